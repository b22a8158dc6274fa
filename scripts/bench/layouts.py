"""The same work in three Redis layouts: processor time of the server per block written, removed and looked up (all
in: parsing and replies, too), and bytes per block.

- *metatrie*: pages of 32 depths, through this package's own backend.
- *llm-d*: a HASH per block, one JSON field per pod, and a ZSET that maps each engine hash to its request key; a
  removal reads the map, deletes the field, looks whether the block is still held, and deletes the map.
- *kthena*: a HASH per block, one field per pod, and a STRING that maps each engine hash to its block.

The two others are written down here from their projects' documentation. Their writes and queries are pipelined; so
are kthena's removals, while llm-d's take a round trip per step and block, as it does them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, cast

from redis.asyncio import Redis

from ...indexer.connect import open_store
from ...proto.hashing import BlockKey, Chain, Namespace
from ...proto.index import PAGE_SPAN, BlockWrite, Incarnation, Index, PageHead, ReplicaRef, ReplicaSpec, TierMask
from .measure import Figure, memory_bytes, server_cpu_us

_REPLICAS = 64
_CONVERSATIONS = 150
_REMOVED = 20
_BLOCKS = 224
_SYSTEM = 96
_BATCH = 32
_ROUNDS = 3
_FLOOR_CALLS = 2000
_ONE_HSET = """
local fields = {}
for i = 1, 32 do fields[2 * i - 1], fields[2 * i] = string.sub(ARGV[1], 8 * i - 7, 8 * i), 'b' end
return redis.call('HSET', KEYS[1], unpack(fields))
"""


class _Layout(Protocol):
    async def write(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int) -> None: ...

    async def remove(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int) -> None: ...

    async def query(self, chain: Sequence[BlockKey]) -> None: ...


class Pages:
    """Writes and queries of an index, by replica number and known keys."""

    def __init__(self, index: Index, incarnations: Sequence[Incarnation]) -> None:
        self._index, self._incarnations, self._version = index, incarnations, 0

    async def write(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int, tiers: int = 1) -> None:
        self._version += 1
        blocks = [
            BlockWrite(chain[i], chain[i - 1] if i else None, PageHead(chain[i - i % PAGE_SPAN]), i, TierMask(tiers))
            for i in range(start, stop)
        ]
        await self._index.write(self._incarnations[replica], self._version, blocks if tiers else blocks[::-1])

    async def remove(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int) -> None:
        await self.write(replica, chain, start, stop, 0)

    async def query(self, chain: Sequence[BlockKey]) -> None:
        await self._index.match(Chain.of_keys(chain))  # hashing is no part of this comparison


class _HashPerBlock:
    """llm-d's and kthena's, which differ in their map from engine hashes and in how a block is read."""

    def __init__(self, client: Redis, *, zset: bool) -> None:
        self._client, self._zset = client, zset

    @staticmethod
    def _field(replica: int) -> str:
        return f'{{"pod":"10.0.{replica}.1:8000","tier":"gpu"}}'

    async def write(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int) -> None:
        pipe = self._client.pipeline(transaction=False)
        for key in chain[start:stop]:
            name = str(int.from_bytes(key, "big"))
            pipe.hset(name, self._field(replica), "1700000000")
            if self._zset:
                pipe.zadd(f"engine:{name}", {name: 0})
            else:
                pipe.set(f"engine:{name}", name)
        await pipe.execute()

    async def remove(self, replica: int, chain: Sequence[BlockKey], start: int, stop: int) -> None:
        names = [str(int.from_bytes(key, "big")) for key in reversed(chain[start:stop])]
        client, field = self._client, self._field(replica)
        run = cast(Callable[..., Awaitable[object]], client.execute_command)  # redis-py leaves it untyped
        if self._zset:
            for name in names:
                await run("ZRANGE", f"engine:{name}", 0, -1)
                await run("HDEL", name, field)
                await run("HLEN", name)
                await run("DEL", f"engine:{name}")
            return
        pipe = client.pipeline(transaction=False)
        for name in names:
            pipe.get(f"engine:{name}")
            pipe.hdel(name, field)
            pipe.delete(f"engine:{name}")
        await pipe.execute()

    async def query(self, chain: Sequence[BlockKey]) -> None:
        pipe = self._client.pipeline(transaction=False)
        for key in chain:
            name = str(int.from_bytes(key, "big"))
            if self._zset:
                pipe.hkeys(name)
            else:
                pipe.hgetall(name)
        await pipe.execute()


async def layouts(url: str, rng: random.Random) -> list[Figure]:
    """Writes, removals and queries in every layout: of _ROUNDS rounds taken in turn the least, since what else runs
    on the machine only adds to a server's processor time."""
    system = [keys_of(rng, _SYSTEM) for _ in range(8)]
    chains = [rng.choice(system) + keys_of(rng, _BLOCKS) for _ in range(_CONVERSATIONS)]
    homes = [rng.sample(range(_REPLICAS), 1 if rng.random() < 0.9 else 2) for _ in chains]
    client: Redis = Redis.from_url(url)
    costs: dict[str, list[tuple[float, float, float]]] = {"metatrie": [], "llm-d": [], "kthena": []}
    try:
        for _ in range(_ROUNDS):
            for name, rounds in costs.items():
                await client.flushall()
                if name == "metatrie":
                    store = await open_store(url)
                    pages = await register(await store.open(Namespace(model="layouts")), _REPLICAS)
                    rounds.append(await _costs(client, pages, chains, homes, rng))
                    await store.close()
                else:
                    layout = _HashPerBlock(client, zset=name == "llm-d")
                    rounds.append(await _costs(client, layout, chains, homes, rng))
        floors = await _floors(client, rng)
    finally:
        await client.aclose()
    least = {name: [min(values) for values in zip(*rounds, strict=True)] for name, rounds in costs.items()}
    figures = []
    for name, (writing, removing, query) in least.items():
        figures += [
            Figure(f"{name}: write, server", "block", writing, target="≤ 2 µs" if name == "metatrie" else ""),
            Figure(f"{name}: remove, server", "block", removing),
            Figure(f"{name}: query of {_SYSTEM + _BLOCKS + 32} blocks, server", "query", query),
        ]
    figures += floors
    ours = least["metatrie"]
    for other in ("llm-d", "kthena"):
        theirs = least[other]
        changes = (theirs[0] + theirs[1]) / (ours[0] + ours[1])
        figures += [
            Figure(f"{other} ÷ metatrie: writes and removals", "block", changes, "×", "≥ 10"),
            Figure(f"{other} ÷ metatrie: queries", "query", theirs[2] / ours[2], "×", "≥ 10"),
        ]
    return figures


