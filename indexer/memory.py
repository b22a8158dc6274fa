"""The index in one process's memory: reference semantics for the Redis backend, and the store of a single machine.

Strategy. Every incarnation that wrote something owns one bit, its slot in `Holdings`, which maps a block to the bits
of those that hold it: a lookup is one AND per probed block whatever the size of fleet and index.

Invariants. A bit is reused only after the sweeper cleared it everywhere. Every method runs to its end without
awaiting, so readers see whole calls; within a page they rely on prefix closure (a holder of a page's first and last
probed block holds those between), across pages they AND.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..proto.errors import Superseded
from ..proto.hashing import BlockKey, Chain, Namespace, NamespaceId
from ..proto.index import (
    PAGE_SPAN,
    THROUGH,
    BlockWrite,
    Claim,
    Depth,
    Fleet,
    Incarnation,
    Match,
    PackedWrites,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaView,
    SweepReport,
    TierMask,
)
from .holdings import FASTEST, ONE_TIER, holdings

_MAX_CHUNK = 16 * PAGE_SPAN
"""Most blocks hashed ahead of what is known to match."""
_MAX_MASKS = 256
"""Sets of holders that queries ended with, kept by their mask; a fleet's worth of pointers each."""


@dataclass(slots=True)
class _Holder:
    """One incarnation that wrote something."""

    incarnation: Incarnation
    slot: int
    bit: int
    fastest: int = 0
    """Bit per tier that was the fastest of some block, ever."""
    sparse: bool = False
    """Some block of it was THROUGH, ever."""

    def saw(self, tiers: int) -> None:
        """As `Holdings` tells what was written."""
        self.fastest |= tiers & ~THROUGH
        if tiers & THROUGH:
            self.sparse = True


