"""TensorRT-LLM through its relay: JSON events over real HTTP, real sockets, a consumer, an index.

The engine here is a small model of what the wire-format notes (section 5) say of TensorRT-LLM: a paged cache with
two tiers whose events wait in a bounded buffer until somebody takes them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.consumers.inventory import Inventory
from metatrie.engines.rules import rule_for
from metatrie.engines.trtllm import RelayConfig, Translator, TrtllmEvent, TrtllmRelay
from metatrie.indexer.memory import MemoryIndex
from metatrie.proto.errors import ConfigError, MalformedBatch
from metatrie.proto.events import decode_batch
from metatrie.proto.hashing import Chain, Namespace, PromptExtras
from metatrie.proto.index import THROUGH

if TYPE_CHECKING:
    from .conftest import Reached

SIZE = 32
NAMESPACE = Namespace(model="m", block_size=16)


def tokens_of(*ids: int) -> list[dict[str, Any]]:
    return [{"type": "unique_token", "token_id": i, "token_extra_id": 0} for i in ids]


def stored_block(name: int | str, ids: list[int], **fields: Any) -> dict[str, Any]:
    block = {"type": "stored_block", "block_hash": name, "tokens": tokens_of(*ids), "cache_level": 0, "priority": 35}
    return {**block, "mm_keys": [], **fields}


class Engine:
    """Events in, events out; block hashes are opaque numbers."""

    def __init__(self, *, buffer: int = 10_000, rank: int | None = None) -> None:
        self.buffer: deque[dict[str, Any]] = deque(maxlen=buffer)
        self.rank = rank
        self.next_id = 0
        self.levels: dict[int, int] = {}
        self.paths: dict[tuple[int, ...], int] = {}
        self.say({"type": "created", "num_blocks_per_cache_level": [100, 100]})

    def say(self, data: dict[str, Any], window: int = 4096) -> None:
        event = {"event_id": self.next_id, "data": data, "window_size": window, "hash_algo": "v1_block_key"}
        self.buffer.append(event if self.rank is None else event | {"attention_dp_rank": self.rank})
        self.next_id += 1

    def store(self, tokens: list[int]) -> None:
        """A prompt was computed: what is new of its full blocks, and a partial block at the end."""
        parent, blocks = None, []
        for end in range(SIZE, len(tokens) + SIZE, SIZE):
            path = tuple(tokens[:end])
            name = self.paths.setdefault(path, 7919 * (len(self.paths) + 1))
            if not blocks and name in self.levels:
                parent = name
                continue
            # Blocks further down that are held already are told of again, where they are.
            level = self.levels.get(name, 0)
            blocks.append(stored_block(name, tokens[end - SIZE : end], cache_level=level))
            if end <= len(tokens):
                self.levels[name] = level
        if blocks:
            self.say({"type": "stored", "parent_hash": parent, "blocks": blocks})

    def move(self, name: int, level: int) -> None:
        old, self.levels[name] = self.levels[name], level
        diff = {"type": "event_diff", "old_value": old, "new_value": level}
        self.say({"type": "updated", "block_hash": name, "cache_level": diff, "priority": None})

    def remove(self, name: int) -> None:
        del self.levels[name]
        self.say({"type": "removed", "block_hashes": [name]})

    def take(self) -> list[dict[str, Any]]:
        events = list(self.buffer)
        self.buffer.clear()
        return events

    def truth(self) -> dict[bytes, int]:
        """What the index must show: blocks whose whole prefix is held, by tier, cut into index blocks."""
        found: dict[bytes, int] = {}
        for path, name in self.paths.items():
            above = [self.paths.get(path[:end]) for end in range(SIZE, len(path), SIZE)]
            if len(path) % SIZE or name not in self.levels or any(n not in self.levels for n in above):
                continue
            first, second = Chain(NAMESPACE.root, 16, list(path)).keys(len(path) // 16)[-2:]
            found[bytes(first)] = 1 << self.levels[name] | THROUGH
            found[bytes(second)] = 1 << self.levels[name]
        return found


def events_of(*raw: dict[str, Any], translator: Translator | None = None) -> list[dict[str, Any]]:
    translator = translator or Translator(SIZE)
    return [e for event in raw for e in translator.translate(msgspec.convert(event, TrtllmEvent))]


def picture(engine: Engine, translator: Translator, inventory: Inventory) -> dict[bytes, int]:
    for raw in engine.take():
        events = events_of(raw, translator=translator)
        inventory.apply(decode_batch(msgspec.msgpack.encode([1.0, events, 0])))
    return {bytes(k): int(t) for k, t in inventory.expected().items()}


@pytest.mark.parametrize("seed", range(8))
def test_the_picture_follows_a_random_engine(seed: int) -> None:
    rng = random.Random(seed)
    engine, translator, inventory = Engine(), Translator(SIZE), Inventory(NAMESPACE, rule=rule_for("trtllm"))
    for _ in range(150):
        match rng.randrange(4):
            case 0 | 1:
                shared = [rng.randrange(2)] * (SIZE * rng.randint(0, 4))
                engine.store([*shared, *(rng.randrange(3) for _ in range(rng.randint(1, 3 * SIZE)))])
            case 2 if engine.levels:
                name = rng.choice(list(engine.levels))
                engine.move(name, 1 - engine.levels[name])
            case 3 if engine.levels:
                engine.remove(rng.choice(list(engine.levels)))
        assert picture(engine, translator, inventory) == engine.truth()
    assert translator.partial > 10
    assert inventory.stats.unknown_removals == 0
    assert not inventory.flaws


def test_a_move_never_breaks_the_prefix() -> None:
    engine = Engine()
    engine.store(list(range(SIZE)))
    engine.move(engine.paths[tuple(range(SIZE))], 1)
    *_, there, gone = events_of(*engine.take())
    assert (there["type"], there["medium"]) == ("BlockStored", "CPU")
    assert (gone["type"], gone["medium"]) == ("BlockRemoved", "GPU")


def test_what_the_json_leaves_open_is_never_matched() -> None:
    ids = list(range(SIZE))
    salted = {"type": "stored", "parent_hash": None, "blocks": [stored_block(1, ids, cache_salt="tenant-a")]}
    image = {"type": "stored", "parent_hash": None, "blocks": [stored_block(2, ids, mm_keys=[{"hash": "ab"}])]}
    prompt_tuned = stored_block(3, ids)
    prompt_tuned["tokens"][0]["token_extra_id"] = 9
    media_ids = stored_block(4, ids)
    media_ids["tokens"][5]["token_id"] = "ab" * 32
    inventory = Inventory(NAMESPACE)
    raw = [
        salted,
        image,
        *({"type": "stored", "parent_hash": None, "blocks": [b]} for b in (prompt_tuned, media_ids)),
    ]
    events = events_of(*({"event_id": i, "data": data} for i, data in enumerate(raw)))
    inventory.apply(decode_batch(msgspec.msgpack.encode([1.0, events, 0])))
    shown = inventory.expected()
    assert not shown.keys() & set(Chain(NAMESPACE.root, 16, ids).keys(2))
    assert shown.keys() == set(Chain(NAMESPACE.root, 16, ids, PromptExtras(cache_salt="tenant-a")).keys(2))
    assert inventory.stats.unhashable == 3


def test_windows_are_cache_groups() -> None:
    created = {"type": "created", "num_blocks_per_cache_level": [10]}
    ids = list(range(SIZE))
    stored = {"type": "stored", "parent_hash": None, "blocks": [stored_block(5, ids)]}
    events = events_of(
        *(
            {"event_id": i, "window_size": w, "data": d}
            for i, (w, d) in enumerate([(512, created), (4096, created), (512, stored), (4096, stored)])
        )
    )
    assert [(e["group_idx"], e["kv_cache_spec_kind"], e["kv_cache_spec_sliding_window"]) for e in events] == [
        (0, "sliding_window", 512),
        (1, "full_attention", None),
    ]


def test_digest_names_reduce_to_their_last_eight_bytes() -> None:
    digest = "11" * 24 + "0123456789abcdef"
    data = {"type": "stored", "parent_hash": None, "blocks": [stored_block(digest, list(range(SIZE)))]}
    (event,) = decode_batch(msgspec.msgpack.encode([1.0, events_of({"event_id": 0, "data": data}), 0])).events
    assert event.hashes == [0x0123456789ABCDEF]  # type: ignore[union-attr]  # a store has hashes
    with pytest.raises(MalformedBatch):
        events_of({"event_id": 1, "data": {"type": "removed", "block_hashes": ["zz"]}})


# ---- the relay, over real sockets ---------------------------------------------------------------------------------


class Stack:
    """trtllm-serve, the relay, and a consumer with its index."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.engine = Engine()
        self.index = MemoryIndex(NAMESPACE)
        self.garbage: list[bytes] = []
        self.taken = 0

    async def events(self, request: web.Request) -> web.Response:
        body = self.garbage.pop(0) if self.garbage else json.dumps(self.engine.take()).encode()
        self.taken += 1
        return web.Response(body=body, content_type="application/json")

    async def settled(self) -> None:
        """Everything the engine said so far was taken, relayed and written."""
        taken = self.taken
        await self.reached(lambda: self.taken >= taken + 2 and not self.engine.buffer)
        publisher = self.relay.publishers[0]
        await self.reached(
            lambda: (
                self.consumer.stream.expected == publisher.next_seq
                and not self.consumer.stream.waiting
                and self.consumer.writer.active
                and not self.consumer.writer.pending
            )
        )

    async def shown(self) -> dict[bytes, int]:
        claim = self.consumer.writer.claim
        assert claim is not None
        return {bytes(k): int(t) for k, t in (await self.index.held(claim.incarnation)).items()}


