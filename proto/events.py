"""KV-cache events: one normalised form, and a tolerant decoder for every encoding engines have used.

Strategy. A batch is a positional msgpack array ``[ts, events, rank?]``; an event is either an array
``[tag, field, …]`` (vLLM ≤ 0.23, SGLang ≤ 0.5.18) or a map with a ``type`` key (later). Both are decoded
generically and normalised field by field, so longer arrays, shorter arrays, unknown keys, unknown kinds and
any header width are fine. One bad event costs itself, never its neighbours: it lands in `Batch.skipped` with a
cause. Only a payload that is no batch at all raises MalformedBatch (which includes nesting deeper than the
interpreter's recursion limit: no engine nests deeper than six).

A field that names the block (hashes, tokens, adapter, salt, extra keys) is never repaired or guessed: a wrong type
there skips the event, since a block indexed under the wrong name could match a prompt it must not.

Invariants: hashes are unsigned 64-bit; `medium` is lower case and never None; `tokens` is a flat list of ints in
[0, 2^64); `ts` is finite; nothing here looks at token values, and no error text carries anything from the payload.
Cost is linear in the payload, whatever lengths it declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NewType, cast

import msgspec

from .errors import MalformedBatch
from .hashing import PackedTokens, token_ids_of
from .index import Tier
from .native import kernel

EngineHash = NewType("EngineHash", int)
"""Unsigned 64-bit: what an engine calls a block on the wire, reduced as vLLM reduces 32-byte hashes."""

_U64 = 0xFFFF_FFFF_FFFF_FFFF
MAX_GROUPS = 64
"""Cache groups per engine we accept; hybrid models have a handful."""
MAX_RANK = 65_535
MAX_PAYLOAD_BYTES = 32 << 20
"""Larger payloads are refused unread. A store of a million tokens takes 5 MB."""

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Group kinds whose blocks form a prefix chain. A nil kind means an engine that has only one group."""
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
"""Group kinds that need the blocks of their window before the point where a prompt goes on, and no others."""
STATE_KINDS = frozenset({"mamba"})
"""Group kinds whose one block at that point stands for everything before it."""
UNCACHED_KINDS = frozenset({"encoder_only_attention", "cross_attention"})
"""Group kinds that take no part in prefix caching."""

_TIERS = {
    "gpu": Tier.GPU,
    "cpu": Tier.CPU,
    "cpu_pinned": Tier.CPU,
    "cxl": Tier.CPU,
    "fs": Tier.STORAGE,
    "obj": Tier.STORAGE,
    "storage": Tier.STORAGE,
    "disk": Tier.STORAGE,
    "external": Tier.STORAGE,
}
OTHER_MEDIUM = "other"
"""Unknown medium names fold into this one, so that a publisher cannot grow our tables with names."""


def tier_of(medium: str) -> Tier:
    """Tier of a normalised medium. Unknown media are never taken for GPU memory."""
    return _TIERS.get(medium, Tier.STORAGE)


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Blocks that became findable, one physical copy each, in chain order."""

    hashes: list[EngineHash]
    """May be empty, when a masked group announces none of a step's blocks."""
    parent: EngineHash | None
    """Hash of the block before the first one; None for a block that starts the prompt, or if unpublished."""
    tokens: list[int]
    """len(hashes) × block_size ids; empty for offload placeholders; of another length for masked groups."""
    block_size: int
    """Tokens per engine block; 0 for placeholders."""
    medium: str = "gpu"
    group: int = 0
    kind: str | None = None
    """vLLM's kv_cache_spec_kind; None on engines that do not publish it."""
    window: int | None = None
    """Tokens of this group's sliding window; None where there is none, or none was published."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    """One entry per hash: None or a list of untagged extra keys (see hashing.event_extra_keys)."""
    cache_salt: str | None = None
    lookahead: bool = False
    """The hashes also cover tokens past the block (speculative decoding): same text, other hash."""
    lookahead_tokens: list[list[int]] | None = None
    """Those tokens, one list per hash; None where they cannot be told from the event."""
    remote: bool = False
    """The copy is not in this engine's own memory; its `medium` is then never `gpu`."""
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One physical copy of each of these blocks is gone."""

    hashes: list[EngineHash]
    medium: str = "gpu"
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, gc=False):
    """The engine reset its prefix cache. Names neither medium nor group, in any version."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Skipped(msgspec.Struct, frozen=True, gc=False):
    """An event that was not applied. `cause` is one of a fixed set of metric labels."""

    cause: str


