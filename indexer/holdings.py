"""Which blocks the holders of an index in memory have, by block and by page.

A holder is an incarnation, here a *slot*: a small number, whose bit stands for it in the mask of every block it holds
in any tier. Tiers are kept per holder and page, and looked at only where the fastest tier of its blocks ever
differed.

Invariants: a block has a mask exactly while some holder has it, and a bit is set in it exactly while that holder's
page lists the block. Versions: within a page an older version than the newest seen is ignored.

`holdings` gives the native kernel's twin where there is a kernel: the same answers at about 50 bytes an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from ..proto.hashing import KEY_BYTES, BlockKey
from ..proto.index import PAGE_SPAN, THROUGH, PackedWrites, PageHead, TierMask
from ..proto.native import kernel

MAX_EMPTIED: Final = 1024
"""Emptied pages per holder whose version is remembered; the oldest is forgotten first."""
FASTEST: Final = (0, 0, 1, 0, 2, 0, 1, 0)
"""Tier mask → its fastest tier."""
ONE_TIER: Final = frozenset({1, 2, 4})


@dataclass(slots=True)
class _Page:
    """One holder's blocks in one page."""

    version: int
    blocks: dict[BlockKey, TierMask] = field(default_factory=dict)
    fastest: int = 0
    """Bit per tier that was the fastest of some block here since the page was last empty."""


@dataclass(slots=True)
class _Holder:
    pages: dict[PageHead, _Page] = field(default_factory=dict)
    emptied: dict[PageHead, int] = field(default_factory=dict)
    """Newest version seen in pages it has emptied; at most MAX_EMPTIED."""


