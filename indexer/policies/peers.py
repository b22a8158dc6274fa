"""The choices other systems make, as policies of ours: what to compare with, and to migrate from.

Each follows the published rule with its published defaults. Where a system infers cache contents from its own routing
history instead of events, so does its policy here: `History` is that inference, bounded and forgetting the oldest.
Units differ by system and are kept: llm-d and Ray Serve count requests, Dynamo blocks, Preble and DualMap seconds.
"""

from __future__ import annotations

import hashlib
import random
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from ...proto.hashing import BlockKey
from ...proto.index import Load, ReplicaRef
from .base import Candidate, Candidates, Policy, RoutingRequest, Speed
from .shared_prefixes import SharedPrefixes

Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]


class History:
    """What a router infers without events: a prefix it sent to a replica is there until it is the oldest.

    Keeps, per replica, at most `capacity` blocks, least recently sent out first. Not thread-safe.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sent: dict[ReplicaRef, OrderedDict[BlockKey, None]] = {}

    def matched(self, ref: ReplicaRef, keys: Sequence[BlockKey]) -> int:
        """Leading blocks it was sent before."""
        sent = self._sent.get(ref)
        if not sent:
            return 0
        for i, key in enumerate(keys):
            if key not in sent:
                return i
        return len(keys)

    def size(self, ref: ReplicaRef) -> int:
        return len(self._sent.get(ref, ()))

    def send(self, ref: ReplicaRef, keys: Sequence[BlockKey]) -> None:
        sent = self._sent.setdefault(ref, OrderedDict())
        for key in reversed(keys):  # so that the end of a prompt is forgotten before its beginning
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._capacity:
            sent.popitem(last=False)

    def keep(self, refs: set[ReplicaRef]) -> None:
        """Forget replicas that are gone."""
        for ref in self._sent.keys() - refs:
            del self._sent[ref]


class _HistoryPolicy(Policy):
    """Shared by those that route by history: what each candidate is believed to hold, as a share of the prompt."""

    def __init__(self, parameters: msgspec.Struct, rng: random.Random, capacity: int) -> None:
        super().__init__(parameters, rng)
        self._history = History(capacity)
        self._share: dict[ReplicaRef, float] = {}
        self._sizes: dict[ReplicaRef, int] = {}

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        keys = request.chain.keys(request.chain.blocks)
        blocks = max(1, len(keys))
        self._share = {ref: self._history.matched(ref, keys) / blocks for ref in candidates.refs}
        self._sizes = {ref: self._history.size(ref) for ref in candidates.refs}
        return self._rule(candidates)

    def evidence(self) -> tuple[dict[ReplicaRef, float], dict[ReplicaRef, int]]:
        return self._share, self._sizes

    @abstractmethod
    def _rule(self, candidates: Candidates) -> Sequence[float]: ...

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        shares, sizes = evidence
        return {
            "history_share": shares[candidate.ref],
            "history_blocks": sizes[candidate.ref],
            "pending_requests": candidate.pending,
        }

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._history.send(candidate.ref, request.chain.keys(request.chain.blocks))
        if len(self._history._sent) > 2 * len(self._share):
            self._history.keep(set(self._share))


class RayServeParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    match_rate_threshold: Share = 0.1
    """Share of the prompt from which on history decides."""
    imbalanced_threshold: Annotated[float, msgspec.Meta(ge=0)] = float("inf")
    """Difference of queue lengths that switches affinity off."""
    capacity_blocks: Count = 1_000_000
    """Blocks of history per replica."""


class RayServe(_HistoryPolicy):
    """History if it knows enough of the prompt, else the replica that was sent least; power of two as the way out.

    Formula: if max pending − min pending > imbalanced_threshold: power of two choices; else, with m the longest
    history share: argmax share if m ≥ match_rate_threshold, else argmin history size. Source: Ray Serve's
    PrefixCacheAffinityRouter. Defaults 0.1 and infinity, as there.
    """

    name = "ray_serve"
    formula = "argmax history share if >= match_rate_threshold, else argmin history size; p2c when imbalanced"
    decisive = "history"
    Parameters = RayServeParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        assert isinstance(parameters, RayServeParameters)
        super().__init__(parameters, rng, parameters.capacity_blocks)
        self._p = parameters

    def _rule(self, candidates: Candidates) -> Sequence[float]:
        pending = candidates.pending
        if max(pending) - min(pending) > self._p.imbalanced_threshold:
            drawn = set(self._rng.sample(range(len(pending)), min(2, len(pending))))
            return [p if i in drawn else float("inf") for i, p in enumerate(pending)]
        if max(self._share.values()) >= self._p.match_rate_threshold:
            return [-share for share in self._share.values()]
        return list(self._sizes.values())


class SglangGatewayParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cache_threshold: Share = 0.3
    """Share of the prompt above which history decides."""
    balance_abs_threshold: Annotated[int, msgspec.Meta(ge=0)] = 64
    balance_rel_threshold: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """Affinity is off for all while max pending − min pending exceeds the first and max exceeds the second × min."""
    capacity_blocks: Count = 1_000_000


class SglangGateway(_HistoryPolicy):
    """History if it knows enough of the prompt, else the smallest tree; shortest queue while the fleet is imbalanced.

    Formula: if max − min > abs and max > rel · min of pending: argmin pending; else argmax share if above
    cache_threshold, else argmin history size. Source: SGLang's gateway, policy `cache_aware`. Defaults 0.3, 64, 1.5,
    as its command line's.
    """

    name = "sglang_gateway"
    formula = "argmax history share if > cache_threshold, else argmin history size; argmin pending when imbalanced"
    decisive = "history"
    Parameters = SglangGatewayParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        assert isinstance(parameters, SglangGatewayParameters)
        super().__init__(parameters, rng, parameters.capacity_blocks)
        self._p = parameters

    def _rule(self, candidates: Candidates) -> Sequence[float]:
        pending = candidates.pending
        most, least = max(pending), min(pending)
        if most - least > self._p.balance_abs_threshold and most > self._p.balance_rel_threshold * least:
            return pending
        if max(self._share.values()) > self._p.cache_threshold:
            return [-share for share in self._share.values()]
        return list(self._sizes.values())


class WeightedScoreParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix_weight: Weight = 3.0
    queue_weight: Weight = 2.0
    kv_weight: Weight = 2.0
    """Of the prefix, queue and KV usage scorers."""


class WeightedScore(Policy):
    """The highest weighted sum of scores between 0 and 1.

    Formula: argmax prefix_weight · reusable/prompt + queue_weight · (max pending − pending)/(max − min) + kv_weight ·
    (1 − KV usage). A candidate whose engine reported no usage scores 1 there. Source: llm-d's scheduler with precise
    prefix scores. Defaults 3, 2, 2, as its default profile.
    """

    name = "weighted_score"
    formula = "argmax wp*reusable/prompt + wq*(max - pending)/(max - min) + wk*(1 - kv_usage)"
    decisive = "score"
    Parameters = WeightedScoreParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, WeightedScoreParameters)
        self._p = parameters
        self._seen = _Scored(0, 0, {})

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        p, pending = self._p, candidates.pending
        most, least = max(pending), min(pending)
        shares = self._shares(candidates, request)
        self._seen = _Scored(most, least, dict(zip(candidates.refs, shares, strict=True)))
        rows = zip(shares, pending, candidates.roster.loads, strict=True)
        return [
            -(
                p.prefix_weight * share
                + p.queue_weight * _queue_score(most, least, requests)
                + p.kv_weight * _free_share(load)
            )
            for share, requests, load in rows
        ]

    def evidence(self) -> _Scored:
        return self._seen

    def _shares(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        return [tokens / request.prompt_tokens for tokens in candidates.reusable]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: _Scored) -> dict[str, float]:
        return {
            "prefix_score": evidence.shares[candidate.ref],
            "queue_score": _queue_score(evidence.most, evidence.least, candidate.pending),
            "kv_score": _free_share(candidate.load),
            "pending_requests": candidate.pending,
        }


class _Scored(NamedTuple):
    """What one decision compared: pending requests, and shares of the prompt."""

    most: int
    least: int
    shares: dict[ReplicaRef, float]


def _queue_score(most: int, least: int, pending: int) -> float:
    return 1.0 if most == least else (most - pending) / (most - least)


def _free_share(load: Load | None) -> float:
    return 1.0 if load is None else 1.0 - load.kv_usage


class ApproximateScoreParameters(WeightedScoreParameters, frozen=True, forbid_unknown_fields=True):
    capacity_blocks: Count = 31_250
    """Blocks of history per replica."""


class ApproximateScore(WeightedScore):
    """As weighted_score, with the prefix score from routing history.

    Formula: as weighted_score, with history share for reusable/prompt. Source: llm-d's approximate prefix producer.
    Defaults 3, 2, 2 and 31,250 blocks per replica, as there.
    """

    name = "approximate_score"
    formula = "argmax wp*history share + wq*(max - pending)/(max - min) + wk*(1 - kv_usage)"
    Parameters = ApproximateScoreParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, ApproximateScoreParameters)
        self._history = History(parameters.capacity_blocks)

    def _shares(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        keys = request.chain.keys(request.chain.blocks)
        return [self._history.matched(ref, keys) / max(1, len(keys)) for ref in candidates.refs]

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._history.send(candidate.ref, request.chain.keys(request.chain.blocks))


class BlockCostParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefill_scale: Weight = 1.0
    """What a block to be computed counts, against 1 for a block being decoded with."""
    decode_blocks_per_request: Weight = 0.0
    """KV blocks of a decoding sequence; 0: as many as the mean prompt routed lately."""


class BlockCost(Policy):
    """The fewest blocks to compute and to decode with.

    Formula: argmin prefill_scale · (reserved_tokens + prompt − reusable)/block_size + blocks of the sequences that
    decode there, this one included. Source: Dynamo's KV router: potential prefill blocks with overlap credit plus
    potential decode blocks, temperature 0. Default prefill_scale 1; 4 is better on the traces we know.
    """

    name = "block_cost"
    formula = "argmin scale*(reserved_tokens + prompt - reusable)/block_size + decode_blocks"
    decisive = "cheapest"
    Parameters = BlockCostParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, BlockCostParameters)
        self._p = parameters
        self._mean_prompt = 0.0

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        self._mean_prompt += (request.prompt_tokens - self._mean_prompt) / (64 if self._mean_prompt else 1)
        p, mean, prompt = self._p, self._mean_prompt, request.prompt_tokens
        rows = zip(
            candidates.tokens, candidates.reusable, candidates.pending, candidates.roster.block_sizes, strict=True
        )
        return [
            p.prefill_scale * ((tokens + prompt - reusable) / size)
            + (pending * (p.decode_blocks_per_request or mean / size) + prompt / size)
            for tokens, reusable, pending, size in rows
        ]

    def evidence(self) -> float:
        return self._mean_prompt

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: float) -> dict[str, float]:
        c, prompt = candidate, request.prompt_tokens
        each = self._p.decode_blocks_per_request or evidence / c.block_size
        return {
            "prefill_blocks": (c.reserved_tokens + prompt - c.reusable_tokens) / c.block_size,
            "decode_blocks": c.pending * each + prompt / c.block_size,
            "reusable_tokens": c.reusable_tokens,
            "reserved_tokens": c.reserved_tokens,
        }


class DualHashParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    objective_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 5.0
    """Time to first token to be met."""


class DualHash(Policy):
    """Two replicas per prefix, by two hashes; the one with more cached while its delay meets the objective.

    Formula: the candidates are argmax h1(prefix, r) and argmax h2(prefix, r), prefix being the prompt up to the first
    mark below what many conversations share (shared_prefixes.py). Of the two, argmax reusable_tokens if its expected
    time to first token is within objective_s, else argmin expected time to first token. Source: DualMap, dual-hash
    routing with an SLO-aware switch. Default objective_s 5.
    """

    name = "dual_hash"
    formula = "of two hashed replicas: the fuller cache if its TTFT <= objective_s, else the lower TTFT"
    decisive = "deepest"
    Parameters = DualHashParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, DualHashParameters)
        self._p = parameters
        self._shared = SharedPrefixes(branches=8, window_s=60.0)
        self._pair: tuple[ReplicaRef, ReplicaRef] | None = None

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        chain = request.chain
        at = min(chain.blocks, self._shared.shared_blocks(chain, request.now) + max(1, 512 // chain.block_size))
        prefix = chain.keys(at)[at - 1] if at else b""
        refs = candidates.refs
        first = max(refs, key=lambda ref: _hashed(b"1", prefix, ref))
        second = max((r for r in refs if r != first), key=lambda ref: _hashed(b"2", prefix, ref), default=first)
        self._pair = first, second
        pair = [i for i, ref in enumerate(refs) if ref in self._pair]
        fuller = max(pair, key=lambda i: (candidates.reusable[i], -candidates.tokens[i]))
        delays = [
            _delay(pending, request.prompt_tokens - cached, speed)
            for pending, cached, speed in zip(
                candidates.tokens, candidates.reusable, candidates.speeds.speed, strict=True
            )
        ]
        return [-tokens for tokens in candidates.reusable] if delays[fuller] <= self._p.objective_s else delays

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        assert self._pair is not None
        return [ref in self._pair for ref in candidates.refs]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        c = candidate
        delay_s = _delay(c.reserved_tokens, request.prompt_tokens - c.reusable_tokens, c.speed)
        return {"delay_s": delay_s, "reusable_tokens": c.reusable_tokens}

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        self._shared.saw(request.chain, request.now)


def _hashed(salt: bytes, prefix: bytes, ref: ReplicaRef) -> bytes:
    return hashlib.blake2b(prefix + str(ref).encode(), digest_size=8, salt=salt).digest()


def _delay(pending: int, uncached: int, speed: Speed) -> float:
    """Expected time to first token, without what decoding adds."""
    return (pending + uncached) / speed.prefill_tokens_per_s


class ExploitExploreParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 180.0
    """Over which work routed counts as load."""
    imbalance: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 2.0
    """Exploiting stops where the holder's load exceeds this many times the least."""


