"""Prompts and writes for tests that look at what only the Redis backend does."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from metatrie.indexer.connect import open_store
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.index import PAGE_SPAN, BlockWrite, Index, PageHead, ReplicaRef, ReplicaSpec, Store, TierMask

_names = itertools.count()
_tokens = itertools.count(1)


class Kit:
    """One namespace of its own, and shorthand for it."""

    def __init__(self) -> None:
        self.namespace = Namespace(model=f"kit-{next(_names)}", block_size=1)

    def prompt(self, blocks: int, of: Sequence[int] = (), shared: int = 0) -> list[int]:
        """Tokens, one per block; the first `shared` are those of another prompt."""
        return [*of[:shared], *(next(_tokens) for _ in range(blocks - shared))]

    def chain(self, tokens: list[int]) -> Chain:
        return Chain(self.namespace.root, 1, tokens)

    def keys(self, tokens: list[int]) -> list[BlockKey]:
        return self.chain(tokens).keys(len(tokens))

    def writes(self, tokens: list[int], start: int = 0, tiers: int = 1) -> list[BlockWrite]:
        keys = self.keys(tokens)
        writes = [
            BlockWrite(
                key=keys[d],
                parent=keys[d - 1] if d else None,
                head=PageHead(keys[d - d % PAGE_SPAN]),
                depth=d,
                tiers=TierMask(tiers),
            )
            for d in range(start, len(keys))
        ]
        return writes if tiers else writes[::-1]

    async def claim(self, index: Index, name: str = "a", lease_s: float = 600) -> int:
        spec = ReplicaSpec(ref=ReplicaRef(name), engine="vllm")
        return (await index.claim(spec, owner="test", lease_s=lease_s, activate=True)).incarnation

    async def depths(self, index: Index, tokens: list[int]) -> dict[int, int]:
        match = await index.match(self.chain(tokens))
        return {incarnation: depth.blocks for incarnation, depth in match.depths.items()}


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[Store]]]:
    """`open_store`, closing what it opened when the test ends."""
    stores: list[Store] = []

    async def opened(url: str, **options: Any) -> Store:
        stores.append(await open_store(url, **options))
        return stores[-1]

    yield opened
    for store in stores:
        await store.close()
