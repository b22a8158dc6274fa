"""Four router processes over one Redis: they place a burst as one would, and a killed one's load is freed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from metatrie.indexer.connect import open_store
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.index import PAGE_SPAN, BlockWrite, PageHead, ReplicaRef, ReplicaSpec, Tier, TierMask

NAMESPACE = Namespace(model="m")
REPLICAS = 8
BURST = 160
PREFIX = list(range(1000, 1000 + 64 * 16))


@asynccontextmanager
async def router(redis_url: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A router process, and its URL."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "metatrie", "router", "--redis", redis_url, "--port", "0", "--log-level", "error"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            said = json.loads(await process.stdout.readline())
        yield said["url"], process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await process.wait()


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[str]:
    """Eight replicas, one of which holds the prefix."""
    store = await open_store(redis_url)
    index = await store.open(NAMESPACE)
    for number in range(REPLICAS):
        spec = ReplicaSpec(ref=ReplicaRef(f"r{number}"), engine="vllm")
        claim = await index.claim(spec, owner="test", lease_s=600, activate=True)
        if number == 0:
            keys = Chain(NAMESPACE.root, 16, PREFIX).keys(64)
            held = TierMask(1 << Tier.GPU)
            await index.write(claim.incarnation, 1, [_write(keys, i, held) for i in range(64)])
    yield redis_url
    await store.close()


def _write(keys: list[BlockKey], i: int, tiers: TierMask) -> BlockWrite:
    return BlockWrite(keys[i], keys[i - 1] if i else None, PageHead(keys[i - i % PAGE_SPAN]), i, tiers)


async def burst(session: aiohttp.ClientSession, urls: list[str]) -> Counter[str]:
    """Requests with one prefix and tails of their own, to the routers in turn, 16 at a time; none ends."""
    places: Counter[str] = Counter()
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        body = {"model": "m", "token_ids": [*PREFIX, *range(number * 64, number * 64 + 64)]}
        async with slots, session.post(urls[number % len(urls)] + "/v1/route", json=body) as answer:
            assert answer.status == 200
            places[(await answer.json())["replica"]] += 1

    await asyncio.gather(*(one(number) for number in range(BURST)))
    return places


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


@pytest.mark.timeout(180)
async def test_four_routers_place_a_burst_as_one_and_a_killed_ones_load_is_freed(fleet: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with router(fleet) as (url, _):
            alone = await burst(session, [url])
        # Stopping freed what the first one had.
        async with router(fleet) as first, router(fleet) as second, router(fleet) as third, router(fleet) as fourth:
            urls = [url for url, _ in (first, second, third, fourth)]
            assert await reserved(session, urls[0]) == 0
            together = await burst(session, urls)
            assert sum(together.values()) == sum(alone.values()) == BURST
            # Even shares are 20; a router that knew its own load only would put a fourth of all where each sees room.
            assert max(together.values()) <= max(alone.values()) * 1.05 + 4
            assert len(together) == REPLICAS

            await agree(session, urls, BURST)
            fourth[1].kill()
            await fourth[1].wait()
            await agree(session, urls[:3], BURST * 3 // 4)
