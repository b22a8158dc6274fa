"""Tenants: isolation, trust groups, salts and their rotation, limits, and what a probe can learn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from metatrie.indexer.models import ModelConfig
from metatrie.indexer.proxy import HEADER
from metatrie.indexer.router import RouterConfig
from metatrie.indexer.tenants import BearerAuth, Caller, Quota, Tenants, TenantsConfig, TenantsFile, load_tenants
from metatrie.proto.errors import ConfigError, TooManyRequests, Unauthorized
from metatrie.scripts.stack import Child
from prometheus_client import CollectorRegistry

OpenFront = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]
StartScripted = Callable[..., Awaitable[Any]]
TEXT = "the weather in Paris is what it was " * 20
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
BYTES = RouterConfig(models={"m": ModelConfig(tokenizer="byte")})
SECRETS = {"1": "0123456789abcdef", "2": "fedcba9876543210"}


def token(name: str) -> str:
    return f"{name}-token-0123456789"


def tenants_of(**changes: Any) -> Tenants:
    """acme and its lab trust each other; other is alone; admin is trusted."""
    config = {
        "salt": {"version": 1, "secrets": SECRETS},
        "tenants": {
            "acme": {"tokens": [token("acme")]},
            "lab": {"tokens": [token("lab")], "group": "acme"},
            "other": {"tokens": [token("other")]},
            "admin": {"token_digests": [hashlib.sha256(token("admin").encode()).hexdigest()], "trusted": True},
            **changes.pop("tenants", {}),
        },
        **changes,
    }
    return Tenants(msgspec.convert({k: v for k, v in config.items() if v is not None}, TenantsConfig))


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token(name)}"}


class Request:
    def __init__(self, **headers: str) -> None:
        self.headers = headers


# Isolation


async def hits(front: Any, tenant: str, **fields: object) -> int:
    body = {"model": "m", "messages": CHAT["messages"], **fields}
    status, answer, _ = await front.post("/v1/match", body, **bearer(tenant))
    assert status == 200
    return int(max(replica["matched_blocks"] for replica in answer["replicas"]))


@pytest.mark.parametrize("salted", [False, True])
async def test_the_worked_example(open_front: OpenFront, eventually: Eventually, salted: bool) -> None:
    """One tenant's prompt is served, another asks the same: a hit unsalted, none salted; one within a trust group."""
    tenants = tenants_of() if salted else tenants_of(salt=None, shared=True)
    front = await open_front(engines=2, router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
    status, _, _ = await front.post("/v1/chat/completions", CHAT, **bearer("acme"))
    assert status == 200

    async def stored() -> bool:
        return await hits(front, "acme") > 40

    await eventually(stored)
    assert (await hits(front, "other") > 40) is not salted
    assert await hits(front, "lab") > 40
    # The engine agrees: the salt reached it.
    cached = {}
    for name in ("other", "lab"):
        _, answer, headers = await front.post("/v1/chat/completions", CHAT, **bearer(name))
        cached[name] = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        if name == "other" and salted:
            assert headers[HEADER + "Matched-Blocks"] == "0"
    assert (cached["other"] > 0) is not salted
    assert cached["lab"] > 0


async def test_a_probe_learns_nothing(open_front: OpenFront, eventually: Eventually) -> None:
    """Answers to a tenant are the same whether or not another one's prompt was served."""
    answers = []
    for served in (False, True):
        tenants = tenants_of()
        front = await open_front(engines=1, router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
        if served:
            assert (await front.post("/v1/chat/completions", CHAT, **bearer("acme")))[0] == 200

            async def stored(front: Any = front) -> bool:
                return await hits(front, "acme") > 40 and await front.reserved() == 0

            await eventually(stored)
        seen: list[Any] = []
        for path, body in (("/v1/match", CHAT), ("/v1/route", {**CHAT, "explain": True})):
            _, answer, _ = await front.post(path, body, **bearer("other"))
            seen.append({k: v for k, v in answer.items() if k not in ("reservation", "url", "decision")})
        _, answer, headers = await front.post("/v1/chat/completions", CHAT, **bearer("other"))
        seen.append(answer["usage"])
        seen.append({name: value for name, value in headers.items() if name.startswith(HEADER)})
        answers.append(json.loads(re.sub(r'"(load|at)": [^,}]+', '"x": 0', json.dumps(seen))))
    before, after = answers
    terms = [answer[1].pop("explanation") for answer in (before, after)]
    assert before == after
    assert [t["candidates"][0]["terms"].get("reusable_tokens", 0) for t in terms] == [0, 0]


async def test_what_tenants_share_is_not_theirs_to_see_or_change(open_front: OpenFront) -> None:
    tenants = tenants_of()
    front = await open_front(engines=1, router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
    for path in ("/v1/replicas", "/v1/decisions"):
        assert (await front.get(path, **bearer("other")))[0] == 403
        assert (await front.get(path, **bearer("admin")))[0] == 200
    async with front.session.delete(front.url + "/v1/replicas/engine-0", headers=bearer("other")) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"kv_transfer_params": {"remote_engine_id": "x"}}, "kv_transfer_params"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}, "uuid": "theirs"}]}]},
            "messages.content.uuid",
        ),
    ],
)
async def test_what_addresses_others_blocks_is_refused(
    open_front: OpenFront, scripted: StartScripted, fields: dict[str, Any], param: str
) -> None:
    async def fine(http: web.Request) -> web.StreamResponse:
        return web.json_response({})

    engine = await scripted(fine)
    tenants = tenants_of()
    front = await open_front(urls=[engine.url], router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
    body = {**CHAT, **fields}
    status, answer, _ = await front.post("/v1/chat/completions", body, **bearer("other"))
    assert (status, answer["error"]["param"], answer["error"]["type"]) == (403, param, "permission_error")
    assert not engine.requests
    assert (await front.post("/v1/chat/completions", body, **bearer("admin")))[0] == 200
    sent = json.loads(engine.requests[0][1])
    assert {name: sent[name] for name in fields} == fields


async def test_the_engine_gets_the_salt_and_its_own_key(open_front: OpenFront, scripted: StartScripted) -> None:
    async def fine(http: web.Request) -> web.StreamResponse:
        return web.json_response({})

    engine = await scripted(fine)
    tenants = tenants_of()
    front = await open_front(
        urls=[engine.url], authenticate=tenants, salt_of=tenants.salt_of, engine_api_key="engine-key"
    )
    raw = b'{"model":"m", "temperature":1.0, "prompt":[1, 2], "cache_salt":null, "big":12345678901234567890123}'
    async with front.session.post(front.url + "/v1/completions", data=raw, headers=bearer("acme")) as response:
        assert response.status == 200
        assert "metatrie" not in str(response.headers).lower().replace("x-metatrie-", "")
    headers, sent = engine.requests[0]
    salt = tenants.salt_of("acme")
    assert sent == raw.replace(b'"cache_salt":null', b'"cache_salt":"%b"' % str(salt).encode()).replace(
        b", ", b","
    ).replace(b"[1,2]", b"[1, 2]")
    assert headers["Authorization"] == "Bearer engine-key"
    for value in (await front.post("/v1/match", {"model": "m", "token_ids": [1]}, **bearer("acme")))[1:]:
        assert str(salt) not in str(value)


async def test_unknown_callers_get_openais_error(open_front: OpenFront) -> None:
    front = await open_front(engines=1, authenticate=tenants_of())
    for headers in ({}, {"Authorization": "Bearer nobody"}, {"Authorization": "Basic " + token("acme")}):
        status, answer, _ = await front.post("/v1/chat/completions", CHAT, **headers)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await front.get("/v1/models", **headers))[0] == 401


