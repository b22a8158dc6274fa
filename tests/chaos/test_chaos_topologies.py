"""A Sentinel failover that loses writes and brings removed ones back; a cluster that loses a shard and moves slots.

Real redis-server processes, and a real fleet on top of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.scripts.chaos import VOCABULARY, World, WorldConfig

Measured = Callable[..., None]


async def eventually(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """A server that changes its role drops its clients, which is no answer."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(redis.ConnectionError):
            if condition():
                return
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


@asynccontextmanager
async def fleet_on(url: str) -> AsyncIterator[World]:
    async with World(WorldConfig(engines=2, redis=url), seed=11) as world:
        await world.busy(40)
        await world.settled()
        yield world


async def known(world: World) -> list[int]:
    """A prompt the first engine has just served, and the router knows of."""
    prompt = [world.rng.randrange(VOCABULARY) for _ in range(10 * 16)]
    await world.serve(world.engines[0], prompt)

    async def matched() -> bool:
        return await world.depth("engine-0", prompt) == 10

    await world.until(matched, "a served prompt is matched")
    return prompt


async def doubts(world: World) -> float:
    return sum([await world.metric(sidecar, "metatrie_writer_doubts_total") for sidecar in world.sidecars])


# Sentinel


class Watched:
    """A primary, a replica of it, and the sentinel that fails over between them."""

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.primary = stack.enter_context(EmbeddedRedis(tcp=True))
        self.replica = stack.enter_context(EmbeddedRedis(tcp=True, options=["--repl-diskless-sync-delay", "0"]))
        self.to_primary = stack.enter_context(redis.Redis.from_url(self.primary.url))
        self.to_replica = stack.enter_context(redis.Redis.from_url(self.replica.url))
        self.to_replica.execute_command("REPLICAOF", "127.0.0.1", self.primary.port)
        config = directory / "sentinel.conf"
        config.write_text(
            f"sentinel monitor fleet 127.0.0.1 {self.primary.port} 1\n"
            "sentinel down-after-milliseconds fleet 1000\nsentinel failover-timeout fleet 3000\n"
        )
        self.sentinel = stack.enter_context(EmbeddedRedis(tcp=True, config=config, options=["--sentinel"]))
        self.watch = stack.enter_context(redis.Redis.from_url(self.sentinel.url))

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/fleet"

    def in_step(self) -> bool:
        """The replica has everything, and the sentinel knows of it."""
        link = self.to_replica.info("replication")["master_link_status"] == "up"
        return link and int(self.watch.sentinel_master("fleet")["num-slaves"]) == 1

    def offset(self, client: Any) -> int:
        return int(client.info("replication")["master_repl_offset"])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with ExitStack() as stack:
        yield Watched(stack, tmp_path)


async def test_a_failover_that_loses_writes_and_returns_removals(watched: Watched, measured: Measured) -> None:
    await eventually(watched.in_step, "the replica is in step")
    async with fleet_on(watched.url) as world:
        removed = await known(world)
        await eventually(
            lambda: watched.offset(watched.to_replica) == watched.offset(watched.to_primary),
            "everything is replicated",
        )
        # From here on the replica misses what the primary acknowledges: new blocks, and a whole cleared cache.
        os.kill(watched.replica.pid, signal.SIGSTOP)
        await world.clear(world.engines[0])
        lost = await known(world)
        await world.settled()
        assert await world.depth("engine-0", removed) == 0
        before = await doubts(world)
        watched.primary.kill()
        os.kill(watched.replica.pid, signal.SIGCONT)
        killed = time.monotonic()
        await eventually(lambda: watched.to_replica.info("replication")["role"] == "master", "the replica took over")
        promoted = time.monotonic()

        async def noticed() -> bool:
            return await doubts(world) > before

        await world.until(noticed, "a sidecar noticed")
        detect = time.monotonic() - promoted
        await world.settled()
        assert (await world.depth("engine-0", removed), await world.depth("engine-0", lost)) == (0, 10)
        measured(
            "Sentinel failover that loses writes and returns removals",
            injected="the replica stopped while the primary acknowledges writes and a clear; then the primary killed",
            asserted=f"another replication id: all is published anew. Sentinel itself took {promoted - killed:.1f} s",
            detect=detect,
            converge=time.monotonic() - promoted,
        )


# Cluster


class Cluster:
    """Two primaries, half of the slots each."""

    def __init__(self, stack: ExitStack) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
        self.servers = [stack.enter_context(EmbeddedRedis(tcp=True, options=options)) for _ in range(2)]
        self.clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in self.servers]
        for client, slots in zip(self.clients, (range(8192), range(8192, 16384)), strict=True):
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
        self.clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[1].port)

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.servers[0].port}"

    def formed(self) -> bool:
        try:
            infos = [client.execute_command("CLUSTER INFO") for client in self.clients]
        except redis.RedisError:
            return False
        return all(i["cluster_state"] == "ok" and i["cluster_known_nodes"] == "2" for i in infos)

    def move_slots(self, slots: range) -> int:
        """Reshard from the first to the second, data and all, as redis-cli does. Returns how many keys moved."""
        source, target = self.clients
        ids = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        moved = 0
        for slot in slots:
            target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            while keys := source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                port = self.servers[1].port
                source.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "REPLACE", "KEYS", *keys)
                moved += len(keys)
            for client in (target, source):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        return moved


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


async def test_a_cluster_loses_a_shard_and_moves_slots(cluster: Cluster, measured: Measured) -> None:
    await eventually(cluster.formed, "the cluster formed")
    async with fleet_on(cluster.url) as world:
        prompt = await known(world)
        before = await doubts(world)
        cluster.servers[1].kill()
        killed = time.monotonic()

        async def flagged() -> bool:
            return bool((await world.match(prompt))["index"] == "unavailable")

        await world.until(flagged, "the router answers, and says that the index is away")
        detect = time.monotonic() - killed
        await world.busy(3)
        cluster.servers[1].start()  # its slots, without its data
        started = time.monotonic()
        await eventually(cluster.formed, "the cluster formed again")
        await world.settled()
        assert await doubts(world) > before
        measured(
            "Cluster loses one shard's data",
            injected="kill -9 of one of two primaries, restarted empty",
            asserted="the canary of that shard is gone: everything is published anew",
            detect=detect,
            converge=time.monotonic() - started,
        )

        # Once more under traffic: slots move, and with them pages, page sets and registries.
        traffic = asyncio.create_task(world.busy(60))
        started = time.monotonic()
        moved = await asyncio.to_thread(cluster.move_slots, range(4096))
        await traffic
        await world.settled()
        assert moved > 0
        measured(
            "Cluster resharded",
            injected=f"4096 slots and {moved} keys moved to the other primary, requests meanwhile",
            asserted="redirections are followed; in the end all is equal",
            converge=time.monotonic() - started,
        )
