"""The native kernel and its pure twins say the same, of what is well formed and of what is not."""

from __future__ import annotations

import json
import random
from array import array
from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.proto.api import MAX_PROMPT_TOKENS, MatchRequest
from metatrie.proto.errors import InvalidField, MalformedBatch
from metatrie.proto.events import BlockStored, decode_batch
from metatrie.proto.hashing import (
    BlockHash,
    BlockKey,
    Chain,
    PackedTokens,
    block_hash,
    block_key,
    chain_hashes,
    none_hash,
)
from metatrie.proto.http import Body, PromptBody
from metatrie.proto.http_front import HotHead
from metatrie.proto.index import PAGE_SPAN, BlockWrite, PackedWrites, PageHead, TierMask
from metatrie.proto.native import kernel

needs_kernel = pytest.mark.skipif(
    kernel is None, reason="the native kernel is not installed, or METATRIE_PURE is set"
)
HEAD = HotHead({"Content-Type": "application/json"}, "127.0.0.1")
MSGPACK_HEAD = HotHead({"Content-Type": "application/msgpack"}, "127.0.0.1")
ROOT = none_hash("0")
TOKENS = st.integers(0, 2**32 - 1)


def said(body: Body[MatchRequest], doc: bytes, head: HotHead = HEAD) -> Any:
    """What a body decodes to, or the error it is refused with."""
    try:
        request = body.decode(head, doc)
    except InvalidField as error:
        return error.field, error.detail
    ids = request.token_ids
    return (
        None if ids is None else list(ids),
        {name: getattr(request, name) for name in request.__struct_fields__ if name != "token_ids"},
    )


def agree(doc: bytes) -> Any:
    ordinary, split = said(Body(MatchRequest), doc), said(PromptBody(MatchRequest), doc)
    assert ordinary == split
    return split


spaces = st.text(" \t\r\n", max_size=3)
scalars = st.one_of(st.integers(-5, 2**33), st.floats(allow_nan=False), st.text(max_size=8), st.none(), st.booleans())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner)
)


@needs_kernel
@given(
    st.lists(TOKENS | scalars, max_size=20) | values,
    st.dictionaries(st.sampled_from(["model", "lora", "limit", "x", "token_ids"]) | st.text(max_size=9), values),
    st.randoms(use_true_random=False),
    spaces,
)
def test_json_bodies(ids: Any, more: dict[str, Any], rng: random.Random, space: str) -> None:
    fields = [("model", "m"), ("token_ids", ids), *more.items()]
    rng.shuffle(fields)
    separator = f"{space},{space}"
    doc = "{" + separator.join(f"{json.dumps(k)}{space}:{json.dumps(v)}" for k, v in fields) + "}" + space
    agree(doc.encode())
    cut = rng.randrange(len(doc))
    agree(doc[:cut].encode())
    agree((doc[:cut] + rng.choice('{}[],:"\\0x') + doc[cut + 1 :]).encode())


@needs_kernel
@pytest.mark.parametrize(
    "ids",
    ["[01]", "[-0]", "[1.0]", "[1e2]", "[4294967296]", "[4294967295]", "[0]", "[]", "[1,]", "[,1]", "[1 2]", "[[1]]"],
)
def test_numbers_of_every_kind(ids: str) -> None:
    agree(f'{{"model":"m","token_ids":{ids}}}'.encode())


@needs_kernel
@pytest.mark.parametrize("tail", ["", " ", "        ", ",7", ", 7"])
@pytest.mark.parametrize("digits", range(1, 12))
def test_numbers_of_every_length(digits: int, tail: str) -> None:
    for number in (10 ** (digits - 1), 10**digits - 1):
        agree(f'{{"token_ids":[{number}{tail}],"model":"m"}}'.encode())


@needs_kernel
def test_a_key_may_be_spelled_in_escapes_and_come_twice() -> None:
    assert agree(rb'{"model":"m","token\u005fids":[1],"token_ids":[2]}')[0] == [2]
    assert agree(b'{"model":"m","token_ids":[1],"token_ids":[2]}')[0] == [2]
    assert agree(b'{"model":"m","x":{"token_ids":[1]},"token_ids":[2]}')[0] == [2]


