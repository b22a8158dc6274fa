"""Measurements of the front door: `metatrie tokens` (is cached tokenisation exact, and what does a turn cost?) and
`metatrie load` (of many streams, is anything lost or reordered, does memory stay flat, what does the proxy add?).

Both judge by what the other side says: the tokenizer without a cache, the engines' own answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import random
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from ..indexer.text import PieceCache
from ..proto.errors import ConfigError, InvalidField
from ..proto.text import ChatPrompt, HFText, Message, render
from .cli import common_options, run_process, until
from .demo import percentile
from .stack import Child

PAGE_BYTES: Final = resource.getpagesize()
DISTINCT: Final = 1000
"""Prompts of a load run, asked in turn: so caches and the index fill early, and what grows after that is a leak."""


# Tokens


class Turn(msgspec.Struct, frozen=True):
    """One prompt of a conversation, tokenised both ways. Times are the processor's, all threads together: what else
    runs on the machine does not show in them."""

    tokens: int
    render_s: float
    cached_s: float
    full_s: float
    equal: bool


def conversations(path: Path) -> Iterator[list[list[Message]]]:
    """Each conversation's prompts, in order, as messages. Two formats, told by the file's content: tau-bench's
    trajectories (`traj`: OpenAI messages), and LMCache's agent traces (`input` text by `session_id`). Raises
    ConfigError."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if raw[:1] == b"[":
            yield from (_turns_of(entry["traj"]) for entry in json.loads(raw))
            return
        sessions: dict[str, list[str]] = {}
        for line in raw.splitlines():
            row = json.loads(line)
            sessions.setdefault(row["session_id"], []).append(row["input"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "trace", f"{path.name} is no conversation trace ({type(error).__name__})", "unpack .zst files first"
        ) from None
    yield from map(_turns_of_texts, sessions.values())


def _turns_of(messages: Sequence[Message]) -> list[list[Message]]:
    """The prompt before each answer of the assistant."""
    return [list(messages[:i]) for i, m in enumerate(messages) if m["role"] == "assistant" and i]


def _turns_of_texts(inputs: Sequence[str]) -> list[list[Message]]:
    """What each flattened prompt adds to the one before is a message of its own."""
    turns: list[list[Message]] = []
    messages: list[Message] = []
    before = ""
    for text in inputs:
        if messages and text.startswith(before):
            role = "assistant" if len(messages) % 2 else "user"
            messages = [*messages, {"role": role, "content": text[len(before) :]}]
        else:
            messages = [{"role": "user", "content": text}]
        before = text
        turns.append(messages)
    return turns


def measure(tokenizer: HFText, prompts: Sequence[Sequence[Message]], cache: PieceCache) -> list[Turn]:
    """A conversation's turns in order, through the cache and without it."""
    turns = []
    for messages in prompts:
        begun = time.process_time()
        text = render(tokenizer, ChatPrompt(messages=messages))
        rendered = time.process_time()
        cached = cache.encode(tokenizer, text, add_special_tokens=False)
        done = time.process_time()
        full = tokenizer.encode(text, add_special_tokens=False)
        end = time.process_time()
        turns.append(Turn(len(full), rendered - begun, done - rendered, end - done, cached == full))
    return turns


@click.command("tokens")
@common_options
@click.option(
    "--tokenizer", required=True, metavar="DIR", help="Directory with tokenizer.json and its chat template."
)
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def tokens_command(context: click.Context, log_level: str, tokenizer: str, traces: Sequence[Path]) -> None:
    """Tokenise every turn of conversations with and without the cache, and compare.

    Exits with status 1 if any turn differs.
    """
    loaded = HFText(tokenizer)
    table = Table("")
    columns: list[list[str]] = []
    differ = 0
    for path in traces:
        turns: list[Turn] = []
        count = refused = 0
        for prompts in conversations(path):
            count += 1
            try:
                turns += measure(loaded, prompts, PieceCache())
            except InvalidField:
                refused += 1
        unequal = sum(not turn.equal for turn in turns)
        differ += unequal
        table.add_column(path.name.partition(".")[0], justify="right")
        mean = sum(turn.tokens for turn in turns) / max(1, len(turns))
        counts = [f"{number:,}" for number in (count, len(turns), unequal, refused, round(mean))]
        costs = ([t.render_s for t in turns], [t.cached_s for t in turns], [t.full_s for t in turns])
        columns.append([*counts, *(" / ".join(f"{percentile(c, p) * 1e3:.2f}" for p in (0.5, 0.99)) for c in costs)])
    for name, *cells in zip(_ROWS, *columns, strict=True):
        table.add_row(name, *cells)
    Console().print(table)
    context.exit(1 if differ else 0)


_ROWS: Final = (
    *("conversations", "turns", "turns that differ", "conversations refused", "tokens per turn"),
    *(f"{what}, CPU ms, p50 / p99" for what in ("template", "cached tokenisation", "full tokenisation")),
)


# Load


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a run."""

    streams: int = 500
    seconds: float = 60.0
    engines: int = 4
    tokens: int = 32
    """Per answer."""
    decode_step_s: float = 0.25
    probes: int = 300
    """Requests of one token, one at a time, sent to the proxy and to an engine in turn."""
    seed: int = 7


class Seen(msgspec.Struct):
    """What the streams of a run experienced."""

    finished: int = 0
    failed: int = 0
    refused: int = 0
    wrong: int = 0
    """Answers that were not, token for token, what the engine gives when asked directly."""
    compared: int = 0
    chunks: int = 0
    rss: list[int] = msgspec.field(default_factory=list)
    """Resident bytes of the router's process, once a second under load."""


class Report(msgspec.Struct, frozen=True):
    config: LoadConfig
    seen: Seen
    direct_ms: list[float]
    """p50 and p99 of one-token requests sent to an engine."""
    proxied_ms: list[float]
    """The same through the proxy."""


async def run_load(config: LoadConfig) -> Report:
    """Start engines and a router, load them, and measure. Raises ChildFailed."""
    settings = '[models.m]\ntokenizer = "byte"\n[proxy]\nmax_in_flight = 1024\n'
    async with (
        fleet(config.engines, settings, "--decode-step-s", str(config.decode_step_s)) as (router, url, engines),
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
    ):
        direct, proxied = await _probe(session, url, engines[0], config)
        seen = Seen()
        stop = time.monotonic() + config.seconds
        sampling = asyncio.create_task(_sample(router.pid, seen))
        numbers = itertools.count()
        await asyncio.gather(
            *(_stream_until(stop, session, url, engines, config, seen, numbers, i) for i in range(config.streams))
        )
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        return Report(config, seen, direct, proxied)


@contextlib.asynccontextmanager
async def fleet(engines: int, settings: str, *options: str) -> AsyncIterator[tuple[Child, str, list[str]]]:
    """A router process with this configuration file over so many simulated engines with these options, of model `m`:
    the router, its URL, the engines' URLs. Raises ChildFailed."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory(prefix="metatrie-") as logs:

        async def start(name: str, *argv: str) -> dict[str, Any]:
            child = Child(name, argv, Path(logs) / f"{name}.log")
            children.append(child)
            return await child.start()

        try:
            config = Path(logs) / "router.toml"
            config.write_text(settings)
            said = await start("router", "serve", "--port", "0", "--config", str(config))
            started = [
                await start(
                    f"engine-{i}",
                    *("engine", "--port", "0", "--model", "m", *options),
                    *("--events", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*"),
                )
                for i in range(engines)
            ]
            async with aiohttp.ClientSession() as session:
                for i, one in enumerate(started):
                    body = {"replica": f"engine-{i}", "engine": "vllm", "model": "m", "block_size": 16}
                    body |= {name: one[name] for name in ("events", "replay", "url")}
                    async with session.post(f"{said['url']}/v1/replicas", json=body) as response:
                        response.raise_for_status()
            yield children[0], said["url"], [one["url"] for one in started]
        finally:
            for child in reversed(children):
                await child.stop()


async def _probe(
    session: aiohttp.ClientSession, url: str, engine: str, config: LoadConfig
) -> tuple[list[float], list[float]]:
    """Time of one-token answers, direct and through the proxy, in turn, so that both see the same machine."""
    taken: dict[str, list[float]] = {engine: [], url: []}
    for number in range(config.probes):
        body = {**_question(f"probe {number}", 1), "stream": False}
        for where, times in taken.items():
            begun = time.perf_counter()
            async with session.post(f"{where}/v1/chat/completions", json=body) as response:
                await response.read()
            times.append((time.perf_counter() - begun) * 1e3)
    direct, proxied = ([percentile(times, share) for share in (0.5, 0.99)] for times in taken.values())
    return direct, proxied


async def _sample(pid: int, seen: Seen) -> None:
    while True:
        await asyncio.sleep(1)
        seen.rss.append(_resident(pid))


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


async def _stream_until(
    stop: float,
    session: aiohttp.ClientSession,
    url: str,
    engines: Sequence[str],
    config: LoadConfig,
    seen: Seen,
    numbers: Iterator[int],
    user: int,
) -> None:
    """One user: an answer after the other, until time is up. Each user's first is compared with a direct one."""
    rng = random.Random(config.seed * 1_000_003 + user)
    await asyncio.sleep(rng.uniform(0, config.decode_step_s * config.tokens))
    first = True
    while time.monotonic() < stop:
        text = f"{config.seed} {next(numbers) % DISTINCT} "
        question = _question(text + "word " * (20 + len(text) % 40), config.tokens)
        try:
            ids = await _stream(session, url, question, seen)
        except aiohttp.ClientError:
            seen.failed += 1
            continue
        if ids is None:
            seen.refused += 1
            await asyncio.sleep(1)
            continue
        seen.finished += 1
        if len(ids) != config.tokens:
            seen.wrong += 1
        if first and user % 10 == 0:
            first = False
            seen.compared += 1
            direct = {**question, "stream": False}
            async with session.post(f"{rng.choice(engines)}/v1/chat/completions", json=direct) as response:
                expected = (await response.json())["choices"][0]["token_ids"]
            seen.wrong += ids != expected


def _question(text: str, tokens: int) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "stream": True,
        "return_token_ids": True,
    }


async def _stream(session: aiohttp.ClientSession, url: str, question: dict[str, Any], seen: Seen) -> list[int] | None:
    """The answer's token ids as they came; None if it was refused. An answer without its end has none of them."""
    ids: list[int] = []
    async with session.post(f"{url}/v1/chat/completions", json=question) as response:
        if response.status != 200:
            return None
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                return ids
            if line.startswith(b"data: "):
                seen.chunks += 1
                for choice in msgspec.json.decode(line[6:])["choices"]:
                    ids += choice.get("token_ids") or []
    return []


@click.command("load")
@common_options
@click.option("--streams", type=click.IntRange(1, 10_000), default=LoadConfig().streams, help="Concurrent streams.")
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=LoadConfig().seconds, help="How long.")
@click.option("--engines", type=click.IntRange(1, 64), default=LoadConfig().engines, help="Simulated engines.")
@click.option("--tokens", type=click.IntRange(1, 4096), default=LoadConfig().tokens, help="Tokens per answer.")
@click.option(
    "--decode-step-s", type=click.FloatRange(0.001, 10), default=LoadConfig().decode_step_s, help="Seconds per token."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def load_command(log_level: str, as_json: bool, **options: Any) -> None:
    """Many concurrent streams through a front door over simulated engines; exits with status 1 if any was wrong."""
    config = LoadConfig(**options)
    reports: list[Report] = []

    async def run(stop: asyncio.Event) -> None:
        report = await until(stop, run_load(config))
        if report is not None:
            reports.append(report)

    run_process(log_level, run)
    for report in reports:
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(report)).decode())
        else:
            _print(report)
        seen = report.seen
        if seen.failed or seen.wrong:
            raise click.exceptions.Exit(1)


def _print(report: Report) -> None:
    seen, config = report.seen, report.config
    quarters = [seen.rss[i * len(seen.rss) // 4 : (i + 1) * len(seen.rss) // 4] or seen.rss for i in range(4)]
    table = Table(show_header=False)
    for name, value in (
        ("concurrent streams", f"{config.streams} for {config.seconds:g} s, {config.engines} engines"),
        ("answers", f"{seen.finished:,} ({seen.chunks:,} events)"),
        ("failed / refused", f"{seen.failed} / {seen.refused}"),
        ("lost or reordered", f"{seen.wrong} (all counted, {seen.compared} compared token by token)"),
        (
            "router memory, by quarters of the run",
            " → ".join(f"{sum(part) / len(part) / 2**20:.0f}" for part in quarters) + " MiB",
        ),
        ("one-token request, direct", "p50 {:.2f} ms, p99 {:.2f} ms".format(*report.direct_ms)),
        ("the same through the proxy", "p50 {:.2f} ms, p99 {:.2f} ms".format(*report.proxied_ms)),
    ):
        table.add_row(name, value)
    Console().print(table)
