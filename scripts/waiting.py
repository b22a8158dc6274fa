"""`metatrie waiting`: what the router's own queue does to times to first token, over real processes.

Many short requests that continue a few known prefixes, and some long ones that nobody has cached, arrive at random at
a front door over simulated engines; once while requests wait in the engines, once while they wait in the router. Both
times the same requests arrive at the same moments.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from typing import Any

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from .cli import common_options, run_process, until
from .demo import percentile
from .front_door import fleet

_VOCABULARY = 256
"""Of the simulated engines' byte tokenizer."""
_PREFIX_TOKENS = 3_000
_SHORT, _LONG = (50, 600), (15_000, 40_000)
"""Fewest and most new tokens of a request."""
_ANSWER_TOKENS = 20


class WaitingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a run."""

    engines: int = 4
    requests: int = 260
    rate: float = 6.5
    """Requests per second."""
    long_share: float = 0.18
    prefixes: int = 12
    seeds: int = 2
    time_scale: float = 1.0
    """Factor on everything the engines take time for."""


class Arrival(msgspec.Struct, frozen=True):
    at: float
    prompt: list[int]


class Waited(msgspec.Struct, frozen=True):
    """One run. Times to first token, seconds, as the clients saw them."""

    seed: int
    queue: bool
    ttft: list[float]
    waited: int
    """Requests that waited in the router."""

    @property
    def mean(self) -> float:
        return sum(self.ttft) / len(self.ttft)


def arrivals(config: WaitingConfig, seed: int) -> list[Arrival]:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return rng.choices(range(_VOCABULARY), k=count)

    prefixes = [tokens(_PREFIX_TOKENS) for _ in range(config.prefixes)]
    times = itertools.accumulate(rng.expovariate(config.rate) for _ in range(config.requests))
    return [
        Arrival(
            at,
            tokens(rng.randint(*_LONG))
            if rng.random() < config.long_share
            else rng.choice(prefixes) + tokens(rng.randint(*_SHORT)),
        )
        for at in times
    ]


async def measure(config: WaitingConfig, seed: int, *, queue: bool) -> Waited:
    """One run. Raises ChildFailed, and aiohttp.ClientError if a request failed."""
    settings = f'[models.m]\ntokenizer = "byte"\n[queue]\nenabled = {str(queue).lower()}\n'
    options = "--num-blocks", "16385", "--max-model-len", "65536", "--time-scale", str(config.time_scale)
    async with (
        fleet(config.engines, settings, *options) as (_, url, _),
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            raise_for_status=True,
        ) as session,
    ):
        begun = time.monotonic()
        asked = [_ask(session, url, arrival, begun) for arrival in arrivals(config, seed)]
        answers = await asyncio.gather(*asked)
    return Waited(seed, queue, [ttft for ttft, _ in answers], sum(waited for _, waited in answers))


async def _ask(session: aiohttp.ClientSession, url: str, arrival: Arrival, begun: float) -> tuple[float, bool]:
    """Time to first token, and whether the request waited in the router."""
    body = {"model": "m", "prompt": arrival.prompt, "max_tokens": _ANSWER_TOKENS, "stream": True}
    payload = msgspec.json.encode(body)
    await asyncio.sleep(max(0.0, begun + arrival.at - time.monotonic()))
    sent = time.monotonic()
    async with session.post(f"{url}/v1/completions", data=payload, headers=_JSON) as response:
        await response.content.readany()
        ttft = time.monotonic() - sent
        await response.read()
        return ttft, "X-Metatrie-Waited-Ms" in response.headers


_JSON = {"Content-Type": "application/json"}


@click.command("waiting")
@common_options
@click.option("--engines", type=click.IntRange(1, 64), default=WaitingConfig().engines, help="Simulated engines.")
@click.option("--requests", type=click.IntRange(1, 100_000), default=WaitingConfig().requests, help="Per run.")
@click.option(
    "--rate", type=click.FloatRange(0.01, 10_000), default=WaitingConfig().rate, help="Requests per second."
)
@click.option("--long-share", type=click.FloatRange(0, 1), default=WaitingConfig().long_share, help="Of requests.")
@click.option("--seeds", type=click.IntRange(1, 1000), default=WaitingConfig().seeds, help="Runs of either kind.")
@click.option("--json", "as_json", is_flag=True, help="Print every time, as JSON.")
def command(log_level: str, as_json: bool, **options: Any) -> None:
    """Times to first token while requests wait in the engines, and while they wait in the router."""
    config = WaitingConfig(**options)
    console = Console(stderr=as_json)
    runs: list[Waited] = []

    async def everything() -> None:
        for seed, queue in itertools.product(range(1, config.seeds + 1), (False, True)):
            runs.append(await measure(config, seed, queue=queue))

    async def run(stop: asyncio.Event) -> None:
        await until(stop, everything())

    run_process(log_level, run)
    table = Table(title="time to first token, seconds", title_justify="left")
    for column in ("seed", "requests wait in", "mean", "p50", "p90", "p99", "waited"):
        table.add_column(column, justify="left" if column == "requests wait in" else "right")
    for one in runs:
        shares = (f"{percentile(one.ttft, share):.2f}" for share in (0.5, 0.9, 0.99))
        where = "the router" if one.queue else "the engines"
        table.add_row(str(one.seed), where, f"{one.mean:.2f}", *shares, str(one.waited))
    console.print(table)
    if as_json:
        print(msgspec.json.encode(runs).decode())