def test_too_many_tokens_are_refused_either_way() -> None:
    doc = json.dumps({"model": "m", "token_ids": [1] * (MAX_PROMPT_TOKENS + 1)}).encode()
    assert said(Body(MatchRequest), doc) == said(PromptBody(MatchRequest), doc)
    assert said(PromptBody(MatchRequest), doc)[0] == "token_ids"


@given(st.lists(TOKENS, min_size=1, max_size=40))
def test_token_ids_may_come_packed(ids: list[int]) -> None:
    raw = array("I", ids).tobytes()
    packed = msgspec.msgpack.encode({"model": "m", "token_ids": raw})
    listed = msgspec.msgpack.encode({"model": "m", "token_ids": ids})
    body = PromptBody(MatchRequest)
    assert said(body, packed, MSGPACK_HEAD) == said(body, listed, MSGPACK_HEAD)
    assert said(body, msgspec.json.encode({"model": "m", "token_ids": raw})) == said(body, listed, MSGPACK_HEAD)
    half = msgspec.msgpack.encode({"model": "m", "token_ids": raw[:-1]})
    assert said(body, half, MSGPACK_HEAD)[0] == "token_ids"


@given(st.lists(TOKENS, max_size=70), st.integers(1, 17))
def test_hashes_of_packed_tokens_and_lists(ids: list[int], size: int) -> None:
    whole = len(ids) // size * size
    expected: list[BlockHash] = []
    for at in range(0, whole, size):
        expected.append(block_hash(expected[-1] if expected else ROOT, ids[at : at + size]))
    packed = PackedTokens(array("I", ids).tobytes())
    assert list(packed) == ids == packed[:]
    assert packed == ids
    assert chain_hashes(ROOT, size, ids[:whole]) == chain_hashes(ROOT, size, packed[:whole]) == expected
    for tokens in (ids, packed, tuple(ids)):
        assert Chain(ROOT, size, tokens).keys(99) == [block_key(digest) for digest in expected]


def test_tokens_past_32_bits_are_hashed_all_the_same() -> None:
    ids = [2**40, 1, 2, 3]
    assert Chain(ROOT, 2, ids).keys(2) == [block_key(d) for d in chain_hashes(ROOT, 2, ids)]
    assert chain_hashes(ROOT, 2, ids)[0] == block_hash(ROOT, ids[:2])


def test_a_prefix_seen_before_gives_the_same_keys() -> None:
    """The memo of pure Python: whole spans, in other prompts, after other parents, in other block sizes."""
    rng = random.Random(3)
    shared = [rng.randrange(1000) for _ in range(64 * 4)]
    for size in (4, 2, 4):
        for head in ([], [7] * size):
            prompt = [*head, *shared, rng.randrange(1000), 1, 2, 3]
            keys = Chain(ROOT, size, prompt).keys(1000)
            assert keys == [block_key(d) for d in chain_hashes(ROOT, size, prompt[: len(keys) * size])]


