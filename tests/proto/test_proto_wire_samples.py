"""Conformance of proto/events.py to payloads of real publishers (tests/data/vectors/wire, tests/data/captures).

The expected events are derived here from the wire-format notes and each sample's decoded content, independently of
the code under test. One rich sample per wire family is also written out by hand, so that a mistake in this reading
of the notes cannot hide the same mistake in the decoder.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from metatrie.proto.errors import MalformedBatch
from metatrie.proto.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Skipped,
    decode_batch,
)

DATA = Path(__file__).parents[1] / "data"
SAMPLES: dict[str, list[dict[str, Any]]] = {}
FRAMES: dict[str, dict[str, Any]] = {}
for _path in sorted((DATA / "vectors/wire").glob("*.json")):
    _content = json.loads(_path.read_text(encoding="utf-8"))
    if isinstance(_content, dict):
        FRAMES[_path.stem] = _content
    else:
        SAMPLES[_path.stem] = _content
CAPTURES = sorted(p.name.removesuffix(".frames.jsonl.gz") for p in (DATA / "captures").glob("*.frames.jsonl.gz"))

# ---------------------------------------------------------------- what the notes say an event means, as plain data

POSITIONS = {
    "BlockStored": [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ],
    "BlockRemoved": ["block_hashes", "medium", "group_idx"],
    "AllBlocksCleared": [],
}
KNOWN_MEDIA = {"gpu", "cpu", "cpu_pinned", "cxl", "fs", "obj", "storage", "disk", "external"}


def revived(value: Any) -> Any:
    """JSON marks byte strings as {"$bytes": hex}."""
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bytes"]) if set(value) == {"$bytes"} else {k: revived(v) for k, v in value.items()}
        )
    return [revived(v) for v in value] if isinstance(value, list) else value


def u64(engine_hash: int | bytes) -> int:
    """Two's complement for signed ints; the last 8 bytes for byte hashes."""
    return engine_hash % 2**64 if isinstance(engine_hash, int) else int(engine_hash.hex(), 16) % 2**64


def expected_event(raw: Any) -> dict[str, Any] | None:
    """The normalised event, or None for a kind nobody knows."""
    tag = raw["type"] if isinstance(raw, dict) else raw[0]
    if tag not in POSITIONS:
        return None
    # More elements than known positions and more keys than known fields are ignored.
    fields = raw if isinstance(raw, dict) else dict(zip(POSITIONS[tag], raw[1:], strict=False))
    if tag == "AllBlocksCleared":
        return {"event": tag}
    medium = (fields.get("medium") or "GPU").lower()
    event = {
        "event": tag,
        "hashes": [u64(h) for h in fields["block_hashes"]],
        "medium": medium if medium in KNOWN_MEDIA else "other",
        "group": fields.get("group_idx") or 0,
    }
    if tag == "BlockRemoved":
        return event
    parent, tokens, extra = fields["parent_block_hash"], fields["token_ids"] or [], fields.get("extra_keys")
    pairs = bool(tokens) and isinstance(tokens[0], list)
    return event | {
        "parent": None if parent is None else u64(parent),
        "tokens": [pair[0] for pair in tokens] if pairs else tokens,
        "block_size": fields["block_size"] or 0,
        "kind": fields.get("kv_cache_spec_kind"),
        "window": fields.get("kv_cache_spec_sliding_window"),
        "lora_id": fields.get("lora_id"),
        "lora_name": fields.get("lora_name"),
        "extra_keys": None if extra is None or not any(extra) else extra,
        "cache_salt": fields.get("cache_salt"),
        "lookahead": pairs or "lookahead_token_ids" in fields,
        "lookahead_tokens": fields.get("lookahead_token_ids")
        or (pairs_ahead(tokens, fields["block_size"]) if pairs else None),
        "remote": fields.get("locality") == "REMOTE",
        "session_id": fields.get("session_id"),
    }


