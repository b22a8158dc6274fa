"""The subscriber over real ZeroMQ sockets on loopback, against the simulated engine's publisher."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from metatrie.consumers.stream import Action, Apply, Phase, Restarted, Stream
from metatrie.consumers.subscriber import Subscriber
from metatrie.engines.publisher import Publisher, PublisherConfig
from metatrie.engines.versions import traits_of
from metatrie.proto.errors import ConfigError

DEADLINE_S = 20.0


def payload(life: int, seq: int, size: int = 0) -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": [seq], "pad": b"x" * size}
    return msgspec.msgpack.encode([life * 100_000.0 + seq, [event], 0])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  sockets set no event
            await asyncio.sleep(0.002)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Engine:
    """One engine process's publishing side; `restart` replaces it on the same endpoints."""

    def __init__(self, version: str = "0.33.0", **config: Any) -> None:
        config.setdefault("endpoint", f"tcp://*:{free_port()}")
        config.setdefault("replay_endpoint", f"tcp://*:{free_port()}")
        config.setdefault("topic", "kv@pod@m")
        self.config = PublisherConfig(**config)
        self.version = version
        self.life = 0
        self.publisher: Publisher | None = None

    async def start(self) -> None:
        self.life += 1
        publisher = Publisher(self.config, traits_of(self.version))
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    publisher.start()
                    break
                except ConfigError:  # the predecessor's port is being released in the background
                    await asyncio.sleep(0.01)
        self.publisher = publisher

    async def stop(self) -> None:
        if self.publisher is not None:
            await self.publisher.close()
            self.publisher = None

    def publish(self, count: int = 1, size: int = 0) -> None:
        assert self.publisher is not None
        for _ in range(count):
            self.publisher.publish(payload(self.life, self.publisher.next_seq, size))

    @property
    def endpoints(self) -> tuple[str, str | None]:
        assert self.publisher is not None
        config = self.publisher.config
        return config.endpoint, config.replay_endpoint