async def _costs(
    client: Redis,
    layout: _Layout,
    chains: Sequence[list[BlockKey]],
    homes: Sequence[Sequence[int]],
    rng: random.Random,
) -> tuple[float, float, float]:
    """Processor time of the server per block written, per block removed and per query."""
    entries, before = 0, await server_cpu_us(client)
    for chain, replicas in zip(chains, homes, strict=True):
        for replica in replicas:
            for start in range(0, len(chain), _BATCH):
                await layout.write(replica, chain, start, min(start + _BATCH, len(chain)))
            entries += len(chain)
    written = await server_cpu_us(client)
    for chain in chains:
        await layout.query(chain + keys_of(rng, 32))
    queried = await server_cpu_us(client)
    gone = 0
    for chain, replicas in list(zip(chains, homes, strict=True))[:_REMOVED]:
        for replica in replicas:
            gone += len(chain)
            for start in reversed(range(0, len(chain), _BATCH)):
                await layout.remove(replica, chain, start, min(start + _BATCH, len(chain)))
    removed = await server_cpu_us(client)
    return (written - before) / entries, (removed - queried) / gone, (queried - written) / len(chains)


async def _floors(client: Redis, rng: random.Random) -> list[Figure]:
    """What any layout pays that keeps a field per block: pages of 32 written by nothing but one command each, and by
    a script that does nothing but that."""
    await client.flushall()
    alone = await client.script_load(_ONE_HSET)
    figures = []
    for what in ("one HSET of 32 fields", "a script that does only that"):
        before = await server_cpu_us(client)
        for _ in range(_FLOOR_CALLS // 100):
            pipe = client.pipeline(transaction=False)
            for _ in range(100):
                keys = keys_of(rng, 32)
                if what.startswith("a script"):
                    pipe.evalsha(alone, 1, rng.randbytes(24), b"".join(keys))
                else:
                    pipe.hset(rng.randbytes(24), mapping=dict.fromkeys(keys, b"b"))
            await pipe.execute()
        figures.append(
            Figure(f"floor: {what}, server", "block", (await server_cpu_us(client) - before) / 32 / _FLOOR_CALLS)
        )
    return figures


async def footprint(url: str, rng: random.Random) -> list[Figure]:
    """Bytes the server keeps, pages and page sets and all."""
    client: Redis = Redis.from_url(url)
    figures = []
    try:
        for what, conversations, length, sharers, limit, per in (
            ("unique blocks", 400, 256, 1, "≤ 30", "entry"),
            ("blocks shared by 8 replicas", 200, 256, 8, "≤ 8", "entry"),
            ("a prefix of 100 blocks on 1,000 replicas", 1, 100, 1000, "≤ 1,000", "block"),
        ):
            await client.flushall()
            store = await open_store(url)
            pages = await register(await store.open(Namespace(model="footprint")), max(8, sharers))
            before = await memory_bytes(client)
            for _ in range(conversations):
                chain = keys_of(rng, length)
                for replica in range(sharers):
                    await pages.write(replica, chain, 0, length)
            entries = conversations * length * (sharers if per == "entry" else 1)
            grown = await memory_bytes(client) - before
            heads = [key async for key in client.scan_iter(match="mt:p:*", count=1000)]
            used = [await client.memory_usage(key, samples=0) for key in heads]
            figures.append(
                Figure(f"Redis memory, {what}: pages", per, sum(u or 0 for u in used) / entries, "bytes", limit)
            )
            figures.append(Figure(f"Redis memory, {what}: and page sets", per, grown / entries, "bytes"))
            await store.close()
        await client.flushall()
    finally:
        await client.aclose()
    return figures


async def register(index: Index, replicas: int) -> Pages:
    """That many replicas, leased for as long as anything here takes."""
    incarnations = []
    for i in range(replicas):
        spec = ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="vllm")
        claim = await index.claim(spec, owner="bench", lease_s=3600, activate=True)
        incarnations.append(claim.incarnation)
    return Pages(index, incarnations)


def keys_of(rng: random.Random, count: int) -> list[BlockKey]:
    """Random keys."""
    return [BlockKey(rng.randbytes(8)) for _ in range(count)]