def plain_event(rng: random.Random) -> Any:
    """Of the kind that is read whole, but for what may be odd about one field."""
    names = [rng.choice([rng.randrange(2**64), -rng.randrange(2**63), rng.randbytes(8), 5]) for _ in range(2)]
    fields = {
        "block_hashes": names,
        "parent_block_hash": rng.choice([None, 5, -5, 2**64 - 1, rng.randbytes(9)]),
        "token_ids": [rng.choice([3, 300, 70_000]) for _ in range(8)],
        "block_size": rng.choice([4, 4, 300, 70_000]),
        "lora_id": None,
        "medium": rng.choice([None, "GPU", "gpu", "CPU", "fs", "ünknown"]),
        "lora_name": None,
        "extra_keys": rng.choice([None, [None, None]]),
        "group_idx": rng.choice([None, 0, 63]),
        "kv_cache_spec_kind": rng.choice([None, "full_attention", "mamba"]),
        "kv_cache_spec_sliding_window": None,
    }
    more = {"cache_salt": None, "locality": None, "new_in_the_next_version": rng.choice([None, "x", 1.5, True])}
    if rng.random() < 0.3:
        values = [
            None,
            "",
            "LOCAL",
            "REMOTE",
            b"GPU",
            0,
            -1,
            64,
            2**40,
            2.5,
            True,
            [],
            [[]],
            {"a": 1},
            [None],
            [7, 8],
        ]
        rng.choice([fields, more])[rng.choice([*fields, *more])] = rng.choice(values)
    tag = rng.choice(["BlockStored", "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"])
    if rng.random() < 0.5:
        items = [*{"type": tag, **fields, **more}.items()]
        rng.shuffle(items)
        return dict(items)
    values = list(fields.values())
    if tag == "BlockRemoved":
        values = [fields["block_hashes"], fields["medium"], fields["group_idx"]]
    return [tag, *values][: rng.choice([2, 5, 12, 13])]


def event(rng: random.Random) -> Any:
    if rng.random() < 0.6:
        return plain_event(rng)
    tokens: Any = [rng.choice([rng.randrange(200), rng.randrange(2**32)]) for _ in range(16 * rng.randrange(4))]
    if rng.random() < 0.2:
        tokens = rng.choice([None, "x", b"xxxx", [1, -1], [2**40], [[1, 2]], [1.5], 5, [True], {"a": 1}, [None]])
    fields = {
        "type": "BlockStored",
        "block_hashes": [
            rng.choice([rng.randrange(2**64), rng.randbytes(32)]) for _ in range(len(tokens or ()) // 16)
        ]
        if isinstance(tokens, list)
        else [],
        "parent_block_hash": rng.choice([None, 5]),
        "token_ids": tokens,
        "block_size": 16,
        "lora_id": None,
        "medium": rng.choice(["GPU", None, 3]),
        "extra_keys": rng.choice([None, [["salt"]], [[["token_ids", 1]]]]),
    }
    kind = rng.random()
    if kind < 0.5:
        if rng.random() < 0.5:
            items = list(fields.items())
            rng.shuffle(items)
            fields = dict(items)
        return fields
    if kind < 0.8:
        return list(fields.values())[: rng.randrange(1, 9)]
    return rng.choice([["BlockRemoved", [1], "GPU"], {"type": "AllBlocksCleared"}, 7, [], {}, "BlockStored", None])


@needs_kernel
@pytest.mark.parametrize("seed", range(400))
def test_event_batches(seed: int) -> None:
    rng = random.Random(seed)
    ts, rank = rng.choice([1.5, 1.5, 7, 1.8e12, -1.0, 2**60]), rng.choice([None, 0, 70_000])
    payload = msgspec.msgpack.encode([ts, [event(rng) for _ in range(rng.randrange(4))], rank])
    for _ in range(6):
        both: list[Any] = []
        for pack in (False, True):
            try:
                both.append(decode_batch(payload, pack_tokens=pack))
            except MalformedBatch as error:
                both.append(error.cause)
        assert both[0] == both[1]
        if not isinstance(both[1], str):
            for one in both[1].events:
                if isinstance(one, BlockStored):
                    assert all(type(token) is int for token in one.tokens)
        at = rng.randrange(len(payload))
        payload = payload[:at] + rng.randbytes(rng.randrange(3)) + payload[at + rng.randrange(3) :] or b"\x90"


@needs_kernel
def test_what_engines_mostly_publish_is_read_whole() -> None:
    assert kernel is not None
    stored = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [7] * 8}
    stored |= {"block_size": 4, "lora_id": None, "medium": "GPU", "extra_keys": [None, None], "group_idx": 0}
    removed = {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": "CPU"}
    listed = [["BlockStored", [3], 2, [7] * 4, 4, None, "GPU"], ["BlockRemoved", [b"x" * 32], "GPU"]]
    for events in ([stored, removed], listed, [["AllBlocksCleared"], {"type": "AllBlocksCleared"}]):
        payload = msgspec.msgpack.encode([1.5, events, 0])
        assert kernel.plain_batch(payload) is not None
        assert decode_batch(payload, pack_tokens=True) == decode_batch(payload)
        assert kernel.plain_batch(payload + b"\x00") is None


@needs_kernel
def test_an_engine_cannot_send_packed_tokens_itself() -> None:
    raw = array("I", range(16)).tobytes()
    forged = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}
    payload = msgspec.msgpack.encode([0.0, [{**forged, "token_ids": msgspec.msgpack.Ext(84, raw)}], 0])
    assert [skipped.cause for skipped in decode_batch(payload, pack_tokens=True).skipped] == ["token_ids"]


