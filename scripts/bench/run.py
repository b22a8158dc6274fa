"""`metatrie bench`: measure, show, and write docs/performance.md."""

from __future__ import annotations

import asyncio
import os
import platform
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ...indexer.embedded import EmbeddedRedis
from ...proto.native import kernel
from ..cli import common_options, redis_option, run_process, until
from .growth import growth
from .hot import hot_paths
from .layouts import footprint, layouts
from .measure import Figure
from .recordings import recordings
from .report import Results, amount, write_page
from .request import request
from .scale import scale
from .soak import soak
from .versus import ingest_by_engines, side_by_side

PARTS = ("hot", "layouts", "versus", "scale", "growth", "recordings", "soak")


async def bench(
    console: Console,
    parts: Sequence[str],
    *,
    redis_url: str,
    peer_python: str | None,
    events: int,
    quick: bool,
    results: Results,
    seed: int = 1,
) -> None:
    """Measure these parts, in order, into `results`. redis_url: a server that is there for this alone; emptied."""
    rng = random.Random(seed)
    sections = results.sections
    if "hot" in parts:
        _show(console, sections, "Hot paths", await hot_paths(redis_url, rng))
        _show(console, sections, "A query of 32 blocks, step by step", await request(rng))
    if "layouts" in parts:
        figures = [*await layouts(redis_url, rng), *await footprint(redis_url, rng)]
        _show(console, sections, "Redis: layouts and memory", figures)
    if "versus" in parts:
        queries, batches = (100, 1000) if quick else (500, 6000)
        for title, url in (("Beside a peer, index in memory", None), ("Beside a peer, index in Redis", redis_url)):
            figures = await asyncio.to_thread(
                side_by_side, rng, redis_url=url, peer_python=peer_python, queries=queries, batches=batches
            )
            _show(console, sections, title, figures)
    if "scale" in parts:
        _show(console, sections, "Clusters and workers", await scale(rng))
    if "growth" in parts:
        most_blocks, most_branches = (100_000, 1000) if quick else (10_000_000, 100_000)
        results.curves += await growth(redis_url, rng, most_blocks=most_blocks, most_branches=most_branches)
        results.curves.append(await asyncio.to_thread(ingest_by_engines, rng, batches=1000 if quick else 4000))
    if "recordings" in parts:
        size = 100_000 if quick else 1_000_000
        _show(console, sections, "Recordings", await recordings(rng, size))
    if "soak" in parts:
        await soak(events, rng, results.curves)


def _show(console: Console, sections: dict[str, list[Figure]], title: str, figures: list[Figure]) -> None:
    sections[title] = figures
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("per")
    table.add_column("measured", justify="right")
    table.add_column("target")
    for figure in figures:
        table.add_row(figure.what, figure.per, amount(figure), figure.target)
    console.print(table)


@click.command("bench")
@common_options
@redis_option(required=False)
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="Measure only this; repeatable. Default: all but the soak.",
)
@click.option(
    "--peer-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Python of an environment that holds `ai-dynamo-runtime`: its indexer is measured beside ours.",
)
@click.option("--events", type=click.IntRange(10_000), default=100_000_000, help="Block events of the soak.")
@click.option("--quick", is_flag=True, help="Fewer repetitions, smaller sizes: about a minute.")
@click.option(
    "--write",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Markdown page whose measured part to replace; plots go to a folder beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON on standard output.")
def command(
    log_level: str,
    redis_url: str | None,
    parts: tuple[str, ...],
    peer_python: Path | None,
    events: int,
    quick: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """What the hot paths, Redis layouts, queries and ingest cost on this machine.

    Starts an embedded Redis unless --redis names one, which must be there for this alone: it is emptied.
    """
    chosen = parts or tuple(part for part in PARTS if part != "soak")
    flags = [f"--part {part}" for part in parts]
    flags += ["--quick"] * quick + ["--peer-python …"] * (peer_python is not None)
    flags += [f"--events {events}"] * ("soak" in chosen)
    python = f"Python {platform.python_version()}, {'native kernel' if kernel else 'pure Python'}"
    results = Results(machine=f"{os.cpu_count()} cores, {python}", command=" ".join(["metatrie bench", *flags]))

    async def run(stop: asyncio.Event) -> None:
        console = Console(stderr=as_json)

        async def measure(url: str) -> None:
            await bench(
                console,
                chosen,
                redis_url=url,
                peer_python=None if peer_python is None else str(peer_python),
                events=events,
                quick=quick,
                results=results,
            )

        async def everything() -> None:
            if redis_url is not None:
                await measure(redis_url)
                return
            async with EmbeddedRedis() as server:
                await measure(server.url)

        await until(stop, everything())

    run_process(log_level, run)
    if page is not None:
        write_page(page, results)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(results)).decode() + "\n")
