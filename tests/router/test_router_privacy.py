"""Whatever a caller sends, nothing of a prompt, salt or media identifier comes back in an error, metric or log."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from metatrie.indexer.http_api import make_app
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.indexer.tenants import BearerAuth, Caller
from metatrie.proto.hashing import Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import ReplicaRef, ReplicaSpec

CANARY = "CANARYx7q"
NUMBER = 987654321
"""A token id nobody would meet by accident."""

TEXT = st.sampled_from([CANARY, CANARY * 300])
LEAF = st.one_of(TEXT, st.sampled_from([NUMBER, -NUMBER, NUMBER * 10**9, NUMBER + 0.5, True, None]))
WRONG = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("role"), inner, max_size=2),
    max_leaves=5,
)
FIELDS = (
    "token_ids",
    "prompt",
    "messages",
    "cache_salt",
    "tenant",
    "media",
    "lora",
    "replicas",
    "policy",
    "reservation",
)
VALID: dict[str, Any] = {
    "token_ids": [NUMBER] * 20,
    "prompt": CANARY,
    "messages": [{"role": CANARY, "content": CANARY}],
    "cache_salt": CANARY,
    "tenant": CANARY,
    "media": [{"identifier": CANARY, "offset": 3, "length": 2}],
    "lora": CANARY,
    "explain": True,
}
BODY = st.dictionaries(st.sampled_from(FIELDS), WRONG, max_size=4) | st.sets(st.sampled_from(sorted(VALID))).map(
    lambda names: {name: VALID[name] for name in names}
)
PATH = st.sampled_from(["/v1/match", "/v1/route", "/v1/feedback", "/v1/replicas"])


async def exchange(path: str, body: dict[str, Any], packed: bool, cut: int, trusted: bool) -> tuple[int, str, str]:
    """Status and text of one answer, and the metrics after it."""
    store = MemoryStore()
    index = await store.open(Namespace(model="m"))
    spec = ReplicaSpec(ref=ReplicaRef("r"), engine="vllm", url="http://127.0.0.1:1")
    await index.claim(spec, owner="test", lease_s=60, activate=True)
    encode, kind = (
        (msgspec.msgpack.encode, "application/msgpack") if packed else (msgspec.json.encode, "application/json")
    )
    data = encode({"model": "m", **body})
    auth = BearerAuth({"token": Caller(trusted=trusted)})
    config = RouterConfig(tokenize_timeout_s=1)
    async with (
        Router(store, config, tenant_secret=b"secret") as router,
        HttpServer(make_app(router, authenticate=auth)) as server,
        aiohttp.ClientSession(server.url) as client,
    ):
        headers = {"Content-Type": kind, "Authorization": "Bearer token"}
        async with client.post(path, data=data[: len(data) - cut], headers=headers) as response:
            text = repr(await response.read())
        async with client.get("/metrics") as metrics:
            return response.status, text, await metrics.text()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PATH, BODY, st.booleans(), st.sampled_from([0, 0, 0, 1, 7]), st.booleans())
def test_nothing_of_a_prompt_is_ever_repeated(
    caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], packed: bool, cut: int, trusted: bool
) -> None:
    with caplog.at_level(logging.DEBUG):
        status, text, metrics = asyncio.run(exchange(path, body, packed, cut, trusted))
    assert status < 500 or status == 503
    for seen in (text, metrics, caplog.text):
        assert CANARY not in seen
        assert str(NUMBER) not in seen
    caplog.clear()
