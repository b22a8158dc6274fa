"""A simulated worker from outside: real sockets, the plain HTTP client, a real subscriber."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from metatrie.engines.core import VirtualClock
from metatrie.engines.pool import Lora
from metatrie.engines.scheduler import Request, ServiceModel
from metatrie.engines.worker import EngineConfig, EngineWorker, run_engine
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import BlockRemoved, BlockStored, decode_batch
from prometheus_client.parser import text_string_to_metric_families

DEADLINE_S = 20


def config_of(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "port": 0,
        "events_endpoint": "tcp://*:0",
        "replay_endpoint": "tcp://*:0",
        "model": "m",
        "num_blocks": 257,
        "max_model_len": 2048,
        "time_scale": 0,
        "lora_adapters": (Lora("adapter", "/adapters/one", 3),),
    }
    return EngineConfig(**{**fields, **changes})


class Client:
    def __init__(self, worker: EngineWorker, session: aiohttp.ClientSession) -> None:
        self.worker = worker
        self.session = session

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as response:
            assert response.status == 200
            return await response.json(content_type=None)

    async def post(self, path: str, body: Any, status: int = 200, **headers: str) -> Any:
        async with self.session.post(path, json=body, headers=headers) as response:
            assert response.status == status, await response.text()
            return await response.json(content_type=None)

    async def stream(self, path: str, body: Any) -> list[Any]:
        """Chunks of a streamed response, whose last line must be [DONE]."""
        async with self.session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    async def metric(self, name: str, **labels: str) -> float:
        async with self.session.get("/metrics") as response:
            for family in text_string_to_metric_families(await response.text()):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        return sample.value
        raise AssertionError(name)


OpenClient = Callable[[EngineConfig], Awaitable[Client]]


@pytest.fixture
async def open_client() -> AsyncIterator[OpenClient]:
    async with asyncio.timeout(DEADLINE_S):
        clients: list[Client] = []

        async def open_client(config: EngineConfig) -> Client:
            worker = EngineWorker(config)
            await worker.start()
            clients.append(Client(worker, aiohttp.ClientSession(worker.address)))
            return clients[-1]

        yield open_client
        for client in clients:
            await client.session.close()
            await client.worker.stop()


@pytest.fixture
async def client(open_client: OpenClient) -> Client:
    return await open_client(config_of())


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  what is waited for happens on the far side of a socket
            await asyncio.sleep(0.002)


async def test_completion_and_exact_cached_tokens(client: Client) -> None:
    body = {"model": "m", "prompt": "x" * 100, "max_tokens": 5}
    first, second = [await client.post("/v1/completions", body) for _ in range(2)]
    assert first["object"] == "text_completion"
    assert first["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 5,
        "total_tokens": 105,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    (choice,) = first["choices"]
    assert (choice["index"], choice["finish_reason"], len(choice["text"])) == (0, "length", 5)
    assert choice["text"] == second["choices"][0]["text"]


async def test_a_prompt_of_whole_blocks_recomputes_its_last_block(client: Client) -> None:
    body = {"prompt": "x" * 96, "max_tokens": 1}
    await client.post("/v1/completions", body)
    again = await client.post("/v1/completions", body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("abc", [3]), ([97, 98], [2]), (["abc", "d"], [3, 1]), ([[97], [98, 99], [100]], [1, 2, 1])],
)
async def test_every_form_of_prompt(client: Client, prompt: Any, tokens: list[int]) -> None:
    reply = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    assert reply["usage"]["prompt_tokens"] == sum(tokens)
    assert [c["index"] for c in reply["choices"]] == list(range(len(tokens)))


async def test_text_and_token_ids_are_the_same_prompt(client: Client) -> None:
    text = "the same prompt, twice, in two forms"
    ids = (await client.post("/tokenize", {"prompt": text}))["tokens"]
    await client.post("/v1/completions", {"prompt": text, "max_tokens": 1})
    reply = await client.post("/v1/completions", {"prompt": ids, "max_tokens": 1})
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_streamed_completion_equals_the_whole_one(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 20, "seed": 7, "n": 3}
    whole = await client.post("/v1/completions", body)
    chunks = await client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    texts, finishes = ["", "", ""], [None, None, None]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            assert finishes[choice["index"]] is None
            texts[choice["index"]] += choice["text"]
            finishes[choice["index"]] = choice["finish_reason"]
    assert texts == [c["text"] for c in whole["choices"]]
    assert len(set(texts)) == 3
    assert finishes == ["length"] * 3
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 60
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_streamed_chat(client: Client) -> None:
    chunks = await client.stream(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4, "return_token_ids": True},
    )
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert [d["finish_reason"] for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    text = "".join(d["delta"]["content"] for d in deltas)
    ids = [token for d in deltas for token in d["token_ids"]]
    assert (await client.post("/detokenize", {"tokens": ids}))["prompt"] == text
    assert len(ids) == 4
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_conversation_finds_its_own_past(client: Client) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a question " * 4}]}]
    first = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 40})
    answer = first["choices"][0]["message"]
    messages += [{"role": answer["role"], "content": answer["content"]}, {"role": "user", "content": "and?"}]
    second = await client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    # All but the last generated token were computed.
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_an_answer_without_limit_ends_on_its_own(client: Client) -> None:
    reply = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert 64 <= reply["usage"]["completion_tokens"] <= 192


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_cut_the_text_and_end_the_sequence(client: Client, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 400}
    text = (await client.post("/v1/completions", body))["choices"][0]["text"]
    stop = text[100:104]
    cut = {**body, "stop": ["\0never", stop]}
    if stream:
        choices = [chunk["choices"][0] for chunk in await client.stream("/v1/completions", cut)]
    else:
        choices = (await client.post("/v1/completions", cut))["choices"]
    assert "".join(c["text"] for c in choices) == text[: text.index(stop)]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", stop)
    assert client.worker.cores[0].pool.usage == 0


async def test_adapters_and_salts_have_prefixes_of_their_own(client: Client) -> None:
    async def cached(**extra: str) -> int:
        reply = await client.post("/v1/completions", {"prompt": "x" * 50, "max_tokens": 1, **extra})
        assert reply["model"] == extra.get("model", "m")
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    for extra in ({}, {"model": "adapter"}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        assert await cached(**extra) == 0
        assert await cached(**extra) == 48


async def test_a_client_that_goes_away_frees_its_blocks(open_client: OpenClient) -> None:
    # Modelled time passes slowly enough that the request is certainly still running.
    client = await open_client(config_of(time_scale=50.0))
    core = client.worker.cores[0]
    for stream in (True, False):
        body = {"prompt": "x" * 100, "max_tokens": 1000, "stream": stream}
        request = asyncio.create_task(client.post("/v1/completions", body))
        await eventually(lambda: core.pool.usage > 0)
        request.cancel()
        await asyncio.wait((request,))
        await eventually(lambda: core.pool.usage == 0 and not core.scheduler.has_requests)
    assert await client.metric("vllm:request_success_total", finished_reason="abort") == 2


async def test_streaming_arrives_while_the_request_runs(open_client: OpenClient) -> None:
    client = await open_client(config_of(time_scale=0.5, service=ServiceModel(decode_step_s=0.02)))
    core = client.worker.cores[0]
    body = {"prompt": "x", "max_tokens": 1500, "stream": True}
    async with client.session.post("/v1/completions", json=body) as response:
        line = await response.content.readuntil(b"\n\n")
        assert json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
        assert core.scheduler.running == 1
    await eventually(lambda: core.scheduler.running == 0)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"model": "nope", "prompt": "x"}, 404, "model"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": []}, 400, "prompt"),
        ("/v1/completions", {"prompt": [1, "x"]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"prompt": [259]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x" * 2048}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 2048}, 400, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, None),
        ("/v1/completions", {"prompt": "x", "n": 0}, 400, None),
        ("/v1/completions", {"prompt": ["x"] * 200, "n": 2}, 400, "n"),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, 400, "cache_salt"),
        ("/v1/completions", {"prompt": "x", "cache_salt": 1}, 400, None),
        ("/v1/completions", {"prompt": "x", "stop": [""]}, 400, "stop"),
        ("/v1/chat/completions", {"messages": []}, 400, None),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "messages"),
        ("/tokenize", {"prompt": 1}, 400, None),
        ("/detokenize", {"tokens": [999]}, 400, "tokens"),
        ("/nowhere", {}, 404, None),
        ("/health", {}, 405, None),
    ],
)
async def test_refusals_have_openai_shape(client: Client, path: str, body: Any, status: int, param: Any) -> None:
    error = (await client.post(path, body, status))["error"]
    assert (error["code"], error["param"]) == (status, param)
    assert error["message"]
    assert error["type"]
    assert not client.worker.cores[0].scheduler.has_requests


async def test_bodies_are_bounded(open_client: OpenClient) -> None:
    client = await open_client(config_of(max_body_bytes=2000))
    error = (await client.post("/v1/completions", {"prompt": "x" * 2000}, 413))["error"]
    assert error["code"] == 413
    await client.post("/v1/completions", {"prompt": "x" * 1900, "max_tokens": 1})


async def test_bodies_that_are_not_json(client: Client) -> None:
    for raw in (b"", b"{", b"[]", b"[" * 100_000, b'{"prompt": "\xff"}'):
        async with client.session.post("/v1/completions", data=raw) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "BadRequestError"


async def test_tokenize(client: Client) -> None:
    reply = await client.post("/tokenize", {"prompt": "hé"})
    assert reply == {"count": 3, "max_model_len": 2048, "tokens": [104, 195, 169], "token_strs": None}
    chat = await client.post("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await client.post("/detokenize", {"tokens": chat["tokens"]}))["prompt"] == rendered
    reply = await client.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    )
    assert reply["usage"]["prompt_tokens"] == chat["count"]


async def test_models_and_version(client: Client) -> None:
    models = (await client.get("/v1/models"))["data"]
    assert [(m["id"], m["parent"], m["root"]) for m in models] == [
        ("m", None, "m"),
        ("adapter", "m", "/adapters/one"),
    ]
    assert models[0]["max_model_len"] == 2048
    assert await client.get("/version") == {"version": "0.33.0"}


async def test_metrics_under_vllm_names(client: Client) -> None:
    for _ in range(2):
        await client.post("/v1/completions", {"prompt": "x" * 100, "max_tokens": 5})
    expected = {
        "vllm:prefix_cache_queries_total": 200,
        "vllm:prefix_cache_hits_total": 96,
        "vllm:prompt_tokens_total": 200,
        "vllm:generation_tokens_total": 10,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 8,
        "vllm:num_preemptions_total": 0,
    }
    for name, value in expected.items():
        assert await client.metric(name, model_name="m", engine="0") == value, name
    assert await client.metric("vllm:time_to_first_token_seconds_sum") == pytest.approx(0.0104)
    assert await client.metric("vllm:request_success_total", finished_reason="length") == 2
    assert await client.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="257") == 1


class LateClock(VirtualClock):
    """An event loop that is always late, by these seconds after each wait in turn, then punctual."""

    def __init__(self, lateness: list[float]) -> None:
        super().__init__()
        self._lateness = iter(lateness)

    async def sleep_until(self, when: float) -> None:
        await super().sleep_until(max(when, self.now()) + next(self._lateness, 0.0))


async def complete(worker: EngineWorker, tokens: int) -> Request:
    """Run one request of 100 prompt tokens straight through a core."""
    core = worker.cores[0]
    completion = core.submit([core.scheduler.new_request([7] * 100, tokens)])
    (output,) = completion.outputs
    async with asyncio.timeout(DEADLINE_S):
        while output.finish is None:
            await completion.changes()
    return output.request


async def test_a_late_event_loop_does_not_slow_the_model_down() -> None:
    # 10 ms of prefill and 99 decode steps of 20.3 ms, each noticed 3 ms late.
    clock = LateClock([0.003] * 100)
    async with EngineWorker(config_of(), clock=clock) as worker:
        request = await complete(worker, 100)
    assert request.last_token_s - request.arrival_s == pytest.approx(0.010 + 99 * 0.0203)
    assert clock.now() == pytest.approx(request.last_token_s + 0.003)


async def test_a_stalled_event_loop_is_not_made_up_for() -> None:
    async with EngineWorker(config_of(), clock=LateClock([0.0, 5.0])) as worker:
        request = await complete(worker, 100)
    assert request.last_token_s - request.arrival_s == pytest.approx(0.010 + 99 * 0.0203 + 5)


class Follower:
    """A subscriber that counts copies, as a consumer would."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(endpoint)
        self.resident: Counter[int] = Counter()
        self.kinds: list[str] = []
        self.next_seq = 0

    async def follow(self, until: int) -> None:
        """Apply batches until `until` of them were published."""
        async with asyncio.timeout(DEADLINE_S):
            while self.next_seq < until:
                _, seq, payload = await self.socket.recv_multipart()
                assert int.from_bytes(seq, "big") == self.next_seq
                self.next_seq += 1
                for event in decode_batch(payload).events:
                    self.kinds.append(type(event).__name__)
                    match event:
                        case BlockStored():
                            self.resident.update(event.hashes)
                        case BlockRemoved():
                            self.resident.subtract(event.hashes)
                        case _:
                            self.resident.clear()