async def test_a_tenant_sees_only_its_models(open_front: OpenFront) -> None:
    tenants = tenants_of(tenants={"small": {"tokens": [token("small")], "models": ["other-model"]}})
    front = await open_front(engines=1, router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
    status, answer, _ = await front.post("/v1/chat/completions", CHAT, **bearer("small"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await front.get("/v1/models", **bearer("small")))[1]["data"] == []
    assert (await front.post("/v1/match", CHAT, **bearer("small")))[0] == 404


# Salts


def test_salts_differ_by_group_and_are_stable() -> None:
    one, again = tenants_of(), tenants_of()
    salts = {name: one.salt_of(name) for name in ("acme", "lab", "other", "unheard-of")}
    assert salts["acme"] == salts["lab"]
    assert len(set(salts.values())) == 3
    assert all(re.fullmatch("[0-9a-f]{64}", str(salt)) for salt in salts.values())
    assert salts == {name: again.salt_of(name) for name in salts}


def test_rotation_moves_tenants_together_or_one_by_one() -> None:
    old, new = tenants_of(), tenants_of(salt={"version": 2, "secrets": SECRETS})
    assert old.salt_of("acme") != new.salt_of("acme")
    early = tenants_of(tenants={"other": {"tokens": [token("other")], "salt_version": 2}})
    assert early.salt_of("other") == new.salt_of("other")
    assert early.salt_of("acme") == old.salt_of("acme")


# Tokens


def test_tokens_are_looked_up_by_a_keyed_digest_and_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is presented, the path is the same: digest, keyed digest, one comparison in constant time."""
    compared: list[tuple[bytes, bytes]] = []
    real = __import__("hmac").compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return bool(real(a, b))

    monkeypatch.setattr("metatrie.indexer.tenants.hmac.compare_digest", compare)
    auth = BearerAuth({token("a"): Caller(tenant="a")})
    assert auth(Request(Authorization=f"bearer  {token('a')} ")).tenant == "a"
    for header in ("", "Bearer ", f"Bearer {token('a')[:-1]}", f"Bearer {token('a')}x", "Bearer é", "Bearer \udcff"):
        with pytest.raises(Unauthorized):
            auth(Request(Authorization=header))
    assert len(compared) == 7
    assert token("a") not in str(vars(auth))
    assert all(token("a").encode() not in pair for pair in compared)


# Limits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_refills() -> None:
    clock = Clock()
    quota = Quota(requests_per_minute=6, clock=clock)
    for _ in range(6):
        quota.take()
    with pytest.raises(TooManyRequests) as refused:
        quota.take()
    assert 9 <= refused.value.retry_after_s <= 11
    clock.now += 9
    with pytest.raises(TooManyRequests):
        quota.take()
    clock.now += 1.5
    quota.take()
    clock.now += 3600
    for _ in range(6):
        quota.take()
    with pytest.raises(TooManyRequests):
        quota.take()


def test_places_in_flight_are_given_back() -> None:
    quota = Quota(max_in_flight=1)
    for _ in range(3):
        with quota.slot(), pytest.raises(TooManyRequests), quota.slot():
            pass
    with pytest.raises(KeyError), quota.slot():
        raise KeyError
    assert quota.in_flight == 0


async def test_limits_are_a_tenants_own(open_front: OpenFront) -> None:
    tenants = tenants_of(tenants={"slow": {"tokens": [token("slow")], "requests_per_minute": 2}})
    front = await open_front(engines=1, router=BYTES, authenticate=tenants, salt_of=tenants.salt_of)
    statuses = [(await front.post("/v1/chat/completions", CHAT, **bearer("slow")))[0] for _ in range(3)]
    assert statuses == [200, 200, 429]
    status, _, headers = await front.post("/v1/match", CHAT, **bearer("slow"))
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert (await front.post("/v1/chat/completions", CHAT, **bearer("other")))[0] == 200


# The file


GOOD = """
[salt]
version = 1
secrets = { 1 = "0123456789abcdef" }
[tenants.acme]
tokens = ["acme-token-0123456789"]
max_in_flight = 4
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    file = path / "tenants.toml"
    file.write_text(text)
    os.chmod(file, mode)
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    tenants = load_tenants(write(tmp_path, GOOD))
    assert tenants(Request(**bearer("acme"))).tenant == "acme"
    assert tenants.salt_of("acme")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "tenants"),
        ("nonsense", "TOML"),
        (GOOD.replace("[salt]", "[pepper]"), "missing, unknown or wrong"),
        (GOOD.replace('"0123456789abcdef"', '"short"'), "shorter than 16"),
        (GOOD.replace("version = 1", "version = 3"), "secret 3 is missing"),
        (GOOD.replace("acme-token-0123456789", "short"), "too short"),
        (GOOD + '[tenants.b]\ntokens = ["acme-token-0123456789"]', "shares a token"),
        (GOOD + "[tenants.b]\ntypo = 1", "wrong"),
        ('[tenants.acme]\ntokens = ["acme-token-0123456789"]', "no \\[salt\\]"),
        ("shared = true\n[tenants.acme]\nsalt_version = 1", "without \\[salt\\]"),
        (GOOD + '[tenants.b]\ngroup = "acme"\n[tenants.c]\ngroup = "b"', "another group"),
    ],
)
def test_a_file_that_would_not_isolate_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load_tenants(write(tmp_path, text))
    assert "0123456789" not in str(refused.value)


