"""Properties of block naming: chains, what a block's extra keys are, namespaces, and what errors may say."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from metatrie.proto.errors import UnhashableBlock
from metatrie.proto.hashing import (
    KEY_BYTES,
    MAX_BLOCK_SIZE,
    NO_EXTRAS,
    Chain,
    MediaItem,
    Namespace,
    PromptExtras,
    block_hash,
    block_key,
    event_extra_keys,
    none_hash,
)

ROOT = none_hash("0")
TOKEN = st.integers(0, 2**32 - 1)
PROMPTS = st.lists(TOKEN, max_size=80)
BLOCK_SIZES = st.integers(1, 20)
TEXT = st.text(min_size=1, max_size=12)
MEDIA = st.builds(MediaItem, identifier=TEXT, offset=st.integers(0, 90), length=st.integers(1, 60))
EXTRAS = st.builds(
    PromptExtras,
    lora=st.none() | TEXT,
    media=st.lists(MEDIA, max_size=4).map(tuple),
    cache_salt=st.none() | TEXT,
)


def all_keys(block_size: int, tokens: list[int], extras: PromptExtras = NO_EXTRAS) -> list[bytes]:
    chain = Chain(ROOT, block_size, tokens, extras)
    return list(chain.keys(chain.blocks))


# ------------------------------------------------------------------------------------------------------- chains


@given(PROMPTS, BLOCK_SIZES, EXTRAS)
def test_a_chain_is_block_hash_block_by_block(tokens: list[int], size: int, extras: PromptExtras) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_hash(parent, tokens[start : start + size], extras.for_block(start, start + size))
        expected.append(block_key(parent))
    assert all_keys(size, tokens, extras) == expected
    assert all(len(key) == KEY_BYTES for key in expected)


@given(PROMPTS, BLOCK_SIZES, EXTRAS, st.lists(st.integers(-1, 90), max_size=6))
def test_asking_in_steps_equals_asking_once(
    tokens: list[int], size: int, extras: PromptExtras, counts: list[int]
) -> None:
    whole = all_keys(size, tokens, extras)
    chain = Chain(ROOT, size, tokens, extras)
    assert chain.blocks == len(tokens) // size == len(whole)
    known = 0
    for count in counts:
        given_out = list(chain.keys(known))
        known = max(known, min(count, chain.blocks))
        keys = chain.keys(count)
        assert keys[: len(given_out)] == given_out
        assert keys == whole[:known]
    assert chain.keys(chain.blocks) == whole


@given(PROMPTS, PROMPTS, BLOCK_SIZES, EXTRAS)
def test_equal_prefixes_have_equal_keys_and_no_others(
    a: list[int], b: list[int], size: int, extras: PromptExtras
) -> None:
    keys_a, keys_b = all_keys(size, a, extras), all_keys(size, b, extras)
    for depth, (key_a, key_b) in enumerate(zip(keys_a, keys_b, strict=False), start=1):
        assert (key_a == key_b) is (a[: depth * size] == b[: depth * size])


@given(PROMPTS, PROMPTS, BLOCK_SIZES, EXTRAS, MEDIA)
def test_keys_depend_on_nothing_that_comes_later(
    tokens: list[int], suffix: list[int], size: int, extras: PromptExtras, item: MediaItem
) -> None:
    keys = all_keys(size, tokens, extras)
    end = len(keys) * size
    later = msgspec.structs.replace(item, offset=end + item.offset)
    longer = msgspec.structs.replace(extras, media=(*extras.media, later))
    assert all_keys(size, tokens[:end] + suffix, longer)[: len(keys)] == keys


@given(st.lists(TOKEN, min_size=1, max_size=60), BLOCK_SIZES, EXTRAS, st.data())
def test_every_token_counts_from_its_block_on(
    tokens: list[int], size: int, extras: PromptExtras, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], data.draw(TOKEN.filter(lambda t: t != tokens[at])), *tokens[at + 1 :]]
    before, after = all_keys(size, tokens, extras), all_keys(size, changed, extras)
    assert before[: at // size] == after[: at // size]
    assert all(x != y for x, y in zip(before[at // size :], after[at // size :], strict=True))


def test_equal_blocks_at_different_depths_have_different_keys() -> None:
    assert len(set(all_keys(4, [7] * 400))) == 100


# --------------------------------------------------------------------------------------------------- extra keys


def covering(extras: PromptExtras, start: int, end: int) -> list[Any] | None:
    """The definition, token by token: an item belongs to a block if one of the block's tokens lies in its span."""
    keys: list[Any] = [["lora", extras.lora]] if extras.lora else []
    for item in extras.media:
        span = range(item.offset, item.offset + item.length)
        if any(position in span for position in range(start, end)):
            keys.append(["mm", item.identifier, item.offset - start])
    if extras.cache_salt and 0 in range(start, end):
        keys.append(["cache_salt", extras.cache_salt])
    return keys or None


@given(EXTRAS, st.integers(0, 12), BLOCK_SIZES)
def test_extra_keys_of_a_block_are_those_of_its_tokens(extras: PromptExtras, block: int, size: int) -> None:
    start = block * size
    assert extras.for_block(start, start + size) == covering(extras, start, start + size)


