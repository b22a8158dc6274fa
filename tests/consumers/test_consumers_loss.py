"""The policy `keep` after a loss: what is in doubt, what vouches for it, and when it goes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from consumer_world import pool_batches
from metatrie.consumers.inventory import DEFAULT_CAPACITY, Inventory
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event
from metatrie.proto.hashing import Namespace, block_key
from metatrie.proto.index import BlockWrite

NAMESPACE = Namespace(model="m", block_size=16)


def stored(*names: int, parent: int | None = None, medium: str = "gpu") -> BlockStored:
    """Blocks named by number; the name decides the tokens."""
    tokens = [name * 31 + i for name in names for i in range(16)]
    return BlockStored(
        hashes=[EngineHash(name) for name in names],
        parent=None if parent is None else EngineHash(parent),
        tokens=tokens,
        block_size=16,
        medium=medium,
    )


def removed(*names: int, medium: str = "gpu") -> BlockRemoved:
    return BlockRemoved(hashes=[EngineHash(name) for name in names], medium=medium)


def apply(inventory: Inventory, *events: Event) -> list[BlockWrite]:
    return inventory.apply(Batch(1.0, list(events))).writes


def held(inventory: Inventory, medium: str = "gpu") -> set[int]:
    return {name for _, name in inventory.resident(medium)}


def lossy(*events: Event, capacity: int | None = 10) -> Inventory:
    """An inventory that applied these, and then lost something."""
    inventory = Inventory(NAMESPACE)
    inventory.capacity = capacity
    apply(inventory, *events)
    inventory.doubt()
    inventory.settle()
    return inventory


def fresh(start: int = 1000) -> Iterator[int]:
    return iter(range(start, start + 10**6))


def test_nothing_is_in_doubt_until_something_is_lost() -> None:
    inventory = Inventory(NAMESPACE)
    inventory.capacity = 1
    apply(inventory, stored(*range(1, 50)))
    assert (inventory.unsure, len(held(inventory))) == (0, 49), "a bound that is wrong must not hurt an exact picture"


def test_a_loss_puts_everything_in_doubt_and_changes_nothing_yet() -> None:
    inventory = lossy(stored(1, 2, 3), stored(4, medium="cpu"))
    assert inventory.unsure == 4
    assert held(inventory) == {1, 2, 3}
    assert inventory.settle().writes == []


def test_what_nothing_vouches_for_goes_after_one_turnover() -> None:
    inventory, names = lossy(stored(1, 2, 3)), fresh()
    for _ in range(9):
        name = next(names)
        apply(inventory, stored(name), removed(name))
    assert held(inventory) == {1, 2, 3}
    name = next(names)
    writes = apply(inventory, stored(name), removed(name))
    assert held(inventory) == set()
    assert {w.tiers for w in writes} == {0}
    assert (inventory.stats.aged, inventory.unsure, inventory.copies, inventory.nodes) == (3, 0, 0, 0)


def test_a_block_stored_below_vouches_for_its_whole_prefix() -> None:
    inventory, names = lossy(stored(1, 2, 3), stored(7)), fresh()
    apply(inventory, stored(4, parent=3))
    assert inventory.unsure == 1
    for _ in range(20):
        name = next(names)
        apply(inventory, stored(name), removed(name))
    assert held(inventory) == {1, 2, 3, 4}


def test_a_suspect_that_is_stored_again_has_that_one_copy() -> None:
    inventory = lossy(stored(1), stored(1), stored(1))
    apply(inventory, stored(1))
    assert inventory.resident() == {(0, EngineHash(1)): 1}
    apply(inventory, removed(1))
    assert (held(inventory), inventory.copies) == (set(), 0)


def test_a_removal_settles_a_suspect() -> None:
    inventory = lossy(stored(1, 2))
    apply(inventory, removed(2))
    assert (held(inventory), inventory.unsure) == ({1}, 1)


def test_suspects_make_room_when_the_engine_could_not_hold_both_oldest_first() -> None:
    inventory = lossy(stored(1), stored(2), stored(3), capacity=5)
    apply(inventory, stored(10), stored(11), stored(12))
    assert held(inventory) == {2, 3, 10, 11, 12}
    apply(inventory, stored(13), stored(14))
    assert held(inventory) == {10, 11, 12, 13, 14}
    apply(inventory, stored(15))
    assert held(inventory) == {10, 11, 12, 13, 14, 15}, "what is certain stays, whatever the bound"


def test_a_doubt_keeps_its_age_when_more_is_lost() -> None:
    inventory, names = lossy(stored(1)), fresh()
    for _ in range(9):
        name = next(names)
        apply(inventory, stored(name), removed(name))
        inventory.doubt()
        inventory.settle()
    name = next(names)
    apply(inventory, stored(name), removed(name))
    assert held(inventory) == set()


def test_each_medium_turns_over_by_itself() -> None:
    inventory, names = lossy(stored(1), stored(2, medium="cpu")), fresh()
    for _ in range(10):
        name = next(names)
        apply(inventory, stored(name), removed(name))
    assert (held(inventory), held(inventory, "cpu")) == (set(), {2})
    for _ in range(DEFAULT_CAPACITY):
        name = next(names)
        apply(inventory, stored(name, medium="cpu"), removed(name, medium="cpu"))
    assert held(inventory, "cpu") == set()


def test_without_a_known_capacity_the_bound_is_generous() -> None:
    inventory, names = lossy(stored(1), capacity=None), fresh()
    for _ in range(DEFAULT_CAPACITY - 1):
        name = next(names)
        apply(inventory, stored(name), removed(name))
    assert held(inventory) == {1}
    name = next(names)
    apply(inventory, stored(name), removed(name))
    assert held(inventory) == set()


def test_a_clear_ends_every_doubt() -> None:
    inventory = lossy(stored(1, 2))
    apply(inventory, AllBlocksCleared(), stored(3))
    assert (inventory.unsure, held(inventory)) == (0, {3})


def test_the_engines_own_word_settles_everything() -> None:
    inventory = lossy(stored(1, 2, 3), stored(3))
    unknown = inventory.reconcile({EngineHash(1): 1, EngineHash(2): 2, EngineHash(99): 1})
    writes = inventory.settle().writes
    assert unknown == 1
    assert inventory.resident() == {(0, EngineHash(1)): 1, (0, EngineHash(2)): 2}
    assert [w.tiers for w in writes] == [0]
    assert (inventory.unsure, inventory.copies, inventory.stats.corrected) == (0, 3, 2)
    assert inventory.only_holds("gpu")


def test_a_block_known_by_name_only_can_be_held_again_on_the_engines_word() -> None:
    inventory = lossy(stored(1, 2, 3))
    apply(inventory, removed(2))
    assert len(inventory.expected()) == 1
    assert inventory.reconcile({EngineHash(name): 1 for name in (1, 2, 3)}) == 0
    inventory.settle()
    assert len(inventory.expected()) == 3


@pytest.mark.parametrize("share", [0.01, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_the_picture_stays_within_the_engine_and_closed_under_losses(seed: int, share: float) -> None:
    """Bounds and closure hold at every step, and it is nearer to the truth than what only applies what arrives."""
    rng = random.Random(seed)
    blocks = 24
    whole, kept, plain = (Inventory(NAMESPACE) for _ in range(3))
    kept.capacity = blocks
    wrong = {"kept": 0, "plain": 0}
    for at, batch in enumerate(pool_batches(random.Random(seed + 1), 1500, blocks=blocks + 1)):
        whole.apply(batch)
        if rng.random() < share:
            kept.doubt()
            continue
        kept.apply(batch)
        plain.apply(batch)
        if kept.unsure:
            assert len(kept.resident()) <= blocks
        shown = {w.key: w for w in kept.attached_writes()}
        for write in shown.values():
            assert write.parent is None or write.parent in shown
            assert kept.parent(write.key) == write.parent
            chain = kept.chain(write.key)
            assert (len(chain), chain[-1]) == (write.depth + 1, write.key)
        if at > 200:
            truth = whole.expected().keys()
            wrong["kept"] += len(kept.expected().keys() - truth)
            wrong["plain"] += len(plain.expected().keys() - truth)
    assert wrong["kept"] < wrong["plain"]


def test_keys_are_names_of_blocks() -> None:
    """The oracle of this file: a chain's keys come from its tokens."""
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2))
    node = inventory.node(EngineHash(2))
    assert node is not None
    assert node.digest is not None
    assert inventory.chain(block_key(node.digest))[-1] == block_key(node.digest)
