"""Registration, listing, health, metrics, OpenAPI: the rest of the router's surface."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from metatrie.indexer.http_api import endpoints, make_app, trust_loopback
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.indexer.router_metrics import MAX_CAUSES
from metatrie.indexer.tenants import BearerAuth, Caller
from metatrie.proto.api import RegisterReplica, ReplicaInfo, ReplicaLoad
from metatrie.proto.errors import Conflict
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import ReplicaRef, ReplicaSpec, ReplicaStatus

if TYPE_CHECKING:
    from .conftest import Api, Hold, ServeApi

TOKENS = list(range(1000, 1100))


class StoreRegistrar:
    """Registers replicas without following any events."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._registered: dict[tuple[str, str, int], RegisterReplica] = {}

    async def register(self, request: RegisterReplica) -> ReplicaInfo:
        key = request.model, request.replica, request.dp_rank
        if self._registered.setdefault(key, request) != request:
            raise Conflict("registered with other settings", field="replica", remedy="unregister it first")
        namespace = Namespace(model=request.model, block_size=request.block_size)
        index = await self._store.open(namespace)
        ref = ReplicaRef(request.replica, request.dp_rank)
        spec = ReplicaSpec(ref=ref, engine=request.engine, url=request.url, events=request.events)
        claim = await index.claim(spec, owner="test", lease_s=60, activate=True)
        return ReplicaInfo(
            replica=request.replica,
            dp_rank=request.dp_rank,
            model=request.model,
            namespace=namespace.id,
            block_size=request.block_size,
            engine=request.engine,
            role=request.role,
            url=request.url,
            events=request.events,
            state="exact",
            cause="",
            incarnation=claim.incarnation,
            blocks=0,
            detached=0,
            lag_s=0.0,
            load=ReplicaLoad(running=None, waiting=None, kv_usage=None, reserved_requests=0, reserved_tokens=0),
        )

    async def unregister(self, replica: str, *, model: str | None, dp_rank: int | None) -> bool:
        found = [
            key
            for key in self._registered
            if key[1] == replica and model in (None, key[0]) and dp_rank in (None, key[2])
        ]
        for key in found:
            request = self._registered.pop(key)
            index = await self._store.open(Namespace(model=request.model, block_size=request.block_size))
            await index.release(ReplicaRef(request.replica, request.dp_rank), owner=None)
        return bool(found)


@pytest.fixture
async def standalone(store: MemoryStore, serve_api: ServeApi) -> Api:
    """As `metatrie serve` runs it: replicas register over HTTP."""
    return await serve_api(store, registrar=StoreRegistrar(store))


BODY = {"replica": "r0", "engine": "vllm", "model": "m", "block_size": 16, "events": "tcp://127.0.0.1:5557"}


async def register(api: Api, status: int = 201, **changes: object) -> Any:
    body = {name: value for name, value in {**BODY, **changes}.items() if value is not None}
    answer = await api.call("POST", "/v1/replicas", body)
    assert answer.status == status, answer.text
    return answer.json


async def test_register_list_unregister(standalone: Api) -> None:
    created = await register(standalone, url="http://10.0.0.1:8000", replay="tcp://127.0.0.1:5558", surprise=1)
    assert (created["replica"], created["dp_rank"], created["state"]) == ("r0", 0, "exact")
    await register(standalone, dp_rank=1)
    await register(standalone, model="n", replica="a/b ü")
    listed = (await standalone.call("GET", "/v1/replicas")).json
    assert (listed["index"], listed["total"]) == ("ok", 3)
    assert [(r["model"], r["replica"], r["dp_rank"]) for r in listed["replicas"]] == [
        ("m", "r0", 0),
        ("m", "r0", 1),
        ("n", "a/b ü", 0),
    ]
    assert listed["replicas"][0] == created
    only = (await standalone.call("GET", "/v1/replicas?model=n&limit=1")).json
    assert [r["replica"] for r in only["replicas"]] == ["a/b ü"]

    assert (await standalone.call("DELETE", "/v1/replicas/r0?model=n")).status == 404
    assert (await standalone.call("DELETE", "/v1/replicas/r0?model=m&dp_rank=1")).status == 204
    assert (await standalone.call("DELETE", "/v1/replicas/r0")).status == 204
    assert (await standalone.call("DELETE", "/v1/replicas/a%2Fb%20%C3%BC")).status == 204
    gone = await standalone.call("DELETE", "/v1/replicas/r0")
    assert (gone.status, gone.json["field"]) == (404, "replica")
    assert (await standalone.call("GET", "/v1/replicas")).json["replicas"] == []
    routed = await standalone.call("POST", "/v1/route", {"model": "m", "token_ids": TOKENS})
    assert routed.status == 503


