"""The data path's own connections: what they share, and what becomes of calls when they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.indexer.redis_store import RedisStore
from metatrie.proto.errors import StoreRefused, StoreUnavailable
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.index import PAGE_SPAN, BlockWrite, Match, PageHead, ReplicaRef, ReplicaSpec, TierMask
from redis.asyncio import Redis

NAMESPACE = Namespace(model="m", block_size=1)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def admin(server: EmbeddedRedis) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(server: EmbeddedRedis) -> AsyncIterator[RedisStore]:
    opened = await open_store(server.url, command_timeout_s=0.5)
    assert isinstance(opened, RedisStore)
    yield opened
    await opened.close()


def writes(chain: Chain) -> list[BlockWrite]:
    keys = chain.keys(chain.blocks)
    return [
        BlockWrite(key, keys[i - 1] if i else None, PageHead(keys[i - i % PAGE_SPAN]), i, TierMask(1))
        for i, key in enumerate(keys)
    ]


def prompt(start: int, blocks: int = 100) -> Chain:
    return Chain(NAMESPACE.root, 1, list(range(start, start + blocks)))


async def depths(index: Any, chain: Chain) -> list[int]:
    return [depth.blocks for depth in (await index.match(chain)).depths.values()]


async def claimed(store: RedisStore) -> tuple[Any, Any]:
    index = await store.open(NAMESPACE)
    claim = await index.claim(ReplicaSpec(ref=ReplicaRef("r"), engine="vllm"), owner="me", lease_s=60, activate=True)
    return index, claim.incarnation


async def test_many_callers_share_a_connection_and_get_their_own_answers(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    lengths = list(range(1, 200))
    for i, length in enumerate(lengths):
        await index.write(incarnation, i + 1, writes(prompt(1000 * i, length)))
    asked = await asyncio.gather(*(depths(index, prompt(1000 * i, 300)) for i in range(len(lengths))))
    assert asked == [[length] for length in lengths]
    assert len(await admin.client_list()) < 10


async def test_scripts_the_server_forgot_are_sent_again(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    await admin.script_flush()
    await index.write(incarnation, 1, writes(prompt(0)))
    assert await depths(index, prompt(0)) == [100]


async def test_a_connection_that_was_killed_is_opened_again(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0)))
    assert await depths(index, prompt(0)) == [100]
    await admin.client_kill_filter(_type="normal", skipme=True)
    answers = []
    while not answers or answers[-1] != [100]:
        assert len(answers) < 5
        try:
            answers.append(await depths(index, prompt(0)))
        except StoreUnavailable:
            answers.append([])
    await index.write(incarnation, 2, writes(prompt(500)))
    assert await depths(index, prompt(500)) == [100]


async def test_a_server_that_stalls_fails_every_call_in_time_and_no_later_one(
    store: RedisStore, admin: Redis
) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0)))
    assert await depths(index, prompt(0)) == [100]
    await admin.client_pause(1200)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(depths(index, prompt(0)) for _ in range(5)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {StoreUnavailable}
        while True:
            try:
                assert await depths(index, prompt(0)) == [100]
                break
            except StoreUnavailable:
                continue


async def test_a_call_given_up_does_not_shift_the_answers_of_others(store: RedisStore) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0, 10)) + writes(prompt(1000, 20)))
    for _ in range(50):
        given_up = asyncio.create_task(depths(index, prompt(0, 10)))
        kept = asyncio.create_task(depths(index, prompt(1000, 20)))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await kept == [20]
    assert await depths(index, prompt(0, 10)) == [10]


async def test_refusals_say_what_was_refused(server: EmbeddedRedis, admin: Redis) -> None:
    await admin.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~mt:*", "+@all", "-hmget")
    host = server.url.removeprefix("unix://")
    store = await open_store(f"unix://reader:pw@{host}")
    try:
        index = await store.open(NAMESPACE)
        with pytest.raises(StoreRefused, match="permission"):
            await index.match(prompt(0))
    finally:
        await store.close()


async def quickly(index: Any, chain: Chain) -> list[int]:
    """`depths`, as the router asks: without a task where that goes."""
    soon = index.match_quickly(chain)
    if soon is None:
        return await depths(index, chain)
    brought = asyncio.Event()
    soon.when(lambda _: brought.set())
    async with asyncio.timeout(10):
        await brought.wait()
    made = soon.result()
    match = made if isinstance(made, Match) else await made
    return [depth.blocks for depth in match.depths.values()]


async def test_quick_matches_share_the_connection_with_others(store: RedisStore) -> None:
    index, incarnation = await claimed(store)
    lengths = list(range(1, 100))
    for i, length in enumerate(lengths):
        await index.write(incarnation, i + 1, writes(prompt(1000 * i, length)))
    for _ in range(2):  # what the first round saw decides what the second reads
        asked = [f(index, prompt(1000 * i, 300)) for i in range(len(lengths)) for f in (depths, quickly)]
        assert await asyncio.gather(*asked) == [[length] for length in lengths for _ in range(2)]


async def test_a_conversation_that_goes_on_inside_a_page_takes_one_question(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0, 30)))
    assert await quickly(index, prompt(0, 30)) == [30]
    before = (await admin.info("commandstats"))["cmdstat_hmget"]["calls"]
    # The end of the first page is not known to be held, its head is.
    assert await quickly(index, prompt(0, 40)) == [30]
    assert (await admin.info("commandstats"))["cmdstat_hmget"]["calls"] == before + 2


async def test_a_quick_match_survives_scripts_the_server_forgot(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0)))
    other = await store.open(Namespace(model="other"))
    await other.match(prompt(0))  # opens the connection
    await admin.script_flush()
    assert await quickly(index, prompt(0)) == [100]


async def test_a_quick_match_fails_with_its_connection(store: RedisStore, admin: Redis) -> None:
    index, incarnation = await claimed(store)
    await index.write(incarnation, 1, writes(prompt(0)))
    assert await quickly(index, prompt(0)) == [100]
    await admin.client_pause(1200)
    answers = await asyncio.gather(*(quickly(index, prompt(0)) for _ in range(5)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {StoreUnavailable}
    while True:
        try:
            assert await quickly(index, prompt(0)) == [100]
            break
        except StoreUnavailable:
            continue


async def test_a_cancellation_is_never_lost(store: RedisStore) -> None:
    """Whenever it comes. redis-py alone swallows some that come together with what it waits for."""
    index = await store.open(NAMESPACE)
    cancelled = 0
    for turns in range(600):
        task = asyncio.create_task([store.namespaces, index.fleet, index.witness][turns % 3]())
        for _ in range(turns // 3 % 20):
            await asyncio.sleep(0)
        if task.cancel():
            await asyncio.wait([task])
            assert task.cancelled()
            cancelled += 1
        else:
            await task
    assert cancelled > 100
