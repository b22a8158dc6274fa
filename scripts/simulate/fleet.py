"""The discrete-event run: arrivals, routers, replicas, and what each knows when.

What is real: the policies, the in-memory index that answers them, speculative placement. What is modelled: engines
(engine.py), the way of their events to the index (a fixed lag), what routers tell each other (a fixed delay), and
time. Nothing in a run depends on the machine or the clock: the same inputs give the same digits.

Order of things at one instant: engine steps end, events and messages that are due arrive, requests arrive.
"""

from __future__ import annotations

import gc
import math
import random
from array import array
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Annotated, Any, TypeVar

import msgspec

from ...indexer.load import Learned
from ...indexer.memory import MemoryIndex
from ...indexer.placement import DEFAULT_SETTLE_S, Placements
from ...indexer.policies import (
    DEFAULT_POLICY,
    Candidates,
    Decision,
    Policy,
    Roster,
    RoutingRequest,
    Speeds,
    make_policy,
)
from ...indexer.queueing import Line, QueueConfig, pending_s
from ...proto.hashing import BlockKey, Namespace
from ...proto.index import (
    Depth,
    Incarnation,
    PackedWrites,
    ReplicaRef,
    ReplicaSpec,
    Tier,
    TierMask,
)
from .engine import Engine, EngineConfig, Job, Keys, PrefixCache
from .traces import Request, Trace

T = TypeVar("T")
Seconds = Annotated[float, msgspec.Meta(ge=0)]

AFTER_LOSS_MINUTES = (3, 5, 10)
WINDOWS = 60
"""Points of the series over time."""
_HELD = TierMask(1 << Tier.GPU)
_GONE = TierMask(0)
_NO_DEPTH = Depth(0, (0, 0, 0))
_REFERENCE = {"base_weight": 3.0, "max_weight": 10.0}
"""Parameters of the default policy that define what a load is: those of the study behind docs/routing.md."""
_OUTPUT_WINDOW = 256
"""Requests the mean output length is taken over, with falling weight."""


class Loss(msgspec.Struct, frozen=True):
    """A replica's engine restarts: its cache is gone and its requests are routed again."""

    at: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """Share of the trace's span."""
    replica: int


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    engine: EngineConfig = EngineConfig()
    engines: tuple[EngineConfig, ...] = ()
    """Per replica, where they differ; overrides the two above."""
    policy: str = DEFAULT_POLICY
    parameters: dict[str, float] = {}
    stretch: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Factor on every arrival time."""
    routers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Requests go to them in turn."""
    event_lag_s: Seconds = 0.0
    """From a change in a cache to the index knowing."""
    exchange_s: Seconds = 0.0
    """From a router's reservation to the other routers knowing; infinite: never."""
    speculative: bool = True
    learned: bool = False
    """Policies see what routers learned of each replica's speed, not what is declared."""
    oracle: bool = False
    """One infinite cache shared by all replicas: the bound no policy passes."""
    losses: tuple[Loss, ...] = ()
    queue: QueueConfig | None = None
    """Requests wait in the router as this says, where there is one and its policy queues; None: in the engines."""
    warmup: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    """Share of the requests, in order of arrival, that no figure counts."""
    objective_s: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    """Time to first token that a request must meet to count as goodput."""
    seed: int = 1

    def engine_of(self, replica: int) -> EngineConfig:
        return self.engines[replica] if self.engines else self.engine

    @property
    def size(self) -> int:
        return len(self.engines) or self.replicas


class Distribution(msgspec.Struct, frozen=True):
    """Of a time, seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Window(msgspec.Struct, frozen=True):
    """One slice of a run."""

    at_s: float
    ttft_mean_s: float
    hit: float
    pending: tuple[int, int]
    """Fewest and most requests pending on one replica, at the last arrival in it."""
    work_skew: float
    """Most prefill tokens routed to one replica over the mean."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a run measured, over the requests after the warm-up."""

    requests: int
    prompt_tokens: int
    reused_tokens: int
    hit: float
    """Reused tokens over prompt tokens."""
    ttft: Distribution
    latency: Distribution
    """From arrival to last token."""
    goodput: float
    """Requests per second of the trace that met the objective."""
    met: float
    """Share of requests that met it."""
    work_skew: float
    """Prefill tokens of the busiest replica over the mean."""
    peak_pending: int
    """Most requests pending on one replica, ever."""
    load: float
    """Share of time in steps with prefill, over all replicas, until the last arrival; warm-up included."""
    evicted_blocks: int
    predicted_tokens: int
    """Of prompts, what routing expected to be reused."""
    routed: tuple[int, ...]
    """Requests per replica."""
    queued: int = 0
    """Most requests that waited in the router, ever."""
    windows: tuple[Window, ...]
    after_loss: tuple[tuple[int, float], ...] = ()
    """(minutes, p99 of the time to first token of what arrived so soon after the first loss)."""


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as all of the in-memory index's do not."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("the in-memory index waited")