class Follower:
    """A subscriber at work, and what it was told to apply since the last restart."""

    def __init__(self, events: str, replay: str | None, *, topic: str = "kv@", clock: Any = time.monotonic) -> None:
        self.stream = Stream(replay=replay is not None)
        self.applied: list[tuple[int, int]] = []
        self.replayed = 0
        self.restarts = 0
        self.phases: list[Phase] = []
        self.subscriber = Subscriber(
            self.stream, events=events, replay=replay, topic=topic, handle=self._handle, clock=clock
        )
        self.task = asyncio.create_task(self.subscriber.run())

    def _handle(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply():
                    self.applied.append((int(action.batch.ts) // 100_000, action.seq))
                    self.replayed += action.replayed
                case Restarted():
                    self.applied.clear()
                    self.restarts += 1

    def has(self, life: int, count: int) -> bool:
        """Exactly batches 0 to count - 1 of this life, in order, and sure of it."""
        return self.stream.phase is Phase.EXACT and self.applied == [(life, seq) for seq in range(count)]

    async def phase(self, phase: Phase) -> None:
        await until(lambda: self.stream.phase is phase)

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@contextlib.asynccontextmanager
async def following(engine: Engine, **options: Any) -> AsyncIterator[Follower]:
    events, replay = engine.endpoints
    options = {"events": events, "replay": replay, **options}
    follower = Follower(**options)
    try:
        yield follower
    finally:
        await follower.stop()


@pytest.mark.parametrize("version", ["0.25.0", "0.26.0"], ids=["replies without topic", "replies with topic"])
async def test_slow_joiner_is_healed_by_replay(version: str) -> None:
    engine = Engine(version)
    await engine.start()
    engine.publish(50)
    async with following(engine) as follower:
        await until(lambda: follower.has(1, 50))
        engine.publish(10)
        await until(lambda: follower.has(1, 60))
        assert follower.replayed == 50
    await engine.stop()


async def test_batches_published_while_joining_are_neither_lost_nor_doubled(engine: Engine) -> None:
    engine.publish(5)
    async with following(engine) as follower:
        for _ in range(200):
            engine.publish()
            await asyncio.sleep(0)
        await until(lambda: follower.has(1, 205))


@pytest.mark.parametrize("version", ["0.25.0", "0.33.0"])
async def test_a_full_ring_of_large_batches_is_replayed_completely(version: str) -> None:
    engine = Engine(version, buffer_steps=6000)
    await engine.start()
    engine.publish(6000, size=8000)
    async with following(engine) as follower:
        await until(lambda: follower.has(1, 6000))
        assert follower.stream.stats.replays == 1
    await engine.stop()


async def test_restart_on_the_same_endpoint(engine: Engine) -> None:
    async with following(engine) as follower:
        await follower.phase(Phase.EXACT)
        engine.publish(10)
        await until(lambda: follower.has(1, 10))
        await engine.stop()
        await follower.phase(Phase.RECOVERING)
        assert follower.stream.cause == "disconnected"
        await engine.start()
        engine.publish(3)
        await until(lambda: follower.has(2, 3))
        assert follower.restarts == 1


async def test_restart_that_published_more_before_we_were_back(engine: Engine) -> None:
    """Its numbers go on where the old ones were: only the payload of the last batch tells."""
    async with following(engine) as follower:
        await follower.phase(Phase.EXACT)
        engine.publish(10)
        await until(lambda: follower.has(1, 10))
        await engine.stop()
        await engine.start()
        engine.publish(11)
        await until(lambda: follower.has(2, 11))
        assert follower.restarts == 1
        engine.publish()
        await until(lambda: follower.has(2, 12))


async def test_restart_of_an_engine_that_stays_silent(engine: Engine) -> None:
    async with following(engine) as follower:
        engine.publish(4)
        await until(lambda: follower.has(1, 4))
        await engine.stop()
        await engine.start()
        await until(lambda: follower.has(2, 0) and follower.restarts == 1)


async def test_silence_is_not_a_dead_link(engine: Engine) -> None:
    skipped = 0.0
    async with following(engine, clock=lambda: time.monotonic() + skipped) as follower:
        engine.publish()
        await until(lambda: follower.has(1, 1))
        replays = follower.stream.stats.replays
        skipped = 86_400.0
        engine.publish()
        await until(lambda: follower.has(1, 2))
        assert follower.stream.stats.replays == replays
        await engine.stop()
        await follower.phase(Phase.RECOVERING)
        assert follower.stream.cause == "disconnected"


async def test_without_a_replay_endpoint_a_late_join_says_so(engine: Engine) -> None:
    engine.publish(3)
    async with following(engine, replay=None) as follower:
        await follower.phase(Phase.SYNCING)
        async with asyncio.timeout(DEADLINE_S):
            while follower.stream.phase is Phase.SYNCING:  # the subscription may need a moment to reach the publisher
                engine.publish()
                await asyncio.sleep(0.002)
        assert (follower.stream.phase, follower.stream.cause) == (Phase.DEGRADED, "joined_late")
        assert follower.applied


async def test_a_replay_endpoint_that_is_not_there(engine: Engine) -> None:
    engine.publish(3)
    started = time.monotonic()

    def hurried() -> float:
        return started + (time.monotonic() - started) * 100

    nobody = f"tcp://127.0.0.1:{free_port()}"
    async with following(engine, replay=nobody, clock=hurried) as follower:
        await follower.phase(Phase.DEGRADED)
        assert follower.stream.cause == "replay_failed"
        engine.publish(2)
        await until(lambda: [seq for _, seq in follower.applied] == [3, 4])
        assert follower.stream.cause == "history_lost"


async def test_engines_that_dial_in() -> None:
    port = free_port()
    follower = None
    engine = Engine(endpoint=f"tcp://127.0.0.1:{port}")
    try:
        await engine.start()
        engine.publish(7)
        follower = Follower(f"tcp://*:{port}", engine.endpoints[1])
        await until(lambda: follower.has(1, 7))
        engine.publish(2)
        await until(lambda: follower.has(1, 9))
        await engine.stop()
        await follower.phase(Phase.RECOVERING)
        await engine.start()
        engine.publish(2)
        await until(lambda: follower.has(2, 2))
    finally:
        if follower is not None:
            await follower.stop()
        await engine.stop()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_engines_on_ipv6_addresses() -> None:
    # vLLM binds an endpoint that has a `::`.
    engine = Engine(endpoint=f"tcp://[::1]:{free_port()}", replay_endpoint=f"tcp://[::1]:{free_port()}")
    await engine.start()
    try:
        engine.publish(3)
        async with following(engine) as follower:
            await until(lambda: follower.has(1, 3))
            engine.publish(2)
            await until(lambda: follower.has(1, 5))
    finally:
        await engine.stop()


async def test_a_replay_that_loses_batches_and_end_markers_is_asked_again() -> None:
    """A publisher with a mark on its replay socket, as engines before 0.33 have."""
    context = zmq.asyncio.Context()
    pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    pub.linger = router.linger = 0
    events = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    lost = [{5, 6, 7}, {6}, set()]
    starts = []

    async def serve() -> None:
        for round_ in lost:
            peer, empty, start = await router.recv_multipart()
            assert empty == b""
            starts.append(int.from_bytes(start, "big"))
            for seq in range(starts[-1], 10):
                if seq not in round_:
                    await router.send_multipart([peer, b"", seq.to_bytes(8, "big"), payload(1, seq)])
            await router.send_multipart([peer, b"", b"\xff" * 8, b""])

    serving = asyncio.create_task(serve())
    follower = Follower(events, replay, topic="")
    try:
        await until(lambda: follower.has(1, 10))
        await serving
        assert starts == [0, 4, 5]
    finally:
        await follower.stop()
        serving.cancel()
        context.destroy(linger=0)


async def test_only_the_topic_asked_for_arrives(engine: Engine) -> None:
    """Two followers of one publisher, one with a topic that does not match."""
    async with following(engine, topic="kv@pod@") as right, following(engine, topic="kv@other", replay=None) as wrong:
        await right.phase(Phase.EXACT)
        await wrong.phase(Phase.SYNCING)
        engine.publish(5)
        await until(lambda: right.has(1, 5))
        assert wrong.applied == []


async def test_junk_on_the_topic_is_counted_and_survived() -> None:
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.PUB)
    pub.linger = 0
    events = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    follower = Follower(events, None, topic="")
    try:
        await follower.phase(Phase.SYNCING)
        async with asyncio.timeout(DEADLINE_S):
            while not follower.stream.stats.malformed_frames:
                await pub.send_multipart([b"hello"])
                await asyncio.sleep(0.002)
        await pub.send_multipart([b"", b"\xff" * 8, b"x"])
        await pub.send_multipart([b"", (0).to_bytes(8, "big"), b"\xc1"])
        await pub.send_multipart([b"", (1).to_bytes(8, "big"), payload(1, 1)])
        await until(lambda: follower.applied == [(1, 1)])
        assert follower.stream.phase is Phase.DEGRADED
        assert follower.stream.stats.malformed_batches == 1
    finally:
        await follower.stop()
        context.destroy(linger=0)


async def test_cancelling_leaves_no_socket_and_no_warning(engine: Engine) -> None:
    """In every state it can be in; unclosed sockets would warn, and warnings are errors here."""
    engine.publish(3)
    async with following(engine) as exact:
        await until(lambda: exact.has(1, 3))
    async with following(engine, replay=f"tcp://127.0.0.1:{free_port()}") as waiting:
        await until(lambda: waiting.stream.waiting)
    async with following(engine) as fresh:
        await asyncio.sleep(0)
    never = Follower(f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}")
    await asyncio.sleep(0)
    await never.stop()
    assert all(follower.task.cancelled() for follower in (exact, waiting, fresh, never))
    gc.collect()
