"""What a consumer must know about one engine family: how it names blocks.

Engine hashes are opaque to the index, which recomputes canonical ones. But where an engine's rule is known and its
seed is ours, a published name can be *predicted* from what the wire shows, and a wrong prediction means that the
block depends on something the wire hides (a cache salt before vLLM 0.17, an `extra_key` in SGLang). Such a block
must not count for a prompt that lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .events import EngineHash
from .hashing import BlockHash


class HashRule(Protocol):
    """How one engine family names a block. Pure and stateless."""

    @property
    def name(self) -> str: ...

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
