"""What one replica holds: the consumer's own exact picture, and what of it belongs in the index.

Two structures, each with one job:

- *tables*, one per (medium, group): engine hash → physical copies. They mirror the engine's own table, since engines
  do not merge duplicates: k copies come as k stores and go as k removals.
- *nodes*, one per engine block of the full-attention group: how blocks hang together, and their canonical hashes.
  A node whose parent was never seen, or is gone, is *detached*: kept, absent from the index, and attached again with
  all that hangs below it the moment its parent returns.

An engine block may be smaller than an index block (SGLang pages of one token) or larger: a node therefore carries
the chain state at its end and the keys of those index blocks that complete within it, none or several.

Invariants: a node is attached iff it is held in some tier, its canonical chain is known, and its parent is attached
or it starts the prompt (prefix closure over the union of tiers). After `settle` the emitted writes, applied to an
index that had all earlier ones, make it equal to the attached part. A node exists only while it is held or something
below it is. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ..proto.engine import HashRule
from ..proto.errors import UnhashableBlock
from ..proto.events import (
    FULL_ATTENTION_KINDS,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EngineHash,
    tier_of,
)
from ..proto.hashing import BlockHash, BlockKey, Namespace, block_hash, block_key, event_extra_keys
from ..proto.index import PAGE_SPAN, BlockWrite, PageHead, TierMask

HashMode = Literal["auto", "engine", "recompute"]
"""auto: recompute, and distrust blocks whose published name an established parity does not explain. engine: the
engine's own hashes are the keys (it runs sha256_cbor under our seed). recompute: never compare."""
CopyMode = Literal["count", "set"]
"""count: k stores need k removals. set: for engines that announce reused blocks again (vLLM report mode full)."""

DEFAULT_MAX_BLOCKS = 4_000_000
"""Bound on copies kept per replica, and on half the nodes; far above any real pool. The oldest go first, and the
state says so."""


Inputs = tuple[Sequence[int], Sequence[Any] | None]
"""What a block's hash covers besides its parent: token ids, tagged extra keys."""


class Node:
    """One engine block of the full-attention group."""

    __slots__ = (
        "children",
        "depth",
        "digest",
        "engine_digest",
        "hash",
        "head",
        "keys",
        "mask",
        "opaque",
        "parent",
        "pending",
        "placed",
        "tail",
        "tiers",
    )

    def __init__(self, engine_hash: EngineHash) -> None:
        self.hash = engine_hash
        self.parent: Node | None = None
        self.children: set[Node] | None = None
        self.placed = False
        """Its parent is known (None then means: it starts the prompt)."""
        self.tiers = 0
        """Tiers that hold a copy, as a bit mask."""
        self.mask = 0
        """Tiers as last emitted to the index; 0 while detached."""
        self.digest: BlockHash | None = None
        """Canonical hash of the last index block completed at or before its end (or the none-hash)."""
        self.engine_digest: bytes | None = None
        """The engine-side digest at its end, where the engine's rule is known."""
        self.depth = 0
        """Index blocks completed up to its end."""
        self.head: PageHead | None = None
        """Page head of the last of those."""
        self.keys: tuple[BlockKey, ...] = ()
        """Index blocks that complete within it."""
        self.tail: Inputs | None = None
        """Tokens and extra keys since the last completed index block; None unless engine blocks are smaller."""
        self.pending: Inputs | None = None
        """Tokens and extra keys, kept until the parent's digest is known."""
        self.opaque = False
        """It depends on something the wire hides, so no prompt can be known to match it."""


class Delta(msgspec.Struct, frozen=True):
    """What changed for the index since the last settle."""

    reset: bool
    """Everything written before belongs to a past incarnation; `writes` start from nothing."""
    writes: list[BlockWrite]
    """Absolute states, at most one per key, in no particular order."""


