"""Engines whose drafting looks ahead: a block also depends on the tokens after it, and the namespace says how many.

A prompt is matched as deep as those engines would, and no prompt that goes on otherwise within the lookahead is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.engines.rules import rule_for
from metatrie.proto import hashing
from metatrie.proto.events import Batch, BlockStored, EngineHash, decode_batch
from metatrie.proto.hashing import Chain, MediaItem, Namespace, PromptExtras

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
HASHES = json.loads((VECTORS / "hash-vectors.json").read_text())["vllm"]
AHEAD = [v for v in HASHES["vectors"] if v["lookahead"]]


def samples(name: str, words: str) -> Any:
    (sample,) = [s for s in json.loads((VECTORS / "wire" / f"{name}.json").read_text()) if words in s["description"]]
    return decode_batch(bytes.fromhex(sample["hex"]))


def test_the_vectors_are_there() -> None:
    assert sorted((v["extra"], v["lookahead"]) for v in AHEAD) == [
        ("mm_lora_salt", 1),
        ("mm_lora_salt", 3),
        ("none", 1),
        ("none", 3),
    ]


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("vector", [v for v in AHEAD if v["extra"] == "none"], ids=lambda v: v["id"])
def test_text_is_hashed_as_vllm_hashes_it(vector: Any, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(hashing, "kernel", None)
    elif hashing.kernel is None:
        pytest.skip("the native kernel is not installed")
    tokens = HASHES["sequences"][vector["seq"]][: vector["n_tokens"]]
    chain = Chain(hashing.none_hash("0"), vector["block_size"], tokens, lookahead=vector["lookahead"])
    assert chain.blocks == len(vector["blocks"])
    assert [int.from_bytes(key, "big") for key in chain.keys(99)] == [b["event_int"] for b in vector["blocks"]]


def stored(tokens: list[int], ahead: int, blocks: int, **fields: Any) -> BlockStored:
    return BlockStored(
        hashes=[EngineHash(100 + i) for i in range(blocks)],
        parent=None,
        tokens=tokens[: blocks * 16],
        block_size=16,
        lookahead=True,
        lookahead_tokens=[tokens[(i + 1) * 16 : (i + 1) * 16 + ahead] for i in range(blocks)],
        **fields,
    )


def depth(inventory: Inventory, namespace: Namespace, tokens: list[int], **extras: Any) -> int:
    chain = Chain(namespace.root, 16, tokens, PromptExtras(**extras), lookahead=namespace.lookahead)
    shown = inventory.expected()
    return next((i for i, key in enumerate(chain.keys(99)) if key not in shown), chain.blocks)


def test_a_prompt_matches_as_far_as_its_lookahead_does() -> None:
    namespace = Namespace(model="m", lookahead=3)
    inventory = Inventory(namespace, rule=rule_for("vllm"))
    tokens = list(range(67))
    inventory.apply(Batch(1.0, [stored(tokens, 3, 4)], 0))
    assert depth(inventory, namespace, tokens) == 4
    assert depth(inventory, namespace, tokens[:66]) == 3, "a block needs its lookahead to be hashed at all"
    assert depth(inventory, namespace, [*tokens[:51], 999, *tokens[52:]]) == 3
    assert depth(inventory, namespace, [*tokens[:50], 999, *tokens[51:]]) == 2, "the third block looks at token 50"
    assert depth(inventory, Namespace(model="m"), tokens) == 0
    assert not inventory.flaws


def test_extra_keys_and_lookahead_go_together() -> None:
    namespace = Namespace(model="m", lookahead=1)
    tokens = list(range(40))
    inventory = Inventory(namespace)
    keys = [["sql", ["img", 18], "salt"], ["sql", ["img", 2]]]
    inventory.apply(Batch(1.0, [stored(tokens, 1, 2, lora_name="sql", lora_id=1, extra_keys=keys)], 0))
    media = (MediaItem(identifier="img", offset=18, length=4),)
    # The image begins beyond the first block and beyond its lookahead, so it is no part of that block.
    assert depth(inventory, namespace, tokens, lora="sql", media=media, cache_salt="salt") == 0
    near = Inventory(namespace)
    keys = [["sql", ["img", 16], "salt"], ["sql", ["img", 0]]]
    near.apply(Batch(1.0, [stored(tokens, 1, 2, lora_name="sql", lora_id=1, extra_keys=keys)], 0))
    media = (MediaItem(identifier="img", offset=16, length=4),)
    assert depth(near, namespace, tokens, lora="sql", media=media, cache_salt="salt") == 2
    assert depth(near, namespace, tokens) == 0


def test_vllms_sample_is_matched() -> None:
    namespace = Namespace(model="m", lookahead=3)
    inventory = Inventory(namespace)
    inventory.apply(samples("vllm-0.33.0", "lookahead_token_ids"))
    assert depth(inventory, namespace, list(range(35))) == 2
    assert not inventory.flaws


def test_sglangs_pairs_are_matched_and_their_names_predicted() -> None:
    """EAGLE: pages named by pairs of tokens, that is, with a lookahead of one."""
    namespace = Namespace(model="m", lookahead=1)
    inventory = Inventory(namespace, rule=rule_for("sglang"))
    inventory.apply(samples("sglang-0.5.23", "EAGLE"))
    assert depth(inventory, namespace, list(range(65))) == 4
    assert inventory.parity
    assert inventory.stats.parity_ok == 4
    assert inventory.stats.parity_bad == 0


@pytest.mark.parametrize(("declared", "ahead"), [(0, 1), (2, 1), (1, 3)])
def test_another_lookahead_than_declared_is_not_indexed_and_shows(declared: int, ahead: int) -> None:
    namespace = Namespace(model="m", lookahead=declared)
    inventory = Inventory(namespace)
    tokens = list(range(80))
    inventory.apply(Batch(1.0, [stored(tokens, ahead, 4)], 0))
    assert inventory.expected() == {}
    assert inventory.flaws == {"lookahead_hashes"}
    assert inventory.stats.unhashable == 4


def test_an_engine_without_drafting_is_not_indexed_where_a_lookahead_is_declared() -> None:
    inventory = Inventory(Namespace(model="m", lookahead=1))
    plain = BlockStored(hashes=[EngineHash(1)], parent=None, tokens=list(range(16)), block_size=16)
    inventory.apply(Batch(1.0, [plain], 0))
    assert inventory.expected() == {}
    assert inventory.flaws == {"lookahead_hashes"}


def test_ids_of_namespaces_without_lookahead_did_not_move() -> None:
    assert Namespace(model="m").id == Namespace(model="m", lookahead=0).id
    assert len({Namespace(model="m", lookahead=n).id for n in range(4)}) == 4
