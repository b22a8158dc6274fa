"""The KV block pool of vLLM v1: which blocks exist, who references them, what they are called, what gets evicted.

Strategy. `num_blocks` physical blocks; block 0 is the null block, never handed out. A block that no sequence
references waits in the free queue, *still findable by its hash* if it was full, until it is taken for new content:
only then is it evicted, and only then does a removal event appear. A sequence's blocks are freed tail first, so the
end of a conversation is evicted before its beginning.

Invariants (each has a property test)
- A block is in the free queue exactly when its reference count is 0 and it is not the null block.
- Only full blocks have a hash. Equal content in two physical blocks is *not* merged: k copies are stored k times and
  removed k times, and the oldest copy is the one lookups find.
- At least the last token of a prompt is recomputed, so a lookup returns at most ⌊(n-1)/block_size⌋ blocks.
- Replaying the emitted events as a counter gives `resident()` (except after `report_full`, which announces reused
  blocks once more, as vLLM's `kv_cache_report_mode: full` does).

Groups. A hybrid model has one set of block tables per attention group over the one pool, and a group with a sliding
window drops blocks that fell out of it. Hashes are the same in all groups; the map is keyed by (group, hash).

Checked step by step against recordings of vLLM 0.11.0, 0.26.0 and 0.33.0.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any, Literal, NewType

import msgspec

from ..proto.hashing import BlockHash, block_hash

BlockId = NewType("BlockId", int)
NULL_BLOCK = BlockId(0)

ExtraKeyForm = Literal["lora_id", "untagged", "tagged"]
"""How an engine version feeds LoRA and cache salt to the hash: `lora_id` (vLLM ≤ 0.11.0) the adapter's number,
`untagged` (0.11.1 to 0.30) its name, `tagged` (0.31 and later) `["lora", name, path]` and `["cache_salt", salt]`."""


class Lora(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A served adapter."""

    name: str
    path: str = ""
    id: int = 1


class Stored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Blocks that became findable, one physical copy each, in chain order."""

    digests: list[bytes]
    parent: bytes | None
    """Digest of the block before `tokens`; None at the start of a prompt."""
    tokens: list[int]
    """Every token of the run, also of blocks that a sliding window masked out of `digests`."""
    extra_keys: list[list[Any] | None]
    """Per digest, untagged, as every version publishes them."""
    lora: Lora | None
    group: int
    window: int | None
    """Tokens of the group's sliding window; None for full attention."""


class Removed(msgspec.Struct, frozen=True, gc=False):
    """One physical copy of a block is gone."""

    digest: bytes
    group: int


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The whole prefix cache was reset."""


PoolEvent = Stored | Removed | Cleared


class _Block:
    """One physical block. `key` is (group, digest) while it is findable."""

    __slots__ = ("id", "key", "refs")

    def __init__(self, block_id: BlockId) -> None:
        self.id = block_id
        self.refs = 0
        self.key: tuple[int, bytes] | None = None


class Hit(msgspec.Struct, frozen=True):
    """The cached prefix a lookup found. Valid until the pool changes."""

    tokens: int
    blocks: tuple[list[_Block], ...]
    """Per group; null blocks stand where a sliding window needs nothing."""


class Sequence:
    """The pool's side of one request. Append to `tokens` freely; everything else belongs to the pool."""

    __slots__ = (
        "_event_keys",
        "_hash_keys",
        "blocks",
        "cached",
        "computed",
        "digests",
        "lora",
        "report_full",
        "tokens",
    )

    def __init__(
        self, tokens: list[int], groups: int, form: ExtraKeyForm, lora: Lora | None, salt: str | None, full: bool
    ) -> None:
        self.tokens = tokens
        self.computed = 0
        """Leading tokens whose KV exists once the current step has run."""
        self.digests: list[BlockHash] = []
        self.blocks: list[list[_Block]] = [[] for _ in range(groups)]
        self.cached = [0] * groups
        """Leading blocks of each group that were announced, or were found in the cache."""
        self.lora = lora
        self.report_full = full
        lora_key: list[Any] = [] if lora is None else [_lora_key(lora, form)]
        salt_key: list[Any] = [] if not salt else [["cache_salt", salt] if form == "tagged" else salt]
        names: list[Any] = [] if lora is None else [lora.name]
        # Only two extra-key values exist per text sequence: that of the first block, and that of all others.
        self._hash_keys = (lora_key + salt_key or None, lora_key or None)
        self._event_keys = (names + ([salt] if salt else []) or None, names or None)

    def hash_keys(self, index: int) -> list[Any] | None:
        return self._hash_keys[index > 0]

    def event_keys(self, index: int) -> list[Any] | None:
        return self._event_keys[index > 0]