@pytest.fixture
async def stack(tmp_path: Path, reached: Reached) -> AsyncIterator[Stack]:
    made = Stack(reached)
    app = web.Application()
    app.router.add_get("/kv_cache_events", made.events)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    made.relay = TrtllmRelay(
        RelayConfig(url=f"http://127.0.0.1:{port}", block_size=SIZE, events=events, replay=replay, poll_s=0.01)
    )
    await made.relay.start()
    config = ReplicaConfig(replica="t", engine="trtllm", events=events, replay=replay, replay_timeout_s=0.5)
    made.consumer = ReplicaConsumer(config, made.index, rule=rule_for("trtllm"))
    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(made.relay.run(session)), asyncio.create_task(made.consumer.run())]
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await runner.cleanup()


def prompt(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * SIZE))


async def test_events_arrive_and_a_restart_of_the_engine_clears(stack: Stack) -> None:
    stack.engine.store(prompt(0, 4))
    stack.engine.store(prompt(5000, 3))
    stack.engine.move(stack.engine.paths[tuple(prompt(0, 1))], 1)
    await stack.settled()
    assert await stack.shown() == stack.engine.truth()
    assert len(stack.engine.truth()) == 14
    assert stack.consumer.cause() == ""
    stack.engine = Engine()
    stack.engine.store(prompt(0, 2))
    await stack.settled()
    assert await stack.shown() == stack.engine.truth()
    assert stack.consumer.cause() == ""


