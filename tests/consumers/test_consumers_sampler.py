"""The background comparison of index and inventory, against the real reference index."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.sampler import IndexSampler
from metatrie.consumers.writer import IndexWriter
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.events import AllBlocksCleared, Batch, BlockStored, EngineHash, Event
from metatrie.proto.hashing import BlockKey, Namespace
from metatrie.proto.index import BlockWrite, PageHead, ReplicaRef, ReplicaSpec, ReplicaStatus, TierMask

NAMESPACE = Namespace(model="m", block_size=16)
REF = ReplicaRef("r")


class Scene:
    """An inventory with something in it, published."""

    def __init__(self, index: Any) -> None:
        self.index = index
        self.inventory = Inventory(NAMESPACE)
        self.writer = IndexWriter(
            index,
            ReplicaSpec(ref=REF, engine="vllm"),
            self.inventory,
            owner="me",
            status=ReplicaStatus,
            synced=lambda: True,
            lease_s=1.0,
            linger_s=0.001,
        )
        self.now = 1000.0
        self.sampler = IndexSampler(
            index, self.inventory, self.writer, interval_s=10, rng=random.Random(1), clock=lambda: self.now
        )

    def apply(self, *events: Event) -> None:
        delta = self.inventory.apply(Batch(1.0, list(events)))
        self.sampler.note(delta)
        self.writer.submit(delta, None)

    @property
    def incarnation(self) -> Any:
        assert self.writer.claim is not None
        return self.writer.claim.incarnation


def stored(*names: int, parent: int | None = None) -> BlockStored:
    return BlockStored(
        hashes=[EngineHash(n) for n in names],
        parent=None if parent is None else EngineHash(parent),
        tokens=[n * 31 + i for n in names for i in range(16)],
        block_size=16,
    )


def write(key: bytes, tiers: int = 1) -> BlockWrite:
    return BlockWrite(BlockKey(key), None, PageHead(key), 0, TierMask(tiers))


async def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene(await MemoryStore().open(NAMESPACE))
    scene.apply(stored(*range(1, 60)), *(stored(n) for n in range(100, 200)))
    task = asyncio.create_task(scene.writer.run())
    await eventually(lambda: scene.writer.idle, "everything is published")
    yield scene
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_what_is_right_is_found_right(scene: Scene) -> None:
    assert await scene.sampler.round()
    stats = scene.sampler.stats
    assert (stats.rounds, stats.void, stats.stale, stats.missing) == (1, 0, 0, 0)
    assert stats.checked > 60
    assert (scene.sampler.precision, scene.sampler.recall) == (1.0, 1.0)
    assert scene.writer.stats.doubts == 0


async def test_what_should_have_gone_is_found_and_published_away(scene: Scene) -> None:
    old = scene.incarnation
    await scene.index.write(old, 10**6, [write(bytes([255] * 7 + [i])) for i in range(150)])
    assert await scene.sampler.round()
    assert scene.sampler.stats.stale > 0
    assert scene.sampler.precision < 1.0
    await eventually(lambda: scene.writer.idle and scene.incarnation != old, "published anew")
    assert await scene.index.held(scene.incarnation) == scene.inventory.expected()
    assert await scene.sampler.round()
    assert scene.sampler.precision == 1.0


async def test_what_no_reader_finds_is_found_missing(scene: Scene) -> None:
    old = scene.incarnation
    keys = list(scene.inventory.expected())
    await scene.index.write(old, 10**6, [write(key, tiers=0) for key in keys])
    assert await scene.sampler.round()
    assert scene.sampler.stats.missing > 0
    assert scene.sampler.recall < 1.0
    await eventually(lambda: scene.writer.idle and scene.incarnation != old, "published anew")
    assert await scene.index.held(scene.incarnation) == scene.inventory.expected()


async def test_what_moves_meanwhile_is_no_difference(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    held = scene.index.held

    async def and_meanwhile(*args: Any, **options: Any) -> Any:
        found = await held(*args, **options)
        scene.apply(stored(*range(1000, 1050)), stored(60, parent=59))
        return found

    monkeypatch.setattr(scene.index, "held", and_meanwhile)
    for _ in range(5):
        await scene.sampler.round()
    assert (scene.sampler.stats.stale, scene.sampler.stats.missing) == (0, 0)


async def test_a_round_across_another_life_says_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    held = scene.index.held

    async def and_meanwhile(*args: Any, **options: Any) -> Any:
        found = await held(*args, **options)
        scene.apply(AllBlocksCleared(), stored(1))
        return found

    monkeypatch.setattr(scene.index, "held", and_meanwhile)
    assert not await scene.sampler.round()
    assert (scene.sampler.stats.rounds, scene.sampler.stats.void) == (0, 1)


async def test_what_publishing_does_not_mend_is_not_published_for_ever(scene: Scene) -> None:
    published = 0
    for _ in range(200):
        await scene.index.write(scene.incarnation, 10**6, [write(bytes([254] * 7 + [i])) for i in range(150)])
        before = scene.writer.stats.doubts
        await scene.sampler.round()
        published += scene.writer.stats.doubts - before
        await eventually(lambda: scene.writer.idle, "published")
        scene.now += 10.0
    assert 2 < published < 12


async def test_nothing_is_said_before_anything_counts() -> None:
    scene = Scene(await MemoryStore().open(NAMESPACE))
    scene.apply(stored(1))
    assert not await scene.sampler.round()
    assert scene.sampler.stats.void == 1
