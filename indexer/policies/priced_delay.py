"""The default policy: time to first token, plus a price on duplicating what is cached elsewhere, plus what it slows.

Strategy. Routing by expected time to first token alone is a trap: whenever the replica that holds a prefix is a
little behind, the prefix is computed again somewhere else, which costs everybody there, evicts something, and puts
the fleet further behind. So uncached tokens count w times, once as delay and w − 1 times as a price, and w rises
with load. A prefix that many conversations share is exempt: it ends up on every replica anyway, and should, before
they pile up on one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from .base import Candidate, Candidates, Policy, RoutingRequest
from .shared_prefixes import SharedPrefixes

Factor = Annotated[float, msgspec.Meta(ge=0, le=1000)]


class PricedDelayParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base_weight: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 5.0
    """w of an idle fleet: what an uncached token counts, against 1 for its delay alone."""
    max_weight: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 50.0
    """Bound of w under load. Both weights 1: plain expected time to first token."""
    load_window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 20.0
    """Time constant of the average load that w follows."""
    decode_factor: Factor = 1.0
    """What slowing others' decoding counts, against one's own delay."""
    stall_factor: Factor = 0.0
    """What it counts that sequences wait while a prefill runs. 0.1 lowers end-to-end latency by a few percent at high
    load, and costs as much in time to first token."""
    shared_branches: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """New branches below a prefix, within `shared_window_s`, that make it a shared one."""
    shared_window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0


class _Seen(NamedTuple):
    """What one decision looked at beside its candidates."""

    weight: float
    busy_share: float
    shared_tokens: int
    deepest_tokens: int


class PricedDelay(Policy):
    """Expected time to first token, a price on duplicating private prefixes, and the decode slowdown caused.

    Formula: argmin (pend + u)·s(B) + (w − 1)·u'/rate + load + c·max(inflight, B)·L, with per replica
    u the prompt tokens it would have to compute, pend those of requests routed there without a first token yet,
    B its decoding sequences, inflight all its requests, s(B) = 1/rate + (step + c·B)/chunk seconds per token,
    u' as u, without what is missing of shared prefixes, load the time to bring host and storage hits back,
    L the mean output length lately, w = min(max_weight, base_weight + ρ/(1 − ρ)), ρ the average share of replicas
    with prefill pending. Where KV can be moved between replicas, tokens another candidate holds cost at most their
    transfer. Source: the study behind docs/routing.md. Defaults: see PricedDelayParameters.
    """

    name = "priced_delay"
    formula = "argmin (pend + u)*s(B) + (w - 1)*u'/rate + load + c*max(inflight, B)*L"
    decisive = "cheapest"
    queues = True
    Parameters = PricedDelayParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, PricedDelayParameters)
        self._p = parameters
        self._shared = SharedPrefixes(branches=parameters.shared_branches, window_s=parameters.shared_window_s)
        self._busy = 0.0
        """ρ, as of `_busy_at`."""
        self._busy_at: float | None = None
        self._weight = parameters.base_weight
        self._seen = _Seen(self._weight, 0.0, 0, 0)

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        self._observe(candidates.prefills, request.now)
        chain, p, c = request.chain, self._p, candidates
        shared = self._shared.shared_blocks(chain, request.now) * chain.block_size
        speeds = c.speeds
        moves = any(speeds.transfer)
        deepest = max(c.reusable) if moves else 0
        self._seen = _Seen(self._weight, self._busy, shared, deepest)
        price = self._weight - 1.0
        prompt, slowdown = request.prompt_tokens, p.decode_factor * request.expected_output_tokens
        free = [tokens if tokens > shared else shared for tokens in c.reusable] if shared else c.reusable
        costs = [
            (tokens + prompt - cached) * (token_s + sequence_s * (requests - prefills))
            + price * (prompt - unpriced) * alone_s
            + step_s * slowdown * pending
            for cached, unpriced, tokens, requests, prefills, pending, alone_s, token_s, sequence_s, step_s in zip(
                c.reusable,
                free,
                c.tokens,
                c.requests,
                c.prefills,
                c.pending,
                speeds.token_s,
                speeds.chunk_token_s,
                speeds.chunk_sequence_s,
                speeds.sequence_s,
                strict=True,
            )
        ]
        if p.stall_factor:
            for i, alone_s in enumerate(speeds.token_s):
                costs[i] += p.stall_factor * (prompt - c.reusable[i]) * alone_s * c.pending[i]
        for i in range(len(c)) if moves else c.slower:
            costs[i] += self._moving(c[i], self._seen)
        return costs

    def evidence(self) -> _Seen:
        return self._seen

    @staticmethod
    def _moving(c: Candidate, seen: _Seen) -> float:
        """Seconds for bringing KV up from slower tiers, less what fetching it from another replica saves."""
        speed, size = c.speed, c.block_size
        _, cpu, storage = c.tiers
        moved = size * (cpu / speed.cpu_tokens_per_s + storage / speed.storage_tokens_per_s)
        if speed.transfer_tokens_per_s:
            computed = 1.0 / speed.prefill_tokens_per_s
            fetched = 1.0 / speed.transfer_tokens_per_s
            # A copy made by a transfer still takes room, but no prefill: the price falls with the delay.
            elsewhere = max(0, seen.deepest_tokens - c.reusable_tokens)
            moved -= seen.weight * elsewhere * max(0.0, computed - fetched)
        return moved

    def _observe(self, prefills: Sequence[int], now: float) -> None:
        busy = (len(prefills) - prefills.count(0)) / len(prefills)
        if self._busy_at is None:
            self._busy = busy
        else:
            self._busy += (busy - self._busy) * -math.expm1((self._busy_at - now) / self._p.load_window_s)
        self._busy_at = now
        p = self._p
        if self._busy >= 1.0:
            self._weight = p.max_weight
        else:
            self._weight = min(p.max_weight, p.base_weight + self._busy / (1.0 - self._busy))

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: _Seen) -> dict[str, float]:
        seconds = candidate.speed.row
        uncached = request.prompt_tokens - candidate.reusable_tokens
        per_token = seconds.chunk_token_s + seconds.chunk_sequence_s * candidate.decoding
        private = request.prompt_tokens - max(candidate.reusable_tokens, evidence.shared_tokens)
        slowdown = self._p.decode_factor * request.expected_output_tokens * seconds.sequence_s
        return {
            "reusable_tokens": candidate.reusable_tokens,
            "uncached_tokens": uncached,
            "reserved_tokens": candidate.reserved_tokens,
            "decoding": candidate.decoding,
            "pending_requests": candidate.pending,
            "weight": evidence.weight,
            "busy_share": evidence.busy_share,
            "shared_tokens": evidence.shared_tokens,
            "queue_s": candidate.reserved_tokens * per_token,
            "prefill_s": uncached * per_token,
            "price_s": (evidence.weight - 1.0) * private * seconds.token_s,
            "moving_s": self._moving(candidate, evidence),
            "slowdown_s": slowdown * candidate.pending,
            "stall_s": self._p.stall_factor * uncached * seconds.token_s * candidate.pending,
        }

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._shared.saw(request.chain, request.now)