class InventoryStats(msgspec.Struct):
    """Running totals; every oddity of a stream is counted under exactly one name."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    duplicate_stores: int = 0
    """Stores of a block that already had a copy in that medium."""
    unknown_removals: int = 0
    """Removals of a block that had no copy (a lost store, or an announcement twice removed)."""
    foreign: int = 0
    """Blocks of another block size, recorded by medium only (LMCache chunks, partial entries)."""
    unplaced: int = 0
    """Blocks announced without usable tokens or parent (offload placeholders, masked groups)."""
    unhashable: int = 0
    """Blocks whose published inputs do not determine a canonical hash."""
    hidden: int = 0
    """Chains that parity shows to depend on something the wire hides, counted at their first such block."""
    ambiguous: int = 0
    """Times two engine hashes claimed the same canonical block: some hidden input exists."""
    reparented: int = 0
    """Stores naming another parent than before: hashes that do not bind their prefix."""
    evicted: int = 0
    """Copies dropped at the inventory's own bound."""
    parity_ok: int = 0
    parity_bad: int = 0


class Inventory:
    """The picture of one incarnation of one replica's cache."""

    def __init__(
        self,
        namespace: Namespace,
        *,
        rule: HashRule | None = None,
        hash_mode: HashMode = "auto",
        copy_mode: CopyMode = "count",
        max_blocks: int = DEFAULT_MAX_BLOCKS,
    ) -> None:
        self.block_size = namespace.block_size
        self.stats = InventoryStats()
        self._root = namespace.root
        self._rule = rule if hash_mode == "auto" else None
        self._engine_root = rule.root(self._root) if rule is not None and hash_mode == "auto" else None
        self._engine_keys = hash_mode == "engine"
        self._count = copy_mode == "count"
        self._max_blocks = max_blocks
        self._reset = False
        self.parity = False
        """A published name was predicted at least once: the engine's seed and rule are ours."""
        self._main_group: int | None = None
        self._page_size: int | None = None
        self._start()

    def _start(self) -> None:
        self._tables: dict[tuple[str, int], dict[EngineHash, int]] = {}
        self._nodes: dict[EngineHash, Node] = {}
        self._claims: dict[BlockKey, Node | set[Node]] = {}
        self._dirty: dict[Node, None] = {}
        self._emitted: dict[BlockKey, BlockWrite] = {}
        self._suspects: set[Node] = set()
        self.copies = 0
        """Physical copies held, over all media and groups."""
        self.held = 0
        """Engine blocks of the full-attention group held in some tier."""
        self.attached = 0
        """Of those, how many are attached."""
        self.ambiguous = 0
        """Index blocks that several engine hashes claim at present."""
        self.flaws: set[str] = set()
        """Why this picture may differ from the engine's, as metric labels; see `InventoryStats` for each."""

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    def detached(self) -> int:
        """Engine blocks held but absent from the index."""
        return self.held - self.attached

    @property
    def index_blocks(self) -> int:
        """Index blocks currently attached."""
        return len(self._claims)

    @property
    def nodes(self) -> int:
        """Engine blocks known by name: those held, and those that something held hangs under."""
        return len(self._nodes)

    def resident(self, medium: str = "gpu") -> dict[tuple[int, EngineHash], int]:
        """(group, engine hash) → copies in one medium: comparable with the engine's own table."""
        return {
            (group, h): n for (name, group), table in self._tables.items() if name == medium for h, n in table.items()
        }

    def tables(self) -> Mapping[tuple[str, int], Mapping[EngineHash, int]]:
        """(medium, group) → engine hash → copies. A live view; do not change it."""
        return self._tables

    def node(self, engine_hash: EngineHash) -> Node | None:
        """The node of one engine block, for audits and explanations."""
        return self._nodes.get(engine_hash)

    def find(self, keys: Iterable[BlockKey]) -> dict[BlockKey, list[Node]]:
        """The nodes at which these index blocks complete, attached or not; keys nobody knows are left out.

        For explanations: linear in the inventory as soon as anything is detached.
        """
        found: dict[BlockKey, list[Node]] = {}
        unclaimed: set[BlockKey] = set()
        for key in keys:
            owner = self._claims.get(key)
            if owner is None:
                unclaimed.add(key)
            else:
                found[key] = [owner] if isinstance(owner, Node) else list(owner)
        if unclaimed and self.detached:
            for node in self._nodes.values():
                for key in node.keys:
                    if key in unclaimed:
                        found.setdefault(key, []).append(node)
        return found

    def expected(self) -> dict[BlockKey, TierMask]:
        """What the index must hold under this incarnation once everything emitted is written."""
        return {key: TierMask(self._claimed(key)) for key in self._claims}

    def attached_writes(self) -> Iterator[BlockWrite]:
        """The whole attached part, as writes for a fresh incarnation. In no particular order."""
        seen: set[BlockKey] = set()
        for node in self._nodes.values():
            if node.mask:
                for write in self._writes(node):
                    if write.key not in seen:
                        seen.add(write.key)
                        yield write

    # ---- applying -----------------------------------------------------------------------------------------------

    def apply(self, batch: Batch) -> Delta:
        """Apply one batch in order and settle. Never raises on what an engine may send."""
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    self._removed(event)
                case AllBlocksCleared():
                    self.clear()
                    self.stats.cleared += 1
        return self.settle()

    def clear(self) -> None:
        """Forget everything held: the engine reset its cache. What the stream taught of the engine stays."""
        self._start()
        self._reset = True

    def restart(self) -> None:
        """Forget everything: another engine process took over the stream, perhaps with another hash seed."""
        self.clear()
        self.parity = False
        self._main_group = self._page_size = None

    def settle(self) -> Delta:
        """Bring attachment up to date after changes and return what the index must be told."""
        self._enforce_bound()
        dirty, self._dirty = self._dirty, {}
        old: dict[Node, int] = {}
        for node in dirty:
            self._attach(node, old)
        for node, mask in old.items():
            if node.mask != mask:
                self._emit(node, mask)
        for node in dirty:
            if not node.tiers:
                self._collect(node)
        delta = Delta(self._reset, list(self._emitted.values()))
        self._reset, self._emitted = False, {}
        return delta

    def _stored(self, event: BlockStored) -> None:
        stats, hashes = self.stats, event.hashes
        stats.stored += len(hashes)
        table = self._tables.setdefault((event.medium, event.group), {})
        for h in hashes:
            copies = table.get(h, 0)
            if copies:
                stats.duplicate_stores += 1
                if not self._count:
                    continue
            table[h] = copies + 1
            self.copies += 1
        if not hashes or not self._is_main(event):
            return
        bit = 1 << tier_of(event.medium)
        size, tokens = event.block_size, event.tokens
        aligned = size > 0 and len(tokens) == size * len(hashes)
        if tokens and not self._fits(size, event.medium, aligned):
            stats.foreign += len(hashes)
            return
        usable = aligned or (self._engine_keys and (event.parent is not None or bool(tokens)))
        if not usable:
            stats.unplaced += len(hashes)
            for h in hashes:
                self._hold(self._node(h), bit)
            return
        first = parent = None if event.parent is None else self._node(event.parent)
        extra = event.extra_keys
        for i, h in enumerate(hashes):
            node = self._node(h)
            if not node.placed:
                inputs: Inputs | None = None
                try:
                    if event.lookahead and not self._engine_keys:
                        raise UnhashableBlock("lookahead")
                    if aligned:
                        keys = event_extra_keys(
                            extra[i] if extra is not None else None,
                            lora_name=event.lora_name,
                            lora_id=event.lora_id,
                            first=parent is None,
                            salt=event.cache_salt,
                        )
                        inputs = (tokens[i * size : (i + 1) * size], keys)
                except UnhashableBlock:
                    stats.unhashable += 1
                    node.opaque = not self._engine_keys
                self._place(node, parent, inputs)
            elif node.parent is not parent:
                stats.reparented += 1
                self.flaws.add("hashes_do_not_bind_prefix")
            self._hold(node, bit)
            parent = node
        if first is not None:
            self._collect(first)

    def _is_main(self, event: BlockStored) -> bool:
        """Does this group's presence make a prefix usable? Learns the group's index at its first store."""
        if event.kind is not None and event.kind not in FULL_ATTENTION_KINDS:
            return False
        if self._main_group is None and (event.kind is not None or event.group == 0):
            self._main_group = event.group
        return event.group == self._main_group

    def _fits(self, size: int, medium: str, aligned: bool) -> bool:
        """Is this the engine's own block size? The first aligned store in GPU memory settles what that is."""
        if self._page_size is None:
            if size <= 0 or (self.block_size % size and size % self.block_size):
                return False
            if self._engine_keys and size != self.block_size:
                return False
            if medium != "gpu" or not aligned:
                return size == self.block_size
            self._page_size = size
        return size == self._page_size

    def _node(self, h: EngineHash) -> Node:
        node = self._nodes.get(h)
        if node is None:
            node = self._nodes[h] = Node(h)
        return node

    def _hold(self, node: Node, bit: int) -> None:
        if not node.tiers & bit:
            if not node.tiers:
                self.held += 1
            node.tiers |= bit
            self._dirty[node] = None

    def _place(self, node: Node, parent: Node | None, inputs: Inputs | None) -> None:
        """Hang a node under its parent and extend the chain as far down as it is now known."""
        # Only a node that was named as a parent before can be above its own parent.
        if parent is node or (parent is not None and node.children and self._is_below(parent, node)):
            # A block cannot be part of its own prefix. Nothing under such a name can be known to match.
            self.flaws.add("hashes_do_not_bind_prefix")
            self.stats.reparented += 1
            parent, node.opaque = None, True
        node.placed, node.parent, node.pending = True, parent, inputs
        if parent is not None:
            if parent.children is None:
                parent.children = set()
            parent.children.add(node)
            if parent.digest is None and not parent.opaque:
                return
        todo = [node]
        while todo:
            node = todo.pop()
            self._extend(node)
            self._dirty[node] = None
            todo.extend(child for child in node.children or () if child.digest is None)

    @staticmethod
    def _is_below(node: Node, other: Node) -> bool:
        """Is `other`, which is not placed, an ancestor of `node`? Then `node` has no known chain yet."""
        at: Node | None = node
        while at is not None and at.digest is None:
            if at is other:
                return True
            at = at.parent
        return False

    def _extend(self, node: Node) -> None:
        """Compute the chain state at a placed node's end from its parent's."""
        parent, inputs = node.parent, node.pending
        node.pending = None
        if parent is None:
            digest, engine_digest, depth = self._root, self._engine_root, 0
            head: PageHead | None = None
            tail: Inputs | None = None
        elif parent.opaque or parent.digest is None:
            node.opaque = True
            return
        else:
            digest, engine_digest, depth = parent.digest, parent.engine_digest, parent.depth
            head, tail = parent.head, parent.tail
        keys: list[BlockKey] = []
        if node.opaque:
            return
        if self._engine_keys:
            digest = BlockHash(node.hash.to_bytes(8, "big"))
            keys.append(BlockKey(digest))
        elif inputs is None:
            node.opaque = True
            return
        else:
            try:
                blocks, tail = _cut(tail, inputs, self.block_size)
            except UnhashableBlock:
                self.stats.unhashable += 1
                node.opaque = True
                return
            for tokens, extra in blocks:
                digest = block_hash(digest, tokens, extra)
                keys.append(block_key(digest))
            if self._rule is not None and engine_digest is not None:
                engine_digest = self._rule.extend(engine_digest, *inputs, digest)
                if engine_digest is not None and not self._compare(node, engine_digest):
                    engine_digest = None  # nothing below can be predicted either
        for key in keys:
            if depth % PAGE_SPAN == 0:
                head = PageHead(key)
            depth += 1
        node.digest, node.engine_digest, node.depth, node.head = digest, engine_digest, depth, head
        node.keys, node.tail = tuple(keys), tail

    def _compare(self, node: Node, engine_digest: bytes) -> bool:
        """Learn from one prediction of a published name; see proto/engine.py for what a miss means."""
        assert self._rule is not None
        if self._rule.published(engine_digest) == node.hash:
            self.stats.parity_ok += 1
            if not self.parity:
                self.parity = True
                for suspect in self._suspects:
                    self._hide(suspect)
                self._suspects.clear()
            return True
        self.stats.parity_bad += 1
        if self.parity:
            self._hide(node)
        else:
            self._suspects.add(node)
        return False

    def _hide(self, node: Node) -> None:
        """Take a block that depends on something unpublished, and all below it, out of what can match."""
        self.stats.hidden += 1
        todo = [node]
        while todo:
            node = todo.pop()
            node.opaque = True
            self._dirty[node] = None
            todo.extend(child for child in node.children or () if not child.opaque)

    def _removed(self, event: BlockRemoved) -> None:
        stats = self.stats
        stats.removed += len(event.hashes)
        table = self._tables.get((event.medium, event.group))
        for h in event.hashes:
            copies = table.get(h) if table is not None else None
            if table is None or copies is None:
                stats.unknown_removals += 1
                continue
            self.copies -= 1
            if copies > 1:
                table[h] = copies - 1
            else:
                del table[h]
                if event.group == self._main_group:
                    self._unhold(h, event.medium)

    def _unhold(self, h: EngineHash, medium: str) -> None:
        node = self._nodes.get(h)
        if node is None:
            return  # a foreign block: recorded by medium only
        tier = tier_of(medium)
        for (name, group), table in self._tables.items():
            if group == self._main_group and name != medium and tier_of(name) == tier and h in table:
                return
        if node.tiers & (1 << tier):
            node.tiers &= ~(1 << tier)
            if not node.tiers:
                self.held -= 1
            self._dirty[node] = None

    def _enforce_bound(self) -> None:
        # Nodes that are not held hang above one that is, so evicting copies frees nodes as well.
        while self.copies > self._max_blocks or (self.copies and len(self._nodes) > 2 * self._max_blocks):
            (medium, group), table = max(self._tables.items(), key=lambda item: len(item[1]))
            oldest = next(iter(table))
            self.copies -= table.pop(oldest)
            self.stats.evicted += 1
            self.flaws.add("inventory_bound")
            if group == self._main_group:
                self._unhold(oldest, medium)
                if (node := self._nodes.get(oldest)) is not None:
                    self._collect(node)

    # ---- attaching ----------------------------------------------------------------------------------------------

    def _wanted(self, node: Node) -> int:
        """The tier mask this node should show in the index; 0 while detached."""
        if not node.tiers or node.opaque or node.digest is None:
            return 0
        parent = node.parent
        if parent is not None and not parent.mask:
            return 0
        pages = self._pages(node)
        if len(pages) == 1:
            return node.tiers
        # Several engine pages make one index block: a tier holds it when it holds all of them.
        common, slowest = node.tiers, 0
        for page in pages:
            common &= page.tiers
            slowest = max(slowest, page.tiers & -page.tiers)
        return common or slowest

    def _pages(self, node: Node) -> list[Node]:
        """The engine pages that make up the index block completing at this node; itself if none does."""
        pages = [node]
        while node.keys and (parent := pages[-1].parent) is not None and parent.tail is not None:
            pages.append(parent)
        return pages

    def _completing(self, page: Node) -> Iterator[Node]:
        """The nodes at which an index block completes that `page`, which completes none, is part of."""
        todo = [page]
        while todo:
            for child in todo.pop().children or ():
                if child.keys:
                    yield child
                else:
                    todo.append(child)

    def _attach(self, node: Node, old: dict[Node, int]) -> None:
        todo = [node]
        while todo:
            node = todo.pop()
            wanted = self._wanted(node)
            if wanted == node.mask:
                continue
            old.setdefault(node, node.mask)
            flipped = bool(wanted) != bool(node.mask)
            if flipped:
                self.attached += 1 if wanted else -1
            node.mask = wanted
            if flipped:
                todo.extend(node.children or ())
            elif not node.keys:
                # A page without a key of its own still decides the tiers of the block it is part of.
                todo.extend(self._completing(node))

    def _emit(self, node: Node, was: int) -> None:
        for key in node.keys:
            if node.mask and not was:
                self._claim(key, node)
            elif was and not node.mask:
                self._disclaim(key, node)
        for write in self._writes(node):
            self._emitted[write.key] = write

    def _writes(self, node: Node) -> Iterator[BlockWrite]:
        parent = node.parent
        head = None if parent is None else parent.head
        above = None if parent is None or not parent.depth or parent.digest is None else block_key(parent.digest)
        depth = node.depth - len(node.keys)
        for key in node.keys:
            if depth % PAGE_SPAN == 0 or head is None:
                head = PageHead(key)
            yield BlockWrite(key, above, head, depth, TierMask(self._claimed(key)))
            above, depth = key, depth + 1

    def _claim(self, key: BlockKey, node: Node) -> None:
        other = self._claims.setdefault(key, node)
        if other is node:
            return
        self.stats.ambiguous += 1
        if isinstance(other, set):
            other.add(node)
        else:
            self._claims[key] = {other, node}
            self.ambiguous += 1

    def _disclaim(self, key: BlockKey, node: Node) -> None:
        owner = self._claims.get(key)
        if owner is node:
            del self._claims[key]
        elif isinstance(owner, set):
            owner.discard(node)
            if len(owner) == 1:
                self._claims[key] = owner.pop()
                self.ambiguous -= 1

    def _claimed(self, key: BlockKey) -> int:
        owner = self._claims.get(key)
        if owner is None:
            return 0
        if isinstance(owner, Node):
            return owner.mask
        mask = 0
        for node in owner:
            mask |= node.mask
        return mask

    def _collect(self, node: Node) -> None:
        """Drop a node that is neither held nor needed by anything below it, and ancestors freed by that."""
        while not node.tiers and not node.children and self._nodes.get(node.hash) is node:
            del self._nodes[node.hash]
            self._suspects.discard(node)
            parent = node.parent
            if parent is None or parent.children is None:
                return
            parent.children.discard(node)
            node = parent