async def test_a_registration_counts_at_once_in_every_namespace_of_its_model(standalone: Api) -> None:
    for block_size in (16, 32):
        await register(standalone, replica=f"r{block_size}", block_size=block_size)
    sizes = {r["replica"]: r.get("block_size") for r in (await standalone.match(token_ids=TOKENS))["replicas"]}
    assert sizes == {"r16": None, "r32": 32}
    await standalone.call("DELETE", "/v1/replicas/r16")
    answer = await standalone.match(token_ids=TOKENS)
    assert (answer["block_size"], [r["replica"] for r in answer["replicas"]]) == (32, ["r32"])
    await register(standalone, replica="again")
    states = {r["replica"]: r["state"] for r in (await standalone.match(token_ids=TOKENS))["replicas"]}
    assert states == {"r32": "exact", "again": "exact"}


async def test_the_same_again_is_no_error_and_something_else_is_a_conflict(standalone: Api) -> None:
    await register(standalone)
    await register(standalone)
    problem = await register(standalone, 409, events="tcp://127.0.0.1:9999")
    assert problem["field"] == "replica"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replica", None),
        ("replica", ""),
        ("replica", "x" * 201),
        ("replica", "a\nb"),
        ("dp_rank", -1),
        ("dp_rank", 65536),
        ("engine", "VLLM!"),
        ("model", ""),
        ("block_size", 0),
        ("block_size", "16"),
        ("block_size", 5000),
        ("events", "127.0.0.1:5557"),
        ("replay", "http://127.0.0.1"),
        ("url", "ftp://host"),
        ("url", "http://user:secret@host"),
        ("role", "spare"),
        ("hash_mode", "guess"),
    ],
)
async def test_registration_is_checked(standalone: Api, field: str, value: object) -> None:
    problem = await register(standalone, 400, **{field: value})
    assert problem["field"] == field
    assert problem["remedy"]


async def test_where_sidecars_register_http_does_not(api: Api) -> None:
    for method, path, body in (("POST", "/v1/replicas", BODY), ("DELETE", "/v1/replicas/r0", None)):
        answer = await api.call(method, path, body)
        assert answer.status == 409
        assert "sidecar" in answer.json["remedy"]


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=99999", "limit=-1", "limit="])
async def test_query_parameters_are_checked(api: Api, query: str) -> None:
    answer = await api.call("GET", f"/v1/replicas?{query}")
    assert (answer.status, answer.json["field"]) == (400, "limit")


async def test_unknown_ranks_and_models_in_queries_are_refused(standalone: Api) -> None:
    assert (await standalone.call("DELETE", "/v1/replicas/r?dp_rank=zero")).json["field"] == "dp_rank"
    assert (await standalone.call("GET", "/v1/replicas?model=nope")).status == 404


async def test_every_path_of_the_api_wants_credentials_where_they_are_configured(
    store: MemoryStore, serve_api: ServeApi
) -> None:
    api = await serve_api(store, authenticate=BearerAuth({"good": Caller()}))
    for endpoint in endpoints(api.router, registrar=None, authenticate=trust_loopback):
        path = re.sub(r"\{\w+\}", "x", endpoint.path)
        status = (await api.call(endpoint.method, path, {} if endpoint.request else None)).status
        assert (status == 401) == path.startswith("/v1/"), path


# Health and metrics


async def test_health(api: Api, hold: Hold) -> None:
    await hold("r")
    assert (await api.call("GET", "/healthz")).json == {"status": "alive"}
    assert (await api.call("GET", "/readyz")).json == {"status": "ready", "models": 1, "replicas": 1}
    assert "/v1/match" in (await api.call("GET", "/")).text


