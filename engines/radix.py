"""SGLang's prefix cache: a radix tree over token ids, its events, and who is admitted next.

Strategy. A node is a run of pages that every sequence through it shares; children are found by their first page. A
lookup that ends inside a node splits it there, so that a handle always names a whole path. Nothing is copied: one
page of content exists once per namespace, in contrast to vLLM's pool, so sets describe the cache exactly. Room is
made leaf by leaf, least recently used first, never in a node that a running request holds; a node that loses its
last child becomes a leaf with the use it last saw.

Invariants (each has a property test)
- `tokens` is the sum over nodes, a multiple of `page_size`, and after `evict` never above what was asked unless
  everything left is locked.
- A locked node's ancestors are locked; `locked_tokens` is the sum over locked nodes.
- Replaying the events as a set gives `resident()`, as long as one format and no `extra_key` is in use: under the
  default format an extra key separates trees but not names (wire-format notes, section 4).

Longest prefix first. `LongestPrefixFirst` admits the waiting request with the longest cached prefix. With a cache at
least as large as the longest request and one request at a time that is a depth-first walk over the tree of requests,
which computes every distinct page once: the optimum (Zheng et al., *SGLang*, 2024, Theorem 3.1). The price is that
a request whose prefix nobody shares can be overtaken for as long as others keep coming; `patience` bounds how often.

Checked step by step against recordings of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from ..proto.errors import ConfigError
from ..proto.hashing import BlockHash
from .rules import SglangRule, sglang_namespace

T = TypeVar("T")
EventFormat = Literal["default", "dynamo"]
_NO_CANONICAL: Final = BlockHash(b"")


class Scope(msgspec.Struct, frozen=True):
    """What keeps equal tokens of different requests apart."""

    cache_salt: str | None = None
    extra_key: str | None = None


NO_SCOPE: Final = Scope()


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Pages that entered the cache, in chain order."""

    names: list[int]
    """Signed 64-bit, as published."""
    parent: int | None
    tokens: list[int]
    cache_salt: str | None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Pages that left."""

    names: list[int]


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The tree was reset; also what a new one announces first."""


RadixEvent = Stored | Removed | Cleared


class Node:
    """One edge of the tree and where it ends. Handles are valid until their node is evicted: lock them."""

    __slots__ = ("children", "digests", "locks", "parent", "scope", "tokens", "used")

    def __init__(self, parent: Node | None, scope: Scope, tokens: list[int], digests: list[bytes]) -> None:
        self.parent = parent
        self.scope = scope
        self.tokens = tokens
        self.digests = digests
        """One per page."""
        self.children: dict[tuple[Any, ...], Node] = {}
        self.locks = 0
        self.used = 0