@given(st.lists(MEDIA, max_size=5, unique_by=lambda item: item.offset), st.randoms())
def test_the_order_media_are_listed_in_does_not_matter(media: list[MediaItem], random: Any) -> None:
    shuffled = random.sample(media, len(media))
    extras = PromptExtras(media=tuple(shuffled))
    assert extras == PromptExtras(media=tuple(media))
    assert [item.offset for item in extras.media] == sorted(item.offset for item in media)
    decoded = msgspec.json.decode(msgspec.json.encode({"media": shuffled}), type=PromptExtras)
    assert decoded == extras


@pytest.mark.parametrize("empty", [PromptExtras(lora=""), PromptExtras(cache_salt=""), NO_EXTRAS])
def test_empty_extras_are_none(empty: PromptExtras) -> None:
    assert empty.for_block(0, 16) is None
    assert all_keys(2, [1, 2, 3, 4], empty) == all_keys(2, [1, 2, 3, 4])


@given(st.lists(TOKEN, min_size=8, max_size=40), EXTRAS, EXTRAS)
def test_prompts_share_a_key_only_if_their_extras_agree_up_to_it(
    tokens: list[int], a: PromptExtras, b: PromptExtras
) -> None:
    size = 4
    agree = True
    for i, (x, y) in enumerate(zip(all_keys(size, tokens, a), all_keys(size, tokens, b), strict=True)):
        agree = agree and a.for_block(i * size, i * size + size) == b.for_block(i * size, i * size + size)
        assert (x == y) is agree


def test_a_salt_an_adapter_and_a_media_item_of_one_name_are_different_things() -> None:
    named = [
        PromptExtras(lora="x"),
        PromptExtras(cache_salt="x"),
        PromptExtras(media=(MediaItem(identifier="x", offset=0, length=1),)),
        NO_EXTRAS,
    ]
    assert len({all_keys(4, [1, 2, 3, 4], extras)[0] for extras in named}) == len(named)


# ------------------------------------------------------------------------------------- extra keys from the wire


def untagged(tagged: list[Any] | None) -> list[Any] | None:
    """What vLLM 0.19 and later publish of a block's extra keys: the entries without their tags."""
    if tagged is None:
        return None
    return [entry[1:] if entry[0] == "mm" else entry[1] for entry in tagged]


@given(EXTRAS, st.integers(0, 6), BLOCK_SIZES, st.none() | st.integers(1, 9))
@example(PromptExtras(lora="same", cache_salt="same"), 0, 16, 1)
@example(PromptExtras(lora="", cache_salt=""), 0, 16, None)
def test_events_and_prompts_name_blocks_alike(
    extras: PromptExtras, block: int, size: int, lora_id: int | None
) -> None:
    start = block * size
    tagged = extras.for_block(start, start + size)
    from_event = event_extra_keys(
        untagged(tagged),
        lora_name=extras.lora,
        lora_id=lora_id if extras.lora else None,
        first=start == 0,
        salt=None,
    )
    assert from_event == tagged


@given(st.none() | TEXT, st.none() | TEXT, st.booleans())
def test_a_salt_the_event_names_itself_enters_the_first_block_only(
    lora: str | None, salt: str | None, first: bool
) -> None:
    """SGLang: no extra keys, the salt and the adapter are fields of the event."""
    start = 0 if first else 16
    assert event_extra_keys(None, lora_name=lora, lora_id=None, first=first, salt=salt) == PromptExtras(
        lora=lora, cache_salt=salt
    ).for_block(start, start + 16)


def test_embedding_digests_come_last() -> None:
    digest = bytes(range(32))
    raw = ["adapter", ["image", 3], "salt", digest]
    assert event_extra_keys(raw, lora_name="adapter", lora_id=1, first=True, salt=None) == [
        ["lora", "adapter"],
        ["mm", "image", 3],
        ["cache_salt", "salt"],
        ["prompt_embeds", digest],
    ]


@pytest.mark.parametrize(
    ("raw", "named", "cause"),
    [
        pytest.param(["image"], {"first": False}, "media_without_offset", id="bare media id in a later block"),
        pytest.param(["image", "salt"], {}, "media_without_offset", id="bare media id beside a salt"),
        pytest.param(["salt"], {"salt": "another"}, "media_without_offset", id="text beside the event's own salt"),
        pytest.param(
            ["adapter"], {"first": False, "lora_name": "other"}, "media_without_offset", id="another adapter's name"
        ),
        pytest.param(
            ["adapter", "adapter"], {"first": False, "lora_name": "adapter"}, "media_without_offset", id="name twice"
        ),
        pytest.param(None, {"lora_id": 7}, "lora_without_name", id="adapter id without a name"),
        pytest.param(None, {"lora_id": 7, "lora_name": ""}, "lora_without_name", id="adapter id, empty name"),
        pytest.param([7], {}, "unknown_extra_key", id="integer adapter id"),
        pytest.param([None], {}, "unknown_extra_key", id="nil entry"),
        pytest.param([["image", 1.5]], {}, "unknown_extra_key", id="fractional offset"),
        pytest.param([["image", True]], {}, "unknown_extra_key", id="boolean offset"),
        pytest.param([["image", None]], {}, "unknown_extra_key", id="nil offset"),
        pytest.param([["mm", "image", 3]], {}, "unknown_extra_key", id="tagged entry"),
        pytest.param([["cache_salt", "salt"]], {}, "unknown_extra_key", id="tagged salt"),
        pytest.param([{"image": 3}], {}, "unknown_extra_key", id="map"),
        pytest.param([[]], {}, "unknown_extra_key", id="empty entry"),
    ],
)
def test_what_the_wire_leaves_open_is_refused(raw: list[Any] | None, named: dict[str, Any], cause: str) -> None:
    arguments: dict[str, Any] = {"lora_name": None, "lora_id": None, "first": True, "salt": None} | named
    with pytest.raises(UnhashableBlock) as raised:
        event_extra_keys(raw, **arguments)
    assert raised.value.cause == cause


