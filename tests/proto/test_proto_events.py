"""Properties of the event decoder: every encoding of an event means the same, and nothing a publisher sends can do
more harm than losing the event it is in."""

from __future__ import annotations

import math
import struct
import sys
import traceback
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from metatrie.proto.errors import MalformedBatch
from metatrie.proto.events import (
    MAX_GROUPS,
    MAX_PAYLOAD_BYTES,
    MAX_RANK,
    OTHER_MEDIUM,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    EngineHash,
    Event,
    Skipped,
    block_tokens,
    decode_batch,
    tier_of,
)
from metatrie.proto.index import Tier

pack = msgspec.msgpack.encode
TS = 1700000000.25

REFUSALS = {"too_large", "undecodable", "not_an_array", "too_short", "timestamp", "events", "rank"}
SKIPS = {
    "undecodable",
    "not_an_event",
    "unknown_kind",
    "block_hashes",
    "hash",
    "token_ids",
    "block_size",
    "extra_keys",
    "medium",
    "group_idx",
    "locality",
    "kv_cache_spec_kind",
    "lora_id",
    "lora_name",
    "cache_salt",
    "session_id",
}
"""Metric labels. Dashboards select by them: adding one is free, renaming one is not."""

MEDIA = {
    "GPU": ("gpu", Tier.GPU),
    "gpu": ("gpu", Tier.GPU),
    "CPU": ("cpu", Tier.CPU),
    "cpu": ("cpu", Tier.CPU),
    "CPU_PINNED": ("cpu_pinned", Tier.CPU),
    "CXL": ("cxl", Tier.CPU),
    "FS": ("fs", Tier.STORAGE),
    "OBJ": ("obj", Tier.STORAGE),
    "STORAGE": ("storage", Tier.STORAGE),
    "DISK": ("disk", Tier.STORAGE),
    "EXTERNAL": ("external", Tier.STORAGE),
    "cuda:0": (OTHER_MEDIUM, Tier.STORAGE),
    "": (OTHER_MEDIUM, Tier.STORAGE),
}


# -------------------------------------------------------------------- events beside the fields that announce them

U64 = st.integers(0, 2**64 - 1)
TOKENS = st.lists(st.integers(0, 2**20) | U64, max_size=24)
TEXT = st.text(max_size=10)
MEDIUM_NAMES = st.sampled_from([*MEDIA]) | TEXT.filter(lambda s: s.lower() not in {m.lower() for m in MEDIA})
EXTRA_ENTRY = st.none() | st.lists(TEXT | st.binary(max_size=4) | st.tuples(TEXT, st.integers(-9, 9)).map(list))


@st.composite
def wire_hashes(draw: st.DrawFn, value: int) -> int | bytes:
    """One of the forms engines have used for the same 64 bits."""
    form = draw(st.sampled_from(["unsigned", "signed", "bytes"]))
    if form == "signed":
        return value - 2**64 if value >= 2**63 else value
    if form == "bytes":
        return draw(st.binary(max_size=24)) + value.to_bytes(8, "big")
    return value


def tokens_ahead(tokens: list[int], block_size: int, blocks: int) -> list[list[int]] | None:
    """What the pairs made below say of the token after each block."""
    if not 0 < block_size * blocks == len(tokens):
        return None
    following = [*tokens[1:], 0]
    return [[following[end - 1]] for end in range(block_size, len(tokens) + 1, block_size)]