@dataclass(slots=True)
class _Record:
    """One replica's registration."""

    spec: ReplicaSpec
    owner: str
    newest: Incarnation
    expires: float
    status: ReplicaStatus
    pointer: Incarnation | None = None
    tombstoned: float | None = None


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The registry as readers see it, until it changes or a lease runs out."""

    fleet: Fleet
    live: int
    """Bits of the live incarnations that hold anything."""
    until: float


class MemoryIndex:
    """The meta-trie and registry of one namespace. Not thread-safe: one event loop."""

    def __init__(self, namespace: Namespace, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never running backwards; leases are judged by it."""
        self._namespace = namespace
        self._clock = clock
        self._records: dict[ReplicaRef, _Record] = {}
        self._last_incarnation = 0
        self._holdings = holdings()
        self._holders: dict[Incarnation, _Holder] = {}
        self._by_slot: list[_Holder | None] = []
        self._behind: dict[int, tuple[_Holder, ...]] = {}
        """The incarnations behind a mask's bits; at most _MAX_MASKS, all dropped at the bound and when a bit's owner
        changes."""
        self._snapshot: _Snapshot | None = None

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    # Registry

    async def claim(self, spec: ReplicaSpec, *, owner: str, lease_s: float, activate: bool) -> Claim:
        now = self._clock()
        record = self._records.get(spec.ref)
        if record and record.owner != owner and record.tombstoned is None and now < record.expires:
            raise Superseded(f"{spec.ref} is leased by another owner", retry_s=record.expires - now)
        self._last_incarnation += 1
        incarnation = Incarnation(self._last_incarnation)
        previous = record.pointer if record else None
        self._records[spec.ref] = _Record(
            spec=spec,
            owner=owner,
            newest=incarnation,
            expires=now + lease_s,
            status=record.status if record and not activate else ReplicaStatus(),
            pointer=incarnation if activate else previous,
        )
        self._snapshot = None
        return Claim(incarnation, previous)

    async def witness(self) -> bytes:
        return b""  # a process forgets everything or nothing

    @property
    def announced(self) -> bool:
        """A replica was claimed here."""
        return self._last_incarnation > 0

    async def activate(self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation) -> None:
        record = self._owned(ref, owner)
        if record.newest != incarnation:
            raise Superseded(f"{ref}: a newer incarnation was claimed")
        record.pointer = incarnation
        self._snapshot = None

    async def renew(
        self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation, status: ReplicaStatus, lease_s: float
    ) -> None:
        record = self._owned(ref, owner)
        if incarnation not in (record.newest, record.pointer):
            raise Superseded(f"{ref}: a newer incarnation was claimed")
        record.status = status
        record.expires = self._clock() + lease_s
        self._snapshot = None

    async def release(self, ref: ReplicaRef, *, owner: str | None) -> bool:
        record = self._records.get(ref)
        if record is None or (owner is not None and record.owner != owner):
            return False
        del self._records[ref]
        self._snapshot = None
        return True

    async def fleet(self) -> Fleet:
        return self._read_registry().fleet

    def _owned(self, ref: ReplicaRef, owner: str) -> _Record:
        record = self._records.get(ref)
        if record is None or record.tombstoned is not None:
            raise Superseded(f"{ref} is no longer registered")
        if record.owner != owner:
            raise Superseded(f"{ref} is owned by somebody else")
        return record

    def _read_registry(self) -> _Snapshot:
        now = self._clock()
        snapshot = self._snapshot
        if snapshot is not None and now < snapshot.until:
            return snapshot
        views, live, until = [], 0, float("inf")
        for _, record in sorted(self._records.items()):
            running = record.tombstoned is None and now < record.expires
            if running:
                until = min(until, record.expires)
                holder = None if record.pointer is None else self._holders.get(record.pointer)
                live |= holder.bit if holder else 0
            views.append(
                ReplicaView(spec=record.spec, incarnation=record.pointer, live=running, status=record.status)
            )
        self._snapshot = _Snapshot(Fleet(tuple(views)), live, until)
        return self._snapshot

    # Writing

    async def write(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> None:
        holder = self._holder(incarnation)
        holder.saw(self._holdings.write(holder.slot, version, PackedWrites.of(blocks).raw))

    async def refresh(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> int:
        holder = self._holder(incarnation)
        wrong, tiers = self._holdings.refresh(holder.slot, version, PackedWrites.of(blocks).raw)
        holder.saw(tiers)
        return wrong

    def _holder(self, incarnation: Incarnation) -> _Holder:
        holder = self._holders.get(incarnation)
        if holder is None:
            try:
                slot = self._by_slot.index(None)
            except ValueError:
                slot = len(self._by_slot)
                self._by_slot.append(None)
            holder = self._by_slot[slot] = self._holders[incarnation] = _Holder(incarnation, slot, 1 << slot)
            self._snapshot = None
        return holder

    # Reading

    async def match(self, chain: Chain) -> Match:
        return self.match_quickly(chain)

    def match_quickly(self, chain: Chain) -> Match:
        snapshot = self._read_registry()
        alive, total, walk = snapshot.live, chain.blocks, self._holdings.walk
        # Most prompts nobody holds part with the first block, which is hashed faster alone than with its page.
        if not total or not self._holdings.mask(chain.first()) & alive:
            return Match(snapshot.fleet, {})
        ended: list[tuple[int, int]] = []
        """(bits, blocks): those who hold exactly that many leading blocks."""
        keys: list[BlockKey] = []
        start, ahead = 0, PAGE_SPAN
        while alive and start < total:
            keys = chain.keys(start + ahead)
            ahead = min(2 * ahead, _MAX_CHUNK)
            stop = min(len(keys) // PAGE_SPAN * PAGE_SPAN if len(keys) < total else total, total)
            left, alive = walk(keys, start, stop, alive)
            ended += left
            start = stop
        ended.append((alive, total))
        depths: dict[Incarnation, Depth] = {}
        for mask, blocks in ended:
            if blocks:
                alike: dict[int, Depth] = {}
                """By the only tier of its holders."""
                for holder in self._of(mask):
                    if holder.fastest in ONE_TIER and not holder.sparse:
                        shared = alike.get(holder.fastest)
                        if shared is None:
                            shared = alike[holder.fastest] = Depth(blocks, self._tiers(holder, keys, blocks))
                        depths[holder.incarnation] = shared
                    elif usable := self._holdings.usable(holder.slot, keys, blocks) if holder.sparse else blocks:
                        depths[holder.incarnation] = Depth(usable, self._tiers(holder, keys, usable))
        return Match(snapshot.fleet, depths)

    def _tiers(self, holder: _Holder, keys: list[BlockKey], blocks: int) -> tuple[int, int, int]:
        """How many of the first `blocks` blocks have their fastest copy in which tier."""
        if holder.fastest not in ONE_TIER:
            return self._holdings.tiers(holder.slot, keys, blocks)
        counts = [0, 0, 0]
        counts[FASTEST[holder.fastest]] = blocks
        return counts[0], counts[1], counts[2]

    def _of(self, mask: int) -> tuple[_Holder, ...]:
        """The incarnations behind a mask's bits."""
        found = self._behind.get(mask)
        if found is None:
            holders, bits = [], mask
            while bits:
                low = bits & -bits
                holder = self._by_slot[low.bit_length() - 1]
                assert holder is not None, "a bit outlived its incarnation"
                holders.append(holder)
                bits ^= low
            if len(self._behind) >= _MAX_MASKS:
                self._behind.clear()
            found = self._behind[mask] = tuple(holders)
        return found

    async def held(self, incarnation: Incarnation, *, pages: int | None = None) -> dict[BlockKey, TierMask]:
        holder = self._holders.get(incarnation)
        heads = self._holdings.heads(holder.slot) if holder else []
        if pages is not None and pages < len(heads):
            heads = random.sample(heads, pages)
        return dict(self._holdings.content(holder.slot, heads)) if holder else {}

    # Sweeping

    async def sweep(self, *, pages: int, grace_s: float) -> SweepReport:
        now = self._clock()
        expired = []
        for ref, record in list(self._records.items()):
            if record.tombstoned is None:
                if now - record.expires > grace_s:
                    record.tombstoned = now
                    record.pointer = None
                    expired.append(ref)
            elif now - record.tombstoned > grace_s:
                del self._records[ref]
                expired.append(ref)
        if expired:
            self._snapshot = None
        named = {i for r in self._records.values() if r.tombstoned is None for i in (r.pointer, r.newest)}
        dead = [holder for incarnation, holder in self._holders.items() if incarnation not in named]
        cleaned = reclaimed = 0
        for holder in dead:
            vacated, empty = self._holdings.vacate(holder.slot, pages - cleaned)
            cleaned += vacated
            if not empty:
                break
            del self._holders[holder.incarnation]
            self._by_slot[holder.slot] = None
            self._behind.clear()
            reclaimed += 1
        return SweepReport(cleaned, reclaimed, len(dead) - reclaimed, tuple(expired))


class MemoryStore:
    """A store that lives and dies with this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._indexes: dict[NamespaceId, MemoryIndex] = {}

    async def open(self, namespace: Namespace) -> MemoryIndex:
        return self._indexes.setdefault(namespace.id, MemoryIndex(namespace, self._clock))

    async def namespaces(self) -> Sequence[Namespace]:
        return [index.namespace for index in self._indexes.values() if index.announced]

    async def ping(self) -> None:
        return None

    async def close(self) -> None:
        return None
