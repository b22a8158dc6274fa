"""The paged trie in Redis: how blocks are laid out in pages, written, verified and matched.

Strategy. A page is one HASH (fields: lua/page.lua) holding the blocks of a span of PAGE_SPAN depths below one head:
a small table of holders, and per block a bitmap over that table. A reader who knows a prompt's chain knows the name
of every page on it. Every write is one atomic script on one page and states the absolute state of what it names.

Overflow. A span can branch without bound, a page must not. A page at its limit is *marked* and takes no new blocks,
only new holders of those it has; the script hands the refused keys back. *Placement*: a block belongs to its aligned
page, or, if its parent had to move, to its parent's page; if that page refuses it, to a page it heads itself. A page
never refuses its own head, so placing ends.

Invariants.
- Two writers place a block alike. A mark lasts while the page has any block, and a live holder of a moved block
  holds, by prefix closure, its parent in the page that refused it: so what moved for one writer is refused to the
  next, and what a page has it never refuses. A writer learns placement from refusals, and keeps only exceptions.
- A writer knows every page that may hold a bit of its incarnation: heads enter the incarnation's page set before the
  page is written, and placement is noted before the block is sent, whatever becomes of the answer.
- Within a page closure holds at every instant, so a reader looks at a page's first and last block on the chain and
  reads the rest only where holders differ. Across pages it ANDs. A chain that breaks in a marked page goes on in the
  page headed by the first missing block.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, cast

from ..proto.hashing import KEY_BYTES, BlockKey, Chain
from ..proto.index import PAGE_SPAN, BlockWrite, Depth, Incarnation, PackedWrites, PageHead, TierMask
from ..proto.native import kernel
from .redis_link import Command, RedisLink, script
from .redis_wire import pack

PAGE_LIMIT = 512
"""Blocks a page takes before it is marked."""
PAGE_TTL_S = 24 * 3600
"""Life of a page nobody writes or verifies; consumers verify theirs every minute or so."""
EMPTY_PAGE_TTL_S = 60
"""Life of an emptied page, kept to refuse older commands still on their way; beyond any command timeout."""
PAGE_SET_TTL_S = 7 * PAGE_TTL_S
"""Longer than a page's, since writing to a known page does not renew it."""

_ENTRY = KEY_BYTES + 1
"""Bytes of a block in a script call: key and tiers."""
_MAX_ENTRIES = 256
"""Blocks per script call: bounds how long one call keeps the server."""
_MAX_HEADS = 512
"""Members per SADD or SREM."""
_READ_PAGES = 64
"""Whole pages read at a time by audits and refreshes."""
_FIRST_CHUNK = 2 * PAGE_SPAN
_MAX_CHUNK = 64 * PAGE_SPAN
"""Blocks hashed and looked up per round trip: doubling from first to most. Where the kernel hashes and a prompt's
first block is known, the first is as long as queries matched of late: a round trip costs more than hashing ahead for
nothing now and then."""
_RECENT = 8
"""Queries that count as recent."""
_MAX_WRITERS = 4096
"""Incarnations written by this process; beyond it the oldest is forgotten, and refreshed from what its pages show."""
_MAX_SEEN = 1 << 16
"""Blocks at ends of pages remembered as held, about 100 bytes each; all are dropped at the bound. A hint only: what
it gets wrong costs a round trip."""
_MAX_TABLES = 4096
"""Decoded holder tables kept between queries; all are dropped at the bound."""

_WRITE = script("write_page", after="page")
_TABLE, _STATES, _MARK = b"d", b"v", b"o"
_STATE = struct.Struct("<II")


