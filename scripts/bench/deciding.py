"""What a decision costs beyond the match: candidates put together, and the default policy's choice among them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from ...indexer.lineup import Lineup
from ...indexer.load import Learned, LocalReservations
from ...indexer.placement import Placements
from ...indexer.policies import DEFAULT_POLICY, Decision, RoutingRequest, make_policy
from ...proto.hashing import Chain, Namespace
from ...proto.index import Depth, Incarnation, Load, ReplicaRef, ReplicaSpec, ReplicaStatus, ReplicaView
from .measure import BLOCK_SIZE, Figure, median_us, prompt

CANDIDATES: Final = 64
_BLOCKS: Final = 500
_TIMES: Final = 2000


async def deciding(rng: random.Random) -> list[Figure]:
    """A fleet nobody uses, and one at work: everybody holds a part of the prompt, has requests pending and others on
    their way, reports load, and has a speed of its own."""
    figures = []
    for what, busy in (("idle, nobody holds it", False), ("busy, all hold a part", True)):
        decide = await _decision(rng, busy)
        figures.append(
            Figure(f"decide among {CANDIDATES}, {what}", "request", median_us(decide, _TIMES), target="50 µs")
        )
    return figures


async def _decision(rng: random.Random, busy: bool) -> Callable[[], Decision]:
    space = Namespace(model="bench")
    status = ReplicaStatus(load=Load(running=3, waiting=1) if busy else None)
    refs = [ReplicaRef(f"r{i:02}") for i in range(CANDIDATES)]
    views = [
        ReplicaView(spec=ReplicaSpec(ref=ref, engine="vllm"), incarnation=Incarnation(i), live=True, status=status)
        for i, ref in enumerate(refs)
    ]
    reservations, placements, learned = LocalReservations(), Placements(), Learned()
    depths: dict[Incarnation, Depth] = {}
    for i, ref in enumerate(refs if busy else ()):
        incarnation, blocks = Incarnation(i), rng.randrange(1, _BLOCKS)
        depths[incarnation] = Depth(blocks, (blocks, 0, 0))
        for _ in range(4):
            await reservations.add(ref, predicted_tokens=0, uncached_tokens=rng.randrange(8000))
        other = Chain(space.root, BLOCK_SIZE, prompt(rng, _BLOCKS))
        placements.sent(ref.replica, incarnation, other.keys(_BLOCKS), 0, 0.0)
        learned.routed(ref.replica, ref, tokens=8000 + i, decoding=3, now=0.0)
        learned.first_token(ref.replica, 1.0)
    tokens = prompt(rng, _BLOCKS)
    chain = Chain(space.root, BLOCK_SIZE, tokens)
    chain.keys(_BLOCKS)  # as the match did
    lineup, policy = Lineup(views, BLOCK_SIZE), make_policy(DEFAULT_POLICY, {}, rng)
    request = RoutingRequest(prompt_tokens=len(tokens), chain=chain)

    def decide() -> Decision:
        candidates = lineup.candidates(
            depths, chain, len(tokens), placements=placements, reservations=reservations, learned=learned
        )
        return policy.choose(candidates, request)

    return decide
