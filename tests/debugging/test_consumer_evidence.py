"""What a sidecar tells of single blocks, and how old events are when they count."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from debugging_world import MIXED, NAMESPACE, capture, frames_of
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.consumers.evidence import Departures, evidence
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.lag import BOUNDS, Lag
from metatrie.consumers.recording import Frame
from metatrie.consumers.sidecar import make_app
from metatrie.consumers.stream import Stream
from metatrie.engines.rules import rule_for
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.events import decode_batch
from metatrie.proto.http import HttpServer
from metatrie.proto.index import ReplicaRef
from prometheus_client.core import HistogramMetricFamily


@pytest.fixture
async def consumer() -> ReplicaConsumer:
    """One that has heard a whole recorded stream."""
    index = await MemoryStore().open(NAMESPACE)
    consumer = ReplicaConsumer(ReplicaConfig(replica="r", events="inproc://nowhere"), index, rule=rule_for("vllm"))
    consumer._handle(consumer.stream.connected(0.0))
    for entry in capture(MIXED):
        consumer._handle(consumer.stream.live(frames_of(entry), 0.0))
    return consumer


@pytest.fixture
async def url(consumer: ReplicaConsumer) -> AsyncIterator[str]:
    async with aiohttp.ClientSession() as session, HttpServer(make_app([consumer], session)) as server:
        yield server.url


async def ask(url: str, body: object) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/blocks", json=body) as response:
        return response.status, await response.json()


async def test_a_sidecar_tells_of_single_blocks(consumer: ReplicaConsumer, url: str) -> None:
    held = [key.hex() for key in consumer.inventory.expected()]
    status, said = await ask(url, {"keys": [*held[:3], "00" * 8]})
    assert status == 200
    assert [block["state"] for block in said["blocks"]] == ["attached"] * 3 + ["unknown"]  # type: ignore[attr-defined]  # JSON
    assert (said["replica"], said["next_seq"], said["hash_mode"]) == ("r", consumer.stream.expected, "auto")
    assert said["namespace"]["model"] == "m"  # type: ignore[index]  # JSON
    assert said["parity"] is True
    assert said["emptied_seq"] == 264, "the engine cleared its cache in that batch"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"keys": []}, 400),
        ({"keys": ["xyz"]}, 400),
        ({"keys": ["00" * 8] * 5000}, 400),
        ({"keys": ["00" * 8], "replica": "other"}, 404),
        ({}, 400),
    ],
)
async def test_a_bad_question_is_refused(url: str, body: object, status: int) -> None:
    assert (await ask(url, body))[0] == status


def test_every_block_that_left_is_remembered_with_the_batch_that_took_it() -> None:
    inventory, departures, stream = Inventory(NAMESPACE, rule=rule_for("vllm")), Departures(), Stream(replay=False)
    before: dict[bytes, int] = {}
    left: dict[bytes, int] = {}
    for entry in capture(MIXED):
        assert isinstance(entry.record, Frame)
        batch = decode_batch(entry.record.payload)
        delta = inventory.apply(batch)
        departures.note(delta, entry.record.seq, batch.ts)
        now = dict(inventory.expected())
        if delta.reset:
            left.clear()
        else:
            left.update(dict.fromkeys(before.keys() - now.keys(), entry.record.seq))
        before = dict(now)  # type: ignore[arg-type]  # keys are bytes
    gone = [key for key in left if key not in before]
    assert len(gone) > 20
    said = evidence(
        gone, inventory, departures, stream,  # type: ignore[arg-type]  # keys are bytes
        ref=ReplicaRef("r"), namespace=NAMESPACE, hash_mode="auto", state="exact", cause="",
    )  # fmt: skip
    assert {block.key: block.left_seq for block in said.blocks if block.state == "left"} == {
        key.hex(): left[key]
        for key in gone
        if inventory.find([key]) == {}  # type: ignore[list-item]  # keys are bytes
    }


def test_only_so_many_departures_are_remembered() -> None:
    inventory, departures = Inventory(NAMESPACE, rule=rule_for("vllm")), Departures(most=5)
    for entry in list(capture(MIXED))[:60]:
        assert isinstance(entry.record, Frame)
        departures.note(inventory.apply(decode_batch(entry.record.payload)), entry.record.seq, 0.0)
    assert len(departures._left) == 5


# Lag


def test_a_histogram_counts_each_time_once() -> None:
    lag = Lag()
    for value in (-1.0, 0.0, 0.0015, 0.3, 1e9):
        lag.observe(value)
    family = HistogramMetricFamily("x", "x", labels=["l"])
    lag.add_to(family, ["v"])
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name == "x_bucket"}
    assert (buckets["0.001"], buckets["0.002"], buckets["0.5"], buckets["60.0"], buckets["+Inf"]) == (2, 3, 4, 4, 5)
    assert lag.count == 5
    assert len(buckets) == len(BOUNDS) + 1


async def test_lag_is_measured_from_the_engine_to_the_index(url: str, consumer: ReplicaConsumer) -> None:
    """Of live batches only: a replayed one is old for reasons that are not ours."""
    assert consumer.received.count == len(list(capture(MIXED)))
    fresh = Stream(replay=True)
    assert fresh.waiting is False
    payload = msgspec.msgpack.encode([time.time() - 0.2, [["AllBlocksCleared"]], 0])
    before = consumer.received.count
    seq = consumer.stream.expected
    consumer._handle(consumer.stream.live([b"", seq.to_bytes(8, "big"), payload], 0.0))
    assert consumer.received.count == before + 1
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    assert f'metatrie_event_receipt_seconds_count{{dp_rank="0",model="m",replica="r"}} {before + 1}' in text
    assert 'metatrie_event_visible_seconds_count{dp_rank="0",model="m",replica="r"} 0' in text
    assert "metatrie_stream_decode_errors" in text


async def test_decode_errors_are_told_apart(url: str, consumer: ReplicaConsumer) -> None:
    seq = consumer.stream.expected
    for i, payload in enumerate(
        (b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}, ["Novelty"], 7], 0]))
    ):
        consumer._handle(consumer.stream.live([b"", (seq + i).to_bytes(8, "big"), payload], 0.0))
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    for cause in ("undecodable", "block_hashes", "unknown_kind", "not_an_event"):
        assert f'cause="{cause}",dp_rank="0",model="m",replica="r"}} 1.0' in text, cause
