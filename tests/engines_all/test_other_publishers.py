"""Publishers whose names cannot be joined with an engine's: counted by medium, never matched by a prompt.

Their samples (tests/data/vectors/wire/other-publishers.json) are constructed from the published sources.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.stream import Phase, Stream
from metatrie.engines.adapters import ADAPTERS, adapter_for
from metatrie.engines.rules import rule_for
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import Batch, BlockRemoved, BlockStored, EngineHash, decode_batch
from metatrie.proto.hashing import Chain, Namespace

WIRE = Path(__file__).parents[1] / "data" / "vectors" / "wire"
SAMPLES = json.loads((WIRE / "other-publishers.json").read_text())
NAMESPACE = Namespace(model="m", block_size=16)
PROMPT = list(range(64))


def payload(description: str) -> bytes:
    (sample,) = [s for s in SAMPLES if s["description"].startswith(description)]
    return bytes.fromhex(sample["hex"])


def own(first: int, count: int) -> BlockStored:
    """The engine's own blocks of PROMPT, named 100, 101, …"""
    return BlockStored(
        hashes=[EngineHash(100 + i) for i in range(first, first + count)],
        parent=EngineHash(99 + first) if first else None,
        tokens=PROMPT[first * 16 : (first + count) * 16],
        block_size=16,
    )


def followed(*batches: Batch, **options: Any) -> Inventory:
    inventory = Inventory(NAMESPACE, **options)
    for batch in batches:
        inventory.apply(batch)
    return inventory


def test_lmcache_chunks_never_match_and_never_disturb_the_engines_own_blocks() -> None:
    chunk = decode_batch(payload("LMCache chunk event"))
    inventory = followed(Batch(1.0, [own(0, 4)], 0), chunk)
    assert inventory.expected().keys() == set(Chain(NAMESPACE.root, 16, PROMPT).keys(4))
    assert set(inventory.expected().values()) == {1}
    assert inventory.stats.foreign == 1
    assert inventory.resident("cpu") == {(0, 7777777777777): 1}
    assert followed(chunk).expected() == {}


def test_a_mooncake_masters_objects_are_not_placed() -> None:
    stored, removed = decode_batch(payload("RFC1527 stored event")), decode_batch(payload("RFC1527 removed event"))
    inventory = followed(stored, removed)
    assert inventory.expected() == {}
    assert inventory.detached == 1
    assert inventory.stats.unplaced == 1


def test_a_mooncake_masters_stream_starts_at_one_so_its_history_is_doubted() -> None:
    stream = Stream(replay=False)
    stream.connected(0.0)
    stream.live([b"", (1).to_bytes(8, "big"), payload("RFC1527 stored event")], 0.0)
    assert (stream.phase, stream.cause) == (Phase.DEGRADED, "joined_late")


def test_a_connector_that_never_removes_is_kept_out_where_declared() -> None:
    """vLLM's Mooncake store connector: the engine's names, medium `cpu`, stores only."""
    connector = decode_batch(payload("connector event"))
    (event,) = connector.events
    assert isinstance(event, BlockStored)
    engine = BlockStored(hashes=[event.parent or EngineHash(0)], parent=None, tokens=PROMPT[:16], block_size=16)
    gone = BlockRemoved(hashes=[event.parent or EngineHash(0)])
    trusting = followed(Batch(1.0, [engine], 0), connector)
    assert sorted(trusting.expected().values()) == [1, 2]
    declared = followed(Batch(1.0, [engine], 0), connector, ignore_media=["CPU"])
    assert sorted(declared.expected().values()) == [1]
    assert declared.stats.foreign == 1
    assert declared.resident("cpu") == {(0, event.hashes[0]): 1}
    # The same block in an ignored medium of the same tier keeps nothing alive.
    same_tier = followed(
        Batch(1.0, [engine], 0),
        Batch(2.0, [own(0, 1)], 0),
        Batch(3.0, [BlockStored(hashes=[gone.hashes[0]], parent=None, tokens=[], block_size=0, medium="cxl")], 0),
        Batch(4.0, [BlockStored(hashes=[gone.hashes[0]], parent=None, tokens=[], block_size=0, medium="cpu")], 0),
        Batch(5.0, [BlockRemoved(hashes=gone.hashes, medium="cpu"), gone], 0),
        ignore_media=["cxl"],
    )
    node = same_tier.node(gone.hashes[0])
    assert node is None or node.tiers == 0


def test_dynamos_relay_is_read_like_an_engine() -> None:
    stored, removed = (
        decode_batch(payload("map event with reduced field set")),
        decode_batch(payload("removed [CONSTRUCTED")),
    )
    inventory = Inventory(Namespace(model="m", block_size=32), rule=rule_for("dynamo"))
    inventory.apply(stored)
    assert len(inventory.expected()) == 1
    inventory.apply(removed)
    assert inventory.expected() == {}
    assert inventory.stats.parity_ok == inventory.stats.parity_bad == 0


def test_an_event_of_a_kind_nobody_knows_costs_itself() -> None:
    batch = decode_batch(payload("unknown event type"))
    assert [s.cause for s in batch.skipped] == ["unknown_kind"]
    assert len(batch.events) == 1


def test_every_family_is_known_to_commands_and_documentation() -> None:
    assert set(ADAPTERS) == {"vllm", "sglang", "sglang-dynamo", "trtllm", "dynamo", "mooncake", "lmcache"}
    for name in ADAPTERS:
        assert adapter_for(name).rule is rule_for(name)
        assert adapter_for(name).rule.name == name
    with pytest.raises(ConfigError, match="no engine family"):
        adapter_for("tgi")
