"""Truth by brute force: what an engine holds and what of it an index must show, recomputed from scratch when asked.

Shares no code with consumers/ and hashes by itself (hashlib, cbor2). It only relies on `proto.events` to name events.

- `copies`: a counter per (medium, group, engine hash), exactly as the events say.
- `known`: per engine hash of the full-attention group, its parent and inputs as published.
- `rows()`: for every held block, walk its parents to the root, lay out all tokens of that prompt, cut them into index
  blocks as a router would, and keep those that end inside the block.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import cbor2
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored

FULL = {"full_attention", "mla_attention", "sink_full_attention"}
THROUGH = 8
"""Bit of a block that a longer prefix may pass through, and no prompt may end with."""
TIERS = {"gpu": 0, "cpu": 1, "cpu_pinned": 1, "cxl": 1}


def sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


@functools.lru_cache(maxsize=200_000)
def chained(parent: bytes, tokens: tuple[int, ...], extra: tuple[tuple[Any, ...], ...]) -> bytes:
    return sha256_cbor([parent, list(tokens), [list(e) for e in extra] or None])


class Row(NamedTuple):
    """One index block as it must be stored."""

    parent: bytes | None
    head: bytes
    depth: int
    tiers: int


class Link(NamedTuple):
    """One engine block as it was published."""

    parent: int | None
    tokens: tuple[int, ...] | None
    """None when the wire does not determine the block's hash."""
    extra: tuple[Any, ...]
    lora: str | None
    salt: str | None


Predict = Callable[[Sequence[Link]], int | None]
"""The name an engine of ours would publish for the last block of this chain; None when the wire cannot tell."""


