"""Many block events through one consumer, in compressed time: does anything grow that should not?

One replica's cache of a fixed size turns over and over: prompts are stored, the oldest are evicted leaf first. Events
go through decoder, stream, inventory and writer into the index in memory, as fast as they are taken.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from pathlib import Path

from ...consumers.consumer import ReplicaConfig, ReplicaConsumer
from ...engines.rules import rule_for
from ...indexer.memory import MemoryStore
from ...proto.hashing import BlockKey, Chain, Namespace
from .measure import BLOCK_SIZE, Curve, encode, prompt, quantile, stored

_POOL = 2048
"""Prompts in the cache at a time."""
_BLOCKS = 32
_VARIANTS = 4096
"""Different prompts, made beforehand: what is soaked is the consumer, not the generator."""
_SAMPLES = 40


async def soak(events: int, rng: random.Random, curves: list[Curve]) -> None:
    """Resident memory, processor time per event and query latency, over the number of block events.

    curves: gets what is measured as it is measured, so that a soak cut short shows how far it came.
    """
    index = await MemoryStore().open(Namespace(model="soak"))
    root = index.namespace.root
    stores: list[bytes] = []
    removals: list[bytes] = []
    prompts = []
    for _ in range(_VARIANTS):
        tokens = prompt(rng, _BLOCKS)
        keys = Chain(root, BLOCK_SIZE, tokens).keys(_BLOCKS)
        prompts.append(tokens)
        stores.append(encode([0.0, [stored(tokens, keys, None)], 0]))
        removals.append(encode([0.0, [_removed(key) for key in reversed(keys)], 0]))
    consumer = ReplicaConsumer(
        ReplicaConfig(replica="r0", events="inproc://soak"), index, rule=rule_for("vllm"), refresh_s=3600
    )
    writing = asyncio.create_task(consumer.writer.run())
    consumer._handle(consumer.stream.connected(0.0))
    await consumer.writer.registered.wait()
    memory: list[tuple[float, float]] = []
    speed: list[tuple[float, float]] = []
    median: list[tuple[float, float]] = []
    slowest: list[tuple[float, float]] = []
    curves += [
        Curve("soak-memory", "Soak: resident memory", "block events", "MiB", {"process": memory}, log_x=False),
        Curve("soak-speed", "Soak: processor time per event", "block events", "µs", {"process": speed}, log_x=False),
        Curve(
            "soak-latency",
            "Soak: query of 32 blocks",
            "block events",
            "µs",
            {"p50": median, "p99": slowest},
            log_x=False,
        ),
    ]
    done, turn, seq, marked, mark = 0, 0, 0, time.process_time(), 0
    step = max(1, events // _SAMPLES)
    try:
        while done < events:
            payloads = [stores[turn % _VARIANTS]]
            if turn >= _POOL:
                payloads.insert(0, removals[(turn - _POOL) % _VARIANTS])
            turn += 1
            for payload in payloads:
                consumer._handle(consumer.stream.live([b"", seq.to_bytes(8, "big"), payload], 0.0))
                seq += 1
                done += _BLOCKS
            if turn % 32 == 0:
                await asyncio.sleep(0)
            if done - mark >= step:
                speed.append((done, (time.process_time() - marked) / (done - mark) * 1e6))
                while consumer.writer.pending:  # noqa: ASYNC110 -- it sets no event
                    await asyncio.sleep(0)
                taken = []
                for i in range(turn - min(turn, 100), turn):
                    begun = time.perf_counter()
                    await index.match(Chain(root, BLOCK_SIZE, prompts[i % _VARIANTS]))
                    taken.append((time.perf_counter() - begun) * 1e6)
                median.append((done, quantile(taken, 0.5)))
                slowest.append((done, quantile(taken, 0.99)))
                memory.append((done, _resident() / 2**20))
                marked, mark = time.process_time(), done
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


def _removed(key: BlockKey) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [int.from_bytes(key, "big")], "medium": "GPU"}


def _resident() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
