"""What every policy is made of: what it is told, what it must say, and how a decision follows from that.

Strategy. A policy is synchronous and sees only what it is given; state it needs over time (a turn, an average, a
history) is its own, time comes with each request, and randomness is injected, so the router and the simulator run
the same code. Nearly every policy in the field is "the cheapest admissible candidate", so a policy here is a class
that gives each candidate a cost and may rule candidates out. The base class does the rest once, for all of them: the
cheapest wins, ties go to the least pending work, then to chance, and every decision can be explained.

To add a policy: subclass `Policy`, document formula, source and defaults, give it a `name`, a `formula`, `Parameters`
and `costs` (and `admissible`), name what they look at in `terms`, and list it in the package's `POLICIES`. Everything
else (the HTTP field, the configuration, validation, metrics, explanations, the simulator) follows from the list.

Units: tokens are prompt tokens, times are seconds, work is counted in requests unless a name says otherwise.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import compress
from typing import ClassVar

import msgspec

from ...proto.api import ExplainedCandidate, Explanation
from ...proto.hashing import Chain, none_hash
from ...proto.index import Load, ReplicaRef, State

MAX_EXPLAINED = 64
"""Candidates an explanation lists."""
NO_CHAIN = Chain(none_hash(""), 1, ())
"""Of a prompt whose blocks are not known."""


class Speed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
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
        """One cost per candidate, lower is better. Called once per decision, before `admissible` and `terms`."""

    def admissible(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[bool] | None:
        """Which candidates may be used at all: at least one. None, the default: all."""
        return None

    @abstractmethod
    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        """Every quantity costs and constraint looked at in this decision, by name, for explanations."""

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:  # noqa: B027 - most need no memory
        """Told of each decision; a policy with a memory overrides it."""

    def choose(
        self,
        candidates: Sequence[Candidate],
        request: RoutingRequest,
        *,
        explain: bool = False,
        listed: int = MAX_EXPLAINED,
        dry: bool = False,
    ) -> Decision:
        """Pick one of `candidates` (at least one, in any order).

        listed: candidates an explanation lists, at least one. dry: try only; the policy does not remember the choice.
        """
        costs = self.costs(candidates, request)
        allowed = self.admissible(candidates, request)
        lowest = min(costs) if allowed is None else min(compress(costs, allowed))
        if allowed is None:
            tied = [c for c, cost in zip(candidates, costs, strict=True) if cost == lowest]
        else:
            tied = [c for c, cost, ok in zip(candidates, costs, allowed, strict=True) if ok and cost == lowest]
        if len(candidates) == 1:
            reason = "only_candidate"
        elif len(tied) == 1:
            reason = "constraint" if allowed is not None and min(costs) < lowest else self.decisive
        else:
            least = min(map(load_key, tied))
            tied = [c for c in tied if load_key(c) == least]
            reason = "least_loaded" if len(tied) == 1 else "random"
        winner = tied[0] if len(tied) == 1 else self._rng.choice(tied)
        explanation = None
        if explain:
            admitted = [True] * len(candidates) if allowed is None else allowed
            # Two at least, since the best of the others is named; those that tie with the last, since load decides.
            limit = heapq.nsmallest(max(listed, 2), costs)[-1]
            ranked = sorted(
                (row for row in zip(candidates, costs, admitted, strict=True) if row[1] <= limit or row[0] is winner),
                key=_best_first,
            )
            explanation = self._explain(ranked, len(candidates), listed, request, winner, reason)
        if not dry:
            self.chosen(winner, request)
        return Decision(candidate=winner, reason=reason, explanation=explanation)

    def _explain(
        self,
        ranked: list[tuple[Candidate, float, bool]],
        total: int,
        most: int,
        request: RoutingRequest,
        winner: Candidate,
        reason: str,
    ) -> Explanation:
        others = (row for row in ranked if row[0] is not winner)
        alternative, _, allowed = next(others, (None, 0.0, True))
        why = f"{winner.ref}: {_WHY[reason]}"
        if alternative is not None:
            why += f"; {alternative.ref} " + ("comes next" if allowed else "is ruled out by the policy's constraint")
        # The list is bounded, and the winner is always in it: a constraint may have ruled out many cheaper ones.
        listed = ranked[:most]
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
            omitted=total - len(listed),
        )


def _best_first(row: tuple[Candidate, float, bool]) -> tuple[float, tuple[int, int], ReplicaRef]:
    candidate, cost, _ = row
    return cost, load_key(candidate), candidate.ref


def load_key(candidate: Candidate) -> tuple[int, int]:
    """Pending work, requests first: smaller is idler."""
    return candidate.pending, candidate.reserved_tokens


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
