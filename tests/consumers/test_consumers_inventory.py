"""The inventory, case by case: what random engines do rarely, and every defect they ever uncovered."""

from __future__ import annotations

from typing import Any

import pytest
from metatrie.consumers.inventory import Delta, Inventory
from metatrie.engines.rules import rule_for
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash
from metatrie.proto.hashing import Chain, MediaItem, Namespace, PromptExtras
from metatrie.proto.index import THROUGH

NAMESPACE = Namespace(model="m", block_size=16)


def tokens(blocks: int, size: int = 16, base: int = 0) -> list[int]:
    return [base + t for t in range(blocks * size)]


def keys(count: int, *, toks: list[int] | None = None, **extras: Any) -> list[bytes]:
    """Keys of the first blocks of the prompt a router would ask for."""
    chain = Chain(NAMESPACE.root, 16, toks if toks is not None else tokens(count), PromptExtras(**extras))
    return [bytes(k) for k in chain.keys(count)[:count]]


def stored(*hashes: int, parent: int | None = None, start: int = 0, size: int = 16, **fields: Any) -> BlockStored:
    """A run of the one prompt 0, 1, 2, …; start: its first block, in blocks of `size`."""
    fields.setdefault("tokens", [start * size + t for t in range(len(hashes) * size)])
    return BlockStored(hashes=[EngineHash(h) for h in hashes], parent=parent, block_size=size, **fields)  # type: ignore[arg-type]  # an EngineHash is an int


def removed(*hashes: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved(hashes=[EngineHash(h) for h in hashes], **fields)


def apply(inventory: Inventory, *events: Any) -> Delta:
    return inventory.apply(Batch(1.0, list(events), 0))


def shown(inventory: Inventory) -> dict[bytes, int]:
    return {bytes(k): int(t) for k, t in inventory.expected().items()}


def name(key: bytes) -> int:
    """What an engine under our seed and rule calls the block of that key."""
    return int.from_bytes(key, "big")


# Prefix closure


def test_blocks_without_their_prefix_wait_for_it() -> None:
    inventory = Inventory(NAMESPACE)
    assert apply(inventory, stored(3, 4, parent=2, start=2)).writes == []
    assert (inventory.detached, inventory.index_blocks) == (2, 0)
    assert apply(inventory, stored(2, parent=1, start=1)).writes == []
    delta = apply(inventory, stored(1))
    assert {bytes(w.key) for w in delta.writes} == set(keys(4))
    assert [w.depth for w in sorted(delta.writes, key=lambda w: w.depth)] == [0, 1, 2, 3]
    assert inventory.detached == 0


def test_removing_a_parent_detaches_what_hangs_below_until_it_returns() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, 3))
    delta = apply(inventory, removed(2))
    assert {bytes(w.key): w.tiers for w in delta.writes} == dict.fromkeys(keys(3)[1:], 0)
    assert shown(inventory) == {keys(3)[0]: 1}
    assert inventory.detached == 1
    apply(inventory, stored(2, parent=1, start=1))
    assert shown(inventory) == dict.fromkeys(keys(3), 1)


def test_a_break_that_heals_inside_a_batch_costs_no_write() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, 3))
    assert apply(inventory, removed(2), stored(2, parent=1, start=1)).writes == []
    assert inventory.stats.unknown_removals == 0


def test_closure_is_over_the_union_of_tiers() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2), stored(2, parent=1, start=1, medium="cpu"))
    apply(inventory, removed(2), stored(1, medium="disk"), removed(1))
    assert shown(inventory) == {keys(2)[0]: 4, keys(2)[1]: 2}


def test_two_media_of_one_tier_hold_it_together() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1), stored(1, medium="cpu"), stored(1, medium="cpu_pinned"), removed(1))
    apply(inventory, removed(1, medium="cpu"))
    assert shown(inventory) == {keys(1)[0]: 2}
    apply(inventory, removed(1, medium="cpu_pinned"))
    assert shown(inventory) == {}


def test_offload_placeholders_need_the_block_to_be_known() -> None:
    inventory = Inventory(NAMESPACE)
    apply(
        inventory,
        stored(1),
        BlockStored(hashes=[EngineHash(1), EngineHash(9)], parent=None, tokens=[], block_size=0, medium="cpu"),
    )
    assert shown(inventory) == {keys(1)[0]: 3}
    assert inventory.detached == 1
    assert inventory.stats.unplaced == 2


