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
from typing import Annotated

import msgspec

from .base import Candidate, Policy, RoutingRequest, Speed
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
        self._shared_tokens = 0
        self._deepest = 0

    def costs(self, candidates: Sequence[Candidate], request: RoutingRequest) -> Sequence[float]:
        self._observe(candidates, request.now)
        chain = request.chain
        shared = self._shared_tokens = self._shared.shared_blocks(chain, request.now) * chain.block_size
        price = self._weight - 1.0
        prompt = request.prompt_tokens
        slowdown, stall = self._p.decode_factor * request.expected_output_tokens, self._p.stall_factor
        self._deepest = max(c.reusable_tokens for c in candidates)
        costs: list[float] = []
        speed: Speed | None = None
        per_token = per_sequence = 0.0
        for c in candidates:
            if c.speed is not speed:
                speed = c.speed
                chunk = speed.chunk_tokens
                per_token = 1.0 / speed.prefill_tokens_per_s
                per_step, per_sequence = speed.step_s / chunk, speed.sequence_step_s / chunk
                slow = speed.sequence_step_s * slowdown
                simple = not speed.transfer_tokens_per_s
            reusable = c.reusable_tokens
            pending, engine = c.reserved_requests, c.load
            decoding = pending - c.reserved_prefills
            if engine is not None and engine.running + engine.waiting > pending:
                pending = engine.running + engine.waiting
            uncached = prompt - reusable
            delay = (c.reserved_tokens + uncached) * (per_token + per_step + per_sequence * decoding)
            if reusable < shared:
                reusable = shared
            cost = delay + price * (prompt - reusable) * per_token + slow * pending
            if stall:
                cost += stall * uncached * per_token * pending
            if not simple or c.tiers[0] != c.matched_blocks:
                cost += self._moving(c, request)
            costs.append(cost)
        return costs

    def _moving(self, c: Candidate, request: RoutingRequest) -> float:
        """Seconds for bringing KV up from slower tiers, less what fetching it from another replica saves."""
        speed, size = c.speed, c.block_size
        _, cpu, storage = c.tiers
        moved = size * (cpu / speed.cpu_tokens_per_s + storage / speed.storage_tokens_per_s)
        if speed.transfer_tokens_per_s:
            computed = 1.0 / speed.prefill_tokens_per_s
            fetched = 1.0 / speed.transfer_tokens_per_s
            # A copy made by a transfer still takes room, but no prefill: the price falls with the delay.
            elsewhere = max(0, self._deepest - c.reusable_tokens)
            moved -= self._weight * elsewhere * max(0.0, computed - fetched)
        return moved

    def _observe(self, candidates: Sequence[Candidate], now: float) -> None:
        busy = sum(1 for c in candidates if c.reserved_prefills) / len(candidates)
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

    def terms(self, candidate: Candidate, request: RoutingRequest) -> dict[str, float]:
        speed, uncached = candidate.speed, request.prompt_tokens - candidate.reusable_tokens
        per_token = (
            1.0 / speed.prefill_tokens_per_s
            + (speed.step_s + speed.sequence_step_s * candidate.decoding) / speed.chunk_tokens
        )
        private = request.prompt_tokens - max(candidate.reusable_tokens, self._shared_tokens)
        slowdown = self._p.decode_factor * request.expected_output_tokens * speed.sequence_step_s
        return {
            "reusable_tokens": candidate.reusable_tokens,
            "uncached_tokens": uncached,
            "reserved_tokens": candidate.reserved_tokens,
            "decoding": candidate.decoding,
            "pending_requests": candidate.pending,
            "weight": self._weight,
            "busy_share": self._busy,
            "shared_tokens": self._shared_tokens,
            "queue_s": candidate.reserved_tokens * per_token,
            "prefill_s": uncached * per_token,
            "price_s": (self._weight - 1.0) * private / speed.prefill_tokens_per_s,
            "moving_s": self._moving(candidate, request),
            "slowdown_s": slowdown * candidate.pending,
            "stall_s": self._p.stall_factor * uncached / speed.prefill_tokens_per_s * candidate.pending,
        }

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._shared.saw(request.chain, request.now)
