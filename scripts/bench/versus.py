"""One run, same events, same queries: `metatrie serve` beside a peer's standalone indexer, when there is one.

Both follow the same publishers and are asked the same prompts in turn, so a ratio holds on a noisy machine; ingest
runs one after the other. The client is the standard library's, over one kept-alive connection. The peer is Dynamo's
standalone indexer (`ai-dynamo-runtime`, in an environment of its own).

A ratio is peer ÷ metatrie for times and metatrie ÷ peer for throughput: above 1 metatrie is ahead.
"""

from __future__ import annotations

import http.client
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ...proto.errors import MetatrieError
from ...proto.hashing import Chain, none_hash
from .measure import BLOCK_SIZE, Curve, Figure, encode, family, processor_us, prompt, quantile, stored, waiting_us

MODEL = "bench"
WORKERS = 8
_START_S = 60.0
_VISIBLE_S = 120.0
_PASSES = 5
_WARM_UP = 5
"""Queries of a pass that are not counted."""
_LAGS = 500
"""Of a hundred, the worst one alone would be p99."""
_ROOT = none_hash("0")


class NotVisible(MetatrieError):
    """What was published never showed, or an answer was wrong."""


class _Publisher:
    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(0)
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    def send(self, payload: bytes) -> None:
        self._socket.send_multipart((b"", self._seq.to_bytes(8, "big"), payload))
        self._seq += 1

    def store(self, tokens: Sequence[int]) -> None:
        self.send(_payload(tokens))


def _payload(tokens: Sequence[int]) -> bytes:
    keys = Chain(_ROOT, BLOCK_SIZE, tokens).keys(len(tokens) // BLOCK_SIZE)
    return encode([time.time(), [stored(tokens, keys, None)], 0])


class _Server:
    """One server process and a connection to it."""

    name = ""

    def __init__(self, argv: Sequence[str], port: int, log: Path) -> None:
        with log.open("wb") as out:
            self._process = subprocess.Popen(argv, stdout=out, stderr=out, stdin=subprocess.DEVNULL)  # noqa: S603 -- ours
        deadline = time.monotonic() + _START_S
        while True:
            self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            try:
                self._connection.connect()
                return
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.close()
                    said = log.read_text("utf-8", "replace")[-500:]
                    raise NotVisible(f"{argv[0]} did not start: {said}") from None
                time.sleep(0.05)

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._connection.request(method, path, body, {"content-type": "application/json"})
        response = self._connection.getresponse()
        raw = response.read()
        if response.status >= 300:
            raise NotVisible(f"{self.name} answered {response.status} to {method} {path.partition('?')[0]}")
        return raw

    def resident(self) -> int:
        """Bytes of memory of the process and its descendants."""
        page = os.sysconf("SC_PAGE_SIZE")
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in family(self._process.pid))

    def processor_us(self) -> float:
        """Processor time of all their threads so far: unlike latency, much the same on a busy machine."""
        return processor_us(self._process.pid)

    def waiting_us(self) -> float:
        """How long they were ready to run and had no processor: what the machine's other work costs."""
        return waiting_us(self._process.pid)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def follow(self, worker: int, endpoint: str) -> None:
        raise NotImplementedError

    def forget(self, worker: int) -> None:
        raise NotImplementedError

    def body(self, tokens: Sequence[int]) -> bytes:
        raise NotImplementedError

    def ask(self, body: bytes) -> bytes:
        raise NotImplementedError

    def depths(self, raw: bytes) -> dict[int, int]:
        """Worker → blocks, those that hold any."""
        raise NotImplementedError


class _Metatrie(_Server):
    name = "metatrie"

    def follow(self, worker: int, endpoint: str) -> None:
        registration = {
            "replica": f"r{worker}",
            "engine": "vllm",
            "model": MODEL,
            "block_size": BLOCK_SIZE,
            "events": endpoint,
        }
        self.call("POST", "/v1/replicas", msgspec.json.encode(registration))

    def forget(self, worker: int) -> None:
        self.call("DELETE", f"/v1/replicas/r{worker}?model={MODEL}")

    def body(self, tokens: Sequence[int]) -> bytes:
        return msgspec.json.encode({"model": MODEL, "token_ids": tokens, "limit": 256})

    def ask(self, body: bytes) -> bytes:
        return self.call("POST", "/v1/match", body)

    def depths(self, raw: bytes) -> dict[int, int]:
        found = msgspec.json.decode(raw)["replicas"]
        return {int(r["replica"][1:]): r["matched_blocks"] for r in found if r["matched_blocks"]}


