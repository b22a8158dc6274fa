"""The index writer, over the memory store with a clock of the test's own, and over real redis-servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import redis.asyncio as aioredis
from metatrie.consumers import writer as writer_module
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.writer import IndexWriter
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.errors import StoreRefused, StoreUnavailable
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.index import BlockWrite, ReplicaRef, ReplicaSpec, ReplicaStatus, Store

NAMESPACE = Namespace(model="m", block_size=4)
SPEC = ReplicaSpec(ref=ReplicaRef("a"), engine="vllm")
DEADLINE_S = 20.0


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition, which may be a coroutine function."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            met = condition()
            if asyncio.iscoroutine(met):
                met = await met
            if met:
                return
            await asyncio.sleep(0.002)


def prompt(blocks: int, base: int = 0) -> list[int]:
    return [base * 10_000 + t for t in range(blocks * 4)]


def keys_of(tokens: list[int]) -> list[BlockKey]:
    return list(Chain(NAMESPACE.root, 4, tokens).keys(len(tokens) // 4))


def stored(blocks: int, base: int = 0, start: int = 0) -> BlockStored:
    """Blocks start to `blocks` of one prompt, named by their keys."""
    tokens = prompt(blocks, base)
    names = [EngineHash(int.from_bytes(k, "big")) for k in keys_of(tokens)]
    return BlockStored(
        hashes=names[start:], parent=names[start - 1] if start else None, tokens=tokens[start * 4 :], block_size=4
    )


def removed(blocks: int, base: int = 0, start: int = 0) -> BlockRemoved:
    return BlockRemoved(hashes=stored(blocks, base, start).hashes)


class Index:
    """A real index with a switch, a gate and a log in front. Everything else passes straight through."""

    def __init__(self, index: Any) -> None:
        self._index = index
        self.failure: Exception | None = None
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: set[str] = set()
        self.writes: list[list[BlockWrite]] = []
        self.versions: list[int] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._index, name)
        if not asyncio.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.failure is not None and name not in ("held", "fleet", "match"):
                raise self.failure
            if (gate := self.gates.get(name)) is not None:
                self.waiting.add(name)
                await gate.wait()
                self.waiting.discard(name)
            answer = await method(*args, **kwargs)
            if name == "write":
                self.versions.append(args[1])
                self.writes.append(list(args[2]))
            return answer

        return call


class Consumer:
    """An inventory and its writer, as one consumer process has them."""

    def __init__(self, index: Index, owner: str, *, synced: bool = True, **options: Any) -> None:
        options.setdefault("lease_s", 0.3)
        options.setdefault("linger_s", 0.01)
        self.index = index
        self.inventory = Inventory(NAMESPACE)
        self.synced = synced
        self.status = ReplicaStatus()
        self.writer = IndexWriter(
            index,
            SPEC,
            self.inventory,
            owner=owner,
            status=lambda: self.status,
            synced=lambda: self.synced,
            **options,
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.writer.run())

    async def stop(self) -> None:
        if self.task is not None:
            task, self.task = self.task, None
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=DEADLINE_S)
            assert done, "it went on after it was cancelled"
            assert task.cancelled()

    def feed(self, *events: Any, ts: float = 1.0) -> None:
        self.writer.submit(self.inventory.apply(Batch(ts, list(events), 0)), ts)

    def restart(self) -> None:
        self.inventory.restart()
        self.writer.submit(self.inventory.settle(), None)

    async def shown(self) -> bool:
        """What counts in the index is exactly this inventory."""
        fleet = await self.index.fleet()
        live = list(fleet.live())
        if not live:
            return False
        held = await self.index.held(live[0])
        return self.writer.idle and bool(held == self.inventory.expected())


class World:
    """One store, several consumers of one replica, and time."""

    def __init__(self, store: Store, index: Any) -> None:
        self.now = 1000.0
        self.store = store
        self.index = Index(index)
        self.consumers: list[Consumer] = []

    def consumer(self, owner: str = "one", *, index: Index | None = None, **options: Any) -> Consumer:
        consumer = Consumer(index or self.index, owner, **options)
        self.consumers.append(consumer)
        consumer.start()
        return consumer

    async def incarnation(self) -> Any:
        """The one that counts."""
        return next(iter((await self.index.fleet()).live()), None)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    holder: list[World] = []
    store = MemoryStore(clock=lambda: holder[0].now)
    holder.append(World(store, await store.open(NAMESPACE)))
    yield holder[0]
    for consumer in holder[0].consumers:
        await consumer.stop()


@contextlib.asynccontextmanager
async def on_redis(url: str) -> AsyncIterator[World]:
    store = await open_store(url)
    world = World(store, await store.open(NAMESPACE))
    try:
        yield world
    finally:
        for consumer in world.consumers:
            await consumer.stop()
        await store.close()


# Publishing


async def test_an_inventory_that_was_there_first_is_published_whole(world: World) -> None:
    consumer = Consumer(world.index, "one")
    consumer.feed(stored(50), stored(40, base=1))
    world.consumers.append(consumer)
    consumer.start()
    await until(consumer.shown)
    assert consumer.writer.registered.is_set()
    assert consumer.writer.stats.claims == 1
    assert consumer.writer.stats.written == consumer.inventory.index_blocks == 90


async def test_deltas_follow(world: World) -> None:
    consumer = world.consumer()
    await until(lambda: consumer.writer.idle)
    consumer.feed(stored(70))
    await until(consumer.shown)
    consumer.feed(removed(70, start=60), stored(3, base=1))
    await until(consumer.shown)
    consumer.feed(removed(3, base=1, start=2))
    await until(consumer.shown)
    match = await world.index.match(Chain(NAMESPACE.root, 4, prompt(70)))
    assert [d.blocks for d in match.depths.values()] == [60]
    assert consumer.writer.stats.claims == 1


async def test_a_reader_never_sees_a_child_without_its_parents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every single call, whatever the chunks: parents come first and go last."""
    monkeypatch.setattr(writer_module, "CHUNK", 3)
    consumer = world.consumer()
    consumer.feed(stored(40), stored(9, base=1))
    await until(consumer.shown)
    consumer.feed(removed(40, start=5), stored(30, base=2))
    await until(consumer.shown)
    held: set[BlockKey] = set()
    for call in world.index.writes:
        assert len(call) <= 3
        for write in call:
            if write.tiers:
                held.add(write.key)
                assert write.parent is None or write.parent in held
            else:
                held.discard(write.key)
        parents = {w.key: w.parent for c in world.index.writes for w in c}
        assert all(parents[key] is None or parents[key] in held for key in held)
    assert held == set(consumer.inventory.expected())
    assert world.index.versions == sorted(set(world.index.versions))


