"""`metatrie replay`: a recording into a consumer, an index, or a live ZeroMQ endpoint, as it was or with faults.

Strategy. Recorded entries pass through `Wire`s, one per replica, which stand for the engine process and the way to
its subscribers: they keep the ring an engine keeps for replay, and lose, repeat, swap and delay live messages as a
seeded generator says. What comes out is fed to the consumer's own parts (`Timeline`), or sent over real sockets
(`Endpoint`). The same seed gives the same faults, whatever the speed.

Without faults a recording is taken as complete: a hole in it is a loss. With faults, lost batches can be asked for
again from the ring, as from an engine, and at the end the connection is renewed once, so that a lost tail is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import msgspec
import zmq
import zmq.asyncio
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..consumers.recording import Damage, Entry, Frame, Mark, Recording, Source, open_recording
from ..consumers.stream import END_MARKER
from ..consumers.writer import IndexWriter
from ..indexer.connect import open_store
from ..proto.api import PromptRequest
from ..proto.errors import ConfigError, NotFound, StoreUnavailable
from ..proto.events import EngineHash
from ..proto.hashing import BlockKey, Chain
from ..proto.index import Incarnation, Index, ReplicaRef, ReplicaSpec, ReplicaStatus, Store, TierMask
from .cli import common_options, report_console, run_process, say_ready, until
from .diagnosis import Verdict, extras_of, judge
from .explain import Prompts, capture_options, show_verdicts
from .timeline import (
    END,
    Difference,
    Happening,
    Holdings,
    Point,
    ReplicaPast,
    Timeline,
    differences,
    fingerprint,
    history,
    of_replica,
    up_to,
)

DEFAULT_RING: Final = 10_000
"""vLLM's own default."""
MAX_PENDING: Final = 50_000
"""Block states an index target may lag behind before reading pauses."""
STALLED_S: Final = 30.0
"""An index that acknowledges nothing for so long has failed."""
SUBSCRIBER_S: Final = 30.0
YIELD_EVERY: Final = 256
"""Entries between two turns of the event loop, at full speed."""
FIRST_LINES: Final = 20
"""Keys of each kind a difference lists for people; --json has all."""


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong between engine and consumer. Probabilities are per batch."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """A batch arrives after the one that follows it."""
    delay_s: float = 0.0
    """Each batch arrives up to this much later, in order."""
    restart: int | None = None
    """After so many batches every engine starts over: what it published comes again, from number 0 on."""
    seed: int = 0
    ring: int = DEFAULT_RING
    """Batches the engine keeps for replay; 0: it has no replay socket."""

    @property
    def any(self) -> bool:
        return bool(self.drop or self.duplicate or self.reorder or self.delay_s or self.restart is not None)


NO_FAULTS: Final = Faults()


class Wire:
    """One engine process, and the way its live messages take."""

    def __init__(self, faults: Faults, seed: str) -> None:
        self._faults = faults
        self._rng = random.Random(seed)
        self.ring: deque[Frame] = deque(maxlen=max(1, faults.ring))
        self._under_way: deque[tuple[int, Entry]] = deque()
        self._held_back: Entry | None = None

    def send(self, entry: Entry) -> list[Entry]:
        """The engine publishes a batch; returns what arrives at that moment."""
        assert isinstance(entry.record, Frame)
        faults, rng, now = self._faults, self._rng, entry.record.at
        self.ring.append(entry.record)
        arrived = self._due(now)
        # Every draw is made for every batch, so that one fault does not change when another strikes.
        dropped, doubled, swapped = rng.random(), rng.random(), rng.random()
        late = int(rng.random() * faults.delay_s * 1e9)
        if dropped >= faults.drop:
            copies = [entry, entry] if doubled < faults.duplicate else [entry]
            if swapped < faults.reorder and self._held_back is None:
                self._held_back = copies.pop()
            elif self._held_back is not None:
                copies.append(self._held_back)
                self._held_back = None
            if faults.delay_s:
                due = max(now + late, self._under_way[-1][0] if self._under_way else 0)
                self._under_way += [(due, copy) for copy in copies]
                arrived += self._due(now)
            else:
                arrived += copies
        return arrived

    def rest(self) -> list[Entry]:
        """What is still under way arrives."""
        arrived = [entry for _, entry in self._under_way]
        if self._held_back is not None:
            arrived.append(self._held_back)
        self._under_way.clear()
        self._held_back = None
        return arrived

    def die(self) -> None:
        """The process ends: its ring is gone, and so is what was under way."""
        self.ring.clear()
        self.rest()

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """What the engine's replay socket sends."""
        if self._faults.ring:
            for frame in list(self.ring):
                if frame.seq >= start:
                    yield frame.seq, frame.payload

    def _due(self, now: int) -> list[Entry]:
        due = []
        while self._under_way and self._under_way[0][0] <= now:
            due.append(self._under_way.popleft()[1])
        return due