class PageKeys:
    """Builds the key of everything stored outside the registry. Raw bytes: half the size of hex, and 24 bytes per
    block leave no room for names. No hash tag, so pages spread over a cluster."""

    __slots__ = ("_incarnations", "_pages")

    def __init__(self, digest: bytes) -> None:
        """digest: the namespace's, 8 bytes."""
        self._pages = b"mt:p:" + digest + b":"
        self._incarnations = b"mt:i:" + digest + b":"

    def page(self, head: PageHead | BlockKey) -> bytes:
        """HASH, slot by head, TTL PAGE_TTL_S from the last write or verification; a few KB, at most PAGE_LIMIT + 1
        blocks. Scripts read the head off its last 8 bytes."""
        return self._pages + head

    def page_set(self, incarnation: Incarnation) -> bytes:
        """SET of the heads of pages that may hold bits of one incarnation, slot by incarnation, TTL PAGE_SET_TTL_S.
        Heads are in it as numbers: a set of those is an array of 8 bytes each, until the server's setting for that is
        exceeded; a thousand replicas that share a prefix have a thousand small ones."""
        return self._incarnations + incarnation.to_bytes(4, "big")

    @staticmethod
    def member(head: PageHead) -> int:
        """A page as page sets have it."""
        return int.from_bytes(head, "big", signed=True)

    @staticmethod
    def head_of(member: bytes) -> PageHead:
        """The page behind a member of a page set."""
        return PageHead(int(member).to_bytes(KEY_BYTES, "big", signed=True))


class _Table(NamedTuple):
    """One page's holder table by incarnation."""

    masks: dict[Incarnation, int]
    """Bits of all its tiers."""
    tiers: dict[Incarnation, tuple[int, int, int, int]]
    """Per tier its bit, and that of THROUGH; 0 if it has no slot."""
    single: dict[Incarnation, int]
    """The only tier, for incarnations with one."""
    sparse: frozenset[Incarnation]
    """Incarnations with a slot for THROUGH."""


_NO_TABLE = _Table({}, {}, {}, frozenset())


def _decode_table(raw: bytes) -> _Table:
    tiers: dict[Incarnation, tuple[int, int, int, int]] = {}
    bit = 1
    for (holder,) in struct.iter_unpack("<I", raw):
        incarnation, tier = Incarnation(holder >> 2), holder & 3
        bits = list(tiers.get(incarnation, (0, 0, 0, 0)))
        bits[tier] |= bit
        tiers[incarnation] = (bits[0], bits[1], bits[2], bits[3])
        bit <<= 1
    masks = {incarnation: gpu | cpu | storage for incarnation, (gpu, cpu, storage, _) in tiers.items()}
    single = {
        incarnation: bits.index(masks[incarnation]) for incarnation, bits in tiers.items() if bits[:3].count(0) == 2
    }
    return _Table(masks, tiers, single, frozenset(i for i, bits in tiers.items() if bits[3]))


def _bits(raw: bytes | None) -> int:
    return int.from_bytes(raw, "little") if raw else 0


@dataclass(slots=True)
class _Writer:
    """What this process knows of one incarnation's pages. Bounded by the blocks the incarnation holds."""

    known: set[PageHead] = field(default_factory=set)
    """Heads acknowledged to be in the page set."""
    vacated: set[PageHead] = field(default_factory=set)
    """Heads of pages it emptied, to leave the page set with the next write."""
    moved: dict[PageHead, dict[BlockKey, PageHead]] = field(default_factory=dict)
    """Aligned head → block → the page it was placed in instead; only blocks that had to move."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One call at a time, or one's SREM could overtake another's SADD."""

    def place(self, blocks: PackedWrites) -> dict[PageHead, bytes]:
        """The page to try first for each block: `entries` of pages."""
        if not self.moved:
            return dict(blocks.by_page())
        placed = []
        for block in sorted(blocks, key=_in_order):
            moved = self.moved.get(block.head)
            page = moved.get(block.key) if moved else None
            if moved and page is None and block.tiers and block.parent and PageHead(block.key) != block.head:
                page = moved.get(block.parent)
                if page is not None:
                    moved[block.key] = page
            placed.append((page or block.head, block))
        return _entries(placed)

    def move(self, block: BlockWrite, refusing: PageHead) -> PageHead:
        """The next page to try after one refused the block. Parents move before their children."""
        moved = self.moved.setdefault(block.head, {})
        page = moved.get(block.parent) if block.parent else None
        if page is None or page == refusing:
            page = PageHead(block.key)
        moved[block.key] = page
        return page

    def forget(self, block: BlockWrite) -> None:
        """A removal of this block was acknowledged."""
        moved = self.moved.get(block.head)
        if moved is not None and moved.pop(block.key, None) is not None and not moved:
            del self.moved[block.head]


