"""Whole consumers, from engine sockets to the index, and the sidecar's HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from consumer_world import Wild, encode
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer, parse_load
from metatrie.consumers.sidecar import MAX_PAGE, SidecarConfig, make_app, run_sidecar
from metatrie.engines.pool import BlockPool
from metatrie.engines.publisher import EventEncoder, Publisher, PublisherConfig
from metatrie.engines.rules import rule_for
from metatrie.engines.versions import traits_of
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryIndex, MemoryStore
from metatrie.proto.errors import ConfigError
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import Index, Load

NAMESPACE = Namespace(model="m", block_size=16)
DEADLINE_S = 20.0


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            met = condition()
            if asyncio.iscoroutine(met):
                met = await met
            if met:
                return
            await asyncio.sleep(0.002)


class Engine:
    """The simulated pool behind a real publisher, and a `/metrics` page."""

    def __init__(self, version: str = "0.33.0") -> None:
        self.traits = traits_of(version)
        self.pool = BlockPool(200, 16, NAMESPACE.root, extra_keys=self.traits.hash_extras)
        self.encoder = EventEncoder(self.traits, 16)
        self.publisher = Publisher(PublisherConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0"), self.traits)
        self.metrics = 'vllm:num_requests_running{engine="0"} 3.0\n'
        self.http: HttpServer | None = None

    def serve(self, tokens: list[int], salt: str | None = None) -> Any:
        """Prefill one prompt; its blocks are published."""
        seq = self.pool.sequence(list(tokens), salt=salt)
        assert self.pool.allocate(seq, len(tokens), self.pool.match(seq))
        self.publish()
        return seq

    def publish(self) -> None:
        events = self.pool.take_events()
        if events:
            self.publisher.publish(self.encoder.batch(events, ts=1.0, rank=0))

    def config(self, name: str = "a", **options: Any) -> ReplicaConfig:
        config = self.publisher.config
        options.setdefault("replay", config.replay_endpoint)
        url = self.http.url if self.http is not None else None
        return ReplicaConfig(replica=name, events=config.endpoint, url=url, **options)

    async def __aenter__(self) -> Engine:
        self.publisher.start()
        app = web.Application()

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=self.metrics)

        app.router.add_get("/metrics", metrics)
        self.http = await HttpServer(app).start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self.http is not None
        await self.http.stop()
        await self.publisher.close()


@contextlib.asynccontextmanager
async def running(
    index: Index, *configs: ReplicaConfig, session: aiohttp.ClientSession | None = None, **options: Any
) -> AsyncIterator[list[ReplicaConsumer]]:
    options.setdefault("lease_s", 0.5)
    consumers = [ReplicaConsumer(c, index, rule=rule_for(c.engine), **options) for c in configs]
    tasks = [asyncio.create_task(c.run(session)) for c in consumers]
    try:
        yield consumers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def sidecar(consumers: Sequence[ReplicaConsumer]) -> AsyncIterator[Callable[..., Any]]:
    """GET, returning (status, decoded body)."""
    async with aiohttp.ClientSession() as session, HttpServer(make_app(consumers, session)) as server:

        async def get(path: str, **query: Any) -> tuple[int, Any]:
            async with session.get(server.url + path, params=query) as response:
                if response.content_type.endswith("json"):
                    return response.status, await response.json(content_type=None)
                return response.status, await response.text()

        yield get


async def equal(index: Index, consumer: ReplicaConsumer) -> bool:
    claim = consumer.writer.claim
    if claim is None or not consumer.writer.idle:
        return False
    return bool(await index.held(claim.incarnation) == consumer.inventory.expected())


# End to end


@pytest.mark.parametrize("backend", ["memory", "redis"])
async def test_from_a_prompt_to_a_match(backend: str, request: pytest.FixtureRequest) -> None:
    store = await open_store("memory:" if backend == "memory" else request.getfixturevalue("redis_url"))
    index = await store.open(NAMESPACE)
    prompt = list(range(100))
    async with Engine() as engine:
        engine.serve(prompt)
        async with running(index, engine.config()) as (consumer,):
            await until(lambda: consumer.inventory.index_blocks == 6)
            await until(lambda: equal(index, consumer))

            async def depth() -> int:
                match = await index.match(Chain(NAMESPACE.root, 16, prompt))
                return max((d.blocks for d in match.depths.values()), default=0)

            assert await depth() == 6
            await until(lambda: consumer.cause() == "")
            assert consumer.inventory.parity

            (view,) = (await index.fleet()).replicas
            assert view.spec.ref == consumer.config.ref
            seq = engine.serve(list(range(5000, 5000 + 160)))
            await until(lambda: consumer.inventory.index_blocks == 16)
            await until(lambda: equal(index, consumer))
            engine.pool.free(seq)
            # Fill the pool: everything that nobody uses is evicted, the first prompt stays.
            engine.serve(list(range(10_000, 10_000 + 192 * 16)))
            await until(lambda: consumer.stream.expected == 3)
            await until(lambda: equal(index, consumer))
            assert await depth() == 6
            assert consumer.inventory.resident() == {
                (0, int.from_bytes(d[-8:], "big")): n for d, n in engine.pool.resident().items()
            }
    await store.close()


async def test_a_wild_engine_over_real_sockets_ends_equal() -> None:
    import random

    rng = random.Random(7)
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine:
        wild = Wild(rng, page=16)
        for _ in range(100):
            engine.publisher.publish(encode(wild.batch()))
        async with running(index, engine.config(hash_mode="recompute")) as (consumer,):
            for _ in range(100):
                engine.publisher.publish(encode(wild.batch()))
                await asyncio.sleep(0)
            await until(lambda: consumer.stream.expected == 200)
            await until(lambda: equal(index, consumer))
            tables: dict[tuple[str, int], dict[int, int]] = {}
            for medium, group, h in wild.held:
                table = tables.setdefault((medium, group), {})
                table[h] = table.get(h, 0) + 1
            assert {w: dict(t) for w, t in consumer.inventory.tables().items() if t} == tables


# Load


async def test_the_engine_s_load_is_scraped_and_reported() -> None:
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine, aiohttp.ClientSession() as session:
        engine.metrics = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        async with running(index, engine.config(), session=session) as (consumer,):
            await until(lambda: consumer.load == Load(running=3, waiting=0, kv_usage=0.25))

            async def reported() -> bool:
                replicas = (await index.fleet()).replicas
                return bool(replicas and replicas[0].status.load == consumer.load)

            await until(reported)


VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 9.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.0e+06
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="{odd}",tp_rank="0"} 7.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.125 1700000000
"""