async def test_an_overflowing_buffer_is_a_loss_that_shows(stack: Stack) -> None:
    stack.engine.store(prompt(0, 1))
    await stack.settled()
    stack.engine.next_id += 5  # five events were dropped before anybody took them
    stack.engine.store(prompt(1000, 1))
    await stack.settled()
    assert stack.consumer.cause() == "gap"
    assert stack.consumer.status().state == "degraded"


async def test_bodies_nobody_understands_cost_what_they_held(stack: Stack) -> None:
    stack.engine.store(prompt(0, 1))
    await stack.settled()
    stack.garbage += [b"{}", b'[{"event_id": -1}, {"event_id": "x"}]', b"<html>"]
    await stack.reached(lambda: not stack.garbage)
    stack.engine.store(prompt(1000, 1))
    await stack.settled()
    assert await stack.shown() == stack.engine.truth()
    assert stack.relay.malformed == 2
    assert stack.relay.failed_polls == 2
    assert stack.consumer.status().state == "degraded"


async def test_ranks_get_a_stream_each() -> None:
    relay = TrtllmRelay(RelayConfig(url="http://h", ranks=2, block_size=SIZE, events="inproc://t", replay=None))
    await relay.start()
    try:
        engines = [Engine(rank=0), Engine(rank=1)]
        for engine in engines:
            engine.store(prompt(0, 2))
        relay.take(json.dumps([e for engine in engines for e in engine.take()]).encode())
        assert [p.next_seq for p in relay.publishers] == [1, 1]
        assert [p.config.endpoint for p in relay.publishers] == ["inproc://t", "inproc://t_dp1"]
    finally:
        await relay.close()


async def test_unusable_endpoints_are_refused(tmp_path: Path) -> None:
    relay = TrtllmRelay(RelayConfig(url="http://h", ranks=2, events=f"ipc://{tmp_path}/e", replay=None))
    with pytest.raises(ConfigError, match="no place for rank 1"):
        await relay.start()
