"""The event stream on real sockets: encoding per version, the live stream, replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from metatrie.engines.pool import Cleared, Lora, PoolEvent, Removed, Stored
from metatrie.engines.publisher import END_SEQ, EventEncoder, Publisher, PublisherConfig, binds, rank_endpoint
from metatrie.engines.versions import traits_of
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, decode_batch

WIRE = Path(__file__).parents[1] / "data" / "vectors" / "wire"
VERSIONS = sorted(
    {p.stem.removeprefix("vllm-") for p in WIRE.glob("vllm-*.json")} - {"0.9.0", "0.9.2", "0.10.0", "0.10.1"}
)
DEADLINE_S = 20
FIRST, SECOND = bytes(24) + (2**64 - 1).to_bytes(8, "big"), bytes(24) + (7).to_bytes(8, "big")


def stored(**changes: Any) -> Stored:
    fields: dict[str, Any] = {
        "digests": [FIRST, SECOND],
        "parent": None,
        "tokens": list(range(32)),
        "extra_keys": [["adapter", "salt"], ["adapter"]],
        "lora": Lora("adapter", "/adapter", 7),
        "group": 0,
        "window": None,
    }
    return Stored(**{**fields, **changes})


EVENTS: list[PoolEvent] = [
    Removed(SECOND, 0),
    stored(),
    stored(parent=FIRST, digests=[SECOND], tokens=list(range(16)), extra_keys=[None], lora=None),
    Cleared(),
]


@pytest.mark.parametrize("hash_format", ["int", "bytes"])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_decodes_to_what_was_meant(version: str, hash_format: Any) -> None:
    traits = traits_of(version)
    batch = decode_batch(EventEncoder(traits, 16, hash_format).batch(EVENTS, ts=12.5, rank=3))
    assert (batch.ts, batch.rank, batch.skipped) == (12.5, 3, [])
    removed, first, second, cleared = batch.events
    assert removed == BlockRemoved(hashes=[EngineHash(7)])
    assert isinstance(first, BlockStored)
    assert (first.hashes, first.parent, first.tokens) == ([2**64 - 1, 7], None, list(range(32)))
    assert (first.block_size, first.medium, first.group, first.lora_id) == (16, "gpu", 0, 7)
    assert first.lora_name == ("adapter" if traits.lora_name else None)
    assert first.extra_keys == ([["adapter", "salt"], ["adapter"]] if traits.extra_keys else None)
    assert first.kind == ("full_attention" if traits.spec_kind else None)
    assert isinstance(second, BlockStored)
    assert (second.hashes, second.parent, second.lora_id, second.extra_keys) == ([7], 2**64 - 1, None, None)
    assert cleared == AllBlocksCleared()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_bytes_are_those_of_the_version(version: str) -> None:
    """The engine's own encoding of what a GPU block pool emits, decoded into pool events and encoded by us."""
    vectors = json.loads((WIRE / f"vllm-{version}.json").read_text())
    encoder = EventEncoder(traits_of(version), 16)
    names = (
        "BlockStored root, 2 blocks of 16, as the GPU block pool emits it (dp rank 0)",
        "BlockStored child with parent, lora",
        "BlockRemoved one hash",
        "AllBlocksCleared",
    )
    checked = 0
    for vector in vectors:
        if vector["description"] not in names:
            continue
        ts, events, rank = msgspec.msgpack.decode(bytes.fromhex(vector["hex"]))
        lora = Lora("sql-adapter", "", 7)
        ours = encoder.batch([_pool_event(e, lora) for e in events], ts=ts, rank=rank)
        assert ours.hex() == vector["hex"], vector["description"]
        checked += 1
    assert checked == len(names)