async def test_what_is_under_way_is_still_pending(world: World) -> None:
    consumer = world.consumer()
    await until(lambda: consumer.writer.idle)
    world.index.gates["write"] = asyncio.Event()
    consumer.feed(stored(10))
    await until(lambda: "write" in world.index.waiting)
    assert not consumer.writer.idle
    assert consumer.writer.pending == 10
    consumer.feed(removed(10, start=8))
    assert consumer.writer.pending == 12
    world.index.gates.pop("write").set()
    await until(consumer.shown)
    assert consumer.writer.pending == 0


async def test_single_blocks_arrive_as_well(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(1))
    await until(consumer.shown)
    consumer.feed(stored(2, start=1))
    consumer.feed(stored(3, start=2))
    await until(consumer.shown)


async def test_an_unreadable_engine_clock_is_no_lag(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(5), ts=0.0)
    await until(consumer.shown)
    assert consumer.writer.lag_s == 0.0


async def test_the_status_is_reported(world: World) -> None:
    consumer = world.consumer(lease_s=3600)
    consumer.feed(stored(5))
    await until(consumer.shown)
    consumer.status = ReplicaStatus(state="degraded", cause="gap", blocks=5)
    consumer.writer.status_changed()

    async def reported() -> bool:
        (view,) = (await world.index.fleet()).replicas
        return bool(view.status == consumer.status)

    await until(reported)


async def test_release_is_a_farewell(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(5))
    await until(consumer.shown)
    await consumer.stop()
    await consumer.writer.release()
    assert (await world.index.fleet()).replicas == ()


async def test_cancelling_ends_it_whatever_it_was_doing(world: World) -> None:
    for turn in range(30):
        consumer = world.consumer()
        for _ in range(turn):
            await asyncio.sleep(0)
        consumer.feed(stored(3, base=turn))
        await asyncio.sleep(0)
        await consumer.stop()


@pytest.mark.parametrize("call", ["witness", "claim", "activate", "write", "renew"])
async def test_cancelling_ends_it_in_the_middle_of_a_call(world: World, call: str) -> None:
    consumer = world.consumer(lease_s=3.0)
    if call != "activate":
        await until(lambda: consumer.writer.idle)
    world.index.gates[call] = asyncio.Event()
    if call != "activate":
        consumer.restart()
        consumer.feed(stored(5))
    await until(lambda: call in world.index.waiting)
    await consumer.stop()


# Restarts


