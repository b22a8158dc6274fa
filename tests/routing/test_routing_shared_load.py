"""Reservations in a real Redis: every router sees everybody's, and a dead router's are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.indexer.load import SharesReservations, Wanted
from metatrie.indexer.redis_store import RedisStore
from metatrie.indexer.router import Router
from metatrie.indexer.shared_load import SharedReservations
from metatrie.proto.api import RouteRequest
from metatrie.proto.errors import NoReplica
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import ReplicaRef, ReplicaSpec

A, B = ReplicaRef("a"), ReplicaRef("b", 1)
NONE = (0, 0, 0)


async def store_at(url: str) -> RedisStore:
    store = await open_store(url)
    assert isinstance(store, RedisStore)
    assert isinstance(store, SharesReservations)
    return store


@pytest.fixture
async def routers(redis_url: str) -> AsyncIterator[list[SharedReservations]]:
    """Three routers' reservations, each over connections of its own."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(3):
            store = await store_at(redis_url)
            stack.push_async_callback(store.close)
            reservations = store.reservations(ttl_s=600, capacity=100)
            await reservations.start()
            stack.push_async_callback(reservations.close)
            found.append(reservations)
        yield found


async def seen(reservations: SharedReservations, ref: ReplicaRef = A) -> tuple[int, int, int]:
    await reservations.refresh()
    pending = reservations.total(ref)
    assert reservations.totals([ref]) == tuple([cell] for cell in pending)
    return pending


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.01)


async def all_see(routers: list[SharedReservations], expected: tuple[int, int, int], ref: ReplicaRef = A) -> None:
    async def agreed() -> bool:
        return [await seen(r, ref) for r in routers] == [expected] * len(routers)

    await until(agreed)


async def test_every_router_sees_every_step_of_a_request(routers: list[SharedReservations]) -> None:
    held = await routers[0].add(A, predicted_tokens=10, uncached_tokens=300)
    await all_see(routers, (1, 1, 300))
    other = await routers[1].add(A, predicted_tokens=0, uncached_tokens=7)
    await all_see(routers, (2, 2, 307))
    assert await seen(routers[2], B) == NONE
    before = await routers[0].end_prefill(held.id)
    assert before is not None
    assert (before.prefilling, before.uncached_tokens) == (True, 300)
    await all_see(routers, (2, 1, 7))
    assert await routers[0].free(held.id)
    assert not await routers[0].free(held.id)
    await all_see(routers, (1, 1, 7))
    assert await routers[1].free(other.id)
    await all_see(routers, NONE)


async def test_a_router_knows_whether_it_is_alone(routers: list[SharedReservations]) -> None:
    await all_see(routers, NONE)
    assert [router.alone() for router in routers] == [False] * 3
    await routers[1].close()
    await routers[2].close()

    async def alone() -> bool:
        await routers[0].refresh()
        return routers[0].alone()

    await until(alone)


async def test_what_another_router_chose_at_the_same_moment_is_chosen_again(
    routers: list[SharedReservations],
) -> None:
    await all_see(routers, NONE)
    one, two, three = routers
    chosen: list[ReplicaRef] = []

    def idler(_: str) -> Wanted:
        a, b = two.totals([A, B]).requests
        chosen.append(A if a <= b else B)
        return Wanted(chosen[-1], 0, 50)

    await one.place(lambda _: Wanted(A, 0, 100))
    # Its view is of before: it finds out with its own reservation.
    moved = await two.place(idler)
    assert (chosen, moved.ref) == ([A, B], B)
    await all_see(routers, (1, 1, 100), A)
    await all_see(routers, (1, 1, 50), B)
    before = await three.end_prefill(moved.id)
    assert before is not None
    assert before.uncached_tokens == 50
    # Where nobody else chose, once is enough.
    chosen.clear()
    await two.place(idler)
    assert chosen == [A]


async def test_a_choice_that_cannot_be_made_again_leaves_nothing_reserved(routers: list[SharedReservations]) -> None:
    await all_see(routers, NONE)
    wanted = [Wanted(A, 0, 7)]

    def once(_: str) -> Wanted:
        if not wanted:
            raise NoReplica("nobody has room any more", remedy="retry later")
        return wanted.pop()

    held = await routers[0].place(lambda _: Wanted(A, 0, 100))
    with pytest.raises(NoReplica):
        await routers[1].place(once)
    await all_see(routers, (1, 1, 100))
    assert await routers[0].free(held.id)
    await all_see(routers, NONE)


async def test_a_choice_that_is_not_made_costs_nobody_its_place_at_the_bound(redis_url: str) -> None:
    def never(_: str) -> Wanted:
        raise NoReplica("nobody has room", remedy="retry later")

    store = await store_at(redis_url)
    full = store.reservations(ttl_s=600, capacity=1)
    await full.start()
    first = await full.add(A, predicted_tokens=0, uncached_tokens=5)
    with pytest.raises(NoReplica):
        await full.place(never)
    assert (full.counts().held, full.counts().dropped) == (1, 0)
    await full.add(B, predicted_tokens=0, uncached_tokens=6)
    assert (full.counts().held, full.counts().dropped) == (1, 1)
    assert await full.free(first.id) is None
    assert (await seen(full), await seen(full, B)) == (NONE, (1, 1, 6))
    await full.close()
    await store.close()


