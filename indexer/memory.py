"""The index in one process's memory: reference semantics for the Redis backend, and the store of a single machine.

Strategy. Every incarnation that wrote something owns one bit. `_masks` maps a block key to the bits of those that
hold it in any tier, so a lookup is one AND per probed block whatever the size of fleet and index. Tiers live with
the incarnation, per page, and are read only where the fastest tier of its blocks ever differed.

Invariants. A key is in `_masks` exactly while some incarnation holds it, and a bit is set in it exactly while that
incarnation's page lists the key. A bit is reused only after the sweeper cleared it everywhere. Every method runs
to its end without awaiting, so readers see whole calls; within a page they rely on prefix closure (a holder of a
page's first and last probed block holds those between), across pages they AND.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..proto.errors import Superseded
from ..proto.hashing import KEY_BYTES, BlockKey, Chain, Namespace, NamespaceId
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
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaView,
    SweepReport,
    TierMask,
)

_MAX_CHUNK = 16 * PAGE_SPAN
"""Most blocks hashed ahead of what is known to match."""
_MAX_MASKS = 256
"""Sets of holders that queries ended with, kept by their mask; a fleet's worth of pointers each."""
_MAX_EMPTIED = 1024
"""Emptied pages per incarnation whose version is remembered; the oldest is forgotten first."""
_FASTEST = (0, 0, 1, 0, 2, 0, 1, 0)
"""Tier mask → its fastest tier."""
_ONE_TIER = frozenset({1, 2, 4})


@dataclass(slots=True)
class _Page:
    """One incarnation's blocks in one page."""

    version: int
    blocks: dict[BlockKey, TierMask] = field(default_factory=dict)
    fastest: int = 0
    """Bit per tier that was the fastest of some block here since the page was last empty."""


