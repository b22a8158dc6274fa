"""Conformance of proto/hashing.py to block hashes that real engines computed (tests/data/vectors/hash-vectors.json).

Every vLLM vector falls into exactly one category below. Where our rule is vLLM's, keys are computed the way a router
computes them, from the prompt and its extras through Chain. Where our rule differs on purpose, the test shows both
halves: vLLM's own inputs reproduce the vector, and ours give another name. Nothing is skipped; the last test counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from metatrie.proto.hashing import (
    BlockHash,
    Chain,
    MediaItem,
    Namespace,
    PromptExtras,
    block_hash,
    block_key,
    event_extra_keys,
    none_hash,
)

VLLM = json.loads((Path(__file__).parents[1] / "data/vectors/hash-vectors.json").read_text(encoding="utf-8"))["vllm"]
VECTORS: list[dict[str, Any]] = VLLM["vectors"]
UNSET_SEED = "vllm-none-hash"
"""What vLLM 0.29 and later derive the none-hash from when PYTHONHASHSEED is not set."""


def category(vector: dict[str, Any]) -> str:
    spec = VLLM["extras"][vector["extra"]]
    if vector["algo"] != "sha256_cbor":
        return "other_algorithm"
    if vector["lookahead"]:
        return "lookahead"
    if "embeds" in spec:
        return "embeds"
    if "lora" in spec:
        return "lora"
    if "mm" in spec or spec.get("salt"):
        return "media_or_salt"
    return "text"


def of(name: str) -> list[Any]:
    return [pytest.param(v, id=f"{v['id']}-{v['extra']}-{v['seq']}") for v in VECTORS if category(v) == name]


def seed_of(vector: dict[str, Any]) -> str:
    return UNSET_SEED if vector["pythonhashseed"] is None else vector["pythonhashseed"]


def tokens_of(vector: dict[str, Any]) -> list[int]:
    """Prompts of embeddings have no token ids; vLLM hashes zeros for them."""
    tokens = VLLM["sequences"][vector["seq"]][: vector["n_tokens"]]
    return [0] * len(tokens) if "embeds" in VLLM["extras"][vector["extra"]] else tokens


def extras_of(vector: dict[str, Any]) -> PromptExtras:
    """The request's extras as a caller states them; embeddings have no place there."""
    spec = VLLM["extras"][vector["extra"]]
    return PromptExtras(
        lora=spec["lora"]["lora_name"] if "lora" in spec else None,
        cache_salt=spec.get("salt"),
        media=tuple(MediaItem(identifier=i, offset=o, length=n) for i, o, n in spec.get("mm", ())),
    )


def canonical_keys(vector: dict[str, Any]) -> list[bytes]:
    """Keys of the vector's blocks: all full blocks of the prompt, except where the file lists the first few only."""
    chain = Chain(none_hash(seed_of(vector)), vector["block_size"], tokens_of(vector), extras_of(vector))
    keys = chain.keys(chain.blocks)
    return list(keys[: len(vector["blocks"])]) if vector["id"] == "v173" else list(keys)


def revived(value: Any) -> Any:
    """Extra keys as vLLM had them in memory: JSON marks byte strings."""
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes_hex"])
    return [revived(v) for v in value] if isinstance(value, list) else value


def vllm_chain(vector: dict[str, Any], blocks: list[dict[str, Any]]) -> list[BlockHash]:
    """Chained block_hash() over the extra keys vLLM itself hashed, full digests."""
    tokens, size, parent = tokens_of(vector), vector["block_size"], none_hash(seed_of(vector))
    chain = []
    for i, block in enumerate(blocks):
        parent = block_hash(parent, tokens[i * size : (i + 1) * size], revived(block["extra_keys_hashed"]))
        chain.append(parent)
    return chain


def digests(blocks: list[dict[str, Any]]) -> list[bytes]:
    return [bytes.fromhex(block["hash_hex"]) for block in blocks]


@pytest.mark.parametrize("vector", of("text") + of("media_or_salt"))
def test_keys_of_text_media_and_salted_prompts_are_vllms(vector: dict[str, Any]) -> None:
    blocks = vector["blocks"]
    assert vllm_chain(vector, blocks) == digests(blocks)
    keys = canonical_keys(vector)
    assert keys == [block_key(digest) for digest in digests(blocks)]
    assert [int.from_bytes(key, "big") for key in keys] == [block["event_int"] for block in blocks]


@pytest.mark.parametrize("vector", of("text"))
def test_text_hashes_agree_between_vllm_versions(vector: dict[str, Any]) -> None:
    """0.26.0 and 0.11.0 were run on the same inputs; where they can hash them at all, they said the same."""
    unset = vector["pythonhashseed"] is None  # random per process before 0.29
    assert vector["agreement"] == dict.fromkeys(("0.26.0", "0.11.0"), "not_available" if unset else "same")
    assert "other_versions" not in vector


@pytest.mark.parametrize("vector", of("lora"))
def test_vllm_hashes_the_adapters_path_and_we_do_not(vector: dict[str, Any]) -> None:
    """Since 0.31 the path on the engine's disk enters the hash, which no event shows: ours is ["lora", name]."""
    assert vllm_chain(vector, vector["blocks"]) == digests(vector["blocks"])
    ours = canonical_keys(vector)
    assert len(ours) == len(vector["blocks"])
    assert not set(ours) & {block_key(d) for d in digests(vector["blocks"])}
    for block in vector["blocks"]:
        start, end = block["token_start"], block["token_end"]
        without_path = [e[:2] if e[0] == "lora" else e for e in block["extra_keys_hashed"]]
        assert extras_of(vector).for_block(start, end) == without_path