async def test_requests_routed_at_once_see_each_others_turns_and_placements(redis_url: str) -> None:
    store = await store_at(redis_url)
    index = await store.open(Namespace(model="m"))
    for name in "abcd":
        spec = ReplicaSpec(ref=ReplicaRef(name), engine="vllm")
        await index.claim(spec, owner="test", lease_s=60, activate=True)
    async with Router(store) as router:
        turns = await asyncio.gather(
            *(router.route(RouteRequest(model="m", token_ids=[n] * 64, policy="round_robin")) for n in range(4))
        )
        assert sorted(routed.replica for routed in turns) == ["a", "b", "c", "d"]
        same = await asyncio.gather(
            *(router.route(RouteRequest(model="m", token_ids=[9] * 4097, policy="affinity_only")) for _ in range(3))
        )
        assert sorted(routed.reusable_tokens for routed in same) == [0, 4096, 4096]
        assert len({routed.replica for routed in same}) == 1
    await store.close()


async def test_a_request_may_end_through_another_router(routers: list[SharedReservations]) -> None:
    held = await routers[0].add(B, predicted_tokens=16, uncached_tokens=50)
    before = await routers[1].end_prefill(held.id)
    assert before is not None
    assert (before.prefilling, before.uncached_tokens, before.predicted_tokens) == (True, 50, 16)
    again = await routers[2].end_prefill(held.id)
    assert again is not None
    assert not again.prefilling
    await all_see(routers, (1, 0, 0), B)
    assert await routers[2].free(held.id)
    assert not await routers[1].free(held.id)
    await all_see(routers, NONE, B)


@pytest.mark.parametrize("name", ["", "nonsense", "0123456789abcdef.x", "x" * 64])
async def test_unknown_reservations_are_unknown_everywhere(routers: list[SharedReservations], name: str) -> None:
    assert await routers[0].end_prefill(name) is None
    assert not await routers[0].free(name)


async def test_concurrent_changes_add_up(routers: list[SharedReservations]) -> None:
    async def one(number: int) -> None:
        made, ending = routers[number % 3], routers[(number * 7 + 1) % 3]
        held = await made.add(A, predicted_tokens=0, uncached_tokens=number)
        if number % 2:
            await ending.end_prefill(held.id)
        if number % 4 == 3:
            await ending.free(held.id)

    await asyncio.gather(*(one(number) for number in range(120)))
    left = [n for n in range(120) if n % 4 != 3]
    prefilling = [n for n in left if n % 2 == 0]
    await all_see(routers, (len(left), len(prefilling), sum(prefilling)))


async def test_a_dead_routers_load_expires(redis_url: str, routers: list[SharedReservations]) -> None:
    store = await store_at(redis_url)
    # Never started, so it gives no sign of life but its reservations, as a process that was killed.
    doomed = SharedReservations(store._link, lease_s=0.3)
    await doomed._beat()
    await doomed.add(A, predicted_tokens=0, uncached_tokens=5)
    await all_see(routers, (1, 1, 5))
    await store.close()
    await all_see(routers, NONE)


async def test_what_nobody_frees_is_freed_by_its_router(redis_url: str, routers: list[SharedReservations]) -> None:
    now = [0.0]
    store = await store_at(redis_url)
    forgetful = SharedReservations(store._link, ttl_s=60, clock=lambda: now[0])
    await forgetful.start()
    await forgetful.add(A, predicted_tokens=0, uncached_tokens=5)
    await all_see(routers, (1, 1, 5))
    now[0] = 60.0
    await all_see(routers, NONE)
    assert forgetful.counts().expired == 1
    await forgetful.close()
    await store.close()


async def test_a_router_that_stops_frees_its_load(redis_url: str, routers: list[SharedReservations]) -> None:
    await routers[0].add(A, predicted_tokens=0, uncached_tokens=5)
    await all_see(routers[1:], (1, 1, 5))
    await routers[0].close()
    await all_see(routers[1:], NONE)


async def test_without_redis_a_router_counts_on_by_itself() -> None:
    async with EmbeddedRedis() as server:
        store = await store_at(server.url)
        alone = store.reservations(ttl_s=600, capacity=2)
        await alone.start()
        first = await alone.add(A, predicted_tokens=0, uncached_tokens=5)
        server.kill()
        second = await alone.add(A, predicted_tokens=0, uncached_tokens=6)
        assert await seen(alone) == (2, 2, 11)
        await alone.end_prefill(second.id)
        await alone.free(first.id)
        assert await seen(alone) == (1, 0, 0)
        for tokens in (1, 2):
            await alone.add(A, predicted_tokens=0, uncached_tokens=tokens)
        assert (await seen(alone), alone.counts().dropped) == ((2, 2, 3), 1)
        assert alone.counts().unshared == 6
        await alone.close()
        await store.close()


async def test_a_heartbeat_that_ended_is_told(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await store_at(redis_url)
    held = SharedReservations(store._link, lease_s=0.03)
    await held.start()
    held.expect_alive()
    monkeypatch.setattr(held, "_free_expired", None)  # a defect: not even callable

    async def ended() -> bool:
        try:
            held.expect_alive()
        except TypeError:
            return True
        return False

    await until(ended)
    await held.close()
    await store.close()