@dataclass(slots=True)
class _Holder:
    """Everything one incarnation holds."""

    incarnation: Incarnation
    bit: int
    pages: dict[PageHead, _Page] = field(default_factory=dict)
    emptied: dict[PageHead, int] = field(default_factory=dict)
    """Newest version seen in pages it has emptied; at most _MAX_EMPTIED."""
    fastest: int = 0
    """As in its pages, over all of them, ever."""
    sparse: bool = False
    """Some block of it was THROUGH, ever."""


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
        self._masks: dict[BlockKey, int] = {}
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
        pages, masks, bit = holder.pages, self._masks, holder.bit
        vacating: set[PageHead] = set()
        for head, entries in PackedWrites.of(blocks).by_page():
            page = pages.get(head) or self._page(holder, head)
            if version < page.version:
                vacating.add(head)
                continue
            page.version = version
            for at in range(0, len(entries), KEY_BYTES + 1):
                key, tiers = BlockKey(entries[at : at + KEY_BYTES]), TierMask(entries[at + KEY_BYTES])
                if tiers in _ONE_TIER:  # as `_set` would, for what nearly every block of a fleet is
                    page.blocks[key] = tiers
                    page.fastest |= tiers
                    holder.fastest |= tiers
                    masks[key] = masks.get(key, 0) | bit
                else:
                    self._set(holder, page, key, tiers)
                    vacating.add(head)
        self._forget_empty(holder, vacating)

    async def refresh(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> int:
        holder = self._holder(incarnation)
        wanted: dict[PageHead, dict[BlockKey, TierMask]] = {}
        for block in blocks:
            wanted.setdefault(block.head, {})[block.key] = block.tiers
        wrong = 0
        for head, content in wanted.items():
            page = self._page(holder, head)
            if version < page.version:
                continue
            page.version = version
            for key in [key for key in page.blocks if key not in content]:
                self._set(holder, page, key, TierMask(0))
                wrong += 1
            for key, tiers in content.items():
                if page.blocks.get(key, 0) != tiers:
                    self._set(holder, page, key, tiers)
                    wrong += 1
        self._forget_empty(holder, wanted)
        return wrong

    def _holder(self, incarnation: Incarnation) -> _Holder:
        holder = self._holders.get(incarnation)
        if holder is None:
            try:
                slot = self._by_slot.index(None)
            except ValueError:
                slot = len(self._by_slot)
                self._by_slot.append(None)
            holder = self._by_slot[slot] = self._holders[incarnation] = _Holder(incarnation, 1 << slot)
            self._snapshot = None
        return holder

    @staticmethod
    def _page(holder: _Holder, head: PageHead) -> _Page:
        page = holder.pages.get(head)
        if page is None:
            page = holder.pages[head] = _Page(holder.emptied.pop(head, 0))
        return page

    def _set(self, holder: _Holder, page: _Page, key: BlockKey, tiers: TierMask) -> None:
        if tiers:
            page.blocks[key] = tiers
            fastest = tiers & -tiers
            page.fastest |= fastest
            holder.fastest |= fastest
            if tiers & THROUGH:
                holder.sparse = True
            self._masks[key] = self._masks.get(key, 0) | holder.bit
        elif page.blocks.pop(key, None) is not None:
            mask = self._masks[key] & ~holder.bit
            if mask:
                self._masks[key] = mask
            else:
                del self._masks[key]

    @staticmethod
    def _forget_empty(holder: _Holder, heads: set[PageHead] | dict[PageHead, dict[BlockKey, TierMask]]) -> None:
        for head in heads:
            page = holder.pages[head]
            if not page.blocks:
                del holder.pages[head]
                holder.emptied[head] = page.version
        while len(holder.emptied) > _MAX_EMPTIED:
            del holder.emptied[next(iter(holder.emptied))]

    # Reading

    async def match(self, chain: Chain) -> Match:
        return self.match_quickly(chain)

    def match_quickly(self, chain: Chain) -> Match:
        snapshot = self._read_registry()
        alive, total, probe = snapshot.live, chain.blocks, self._masks.get
        ended: list[tuple[int, int]] = []
        """(bits, blocks): those who hold exactly that many leading blocks."""
        keys: Sequence[BlockKey] = ()
        start, ahead = 0, PAGE_SPAN
        while alive and start < total:
            if start >= len(keys):
                keys = chain.keys(start + ahead)
                ahead = min(2 * ahead, _MAX_CHUNK)
            stop = min(start + PAGE_SPAN, total)
            first = probe(keys[start], 0) & alive
            if first != alive:
                ended.append((alive ^ first, start))
                alive = first
            if alive and probe(keys[stop - 1], 0) & alive != alive:
                for depth in range(start + 1, stop):
                    mask = probe(keys[depth], 0) & alive
                    if mask != alive:
                        ended.append((alive ^ mask, depth))
                        alive = mask
            start = stop
        ended.append((alive, total))
        depths: dict[Incarnation, Depth] = {}
        for mask, blocks in ended:
            if blocks:
                alike: dict[int, Depth] = {}
                """By the only tier of its holders."""
                for holder in self._of(mask):
                    if holder.fastest in _ONE_TIER and not holder.sparse:
                        shared = alike.get(holder.fastest)
                        if shared is None:
                            shared = alike[holder.fastest] = Depth(blocks, _tiers(holder, keys, blocks))
                        depths[holder.incarnation] = shared
                    elif usable := _usable(holder, keys, blocks) if holder.sparse else blocks:
                        depths[holder.incarnation] = Depth(usable, _tiers(holder, keys, usable))
        return Match(snapshot.fleet, depths)

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
        found = list(holder.pages.values()) if holder else []
        if pages is not None and pages < len(found):
            found = random.sample(found, pages)
        return {key: tiers for page in found for key, tiers in page.blocks.items()}

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
            while holder.pages and cleaned < pages:
                _, page = holder.pages.popitem()
                for key in list(page.blocks):
                    self._set(holder, page, key, TierMask(0))
                cleaned += 1
            if holder.pages:
                break
            del self._holders[holder.incarnation]
            self._by_slot[holder.bit.bit_length() - 1] = None
            self._behind.clear()
            reclaimed += 1
        return SweepReport(cleaned, reclaimed, len(dead) - reclaimed, tuple(expired))


def _usable(holder: _Holder, keys: Sequence[BlockKey], blocks: int) -> int:
    """The most of the first `blocks` blocks, all held, with which a prompt may end."""
    while blocks:
        page = holder.pages[PageHead(keys[(blocks - 1) // PAGE_SPAN * PAGE_SPAN])].blocks
        if not page[keys[blocks - 1]] & THROUGH:
            break
        blocks -= 1
    return blocks


def _tiers(holder: _Holder, keys: Sequence[BlockKey], blocks: int) -> tuple[int, int, int]:
    """How many of the first `blocks` blocks have their fastest copy in which tier."""
    counts = [0, 0, 0]
    if holder.fastest in _ONE_TIER:
        counts[_FASTEST[holder.fastest]] = blocks
    else:
        for start in range(0, blocks, PAGE_SPAN):
            stop = min(start + PAGE_SPAN, blocks)
            page = holder.pages[PageHead(keys[start])]
            if page.fastest in _ONE_TIER:
                counts[_FASTEST[page.fastest]] += stop - start
            else:
                for key in keys[start:stop]:
                    counts[_FASTEST[page.blocks[key] & ~THROUGH]] += 1
    return counts[0], counts[1], counts[2]


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