def _pool_event(raw: Any, lora: Lora) -> PoolEvent:
    (event,) = decode_batch(msgspec.msgpack.encode([0.0, [raw]])).events
    if isinstance(event, AllBlocksCleared):
        return Cleared()
    digests = [bytes(24) + h.to_bytes(8, "big") for h in event.hashes]
    if isinstance(event, BlockRemoved):
        return Removed(digests[0], event.group)
    return Stored(
        digests=digests,
        parent=None if event.parent is None else bytes(24) + event.parent.to_bytes(8, "big"),
        tokens=event.tokens,
        extra_keys=event.extra_keys or [None] * len(digests),
        lora=lora if event.lora_id is not None else None,
        group=event.group,
        window=None,
    )


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def open_reader(context: zmq.asyncio.Context) -> Iterator[OpenReader]:
    readers: list[Reader] = []

    def open_reader(publisher: Publisher) -> Reader:
        readers.append(Reader(context, publisher.config))
        return readers[-1]

    yield open_reader
    for reader in readers:
        reader.sub.close(0)
        reader.dealer.close(0)


class Reader:
    """A consumer's two sockets."""

    def __init__(self, context: zmq.asyncio.Context, config: PublisherConfig) -> None:
        self.sub = context.socket(zmq.SUB)
        self.sub.rcvhwm = 0
        self.sub.subscribe(config.topic.encode())
        self.sub.connect(config.endpoint)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.rcvhwm = 0
        self.dealer.connect(config.replay_endpoint or "")

    async def joined(self, publisher: Publisher, payload: bytes = b"hello") -> int:
        """Publish until the subscription works; the next sequence number that will be live."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                seq = publisher.publish(payload)
                if await self.sub.poll(20):
                    while int.from_bytes((await self.sub.recv_multipart())[1], "big") < seq:
                        pass
                    return seq + 1

    async def live(self) -> list[bytes]:
        async with asyncio.timeout(DEADLINE_S):
            return await self.sub.recv_multipart()

    async def replay(self, start: bytes) -> list[list[bytes]]:
        """Every reply frame list up to and including the end marker."""
        await self.dealer.send_multipart([b"", start])
        replies = []
        async with asyncio.timeout(DEADLINE_S):
            while not replies or replies[-1][-2:] != [END_SEQ, b""]:
                replies.append(await self.dealer.recv_multipart())
        return replies


OpenReader = Callable[[Publisher], Reader]


def config_of(**changes: Any) -> PublisherConfig:
    fields = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv@pod@model", **changes}
    return PublisherConfig(**fields)


async def test_live_frames(open_reader: OpenReader) -> None:
    publisher = Publisher(config_of(), traits_of("0.33.0"))
    publisher.start()
    reader = open_reader(publisher)
    seq = await reader.joined(publisher)
    publisher.publish(b"one")
    publisher.publish(b"two")
    assert await reader.live() == [b"kv@pod@model", seq.to_bytes(8, "big"), b"one"]
    assert await reader.live() == [b"kv@pod@model", (seq + 1).to_bytes(8, "big"), b"two"]
    await publisher.close()


@pytest.mark.parametrize("version", ["0.33.0", "0.26.0", "0.11.0"])
async def test_frames_have_the_recorded_shape(open_reader: OpenReader, version: str) -> None:
    recorded = json.loads((WIRE / f"frames-vllm-{version}.json").read_text())
    topic = bytes.fromhex(recorded["live"][0][0])
    publisher = Publisher(config_of(topic=topic.decode()), traits_of(version))
    publisher.start()
    for _, _, payload in recorded["live"]:
        publisher.publish(bytes.fromhex(payload))
    replies = await open_reader(publisher).replay(bytes.fromhex(recorded["replay_request_frames_hex"][1]))
    assert [[frame.hex() for frame in reply] for reply in replies] == recorded["replay"]
    await publisher.close()


@pytest.mark.parametrize("version", ["0.33.0", "0.25.1"])
async def test_replay_starts_where_asked(open_reader: OpenReader, version: str) -> None:
    publisher = Publisher(config_of(buffer_steps=5), traits_of(version))
    publisher.start()
    for n in range(8):
        publisher.publish(b"%d" % n)
    reader = open_reader(publisher)

    async def payloads(start: bytes) -> list[bytes]:
        return [reply[-1] for reply in (await reader.replay(start))[:-1]]

    assert await payloads((6).to_bytes(8, "big")) == [b"6", b"7"]
    # Older than the buffer: silently from the oldest kept. Any width of number is understood.
    assert await payloads(b"") == [b"3", b"4", b"5", b"6", b"7"]
    assert await payloads(b"\x07") == [b"7"]
    assert await payloads(b"\xff" * 8) == []
    # A request without the empty frame gets no reply, and does not stop the next one.
    await reader.dealer.send_multipart([(0).to_bytes(8, "big")])
    assert await payloads((7).to_bytes(8, "big")) == [b"7"]
    await publisher.close()


async def test_a_slow_reader_gets_a_full_replay_without_holes(open_reader: OpenReader) -> None:
    count, payload = 6000, bytes(8192)
    publisher = Publisher(config_of(), traits_of("0.33.0"))
    publisher.start()
    for _ in range(count):
        publisher.publish(payload)
    reader = open_reader(publisher)
    # Unlike a good consumer this one bounds its queue, so the publisher's must hold what it has not read.
    reader.dealer.disconnect(publisher.config.replay_endpoint or "")
    reader.dealer.rcvhwm = 1000
    reader.dealer.connect(publisher.config.replay_endpoint or "")
    replies = await reader.replay((0).to_bytes(8, "big"))
    assert [int.from_bytes(reply[-2], "big") for reply in replies[:-1]] == list(range(count))
    await publisher.close()


async def test_live_and_replay_together_lose_nothing(open_reader: OpenReader) -> None:
    publisher = Publisher(config_of(), traits_of("0.33.0"))
    publisher.start()
    for _ in range(100):
        publisher.publish(b"before")
    reader = open_reader(publisher)
    first_live = await reader.joined(publisher)

    async def publish_on() -> None:
        for _ in range(500):
            publisher.publish(b"during")
            await asyncio.sleep(0)

    replies, _ = await asyncio.gather(reader.replay((0).to_bytes(8, "big")), publish_on())
    seen = {int.from_bytes(reply[-2], "big") for reply in replies[:-1]}
    while publisher.next_seq - 1 not in seen:
        seen.add(int.from_bytes((await reader.live())[1], "big"))
    assert seen == set(range(publisher.next_seq))
    assert first_live < publisher.next_seq
    await publisher.close()


def test_which_endpoints_are_bound() -> None:
    bound = ["tcp://*:5557", "tcp://[::]:5557", "ipc:///tmp/kv", "inproc://kv"]
    assert all(map(binds, bound))
    assert not any(map(binds, ["tcp://127.0.0.1:5557", "tcp://0.0.0.0:5557", "tcp://consumer:5557"]))


async def test_an_address_is_connected_to(context: zmq.asyncio.Context) -> None:
    sub = context.socket(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(PublisherConfig(endpoint=f"tcp://127.0.0.1:{port}"), traits_of("0.33.0"))
    publisher.start()
    async with asyncio.timeout(DEADLINE_S):
        while not await sub.poll(20):
            publisher.publish(b"x")
    assert publisher.config.endpoint == f"tcp://127.0.0.1:{port}"
    await publisher.close()
    sub.close(0)


def test_rank_endpoints() -> None:
    assert rank_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert rank_endpoint("tcp://*:5557", 3) == "tcp://*:5560"
    assert rank_endpoint("tcp://*:0", 3) == "tcp://*:0"
    assert rank_endpoint("inproc://kv", 2) == "inproc://kv_dp2"
    for wrong in ("ipc:///tmp/kv", "tcp://host"):
        with pytest.raises(ConfigError):
            rank_endpoint(wrong, 1)


async def test_a_taken_port_is_a_configuration_error(context: zmq.asyncio.Context) -> None:
    holder = context.socket(zmq.ROUTER)
    port = holder.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(config_of(replay_endpoint=f"tcp://127.0.0.1:{port}"), traits_of("0.33.0"))
    with pytest.raises(ConfigError, match="cannot be used"):
        publisher.start()
    holder.close(0)


@pytest.mark.parametrize("version", ["", "new", "0.9.2", "1", "0.33.0.1"])
def test_versions_we_do_not_know(version: str) -> None:
    with pytest.raises(ConfigError):
        traits_of(version)
