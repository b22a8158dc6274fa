"""`metatrie chaos`: a real fleet, real faults, and the proof that the index is right again afterwards.

A `World` is what a deployment is: engines, sidecars, routers and Redis, each a process of its own, with every link
between them through a `Wire` of ours that can be cut, held, slowed, or made to lose single ZeroMQ messages. The tests
in tests/chaos inject one fault each into such a world and measure; `rampage` injects a random, seeded sequence of all
of them under traffic, and then asks the audit whether index, inventories and engines are equal.

The seed determines the world's names, every prompt, and which fault hits whom when. What it cannot determine is how
the operating system interleaves the processes, so a seed reproduces the plan, not the nanoseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import aiohttp
import click
import msgspec
import redis
from rich.console import Console

from ..indexer.connect import open_store
from ..indexer.embedded import EmbeddedRedis
from ..proto.errors import MetatrieError, StoreError
from ..proto.index import Store
from .audit import ReplicaAudit, audit
from .cli import common_options, run_process, until
from .stack import Child

SETTLE_S: Final = 60.0
"""How long a world may take to be right again."""
POLL_S: Final = 0.02
VOCABULARY: Final = 256
"""Token ids every simulated engine knows."""
GREETING_BYTES: Final = 64
"""Of ZMTP 3: what both sides send before the first frame."""


class NotRight(MetatrieError):
    """The world did not become right again in time; the text says what is wrong."""


# Links


class Wire:
    """A TCP link to `target` that faults can be injected into. Connect to `port` instead."""

    def __init__(self, target: tuple[str, int] | str, *, zeromq: bool) -> None:
        """target: host and port, or the path of a unix socket. zeromq: understand messages, to lose whole ones."""
        self._target = target
        self._zeromq = zeromq
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self.port = 0
        self.down = False
        """New connections are closed at once."""
        self.loses: Callable[[], bool] | None = None
        """Asked for every message towards the client; True loses it."""
        self.slow_s = 0.0
        """Pause per message, or per chunk where messages are not understood."""
        self.lost = 0
        self.passed = 0
        """Messages, towards the client."""

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Drop every connection and refuse new ones, until `heal`."""
        self.down = True
        for writer in list(self._writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Let nothing through, with every connection standing, until `heal`."""
        self._flows.clear()

    def heal(self) -> None:
        """As if nothing had been done to it. What was lost stays lost."""
        self.down, self.loses, self.slow_s = False, None, 0.0
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.down:
            writer.transport.abort()
            return
        try:
            if isinstance(self._target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self._target)
            else:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        towards_client = self._messages if self._zeromq else self._bytes
        for pump in (self._bytes(reader, far_writer), towards_client(far_reader, writer)):
            task = asyncio.create_task(self._until_closed(pump, ends))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _until_closed(self, pump: Awaitable[None], ends: set[asyncio.StreamWriter]) -> None:
        """Either direction's end ends both."""
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await pump
        finally:
            self._writers -= ends
            for writer in ends:
                writer.transport.abort()

    async def _bytes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            await self._forward(writer, chunk)

    async def _messages(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = GREETING_BYTES
        while left:  # in steps: each side waits for parts of the other's
            chunk = await reader.read(left)
            if not chunk:
                return
            left -= len(chunk)
            await self._forward(writer, chunk)
        while True:
            parts: list[bytes] = []
            more = True
            while more:
                flags = (await reader.readexactly(1))[0]
                length = await reader.readexactly(8 if flags & 2 else 1)
                parts += (bytes((flags,)), length, await reader.readexactly(int.from_bytes(length, "big")))
                more = bool(flags & 1)
            if not flags & 4:  # no command of the protocol itself
                if self.loses is not None and self.loses():
                    self.lost += 1
                    continue
                self.passed += 1
            await self._forward(writer, b"".join(parts))

    async def _forward(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        await self._flows.wait()
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if writer.is_closing():  # uvloop does not take it from there
            raise ConnectionResetError
        writer.write(data)
        await writer.drain()


def lose(count: int) -> Callable[[], bool]:
    """Lose the next `count` messages."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def lose_share(share: float, rng: random.Random) -> Callable[[], bool]:
    """Lose each message with this probability."""
    return lambda: rng.random() < share


def free_port() -> int:
    """A loopback port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# The world


class WorldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes. Leases and intervals are short, so that what takes half a minute in production takes seconds here."""

    engines: int = 2
    sidecars: int = 1
    """Per engine; all but one of them stand by."""
    model: str = "chaos"
    block_size: int = 16
    num_blocks: int = 257
    """Small, so that engines evict all the time."""
    max_model_len: int = 2048
    buffer_steps: int = 10_000
    replay: bool = True
    lease_s: float = 2.0
    refresh_s: float = 2.0
    sample_s: float = 1.0
    checkpoints: bool = True
    sweep_interval_s: float = 1.0
    sweep_grace_s: float = 1.0
    redis: str | None = None
    """Use this store instead of starting a server; then no fault of the server can be injected."""
    engine_options: tuple[str, ...] = ()


class Engine:
    """One simulated engine worker on fixed ports, and the wires its events leave by."""

    def __init__(self, name: str, config: WorldConfig, logs: Path) -> None:
        http, events, replay = free_port(), free_port(), free_port()
        self.name = name
        self.url = f"http://127.0.0.1:{http}"
        self.events = Wire(("127.0.0.1", events), zeromq=True)
        self.replay = Wire(("127.0.0.1", replay), zeromq=True) if config.replay else None
        argv = [
            *("engine", "--port", str(http), "--model", config.model, "--time-scale", "0"),
            *("--block-size", str(config.block_size), "--num-blocks", str(config.num_blocks)),
            *("--max-model-len", str(config.max_model_len), "--buffer-steps", str(config.buffer_steps)),
            *("--events", f"tcp://*:{events}", *config.engine_options),
        ]
        if config.replay:
            argv += ["--replay", f"tcp://127.0.0.1:{replay}"]
        self.process = Child(name, argv, logs / f"{name}.log")

    @property
    def wires(self) -> list[Wire]:
        return [self.events, *([self.replay] if self.replay is not None else [])]

    async def restart(self) -> None:
        """Kill -9, and a new process on the same endpoints: sequence numbers begin at 0."""
        await self.process.kill()
        await self.process.start()


class Source(Protocol):
    """Whose events a sidecar follows."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def events(self) -> Wire: ...

    @property
    def replay(self) -> Wire | None: ...


class Sidecar:
    """One sidecar process of one engine."""

    def __init__(self, name: str, engine: Source, config: WorldConfig, redis_url: str, directory: Path) -> None:
        self.engine = engine
        self.url = ""
        argv = [
            *("sidecar", "--redis", redis_url, "--port", "0", "--model", config.model, "--replica", engine.name),
            *("--block-size", str(config.block_size)),
            *("--events", f"tcp://127.0.0.1:{engine.events.port}"),
            *("--lease-s", str(config.lease_s), "--refresh-s", str(config.refresh_s)),
            *("--sample-s", str(config.sample_s), "--replay-timeout-s", "1", "--probe-s", "1"),
        ]
        if engine.url:
            argv += ["--url", engine.url]
        if engine.replay is not None:
            argv += ["--replay", f"tcp://127.0.0.1:{engine.replay.port}"]
        self.checkpoints = directory / f"{name}-checkpoints"
        if config.checkpoints:
            argv += ["--checkpoint-dir", str(self.checkpoints)]
        self.process = Child(name, argv, directory / f"{name}.log")

    async def start(self) -> None:
        self.url = (await self.process.start())["url"]


class World:
    """A fleet under test; an async context manager. `rng` decides its prompts."""

    def __init__(self, config: WorldConfig, seed: int = 0) -> None:
        self.config = config
        self.rng = random.Random(seed)
        self.engines: list[Engine] = []
        self.sidecars: list[Sidecar] = []
        self.router: Child
        self.router_url = ""
        self.redis: EmbeddedRedis | None = None
        self.redis_wire: Wire | None = None
        """Between Redis and everybody else, this process's own audit excepted."""
        self.store: Store
        self.session: aiohttp.ClientSession
        self._stack = contextlib.AsyncExitStack()
        size = config.block_size
        self._families = [
            [self.rng.randrange(VOCABULARY) for _ in range(size * self.rng.randint(4, 24))] for _ in range(8)
        ]

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        stack, config = self._stack, self.config
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metatrie-chaos-")))
        self.directory = directory
        self.session = await stack.enter_async_context(aiohttp.ClientSession())
        store_url = config.redis
        if store_url is None:
            self.redis = stack.enter_context(EmbeddedRedis(tcp=True))
            self.redis_wire = await Wire(("127.0.0.1", self.redis.port), zeromq=False).start()
            stack.push_async_callback(self.redis_wire.stop)
            store_url = f"redis://127.0.0.1:{self.redis_wire.port}/0"
        self.store_url = store_url
        self.store = await open_store(self.redis.url if self.redis is not None else store_url)
        stack.push_async_callback(self.store.close)
        for i in range(config.engines):
            engine = Engine(f"engine-{i}", config, directory)
            for wire in engine.wires:
                await wire.start()
                stack.push_async_callback(wire.stop)
            self.engines.append(engine)
            for j in range(config.sidecars):
                name = f"sidecar-{i}" + (f"-{j}" if j else "")
                self.sidecars.append(self.make_sidecar(name, engine))
        self.router = Child(
            "router",
            [
                *("router", "--redis", store_url, "--port", str(free_port())),
                *("--sweep-interval-s", str(config.sweep_interval_s)),
                *("--sweep-grace-s", str(config.sweep_grace_s)),
            ],
            directory / "router.log",
        )
        for process in self.processes:
            stack.push_async_callback(process.stop)
        await asyncio.gather(*(engine.process.start() for engine in self.engines))
        first = [s for i, s in enumerate(self.sidecars) if i % config.sidecars == 0]
        await asyncio.gather(self.start_router(), *(sidecar.start() for sidecar in first))
        await self.until(lambda: self._registered(len(first)), "every engine is registered")
        await asyncio.gather(*(s.start() for s in self.sidecars if s not in first))

    def make_sidecar(self, name: str, engine: Source) -> Sidecar:
        """A sidecar to be started; one that is not among `sidecars` is the caller's to stop."""
        return Sidecar(name, engine, self.config, self.store_url, self.directory)

    @property
    def processes(self) -> list[Child]:
        return [
            *(engine.process for engine in self.engines),
            *(sidecar.process for sidecar in self.sidecars),
            self.router,
        ]

    async def start_router(self) -> None:
        self.router_url = (await self.router.start())["url"]

    async def _registered(self, count: int) -> bool:
        return bool(sum(r["state"] == "exact" for r in await self.replicas()) == count)

    # Traffic

    def prompt(self, rng: random.Random | None = None) -> list[int]:
        """Token ids: often a prefix others have too, then something new."""
        rng = rng or self.rng
        family = rng.choice(self._families)
        size = self.config.block_size
        kept = rng.randint(0, len(family) // size) * size
        return family[:kept] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6 * size))]

    async def serve(self, engine: Engine, prompt: Sequence[int], *, output_tokens: int = 1) -> int:
        """Have one engine serve a prompt; returns how many of its tokens were cached. Raises aiohttp.ClientError."""
        body = {"model": self.config.model, "prompt": list(prompt), "max_tokens": output_tokens}
        async with self.session.post(f"{engine.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            usage = (await response.json())["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def clear(self, engine: Engine) -> None:
        """Reset an engine's prefix cache, and have it publish so, which it does with its next request."""
        async with self.session.post(f"{engine.url}/reset_prefix_cache") as response:
            response.raise_for_status()
        await self.serve(engine, [7] * 8)

    async def busy(self, requests: int = 20) -> None:
        """Let every engine serve some prompts."""
        for _ in range(requests):
            await asyncio.gather(*(self.serve(engine, self.prompt()) for engine in self.engines))

    # Questions

    async def replicas(self) -> list[dict[str, Any]]:
        """What the router says of every replica; empty while it cannot be asked."""
        try:
            async with self.session.get(f"{self.router_url}/v1/replicas") as response:
                listed: list[dict[str, Any]] = (await response.json())["replicas"] if response.status == 200 else []
                return listed
        except (aiohttp.ClientError, OSError):
            return []

    async def state(self, name: str) -> tuple[str, str]:
        """(state, cause) of one replica, by the router."""
        for replica in await self.replicas():
            if replica["replica"] == name:
                return str(replica["state"]), str(replica["cause"])
        return "absent", ""

    async def match(self, prompt: Sequence[int]) -> dict[str, Any]:
        """The router's answer for a prompt. Raises aiohttp.ClientError if it gives none."""
        body = {"model": self.config.model, "token_ids": list(prompt)}
        async with self.session.post(f"{self.router_url}/v1/match", json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    async def depth(self, name: str, prompt: Sequence[int]) -> int:
        """Blocks of a prompt a replica holds, by the router; -1 if it is not listed."""
        for replica in (await self.match(prompt))["replicas"]:
            if replica["replica"] == name:
                return int(replica["matched_blocks"])
        return -1

    async def inventory(self, sidecar: Sidecar) -> dict[str, Any]:
        """The first page of a sidecar's inventory: where it is, and what it waits for."""
        async with self.session.get(f"{sidecar.url}/v1/inventory", params={"limit": "1"}) as response:
            response.raise_for_status()
            page: dict[str, Any] = await response.json()
            return page

    async def metric(self, sidecar: Sidecar, name: str) -> float:
        """One of a sidecar's metrics, summed over its series."""
        async with self.session.get(f"{sidecar.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        values = [float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == name]
        return sum(values)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float = SETTLE_S) -> float:
        """Wait for a condition; returns how long that took. Raises NotRight after `seconds`."""
        started = time.monotonic()
        while not await condition():
            if time.monotonic() - started > seconds:
                raise NotRight(f"not within {seconds:.0f} s: {what}; the router says {await self.replicas()}")
            await asyncio.sleep(POLL_S)
        return time.monotonic() - started

    async def audit(self) -> list[ReplicaAudit]:
        """Index, inventories and engines, compared."""
        urls = {s.engine.name: s.url for s in self.sidecars} if self.config.sidecars == 1 else {}
        return await audit(self.store, self.session, sidecars=urls)

    async def right(self, *, state: str = "exact") -> bool:
        """Every replica is in this state, and nothing is missing, stale or misplaced anywhere."""
        replicas = await self.replicas()
        if [r["state"] for r in replicas] != [state] * len(self.engines):
            return False
        try:
            audits = await self.audit()
        except StoreError:
            return False
        return len(audits) == len(self.engines) and all(
            one.complete and not one.wrong and one.engine_missing is not None for one in audits
        )

    async def settled(self, *, state: str = "exact", seconds: float = SETTLE_S) -> float:
        """Wait until all is right; returns how long that took. Raises NotRight, with what is wrong."""
        try:
            return await self.until(lambda: self.right(state=state), "index, inventories and engines agree", seconds)
        except NotRight as error:
            logs = "\n".join(f"{child.name}: {child.log_text()[-1500:]}" for child in self.processes)
            raise NotRight(f"{error}; the audit says {await self.audit()}\n{logs}") from None

    def memory(self) -> dict[str, int]:
        """Resident bytes by process name; Linux only, empty elsewhere."""
        pids = {child.name: child.pid for child in self.processes if child.running}
        if self.redis is not None:
            pids["redis"] = self.redis.pid
        return {name: size for name, pid in pids.items() if (size := resident(pid))}

    @staticmethod
    def memory_of(process: Child) -> int:
        """Resident bytes of one process; 0 where the system does not tell."""
        return resident(process.pid)


def resident(pid: int) -> int:
    """Resident bytes of a process, from /proc; 0 where there is none."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


# Random faults


class Strike(msgspec.Struct, frozen=True):
    """One fault of a plan."""

    at_s: float
    fault: str
    target: int
    """Which engine, where the fault has one."""
    for_s: float
    """How long it lasts, where it does."""


FAULTS: Final[dict[str, int]] = {
    "restart engine": 3,
    "clear engine": 3,
    "stall engine": 2,
    "kill sidecar": 4,
    "kill sidecar and its checkpoint": 1,
    "stop sidecar": 3,
    "restart Redis empty": 2,
    "flush Redis": 2,
    "cut Redis": 2,
    "hold Redis": 2,
    "fill Redis": 1,
    "delete pages": 2,
    "cut events": 4,
    "lose events": 6,
    "lose events and some of their replay": 3,
    "slow events": 2,
    "kill router": 2,
}
"""Fault → how often, relative to the others."""


def plan(seed: int, seconds: float, engines: int) -> list[Strike]:
    """The faults of one run, in order. Nothing but the arguments decides it."""
    rng = random.Random(seed)
    names, weights = list(FAULTS), list(FAULTS.values())
    strikes: list[Strike] = []
    at = rng.uniform(0.5, 1.5)
    while at < seconds:
        strikes.append(
            Strike(at, rng.choices(names, weights)[0], rng.randrange(engines), round(rng.uniform(0.2, 5.0), 2))
        )
        at += rng.uniform(0.3, 3.0)
    return strikes


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a rampage left behind."""

    seed: int
    seconds: float
    strikes: int
    by_fault: dict[str, int]
    requests: int
    lookups: int
    """Questions to the router during the run."""
    unanswered: dict[str, int]
    """Of those, questions it did not answer, by how: an HTTP status, or the kind of failure of the connection."""
    flagged: int
    """Of the others, answers that said that the index was away, or a replica not exact."""
    events_lost: int
    """Messages dropped on purpose."""
    settled_s: float
    """From the last fault's end until index, inventories and engines were equal."""
    blocks: int
    """Compared in the end, over all engines."""
    wrong: int
    """Of those, missing, stale or misplaced anywhere."""
    redis_keys: int
    memory_start: dict[str, int]
    memory_end: dict[str, int]
    """Resident bytes by process."""


async def rampage(
    seed: int, seconds: float, config: WorldConfig | None = None, *, say: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Strike a fresh world for so long, under traffic; then let it settle, and compare. Raises NotRight."""
    config = config or WorldConfig(engines=3)
    strikes = plan(seed, seconds, config.engines)
    counts, unanswered = {"requests": 0, "lookups": 0, "flagged": 0}, Tally[str]()
    async with World(config, seed) as world:
        await world.busy(30)
        await world.settled()
        start = world.memory()
        rngs = [random.Random(f"{seed}/{i}") for i in range(config.engines + 1)]
        traffic = [
            asyncio.create_task(_traffic(world, engine, rng, counts))
            for engine, rng in zip(world.engines, rngs, strict=False)
        ]
        traffic.append(asyncio.create_task(_questions(world, rngs[-1], counts, unanswered)))
        began = time.monotonic()
        running: list[asyncio.Task[None]] = []
        locks = {name: asyncio.Lock() for name in ("redis", "router", *(str(i) for i in range(config.engines)))}
        try:
            for strike in strikes:
                await asyncio.sleep(max(0.0, began + strike.at_s - time.monotonic()))
                say(f"{strike.at_s:7.1f} s  {strike.fault}, engine {strike.target}, {strike.for_s} s")
                running.append(asyncio.create_task(_strike(world, strike, locks)))
            await asyncio.gather(*running)
        finally:
            for task in [*traffic, *running]:
                task.cancel()
            await asyncio.gather(*traffic, return_exceptions=True)
        elapsed = time.monotonic() - began
        # Its ring may have moved on without anybody to tell; one more step of each engine ends every doubt.
        await world.busy(2)
        settled_s = await world.settled(seconds=2 * SETTLE_S)
        audits = await world.audit()
        keys = sum(1 for _ in _redis(world).scan_iter(b"mt:*", count=1000))
        return Outcome(
            seed=seed,
            seconds=round(elapsed, 1),
            strikes=len(strikes),
            by_fault={name: n for name in FAULTS if (n := sum(s.fault == name for s in strikes))},
            **counts,
            unanswered=dict(unanswered),
            events_lost=sum(wire.lost for engine in world.engines for wire in engine.wires),
            settled_s=round(settled_s, 2),
            blocks=sum(one.engine or 0 for one in audits),
            wrong=sum(one.wrong for one in audits),
            redis_keys=keys,
            memory_start=start,
            memory_end=world.memory(),
        )


async def _traffic(world: World, engine: Engine, rng: random.Random, counts: dict[str, int]) -> None:
    while True:
        try:
            async with asyncio.timeout(10):
                await world.serve(engine, world.prompt(rng), output_tokens=rng.choice((1, 1, 20)))
            counts["requests"] += 1
            await asyncio.sleep(rng.uniform(0, 0.05))
        except (aiohttp.ClientError, OSError, TimeoutError):
            await asyncio.sleep(0.1)


async def _questions(world: World, rng: random.Random, counts: dict[str, int], unanswered: Tally[str]) -> None:
    """A client of the router: it must always get an answer, flagged where it cannot be a good one."""
    while True:
        counts["lookups"] += 1
        try:
            async with asyncio.timeout(10):
                answer = await world.match(world.prompt(rng))
            counts["flagged"] += answer["index"] != "ok" or any(r["state"] != "exact" for r in answer["replicas"])
        except aiohttp.ClientResponseError as error:
            unanswered[str(error.status)] += 1
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            unanswered[type(error).__name__] += 1
        await asyncio.sleep(0.05)


async def _strike(world: World, strike: Strike, locks: dict[str, asyncio.Lock]) -> None:
    """Inject one fault, keep it up, and take it away. Faults of one kind of target take turns."""
    engine, sidecar = world.engines[strike.target], world.sidecars[strike.target]
    whose = str(strike.target)
    if "Redis" in strike.fault or strike.fault == "delete pages":
        whose = "redis"
    elif "router" in strike.fault:
        whose = "router"
    async with locks[whose]:
        match strike.fault:
            case "restart engine":
                await engine.restart()
            case "clear engine":
                with contextlib.suppress(aiohttp.ClientError):
                    await world.clear(engine)
            case "stall engine":
                await _stopped(engine.process, strike.for_s)
            case "kill sidecar":
                await sidecar.process.kill()
                await sidecar.start()
            case "kill sidecar and its checkpoint":
                await sidecar.process.kill()
                shutil.rmtree(sidecar.checkpoints, ignore_errors=True)
                await sidecar.start()
            case "stop sidecar":
                await _stopped(sidecar.process, strike.for_s)
            case "kill router":
                await world.router.kill()
                await world.start_router()
            case "cut events" | "lose events" | "lose events and some of their replay" | "slow events":
                await _bad_link(engine, strike)
            case _:
                await _bad_redis(world, strike)


async def _stopped(process: Child, seconds: float) -> None:
    process.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        process.signal(signal.SIGCONT)


async def _bad_link(engine: Engine, strike: Strike) -> None:
    rng = random.Random(strike.at_s)
    try:
        match strike.fault:
            case "cut events":
                engine.events.cut()
            case "slow events":
                engine.events.slow_s = 0.02
            case _:
                engine.events.loses = lose_share(0.3, rng)
        if engine.replay is not None and strike.fault == "lose events and some of their replay":
            engine.replay.loses = lose(1)
        await asyncio.sleep(strike.for_s)
    finally:
        for wire in engine.wires:
            wire.heal()


async def _bad_redis(world: World, strike: Strike) -> None:
    assert world.redis is not None
    assert world.redis_wire is not None
    match strike.fault:
        case "restart Redis empty":
            world.redis.kill()
            await asyncio.sleep(strike.for_s / 2)
            await asyncio.to_thread(world.redis.start)
        case "cut Redis" | "hold Redis":
            (world.redis_wire.cut if strike.fault == "cut Redis" else world.redis_wire.hold)()
            try:
                await asyncio.sleep(strike.for_s)
            finally:
                world.redis_wire.heal()
        case "flush Redis":
            _redis(world).flushall()
        case "fill Redis":
            _redis(world).config_set("maxmemory", "1mb")
            try:
                await asyncio.sleep(strike.for_s)
            finally:
                _redis(world).config_set("maxmemory", "0")
        case "delete pages":
            client = _redis(world)
            if pages := sorted(client.scan_iter(b"mt:p:*", count=1000)):
                client.delete(*random.Random(strike.at_s).sample(pages, (len(pages) + 1) // 2))


def _redis(world: World) -> redis.Redis:
    assert world.redis is not None
    return redis.Redis.from_url(world.redis.url)


# Command


@click.command("chaos")
@common_options
@click.option("--seed", type=int, default=None, help="Decides prompts and faults; by default a new one, printed.")
@click.option("--seconds", type=click.FloatRange(1, 86_400), default=300.0, help="How long to inject faults.")
@click.option("--engines", type=click.IntRange(1, 16), default=3, help="Simulated engines, each with a sidecar.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON on standard output.")
def command(log_level: str, seed: int | None, seconds: float, engines: int, as_json: bool) -> None:
    """Strike a private fleet with random faults under traffic, and compare index and engines afterwards.

    Starts everything itself, on this machine. Exits with 1 if anything is wrong in the end.
    """
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    console = Console(stderr=as_json)
    outcome: list[Outcome] = []

    async def run(stop: asyncio.Event) -> None:
        console.print(f"seed {seed}")
        config = WorldConfig(engines=engines)
        found = await until(
            stop, rampage(seed, seconds, config, say=lambda line: console.print(line, highlight=False))
        )
        if found is not None:
            outcome.append(found)

    run_process(log_level, run)
    for one in outcome:
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(one)).decode())
        else:
            console.print_json(data=msgspec.to_builtins(one))
        if one.wrong:
            raise SystemExit(1)