@pytest.mark.parametrize(
    ("text", "rank", "load"),
    [
        (VLLM, 0, Load(running=4, waiting=2, kv_usage=0.5)),
        (VLLM, 1, Load(running=9, waiting=0, kv_usage=0.75)),
        (VLLM, 2, None),
        (SGLANG, 0, Load(running=7, waiting=1, kv_usage=0.125)),
        ("vllm:num_requests_running 5\nvllm:gpu_cache_usage_perc 0.5", 0, Load(running=5, kv_usage=0.5)),
        ("", 0, None),
        ("up 1\nprocess_open_fds 9", 0, None),
    ],
)
def test_load_metrics(text: str, rank: int, load: Load | None) -> None:
    assert parse_load(text, rank) == load


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1", "", "many", "1e999"])
def test_values_that_are_no_counts_are_unknown(value: str) -> None:
    assert parse_load(f'vllm:num_requests_running{{engine="0"}} {value}\n', 0) is None
    assert parse_load(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n", 0) == Load(waiting=2)


async def test_metrics_of_an_engine_that_went_mad_do_not_stop_its_consumer() -> None:
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine, aiohttp.ClientSession() as session:
        engine.metrics = "vllm:num_requests_running NaN\n\x00\ufffd{{{\n"
        async with running(index, engine.config(), session=session) as (consumer,):
            await until(lambda: consumer.scrapes > 0)
            assert consumer.load is None
            engine.serve(list(range(64)))
            await until(lambda: equal(index, consumer))


# HTTP


async def test_health_readiness_and_metrics() -> None:
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine:
        idle = ReplicaConsumer(engine.config("idle"), index, rule=None)
        async with sidecar([idle]) as get:
            assert (await get("/healthz"))[0] == 200
            status, body = await get("/readyz")
            assert status == 503
            assert body["waiting"] == {"idle/0": "connecting"}
        engine.serve(list(range(64)))
        async with running(index, engine.config()) as consumers, sidecar(consumers) as get:

            async def ready() -> bool:
                return bool((await get("/readyz"))[0] == 200)

            await until(ready)
            await until(lambda: equal(index, consumers[0]))
            status, text = await get("/metrics")
            assert status == 200
            where = 'dp_rank="0",model="m",replica="a"'
            assert f"metatrie_inventory_index_blocks{{{where}}} 4.0" in text
            assert f"metatrie_stream_batches_total{{{where}}} 1.0" in text
            assert f"metatrie_writer_written_total{{{where}}} 4.0" in text
            assert f"metatrie_hash_parity{{{where}}} 1.0" in text
            assert 'state="exact"' in text


async def test_an_idle_engine_without_replay_is_ready() -> None:
    """Its pod would never get the traffic that a first event takes."""
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine, running(index, engine.config(replay=None)) as consumers, sidecar(consumers) as get:

        async def ready() -> bool:
            return bool((await get("/readyz"))[0] == 200)

        await until(ready)


async def test_inventory_pages() -> None:
    index = MemoryIndex(NAMESPACE)
    async with Engine() as engine:
        engine.serve(list(range(16 * 25)))
        async with running(index, engine.config()) as (consumer,), sidecar([consumer]) as get:
            await until(lambda: consumer.inventory.index_blocks == 25)
            await until(lambda: equal(index, consumer))
            seen: dict[str, int] = {}
            after, pages = "", 0
            while after is not None:
                status, page = await get("/v1/inventory", limit=10, after=after)
                assert status == 200
                assert page["total"] == 25
                assert len(page["blocks"]) <= 10
                seen |= {b["key"]: b["tiers"] for b in page["blocks"]}
                after, pages = page["next"], pages + 1
            assert pages == 3
            assert seen == {k.hex(): int(t) for k, t in consumer.inventory.expected().items()}
            assert list(seen) == sorted(seen)
            assert page["state"] == "exact"
            assert page["next_seq"] == 1
            assert page["pending"] == 0
            assert consumer.writer.claim is not None
            assert page["incarnation"] == consumer.writer.claim.incarnation
            assert page["namespace"] == NAMESPACE.id


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ({"limit": "x"}, 400, "limit"),
        ({"limit": str(MAX_PAGE + 1)}, 400, "limit"),
        ({"limit": "-1"}, 400, "limit"),
        ({"limit": "²"}, 400, "limit"),
        ({"after": "zz"}, 400, "after"),
        ({"replica": "nobody"}, 404, "replica"),
        ({"replica": "a", "dp_rank": "5"}, 404, "replica"),
        ({"dp_rank": "70000"}, 400, "dp_rank"),
        ({}, 400, "replica"),
    ],
)
async def test_inventory_refusals(query: dict[str, str], status: int, field: str) -> None:
    index = MemoryIndex(NAMESPACE)
    events = "tcp://127.0.0.1:1"
    consumers = [
        ReplicaConsumer(ReplicaConfig(replica="a", dp_rank=rank, events=events), index, rule=None) for rank in (0, 1)
    ]
    async with sidecar(consumers) as get:
        wanted = query if "replica" in query or "dp_rank" in query or not query else {"replica": "a", "dp_rank": "0"}
        got, problem = await get("/v1/inventory", **(wanted | query))
        assert (got, problem["field"]) == (status, field)
        assert problem["remedy"]


def test_a_replica_is_followed_once() -> None:
    config = ReplicaConfig(replica="a", events="tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match="listed twice"):
        SidecarConfig(namespace=NAMESPACE, replicas=(config, config))


async def test_the_process_serves_and_says_farewell() -> None:
    store = MemoryStore()
    stop = asyncio.Event()
    servers: list[HttpServer] = []
    async with Engine() as engine:
        engine.serve(list(range(160)))
        config = SidecarConfig(namespace=NAMESPACE, replicas=(engine.config(),), port=0)
        task = asyncio.create_task(
            run_sidecar(config, store, rule_for=rule_for, stop=stop, ready=servers.append), name="sidecar"
        )
        index = await store.open(NAMESPACE)

        async def shown() -> bool:
            match = await index.match(Chain(NAMESPACE.root, 16, list(range(160))))
            return any(d.blocks == 10 for d in match.depths.values())

        await until(shown)
        assert servers
        stop.set()
        await asyncio.wait_for(task, DEADLINE_S)
        assert (await index.fleet()).replicas == ()