def test_a_file_everybody_may_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chmod"):
        load_tenants(write(tmp_path, GOOD, mode=0o644))


# Changes of the file


@contextlib.asynccontextmanager
async def followed(file: Path) -> AsyncIterator[tuple[TenantsFile, Callable[[str, str], float]]]:
    """The file's tenants, and how often a change was `loaded` or `refused` so far."""
    registry = CollectorRegistry()
    tenants = TenantsFile(file)
    task = asyncio.create_task(tenants.follow(registry, poll_s=0.005))

    def value(name: str, result: str = "") -> float:
        labels = {"result": result} if result else {}
        return registry.get_sample_value(f"metatrie_tenants_{name}", labels) or 0.0

    try:
        yield tenants, value
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_changed_file_takes_effect_and_a_bad_one_does_not(tmp_path: Path, eventually: Eventually) -> None:
    file = write(tmp_path, GOOD)
    async with followed(file) as (tenants, value):
        salt = tenants.salt_of("acme")

        async def becomes(text: str, result: str, mode: int = 0o600) -> None:
            before = value("reloads_total", result)
            # Replaced as a whole, as an operator or a mounted secret does it.
            os.replace(write(new, text, mode), file)

            async def seen() -> bool:
                return value("reloads_total", result) > before

            await eventually(seen)

        new = tmp_path / "new"
        new.mkdir()
        await becomes(GOOD + f'[tenants.b]\ntokens = ["{token("b")}"]', "loaded")
        assert tenants(Request(**bearer("b"))).tenant == "b"
        for text, mode in (("nonsense", 0o600), (GOOD.replace("version = 1", "version = 7"), 0o600), (GOOD, 0o644)):
            await becomes(text, "refused", mode)
            assert value("file_refused", "") == 1
            assert tenants(Request(**bearer("b"))).tenant == "b"
            assert tenants.salt_of("acme") == salt
        await becomes(
            GOOD.replace("version = 1", "version = 2").replace("{ 1 =", '{ 2 = "fedcba9876543210", 1 ='), "loaded"
        )
        assert value("file_refused", "") == 0
        assert tenants.salt_of("acme") not in (None, salt)
        with pytest.raises(Unauthorized):
            tenants(Request(**bearer("b")))