@pytest.mark.parametrize("how", ["restart", "clear"])
async def test_a_new_life_is_a_new_incarnation_at_once(world: World, how: str) -> None:
    consumer = world.consumer()
    consumer.feed(stored(20))
    await until(consumer.shown)
    before = await world.incarnation()
    world.index.gates["write"] = asyncio.Event()
    if how == "restart":
        consumer.restart()
        consumer.feed(stored(6, base=1))
    else:
        consumer.feed(AllBlocksCleared(), stored(6, base=1))

    async def moved() -> bool:
        return await world.incarnation() not in (before, None)

    await until(moved)
    match = await world.index.match(Chain(NAMESPACE.root, 4, prompt(20)))
    assert match.depths == {}, "the old life counts no more, though nothing of the new one is written yet"
    world.index.gates.pop("write").set()
    await until(consumer.shown)
    assert consumer.inventory.index_blocks == 6
    assert consumer.writer.stats.claims == 2


async def test_a_restart_while_a_write_is_under_way(world: World) -> None:
    consumer = world.consumer()
    await until(lambda: consumer.writer.idle)
    gate = world.index.gates["write"] = asyncio.Event()
    consumer.feed(stored(20))
    await until(lambda: "write" in world.index.waiting)
    consumer.restart()
    consumer.feed(stored(7, base=1))
    world.index.gates.clear()
    gate.set()
    await until(consumer.shown)
    assert set(consumer.inventory.expected()) == set(keys_of(prompt(7, base=1)))


async def test_a_late_answer_about_a_replaced_claim_is_not_about_the_new_one(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(5))
    await until(consumer.shown)
    gate = world.index.gates["renew"] = asyncio.Event()
    consumer.writer.status_changed()
    await until(lambda: "renew" in world.index.waiting)
    consumer.restart()
    consumer.feed(stored(6, base=1))
    await until(consumer.shown)
    claim = consumer.writer.claim
    world.index.gates.clear()
    gate.set()  # the old incarnation's renewal is refused now
    await until(lambda: "renew" not in world.index.waiting)
    consumer.status = ReplicaStatus(blocks=6)
    consumer.writer.status_changed()

    async def renewed() -> bool:
        (view,) = (await world.index.fleet()).replicas
        return bool(view.status.blocks == 6)

    await until(renewed)
    assert consumer.writer.claim is claim
    assert consumer.writer.stats.superseded == 0


# Several owners


async def test_takeover_after_the_lease_keeps_the_old_view_until_the_new_one_is_complete(world: World) -> None:
    first = world.consumer("one")
    first.feed(stored(30))
    await until(first.shown)
    await first.stop()
    before = await world.incarnation()
    second = world.consumer("two", synced=False)
    await until(lambda: second.writer.standby)
    assert await world.incarnation() == before, "the lease still runs"
    world.now += 1
    second.feed(stored(12))
    await until(lambda: second.writer.claim is not None and not second.writer.pending)
    assert await world.incarnation() == before
    assert not second.writer.active
    second.synced = True
    second.writer.status_changed()
    await until(second.shown)
    assert await world.incarnation() != before
    assert second.inventory.index_blocks == 12


async def test_a_zombie_changes_nothing_and_takes_over_once_it_may(world: World) -> None:
    zombie = world.consumer("one")
    zombie.feed(stored(10))
    await until(zombie.shown)
    await zombie.stop()
    world.now += 1
    second = world.consumer("two")
    second.feed(stored(4, base=1))
    await until(second.shown)
    incarnation = await world.incarnation()

    zombie.start()
    zombie.feed(stored(20, base=2))
    await until(lambda: zombie.writer.standby)
    assert zombie.writer.claim is None
    assert zombie.writer.stats.superseded >= 1
    assert await world.incarnation() == incarnation
    assert await second.shown()

    await second.stop()
    await second.writer.release()
    await until(zombie.shown)
    assert not zombie.writer.standby
    assert zombie.inventory.index_blocks == 30


async def test_a_registration_that_was_removed_comes_back_while_the_consumer_lives(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(8))
    await until(consumer.shown)
    await world.index.release(SPEC.ref, owner=None)
    assert await world.incarnation() is None
    await until(consumer.shown)
    assert consumer.writer.stats.claims == 2


# A store that is away, full, or not what it was


async def test_nothing_is_lost_while_the_store_is_away(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(20))
    await until(consumer.shown)
    world.index.failure = StoreUnavailable("away")
    consumer.feed(stored(25, base=1))
    await until(lambda: consumer.writer.stats.failures > 0)
    consumer.feed(removed(20, start=3))
    consumer.feed(removed(25, base=1, start=24), stored(25, base=1, start=24))
    assert not consumer.writer.idle
    assert consumer.writer.pending
    world.index.failure = None
    await until(consumer.shown)
    assert consumer.inventory.index_blocks == 28


