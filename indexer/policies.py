"""Policies: which of these replicas should serve this request?

Strategy. A policy is a pure, synchronous function of what is known about each candidate; state it needs over time
(a turn, an average) is its own, and randomness is injected, so the router and a simulator run the same code. Nearly
every policy in the field is "the cheapest admissible candidate", so a policy here is a class that gives each
candidate a cost and may rule candidates out. The base class does the rest once, for all of them: the cheapest wins,
ties go to the least pending work, then to chance, and every decision can be explained.

To add a policy: subclass `Policy`, document formula, source and defaults, give it a `name`, a `formula`, `Parameters`
and `costs` (and `admissible`), name what they look at in `terms`, and list it in `POLICIES`. Everything else (the
HTTP field, the configuration, validation, metrics, explanations, the simulator) follows from the list.

Units: tokens are prompt tokens, work is counted in requests unless a name says otherwise.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Annotated, ClassVar

import msgspec

from ..proto.api import ExplainedCandidate, Explanation
from ..proto.errors import InvalidField
from ..proto.index import Load, ReplicaRef, State

MAX_EXPLAINED = 64
"""Candidates an explanation lists."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One replica that could serve the request, and what is known about it at this moment."""

    ref: ReplicaRef
    matched_blocks: int = 0
    reusable_tokens: int = 0
    """Prompt tokens it need not compute."""
    tiers: tuple[int, int, int] = (0, 0, 0)
    """Of the matched blocks, how many have their fastest copy in GPU, CPU, STORAGE."""
    block_size: int = 16
    state: State = "exact"
    cause: str = ""
    url: str | None = None
    reserved_requests: int = 0
    """Requests routed there and not known to be over."""
    reserved_tokens: int = 0
    """Uncached prompt tokens of those whose prefill is not known to be done."""
    load: Load | None = None
    """What the engine last said of itself; None while unknown."""

    @property
    def pending(self) -> int:
        """Requests it still has to finish: reservations know the newest, the engine knows other routers' too."""
        load = self.load
        return self.reserved_requests if load is None else max(self.reserved_requests, load.running + load.waiting)


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The request to place, as far as a policy may care."""

    prompt_tokens: int
    max_output_tokens: int | None = None
    priority: int = 0


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate to use, and what decided: a metric label from a small fixed set."""

    candidate: Candidate
    reason: str
    explanation: Explanation | None = None


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has none."""


class Policy(ABC):
    """The cheapest admissible candidate, by the subclass's cost."""

    name: ClassVar[str]
    formula: ClassVar[str]
    """One line, for explanations."""
    decisive: ClassVar[str]
    """Reason label when the cost alone decided; its sentence is in `_WHY`."""
    Parameters: ClassVar[type[msgspec.Struct]] = NoParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        """parameters: an instance of the class's own `Parameters`."""
        self.parameters = parameters
        self._rng = rng

    @abstractmethod
    def costs(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[float]:
        """One cost per candidate, lower is better."""

    def admissible(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[bool]:
        """Which candidates may be used at all: at least one. By default all."""
        return [True] * len(candidates)

    @abstractmethod
    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        """Every quantity costs and constraint look at, by name, for explanations."""

    def chosen(self, candidate: Candidate) -> None:  # noqa: B027 - a hook that most policies do not need
        """Told of each decision; a policy with a memory overrides it."""

    def choose(self, candidates: Sequence[Candidate], request: RoutingRequest, *, explain: bool = False) -> Decision:
        """Pick one of `candidates` (at least one, in any order)."""
        costs = self.costs(candidates, request)
        allowed = self.admissible(candidates, request)
        lowest = min(compress(costs, allowed))
        tied = [c for c, cost, ok in zip(candidates, costs, allowed, strict=True) if ok and cost == lowest]
        if len(candidates) == 1:
            reason = "only_candidate"
        elif len(tied) == 1:
            reason = "constraint" if min(costs) < lowest else self.decisive
        else:
            least = min(map(_load_key, tied))
            tied = [c for c in tied if _load_key(c) == least]
            reason = "least_loaded" if len(tied) == 1 else "random"
        winner = tied[0] if len(tied) == 1 else self._rng.choice(tied)
        explanation = None
        if explain:
            ranked = sorted(zip(candidates, costs, allowed, strict=True), key=_best_first)
            explanation = self._explain(ranked, request, winner, reason)
        self.chosen(winner)
        return Decision(candidate=winner, reason=reason, explanation=explanation)

    def _explain(
        self, ranked: list[tuple[Candidate, float, bool]], request: RoutingRequest, winner: Candidate, reason: str
    ) -> Explanation:
        others = (row for row in ranked if row[0] is not winner)
        alternative, _, allowed = next(others, (None, 0.0, True))
        why = f"{winner.ref}: {_WHY[reason]}"
        if alternative is not None:
            why += f"; {alternative.ref} " + ("comes next" if allowed else "is ruled out by the policy's constraint")
        # The list is bounded, and the winner is always in it: a constraint may have ruled out many cheaper ones.
        listed = ranked[:MAX_EXPLAINED]
        if all(candidate is not winner for candidate, _, _ in listed):
            listed[-1] = next(row for row in ranked if row[0] is winner)
        return Explanation(
            policy=self.name,
            formula=self.formula,
            parameters=msgspec.structs.asdict(self.parameters),
            why=why,
            alternative=None if alternative is None else str(alternative.ref),
            candidates=[
                ExplainedCandidate(
                    replica=candidate.ref.replica,
                    dp_rank=candidate.ref.dp_rank,
                    state=candidate.state,
                    eligible=ok,
                    terms={"cost": cost, **self.terms(candidate, request)},
                )
                for candidate, cost, ok in listed
            ],
            omitted=len(ranked) - len(listed),
        )


def _best_first(row: tuple[Candidate, float, bool]) -> tuple[float, tuple[int, int], ReplicaRef]:
    candidate, cost, _ = row
    return cost, _load_key(candidate), candidate.ref


def _load_key(candidate: Candidate) -> tuple[int, int]:
    return candidate.pending, candidate.reserved_tokens


_WHY = {
    "only_candidate": "the only candidate",
    "turn": "its turn",
    "deepest": "the most reusable tokens",
    "constraint": "the best of those the policy's constraint admits",
    "least_loaded": "the least pending work of those that tie",
    "random": "drawn among those that tie in everything",
}


class RoundRobin(Policy):
    """The next replica by name, regardless of caches and load.

    Formula: the first ref after the last one chosen, cyclically. Stays fair when replicas come and go, unlike a
    counter modulo their number. Source: the load balancers everybody starts from; a baseline. No parameters.
    """

    name = "round_robin"
    formula = "next ref after the last one chosen"
    decisive = "turn"

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        self._last: ReplicaRef | None = None

    def costs(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[float]:
        last = self._last
        refs = sorted(c.ref for c in candidates)
        start = 0 if last is None else sum(ref <= last for ref in refs)
        turns = {ref: (i - start) % len(refs) for i, ref in enumerate(refs)}
        return [turns[c.ref] for c in candidates]

    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        return {}

    def chosen(self, candidate: Candidate) -> None:
        self._last = candidate.ref


class AffinityOnly(Policy):
    """The deepest match, whatever the load. A baseline: hot prefixes pile up on one replica.

    Formula: argmax reusable_tokens; ties by pending work, then at random. Source: prefix-aware routing at its
    simplest. No parameters.
    """

    name = "affinity_only"
    formula = "argmax reusable_tokens"
    decisive = "deepest"

    def costs(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[float]:
        return [-c.reusable_tokens for c in candidates]

    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        return {"reusable_tokens": candidate.reusable_tokens, "pending_requests": candidate.pending}


class HybridParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_skew: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 8
    """Requests a replica may have pending beyond the least pending one and still be chosen for its cache."""


class Hybrid(Policy):
    """The deepest match among replicas that are not too far ahead in pending work.

    Formula: argmax reusable_tokens over {r : pending_r ≤ min pending + max_skew}; ties by pending work, then at
    random. max_skew 0 is least-pending with affinity as the tie-breaker; a large one is affinity_only. Guarantees
    that no choice ever makes a replica more than max_skew + 1 requests busier than the idlest. Source: the bounded
    imbalance rule of cache-aware gateways (SGLang's among them), with the bound per replica instead of switching
    affinity off for the whole fleet. Default max_skew 8.
    """

    name = "hybrid"
    formula = "argmax reusable_tokens where pending <= min(pending) + max_skew"
    decisive = "deepest"
    Parameters = HybridParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, HybridParameters)
        self._max_skew = parameters.max_skew

    def costs(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[float]:
        return [-c.reusable_tokens for c in candidates]

    def admissible(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[bool]:
        pending = [c.pending for c in candidates]
        most = min(pending) + self._max_skew
        return [p <= most for p in pending]

    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        return {
            "reusable_tokens": candidate.reusable_tokens,
            "pending_requests": candidate.pending,
            "reserved_tokens": candidate.reserved_tokens,
        }


POLICIES: Mapping[str, type[Policy]] = {policy.name: policy for policy in (RoundRobin, AffinityOnly, Hybrid)}


def make_policy(name: str, parameters: Mapping[str, object], rng: random.Random, *, field: str = "policy") -> Policy:
    """A policy by name. Raises InvalidField, naming the choices, for an unknown policy or a parameter that does not
    fit; `field` is where the caller said it."""
    kind = POLICIES.get(name)
    if kind is None:
        raise InvalidField("no such policy", field=field, remedy=f"choose one of: {', '.join(POLICIES)}")
    known = kind.Parameters.__struct_fields__
    for parameter in parameters:
        if parameter not in known:
            raise InvalidField(
                f"policy {name} has no such parameter",
                field=f"{field}.{parameter}",
                remedy=f"parameters of {name}: {', '.join(known) or 'none'}",
            )
    for parameter, value in parameters.items():
        try:
            msgspec.convert({parameter: value}, kind.Parameters)
        except msgspec.ValidationError as error:
            problem = str(error).partition(" - at ")[0].replace("`", "")
            raise InvalidField(problem, field=f"{field}.{parameter}", remedy=f"see policy {name}") from None
    return kind(msgspec.convert(dict(parameters), kind.Parameters), rng)
