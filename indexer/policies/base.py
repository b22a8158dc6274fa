"""What every policy is made of: what it is told, what it must say, and how a decision follows from that.

Strategy. A policy is synchronous and sees only what it is given; state it needs over time (a turn, an average, a
history) is its own, time comes with each request, and randomness is injected, so the router and the simulator run
the same code. Nearly every policy in the field is "the cheapest admissible candidate", so a policy here is a class
that gives each candidate a cost and may rule candidates out. The base class does the rest once, for all of them: the
cheapest wins, ties go to the least pending work, then to chance, and every decision can be explained.

Candidates come in columns (`Candidates`): a decision among 64 replicas makes no object per replica. What seldom
changes is a `Roster`, which callers keep for as long as the fleet stays the same. Terms are put together when
somebody asks for an explanation, from the columns and from what the policy noted at the time (`evidence`).

To add a policy: subclass `Policy`, document formula, source and defaults, give it a `name`, a `formula`, `Parameters`
and `costs` (and `admissible`), name what they look at in `terms`, and list it in the package's `POLICIES`. Everything
else (the HTTP field, the configuration, validation, metrics, explanations, the simulator) follows from the list.

Units: tokens are prompt tokens, times are seconds, work is counted in requests unless a name says otherwise.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self, overload

import msgspec

from ...proto.api import ExplainedCandidate, Explanation
from ...proto.hashing import Chain, none_hash
from ...proto.index import Depth, Load, ReplicaRef, State

MAX_EXPLAINED = 64
"""Candidates an explanation lists."""
NO_CHAIN = Chain(none_hash(""), 1, ())
"""Of a prompt whose blocks are not known."""


class Speed(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What work costs on one replica: declared, or learned from what it served (indexer/load.py).

    One engine step computes up to `chunk_tokens` prompt tokens and one token of each sequence that decodes. It takes
    `tokens / prefill_tokens_per_s + step_s + sequences · sequence_step_s`.
    """

    prefill_tokens_per_s: float = 10_000.0
    step_s: float = 0.020
    sequence_step_s: float = 0.0003
    chunk_tokens: int = 2048
    cpu_tokens_per_s: float = 200_000.0
    """Loading KV from host memory back into the GPU."""
    storage_tokens_per_s: float = 50_000.0
    """The same from storage."""
    transfer_tokens_per_s: float = 0.0
    """Fetching KV another replica holds; 0: this deployment cannot."""

    @cached_property
    def row(self) -> SpeedRow:
        """What decisions compute with."""
        token_s = 1.0 / self.prefill_tokens_per_s
        chunk = self.chunk_tokens
        return SpeedRow(
            speed=self,
            token_s=token_s,
            chunk_token_s=token_s + self.step_s / chunk,
            chunk_sequence_s=self.sequence_step_s / chunk,
            sequence_s=self.sequence_step_s,
            transfer=self.transfer_tokens_per_s,
        )


class SpeedRow(NamedTuple):
    """A speed, and seconds that follow from it."""

    speed: Speed
    token_s: float
    """Of a prompt token computed alone."""
    chunk_token_s: float
    """Of one in a chunk's step."""
    chunk_sequence_s: float
    """What each decoding sequence adds to the latter."""
    sequence_s: float
    """Of a decoding sequence in a step."""
    transfer: float
    """Tokens per second, as in Speed."""


class Speeds(NamedTuple):
    """`SpeedRow` of several replicas, in columns."""

    speed: Sequence[Speed]
    token_s: Sequence[float]
    chunk_token_s: Sequence[float]
    chunk_sequence_s: Sequence[float]
    sequence_s: Sequence[float]
    transfer: Sequence[float]

    @classmethod
    def of(cls, speeds: Iterable[Speed]) -> Speeds:
        """speeds: at least one."""
        return cls(*zip(*(speed.row for speed in speeds), strict=True))


TYPICAL_SPEED = Speed()


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One replica that could serve the request, and what is known about it at this moment."""

    ref: ReplicaRef
    matched_blocks: int = 0
    """Leading blocks the index knows it to hold."""
    reusable_tokens: int = 0
    """Prompt tokens it need not compute, those of requests still on their way there included."""
    tiers: tuple[int, int, int] = (0, 0, 0)
    """Of the matched blocks, how many have their fastest copy in GPU, CPU, STORAGE."""
    block_size: int = 16
    state: State = "exact"
    cause: str = ""
    url: str | None = None
    reserved_requests: int = 0
    """Requests routed there and not known to be over."""
    reserved_prefills: int = 0
    """Of those, the ones whose prefill is not known to be done."""
    reserved_tokens: int = 0
    """Uncached prompt tokens of the latter."""
    load: Load | None = None
    """What the engine last said of itself; None while unknown."""
    speed: Speed = TYPICAL_SPEED

    @property
    def pending(self) -> int:
        """Requests it still has to finish: reservations know the newest, the engine knows other routers' too."""
        load = self.load
        return self.reserved_requests if load is None else max(self.reserved_requests, load.running + load.waiting)

    @property
    def decoding(self) -> int:
        """Sequences past their prefill."""
        return self.reserved_requests - self.reserved_prefills


