"""What a consumer must know about one engine family: how it names blocks.

Engine hashes are opaque to the index, which recomputes canonical ones. But where an engine's rule is known and its
seed is ours, a published name can be *predicted* from what the wire shows, and a wrong prediction means that the
block depends on something the wire hides (a cache salt before vLLM 0.17, an `extra_key` in SGLang). Such a block
must not count for a prompt that lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from .events import EngineHash
from .hashing import BlockHash


class HashRule(Protocol):
    """How one engine family names a block. Pure and stateless."""

    @property
    def name(self) -> str: ...

    @property
    def canonical(self) -> bool:
        """A block without extra keys, below another such, is published as its canonical key."""
        ...

    def root(self, canonical_root: BlockHash) -> bytes:
        """The engine-side digest that first blocks chain from."""
        ...

    def extend(
        self, parent: bytes, tokens: Sequence[int], extra_keys: Sequence[object] | None, canonical: BlockHash
    ) -> bytes | None:
        """The engine's digest of the next block under `parent`, or None when this rule cannot tell.

        extra_keys: the block's tagged extra keys; canonical: its canonical hash, which some engines equal.
        """
        ...

    def published(self, digest: bytes) -> EngineHash:
        """The name an event would carry for that digest."""
        ...


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where one data-parallel rank of an engine publishes, as a client dials it."""

    dp_rank: int
    events: str
    """ZeroMQ endpoint of the live stream."""
    replay: str | None = None
    topic: str = ""
    block_size: int | None = None
    """Tokens per engine block, if it says so."""


class Range(msgspec.Struct, frozen=True):
    """Versions from `first` up to and without `until`; None leaves that side open."""

    first: tuple[int, ...] | None = None
    until: tuple[int, ...] | None = None

    def __contains__(self, version: tuple[int, ...]) -> bool:
        return (self.first is None or version >= self.first) and (self.until is None or version < self.until)


class Limit(msgspec.Struct, frozen=True):
    """Something a range of versions does not tell, or tells in a way that cannot be used in full."""

    versions: Range
    what: str
    """For people: what it is."""
    effect: Literal["exact", "degraded", "not_indexed", "undetected"]
    """exact: noticed by itself, and those blocks are left out. degraded: the replica's state says so. not_indexed: by
    declaration. undetected: nothing on the wire shows it, so the operator must see to it."""
    remedy: str


class EngineAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is particular to one engine family, as data: decoding and counting are the same for all."""

    name: str
    """What `--engine` takes."""
    title: str
    rule: HashRule
    oldest: tuple[int, ...] | None
    newest: tuple[int, ...] | None
    """Newest version whose wire format was checked against samples, recordings or its source."""
    evidence: Literal["recorded", "samples", "source"]
    """What the support rests on: recorded streams of the real engine with its own tables, captured samples, or its
    source text only."""
    discovery: str | None = None
    """Path of its HTTP server that tells where it publishes."""
    limits: tuple[Limit, ...] = ()

    def limits_of(self, version: tuple[int, ...]) -> list[Limit]:
        """What to know about one version. Mutates nothing."""
        return [limit for limit in self.limits if version in limit.versions]
