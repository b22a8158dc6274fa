"""The index contract: what consumers write, what routers read, whatever the backend.

Vocabulary. A *replica* is one engine worker with its own block pool (instance, data-parallel rank). An
*incarnation* is one uninterrupted life of its cache, a 30-bit number never reused within a namespace. A *holder*
is (incarnation, tier). The registry has one record per replica, whose *pointer* names the incarnation that
counts, and a *lease*, the proof of life without which nothing of the replica counts.

Fencing. A holder counts only while its incarnation is the one its replica's record points at and the lease runs.
Restart, clear and takeover move the pointer; nothing has to be deleted for the old holder to vanish, and a late
write by a dead incarnation is harmless. The sweeper only reclaims memory.

Both backends (memory, Redis) run the same contract suite: tests/contract.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Annotated, Any, Final, Literal, NewType, Protocol, Self, cast, overload, runtime_checkable

import msgspec

from .hashing import KEY_BYTES, BlockKey, Chain, Namespace
from .native import kernel
from .soon import Soon

Incarnation = NewType("Incarnation", int)
PageHead = NewType("PageHead", bytes)
"""8 bytes: key of the block at the page's first depth."""
TierMask = NewType("TierMask", int)
"""Bit `1 << tier` per tier that holds a block, and THROUGH; 0: not held."""
THROUGH = 1 << 3
"""Besides a tier's bit: the block is held, but a prompt that ends with it is no hit, only one that goes on to a block
without this bit is. So it is where some cache group (a sliding window, a recurrent state) lacks what it needs at that
point, and inside an engine block wider than an index block."""

PAGE_SPAN = 32
"""Depths per page. The page of a block at depth d is headed by its ancestor at depth 32·⌊d/32⌋."""
MAX_INCARNATION = (1 << 30) - 1

State = Literal["exact", "degraded", "stale"]
"""exact: the index equals what the engine published. degraded: something was lost, `cause` says what. stale: no
proof of life; its blocks do not count."""


class Tier(IntEnum):
    """Where a block's KV lives, fastest first."""

    GPU = 0
    CPU = 1
    STORAGE = 2


class ReplicaRef(msgspec.Struct, frozen=True, order=True):
    """(engine instance, data-parallel rank): the unit that has a cache of its own."""

    replica: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0

    def __str__(self) -> str:
        return f"{self.replica}/{self.dp_rank}"


class ReplicaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is declared about a replica when it is registered."""

    ref: ReplicaRef
    engine: str
    """`vllm`, `sglang`, …: the family whose conventions its events follow."""
    url: str | None = None
    """Base URL of its OpenAI-compatible HTTP server, for routing; None when it is not routable from here."""
    events: str | None = None
    """ZeroMQ endpoint its consumer subscribes to; informative in a shared registry."""
    role: str = "both"
    """`prefill`, `decode` or `both`."""
    consumer: str | None = None
    """Base URL of its consumer's HTTP server, for audits."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine says of its own load, as scraped by its consumer."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a consumer reports with each lease renewal."""

    state: State = "exact"
    cause: str = ""
    """Metric label for why the state is not exact; empty when it is."""
    load: Load | None = None
    blocks: int = 0
    """Attached index blocks."""
    detached: int = 0
    """Engine blocks held but absent from the index, since their prefix is not."""
    lag_s: float = 0.0
    """Event time to acknowledged write, newest flush."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as a reader sees it now."""

    spec: ReplicaSpec
    incarnation: Incarnation | None
    """The incarnation that counts; None while there is none (registered, not yet activated)."""
    live: bool
    """The lease runs and the record is not tombstoned: its holders count."""
    status: ReplicaStatus

    @property
    def state(self) -> State:
        return self.status.state if self.live and self.incarnation is not None else "stale"

    @property
    def cause(self) -> str:
        if self.live and self.incarnation is not None:
            return self.status.cause
        return "lease_expired" if not self.live else "not_activated"