class Roster:
    """What seldom changes about candidates, in columns. Nothing in it may be changed."""

    __slots__ = ("block_sizes", "causes", "loads", "refs", "reported", "states", "urls")

    def __init__(
        self,
        refs: Sequence[ReplicaRef],
        *,
        block_sizes: Sequence[int],
        states: Sequence[State] | None = None,
        causes: Sequence[str] | None = None,
        urls: Sequence[str | None] | None = None,
        loads: Sequence[Load | None] | None = None,
    ) -> None:
        """refs: each once. Everything has one entry per ref; the defaults are those of Candidate."""
        self.refs = refs
        self.block_sizes = block_sizes
        self.states: Sequence[State] = states or ["exact"] * len(refs)
        self.causes: Sequence[str] = causes or [""] * len(refs)
        self.urls: Sequence[str | None] = urls or [None] * len(refs)
        self.loads: Sequence[Load | None] = loads or [None] * len(refs)
        self.reported: Sequence[int] | None = None
        """Requests each engine said it had; None: none of them said anything."""
        if loads is not None:
            self.reported = [0 if load is None else load.running + load.waiting for load in loads]


class Candidates(Sequence[Candidate]):
    """The replicas a request may go to, in columns policies compute with; an item is put together when asked for.

    Attributes are as those of Candidate, in the same order as `roster.refs`. Nothing in it may be changed.
    """

    __slots__ = ("depths", "pending", "prefills", "requests", "reusable", "roster", "slower", "speeds", "tokens")

    def __init__(
        self,
        roster: Roster,
        *,
        depths: Sequence[Depth],
        reusable: Sequence[int],
        requests: Sequence[int],
        prefills: Sequence[int],
        tokens: Sequence[int],
        speeds: Speeds,
        slower: Sequence[int] = (),
    ) -> None:
        """depths: what the index knows. slower: positions of those that hold a part in slower tiers than the GPU."""
        self.roster = roster
        self.depths = depths
        self.reusable = reusable
        self.requests = requests
        self.prefills = prefills
        self.tokens = tokens
        self.speeds = speeds
        self.slower = slower
        self.pending = requests
        if roster.reported is not None:
            rows = zip(requests, roster.reported, strict=True)
            self.pending = [reserved if reserved > reported else reported for reserved, reported in rows]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Self:
        """The same, from rows."""

        def column(name: str) -> list[Any]:
            return list(map(attrgetter(name), candidates))

        roster = Roster(
            column("ref"),
            block_sizes=column("block_size"),
            states=column("state"),
            causes=column("cause"),
            urls=column("url"),
            loads=column("load"),
        )
        return cls(
            roster,
            depths=[Depth(c.matched_blocks, c.tiers) for c in candidates],
            reusable=column("reusable_tokens"),
            requests=column("reserved_requests"),
            prefills=column("reserved_prefills"),
            tokens=column("reserved_tokens"),
            speeds=Speeds.of(column("speed")),
            slower=[i for i, c in enumerate(candidates) if c.tiers[1] or c.tiers[2]],
        )

    @property
    def refs(self) -> Sequence[ReplicaRef]:
        return self.roster.refs

    def __len__(self) -> int:
        return len(self.roster.refs)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        roster, depth = self.roster, self.depths[at]
        return Candidate(
            ref=roster.refs[at],
            matched_blocks=depth.blocks,
            reusable_tokens=self.reusable[at],
            tiers=depth.tiers,
            block_size=roster.block_sizes[at],
            state=roster.states[at],
            cause=roster.causes[at],
            url=roster.urls[at],
            reserved_requests=self.requests[at],
            reserved_prefills=self.prefills[at],
            reserved_tokens=self.tokens[at],
            load=roster.loads[at],
            speed=self.speeds.speed[at],
        )

    def load_key(self, at: int) -> tuple[int, int]:
        """Pending work, requests first: smaller is idler."""
        return self.pending[at], self.tokens[at]


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The request to place, as far as a policy may care."""

    prompt_tokens: int
    max_output_tokens: int | None = None
    priority: int = 0
    now: float = 0.0
    """On the caller's clock, never running backwards."""
    chain: Chain = NO_CHAIN
    """The prompt's blocks; a policy that asks for keys pays for hashing them."""
    session: str | None = None
    """What the caller says belongs together."""
    expected_output_tokens: float = 256.0
    """Mean of what was served lately."""


