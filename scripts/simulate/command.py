"""`metatrie simulate`: one trace, the whole suite, or the worked examples."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...indexer.embedded import EmbeddedRedis
from ...indexer.policies import DEFAULT_POLICY, POLICIES
from ...proto.errors import ConfigError
from ..cli import common_options, redis_option, run_process, until
from . import examples, report, study, suite, traces
from .burst import Burst, play, router_processes
from .engine import EngineConfig
from .fleet import FleetConfig, Loss, simulate, stretch_for

BURSTS = 8
"""To compare routers by."""
_COMPARED = (
    suite.ORACLE,
    DEFAULT_POLICY,
    suite.QUEUED,
    "sticky",
    "exploit_explore",
    "weighted_score",
    "sglang_gateway",
    "hybrid",
    "round_robin",
)


@click.command("simulate")
@common_options
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
@click.option("--example", is_flag=True, help="Print the worked examples and their known answers.")
@click.option(
    "--processes",
    type=click.IntRange(2, 16),
    help="Compare so many router processes over one Redis with a single one, in bursts on modelled engines.",
)
@redis_option(required=False)
@click.option("--suite", "whole_suite", is_flag=True, help="Every policy in every setting; resumes from --results.")
@click.option(
    "--traces",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of recorded traces, for --suite.",
)
@click.option(
    "--format", "kind", type=click.Choice(sorted(traces.FORMATS)), help="Of TRACE, if its name does not tell."
)
@click.option("--policy", "policies", multiple=True, type=click.Choice(suite.ENTRIES), help="Repeatable.")
@click.option("--set", "parameters", multiple=True, metavar="NAME=VALUE", help="Parameter of the one --policy given.")
@click.option("--replicas", multiple=True, type=click.IntRange(1, 1024), help="Default 8; for --suite 2, 8, 32.")
@click.option("--cache", "caches", multiple=True, help="Tokens per replica, or ample, tight, very_tight.")
@click.option("--load", "loads", multiple=True, type=click.FloatRange(0.01, 0.99), help="Share of time in prefill.")
@click.option("--requests", type=click.IntRange(0), default=0, help="Only the first of each trace; 0: all.")
@click.option("--stretch", type=click.FloatRange(1e-6), help="Factor on arrival times, instead of --load.")
@click.option("--routers", type=click.IntRange(1, 64), default=1, help="Requests go to them in turn.")
@click.option("--event-lag-s", type=click.FloatRange(0), default=0.0, help="From a cache to the index, seconds.")
@click.option("--exchange-s", type=click.FloatRange(0), default=0.01, help="Between routers' loads, seconds.")
@click.option("--no-speculative", is_flag=True, help="Count only what the index knows.")
@click.option("--lose", "losses", multiple=True, metavar="SHARE:REPLICA", help="Restart a replica that far in.")
@click.option("--objective-s", type=click.FloatRange(0, min_open=True), default=5.0, help="TTFT to be met, seconds.")
@click.option("--seed", type=int, default=1)
@click.option("--only", "only_traces", multiple=True, help="For --suite: traces whose file name starts so.")
@click.option("--jobs", type=click.IntRange(1, 256), default=os.cpu_count() or 1, help="Processes, for --suite.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("simulate-results.jsonl"),
    help="Where --suite keeps its results.",
)
@click.option("--recorded", is_flag=True, help="Run nothing: show the settings --results has in full.")
@click.option(
    "--study", "studying", is_flag=True, help="Of those, run what tells why another policy is better, where one is."
)
@click.option(
    "--write",
    "page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Markdown page whose part about the suite to replace.",
)
@click.option(
    "--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with plots."
)
@click.option("--json", "as_json", is_flag=True, help="Print results as JSON on standard output.")
def command(
    log_level: str,
    trace: Path | None,
    example: bool,
    processes: int | None,
    redis_url: str | None,
    whole_suite: bool,
    folder: Path | None,
    kind: str | None,
    policies: tuple[str, ...],
    parameters: tuple[str, ...],
    replicas: tuple[int, ...],
    caches: tuple[str, ...],
    loads: tuple[float, ...],
    requests: int,
    stretch: float | None,
    only_traces: tuple[str, ...],
    jobs: int,
    results: Path,
    recorded: bool,
    studying: bool,
    page: Path | None,
    html_path: Path | None,
    as_json: bool,
    **run: Any,
) -> None:
    """What a routing policy does to latency and reuse, on recorded traces and simulated engines.

    Without TRACE a small synthetic one is used. The model is described in docs/routing.md.
    """
    console = Console(stderr=as_json)
    if example:
        _examples(console)
        return
    if processes is not None:
        run_process(log_level, partial(_processes, console, processes, redis_url))
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:

        def run_suite(wanted: Mapping[suite.Setting, Sequence[str]]) -> list[suite.Result]:
            if folder is None:
                raise ConfigError("traces", "is not set", "pass the folder of recorded traces with --traces")
            task = progress.add_task("runs", total=sum(map(len, wanted.values())))
            before = {(r.setting, r.policy) for r in suite.read(results)}
            progress.advance(task, sum((s, e) in before for s, entries in wanted.items() for e in entries))

            def advance(result: suite.Result) -> None:
                progress.update(task, advance=1, description=f"{result.setting} {result.policy}")

            return suite.run(folder, results, wanted, jobs=jobs, progress=advance)

        if recorded or studying:
            found = suite.complete(suite.read(results), policies or suite.ENTRIES)
            if studying:
                run_suite({setting: study.entries(best) for setting, best, _ in suite.losses(found)})
        elif whole_suite:
            names = [n for n in suite.TRACES if not only_traces or n.startswith(only_traces)]
            wanted = suite.settings(
                names, caches or tuple(suite.CACHES), replicas or suite.REPLICAS, loads or suite.LOADS, requests
            )
            found = run_suite(dict.fromkeys(wanted, policies or suite.ENTRIES))
        else:
            found = _compare(
                progress,
                (traces.load(trace, kind) if trace is not None else traces.synthetic()).first(requests),
                policies or _COMPARED,
                suite.numbers(parameters),
                replicas[0] if replicas else 8,
                caches[0] if caches else "ample",
                loads[0] if loads else 0.75,
                stretch,
                **run,
            )
    _show(console, found)
    if page is not None:
        report.write_page(page, found, study.studies(suite.losses(found), suite.read(results)))
    if html_path is not None:
        html_path.write_text(report.html(found), "utf-8")
    if as_json:
        print(msgspec.json.encode(found).decode())


def _compare(
    progress: Progress,
    trace: traces.Trace,
    entries: tuple[str, ...],
    parameters: dict[str, float],
    replicas: int,
    cache: str,
    load: float,
    stretch: float | None,
    *,
    losses: tuple[str, ...],
    no_speculative: bool,
    **run: Any,
) -> list[suite.Result]:
    if parameters and len(entries) != 1:
        raise ConfigError("set", "is for one policy", "name it with --policy")
    config = FleetConfig(
        replicas=replicas,
        engine=EngineConfig(capacity_tokens=_tokens(cache)),
        losses=tuple(map(_loss, losses)),
        speculative=not no_speculative,
        **run,
    )
    task = progress.add_task(f"{trace.name}: finding the load", total=len(entries))
    config = msgspec.structs.replace(config, stretch=stretch or stretch_for(trace, config, load))
    setting = suite.Setting(trace.name, cache, replicas, load)
    ideal = suite.ideal_hit(trace, config.warmup)
    found = []
    for entry in entries:
        progress.update(task, description=f"{trace.name}: {entry}")
        one = suite.entry_config(entry, config)
        if parameters:
            one = msgspec.structs.replace(one, parameters=parameters)
        found.append(suite.Result(setting, entry, config.stretch, ideal, simulate(trace, one)))
        progress.advance(task)
    return found


async def _processes(console: Console, count: int, redis_url: str | None, stop: asyncio.Event) -> None:
    """Bursts to one router and to `count` of them, in turn."""

    async def compare(url: str) -> None:
        means: list[tuple[float, float]] = []
        async with router_processes(url, 1 + count) as started:
            urls = [one for one, _ in started]
            for seed in range(BURSTS):
                alone = await play(url, urls[:1], Burst(), seed)
                together = await play(url, urls[1:], Burst(), seed)
                means.append((alone.mean, together.mean))
                console.print(
                    f"burst {seed + 1}: one router {alone.mean:.3f} s, {count} routers {together.mean:.3f} s"
                )
        one, several = (sum(column) / BURSTS for column in zip(*means, strict=True))
        console.print(f"mean time to first token: {one:.3f} s and {several:.3f} s, {several / one:.3f} times it")

    async def everything() -> None:
        if redis_url is not None:
            await compare(redis_url)
            return
        async with EmbeddedRedis() as server:
            await compare(server.url)

    await until(stop, everything())


def _tokens(cache: str) -> int:
    if cache in suite.CACHES:
        return suite.CACHES[cache]
    if cache.isdigit() and int(cache) > 0:
        return int(cache)
    raise ConfigError("cache", "is no size", f"a number of tokens, or one of {', '.join(suite.CACHES)}")


def _loss(text: str) -> Loss:
    share, _, replica = text.partition(":")
    try:
        return Loss(float(share), int(replica))
    except ValueError:
        raise ConfigError("lose", "is not SHARE:REPLICA", "as in 0.5:0") from None


def _show(console: Console, results: list[suite.Result]) -> None:
    by_setting: dict[suite.Setting, list[suite.Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, []).append(result)
    for setting, rows in by_setting.items():
        console.print(report.table(rows, f"{setting}, ideal hit {rows[0].ideal:.3f}"))
    for result in results:
        if result.outcome.after_loss:
            after = ", ".join(f"{minutes} minutes {p99:.1f} s" for minutes, p99 in result.outcome.after_loss)
            console.print(f"{result.policy}: p99 after the loss: {after}")
    if len(by_setting) > 1:
        console.print(report.comparison_table(suite.compare(results)))
        for setting, best, ratio in suite.losses(results):
            console.print(f"{setting}: {best} is better, {ratio:.3f} of the default's mean")
    console.print(f"left out: {', '.join(report.LEFT_OUT)}")


def _examples(console: Console) -> None:
    talk = examples.conversation()
    console.print("[bold]A conversation of five turns[/bold], inputs " + ", ".join(map(str, talk.inputs)))
    console.print(
        f"  ideal   {talk.ideal}: {sum(talk.ideal):,} of {sum(talk.inputs):,} tokens, {talk.ideal_share:.4f}"
    )
    console.print(f"  blocks  {talk.reused}: {sum(talk.reused):,}, fresh {talk.fresh:,}")
    for name, sequence, capacity in (
        ("The frozen trace, room for two prefixes", examples.FROZEN, 2),
        ("The same, room for one", examples.FROZEN, 1),
        ("The same, room for two, and a hot prefix in a burst of eight", examples.FROZEN + examples.BURST, 2),
    ):
        table = Table(title=f"{name}: {' '.join(sequence)}", title_justify="left")
        for column in ("policy", "reused", "hits", "loads", "skew", "evictions", "queue penalty"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for policy, skew in (
            ("round_robin", None),
            ("affinity_only", None),
            ("hybrid", 0),
            ("hybrid", 1),
            ("hybrid", 2),
        ):
            if skew is None:
                p = examples.families(policy, sequence, capacity=capacity)
            else:
                p = examples.families(policy, sequence, capacity=capacity, max_skew=skew)
            label = policy if skew is None else f"{policy}, max_skew {skew}"
            loads = "/".join(map(str, p.loads))
            table.add_row(label, f"{p.reused:,}", str(p.hits), loads, str(p.skew), str(p.evictions), str(p.penalty))
        console.print(table)
    spread, held = examples.universal("round_robin"), examples.universal("affinity_only")
    console.print("[bold]A prefix of 200 tokens that all of 50 requests have, five replicas[/bold]")
    console.print(
        f"  round robin {spread.hits} hits, affinity only {held.hits}: {held.reused - spread.reused} tokens, once; "
        "every request after the first five hits under both"
    )
    console.print("[bold]One tenant's prompt against another's cache[/bold]")
    console.print(f"  unsalted {examples.cross_tenant(salted=False)}, salted {examples.cross_tenant(salted=True)}")
    table = Table(title="200 unfinished requests with one hot prefix, 8 replicas: most on one", title_justify="left")
    for column in ("policy", "64 blocks", "512", "2048"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in POLICIES:
        table.add_row(policy, *(str(examples.pile_up(policy, blocks)) for blocks in (64, 512, 2048)))
    console.print(table)
