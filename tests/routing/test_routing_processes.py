"""Several router processes over one Redis: they place bursts as one would, and a killed one's load is freed."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from metatrie.indexer.connect import open_store
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import ReplicaRef, ReplicaSpec
from metatrie.scripts.simulate.burst import Burst, play, router_processes

REPLICAS = 8
REQUESTS = 32
ROUNDS = 8


async def reserved(session: aiohttp.ClientSession, url: str) -> int:
    """Requests this router believes outstanding, its own and others'."""
    async with session.get(url + "/v1/replicas") as answer:
        listed = await answer.json()
    return sum(replica["load"]["reserved_requests"] for replica in listed["replicas"])


async def agree(session: aiohttp.ClientSession, urls: list[str], expected: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if [await reserved(session, url) for url in urls] == [expected] * len(urls):
                return
            await asyncio.sleep(0.02)


@pytest.mark.timeout(240)
async def test_four_routers_serve_bursts_as_one_does(redis_url: str) -> None:
    burst = Burst(waves=5)
    alone = together = 0.0
    async with router_processes(redis_url, 5) as started:
        urls = [url for url, _ in started]
        # Which of several equal replicas is drawn moves one round by a few percent, so there may be some more.
        for seed in range(ROUNDS):
            alone += (await play(redis_url, urls[:1], burst, seed)).mean
            together += (await play(redis_url, urls[1:], burst, seed)).mean
            if seed and together <= 1.05 * alone:
                break
    assert together <= 1.05 * alone


@pytest.mark.timeout(180)
async def test_what_a_killed_router_had_outstanding_is_freed(redis_url: str) -> None:
    store = await open_store(redis_url)
    index = await store.open(Namespace(model="m"))
    for number in range(REPLICAS):
        spec = ReplicaSpec(ref=ReplicaRef(f"r{number}"), engine="vllm")
        await index.claim(spec, owner="test", lease_s=600, activate=True)
    async with router_processes(redis_url, 4) as started, aiohttp.ClientSession() as session:
        urls = [url for url, _ in started]

        async def route(number: int) -> None:
            body = {"model": "m", "token_ids": [number] * 1024}
            async with session.post(urls[number % len(urls)] + "/v1/route", json=body) as answer:
                assert answer.status == 200

        await asyncio.gather(*map(route, range(REQUESTS)))
        await agree(session, urls, REQUESTS)
        await started[3][1].kill()
        await agree(session, urls[:3], REQUESTS * 3 // 4)
    await store.close()