class ExploitExplore(Policy):
    """Exploit the caches where they hold most of the prompt, else explore for the lowest total cost.

    Formula: if max reusable > prompt − max reusable: argmin load over those that hold it, unless that load exceeds
    `imbalance` × the least; else argmin load + prefill time of what is missing. load is the seconds of work routed to
    the replica within window_s, prefill and decode. Source: Preble's E2 scheduling, without its eviction cost, which
    the study found to make no difference. Defaults 180 s and 2.
    """

    name = "exploit_explore"
    formula = "argmin load of best holders if cached > missing (and not imbalanced), else argmin load + missing/rate"
    decisive = "exploit"
    Parameters = ExploitExploreParameters

    def __init__(self, parameters: msgspec.Struct, rng: random.Random) -> None:
        super().__init__(parameters, rng)
        assert isinstance(parameters, ExploitExploreParameters)
        self._p = parameters
        self._routed: deque[tuple[float, ReplicaRef, float]] = deque()
        """(time, replica, seconds), oldest first."""
        self._loads: Counter[ReplicaRef] = Counter()
        self._seen: dict[ReplicaRef, float] = {}
        self._holders: set[ReplicaRef] | None = None

    def costs(self, candidates: Candidates, request: RoutingRequest) -> Sequence[float]:
        self._forget(request.now - self._p.window_s)
        refs, reusable = candidates.refs, candidates.reusable
        deepest = max(reusable)
        loads = self._seen = {ref: float(self._loads[ref]) for ref in refs}
        self._holders = None
        if 2 * deepest > request.prompt_tokens:
            holders = {ref for ref, tokens in zip(refs, reusable, strict=True) if tokens == deepest}
            if min(loads[ref] for ref in holders) <= self._p.imbalance * max(1.0, min(loads.values())):
                self._holders = holders
        if self._holders is not None:
            return list(loads.values())
        return [
            load + _delay(0, request.prompt_tokens - cached, speed)
            for load, cached, speed in zip(loads.values(), reusable, candidates.speeds.speed, strict=True)
        ]

    def evidence(self) -> tuple[dict[ReplicaRef, float], bool]:
        return self._seen, self._holders is not None

    def _forget(self, until: float) -> None:
        while self._routed and self._routed[0][0] < until:
            _, ref, seconds = self._routed.popleft()
            self._loads[ref] -= seconds  # type: ignore[assignment]  # Counter is typed for ints, and works for floats

    def admissible(self, candidates: Candidates, request: RoutingRequest) -> Sequence[bool] | None:
        return None if self._holders is None else [ref in self._holders for ref in candidates.refs]

    def terms(self, candidate: Candidate, request: RoutingRequest, evidence: Any) -> dict[str, float]:
        loads, exploits = evidence
        return {
            "load_s": loads[candidate.ref],
            "prefill_s": _delay(0, request.prompt_tokens - candidate.reusable_tokens, candidate.speed),
            "exploits": float(exploits),
        }

    def chosen(self, candidate: Candidate, request: RoutingRequest) -> None:
        speed = candidate.speed
        uncached = request.prompt_tokens - candidate.reusable_tokens
        seconds = _delay(0, uncached, speed) + speed.sequence_step_s * request.expected_output_tokens
        self._routed.append((request.now, candidate.ref, seconds))
        self._loads[candidate.ref] += seconds  # type: ignore[assignment]
