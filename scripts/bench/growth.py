"""How a query grows: with the prompt, the fleet, the index, and conversations that part at one block."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from ...indexer.connect import open_store
from ...proto.hashing import BlockKey, Chain, Namespace
from ...proto.index import Index
from .layouts import Pages, keys_of, register
from .measure import BLOCK_SIZE, Curve, prompt, quantile

_TIMES = 60


async def growth(url: str, rng: random.Random, *, most_blocks: int, most_branches: int) -> list[Curve]:
    """One curve per question, one series per backend. Queries of 512 blocks unless the prompt is the question;
    hashing is a part of them."""
    length: dict[str, list[tuple[float, float]]] = {}
    fleet: dict[str, list[tuple[float, float]]] = {}
    size: dict[str, list[tuple[float, float]]] = {}
    parting: dict[str, list[tuple[float, float]]] = {}
    for name, where in (("in memory", "memory:"), ("over Redis", url)):
        store = await open_store(where)
        try:

            async def index() -> Index:
                return await store.open(Namespace(model=f"growth-{rng.getrandbits(64):x}"))  # noqa: B023 -- used here

            held = await index()
            pages = await register(held, 8)
            for blocks in (32, 128, 512, 2048, 8192):
                asked = prompt(rng, blocks)
                await _hold(pages, held, asked, 8)
                length.setdefault(name, []).append((blocks, await _query(held, asked)))
            for replicas in (8, 64, 512):
                held = await index()
                pages = await register(held, replicas)
                asked = prompt(rng, 512)
                await _hold(pages, held, asked, replicas)
                fleet.setdefault(name, []).append((replicas, await _query(held, asked)))
            held = await index()
            pages = await register(held, 8)
            asked = prompt(rng, 512)
            await _hold(pages, held, asked, 8)
            blocks, goal = 0, 10_000
            while goal <= most_blocks:
                while blocks < goal:
                    await pages.write(rng.randrange(8), keys_of(rng, 2048), 0, 2048)
                    blocks += 2048
                size.setdefault(name, []).append((goal, await _query(held, asked)))
                goal *= 10
            held = await index()
            pages = await register(held, 8)
            asked = prompt(rng, 512)
            await _hold(pages, held, asked, 8)
            trunk = Chain(held.namespace.root, BLOCK_SIZE, asked).keys(511)[:40]
            branches, goal = 0, 100
            while goal <= most_branches:
                while branches < goal:
                    await pages.write(rng.randrange(8), [*trunk, *keys_of(rng, 2)], 40, 42)
                    branches += 1
                parting.setdefault(name, []).append((goal, await _query(held, asked)))
                goal *= 10
        finally:
            await store.close()
    return [
        Curve("query-by-length", "A query, by blocks of its prompt", "blocks", "µs", length),
        Curve("query-by-fleet", "A query of 512 blocks, by replicas that hold them", "replicas", "µs", fleet),
        Curve("query-by-size", "A query of 512 blocks, by blocks in the index", "blocks in the index", "µs", size),
        Curve("query-by-parting", "The same, by conversations that part at block 40", "conversations", "µs", parting),
    ]


async def _hold(pages: Pages, index: Index, asked: Sequence[int], replicas: int) -> None:
    keys: list[BlockKey] = Chain(index.namespace.root, BLOCK_SIZE, asked).keys(len(asked))
    for replica in range(replicas):
        await pages.write(replica, keys, 0, len(keys))


async def _query(index: Index, asked: Sequence[int]) -> float:
    """µs. What nine of ten queries took longer than: on a busy machine the median of long ones is that of waits."""
    taken = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        await index.match(Chain(index.namespace.root, BLOCK_SIZE, asked))
        taken.append((time.perf_counter() - started) * 1e6)
    return quantile(taken, 0.1)
