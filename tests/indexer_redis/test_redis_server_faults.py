"""What a real server can do to us, done to us."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.proto.errors import StoreRefused, StoreUnavailable
from metatrie.proto.index import ReplicaRef, ReplicaStatus


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """A server to abuse."""
    with EmbeddedRedis() as server:
        yield server


async def _until_it_works(attempt: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                return await attempt()
            except StoreUnavailable:
                await asyncio.sleep(0.01)


async def test_scripts_the_server_forgot_are_sent_again(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    prompt = kit.prompt(300)
    with redis.Redis.from_url(redis_url) as client:
        one = await kit.claim(index)
        client.script_flush()
        await index.write(one, 1, kit.writes(prompt))
        client.script_flush()
        await index.write(one, 2, kit.writes(prompt, start=200, tiers=0))
        client.script_flush()
        assert await kit.depths(index, prompt) == {one: 200}
        client.script_flush()
        await index.renew(ReplicaRef("a"), owner="test", incarnation=one, status=ReplicaStatus(), lease_s=60)
        client.script_flush()
        await kit.claim(index)
        client.script_flush()
        assert (await index.sweep(pages=100, grace_s=60)).incarnations == 1
        assert client.exists(b"mt:{%s}:sweep" % kit.namespace.id.encode()) == 0


async def test_out_of_memory_means_not_written_and_a_repeat_loses_nothing(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    store = await connect(own_server.url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    old, new = kit.prompt(100), kit.prompt(100)
    await index.write(one, 1, kit.writes(old))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        with pytest.raises(StoreRefused, match="out of memory"):
            await index.write(one, 2, kit.writes(new))
        with pytest.raises(StoreRefused, match="out of memory"):
            await index.renew(ReplicaRef("a"), owner="test", incarnation=one, status=ReplicaStatus(), lease_s=60)
        assert await kit.depths(index, new) == {}
        assert await kit.depths(index, old) == {one: 100}
        # What frees memory is not refused.
        await index.write(one, 3, kit.writes(old, start=10, tiers=0))
        assert await kit.depths(index, old) == {one: 10}
        client.config_set("maxmemory", 0)
        await index.write(one, 4, kit.writes(new))
    assert await kit.depths(index, new) == {one: 100}
    assert len(await index.held(one)) == 110
    assert (await index.refresh(one, 5, kit.writes(new) + kit.writes(old[:10]))) == 0


async def test_an_eviction_policy_that_drops_any_key_is_refused(own_server: EmbeddedRedis, connect: Any) -> None:
    store = await connect(own_server.url)
    with redis.Redis.from_url(own_server.url) as client:
        for policy in ("allkeys-lru", "allkeys-random"):
            client.config_set("maxmemory-policy", policy)
            with pytest.raises(StoreRefused, match=rf"{policy}.*CONFIG SET maxmemory-policy noeviction"):
                await store.ping()
        for policy in ("noeviction", "volatile-ttl"):
            client.config_set("maxmemory-policy", policy)
            await store.ping()


async def test_a_user_who_may_not_ask_for_the_policy_is_served(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "metatrie", "on", ">s3cret", "~mt:*", "+@all", "-@admin")
    store = await connect(own_server.url.replace("unix://", "unix://metatrie:s3cret@"))
    await store.ping()
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    await index.write(one, 1, kit.writes(kit.prompt(3)))


async def test_wrong_credentials_are_refused_without_repeating_them(own_server: EmbeddedRedis, connect: Any) -> None:
    store = await connect(own_server.url.replace("unix://", "unix://somebody:s3cret@"))
    with pytest.raises(StoreRefused, match="credentials") as caught:
        await store.ping()
    assert "s3cret" not in repr(caught.value)


async def test_a_missing_permission_is_named(own_server: EmbeddedRedis, kit: Any, connect: Any) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", ">s3cret", "~other:*", "+@all")
    store = await connect(own_server.url.replace("unix://", "unix://reader:s3cret@"))
    index = await store.open(kit.namespace)
    with pytest.raises(StoreRefused, match="permission"):
        await index.fleet()


async def test_a_crashed_server_is_unavailable_and_usable_when_it_is_back(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    store = await connect(own_server.url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    prompt = kit.prompt(40)
    await index.write(one, 1, kit.writes(prompt))
    own_server.kill()
    for call in (
        store.ping,
        index.fleet,
        lambda: index.match(kit.chain(prompt)),
        lambda: index.write(one, 2, kit.writes(prompt)),
        lambda: index.refresh(one, 2, kit.writes(prompt)),
        lambda: index.sweep(pages=1, grace_s=1),
    ):
        with pytest.raises(StoreUnavailable):
            await call()
    own_server.start()
    match = await _until_it_works(lambda: index.match(kit.chain(prompt)))
    assert match.depths == {}
    assert match.fleet.replicas == ()
    two = await kit.claim(index)
    assert two != one
    assert await index.refresh(two, 1, kit.writes(prompt)) == 40
    assert await kit.depths(index, prompt) == {two: 40}


async def test_a_server_that_hangs_is_given_up_on(own_server: EmbeddedRedis, kit: Any, connect: Any) -> None:
    store = await connect(own_server.url, connect_timeout_s=0.2, command_timeout_s=0.2)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    prompt = kit.prompt(40)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreUnavailable):
            await index.write(one, 1, kit.writes(prompt))
        with pytest.raises(StoreUnavailable):
            await index.match(kit.chain(prompt))
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    # The first write may still have been executed, late; the newer one has the last word.
    await _until_it_works(lambda: index.write(one, 2, kit.writes(prompt, start=10, tiers=0)))
    await _until_it_works(lambda: index.write(one, 3, kit.writes(prompt[:10])))
    assert await kit.depths(index, prompt) == {one: 10}


async def test_a_demoted_primary_is_unavailable_until_it_is_promoted(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    store = await connect(own_server.url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("replica-serve-stale-data", "yes")
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match=r"(?i)readonly"):
            await index.write(one, 1, kit.writes(kit.prompt(3)))
        with pytest.raises(StoreUnavailable, match=r"(?i)readonly"):
            await kit.claim(index)
        client.execute_command("REPLICAOF", "NO", "ONE")
    await index.write(one, 2, kit.writes(kit.prompt(3)))


async def test_a_cancelled_query_leaves_no_answer_behind_for_the_next(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    prompt = kit.prompt(200)
    await index.write(one, 1, kit.writes(prompt))
    for _ in range(50):
        task = asyncio.create_task(index.match(kit.chain(prompt)))
        for _ in range(random_yields()):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await kit.depths(index, prompt) == {one: 200}


_yields = iter(range(10**6))


def random_yields() -> int:
    return next(_yields) % 25


async def test_a_registry_that_was_lost_is_noticed_by_the_next_query(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    prompt = kit.prompt(3)
    one = await kit.claim(index)
    await index.write(one, 1, kit.writes(prompt))
    assert await kit.depths(index, prompt) == {one: 3}
    with redis.Redis.from_url(redis_url) as client:
        client.delete(b"mt:{%s}:r" % kit.namespace.id.encode())
    assert await kit.depths(index, prompt) == {}
    # The counter was lost with it; time alone keeps the next one from being the same.
    with redis.Redis.from_url(redis_url) as client:
        client.hset(b"mt:{%s}:r" % kit.namespace.id.encode(), b"i", one)
    assert await kit.claim(index) > one
    assert await kit.depths(index, prompt) == {}


async def test_another_processs_restart_is_seen_by_a_reader_at_once(redis_url: str, kit: Any, connect: Any) -> None:
    stores = [await connect(redis_url) for _ in range(2)]
    writer, reader = [await store.open(kit.namespace) for store in stores]
    prompt = kit.prompt(3)
    for _ in range(20):
        one = await kit.claim(writer)
        assert await kit.depths(reader, prompt) == {}
        await writer.write(one, 1, kit.writes(prompt))
        assert await kit.depths(reader, prompt) == {one: 3}


async def test_a_sweep_in_progress_keeps_others_from_working(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    one = await kit.claim(index)
    await index.write(one, 1, kit.writes(kit.prompt(40)))
    await kit.claim(index)
    lock = b"mt:{%s}:sweep" % kit.namespace.id.encode()
    with redis.Redis.from_url(redis_url) as client:
        client.set(lock, b"somebody else", px=60_000)
        report = await index.sweep(pages=10, grace_s=60)
        assert (report.pages, report.incarnations, report.expired) == (0, 0, ())
        assert client.get(lock) == b"somebody else"
        client.delete(lock)
        assert (await index.sweep(pages=10, grace_s=60)).pages == 2
        assert client.get(lock) is None


async def test_what_a_zombie_writes_to_a_swept_page_is_refused(redis_url: str, kit: Any, connect: Any) -> None:
    store = await connect(redis_url)
    index = await store.open(kit.namespace)
    prompt = kit.prompt(5)
    old, other = await kit.claim(index, "a"), await kit.claim(index, "b")
    for incarnation in (old, other):
        await index.write(incarnation, 1, kit.writes(prompt))
    await kit.claim(index, "a")
    await index.sweep(pages=10, grace_s=60)
    await index.write(old, 2, kit.writes(prompt))
    assert await index.held(old) == {}
    assert await kit.depths(index, prompt) == {other: 5}


async def test_a_store_that_evicts_at_will_grants_no_claim(own_server: EmbeddedRedis, kit: Any, connect: Any) -> None:
    index = await (await connect(own_server.url)).open(kit.namespace)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreRefused, match="allkeys-lru"):
            await kit.claim(index)
        client.config_set("maxmemory-policy", "noeviction")
        await kit.claim(index)


@pytest.mark.parametrize("loss", ["flush", "restart", "canary"])
async def test_a_store_that_forgot_is_no_witness_any_more(
    own_server: EmbeddedRedis, kit: Any, connect: Any, loss: str
) -> None:
    index = await (await connect(own_server.url)).open(kit.namespace)
    before = await index.witness()
    if loss == "restart":
        own_server.kill()
        own_server.start()
    else:
        with redis.Redis.from_url(own_server.url) as client:
            if loss == "flush":
                client.flushall()
            else:
                assert sum(client.delete(key) for key in client.scan_iter(b"mt:c:*")) == 1
    after = await _until_it_works(index.witness)
    assert after != before
    assert await index.witness() == after


async def test_what_another_server_brought_back_is_never_claimed_again(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    """A promoted replica may lack the newest claims: their numbers must not be handed out a second time."""
    index = await (await connect(own_server.url)).open(kit.namespace)
    prompt = kit.prompt(3)
    registry = b"mt:{%s}:r" % kit.namespace.id.encode()
    await kit.claim(index, "a")
    with redis.Redis.from_url(own_server.url) as client, EmbeddedRedis(tcp=True) as replica:
        replicated = client.hgetall(registry)
        lost = [await kit.claim(index, f"r{i}") for i in range(50)]
        for incarnation in lost:
            await index.write(incarnation, 1, kit.writes(prompt))
        generation = int(client.hget(registry, b"g"))
        promoted = await (await connect(replica.url)).open(kit.namespace)
        with redis.Redis.from_url(replica.url) as other:
            other.hset(registry, mapping=replicated)
            assert await kit.claim(promoted, "b") not in lost
            assert int(other.hget(registry, b"g")) > generation
            second = await kit.claim(promoted, "c")
            assert second == int(other.hget(registry, b"i"))
            assert second - int(replicated[b"i"]) < 70_000


async def test_a_user_who_may_not_ask_for_the_history_still_has_a_witness(
    own_server: EmbeddedRedis, kit: Any, connect: Any
) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.execute_command("ACL", "SETUSER", "metatrie", "on", ">s3cret", "~mt:*", "+@all", "-info", "-config")
    index = await (await connect(own_server.url.replace("unix://", "unix://metatrie:s3cret@"))).open(kit.namespace)
    before = await index.witness()
    await kit.claim(index)
    assert await index.witness() == before
    with redis.Redis.from_url(own_server.url) as client:
        client.flushall()
    assert await index.witness() != before
