"""The router while a real Redis is killed and comes back empty."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import RouterConfig
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import Load, ReplicaRef, ReplicaStatus, Store

if TYPE_CHECKING:
    from .conftest import Hold, ServeApi

TOKENS = list(range(1000, 1100))
FAST = RouterConfig(poll_interval_s=0.05, outage_poll_interval_s=0.02, sweep_interval_s=0.05)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedRedis]:
    """A redis-server of the test's own."""
    async with EmbeddedRedis() as started:
        yield started


@pytest.fixture
async def shared(server: EmbeddedRedis) -> AsyncIterator[Store]:
    store = await open_store(server.url)
    yield store
    await store.close()


async def test_the_router_outlives_its_store(
    server: EmbeddedRedis, shared: Store, serve_api: ServeApi, hold: Hold, eventually: Any
) -> None:
    api = await serve_api(shared, FAST)
    await hold("busy", TOKENS, store=shared, status=ReplicaStatus(load=Load(running=9)))
    await hold("idle", store=shared)
    assert (await api.match(token_ids=TOKENS))["replicas"][0]["matched_blocks"] == 6
    assert (await api.call("GET", "/readyz")).status == 200

    server.kill()
    # Blind from the first request on: everything known of the fleet, nothing of its blocks, and it says so.
    blind = await api.match(token_ids=TOKENS)
    assert blind["index"] == "unavailable"
    assert [(r["replica"], r["matched_blocks"], r["state"], r["cause"]) for r in blind["replicas"]] == [
        ("busy", 0, "stale", "index_unavailable"),
        ("idle", 0, "stale", "index_unavailable"),
    ]
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["state"], routed["index"]) == ("idle", "stale", "unavailable")
    assert routed["reusable_tokens"] == 0
    listed = (await api.call("GET", "/v1/replicas")).json
    assert (listed["index"], {r["cause"] for r in listed["replicas"]}) == ("unavailable", {"index_unavailable"})
    ready = await api.call("GET", "/readyz")
    assert (ready.status, ready.json["title"]) == (503, "Index store unavailable")
    assert (await api.call("GET", "/healthz")).status == 200
    unknown = await api.call("POST", "/v1/match", {"model": "other", "token_ids": TOKENS})
    assert (unknown.status, unknown.headers["Retry-After"]) == (503, "1")
    metrics = await api.metrics()
    assert metrics["metatrie_router_blind_answers_total"] == 2
    assert metrics["metatrie_router_namespaces_down"] == 1
    assert metrics['metatrie_router_store_errors_total{error="StoreUnavailable"}'] >= 1
    assert metrics['metatrie_router_replicas{cause="index_unavailable",model="m",state="stale"}'] == 2

    server.start()

    async def reachable() -> bool:
        return bool((await api.match(token_ids=TOKENS))["index"] == "ok")

    # It came back empty: nobody is registered, but requests still go where engines were a moment ago.
    await eventually(reachable)
    assert (await api.match(token_ids=TOKENS))["replicas"] == []
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["state"], routed["cause"]) == ("idle", "stale", "registry_empty")

    # Consumers register again, and the index is believed again.
    await hold("busy", TOKENS, store=shared)
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["state"], routed["reusable_tokens"]) == ("busy", "exact", 96)
    assert (await api.call("GET", "/readyz")).status == 200


async def test_a_known_outage_costs_requests_nothing(
    server: EmbeddedRedis, shared: Store, serve_api: ServeApi, hold: Hold
) -> None:
    api = await serve_api(shared, RouterConfig(poll_interval_s=60, outage_poll_interval_s=60, sweep_interval_s=0))
    await hold("r", TOKENS, store=shared)
    await api.match(token_ids=TOKENS)
    server.kill()
    for _ in range(5):
        assert (await api.match(token_ids=TOKENS))["index"] == "unavailable"
        assert (await api.route(token_ids=TOKENS))["index"] == "unavailable"
        assert (await api.call("GET", "/v1/replicas")).json["index"] == "unavailable"
    # Only the first of them asked the store.
    metrics = await api.metrics()
    assert metrics['metatrie_router_store_errors_total{error="StoreUnavailable"}'] == 1
    assert metrics["metatrie_router_blind_answers_total"] == 10


async def test_an_outage_is_noticed_and_ended_in_the_background(
    server: EmbeddedRedis, shared: Store, serve_api: ServeApi, hold: Hold, eventually: Any
) -> None:
    await hold("r", TOKENS, store=shared)
    api = await serve_api(shared, FAST)

    async def down() -> bool:
        return (await api.metrics())["metatrie_router_namespaces_down"] == 1

    async def up() -> bool:
        return not await down()

    await eventually(up)
    server.kill()
    await eventually(down)
    server.start()
    await eventually(up)


async def test_a_router_starts_without_its_store(
    server: EmbeddedRedis, shared: Store, serve_api: ServeApi, hold: Hold, eventually: Any
) -> None:
    server.kill()
    api = await serve_api(shared, FAST)
    assert (await api.call("POST", "/v1/match", {"model": "m", "token_ids": TOKENS})).status == 503
    server.start()
    await hold("r", TOKENS, store=shared)

    async def answers() -> bool:
        return (await api.call("POST", "/v1/match", {"model": "m", "token_ids": TOKENS})).status == 200

    await eventually(answers)


async def test_an_emptied_registry_is_remembered_for_a_while_only(
    shared: Store, serve_api: ServeApi, hold: Hold
) -> None:
    now = [0.0]
    api = await serve_api(shared, RouterConfig(poll_interval_s=60, sweep_interval_s=0), clock=lambda: now[0])
    await hold("r", TOKENS, store=shared)
    assert (await api.route(token_ids=TOKENS))["state"] == "exact"
    index = await shared.open(Namespace(model="m"))
    await index.release(ReplicaRef("r"), owner=None)
    now[0] = 59
    assert (await api.route(token_ids=TOKENS))["cause"] == "registry_empty"
    now[0] = 61
    answer = await api.call("POST", "/v1/route", {"model": "m", "token_ids": TOKENS})
    assert (answer.status, answer.json["title"]) == (503, "No replica available")


async def test_a_router_that_cannot_go_on_is_not_called_alive(serve_api: ServeApi, eventually: Any) -> None:
    class Defective(MemoryStore):
        broken = False

        async def namespaces(self) -> Sequence[Namespace]:
            if self.broken:
                raise KeyError("a defect")
            return await super().namespaces()

    store = Defective()
    api = await serve_api(store, FAST)
    assert (await api.call("GET", "/healthz")).status == 200
    store.broken = True

    async def shown() -> bool:
        return (await api.call("GET", "/healthz")).status == 500 == (await api.call("GET", "/readyz")).status

    await eventually(shown)
