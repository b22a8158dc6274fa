"""Hash rules against the engines' own vectors and recorded streams."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from metatrie.engines.rules import rule_for
from metatrie.proto.engine import HashRule
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import BlockStored, block_tokens, decode_batch
from metatrie.proto.hashing import block_hash, none_hash

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "vectors" / "hash-vectors.json").read_text())
SEQUENCES = VECTORS["vllm"]["sequences"]
ROOT = none_hash("0")


def predict(rule: HashRule, tokens: list[int], size: int, *, salt: str | None = None, lora: str | None = None) -> Any:
    """Names the rule gives the full blocks of a prompt; stops where it cannot tell."""
    digest, canonical, names = rule.root(ROOT), ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        block = tokens[start : start + size]
        extra: list[object] = [["lora", lora]] if lora else []
        if salt and start == 0:
            extra.append(["cache_salt", salt])
        canonical = block_hash(canonical, block, extra)
        extended = rule.extend(digest, block, extra or None, canonical)
        if extended is None:
            break
        digest = extended
        names.append(rule.published(digest))
    return names


def test_vllm_vectors() -> None:
    rule, checked = rule_for("vllm"), 0
    for vector in VECTORS["vllm"]["vectors"]:
        extra = VECTORS["vllm"]["extras"][vector["extra"]]
        plain = vector["algo"] == "sha256_cbor" and not vector["lookahead"] and not extra.get("salt")
        plain = plain and set(extra) <= {"salt"}
        if not plain or vector["pythonhashseed"] != "0" or not vector["blocks"]:
            continue
        tokens = SEQUENCES[vector["seq"]][: vector["blocks"][-1]["token_end"]]
        hashes = [int(block["hash_hex"][-16:], 16) for block in vector["blocks"]]
        assert predict(rule, tokens, vector["block_size"]) == hashes, vector["id"]
        checked += 1
    assert checked > 10


def test_vllm_cannot_tell_names_that_cover_extra_keys() -> None:
    """Their form changed between versions, which the wire does not name; the adapter's path never shows."""
    assert predict(rule_for("vllm"), list(range(64)), 16, lora="sql-adapter") == []
    assert predict(rule_for("vllm"), list(range(64)), 16, salt="tenant-a") == []


@pytest.mark.parametrize("vector", VECTORS["sglang"]["vectors"], ids=lambda v: f"{v['kind']}-{v['seq']}")
def test_sglang_vectors(vector: dict[str, Any]) -> None:
    tokens = SEQUENCES[vector["seq"]]
    size = vector["page_size"]
    match vector["kind"]:
        case "page_chain":
            names = predict(rule_for("sglang"), tokens[: vector["n_tokens"]], size)
            pages = [page["event_int"] % 2**64 for page in vector["pages"]]
            # A short last page has a name in storage only.
            assert names == pages[: len(names)]
            assert len(names) == vector["n_tokens"] // size
        case "event_hashes":
            rule = rule_for("sglang-dynamo" if vector["format"] == "dynamo" else "sglang")
            names = predict(
                rule, tokens[: vector["n_tokens"]], size, salt=vector["cache_salt"], lora=vector["lora_name"]
            )
            published = [name % 2**64 for name in vector["block_hashes"]]
            if vector["lora_name"]:
                assert names == []
            elif vector["format"] == "dynamo" and "extra_key" in vector["ns"]:
                # The namespace hides an input, and the names say so.
                assert not set(names) & set(published)
            else:
                assert names == published
        case _:
            # EAGLE publishes token pairs; consumers see those marked as lookahead and do not predict.
            assert vector["kind"] == "bigram_page_chain"


def predictions(capture: str, rule: HashRule) -> list[tuple[str, bool]]:
    """For every block stored in a recording: the note of its step, and whether its name was predicted."""
    notes = {t["seq"]: t["note"] for t in read_lines(f"{capture}.truth")}
    digests: dict[int, bytes] = {}
    result = []
    for _, seq, payload in read_lines(f"{capture}.frames"):
        for event in decode_batch(bytes.fromhex(payload)).events:
            if not isinstance(event, BlockStored):
                continue
            parent = rule.root(ROOT) if event.parent is None else digests.get(event.parent)
            extra: list[object] | None = None
            if event.parent is None and event.cache_salt:
                extra = [["cache_salt", event.cache_salt]]
            for name, tokens in zip(event.hashes, block_tokens(event) or (), strict=True):
                digest = None if parent is None else rule.extend(parent, tokens, extra, ROOT)
                predicted = digest is not None and rule.published(digest) == name
                result.append((notes[int(seq, 16)], predicted))
                extra, parent = None, digest if predicted else None
                if parent is not None:
                    digests[name] = parent
    return result


def read_lines(name: str) -> list[Any]:
    with gzip.open(DATA / "captures" / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def test_sglang_recording_is_predicted_in_full() -> None:
    blocks = predictions("sglang-0.5.23-radix", rule_for("sglang"))
    assert len(blocks) > 400
    assert all(predicted for _, predicted in blocks)


def test_sglang_hidden_extra_keys_come_out_as_mispredicted() -> None:
    blocks = predictions("sglang-0.5.23-radix-namespaces-dynamo", rule_for("sglang-dynamo"))
    assert {predicted for _, predicted in blocks} == {True, False}
    for note, predicted in blocks:
        assert predicted == ("extra_key" not in note), note


def test_sglang_default_rule_tells_namespaced_names_apart() -> None:
    for note, predicted in predictions("sglang-0.5.23-radix-namespaces-dynamo", rule_for("sglang")):
        assert predicted == ("extra_key" not in note and "cache_salt" not in note), note


def test_unknown_engines_have_no_rule() -> None:
    with pytest.raises(ConfigError, match="use one of: vllm, sglang"):
        rule_for("other")
