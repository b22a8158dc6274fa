"""Small cases whose answers are known exactly: they show what a policy does, and prove the simulator's parts.

Each uses the real policies, and caches that hold whole prefixes or blocks (PrefixCache). The tests compare
them with figures worked out by hand; `metatrie simulate --example` prints them.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from ...indexer.memory import MemoryIndex
from ...indexer.placement import Placements
from ...indexer.policies import Candidate, RoutingRequest, make_policy
from ...proto.hashing import BlockKey, Chain, Namespace, PromptExtras
from ...proto.index import BlockWrite, PageHead, ReplicaRef, ReplicaSpec, Tier, TierMask
from .engine import PrefixCache
from .fleet import run_now
from .traces import KnownChain

FROZEN = "AABACABDAACBADABCABA"
"""The frozen trace: one letter per request, naming its prefix."""
LENGTHS = {"A": 1000, "B": 800, "C": 600, "D": 400, "E": 1200}
"""Tokens of each prefix."""
BURST = "E" * 8
"""What the burst appends."""


class Conversation(msgspec.Struct, frozen=True):
    """What a growing conversation can reuse, turn by turn."""

    inputs: tuple[int, ...]
    ideal: tuple[int, ...]
    """Tokens of the turns before that each input repeats."""
    reused: tuple[int, ...]
    """Of those, in full blocks whose KV exists."""

    @property
    def ideal_share(self) -> float:
        return sum(self.ideal) / sum(self.inputs)

    @property
    def fresh(self) -> int:
        """Tokens that must be computed."""
        return sum(self.inputs) - sum(self.reused)


def conversation(
    inputs: Sequence[int] = (400, 700, 1000, 1400, 1700),
    outputs: Sequence[int] = (100, 100, 150, 100),
    block_size: int = 16,
) -> Conversation:
    """Five turns on one replica; each input repeats the last input and the last output.

    The last token of an output was sampled but never fed back, so it has no KV, and a block it would complete is not
    cached.
    """
    cache = PrefixCache(1 << 40, stored=_nothing, removed=_nothing)
    keys = [BlockKey(i.to_bytes(8, "big")) for i in range(max(inputs) // block_size)]
    ideal, reused, before = [], [], 0
    for turn, tokens in enumerate(inputs):
        handle, blocks = cache.lock(keys, (tokens - 1) // block_size)
        ideal.append(before)
        reused.append(blocks * block_size)
        before = tokens + outputs[turn] if turn < len(outputs) else tokens
        cache.unlock(cache.extend(handle, keys, blocks, (before - 1) // block_size))
    return Conversation(tuple(inputs), tuple(ideal), tuple(reused))


class Placement(msgspec.Struct, frozen=True):
    """What became of a sequence of whole prefixes, spread over replicas by a policy."""

    reused: int
    """Tokens found cached."""
    hits: int
    loads: tuple[int, ...]
    """Requests per replica."""
    skew: int
    """Largest difference of requests between two replicas, at any time."""
    evictions: int
    penalty: int
    """Sum over requests of how many more their replica had than the idlest: the wait a queue would add."""


def families(
    policy: str,
    trace: str = FROZEN,
    *,
    replicas: int = 3,
    capacity: int = 2,
    lengths: Mapping[str, int] = LENGTHS,
    **parameters: int,
) -> Placement:
    """Route prefixes, one by one and none of them ever finishing, to replicas that keep the last `capacity` of them.

    Ties go to the replica that has fewer requests, then to the first by name.
    """
    decide = make_policy(policy, parameters, _First())
    caches: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(replicas)]
    loads = [0] * replicas
    reused = hits = skew = evictions = penalty = 0
    for name in trace:
        tokens = lengths[name]
        candidates = [
            Candidate(
                ref=ReplicaRef(f"r{i}"),
                matched_blocks=tokens if name in cache else 0,
                reusable_tokens=tokens if name in cache else 0,
                block_size=1,
                reserved_requests=load,
            )
            for i, (cache, load) in enumerate(zip(caches, loads, strict=True))
        ]
        request = RoutingRequest(prompt_tokens=tokens + 1)
        chosen = int(decide.choose(candidates, request).candidate.ref.replica[1:])
        penalty += loads[chosen] - min(loads)
        loads[chosen] += 1
        skew = max(skew, max(loads) - min(loads))
        cache = caches[chosen]
        if name in cache:
            cache.move_to_end(name)
            reused += tokens
            hits += 1
        else:
            cache[name] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
                evictions += 1
    return Placement(reused, hits, tuple(loads), skew, evictions, penalty)


class _First(random.Random):
    """Draws the first of any sequence: worked examples break ties by name."""

    def choice(self, seq: Sequence[int]) -> int:  # type: ignore[override]  # what a policy draws are positions
        return min(seq)


def universal(policy: str, *, requests: int = 50, replicas: int = 5, tokens: int = 200) -> Placement:
    """One prefix that every request has. Spreading it costs one computation per replica, once, and nothing after."""
    return families(policy, "U" * requests, replicas=replicas, capacity=1, lengths={"U": tokens})


def cross_tenant(*, salted: bool, secret: bytes = b"example") -> bool:
    """Does one tenant's prompt match what another's put into the cache?"""
    namespace = Namespace(model="example")
    index = MemoryIndex(namespace)
    prompt = list(range(64))

    def chain(tenant: str) -> Chain:
        salt = hashlib.blake2b(tenant.encode(), key=secret).hexdigest() if salted else None
        return Chain(namespace.root, namespace.block_size, prompt, PromptExtras(cache_salt=salt))

    spec = ReplicaSpec(ref=ReplicaRef("r0"), engine="example")
    claim = run_now(index.claim(spec, owner="example", lease_s=60, activate=True))
    keys = chain("one").keys(4)
    held = TierMask(1 << Tier.GPU)
    writes = [BlockWrite(key, keys[i - 1] if i else None, PageHead(keys[0]), i, held) for i, key in enumerate(keys)]
    run_now(index.write(claim.incarnation, 1, writes))
    return bool(run_now(index.match(chain("two"))).depths)


def pile_up(
    policy: str,
    prefix_blocks: int,
    *,
    requests: int = 200,
    replicas: int = 8,
    tail_blocks: int = 4,
    block_size: int = 16,
) -> int:
    """Most requests on one replica when `requests` with one hot prefix, held by one replica, arrive at once and none
    has finished. Speculative placement counts; every request has a tail of its own."""
    decide = make_policy(policy, {}, random.Random(1))
    refs = [ReplicaRef(f"r{i}") for i in range(replicas)]
    namespace = Namespace(model="example", block_size=block_size)
    index = MemoryIndex(namespace)
    incarnations = [
        run_now(index.claim(ReplicaSpec(ref=r, engine="example"), owner="e", lease_s=60, activate=True)).incarnation
        for r in refs
    ]
    prefix = [BlockKey(i.to_bytes(8, "big")) for i in range(prefix_blocks)]
    placements = Placements()
    loads: Counter[ReplicaRef] = Counter()
    tokens: Counter[ReplicaRef] = Counter()
    for number in range(requests):
        tail = [BlockKey(b"\1" + (number * tail_blocks + i).to_bytes(7, "big")) for i in range(tail_blocks)]
        keys = prefix + tail
        prompt = len(keys) * block_size + 1
        candidates = []
        known = [prefix_blocks if ref == refs[0] else 0 for ref in refs]
        placements.deepen(incarnations, keys, known)
        for ref, held in zip(refs, known, strict=True):
            candidates.append(
                Candidate(
                    ref=ref,
                    matched_blocks=held,
                    reusable_tokens=held * block_size,
                    block_size=block_size,
                    reserved_requests=loads[ref],
                    reserved_prefills=loads[ref],
                    reserved_tokens=tokens[ref],
                )
            )
        request = RoutingRequest(prompt_tokens=prompt, chain=KnownChain(block_size, keys), now=0.01 * number)
        chosen = decide.choose(candidates, request).candidate
        indexed = prefix_blocks if chosen.ref == refs[0] else 0
        placements.sent(str(number), incarnations[refs.index(chosen.ref)], keys, indexed, request.now)
        loads[chosen.ref] += 1
        tokens[chosen.ref] += prompt - chosen.reusable_tokens
    return max(loads.values())


def _nothing(keys: Sequence[BlockKey], start: int, end: int) -> None:
    pass