def pairs_ahead(pairs: list[list[int]], block_size: int) -> list[list[int]]:
    """Of each page of (token, next token) pairs, the token after it."""
    return [[pairs[end - 1][1]] for end in range(block_size, len(pairs) + 1, block_size)]


def expected_batch(decoded: list[Any]) -> dict[str, Any]:
    ts, raw_events = decoded[:2]
    events = [expected_event(raw) for raw in raw_events]
    return {
        "ts": ts / 1000 if isinstance(ts, int) else ts,  # only a Mooncake master sends an int: milliseconds
        "rank": decoded[2] if len(decoded) > 2 else None,
        "events": [event for event in events if event is not None],
        "skipped": ["unknown_kind"] * events.count(None),
    }


def as_plain(batch: Batch) -> dict[str, Any]:
    return {
        "ts": batch.ts,
        "rank": batch.rank,
        "events": [{"event": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events],
        "skipped": [skipped.cause for skipped in batch.skipped],
    }


# ---------------------------------------------------------------------------------------------- decoded samples

DECODED = {
    f"{file}-{i}": sample
    for file, samples in SAMPLES.items()
    if file != "malformed"
    for i, sample in enumerate(samples)
}


@pytest.mark.parametrize("sample", DECODED.values(), ids=DECODED.keys())
def test_every_sample_decodes_to_what_it_means(sample: dict[str, Any]) -> None:
    assert as_plain(decode_batch(bytes.fromhex(sample["hex"]))) == expected_batch(revived(sample["decoded"]))


def test_every_file_and_family_is_there() -> None:
    assert len(SAMPLES) == 39
    assert len(DECODED) == 565
    assert set(FRAMES) == {"frames-sglang-0.5.23", "frames-vllm-0.11.0", "frames-vllm-0.26.0", "frames-vllm-0.33.0"}
    assert len(CAPTURES) == 11
    forms = Counter(type(event).__name__ for sample in DECODED.values() for event in sample["decoded"][1])
    assert forms["list"] > 200
    assert forms["dict"] > 200


# ------------------------------------------------------------------------------- one per family, written by hand


def hashes(*values: int) -> list[EngineHash]:
    return [EngineHash(v) for v in values]


A, B, C = 0xB0147556276AFC9C, 0x192DD62904FCCCAC, 0x8000000000000000
ROOT = EngineHash(A)
DIGEST_A = bytes.fromhex("d830de3d42c00f25a2949b5d12d98642664a44872c1614c5b0147556276afc9c")
TS = 1700000000.25
RICH_EXTRAS = [["sql-adapter", ["84127d9feb93", 10], "tenant-a"], ["sql-adapter", ["84127d9feb93", -6]], None]

BY_HAND = [
    (
        "vllm-0.9.0",
        "negative hash",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(2**64 - 6841536519428345600, 5), parent=None, tokens=[*range(32)], block_size=16
                ),
                BlockRemoved(hashes=hashes(2**64 - 6841536519428345600)),
            ],
            None,
        ),
    ),
    (
        "vllm-0.11.0",
        "OffloadingConnector",
        Batch(
            TS,
            [
                BlockStored(hashes=hashes(A, B), parent=None, tokens=[*range(32)], block_size=16),
                BlockStored(hashes=hashes(A, B), parent=None, tokens=[], block_size=0, medium="cpu"),
                BlockRemoved(hashes=hashes(A), medium="cpu"),
            ],
            0,
        ),
    ),
    (
        "vllm-0.20.0",
        "extra_keys: per-block list",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(A, B, C),
                    parent=None,
                    tokens=[*range(48)],
                    block_size=16,
                    lora_id=7,
                    lora_name="sql-adapter",
                    extra_keys=RICH_EXTRAS,
                )
            ],
            0,
        ),
    ),
    (
        "vllm-0.24.0",
        "mixed batch",
        Batch(
            TS,
            [
                BlockRemoved(hashes=hashes(7)),
                BlockStored(
                    hashes=hashes(A, B), parent=None, tokens=[*range(32)], block_size=16, kind="full_attention"
                ),
                BlockRemoved(hashes=hashes(C)),
                AllBlocksCleared(),
            ],
            3,
        ),
    ),
    (
        "vllm-0.30.0",
        "STORAGE tier, REMOTE",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(A, B),
                    parent=None,
                    tokens=[*range(32)],
                    block_size=16,
                    medium="storage",
                    kind="full_attention",
                    remote=True,
                ),
                BlockRemoved(hashes=hashes(A, B), medium="storage"),
            ],
            0,
        ),
    ),
    (
        "vllm-0.33.0",
        "lookahead_token_ids",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(A, B),
                    parent=None,
                    tokens=[*range(32)],
                    block_size=16,
                    kind="full_attention",
                    lookahead=True,
                    lookahead_tokens=[[16, 17, 18], [32, 33, 34]],
                )
            ],
            0,
        ),
    ),
    (
        "vllm-0.33.0",
        "extra_keys: prompt-embeds digest",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(A, B),
                    parent=None,
                    tokens=[*range(32)],
                    block_size=16,
                    kind="full_attention",
                    extra_keys=[
                        [DIGEST_A],
                        [bytes.fromhex("fedd9e4abebebbe6f6cf96b682f08d316063fe2f22a5c552192dd62904fcccac")],
                    ],
                )
            ],
            0,
        ),
    ),
    (
        "sglang-0.5.23",
        "namespace=cache_salt, format=default",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(0x3405012385E066FC, 0x894F861BDD68ABA6, 0x85D50E4BBEE25BA1, 0x1809144DBC2A4002),
                    parent=None,
                    tokens=[*range(64)],
                    block_size=16,
                    cache_salt="tenant-a",
                )
            ],
            0,
        ),
    ),
    (
        "other-publishers",
        "RFC1527 stored event",
        Batch(
            1700000000.25,
            [BlockStored(hashes=hashes(A), parent=None, tokens=[], block_size=0, medium="cpu")],
            0,
        ),
    ),
    (
        "other-publishers",
        "RFC1527 removed event",
        Batch(1700000000.25, [BlockRemoved(hashes=[], medium="disk")], 0),
    ),
    (
        "other-publishers",
        "map event with reduced field set",
        Batch(TS, [BlockStored(hashes=hashes(A), parent=None, tokens=[*range(32)], block_size=32)], 0),
    ),
    (
        "other-publishers",
        "connector event",
        Batch(TS, [BlockStored(hashes=hashes(B), parent=ROOT, tokens=[*range(16)], block_size=16, medium="cpu")], 0),
    ),
    (
        "other-publishers",
        "LMCache chunk event",
        Batch(
            TS,
            [
                BlockStored(
                    hashes=hashes(7777777777777), parent=None, tokens=[*range(256)], block_size=256, medium="cpu"
                )
            ],
            0,
        ),
    ),
    (
        "other-publishers",
        "unknown event type",
        Batch(TS, [BlockRemoved(hashes=hashes(1))], 0, [Skipped("unknown_kind")]),
    ),
]


