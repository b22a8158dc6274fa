"""What no engine can be made to do on demand: scripted events, through a real sidecar, Redis and router."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from chaos_script import Prompt, ScriptedEngine, encode, tokens_of
from metatrie.proto.hashing import Namespace
from metatrie.scripts.chaos import Sidecar, World, WorldConfig, lose

pytestmark = pytest.mark.asyncio(loop_scope="module")

Measured = Callable[..., None]
NAMESPACE = Namespace(model="chaos", block_size=16)
NAME = "scripted"
HWM = 500
"""Messages the engine queues for a subscriber before it drops."""


class Stage:
    """One scripted engine, followed by one sidecar, seen through a router."""

    def __init__(self, world: World, engine: ScriptedEngine, sidecar: Sidecar) -> None:
        self.world, self.engine, self.sidecar = world, engine, sidecar
        self._numbers = iter(range(1, 1_000_000))

    def prompt(self, blocks: int) -> Prompt:
        return Prompt(NAMESPACE, tokens_of(next(self._numbers), blocks))

    async def depth(self, prompt: Prompt) -> int:
        return await self.world.depth(NAME, prompt.tokens)

    async def reaches(self, prompt: Prompt, blocks: int) -> float:
        async def reached() -> bool:
            return await self.depth(prompt) == blocks

        return await self.world.until(reached, f"{blocks} blocks of it are matched")

    async def is_in(self, state: str, cause: str = "") -> float:
        async def right() -> bool:
            return await self.world.state(NAME) == (state, cause)

        return await self.world.until(right, f"{state} {cause}")

    async def applied(self) -> None:
        """Everything published so far is applied and acknowledged."""

        async def done() -> bool:
            page = await self.world.inventory(self.sidecar)
            return bool(page["next_seq"] == self.engine.next and not page["pending"])

        await self.world.until(done, "everything published is applied")

    async def connected(self) -> None:
        """What is published comes through the subscription, not only through a replay."""

        async def live() -> bool:
            replayed = await self.metric("stream_replayed_batches_total")
            self.engine.publish(self.prompt(1).stored())
            await self.applied()
            return await self.metric("stream_replayed_batches_total") == replayed

        await self.world.until(live, "events come through the subscription")

    async def metric(self, name: str) -> float:
        return await self.world.metric(self.sidecar, f"metatrie_{name}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Stage]:
    config = WorldConfig(engines=0, checkpoints=False)
    async with World(config) as world:
        engine = ScriptedEngine(NAME, hwm=HWM)
        await engine.start()
        sidecar = world.make_sidecar("sidecar-scripted", engine)
        await sidecar.start()
        try:
            stage = Stage(world, engine, sidecar)
            await stage.is_in("exact")
            yield stage
        finally:
            await sidecar.process.stop()
            await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stage(shared: Stage) -> Stage:
    """A new engine process each, as far as anybody can tell, and nobody else's events."""
    for wire in (shared.engine.events, shared.engine.replay):
        assert wire is not None
        wire.heal()
    shared.engine.publish(shared.prompt(1).stored())  # so that the restart shows
    await shared.engine.restart()
    first = shared.prompt(1)
    shared.engine.publish(first.stored())
    await shared.reaches(first, 1)
    await shared.is_in("exact")
    await shared.connected()
    return shared


async def test_a_missing_parent_detaches_and_heals_by_itself(stage: Stage, measured: Measured) -> None:
    prompt = stage.prompt(12)
    stage.engine.publish(prompt.stored(4))
    await stage.applied()
    assert await stage.depth(prompt) == 0
    assert await stage.metric("inventory_detached") == 8
    stored = time.monotonic()
    stage.engine.publish(prompt.stored(0, 4))
    await stage.reaches(prompt, 12)
    converge = time.monotonic() - stored
    stage.engine.publish(prompt.removed(2, 3))
    await stage.reaches(prompt, 2)
    stage.engine.publish(prompt.stored(2, 3))
    await stage.reaches(prompt, 12)
    assert await stage.world.state(NAME) == ("exact", "")
    measured(
        "parent missing",
        injected="a chain's tail published before its head; a block in its middle removed and stored again",
        asserted="the tail is kept and not matched, and attached with its head",
        converge=converge,
    )


