"""What every measurement here shares: prompts, events, clocks, and how results are handed on."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from redis.asyncio import Redis

BLOCK_SIZE: Final = 16
TOKENS: Final = 150_000
"""Size of the vocabulary prompts are drawn from."""
encode = msgspec.msgpack.Encoder().encode


class Figure(msgspec.Struct, frozen=True):
    """One measurement."""

    what: str
    per: str
    value: float
    unit: str = "µs"
    target: str = ""
    """What was aimed at; empty where nothing was."""


class Curve(msgspec.Struct, frozen=True):
    """Measurements over one variable."""

    name: str
    """Of the file it is drawn in."""
    title: str
    x: str
    y: str
    series: dict[str, list[tuple[float, float]]]
    log_x: bool = True


def prompt(rng: random.Random, blocks: int) -> list[int]:
    return [rng.randrange(TOKENS) for _ in range(blocks * BLOCK_SIZE)]


def median_us(call: Callable[[], object], times: int) -> float:
    """Median microseconds of one call."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


async def median_us_async(call: Callable[[], Awaitable[object]], times: int) -> float:
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e6


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def stored(tokens: Sequence[int], keys: Sequence[bytes], parent: bytes | None) -> dict[str, Any]:
    """A BlockStored event as vLLM sends it since 0.24, of blocks named by their canonical keys."""

    def name(key: bytes) -> int:
        return int.from_bytes(key, "big")

    return {
        "type": "BlockStored",
        "block_hashes": [name(key) for key in keys],
        "parent_block_hash": None if parent is None else name(parent),
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    pids, todo = [], [pid]
    while todo:
        one = todo.pop()
        pids.append(one)
        children = Path(f"/proc/{one}/task/{one}/children")
        todo += [int(child) for child in children.read_text().split()] if children.exists() else []
    return pids


def processor_us(pid: int) -> float:
    """Processor time of all threads of a process and its descendants so far."""
    return _scheduled(pid)[0]


def waiting_us(pid: int) -> float:
    """How long they were ready to run so far, and had no processor to run on."""
    return _scheduled(pid)[1]


def _scheduled(pid: int) -> tuple[float, float]:
    tasks = [task for one in family(pid) for task in Path(f"/proc/{one}/task").iterdir()]
    stats = [(task / "schedstat").read_text().split() for task in tasks]
    return sum(int(ran) for ran, _, _ in stats) / 1000, sum(int(waited) for _, waited, _ in stats) / 1000


async def server_us(client: Redis | None) -> float:
    """Microseconds the server has spent in commands of the data path, whatever layout they belong to."""
    if client is None:
        return 0.0
    stats: dict[str, dict[str, float]] = await client.info("commandstats")
    other = ("cmdstat_info", "cmdstat_config", "cmdstat_flush", "cmdstat_client", "cmdstat_ping", "cmdstat_select")
    return sum(stat["usec"] for name, stat in stats.items() if not name.startswith(other))


async def server_cpu_us(client: Redis) -> float:
    """Microseconds of processor time the server has used for anything: what commands cost all in."""
    info: dict[str, float] = await client.info("cpu")
    return (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6


async def memory_bytes(client: Redis) -> int:
    """What the server's data takes."""
    info: dict[str, int] = await client.info("memory")
    return info["used_memory"]