KEYS = st.integers(0, 5).map(lambda n: BlockKey(n.to_bytes(8, "big")))
WRITES = st.lists(
    st.builds(
        BlockWrite,
        key=KEYS,
        parent=KEYS | st.none(),
        head=KEYS.map(PageHead),
        depth=st.integers(0, 70) | st.integers(0, 2**32 - 1),
        tiers=st.integers(0, 15).map(TierMask),
    ),
    max_size=12,
)


@given(WRITES)
def test_packed_writes_read_like_a_list(writes: list[BlockWrite]) -> None:
    packed = PackedWrites.of(writes)
    assert packed == writes
    assert [packed[i] for i in range(-len(writes), len(writes))] == writes * 2
    assert all(packed[at : at + 3] == writes[at : at + 3] for at in range(len(writes)))
    assert packed[::-2] == writes[::-2]
    assert packed.keys() == [write.key for write in writes]
    assert packed.gone() == [write.key for write in writes if not write.tiers]


@given(st.integers(0, 100), st.integers(1, 100), st.sampled_from([0, 1, 5]))
def test_a_run_of_a_chain_is_packed_like_its_blocks(start: int, blocks: int, tiers: int) -> None:
    end = start + blocks
    keys = [BlockKey(depth.to_bytes(8, "big")) for depth in range(end)]
    writes = [
        BlockWrite(keys[i], keys[i - 1] if i else None, PageHead(keys[i - i % PAGE_SPAN]), i, TierMask(tiers))
        for i in range(start, end)
    ]
    assert PackedWrites.run(keys, start, end, TierMask(tiers)) == (writes if tiers else writes[::-1])


@given(st.lists(WRITES, max_size=4))
def test_merged_writes_are_the_newest_in_the_order_of_writing(parts: list[list[BlockWrite]]) -> None:
    merged = list(PackedWrites.merged([PackedWrites.of(part) for part in parts]))
    newest = {write.key: write for part in parts for write in part}
    assert {write.key: write for write in merged} == newest
    assert len(merged) == len(newest)
    appear = [write for write in merged if write.tiers]
    vanish = [write for write in merged if not write.tiers]
    assert merged == appear + vanish
    for order in (appear, vanish[::-1]):
        spans = [write.depth // PAGE_SPAN for write in order]
        assert spans == sorted(spans)
        for _, page in groupby(order, key=lambda write: (write.depth // PAGE_SPAN, write.head)):
            depths = [write.depth for write in page]
            assert depths == sorted(depths)
    for order in (appear, vanish):
        pages = [page for page, _ in groupby(order, key=lambda write: (write.depth // PAGE_SPAN, write.head))]
        assert len(pages) == len(set(pages))


@given(WRITES)
def test_writes_by_page(writes: list[BlockWrite]) -> None:
    pages: dict[PageHead, dict[BlockKey, bytes]] = {}
    for write in writes:
        pages.setdefault(write.head, {})[write.key] = bytes((write.tiers,))
    whole: dict[PageHead, list[BlockWrite]] = {}
    for write in writes:
        whole.setdefault(write.head, []).append(write)
    assert {head: list(page) for head, page in PackedWrites.of(writes).pages().items()} == whole
    found = PackedWrites.of(writes).by_page()
    assert found == [(head, b"".join(k + t for k, t in blocks.items())) for head, blocks in pages.items()]