@st.composite
def stored(draw: st.DrawFn) -> tuple[BlockStored, dict[str, Any]]:
    hashes = draw(st.lists(U64, max_size=5))
    parent = draw(st.none() | U64)
    tokens = draw(TOKENS)
    pairs = bool(tokens) and draw(st.booleans())
    block_size = draw(st.none() | st.integers(0, 2**40))
    lora_id, lora_name = draw(st.none() | st.integers(0, 99)), draw(st.none() | TEXT)
    medium, group = draw(st.none() | MEDIUM_NAMES), draw(st.none() | st.integers(0, MAX_GROUPS - 1))
    kind = draw(st.none() | st.sampled_from(["full_attention", "sliding_window", "unknown"]))
    extra = draw(st.none() | st.lists(EXTRA_ENTRY, min_size=len(hashes), max_size=len(hashes) + 1))
    locality = draw(st.sampled_from([None, "LOCAL", "REMOTE", "ELSEWHERE"]))
    cache_salt, session = draw(st.none() | TEXT), draw(st.none() | TEXT)
    lookahead = draw(st.none() | st.just([[1, 2]] * len(hashes)))
    window = draw(st.none() | st.integers(0, 4096))
    fields = {
        "block_hashes": [draw(wire_hashes(h)) for h in hashes],
        "parent_block_hash": None if parent is None else draw(wire_hashes(parent)),
        "token_ids": [[a, b] for a, b in zip(tokens, [*tokens[1:], 0], strict=True)] if pairs else tokens,
        "block_size": block_size,
        "lora_id": lora_id,
        "medium": medium,
        "lora_name": lora_name,
        "extra_keys": extra,
        "group_idx": group,
        "kv_cache_spec_kind": kind,
        "kv_cache_spec_sliding_window": window,
        "locality": locality,
        "cache_salt": cache_salt,
        "session_id": session,
        "lookahead_token_ids": lookahead,
    }
    event = BlockStored(
        hashes=[EngineHash(h) for h in hashes],
        parent=None if parent is None else EngineHash(parent),
        tokens=tokens,
        block_size=block_size or 0,
        medium=medium_in(medium, locality),
        group=group or 0,
        kind=kind,
        window=window or None,
        lora_id=lora_id,
        lora_name=lora_name,
        extra_keys=extra if extra and any(extra) else None,
        cache_salt=cache_salt,
        lookahead=pairs or bool(lookahead),
        lookahead_tokens=lookahead or (tokens_ahead(tokens, block_size or 0, len(hashes)) if pairs else None),
        remote=locality not in (None, "LOCAL"),
        session_id=session,
    )
    return event, fields


@st.composite
def removed(draw: st.DrawFn) -> tuple[BlockRemoved, dict[str, Any]]:
    hashes = draw(st.lists(U64, max_size=5))
    medium, group = draw(st.none() | MEDIUM_NAMES), draw(st.none() | st.integers(0, MAX_GROUPS - 1))
    locality = draw(st.sampled_from([None, "LOCAL", "REMOTE"]))
    event = BlockRemoved(hashes=[EngineHash(h) for h in hashes], medium=medium_in(medium, locality), group=group or 0)
    fields = {
        "block_hashes": [draw(wire_hashes(h)) for h in hashes],
        "medium": medium,
        "group_idx": group,
        "locality": locality,
    }
    return event, fields


def medium_in(name: str | None, locality: str | None) -> str:
    medium = "gpu" if name is None else MEDIA.get(name, (OTHER_MEDIUM, None))[0]
    return OTHER_MEDIUM if medium == "gpu" and locality not in (None, "LOCAL") else medium


ANNOUNCED = stored() | removed() | st.just((AllBlocksCleared(), {}))

