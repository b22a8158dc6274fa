"""One engine is upgraded under a running consumer: other encoding, other hash format, same endpoints.

Everything is real but the model: pool, encoder and publisher of the simulated engine, sockets, consumer, index.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.engines.pool import BlockPool, Sequence
from metatrie.engines.publisher import EventEncoder, HashFormat, Publisher, PublisherConfig
from metatrie.engines.rules import rule_for
from metatrie.engines.versions import traits_of
from metatrie.indexer.memory import MemoryIndex
from metatrie.proto.hashing import Chain, Namespace, block_key, none_hash

if TYPE_CHECKING:
    from .conftest import Reached

NAMESPACE = Namespace(model="m", block_size=16)


class Watched(zmq.Context):
    """Opens XPUB where PUB is asked for: the same on the wire, and it tells when somebody subscribes."""

    events: zmq.Socket[bytes] | None = None

    def socket(self, socket_type: int, *args: Any, **kwargs: Any) -> zmq.Socket[bytes]:
        opened = super().socket(zmq.XPUB if socket_type == zmq.PUB else socket_type, *args, **kwargs)
        if socket_type == zmq.PUB:
            self.events = opened
        return opened


class Process:
    """One engine process. `forms`: (version, hash format) its batches are encoded as, in turn."""

    def __init__(self, folder: Path, forms: list[tuple[str, HashFormat]], seed: int, *, replay: bool) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(60, 16, none_hash("0"))
        self.encoders = [EventEncoder(traits_of(version), 16, form) for version, form in forms]
        settings = PublisherConfig(
            endpoint=f"ipc://{folder}/events", replay_endpoint=f"ipc://{folder}/replay" if replay else None
        )
        self.publisher = Publisher(settings, traits_of(forms[0][0]))
        self._context = Watched()
        self.publisher.start(self._context)
        self.running: list[Sequence] = []
        self.prompts: list[list[int]] = []

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.6:
            shared = [rng.randrange(2)] * (16 * rng.randint(0, 5))
            sequence = self.pool.sequence([*shared, *(rng.randrange(9) for _ in range(rng.randint(1, 60)))])
            if self.pool.allocate(sequence, len(sequence.tokens), self.pool.match(sequence)):
                self.running.append(sequence)
                self.prompts.append(sequence.tokens)
        elif self.running:
            self.pool.free(self.running.pop(0))
        events = self.pool.take_events()
        if events:
            encoder = self.encoders[self.publisher.next_seq % len(self.encoders)]
            self.publisher.publish(encoder.batch(events, ts=time.time(), rank=0))

    def followed(self) -> bool:
        """Somebody has just subscribed."""
        events = self._context.events
        assert events is not None
        return bool(events.poll(0)) and events.recv().startswith(b"\1")

    async def end(self) -> None:
        await self.publisher.close()
        self._context.term()

    @property
    def truth(self) -> set[bytes]:
        """Keys of what a prompt can find: blocks whose whole prefix is held."""
        held = {bytes(block_key(digest)) for digest in self.pool.resident()}
        found: set[bytes] = set()
        for prompt in self.prompts:
            for key in Chain(NAMESPACE.root, 16, prompt).keys(len(prompt) // 16):
                if key not in held:
                    break
                found.add(bytes(key))
        return found

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            await asyncio.sleep(0)


@pytest.fixture
async def following(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[ReplicaConsumer, MemoryIndex]]:
    index = MemoryIndex(NAMESPACE)
    replay = f"ipc://{tmp_path}/replay" if request.param else None
    config = ReplicaConfig(replica="r", events=f"ipc://{tmp_path}/events", replay=replay)
    consumer = ReplicaConsumer(config, index, rule=rule_for("vllm"))
    task = asyncio.create_task(consumer.run())
    yield consumer, index
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def settled(reached: Reached, consumer: ReplicaConsumer, process: Process) -> None:
    await reached(
        lambda: (
            consumer.stream.expected == process.publisher.next_seq
            and not consumer.stream.waiting
            and consumer.writer.active
            and not consumer.writer.pending
        )
    )


async def shown(consumer: ReplicaConsumer, index: MemoryIndex) -> set[bytes]:
    claim = consumer.writer.claim
    assert claim is not None
    assert (await index.fleet()).live().keys() == {claim.incarnation}
    return {bytes(key) for key in await index.held(claim.incarnation)}


FORMS: dict[str, list[tuple[str, HashFormat]]] = {
    "arrays to maps": [("0.23.0", "int"), ("0.24.0", "int")],
    "int to byte hashes": [("0.33.0", "int"), ("0.33.0", "bytes")],
    "both at once": [("0.10.2", "int"), ("0.33.0", "bytes")],
    "and back": [("0.33.0", "bytes"), ("0.14.0", "int")],
}


@pytest.mark.parametrize("following", [True, False], indirect=True, ids=["replay", "no replay"])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS.keys())
async def test_the_process_is_replaced_by_one_of_another_version(
    following: tuple[ReplicaConsumer, MemoryIndex],
    forms: list[tuple[str, HashFormat]],
    tmp_path: Path,
    reached: Reached,
) -> None:
    consumer, index = following
    replay = consumer.config.replay is not None
    for life, form in enumerate(forms):
        process = Process(tmp_path, [form], seed=life, replay=replay)
        restarts = consumer.stream.stats.restarts
        if not replay:  # what is published before the subscription stands is lost, as with the real engine
            await reached(process.followed)
        # More than the last process published, so that nothing but its numbers tell the restart.
        await process.run(60 + 40 * life)
        await settled(reached, consumer, process)
        assert await shown(consumer, index) == process.truth
        assert len(process.truth) > 20
        assert consumer.stream.stats.restarts - restarts == (life > 0)
        assert consumer.cause() == ""
        await process.end()
    assert consumer.inventory.parity
    assert consumer.stream.stats.malformed_batches == consumer.stream.stats.skipped_events == 0


@pytest.mark.parametrize("following", [True], indirect=True, ids=["replay"])
async def test_every_encoding_within_one_life(
    following: tuple[ReplicaConsumer, MemoryIndex], tmp_path: Path, reached: Reached
) -> None:
    """Stores in one form, removals in another: a block's name is the same in all of them."""
    consumer, index = following
    mixed: list[tuple[str, Any]] = [("0.10.2", "int"), ("0.33.0", "bytes"), ("0.23.0", "bytes"), ("0.26.0", "int")]
    process = Process(tmp_path, mixed, seed=9, replay=True)
    for _ in range(6):
        await process.run(40)
        await settled(reached, consumer, process)
        assert await shown(consumer, index) == process.truth
        assert consumer.inventory.resident() == {
            (0, int.from_bytes(digest[-8:], "big")): copies for digest, copies in process.pool.resident().items()
        }
    assert consumer.inventory.stats.unknown_removals == 0
    assert consumer.inventory.stats.removed > 20
    assert consumer.cause() == ""
    await process.end()
