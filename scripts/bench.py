"""`metatrie bench`: what the hot paths cost on this machine, per block and per request.

Each figure is the median over repetitions of one call of the real code; Redis's own share is read from its command
statistics, so it holds on a noisy machine. Absolute times are this machine's; compare ratios.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import click
import msgspec
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from ..consumers.inventory import Inventory
from ..engines.rules import rule_for
from ..indexer.connect import open_store
from ..indexer.embedded import EmbeddedRedis
from ..proto.events import decode_batch
from ..proto.hashing import Chain, Namespace
from ..proto.index import BlockWrite, Index, ReplicaRef, ReplicaSpec, Store
from .cli import common_options, redis_option, run_process, until

REPLICAS = 8
DEPTHS = (32, 512, 2048)
_TOKENS = 150_000
_encode = msgspec.msgpack.Encoder().encode


class Figure(msgspec.Struct, frozen=True):
    """One measurement."""

    what: str
    per: str
    us: float
    """Median microseconds."""


async def bench(console: Console, *, redis_url: str | None, seed: int = 1) -> list[Figure]:
    """Measure everything and print it. redis_url None: an embedded server, started for this."""
    rng = random.Random(seed)
    figures = [*_hashing(rng), *_consuming(rng)]
    memory = await open_store("memory:")
    figures += await _index("memory", memory, rng)
    await memory.close()
    if redis_url is None:
        async with EmbeddedRedis() as server:
            figures += await _over_redis(server.url, rng)
    else:
        figures += await _over_redis(redis_url, rng)
    table = Table(title=f"hot paths, {os.cpu_count()} cores", title_justify="left")
    table.add_column("what")
    table.add_column("per")
    table.add_column("µs", justify="right")
    for figure in figures:
        table.add_row(figure.what, figure.per, f"{figure.us:,.2f}")
    console.print(table)
    return figures


def _prompt(rng: random.Random, blocks: int, size: int = 16) -> list[int]:
    return [rng.randrange(_TOKENS) for _ in range(blocks * size)]


def _median(call: Callable[[], object], times: int) -> float:
    """Median microseconds of one call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


async def _median_async(call: Callable[[], Awaitable[object]], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


def _hashing(rng: random.Random) -> list[Figure]:
    space = Namespace(model="bench")
    tokens = _prompt(rng, 512)
    return [
        Figure(
            "hash a fresh prompt",
            "block",
            _median(lambda: Chain(space.root, 16, tokens).keys(512), 50) / 512,
        )
    ]


def _stored(tokens: Sequence[int], keys: Sequence[bytes], parent: bytes | None) -> dict[str, Any]:
    def name(key: bytes) -> int:
        return int.from_bytes(key, "big")

    return {
        "type": "BlockStored",
        "block_hashes": [name(key) for key in keys],
        "parent_block_hash": None if parent is None else name(parent),
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def _consuming(rng: random.Random) -> list[Figure]:
    """Prefill batches of 32 blocks, single decode blocks, and removals, through decoder and inventory."""
    space = Namespace(model="bench")
    chains = []
    for _ in range(64):
        tokens = _prompt(rng, 64)
        chains.append((tokens, Chain(space.root, 16, tokens).keys(64)))
    prefills = [_encode([0.0, [_stored(t[: 32 * 16], k[:32], None)], 0]) for t, k in chains]
    decodes = [
        _encode([0.0, [_stored(t[i * 16 : i * 16 + 16], [k[i]], k[i - 1])], 0])
        for i in range(32, 64)
        for t, k in chains
    ]
    removals = [
        _encode([0.0, [{"type": "BlockRemoved", "block_hashes": [int.from_bytes(key, "big")], "medium": "GPU"}], 0])
        for _, k in chains
        for key in reversed(k)
    ]
    figures = []
    inventory = Inventory(space, rule=rule_for("vllm"))

    def consume(queue: Iterator[bytes]) -> None:
        inventory.apply(decode_batch(next(queue)))

    for what, payloads, blocks in (
        ("consume a prefill batch of 32", prefills, 32),
        ("consume a decode batch of 1", decodes, 1),
        ("consume a removal of 1", removals, 1),
    ):
        figures.append(Figure(what, "block", _median(partial(consume, iter(payloads)), len(payloads)) / blocks))
    return figures


async def _over_redis(url: str, rng: random.Random) -> list[Figure]:
    store = await open_store(url)
    client: Redis = Redis.from_url(url)
    try:
        return await _index("Redis", store, rng, client)
    finally:
        await client.aclose()
        await store.close()


async def _index(name: str, store: Store, rng: random.Random, client: Redis | None = None) -> list[Figure]:
    index = await store.open(Namespace(model=f"bench-{rng.getrandbits(64):x}"))
    incarnations = []
    for i in range(REPLICAS):
        claim = await index.claim(
            ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="vllm"), owner="bench", lease_s=3600, activate=True
        )
        incarnations.append(claim.incarnation)
    figures = []
    inputs = [_writes(index, _prompt(rng, 32)) for _ in range(100)]
    queue = iter(inputs)
    before = await _server_us(client)
    version = 0

    async def write() -> None:
        nonlocal version
        version += 1
        await index.write(incarnations[0], version, next(queue))

    figures.append(Figure(f"{name}: write 32 blocks", "block", await _median_async(write, len(inputs)) / 32))
    if client is not None:
        spent = await _server_us(client) - before
        figures.append(Figure(f"{name}: the same, server", "block", spent / (32 * len(inputs))))
    for depth in DEPTHS:
        prompt = _prompt(rng, depth)
        for incarnation in incarnations:
            version += 1
            await index.write(incarnation, version, _writes(index, prompt))
        for mode, tokens in (("held", prompt), ("unknown", _prompt(rng, depth))):
            chain = Chain(index.namespace.root, 16, tokens)
            chain.keys(depth)
            before = await _server_us(client)
            times = 50
            wall = await _median_async(partial(index.match, chain), times)
            figures.append(Figure(f"{name}: match {depth} blocks, {mode}", "query", wall))
            if client is not None:
                spent = await _server_us(client) - before
                figures.append(Figure(f"{name}: match {depth} blocks, {mode}, server", "query", spent / times))
    return figures


def _writes(index: Index, tokens: list[int]) -> list[BlockWrite]:
    """A prompt's blocks as an inventory would emit them."""
    inventory = Inventory(index.namespace)
    keys = Chain(index.namespace.root, 16, tokens).keys(len(tokens) // 16)
    return inventory.apply(decode_batch(_encode([0.0, [_stored(tokens, keys, None)], 0]))).writes


async def _server_us(client: Redis | None) -> float:
    """Microseconds the server has spent in commands of the data path."""
    if client is None:
        return 0.0
    stats: dict[str, dict[str, float]] = await client.info("commandstats")
    ours = ("cmdstat_evalsha", "cmdstat_hmget", "cmdstat_hget", "cmdstat_sadd", "cmdstat_hgetall")
    return sum(stats[name]["usec"] for name in ours if name in stats)


@click.command("bench")
@common_options
@redis_option(required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output.")
def command(log_level: str, redis_url: str | None, as_json: bool) -> None:
    """What the hot paths cost on this machine, per block and per request.

    Starts an embedded Redis unless --redis names one, which must be there for this alone.
    """

    async def run(stop: asyncio.Event) -> None:
        figures = await until(stop, bench(Console(stderr=as_json), redis_url=redis_url))
        if as_json and figures is not None:
            print(msgspec.json.format(msgspec.json.encode(figures)).decode())

    run_process(log_level, run)