ARRAY_FIELDS = {
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
REQUIRED = {"BlockStored": 4, "BlockRemoved": 1, "AllBlocksCleared": 0}


def in_array_form(event: Event, fields: dict[str, Any]) -> tuple[Event, dict[str, Any]]:
    """The same event without the fields that only exist in maps."""
    known = set(ARRAY_FIELDS[type(event).__name__])
    rest: dict[str, Any] = {name: value for name, value in fields.items() if name in known}
    match event:
        case BlockStored():
            pairs = bool(fields["token_ids"]) and isinstance(fields["token_ids"][0], list)
            event = msgspec.structs.replace(
                event,
                medium=medium_in(fields["medium"], None),
                remote=False,
                cache_salt=None,
                session_id=None,
                lookahead=pairs,
                lookahead_tokens=tokens_ahead(event.tokens, event.block_size, len(event.hashes)) if pairs else None,
            )
        case BlockRemoved():
            event = msgspec.structs.replace(event, medium=medium_in(fields["medium"], None))
    return event, rest


class Packer:
    """msgpack with headers of any legal width, drawn: no decoder may assume the shortest."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def __call__(self, value: Any) -> bytes:
        match value:
            case None:
                return b"\xc0"
            case bool():
                return b"\xc3" if value else b"\xc2"
            case int():
                return self._int(value)
            case float():
                return b"\xcb" + struct.pack(">d", value)
            case str():
                data = value.encode()
                return self._header(len(data), (0xA0, 32), {0xD9: "B", 0xDA: "H", 0xDB: "I"}) + data
            case bytes():
                return self._header(len(value), None, {0xC4: "B", 0xC5: "H", 0xC6: "I"}) + value
            case list():
                items = b"".join(map(self, value))
                return self._header(len(value), (0x90, 16), {0xDC: "H", 0xDD: "I"}) + items
            case dict():
                items = b"".join(self(k) + self(v) for k, v in value.items())
                return self._header(len(value), (0x80, 16), {0xDE: "H", 0xDF: "I"}) + items
        raise TypeError(type(value).__name__)

    def _header(self, length: int, fix: tuple[int, int] | None, widths: dict[int, str]) -> bytes:
        choices = [bytes([fix[0] + length])] if fix and length < fix[1] else []
        choices += [
            bytes([code]) + struct.pack(">" + width, length)
            for code, width in widths.items()
            if length < 256 ** struct.calcsize(width)
        ]
        return self._draw(st.sampled_from(choices))

    def _int(self, value: int) -> bytes:
        choices = [bytes([value])] if 0 <= value < 128 else [bytes([value + 256])] if -32 <= value < 0 else []
        for code, width in enumerate("BHIQbhiq", start=0xCC):
            bits = 8 * struct.calcsize(width)
            low, high = (0, 2**bits) if width.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1))
            if low <= value < high:
                choices.append(bytes([code]) + struct.pack(">" + width, value))
        return self._draw(st.sampled_from(choices))


UNKNOWN_VALUE = st.none() | st.integers(-9, 9) | TEXT | st.lists(st.integers(0, 9), max_size=3)


@st.composite
def encodings(draw: st.DrawFn) -> tuple[Event, bytes]:
    """An event and one of the ways to put it on the wire."""
    event, fields = draw(ANNOUNCED)
    kind = type(event).__name__
    tag: str | bytes = draw(st.sampled_from([kind, kind.encode()]))
    packer = Packer(draw)
    if draw(st.booleans()):
        event, fields = in_array_form(event, fields)
        values = [fields[name] for name in ARRAY_FIELDS[kind]]
        if draw(st.booleans()):  # older publisher: later positions do not exist, or defaults are trimmed
            while len(values) > REQUIRED[kind] and values[-1] is None:
                values.pop()
        else:  # newer publisher: positions nobody here knows
            values += draw(st.lists(UNKNOWN_VALUE, max_size=3))
        return event, packer([tag, *values])
    required = ARRAY_FIELDS[kind][: REQUIRED[kind]]
    omit = draw(st.booleans())
    entries = [(k, v) for k, v in fields.items() if not (omit and v is None and k not in required)]
    entries.append(("type", tag))
    unknown = st.sampled_from(["zz_new", "zz_newer", 5, None]).flatmap(lambda k: st.tuples(st.just(k), UNKNOWN_VALUE))
    entries += draw(st.lists(unknown, max_size=2, unique_by=lambda e: e[0]))
    as_bytes = draw(st.booleans())
    shuffled = draw(st.permutations(entries))
    return event, packer({k.encode() if as_bytes and isinstance(k, str) else k: v for k, v in shuffled})


def batch_of(*events: bytes, head: bytes = pack(TS), tail: bytes = pack(0)) -> bytes:
    """A batch around events that are encoded already, and may be damaged."""
    return b"\x93" + head + b"\xdd" + struct.pack(">I", len(events)) + b"".join(events) + tail


# ----------------------------------------------------------------------------------------- one meaning, any form


@given(st.lists(encodings(), max_size=4))
def test_every_encoding_of_an_event_decodes_to_it(cases: list[tuple[Event, bytes]]) -> None:
    batch = decode_batch(batch_of(*(encoded for _, encoded in cases)))
    assert batch == Batch(TS, [event for event, _ in cases], 0)


@given(U64, st.binary(max_size=24), st.sampled_from(["BlockStored", "BlockRemoved"]))
def test_signed_unsigned_and_byte_hashes_are_one_hash(value: int, prefix: bytes, kind: str) -> None:
    signed = value - 2**64 if value >= 2**63 else value
    forms = [value, signed, value.to_bytes(8, "big"), prefix + value.to_bytes(8, "big")]
    positions = [forms, value, [], 0] if kind == "BlockStored" else [forms]
    (event,) = decode_batch(pack([TS, [[kind, *positions]]])).events
    assert isinstance(event, (BlockStored, BlockRemoved))
    assert event.hashes == [value] * 4
    for parent in forms:
        (child,) = decode_batch(pack([TS, [["BlockStored", [1], parent, [], 0]]])).events
        assert isinstance(child, BlockStored)
        assert child.parent == value


@pytest.mark.parametrize(("name", "expected"), MEDIA.items())
def test_media_and_their_tiers(name: str, expected: tuple[str, Tier]) -> None:
    for wire_name in (name, name.encode()):
        (event,) = decode_batch(
            pack([TS, [{"type": "BlockRemoved", "block_hashes": [1], "medium": wire_name}]])
        ).events
        assert isinstance(event, BlockRemoved)
        assert (event.medium, tier_of(event.medium)) == expected


@pytest.mark.parametrize("locality", ["REMOTE", "remote", b"REMOTE", "ANOTHER_HOST", ""])
def test_what_is_not_local_is_not_this_engines_gpu(locality: str | bytes) -> None:
    stored_there = {"type": "BlockStored", "block_hashes": [1], "medium": "GPU", "locality": locality}
    gone_there = {"type": "BlockRemoved", "block_hashes": [1], "locality": locality}
    store, remove = decode_batch(pack([TS, [stored_there, gone_there]])).events
    assert isinstance(store, BlockStored)
    assert isinstance(remove, BlockRemoved)
    assert store.remote
    assert store.medium == remove.medium == OTHER_MEDIUM
    assert tier_of(store.medium) is Tier.STORAGE


@pytest.mark.parametrize("locality", [None, "LOCAL", "local", b"LOCAL"])
def test_what_is_local_or_does_not_say_keeps_its_medium(locality: str | bytes | None) -> None:
    here = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "locality": locality}
    batch = decode_batch(pack([TS, [here, here | {"medium": "CPU"}]]))
    assert [event.medium for event in batch.events if isinstance(event, BlockRemoved)] == ["gpu", "cpu"]


RFC1527 = [
    (
        {"event_type": "stored", "seq_hashes": [2**64 - 1, 5], "parent_hash": -1, "medium": "cpu", "group_id": "g"},
        BlockStored(
            hashes=[EngineHash(2**64 - 1), EngineHash(5)],
            parent=EngineHash(2**64 - 1),
            tokens=[],
            block_size=0,
            medium="cpu",
        ),
    ),
    (
        {"event_type": "removed", "seq_hashes": [7], "medium": "disk"},
        BlockRemoved(hashes=[EngineHash(7)], medium="disk"),
    ),
    ({"event_type": "cleared"}, AllBlocksCleared()),
]


@pytest.mark.parametrize(("raw", "expected"), RFC1527)
@pytest.mark.parametrize("binary_keys", [False, True])
def test_rfc_1527_maps_need_no_vllm_aliases(raw: dict[str, Any], expected: Event, binary_keys: bool) -> None:
    """A Mooncake master can be told to leave out `type`, `block_hashes` and `parent_block_hash`."""
    fields = {k.encode() if binary_keys else k: v for k, v in raw.items()}
    assert decode_batch(pack([1700000000250, [fields], 0])) == Batch(TS, [expected], 0)


def test_unknown_kinds_are_counted_in_either_form() -> None:
    unknown = [["BlockMigrated", [1]], {"type": "BlockMigrated"}, {"event_type": "moved"}, [b"BlockMigrated"]]
    batch = decode_batch(pack([TS, [*unknown, ["AllBlocksCleared"]]]))
    assert batch.events == [AllBlocksCleared()]
    assert batch.skipped == [Skipped("unknown_kind")] * len(unknown)


@given(st.integers(1, 8), st.integers(0, 6), st.integers(0, 40))
def test_tokens_are_cut_per_block_only_where_they_line_up(size: int, blocks: int, tokens: int) -> None:
    event = BlockStored(
        hashes=[EngineHash(i) for i in range(blocks)], parent=None, tokens=[*range(tokens)], block_size=size
    )
    cut = block_tokens(event)
    if tokens == size * blocks:
        assert cut is not None
        assert [len(block) for block in cut] == [size] * blocks
        assert [t for block in cut for t in block] == event.tokens
    else:
        assert cut is None


def test_placeholders_have_no_token_blocks() -> None:
    event = BlockStored(hashes=[EngineHash(1)], parent=None, tokens=[], block_size=0)
    assert block_tokens(event) is None


# --------------------------------------------------------------------------------------------- the batch around


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (TS, TS),
        (1700000000, 1700000000.0),
        (1700000000250, TS),
        (1700000000250.0, TS),
        (0, 0.0),
        (math.nan, 0.0),
        (math.inf, 0.0),
        (-math.inf, 0.0),
        (-1.0, 0.0),
        (-(2**63), 0.0),
        (2**64 - 1, 0.0),
        (1e308, 0.0),
    ],
)
def test_a_timestamp_never_costs_events_and_is_always_finite(sent: float, seconds: float) -> None:
    assert decode_batch(pack([sent, [["AllBlocksCleared"]]])) == Batch(seconds, [AllBlocksCleared()])


@pytest.mark.parametrize("sent", [None, "now", True, [], {}, b"\0", msgspec.msgpack.Ext(5, b"")])
def test_without_a_number_in_front_it_is_no_batch(sent: Any) -> None:
    assert refusal_of(pack([sent, [], 0])) == "timestamp"


@pytest.mark.parametrize("sent", ["0", 0.0, True, -1, MAX_RANK + 1, 2**64 - 1, []])
def test_a_rank_nobody_can_have_is_refused(sent: Any) -> None:
    assert refusal_of(pack([TS, [], sent])) == "rank"


@pytest.mark.parametrize("sent", [(), (None,), (3,), (MAX_RANK,), (None, "more"), (3, {"more": []})])
def test_the_rank_may_be_absent_nil_or_followed_by_more(sent: tuple[Any, ...]) -> None:
    assert decode_batch(pack([TS, [], *sent])) == Batch(TS, [], sent[0] if sent else None)


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"", "undecodable"),
        (b"\xc1", "undecodable"),
        (pack([TS, []]) + b"\0", "undecodable"),
        (pack([TS, []])[:-1], "undecodable"),
        (pack({"ts": TS, "events": []}), "not_an_array"),
        (pack(None), "not_an_array"),
        (pack([]), "too_short"),
        (pack([TS]), "too_short"),
        (pack([TS, None]), "events"),
        (pack([TS, {"type": "AllBlocksCleared"}]), "events"),
        (pack([TS, "AllBlocksCleared"]), "events"),
    ],
)
def test_what_is_no_batch_has_a_cause(payload: bytes, cause: str) -> None:
    assert refusal_of(payload) == cause


def test_payloads_are_bounded() -> None:
    assert refusal_of(bytes(MAX_PAYLOAD_BYTES + 1)) == "too_large"
    assert refusal_of(bytes(MAX_PAYLOAD_BYTES)) == "undecodable"


def refusal_of(payload: bytes) -> str:
    with pytest.raises(MalformedBatch) as raised:
        decode_batch(payload)
    return raised.value.cause


# ------------------------------------------------------------------------------------- bad events, good neighbours

GOOD_STORE = ["BlockStored", [1, 2], None, [5, 6, 7, 8], 2]
STORE = {
    "type": "BlockStored",
    "block_hashes": [1],
    "parent_block_hash": None,
    "token_ids": [5, 6],
    "block_size": 2,
}
BAD_EVENTS = [
    (None, "not_an_event"),
    (7, "not_an_event"),
    ("BlockStored", "not_an_event"),
    ([], "not_an_event"),
    ({}, "not_an_event"),
    ([None], "not_an_event"),
    ([["BlockStored"], [1]], "not_an_event"),
    ({"type": None}, "not_an_event"),
    ({"type": ["BlockStored"]}, "not_an_event"),
    ({"type": {"BlockStored": 1}}, "not_an_event"),
    ({"event_type": 5}, "not_an_event"),
    ({5: 6, None: 7}, "not_an_event"),
    ([""], "unknown_kind"),
    (["blockstored", [1]], "unknown_kind"),
    ([b"\xff", [1]], "unknown_kind"),
    (["BlockStored"], "block_hashes"),
    (["BlockRemoved"], "block_hashes"),
    (["BlockRemoved", None], "block_hashes"),
    (["BlockRemoved", 5], "block_hashes"),
    (["BlockRemoved", {"1": 2}], "block_hashes"),
    (["BlockRemoved", ["1"]], "hash"),
    (["BlockRemoved", [1.0]], "hash"),
    (["BlockRemoved", [True]], "hash"),
    (["BlockRemoved", [None]], "hash"),
    (["BlockRemoved", [[1]]], "hash"),
    (["BlockRemoved", [1, b"1234567"]], "hash"),
    (["BlockRemoved", [msgspec.msgpack.Ext(1, b"12345678")]], "hash"),
    (["BlockRemoved", [1], 0], "medium"),
    (["BlockRemoved", [1], ["GPU"]], "medium"),
    (["BlockRemoved", [1], b"\xff"], "medium"),
    (["BlockRemoved", [1], "GPU", -1], "group_idx"),
    (["BlockRemoved", [1], "GPU", MAX_GROUPS], "group_idx"),
    (["BlockRemoved", [1], "GPU", False], "group_idx"),
    (["BlockRemoved", [1], "GPU", "g"], "group_idx"),
    ({"type": "BlockRemoved", "block_hashes": [1], "locality": 1}, "locality"),
    (STORE | {"block_hashes": "1"}, "block_hashes"),
    (STORE | {"parent_block_hash": "1"}, "hash"),
    (STORE | {"parent_block_hash": b""}, "hash"),
    (STORE | {"parent_block_hash": 0.5}, "hash"),
    (STORE | {"token_ids": 5}, "token_ids"),
    (STORE | {"token_ids": 0}, "token_ids"),
    (STORE | {"token_ids": ""}, "token_ids"),
    (STORE | {"token_ids": {}}, "token_ids"),
    (STORE | {"token_ids": b"56"}, "token_ids"),
    (STORE | {"token_ids": "56"}, "token_ids"),
    (STORE | {"token_ids": [5, -6]}, "token_ids"),
    (STORE | {"token_ids": [5, 6.0]}, "token_ids"),
    (STORE | {"token_ids": [5, True]}, "token_ids"),
    (STORE | {"token_ids": [5, "6"]}, "token_ids"),
    (STORE | {"token_ids": [5, None]}, "token_ids"),
    (STORE | {"token_ids": [5, [6, 7]]}, "token_ids"),
    (STORE | {"token_ids": [[5, 6], 7]}, "token_ids"),
    (STORE | {"token_ids": [[5, 6, 7]]}, "token_ids"),
    (STORE | {"token_ids": [[5]]}, "token_ids"),
    (STORE | {"token_ids": [[]]}, "token_ids"),
    (STORE | {"block_size": -1}, "block_size"),
    (STORE | {"block_size": 2.0}, "block_size"),
    (STORE | {"block_size": True}, "block_size"),
    (STORE | {"block_size": "2"}, "block_size"),
    (STORE | {"extra_keys": []}, "extra_keys"),
    (STORE | {"extra_keys": "x"}, "extra_keys"),
    (STORE | {"extra_keys": {"0": None}}, "extra_keys"),
    (STORE | {"extra_keys": ["salt"]}, "extra_keys"),
    (STORE | {"extra_keys": [b"salt"]}, "extra_keys"),
    (STORE | {"extra_keys": [7]}, "extra_keys"),
    (STORE | {"extra_keys": [0]}, "extra_keys"),
    (STORE | {"extra_keys": [""]}, "extra_keys"),
    (STORE | {"extra_keys": [{"salt": 1}]}, "extra_keys"),
    (STORE | {"lora_id": "7"}, "lora_id"),
    (STORE | {"lora_id": False}, "lora_id"),
    (STORE | {"lora_name": 7}, "lora_name"),
    (STORE | {"lora_name": b"\xff"}, "lora_name"),
    (STORE | {"cache_salt": ["salt"]}, "cache_salt"),
    (STORE | {"cache_salt": b"\xfe\xff"}, "cache_salt"),
    (STORE | {"kv_cache_spec_kind": 1}, "kv_cache_spec_kind"),
    (STORE | {"session_id": 1}, "session_id"),
    (STORE | {"locality": []}, "locality"),
]
BAD_BYTES = [
    pytest.param(b"\x92\xacBlockRemoved\x91\xa2\xff\xfe", id="invalid UTF-8 in a value"),
    pytest.param(b"\x82\xa4type\xacBlockRemoved\xa2\xff\xfe\x91\x01", id="invalid UTF-8 in a key"),
    pytest.param(b"\x82\xa4type\xacBlockRemoved\x81\x01\x02\x03", id="a map as a map key"),
    pytest.param(b"\x82\xa4type\xacBlockRemoved\xd4\x05\x00\x03", id="an extension as a map key"),
    pytest.param(b"\x92\xacBlockRemoved\xd7\xff" + b"\xff" * 8, id="a timestamp no clock shows"),
    pytest.param(b"\x92\xacBlockRemoved\xd4\xff\x00", id="a timestamp of a wrong size"),
]


@pytest.mark.parametrize(("bad", "cause"), BAD_EVENTS)
def test_a_bad_event_costs_itself_and_says_why(bad: Any, cause: str) -> None:
    batch = decode_batch(pack([TS, [GOOD_STORE, bad, ["AllBlocksCleared"]], 2]))
    assert batch == Batch(
        TS,
        [
            BlockStored(hashes=[EngineHash(1), EngineHash(2)], parent=None, tokens=[5, 6, 7, 8], block_size=2),
            AllBlocksCleared(),
        ],
        2,
        [Skipped(cause)],
    )


def test_every_cause_has_an_example() -> None:
    assert {cause for _, cause in BAD_EVENTS} | {"undecodable"} == SKIPS


@pytest.mark.parametrize("bad", BAD_BYTES)
def test_an_undecodable_event_costs_itself(bad: bytes) -> None:
    batch = decode_batch(batch_of(pack(["BlockRemoved", [1]]), bad, pack(["AllBlocksCleared"])))
    assert batch == Batch(TS, [BlockRemoved(hashes=[EngineHash(1)]), AllBlocksCleared()], 0, [Skipped("undecodable")])


@pytest.mark.parametrize("damaged", [{"head": b"\xa2\xff\xfe"}, {"tail": b"\xa2\xff\xfe"}])
def test_an_undecodable_head_costs_the_batch(damaged: dict[str, bytes]) -> None:
    assert refusal_of(batch_of(pack(["AllBlocksCleared"]), **damaged)) == "undecodable"


def test_an_undecodable_future_field_costs_nothing() -> None:
    payload = b"\x94" + pack(TS) + pack([["AllBlocksCleared"]]) + pack(1) + b"\xa2\xff\xfe"
    assert decode_batch(payload) == Batch(TS, [AllBlocksCleared()], 1)


ANY_VALUE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["type", "BlockStored", "BlockRemoved", "block_hashes", "token_ids"])
    | st.just(msgspec.msgpack.Ext(5, b"x")),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(
            st.sampled_from([*STORE, "medium", "extra_keys", "zz"]) | st.integers(0, 3), inner, max_size=5
        )
    ),
    max_leaves=12,
)


@given(
    st.lists(encodings(), min_size=1, max_size=3),
    st.lists(ANY_VALUE.map(pack) | st.sampled_from([p.values[0] for p in BAD_BYTES]), max_size=3),
    st.data(),
)
def test_neighbours_never_pay(cases: list[tuple[Event, bytes]], strangers: list[Any], data: st.DataObject) -> None:
    """Good events come out unchanged and in order, whatever stands between them."""
    marked = [(encoded, event) for event, encoded in cases] + [(stranger, None) for stranger in strangers]
    order = data.draw(st.permutations(range(len(marked))))
    # Good events keep their own order; only the strangers' places are drawn.
    good = iter(sorted(i for i in order if marked[i][1] is not None))
    placed = [marked[next(good)] if marked[i][1] is not None else marked[i] for i in order]
    batch = decode_batch(batch_of(*(encoded for encoded, _ in placed)))
    assert len(batch.events) + len(batch.skipped) == len(placed)
    remaining = iter(batch.events)
    assert all(any(event == seen for seen in remaining) for _, event in placed if event is not None)
    check_invariants(batch)


# -------------------------------------------------------------------------------------------------- any bytes


def check_invariants(batch: Batch) -> None:
    assert math.isfinite(batch.ts)
    assert batch.rank is None or 0 <= batch.rank <= MAX_RANK
    assert {s.cause for s in batch.skipped} <= SKIPS
    for event in batch.events:
        if isinstance(event, AllBlocksCleared):
            continue
        assert all(type(h) is int and 0 <= h < 2**64 for h in event.hashes)
        assert event.medium in {name for name, _ in MEDIA.values()}
        assert 0 <= event.group < MAX_GROUPS
        if isinstance(event, BlockStored):
            assert event.parent is None or 0 <= event.parent < 2**64
            assert all(type(t) is int and 0 <= t < 2**64 for t in event.tokens)
            assert event.block_size >= 0
            assert not (event.remote and event.medium == "gpu")
            if event.extra_keys is not None:
                assert len(event.extra_keys) >= len(event.hashes)
                assert all(entry is None or isinstance(entry, list) for entry in event.extra_keys)


def decode_anything(payload: bytes) -> None:
    """decode_batch() returns a sound batch or raises MalformedBatch; any other exception fails the test."""
    refusal = None
    try:
        batch = decode_batch(payload)
    except MalformedBatch as error:
        refusal = error
    if refusal is None:
        check_invariants(batch)
    else:
        assert refusal.cause in REFUSALS


@given(st.binary(max_size=200))
@example(b"\x93\xc0")
def test_random_bytes(payload: bytes) -> None:
    decode_anything(payload)


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_random_bytes_where_events_should_be(events: bytes, tail: bytes) -> None:
    decode_anything(b"\x93" + pack(TS) + events + tail)
    decode_anything(batch_of(events, tail=tail))


@settings(max_examples=300)
@given(st.lists(encodings(), max_size=3), st.data())
def test_mutations_of_good_payloads(cases: list[tuple[Event, bytes]], data: st.DataObject) -> None:
    payload = bytearray(batch_of(*(encoded for _, encoded in cases)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload) - 1)) if payload else 0
        match data.draw(st.sampled_from(["set", "delete", "insert", "cut", "repeat"])):
            case "set" if payload:
                payload[at] = data.draw(st.integers(0, 255))
            case "delete":
                del payload[at : at + data.draw(st.integers(1, 4))]
            case "insert":
                payload[at:at] = data.draw(st.binary(min_size=1, max_size=4))
            case "cut":
                del payload[at:]
            case "repeat":
                payload[at:at] = payload[at : at + 16]
    decode_anything(bytes(payload))


@given(ANY_VALUE, ANY_VALUE, ANY_VALUE)
def test_well_formed_nonsense(ts: Any, events: Any, rank: Any) -> None:
    decode_anything(pack(events))
    decode_anything(pack([ts, events, rank]))
    decode_anything(pack([TS, [events, rank]]))


@given(st.sampled_from(["type", "block_hashes", "token_ids", "medium"]), ANY_VALUE)
def test_duplicate_keys_are_decided_one_way_or_refused(key: str, value: Any) -> None:
    entries = [*STORE.items(), ("medium", "GPU"), (key, value)]
    encoded = bytes([0x80 + len(entries)]) + b"".join(pack(k) + pack(v) for k, v in entries)
    batch = decode_batch(batch_of(encoded, pack(["AllBlocksCleared"])))
    assert batch.events[-1] == AllBlocksCleared()
    assert len(batch.events) + len(batch.skipped) == 2
    check_invariants(batch)


HUGE = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x05",
]


@pytest.mark.parametrize("header", HUGE, ids=["array", "map", "str", "bin", "ext"])
@pytest.mark.parametrize("place", ["payload", "events", "event", "hashes", "key"])
def test_declared_lengths_reserve_no_memory(header: bytes, place: str) -> None:
    """Headers that promise 4 Gi elements, nested as deep as msgpack decoders go, cost what was sent."""
    start = {
        "payload": b"",
        "events": b"\x93" + pack(TS),
        "event": b"\x93" + pack(TS) + b"\x91",
        "hashes": b"\x93" + pack(TS) + b"\x91\x92" + pack("BlockRemoved"),
        "key": b"\x93" + pack(TS) + b"\x91\x82\xa4type" + pack("BlockRemoved"),
    }[place]
    payloads = [start + header, start + header * 500, start + header + b"\0" * 100_000]
    tracemalloc.start()
    try:
        causes = [refusal_of(payload) for payload in payloads]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert set(causes) <= {"undecodable", "not_an_array"}
    assert peak < 8 << 20


@pytest.mark.parametrize("deep", [b"\x91", b"\x81\x01", b"\x81\x91", b"\x92\x01"])
def test_bottomless_nesting_is_refused(deep: bytes) -> None:
    depth = 100 * sys.getrecursionlimit()
    assert refusal_of(deep * depth) == "undecodable"
    assert refusal_of(batch_of(deep * depth)) == "undecodable"
    assert refusal_of(batch_of(deep * depth + b"\x01" * (2 * depth))) == "undecodable"


def test_ordinary_nesting_in_unknown_places_is_ignored() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value, {"a": value}] if not isinstance(value, list) else [value]
    batch = decode_batch(pack([TS, [STORE | {"new": value}, ["AllBlocksCleared", value]], 0, value]))
    assert len(batch.events) == 2
    assert batch.skipped == []


def test_numbers_at_the_edge_of_msgpack() -> None:
    edge = 2**64 - 1
    raw = STORE | {
        "block_hashes": [edge, -(2**63)],
        "token_ids": [edge, 2**32, 0],
        "block_size": edge,
        "lora_id": edge,
    }
    (event,) = decode_batch(pack([TS, [raw], 0])).events
    assert isinstance(event, BlockStored)
    assert (event.hashes, event.tokens, event.block_size) == ([edge, 2**63], [edge, 2**32, 0], edge)
    assert block_tokens(event) is None


# ------------------------------------------------------------------------------------------------ what is said

CANARY_TOKEN = 918_273_645
CANARY_TEXT = "c4n4ry-5alt"


@pytest.mark.parametrize(
    "events",
    [
        [STORE | {"token_ids": [CANARY_TOKEN, -CANARY_TOKEN]}],
        [STORE | {"token_ids": [[CANARY_TOKEN, CANARY_TEXT]]}],
        [STORE | {"cache_salt": [CANARY_TEXT]}],
        [STORE | {"extra_keys": [CANARY_TEXT]}],
        [STORE | {"lora_name": {CANARY_TEXT: CANARY_TOKEN}}],
        [[CANARY_TEXT, CANARY_TOKEN]],
        [{"type": CANARY_TEXT}],
        [{"event_type": CANARY_TEXT}],
        [CANARY_TEXT],
        CANARY_TEXT,
        {CANARY_TEXT: CANARY_TOKEN},
    ],
)
def test_nothing_from_a_payload_is_ever_said(events: Any) -> None:
    """Neither a skipped event's cause nor a refusal, with everything it was raised from, quotes the payload."""
    said = ""
    for payload in (pack([TS, events, 0]), pack([TS, events, CANARY_TEXT]), pack([TS, events])[:-1]):
        try:
            said += repr(decode_batch(payload).skipped)
        except MalformedBatch as error:
            said += "".join(traceback.format_exception(error)) + repr(error)
    assert said
    assert str(CANARY_TOKEN) not in said
    assert CANARY_TEXT not in said
