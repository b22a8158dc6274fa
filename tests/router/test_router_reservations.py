"""Reservations: totals, expiry and bounds, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.load import LocalReservations, Pending
from metatrie.proto.index import ReplicaRef

A, B = ReplicaRef("a"), ReplicaRef("b", 1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def totals(reservations: LocalReservations) -> dict[ReplicaRef, tuple[int, int]]:
    found = {ref: reservations.total(ref) for ref in (A, B)}
    assert reservations.totals((A, B)) == tuple(map(list, zip(*found.values(), strict=True)))
    return {ref: (p.requests, p.tokens) for ref, p in found.items() if p != Pending()}


async def test_totals_follow_each_change(clock: Clock) -> None:
    reservations = LocalReservations(clock=clock)
    first = await reservations.add(A, predicted_tokens=32, uncached_tokens=100)
    second = await reservations.add(A, predicted_tokens=0, uncached_tokens=7)
    await reservations.add(B, predicted_tokens=0, uncached_tokens=1)
    assert totals(reservations) == {A: (2, 107), B: (1, 1)}

    before = await reservations.end_prefill(first.id)
    assert before == first
    assert totals(reservations)[A] == (2, 7)
    again = await reservations.end_prefill(first.id)
    assert again is not None
    assert (again.prefilling, again.uncached_tokens, again.predicted_tokens) == (False, 0, 32)
    assert totals(reservations)[A] == (2, 7)

    assert await reservations.free(first.id)
    assert await reservations.free(second.id)
    assert not await reservations.free(second.id)
    assert totals(reservations) == {B: (1, 1)}


async def test_what_nobody_frees_expires(clock: Clock) -> None:
    reservations = LocalReservations(ttl_s=10, clock=clock)
    old = await reservations.add(A, predicted_tokens=0, uncached_tokens=5)
    clock.now = 6
    young = await reservations.add(A, predicted_tokens=0, uncached_tokens=3)
    clock.now = 9.9
    assert totals(reservations) == {A: (2, 8)}
    clock.now = 10
    assert totals(reservations) == {A: (1, 3)}
    assert not await reservations.free(old.id)
    assert await reservations.end_prefill(old.id) is None
    clock.now = 16
    assert totals(reservations) == {}
    assert not await reservations.free(young.id)
    assert (reservations.counts().held, reservations.counts().expired) == (0, 2)


async def test_ending_the_prefill_does_not_prolong_a_reservation(clock: Clock) -> None:
    reservations = LocalReservations(ttl_s=10, clock=clock)
    first = await reservations.add(A, predicted_tokens=0, uncached_tokens=5)
    await reservations.add(B, predicted_tokens=0, uncached_tokens=5)
    clock.now = 9
    await reservations.end_prefill(first.id)
    clock.now = 10
    assert totals(reservations) == {}


async def test_at_the_bound_the_oldest_is_dropped_and_counted() -> None:
    reservations = LocalReservations(capacity=2)
    held = [await reservations.add(A, predicted_tokens=0, uncached_tokens=1 << i) for i in range(3)]
    assert totals(reservations) == {A: (2, 6)}
    assert not await reservations.free(held[0].id)
    counts = reservations.counts()
    assert (counts.held, counts.dropped, counts.expired) == (2, 1, 0)


@given(st.lists(st.tuples(st.sampled_from("apft"), st.integers(0, 5)), max_size=60))
async def test_totals_always_equal_the_sum_of_what_is_held(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    reservations = LocalReservations(ttl_s=10, capacity=8, clock=clock)
    model: dict[str, list[float]] = {}
    """Deadline, tokens, replica and whether it prefills of each one held, oldest first."""
    for step, n in steps:
        match step:
            case "a":
                if len(model) == 8:
                    del model[next(iter(model))]
                added = await reservations.add((A, B)[n % 2], predicted_tokens=n, uncached_tokens=n)
                model[added.id] = [clock.now + 10, n, n % 2, 1]
            case "p" if model:
                reservation = list(model)[n % len(model)]
                assert await reservations.end_prefill(reservation) is not None
                model[reservation][1] = model[reservation][3] = 0
            case "f" if model:
                reservation = list(model)[n % len(model)]
                assert await reservations.free(reservation)
                del model[reservation]
            case "t":
                clock.now += n
                model = {key: value for key, value in model.items() if value[0] > clock.now}
        expected = [Pending(), Pending()]
        for _, tokens, which, prefills in model.values():
            expected[int(which)] = expected[int(which)].plus(Pending(1, int(prefills), int(tokens)))
        assert [reservations.total(A), reservations.total(B)] == expected
        assert reservations.counts().held == len(model)
