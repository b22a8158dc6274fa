"""What the router remembers of its decisions: bounded, without a word of anybody's prompt, for trusted eyes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from metatrie.indexer.decisions import COLD_KEYS, Decisions
from metatrie.indexer.http_api import Caller, make_app
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.proto.api import Feedback, RouteRequest
from metatrie.proto.errors import ConfigError, Forbidden
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import PAGE_SPAN, BlockWrite, PageHead, ReplicaRef, ReplicaSpec, TierMask
from metatrie.scripts.explain import from_log

NAMESPACE = Namespace(model="m")
TOKENS = list(range(50_000, 50_000 + 16 * 40))
KEYS = Chain(NAMESPACE.root, 16, TOKENS).keys(40)


async def held(store: MemoryStore, replica: str, blocks: int) -> None:
    index = await store.open(NAMESPACE)
    spec = ReplicaSpec(ref=ReplicaRef(replica), engine="vllm", consumer=f"http://{replica}:9400")
    claim = await index.claim(spec, owner="o", lease_s=3600, activate=True)
    writes = [
        BlockWrite(key, KEYS[d - 1] if d else None, PageHead(KEYS[d - d % PAGE_SPAN]), d, TierMask(1))
        for d, key in enumerate(KEYS[:blocks])
    ]
    await index.write(claim.incarnation, 1, writes)


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await held(store, "deep", 24)
    await held(store, "shallow", 3)
    await held(store, "empty", 0)
    return store


@pytest.fixture
async def router(store: MemoryStore) -> AsyncIterator[Router]:
    async with Router(store, RouterConfig(policy="affinity_only")) as router:
        yield router


async def test_a_decision_is_kept_with_what_it_rests_on(router: Router) -> None:
    routed = await router.route(RouteRequest(model="m", token_ids=TOKENS))
    assert routed.explanation is None, "it was not asked for"
    (decided,) = router.decisions.newest(10)
    assert decided.id == routed.decision
    assert (decided.replica, decided.matched_blocks, decided.reusable_tokens) == ("deep/0", 24, 24 * 16)
    assert [(h.replica, h.matched_blocks) for h in decided.holdings] == [
        ("deep/0", 24),
        ("shallow/0", 3),
        ("empty/0", 0),
    ]
    (lookup,) = decided.lookups
    assert lookup.namespace == NAMESPACE
    assert lookup.prompt_blocks == 40
    kept = max(25, COLD_KEYS)
    assert lookup.keys == b"".join(KEYS[:kept]).hex(), "to one past the deepest match, at least"
    assert decided.explanation is not None
    assert {row.replica for row in decided.explanation.candidates} == {"deep", "shallow", "empty"}
    assert decided.served_tokens is None
    for tokens in (320, 999):
        await router.feedback(Feedback(reservation=routed.reservation, cached_tokens=tokens))
    assert router.decisions.newest(1)[0].served_tokens == 320, "the first report counts"


async def test_only_so_many_are_kept(store: MemoryStore) -> None:
    async with Router(store, RouterConfig(decisions=5)) as router:
        routed = [await router.route(RouteRequest(model="m", token_ids=TOKENS)) for _ in range(8)]
        assert len(router.decisions) == 5
        assert [d.id for d in router.decisions.newest(99)] == [r.decision for r in reversed(routed[3:])]
        assert router.decisions.get(routed[0].decision or "") is None
        await router.feedback(Feedback(reservation=routed[0].reservation, cached_tokens=1))
    async with Router(store, RouterConfig(decisions=0)) as router:
        assert (await router.route(RouteRequest(model="m", token_ids=TOKENS))).decision is None
        assert len(router.decisions) == 0


async def test_keys_are_bounded_over_all_decisions(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metatrie.indexer.decisions.MAX_KEY_BYTES", 3 * COLD_KEYS * 8)
    async with Router(store, RouterConfig()) as router:
        for _ in range(8):
            await router.route(RouteRequest(model="m", token_ids=TOKENS))
        assert len(router.decisions) == 3


async def test_they_are_listed_over_http(router: Router) -> None:
    routed = [await router.route(RouteRequest(model="m", token_ids=TOKENS[: 16 * n])) for n in (2, 20, 40)]
    async with HttpServer(make_app(router)) as server, aiohttp.ClientSession() as session:

        async def get(path: str) -> tuple[int, dict[str, object]]:
            async with session.get(server.url + path) as response:
                return response.status, await response.json()

        status, listed = await get("/v1/decisions?limit=2")
        assert (status, listed["kept"]) == (200, 3)
        assert [d["id"] for d in listed["decisions"]] == [r.decision for r in reversed(routed[1:])]  # type: ignore[attr-defined]  # JSON
        assert (await get("/v1/decisions?replica=nobody"))[1]["decisions"] == []
        assert (await get("/v1/decisions?model=other"))[1]["decisions"] == []
        assert len((await get("/v1/decisions?replica=deep/0"))[1]["decisions"]) >= 1  # type: ignore[arg-type]  # JSON
        status, one = await get(f"/v1/decisions/{routed[0].decision}")
        assert (status, one["id"], one["prompt_tokens"]) == (200, routed[0].decision, 32)
        assert (await get("/v1/decisions/nothing"))[0] == 404
        assert (await get("/v1/decisions?limit=0"))[0] == 400


async def test_nobody_else_may_read_them(router: Router) -> None:
    await router.route(RouteRequest(model="m", token_ids=TOKENS))
    stranger = Caller()
    with pytest.raises(Forbidden):
        router.decided(stranger, limit=1, model=None, replica=None)
    with pytest.raises(Forbidden):
        router.decision(stranger, "x")
    with pytest.raises(Forbidden):
        await router.explain(RouteRequest(model="m", token_ids=TOKENS), stranger)
    async with (
        HttpServer(make_app(router, authenticate=lambda request: stranger)) as server,
        aiohttp.ClientSession() as session,
    ):
        for method, path in (("GET", "/v1/decisions"), ("GET", "/v1/decisions/x"), ("POST", "/v1/explain")):
            body = {"model": "m", "token_ids": TOKENS} if method == "POST" else None
            async with session.request(method, server.url + path, json=body) as response:
                assert response.status == 403, path


async def test_the_log_has_every_decision_and_no_token(store: MemoryStore, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    config = RouterConfig(decisions=2, decision_log=str(log), policy="affinity_only")
    async with Router(store, config) as router:
        routed = [
            await router.route(RouteRequest(model="m", token_ids=TOKENS, cache_salt="hunter2")) for _ in range(4)
        ]
        await router.feedback(Feedback(reservation=routed[3].reservation, cached_tokens=7))
    text = log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["id"] for line in lines if line["kind"] == "decided"] == [r.decision for r in routed]
    assert [line for line in lines if line["kind"] == "served"] == [
        {"kind": "served", "id": routed[3].decision, "served_tokens": 7}
    ]
    assert "hunter2" not in text
    assert not _numbers(lines) & set(TOKENS)
    last = from_log(log, "last")
    assert (last.id, last.served_tokens) == (routed[3].decision, 7)
    assert from_log(log, routed[0].decision or "").served_tokens is None
    with pytest.raises(ConfigError, match="decision"):
        from_log(log, "0000")


def _numbers(value: object) -> set[object]:
    if isinstance(value, dict):
        return _numbers(list(value.values()))
    return set().union(*map(_numbers, value)) if isinstance(value, list) else {value}


async def test_the_log_begins_anew_beyond_its_size(store: MemoryStore, tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    decisions = Decisions(log=log, max_log_bytes=5_000)
    async with Router(store, RouterConfig()) as router:
        router.decisions = decisions
        for _ in range(20):
            await router.route(RouteRequest(model="m", token_ids=TOKENS))
            decisions.flush()
    older = log.with_name("decisions.jsonl.1")
    assert log.stat().st_size <= 10_000
    assert older.stat().st_size <= 10_000
    for line in (older.read_text() + log.read_text()).splitlines():
        assert json.loads(line)["kind"] == "decided"


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decision_log"):
        Decisions(log=tmp_path / "nowhere" / "log")


async def test_explaining_changes_nothing(store: MemoryStore) -> None:
    async with Router(store, RouterConfig(policy="round_robin")) as router:
        request = RouteRequest(model="m", token_ids=TOKENS)
        first = await router.explain(request)
        again = await router.explain(request)
        assert first.decision.replica == again.decision.replica == f"{(await router.route(request)).replica}/0"
        assert (await router.explain(request)).decision.replica != first.decision.replica, "it was that one's turn"
        assert len(router.decisions) == 1
        listed = (await router.replicas(model="m", limit=10)).replicas
        assert sum(info.load.reserved_requests for info in listed) == 1


async def test_explaining_tells_what_a_request_rests_on(router: Router) -> None:
    said = await router.explain(RouteRequest(model="m", token_ids=TOKENS))
    assert said.token_ids == TOKENS
    assert [(r.replica, r.matched_blocks, r.consumer) for r in said.replicas] == [
        ("deep", 24, "http://deep:9400"),
        ("shallow", 3, "http://shallow:9400"),
        ("empty", 0, "http://empty:9400"),
    ]
    assert said.decision.lookups[0].keys == b"".join(KEYS).hex(), "every key, however far anybody matched"
    assert said.unsalted_blocks == 0
    salted = await router.explain(RouteRequest(model="m", token_ids=TOKENS, cache_salt="s"))
    assert (salted.decision.matched_blocks, salted.unsalted_blocks, salted.unadapted_blocks) == (0, 24, 0)
    adapted = await router.explain(RouteRequest(model="m", token_ids=TOKENS, lora="a"))
    assert (adapted.decision.matched_blocks, adapted.unsalted_blocks, adapted.unadapted_blocks) == (0, 0, 24)
