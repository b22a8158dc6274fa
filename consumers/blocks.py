"""The blocks of one replica: how they hang together, and what of them the index must show.

A *node* is one engine block of the full-attention group. It is *attached* iff it is held in some tier, its canonical
chain is known, and its parent is attached or it starts the prompt (prefix closure over the union of tiers). A node
exists only while it is held or something below it is.

Changes are made at once; what they mean for the index is worked out by `settle`, once per batch, from the nodes that
were touched. After it, the writes it returned, applied to an index that had all earlier ones, make that equal to the
attached part.

`block_table` and `copies` give the native kernel's twins of the classes here, where there is a kernel: the same
methods with the same answers, at a quarter of the memory (about 120 bytes a block) and a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, cast

import msgspec

from ..proto.events import EngineHash
from ..proto.hashing import BlockHash, BlockKey, PackedTokens, block_key, chain_hashes
from ..proto.index import PAGE_SPAN, THROUGH, BlockWrite, PackedWrites, PageHead, TierMask
from ..proto.native import kernel

Inputs = tuple[Sequence[int], Sequence[Any] | None]
"""What a block's hash covers besides its parent: token ids, tagged extra keys."""


State = tuple[int, int | None, bool, int, bytes | None, bytes | None, int, bytes | None, Any, Any, Any, bool]
"""Of a node: hash, its parent's, placed, tiers, digest, engine digest, depth, head, keys, tail, pending, opaque."""


class Node(msgspec.Struct, eq=False):
    """One engine block. Set nothing but `opaque`, `pending` and `lacking`, and mark it then; compare it by `==`."""

    hash: EngineHash
    parent: Node | None = None
    placed: bool = False
    """Its parent is known (None then means: it starts the prompt)."""
    tiers: int = 0
    """Tiers that hold a copy, as a bit mask."""
    mask: int = 0
    """Tiers and THROUGH as last emitted to the index; 0 while detached."""
    digest: BlockHash | None = None
    """Canonical hash of the last index block completed at or before its end (or the none-hash)."""
    engine_digest: bytes | None = None
    """The engine-side digest at its end, where the engine's rule is known."""
    depth: int = 0
    """Index blocks completed up to its end."""
    head: PageHead | None = None
    """Page head of the last of those."""
    keys: tuple[BlockKey, ...] = ()
    """Index blocks that complete within it; the last is the end of its digest."""
    tail: Inputs | None = None
    """Tokens and extra keys since the last completed index block; None unless engine blocks are smaller."""
    pending: Inputs | None = None
    """Tokens and extra keys, kept until the parent's digest is known."""
    opaque: bool = False
    """It depends on something the wire hides, so no prompt can be known to match it."""
    lacking: bool = False
    """Some further cache group lacks what a prompt that goes on here needs: it is shown as THROUGH."""
    below: Node | set[Node] | None = None
    """Its children: most blocks have one at most, and a set takes more memory than the rest of the node."""

    @property
    def children(self) -> Collection[Node]:
        """Nodes that name it as their parent."""
        below = self.below
        return below if isinstance(below, set) else () if below is None else (below,)

    def place(self, parent: Node | None) -> None:
        """Hang it under its parent; None: it starts the prompt."""
        self.placed, self.parent = True, parent
        if parent is None:
            return
        below = parent.below
        if isinstance(below, set):
            below.add(self)
        elif below is None:
            parent.below = self
        elif below is not self:
            parent.below = {below, self}

    def extend(
        self,
        digest: BlockHash | None,
        engine_digest: bytes | None,
        depth: int,
        head: PageHead | None,
        keys: Sequence[BlockKey],
        tail: Inputs | None,
    ) -> None:
        """Set the state of its chain at its end; not while it is attached."""
        if len(keys) > depth or (keys and (digest is None or keys[-1] != block_key(digest))):
            raise ValueError("the keys are not those of the digest")
        self.digest, self.engine_digest, self.depth, self.head = digest, engine_digest, depth, head
        self.keys, self.tail = tuple(keys), tail


class Copies(dict[EngineHash, int]):
    """Engine hash → physical copies, in the order the blocks came."""

    def drop(self, h: EngineHash) -> int:
        """Forget a block. Returns how many copies there were."""
        return self.pop(h, 0)

    def oldest(self) -> EngineHash:
        """The block that came first. Raises KeyError if there is none."""
        for h in self:
            return h
        raise KeyError