WIRE_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
CANARY = "c4n4ry-5alt"
ENTRIES = WIRE_VALUES | st.sampled_from([CANARY, [CANARY, 3], [CANARY, CANARY], {CANARY: 1}])


@given(
    st.lists(ENTRIES, max_size=4),
    st.none() | TEXT,
    st.none() | st.integers(),
    st.booleans(),
    st.none() | st.just(CANARY),
)
@example([CANARY, [CANARY, CANARY]], None, None, True, None)
@example([CANARY], None, None, False, None)
@example([], None, 7, True, CANARY)
def test_whatever_the_wire_shows_is_hashed_or_refused_without_a_word_of_it(
    raw: list[Any], lora: str | None, lora_id: int | None, first: bool, salt: str | None
) -> None:
    refusal = None
    try:
        keys = event_extra_keys(raw, lora_name=lora, lora_id=lora_id, first=first, salt=salt)
    except UnhashableBlock as error:
        refusal = error
    if refusal is None:
        assert len(block_hash(ROOT, [1], keys)) == 32
    else:
        assert refusal.cause in {"lora_without_name", "media_without_offset", "unknown_extra_key"}
        assert CANARY not in "".join(traceback.format_exception(refusal))


# --------------------------------------------------------------------------------------------------- namespaces

NAMESPACES = st.builds(
    Namespace,
    model=st.text(max_size=4),
    block_size=st.integers(1, MAX_BLOCK_SIZE),
    hash_seed=st.text(max_size=4),
    revision=st.text(max_size=4),
    tokenizer=st.text(max_size=4),
    attention=st.text(max_size=4),
    kv_dtype=st.text(max_size=4),
    kv_layout=st.text(max_size=4),
)


@given(NAMESPACES, NAMESPACES)
@example(Namespace(model="a", revision="b"), Namespace(model="ab"))
@example(Namespace(model="m", kv_dtype="x"), Namespace(model="m", kv_layout="x"))
@example(Namespace(model="m", block_size=16), Namespace(model="m", block_size=32))
def test_only_equal_namespaces_share_an_id(a: Namespace, b: Namespace) -> None:
    assert (a.id == b.id) is (a == b)


@given(NAMESPACES, st.data())
def test_every_field_enters_the_id(namespace: Namespace, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from([f for f in Namespace.__struct_fields__ if f != "hash_algorithm"]))
    values = st.integers(1, MAX_BLOCK_SIZE) if field == "block_size" else st.text(max_size=4)
    changed = msgspec.structs.replace(namespace, **{field: data.draw(values)})
    assume(changed != namespace)
    assert changed.id != namespace.id


def test_ids_are_stable() -> None:
    """Pinned: sidecars and routers of different releases meet in one store, so an id must never move.

    A new field, another order or another name of a field would change it, and orphan every index in service.
    """
    assert Namespace(model="m").id == "07980009997bc651"
    assert (
        Namespace(
            model="org/model",
            block_size=64,
            hash_seed="42",
            revision="r1",
            tokenizer="t1",
            attention="rope-scaled",
            kv_dtype="fp8",
            kv_layout="nhd",
        ).id
        == "e8ba23f443668968"
    )


@given(NAMESPACES)
def test_namespaces_survive_encoding(namespace: Namespace) -> None:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(namespace), type=Namespace)
    assert (copy, copy.id, copy.root) == (namespace, namespace.id, namespace.root)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "m", "block_size": 0},
        {"model": "m", "block_size": MAX_BLOCK_SIZE + 1},
        {"model": "m", "block_size": "16"},
        {"model": "m", "hash_algorithm": "sha256"},
        {"model": "m", "blocksize": 16},
        {"block_size": 16},
    ],
)
def test_declarations_that_bind_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(fields, Namespace)


def test_the_seed_is_text() -> None:
    assert none_hash("0") != none_hash("00")
    assert Namespace(model="m").root == none_hash("0")
    assert Namespace(model="other", revision="2").root == Namespace(model="m").root
    assert Namespace(model="m", hash_seed="1").root != Namespace(model="m").root
