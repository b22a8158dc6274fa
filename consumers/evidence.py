"""Why a block is, or is not, in a replica's index: what a consumer can tell about single blocks when asked.

The inventory knows what is held and what is detached. What it cannot know is what it no longer has; so `Departures`
remembers, for a bounded number of blocks, with which batch they left the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from ..proto.api import BlockEvidence
from ..proto.hashing import BlockKey, block_key
from ..proto.index import TierMask
from .inventory import Delta, Inventory, Node

DEFAULT_REMEMBERED: Final = 65_536


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
        left = self._left
        if delta.reset:
            left.clear()
            self.emptied = Departure(seq, ts)
        for write in delta.writes:
            if not write.tiers:
                left.pop(write.key, None)
                left[write.key] = Departure(seq, ts)
        while len(left) > self._most:
            left.popitem(last=False)

    def of(self, key: BlockKey) -> Departure | None:
        """When this block last left; None if it never did, as far as is remembered."""
        return self._left.get(key)


def evidence(inventory: Inventory, departures: Departures, keys: Sequence[BlockKey]) -> list[BlockEvidence]:
    """What is known of each of these index blocks. Linear in the inventory if anything is detached."""
    found = inventory.find(keys)
    return [_evidence(key, found.get(key, ()), departures) for key in keys]


def _evidence(key: BlockKey, nodes: Sequence[Node], departures: Departures) -> BlockEvidence:
    left = departures.of(key)
    seq, ts = (None, None) if left is None else (left.seq, left.ts)
    tiers = 0
    for node in nodes:
        tiers |= node.mask
    known = BlockEvidence(
        key=key.hex(),
        state="unknown",
        tiers=TierMask(tiers),
        branches=sum(len(node.children or ()) for node in nodes),
        left_seq=seq,
        left_ts=ts,
    )
    if tiers:
        return msgspec.structs.replace(known, state="attached")
    held = [node for node in nodes if node.tiers]
    if any(node.opaque for node in held):
        return msgspec.structs.replace(known, state="hidden")
    if held:
        missing = _missing(held[0])
        gone = None if missing is None else departures.of(missing)
        return msgspec.structs.replace(
            known,
            state="detached",
            missing=None if missing is None else missing.hex(),
            missing_left_seq=None if gone is None else gone.seq,
        )
    return known if left is None else msgspec.structs.replace(known, state="left")


def _missing(node: Node) -> BlockKey | None:
    """The nearest index block above a detached node that is not held; None if its name is not known."""
    at = node.parent
    while at is not None:
        if not at.tiers:
            return at.keys[-1] if at.keys else None if at.digest is None else block_key(at.digest)
        at = at.parent
    return None
