"""Hot paths: the median over repetitions of one call of the real code, in this process.

Redis's own share is read from its command statistics, so it holds on a noisy machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from redis.asyncio import Redis

from ...consumers.inventory import Inventory
from ...engines.rules import rule_for
from ...indexer.connect import open_store
from ...proto.events import decode_batch
from ...proto.hashing import Chain, Namespace
from ...proto.index import Index, PackedWrites, ReplicaRef, ReplicaSpec, Store
from .deciding import deciding
from .measure import Figure, encode, median_us, median_us_async, prompt, server_us, stored

REPLICAS = 8
DEPTHS = (32, 512, 2048)


async def hot_paths(redis_url: str, rng: random.Random) -> list[Figure]:
    """Everything there is. redis_url: a server that is there for this alone."""
    figures = [*_hashing(rng), *_consuming(rng), *await deciding(rng)]
    memory = await open_store("memory:")
    figures += await _index("memory", memory, rng)
    await memory.close()
    return figures + await _over_redis(redis_url, rng)


def _hashing(rng: random.Random) -> list[Figure]:
    space = Namespace(model="bench")
    tokens = prompt(rng, 512)
    return [
        Figure(
            "hash a fresh prompt",
            "block",
            median_us(lambda: Chain(space.root, 16, tokens).keys(512), 50) / 512,
        )
    ]


def _consuming(rng: random.Random) -> list[Figure]:
    """Prefill batches of 32 blocks, single decode blocks, and removals, through decoder and inventory."""
    space = Namespace(model="bench")
    chains = []
    for _ in range(64):
        tokens = prompt(rng, 64)
        chains.append((tokens, Chain(space.root, 16, tokens).keys(64)))
    prefills = [encode([0.0, [stored(t[: 32 * 16], k[:32], None)], 0]) for t, k in chains]
    decodes = [
        encode([0.0, [stored(t[i * 16 : i * 16 + 16], [k[i]], k[i - 1])], 0])
        for i in range(32, 64)
        for t, k in chains
    ]
    removals = [
        encode([0.0, [{"type": "BlockRemoved", "block_hashes": [int.from_bytes(key, "big")], "medium": "GPU"}], 0])
        for _, k in chains
        for key in reversed(k)
    ]
    figures = []
    inventory = Inventory(space, rule=rule_for("vllm"))

    def consume(queue: Iterator[bytes]) -> None:
        inventory.apply(decode_batch(next(queue), pack_tokens=True))

    for what, payloads, blocks in (
        ("consume a prefill batch of 32", prefills, 32),
        ("consume a decode batch of 1", decodes, 1),
        ("consume a removal of 1", removals, 1),
    ):
        figures.append(Figure(what, "block", median_us(partial(consume, iter(payloads)), len(payloads)) / blocks))
    return figures


async def _over_redis(url: str, rng: random.Random) -> list[Figure]:
    store = await open_store(url)
    client: Redis = Redis.from_url(url)
    try:
        return await _index("Redis", store, rng, client)
    finally:
        await client.aclose()
        await store.close()


async def _index(name: str, store: Store, rng: random.Random, client: Redis | None = None) -> list[Figure]:
    index = await store.open(Namespace(model=f"bench-{rng.getrandbits(64):x}"))
    incarnations = []
    for i in range(REPLICAS):
        claim = await index.claim(
            ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="vllm"), owner="bench", lease_s=3600, activate=True
        )
        incarnations.append(claim.incarnation)
    figures = []
    inputs = [writes_of(index, prompt(rng, 32)) for _ in range(100)]
    queue = iter(inputs)
    before = await server_us(client)
    version = 0

    async def write() -> None:
        nonlocal version
        version += 1
        await index.write(incarnations[0], version, next(queue))

    figures.append(Figure(f"{name}: write 32 blocks", "block", await median_us_async(write, len(inputs)) / 32))
    if client is not None:
        spent = await server_us(client) - before
        figures.append(Figure(f"{name}: the same, server", "block", spent / (32 * len(inputs))))
    for depth in DEPTHS:
        asked = prompt(rng, depth)
        for incarnation in incarnations:
            version += 1
            await index.write(incarnation, version, writes_of(index, asked))
        for mode, tokens in (("held", asked), ("unknown", prompt(rng, depth))):
            chain = Chain(index.namespace.root, 16, tokens)
            chain.keys(depth)
            before = await server_us(client)
            times = 50
            wall = await median_us_async(partial(index.match, chain), times)
            figures.append(Figure(f"{name}: match {depth} blocks, {mode}", "query", wall))
            if client is not None:
                spent = await server_us(client) - before
                figures.append(Figure(f"{name}: match {depth} blocks, {mode}, server", "query", spent / times))
    return figures


def writes_of(index: Index, tokens: list[int]) -> PackedWrites:
    """A prompt's blocks as an inventory would emit them."""
    inventory = Inventory(index.namespace)
    keys = Chain(index.namespace.root, 16, tokens).keys(len(tokens) // 16)
    return inventory.apply(decode_batch(encode([0.0, [stored(tokens, keys, None)], 0]))).writes