@pytest.fixture
async def follower_of() -> AsyncIterator[Callable[[str], Follower]]:
    context = zmq.asyncio.Context()
    followers: list[Follower] = []

    def follower_of(endpoint: str) -> Follower:
        followers.append(Follower(context, endpoint))
        return followers[-1]

    yield follower_of
    for follower in followers:
        follower.socket.close(0)
    context.term()


async def audit(client: Client, rank: int = 0) -> tuple[int, dict[int, int]]:
    async with client.session.get("/debug/cache", params={"dp_rank": str(rank)}) as response:
        assert response.status == 200
        copies = {int(name): count for name, count in (await response.json()).items()}
        return int(response.headers["X-Next-Seq"]), copies


def connect_follower(client: Client, follower_of: Callable[[str], Follower], rank: int = 0) -> Follower:
    sources = client.worker.event_sources
    return follower_of(sources[rank].endpoint)


async def subscribed(client: Client, follower: Follower, rank: int = 0) -> None:
    """Wait until events reach the follower, then forget what it saw of the beginning."""
    async with asyncio.timeout(DEADLINE_S):
        n = 0
        while not await follower.socket.poll(20):
            n += 1
            body = {"prompt": f"probe {n} " * 8, "max_tokens": 1}
            await client.post("/v1/completions", body, **{"X-data-parallel-rank": str(rank)})
        next_seq, copies = await audit(client, rank)
        while follower.next_seq < next_seq:
            _, seq, _ = await follower.socket.recv_multipart()
            follower.next_seq = int.from_bytes(seq, "big") + 1
        follower.resident = Counter(copies)