@pytest.mark.parametrize("vector", of("embeds"))
def test_embeddings_hash_as_vllm_does_from_events_but_cannot_be_prompts(vector: dict[str, Any]) -> None:
    assert vllm_chain(vector, vector["blocks"]) == digests(vector["blocks"])
    assert not set(canonical_keys(vector)) & {block_key(d) for d in digests(vector["blocks"])}
    adapter = extras_of(vector).lora
    for i, block in enumerate(vector["blocks"]):
        hashed = revived(block["extra_keys_hashed"])
        published = [entry[1] for entry in hashed]  # events carry extra keys without their tags
        tagged = event_extra_keys(published, lora_name=adapter, lora_id=None, first=i == 0, salt=None)
        assert tagged == [entry[:2] for entry in hashed]


@pytest.mark.parametrize("vector", of("lookahead"))
def test_speculative_engines_hash_tokens_past_the_block_and_we_do_not(vector: dict[str, Any]) -> None:
    """vLLM 0.33 with lookahead L hashes [extra keys, t_e, …, t_{e+L-1}] and needs those L tokens to exist."""
    tokens, size, ahead = tokens_of(vector), vector["block_size"], vector["lookahead"]
    assert vllm_chain(vector, vector["blocks"]) == digests(vector["blocks"])
    for block in vector["blocks"]:
        end = block["token_end"]
        assert block["extra_keys_hashed"][1:] == tokens[end : end + ahead]
    assert len(vector["blocks"]) == (len(tokens) - ahead) // size
    assert not set(canonical_keys(vector)) & {block_key(d) for d in digests(vector["blocks"])}


@pytest.mark.parametrize("vector", of("other_algorithm"))
def test_other_algorithms_share_no_name_with_ours(vector: dict[str, Any]) -> None:
    blocks = vector["blocks"]
    assert len(canonical_keys(vector)) == len(blocks)
    assert not set(canonical_keys(vector)) & {block_key(d) for d in digests(blocks)}
    assert {len(d) for d in digests(blocks)} == ({16} if vector["algo"].startswith("xxhash") else {32})


CBOR_WITH_OTHER_VERSIONS = [
    pytest.param(v, version, id=f"{v['id']}-{v['extra']}-vllm{version}")
    for v in VECTORS
    for version in v.get("other_versions", {})
    if v["algo"] == "sha256_cbor"
]


@pytest.mark.parametrize(("vector", "version"), CBOR_WITH_OTHER_VERSIONS)
def test_older_versions_hash_the_same_extras_in_other_forms(vector: dict[str, Any], version: str) -> None:
    """The algorithm is the same, the extra keys are not: untagged in 0.26; in 0.11 an integer LoRA id,
    media without offsets, and embeddings ignored.

    So names agree exactly as long as nothing but text entered the chain on either side.
    """
    blocks = vector["other_versions"][version]
    assert vllm_chain(vector, blocks) == digests(blocks)
    assert vector["agreement"][version] == "differs"
    extras, text_only = extras_of(vector), True
    for block, theirs, ours in zip(vector["blocks"], blocks, canonical_keys(vector), strict=True):
        extra = extras.for_block(block["token_start"], block["token_end"])
        text_only = text_only and extra is None and not theirs["extra_keys_hashed"]
        assert (block_key(bytes.fromhex(theirs["hash_hex"])) == ours) is text_only


@pytest.mark.parametrize(
    ("version", "setting", "digest"),
    [(version, setting, d) for version, hashes in VLLM["none_hash"].items() for setting, d in hashes.items()],
)
def test_none_hashes(version: str, setting: str, digest: str) -> None:
    algorithm, _, seed = setting.partition("|")
    if seed == "None":
        assert version == "0.33.0"
        seed = UNSET_SEED
    ours = none_hash(seed)
    assert (ours.hex() == digest) is (algorithm == "sha256_cbor")
    assert Namespace(model="m", hash_seed=seed).root == ours


@pytest.mark.parametrize("vector", [pytest.param(v, id=v["id"]) for v in VECTORS])
def test_each_vector_is_sound_in_itself(vector: dict[str, Any]) -> None:
    """The published integer is the digest's low 64 bits, whatever the algorithm; preimages hash to the digest."""
    for blocks in (vector["blocks"], *vector.get("other_versions", {}).values()):
        for block in blocks:
            digest = bytes.fromhex(block["hash_hex"])
            assert int.from_bytes(block_key(digest), "big") == block["event_int"] == int(digest.hex(), 16) % 2**64
            if "preimage_hex" in block and vector["algo"].startswith("sha256"):
                assert hashlib.sha256(bytes.fromhex(block["preimage_hex"])).digest() == digest


def test_no_vector_is_left_out() -> None:
    assert Counter(category(v) for v in VECTORS) == {
        "text": 97,
        "media_or_salt": 20,
        "lora": 12,
        "embeds": 8,
        "lookahead": 4,
        "other_algorithm": 39,
    }
    assert len(VECTORS) == 180
    assert len(CBOR_WITH_OTHER_VERSIONS) == 80
    assert Counter(s.partition("|")[0] for v in VLLM["none_hash"].values() for s in v)["sha256_cbor"] == 13
