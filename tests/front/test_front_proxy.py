"""The front door from outside: the openai package, plain HTTP, engines that die, stall and refuse."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from aiohttp import web
from metatrie.indexer.load import LocalReservations
from metatrie.indexer.models import ModelConfig
from metatrie.indexer.proxy import HEADER, ProxyConfig
from metatrie.indexer.router import RouterConfig
from metatrie.indexer.stand_ins import MEDIA_TOKENS
from metatrie.indexer.tenants import Tenants, TenantsConfig
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import ReplicaRef, ReplicaSpec
from yarl import URL

StartScripted = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]
OpenFront = Callable[..., Awaitable[Any]]
TEXT = "the weather in Paris is what it was " * 20
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8}
BYTES = RouterConfig(models={"m": ModelConfig(tokenizer="byte")})
DONE = b"data: [DONE]\n\n"


def client_of(front: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=front.url + "/v1", api_key="anything", max_retries=0, timeout=30)


async def fine(http: web.Request) -> web.StreamResponse:
    usage = {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    return web.json_response({"id": "x", "choices": [{"index": 0, "text": "ok"}], "usage": usage})


async def drop(http: web.Request) -> web.StreamResponse:
    """Dies before its first byte."""
    assert http.transport is not None
    http.transport.abort()
    return web.Response()


# The openai package


async def test_the_openai_package_streams_and_gets_usage(open_front: OpenFront) -> None:
    front = await open_front(engines=2, router=BYTES)
    async with client_of(front) as client:
        whole = await client.chat.completions.create(**CHAT)
        assert whole.choices[0].finish_reason == "length"
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert usage is not None
        assert usage.prompt_tokens_details.cached_tokens > 0
        completion = await client.completions.create(model="m", prompt="hello", max_tokens=3)
        assert completion.usage.completion_tokens == 3


async def test_the_openai_package_asks_for_several_answers_and_tools(open_front: OpenFront) -> None:
    front = await open_front(engines=1, router=BYTES)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "warm"}]},
    ]
    async with client_of(front) as client:
        answer = await client.chat.completions.create(model="m", messages=messages, tools=tools, n=3, max_tokens=4)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        stream = await client.chat.completions.create(
            model="m", messages=messages, tools=tools, n=2, max_tokens=4, stream=True
        )
        seen = {choice.index async for chunk in stream for choice in chunk.choices}
        assert seen == {0, 1}


async def test_the_openai_package_raises_its_own_errors(open_front: OpenFront) -> None:
    front = await open_front(engines=1, router=BYTES)
    async with client_of(front) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nobody", messages=CHAT["messages"])
        assert missing.value.code == "model_not_found"
        assert missing.value.param == "model"
        # The engine's own refusal, in its own words.
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.chat.completions.create(model="m", messages=CHAT["messages"], max_tokens=100_000)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[{"content": "no role"}])  # type: ignore[list-item]  # wrong on purpose
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nobody")


async def test_a_client_that_hangs_up_cancels_at_the_engine(open_front: OpenFront, eventually: Eventually) -> None:
    front = await open_front(engines=1, router=BYTES, engine={"time_scale": 1})
    scheduler = front.engines[0].cores[0].scheduler

    async def idle() -> bool:
        return not scheduler.has_requests and await front.reserved() == 0

    async with client_of(front) as client:
        stream = await client.chat.completions.create(**{**CHAT, "max_tokens": 4000}, stream=True)
        async for _ in stream:
            break
        assert scheduler.has_requests
        await stream.close()
        await eventually(idle)
        # And one that waits for a whole answer.
        asking = asyncio.create_task(client.chat.completions.create(**{**CHAT, "max_tokens": 4000}))

        async def started() -> bool:
            return bool(scheduler.has_requests)

        await eventually(started)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(idle)


async def test_a_client_that_hangs_up_while_it_is_placed_leaves_nothing(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    class Slow(LocalReservations):
        """Takes its time, as a shared store may."""

        def __init__(self) -> None:
            super().__init__()
            self.asked, self.gate = asyncio.Event(), asyncio.Event()

        async def place(self, *args: Any, **kwargs: Any) -> Any:
            self.asked.set()
            await self.gate.wait()
            return await super().place(*args, **kwargs)

    reservations = Slow()
    engine = await scripted(fine)
    front = await open_front(urls=[engine.url], reservations=reservations)
    asking = asyncio.create_task(front.post("/v1/completions", {"model": "m", "prompt": [1]}))
    await reservations.asked.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    async def noticed() -> bool:
        return bool((await front.metrics()).get('metatrie_proxy_abandoned_total{how="hung_up"}') == 1)

    await eventually(noticed)
    reservations.gate.set()

    async def free() -> bool:
        return bool(await front.reserved() == 0 and not front.proxy._background)

    await eventually(free)
    assert not engine.requests


# Bytes


async def test_what_passes_is_untouched(open_front: OpenFront, scripted: StartScripted) -> None:
    events = [
        b'data: {"choices":[],"x":1}\r\n\r\n',
        b": ping\n\n",
        b'data: {"choices":[]  }\n\n',
        DONE,
        b"data: tail",
    ]

    async def odd(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=201, headers={"Content-Type": "text/event-stream", "X-Own": "é"})
        await response.prepare(http)
        for i in range(0, len(joined := b"".join(events)), 7):  # events cut anywhere
            await response.write(joined[i : i + 7])
        return response

    engine = await scripted(odd)
    front = await open_front(urls=[engine.url])
    odd_url = URL(front.url + "/v1/completions?a=%2F", encoded=True)
    body = (
        b'{ "model" : "m","prompt":[1,2,3], "temperature": 1.0, "big": 123456789012345678901234567890, "model":"m"}'
    )
    headers = {"Content-Type": "application/json", "X-Request-Id": "abc", "Authorization": "Bearer own"}
    async with front.session.post(odd_url, data=body, headers=headers) as response:
        assert response.status == 201
        assert await response.read() == b"".join(events)
        assert response.headers["X-Own"] == "é"
        assert response.headers[HEADER + "Replica"] == "r0/0"
    sent, raw = engine.requests[0]
    assert raw == body
    assert engine.paths == ["/v1/completions?a=%2F"]
    assert (sent["X-Request-Id"], sent["Authorization"]) == ("abc", "Bearer own")


async def test_events_are_not_buffered(open_front: OpenFront, scripted: StartScripted) -> None:
    gate = asyncio.Event()

    async def slow(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: 1\n\n")
        await gate.wait()
        await response.write(DONE)
        return response

    front = await open_front(urls=[(await scripted(slow)).url])
    async with front.session.post(front.url + "/v1/completions", json={"model": "m", "prompt": "x"}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        gate.set()
        assert await response.content.read() == DONE


async def test_the_decision_is_in_the_headers(open_front: OpenFront, eventually: Eventually) -> None:
    front = await open_front(engines=2, router=BYTES)
    _, _, first = await front.post("/v1/chat/completions", CHAT)
    blocks = int(first[HEADER + "Prompt-Blocks"])
    assert (first[HEADER + "Matched-Blocks"], first[HEADER + "State"]) == ("0", "exact")
    assert blocks > 40

    async def known() -> bool:
        _, answer, _ = await front.post("/v1/match", {"model": "m", "messages": CHAT["messages"]})
        return bool(answer["replicas"][0]["matched_blocks"] == blocks)

    await eventually(known)
    _, body, second = await front.post("/v1/chat/completions", CHAT)
    assert second[HEADER + "Replica"] == first[HEADER + "Replica"]
    assert int(second[HEADER + "Matched-Blocks"]) == blocks
    assert int(second[HEADER + "Reusable-Tokens"]) == body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert second[HEADER + "Policy"] == front.router.config.policy
    assert second[HEADER + "Attempt"] == "1"
    assert HEADER + "Note" not in second


# Failure


async def test_an_engine_that_dies_before_its_first_byte_costs_nothing(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    dead, good = await scripted(drop), await scripted(fine)
    front = await open_front(urls=[dead.url, good.url, "http://127.0.0.1:1"])
    for _ in range(12):
        status, body, headers = await front.post("/v1/completions", {"model": "m", "prompt": "x"})
        assert (status, body["choices"][0]["text"]) == (200, "ok")
        assert headers[HEADER + "Replica"] == "r1/0"
    assert dead.requests

    async def free() -> bool:
        return bool(await front.reserved() == 0)

    await eventually(free)
    assert (await front.metrics())['metatrie_proxy_attempts_total{kind="retry"}'] > 0


async def test_an_engine_killed_while_it_computes_costs_nothing(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    """A real process, and a real kill."""
    argv = ["-m", "metatrie", "engine", "--port", "0", "--model", "m", "--events", "tcp://127.0.0.1:*"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, "--prefill-tokens-per-s", "100", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        slow = json.loads(await process.stdout.readline())["url"]
        good = await scripted(fine)
        front = await open_front(urls=[slow, good.url], router=RouterConfig(policy="round_robin"))
        turn = itertools.count()

        def ask() -> asyncio.Task[Any]:
            messages = [{"role": "user", "content": f"{next(turn)} {TEXT}"}]
            return asyncio.create_task(front.post("/v1/chat/completions", {**CHAT, "messages": messages}))

        asking = ask()

        async def computing() -> bool:
            nonlocal asking
            if asking.done():  # by the other one: once more
                asking = ask()
            async with front.session.get(slow + "/metrics") as response:
                running = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", await response.text(), re.MULTILINE)
            return running is not None and float(running[1]) == 1

        await eventually(computing)
        process.kill()
        status, answer, headers = await asking
        assert (status, answer["choices"][0]["text"]) == (200, "ok")
        assert headers[HEADER + "Attempt"] == "2"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("tail", [b"", b'data: {"cut'])
async def test_an_engine_that_dies_after_its_first_byte_gives_one_error(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually, tail: bytes
) -> None:
    chunk = {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": []}

    async def breaks(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n" + tail)
        await asyncio.sleep(0)
        assert http.transport is not None
        http.transport.close()
        return response

    engine, other = await scripted(breaks), await scripted(breaks)
    front = await open_front(urls=[engine.url, other.url])
    async with client_of(front) as client:
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        chunks = aiter(stream)
        await anext(chunks)
        with pytest.raises(openai.APIError, match="broke off"):
            await anext(chunks)
    assert len(engine.requests) + len(other.requests) == 1

    async def free() -> bool:
        return bool(await front.reserved() == 0)

    await eventually(free)


async def test_a_plain_answer_that_breaks_off_is_not_taken_for_whole(
    open_front: OpenFront, scripted: StartScripted
) -> None:
    async def breaks(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await response.prepare(http)
        await response.write(b'{"id"')
        assert http.transport is not None
        http.transport.close()
        return response

    front = await open_front(urls=[(await scripted(breaks)).url])
    with pytest.raises(aiohttp.ClientError):
        await front.post("/v1/completions", {"model": "m", "prompt": "x"})


async def test_a_saturated_fleet_sheds_at_once(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    gate = asyncio.Event()

    async def waits(http: web.Request) -> web.StreamResponse:
        await gate.wait()
        return await fine(http)

    engines = [await scripted(waits), await scripted(waits)]
    front = await open_front(urls=[e.url for e in engines], proxy=ProxyConfig(max_in_flight=2))
    body = {"model": "m", "prompt": "x"}
    running = [asyncio.create_task(front.post("/v1/completions", body)) for _ in range(4)]

    async def full() -> bool:
        return sum(len(e.requests) for e in engines) == 4

    await eventually(full)
    status, answer, headers = await front.post("/v1/completions", body)
    assert status == 429
    assert answer["error"]["type"] == "rate_limit_error"
    assert 1 <= int(headers["Retry-After"]) <= 5
    async with client_of(front) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="m", prompt="x")
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*running)] == [200] * 4
    assert (await front.post("/v1/completions", body))[0] == 200


async def test_engines_that_say_they_are_full_are_believed(open_front: OpenFront, scripted: StartScripted) -> None:
    async def full(http: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    first, second = await scripted(full), await scripted(full)
    front = await open_front(urls=[first.url, second.url])
    status, _, headers = await front.post("/v1/completions", {"model": "m", "prompt": "x"})
    assert status == 429
    assert "Retry-After" in headers
    assert (len(first.requests), len(second.requests)) == (1, 1)
    assert (await front.post("/v1/completions", {"model": "m", "prompt": "x"}))[0] == 429
    assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_an_ejected_engine_returns_gently(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    ill = True

    async def health(http: web.Request) -> web.StreamResponse:
        return web.Response(status=500 if ill else 200)

    engine = await scripted(fine, health=health)
    quick = ProxyConfig(health_interval_s=0.02, eject_after=2, eject_s=0.02, ramp_s=0.05)
    front = await open_front(urls=[engine.url], proxy=quick)

    async def status() -> int:
        return int((await front.post("/v1/completions", {"model": "m", "prompt": "x"}))[0])

    async def ejected() -> bool:
        return await status() == 503

    async def back() -> bool:
        return await status() == 200

    await eventually(ejected)
    ill = False
    await eventually(back)


async def test_a_caller_that_takes_nothing_is_cut_off(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    async def floods(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        while True:
            await response.write(b"data: " + b"x" * 65536 + b"\n\n")

    front = await open_front(urls=[(await scripted(floods)).url], proxy=ProxyConfig(send_timeout_s=0.2))
    _, writer = await asyncio.open_connection("127.0.0.1", int(front.url.rpartition(":")[2]))
    raw = b'{"model":"m","prompt":"x"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()

    async def cut() -> bool:
        metrics = await front.metrics()
        return metrics.get('metatrie_proxy_abandoned_total{how="stalled"}') == 1 and await front.reserved() == 0

    await eventually(cut)
    writer.close()


# Models


async def test_aliases_and_adapters_are_what_the_engine_calls_them(
    open_front: OpenFront, scripted: StartScripted
) -> None:
    base: dict[str, Any] = {"id": "m", "parent": None, "max_model_len": 99}
    with_adapter = await scripted(fine, models=[base, {"id": "sql", "parent": "m"}])
    without = await scripted(fine, models=[base])
    models = {"m": ModelConfig(tokenizer="byte", aliases=("gpt-4o",))}
    front = await open_front(urls=[without.url, with_adapter.url], router=RouterConfig(models=models))
    for name in ("gpt-4o", "sql", "sql", "sql", "sql"):
        status, _, _ = await front.post("/v1/completions", {"model": name, "prompt": "x", "seed": 1})
        assert status == 200
    sent = [json.loads(raw) for engine in (without, with_adapter) for _, raw in engine.requests]
    assert sorted(body["model"] for body in sent) == ["m", "sql", "sql", "sql", "sql"]
    assert all(body == {"model": body["model"], "prompt": "x", "seed": 1} for body in sent)
    assert all(json.loads(raw)["model"] == "m" for _, raw in without.requests)
    _, listed = await front.get("/v1/models")
    assert {card["id"]: card.get("parent") for card in listed["data"]} == {"gpt-4o": None, "m": None, "sql": "m"}
    assert listed["data"][1]["max_model_len"] == 99
    status, body, _ = await front.post("/v1/completions", {"model": "nobody", "prompt": "x"})
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_an_adapters_blocks_are_its_own(open_front: OpenFront, eventually: Eventually) -> None:
    from metatrie.engines.pool import Lora

    front = await open_front(engines=1, router=BYTES, engine={"lora_adapters": (Lora("sql", "/adapters/sql", 1),)})
    assert (await front.post("/v1/chat/completions", {**CHAT, "model": "sql"}))[0] == 200

    async def depth(model: str) -> int:
        _, answer, _ = await front.post("/v1/match", {"model": model, "messages": CHAT["messages"]})
        return int(answer["replicas"][0]["matched_blocks"])

    async def known() -> bool:
        return await depth("sql") > 40

    await eventually(known)
    assert await depth("m") == 0


# What cannot be tokenised


async def test_media_is_matched_up_to_its_message_and_says_so(open_front: OpenFront, scripted: StartScripted) -> None:
    engine = await scripted(fine)
    front = await open_front(urls=[engine.url], router=BYTES)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [*CHAT["messages"], {"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]
    status, _, headers = await front.post("/v1/chat/completions", {"model": "m", "messages": messages})
    assert status == 200
    assert "media" in headers[HEADER + "Note"]
    whole_first_message = 1 + len("user\n" + TEXT)
    assert int(headers[HEADER + "Prompt-Blocks"]) == whole_first_message // 16
    _, answer, _ = await front.post("/v1/match", {"model": "m", "messages": messages})
    assert "media" in answer["note"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_a_model_is_listed_as_soon_as_it_is_announced(open_front: OpenFront, path: str) -> None:
    front = await open_front(router=RouterConfig(poll_interval_s=60))
    index = await front.store.open(Namespace(model="m"))
    spec = ReplicaSpec(ref=ReplicaRef("r"), engine="vllm", url="http://127.0.0.1:1")
    await index.claim(spec, owner="test", lease_s=3600, activate=True)
    status, answer = await front.get(path)
    assert status == 200
    assert "m" in (answer.get("id"), *(card["id"] for card in answer.get("data", ())))


async def test_an_engine_is_asked_about_what_precedes_the_media(open_front: OpenFront) -> None:
    front = await open_front(engines=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    media = {"role": "user", "content": [image]}
    for before, tokens in ((CHAT["messages"], len(b"\0user\n") + len(TEXT) + len(b"\0\n")), ([], 0)):
        status, answer, _ = await front.post("/v1/match", {"model": "m", "messages": [*before, media]})
        assert status == 200
        assert answer["prompt_tokens"] == tokens
        assert "media" in answer["note"]


async def test_an_image_weighs_the_same_however_many_bytes_it_has(
    open_front: OpenFront, scripted: StartScripted
) -> None:
    """Or one photograph would count as a hundred prompts, and turn everybody else away from its replica."""
    reserved: list[int] = []

    async def look(http: web.Request) -> web.StreamResponse:
        _, answer = await front.get("/v1/replicas")
        reserved.append(answer["replicas"][0]["load"]["reserved_tokens"])
        return await fine(http)

    engine = await scripted(look)
    front = await open_front(urls=[engine.url], router=BYTES)
    for size in (100, 1_000_000):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
        content = [{"type": "text", "text": "what is in this picture?" * 10}, image]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        assert (await front.post("/v1/chat/completions", body))[0] == 200
    assert len(set(reserved)) == 1
    assert MEDIA_TOKENS < reserved[0] < 2 * MEDIA_TOKENS


@pytest.mark.parametrize("tokenizer", ["byte", "engine"])
async def test_a_conversation_about_an_image_stays_where_it_was(
    open_front: OpenFront, scripted: StartScripted, tokenizer: str
) -> None:
    """The index cannot know its blocks; what was sent where decides. Nobody else's conversation is drawn along."""
    tenants = Tenants(
        msgspec.convert(
            {
                "salt": {"version": 1, "secrets": {"1": "0123456789abcdef"}},
                "tenants": {name: {"tokens": [f"{name}-token-0123456789"]} for name in ("a", "b")},
            },
            TenantsConfig,
        )
    )
    # Its ties are broken by chance, while the default notices which engine answers sooner.
    router = RouterConfig(models={"m": ModelConfig(tokenizer=tokenizer)}, policy="affinity_only")
    engines = [await scripted(fine) for _ in range(2)]
    front = await open_front(
        urls=[e.url for e in engines], router=router, authenticate=tenants, salt_of=tenants.salt_of
    )

    async def ask(tenant: str, *messages: dict[str, Any]) -> Mapping[str, str]:
        body = {"model": "m", "messages": messages}
        status, _, headers = await front.post(
            "/v1/chat/completions", body, Authorization=f"Bearer {tenant}-token-0123456789"
        )
        assert status == 200
        assert headers[HEADER + "Matched-Blocks"] == "0"
        return headers

    went: set[str] = set()
    for number in range(20):
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{number:04}"}}
        first = {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]}
        turns = [first, {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "and its colour?"}]
        before = await ask("a", first)
        assert before[HEADER + "Reusable-Tokens"] == "0"
        after = await ask("a", *turns)
        assert after[HEADER + "Replica"] == before[HEADER + "Replica"]
        assert int(after[HEADER + "Reusable-Tokens"]) >= MEDIA_TOKENS
        assert (await ask("b", *turns))[HEADER + "Reusable-Tokens"] == "0"
        went.add(after[HEADER + "Replica"])
    assert len(went) == 2


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "nonsense"},
        {"messages": CHAT["messages"], "chat_template": "{{ messages }}"},
        {"prompt_embeds": "AAAA"},
        {"prompt": {"no": "prompt"}},
        {"messages": CHAT["messages"], "truncate_prompt_tokens": -1},
    ],
)
async def test_what_is_not_understood_is_the_engines_to_judge(
    open_front: OpenFront, scripted: StartScripted, body: dict[str, Any]
) -> None:
    engine = await scripted(fine)
    front = await open_front(urls=[engine.url], router=BYTES)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, _, headers = await front.post(path, {"model": "m", **body})
    assert status == 200
    assert "load" in headers[HEADER + "Note"]
    assert json.loads(engine.requests[0][1]) == {"model": "m", **body}


@pytest.mark.parametrize(
    ("raw", "param"), [(b"", None), (b"[]", None), (b"{", None), (b"{}", "model"), (b'{"model": 3}', "model")]
)
async def test_bodies_that_name_no_model_are_refused(
    open_front: OpenFront, scripted: StartScripted, raw: bytes, param: str | None
) -> None:
    front = await open_front(urls=[(await scripted(fine)).url])
    async with front.session.post(front.url + "/v1/completions", data=raw) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_a_body_over_the_limit_is_refused_in_openais_shape(
    open_front: OpenFront, scripted: StartScripted
) -> None:
    front = await open_front(urls=[(await scripted(fine)).url], router=RouterConfig(max_body_bytes=4096))
    status, body, _ = await front.post("/v1/completions", {"model": "m", "prompt": "x" * 5000})
    assert (status, body["error"]["type"]) == (413, "invalid_request_error")