async def test_events_explain_the_cache_exactly(
    open_client: OpenClient, follower_of: Callable[[str], Follower]
) -> None:
    client = await open_client(config_of(num_blocks=65, max_model_len=512, max_num_batched_tokens=64))
    follower = connect_follower(client, follower_of)
    await subscribed(client, follower)

    async def one(i: int) -> None:
        body = {"prompt": f"tenant {i % 3} " * (3 + i % 5 * 6), "max_tokens": 20 + i, "cache_salt": f"s{i % 2}"}
        await client.post("/v1/completions", body)

    for _ in range(3):
        await asyncio.gather(*(one(i) for i in range(12)))
        next_seq, copies = await audit(client)
        await follower.follow(next_seq)
        assert +follower.resident == copies
    assert {"BlockStored", "BlockRemoved"} <= set(follower.kinds)


async def test_an_audit_falls_between_two_steps(
    open_client: OpenClient, follower_of: Callable[[str], Follower]
) -> None:
    client = await open_client(config_of())
    follower = connect_follower(client, follower_of)
    await subscribed(client, follower)
    requests = [
        asyncio.create_task(client.post("/v1/completions", {"prompt": f"{i}" * 40, "max_tokens": 200}))
        for i in range(8)
    ]
    while not all(task.done() for task in requests):
        next_seq, copies = await audit(client)
        await follower.follow(next_seq)
        assert +follower.resident == copies
    await asyncio.gather(*requests)