class Wires:
    """Every replica's wire, and what arrives of a recording that passes through them."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self._wires: dict[Source, Wire] = {}

    def of(self, source: Source) -> Wire:
        wire = self._wires.get(source)
        if wire is None:
            wire = self._wires[source] = Wire(self.faults, f"{self.faults.seed} {source.ref}")
        return wire

    def arriving(self, recording: Recording, point: Point, replica: str | None) -> Iterator[tuple[Entry, int]]:
        """What arrives, in order, each with the bytes of the recording read so far."""
        frames = 0
        if self.faults.restart is not None:
            for entry, done in _upto(recording, point, replica):
                if frames == self.faults.restart:
                    break
                frames += isinstance(entry.record, Frame)
                yield from ((arrived, done) for arrived in self._pass(entry))
            for source in list(self._wires):
                for arrived in self._pass(Entry(0, source, Mark(0, 0, "restarted"))):
                    yield arrived, 0
        done = 0
        for entry, done in _upto(recording, point, replica):
            yield from ((arrived, done) for arrived in self._pass(entry))
        for wire in self._wires.values():
            yield from ((entry, done) for entry in wire.rest())

    def _pass(self, entry: Entry) -> list[Entry]:
        match entry.record:
            case Frame():
                return self.of(entry.source).send(entry)
            case Mark(what="restarted"):
                self.of(entry.source).die()
        return [entry]


def _upto(recording: Recording, point: Point, replica: str | None) -> Iterator[tuple[Entry, int]]:
    read = 0

    def entries() -> Iterator[Entry]:
        nonlocal read
        for entry, so_far in recording.with_progress():
            read = so_far
            yield entry

    for entry in up_to(of_replica(entries(), replica), point):
        yield entry, read


class Pace:
    """Waits so that entries come as they came, `speed` times as fast; 0: as fast as possible."""

    def __init__(
        self,
        speed: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._speed, self._clock, self._sleep = speed, clock, sleep
        self._first: int | None = None
        self._started = 0.0
        self._count = 0

    async def wait(self, at: int) -> None:
        """Until the moment recorded as `at`, nanoseconds since 1970."""
        if not self._speed:
            self._count += 1
            if not self._count % YIELD_EVERY:
                await self._sleep(0)
            return
        if self._first is None:
            self._first, self._started = at, self._clock()
        due = self._started + max(0, at - self._first) / 1e9 / self._speed
        await self._sleep(max(0.0, due - self._clock()))


# ---- targets ------------------------------------------------------------------------------------------------------


class IndexFeed:
    """Writes what replayed consumers hold into a store, as a sidecar would."""

    def __init__(self, store: Store, *, lease_s: float = 60.0) -> None:
        self._store, self._lease_s = store, lease_s
        self._writers: dict[Source, tuple[Index, IndexWriter, asyncio.Task[None]]] = {}

    async def take(self, past: ReplicaPast) -> IndexWriter:
        """The writer of one replica, started when it is first asked for."""
        found = self._writers.get(past.source)
        if found is None:
            source = past.source
            index = await self._store.open(source.namespace)
            spec = ReplicaSpec(ref=source.ref, engine=source.engine, events=source.events or None)
            writer = IndexWriter(
                index,
                spec,
                past.inventory,
                owner=f"replay-{random.randbytes(8).hex()}",
                status=lambda: ReplicaStatus(
                    state=past.state,
                    cause=past.cause,
                    blocks=past.inventory.index_blocks,
                    detached=past.inventory.detached,
                ),
                synced=lambda: True,
                lease_s=self._lease_s,
            )
            found = self._writers[source] = (index, writer, asyncio.create_task(writer.run()))
        return found[1]

    async def settle(self, most: int = 0) -> None:
        """Wait until at most `most` block states are unacknowledged. Raises StoreUnavailable when nothing moves."""
        for _, writer, task in self._writers.values():
            seen, deadline = (-1, -1), time.monotonic() + STALLED_S
            while writer.pending > most or (not most and not writer.idle):
                if task.done():
                    task.result()
                if (now := (writer.stats.written, writer.stats.claims)) != seen:
                    seen, deadline = now, time.monotonic() + STALLED_S
                elif time.monotonic() > deadline:
                    raise StoreUnavailable(f"the store acknowledged nothing for {STALLED_S:.0f} s")
                await asyncio.sleep(0.001)

    async def held(self, source: Source) -> dict[BlockKey, TierMask]:
        """What the store holds now under this replay's incarnation."""
        index, writer, _ = self._writers[source]
        assert writer.claim is not None, "a settled writer has a claim"
        return await index.held(writer.claim.incarnation)

    async def close(self) -> None:
        """Deregister, so that the replayed blocks stop counting."""
        for _, writer, task in self._writers.values():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await writer.release()