class BlockTable:
    """All nodes of one replica, by engine hash and by index block."""

    def __init__(self) -> None:
        self.held = 0
        """Nodes held in some tier."""
        self.attached = 0
        """Of those, how many are attached."""
        self.ambiguous = 0
        """Index blocks that several nodes have at present."""
        self._nodes: dict[EngineHash, Node] = {}
        self._claims: dict[BlockKey, Node | set[Node]] = {}
        self._dirty: dict[Node, None] = {}
        self._dropped: list[Node] = []
        self._emitted: dict[BlockKey, BlockWrite] = {}
        self._contests = 0

    # ---- reading ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def index_blocks(self) -> int:
        """Index blocks attached."""
        return len(self._claims)

    def nodes(self) -> list[Node]:
        """All of them, in no particular order."""
        return list(self._nodes.values())

    def states(self) -> list[State]:
        """Of every node, in no particular order."""
        return [
            (
                node.hash,
                None if node.parent is None else node.parent.hash,
                node.placed,
                node.tiers,
                node.digest,
                node.engine_digest,
                node.depth,
                node.head,
                node.keys,
                node.tail,
                node.pending,
                node.opaque,
            )
            for node in self._nodes.values()
        ]

    def get(self, h: EngineHash) -> Node | None:
        """The node of this name, if there is one."""
        return self._nodes.get(h)

    def owners(self, key: BlockKey) -> list[Node]:
        """Attached nodes that have this index block."""
        owner = self._claims.get(key)
        return [] if owner is None else list(owner) if isinstance(owner, set) else [owner]

    def shows(self, key: BlockKey) -> int:
        """Tiers and THROUGH the index must show of one block; 0 if it is not attached."""
        owner = self._claims.get(key)
        if owner is None:
            return 0
        if isinstance(owner, Node):
            return _shown(owner, key)
        mask, through = 0, THROUGH
        for node in owner:
            shown = _shown(node, key)
            mask |= shown
            through &= shown
        return mask & ~THROUGH | through

    def index_keys(self, start: int = 0, step: int = 1) -> list[BlockKey]:
        """Every step-th attached index block from one on. Neighbours came together, mostly."""
        return list(islice(self._claims, start, None, step))

    def attached_writes(self) -> bytes:
        """The whole attached part, as packed writes. In no particular order."""
        attached = {write.key: write for node in self._nodes.values() if node.mask for write in self._writes(node)}
        return PackedWrites.of(attached.values()).raw

    # ---- changing -----------------------------------------------------------------------------------------------

    def node(self, h: EngineHash) -> Node:
        """The node of this name; made if there is none, neither held nor placed."""
        node = self._nodes.get(h)
        if node is None:
            node = self._nodes[h] = Node(h)
        return node

    def mark(self, node: Node) -> None:
        """Look at this node again when settling."""
        self._dirty[node] = None

    def hold(self, node: Node, bits: int) -> None:
        """It is held in these tiers, besides others."""
        if node.tiers & bits != bits:
            self.held += not node.tiers
            node.tiers |= bits
            self._dirty[node] = None

    def unhold(self, node: Node, bit: int) -> None:
        """It is held in this tier no more."""
        if node.tiers & bit:
            node.tiers &= ~bit
            self.held -= not node.tiers
            self._dirty[node] = None

    def store(
        self,
        copies: Copies,
        hashes: Sequence[EngineHash],
        tokens: bytes,
        block_size: int,
        parent: EngineHash | None,
        root: BlockHash,
        bit: int,
        predicted: bool,
    ) -> bool:
        """Take in, the short way, a chain of blocks nobody has seen: each one index block without extra keys, the
        first right below an attached node or (parent None) below `root`. One copy of each, in one tier.

        tokens: packed. predicted: the engine names such blocks by their keys. Most of what engines publish is of this
        kind. Does what the long way would, or nothing at all and returns False where anything is out of the ordinary.
        """
        count, nodes = len(hashes), self._nodes
        above: Node | None = None
        digest, depth, head = root, 0, None
        if not count or len(tokens) != 4 * block_size * count:
            return False
        if parent is not None:
            above = nodes.get(parent)
            if (
                above is None
                or not (above.mask and above.tiers)
                or above in self._dirty
                or above.digest is None
                or above.tail is not None
                or (predicted and above.engine_digest != above.digest)
            ):
                return False
            digest, depth, head = above.digest, above.depth, above.head
        if not (nodes.keys().isdisjoint(hashes) and copies.keys().isdisjoint(hashes)) or len(set(hashes)) != count:
            return False
        digests = chain_hashes(digest, block_size, cast("list[int]", PackedTokens(tokens)))
        keys = [block_key(one) for one in digests]
        if not self._claims.keys().isdisjoint(keys):
            return False
        if predicted and any(int.from_bytes(key, "big") != h for h, key in zip(hashes, keys, strict=True)):
            return False
        before = None if above is None else block_key(digest)
        for h, digest, key in zip(hashes, digests, keys, strict=True):
            if depth % PAGE_SPAN == 0 or head is None:
                head = PageHead(key)
            self._emitted[key] = BlockWrite(key, before, head, depth, TierMask(bit))
            depth += 1
            engine_digest = digest if predicted else None
            node = Node(h, None, True, bit, bit, digest, engine_digest, depth, head, (key,))
            node.place(above)
            nodes[h] = self._claims[key] = node
            above, before = node, key
        copies.update(dict.fromkeys(hashes, 1))
        self.held += count
        self.attached += count
        return True

    def remove(self, copies: Copies, hashes: Sequence[EngineHash], bit: int) -> int:
        """One copy less of each, in a medium that is the only one of its tier. Returns how many had none."""
        unknown = 0
        for h in hashes:
            left = copies.get(h, 0) - 1
            if left > 0:
                copies[h] = left
            elif left < 0:
                unknown += 1
            else:
                del copies[h]
                if (node := self._nodes.get(h)) is not None:
                    self.unhold(node, bit)
        return unknown

    def collect(self, node: Node) -> None:
        """Drop a node that is neither held nor needed by anything below it, and ancestors freed by that."""
        while not node.tiers and not node.children and self._nodes.get(node.hash) is node:
            del self._nodes[node.hash]
            self._dropped.append(node)
            parent = node.parent
            if parent is None:
                return
            if isinstance(parent.below, set):
                parent.below.discard(node)
            elif parent.below is node:
                parent.below = None
            node = parent

    def settle(self, report: bool) -> tuple[bytes, int, list[Node]]:
        """Bring attachment up to date with everything marked, held and dropped since the last time.

        Returns what the index must be told, as packed writes of at most one per block; how often a block turned out
        to have another node already; and, if `report`, the nodes that were dropped.
        """
        dirty, self._dirty = self._dirty, {}
        old: dict[Node, int] = {}
        for node in dirty:
            self._attach(node, old)
        changed = [(node, was) for node, was in old.items() if node.mask != was]
        # What goes gives up its keys first, so that nobody who takes one over is thought to share it.
        for node, _ in changed:
            if not node.mask:
                for key in node.keys:
                    self._disclaim(key, node)
        for node, was in changed:
            if not was:
                for key in node.keys:
                    self._claim(key, node)
        for node, _ in changed:
            for write in self._writes(node):
                self._emitted[write.key] = write
        for node in dirty:
            if not node.tiers:
                self.collect(node)
        writes, contests, dropped = PackedWrites.of(self._emitted.values()).raw, self._contests, self._dropped
        self._emitted, self._contests, self._dropped = {}, 0, []
        return writes, contests, dropped if report else []

    def clear(self) -> None:
        """Forget everything."""
        for node in self._nodes.values():
            node.parent = node.below = None  # nothing for the cycle collector, which seldom looks at what is old
        self.__init__()  # type: ignore[misc]  # there is no subclass

    # ---- attaching ----------------------------------------------------------------------------------------------

    def _wanted(self, node: Node) -> int:
        """The tiers and THROUGH this node should show in the index; 0 while detached."""
        if not node.tiers or node.opaque or node.digest is None:
            return 0
        parent = node.parent
        if parent is not None and not parent.mask:
            return 0
        through = THROUGH if node.lacking else 0
        if parent is None or parent.tail is None or not node.keys:
            return node.tiers | through
        # Several engine pages make one index block: a tier holds it when it holds all of them.
        common, slowest = node.tiers, node.tiers & -node.tiers
        above: Node | None = parent
        while above is not None and above.tail is not None:
            common &= above.tiers
            slowest = max(slowest, above.tiers & -above.tiers)
            above = above.parent
        return (common or slowest) | through

    def _completing(self, page: Node) -> Iterator[Node]:
        """The nodes at which an index block completes that `page`, which completes none, is part of."""
        todo = [page]
        while todo:
            for child in todo.pop().children:
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
                todo.extend(node.children)
            elif not node.keys:
                # A page without a key of its own still decides the tiers of the block it is part of.
                todo.extend(self._completing(node))

    def _writes(self, node: Node) -> Iterator[BlockWrite]:
        parent = node.parent
        head = None if parent is None else parent.head
        above = None if parent is None or not parent.depth or parent.digest is None else block_key(parent.digest)
        depth = node.depth - len(node.keys)
        for key in node.keys:
            if depth % PAGE_SPAN == 0 or head is None:
                head = PageHead(key)
            yield BlockWrite(key, above, head, depth, TierMask(self.shows(key)))
            above, depth = key, depth + 1

    def _claim(self, key: BlockKey, node: Node) -> None:
        other = self._claims.setdefault(key, node)
        if other is node:
            return
        self._contests += 1
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


def _shown(node: Node, key: BlockKey) -> int:
    """What the index shows of one of a node's index blocks. An engine reuses its own blocks whole: one that is wider
    than an index block is no hit for a prompt that leaves it half way."""
    mask = node.mask
    return mask | THROUGH if mask and key != node.keys[-1] else mask


def block_table() -> BlockTable:
    """An empty one, of the native kernel if there is one."""
    return BlockTable() if kernel is None else cast(BlockTable, kernel.BlockTable())


def copies_table() -> Copies:
    """An empty one, of the native kernel if there is one: a block table takes only its own kind."""
    return Copies() if kernel is None else cast(Copies, kernel.Copies())