async def test_metrics_tell_requests_blocks_and_replicas(api: Api, hold: Hold) -> None:
    await hold("a", TOKENS, blocks=4)
    await hold("b", status=ReplicaStatus(state="degraded", cause="gap"))
    await api.match(token_ids=TOKENS)
    await api.route(token_ids=TOKENS)
    await api.call("GET", "/nowhere")
    await api.call("PURGE", "/v1/match")
    metrics = await api.metrics()
    assert metrics['metatrie_router_http_requests_total{route="POST /v1/match",status="200"}'] == 1
    assert metrics['metatrie_router_http_requests_total{route="unmatched",status="404"}'] == 1
    assert metrics['metatrie_router_http_requests_total{route="unmatched",status="405"}'] == 1
    assert metrics['metatrie_router_http_request_seconds_count{route="POST /v1/route"}'] == 1
    assert metrics["metatrie_router_prompt_blocks_total"] == 12
    assert metrics["metatrie_router_matched_blocks_total"] == 8
    assert metrics['metatrie_router_replicas{cause="",model="m",state="exact"}'] == 1
    assert metrics['metatrie_router_replicas{cause="gap",model="m",state="degraded"}'] == 1
    assert metrics["metatrie_router_namespaces_down"] == 0
    assert metrics["metatrie_router_reservations"] == 1


async def test_causes_cannot_grow_the_label_set(api: Api, hold: Hold) -> None:
    for i in range(MAX_CAUSES + 20):
        await hold(f"r{i}", status=ReplicaStatus(state="degraded", cause=f"cause{i}"))
    await api.match(token_ids=TOKENS)
    counts = {k: v for k, v in (await api.metrics()).items() if k.startswith("metatrie_router_replicas{")}
    assert len(counts) <= MAX_CAUSES + 1
    assert sum(counts.values()) == MAX_CAUSES + 20


async def test_dead_incarnations_are_swept_in_the_background(
    store: MemoryStore, serve_api: ServeApi, hold: Hold, eventually: Any
) -> None:
    await hold("r", TOKENS)
    dead = await hold("r", TOKENS)
    await hold("r", TOKENS)
    index = await store.open(Namespace(model="m"))
    assert await index.held(dead)
    api = await serve_api(store, RouterConfig(sweep_interval_s=0.01))

    async def reclaimed() -> bool:
        return not await index.held(dead)

    await eventually(reclaimed)
    assert (await api.match(token_ids=TOKENS))["replicas"][0]["matched_blocks"] == 6
    assert (await api.metrics())["metatrie_router_swept_pages_total"] >= 2


async def test_new_namespaces_and_expired_leases_show_without_a_request(
    serve_api: ServeApi, hold: Hold, eventually: Any
) -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    api = await serve_api(store, RouterConfig(poll_interval_s=0.01))
    await hold("r", TOKENS, store=store, lease_s=1)

    def shows(label: str) -> Any:
        async def condition() -> bool:
            return (await api.metrics()).get(f"metatrie_router_replicas{{{label}}}") == 1

        return condition

    await eventually(shows('cause="",model="m",state="exact"'))
    now[0] = 2
    await eventually(shows('cause="lease_expired",model="m",state="stale"'))


# OpenAPI


@pytest.fixture
async def openapi(api: Api) -> Any:
    return (await api.call("GET", "/openapi.json")).json


async def test_openapi_describes_exactly_what_is_served(openapi: Any, store: MemoryStore) -> None:
    described = {(method.upper(), path) for path, methods in openapi["paths"].items() for method in methods}
    app = make_app(Router(store))
    served = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    assert described == served


async def test_openapi_is_well_formed(openapi: Any) -> None:
    assert openapi["openapi"].startswith("3.1.")
    assert openapi["info"]["title"]
    assert openapi["info"]["version"]
    text = msgspec.json.encode(openapi).decode()
    for reference in set(re.findall(r'"\$ref":"([^"]+)"', text)):
        node = openapi
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]
        assert node
    operations = [(path, op) for path, methods in openapi["paths"].items() for op in methods.values()]
    assert len({op["operationId"] for _, op in operations}) == len(operations)
    for path, operation in operations:
        in_path = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path))
        assert all(response["description"] for response in operation["responses"].values())
        assert any(status.startswith("2") for status in operation["responses"])
        assert operation["responses"]["default"]["content"].keys() == {"application/problem+json"}


async def test_openapi_states_the_bounds_that_hold(openapi: Any) -> None:
    schemas = openapi["components"]["schemas"]
    assert schemas["RouteRequest"]["properties"].keys() > schemas["MatchRequest"]["properties"].keys() - {"limit"}
    token_ids = next(s for s in schemas["MatchRequest"]["properties"]["token_ids"]["anyOf"] if s["type"] == "array")
    assert token_ids["maxItems"] == 1 << 20
    assert token_ids["items"]["maximum"] == (1 << 32) - 1
    assert schemas["MatchedReplica"]["properties"]["state"]["enum"] == ["degraded", "exact", "stale"]
    assert schemas["RegisterReplica"]["required"] == ["replica", "engine", "model", "block_size", "events"]