class _Peer(_Server):
    name = "peer"

    def _instance(self, worker: int, **more: Any) -> bytes:
        return msgspec.json.encode({"instance_id": worker, "model_name": MODEL, **more})

    def follow(self, worker: int, endpoint: str) -> None:
        self.call("POST", "/register", self._instance(worker, endpoint=endpoint, block_size=BLOCK_SIZE))

    def forget(self, worker: int) -> None:
        self.call("POST", "/unregister", self._instance(worker))

    def body(self, tokens: Sequence[int]) -> bytes:
        return msgspec.json.encode({"model_name": MODEL, "token_ids": tokens})

    def ask(self, body: bytes) -> bytes:
        return self.call("POST", "/query", body)

    def depths(self, raw: bytes) -> dict[int, int]:
        scores = msgspec.json.decode(raw)["scores"]
        return {int(worker): max(ranks.values()) // BLOCK_SIZE for worker, ranks in scores.items()}


def side_by_side(
    rng: random.Random, *, redis_url: str | None, peer_python: str | None, queries: int, batches: int
) -> list[Figure]:
    """Queries, publish to visible, ingest and memory. redis_url None: the index in memory. Run it in a thread.

    Queries are asked in _PASSES passes over all modes. A median, and a processor time, is the least of the passes,
    for each server its own, since what else runs on the machine only adds to it; p99 is that of all queries.
    """
    where = "memory" if redis_url is None else "Redis"
    least = 1.0 if redis_url is None else 0.7
    with _servers(redis_url, peer_python) as (servers, publishers):
        figures = []
        for server in servers:
            _follow_all(server, publishers)
        for depth in (32, 512, 2048):
            base = prompt(rng, depth)
            for publisher in publishers:
                publisher.store(base)
            for server in servers:
                _until_held(server, base, WORKERS, depth)
            rounds = max(20, (queries if depth <= 512 else queries // 3) // _PASSES)
            passes: dict[str, list[_Pass]] = {"repeat": [], "new tail": [], "cold": []}
            for _ in range(_PASSES):
                for mode, done in passes.items():
                    held = {"repeat": depth, "new tail": depth - 4, "cold": 0}[mode]
                    done.append(_ask_in_turn(servers, base[: held * BLOCK_SIZE], depth, rounds, rng))
            for mode, done in passes.items():
                figures += _rows(f"{where}: match {depth} blocks, {mode}", done, f"≥ {least}")
        lags = _lags(servers, publishers, rng)
        target = "≥ 1" if redis_url is None else "≥ 0.5"
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            values = {name: quantile(lag, share) for name, lag in lags.items()}
            figures += _compared(f"{where}: publish to visible, {label}", "event", values, target)
        rates, memory, used = _ingest(servers, publishers, rng, batches)
        figures += _compared(f"{where}: ingest, processor time", "block", used, "")
        figures += [Figure(f"{where}: ingest, {name}", "s", rate, "blocks") for name, rate in rates.items()]
        if "peer" in rates:
            ratio = rates["metatrie"] / rates["peer"]
            figures.append(Figure(f"{where}: ingest, ratio", "", ratio, "×", "≥ 1" if redis_url is None else ""))
        figures += [Figure(f"{where}: memory, {name}", "entry", size, "bytes") for name, size in memory.items()]
        return figures


class _Pass(msgspec.Struct):
    """What the servers took in one pass, each by its name."""

    times: dict[str, list[float]]
    """µs per query."""
    used: dict[str, float]
    """µs of processor time per query."""
    waited: dict[str, float]
    """µs per query without a processor."""


def _ask_in_turn(
    servers: Sequence[_Server], prefix: Sequence[int], depth: int, rounds: int, rng: random.Random
) -> _Pass:
    """Ask every server the same prompts of `depth` blocks: this prefix, and something new each time."""
    held = len(prefix) // BLOCK_SIZE
    times: dict[str, list[float]] = {server.name: [] for server in servers}
    used = {server.name: -server.processor_us() for server in servers}
    waited = {server.name: -server.waiting_us() for server in servers}
    for i in range(rounds):
        tokens = [*prefix, *prompt(rng, depth - held)]
        for server in servers if i % 2 else servers[::-1]:
            body = server.body(tokens)
            started = time.perf_counter()
            raw = server.ask(body)
            took = time.perf_counter() - started
            if server.depths(raw) != (dict.fromkeys(range(WORKERS), held) if held else {}):
                raise NotVisible(f"{server.name} answered wrongly ({held} of {depth} blocks)")
            if i >= _WARM_UP:
                times[server.name].append(took * 1e6)
    for server in servers:
        used[server.name] = (used[server.name] + server.processor_us()) / rounds
        waited[server.name] = (waited[server.name] + server.waiting_us()) / rounds
    return _Pass(times, used, waited)


def _rows(what: str, passes: Sequence[_Pass], target: str) -> list[Figure]:
    names = list(passes[0].times)
    figures = _compared(
        f"{what}, processor time", "query", {name: min(p.used[name] for p in passes) for name in names}, ""
    )
    for name in names:
        waited = sum(p.waited[name] for p in passes) / len(passes)
        figures.append(Figure(f"{what}, without a processor while ready to run, {name}", "query", waited))
    medians = {name: min(quantile(p.times[name], 0.5) for p in passes) for name in names}
    worst = {name: quantile([took for p in passes for took in p.times[name]], 0.99) for name in names}
    return [
        *figures,
        *_compared(f"{what}, p50", "query", medians, target),
        *_compared(f"{what}, p99", "query", worst, ""),
    ]


def ingest_by_engines(rng: random.Random, *, batches: int) -> Curve:
    """Ingest of one process, by the number of engines it follows."""
    points: list[tuple[float, float]] = []
    for engines in (1, 8, 32, 128):
        with _servers(None, None, engines) as (servers, publishers):
            rates, _, _ = _ingest(servers, publishers, rng, batches)
            points.append((engines, rates["metatrie"]))
    series = {"in memory": points}
    return Curve("ingest-by-engines", "Ingest of one process, by engines followed", "engines", "blocks/s", series)


@contextmanager
def _servers(
    redis_url: str | None, peer_python: str | None, publishers: int = WORKERS
) -> Iterator[tuple[list[_Server], list[_Publisher]]]:
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metatrie-")))
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        port = _free_port()
        argv = [sys.executable, "-m", "metatrie", "serve", "--port", str(port), "--log-level", "warning"]
        argv += [] if redis_url is None else ["--redis", redis_url]
        servers: list[_Server] = [_Metatrie(argv, port, logs / "metatrie")]
        stack.callback(servers[0].close)
        if peer_python is not None:
            port = _free_port()
            argv = [peer_python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "2"]
            servers.append(_Peer(argv, port, logs / "peer"))
            stack.callback(servers[1].close)
        yield servers, [_Publisher(context) for _ in range(publishers)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _follow_all(server: _Server, publishers: Sequence[_Publisher]) -> None:
    for worker, publisher in enumerate(publishers):
        server.follow(worker, publisher.endpoint)
    # A subscription shows by what arrives through it: publish until every worker's probe is seen.
    deadline = time.monotonic() + _VISIBLE_S
    probe = list(range(BLOCK_SIZE))
    body = server.body(probe)
    while len(server.depths(server.ask(body))) < len(publishers):
        if time.monotonic() > deadline:
            raise NotVisible(f"{server.name} does not see every publisher")
        for publisher in publishers:
            publisher.store(probe)
        time.sleep(0.05)


def _until_held(server: _Server, tokens: Sequence[int], workers: int, blocks: int) -> None:
    body, deadline = server.body(tokens), time.monotonic() + _VISIBLE_S
    while list(server.depths(server.ask(body)).values()) != [blocks] * workers:
        if time.monotonic() > deadline:
            raise NotVisible(f"{server.name} does not see what was published")
        time.sleep(0.01)


def _lags(servers: Sequence[_Server], publishers: Sequence[_Publisher], rng: random.Random) -> dict[str, list[float]]:
    lags: dict[str, list[float]] = {server.name: [] for server in servers}
    for i in range(_LAGS):
        for server in servers:
            tokens = prompt(rng, 32)
            body, payload = server.body(tokens[:BLOCK_SIZE]), _payload(tokens)
            started = time.perf_counter()
            publishers[i % len(publishers)].send(payload)
            while not server.depths(server.ask(body)):
                if time.perf_counter() - started > _VISIBLE_S:
                    raise NotVisible(f"{server.name} does not see what was published")
            lags[server.name].append((time.perf_counter() - started) * 1e6)
    return lags


def _ingest(
    servers: Sequence[_Server], publishers: Sequence[_Publisher], rng: random.Random, batches: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Blocks per second, bytes per entry and processor time per block of each server, each following all publishers
    alone."""
    depth, workers = 32, len(publishers)
    prompts = [prompt(rng, depth) for _ in range(batches)]
    payloads = [_payload(tokens) for tokens in prompts]
    rates: dict[str, float] = {}
    memory: dict[str, float] = {}
    used: dict[str, float] = {}
    for server in servers:
        for other in servers:
            for worker in range(workers):
                if other is not server or not rates:
                    _quietly_forget(other, worker)
        _follow_all(server, publishers)
        resident, processor, started = server.resident(), server.processor_us(), time.perf_counter()
        for i, payload in enumerate(payloads):
            publishers[i % workers].send(payload)
        for tokens in prompts[-workers:]:
            body = server.body(tokens)
            while not server.depths(server.ask(body)):
                if time.perf_counter() - started > _VISIBLE_S:
                    raise NotVisible(f"{server.name} does not see what was published")
                time.sleep(0.005)
        used[server.name] = (server.processor_us() - processor) / (batches * depth)
        rates[server.name] = batches * depth / (time.perf_counter() - started)
        missed = sum(not server.depths(server.ask(server.body(tokens))) for tokens in prompts[::50])
        if missed:
            raise NotVisible(f"{server.name} lost {missed} of {len(prompts[::50])} sampled batches")
        memory[server.name] = (server.resident() - resident) / (batches * depth)
        for worker in range(workers):
            _quietly_forget(server, worker)
    return rates, memory, used


def _quietly_forget(server: _Server, worker: int) -> None:
    try:
        server.forget(worker)
    except NotVisible:
        return  # it was not followed


def _compared(what: str, per: str, values: dict[str, float], target: str) -> list[Figure]:
    figures = [Figure(f"{what}, {name}", per, value) for name, value in values.items()]
    if "peer" in values:
        figures.append(Figure(f"{what}, ratio", "", values["peer"] / values["metatrie"], "×", target))
    return figures