async def test_a_block_with_two_copies_survives_the_removal_of_one(stage: Stage, measured: Measured) -> None:
    prompt = stage.prompt(3)
    stage.engine.publish(prompt.stored())
    stage.engine.publish(prompt.stored())
    stage.engine.publish(prompt.removed(1, 2))
    await stage.applied()
    assert await stage.depth(prompt) == 3
    removed = time.monotonic()
    stage.engine.publish(prompt.removed(1, 2))
    await stage.reaches(prompt, 1)
    measured(
        "duplicate copies, one removed",
        injected="the same blocks stored twice, one removed once, then again",
        asserted="held until the second removal",
        converge=time.monotonic() - removed,
    )


@pytest.mark.parametrize(
    ("what", "poison", "counter", "cause"),
    ids=["no batch", "cut short", "unknown kind", "wrong type"],
    argvalues=[
        ("a payload that is no batch", b"\xc1\xc1", "stream_malformed_batches_total", "malformed_batch"),
        ("a payload cut short", encode([{"type": "AllBlocksCleared"}])[:-4], "stream_malformed_batches_total", None),
        ("an event of an unknown kind", encode([{"type": "BlockTeleported"}]), "stream_unknown_kinds_total", ""),
        (
            "an event with a field of the wrong type",
            encode([{"type": "BlockStored", "block_hashes": "x"}]),
            "stream_skipped_events_total",
            "skipped_event",
        ),
    ],
)
async def test_a_poisoned_batch_costs_itself(
    stage: Stage, measured: Measured, what: str, poison: bytes, counter: str, cause: str | None
) -> None:
    before, after = stage.prompt(4), stage.prompt(4)
    count = await stage.metric(counter)
    stage.engine.publish(before.stored())
    sent = time.monotonic()
    stage.engine.send(poison)
    stage.engine.publish(after.stored())
    await stage.reaches(after, 4)
    assert await stage.depth(before) == 4
    assert await stage.metric(counter) == count + 1
    if cause == "":
        assert await stage.world.state(NAME) == ("exact", "")
    else:
        await stage.is_in("degraded", cause or "malformed_batch")
    detect = time.monotonic() - sent
    stage.engine.publish({"type": "AllBlocksCleared"})
    await stage.is_in("exact")
    measured(
        f"poison: {what}",
        injected="published between two good batches",
        asserted="counted and skipped, its neighbours applied"
        + ("" if cause == "" else "; `degraded` until a clear"),
        detect=detect,
    )


async def test_a_poisoned_event_costs_neither_its_batch_nor_its_neighbours(stage: Stage) -> None:
    prompt = stage.prompt(6)
    bad = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": 1.5, "token_ids": [], "block_size": 16}
    stage.engine.publish(prompt.stored(0, 3), bad, 17, {"type": "Novelty"}, prompt.stored(3))
    await stage.reaches(prompt, 6)
    await stage.is_in("degraded", "skipped_event")


async def test_messages_that_are_no_frames_cost_themselves(stage: Stage, measured: Measured) -> None:
    prompt = stage.prompt(4)
    count = await stage.metric("stream_malformed_frames_total")
    sent = time.monotonic()
    for frames in ((b"",), (b"", b"\0" * 8), (b"", b"\0" * 7, b"x"), (b"",) * 4):
        stage.engine.send_raw(*frames)
    stage.engine.publish(prompt.stored())
    await stage.reaches(prompt, 4)
    assert await stage.metric("stream_malformed_frames_total") == count + 4
    measured(
        "truncated frames",
        injected="messages of one, two and four frames, and one with a sequence number of seven bytes",
        asserted="counted and skipped; the stream goes on",
        detect=time.monotonic() - sent,
    )


async def test_a_policy_for_what_is_lost_for_good(stage: Stage, measured: Measured) -> None:
    engine = stage.engine
    assert engine.replay is not None
    kept, lost, after = stage.prompt(3), stage.prompt(3), stage.prompt(3)
    engine.publish(kept.stored())
    await stage.reaches(kept, 3)
    engine.ring.clear()
    engine.events.loses = lose(1)
    engine.publish(lost.stored())
    engine.ring.clear()  # nor does the ring have it
    sent = time.monotonic()
    engine.publish(after.stored())
    await stage.reaches(after, 3)
    await stage.is_in("degraded", "gap")
    detect = time.monotonic() - sent
    assert (await stage.depth(kept), await stage.depth(lost)) == (3, 0)
    assert await stage.metric("inventory_unsure") > 0
    engine.publish({"type": "AllBlocksCleared"}, after.stored())
    cleared = time.monotonic()
    await stage.is_in("exact")
    assert await stage.metric("inventory_unsure") == 0
    measured(
        "batch lost, and not in the replay ring either",
        injected="one message dropped, the ring emptied",
        asserted="`degraded (gap)`; what was known is served on, as suspect, until a clear",
        detect=detect,
        converge=time.monotonic() - cleared,
    )