async def test_a_file_that_is_gone_changes_nothing_until_it_is_back(tmp_path: Path, eventually: Eventually) -> None:
    file = write(tmp_path, GOOD)
    async with followed(file) as (tenants, value):
        for expected, change in (
            ("refused", file.unlink),
            ("loaded", lambda: write(tmp_path, GOOD.replace("acme", "lab"))),
        ):
            change()

            async def seen(expected: str = expected) -> bool:
                return value("reloads_total", expected) == 1

            await eventually(seen)
            name = "acme" if expected == "refused" else "lab"
            assert tenants(Request(**bearer(name))).tenant == name


async def test_what_a_tenant_has_running_and_used_up_survives_a_change(
    tmp_path: Path, eventually: Eventually
) -> None:
    limited = GOOD + "requests_per_minute = 2\n"
    file = write(tmp_path, limited)
    async with followed(file) as (tenants, value):
        quota = tenants(Request(**bearer("acme"))).quota
        assert quota is not None
        with quota.slot():
            quota.take()
            write(tmp_path, limited.replace("max_in_flight = 4", "max_in_flight = 1").replace("= 2", "= 1.5"))

            async def seen() -> bool:
                return value("reloads_total", "loaded") == 1

            await eventually(seen)
            after = tenants(Request(**bearer("acme"))).quota
            assert after is not None
            with pytest.raises(TooManyRequests), after.slot():
                pass
            with pytest.raises(TooManyRequests):
                after.take()
        with after.slot():
            pass


async def test_a_running_router_takes_up_what_changed(tmp_path: Path, eventually: Eventually) -> None:
    file = write(tmp_path, GOOD)
    serve = Child("serve", ["serve", "--port", "0", "--tenants", str(file)], tmp_path / "log")
    try:
        url = (await serve.start())["url"]
        async with aiohttp.ClientSession() as session:

            async def status(name: str) -> int:
                async with session.get(f"{url}/v1/models", headers=bearer(name)) as response:
                    return response.status

            async def moved() -> bool:
                return (await status("acme"), await status("b")) == (401, 200)

            assert (await status("acme"), await status("b")) == (200, 401)
            write(tmp_path, GOOD.replace("acme", "b"))
            await eventually(moved)
    finally:
        await serve.stop()