async def test_a_reset_is_published_with_the_next_request(
    client: Client, follower_of: Callable[[str], Follower]
) -> None:
    follower = connect_follower(client, follower_of)
    await subscribed(client, follower)
    before, _ = await audit(client)
    async with client.session.post("/reset_prefix_cache") as response:
        assert response.status == 200
    assert await audit(client) == (before, {})
    reply = await client.post("/v1/completions", {"prompt": "x" * 40, "max_tokens": 1})
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    next_seq, copies = await audit(client)
    await follower.follow(next_seq)
    assert follower.kinds == ["AllBlocksCleared", "BlockStored"]
    assert +follower.resident == copies


async def test_event_sources_name_every_rank(open_client: OpenClient) -> None:
    client = await open_client(config_of(dp_rank=4, dp_size=2, topic="kv@x"))
    sources = await client.get("/kv_event_sources")
    assert list(sources) == ["4", "5"]
    endpoints = [source[key] for source in sources.values() for key in ("endpoint", "replay_endpoint")]
    assert len(set(endpoints)) == 4
    assert all(e.startswith("tcp://127.0.0.1:") and not e.endswith(":0") for e in endpoints)
    assert all(source["topic"] == "kv@x" for source in sources.values())


async def test_ranks_have_caches_of_their_own(open_client: OpenClient) -> None:
    client = await open_client(config_of(dp_size=2))
    body = {"prompt": "x" * 40, "max_tokens": 1}

    async def cached(rank: int) -> int:
        reply = await client.post("/v1/completions", body, **{"X-data-parallel-rank": str(rank)})
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(rank) for rank in (0, 0, 1, 1)] == [0, 32, 0, 32]
    await client.post("/v1/completions", body, 400, **{"X-data-parallel-rank": "2"})
    assert (await audit(client, 0))[1] == (await audit(client, 1))[1] != {}
    async with client.session.get("/debug/cache?dp_rank=7") as response:
        assert response.status == 404