async def test_a_late_subscriber_past_the_ring_learns_as_roots_are_seen(stage: Stage, measured: Measured) -> None:
    engine = stage.engine
    old, tail = stage.prompt(10), stage.prompt(10)
    await stage.sidecar.process.kill()
    engine.publish(old.stored(), tail.stored(0, 5))
    engine.publish(tail.stored(5))
    while len(engine.ring) > 1:
        engine.ring.popleft()
    started = time.monotonic()
    await stage.sidecar.start()
    await stage.is_in("degraded", "history_lost")
    detect = time.monotonic() - started
    assert (await stage.depth(old), await stage.depth(tail)) == (0, 0)
    assert await stage.metric("inventory_detached") == 5
    stored = time.monotonic()
    engine.publish(tail.stored(0, 5))
    await stage.reaches(tail, 10)
    measured(
        "subscriber joins past the replay ring",
        injected="a sidecar without checkpoint started when the ring holds only the last of three batches",
        asserted="`degraded (history_lost)`; detached tails are matched once their heads are seen",
        detect=detect,
        converge=time.monotonic() - stored,
    )


async def test_a_late_subscriber_gets_the_whole_history(stage: Stage, measured: Measured) -> None:
    prompts = [stage.prompt(8) for _ in range(200)]
    await stage.sidecar.process.kill()
    for prompt in prompts:
        stage.engine.publish(prompt.stored())
    started = time.monotonic()
    await stage.sidecar.start()
    for prompt in (prompts[0], prompts[99], prompts[199]):
        await stage.reaches(prompt, 8)
    await stage.is_in("exact")
    measured(
        "subscriber joins late",
        injected="a sidecar without checkpoint started after 200 batches, then silence",
        asserted="the replay is asked for at once, not at the next event; everything is there",
        converge=time.monotonic() - started,
    )


async def test_a_stopped_consumer_loses_nothing_under_a_flood(stage: Stage, measured: Measured) -> None:
    """More than every queue holds while it is stopped: a gap, then the replay, with memory bounded throughout."""
    engine, world = stage.engine, stage.world
    gaps = await stage.metric("stream_gaps_total") + await stage.metric("stream_probe_finds_total")
    before = world.memory_of(stage.sidecar.process)
    stage.sidecar.process.signal(signal.SIGSTOP)
    prompts = [stage.prompt(16) for _ in range(1500)]
    padding = {"ballast": b"\0" * 32_768}  # no field of any engine; more than all socket buffers together
    for at, prompt in enumerate(prompts):
        engine.publish(prompt.stored() | padding)
        if at % 100 == 0:
            await asyncio.sleep(0)
    for prompt in prompts[:-10]:
        engine.publish(prompt.removed())
    stage.sidecar.process.signal(signal.SIGCONT)
    continued = time.monotonic()
    await stage.applied()
    await stage.is_in("exact")
    converge = time.monotonic() - continued
    assert await stage.metric("stream_gaps_total") + await stage.metric("stream_probe_finds_total") > gaps
    assert [await stage.depth(prompts[at]) for at in (0, -11, -10, -1)] == [0, 0, 16, 16]
    assert await stage.metric("inventory_index_blocks") == engine.next - (2 * len(prompts) - 10) + 10 * 16
    grown = world.memory_of(stage.sidecar.process) - before
    assert grown < 256 << 20
    measured(
        "consumer too slow",
        injected="SIGSTOP while 3,000 batches, 50 MB, are published past a queue of 500, SIGCONT",
        asserted=f"a gap, then the replay; equal to what was published; {max(0, grown) >> 20} MiB more resident",
        converge=converge,
    )


async def test_the_script_speaks_like_an_engine() -> None:
    """The oracle of this file: names are canonical hashes, so parity is established from the first event."""
    prompt = Prompt(NAMESPACE, tokens_of(1, 3))
    batch: Any = msgspec.msgpack.decode(encode([prompt.stored(1)]))
    assert batch[1][0]["parent_block_hash"] == prompt.names[0]
    assert batch[1][0]["token_ids"] == prompt.tokens[16:]
