"""`POST /v1/match` over HTTP: worked answers, every refusal, both encodings."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from aiohttp import web
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.tenants import BearerAuth, Caller
from metatrie.proto.api import MAX_PROMPT_TOKENS
from metatrie.proto.hashing import MediaItem, Namespace, PromptExtras
from metatrie.proto.index import ReplicaRef, ReplicaStatus, Tier

if TYPE_CHECKING:
    from .conftest import Api, Hold, ServeApi

Engine = Callable[[Callable[[web.Request], Awaitable[web.StreamResponse]]], Awaitable[str]]

TOKENS = list(range(1000, 1100))
"""6 full blocks of 16, and 4 tokens more."""


def depths(answer: Any) -> dict[str, int]:
    return {r["replica"]: r["matched_blocks"] for r in answer["replicas"]}


async def refused(api: Api, status: int, body: object, **headers: str) -> Any:
    """The problem document of a refused match."""
    answer = await api.call("POST", "/v1/match", body, **headers)
    assert answer.status == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"]
    return problem


# Answers


async def test_roles_are_told_where_prefill_and_decode_are_separate(api: Api, hold: Hold) -> None:
    await hold("prefiller", TOKENS, blocks=3, role="prefill")
    await hold("decoder", TOKENS, blocks=2, role="decode")
    await hold("either", TOKENS, blocks=1)
    answer = await api.match(token_ids=TOKENS)
    assert [(r["replica"], r.get("role")) for r in answer["replicas"]] == [
        ("prefiller", "prefill"),
        ("decoder", "decode"),
        ("either", None),
    ]


async def test_replicas_are_listed_deepest_first_with_all_that_was_promised(api: Api, hold: Hold) -> None:
    await hold("shallow", TOKENS, blocks=2)
    await hold("deep", TOKENS, blocks=5, tiers=[Tier.GPU, Tier.GPU, Tier.CPU, Tier.STORAGE, Tier.STORAGE])
    await hold("b-empty")
    await hold("a-empty")
    answer = await api.match(token_ids=TOKENS)
    assert {key: value for key, value in answer.items() if key != "replicas"} == {
        "model": "m",
        "block_size": 16,
        "prompt_tokens": 100,
        "prompt_blocks": 6,
        "index": "ok",
        "total": 4,
    }
    assert answer["replicas"][0] == {
        "replica": "deep",
        "dp_rank": 0,
        "matched_blocks": 5,
        "reusable_tokens": 80,
        "tiers": {"gpu": 2, "cpu": 1, "storage": 2},
        "state": "exact",
    }
    assert depths(answer) == {"deep": 5, "shallow": 2, "a-empty": 0, "b-empty": 0}
    assert list(depths(answer)) == ["deep", "shallow", "a-empty", "b-empty"]


@pytest.mark.parametrize(
    ("prompt_tokens", "matched", "reusable"),
    [(1, 0, 0), (16, 1, 0), (17, 1, 16), (32, 2, 16), (96, 6, 80), (97, 6, 96), (100, 6, 96)],
)
async def test_the_last_token_is_never_reusable(
    api: Api, hold: Hold, prompt_tokens: int, matched: int, reusable: int
) -> None:
    await hold("r", TOKENS)
    (replica,) = (await api.match(token_ids=TOKENS[:prompt_tokens]))["replicas"]
    assert (replica["matched_blocks"], replica["reusable_tokens"]) == (matched, reusable)


async def test_ranks_of_one_engine_are_told_apart(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS, blocks=1, dp_rank=0)
    await hold("r", TOKENS, blocks=3, dp_rank=1)
    answer = await api.match(token_ids=TOKENS)
    assert [(r["dp_rank"], r["matched_blocks"]) for r in answer["replicas"]] == [(1, 3), (0, 1)]


async def test_only_named_replicas_are_considered(api: Api, hold: Hold) -> None:
    for name in "abc":
        await hold(name, TOKENS)
    answer = await api.match(token_ids=TOKENS, replicas=["c", "a", "nobody"])
    assert (list(depths(answer)), answer["total"]) == (["a", "c"], 2)


async def test_the_list_is_bounded_and_keeps_the_deepest(api: Api, hold: Hold) -> None:
    for i in range(70):
        await hold(f"r{i:02}", TOKENS, blocks=i % 7)
    default = await api.match(token_ids=TOKENS)
    assert (len(default["replicas"]), default["total"]) == (64, 70)
    assert list(depths(default).values()) == sorted((i % 7 for i in range(70)), reverse=True)[:64]
    assert list(depths(await api.match(token_ids=TOKENS, limit=3)).items()) == [("r06", 6), ("r13", 6), ("r20", 6)]
    assert len((await api.match(token_ids=TOKENS, limit=100))["replicas"]) == 70


async def test_states_and_their_causes_show(serve_api: ServeApi, hold: Hold) -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    api = await serve_api(store)
    await hold("a-degraded", TOKENS, store=store, status=ReplicaStatus(state="degraded", cause="gap"))
    await hold("b-gone", TOKENS, store=store, lease_s=1)
    await hold("c-exact", TOKENS, store=store)
    namespace = Namespace(model="m")
    index = await store.open(namespace)
    now[0] = 2
    answer = await api.match(token_ids=TOKENS)
    assert [(r["replica"], r["matched_blocks"], r["state"], r.get("cause")) for r in answer["replicas"]] == [
        ("a-degraded", 6, "degraded", "gap"),
        ("c-exact", 6, "exact", None),
        ("b-gone", 0, "stale", "lease_expired"),
    ]
    await index.release(ReplicaRef("b-gone"), owner=None)
    assert "b-gone" not in depths(await api.match(token_ids=TOKENS))


async def test_a_replica_registered_a_moment_ago_counts_at_once(api: Api, hold: Hold) -> None:
    assert (await api.call("POST", "/v1/match", {"model": "m", "token_ids": TOKENS})).status == 404
    await hold("r", TOKENS)
    assert depths(await api.match(token_ids=TOKENS)) == {"r": 6}


async def test_namespaces_of_one_model_are_merged(api: Api, hold: Hold) -> None:
    """A rolling change of block size: two namespaces answer for one model name."""
    old, new = Namespace(model="m"), Namespace(model="m", block_size=32)
    await hold("a-old", TOKENS, blocks=3, namespace=old)
    await hold("moved", TOKENS, blocks=1, namespace=old)
    await hold("moved", TOKENS, blocks=3, namespace=new)
    await hold("z-new", TOKENS, blocks=1, namespace=new)
    await hold("z-idle", namespace=new)
    answer = await api.match(token_ids=TOKENS)
    assert (answer["block_size"], answer["prompt_blocks"], answer["total"]) == (32, 3, 4)
    rows = [
        (r["replica"], r["matched_blocks"], r["reusable_tokens"], r.get("block_size")) for r in answer["replicas"]
    ]
    assert rows == [("moved", 3, 96, None), ("a-old", 3, 48, 16), ("z-new", 1, 32, None), ("z-idle", 0, 0, None)]


async def test_namespaces_that_differ_in_name_only_do_not_share_blocks(api: Api, hold: Hold) -> None:
    await hold("a", TOKENS, namespace=Namespace(model="m", revision="1"))
    await hold("b", TOKENS, blocks=2, namespace=Namespace(model="m", revision="2"))
    assert depths(await api.match(token_ids=TOKENS)) == {"a": 6, "b": 2}
    assert depths(await api.match(token_ids=[1, *TOKENS])) == {"a": 0, "b": 0}


async def test_a_namespace_without_live_replicas_only_lists_them(
    store: MemoryStore, serve_api: ServeApi, hold: Hold
) -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    await hold("old", TOKENS, store=store, namespace=Namespace(model="m", block_size=32), lease_s=1)
    await hold("new", TOKENS, store=store)
    now[0] = 2
    answer = await (await serve_api(store)).match(token_ids=TOKENS)
    assert answer["block_size"] == 16
    assert [(r["replica"], r["state"], r.get("block_size")) for r in answer["replicas"]] == [
        ("new", "exact", None),
        ("old", "stale", 32),
    ]


# What else names a block


async def test_adapters_media_and_salts_have_blocks_of_their_own(api: Api, hold: Hold) -> None:
    media = MediaItem(identifier="img", offset=20, length=10)
    kinds: dict[str, tuple[PromptExtras, dict[str, object]]] = {
        "plain": (PromptExtras(), {}),
        "lora": (PromptExtras(lora="ad"), {"lora": "ad"}),
        "media": (PromptExtras(media=(media,)), {"media": [{"identifier": "img", "offset": 20, "length": 10}]}),
        "salt": (PromptExtras(cache_salt="s"), {"cache_salt": "s"}),
    }
    for name, (extras, _) in kinds.items():
        await hold(name, TOKENS, extras=extras)
    for name, (_, fields) in kinds.items():
        found = {n: d for n, d in depths(await api.match(token_ids=TOKENS, **fields)).items() if d}
        # An image in the second block leaves the first one shared.
        shared = {"plain": {"media": 1}, "media": {"plain": 1}}.get(name, {})
        assert found == {name: 6, **shared}


async def test_media_may_come_in_any_order(api: Api, hold: Hold) -> None:
    items = (MediaItem(identifier="x", offset=3, length=4), MediaItem(identifier="y", offset=40, length=9))
    await hold("r", TOKENS, extras=PromptExtras(media=items))
    fields = [msgspec.to_builtins(item) for item in reversed(items)]
    assert depths(await api.match(token_ids=TOKENS, media=fields)) == {"r": 6}


TOKEN_HEADER = {"Authorization": "Bearer stranger"}


@pytest.mark.parametrize(
    ("field", "value"), [("cache_salt", "s"), ("media", [{"identifier": "x", "offset": 0, "length": 1}])]
)
async def test_what_addresses_others_prefixes_is_for_trusted_callers_only(
    store: MemoryStore, serve_api: ServeApi, hold: Hold, field: str, value: object
) -> None:
    auth = BearerAuth({"stranger": Caller(), "friend": Caller(trusted=True)})
    api = await serve_api(store, authenticate=auth)
    await hold("r", TOKENS)
    body = {"model": "m", "token_ids": TOKENS, field: value}
    problem = await refused(api, 403, body, **TOKEN_HEADER)
    assert problem["field"] == field
    assert problem["remedy"]
    assert (await api.call("POST", "/v1/match", body, Authorization="Bearer friend")).status == 200
    assert (await refused(api, 401, body))["remedy"]
    await refused(api, 401, body, Authorization="Bearer nobody")
    await refused(api, 401, body, Authorization="Basic friend")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
async def test_loopback_is_trusted_unless_it_only_forwards(api: Api, hold: Hold, header: str) -> None:
    await hold("r", TOKENS)
    body = {"model": "m", "token_ids": TOKENS, "cache_salt": "s"}
    assert (await api.call("POST", "/v1/match", body)).status == 200
    assert (await refused(api, 403, body, **{header: "203.0.113.9"}))["field"] == "cache_salt"


async def test_tenants_are_isolated_by_the_secret(store: MemoryStore, serve_api: ServeApi, hold: Hold) -> None:
    salt = hmac.new(b"key", b"acme", hashlib.sha256).hexdigest()
    await hold("r", TOKENS, extras=PromptExtras(cache_salt=salt))
    auth = BearerAuth({"acme": Caller(tenant="acme"), "other": Caller(tenant="other"), "admin": Caller(trusted=True)})
    api = await serve_api(store, authenticate=auth, tenant_secret=b"key")

    async def depth(token: str, **fields: object) -> int:
        body = {"model": "m", "token_ids": TOKENS, **fields}
        answer = await api.call("POST", "/v1/match", body, Authorization=f"Bearer {token}")
        assert answer.status == 200
        return depths(answer.json)["r"]

    assert await depth("acme") == 6
    assert await depth("acme", tenant="acme") == 6
    assert await depth("other") == 0
    assert await depth("admin") == 0
    assert await depth("admin", tenant="acme") == 6
    problem = await refused(
        api, 403, {"model": "m", "token_ids": TOKENS, "tenant": "acme"}, Authorization="Bearer other"
    )
    assert problem["field"] == "tenant"


async def test_without_a_secret_tenants_share_their_prefixes(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS)
    assert depths(await api.match(token_ids=TOKENS, tenant="acme")) == {"r": 6}


# Text


async def test_text_is_tokenised_by_a_live_engine_of_the_model(api: Api, hold: Hold, engine: Engine) -> None:
    asked: list[Any] = []

    async def tokenize(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"count": 100, "max_model_len": 4096, "tokens": TOKENS})

    await hold("r", TOKENS, url=await engine(tokenize))
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "x"}]
    for fields in ({"prompt": "hello"}, {"messages": messages}):
        answer = await api.match(**fields)
        assert (answer["prompt_tokens"], depths(answer)) == (100, {"r": 6})
    assert asked == [
        {"model": "m", "prompt": "hello"},
        {"model": "m", "messages": messages, "add_generation_prompt": True},
    ]


async def test_another_engine_is_asked_when_one_cannot_tokenise(api: Api, hold: Hold, engine: Engine) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=500)

    async def nonsense(request: web.Request) -> web.Response:
        return web.json_response({"tokens": "no"})

    async def good(request: web.Request) -> web.Response:
        return web.json_response({"tokens": TOKENS})

    await hold("bad", url=await engine(broken))
    await hold("good", TOKENS, url=await engine(good))
    for _ in range(4):
        assert depths(await api.match(prompt="x"))["good"] == 6
    await hold("good", TOKENS, url=await engine(nonsense))
    problem = await refused(api, 503, {"model": "m", "prompt": "x"})
    assert problem["field"] == "prompt"
    assert "token_ids" in problem["remedy"]


async def test_a_prompt_the_engine_refuses_is_the_callers_fault(api: Api, hold: Hold, engine: Engine) -> None:
    async def picky(request: web.Request) -> web.Response:
        return web.Response(status=400, text="cannot template: SECRET")

    await hold("r", url=await engine(picky))
    answer = await api.call("POST", "/v1/match", {"model": "m", "messages": [{"role": "SECRET"}]})
    assert (answer.status, answer.json["field"]) == (400, "messages")
    assert "SECRET" not in answer.text


async def test_text_needs_a_replica_with_a_url(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS)
    answer = await api.call("POST", "/v1/match", {"model": "m", "prompt": "x"})
    assert (answer.status, answer.json["field"]) == (503, "prompt")
    assert "token_ids" in answer.json["remedy"]
    assert answer.headers["Retry-After"] == "1"


# Refusals and encodings


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"token_ids": [1]}, "model"),
        ({"model": 1, "token_ids": [1]}, "model"),
        ({"model": "", "token_ids": [1]}, "model"),
        ({"model": "x" * 513, "token_ids": [1]}, "model"),
        ({"model": "m"}, "token_ids"),
        ({"model": "m", "token_ids": [1], "prompt": "x"}, "token_ids"),
        ({"model": "m", "prompt": "x", "messages": [{}]}, "token_ids"),
        ({"model": "m", "token_ids": []}, "token_ids"),
        ({"model": "m", "token_ids": "1,2"}, "token_ids"),
        ({"model": "m", "token_ids": [1, 2.5]}, "token_ids[1]"),
        ({"model": "m", "token_ids": [1, True]}, "token_ids[1]"),
        ({"model": "m", "token_ids": [-1]}, "token_ids[0]"),
        ({"model": "m", "token_ids": [1 << 32]}, "token_ids[0]"),
        ({"model": "m", "prompt": ""}, "prompt"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": ["hi"]}, "messages[0]"),
        ({"model": "m", "token_ids": [1], "lora": ""}, "lora"),
        ({"model": "m", "token_ids": [1], "cache_salt": "x" * 513}, "cache_salt"),
        (
            {"model": "m", "token_ids": [1], "media": [{"identifier": "x", "offset": -1, "length": 1}]},
            "media[0].offset",
        ),
        ({"model": "m", "token_ids": [1], "media": [{"offset": 0, "length": 1}]}, "media[0].identifier"),
        ({"model": "m", "token_ids": [1], "replicas": []}, "replicas"),
        ({"model": "m", "token_ids": [1], "replicas": ["a\nb"]}, "replicas[0]"),
        ({"model": "m", "token_ids": [1], "limit": 0}, "limit"),
    ],
)
async def test_a_wrong_field_is_named(api: Api, hold: Hold, body: object, field: str) -> None:
    await hold("r", TOKENS)
    problem = await refused(api, 400, body)
    assert problem["type"] == "urn:problem-type:metatrie:invalid-field"
    assert problem["field"] == field
    assert problem["remedy"]


@pytest.mark.parametrize("raw", [b"", b"{", b"null", b"[]", b"\xff", b'{"model": "\xff"}', b"[" * 100_000])
async def test_what_is_no_document_is_refused(api: Api, raw: bytes) -> None:
    answer = await api.call("POST", "/v1/match", raw=raw)
    assert answer.status == 400
    assert answer.json["title"] == "Invalid field"


async def test_deep_nesting_is_refused_not_a_crash(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS)
    for name in ("messages", "unknown"):
        raw = b'{"model":"m","%s":[{"a":%s%s}]}' % (name.encode(), b"[" * 100_000, b"]" * 100_000)
        assert (await api.call("POST", "/v1/match", raw=raw)).status == 400


async def test_an_unknown_model_is_not_found(api: Api) -> None:
    problem = await refused(api, 404, {"model": "nope", "token_ids": [1]})
    assert problem["field"] == "model"


async def test_unknown_fields_are_ignored(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS)
    assert depths(await api.match(token_ids=TOKENS, temperature=0.5, nested={"a": [1]})) == {"r": 6}


async def test_the_longest_prompt_fits_and_one_token_more_does_not(api: Api, hold: Hold) -> None:
    await hold("r")
    assert (await api.match(token_ids=[7] * MAX_PROMPT_TOKENS))["prompt_tokens"] == MAX_PROMPT_TOKENS
    problem = await refused(api, 400, {"model": "m", "token_ids": [7] * (MAX_PROMPT_TOKENS + 1)})
    assert problem["field"] == "token_ids"


async def test_a_prompt_of_128k_large_token_ids_fits_in_json(api: Api, hold: Hold) -> None:
    await hold("r")
    assert (await api.match(token_ids=[4294967295] * 131072))["prompt_blocks"] == 8192


@pytest.mark.parametrize("kind", ["application/msgpack", "application/x-msgpack", "application/vnd.msgpack"])
async def test_msgpack_in_and_out(api: Api, hold: Hold, kind: str) -> None:
    await hold("r", TOKENS)
    raw = msgspec.msgpack.encode({"model": "m", "token_ids": TOKENS})
    packed = await api.call("POST", "/v1/match", raw=raw, Content_Type=kind)
    assert packed.headers["Content-Type"] == "application/msgpack"
    as_json = await api.call("POST", "/v1/match", raw=raw, Content_Type=kind, Accept="application/json")
    assert msgspec.msgpack.decode(packed.raw) == as_json.json == await api.match(token_ids=TOKENS)
    body = {"model": "m", "token_ids": TOKENS}
    assert (await api.call("POST", "/v1/match", body, Accept="application/msgpack")).raw == packed.raw
    wrong = await api.call("POST", "/v1/match", raw=raw + b"x", Content_Type=kind)
    assert (wrong.status, wrong.headers["Content-Type"]) == (400, "application/problem+json")


async def test_the_answer_is_the_same_over_redis(redis_url: str, serve_api: ServeApi, api: Api, hold: Hold) -> None:
    shared = await open_store(redis_url)
    try:
        for where in (None, shared):
            options = {} if where is None else {"store": where}
            await hold("a", TOKENS, blocks=4, tiers=[Tier.GPU, Tier.CPU, Tier.STORAGE], **options)
            await hold("b", TOKENS[:40], **options)
            await hold("c", status=ReplicaStatus(state="degraded", cause="gap"), **options)
        over_redis = await serve_api(shared)
        assert await over_redis.match(token_ids=TOKENS) == await api.match(token_ids=TOKENS)
        assert (await over_redis.route(token_ids=TOKENS))["replica"] == "a"
    finally:
        await shared.close()
