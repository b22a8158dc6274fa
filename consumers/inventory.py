"""What one replica holds: the consumer's own exact picture, and what of it belongs in the index.

Two structures, each with one job:

- *tables*, one per (medium, group): engine hash → physical copies. They mirror the engine's own table, since engines
  do not merge duplicates: k copies come as k stores and go as k removals.
- *nodes* (blocks.py), one per engine block of the full-attention group: how blocks hang together, and their canonical
  hashes. A node whose parent was never seen, or is gone, is *detached*: kept, absent from the index, and attached
  again with all that hangs below it the moment its parent returns.

An engine block may be smaller than an index block (SGLang pages of one token) or larger: a node therefore carries
the chain state at its end and the keys of those index blocks that complete within it, none or several.

Here is what an engine's events mean for both; what the nodes then mean for the index is up to the block table.
Nothing here does I/O or reads a clock.

Hybrid models keep further cache groups, and a hit needs all of them: of a sliding window the blocks before the point
where the prompt goes on, of a recurrent state the one block at that point, of anything else the whole prefix. A node
where some group lacks that is shown as THROUGH (proto/index.py): part of longer prefixes, no end of one.

After a loss. A lost batch may have held removals, so every copy known then is a *suspect*, until an event vouches for
it: its block is stored again, or one below it is (an engine computes a block only with its whole prefix in memory).
Suspects do not stay for ever: an engine evicts what nobody uses within one turnover, so a suspect that nothing
vouched for while the medium took in as many blocks as it can hold is dropped. Nor do they crowd out what is certain:
while there are suspects, the picture never exceeds the engine's own capacity, oldest suspects out first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, cast

import msgspec

from ..proto.engine import HashRule
from ..proto.errors import UnhashableBlock
from ..proto.events import (
    FULL_ATTENTION_KINDS,
    STATE_KINDS,
    UNCACHED_KINDS,
    WINDOW_KINDS,
    Batch,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    tier_of,
)
from ..proto.hashing import (
    BlockHash,
    BlockKey,
    Namespace,
    block_hash,
    block_key,
    event_extra_keys,
    looking_ahead,
    packed_tokens,
)
from ..proto.index import PAGE_SPAN, PackedWrites, PageHead, TierMask
from .blocks import Copies, Inputs, Node, block_table, copies_table

HashMode = Literal["auto", "engine", "recompute"]
"""auto: recompute, and distrust blocks whose published name an established parity does not explain. engine: the
engine's own hashes are the keys (it runs sha256_cbor under our seed). recompute: never compare."""
CopyMode = Literal["count", "set"]
"""count: k stores need k removals. set: for engines that announce reused blocks again (vLLM report mode full)."""

DEFAULT_MAX_BLOCKS = 4_000_000
"""Bound on copies kept per replica, and on half the nodes; far above any real pool. The oldest go first, and the
state says so."""


DEFAULT_CAPACITY = 8192
"""Blocks a medium is taken to hold at least, where nobody said and it never held more."""


class NodeState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node as it is kept over a restart: see `Node` for the fields."""

    hash: int
    parent: int | None
    placed: bool
    tiers: int
    digest: bytes | None
    engine_digest: bytes | None
    depth: int
    head: bytes | None
    keys: list[bytes]
    tail: tuple[list[int], list[Any] | None] | None
    pending: tuple[list[int], list[Any] | None] | None
    opaque: bool
    suspect: bool
    """Its published name was not as predicted, and no parity is established."""


class InventoryState(msgspec.Struct, frozen=True, array_like=True):
    """Everything an inventory knows. Holds token ids where a block's hash still waits for them."""

    parity: bool
    main_group: int | None
    page_size: int | None
    flaws: list[str]
    tables: list[tuple[str, int, list[int], list[int]]]
    """(medium, group, engine hashes, copies), in the order they came."""
    nodes: list[NodeState]
    groups: list[tuple[int, int, int]] = []
    """(group, tokens per block, blocks needed) of every further group that a hit needs."""


EVERYTHING = 1 << 62
"""`Group.needed` of a group that must hold the whole prefix, or whose need nobody published."""