def _lora_key(lora: Lora, form: ExtraKeyForm) -> Any:
    match form:
        case "lora_id":
            return lora.id
        case "untagged":
            return lora.name
        case "tagged":
            return ["lora", lora.name, lora.path]


class BlockPool:
    """All KV blocks of one engine core. Not thread safe; every method is synchronous and free of I/O."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        root: BlockHash,
        *,
        extra_keys: ExtraKeyForm = "tagged",
        unhashed_first: bool = True,
        windows: Iterable[int | None] = (None,),
    ) -> None:
        """num_blocks: physical blocks, the null block included, so one less is usable. root: the none-hash.

        unhashed_first: freed blocks without a hash are taken next, before any cached one (0.26 and later; 0.11.0
        queues them like the others). windows: per attention group its sliding window in tokens, or None for full
        attention, which comes first.
        """
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a pool needs at least 2 blocks of at least 1 token")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.windows = tuple(windows)
        self._sliding = [(g, w) for g, w in enumerate(self.windows) if w is not None]
        if not self.windows or self.windows[0] is not None:
            raise ValueError("the first group must be full attention")
        self._root = root
        self._form = extra_keys
        self._unhashed_first = unhashed_first
        self._null = _Block(NULL_BLOCK)
        self._blocks = [self._null, *(_Block(BlockId(i)) for i in range(1, num_blocks))]
        # An OrderedDict is a doubly linked queue: oldest first, any block can leave from the middle.
        self._free: OrderedDict[BlockId, _Block] = OrderedDict((b.id, b) for b in self._blocks[1:])
        self._cached: dict[tuple[int, bytes], list[_Block]] = {}
        self._events: list[PoolEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks no sequence references, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of usable blocks that are referenced, 0 to 1."""
        return 1 - len(self._free) / (self.num_blocks - 1)

    def sequence(
        self, tokens: list[int], *, lora: Lora | None = None, salt: str | None = None, report_full: bool = False
    ) -> Sequence:
        """A new sequence over `tokens`, which it keeps. An empty salt is none. Does not touch the pool."""
        return Sequence(tokens, len(self.windows), self._form, lora, salt, report_full)

    def match(self, seq: Sequence) -> Hit:
        """The longest usable cached prefix of a sequence that owns no blocks. Hashes no further than it must."""
        size = self.block_size
        limit = (len(seq.tokens) - 1) // size
        full: list[_Block] = []
        for index in range(limit):
            copies = self._cached.get((0, self._digest(seq, index)))
            if copies is None:
                break
            full.append(copies[0])
        groups = [full]
        for group, window in self._sliding:
            found = self._match_window(seq, group, window, len(full))
            del full[len(found) :]
            groups.append(found)
        return Hit(len(full) * size, tuple(blocks[: len(full)] for blocks in groups))

    def allocate(self, seq: Sequence, upto: int, hit: Hit | None = None) -> bool:
        """Give the sequence blocks for its first `upto` tokens, and announce those that are now full.

        hit: the result of `match`, for a sequence that owns no blocks yet. False, with nothing allocated, when too
        few blocks are free. Evicts cached free blocks, oldest first.
        """
        if self._sliding:
            self._drop_skipped(seq)
        elif hit is None and upto <= len(seq.blocks[0]) * self.block_size:
            # Decoding inside a block the sequence already has: 15 of 16 steps, so worth a way around the general one.
            seq.computed = upto
            full = min(upto, len(seq.tokens)) // self.block_size
            if full > seq.cached[0]:
                self._announce(seq, 0, seq.cached[0], full)
            return True
        reused: tuple[list[_Block], ...] = hit.blocks if hit is not None else tuple([] for _ in seq.blocks)
        target = -(-upto // self.block_size)
        fresh = [max(0, target - len(own) - len(found)) for own, found in zip(seq.blocks, reused, strict=True)]
        # Reused blocks nobody references come out of the free queue too.
        revived = sum(b.refs == 0 and b is not self._null for found in reused for b in found)
        if sum(fresh) + revived > len(self._free):
            return False
        if hit is not None:
            self._reuse(seq, hit)
        for own, count in zip(seq.blocks, fresh, strict=True):
            own.extend(self._take() for _ in range(count))
        seq.computed = upto
        full = min(upto, len(seq.tokens)) // self.block_size
        for group in range(len(self.windows)):
            if full > seq.cached[group]:
                self._announce(seq, group, seq.cached[group], full)
        return True

    def free(self, seq: Sequence) -> None:
        """Release every block of the sequence, tail first. Emits nothing: what was cached stays findable.

        The sequence may be allocated again from its start (preemption by recompute)."""
        for own in seq.blocks:
            self._release(reversed(own))
            own.clear()
        seq.cached = [0] * len(self.windows)
        seq.computed = 0

    def reset(self) -> bool:
        """Forget every cached block. Refused (False) while any block is referenced."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for copies in self._cached.values():
            for block in copies:
                block.key = None
        self._cached.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[PoolEvent]:
        """Events since the last call, in causal order."""
        events, self._events = self._events, []
        return events

    def resident(self, group: int = 0) -> Counter[bytes]:
        """Copies of every findable block of a group, by digest."""
        return Counter({digest: len(copies) for (g, digest), copies in self._cached.items() if g == group})

    def _digest(self, seq: Sequence, index: int) -> BlockHash:
        digests, size = seq.digests, self.block_size
        while len(digests) <= index:
            i = len(digests)
            parent = digests[-1] if digests else self._root
            digests.append(block_hash(parent, seq.tokens[i * size : (i + 1) * size], seq.hash_keys(i)))
        return digests[index]

    def _match_window(self, seq: Sequence, group: int, window: int, limit: int) -> list[_Block]:
        """The longest prefix of at most `limit` blocks whose last window is cached, nulls before the window."""
        needed = -(-(window - 1) // self.block_size)
        found = [self._null] * limit
        run = 0
        for index in range(limit - 1, -1, -1):
            copies = self._cached.get((group, self._digest(seq, index)))
            if copies is None:
                run = 0
                continue
            found[index] = copies[0]
            run += 1
            if run == needed:
                return found[: index + run]
        return found[:run]

    def _drop_skipped(self, seq: Sequence) -> None:
        """Free the blocks that no window reaches any more; a null block keeps their place in the table."""
        for group, window in self._sliding:
            own = seq.blocks[group]
            skipped: list[_Block] = []
            for index in range(min((seq.computed - window + 1) // self.block_size, len(own)) - 1, -1, -1):
                if own[index] is self._null:
                    break
                skipped.append(own[index])
                own[index] = self._null
            self._release(skipped)

    def _reuse(self, seq: Sequence, hit: Hit) -> None:
        for group, found in enumerate(hit.blocks):
            for block in found:
                if block is not self._null:
                    if block.refs == 0:
                        del self._free[block.id]
                    block.refs += 1
            seq.blocks[group].extend(found)
            seq.cached[group] = len(found)
            if seq.report_full and found:
                self._emit_stored(seq, group, 0, len(found))

    def _take(self) -> _Block:
        """The block that was freed longest ago, evicted if it was cached."""
        _, block = self._free.popitem(last=False)
        key = block.key
        if key is not None:
            copies = self._cached[key]
            copies.remove(block)
            if not copies:
                del self._cached[key]
            block.key = None
            self._events.append(Removed(key[1], key[0]))
        block.refs = 1
        return block

    def _release(self, blocks: Iterable[_Block]) -> None:
        unhashed: list[_Block] = []
        for block in blocks:
            if block is self._null:
                continue
            block.refs -= 1
            if block.refs == 0:
                self._free[block.id] = block
                if block.key is None:
                    unhashed.append(block)
        if self._unhashed_first:
            for block in reversed(unhashed):
                self._free.move_to_end(block.id, last=False)

    def _announce(self, seq: Sequence, group: int, start: int, end: int) -> None:
        """Make blocks [start, end) findable, in one event."""
        self._digest(seq, end - 1)
        own = seq.blocks[group]
        for index in range(start, end):
            block = own[index]
            if block is self._null:
                continue
            block.key = (group, seq.digests[index])
            self._cached.setdefault(block.key, []).append(block)
        seq.cached[group] = end
        self._emit_stored(seq, group, start, end)

    def _emit_stored(self, seq: Sequence, group: int, start: int, end: int) -> None:
        own, size = seq.blocks[group], self.block_size
        shown = [i for i in range(start, end) if own[i] is not self._null]
        self._events.append(
            Stored(
                digests=[seq.digests[i] for i in shown],
                parent=seq.digests[start - 1] if start else None,
                tokens=seq.tokens[start * size : end * size],
                extra_keys=[seq.event_keys(i) for i in shown],
                lora=seq.lora,
                group=group,
                window=self.windows[group],
            )
        )