class Decision:
    """The candidate to use, and what decided: a metric label from a small fixed set."""

    __slots__ = ("_allowed", "_at", "_costs", "_evidence", "_policy", "_request", "candidate", "candidates", "reason")

    def __init__(
        self,
        policy: Policy,
        request: RoutingRequest,
        candidates: Candidates,
        costs: Sequence[float],
        allowed: Sequence[bool] | None,
        at: int,
        reason: str,
    ) -> None:
        """at: position of the winner."""
        self.candidates = candidates
        """What it was chosen from."""
        self.candidate = candidates[at]
        self.reason = reason
        self._policy = policy
        # Without the prompt: a decision may be kept.
        self._request = RoutingRequest(
            prompt_tokens=request.prompt_tokens,
            session=request.session,
            expected_output_tokens=request.expected_output_tokens,
        )
        self._costs = costs
        self._allowed = allowed
        self._at = at
        self._evidence = policy.evidence()

    def explain(self, listed: int = MAX_EXPLAINED) -> Explanation:
        """Why, with the terms of the best `listed` candidates, at least one, as they were at the decision."""
        candidates, costs, policy, winner = self.candidates, self._costs, self._policy, self._at
        allowed: Sequence[bool] = self._allowed or [True] * len(candidates)
        refs = candidates.refs
        ranked = sorted(range(len(candidates)), key=lambda i: (costs[i], candidates.load_key(i), refs[i]))
        other = next((i for i in ranked if i != winner), None)
        why = f"{self.candidate.ref}: {_WHY[self.reason]}"
        if other is not None:
            why += f"; {refs[other]} " + (
                "comes next" if allowed[other] else "is ruled out by the policy's constraint"
            )
        # The list is bounded, and the winner is always in it: a constraint may have ruled out many cheaper ones.
        rows = ranked[:listed]
        if winner not in rows:
            rows[-1] = winner
        return Explanation(
            policy=policy.name,
            formula=policy.formula,
            parameters=msgspec.structs.asdict(policy.parameters),
            why=why,
            alternative=None if other is None else str(refs[other]),
            candidates=[
                ExplainedCandidate(
                    replica=refs[i].replica,
                    dp_rank=refs[i].dp_rank,
                    state=candidates.roster.states[i],
                    eligible=allowed[i],
                    terms={"cost": costs[i], **policy.terms(candidates[i], self._request, self._evidence)},
                )
                for i in rows
            ],
            omitted=len(candidates) - len(rows),
        )


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has none."""


class Policy(ABC):
    """The cheapest admissible candidate, by the subclass's cost."""

    name: ClassVar[str]
    formula: ClassVar[str]
    """One line, for explanations."""
    decisive: ClassVar[str]
    """Reason label when the cost alone decided; its sentence is in `_WHY`."""
    queues: ClassVar[bool] = False
    """Its choice follows load, so a request may wait in the router for load to fall (queueing.py)."""
    Parameters: ClassVar[type[msgspec.Struct]] = NoParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        """parameters: an instance of the class's own `Parameters`."""
        self.parameters = parameters
        self._rng = rng

    @abstractmethod
    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        """One cost per candidate, lower is better. Called once per decision, before `admissible` and `evidence`."""

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        """Which candidates may be used at all: at least one. None, the default: all."""
        return None

    def evidence(self) -> Any:
        """What else, of the decision just made, `terms` needs later. Nothing in it changes afterwards."""
        return None

    @abstractmethod
    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        """Every quantity costs and constraint looked at in that decision, by name, for explanations."""

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:  # noqa: B027 - most need no memory
        """Told of each decision; a policy with a memory overrides it."""

    def choose(self, candidates: Sequence[Candidate], request: RoutingRequest, *, dry: bool = False) -> Decision:
        """Pick one of `candidates` (at least one, in any order; fastest as `Candidates`).

        dry: try only; the policy does not remember the choice.
        """
        if not isinstance(candidates, Candidates):
            candidates = Candidates.of(candidates)
        costs = self.costs(candidates, request)
        allowed = self.admissible(candidates, request)
        if allowed is None:
            lowest = min(costs)
            at = costs.index(lowest)
            tied = [at] if costs.count(lowest) == 1 else [i for i, cost in enumerate(costs) if cost == lowest]
        else:
            lowest = min(compress(costs, allowed))
            tied = [i for i, (cost, ok) in enumerate(zip(costs, allowed, strict=True)) if ok and cost == lowest]
        if len(candidates) == 1:
            reason = "only_candidate"
        elif len(tied) == 1:
            reason = "constraint" if allowed is not None and min(costs) < lowest else self.decisive
        else:
            loads = [(candidates.pending[i], candidates.tokens[i]) for i in tied]
            least = min(loads)
            tied = [i for i, load in zip(tied, loads, strict=True) if load == least]
            reason = "least_loaded" if len(tied) == 1 else "random"
        winner = tied[0] if len(tied) == 1 else self._rng.choice(tied)
        decision = Decision(self, request, candidates, costs, allowed, winner, reason)
        if not dry:
            self.chosen(decision.candidate, request)
        return decision


_WHY = {
    "only_candidate": "the only candidate",
    "turn": "its turn",
    "drawn": "drawn at random",
    "deepest": "the most reusable tokens",
    "history": "the longest prefix it was sent before",
    "idlest": "the least pending work",
    "session": "its session's own replica",
    "score": "the highest weighted score",
    "cheapest": "the lowest cost",
    "exploit": "the cheapest of the replicas that hold most of the prompt",
    "constraint": "the best of those the policy's constraint admits",
    "least_loaded": "the least pending work of those that tie",
    "random": "drawn among those that tie in everything",
}