async def test_hybrid_models_publish_two_groups(
    open_client: OpenClient, follower_of: Callable[[str], Follower]
) -> None:
    client = await open_client(config_of(sliding_window=32, num_blocks=600))
    follower = connect_follower(client, follower_of)
    await subscribed(client, follower)
    await client.post("/v1/completions", {"prompt": "x" * 64, "max_tokens": 1})
    _, _, payload = await follower.socket.recv_multipart()
    stored = [e for e in decode_batch(payload).events if isinstance(e, BlockStored)]
    assert [(e.group, e.kind) for e in stored] == [(0, "full_attention"), (1, "sliding_window")]
    assert stored[0].hashes == stored[1].hashes


async def test_full_report_mode_announces_reused_blocks(
    client: Client, follower_of: Callable[[str], Follower]
) -> None:
    follower = connect_follower(client, follower_of)
    await subscribed(client, follower)
    body = {"prompt": "x" * 40, "max_tokens": 1}
    await client.post("/v1/completions", body)
    await client.post("/v1/completions", {**body, "vllm_xargs": {"kv_cache_report_mode": "full"}})
    next_seq, copies = await audit(client)
    await follower.follow(next_seq)
    assert sum(follower.resident.values()) == sum(copies.values()) + 2


async def test_stopping_ends_open_streams() -> None:
    worker = EngineWorker(config_of(time_scale=50.0))
    await worker.start()
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(worker.address) as session:
        body = {"prompt": "x", "max_tokens": 1000, "stream": True}
        async with session.post("/v1/completions", json=body) as response:
            await worker.stop()
            text = await response.text()
    assert '"finish_reason":"abort"' in text
    await worker.stop()


async def test_run_engine_serves_until_told_to_stop() -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    workers: list[EngineWorker] = []

    def on_ready(worker: EngineWorker) -> None:
        workers.append(worker)
        ready.set()

    running = asyncio.create_task(run_engine(config_of(), ready=on_ready, stop=stop))
    async with asyncio.timeout(DEADLINE_S):
        await ready.wait()
        async with aiohttp.ClientSession(workers[0].address) as session, session.get("/health") as response:
            assert response.status == 200
        stop.set()
        await running


async def test_a_failed_start_leaves_nothing_open(client: Client) -> None:
    taken = int(client.worker.address.rpartition(":")[2])
    with pytest.raises(OSError, match="address"):
        await EngineWorker(config_of(port=taken)).start()


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"num_blocks": 100}, "num_blocks"),
        ({"version": "0.9.0"}, "version"),
        ({"lora_adapters": (Lora("m"),)}, "lora_adapters"),
        ({"sliding_window": 32, "version": "0.19.0"}, "sliding_window"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(**{"num_blocks": 1000, **changes})
    assert caught.value.setting == setting