class Fleet(msgspec.Struct, frozen=True):
    """One consistent read of a namespace's registry."""

    replicas: tuple[ReplicaView, ...]
    """Ordered by ref."""

    def live(self) -> dict[Incarnation, ReplicaView]:
        """Only what counts, by incarnation."""
        return {r.incarnation: r for r in self.replicas if r.live and r.incarnation is not None}


class Claim(msgspec.Struct, frozen=True):
    """The right to write as one incarnation, until superseded."""

    incarnation: Incarnation
    previous: Incarnation | None
    """The incarnation the record pointed at before, if any."""


class BlockWrite(msgspec.Struct, frozen=True, gc=False):
    """The absolute state of one block under the writer's incarnation."""

    key: BlockKey
    parent: BlockKey | None
    """Key of the block before it; None at depth 0."""
    head: PageHead
    """Key of its ancestor at depth PAGE_SPAN·⌊depth/PAGE_SPAN⌋ (itself when aligned)."""
    depth: int
    """Blocks before it in its chain, from 0."""
    tiers: TierMask
    """0 removes it."""


_WRITE = struct.Struct("<8s8s8sIBB2x")
"""BlockWrite packed: key, parent, head, depth, tiers, whether there is a parent. native/src/writes.rs has it too."""


class PackedWrites(Sequence[BlockWrite]):
    """Block writes in one bytes object, for the way from an inventory to the store: a busy engine's are too many to
    be an object each. What looks at single ones gets them as ever."""

    __slots__ = ("raw",)
    SIZE: Final = _WRITE.size
    """Bytes per block."""

    def __init__(self, raw: bytes = b"") -> None:
        """raw: a whole number of packed writes."""
        self.raw = raw

    @classmethod
    def of(cls, writes: Iterable[BlockWrite]) -> Self:
        """These writes, packed; the same object if they are."""
        if isinstance(writes, cls):
            return writes
        pack = _WRITE.pack
        return cls(
            b"".join([pack(w.key, w.parent or b"", w.head, w.depth, w.tiers, w.parent is not None) for w in writes])
        )

    @classmethod
    def run(cls, keys: Sequence[BlockKey], start: int, end: int, tiers: TierMask) -> Self:
        """Blocks `start` to `end` of the chain with these keys: parents first, or where they go, children first."""
        heads: list[BlockKey] = []
        for page in range(start - start % PAGE_SPAN, end, PAGE_SPAN):
            heads += [keys[page]] * (min(page + PAGE_SPAN, end) - max(page, start))
        columns: list[Sequence[Any]] = [
            keys[start:end],
            [*(() if start else (b"",)), *keys[max(start - 1, 0) : end - 1]],
            heads,
            range(start, end),
        ]
        if not tiers:
            columns = [column[::-1] for column in columns]
        below = [True] * (end - start)
        if not start:
            below[0 if tiers else -1] = False
        return cls(b"".join(map(_WRITE.pack, *columns, repeat(tiers), below)))

    def __len__(self) -> int:
        return len(self.raw) // self.SIZE

    @overload
    def __getitem__(self, at: int) -> BlockWrite: ...

    @overload
    def __getitem__(self, at: slice) -> PackedWrites: ...

    def __getitem__(self, at: int | slice) -> BlockWrite | PackedWrites:
        if isinstance(at, int):
            return next(iter(self[range(len(self))[at] :]))
        start, stop, step = at.indices(len(self))
        if step == 1:
            return PackedWrites(self.raw[start * self.SIZE : stop * self.SIZE])
        return PackedWrites(b"".join(self.raw[i * self.SIZE : (i + 1) * self.SIZE] for i in range(start, stop, step)))

    def __iter__(self) -> Iterator[BlockWrite]:
        for key, parent, head, depth, tiers, below in _WRITE.iter_unpack(self.raw):
            yield BlockWrite(key, parent if below else None, head, depth, tiers)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedWrites):
            return self.raw == other.raw
        return list(self) == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def keys(self) -> list[BlockKey]:
        """Of each block, in order."""
        raw = self.raw
        return cast("list[BlockKey]", [raw[at : at + KEY_BYTES] for at in range(0, len(raw), self.SIZE)])

    def gone(self) -> list[BlockKey]:
        """Keys of those that are removed, in order."""
        raw, size = self.raw, self.SIZE
        flags = raw[_TIERS_AT::size]
        if 0 not in flags:
            return []
        return [BlockKey(raw[i * size : i * size + KEY_BYTES]) for i, tiers in enumerate(flags) if not tiers]

    def by_page(self) -> list[tuple[PageHead, bytes]]:
        """Per page, in the order they first occur: its head, and (key, 8 bytes; tiers, 1 byte) of each block in it,
        once with its newest state."""
        if kernel is not None:
            return cast("list[tuple[PageHead, bytes]]", kernel.writes_by_page(self.raw))
        pages: dict[PageHead, dict[bytes, bytes]] = {}
        for key, _, head, _, tiers, _ in _WRITE.iter_unpack(self.raw):
            pages.setdefault(head, {})[key] = key + bytes((tiers,))
        return [(head, b"".join(entries.values())) for head, entries in pages.items()]

    def pages(self) -> dict[PageHead, PackedWrites]:
        """The writes of each page, in order."""
        if kernel is not None:
            return {PageHead(head): PackedWrites(raw) for head, raw in kernel.pages_of_writes(self.raw)}
        pages: dict[PageHead, list[bytes]] = {}
        for at in range(0, len(self.raw), self.SIZE):
            write = self.raw[at : at + self.SIZE]
            pages.setdefault(PageHead(write[2 * KEY_BYTES : 3 * KEY_BYTES]), []).append(write)
        return {head: PackedWrites(b"".join(writes)) for head, writes in pages.items()}

    @staticmethod
    def merged(parts: Sequence[PackedWrites]) -> PackedWrites:
        """The newest state of every block, of parts in the order they arose, in the order `Index.write` asks for:
        what appears with parents first, then what goes with children first. Blocks of a page come together, so that
        whatever is cut off of this names few pages."""
        if kernel is not None:
            return PackedWrites(kernel.merge_writes([part.raw for part in parts]))
        newest = {write.key: write for part in parts for write in part}
        appear, vanish = [w for w in newest.values() if w.tiers], [w for w in newest.values() if not w.tiers]
        appear.sort(key=lambda w: (w.depth // PAGE_SPAN, w.head, w.depth))
        vanish.sort(key=lambda w: (-(w.depth // PAGE_SPAN), w.head, -w.depth))
        return PackedWrites.of(appear + vanish)


_TIERS_AT = 3 * KEY_BYTES + 4


class Depth(msgspec.Struct, frozen=True, gc=False):
    """How far one replica holds a prompt."""

    blocks: int
    """Leading full blocks it can reuse, over the union of tiers: up to the last one held that is not THROUGH."""
    tiers: tuple[int, int, int]
    """Of those, how many have their fastest copy in GPU, CPU, STORAGE; sums to `blocks`."""


class Match(msgspec.Struct, frozen=True):
    """The answer to one query: the fleet it was judged by, and depths of those that hold at least one block."""

    fleet: Fleet
    depths: Mapping[Incarnation, Depth]


class SweepReport(msgspec.Struct, frozen=True):
    """What one bounded sweep step did."""

    pages: int
    """Pages cleaned."""
    incarnations: int
    """Dead incarnations fully reclaimed."""
    remaining: int
    """Dead incarnations still waiting."""
    expired: tuple[ReplicaRef, ...] = ()
    """Replicas tombstoned or removed because their lease ran out."""


class Index(Protocol):
    """The meta-trie and registry of one namespace.

    Every method may raise StoreUnavailable; writers may get StoreRefused. None of them blocks the event loop, and
    none retries on its own: the caller knows what waiting costs.
    """

    @property
    def namespace(self) -> Namespace: ...

    async def claim(self, spec: ReplicaSpec, *, owner: str, lease_s: float, activate: bool) -> Claim:
        """Register the replica, or take a new incarnation of one this owner has. Mutates the registry.

        owner: a name unique to the calling process. With `activate` the pointer moves to the new incarnation at
        once (engine restart or clear: the old view is worthless); without, it stays until `activate`.
        The namespace is announced with it. Raises Superseded, with `retry_s`, while another owner's lease runs, and
        StoreRefused if the store may drop what it is given.
        """
        ...

    async def witness(self) -> bytes:
        """An opaque value that stays the same for as long as the store has demonstrably kept everything.

        It changes when the store came back empty, when another server took over (which may lack acknowledged
        writes, and may bring back what was removed), and when data moved between servers. Compare it with one taken
        before the claim: if it differs, what was written since may be gone, and a new incarnation is due.
        """
        ...

    async def activate(self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation) -> None:
        """Move the pointer by compare-and-set. Raises Superseded unless this owner holds the newest claim."""
        ...

    async def renew(
        self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation, status: ReplicaStatus, lease_s: float
    ) -> None:
        """Extend the lease by `lease_s` from now, store time, and publish the status.

        Raises Superseded if the record names another owner or incarnation, is tombstoned, or is gone.
        """
        ...

    async def release(self, ref: ReplicaRef, *, owner: str | None) -> bool:
        """Remove the registration; its holders stop counting at once. owner None: whoever owns it (an operator's
        DELETE). False if there was none, or if another owner holds it."""
        ...

    async def write(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> None:
        """Set the absolute state of these blocks under this incarnation. Idempotent.

        version: grows with every call of one incarnation; within a page an older version than the newest seen is
        ignored. Call with parents before children for blocks that appear and children before parents for blocks
        that go. Does not check the registry: writes of a dead incarnation are stored and never counted.
        Raises StoreUnavailable with some of the blocks possibly written; repeat with the same blocks.
        """
        ...

    async def refresh(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> int:
        """Verify whole pages: `blocks` is the complete content of every page it touches under this incarnation.

        Missing entries are written, surplus ones cleared, TTLs renewed. Returns how many entries were wrong.
        """
        ...

    async def match(self, chain: Chain) -> Match:
        """Leading blocks of this chain held by each live replica. Hashes no further than needed."""
        ...

    async def fleet(self) -> Fleet:
        """A fresh read of the registry."""
        ...

    async def held(self, incarnation: Incarnation, *, pages: int | None = None) -> dict[BlockKey, TierMask]:
        """Everything stored under one incarnation, for audits. Linear in its size; not for the data path.

        pages: only what is in that many of its pages, picked at random.
        """
        ...

    async def sweep(self, *, pages: int, grace_s: float) -> SweepReport:
        """One bounded step: tombstone replicas whose lease ended more than `grace_s` ago, and clean at most `pages`
        pages of dead incarnations. Any process may call it; at most one works at a time, the others do nothing."""
        ...


@runtime_checkable
class MatchesQuickly(Protocol):
    """An index that can mostly do without a task to wait in."""

    def match_quickly(self, chain: Chain) -> Match | Soon[Match] | None:
        """As `Index.match`: at once, or with the next answer of a store. None where `match` must be asked."""
        ...


class Store(Protocol):
    """Where the indexes of all namespaces live."""

    async def open(self, namespace: Namespace) -> Index:
        """The index of one namespace. Idempotent, and never waits for the store: others see the namespace with its
        first claim."""
        ...

    async def namespaces(self) -> Sequence[Namespace]:
        """Every namespace in which a replica was ever claimed."""
        ...

    async def ping(self) -> None:
        """Raises StoreUnavailable or StoreRefused when the store is unreachable or unfit."""
        ...

    async def close(self) -> None: ...
