"""Invariants of the inventory on random engines: it equals the oracle after every batch, closed, and leaves nothing.

Every example is one seed. A seed that ever failed is pinned as an example of its own.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from consumer_oracle import Oracle, Row, sha256_cbor, vllm_name
from consumer_world import Wild, encode, pool_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.consumers.inventory import Delta, Inventory
from metatrie.engines.rules import rule_for
from metatrie.proto.events import Batch, BlockRemoved, BlockStored, EngineHash, decode_batch
from metatrie.proto.hashing import Namespace

NAMESPACE = Namespace(model="m", block_size=16)
SEEDS = st.integers(0, 2**32 - 1)


class Mirror:
    """An index as the contract says one behaves: the sum of all writes since the last reset."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Row] = {}

    def take(self, delta: Delta) -> None:
        if delta.reset:
            self.rows = {}
        assert len({w.key for w in delta.writes}) == len(delta.writes)
        for w in delta.writes:
            if w.tiers:
                self.rows[bytes(w.key)] = Row(w.parent, bytes(w.head), w.depth, int(w.tiers))
            else:
                self.rows.pop(bytes(w.key), None)

    def assert_closed(self) -> None:
        for row in self.rows.values():
            assert row.parent is None or row.parent in self.rows
            assert (row.parent is None) == (row.depth == 0)


def tables(inventory: Inventory) -> dict[Any, Any]:
    return {where: dict(table) for where, table in inventory.tables().items() if table}


def assert_empty(inventory: Inventory, hashes: set[int]) -> None:
    """Nothing is left of anything."""
    assert tables(inventory) == {}
    assert (inventory.copies, inventory.held, inventory.attached, inventory.index_blocks) == (0, 0, 0, 0)
    assert inventory.ambiguous == 0
    assert inventory.nodes == 0
    assert all(inventory.node(EngineHash(h)) is None for h in hashes)


def follow(inventory: Inventory, oracle: Oracle, mirror: Mirror, batch: Batch) -> None:
    mirror.take(inventory.apply(batch))
    oracle.apply(batch)
    assert tables(inventory) == oracle.tables()
    rows = oracle.rows()
    assert mirror.rows == rows
    assert {bytes(k): int(t) for k, t in inventory.expected().items()} == {k: r.tiers for k, r in rows.items()}
    assert {
        bytes(w.key): Row(w.parent, bytes(w.head), w.depth, int(w.tiers)) for w in inventory.attached_writes()
    } == rows
    assert inventory.index_blocks == len(rows)
    assert inventory.held == len(oracle.held())
    mirror.assert_closed()


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_wild_engines(page: int, seed: int) -> None:
    rng = random.Random(seed)
    engine = Wild(rng, page=page, hybrid=rng.random() < 0.3)
    inventory, oracle, mirror = Inventory(NAMESPACE, hash_mode="recompute"), Oracle(), Mirror()
    hashes: set[int] = set()
    for _ in range(25):
        batch = decode_batch(encode(engine.batch()))
        hashes |= {h for e in batch.events if isinstance(e, BlockStored) for h in (*e.hashes, e.parent or 0)}
        follow(inventory, oracle, mirror, batch)
    follow(inventory, oracle, mirror, engine.empty())
    assert_empty(inventory, hashes)


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_random_vllm_pools(seed: int) -> None:
    rng = random.Random(seed)
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    oracle, mirror = Oracle(predict=partial(vllm_name, root=sha256_cbor("0"))), Mirror()
    for batch in pool_batches(rng, 60, hybrid=rng.random() < 0.3):
        follow(inventory, oracle, mirror, batch)
    assert inventory.stats.parity_bad == inventory.stats.hidden == inventory.stats.unknown_removals == 0
    assert not inventory.flaws


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_liars_can_neither_break_closure_nor_leak(seed: int) -> None:
    """Hashes that bind nothing: reused for other tokens and parents, their own ancestors, any size, any order."""
    rng = random.Random(seed)
    inventory, mirror = (
        Inventory(NAMESPACE, rule=rule_for("vllm"), hash_mode=rng.choice(["auto", "engine"])),
        Mirror(),
    )
    copies: dict[tuple[str, int, int], int] = {}
    for _ in range(60):
        events: list[Any] = []
        for _ in range(rng.randint(1, 4)):
            medium, group = rng.choice(["gpu", "gpu", "cpu", "disk"]), rng.choice([0, 0, 0, 1])
            hashes = [rng.randint(1, 8) for _ in range(rng.randint(1, 4))]
            if rng.random() < 0.35:
                events.append(BlockRemoved(hashes=hashes, medium=medium, group=group))
                for h in hashes:
                    if copies.get((medium, group, h)):
                        copies[medium, group, h] -= 1
                continue
            size = rng.choice([16, 16, 16, 4, 0])
            events.append(
                BlockStored(
                    hashes=hashes,
                    parent=rng.choice([None, *range(1, 9)]),
                    tokens=[rng.randint(0, 1)] * (size * len(hashes)) if rng.random() < 0.9 else [5],
                    block_size=size,
                    medium=medium,
                    group=group,
                    cache_salt=rng.choice([None, None, "s"]),
                    lookahead=rng.random() < 0.05,
                )
            )
            for h in hashes:
                copies[medium, group, h] = copies.get((medium, group, h), 0) + 1
        mirror.take(inventory.apply(Batch(1.0, events, 0)))
        mirror.assert_closed()
        assert {bytes(k): int(t) for k, t in inventory.expected().items()} == {
            k: r.tiers for k, r in mirror.rows.items()
        }
        assert inventory.copies == sum(copies.values())
        assert 0 <= inventory.attached <= inventory.held <= inventory.nodes <= 8
    removals = [BlockRemoved(hashes=[h], medium=m, group=g) for (m, g, h), n in copies.items() for _ in range(n)]
    rng.shuffle(removals)
    mirror.take(inventory.apply(Batch(2.0, removals, 0)))
    assert mirror.rows == {}
    assert_empty(inventory, set(range(1, 9)))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_bounds_hold_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    engine = Wild(rng, page=rng.choice([1, 4, 16, 64]), hybrid=rng.random() < 0.3)
    most = rng.randint(1, 40)
    inventory, mirror = Inventory(NAMESPACE, hash_mode="recompute", max_blocks=most), Mirror()
    for _ in range(30):
        mirror.take(inventory.apply(engine.batch()))
        mirror.assert_closed()
        assert inventory.copies <= most
        assert inventory.nodes <= 2 * most
        assert inventory.copies == sum(n for table in inventory.tables().values() for n in table.values())
        assert {bytes(k): int(t) for k, t in inventory.expected().items()} == {
            k: r.tiers for k, r in mirror.rows.items()
        }
    if inventory.stats.evicted and "inventory_bound" not in inventory.flaws:
        assert inventory.stats.cleared


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_where_batches_are_cut_does_not_matter(seed: int) -> None:
    """Deltas are per batch, truth is not: one event at a time, or all at once, ends in the same place."""
    rng = random.Random(seed)
    engine = Wild(rng, page=rng.choice([1, 4, 16, 64]))
    batches = [engine.batch() for _ in range(20)]
    events = [e for b in batches for e in b.events]
    whole, single = Inventory(NAMESPACE), Inventory(NAMESPACE)
    at_once, one_by_one = Mirror(), Mirror()
    at_once.take(whole.apply(Batch(1.0, events, 0)))
    for event in events:
        one_by_one.take(single.apply(Batch(1.0, [event], 0)))
    assert at_once.rows == one_by_one.rows
    assert tables(whole) == tables(single)
