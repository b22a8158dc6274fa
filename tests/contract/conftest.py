"""One harness per backend, so that the same tests can wait for time to pass in either."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import pytest
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.redis_store import RedisIndex
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.index import (
    PAGE_SPAN,
    BlockWrite,
    Claim,
    Index,
    Match,
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    Store,
    TierMask,
)

DEADLINE_S = 10.0


class Backend(Protocol):
    store: Store

    async def pass_time(self) -> None:
        """Let a little time pass, as this store measures it."""
        ...


class Memory:
    def __init__(self) -> None:
        self.now = 1000.0
        self.store: Store = MemoryStore(clock=lambda: self.now)

    async def pass_time(self) -> None:
        self.now += 0.01


class OnRedis:
    def __init__(self, store: Store) -> None:
        self.store = store

    async def pass_time(self) -> None:
        await asyncio.sleep(0.005)


class Prompt:
    """A prompt of `blocks` blocks whose tokens are all its own after the first `shared` ones of `of`."""

    _fresh = itertools.count(1)

    def __init__(self, namespace: Namespace, blocks: int, of: Prompt | None = None, shared: int = 0) -> None:
        size = namespace.block_size
        self.namespace = namespace
        self.tokens: list[int] = list(of.tokens[: shared * size]) if of else []
        while len(self.tokens) < blocks * size:
            self.tokens.append(next(self._fresh))
        self.keys: Sequence[BlockKey] = tuple(self.chain().keys(blocks))

    def chain(self) -> Chain:
        return Chain(self.namespace.root, self.namespace.block_size, self.tokens)

    def writes(self, start: int = 0, stop: int | None = None, tiers: int = 1) -> list[BlockWrite]:
        """Its blocks from start to stop, parents first; children first if they go."""
        depths = range(len(self.keys))[start:stop]
        keys = self.keys
        return [
            BlockWrite(
                key=keys[d],
                parent=keys[d - 1] if d else None,
                head=PageHead(keys[d - d % PAGE_SPAN]),
                depth=d,
                tiers=TierMask(tiers),
            )
            for d in (depths if tiers else reversed(depths))
        ]


class Harness:
    """An index, and shorthand for what every test does with it."""

    def __init__(self, backend: Backend, index: Index) -> None:
        self.backend = backend
        self.index = index
        self.store = backend.store

    def prompt(self, blocks: int, of: Prompt | None = None, shared: int = 0) -> Prompt:
        return Prompt(self.index.namespace, blocks, of, shared)

    async def claim(
        self, name: str = "a", *, rank: int = 0, owner: str = "owner", lease_s: float = 60, activate: bool = True
    ) -> Claim:
        spec = ReplicaSpec(ref=ReplicaRef(name, rank), engine="vllm", url=f"http://{name}")
        return await self.index.claim(spec, owner=owner, lease_s=lease_s, activate=activate)

    async def depths(self, prompt: Prompt) -> dict[int, int]:
        """Matched blocks per incarnation."""
        match = await self.index.match(prompt.chain())
        return {incarnation: depth.blocks for incarnation, depth in match.depths.items()}

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Let time pass until the condition holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await self.backend.pass_time()

    async def lapsed(self, name: str = "a") -> None:
        """Wait until the replica's lease has run out."""

        async def not_live() -> bool:
            fleet = await self.index.fleet()
            return any(r.spec.ref.replica == name and not r.live for r in fleet.replicas)

        await self.until(not_live)


class Quickly:
    """A Redis index that is matched as the router does it: without a task where that goes."""

    def __init__(self, index: RedisIndex) -> None:
        self._index = index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    async def match(self, chain: Chain) -> Match:
        soon = self._index.match_quickly(chain)
        if soon is None:
            return await self._index.match(chain)
        brought = asyncio.Event()
        soon.when(lambda _: brought.set())
        async with asyncio.timeout(DEADLINE_S):
            await brought.wait()
        made = soon.result()
        return made if isinstance(made, Match) else await made


class QuicklyOnRedis(OnRedis):
    """Opens such indexes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._open = store.open
        store.open = self.open  # type: ignore[method-assign]  # for tests that open another index themselves

    async def open(self, namespace: Namespace) -> Index:
        index = await self._open(namespace)
        assert isinstance(index, RedisIndex)
        return cast(Index, Quickly(index))


@pytest.fixture(params=["memory", "redis", "redis-quickly"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param == "memory":
        yield Memory()
    else:
        store = await open_store(request.getfixturevalue("redis_url"))
        yield OnRedis(store) if request.param == "redis" else QuicklyOnRedis(store)
        await store.close()


@pytest.fixture
async def harness(backend: Backend) -> Harness:
    return Harness(backend, await backend.store.open(Namespace(model="m", block_size=4)))