@pytest.mark.parametrize(("file", "description", "expected"), BY_HAND, ids=[f"{f}-{d[:24]}" for f, d, _ in BY_HAND])
def test_rich_samples_by_hand(file: str, description: str, expected: Batch) -> None:
    (sample,) = [s for s in SAMPLES[file] if description in s["description"]]
    assert decode_batch(bytes.fromhex(sample["hex"])) == expected


def test_eagle_pairs_keep_the_first_token_and_are_marked() -> None:
    (sample,) = [s for s in SAMPLES["sglang-0.5.23"] if s["description"].startswith("EAGLE")]
    (event,) = decode_batch(bytes.fromhex(sample["hex"])).events
    pairs = sample["decoded"][1][0]["token_ids"]
    assert isinstance(event, BlockStored)
    assert event.lookahead
    assert event.tokens == [first for first, _ in pairs]
    assert event.tokens[1:] == [second for _, second in pairs][:-1]


# --------------------------------------------------------------------------------------------------- malformed


@pytest.mark.parametrize(
    ("description", "cause"),
    [
        ("truncated payload", "undecodable"),
        ("empty payload", "undecodable"),
        ("not an array", "not_an_array"),
        ("events is nil", "events"),
    ],
)
def test_what_is_no_batch_is_refused(description: str, cause: str) -> None:
    (sample,) = [s for s in SAMPLES["malformed"] if s["description"] == description]
    with pytest.raises(MalformedBatch) as raised:
        decode_batch(bytes.fromhex(sample["hex"]))
    assert raised.value.cause == cause