def test_the_full_attention_group_is_indexed_and_a_sliding_window_says_where_a_prompt_may_end() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, kind="sliding_window", window=32), stored(1, group=1, kind="full_attention"))
    assert shown(inventory) == {keys(1)[0]: 1}
    apply(inventory, removed(1))
    assert shown(inventory) == {keys(1)[0]: 1 | THROUGH}
    apply(inventory, removed(1, group=1))
    assert shown(inventory) == {}


# Engine blocks of other sizes


def test_an_index_block_is_held_when_all_its_pages_are() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, 3, size=4))
    assert shown(inventory) == {}
    apply(inventory, stored(4, parent=3, start=3, size=4))
    assert shown(inventory) == {keys(1)[0]: 1}
    apply(inventory, removed(2))
    assert shown(inventory) == {}


def test_a_tier_change_of_an_early_page_reaches_the_block_it_is_part_of() -> None:
    """The pages between did not change, and once stopped the news."""
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, 3, 4, size=4), stored(1, 2, 3, 4, size=4, medium="cpu"))
    assert shown(inventory) == {keys(1)[0]: 3}
    delta = apply(inventory, removed(1))
    assert [int(w.tiers) for w in delta.writes] == [2]
    assert shown(inventory) == {keys(1)[0]: 2}


def test_a_wide_engine_block_is_several_index_blocks() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, size=64))
    # The engine reuses its own blocks whole, so a prompt may end with every fourth.
    through = [1 | THROUGH, 1 | THROUGH, 1 | THROUGH, 1]
    assert shown(inventory) == dict(zip(keys(8), through * 2, strict=True))
    apply(inventory, removed(2))
    assert shown(inventory) == dict(zip(keys(4), through, strict=True))


def test_chunks_of_another_connector_are_only_counted() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1), stored(7, size=256, medium="cpu"))
    assert shown(inventory) == {keys(1)[0]: 1}
    assert inventory.stats.foreign == 1
    assert not inventory.flaws


def test_an_event_that_does_not_add_up_does_not_settle_the_block_size() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(8, size=64, tokens=[1, 2, 3]))
    apply(inventory, stored(1))
    assert shown(inventory) == {keys(1)[0]: 1}


def test_a_clear_forgets_blocks_and_not_how_large_they_are() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, 3, 4, size=4))
    delta = apply(inventory, AllBlocksCleared(), stored(1, 2, 3, 4, size=4, medium="cpu"))
    assert delta.reset
    assert shown(inventory) == {keys(1)[0]: 2}


def test_a_block_size_that_can_never_fit_is_a_flaw() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, size=24))
    assert shown(inventory) == {}
    assert inventory.flaws == {"foreign_block_size"}


# Extra keys


@pytest.mark.parametrize("size", [4, 16])
def test_blocks_match_the_prompts_they_came_from(size: int) -> None:
    """Adapter, salt and media, through the wire's untagged form and back to what a router hashes."""
    toks = tokens(4)
    media = (MediaItem(identifier="cat", offset=10, length=30),)
    extra = []
    for start in range(0, 64, size):
        entry: list[Any] = ["sql"]
        if start < 40 and start + size > 10:
            entry.append(["cat", 10 - start])
        extra.append([*entry, "tenant"] if start == 0 else entry)
    hashes = list(range(1, 64 // size + 1))
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(*hashes, size=size, extra_keys=extra, lora_name="sql", lora_id=3))
    assert shown(inventory) == dict.fromkeys(keys(4, toks=toks, lora="sql", media=media, cache_salt="tenant"), 1)


@pytest.mark.parametrize(
    "fields",
    [{"lora_id": 3}, {"lookahead": True}, {"extra_keys": [None, ["old-style-image"]]}],
    ids=["adapter number without name", "speculative", "media without offset"],
)
def test_what_the_wire_leaves_open_is_never_indexed(fields: dict[str, Any]) -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, 2, **fields), stored(3, parent=2, start=2))
    assert keys(3)[1] not in shown(inventory)
    assert keys(3)[2] not in shown(inventory)
    assert inventory.stats.unhashable
    assert inventory.held == 3