class Holdings:
    """Everything all holders have."""

    def __init__(self) -> None:
        self._masks: dict[BlockKey, int] = {}
        self._holders: dict[int, _Holder] = {}

    # Writing. Each returns the tiers that were the fastest of some block set, and THROUGH if one was that.

    def write(self, slot: int, version: int, raw: bytes) -> int:
        """Set the state of these packed writes' blocks."""
        holder = self._holders.setdefault(slot, _Holder())
        seen = 0
        vacating: list[PageHead] = []
        for head, entries in PackedWrites(raw).by_page():
            page = self._page(holder, head)
            if version < page.version:
                vacating.append(head)
                continue
            page.version = version
            for at in range(0, len(entries), KEY_BYTES + 1):
                key, tiers = BlockKey(entries[at : at + KEY_BYTES]), TierMask(entries[at + KEY_BYTES])
                seen |= self._set(page, slot, key, tiers)
            vacating.append(head)
        self._forget_empty(holder, vacating)
        return seen

    def refresh(self, slot: int, version: int, raw: bytes) -> tuple[int, int]:
        """Make these the whole content of every page they touch. Returns how many entries were wrong, first."""
        holder = self._holders.setdefault(slot, _Holder())
        wrong = seen = 0
        heads: list[PageHead] = []
        for head, entries in PackedWrites(raw).by_page():
            heads.append(head)
            page = self._page(holder, head)
            if version < page.version:
                continue
            page.version = version
            size = KEY_BYTES + 1
            content = {BlockKey(entries[at : at + 8]): entries[at + 8] for at in range(0, len(entries), size)}
            for key in [key for key in page.blocks if key not in content]:
                self._set(page, slot, key, TierMask(0))
                wrong += 1
            for key, tiers in content.items():
                if page.blocks.get(key, 0) != tiers:
                    seen |= self._set(page, slot, key, TierMask(tiers))
                    wrong += 1
        self._forget_empty(holder, heads)
        return wrong, seen

    def vacate(self, slot: int, pages: int) -> tuple[int, bool]:
        """Drop at most so many pages of one holder. Returns how many, and whether it has none left."""
        holder = self._holders.get(slot)
        if holder is None:
            return 0, True
        cleaned = 0
        while holder.pages and cleaned < pages:
            _, page = holder.pages.popitem()
            for key in list(page.blocks):
                self._set(page, slot, key, TierMask(0))
            cleaned += 1
        if not holder.pages:
            del self._holders[slot]
        return cleaned, not holder.pages

    # Reading.

    def mask(self, key: BlockKey) -> int:
        """The bits of those who hold a block."""
        return self._masks.get(key, 0)

    def walk(self, keys: list[BlockKey], start: int, stop: int, alive: int) -> tuple[list[tuple[int, int]], int]:
        """Follow a chain's blocks from start, a page's first, to stop. alive: bits of those who hold all before.
        Returns (bits, blocks) of those who hold exactly that many, in order, and the bits of those who hold all.

        Within a page a holder of its first and last block on a chain holds those between."""
        ended: list[tuple[int, int]] = []
        probe = self._masks.get
        while alive and start < stop:
            end = min(start + PAGE_SPAN, stop)
            if probe(keys[start], 0) & probe(keys[end - 1], 0) & alive != alive:
                for depth in range(start, end):
                    mask = probe(keys[depth], 0) & alive
                    if mask != alive:
                        ended.append((alive ^ mask, depth))
                        alive = mask
            start = end
        return ended, alive

    def tiers(self, slot: int, keys: list[BlockKey], blocks: int) -> tuple[int, int, int]:
        """How many of the first `blocks` blocks of a chain, all held, have their fastest copy in which tier."""
        counts = [0, 0, 0]
        pages = self._holders[slot].pages
        for start in range(0, blocks, PAGE_SPAN):
            stop = min(start + PAGE_SPAN, blocks)
            page = pages[PageHead(keys[start])]
            if page.fastest in ONE_TIER:
                counts[FASTEST[page.fastest]] += stop - start
            else:
                for key in keys[start:stop]:
                    counts[FASTEST[page.blocks[key] & ~THROUGH]] += 1
        return counts[0], counts[1], counts[2]

    def usable(self, slot: int, keys: list[BlockKey], blocks: int) -> int:
        """The most of the first `blocks` blocks of a chain, all held, with which a prompt may end."""
        pages = self._holders[slot].pages
        while blocks:
            page = pages[PageHead(keys[(blocks - 1) // PAGE_SPAN * PAGE_SPAN])].blocks
            if not page[keys[blocks - 1]] & THROUGH:
                break
            blocks -= 1
        return blocks

    def heads(self, slot: int) -> list[PageHead]:
        """Of one holder's pages, in no particular order."""
        holder = self._holders.get(slot)
        return [] if holder is None else list(holder.pages)

    def content(self, slot: int, heads: Sequence[PageHead]) -> list[tuple[BlockKey, TierMask]]:
        """One holder's blocks in these pages."""
        holder = self._holders.get(slot)
        pages = {} if holder is None else holder.pages
        return [item for head in heads if head in pages for item in pages[head].blocks.items()]

    @staticmethod
    def _page(holder: _Holder, head: PageHead) -> _Page:
        page = holder.pages.get(head)
        if page is None:
            page = holder.pages[head] = _Page(holder.emptied.pop(head, 0))
        return page

    def _set(self, page: _Page, slot: int, key: BlockKey, tiers: TierMask) -> int:
        if tiers:
            page.blocks[key] = tiers
            fastest = tiers & -tiers
            page.fastest |= fastest
            self._masks[key] = self._masks.get(key, 0) | 1 << slot
            return fastest | tiers & THROUGH
        if page.blocks.pop(key, None) is not None:
            mask = self._masks[key] & ~(1 << slot)
            if mask:
                self._masks[key] = mask
            else:
                del self._masks[key]
        return 0

    @staticmethod
    def _forget_empty(holder: _Holder, heads: Sequence[PageHead]) -> None:
        for head in heads:
            if not holder.pages[head].blocks:
                holder.emptied[head] = holder.pages.pop(head).version
        while len(holder.emptied) > MAX_EMPTIED:
            del holder.emptied[next(iter(holder.emptied))]


def holdings() -> Holdings:
    """None yet, of the native kernel if there is one."""
    return Holdings() if kernel is None else cast(Holdings, kernel.Holdings())