class RadixCache:
    """The prefix cache of one engine core. Synchronous and free of I/O; token lists are never kept, only cut."""

    def __init__(self, page_size: int = 1, *, event_format: EventFormat = "default") -> None:
        if page_size < 1:
            raise ConfigError("page_size", "must be positive", "SGLang's default is 1")
        self.page_size = page_size
        self._dynamo = event_format == "dynamo"
        self._rule = SglangRule(dynamo=self._dynamo)
        self._ticks = count(1)
        self._events: list[RadixEvent] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything, locked or not; handles are void."""
        self._root = Node(None, NO_SCOPE, [], [])
        self.tokens = 0
        """Tokens cached."""
        self.locked_tokens = 0
        self._events.append(Cleared())

    def match(self, tokens: Sequence[int], scope: Scope = NO_SCOPE) -> tuple[Node, int]:
        """The longest cached prefix: its handle and length in tokens, whole pages. Refreshes its use; may split."""
        used, node, at, size = next(self._ticks), self._root, 0, self.page_size
        while at + size <= len(tokens):
            child = node.children.get(self._branch(node, tokens, at, scope))
            if child is None:
                break
            child.used = used
            end = at + len(child.tokens)
            if list(tokens[at:end]) != child.tokens:
                shared = self._shared(child.tokens, tokens, at)
                return self._split(child, shared), at + shared
            node, at = child, end
        return node, at

    def peek(self, tokens: Sequence[int], scope: Scope = NO_SCOPE) -> int:
        """Length of the longest cached prefix in tokens. Mutates nothing."""
        node, at, size = self._root, 0, self.page_size
        while at + size <= len(tokens):
            child = node.children.get(self._branch(node, tokens, at, scope))
            if child is None:
                break
            end = at + len(child.tokens)
            if list(tokens[at:end]) != child.tokens:
                return at + self._shared(child.tokens, tokens, at)
            node, at = child, end
        return at

    def insert(self, tokens: Sequence[int], scope: Scope = NO_SCOPE) -> tuple[Node, int]:
        """Cache the whole pages of a sequence: its handle, and how many of its tokens were cached before.

        Announces what is new, at once. Does not make room: `evict` before or after.
        """
        node, cached = self.match(tokens, scope)
        end = len(tokens) - len(tokens) % self.page_size
        if end > cached:
            fresh = list(tokens[cached:end])
            leaf = Node(node, scope, fresh, self._digests(node, fresh, scope))
            leaf.used = next(self._ticks)
            node.children[self._branch(node, tokens, cached, scope)] = leaf
            self.tokens += len(fresh)
            parent = None if node is self._root else self._name(node.digests[-1])
            self._events.append(Stored([self._name(d) for d in leaf.digests], parent, fresh, scope.cache_salt))
            node = leaf
        return node, cached

    def lock(self, node: Node) -> None:
        """Keep a path from being evicted, once more."""
        for step in self._path(node):
            if not step.locks:
                self.locked_tokens += len(step.tokens)
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same handle."""
        for step in self._path(node):
            step.locks -= 1
            if not step.locks:
                self.locked_tokens -= len(step.tokens)

    def evict(self, tokens: int) -> int:
        """Free at least that many tokens, in whole leaves, or all that is not locked. Returns how many it freed."""
        order = count()
        leaves = [(n.used, next(order), n) for n in self._nodes() if not n.children and not n.locks]
        heapify(leaves)
        freed, names = 0, list[int]()
        while freed < tokens and leaves:
            _, _, node = heappop(leaves)
            freed += len(node.tokens)
            names += [self._name(d) for d in node.digests]
            parent = node.parent
            assert parent is not None
            del parent.children[self._branch(parent, node.tokens, 0, node.scope)]
            if parent is not self._root and not parent.children and not parent.locks:
                heappush(leaves, (parent.used, next(order), parent))
        if names:
            self._events.append(Removed(names))
        self.tokens -= freed
        return freed

    def take_events(self) -> list[RadixEvent]:
        """Events since the last call, in causal order."""
        events, self._events = self._events, []
        return events

    def resident(self) -> set[int]:
        """Names of every cached page, as published."""
        return {self._name(digest) for node in self._nodes() for digest in node.digests}

    # The root is shared by all scopes; below it a path stays within one.

    def _branch(self, node: Node, tokens: Sequence[int], at: int, scope: Scope) -> tuple[Any, ...]:
        page = tuple(tokens[at : at + self.page_size])
        return (scope, *page) if node is self._root else page

    def _shared(self, own: list[int], tokens: Sequence[int], at: int) -> int:
        """Leading tokens of `own`, whole pages, that `tokens` continues with at `at`."""
        same = 0
        for a, b in zip(own, tokens[at : at + len(own)], strict=False):
            if a != b:
                break
            same += 1
        return same - same % self.page_size

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after `at` tokens; returns the upper part. Announces nothing: the same pages stay cached."""
        parent = node.parent
        assert parent is not None
        pages = at // self.page_size
        upper = Node(parent, node.scope, node.tokens[:at], node.digests[:pages])
        upper.locks, upper.used = node.locks, node.used
        parent.children[self._branch(parent, upper.tokens, 0, node.scope)] = upper
        node.parent, node.tokens, node.digests = upper, node.tokens[at:], node.digests[pages:]
        upper.children[self._branch(upper, node.tokens, 0, node.scope)] = node
        return upper

    def _digests(self, node: Node, tokens: list[int], scope: Scope) -> list[bytes]:
        """Digests of the pages that continue `node`; see `SglangRule` for what a digest is."""
        size, digests = self.page_size, []
        digest = node.digests[-1] if node.digests else b""
        for at in range(0, len(tokens), size):
            first = node is self._root and at == 0
            salted = [["cache_salt", scope.cache_salt]] if first and scope.cache_salt else None
            extended = self._rule.extend(digest, tokens[at : at + size], salted, _NO_CANONICAL)
            assert extended is not None
            if first and self._dynamo and scope.extra_key:
                extended = extended[:32] + sglang_namespace(scope.extra_key, scope.cache_salt)
            digest = extended
            digests.append(digest)
        return digests

    def _name(self, digest: bytes) -> int:
        name = self._rule.published(digest)
        return name - (1 << 64) if name >> 63 else name

    def _path(self, node: Node) -> Iterator[Node]:
        at: Node | None = node
        while at is not None and at is not self._root:
            yield at
            at = at.parent

    def _nodes(self) -> Iterator[Node]:
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())


# ---- the wire ---------------------------------------------------------------------------------------------------


class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(
    events: Sequence[RadixEvent], page_size: int, *, ts: float, rank: int, map_events: bool = True
) -> bytes:
    """One payload frame as SGLang 0.5.20 and later send it; map_events False: as 0.5.9 to 0.5.18 do, without salts.

    ts: wall clock, seconds; rank: attention data-parallel rank.
    """
    return _encode([ts, [_wire(event, page_size, map_events) for event in events], rank])


def _wire(event: RadixEvent, page_size: int, map_events: bool) -> Any:
    match event:
        case Stored(names=names, parent=parent, tokens=tokens, cache_salt=salt):
            if map_events:
                return _StoredMap(names, parent, tokens, page_size, None, "GPU", salt)
            return ["BlockStored", names, parent, tokens, page_size, None, "GPU"]
        case Removed(names=names):
            return _RemovedMap(names, "GPU") if map_events else ["BlockRemoved", names, "GPU"]
        case Cleared():
            return _ClearedMap() if map_events else ["AllBlocksCleared"]


# ---- admission --------------------------------------------------------------------------------------------------


class Waiting(Generic[T]):
    """A request that waits: its prompt, and what of it is the caller's."""

    __slots__ = ("overtaken", "request", "scope", "tokens")

    def __init__(self, request: T, tokens: Sequence[int], scope: Scope = NO_SCOPE) -> None:
        self.request = request
        self.tokens = tokens
        self.scope = scope
        self.overtaken = 0
        """Later arrivals admitted before it."""


class LongestPrefixFirst(Generic[T]):
    """The waiting queue: whoever finds most of its prompt cached goes next; first come, first served among equals.

    Looking for the next one costs a walk down the tree per waiting request. SGLang falls back to first come, first
    served above 128 waiting for that reason; here the caller bounds the queue.
    """

    def __init__(self, cache: RadixCache, *, patience: int | None = None) -> None:
        """patience: a request overtaken so often goes before all others, oldest first. None: never, as in SGLang;
        0: first come, first served."""
        self._cache = cache
        self._patience = patience
        self._queue: list[Waiting[T]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: Waiting[T]) -> None:
        self._queue.append(waiting)

    def pop(self) -> Waiting[T]:
        """The next to admit. Raises IndexError when nobody waits."""
        queue, at = self._queue, 0
        if not queue:
            raise IndexError("nobody waits")
        # Whoever came first was overtaken most often, so only the head can have lost its patience.
        if self._patience is None or queue[0].overtaken < self._patience:
            longest = -1
            for i, waiting in enumerate(queue):
                cached = self._cache.peek(waiting.tokens, waiting.scope)
                if cached > longest:
                    at, longest = i, cached
        for earlier in queue[:at]:
            earlier.overtaken += 1
        return queue.pop(at)