# Hidden inputs


def test_parity_found_late_hides_what_did_not_fit_it() -> None:
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    salted, plain = 77, tokens(2, base=5000)
    apply(inventory, stored(salted, 78))
    assert set(shown(inventory)) == set(keys(2)), "nothing is known against it yet"
    (first, second) = keys(2, toks=plain)
    delta = apply(inventory, stored(name(first), name(second), tokens=plain))
    assert inventory.parity
    assert set(shown(inventory)) == {first, second}
    assert {bytes(w.key) for w in delta.writes if not w.tiers} == set(keys(2))
    assert inventory.stats.hidden == 1


def test_parity_hides_descendants_that_come_later() -> None:
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    apply(inventory, stored(name(keys(1)[0])))
    apply(inventory, stored(77, tokens=tokens(1, base=5000)), stored(78, parent=77, tokens=tokens(1, base=6000)))
    assert set(shown(inventory)) == {keys(1)[0]}


def test_parity_survives_a_clear_and_not_a_restart() -> None:
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    apply(inventory, stored(name(keys(1)[0])))
    apply(inventory, AllBlocksCleared(), stored(77))
    assert shown(inventory) == {}
    inventory.restart()
    apply(inventory, stored(77))
    assert set(shown(inventory)) == {keys(1)[0]}


def test_two_names_for_one_block_are_told() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1), stored(2, medium="cpu"))
    assert inventory.ambiguous == 1
    assert shown(inventory) == {keys(1)[0]: 3}
    apply(inventory, removed(1))
    assert shown(inventory) == {keys(1)[0]: 2}
    assert inventory.ambiguous == 0


def test_engine_hashes_as_keys() -> None:
    inventory = Inventory(NAMESPACE, hash_mode="engine")
    first, second = keys(2)
    apply(
        inventory,
        stored(name(first)),
        BlockStored(hashes=[EngineHash(name(second))], parent=EngineHash(name(first)), tokens=[], block_size=0),
    )
    assert shown(inventory) == {first: 1, second: 1}


# Names that lie


def test_a_block_that_claims_itself_as_parent_leaves_nothing_behind() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(1, parent=1))
    assert shown(inventory) == {}
    assert "hashes_do_not_bind_prefix" in inventory.flaws
    apply(inventory, removed(1))
    assert inventory.nodes == 0


def test_blocks_that_are_each_other_s_ancestors_leave_nothing_behind() -> None:
    inventory = Inventory(NAMESPACE)
    apply(inventory, stored(2, parent=1), stored(3, parent=2), stored(1, parent=3))
    assert shown(inventory) == {}
    assert "hashes_do_not_bind_prefix" in inventory.flaws
    apply(inventory, removed(1, 2, 3))
    assert inventory.nodes == 0


def test_removals_of_what_was_never_stored() -> None:
    inventory = Inventory(NAMESPACE)
    assert apply(inventory, removed(1, 2)).writes == []
    apply(inventory, stored(1))
    apply(inventory, removed(1, medium="cpu"))
    assert shown(inventory) == {keys(1)[0]: 1}
    assert inventory.stats.unknown_removals == 3


# Bounds


def test_the_oldest_go_at_the_bound() -> None:
    inventory = Inventory(NAMESPACE, max_blocks=3)
    for i in range(5):
        apply(inventory, stored(i + 1, tokens=tokens(1, base=100 * i)))
    assert inventory.copies == 3
    assert inventory.resident().keys() == {(0, 3), (0, 4), (0, 5)}
    assert inventory.flaws == {"inventory_bound"}
    assert inventory.stats.evicted == 2


def test_ancestors_kept_for_a_descendant_are_bounded_as_well() -> None:
    """An engine that removes all but the leaf of long chains, again and again."""
    inventory = Inventory(NAMESPACE, max_blocks=20)
    for i in range(8):
        chain = [100 * i + j for j in range(1, 11)]
        apply(inventory, stored(*chain, tokens=tokens(10, base=1000 * i)))
        apply(inventory, removed(*chain[:-1]))
        assert inventory.nodes <= 40
    assert inventory.copies == 4
    apply(inventory, *(removed(h) for _, h in list(inventory.resident())))
    assert inventory.nodes == 0
