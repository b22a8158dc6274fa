"""Real router processes over a real Redis, in front of modelled engines: does it matter how many routers there are?

Strategy. Requests come in waves, each at one instant, to the routers in turn, so that every router decides while the
others do. Where they were sent is played on modelled engines (engine.py), whose clock follows the wall's: between the
waves the routers are told of first tokens and ends, and the index of what caches store. The times to first token are
the model's, so they depend on where requests went and on nothing else: not on how fast this machine answers.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from math import inf, isnan
from pathlib import Path

import aiohttp
import msgspec

from ...indexer.connect import open_store
from ...proto.api import Feedback, RouteRequest, RouteResponse
from ...proto.hashing import Chain, Namespace
from ...proto.index import Incarnation, Index, PackedWrites, ReplicaRef, ReplicaSpec, Tier, TierMask
from ..stack import Child
from .engine import Engine, EngineConfig, Job, Keys
from .fleet import Distribution, distribution

BLOCK_SIZE = 16
_LEASE_S = 600.0
_JSON = {"Content-Type": "application/json"}
_STEP_S = 0.05
"""Between looks at the engines."""


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """What arrives. By default as much prefill as the fleet can do meanwhile, if every prefix is found."""

    replicas: int = 8
    prefixes: int = 24
    """Held by one replica each; the more popular the lower its number."""
    prefix_blocks: int = 128
    tail_blocks: int = 48
    """Each request's own."""
    output_tokens: int = 64
    waves: int = 8
    wave: int = 32
    """Requests in each."""
    every_s: float = 0.3


@asynccontextmanager
async def router_processes(redis_url: str, count: int, *options: str) -> AsyncIterator[list[tuple[str, Child]]]:
    """So many routers on one Redis, with their URLs."""
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metatrie-")))
        argv = ["router", "--redis", redis_url, "--port", "0", "--decisions", "0", *options]
        started = []
        for number in range(count):
            child = Child(f"router {number}", argv, logs / f"router-{number}.log")
            stack.push_async_callback(child.stop)
            started.append(((await child.start())["url"], child))
        yield started


async def play(redis_url: str, urls: Sequence[str], burst: Burst, seed: int = 1) -> Distribution:
    """Send one burst to these routers. Returns the times to first token that engines would have."""
    async with AsyncExitStack() as stack:
        store = await open_store(redis_url)
        stack.push_async_callback(store.close)
        # A namespace of its own, so that no burst finds what another left.
        index = await store.open(Namespace(model=f"burst-{secrets.token_hex(8)}", block_size=BLOCK_SIZE))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = _Fleet(index, session, urls, burst, random.Random(seed))
        await fleet.prepare()
        return await fleet.play()


class _Fleet:
    def __init__(
        self, index: Index, session: aiohttp.ClientSession, urls: Sequence[str], burst: Burst, rng: random.Random
    ) -> None:
        self._index = index
        self._session = session
        self._urls = urls
        self._burst = burst
        self._rng = rng
        self._incarnations: list[Incarnation] = []
        self._version = 0
        self._changes: list[tuple[int, TierMask, Keys, int, int]] = []
        """Of caches, not yet in the index."""
        self._news: list[tuple[Job, bool]] = []
        """First tokens, and ends, that routers were not told of yet."""
        self._engines = [
            Engine(
                EngineConfig(capacity_tokens=1_000_000),
                BLOCK_SIZE,
                stored=partial(self._changed, i, TierMask(1 << Tier.GPU)),
                removed=partial(self._changed, i, TierMask(0)),
                first_token=lambda job, now: self._news.append((job, False)),
                finished=lambda job, now: self._news.append((job, True)),
            )
            for i in range(burst.replicas)
        ]
        self._reservations: dict[int, str] = {}
        self._jobs: list[Job] = []

    async def prepare(self) -> None:
        """Register the replicas, and put every prefix into the cache of one."""
        for i in range(self._burst.replicas):
            spec = ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="simulated")
            claim = await self._index.claim(spec, owner="burst", lease_s=_LEASE_S, activate=True)
            self._incarnations.append(claim.incarnation)
        for number in range(self._burst.prefixes):
            keys = self._keys(self._prefix(number))
            cache = self._engines[number % self._burst.replicas].cache
            handle, _ = cache.lock(keys, 0)
            cache.unlock(cache.extend(handle, keys, 0, len(keys)))
        await self._publish()

    async def play(self) -> Distribution:
        burst, start, now = self._burst, time.monotonic(), 0.0
        for wave in range(burst.waves):
            while now < wave * burst.every_s:
                now = min(now + _STEP_S, wave * burst.every_s)
                await asyncio.sleep(max(0.0, start + now - time.monotonic()))
                await self._advance(now)
            requests = range(wave * burst.wave, (wave + 1) * burst.wave)
            prompts = [self._prompt(number) for number in requests]
            routed = await asyncio.gather(*map(self._route, requests, prompts))
            for number, prompt, answer in zip(requests, prompts, routed, strict=True):
                job = Job(number, self._keys(prompt), len(prompt), burst.output_tokens, now)
                job.replica = int(answer.replica[1:])
                self._jobs.append(job)
                self._reservations[number] = answer.reservation
                self._engines[job.replica].submit(job, now)
        await self._advance(inf)
        return distribution([job.first_token - job.arrived for job in self._jobs])

    async def _advance(self, until: float) -> None:
        """Let the engines work, and tell of it."""
        for engine in self._engines:
            while engine.wake_at <= until and engine.wake_at != inf:
                engine.wake(engine.wake_at)
        await self._publish()
        news, self._news = self._news, []
        await asyncio.gather(*(self._tell(job, over) for job, over in news if over or isnan(job.finished)))

    def _changed(self, replica: int, tiers: TierMask, keys: Keys, start: int, end: int) -> None:
        self._changes.append((replica, tiers, keys, start, end))

    async def _publish(self) -> None:
        changes, self._changes = self._changes, []
        for replica, tiers, keys, start, end in changes:
            self._version += 1
            writes = PackedWrites.run(keys, start, end, tiers)
            await self._index.write(self._incarnations[replica], self._version, writes)

    async def _route(self, number: int, prompt: list[int]) -> RouteResponse:
        asked = RouteRequest(model=self._index.namespace.model, token_ids=prompt)
        url = self._urls[number % len(self._urls)] + "/v1/route"
        async with self._session.post(url, data=msgspec.json.encode(asked), headers=_JSON) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=RouteResponse)

    async def _tell(self, job: Job, over: bool) -> None:
        said = Feedback(
            reservation=self._reservations[job.index],
            cached_tokens=job.cached,
            finished=over,
            output_tokens=job.output_tokens if over else None,
        )
        url = self._urls[job.index % len(self._urls)] + "/v1/feedback"
        async with self._session.post(url, data=msgspec.json.encode(said), headers=_JSON) as answer:
            answer.raise_for_status()

    def _prefix(self, number: int) -> list[int]:
        size = self._burst.prefix_blocks * BLOCK_SIZE
        return [1_000 + number] * size

    def _prompt(self, number: int) -> list[int]:
        popular = self._rng.choices(range(self._burst.prefixes), [1 / (i + 1) for i in range(self._burst.prefixes)])
        return self._prefix(popular[0]) + [100_000 + number] * (self._burst.tail_blocks * BLOCK_SIZE)

    def _keys(self, prompt: list[int]) -> Keys:
        chain = Chain(self._index.namespace.root, BLOCK_SIZE, prompt)
        return chain.keys(chain.blocks)
