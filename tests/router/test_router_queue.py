"""The router's own queue: order, turns, bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.load import Reservation
from metatrie.indexer.policies import TYPICAL_SPEED, Candidate, RoutingRequest, make_policy
from metatrie.indexer.policies.base import Decision
from metatrie.indexer.queueing import TRIES, Line, QueueConfig, RouterQueue, Turn, own_s, pending_s
from metatrie.proto.errors import NoReplica
from metatrie.proto.index import ReplicaRef


def decision(
    reserved_tokens: int, *, reusable_tokens: int = 0, prompt_tokens: int = 1000, name: str = "a"
) -> Decision:
    one = Candidate(ref=ReplicaRef(name), reserved_tokens=reserved_tokens, reusable_tokens=reusable_tokens)
    policy = make_policy("least_loaded", {}, random.Random(0))
    return policy.choose([one], RoutingRequest(prompt_tokens=prompt_tokens))


def test_seconds_are_of_the_chosen_replicas_own_rate() -> None:
    rate = TYPICAL_SPEED.prefill_tokens_per_s
    assert pending_s(decision(20_000)) == pytest.approx(20_000 / rate)
    assert own_s(decision(0, reusable_tokens=400), 1000) == pytest.approx(600 / rate)


# The line


def test_short_work_overtakes_long_work_within_its_patience_only() -> None:
    line: Line[str] = Line(QueueConfig(patience=10))
    there = decision(0)
    line.join("long", there, arrived=0.0, prompt_tokens=20_000)
    line.join("short, soon", there, arrived=19.0, prompt_tokens=500)
    line.join("short, late", there, arrived=20.0, prompt_tokens=500)
    line.join("equal", there, arrived=0.0, prompt_tokens=20_000)
    assert line.next(()) == ["short, soon", "long", "equal", "short, late"]


def test_who_would_go_where_load_fell_looks_first_and_the_others_in_turn() -> None:
    line: Line[int] = Line(QueueConfig(patience=0))
    for number in range(40):
        line.join(number, decision(0, name="ab"[number % 2]), arrived=number, prompt_tokens=100)
    fallen = {ReplicaRef("b")}
    assert line.next(fallen) == sorted({*range(1, 17, 2), *range(8)})
    assert line.next(fallen) == sorted({*range(1, 17, 2), *range(8, 16)})
    assert line.next(fallen) == sorted({*range(1, 17, 2), *range(16, 24)})
    for number in range(30):
        line.leave(number)
    assert line.next(()) == [*range(30, 38)]
    assert line.next(()) == [*range(30, 36), 38, 39]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["join", "leave", "next"]), st.integers(0, 30), st.integers(0, 20), st.integers(0, 3)
        ),
        max_size=80,
    ),
    st.integers(0, 5),
)
def test_a_line_is_in_order_whoever_joins_and_leaves(steps: list[tuple[str, int, int, int]], patience: int) -> None:
    line: Line[int] = Line(QueueConfig(patience=patience, capacity=20))
    model: list[tuple[float, int, int]] = []
    names: dict[int, str] = {}
    rate = TYPICAL_SPEED.prefill_tokens_per_s
    for number, (step, who, arrived, own) in enumerate(steps):
        there = any(one == who for _, _, one in model)
        if step == "leave":
            assert line.leave(who) == there
            model = [entry for entry in model if entry[2] != who]
        elif step == "next":
            found, order = line.next({ReplicaRef("a")}), [one for _, _, one in sorted(model)]
            assert found == [one for one in order if one in found]
            first = [one for one in order if names[one] == "a"][:TRIES]
            assert set(first) <= set(found)
            assert len(found) >= min(TRIES, len(order))
        elif not there:
            names[who] = "ab"[who % 2]
            line.join(who, decision(0, name=names[who]), arrived=arrived, prompt_tokens=int(own * rate))
            model.append((arrived + patience * own, number, who))
        assert (len(line), line.full) == (len(model), len(model) >= 20)


# Turns

ENDED = Reservation(
    id="x", ref=ReplicaRef("a"), predicted_tokens=0, uncached_tokens=0, prefilling=True, expires_at=0.0
)


class Load:
    """Of one replica, as turns see it, behind a queue."""

    def __init__(self, **config: Any) -> None:
        self.tokens = 0
        self.alone = True
        self.went: list[str] = []
        self.queue = RouterQueue(QueueConfig(**config), alone=lambda: self.alone)

    async def request(self, name: str, turn: Turn, *, tokens: int = 1000) -> None:
        """What a router does with one: it goes when its turn lets it, and adds to the load."""
        try:
            while turn.must_wait(best := decision(self.tokens)):
                await turn.wait(best, tokens, lambda: not turn.must_wait(decision(self.tokens)))
            self.tokens += tokens
            self.went.append(name)
        finally:
            turn.settle()

    def start(self, name: str, **options: Any) -> tuple[asyncio.Task[None], Turn]:
        turn = self.queue.turn()
        assert turn is not None
        return asyncio.create_task(self.request(name, turn, **options)), turn

    def ended(self, tokens: int) -> None:
        self.tokens -= tokens
        self.queue.ease(ENDED)

    async def waiting(self, count: int, *, went: Sequence[str] = ()) -> None:
        """Until so many wait, and these went."""
        async with asyncio.timeout(10):
            while True:
                if (len(self.queue.line), self.went) == (count, [*went]):
                    return
                await asyncio.sleep(0)


@pytest.fixture
async def load() -> Load:
    return Load()


async def test_requests_go_in_order_as_load_falls(load: Load) -> None:
    load.tokens = 20_000
    tasks = [load.start(name, tokens=tokens)[0] for name, tokens in (("c", 9000), ("a", 10), ("b", 400))]
    await load.waiting(3)
    load.ended(15_000)
    await asyncio.gather(*tasks)
    # The last in line found the replica idle enough all the same: what went before was short.
    assert load.went == ["a", "b", "c"]
    assert load.queue.waits == 3
    assert load.queue.waited_s > 0
    assert (load.queue.timeouts, load.queue.overflows) == (0, 0)
    await load.queue.close()


async def test_one_after_the_other_sees_what_the_one_before_did(load: Load) -> None:
    load.tokens = 20_000
    tasks = [load.start(name, tokens=8100)[0] for name in "abc"]
    await load.waiting(3)
    load.ended(20_000)
    await load.waiting(2, went="a")  # 8,100 pending tokens are more than 0.8 s
    load.ended(8100)
    await load.waiting(1, went="ab")
    load.ended(8100)
    await asyncio.gather(*tasks)
    assert load.went == ["a", "b", "c"]


async def test_an_idle_fleet_makes_nobody_wait(load: Load) -> None:
    task, turn = load.start("a")
    await task
    assert (load.queue.waits, turn.waited_s) == (0, 0.0)


async def test_nobody_waits_longer_than_the_bound() -> None:
    load = Load(max_wait_s=0.05)
    load.tokens = 1 << 30
    task, turn = load.start("a")
    await task
    assert load.went == ["a"]
    assert load.queue.timeouts == 1
    assert turn.waited_s >= 0.04
    again = asyncio.create_task(load.request("a again", turn))  # another attempt: it has waited enough
    await again
    assert load.queue.waits == 1


async def test_a_full_queue_lets_requests_through() -> None:
    load = Load(capacity=2)
    load.tokens = 1 << 30
    tasks = [load.start(name)[0] for name in "ab"]
    await load.waiting(2)
    await load.start("c")[0]
    assert load.went == ["c"]
    assert load.queue.overflows == 1
    load.ended(1 << 30)
    await asyncio.gather(*tasks)


async def test_who_hangs_up_leaves_the_line(load: Load) -> None:
    load.tokens = 20_000
    task, turn = load.start("a")
    other, _ = load.start("b")
    await load.waiting(2)
    turn.leave()
    turn.leave()
    with pytest.raises(NoReplica, match="nobody wants"):
        await task
    await load.waiting(1)
    load.ended(20_000)
    await other
    assert load.went == ["b"]


async def test_who_is_cancelled_holds_up_nobody(load: Load) -> None:
    load.tokens = 20_000
    task, _ = load.start("a")
    other, _ = load.start("b")
    await load.waiting(2)
    load.ended(20_000)
    task.cancel()
    await other
    assert load.went == ["b"]


async def test_a_second_router_ends_the_waiting(load: Load) -> None:
    load.tokens = 20_000
    tasks = [load.start(name)[0] for name in "abc"]
    await load.waiting(3)
    load.alone = False
    await asyncio.gather(*tasks)
    assert load.went == ["a", "b", "c"]
    await load.start("d")[0]


async def test_a_queue_that_is_off_has_no_turns() -> None:
    assert Load(enabled=False).queue.turn() is None


async def test_a_defect_is_told_and_nobody_waits_for_it(load: Load) -> None:
    load.tokens = 20_000

    def broken() -> bool:
        raise RuntimeError("a defect")

    assert load.queue.works()
    turn = load.queue.turn()
    assert turn is not None
    other, _ = load.start("a")
    await load.waiting(1)
    await turn.wait(decision(20_000), 1000, broken)
    await other
    await load.start("b")[0]
    assert load.went == ["a", "b"]
    assert (load.queue.timeouts, load.queue.works()) == (0, False)
    with pytest.raises(RuntimeError, match="a defect"):
        load.queue.expect_alive()


async def test_it_closes_while_somebody_waits(load: Load) -> None:
    load.tokens = 20_000
    task, turn = load.start("a")
    await load.waiting(1)
    await load.queue.close()
    await load.queue.close()
    turn.leave()
    with pytest.raises(NoReplica):
        await task