class Batch(msgspec.Struct, frozen=True):
    """One engine step's events, in causal order."""

    ts: float
    """Engine wall clock, seconds since 1970; milliseconds are recognised and converted. 0.0 when the engine sent none
    that a clock could show (NaN, infinite, negative): events are worth more than their time."""
    events: list[Event]
    rank: int | None = None
    skipped: list[Skipped] = []


class _Bad(Exception):
    def __init__(self, cause: str) -> None:
        self.cause = cause


_Token = Annotated[int, msgspec.Meta(ge=0)]


class _FlatTokens(msgspec.Struct):
    ids: list[_Token]


class _TokenPairs(msgspec.Struct):
    ids: list[tuple[_Token, _Token]]


class _TokenLists(msgspec.Struct):
    ids: list[list[_Token]]


_decode = msgspec.msgpack.Decoder().decode
_decode_raw = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_packed = msgspec.msgpack.Decoder(ext_hook=lambda _, data: PackedTokens(bytes(data))).decode
"""Of what the native kernel made of a payload: it leaves no extension value of the engine's in."""
_UNDECODABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

_STORED = (
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
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_RFC1527_TAGS = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
_RFC1527_FIELDS = {"seq_hashes": "block_hashes", "parent_hash": "parent_block_hash"}

# No clock reads 1e11 seconds before the year 5138: above it, a timestamp is in milliseconds.
_MAX_SECONDS = 1e11


def decode_batch(payload: bytes, *, pack_tokens: bool = False) -> Batch:
    """Decode one payload frame. Raises MalformedBatch when it is no batch; bad events are skipped and listed.

    pack_tokens: where the native kernel can, `tokens` are PackedTokens, which stand in for a list but for encoding.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedBatch("too_large")
    if pack_tokens and kernel is not None and (plain := kernel.plain_batch(payload)) is not None:
        ts, rank, fields = plain
        return Batch(_seconds(ts), [_plain_event(*event) for event in fields], rank)
    skipped: list[Skipped] = []
    packed = kernel.pack_token_ids(payload) if pack_tokens and kernel is not None else None
    try:
        batch = _decode(payload) if packed is None else _decode_packed(packed)
    except _UNDECODABLE:
        batch = _salvage(payload, skipped)
    if not isinstance(batch, list):
        raise MalformedBatch("not_an_array")
    if len(batch) < 2:
        raise MalformedBatch("too_short")
    ts, raw_events = batch[0], batch[1]
    rank = batch[2] if len(batch) > 2 else None
    if type(ts) is not float and type(ts) is not int:
        raise MalformedBatch("timestamp")
    if not isinstance(raw_events, list):
        raise MalformedBatch("events")
    if rank is not None and (type(rank) is not int or not 0 <= rank <= MAX_RANK):
        raise MalformedBatch("rank")
    events: list[Event] = []
    for raw in raw_events:
        try:
            events.append(_event(raw))
        except _Bad as bad:
            skipped.append(Skipped(bad.cause))
    return Batch(_seconds(ts), events, rank, skipped)


def _plain_event(
    hashes: list[EngineHash] | None = None,
    medium: str | None = None,
    group: int = 0,
    parent: EngineHash | None = None,
    tokens: bytes | None = None,
    block_size: int = 0,
    kind: str | None = None,
) -> Event:
    """An event as the native kernel tells it."""
    if hashes is None:
        return AllBlocksCleared()
    name = _medium(medium)
    if tokens is None:
        return BlockRemoved(hashes=hashes, medium=name, group=group)
    return BlockStored(
        hashes=hashes,
        parent=parent,
        tokens=token_ids_of(tokens),
        block_size=block_size,
        medium=name,
        group=group,
        kind=kind,
    )


def _seconds(ts: float) -> float:
    seconds = ts / 1000 if ts > _MAX_SECONDS else float(ts)
    # The comparison is false for NaN, too.
    return seconds if 0.0 <= seconds <= _MAX_SECONDS else 0.0


def _salvage(payload: bytes, skipped: list[Skipped]) -> Any:
    """Cut an undecodable batch into events, so that one with, say, broken UTF-8 costs only itself."""
    try:
        parts = _decode_raw(payload)
        raw_events = _decode_raw(parts[1])
        head, tail = _decode(parts[0]), [_decode(p) for p in parts[2:3]]
    except (*_UNDECODABLE, IndexError):
        raise MalformedBatch("undecodable") from None
    events = []
    for raw in raw_events:
        try:
            events.append(_decode(raw))
        except _UNDECODABLE:
            skipped.append(Skipped("undecodable"))
    return [head, events, *tail]


def _event(raw: Any) -> Event:
    if isinstance(raw, dict):
        fields = raw
        tag = raw.get("type")
        if tag is None:
            tag, fields = _renamed(raw)
    elif isinstance(raw, list) and raw:
        tag, fields = raw[0], None
    else:
        raise _Bad("not_an_event")
    if isinstance(tag, bytes):
        tag = tag.decode("utf-8", "replace")
    match tag:
        case "BlockStored":
            return _stored(fields if fields is not None else dict(zip(_STORED, raw[1:], strict=False)))
        case "BlockRemoved":
            return _removed(fields if fields is not None else dict(zip(_REMOVED, raw[1:], strict=False)))
        case "AllBlocksCleared":
            return AllBlocksCleared()
        case str():
            raise _Bad("unknown_kind")
        case _:
            raise _Bad("not_an_event")


def _renamed(raw: dict[Any, Any]) -> tuple[Any, dict[Any, Any]]:
    """Tag and fields of a map without a `type` key: its keys are binary, or it speaks RFC 1527 only.

    A Mooncake master can be told not to add vLLM's names (`type`, `block_hashes`, …) to its own.
    """
    fields = {k.decode("utf-8", "replace") if isinstance(k, bytes) else k: v for k, v in raw.items()}
    tag = fields.get("type")
    if tag is None:
        kind = _text(fields.get("event_type"), "not_an_event")
        tag = None if kind is None else _RFC1527_TAGS.get(kind, kind)
        for theirs, ours in _RFC1527_FIELDS.items():
            if ours not in fields:
                fields[ours] = fields.get(theirs)
    return tag, fields


def _stored(f: dict[Any, Any]) -> BlockStored:
    get = f.get
    hashes = _hashes(get("block_hashes"))
    parent = get("parent_block_hash")
    tokens, ahead = _tokens(get("token_ids"))
    block_size = _int(get("block_size"), "block_size") or 0
    if block_size < 0:
        raise _Bad("block_size")
    lookahead = get("lookahead_token_ids")
    lookahead_tokens = None
    if lookahead:
        lookahead_tokens = _lookahead(lookahead, len(hashes))
    elif ahead is not None and 0 < block_size * len(hashes) == len(tokens):
        lookahead_tokens = [[token] for token in ahead[block_size - 1 :: block_size]]
    medium, group, remote = _where(f)
    return BlockStored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        medium=medium,
        group=group,
        kind=_text(get("kv_cache_spec_kind"), "kv_cache_spec_kind"),
        window=_window(get("kv_cache_spec_sliding_window")),
        lora_id=_int(get("lora_id"), "lora_id"),
        lora_name=_text(get("lora_name"), "lora_name"),
        extra_keys=_extra_keys(get("extra_keys"), len(hashes)),
        cache_salt=_text(get("cache_salt"), "cache_salt"),
        lookahead=ahead is not None or bool(lookahead),
        lookahead_tokens=lookahead_tokens,
        remote=remote,
        session_id=_text(get("session_id"), "session_id"),
    )


def _removed(f: dict[Any, Any]) -> BlockRemoved:
    medium, group, _ = _where(f)
    return BlockRemoved(hashes=_hashes(f.get("block_hashes")), medium=medium, group=group)


def _hash(value: Any) -> EngineHash:
    if type(value) is int:
        return EngineHash(value & _U64)
    if isinstance(value, bytes) and len(value) >= 8:
        return EngineHash(int.from_bytes(value[-8:], "big"))
    raise _Bad("hash")


def _hashes(value: Any) -> list[EngineHash]:
    if not isinstance(value, list):
        raise _Bad("block_hashes")
    # Inline for the common case, and without calling the NewType: both calls cost more than the reduction itself.
    hashes = [v & _U64 if type(v) is int else _hash(v) for v in value]
    return cast("list[EngineHash]", hashes)


def _tokens(value: Any) -> tuple[list[int], list[int] | None]:
    """Flat token ids; and those that follow each, if they came as (token, next token) pairs (SGLang with EAGLE)."""
    if type(value) is PackedTokens:
        return cast("list[int]", value), None
    if not value and (value is None or isinstance(value, list)):
        return [], None
    try:
        # Through a struct, because msgspec keeps the compiled type there; a bare list type is compiled per call.
        if isinstance(value, list) and isinstance(value[0], list):
            pairs = msgspec.convert({"ids": value}, _TokenPairs).ids
            return [first for first, _ in pairs], [second for _, second in pairs]
        return msgspec.convert({"ids": value}, _FlatTokens).ids, None
    except msgspec.ValidationError:
        raise _Bad("token_ids") from None


def _lookahead(value: Any, hashes: int) -> list[list[int]]:
    try:
        tokens = msgspec.convert({"ids": value}, _TokenLists).ids
    except msgspec.ValidationError:
        raise _Bad("lookahead_token_ids") from None
    if len(tokens) < hashes:
        raise _Bad("lookahead_token_ids")
    return tokens


def _extra_keys(value: Any, hashes: int) -> list[Any] | None:
    """One entry per hash, each None or a list. None when no block has any.

    Masked groups may list more entries than hashes; fewer would leave a block's inputs open.
    """
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < hashes:
        raise _Bad("extra_keys")
    if value.count(None) == len(value):
        return None
    for entry in value:
        if entry is not None and not isinstance(entry, list):
            raise _Bad("extra_keys")
    return value if any(value) else None


def _where(f: dict[Any, Any]) -> tuple[str, int, bool]:
    """Medium, group and whether the copy is remote. A remote copy is never taken for the engine's GPU memory."""
    medium, group, locality = f.get("medium"), f.get("group_idx"), f.get("locality")
    name = _medium(_text(medium, "medium"))
    remote = locality is not None and (_text(locality, "locality") or "").upper() != "LOCAL"
    if remote and name == "gpu":
        name = OTHER_MEDIUM
    if group is None:
        return name, 0, remote
    if type(group) is not int or not 0 <= group < MAX_GROUPS:
        raise _Bad("group_idx")
    return name, group, remote


def _medium(name: str | None) -> str:
    if name is None:
        return "gpu"
    name = name.lower()
    return name if name in _TIERS else OTHER_MEDIUM


def _window(value: Any) -> int | None:
    """Not a name of anything, so nothing is lost with a bad one but the knowledge of how far the window reaches."""
    return value if type(value) is int and value > 0 else None


def _int(value: Any, cause: str) -> int | None:
    if value is None or type(value) is int:
        return value
    raise _Bad(cause)


def _text(value: Any, cause: str) -> str | None:
    if value is None or type(value) is str:
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _Bad(cause) from None
    raise _Bad(cause)


def block_tokens(event: BlockStored) -> Sequence[Sequence[int]] | None:
    """The event's tokens cut per block, or None when they do not line up with its hashes (masked groups)."""
    size, tokens = event.block_size, event.tokens
    if size <= 0 or len(tokens) != size * len(event.hashes):
        return None
    return [tokens[i : i + size] for i in range(0, len(tokens), size)]