async def test_a_restart_while_the_store_is_away(world: World) -> None:
    consumer = world.consumer()
    consumer.feed(stored(20))
    await until(consumer.shown)
    world.index.failure = StoreUnavailable("away")
    consumer.feed(stored(9, base=1))
    await until(lambda: consumer.writer.stats.failures > 0)
    consumer.restart()
    consumer.feed(stored(5, base=2))
    world.index.failure = None
    await until(consumer.shown)
    assert consumer.inventory.index_blocks == 5


async def test_a_store_that_is_full_is_told_apart(world: World) -> None:
    consumer = world.consumer()
    await until(lambda: consumer.writer.idle)
    world.index.failure = StoreRefused("out of memory")
    consumer.feed(stored(6))
    await until(lambda: consumer.writer.stats.refused > 0)
    world.index.failure = None
    await until(consumer.shown)


async def test_what_waits_for_the_store_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "MAX_PENDING", 50)
    consumer = world.consumer()
    consumer.feed(stored(20))
    await until(consumer.shown)
    world.index.failure = StoreUnavailable("away")
    for base in range(1, 30):
        consumer.feed(stored(10, base=base))
        await asyncio.sleep(0)
        assert consumer.writer.pending <= 100
    assert consumer.writer.claim is None
    world.index.failure = None
    await until(consumer.shown)
    assert consumer.inventory.index_blocks == 310
    assert consumer.writer.stats.claims == 2


async def test_an_inventory_larger_than_the_bound_is_published_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_PENDING", 5)
    consumer = Consumer(world.index, "one")
    consumer.feed(*(stored(10, base=base) for base in range(5)))
    world.consumers.append(consumer)
    consumer.start()
    await until(consumer.shown)
    assert consumer.inventory.index_blocks == 50
    assert consumer.writer.stats.claims == 1


# Redis


async def test_on_redis_deltas_restarts_and_takeovers(redis_url: str) -> None:
    async with on_redis(redis_url) as world:
        first = world.consumer("one")
        first.feed(stored(40))
        await until(first.shown)
        first.feed(removed(40, start=33), stored(6, base=1))
        await until(first.shown)
        before = await world.incarnation()
        first.restart()
        first.feed(stored(5, base=2))
        await until(first.shown)
        assert await world.incarnation() != before
        await first.stop()
        second = world.consumer("two")
        second.feed(stored(9, base=3))
        await until(second.shown)
        first.start()
        first.feed(stored(30, base=4))
        await until(lambda: first.writer.standby)
        assert await second.shown()


async def test_cancelling_on_redis_ends_it_whatever_it_was_doing(redis_url: str) -> None:
    """The client's own waiting can swallow a cancellation that comes together with an answer."""
    async with on_redis(redis_url) as world:
        for turn in range(60):
            consumer = world.consumer(lease_s=0.03, linger_s=0.0)
            consumer.feed(stored(3, base=turn))
            for _ in range(turn):
                await asyncio.sleep(0)
            await consumer.stop()


async def test_a_redis_that_was_killed_and_came_back_empty_is_filled_again() -> None:
    async with EmbeddedRedis() as server, on_redis(server.url) as world:
        consumer = world.consumer()
        consumer.feed(stored(40))
        await until(consumer.shown)
        server.kill()
        consumer.feed(stored(10, base=1), removed(40, start=30))
        await until(lambda: consumer.writer.stats.failures > 0)
        consumer.feed(stored(2, base=2))
        server.start()
        await until(consumer.shown)
        assert consumer.inventory.index_blocks == 42
        consumer.feed(stored(3, base=3))
        await until(consumer.shown)


async def test_verification_mends_holes_surplus_and_lifetimes(redis_url: str) -> None:
    client = aioredis.Redis.from_url(redis_url)
    async with on_redis(redis_url) as world:
        consumer = world.consumer(refresh_s=0.05)
        consumer.feed(stored(40))
        await until(consumer.shown)
        incarnation = await world.incarnation()
        assert incarnation is not None
        pages = [page async for page in client.scan_iter(b"mt:p:*")]
        assert len(pages) == 2

        (first,) = [page for page in pages if page.endswith(bytes(keys_of(prompt(40))[0]))]
        hole = keys_of(prompt(40))[7]
        assert await client.hdel(first, bytes(hole)) == 1
        await until(lambda: consumer.writer.stats.repaired > 0)
        await until(consumer.shown)
        match = await world.index.match(Chain(NAMESPACE.root, 4, prompt(40)))
        assert [d.blocks for d in match.depths.values()] == [40]

        # An entry that failed over from the past: same holders as a block that is really there.
        bits = await client.hget(first, bytes(keys_of(prompt(40))[0]))
        await client.hset(first, b"surplus!", bits)
        assert BlockKey(b"surplus!") in await world.index.held(incarnation)
        await until(consumer.shown)

        await client.expire(first, 100)

        async def renewed() -> bool:
            return int(await client.ttl(first)) > 1000

        await until(renewed)
    await client.aclose()