def test_a_bad_event_in_a_good_batch_costs_itself() -> None:
    (sample,) = [s for s in SAMPLES["malformed"] if s["description"].startswith("one bad event")]
    batch = decode_batch(bytes.fromhex(sample["hex"]))
    assert batch == Batch(TS, [AllBlocksCleared()], 0, [Skipped("block_hashes")])
    assert len(SAMPLES["malformed"]) == 5


# -------------------------------------------------------------------------------------- frames and whole streams


@pytest.mark.parametrize("name", FRAMES)
def test_live_and_replayed_frames(name: str) -> None:
    """Replay answers with the very payloads that were live, in either framing, then with an end marker."""
    capture = FRAMES[name]
    live = {seq: bytes.fromhex(payload) for _topic, seq, payload in capture["live"]}
    assert list(live) == [f"{i:016x}" for i in range(len(live))]
    kinds: Counter[str] = Counter()
    for payload in live.values():
        batch = decode_batch(payload)
        assert as_plain(batch) == expected_batch(msgspec.msgpack.decode(payload))
        kinds.update(type(event).__name__ for event in batch.events)
    assert kinds["BlockStored"] > 0
    *replayed, end = capture["replay"]
    assert [end[-2], end[-1]] == ["f" * 16, ""]
    assert [frames[-2] for frames in replayed] == [
        seq for seq in live if seq >= capture["replay_request_frames_hex"][1]
    ]
    for frames in replayed:
        assert len(frames) == (3 if name.endswith("0.11.0") else 4)
        assert bytes.fromhex(frames[-1]) == live[frames[-2]]


@pytest.mark.parametrize("name", CAPTURES)
def test_decoded_streams_add_up_to_the_engines_own_table(name: str) -> None:
    """Counting copies per (group, hash) from decoded events alone gives what the engine held after every step.

    `full-report` re-announces blocks that were already there: copies drift, but never what is held (see
    tests/data/captures/README.md).
    """
    with gzip.open(DATA / f"captures/{name}.frames.jsonl.gz", "rt", encoding="utf-8") as lines:
        payloads = {int(seq, 16): bytes.fromhex(payload) for _topic, seq, payload in map(json.loads, lines)}
    copies: Counter[tuple[int, int]] = Counter()
    checked = 0
    with gzip.open(DATA / f"captures/{name}.truth.jsonl.gz", "rt", encoding="utf-8") as lines:
        for step in map(json.loads, lines):
            if step["seq"] is None:
                continue
            payload = payloads[step["seq"]]
            batch = decode_batch(payload)
            assert as_plain(batch) == expected_batch(msgspec.msgpack.decode(payload))
            for event in batch.events:
                match event:
                    case BlockStored():
                        copies.update((event.group, h) for h in event.hashes)
                    case BlockRemoved():
                        copies.subtract((event.group, h) for h in event.hashes)
                    case AllBlocksCleared():
                        copies.clear()
            resident = {resident_key(key): n for key, n in step["resident"].items()}
            if "full-report" in name:
                assert resident.keys() <= (+copies).keys()
            else:
                assert +copies == resident
            checked += 1
    assert checked == len(payloads) > 0


def resident_key(key: str) -> tuple[int, int]:
    """`<group>:<hash>` (SGLang: `<hash>`), in decimal as published, or in hex where 32 bytes were."""
    group, _, text = key.rpartition(":")
    return int(group or 0), int(text, 16) % 2**64 if len(text) == 64 else int(text) % 2**64
