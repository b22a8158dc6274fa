"""More machines' worth: a cluster of three beside a single server, and router processes that share a port."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial

import msgspec
import redis

from ...indexer.connect import open_store
from ...indexer.embedded import EmbeddedRedis
from ...proto.hashing import BlockKey, Chain, Namespace
from .layouts import register
from .measure import BLOCK_SIZE, Figure, median_us_async, processor_us, prompt

_NODES = 3
_SLOTS = 16_384
_FORM_S = 30.0
_CLIENTS = 4
_LOAD_S = 3.0
_MODEL = "scale"


async def scale(rng: random.Random) -> list[Figure]:
    """Queries of 512 blocks held by 8 replicas."""
    with ExitStack() as stack:
        single = stack.enter_context(EmbeddedRedis(tcp=True))
        figures = []
        took = {}
        cluster = await asyncio.to_thread(_cluster, stack)
        for name, url in (("a single server", single.url), (f"a cluster of {_NODES}", cluster)):
            took[name] = await _query(url, rng)
            figures.append(Figure(f"match 512 blocks, {name}", "query", took[name]))
        ratio = took[f"a cluster of {_NODES}"] / took["a single server"]
        figures.append(Figure("cluster ÷ single server", "", ratio, "×", "≤ 1.5"))
        body = msgspec.json.encode({"model": _MODEL, "token_ids": prompt(rng, 32)})
        for workers in (1, 2):
            rate, used = await asyncio.to_thread(_throughput, single.url, workers, body)
            what = f"router --workers {workers}, {_CLIENTS} clients, 32 blocks"
            figures.append(Figure(what, "s", rate, "queries"))
            figures.append(Figure(f"{what}: processor time of the router", "query", used))
            figures.append(Figure(f"{what}: processors the router used", "", rate * used / 1e6, ""))
        return figures


def _cluster(stack: ExitStack) -> str:
    """Start a cluster; its URL."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "5000"]
    servers = [stack.enter_context(EmbeddedRedis(tcp=True, options=options)) for _ in range(_NODES)]
    clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in servers]
    for i, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTS", *range(_SLOTS * i // _NODES, _SLOTS * (i + 1) // _NODES))
    for server in servers[1:]:
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)
    deadline = time.monotonic() + _FORM_S
    while True:
        infos = [client.execute_command("CLUSTER INFO") for client in clients]
        if all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == str(_NODES) for info in infos):
            return f"redis+cluster://127.0.0.1:{servers[0].port}"
        if time.monotonic() > deadline:
            raise TimeoutError("the cluster did not form")
        time.sleep(0.05)


async def _query(url: str, rng: random.Random) -> float:
    store = await open_store(url)
    try:
        index = await store.open(Namespace(model=_MODEL))
        pages = await register(index, 8)
        asked = prompt(rng, 512)
        keys: list[BlockKey] = Chain(index.namespace.root, BLOCK_SIZE, asked).keys(512)
        for replica in range(8):
            await pages.write(replica, keys, 0, 512)

        async def query() -> None:
            await index.match(Chain(index.namespace.root, BLOCK_SIZE, asked))

        return await median_us_async(query, 200)
    finally:
        await store.close()


def _throughput(url: str, workers: int, body: bytes) -> tuple[float, float]:
    """Queries per second, and the router's processor time per query."""
    argv = [sys.executable, "-m", "metatrie", "router", "--redis", url, "--port", "0", "--workers", str(workers)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)  # noqa: S603 -- ours
    assert process.stdout is not None
    try:
        port = int(msgspec.json.decode(process.stdout.readline())["url"].rpartition(":")[2])
        with multiprocessing.get_context("spawn").Pool(_CLIENTS) as pool:
            before = processor_us(process.pid)
            queries = sum(pool.map(partial(_ask_on, port), [body] * _CLIENTS))
            return queries / _LOAD_S, (processor_us(process.pid) - before) / queries
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        process.stdout.close()


def _ask_on(port: int, body: bytes) -> int:
    """Queries one client gets answered in _LOAD_S, over one connection. It does next to nothing besides, so that the
    machine is the router's."""
    request = (
        b"POST /v1/match HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    done, asked = 0, request % len(body) + body
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        deadline = time.monotonic() + _LOAD_S
        while time.monotonic() < deadline:
            connection.sendall(asked)
            answer = connection.recv(1 << 16)
            head, _, rest = answer.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise ConnectionError("the router did not answer as expected")
            missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(rest)
            while missing > 0:
                missing -= len(connection.recv(missing))
            done += 1
    return done
