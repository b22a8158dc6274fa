"""The router's own queue: what would only wait in an engine's queue waits here, where the order can still be chosen.

An engine serves first come first served, so one prompt of 100,000 uncached tokens holds up everybody behind it for as
long as it takes, though most of them need next to nothing computed. And a request in an engine's queue is bound to
it, whatever becomes of that engine or frees up elsewhere.

Strategy. A request whose best replica has more than `threshold_s` of prefill ahead of it waits in the router.
Whenever load falls on a replica, the first few in line whose best it is look again, each with the whole fleet to
choose from; so do a few of the others in turn, for whom it may have become the best. The line is ordered by arrival
plus `patience` times a request's own prefill. So short work overtakes long work, but only such as came within
`patience` times the long one's duration after it: nobody waits for ever.

Only a router that is alone queues. Several routers would each have a line of their own, and whichever hears of free
room first takes it for its own first in line: that was measured to be worse than the engines' queues, also with one
line for all and loads exchanged in 10 ms (docs/routing.md).

Bounds: `capacity` requests wait, for at most `max_wait_s` each; beyond either a request goes to its best replica at
once, as without a queue. A round lets `TRIES` requests of either kind look again, one after another, at most every
`ROUND_S`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from ..proto.errors import NoReplica
from ..proto.index import ReplicaRef
from .load import Reservation, report_defect
from .policies import Decision

T = TypeVar("T")

TRIES: Final = 8
"""Requests that look again when load has fallen: so many who would go there, and so many others."""
ROUND_S: Final = 0.01
"""Between two rounds at least, or"""
SPARING: Final = 4.0
"""Times the last round's own duration."""
MAX_ROUND_S: Final = 0.25
POLL_S: Final = 0.05
"""After which a round begins though no load has fallen: a replica may have joined, or come back."""


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[queue]`: which requests through the front door wait in the router."""

    enabled: bool = True
    threshold_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 0.8
    """Seconds of prefill ahead of a request, on the replica that suits it best, beyond which it waits."""
    patience: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 10.0
    """What arrives within so many times a request's own prefill may overtake it."""
    max_wait_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    capacity: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1024


def pending_s(decision: Decision) -> float:
    """Seconds of prefill ahead of a request on the replica chosen for it."""
    chosen = decision.candidate
    return chosen.reserved_tokens * chosen.speed.row.token_s


def own_s(decision: Decision, prompt_tokens: int) -> float:
    """Seconds of prefill it brings there."""
    chosen = decision.candidate
    return (prompt_tokens - chosen.reusable_tokens) * chosen.speed.row.token_s


class Line(Generic[T]):
    """Who waits, in order; the same for the router and the simulator. Not thread-safe."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._order: list[tuple[float, int, T]] = []
        self._places: dict[T, tuple[float, int]] = {}
        self._best: dict[T, ReplicaRef] = {}
        self._numbers = itertools.count()
        self._passed = (-math.inf, 0)
        """Place of the last that looked for a change."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        """All of them, in order; whoever joins or leaves meanwhile does not matter."""
        return iter([one for _, _, one in self._order])

    @property
    def full(self) -> bool:
        return len(self._order) >= self._config.capacity

    def join(self, one: T, decision: Decision, *, arrived: float, prompt_tokens: int) -> None:
        """one: hashable, not in line. decision: where it would go."""
        place = arrived + self._config.patience * own_s(decision, prompt_tokens), next(self._numbers)
        self._places[one] = place
        self._best[one] = decision.candidate.ref
        insort(self._order, (*place, one), key=_place)

    def leave(self, one: T) -> bool:
        """False for who is not in line."""
        place = self._places.pop(one, None)
        if place is None:
            return False
        del self._order[bisect_left(self._order, place, key=_place)]
        del self._best[one]
        return True

    def next(self, eased: Container[ReplicaRef]) -> list[T]:
        """Who looks again, in order: the first whose best replica is among those where load has fallen; and others in
        turn, for whom one of them may be better by now."""
        best = self._best
        chosen = list(islice((entry for entry in self._order if best[entry[2]] in eased), TRIES))
        after = bisect_right(self._order, self._passed, key=_place)
        others = (self._order[after : after + TRIES] + self._order[:after])[:TRIES]
        if others:
            self._passed = _place(others[-1])
        return [one for _, _, one in sorted({entry[:2]: entry for entry in chosen + others}.values(), key=_place)]


def _place(entry: tuple[float, int, T]) -> tuple[float, int]:
    return entry[:2]


class Turn:
    """One request on its way through the queue."""

    __slots__ = ("_arrived", "_free", "_go", "_queue", "_settled", "ready", "waited_s")

    def __init__(self, queue: RouterQueue, arrived: float) -> None:
        self._queue = queue
        self._arrived = arrived
        self._free = False
        """It goes wherever suits it best."""
        self._go: asyncio.Future[None] | None = None
        self._settled: asyncio.Event | None = None
        self.ready: Callable[[], bool] = _always
        self.waited_s = 0.0

    def must_wait(self, decision: Decision) -> bool:
        queue = self._queue
        return not self._free and queue.works() and pending_s(decision) > queue.config.threshold_s

    async def wait(self, decision: Decision, prompt_tokens: int, ready: Callable[[], bool]) -> None:
        """Until it may look again. decision: where it would go; ready: whether it would go now, wherever, as far as
        can be told at once. Raises NoReplica after `leave`."""
        queue = self._queue
        if queue.line.full:
            self._free = True
            queue.overflows += 1
            return
        if not self.waited_s:
            queue.waits += 1
        self.ready = ready
        self._go = asyncio.get_running_loop().create_future()
        queue.line.join(self, decision, arrived=self._arrived, prompt_tokens=prompt_tokens)
        self.settle()
        queue.serve()
        began = queue.clock()
        try:
            async with asyncio.timeout(queue.config.max_wait_s - self.waited_s):
                await self._go
        except TimeoutError:
            self._free = True
            queue.timeouts += 1
        finally:
            queue.line.leave(self)
            waited = queue.clock() - began
            self.waited_s += waited
            queue.waited_s += waited

    async def look(self) -> None:
        """Its turn to look again; returns when it has gone, waits again, or is no more."""
        settled = self._settled = asyncio.Event()
        if self.go():
            await settled.wait()

    def go(self) -> bool:
        """Wake it. False if it was, or does not wait."""
        if self._go is None or self._go.done():
            return False
        self._queue.line.leave(self)
        self._go.set_result(None)
        return True

    def settle(self) -> None:
        """Call when the request was placed or given up."""
        if self._settled is not None:
            self._settled.set()
            self._settled = None

    def leave(self) -> None:
        """Nobody wants it any more."""
        if self._go is not None and not self._go.done():
            self._go.set_exception(NoReplica("nobody wants the answer any more", remedy="send it again"))


class RouterQueue:
    """The requests of one router that wait. Runs a task while there are any."""

    def __init__(
        self,
        config: QueueConfig,
        *,
        alone: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """alone: whether no other router shares the load."""
        self.config = config
        self.clock = clock
        self.line: Line[Turn] = Line(config)
        self.waits = self.timeouts = self.overflows = 0
        """Requests that waited, waited too long, or found the queue full; since the start."""
        self.waited_s = 0.0
        """Of all of them together."""
        self._alone = alone
        self._fallen: set[ReplicaRef] = set()
        """Where load has fallen since the last round."""
        self._eased = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    def turn(self) -> Turn | None:
        """Of a request that arrives now; None where there is no queue."""
        return Turn(self, self.clock()) if self.config.enabled else None

    def ease(self, before: Reservation) -> None:
        """Its prefill is over, or all of it; as it was until then."""
        if self.line and before.prefilling:
            self._fallen.add(before.ref)
            self._eased.set()

    def works(self) -> bool:
        """Requests may have to wait: it is on, no other router shares the load, and no defect has ended it."""
        return self.config.enabled and self._alone() and (self._serving is None or not self._serving.done())

    def serve(self) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve(), name="router-queue")
            self._serving.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        report_defect(task)
        if self._serving is task:  # nobody else will wake who waits
            for turn in self.line:
                turn.go()

    def expect_alive(self) -> None:
        """Raises what killed the task, if anything did."""
        if self._serving is not None and self._serving.done():
            self._serving.result()

    async def close(self) -> None:
        """Idempotent. Whoever waits still does, until it is too long."""
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self) -> None:
        while self.line:
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._eased.wait()
            self._eased.clear()
            began = self.clock()
            fallen, self._fallen = self._fallen, set()
            for turn in self.line.next(fallen):
                if turn.ready():
                    await turn.look()
            # In a large fleet to look again is work: most of the time belongs to those who arrive.
            spent = self.clock() - began
            await asyncio.sleep(min(max(ROUND_S, SPARING * spent), MAX_ROUND_S))
        self._serving = None


def _always() -> bool:
    return True
