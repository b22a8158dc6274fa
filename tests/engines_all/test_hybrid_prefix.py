"""Usable prefixes of hybrid models: the index promises what the engine itself would find, on both backends.

The engine is the simulated vLLM pool, which is checked byte for byte against vLLM's own recordings; its `match` is
the truth here. Mamba groups and wide group blocks, which it does not model, are checked against their definition.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.consumers.evidence import Departures, evidence
from metatrie.consumers.inventory import Delta, Inventory
from metatrie.consumers.stream import Stream
from metatrie.engines.pool import BlockPool, Sequence
from metatrie.engines.publisher import EventEncoder
from metatrie.engines.rules import rule_for
from metatrie.engines.versions import traits_of
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.events import Batch, BlockRemoved, BlockStored, EngineHash, decode_batch
from metatrie.proto.hashing import BlockKey, Chain, Namespace, none_hash
from metatrie.proto.index import THROUGH, BlockWrite, Incarnation, Index, PageHead, ReplicaRef, ReplicaSpec, TierMask
from metatrie.scripts.diagnosis import judge

if TYPE_CHECKING:
    from .conftest import Reached

SIZE = 16
NAMESPACE = Namespace(model="m", block_size=SIZE)


class Written:
    """One replica's part of an index, kept up to date."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.incarnation: Incarnation | None = None
        self.version = 0

    async def take(self, delta: Delta) -> None:
        if delta.reset or self.incarnation is None:
            spec = ReplicaSpec(ref=ReplicaRef("hybrid"), engine="vllm")
            claim = await self.index.claim(spec, owner="test", lease_s=600, activate=True)
            self.incarnation, self.version = claim.incarnation, 0
        appear = sorted((w for w in delta.writes if w.tiers), key=lambda w: w.depth)
        vanish = sorted((w for w in delta.writes if not w.tiers), key=lambda w: -w.depth)
        if delta.writes:
            self.version += 1
            await self.index.write(self.incarnation, self.version, appear + vanish)

    async def depth(self, tokens: list[int]) -> tuple[int, tuple[int, ...]]:
        found = await self.index.match(Chain(NAMESPACE.root, SIZE, tokens))
        depth = found.depths.get(self.incarnation) if self.incarnation is not None else None
        return (0, (0, 0, 0)) if depth is None else (depth.blocks, depth.tiers)


@pytest.fixture(params=["memory", "redis"])
async def written(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Written]:
    store = MemoryStore() if request.param == "memory" else await open_store(redis_url)
    yield Written(await store.open(NAMESPACE))
    await store.close()


class HybridEngine:
    """The simulated pool of a model with full attention and a sliding window, under random requests."""

    def __init__(self, rng: random.Random, *, blocks: int, window: int) -> None:
        self.rng = rng
        self.pool = BlockPool(blocks, SIZE, none_hash("0"), windows=(None, window))
        self.encoder = EventEncoder(traits_of("0.33.0"), SIZE)
        self.running: list[Sequence] = []
        self.prompts: list[list[int]] = [[]]

    def step(self) -> Batch | None:
        rng = self.rng
        dice = rng.random()
        if dice < 0.5:
            tokens = list(rng.choice(self.prompts))
            tokens = tokens[: rng.randrange(len(tokens) + 1)]
            tokens += [rng.randrange(3) for _ in range(rng.randint(1, 120))]
            self.prompts = [*self.prompts[-20:], tokens]
            sequence = self.pool.sequence(list(tokens))
            if self.pool.allocate(sequence, len(tokens), self.pool.match(sequence)):
                self.running.append(sequence)
        elif dice < 0.8 and self.running:
            sequence = rng.choice(self.running)
            sequence.tokens.append(rng.randrange(3))
            if not self.pool.allocate(sequence, len(sequence.tokens)):
                sequence.tokens.pop()
        elif self.running:
            self.pool.free(self.running.pop(rng.randrange(len(self.running))))
        elif rng.random() < 0.1:
            self.pool.reset()
        events = self.pool.take_events()
        return decode_batch(self.encoder.batch(events, ts=1.0, rank=0)) if events else None

    def probe(self) -> tuple[list[int], int]:
        """A prompt, and how many of its full blocks the engine would reuse, the last token left aside."""
        tokens = list(self.rng.choice(self.prompts))
        tokens = tokens[: self.rng.randrange(len(tokens) + 1)] + [self.rng.randrange(3)] * self.rng.randrange(20)
        return tokens, self.pool.match(self.pool.sequence([*tokens, 0])).tokens // SIZE