class Group:
    """A further cache group that a hit needs: the last `needed` of its blocks up to where the prompt goes on."""

    __slots__ = ("needed", "runs", "size")

    def __init__(self, size: int, needed: int) -> None:
        self.size = size
        """Tokens per block of this group."""
        self.needed = needed
        self.runs: dict[Node, int] = {}
        """Blocks in a row that it holds up to each node's end, counted to `needed`. What lies before the start of a
        prompt counts as held."""


class Delta(msgspec.Struct, frozen=True):
    """What changed for the index since the last settle."""

    reset: bool
    """Everything written before belongs to a past incarnation; `writes` start from nothing."""
    writes: PackedWrites
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
    aged: int = 0
    """Copies dropped after a loss, since nothing vouched for them any more."""
    corrected: int = 0
    """Copies added or dropped on the engine's own word."""
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
        ignore_media: Collection[str] = (),
    ) -> None:
        """ignore_media: media whose publisher never says what it dropped; counted, and kept out of the index."""
        self.block_size = namespace.block_size
        self._lookahead = namespace.lookahead
        self.stats = InventoryStats()
        self._root = namespace.root
        self._rule = rule if hash_mode == "auto" else None
        self._engine_root = rule.root(self._root) if rule is not None and hash_mode == "auto" else None
        self._engine_keys = hash_mode == "engine"
        self._count = copy_mode == "count"
        self._ignored = frozenset(name.lower() for name in ignore_media)
        self._max_blocks = max_blocks
        self.capacity: int | None = None
        """Blocks the engine's GPU memory can hold, where it is known."""
        self._reset = False
        self.parity = False
        """A published name was predicted at least once: the engine's seed and rule are ours."""
        self._main_group: int | None = None
        self._page_size: int | None = None
        self._groups: dict[int, Group] = {}
        self._blocks = block_table()
        self._start()

    def _start(self) -> None:
        self._tables: dict[tuple[str, int], Copies] = {}
        self._blocks.clear()
        self._stale: dict[Node, None] = {}
        """Nodes whose runs in the further groups may have changed."""
        for group in self._groups.values():
            group.runs.clear()
        self._suspects: set[Node] = set()
        self._unsure: dict[str, dict[tuple[int, EngineHash], int]] = {}
        """Medium → (group, engine hash) of what a loss may have removed → blocks the medium had taken in by then;
        longest in doubt first. Empty unless something was lost."""
        self._taken: dict[str, int] = {}
        """Medium → blocks it took in so far."""
        self._peak: dict[str, int] = {}
        """Medium → most blocks it was seen to hold, at losses."""
        self._lossy = False
        """A loss whose suspects are not noted yet."""
        self._noted_at = -1
        """Blocks stored so far when suspects were noted last."""
        self.copies = 0
        """Physical copies held, over all media and groups."""
        self.flaws: set[str] = set()
        """Why this picture may differ from the engine's, as metric labels; see `InventoryStats` for each."""

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Engine blocks of the full-attention group held in some tier."""
        return self._blocks.held

    @property
    def attached(self) -> int:
        """Of those, how many are attached."""
        return self._blocks.attached

    @property
    def ambiguous(self) -> int:
        """Index blocks that several engine hashes claim at present."""
        return self._blocks.ambiguous

    @property
    def detached(self) -> int:
        """Engine blocks held but absent from the index."""
        return self.held - self.attached

    @property
    def index_blocks(self) -> int:
        """Index blocks currently attached."""
        return self._blocks.index_blocks

    @property
    def nodes(self) -> int:
        """Engine blocks known by name: those held, and those that something held hangs under."""
        return len(self._blocks)

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
        return self._blocks.get(engine_hash)

    def find(self, keys: Iterable[BlockKey]) -> dict[BlockKey, list[Node]]:
        """The nodes at which these index blocks complete, attached or not; keys nobody knows are left out.

        For explanations: linear in the inventory as soon as anything is detached.
        """
        found: dict[BlockKey, list[Node]] = {}
        unclaimed: set[BlockKey] = set()
        for key in keys:
            owners = self._blocks.owners(key)
            if owners:
                found[key] = owners
            else:
                unclaimed.add(key)
        if unclaimed and self.detached:
            for node in self._blocks.nodes():
                for key in node.keys:
                    if key in unclaimed:
                        found.setdefault(key, []).append(node)
            for key in unclaimed - found.keys():
                # Its chain is not known, since nothing above it was ever announced; but an engine that names blocks
                # as we do has told which one it is.
                named = self._blocks.get(EngineHash(int.from_bytes(key, "big")))
                if named is not None and named.digest is None:
                    found[key] = [named]
        return found

    def expected(self) -> dict[BlockKey, TierMask]:
        """What the index must hold under this incarnation once everything emitted is written."""
        return {key: self.tiers(key) for key in self._blocks.index_keys()}

    def index_keys(self, start: int = 0, step: int = 1) -> list[BlockKey]:
        """Every step-th attached index block from one on. Neighbours were stored together, mostly."""
        return self._blocks.index_keys(start, step)

    def tiers(self, key: BlockKey) -> TierMask:
        """Tiers the index must show for one block; 0 if it is not attached."""
        return TierMask(self._blocks.shows(key))

    def parent(self, key: BlockKey) -> BlockKey | None:
        """The index block before an attached one; None if it starts the prompt."""
        for node in self._blocks.owners(key)[:1]:
            if before := node.keys[: node.keys.index(key)]:
                return before[-1]
            at = node.parent
            while at is not None:
                if at.keys:
                    return at.keys[-1]
                at = at.parent
        return None

    def chain(self, key: BlockKey) -> list[BlockKey]:
        """The keys from the start of the prompt to an attached block, its own last; empty if it is not attached."""
        keys: list[BlockKey] = []
        for node in self._blocks.owners(key)[:1]:
            keys += node.keys[: node.keys.index(key) + 1][::-1]
            at = node.parent
            while at is not None:
                keys += at.keys[::-1]
                at = at.parent
        return keys[::-1]

    def main_copies(self, medium: str = "gpu") -> Mapping[EngineHash, int]:
        """Engine hash → copies of the full-attention group in one medium. A live view; do not change it."""
        group = 0 if self._main_group is None else self._main_group
        return self._tables.get((medium, group), {})

    def only_holds(self, medium: str) -> bool:
        """Nothing is held but in this medium, by the full-attention group."""
        main = 0 if self._main_group is None else self._main_group
        return all(key == (medium, main) or not table for key, table in self._tables.items())

    def attached_writes(self) -> PackedWrites:
        """The whole attached part, as writes for a fresh incarnation. In no particular order."""
        return PackedWrites(self._blocks.attached_writes())

    # ---- applying -----------------------------------------------------------------------------------------------

    def apply(self, batch: Batch) -> Delta:
        """Apply one batch in order and settle. Never raises on what an engine may send."""
        for (medium, group), run in groupby(batch.events, _removed_from):
            if medium is not None:
                # Engines say of each block by itself that it went.
                self._removed(medium, group, [h for event in run for h in cast(BlockRemoved, event).hashes])
                continue
            for event in run:
                if isinstance(event, BlockStored):
                    self._stored(event)
                else:
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
        self._groups = {}

    def doubt(self) -> None:
        """Something was lost: what is held now may have been removed without us knowing."""
        self._lossy = True

    @property
    def unsure(self) -> int:
        """Copies that a loss may have removed, and nothing has vouched for since."""
        return sum(map(len, self._unsure.values()))

    def reconcile(self, truth: Mapping[EngineHash, int], medium: str = "gpu") -> int:
        """Take the engine's word for what one medium of the full-attention group holds, by copies.

        Returns how many blocks it names that cannot be placed, since their tokens were never heard of. Settle after.
        """
        group = self._main_group if self._main_group is not None else 0
        table = self._table(medium, group)
        self._unsure.pop(medium, None)
        for h in [h for h in table if not truth.get(h)]:
            self.stats.corrected += 1
            self._drop(medium, group, h)
        unknown = 0
        for h, copies in truth.items():
            held = table.get(h, 0)
            if held == copies:
                continue
            node = self._blocks.get(h)
            if not held and node is None:
                unknown += 1
                continue
            self.stats.corrected += 1
            self.copies += copies - held
            table[h] = copies
            if not held and node is not None:
                self._blocks.hold(node, 1 << tier_of(medium))
        return unknown

    def state(self) -> InventoryState:
        """Everything known, for `restore`. Nothing in it changes when the inventory does."""
        suspects = {node.hash for node in self._suspects}
        return InventoryState(
            self.parity,
            self._main_group,
            self._page_size,
            sorted(self.flaws),
            [
                (medium, group, list(table.keys()), list(table.values()))
                for (medium, group), table in self._tables.items()
                if table
            ],
            [NodeState(*fields, fields[0] in suspects) for fields in self._blocks.states()],
            [(group, need.size, need.needed) for group, need in self._groups.items()],
        )

    def restore(self, state: InventoryState) -> None:
        """Become what `state` describes; settle after. Raises ValueError, with nothing taken over, if it contradicts
        itself."""
        by_hash = {EngineHash(saved.hash): saved for saved in state.nodes}
        if len(by_hash) != len(state.nodes):
            raise ValueError("a block is listed twice")
        if any(saved.parent is not None and saved.parent not in by_hash for saved in state.nodes):
            raise ValueError("a parent is missing")
        blocks, suspects = block_table(), set()
        tables: dict[tuple[str, int], Copies] = {}
        try:
            for saved in state.nodes:
                node = blocks.node(EngineHash(saved.hash))
                blocks.hold(node, saved.tiers)
                blocks.mark(node)
                node.opaque, node.pending = saved.opaque, saved.pending
                node.extend(
                    None if saved.digest is None else BlockHash(saved.digest),
                    saved.engine_digest,
                    saved.depth,
                    None if saved.head is None else PageHead(saved.head),
                    [BlockKey(key) for key in saved.keys],
                    saved.tail,
                )
                if saved.placed:
                    node.place(None if saved.parent is None else blocks.node(EngineHash(saved.parent)))
                if saved.suspect:
                    suspects.add(node)
            for medium, group, hashes, copies in state.tables:
                table = tables[medium, group] = copies_table()
                for h, count in zip(map(EngineHash, hashes), copies, strict=True):
                    table[h] = count
        except OverflowError:
            raise ValueError("a number is out of range") from None
        self._groups = {group: Group(size, needed) for group, size, needed in state.groups}
        self._start()
        self._reset = True
        self._blocks, self._tables, self._suspects = blocks, tables, suspects
        if self._groups:
            self._stale = dict.fromkeys(blocks.nodes())
        self.copies = sum(sum(table.values()) for table in tables.values())
        self.flaws = set(state.flaws)
        self.parity, self._main_group, self._page_size = state.parity, state.main_group, state.page_size

    def settle(self) -> Delta:
        """Bring attachment up to date after changes and return what the index must be told."""
        if self._lossy:
            self._note_suspects()
        if self._unsure:
            self._age()
        self._enforce_bound()
        if self._stale:
            self._count_runs()
        report = bool(self._suspects or self._groups)
        writes, contests, dropped = self._blocks.settle(report)
        self.stats.ambiguous += contests
        for node in dropped:
            self._suspects.discard(node)
            for need in self._groups.values():
                need.runs.pop(node, None)
        delta = Delta(self._reset, PackedWrites(writes))
        self._reset = False
        return delta

    def _table(self, medium: str, group: int) -> Copies:
        table = self._tables.get((medium, group))
        if table is None:
            table = self._tables[medium, group] = copies_table()
        return table

    def _stored(self, event: BlockStored) -> None:
        stats, hashes = self.stats, event.hashes
        stats.stored += len(hashes)
        medium = event.medium
        table = self._table(medium, event.group)
        self._taken[medium] = self._taken.get(medium, 0) + len(hashes)
        if self._unsure:
            self._vouch(event, table)
        elif self._stored_plainly(event, table):
            return
        for h in hashes:
            copies = table.get(h, 0)
            if copies:
                stats.duplicate_stores += 1
                if not self._count:
                    continue
            table[h] = copies + 1
            self.copies += 1
        if medium in self._ignored:
            stats.foreign += len(hashes)
            return
        if not hashes or not self._is_main(event):
            if event.group != self._main_group:
                self._other_group(event)
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
                self._blocks.hold(self._blocks.node(h), bit)
            return
        first = parent = None if event.parent is None else self._blocks.node(event.parent)
        extra = event.extra_keys
        for i, h in enumerate(hashes):
            node = self._blocks.node(h)
            if not node.placed:
                inputs: Inputs | None = None
                try:
                    ahead = self._tokens_ahead(event, i)
                    if aligned:
                        keys = event_extra_keys(
                            extra[i] if extra is not None else None,
                            lora_name=event.lora_name,
                            lora_id=event.lora_id,
                            first=parent is None,
                            salt=event.cache_salt,
                        )
                        inputs = (
                            tokens[i * size : (i + 1) * size],
                            keys if ahead is None else looking_ahead(keys, ahead),
                        )
                except UnhashableBlock:
                    stats.unhashable += 1
                    node.opaque = not self._engine_keys
                self._place(node, parent, inputs)
            elif node.parent != parent:
                stats.reparented += 1
                self.flaws.add("hashes_do_not_bind_prefix")
            self._blocks.hold(node, bit)
            parent = node
        if first is not None:
            self._blocks.collect(first)

    def _tokens_ahead(self, event: BlockStored, index: int) -> Sequence[int] | None:
        """The tokens past a block that its hash covers; None for none. Raises UnhashableBlock where that is not what
        the namespace declares, since its keys then mean something else."""
        if self._engine_keys or not (event.lookahead or self._lookahead):
            return None
        ahead = event.lookahead_tokens
        if event.block_size == self.block_size and ahead is not None and len(ahead[index]) == self._lookahead:
            return ahead[index]
        self.flaws.add("lookahead_hashes")
        raise UnhashableBlock("lookahead")

    def _stored_plainly(self, event: BlockStored, table: Copies) -> bool:
        """Take in one event the short way (`BlockTable.store`), or do nothing and return False."""
        hashes, size, rule = event.hashes, self.block_size, self._rule
        if (
            event.block_size != size
            or size != self._page_size
            or event.group != self._main_group
            or self._engine_keys
            or self._groups
            or self._lookahead
            or event.medium in self._ignored
            or event.lookahead
            or event.extra_keys is not None
            or event.lora_name
            or event.lora_id is not None
            or event.cache_salt
            or not (rule is None or (self.parity and rule.canonical))
            or (event.kind is not None and event.kind not in FULL_ATTENTION_KINDS)
        ):
            return False
        tokens = packed_tokens(event.tokens, 0, len(event.tokens))
        if tokens is None or not self._blocks.store(
            table, hashes, tokens, size, event.parent, self._root, 1 << tier_of(event.medium), rule is not None
        ):
            return False
        self.copies += len(hashes)
        if rule is not None:
            self.stats.parity_ok += len(hashes)
        return True

    def _is_main(self, event: BlockStored) -> bool:
        """Does this group's presence make a prefix usable? Learns the group's index at its first store."""
        if event.kind is not None and event.kind not in FULL_ATTENTION_KINDS:
            return False
        if self._main_group is None and (event.kind is not None or event.group == 0):
            self._main_group = event.group
        return event.group == self._main_group

    def _other_group(self, event: BlockStored) -> None:
        """A store in another group than the one whose nodes are kept: a masked one may name none of its blocks."""
        kind = event.kind
        if kind in UNCACHED_KINDS or (self._main_group is None and (kind is None or kind in FULL_ATTENTION_KINDS)):
            return
        if event.group not in self._groups:
            if event.block_size <= 0:
                return  # a placeholder does not say how the group is cut
            needed = EVERYTHING
            if kind in WINDOW_KINDS and event.window is not None:
                needed = -(-(event.window - 1) // event.block_size)
            elif kind in STATE_KINDS:
                needed = 1
            elif kind not in FULL_ATTENTION_KINDS:
                self.flaws.add("unknown_group_kind")
            if self._page_size is not None and event.block_size % self._page_size:
                self.flaws.add("group_block_size")
            self._groups[event.group] = Group(event.block_size, needed)
            self._stale = dict.fromkeys(self._blocks.nodes())
        for h in event.hashes:
            if (node := self._blocks.get(h)) is not None:
                self._stale[node] = None

    def _group_holds(self, group: int, h: EngineHash) -> bool:
        return any(
            g == group and h in table and medium not in self._ignored for (medium, g), table in self._tables.items()
        )

    def _count_runs(self) -> None:
        """Bring every group's runs up to date, from the nodes that changed down to where nothing does."""
        stale, self._stale = self._stale, {}
        counted: set[Node] = set()
        for group, need in self._groups.items():
            runs = need.runs
            for start in stale:
                todo = [start]
                while todo:
                    node = todo.pop()
                    if self._blocks.get(node.hash) != node:
                        continue
                    at_start = need.needed if node.placed else 0
                    above = at_start if node.parent is None else runs.get(node.parent, 0)
                    if self._ends_group_block(node, need):
                        above = min(need.needed, above + 1) if self._group_holds(group, node.hash) else 0
                    counted.add(node)
                    if runs.get(node) != above:
                        runs[node] = above
                        todo.extend(node.children)
        for node in counted:
            if self._usable_end(node) == node.lacking:
                node.lacking = not node.lacking
                self._blocks.mark(node)

    def _ends_group_block(self, node: Node, need: Group) -> bool:
        tail = 0 if node.tail is None else len(node.tail[0])
        return (node.depth * self.block_size + tail) % need.size == 0

    def _fits(self, size: int, medium: str, aligned: bool) -> bool:
        """Is this the engine's own block size? An aligned GPU store into an empty picture settles what that is."""
        computed = medium == "gpu" and aligned
        if computed and (self._page_size is None or not self.held) and self._usable_size(size):
            self._page_size = size
        if size == (self._page_size or self.block_size):
            return True
        if computed:
            self.flaws.add("foreign_block_size")
        elif self._page_size is None:
            self.flaws.add("unknown_block_size")
        return False

    def _usable_size(self, size: int) -> bool:
        if self._engine_keys:
            return size == self.block_size
        return size > 0 and (self.block_size % size == 0 or size % self.block_size == 0)

    def _place(self, node: Node, parent: Node | None, inputs: Inputs | None) -> None:
        """Hang a node under its parent and extend the chain as far down as it is now known."""
        # Only a node that was named as a parent before can be above its own parent.
        if parent == node or (parent is not None and node.children and self._is_below(parent, node)):
            # A block cannot be part of its own prefix. Nothing under such a name can be known to match.
            self.flaws.add("hashes_do_not_bind_prefix")
            self.stats.reparented += 1
            parent, node.opaque = None, True
        node.place(parent)
        node.pending = inputs
        if parent is not None and parent.digest is None and not parent.opaque:
            return
        todo = [node]
        while todo:
            node = todo.pop()
            self._extend(node)
            self._blocks.mark(node)
            if self._groups:
                self._stale[node] = None
            todo.extend(child for child in node.children if child.digest is None)

    @staticmethod
    def _is_below(node: Node, other: Node) -> bool:
        """Is `other`, which is not placed, an ancestor of `node`? Then `node` has no known chain yet."""
        at: Node | None = node
        while at is not None and at.digest is None:
            if at == other:
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
        node.extend(digest, engine_digest, depth, head, keys, tail)

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
            self._blocks.mark(node)
            todo.extend(child for child in node.children if not child.opaque)

    def _removed(self, medium: str, group: int, hashes: list[EngineHash]) -> None:
        stats = self.stats
        stats.removed += len(hashes)
        table = self._tables.get((medium, group))
        if table is None:
            stats.unknown_removals += len(hashes)
            return
        if group == self._main_group and medium not in self._unsure and self._only_of_tier(medium):
            unknown = self._blocks.remove(table, hashes, 1 << tier_of(medium))
            stats.unknown_removals += unknown
            self.copies -= len(hashes) - unknown
            return
        for h in hashes:
            copies = table.get(h, 0)
            if not copies:
                stats.unknown_removals += 1
                continue
            self.copies -= 1
            if copies > 1:
                table[h] = copies - 1
            else:
                self._gone(medium, group, table, h)

    def _gone(self, medium: str, group: int, table: Copies, h: EngineHash) -> Node | None:
        """The last copy of a block in one medium went. Returns its node, if it has one."""
        table.drop(h)
        if unsure := self._unsure.get(medium):
            unsure.pop((group, h), None)
        node = self._blocks.get(h)  # none for a foreign block: recorded by medium only
        if node is not None and group == self._main_group:
            if not any(h in other for other in self._same_tier(medium)):
                self._blocks.unhold(node, 1 << tier_of(medium))
        elif node is not None and self._groups:
            self._stale[node] = None
        return node

    def _same_tier(self, medium: str) -> Iterator[Copies]:
        """Tables of the other media that count for the same tier."""
        tier = tier_of(medium)
        for (name, group), table in self._tables.items():
            if group == self._main_group and name != medium and tier_of(name) == tier and name not in self._ignored:
                yield table

    def _only_of_tier(self, medium: str) -> bool:
        return medium == "gpu" or not any(self._same_tier(medium))

    def _enforce_bound(self) -> None:
        # Nodes that are not held hang above one that is, so evicting copies frees nodes as well.
        while self.copies > self._max_blocks or (self.copies and len(self._blocks) > 2 * self._max_blocks):
            (medium, group), table = max(self._tables.items(), key=lambda item: len(item[1]))
            self.stats.evicted += 1
            self.flaws.add("inventory_bound")
            self._drop(medium, group, table.oldest())

    def _drop(self, medium: str, group: int, h: EngineHash) -> None:
        """Forget every copy of one block in one medium."""
        table = self._tables[medium, group]
        self.copies -= table[h]
        node = self._gone(medium, group, table, h)
        if node is not None and group == self._main_group:
            self._blocks.collect(node)

    # ---- after a loss -------------------------------------------------------------------------------------------

    def _holds(self, medium: str) -> int:
        """Different blocks held in one medium, over its groups."""
        return sum(len(table) for (name, _), table in self._tables.items() if name == medium)

    def _limit(self, medium: str) -> int:
        """Blocks one medium can hold, as far as is known."""
        if medium == "gpu" and self.capacity is not None:
            return self.capacity
        return max(self._peak.get(medium, 0), DEFAULT_CAPACITY)

    def _note_suspects(self) -> None:
        """Everything held is in doubt from now, unless it was before. Linear, so not for every loss of many."""
        stored = self.stats.stored
        if self._unsure and stored - self._noted_at < self._limit("gpu") // 64:
            return
        self._lossy, self._noted_at = False, stored
        for (medium, group), table in self._tables.items():
            self._peak[medium] = max(self._peak.get(medium, 0), self._holds(medium))
            unsure, taken = self._unsure.setdefault(medium, {}), self._taken.get(medium, 0)
            for h in table:
                unsure.setdefault((group, h), taken)

    def _vouch(self, event: BlockStored, table: Copies) -> None:
        """A store proves that its prefix is in the engine's memory. Of a suspect stored again, that copy is sure."""
        unsure = self._unsure.get(event.medium)
        if not unsure:
            return
        group = event.group
        for h in event.hashes:
            if unsure.pop((group, h), None) is not None:
                self.copies -= table.drop(h)
        if event.medium == "gpu" and group == self._main_group and event.parent is not None:
            node = self._blocks.get(event.parent)
            while node is not None and unsure.pop((group, node.hash), None) is not None:
                node = node.parent

    def _age(self) -> None:
        """Drop suspects a turnover old, and what the engine cannot hold beside what is certain."""
        for medium, unsure in self._unsure.items():
            limit, taken = self._limit(medium), self._taken.get(medium, 0)
            excess = self._holds(medium) - self.capacity if medium == "gpu" and self.capacity is not None else 0
            while unsure:
                (group, h), mark = next(iter(unsure.items()))
                if excess <= 0 and taken - mark < limit:
                    break
                excess -= 1
                self.stats.aged += 1
                self._drop(medium, group, h)
        self._unsure = {medium: unsure for medium, unsure in self._unsure.items() if unsure}

    def _usable_end(self, node: Node) -> bool:
        """Does every further group hold what a prompt that goes on here needs of it?"""
        return all(
            need.runs.get(node, 0) >= need.needed and self._ends_group_block(node, need)
            for need in self._groups.values()
        )


def _removed_from(event: Event) -> tuple[str | None, int]:
    """Medium and group of a removal; no medium for any other event."""
    return (event.medium, event.group) if isinstance(event, BlockRemoved) else (None, 0)


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
