"""Policies of one idea each: chance, turns, load, affinity, and affinity within a bound on load."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ...proto.index import ReplicaRef
from .base import Candidate, Candidates, Policy, RoutingRequest
from .shared_prefixes import STRIDE_TOKENS, SharedPrefixes


class Random(Policy):
    """Any replica, with equal chance.

    Formula: uniform. Source: the simplest balancer; a baseline. No parameters.
    """

    name = "random"
    formula = "uniform draw"
    decisive = "drawn"

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return [self._rng.random() for _ in candidates]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {}


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

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        last = self._last
        refs = sorted(candidates.refs)
        start = 0 if last is None else sum(ref <= last for ref in refs)
        turns = {ref: (i - start) % len(refs) for i, ref in enumerate(refs)}
        return [turns[ref] for ref in candidates.refs]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {}

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._last = candidate.ref


class PowerOfTwoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    draws: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 2
    """Replicas drawn per request."""


class PowerOfTwo(Policy):
    """The less pending of two replicas drawn at random.

    Formula: argmin pending over `draws` distinct replicas drawn uniformly. Needs no exact load to avoid the herd that
    least-loaded causes with stale figures. Source: Mitzenmacher, "The power of two choices" (2001). Default draws 2.
    """

    name = "power_of_two"
    formula = "argmin pending over a random sample of `draws`"
    decisive = "idlest"
    Parameters = PowerOfTwoParameters

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return candidates.pending

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        assert isinstance(self.parameters, PowerOfTwoParameters)
        drawn = set(self._rng.sample(range(len(candidates)), min(self.parameters.draws, len(candidates))))
        return [i in drawn for i in range(len(candidates))]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {"pending_requests": candidate.pending, "reserved_tokens": candidate.reserved_tokens}


class LeastLoaded(Policy):
    """The least pending work, whatever the caches hold.

    Formula: argmin pending requests; ties by uncached tokens still to be computed, then at random. Source: "least
    outstanding requests" of ordinary load balancers. No parameters.
    """

    name = "least_loaded"
    formula = "argmin pending"
    decisive = "idlest"

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return candidates.pending

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {"pending_requests": candidate.pending, "reserved_tokens": candidate.reserved_tokens}


class AffinityOnly(Policy):
    """The deepest match, whatever the load. A baseline: hot prefixes pile up on one replica.

    Formula: argmax reusable_tokens; ties by pending work, then at random. Source: prefix-aware routing at its
    simplest. No parameters.
    """

    name = "affinity_only"
    formula = "argmax reusable_tokens"
    decisive = "deepest"

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return [-tokens for tokens in candidates.reusable]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
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

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return [-tokens for tokens in candidates.reusable]

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        return _within(candidates.pending, self._max_skew)

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {
            "reusable_tokens": candidate.reusable_tokens,
            "pending_requests": candidate.pending,
            "reserved_tokens": candidate.reserved_tokens,
        }


def _within(pending: Sequence[int], max_skew: int) -> list[bool]:
    most = min(pending) + max_skew
    return [p <= most for p in pending]


class SessionAffinityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_skew: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1_000_000
    """As in hybrid: a session's replica further ahead in pending work is passed over for its next choice."""


class SessionAffinity(Policy):
    """Every request of a session on the same replica, without any memory of sessions.

    Formula: argmax hash(session, replica), rendezvous hashing: when a replica leaves, only its own sessions move. A
    request without a session goes to the least pending replica. Source: Thaler and Ravishankar (1998); what sticky
    cookies of HTTP balancers do. Default max_skew 1,000,000: never passed over.
    """

    name = "session_affinity"
    formula = "argmax hash(session, replica) where pending <= min(pending) + max_skew"
    decisive = "session"
    Parameters = SessionAffinityParameters

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        if request.session is None:
            return candidates.pending
        return [-_rendezvous(request.session, ref) for ref in candidates.refs]

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        assert isinstance(self.parameters, SessionAffinityParameters)
        return _within(candidates.pending, self.parameters.max_skew)

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {"has_session": float(request.session is not None), "pending_requests": candidate.pending}


def _rendezvous(session: str, ref: ReplicaRef) -> float:
    digest = hashlib.blake2b(f"{ref}\0{session}".encode(), digest_size=6).digest()
    return float(int.from_bytes(digest, "big"))


class Sticky(Policy):
    """The longest prefix; among equals, and for what nobody holds, the least uncached work pending.

    Formula: argmax of reusable_tokens beyond what many conversations share (shared_prefixes.py), then argmin
    reserved_tokens, then argmin pending. Without the exemption all conversations that begin with one system prompt
    end on the replica that computed it first. Source: what a careful operator configures by hand; the strongest of
    the simple policies. Defaults as priced_delay's.
    """

    name = "sticky"
    formula = "argmax reusable_tokens beyond shared prefixes, then argmin reserved_tokens"
    decisive = "deepest"

    class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        shared_branches: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
        shared_window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, Sticky.Parameters)
        self._shared = SharedPrefixes(branches=parameters.shared_branches, window_s=parameters.shared_window_s)
        self._shared_tokens = 0

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        shared = self._shared.shared_blocks(request.chain, request.now) * request.chain.block_size
        self._shared_tokens = shared
        # One number for both criteria: a token of prefix outweighs any amount of pending work.
        most = 1.0 + max(candidates.tokens)
        least = shared + STRIDE_TOKENS  # what is shared is known no better than that
        return [
            pending / most - (reusable if reusable >= least or not shared else shared)
            for pending, reusable in zip(candidates.tokens, candidates.reusable, strict=True)
        ]

    def evidence(self) -> int:
        return self._shared_tokens

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        return {
            "reusable_tokens": candidate.reusable_tokens,
            "shared_tokens": evidence,
            "reserved_tokens": candidate.reserved_tokens,
        }

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._shared.saw(request.chain, request.now)