class Endpoint:
    """An engine's two sockets, served from a recording: PUB, and ROUTER for replay."""

    def __init__(self, events: str, replay: str | None, wire: Wire) -> None:
        self.events, self.replay = events, replay
        self._wire = wire
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._serving: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Bind. Raises ConfigError if an endpoint cannot be bound."""
        self._pub: zmq.asyncio.Socket = self._context.socket(zmq.XPUB)
        self._pub.setsockopt(zmq.LINGER, 5000)
        self._pub.setsockopt(zmq.SNDHWM, 0)
        self.events = _bind(self._pub, self.events)
        if self.replay is not None:
            self._router: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.SNDHWM, 0)
            self.replay = _bind(self._router, self.replay)
            self._serving = asyncio.create_task(self._serve())

    async def subscriber(self) -> bool:
        """Wait until somebody subscribes; False if nobody does within SUBSCRIBER_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SUBSCRIBER_S):
                while (await self._pub.recv())[:1] != b"\x01":
                    pass
                return True
        return False

    async def send(self, frame: Frame) -> None:
        await self._pub.send_multipart([frame.topic, frame.seq.to_bytes(8, "big"), frame.payload])

    async def restart(self) -> None:
        """The process is replaced by another one on the same addresses."""
        await self.close()
        self._context = zmq.asyncio.Context()
        self.open()
        await self.subscriber()

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._router.close(0)
        self._pub.close()
        # Waits until what was sent has left, in another thread since it blocks.
        await asyncio.to_thread(self._context.term)

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3:
                continue
            peer, _, start = frames
            for seq, payload in self._wire.replay(int.from_bytes(start, "big")):
                await self._router.send_multipart([peer, b"", seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([peer, b"", END_MARKER.to_bytes(8, "big"), b""])


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError("into", f"{endpoint} cannot be bound ({error.strerror})", "choose another one") from None
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


# ---- replaying ----------------------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one replica stood when the replay ended."""

    replica: str
    model: str
    state: str
    cause: str
    batches: int
    blocks: int
    """Index blocks attached."""
    detached: int
    next_seq: int
    restarts: int
    lost_batches: int
    fingerprint: str
    """Equal for equal pictures: SHA-256 over keys and tiers in key order."""
    index_fingerprint: str | None = None
    """The same of what the store holds, for an index target."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay did."""

    replicas: list[Outcome]
    seconds: float
    cpu_seconds: float
    """Processor time of this process in that time."""
    batches: int
    block_events: int
    block_events_per_second: float
    damage: list[Damage]


async def replay(
    recording: Recording,
    *,
    store: Store | None = None,
    faults: Faults = NO_FAULTS,
    speed: float = 0.0,
    point: Point = END,
    replica: str | None = None,
    progress: Progress | None = None,
) -> Replayed:
    """Feed a recording to consumers, and what they hold into a store if one is given.

    speed: as `Pace` takes it. Raises StoreUnavailable if the store stops taking blocks.
    """
    wires, pace = Wires(faults), Pace(speed)
    asks = faults.any and faults.ring > 0
    timeline = Timeline(replay=(lambda source: wires.of(source).replay) if asks else None)
    feed = None if store is None else IndexFeed(store)
    task = None if progress is None else progress.add_task("replaying", total=recording.size)
    started, cpu = time.perf_counter(), time.process_time()
    try:
        for entry, done in wires.arriving(recording, point, replica):
            await pace.wait(entry.record.at)
            past, changes = timeline.feed(entry)
            if feed is not None:
                writer = await feed.take(past)
                for change in changes:
                    writer.submit(change.delta, None)
                if writer.pending > MAX_PENDING:
                    await feed.settle(MAX_PENDING // 2)
            if progress is not None and task is not None:
                progress.update(task, completed=done)
        for past in timeline.replicas if asks else ():
            changes = past.reconnect()
            if feed is not None:
                writer = await feed.take(past)
                for change in changes:
                    writer.submit(change.delta, None)
        indexed: dict[Source, str] = {}
        if feed is not None:
            await feed.settle()
            indexed = {past.source: fingerprint(await feed.held(past.source)) for past in timeline.replicas}
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        if feed is not None:
            await feed.close()
    if progress is not None and task is not None:
        progress.update(task, completed=recording.size)
    events = sum(past.blocks for past in timeline.replicas)
    return Replayed(
        replicas=[_outcome(past, indexed.get(past.source)) for past in timeline.replicas],
        seconds=seconds,
        cpu_seconds=cpu,
        batches=sum(past.batches for past in timeline.replicas),
        block_events=events,
        block_events_per_second=events / seconds,
        damage=recording.damage,
    )


def _outcome(past: ReplicaPast, indexed: str | None) -> Outcome:
    inventory, stream = past.inventory, past.stream
    return Outcome(
        replica=str(past.source.ref),
        model=past.source.namespace.model,
        state=past.state,
        cause=past.cause,
        batches=past.batches,
        blocks=inventory.index_blocks,
        detached=inventory.detached,
        next_seq=stream.expected,
        restarts=past.life,
        lost_batches=stream.stats.gap_batches,
        fingerprint=fingerprint(inventory.expected()),
        index_fingerprint=indexed,
    )


async def publish(
    recording: Recording,
    *,
    events: str,
    replay_endpoint: str | None,
    faults: Faults = NO_FAULTS,
    speed: float = 1.0,
    point: Point = END,
    replica: str | None = None,
    hold: asyncio.Event | None = None,
) -> int:
    """Serve a recording of one replica as a live engine would; returns how many messages were sent.

    Waits for a subscriber first. hold: stay, and answer replay requests, until it is set.
    Raises ConfigError if the recording has several replicas and none is picked.
    """
    wires = Wires(msgspec.structs.replace(faults, ring=faults.ring if replay_endpoint else 0))
    pace, sent = Pace(speed), 0
    endpoint: Endpoint | None = None
    source: Source | None = None
    try:
        for entry, _ in wires.arriving(recording, point, replica):
            if endpoint is None:
                source = entry.source
                endpoint = Endpoint(events, replay_endpoint, wires.of(source))
                endpoint.open()
                say_ready("replay", events=endpoint.events, replay=endpoint.replay)
                if not await endpoint.subscriber():
                    raise ConfigError("into", "nobody subscribed", "connect a consumer to the events endpoint")
            if entry.source != source:
                raise ConfigError("replica", "is not set", "several were recorded; an endpoint is of one")
            await pace.wait(entry.record.at)
            match entry.record:
                case Frame() as frame:
                    await endpoint.send(frame)
                    sent += 1
                case Mark(what="restarted"):
                    await endpoint.restart()
        if hold is not None:
            await hold.wait()
        return sent
    finally:
        if endpoint is not None:
            await endpoint.close()


# ---- time travel --------------------------------------------------------------------------------------------------


def query(
    recording: Recording, point: Point, replica: str | None, request: PromptRequest, tokens: Sequence[int]
) -> list[Verdict]:
    """What a prompt would have found on each replica at that moment, deepest first."""
    verdicts = []
    for past in Timeline.at(recording, point, replica).replicas:
        namespace = past.source.namespace
        if namespace.model != request.model:
            continue
        chain = Chain(namespace.root, namespace.block_size, tokens, extras_of(request), lookahead=namespace.lookahead)
        keys = chain.keys(chain.blocks)
        verdicts.append(judge(keys, len(tokens), past.evidence(keys)))
    if not verdicts:
        raise NotFound("no replica of this model was heard of by then", field="model")
    return sorted(verdicts, key=lambda v: (-v.matched_blocks, v.replica))


async def holdings(where: str, recording: Recording, replica: str | None, capture: Source | None) -> Holdings:
    """One side of a difference: a point of this recording, another recording (`FILE` or `FILE@POINT`), a live index
    (a store URL), or a live sidecar (its URL)."""
    scheme = where.partition("://")[0] if "://" in where else ""
    if scheme in ("http", "https"):
        return await _from_sidecar(where.rstrip("/"))
    if scheme:
        return await _from_store(where, recording, replica)
    return _from_recording(where, recording, replica, capture)


def _from_recording(where: str, recording: Recording, replica: str | None, capture: Source | None) -> Holdings:
    name, _, point = where.rpartition("@")
    for path, at in ((where, "end"), (name, point)):
        if path and Path(path).exists():
            other = open_recording([Path(path)], capture)
            return Timeline.at(other, Point.parse(at), replica).holdings()
    return Timeline.at(recording, Point.parse(where), replica).holdings()


async def _from_store(url: str, recording: Recording, replica: str | None) -> Holdings:
    namespaces = {entry.source.namespace for entry in of_replica(recording, replica)}
    store = await open_store(url)
    try:
        found: dict[Any, dict[BlockKey, TierMask]] = {}
        for namespace in namespaces:
            index = await store.open(namespace)
            for view in (await index.fleet()).replicas:
                ref = view.spec.ref
                if view.incarnation is not None and replica in (None, ref.replica, str(ref)):
                    found[ref] = await index.held(Incarnation(view.incarnation))
        return found
    finally:
        await store.close()


async def _from_sidecar(url: str) -> Holdings:
    """Every page of `GET /v1/inventory`. The picture is of no one moment if the engine is busy meanwhile."""
    held: dict[BlockKey, TierMask] = {}
    after = ""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        while True:
            async with session.get(f"{url}/v1/inventory", params={"limit": "10000", "after": after}) as response:
                response.raise_for_status()
                page = await response.json()
            for block in page["blocks"]:
                held[BlockKey(bytes.fromhex(block["key"]))] = TierMask(block["tiers"])
            if page["next"] is None:
                return {ReplicaRef(page["replica"], page["dp_rank"]): held}
            after = page["next"]


def happenings(
    recording: Recording, what: str, replica: str | None, point: Point, prompts: Prompts
) -> list[Happening]:
    """The history of a block (its key in hex, or the engine's name for it in decimal) or of a prompt's blocks (a file
    with the request)."""
    keys: set[BlockKey] = set()
    names: set[EngineHash] = set()
    if Path(what).is_file():
        request, tokens = prompts.load(Path(what), recording)
        for namespace in {entry.source.namespace for entry in of_replica(recording, replica)}:
            chain = Chain(
                namespace.root, namespace.block_size, tokens, extras_of(request), lookahead=namespace.lookahead
            )
            keys.update(chain.keys(chain.blocks))
    elif len(what) == 16 and all(c in "0123456789abcdef" for c in what):
        keys.add(BlockKey(bytes.fromhex(what)))
    elif (number := what.removeprefix("engine:").removeprefix("-")).isdigit() and number.isascii():
        value = -int(number) if "-" in what else int(number)
        names.add(EngineHash(value & 0xFFFF_FFFF_FFFF_FFFF))
    else:
        raise ConfigError(
            "history", f"{what!r} is no block", "give a key of 16 hex digits, engine:HASH, or a file with a request"
        )
    return history(lambda: up_to(of_replica(recording, replica), point), keys, names)


# ---- command ------------------------------------------------------------------------------------------------------

_probability = click.FloatRange(0, 1)


def _as_speed(context: click.Context, parameter: click.Parameter, value: str) -> float:
    if value == "max":
        return 0.0
    try:
        speed = float(value)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise click.BadParameter("use a number above 0, or max")
    return speed


def _as_point(context: click.Context, parameter: click.Parameter, value: str) -> Point:
    return Point.parse(value)


@click.command("replay")
@common_options
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--into",
    default="consumer",
    metavar="TARGET",
    help="`consumer`; an index (memory:, redis://…, embedded:); or a ZeroMQ endpoint to publish at (tcp://…, ipc://…).",
)
@click.option("--replay-endpoint", metavar="ENDPOINT", help="With a ZeroMQ target: where to answer replay requests.")
@click.option("--hold", is_flag=True, help="With a ZeroMQ target: stay after the last batch, until interrupted.")
@click.option("--replica", metavar="NAME", help="Only this replica (NAME or NAME/RANK) of those recorded.")
@click.option("--speed", callback=_as_speed, default="max", help="1: as recorded; 10: ten times as fast; max.")
@click.option("--until", "point", callback=_as_point, default="end", help="Last batch: SEQ, #POSITION, time, or end.")
@click.option("--drop", type=_probability, default=0.0, help="Share of live batches lost.")
@click.option("--duplicate", type=_probability, default=0.0, help="Share of live batches that come twice.")
@click.option("--reorder", type=_probability, default=0.0, help="Share of live batches overtaken by the next.")
@click.option(
    "--delay-s", type=click.FloatRange(0), default=0.0, help="Live batches come up to so many seconds late."
)
@click.option("--restart", type=click.IntRange(0), help="Engines start over after so many batches.")
@click.option("--seed", type=int, default=0, help="Of the faults.")
@click.option("--ring", type=click.IntRange(0), default=DEFAULT_RING, help="Batches kept for replay; 0: no replay.")
@click.option("--at", "at", callback=_as_point, default="end", help="With --query: the moment to ask at.")
@click.option("--query", "query_file", type=click.Path(exists=True, path_type=Path), help="A request, as JSON.")
@click.option(
    "--diff", nargs=2, metavar="A B", help="Points, other recordings (FILE[@POINT]), store or sidecar URLs."
)
@click.option("--history", "history_of", metavar="BLOCK", help="A block's key, engine:HASH, or a request as JSON.")
@click.option("--tokenizer", help="For requests in text: `byte`, or a directory with tokenizer.json.")
@capture_options
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
def command(
    log_level: str,
    files: tuple[Path, ...],
    into: str,
    replay_endpoint: str | None,
    hold: bool,
    replica: str | None,
    speed: float,
    point: Point,
    drop: float,
    duplicate: float,
    reorder: float,
    delay_s: float,
    restart: int | None,
    seed: int,
    ring: int,
    at: Point,
    query_file: Path | None,
    diff: tuple[str, str] | None,
    history_of: str | None,
    tokenizer: str | None,
    capture: Source | None,
    as_json: bool,
) -> None:
    """Feed a recording to a consumer, an index or a live endpoint; or look into it.

    FILES: what `metatrie record` wrote, in order, or a folder of it; or one capture (.frames.jsonl.gz), with --model.

    --query, --diff and --history look at the past instead: what a prompt would have found, what changed between two
    moments, what happened to a block.
    """
    recording = open_recording(files, capture)
    prompts = Prompts(tokenizer)
    console = report_console(as_json)
    faults = Faults(
        drop=drop, duplicate=duplicate, reorder=reorder, delay_s=delay_s, restart=restart, seed=seed, ring=ring
    )
    if sum(option is not None for option in (query_file, diff, history_of)) > 1:
        raise click.UsageError("--query, --diff and --history exclude each other")

    async def run(stop: asyncio.Event) -> None:
        result: Any
        if query_file is not None:
            request, tokens = prompts.load(query_file, recording)
            result = query(recording, at, replica, request, tokens)
            show_verdicts(console, result)
        elif history_of is not None:
            result = happenings(recording, history_of, replica, point, prompts)
            _show_history(console, result)
        elif diff is not None:
            before, after = [await holdings(side, recording, replica, capture) for side in diff]
            result = differences(before, after)
            _show_differences(console, diff, result)
        elif "://" in into and into.partition("://")[0] in ("tcp", "ipc"):
            sent = await until(
                stop,
                publish(
                    recording,
                    events=into,
                    replay_endpoint=replay_endpoint,
                    faults=faults,
                    speed=speed,
                    point=point,
                    replica=replica,
                    hold=stop if hold else None,
                ),
            )
            result = {"sent": sent}
        else:
            result = await until(stop, _replay_into(into, recording, faults, speed, point, replica, console))
            if result is None:
                return
            _show_outcomes(console, result)
        for damage in recording.damage:
            console.print(f"[yellow]{damage.path.name}: {damage.kind} at byte {damage.offset:,}[/]")
        if as_json:
            print(msgspec.json.format(msgspec.json.encode(result, enc_hook=str)).decode())

    run_process(log_level, run)


async def _replay_into(
    target: str,
    recording: Recording,
    faults: Faults,
    speed: float,
    point: Point,
    replica: str | None,
    console: Console,
) -> Replayed:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    async with _target(target) as store:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            return await replay(
                recording, store=store, faults=faults, speed=speed, point=point, replica=replica, progress=progress
            )


@contextlib.asynccontextmanager
async def _target(name: str) -> AsyncIterator[Store | None]:
    if name == "consumer":
        yield None
        return
    store = await open_store(name)
    try:
        await store.ping()
        yield store
    finally:
        await store.close()


def _show_outcomes(console: Console, done: Replayed) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("replica", "state", "batches", "lost", "restarts", "blocks", "detached", "fingerprint", "index"):
        table.add_column(name, justify="left" if name in ("replica", "state", "fingerprint", "index") else "right")
    for one in done.replicas:
        agrees = one.index_fingerprint == one.fingerprint
        table.add_row(
            one.replica,
            f"{one.state}: {one.cause}" if one.cause else one.state,
            f"{one.batches:,}",
            f"{one.lost_batches:,}",
            f"{one.restarts:,}",
            f"{one.blocks:,}",
            f"{one.detached:,}",
            one.fingerprint[:16],
            "" if one.index_fingerprint is None else "the same" if agrees else "DIFFERS",
        )
    console.print(table)
    console.print(
        f"{done.batches:,} batches, {done.block_events:,} block events in {done.seconds:.2f} s:"
        f" {done.block_events_per_second:,.0f} block events a second"
    )


def _show_history(console: Console, found: Sequence[Happening]) -> None:
    """One line for what happened to neighbouring blocks in one batch."""
    if not found:
        console.print("nothing in this recording ever touched it")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("time", "position", "replica", "seq", "blocks", "what", "by"):
        table.add_column(name, justify="right" if name in ("position", "seq") else "left", no_wrap=name != "by")
    for (position, _, what, by), alike in itertools.groupby(found, lambda h: (h.position, h.life, h.what, h.by)):
        group = list(alike)
        first = group[0]
        table.add_row(
            first.at[11:-1],
            f"#{position}",
            first.replica,
            "" if first.seq is None else str(first.seq),
            _blocks(group),
            what,
            by,
        )
    console.print(table)


def _blocks(group: Sequence[Happening]) -> str:
    if group[0].block is None:
        return "all"
    if len(group) == 1:
        return group[0].block + ("" if group[0].depth is None else f" at {group[0].depth}")
    depths = sorted({one.depth for one in group if one.depth is not None})
    runs: list[list[int]] = []
    for depth in depths:
        if runs and depth == runs[-1][-1] + 1:
            runs[-1].append(depth)
        else:
            runs.append([depth])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _show_differences(console: Console, sides: tuple[str, str], found: Sequence[Difference]) -> None:
    for one in found:
        if one.same:
            console.print(f"{one.replica}: the same {one.after:,} blocks")
            continue
        console.print(
            f"{one.replica}: {one.before:,} blocks at {sides[0]}, {one.after:,} at {sides[1]}:"
            f" {len(one.gained):,} gained, {len(one.lost):,} lost, {len(one.moved):,} in other tiers"
        )
        for sign, keys in (("+", one.gained), ("-", one.lost), ("~", one.moved)):
            for key in keys[:FIRST_LINES]:
                console.print(f"  {sign} {key}", highlight=False)
            if len(keys) > FIRST_LINES:
                console.print(f"  {sign} … and {len(keys) - FIRST_LINES:,} more")