_NOBODY = Job(-1, (), 1, 1, 0.0)


class _View:
    """What one router believes a replica has outstanding."""

    __slots__ = ("prefills", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.prefills = self.tokens = 0

    def change(self, requests: int, prefills: int, tokens: int) -> None:
        self.requests += requests
        self.prefills += prefills
        self.tokens += tokens


class _Router:
    __slots__ = ("learned", "placements", "policy", "views")

    def __init__(self, policy: Policy, replicas: int, settle_s: float) -> None:
        self.policy = policy
        self.views = [_View() for _ in range(replicas)]
        self.placements = Placements(settle_s=settle_s)
        self.learned = Learned()


class Fleet:
    """One run, ready to go."""

    def __init__(self, trace: Trace, config: FleetConfig) -> None:
        self._trace = trace
        self._config = config
        self._now = 0.0
        self._size = config.size
        self._index = MemoryIndex(Namespace(model="simulated", block_size=trace.block_size), lambda: self._now)
        self._version = 0
        self._refs = [ReplicaRef(f"r{i:02}") for i in range(self._size)]
        self._incarnations = [self._claim(ref) for ref in self._refs]
        self._replicas = {incarnation: i for i, incarnation in enumerate(self._incarnations)}
        self._roster = Roster(self._refs, block_sizes=[trace.block_size] * self._size)
        self._speeds = Speeds.of(config.engine_of(i).speed for i in range(self._size))
        self._events: deque[tuple[float, Incarnation, Keys, int, int, TierMask]] = deque()
        """Cache changes on their way to the index."""
        self._messages: deque[tuple[float, int, int, int, int, int]] = deque()
        """Reservation changes on their way to other routers: due, sender, replica, requests, prefills, tokens."""
        rng = random.Random(config.seed)
        settle_s = max(DEFAULT_SETTLE_S, 2 * config.event_lag_s)
        policies = [
            make_policy(config.policy, config.parameters, random.Random(rng.random())) for _ in range(config.routers)
        ]
        self._routers = [_Router(policy, self._size, settle_s) for policy in policies]
        self._line: Line[int] | None = None
        """Numbers of the requests that wait in the router."""
        self._fallen: set[ReplicaRef] = set()
        """Where load has fallen since they last looked."""
        if config.queue is not None and config.routers == 1 and policies[0].queues:
            self._line = Line(config.queue)
        self._engines = [self._engine(i) for i in range(self._size)]
        if config.oracle:
            shared = PrefixCache(1 << 60, stored=_ignore, removed=_ignore)
            for engine in self._engines:
                engine.cache = shared
        self._wakes: list[tuple[float, int]] = []
        """Heap of times with the replica that wakes then; or, above their numbers, with a request whose turn of a
        conversation has come, or one that has waited in the router for long enough; or with the router's queue."""
        self._mean_output = 256.0
        count = len(trace.requests)
        self._waited, self._eased = self._size + count, self._size + 2 * count
        """Where the last two begin."""
        self._queued = 0
        self._jobs: list[Job] = [_NOBODY] * count
        self._predicted = array("q", bytes(8 * count))
        self._uncached = array("q", bytes(8 * count))
        """Per job: prompt tokens that routing took to be reusable, and not."""
        self._over: set[tuple[str | None, int]] = set()
        """(session, turn) that have finished."""
        self._held: dict[tuple[str | None, int], list[int]] = {}
        """Requests whose time has come, by the turn they wait for."""
        self._pending = [0] * self._size
        self._peak = 0
        self._busy_at_last_arrival = 0.0
        self._extremes = [(0, 0)] * count

    def run(self) -> Outcome:
        requests, stretch = self._trace.requests, self._config.stretch
        start = requests[0].at
        span = (requests[-1].at - start) * stretch
        losses = deque(sorted(self._config.losses, key=lambda loss: loss.at))
        for number, request in enumerate(requests):
            at = (request.at - start) * stretch
            while losses and losses[0].at * span <= at:
                loss = losses.popleft()
                self._advance(loss.at * span)
                self._lose(loss.replica)
            self._advance(at)
            if request.after is None or (request.session, request.after) in self._over:
                self._arrive(number, request)
            else:
                self._held.setdefault((request.session, request.after), []).append(number)
        self._busy_at_last_arrival = sum(engine.prefill_s for engine in self._engines)
        self._advance(math.inf)
        return self._outcome(span)

    # Time

    def _advance(self, until: float) -> None:
        wakes, engines = self._wakes, self._engines
        while wakes and wakes[0][0] <= until:
            at, replica = heappop(wakes)
            if replica >= self._size:
                self._now = at
                self._call(replica)
                continue
            engine = engines[replica]
            if engine.wake_at == at:
                self._now = at
                engine.wake(at)
                if engine.wake_at != math.inf:
                    heappush(wakes, (engine.wake_at, replica))
        if until != math.inf:
            self._now = until

    def _call(self, wake: int) -> None:
        """What is due is no engine."""
        if wake >= self._eased:
            self._look_again()
        elif wake >= self._waited:
            number = wake - self._waited
            if self._line is not None and self._line.leave(number):
                self._route(self._jobs[number], self._trace.requests[number], waits=False)
        else:
            number = wake - self._size
            self._arrive(number, self._trace.requests[number])

    def _look_again(self) -> None:
        """The first in line, when load has fallen."""
        assert self._line is not None
        fallen, self._fallen = self._fallen, set()
        for number in self._line.next(fallen):
            self._line.leave(number)
            self._route(self._jobs[number], self._trace.requests[number])

    def _deliver(self) -> None:
        """What is due by now."""
        now, events, messages = self._now, self._events, self._messages
        while events and events[0][0] <= now:
            _, incarnation, keys, start, end, tiers = events.popleft()
            self._version += 1
            run_now(self._index.write(incarnation, self._version, PackedWrites.run(keys, start, end, tiers)))
        while messages and messages[0][0] <= now:
            _, sender, replica, *change = messages.popleft()
            for number, router in enumerate(self._routers):
                if number != sender:
                    router.views[replica].change(*change)

    # Routing

    def _arrive(self, number: int, request: Request) -> None:
        keys = request.chain.keys(request.chain.blocks)
        job = Job(number, keys, request.prompt_tokens, request.output_tokens, self._now)
        self._jobs[number] = job
        job.router = number % len(self._routers)
        self._route(job, request)
        self._extremes[number] = min(self._pending), max(self._pending)

    def _route(self, job: Job, request: Request, *, waits: bool = True) -> None:
        """waits: it may have to."""
        self._deliver()
        now, config, size = self._now, self._config, self._trace.block_size
        router = self._routers[job.router]
        placements, keys = router.placements, job.keys
        placements.expire(now)
        depths, replicas = [_NO_DEPTH] * self._size, self._replicas
        if config.oracle:
            blocks = self._engines[0].cache.matched(keys)
            depths = [Depth(blocks, (blocks, 0, 0))] * self._size
        else:
            for incarnation, depth in run_now(self._index.match(request.chain)).depths.items():
                depths[replicas[incarnation]] = depth
        held = [depth.blocks for depth in depths]
        if config.speculative:
            placements.deepen(self._incarnations, keys, held)
        most, views = (job.prompt_tokens - 1) // size, router.views
        candidates = Candidates(
            self._roster,
            depths=depths,
            reusable=[min(blocks, most) * size for blocks in held],
            requests=[view.requests for view in views],
            prefills=[view.prefills for view in views],
            tokens=[view.tokens for view in views],
            speeds=router.learned.speeds(self._refs) if config.learned else self._speeds,
        )
        asked = RoutingRequest(
            prompt_tokens=job.prompt_tokens,
            now=now,
            chain=request.chain,
            session=request.session,
            expected_output_tokens=self._mean_output,
        )
        decision = router.policy.choose(candidates, asked, dry=True)
        if waits and self._must_wait(job, decision):
            return
        chosen = decision.candidate
        router.policy.chosen(chosen, asked)
        replica = job.replica = int(chosen.ref.replica[1:])
        uncached = job.prompt_tokens - chosen.reusable_tokens
        self._predicted[job.index] = chosen.reusable_tokens
        self._uncached[job.index] = uncached
        if config.speculative:
            placements.sent(str(job.index), self._incarnations[replica], keys, chosen.matched_blocks, now)
        self._tell(job, 1, 1, uncached)
        if config.learned:
            view = router.views[replica]
            decoding = view.requests - view.prefills
            router.learned.routed(str(job.index), chosen.ref, tokens=view.tokens, decoding=decoding, now=now)
        self._pending[replica] += 1
        self._peak = max(self._peak, self._pending[replica])
        engine = self._engines[replica]
        before = engine.wake_at
        engine.submit(job, now)
        if engine.wake_at != before:
            heappush(self._wakes, (engine.wake_at, replica))

    def _must_wait(self, job: Job, decision: Decision) -> bool:
        """It waits in its router, and is in line there."""
        line, config = self._line, self._config.queue
        if line is None or config is None or line.full or pending_s(decision) <= config.threshold_s:
            return False
        if job.wait_until is None:
            job.wait_until = self._now + config.max_wait_s
            heappush(self._wakes, (job.wait_until, self._waited + job.index))
        line.join(job.index, decision, arrived=job.arrived, prompt_tokens=job.prompt_tokens)
        self._queued = max(self._queued, len(line))
        return True

    def _tell(self, job: Job, requests: int, prefills: int, tokens: int) -> None:
        """A reservation changed: its own router knows at once, the others later."""
        self._routers[job.router].views[job.replica].change(requests, prefills, tokens)
        if len(self._routers) > 1 and self._config.exchange_s != math.inf:
            due = self._now + self._config.exchange_s
            self._messages.append((due, job.router, job.replica, requests, prefills, tokens))
        if prefills < 0 and self._line:
            self._fallen.add(self._refs[job.replica])
            heappush(self._wakes, (self._now, self._eased))

    # What engines say

    def _engine(self, replica: int) -> Engine:
        return Engine(
            self._config.engine_of(replica),
            self._trace.block_size,
            stored=partial(self._changed, replica, _HELD),
            removed=partial(self._changed, replica, _GONE),
            first_token=self._first_token,
            finished=self._finished,
        )

    def _changed(self, replica: int, tiers: TierMask, keys: Keys, start: int, end: int) -> None:
        due = self._now + self._config.event_lag_s
        self._events.append((due, self._incarnations[replica], keys, start, end, tiers))

    def _first_token(self, job: Job, now: float) -> None:
        self._tell(job, 0, -1, -self._uncached[job.index])
        router = self._routers[job.router]
        router.placements.computed(str(job.index), now)
        router.learned.first_token(str(job.index), now)

    def _finished(self, job: Job, now: float) -> None:
        self._tell(job, -1, 0, 0)
        self._routers[job.router].learned.finished(str(job.index), now, job.output_tokens)
        self._pending[job.replica] -= 1
        self._mean_output += (job.output_tokens - self._mean_output) / _OUTPUT_WINDOW
        request = self._trace.requests[job.index]
        if request.session is not None:
            turn = request.session, request.turn
            self._over.add(turn)
            for number in self._held.pop(turn, ()):
                heappush(self._wakes, (now, self._size + number))

    def _lose(self, replica: int) -> None:
        lost = self._engines[replica].crash()
        ref = self._refs[replica]
        for job in lost:
            prefills = -int(math.isnan(job.first_token))
            self._tell(job, -1, prefills, prefills * self._uncached[job.index])
            self._routers[job.router].placements.cancel(str(job.index))
        self._pending[replica] -= len(lost)
        del self._replicas[self._incarnations[replica]]
        self._incarnations[replica] = self._claim(ref)
        self._replicas[self._incarnations[replica]] = replica
        for job in lost:
            again = Job(job.index, job.keys, job.prompt_tokens, job.output_tokens, job.arrived)
            again.router = job.router
            self._jobs[job.index] = again
            self._route(again, self._trace.requests[job.index])

    def _claim(self, ref: ReplicaRef) -> Incarnation:
        spec = ReplicaSpec(ref=ref, engine="simulated")
        return run_now(self._index.claim(spec, owner="simulation", lease_s=math.inf, activate=True)).incarnation

    # Figures

    def _outcome(self, span: float) -> Outcome:
        config = self._config
        first = int(len(self._jobs) * config.warmup)
        jobs = self._jobs[first:]
        prompt = sum(job.prompt_tokens for job in jobs)
        reused = sum(job.cached for job in jobs)
        ttfts = [job.first_token - job.arrived for job in jobs]
        met = sum(t <= config.objective_s for t in ttfts)
        measured_s = max(jobs[-1].arrived - jobs[0].arrived, 1e-9)
        return Outcome(
            requests=len(jobs),
            prompt_tokens=prompt,
            reused_tokens=reused,
            hit=reused / prompt,
            ttft=distribution(ttfts),
            latency=distribution([job.finished - job.arrived for job in jobs]),
            goodput=met / measured_s,
            met=met / len(jobs),
            work_skew=_work_skew(jobs, self._size),
            peak_pending=self._peak,
            load=self._busy_at_last_arrival / (self._size * max(span, 1e-9)),
            evicted_blocks=sum({id(e.cache): e.cache.evicted for e in self._engines}.values()),
            predicted_tokens=sum(self._predicted[first:]),
            queued=self._queued,
            routed=tuple(sum(job.replica == i for job in jobs) for i in range(self._size)),
            windows=tuple(self._windows(span)),
            after_loss=tuple(self._after_loss(span)),
        )

    def _after_loss(self, span: float) -> Iterator[tuple[int, float]]:
        if self._config.losses:
            at = min(loss.at for loss in self._config.losses) * span
            for minutes in AFTER_LOSS_MINUTES:
                ttfts = [j.first_token - j.arrived for j in self._jobs if at <= j.arrived < at + 60 * minutes]
                if ttfts:
                    yield minutes, distribution(ttfts).p99

    def _windows(self, span: float) -> list[Window]:
        width = max(span, 1e-9) / WINDOWS
        slices: list[list[Job]] = [[] for _ in range(WINDOWS)]
        for job in sorted(self._jobs, key=lambda job: job.arrived):
            slices[min(WINDOWS - 1, int(job.arrived / width))].append(job)
        return [
            Window(
                at_s=(number + 0.5) * width,
                ttft_mean_s=sum(job.first_token - job.arrived for job in jobs) / len(jobs),
                hit=sum(job.cached for job in jobs) / sum(job.prompt_tokens for job in jobs),
                pending=self._extremes[jobs[-1].index],
                work_skew=_work_skew(jobs, self._size),
            )
            for number, jobs in enumerate(slices)
            if jobs
        ]


def simulate(trace: Trace, config: FleetConfig) -> Outcome:
    """Run a trace through a fleet. Deterministic."""
    # Millions of objects live to the end and no cycle ends earlier: looking for garbage costs a quarter of the time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Fleet(trace, config).run()
    finally:
        if collecting:
            gc.enable()
            gc.collect()


def stretch_for(
    trace: Trace, config: FleetConfig, load: float, *, rounds: int = 6, start: float | None = None
) -> float:
    """The stretch at which the reference policy spends `load` of the time in steps with prefill.

    The policy of `config` plays no part, so every policy meets the same arrivals, and tuning a policy does not move
    what a load means. Exact to half a percent, or as far as `rounds` lead: conversations whose turns wait for each
    other cannot load a fleet beyond some point. start: a first guess, too long rather than too short.
    """
    reference = msgspec.structs.replace(
        config,
        policy=DEFAULT_POLICY,
        parameters=_REFERENCE,
        routers=1,
        event_lag_s=0.0,
        losses=(),
        queue=None,
        oracle=False,
    )
    work = (
        sum(request.prompt_tokens for request in trace.requests) / reference.engine_of(0).speed.prefill_tokens_per_s
    )
    stretch = start or work / (load * reference.size * max(trace.span_s, 1e-9))
    # From an idle fleet up: an overloaded one spends all its time in prefill, whatever the load.
    for _ in range(rounds):
        reached = simulate(trace, msgspec.structs.replace(reference, stretch=stretch)).load
        stretch *= reached / load
        if abs(reached / load - 1) < 0.005:
            break
    return stretch


def _ignore(keys: Keys, start: int, end: int) -> None:
    pass


def _work_skew(jobs: Sequence[Job], replicas: int) -> float:
    work = [0] * replicas
    for job in jobs:
        work[job.replica] += job.prompt_tokens - job.cached
    total = sum(work)
    return max(work) * replicas / total if total else 1.0


def distribution(values: list[float]) -> Distribution:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Distribution(
        sum(ordered) / len(ordered), ordered[last // 2], ordered[int(last * 0.9)], ordered[int(last * 0.99)]
    )


__all__ = ["BlockKey", "Fleet", "FleetConfig", "Loss", "Outcome", "simulate", "stretch_for"]
