"""Why a block is, or is not, in a replica's index: what a consumer can tell about single blocks when asked.

The inventory knows what is held and what is detached. What it cannot know is what it no longer has; so `Departures`
remembers, for a bounded number of blocks, with which batch they left the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from ..proto.api import BlockEvidence, BlocksResponse
from ..proto.hashing import BlockKey, Namespace, block_key
from ..proto.index import THROUGH, ReplicaRef, State, TierMask
from .blocks import Node
from .inventory import Delta, HashMode, Inventory
from .stream import Stream

DEFAULT_REMEMBERED: Final = 65_536
BRANCH_DEPTH: Final = 4
"""Blocks below one in which ways on are counted: two texts that change at one place need not change at one block."""
MAX_BRANCHES: Final = 1000
"""Counted no further than this."""


class Departure(msgspec.Struct, frozen=True, gc=False):
    """When a block left the index."""

    seq: int
    ts: float
    """Engine time of that batch, seconds since 1970."""


class Departures:
    """Blocks that left one replica's index, the newest `most`."""

    def __init__(self, most: int = DEFAULT_REMEMBERED) -> None:
        self._most = most
        self._left: OrderedDict[BlockKey, Departure] = OrderedDict()
        self.emptied: Departure | None = None
        """When everything went at once, by a clear or a restart of the engine."""

    def note(self, delta: Delta, seq: int, ts: float) -> None:
        """What a batch changed."""
        left, departure = self._left, Departure(seq, ts)
        if delta.reset:
            left.clear()
            self.emptied = departure
        for key in delta.writes.gone():
            left[key] = departure
            left.move_to_end(key)
        while len(left) > self._most:
            left.popitem(last=False)

    def of(self, key: BlockKey) -> Departure | None:
        """When this block last left; None if it never did, as far as is remembered."""
        return self._left.get(key)


def evidence(
    keys: Sequence[BlockKey],
    inventory: Inventory,
    departures: Departures,
    stream: Stream,
    *,
    ref: ReplicaRef,
    namespace: Namespace,
    hash_mode: HashMode,
    state: State,
    cause: str,
) -> BlocksResponse:
    """What one replica's consumer knows of each of these index blocks, and of its own view as a whole.

    Linear in the inventory if anything is detached.
    """
    found = inventory.find(keys)
    emptied = departures.emptied
    return BlocksResponse(
        replica=ref.replica,
        dp_rank=ref.dp_rank,
        namespace=namespace,
        state=state,
        cause=cause,
        next_seq=stream.expected,
        hash_mode=hash_mode,
        parity=inventory.parity,
        parity_bad=inventory.stats.parity_bad,
        detached=inventory.detached,
        unhashable=inventory.stats.unhashable,
        emptied_seq=None if emptied is None else emptied.seq,
        blocks=[
            _evidence(key, found.get(key, ()), departures, through=bool(inventory.tiers(key) & THROUGH))
            for key in keys
        ],
    )


def _evidence(key: BlockKey, nodes: Sequence[Node], departures: Departures, *, through: bool) -> BlockEvidence:
    left = departures.of(key)
    seq, ts = (None, None) if left is None else (left.seq, left.ts)
    tiers = 0
    for node in nodes:
        tiers |= node.mask & ~THROUGH
    known = BlockEvidence(
        key=key.hex(),
        state="unknown",
        tiers=TierMask(tiers),
        through=through,
        branches=_branches(nodes),
        left_seq=seq,
        left_ts=ts,
    )
    if tiers:
        return msgspec.structs.replace(known, state="attached")
    held = [node for node in nodes if node.tiers]
    if any(node.opaque for node in held):
        return msgspec.structs.replace(known, state="hidden")
    if held:
        missing = missing_above(held[0])
        gone = None if missing is None else departures.of(missing)
        return msgspec.structs.replace(
            known,
            state="detached",
            missing=None if missing is None else missing.hex(),
            missing_left_seq=None if gone is None else gone.seq,
        )
    return known if left is None else msgspec.structs.replace(known, state="left")


def _branches(nodes: Sequence[Node]) -> int:
    """The most different blocks known at one of the next few places below."""
    widest, level = 0, list(nodes)
    for _ in range(BRANCH_DEPTH):
        level = [child for node in level for child in node.children or ()]
        if not level or len(level) > MAX_BRANCHES:
            return max(widest, min(len(level), MAX_BRANCHES))
        widest = max(widest, len(level))
    return widest


def missing_above(node: Node) -> BlockKey | None:
    """The nearest index block above a detached node that is not held; None if its name is not known."""
    at = node.parent
    while at is not None:
        if not at.tiers:
            return at.keys[-1] if at.keys else None if at.digest is None else block_key(at.digest)
        at = at.parent
    return None