class _Content(NamedTuple):
    """A whole page as one incarnation's writer sees it."""

    keys: frozenset[bytes]
    own: dict[BlockKey, TierMask]
    marked: bool
    version: int
    """Newest version the incarnation wrote here; 0 if it never did."""


class PageWriter:
    """Writes, verifies and lists pages. Calls for one incarnation take turns."""

    def __init__(self, link: RedisLink, keys: PageKeys, *, limit: int, ttl_s: float) -> None:
        self._link = link
        self._keys = keys
        self._limit = limit
        self._ttl_ms = int(ttl_s * 1000)
        self._writers: dict[Incarnation, _Writer] = {}

    def drop(self, incarnation: Incarnation) -> None:
        """Forget an incarnation that will not be written again."""
        self._writers.pop(incarnation, None)

    async def write(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> None:
        writer, blocks = self._writer(incarnation), PackedWrites.of(blocks)
        async with writer.lock:
            await self._put(writer, incarnation, version, writer.place(blocks), blocks)
            if writer.moved:
                for block in blocks:
                    if not block.tiers:
                        writer.forget(block)

    async def refresh(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> int:
        """Compares on this side: a script that compared would cost the server several times a plain read, and the
        server is what everybody shares. Placement is derived anew from what the pages show, which also repairs
        blocks that a loss of data left in the wrong page."""
        writer = self._writer(incarnation)
        groups: dict[PageHead, list[BlockWrite]] = {}
        for block in blocks:
            groups.setdefault(block.head, []).append(block)
        wrong = 0
        heads = list(groups)
        for at in range(0, len(heads), _READ_PAGES):
            some = heads[at : at + _READ_PAGES]
            async with writer.lock:
                wrong += await self._refresh(writer, incarnation, version, {head: groups[head] for head in some})
        return wrong

    def _writer(self, incarnation: Incarnation) -> _Writer:
        writer = self._writers.get(incarnation)
        if writer is None:
            if len(self._writers) >= _MAX_WRITERS:
                del self._writers[next(iter(self._writers))]
            writer = self._writers[incarnation] = _Writer()
        return writer

    async def held(self, incarnation: Incarnation, pages: int | None = None) -> dict[BlockKey, TierMask]:
        """Of all pages, or of that many at random."""
        key = self._keys.page_set(incarnation)
        (members,) = await self._link.run([("SMEMBERS", key) if pages is None else ("SRANDMEMBER", key, pages)])
        contents = await self._read(incarnation, map(self._keys.head_of, members))
        return {key: tiers for content in contents.values() for key, tiers in content.own.items()}

    async def _put(
        self,
        writer: _Writer,
        incarnation: Incarnation,
        version: int,
        pages: Mapping[PageHead, bytes],
        blocks: Iterable[BlockWrite],
    ) -> None:
        """Write entries to their pages, and on from there as pages refuse them. blocks: what they say of each."""
        while pages:
            refused = await self._write_pages(writer, incarnation, version, pages)
            if not refused:
                return
            by_key = {block.key: block for block in blocks}
            moving = sorted(((page, by_key[key]) for page, key in refused), key=lambda item: item[1].depth)
            pages = _entries((writer.move(block, page), block) for page, block in moving)

    async def _write_pages(
        self, writer: _Writer, incarnation: Incarnation, version: int, pages: Mapping[PageHead, bytes]
    ) -> list[tuple[PageHead, BlockKey]]:
        """One script call per page and _MAX_ENTRIES blocks. Returns what the pages refused."""
        adding = {page for page, entries in pages.items() if any(entries[KEY_BYTES::_ENTRY])}
        leaving = list(writer.vacated - adding)
        commands: list[Command] = []
        targets: list[PageHead] = []
        limits = (self._limit, self._ttl_ms, EMPTY_PAGE_TTL_S * 1000)
        for page, entries in pages.items():
            for at in range(0, len(entries), _MAX_ENTRIES * _ENTRY):
                chunk = entries[at : at + _MAX_ENTRIES * _ENTRY]
                commands.append((_WRITE, self._keys.page(page), incarnation, version, *limits, chunk))
                targets.append(page)
        replies = await self._link.run(commands, first=self._membership(incarnation, leaving, adding - writer.known))
        writer.known |= adding
        writer.vacated.difference_update(leaving, adding)
        refused = []
        for page, (bits, keys) in zip(targets, replies, strict=True):
            if bits == 0:
                writer.known.discard(page)
                writer.vacated.add(page)
            refused += [(page, BlockKey(keys[i : i + KEY_BYTES])) for i in range(0, len(keys), KEY_BYTES)]
        return refused

    def _membership(
        self, incarnation: Incarnation, leaving: Iterable[PageHead], joining: Iterable[PageHead]
    ) -> list[Command]:
        """Commands that bring the incarnation's page set up to date."""
        key, member = self._keys.page_set(incarnation), self._keys.member
        commands: list[Command] = [("SREM", key, *map(member, some)) for some in _batches(leaving, _MAX_HEADS)]
        joins: list[Command] = [("SADD", key, *map(member, some)) for some in _batches(joining, _MAX_HEADS)]
        if joins:
            joins.append(("PEXPIRE", key, PAGE_SET_TTL_S * 1000))
        return commands + joins

    async def _refresh(
        self, writer: _Writer, incarnation: Incarnation, version: int, groups: Mapping[PageHead, Sequence[BlockWrite]]
    ) -> int:
        """Verify these aligned pages and the pages their blocks moved to. Returns how many blocks were wrong."""
        homes = {head: {head, *writer.moved.get(head, {}).values()} for head in groups}
        renewed = {page for pages in homes.values() for page in pages}
        renew: list[Command] = [("PEXPIRE", self._keys.page(page), self._ttl_ms) for page in renewed]
        occupied = {head for head, blocks in groups.items() if any(b.tiers for b in blocks)}
        await self._link.run(renew, first=self._membership(incarnation, (), occupied | (renewed & writer.known)))
        contents = await self._read(incarnation, renewed)
        wrong = 0
        surplus: list[tuple[PageHead, BlockWrite]] = []
        missing: list[tuple[PageHead, BlockWrite]] = []
        for head, blocks in groups.items():
            if any(contents[page].version > version for page in homes[head]):
                continue
            moved: dict[BlockKey, PageHead] = {}
            expected: dict[BlockKey, PageHead] = {}
            bad: set[BlockKey] = set()
            for block in sorted(blocks, key=_in_order):
                if not block.tiers:
                    continue
                own = PageHead(block.key)
                page = (moved.get(block.parent) if block.parent and own != head else None) or head
                content = contents.get(page)
                if content and content.marked and own not in content.keys and own != page:
                    page = own
                    content = contents.get(page)
                if page != head:
                    moved[block.key] = page
                expected[block.key] = page
                if content is None or content.own.get(block.key, 0) != block.tiers:
                    bad.add(block.key)
                    missing.append((page, block))
            for page in homes[head]:
                for key in contents[page].own:
                    if expected.get(key) != page:
                        bad.add(key)
                        surplus.append((page, BlockWrite(key, None, head, 0, TierMask(0))))
            wrong += len(bad)
            writer.moved.setdefault(head, {}).update(moved)
            if surplus:
                await self._put(writer, incarnation, version, _entries(surplus), [block for _, block in surplus])
                surplus.clear()
            # Only now is nothing left where it should not be.
            if moved:
                writer.moved[head] = moved
            else:
                writer.moved.pop(head, None)
        if missing:
            await self._put(writer, incarnation, version, _entries(missing), [block for _, block in missing])
        return wrong

    async def _read(self, incarnation: Incarnation, heads: Iterable[PageHead]) -> dict[PageHead, _Content]:
        """Whole pages, as far as one incarnation is concerned. Not atomic across pages."""
        contents = {}
        for some in _batches(heads, _READ_PAGES):
            pages = await self._link.run([("HGETALL", self._keys.page(head)) for head in some])
            for head, fields in zip(some, pages, strict=True):
                contents[head] = _content(incarnation, fields)
        return contents


def _entries(placed: Iterable[tuple[PageHead, BlockWrite]]) -> dict[PageHead, bytes]:
    """Per page, (key, 8 bytes; tiers, 1 byte) of each block placed there."""
    pages: dict[PageHead, list[bytes]] = {}
    for page, block in placed:
        pages.setdefault(page, []).append(block.key + bytes((block.tiers,)))
    return {page: b"".join(entries) for page, entries in pages.items()}


def _in_order(block: BlockWrite) -> int:
    """Removals, children first, then the rest, parents first."""
    return block.depth if block.tiers else -block.depth


def _content(incarnation: Incarnation, fields: Mapping[bytes, bytes]) -> _Content:
    table = _decode_table(fields.get(_TABLE, b""))
    mask, bits = table.masks.get(incarnation, 0), table.tiers.get(incarnation, (0, 0, 0, 0))
    states = fields.get(_STATES, b"")
    slots = [bit.bit_length() - 1 for bit in bits if bit]
    version = max((_STATE.unpack_from(states, slot * _STATE.size)[0] for slot in slots), default=0)
    own = {}
    keys = frozenset(key for key in fields if len(key) == KEY_BYTES)
    if mask:
        for key in keys:
            bitmap = _bits(fields[key])
            if bitmap & mask:
                own[BlockKey(key)] = TierMask(sum(1 << tier for tier, bit in enumerate(bits) if bitmap & bit))
    return _Content(keys, own, _MARK in fields, version)


def _batches(items: Iterable[PageHead], size: int) -> Iterator[Sequence[PageHead]]:
    everything = list(items)
    for at in range(0, len(everything), size):
        yield everything[at : at + size]


class _Segment(NamedTuple):
    """The part of a chain that lies in one page: keys[start:stop], headed by the first."""

    start: int
    stop: int


_Closer = list[tuple[Incarnation, list[int], bool]]
"""Replicas whose blocks in a page must be looked at one by one, their counts, and whether they pass it."""


class _Walk:
    """One query's progress: who is still on the chain, and how far the others came.

    Counts are lists shared with reads still to be evaluated, so depths are taken when all is read. Pages that look
    exactly like the one before cost no look at each replica: that keeps a prefix shared by a whole fleet cheap.
    """

    __slots__ = ("_last", "_pending", "alive", "ended", "sparse")

    def __init__(self, live: Iterable[Incarnation]) -> None:
        self.alive: dict[Incarnation, list[int]] = {incarnation: [0, 0, 0] for incarnation in live}
        """Per incarnation that holds everything so far, blocks by fastest tier."""
        self.ended: dict[Incarnation, list[int]] = {}
        self.sparse: set[Incarnation] = set()
        """Those with THROUGH blocks in some page seen."""
        self._last: tuple[_Table, int, int] | None = None
        """A page everybody passed in one tier each, by its table and the bitmaps at its ends."""
        self._pending = 0
        """Blocks of further pages like it, not yet added to the counts."""

    def end(self, incarnation: Incarnation) -> None:
        """This one holds no more of the chain."""
        self.ended[incarnation] = self.alive.pop(incarnation)

    def settle(self) -> None:
        """Add what is pending to the counts."""
        if self._last is not None and self._pending:
            single = self._last[0].single
            for incarnation, counts in self.alive.items():
                counts[single[incarnation]] += self._pending
        self._last, self._pending = None, 0

    def step(self, table: _Table, first: int, last: int, blocks: int) -> _Closer:
        """Pass a page with these bitmaps at its ends. Returns whose blocks must be looked at one by one: those who
        leave inside (False), and those who pass but use several tiers (True)."""
        look = self._last
        if look is not None and look[0] is table and look[1] == first and look[2] == last:
            self._pending += blocks
            return []
        self.settle()
        masks, single = table.masks, table.single
        closer: _Closer = []
        ended: list[Incarnation] = []
        for incarnation, counts in self.alive.items():
            mask = masks.get(incarnation, 0)
            if not mask & last:
                ended.append(incarnation)
                if mask & first:
                    closer.append((incarnation, counts, False))
            elif not mask & first:
                ended.append(incarnation)
            elif incarnation in single:
                counts[single[incarnation]] += blocks
            else:
                closer.append((incarnation, counts, True))
        for incarnation in ended:
            self.end(incarnation)
        if not closer:
            self._last = (table, first, last)
        return closer

    def repeat(self, blocks: int) -> bool:
        """Pass a page that looks exactly like the last one, if everybody passed that in one tier each."""
        if self._last is not None:
            self._pending += blocks
        return self._last is not None

    def depths(self) -> dict[Incarnation, Depth]:
        self.settle()
        depths: dict[Incarnation, Depth] = {}
        alike: dict[tuple[int, ...], Depth] = {}
        for counted in (self.ended, self.alive):
            for incarnation, counts in counted.items():
                gpu, cpu, storage = tiers = tuple(counts)
                blocks = gpu + cpu + storage
                if blocks:
                    depth = alike.get(tiers)
                    if depth is None:
                        depth = alike[tiers] = Depth(blocks, (gpu, cpu, storage))
                    depths[incarnation] = depth
        return depths


class Reading(NamedTuple):
    """The reads a match begins with."""

    stop: int
    """Blocks covered."""
    segments: list[_Segment]
    """One per page."""
    whole: int
    """Which of them is read whole; -1: none."""
    commands: list[Command | bytes]
    """One per page; packed, if that was asked for."""


class PageReader:
    """Matches chains against the pages of one namespace."""

    def __init__(self, link: RedisLink, keys: PageKeys) -> None:
        self._link = link
        self._keys = keys
        self._tables: dict[bytes, _Table] = {}
        self._seen: set[BlockKey] = set()
        """Blocks at an end of a page that some replica held when they were read last; at most _MAX_SEEN."""
        self._usual = 0.0
        """Blocks that queries matched of late."""
        page = keys.page(BlockKey(b""))
        self._packed_ends = (
            b"*6\r\n$5\r\nHMGET\r\n$%d\r\n" % (len(page) + KEY_BYTES)
            + page.replace(b"%", b"%%")
            + b"%b\r\n$1\r\nd\r\n$1\r\no\r\n$8\r\n%b\r\n$8\r\n%b\r\n"
        )
        """`_ends` on the wire: head, first and last block. It is what nearly all of the traffic of queries is."""

    def begin(self, chain: Chain, *, packed: bool = False) -> Reading:
        """The reads `match` begins with, for the caller to send along with its own. packed: as bytes, which is faster
        and leaves nothing to route by."""
        # A chain somebody hashed before costs nothing to look up further at once; one whose first block nobody was
        # seen to hold is probably new.
        free = len(chain.keys(0))
        if kernel is not None and chain.blocks and chain.first() in self._seen:
            free = max(free, (int(self._usual) + PAGE_SPAN - 1) // PAGE_SPAN * PAGE_SPAN)
        stop = min(max(_FIRST_CHUNK, min(free, _MAX_CHUNK)), chain.blocks)
        keys, segments = chain.keys(stop), _segments(0, stop)
        commands: list[Command | bytes]
        if packed:
            form = self._packed_ends
            commands = [form % ((first := keys[at]), first, keys[to - 1]) for at, to in segments]
        else:
            commands = [self._ends(keys, segment) for segment in segments]
        # A page that is known to begin on this chain, and not to end on it, is where a conversation goes on: read it
        # whole, since the chain probably breaks inside.
        for i, segment in enumerate(segments):
            if keys[segment.stop - 1] not in self._seen:
                if keys[segment.start] not in self._seen:
                    break
                whole = self._whole(keys, segment)
                commands[i] = pack(cast("tuple[str | bytes, ...]", whole)) if packed else whole
                return Reading(stop, segments, i, commands)
        return Reading(stop, segments, -1, commands)

    def finish(
        self, chain: Chain, live: Iterable[Incarnation], reading: Reading, replies: Sequence[Any]
    ) -> dict[Incarnation, Depth] | None:
        """`match`, where these replies are all it needs; else None."""
        keys, walk, seen = chain.keys(reading.stop), _Walk(live), self._seen
        before: Any = None
        for i, (segment, reply) in enumerate(zip(reading.segments, replies, strict=True)):
            if not walk.alive:
                break
            known = keys[segment.start] in seen and keys[segment.stop - 1] in seen
            if known and reply == before and walk.repeat(segment.stop - segment.start):
                continue
            before = reply
            first, last = reply[2], reply[-1]
            table = self._table(reply[0])
            if table.sparse or (reply[1] and first is not None and last is None):
                return None
            closer = walk.step(table, _bits(first), _bits(last), segment.stop - segment.start)
            self._note(keys, segment, first, last)
            if closer:
                if i != reading.whole:
                    return None
                _look_closer(table, reply[2:], closer)
        if walk.alive and reading.stop < chain.blocks:
            return None
        return self._done(walk)

    async def match(
        self, chain: Chain, live: Iterable[Incarnation], begun: Reading, replies: Sequence[Any]
    ) -> dict[Incarnation, Depth]:
        """Depths of those of `live` that hold at least the first block. replies: to `begun`, one per page."""
        walk = _Walk(live)
        start, stop, segments, whole = 0, begun.stop, begun.segments, begun.whole
        while start < stop and walk.alive:
            await self._advance(walk, chain.keys(stop), segments, replies, whole)
            start, stop, whole = stop, min(stop + min(2 * (stop - start), _MAX_CHUNK), chain.blocks), -1
            if start < stop and walk.alive:
                keys, segments = chain.keys(stop), _segments(start, stop)
                replies = await self._link.run([self._ends(keys, segment) for segment in segments])
        depths = self._done(walk)
        for incarnation in walk.sparse & depths.keys():
            usable = await self._usable(chain, incarnation, depths[incarnation])
            if usable.blocks:
                depths[incarnation] = usable
            else:
                del depths[incarnation]
        return depths

    def _done(self, walk: _Walk) -> dict[Incarnation, Depth]:
        depths = walk.depths()
        deepest = max([depth.blocks for depth in depths.values()]) if depths else 0
        self._usual += (deepest - self._usual) / _RECENT
        return depths

    def _note(self, keys: Sequence[BlockKey], segment: _Segment, first: bytes | None, last: bytes | None) -> None:
        """Remember which ends of a page were held."""
        seen = self._seen
        if first is None:
            seen.discard(keys[segment.start])
        elif last is None:
            seen.add(keys[segment.start])
            seen.discard(keys[segment.stop - 1])
        else:
            seen.update((keys[segment.start], keys[segment.stop - 1]))
        if len(seen) > _MAX_SEEN:
            seen.clear()

    async def _usable(self, chain: Chain, incarnation: Incarnation, held: Depth) -> Depth:
        """What a prompt can reuse of what is held: back to the last block that is not THROUGH, page by page."""
        blocks, counts = held.blocks, list(held.tiers)
        keys = chain.keys(blocks)
        while blocks:
            start = (blocks - 1) // PAGE_SPAN * PAGE_SPAN
            rows = await self._rows(keys, _Segment(start, blocks))
            for table, bitmap in reversed(rows):
                gpu, cpu, _, through = table.tiers.get(incarnation, (0, 0, 0, 0))
                if bitmap & table.masks.get(incarnation, 0) and not bitmap & through:
                    return Depth(blocks, (counts[0], counts[1], counts[2]))
                tier = 0 if bitmap & gpu else 1 if bitmap & cpu else 2
                if not counts[tier]:  # it changed since it was counted
                    tier = max(range(3), key=counts.__getitem__)
                counts[tier] -= 1
                blocks -= 1
        return Depth(0, (0, 0, 0))

    async def _rows(self, keys: Sequence[BlockKey], segment: _Segment) -> list[tuple[_Table, int]]:
        """Table and bitmap of every block of a span, wherever it overflowed to; (empty, 0) for one that is gone."""
        found: list[tuple[_Table, int]] = []
        at = segment
        while at.start < at.stop:
            ((raw, mark, *rows),) = await self._link.run([self._whole(keys, at)])
            table = self._table(raw)
            present = next((i for i, row in enumerate(rows) if row is None), len(rows))
            found += [(table, _bits(row)) for row in rows[:present]]
            at = _Segment(at.start + present, at.stop)
            if at.start < at.stop and (present == 0 or not mark):
                found += [(_NO_TABLE, 0)] * (at.stop - at.start)
                break
        return found

    def _ends(self, keys: Sequence[BlockKey], segment: _Segment) -> Command:
        """Read a page's table, mark, and its first and last block on the chain."""
        first, last = keys[segment.start], keys[segment.stop - 1]
        return ("HMGET", self._keys.page(first), _TABLE, _MARK, first, last)

    def _whole(self, keys: Sequence[BlockKey], segment: _Segment) -> Command:
        """Read a page's table, mark, and all its blocks on the chain."""
        blocks = keys[segment.start : segment.stop]
        return ("HMGET", self._keys.page(blocks[0]), _TABLE, _MARK, *blocks)

    async def _advance(
        self, walk: _Walk, keys: Sequence[BlockKey], segments: Sequence[_Segment], replies: Sequence[Any], whole: int
    ) -> None:
        """Take the walk through these pages, whose ends were read; one of them whole."""
        inside: list[tuple[_Segment, _Closer]] = []
        """Pages to read whole, for those who pass using several tiers (True) or leave in it (False)."""
        for i, (segment, (raw, mark, *rows)) in enumerate(zip(segments, replies, strict=True)):
            if not walk.alive:
                break
            first, last = rows[0], rows[-1]
            if mark and first is not None and last is None:
                await self._follow(walk, keys, segment)
                continue
            table = self._table(raw)
            if table.sparse:
                walk.sparse |= table.sparse
            closer = walk.step(table, _bits(first), _bits(last), segment.stop - segment.start)
            self._note(keys, segment, first, last)
            if closer and i == whole:
                _look_closer(table, rows, closer)
            elif closer:
                inside.append((segment, closer))
        if not inside:
            return
        wholes = await self._link.run([self._whole(keys, segment) for segment, _ in inside])
        for (_, closer), (raw, _, *rows) in zip(inside, wholes, strict=True):
            _look_closer(self._table(raw), rows, closer)

    async def _follow(self, walk: _Walk, keys: Sequence[BlockKey], segment: _Segment) -> None:
        """Take the walk through a span whose blocks overflowed into further pages."""
        walk.settle()
        while walk.alive and segment.start < segment.stop:
            ((raw, mark, *rows),) = await self._link.run([self._whole(keys, segment)])
            table = self._table(raw)
            walk.sparse |= table.sparse
            present = next((i for i, row in enumerate(rows) if row is None), len(rows))
            runs = _runs(rows[:present])
            for incarnation, counts in list(walk.alive.items()):
                if _count(table, incarnation, runs, counts) < present:
                    walk.end(incarnation)
            segment = _Segment(segment.start + present, segment.stop)
            if segment.start < segment.stop and (present == 0 or not mark):
                for incarnation in list(walk.alive):
                    walk.end(incarnation)

    def _table(self, raw: bytes | None) -> _Table:
        if raw is None:
            return _NO_TABLE
        table = self._tables.get(raw)
        if table is None:
            if len(self._tables) >= _MAX_TABLES:
                self._tables.clear()
            table = self._tables[raw] = _decode_table(raw)
        return table


def _look_closer(table: _Table, rows: Sequence[bytes | None], closer: _Closer) -> None:
    """Count what these replicas hold in a page that was read whole."""
    runs, single, masks = _runs(rows), table.single, table.masks
    for incarnation, counts, passes in closer:
        tier = single.get(incarnation)
        if tier is None:
            held = _count(table, incarnation, runs, counts)
        else:  # the same, for what nearly all are
            mask, held = masks[incarnation], 0
            for bitmap, blocks in runs:
                if not bitmap & mask:
                    break
                held += blocks
            counts[tier] += held
        if passes:
            # It passed when the ends were read; a block that went since then counts as in storage.
            counts[2] += len(rows) - held


def _runs(rows: Iterable[bytes | None]) -> list[tuple[int, int]]:
    """(bitmap, how many blocks in a row have it): neighbours mostly share theirs."""
    return [(_bits(row), len(list(same))) for row, same in groupby(rows)]


def _count(table: _Table, incarnation: Incarnation, runs: Sequence[tuple[int, int]], counts: list[int]) -> int:
    """Add an incarnation's leading blocks among these to its counts, by fastest tier. Returns how many."""
    mask, (gpu, cpu, _, _) = table.masks.get(incarnation, 0), table.tiers.get(incarnation, (0, 0, 0, 0))
    held = 0
    for bitmap, blocks in runs:
        if not bitmap & mask:
            break
        counts[0 if bitmap & gpu else 1 if bitmap & cpu else 2] += blocks
        held += blocks
    return held


def _segments(start: int, stop: int) -> list[_Segment]:
    """Cut depths into pages; `start` is aligned."""
    return [_Segment(at, min(at + PAGE_SPAN, stop)) for at in range(start, stop, PAGE_SPAN)]