async def follow(engine: HybridEngine, inventory: Inventory, written: Written, steps: int) -> tuple[int, int]:
    """Run both; every probe must agree. Returns (hits, hits shorter than the full-attention chain)."""
    hits = shorter = 0
    for _ in range(steps):
        batch = engine.step()
        if batch is not None:
            await written.take(inventory.apply(batch))
        tokens, truth = engine.probe()
        blocks, tiers = await written.depth(tokens)
        assert (blocks, tiers) == (truth, (truth, 0, 0))
        hits += truth > 0
        keys = Chain(NAMESPACE.root, SIZE, tokens).keys(len(tokens) // SIZE)
        held = next((i for i, key in enumerate(keys) if not inventory.tiers(key)), len(keys))
        shorter += truth < held
    return hits, shorter


@pytest.mark.parametrize("window", [32, 100])
async def test_the_index_promises_what_the_engine_would_find(written: Written, window: int) -> None:
    rng = random.Random(window)
    engine = HybridEngine(rng, blocks=60, window=window)
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    hits, shorter = await follow(engine, inventory, written, 400)
    assert hits > 100
    assert shorter > 10, "the window must have mattered"
    assert not inventory.flaws


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
async def test_the_same_on_random_engines(seed: int) -> None:
    rng = random.Random(seed)
    engine = HybridEngine(rng, blocks=rng.randint(12, 80), window=rng.choice([2, 16, 17, 32, 33, 64, 200]))
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    await follow(engine, inventory, Written(await MemoryStore().open(NAMESPACE)), 80)


async def test_a_restored_inventory_knows_its_groups() -> None:
    engine = HybridEngine(random.Random(5), blocks=40, window=32)
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    for _ in range(60):
        batch = engine.step()
        if batch is not None:
            inventory.apply(batch)
    other = Inventory(NAMESPACE, rule=rule_for("vllm"))
    other.restore(inventory.state())
    other.settle()
    assert other.expected() == inventory.expected()
    assert any(tiers & THROUGH for tiers in inventory.expected().values())
    written = Written(await MemoryStore().open(NAMESPACE))
    await written.take(Delta(True, list(other.attached_writes())))
    await follow(engine, other, written, 60)


def stored(first: int, count: int, **fields: Any) -> BlockStored:
    """Blocks `first` on of one prompt of all different tokens; engine hashes are 1000 + index."""
    where = {"hashes": [EngineHash(1000 + i) for i in range(first, first + count)], "block_size": SIZE} | fields
    where.setdefault("tokens", list(range(first * SIZE, (first + count) * SIZE)))
    return BlockStored(parent=EngineHash(999 + first) if first else None, **where)


def ends(inventory: Inventory, blocks: int) -> list[int]:
    """Lengths, in blocks, at which that prompt may end in a hit."""
    keys = Chain(NAMESPACE.root, SIZE, list(range(blocks * SIZE))).keys(blocks)
    return [i + 1 for i, key in enumerate(keys) if inventory.tiers(key) and not inventory.tiers(key) & THROUGH]


def applied(*events: Any) -> Inventory:
    inventory = Inventory(NAMESPACE)
    inventory.apply(Batch(1.0, list(events), 0))
    return inventory


FULL = {"kind": "full_attention", "group": 0}


def test_a_recurrent_state_counts_at_its_own_point_only() -> None:
    mamba = stored(0, 8, group=1, kind="mamba", hashes=[EngineHash(1003), EngineHash(1007)])
    inventory = applied(stored(0, 8, **FULL), mamba)
    assert ends(inventory, 8) == [4, 8]
    inventory.apply(Batch(2.0, [BlockRemoved(hashes=[EngineHash(1007)], group=1)], 0))
    assert ends(inventory, 8) == [4]
    assert not inventory.flaws


def test_a_group_with_wider_blocks_counts_where_they_end() -> None:
    """A group block of k units is named like its last unit."""
    wide = {"group": 1, "kind": "sliding_window", "window": 33, "block_size": 32, "tokens": list(range(128))}
    inventory = applied(
        stored(0, 8, **FULL), stored(0, 4, hashes=[EngineHash(1000 + i) for i in (1, 3, 5, 7)], **wide)
    )
    assert ends(inventory, 8) == [2, 4, 6, 8]
    inventory.apply(Batch(2.0, [BlockRemoved(hashes=[EngineHash(1003)], group=1)], 0))
    assert ends(inventory, 8) == [2, 6, 8]


def test_the_window_may_be_heard_of_before_the_chain() -> None:
    window = {"group": 1, "kind": "sliding_window", "window": 32}
    inventory = applied(stored(0, 2, **window), stored(0, 4, **FULL))
    assert ends(inventory, 4) == [1, 2]


def test_a_masked_group_that_names_no_block_still_counts_as_a_group() -> None:
    empty = stored(0, 0, group=1, kind="sliding_window", window=32, tokens=list(range(64)))
    assert ends(applied(stored(0, 4, **FULL), empty), 4) == []


@pytest.mark.parametrize("kind", ["chunked_local_attention", "unknown", None])
def test_a_group_whose_need_is_unknown_must_hold_everything_and_says_so(kind: str | None) -> None:
    inventory = applied(stored(0, 4, **FULL), stored(0, 2, group=1, kind=kind), stored(3, 1, group=1, kind=kind))
    assert ends(inventory, 4) == [1, 2]
    assert inventory.flaws == {"unknown_group_kind"}


@pytest.mark.parametrize("kind", ["encoder_only_attention", "cross_attention"])
def test_groups_outside_prefix_caching_need_nothing(kind: str) -> None:
    assert ends(applied(stored(0, 4, **FULL), stored(0, 1, group=1, kind=kind)), 4) == [1, 2, 3, 4]


def test_a_second_full_attention_group_counts_as_well() -> None:
    inventory = applied(stored(0, 4, **FULL), stored(0, 3, group=2, kind="mla_attention"))
    assert ends(inventory, 4) == [1, 2, 3]
    assert not inventory.flaws


def test_every_needed_group_must_hold_what_it_needs() -> None:
    window = stored(2, 2, group=1, kind="sliding_window", window=32)
    state = stored(2, 1, group=2, kind="mamba")
    assert ends(applied(stored(0, 4, **FULL), window, state), 4) == []
    assert ends(applied(stored(0, 4, **FULL), window, stored(3, 1, group=2, kind="mamba")), 4) == [4]


def test_an_engine_block_wider_than_an_index_block_is_reused_whole() -> None:
    wide = BlockStored(hashes=[EngineHash(1), EngineHash(2)], parent=None, tokens=list(range(128)), block_size=64)
    assert ends(applied(wide), 8) == [4, 8]


# ---- the index contract: blocks a prompt may pass through and not end with, on both backends ----------------------


def writes(masks: list[int]) -> list[BlockWrite]:
    keys = [BlockKey(i.to_bytes(8, "big")) for i in range(1, len(masks) + 1)]
    return [
        BlockWrite(key, keys[i - 1] if i else None, PageHead(keys[i - i % 32]), i, TierMask(mask))
        for i, (key, mask) in enumerate(zip(keys, masks, strict=True))
    ]


def chain_of(blocks: int) -> Chain:
    return Chain.of_keys([BlockKey(i.to_bytes(8, "big")) for i in range(1, blocks + 1)])


@pytest.mark.parametrize("limit", [512, 7])
@pytest.mark.parametrize("seed", range(6))
async def test_matches_end_before_the_blocks_passed_through(redis_url: str, limit: int, seed: int) -> None:
    """Long chains over many pages, several tiers, and pages that overflow, against the definition."""
    rng = random.Random(seed)
    stores: list[Any] = [MemoryStore(), await open_store(redis_url)]
    masks = [rng.choice([1, 1, 1, 2, 3, 4]) | (THROUGH if rng.random() < 0.8 else 0) for _ in range(150)]
    masks[40:110] = [1 | THROUGH] * 70
    for store in stores:
        index = await store.open(NAMESPACE)
        if store is not stores[0]:
            index._writer._limit = limit  # the overflow limit, so that small pages show it
        spec = ReplicaSpec(ref=ReplicaRef("r"), engine="vllm")
        claim = await index.claim(spec, owner="test", lease_s=60, activate=True)
        await index.write(claim.incarnation, 1, writes(masks))
        held = await index.held(claim.incarnation)
        assert [held[w.key] for w in writes(masks)] == masks
        for blocks in [1, 5, 31, 32, 33, 60, 64, 100, 109, 120, 149, 150]:
            usable = blocks
            while usable and masks[usable - 1] & THROUGH:
                usable -= 1
            tiers = [0, 0, 0]
            for mask in masks[:usable]:
                tiers[0 if mask & 1 else 1 if mask & 2 else 2] += 1
            found = (await index.match(chain_of(blocks))).depths.get(claim.incarnation)
            assert (0, (0, 0, 0)) if found is None else (found.blocks, found.tiers) == (usable, tuple(tiers))
        await index.write(claim.incarnation, 2, writes([mask & ~THROUGH for mask in masks]))
        found = (await index.match(chain_of(150))).depths[claim.incarnation]
        assert found.blocks == 150
        await index.write(claim.incarnation, 3, writes([0] * 150)[::-1])
        assert await index.held(claim.incarnation) == {}
        await store.close()


async def test_a_consumers_own_samples_find_nothing_wrong_with_a_hybrid_index(
    reached: Reached, tmp_path: Path
) -> None:
    """Samples are asked as prompts; one that ends where a window lacks something proves no index wrong."""
    engine = HybridEngine(random.Random(3), blocks=50, window=64)
    index = await MemoryStore().open(NAMESPACE)
    consumer = ReplicaConsumer(ReplicaConfig(replica="h", events=f"ipc://{tmp_path}/e"), index, rule=rule_for("vllm"))
    task = asyncio.create_task(consumer.run())
    await reached(lambda: consumer.writer.active)
    for _ in range(120):
        batch = engine.step()
        if batch is not None:
            consumer.writer.submit(consumer.inventory.apply(batch), batch.ts)
    await reached(lambda: consumer.writer.current and not consumer.writer.pending)
    assert any(tiers & THROUGH for tiers in consumer.inventory.expected().values())
    for _ in range(10):
        assert await consumer.sampler.round()
    assert (consumer.sampler.precision, consumer.sampler.recall) == (1.0, 1.0)
    assert consumer.sampler.stats.missing == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_an_explanation_says_why_held_blocks_are_no_hit() -> None:
    window = {"group": 1, "kind": "sliding_window", "window": 32}
    inventory = applied(stored(0, 6, **FULL), stored(0, 3, **window), stored(5, 1, **window))
    assert ends(inventory, 6) == [1, 2, 3]
    inventory.apply(Batch(2.0, [BlockRemoved(hashes=[EngineHash(1005)], group=1)], 0))
    keys = Chain(NAMESPACE.root, SIZE, list(range(96))).keys(6)
    said = evidence(
        keys,
        inventory,
        Departures(),
        Stream(replay=False),
        ref=ReplicaRef("r"),
        namespace=NAMESPACE,
        hash_mode="auto",
        state="exact",
        cause="",
    )
    verdict = judge(keys, 96, said)
    assert (verdict.matched_blocks, verdict.reason) == (3, "no_usable_end")
    assert "blocks 3 to 5 are held" in verdict.text
