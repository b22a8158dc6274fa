"""A router on a real socket, replicas that hold prompts, and a client that speaks to it."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from metatrie.indexer.http_api import Authenticate, Registrar, make_app, trust_loopback
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.proto.hashing import NO_EXTRAS, BlockKey, Chain, Namespace, PromptExtras
from metatrie.proto.http import HttpServer
from metatrie.proto.index import (
    PAGE_SPAN,
    BlockWrite,
    Incarnation,
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    Store,
    Tier,
    TierMask,
)

LEASE_S = 3600.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.raw)

    @property
    def text(self) -> str:
        return self.raw.decode()


class Api:
    """One served router."""

    def __init__(self, router: Router, server: HttpServer, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.url = server.url
        self._session = session

    async def call(
        self, method: str, path: str, body: object = None, *, raw: bytes | None = None, **headers: str
    ) -> Answer:
        """body: sent as JSON. headers: with underscores for dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        data = raw
        if body is not None:
            data = msgspec.json.encode(body)
        stream = None if data is None else io.BytesIO(data)
        if data is not None:
            sent.setdefault("Content-Type", "application/json")
        async with self._session.request(method, self.url + path, data=stream, headers=sent) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def match(self, **body: object) -> Any:
        answer = await self.call("POST", "/v1/match", {"model": "m", **body})
        assert answer.status == 200, answer.text
        return answer.json

    async def route(self, **body: object) -> Any:
        answer = await self.call("POST", "/v1/route", {"model": "m", **body})
        assert answer.status == 200, answer.text
        return answer.json

    async def metrics(self) -> dict[str, float]:
        text = (await self.call("GET", "/metrics")).text
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}


ServeApi = Callable[..., Awaitable[Api]]
Hold = Callable[..., Awaitable[Incarnation]]


@pytest.fixture
async def serve_api() -> AsyncIterator[ServeApi]:
    """Starts routers; everything started is stopped after the test."""
    async with AsyncExitStack() as stack:

        async def serve(
            store: Store,
            config: RouterConfig | None = None,
            *,
            registrar: Registrar | None = None,
            authenticate: Authenticate = trust_loopback,
            **options: Any,
        ) -> Api:
            router = await stack.enter_async_context(Router(store, config, **options))
            app = make_app(router, registrar=registrar, authenticate=authenticate)
            server = await stack.enter_async_context(HttpServer(app))
            return Api(router, server, await stack.enter_async_context(aiohttp.ClientSession()))

        yield serve


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def api(store: MemoryStore, serve_api: ServeApi) -> Api:
    """A router over `store`, as configured by default."""
    return await serve_api(store)


@pytest.fixture
def hold(store: MemoryStore) -> Hold:
    """Registers a replica in `store` that holds leading blocks of a prompt."""

    async def hold_in(replica: str, tokens: Sequence[int] = (), **options: Any) -> Incarnation:
        return await hold_blocks(options.pop("store", store), replica, tokens, **options)

    return hold_in


async def hold_blocks(
    store: Store,
    replica: str,
    tokens: Sequence[int] = (),
    *,
    blocks: int | None = None,
    namespace: Namespace | None = None,
    dp_rank: int = 0,
    url: str | None = None,
    role: str = "both",
    status: ReplicaStatus | None = None,
    extras: PromptExtras = NO_EXTRAS,
    tiers: Sequence[Tier] = (),
    lease_s: float = LEASE_S,
) -> Incarnation:
    """blocks: how many leading ones, else all. tiers: of each block, else all GPU."""
    namespace = namespace or Namespace(model="m")
    index = await store.open(namespace)
    ref = ReplicaRef(replica, dp_rank)
    spec = ReplicaSpec(ref=ref, engine="vllm", url=url, role=role)
    claim = await index.claim(spec, owner=replica, lease_s=lease_s, activate=True)
    chain = Chain(namespace.root, namespace.block_size, tokens, extras)
    keys = chain.keys(chain.blocks if blocks is None else blocks)

    def write(i: int, key: BlockKey) -> BlockWrite:
        tier = tiers[i] if i < len(tiers) else Tier.GPU
        head = PageHead(keys[i - i % PAGE_SPAN])
        return BlockWrite(key=key, parent=keys[i - 1] if i else None, head=head, depth=i, tiers=TierMask(1 << tier))

    await index.write(claim.incarnation, 1, [write(i, key) for i, key in enumerate(keys)])
    if status is not None:
        await index.renew(ref, owner=replica, incarnation=claim.incarnation, status=status, lease_s=lease_s)
    return claim.incarnation


@pytest.fixture
async def engine() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts HTTP servers that answer `/tokenize` with the given handler; returns their base URL."""
    async with AsyncExitStack() as stack:

        async def start(tokenize: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> str:
            app = web.Application()
            app.router.add_post("/tokenize", tokenize)
            return (await stack.enter_async_context(HttpServer(app))).url

        yield start


async def wait_for(condition: Callable[[], Awaitable[bool]], *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Waits until an asynchronous condition holds."""
    return wait_for