class Oracle:
    def __init__(
        self, *, block_size: int = 16, seed: str = "0", predict: Predict | None = None, set_mode: bool = False
    ) -> None:
        self.block_size = block_size
        self.root = sha256_cbor(seed)
        self.predict = predict
        self.set_mode = set_mode
        self.restart()

    def clear(self) -> None:
        self.copies: Counter[tuple[str, int, int]] = Counter()
        self.known: dict[int, Link] = {}
        self.native: set[tuple[str, int]] = set()
        """(medium, hash) with a copy announced as one of the engine's own blocks, not as a chunk of others."""
        self._laid_out: dict[int, list[tuple[bytes, Row, list[int]]]] = {}
        self._names: dict[int, int | None] = {}
        """Both by engine hash: what was published of a block, and of its prefix, never changes between clears."""

    def restart(self) -> None:
        self.clear()
        self.parity = False
        self.main: int | None = None
        self.page: int | None = None
        self.others: dict[int, tuple[int, int | None]] = {}
        """Further group → its tokens per block, and how many of its last blocks a hit needs (None: all)."""

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    for h in event.hashes:
                        key = (event.medium, event.group, h)
                        self.copies[key] -= 1
                        if self.copies[key] <= 0:
                            del self.copies[key]
                            if event.group == self.main:
                                self.native.discard((event.medium, h))
                case AllBlocksCleared():
                    self.clear()

    def _stored(self, event: BlockStored) -> None:
        for h in event.hashes:
            key = (event.medium, event.group, h)
            self.copies[key] = 1 if self.set_mode else self.copies[key] + 1
        if event.kind is not None and event.kind not in FULL:
            needed = None if event.window is None else -(-(event.window - 1) // event.block_size)
            self.others.setdefault(event.group, (event.block_size, needed))
            return
        if self.main is None and event.hashes and (event.kind is not None or event.group == 0):
            self.main = event.group
        if event.group != self.main or not event.hashes:
            return
        size = event.block_size
        aligned = size > 0 and len(event.tokens) == size * len(event.hashes)
        fits = size > 0 and (self.block_size % size == 0 or size % self.block_size == 0)
        if aligned and fits and event.medium == "gpu" and (self.page is None or not self.held()):
            self.page = size
        if event.tokens and size != (self.page or self.block_size):
            return
        self.native |= {(event.medium, h) for h in event.hashes}
        if not aligned:
            return
        parent = event.parent
        for i, h in enumerate(event.hashes):
            raw = tuple((event.extra_keys[i] if event.extra_keys else None) or ())
            bad = event.lookahead or (event.lora_id is not None and not event.lora_name)
            tokens = None if bad else tuple(event.tokens[i * size : (i + 1) * size])
            self.known.setdefault(h, Link(parent, tokens, raw, event.lora_name, event.cache_salt))
            parent = h

    # ---- answers

    def resident(self, medium: str = "gpu") -> dict[tuple[int, int], int]:
        return {(group, h): n for (name, group, h), n in self.copies.items() if name == medium}

    def tables(self) -> dict[tuple[str, int], dict[int, int]]:
        tables: dict[tuple[str, int], dict[int, int]] = {}
        for (medium, group, h), n in self.copies.items():
            tables.setdefault((medium, group), {})[h] = n
        return tables

    def held(self) -> dict[int, int]:
        """Engine hash of the full-attention group → mask of the tiers that hold it."""
        held: dict[int, int] = {}
        for medium, group, h in self.copies:
            if group == self.main and (medium, h) in self.native:
                held[h] = held.get(h, 0) | 1 << TIERS.get(medium, 2)
        return held

    def rows(self) -> dict[bytes, Row]:
        """Key → row, for everything the index must show."""
        held = self.held()
        chains = {h: chain for h in held if (chain := self._chain(h)) is not None}
        hidden = self._hidden(chains.values())
        rows: dict[bytes, Row] = {}
        for chain in chains.values():
            if any(h not in held or h in hidden for h in chain):
                continue
            if (blocks := self._laid_out.get(chain[-1])) is None:
                blocks = self._laid_out[chain[-1]] = self._ends([self.known[h] for h in chain])
            for key, row, pages in blocks:
                tiers = [held[chain[page]] for page in pages]
                common = functools.reduce(int.__and__, tiers)
                # A tier holds an index block when it holds all its pages; else the slowest of their fastest copies.
                mask = common or max(t & -t for t in tiers)
                # The engine reuses whole blocks of its own, where every group has what it needs.
                end = (row.depth + 1) * self.block_size
                through = 0 if end == len(chain) * (self.page or 1) and self._hit(chain) else THROUGH
                before = rows.get(key, row._replace(tiers=THROUGH)).tiers
                rows[key] = row._replace(tiers=(before | mask) & ~THROUGH | before & through)
        return rows

    def _hit(self, chain: list[int]) -> bool:
        """Do the further groups hold what a prompt that goes on after this chain needs of them?"""
        page = self.page or 1
        for group, (size, needed) in self.others.items():
            ends = range(size, len(chain) * page + 1, size)
            if len(chain) * page % size:
                return False
            names = [chain[end // page - 1] for end in ends]
            held = {h for _, g, h in self.copies if g == group}
            if not held.issuperset(names if needed is None else names[max(0, len(names) - needed) :]):
                return False
        return True

    def _chain(self, h: int) -> list[int] | None:
        """Engine hashes from the start of the prompt to this block, if all of it is known and can be hashed."""
        chain: list[int] = []
        at: int | None = h
        while at is not None:
            link = self.known.get(at)
            if link is None or link.tokens is None or len(chain) > 10_000:
                return None
            chain.append(at)
            at = link.parent
        return chain[::-1]

    def _hidden(self, chains: Iterable[list[int]]) -> set[int]:
        """Blocks whose published name their visible inputs do not explain, once the engine's rule is established."""
        if self.predict is None:
            return set()
        wrong: set[int] = set()
        for chain in chains:
            for i, h in enumerate(chain):
                if h not in self._names:
                    self._names[h] = self.predict([self.known[x] for x in chain[: i + 1]])
                name = self._names[h]
                if name is None:
                    break
                if name != h:
                    wrong.add(h)
                    break
                self.parity = True
        return wrong if self.parity else set()

    def _ends(self, chain: Sequence[Link]) -> list[tuple[bytes, Row, list[int]]]:
        """The index blocks that end inside the last block of this chain, and the engine blocks each consists of."""
        size = self.block_size
        tokens = [t for link in chain for t in link.tokens or ()]
        starts = [0]
        for link in chain:
            starts.append(starts[-1] + len(link.tokens or ()))
        keys: list[bytes] = []
        parent = self.root
        found: list[tuple[bytes, Row, list[int]]] = []
        for index in range(len(tokens) // size):
            begin, end = index * size, (index + 1) * size
            pages = [i for i in range(len(chain)) if starts[i] < end and starts[i + 1] > begin]
            extra = block_extra(chain, starts, pages, begin, size)
            if extra is None:
                return []
            parent = chained(parent, tuple(tokens[begin:end]), tuple(extra))
            keys.append(parent[-8:])
            if starts[-2] < end <= starts[-1]:
                row = Row(keys[index - 1] if index else None, keys[index - index % 32], index, 0)
                found.append((keys[index], row, pages))
        return found


def block_extra(
    chain: Sequence[Link], starts: Sequence[int], pages: Sequence[int], begin: int, size: int
) -> list[tuple[Any, ...]] | None:
    """Tagged extra keys of one index block, or None where the wire does not determine them."""
    lora = chain[0].lora
    media: set[tuple[int, str]] = set()
    salt = chain[0].salt
    for page in pages:
        for entry in chain[page].extra:
            if entry == lora and lora is not None:
                continue
            if isinstance(entry, str):
                if page:
                    return None
                salt = entry
            else:
                if len(chain[page].tokens or ()) > size:
                    return None
                media.add((starts[page] + entry[1], entry[0]))
    extra: list[tuple[Any, ...]] = [("lora", lora)] if lora else []
    extra += [("mm", name, offset - begin) for offset, name in sorted(media)]
    if begin == 0 and salt:
        extra.append(("cache_salt", salt))
    return extra


def vllm_name(chain: Sequence[Link], root: bytes) -> int | None:
    """What vLLM with `sha256_cbor` calls the last block of this chain.

    Nothing can be said of chains with extra keys: how they are hashed differs by version, which the wire does not
    name.
    """
    digest = root
    for link in chain:
        if link.lora or link.extra:
            return None
        digest = chained(digest, link.tokens or (), ())
    return int.from_bytes(digest[-8:], "big")


def sglang_name(chain: Sequence[Link], *, dynamo: bool) -> int | None:
    """What SGLang calls the last page of this chain (no adapters, no extra_key)."""
    salt = chain[0].salt
    digest = hashlib.sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest() if salt else b""
    for link in chain:
        words = b"".join(t.to_bytes(4, "little") for t in link.tokens or ())
        digest = hashlib.sha256(digest + words).digest()
    name = digest[:8]
    if salt and dynamo:
        raw = salt.encode()
        seed = b"sglang-kv-event-namespace-v1" + b"\0" + b"\1" + len(raw).to_bytes(8, "little") + raw
        name = hashlib.sha256(hashlib.sha256(seed).digest() + name).digest()[:8]
    return int.from_bytes(name, "big")