def _cut(tail: Inputs | None, inputs: Inputs, size: int) -> tuple[list[Inputs], Inputs | None]:
    """Index blocks completed by one engine block after `tail`, and what is left over.

    Raises UnhashableBlock where the wire does not say which of several index blocks an extra key belongs to.
    """
    tokens, extra = inputs
    if tail is None and len(tokens) == size:
        return [inputs], None
    before, above = tail if tail is not None else ((), None)
    extra = _joined(above, extra, len(before))
    span = [*before, *tokens]
    full = len(span) - len(span) % size
    if full > size and any(entry[0] in ("mm", "prompt_embeds") for entry in extra or ()):
        raise UnhashableBlock("media_in_wide_block")
    blocks: list[Inputs] = []
    for start in range(0, full, size):
        blocks.append((span[start : start + size], extra))
        # A salt enters the first block of a prompt only; an adapter enters all of them.
        extra = [entry for entry in extra or () if entry[0] == "lora"] or None
    return blocks, (span[full:], extra) if full < len(span) else None


_EXTRA_ORDER = {"lora": 0, "mm": 1, "cache_salt": 2, "prompt_embeds": 3}


def _joined(first: Sequence[Any] | None, second: Sequence[Any] | None, shift: int) -> Sequence[Any] | None:
    """Extra keys of an index block from those of two neighbouring spans, the second `shift` tokens later."""
    merged = list(first or ())
    merged += [entry for entry in _shifted(second, shift) if entry not in merged]
    return sorted(merged, key=lambda entry: _EXTRA_ORDER[entry[0]]) or None


def _shifted(extra: Sequence[Any] | None, shift: int) -> list[Any]:
    return [["mm", e[1], e[2] + shift] if e[0] == "mm" else e for e in extra or ()]
