"""Where engines publish, asked of themselves: vLLM's and SGLang's answers, data-parallel ranks, the command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import aiohttp
import click
import pytest
from aiohttp import web
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.engines.core import EngineConfig
from metatrie.engines.discovery import discover, sglang_sources, vllm_sources
from metatrie.engines.rules import rule_for
from metatrie.engines.worker import EngineWorker
from metatrie.indexer.memory import MemoryIndex
from metatrie.proto.engine import EventSource
from metatrie.proto.errors import ConfigError
from metatrie.proto.hashing import Chain, Namespace
from metatrie.scripts.cli import followed_replicas

if TYPE_CHECKING:
    from .conftest import Reached

Serve = Callable[[str, Callable[[], Any]], Awaitable[str]]

SGLANG = {
    "kv_events": {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 6557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 2,
    }
}


def test_sglang_ports_count_up_from_the_base() -> None:
    assert sglang_sources(SGLANG, "pod-1") == [
        EventSource(dp_rank=0, events="tcp://pod-1:5557", replay="tcp://pod-1:6557", topic="kv", block_size=16),
        EventSource(dp_rank=1, events="tcp://pod-1:5558", replay="tcp://pod-1:6558", topic="kv", block_size=16),
    ]
    bare = {"kv_events": {"publisher": "zmq", "endpoint_host": "10.0.0.7", "endpoint_port_base": 1}}
    assert sglang_sources(bare, "pod-1") == [EventSource(dp_rank=0, events="tcp://10.0.0.7:1")]


def test_vllm_names_every_rank() -> None:
    body = {
        "1": {"endpoint": "tcp://10.0.0.7:5558", "replay_endpoint": None, "topic": ""},
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://[::]:6557", "topic": "kv@pod"},
    }
    assert vllm_sources(body, "pod-1") == [
        EventSource(dp_rank=0, events="tcp://pod-1:5557", replay="tcp://pod-1:6557", topic="kv@pod"),
        EventSource(dp_rank=1, events="tcp://10.0.0.7:5558"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        {"x": {"endpoint": "tcp://*:1"}},
        {"0": "tcp://*:1"},
        {"0": {"endpoint": 5}},
        {"0": {}},
        {"0": {"endpoint": "tcp://*:1", "publisher": "null"}},
        {"0": {"endpoint": "tcp://*:1", "enable_kv_cache_events": False}},
        {str(i): {"endpoint": "tcp://*:1"} for i in range(1025)},
    ],
)
def test_answers_that_are_none_of_vllms(body: Any) -> None:
    with pytest.raises(ValueError, match=r"no map of ranks|switched off|not text"):
        vllm_sources(body, "h")


@pytest.mark.parametrize(
    "change",
    [
        {"publisher": "null"},
        {"endpoint_port_base": None},
        {"endpoint_port_base": "5557"},
        {"dp_size": "2"},
        {"dp_size": 100_000},
        {"topic": 4},
        {"endpoint_host": 4},
    ],
)
def test_answers_that_are_none_of_sglangs(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"switched off|no ports|not text"):
        sglang_sources({"kv_events": SGLANG["kv_events"] | change}, "h")
    with pytest.raises(ValueError, match="switched off"):
        sglang_sources({}, "h")


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(path: str, answer: Callable[[], Any]) -> str:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(answer())

        app = web.Application()
        app.router.add_get(path, handle)
        runner = web.AppRunner(app)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_sglang_is_asked_over_http(serve: Serve) -> None:
    url = await serve("/server_info", lambda: SGLANG)
    assert [s.events for s in await discover(url, "sglang")] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    with pytest.raises(ConfigError, match="has no /kv_event_sources"):
        await discover(url, "vllm")
    off = await serve("/server_info", lambda: {"kv_events": {"publisher": "null"}})
    with pytest.raises(ConfigError, match=r"switched off.*--kv-events-config"):
        await discover(off, "sglang")


async def test_families_and_urls_that_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="trtllm engines cannot be asked"):
        await discover("http://127.0.0.1:1", "trtllm")
    with pytest.raises(ConfigError, match="names no host"):
        await discover("localhost", "vllm")
    with pytest.raises(ConfigError, match="does not answer"):
        await discover("http://127.0.0.1:1", "vllm", timeout_s=0)


async def test_every_rank_of_a_worker_is_found_and_followed_apart(reached: Reached) -> None:
    """Data parallelism end to end: one stream, one sequence, one replica per rank."""
    namespace = Namespace(model="simulated", block_size=16)
    index = MemoryIndex(namespace)
    config = EngineConfig(
        port=0,
        dp_size=2,
        num_blocks=300,
        max_model_len=1024,
        events_endpoint="tcp://*:0",
        replay_endpoint="tcp://*:0",
        time_scale=0,
    )
    async with EngineWorker(config) as worker:
        sources = await discover(worker.address, "vllm")
        assert [s.dp_rank for s in sources] == [0, 1]
        assert len({s.events for s in sources} | {s.replay for s in sources}) == 4
        consumers = [
            ReplicaConsumer(
                ReplicaConfig(replica="w", dp_rank=s.dp_rank, events=s.events, replay=s.replay, topic=s.topic),
                index,
                rule=rule_for("vllm"),
            )
            for s in sources
        ]
        tasks = [asyncio.create_task(consumer.run()) for consumer in consumers]
        prompts = [[rank * 100 + i % 99 for i in range(160)] for rank in (0, 1)]
        async with aiohttp.ClientSession() as session:
            for rank, tokens in enumerate(prompts):
                body = {"model": "simulated", "prompt": tokens, "max_tokens": 1}
                headers = {"X-data-parallel-rank": str(rank)}
                async with session.post(f"{worker.address}/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200
        await reached(
            lambda: all(c.writer.active and c.inventory.index_blocks and not c.writer.pending for c in consumers)
        )
        for rank, tokens in enumerate(prompts):
            found = await index.match(Chain(namespace.root, 16, tokens))
            live = found.fleet.live()
            assert {live[i].spec.ref.dp_rank: d.blocks for i, d in found.depths.items()} == {rank: 10}
        assert [c.stream.stats.wrong_rank for c in consumers] == [0, 0]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_command_line_follows_what_it_discovers(serve: Serve) -> None:
    url = await serve("/server_info", lambda: SGLANG)
    context = click.Context(click.Command("sidecar"))
    options = {"events": None, "engine": "sglang", "url": None, "role": "prefill", "topic": "", "dp_rank": 0}
    found = await asyncio.to_thread(followed_replicas, context, replica="r", discover=url, **options)
    assert [(c.ref.dp_rank, c.events, c.url, c.role, c.topic) for c in found] == [
        (0, "tcp://127.0.0.1:5557", url, "prefill", "kv"),
        (1, "tcp://127.0.0.1:5558", url, "prefill", "kv"),
    ]
    with pytest.raises(click.UsageError, match="--replica is not set"):
        followed_replicas(context, replica=None, discover=url, **options)
