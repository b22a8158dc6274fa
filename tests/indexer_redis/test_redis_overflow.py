"""Pages that fill up: bounded keys, one placement for all writers, readers that follow."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import redis
from metatrie.indexer.redis_pages import EMPTY_PAGE_TTL_S, PAGE_LIMIT, PageKeys


def _pages(url: str) -> dict[bytes, int]:
    """Fields per page on the server."""
    with redis.Redis.from_url(url) as client:
        return {key: client.hlen(key) for key in client.scan_iter(b"mt:p:*", count=1000)}


async def test_one_prefix_diverging_into_thousands_keeps_every_key_small(
    redis_url: str, kit: Any, connect: Any
) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    one, two = await kit.claim(index, "a"), await kit.claim(index, "b")
    trunk = kit.prompt(20)
    branches = [kit.prompt(26, of=trunk, shared=20) for _ in range(1500)]
    for version, branch in enumerate(branches):
        await index.write(one, version, kit.writes(branch))
    # The second writer sees a full page from its first write on.
    await index.write(two, 1, [w for branch in reversed(branches) for w in kit.writes(branch)])
    fields = _pages(redis_url)
    assert max(fields.values()) <= PAGE_LIMIT + 1 + 3
    assert len(fields) > 1000
    for branch in branches[::50]:
        assert await kit.depths(index, branch) == {one: 26, two: 26}
    assert len(await index.held(two)) == 20 + 6 * 1500
    everything = {w.key: w for branch in branches for w in kit.writes(branch)}
    assert await index.refresh(two, 2, list(everything.values())) == 0
    await index.write(two, 3, [w for branch in branches for w in kit.writes(branch, start=20, tiers=0)])
    assert await kit.depths(index, branches[7]) == {one: 26, two: 20}
    assert len(await index.held(two)) == 20


@pytest.mark.parametrize("first", [0, 1])
async def test_two_writers_place_alike_whoever_comes_first(
    redis_url: str, kit: Any, first: int, connect: Any
) -> None:
    stores = [await connect(redis_url, page_limit=4) for _ in range(2)]
    indexes = [await store.open(kit.namespace) for store in stores]
    incarnations = [await kit.claim(index, name) for index, name in zip(indexes, "ab", strict=True)]
    trunk = kit.prompt(3)
    prompts = [kit.prompt(50, of=trunk, shared=3) for _ in range(2)]
    for turn in range(4):
        who = (first + turn) % 2
        await indexes[who].write(incarnations[who], turn + 1, kit.writes(prompts[(turn // 2 + who) % 2]))
    for prompt in prompts:
        for index in indexes:
            assert await kit.depths(index, prompt) == dict.fromkeys(incarnations, 50)
    # No block is stored twice.
    with redis.Redis.from_url(redis_url) as client:
        blocks = [f for key in client.scan_iter(b"mt:p:*") for f in client.hkeys(key) if len(f) == 8]
    assert len(blocks) == len(set(blocks)) == 3 + 2 * 47


@pytest.mark.parametrize("seed", range(6))
async def test_many_writers_at_once_end_up_at_the_same_placement(
    redis_url: str, kit: Any, seed: int, connect: Any
) -> None:
    """Concurrent writers on connections of their own, a tiny limit, and nothing but the outcome to compare."""
    rng = random.Random(seed)
    stores = [await connect(redis_url, page_limit=3) for _ in range(3)]
    indexes = [await store.open(kit.namespace) for store in stores]
    trunk = kit.prompt(40)
    prompts = [kit.prompt(rng.randint(10, 70), of=trunk, shared=rng.randint(1, 9)) for _ in range(8)]
    truth: dict[int, dict[int, int]] = {}
    owners: dict[int, Any] = {}

    async def writer(number: int) -> None:
        index, dice = indexes[number % 3], random.Random(1000 * seed + number)
        incarnation = await kit.claim(index, f"w{number}")
        held = truth[incarnation] = {}
        owners[incarnation] = index
        for version in range(1, 25):
            which = dice.randrange(len(prompts))
            prompt, now = prompts[which], held.get(which, 0)
            length = dice.choice([0, dice.randint(0, len(prompt)), len(prompt)])
            if length >= now:
                await index.write(incarnation, version, kit.writes(prompt[:length]))
                held[which] = length
            else:
                # Blocks shared with another prompt stay as long as that one is held.
                shared = max(
                    (_common(prompt, prompts[other][:n]) for other, n in held.items() if other != which), default=0
                )
                length = max(length, min(shared, now))
                await index.write(incarnation, version, kit.writes(prompt[:now], start=length, tiers=0))
                held[which] = length

    await asyncio.gather(*(writer(number) for number in range(9)))
    for prompt in prompts:
        expected = {}
        for incarnation, held in truth.items():
            depth = max(_common(prompt, prompts[which][:length]) for which, length in held.items())
            if depth:
                expected[incarnation] = depth
        for index in indexes:
            assert await kit.depths(index, prompt) == expected
    for incarnation, held in truth.items():
        blocks = {w.key: w for which, length in held.items() for w in kit.writes(prompts[which][:length])}
        assert set(await indexes[0].held(incarnation)) == set(blocks)
        # Nor is anything where placement derived anew would not look for it.
        assert await owners[incarnation].refresh(incarnation, 1000, list(blocks.values())) == 0


def _common(one: list[int], two: list[int]) -> int:
    depth = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        depth += 1
    return depth


async def test_refresh_repairs_placement_after_a_page_was_lost(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url, page_limit=4)
    index = await store.open(kit.namespace)
    one, two = await kit.claim(index, "a"), await kit.claim(index, "b")
    prompt = kit.prompt(30)
    await index.write(one, 1, kit.writes(prompt))
    with redis.Redis.from_url(redis_url) as client:
        (page,) = [key for key in client.scan_iter(b"mt:p:*") if key.endswith(kit.keys(prompt)[0])]
        client.delete(page)
    # The second writer finds the page gone and unmarked, and places blocks the first one has elsewhere.
    await index.write(two, 1, kit.writes(prompt[:4]))
    await index.write(two, 2, kit.writes(prompt))
    assert await index.refresh(one, 2, kit.writes(prompt)) > 0
    assert await kit.depths(index, prompt) == {one: 30, two: 30}
    assert await index.refresh(one, 3, kit.writes(prompt)) == 0
    assert await index.refresh(two, 3, kit.writes(prompt)) == 0
    await index.write(one, 4, kit.writes(prompt, tiers=0))
    assert await index.held(one) == {}
    assert await kit.depths(index, prompt) == {two: 30}


async def test_a_process_that_knows_nothing_can_refresh_what_overflowed(
    redis_url: str, kit: Any, connect: Any
) -> None:
    prompt = kit.prompt(30)
    store = await connect(redis_url, page_limit=4)
    index = await store.open(kit.namespace)
    one = await kit.claim(index, "a")
    await index.write(one, 1, kit.writes(prompt))
    store = await connect(redis_url, page_limit=4)
    index = await store.open(kit.namespace)
    await index.refresh(one, 2, kit.writes(prompt))
    assert await index.refresh(one, 3, kit.writes(prompt)) == 0
    assert await kit.depths(index, prompt) == {one: 30}


async def test_an_emptied_page_starts_afresh(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url, page_limit=4)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    long, short = kit.prompt(8), kit.prompt(4)
    await index.write(one, 1, kit.writes(long))
    head = b"mt:p:" + bytes.fromhex(kit.namespace.id) + b":" + kit.keys(long)[0]
    with redis.Redis.from_url(redis_url) as client:
        assert client.hexists(head, b"o")
        assert client.ttl(head) > 3600
        await index.write(one, 2, kit.writes(long, tiers=0))
        assert not client.hexists(head, b"o")
        assert 0 < client.ttl(head) <= EMPTY_PAGE_TTL_S
        await index.write(one, 3, kit.writes(short) + kit.writes(long[:4]))
        assert client.hlen(head) == 4 + 2
        assert client.ttl(head) > 3600
    assert await kit.depths(index, long) == {one: 4}


async def test_freed_places_in_a_page_are_used_again(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    keeper = await kit.claim(index, "keeper")
    prompt = kit.prompt(10)
    await index.write(keeper, 1, kit.writes(prompt))
    for turn in range(40):
        incarnation = await kit.claim(index, "guest")
        await index.write(incarnation, 1, kit.writes(prompt, tiers=1 + turn % 7))
        assert await kit.depths(index, prompt) == {keeper: 10, incarnation: 10}
        await index.write(incarnation, 2, kit.writes(prompt, tiers=0))
    with redis.Redis.from_url(redis_url) as client:
        (page,) = client.scan_iter(b"mt:p:*")
        table = client.hget(page, b"d")
    assert len(table) / 4 <= 1 + 2 * 3
    assert await kit.depths(index, prompt) == {keeper: 10}


async def test_a_removal_of_what_was_never_there_leaves_a_page_that_goes(
    redis_url: str, kit: Any, connect: Any
) -> None:
    index = await (await connect(redis_url)).open(kit.namespace)
    one = await kit.claim(index)
    await index.write(one, 1, kit.writes(kit.prompt(5), tiers=0))
    with redis.Redis.from_url(redis_url) as client:
        (page,) = client.scan_iter(b"mt:p:*")
        assert 0 < client.ttl(page) <= EMPTY_PAGE_TTL_S


async def test_the_page_set_follows_what_is_held(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    prompts = [kit.prompt(40) for _ in range(10)]
    await index.write(one, 1, [w for p in prompts for w in kit.writes(p)])
    await index.write(one, 2, [w for p in prompts[1:] for w in kit.writes(p, tiers=0)])
    await index.write(one, 3, kit.writes(prompts[0]))
    with redis.Redis.from_url(redis_url) as client:
        (page_set,) = client.scan_iter(b"mt:i:*")
        keys = kit.keys(prompts[0])
        assert {PageKeys.head_of(member) for member in client.smembers(page_set)} == {keys[0], keys[32]}
        assert client.object("encoding", page_set) == b"intset"
        assert client.ttl(page_set) > 24 * 3600
