"""Time travel: the index as of any batch, differences between moments, and the history of a block."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from debugging_world import MIXED, NAMESPACE, RESETS, capture, record, source_of
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.recording import Entry, Frame, Mark, RecordingReader
from metatrie.engines.rules import rule_for
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import EngineHash, decode_batch
from metatrie.proto.hashing import BlockKey, Chain
from metatrie.scripts.timeline import END, Point, Timeline, differences, fingerprint, history, iso, up_to

_encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize("name", [MIXED, RESETS])
def test_the_index_as_of_any_batch_is_what_a_consumer_had_then(name: str) -> None:
    recording = capture(name)
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    seen = []
    for entry in recording:
        assert isinstance(entry.record, Frame)
        inventory.apply(decode_batch(entry.record.payload))
        seen.append(inventory.expected())
    rng = random.Random(1)
    for seq in rng.sample(range(len(seen)), 12):
        for point in (Point("seq", seq), Point("position", seq)):
            (past,) = Timeline.at(recording, point).replicas
            assert past.inventory.expected() == seen[seq]
            assert past.stream.expected == seq + 1
    assert Timeline.at(recording).replicas[0].inventory.expected() == seen[-1]


def test_a_time_means_the_moment_of_receipt(tmp_path: Path) -> None:
    recording = RecordingReader(record(tmp_path / "a.mtrec", MIXED))
    frames = [entry for entry in recording if isinstance(entry.record, Frame)]
    moment = frames[100].record.at
    (past,) = Timeline.at(recording, Point("time", moment)).replicas
    assert past.stream.expected == 101
    assert Point.parse(iso(moment)) == Point("time", moment // 1000 * 1000)
    assert Point.parse(f"@{moment // 10**9}") == Point("time", moment // 10**9 * 10**9)


@pytest.mark.parametrize("text", ["", "yesterday", "-1", "#", "#x", "@", "1e99x", "12:00 o'clock"])
def test_what_names_no_moment_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="point"):
        Point.parse(text)


def test_points_are_read() -> None:
    assert Point.parse("12") == Point("seq", 12)
    assert Point.parse("#12") == Point("position", 12)
    assert Point.parse("end") == END
    assert Point.parse("2023-11-14T22:13:20Z") == Point("time", 1_700_000_000 * 10**9)
    assert Point.parse("2023-11-14 22:13:20") == Point("time", 1_700_000_000 * 10**9), "UTC where no zone is given"


def test_a_sequence_number_of_several_replicas_is_refused() -> None:
    mixed = [Entry(i, source_of(MIXED, "ab"[i % 2]), Frame(0, i, i // 2, False, b"", b"")) for i in range(6)]
    with pytest.raises(ConfigError, match="--replica"):
        list(up_to(mixed, Point("seq", 2)))
    assert len(list(up_to(mixed, Point("position", 2)))) == 3


def test_differences_name_every_key() -> None:
    recording = capture(MIXED)
    before, after = (Timeline.at(recording, Point("seq", seq)).holdings() for seq in (50, 120))
    (found,) = differences(before, after)
    (a,), (b,) = before.values(), after.values()
    assert (found.before, found.after) == (len(a), len(b))
    assert set(found.gained) == {key.hex() for key in b if key not in a}
    assert set(found.lost) == {key.hex() for key in a if key not in b}
    assert found.gained
    assert found.lost
    assert not found.same
    assert all(one.same for one in differences(after, after))
    assert fingerprint(a) != fingerprint(b)


def test_a_tier_change_is_a_difference() -> None:
    key = BlockKey(b"12345678")
    ref = source_of(MIXED).ref
    (found,) = differences({ref: {key: 1}}, {ref: {key: 3}})  # type: ignore[dict-item]  # plain ints are masks here
    assert (found.moved, found.gained, found.lost) == ([key.hex()], [], [])


# A small story, told block by block.

TOKENS = list(range(48))
KEYS = Chain(NAMESPACE.root, 16, TOKENS).keys(3)


def stored(first: int, last: int, medium: str = "GPU") -> dict[str, object]:
    """Blocks first to last of the prompt, named 100, 101, …"""
    return {
        "type": "BlockStored",
        "block_hashes": [100 + i for i in range(first, last + 1)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": TOKENS[first * 16 : last * 16 + 16],
        "block_size": 16,
        "lora_id": None,
        "medium": medium,
    }


def removed(block: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [100 + block], "medium": "GPU"}


STORY: list[list[dict[str, object]] | str | None] = [
    [stored(0, 2)],
    [stored(2, 2)],  # a second copy
    [removed(2)],
    [removed(1)],  # detaches block 2
    [stored(1, 1)],
    None,  # lost
    [{"type": "AllBlocksCleared"}, stored(0, 1)],
    [removed(2)],
    "restarted",
    [stored(0, 0)],
]


def story() -> list[Entry]:
    source, entries, seq = source_of(MIXED), [], 0
    for told in STORY:
        position = len(entries)
        if told == "restarted":
            entries.append(Entry(position, source, Mark(0, 1_000 * position, "restarted")))
            seq = 0
            continue
        if told is not None:
            payload = _encode([1.0, told, 0])
            entries.append(Entry(position, source, Frame(0, 1_000 * position, seq, False, b"", payload)))
        seq += 1
    return entries


def told(*, keys: tuple[int, ...] = (), names: tuple[int, ...] = ()) -> list[tuple[int | None, int | None, str]]:
    """(seq, depth, what) of everything found."""
    found = history(story, [KEYS[i] for i in keys], [EngineHash(name) for name in names])
    return [(one.seq, one.depth, one.what) for one in found]


def test_the_history_of_a_block_is_everything_that_touched_it() -> None:
    assert told(keys=(2,)) == [
        (0, 2, "stored"),
        (0, 2, "attached"),
        (1, 2, "stored again"),
        (2, 2, "copy removed"),
        (3, 2, "detached"),
        (4, 2, "attached"),
        (None, None, "batches lost"),
        (6, None, "cleared"),
        (7, 2, "removed, never stored"),
        (None, None, "restarted"),
    ]


def test_a_history_by_the_engines_own_name_is_the_same() -> None:
    assert told(names=(102,)) == told(keys=(2,))


def test_the_history_of_a_prefix_is_that_of_its_blocks() -> None:
    whole = told(keys=(0, 1, 2))
    assert (3, 1, "evicted") in whole
    assert (3, 1, "left") in whole
    assert (3, 2, "detached") in whole
    assert whole.index((3, 1, "evicted")) < whole.index((3, 2, "detached"))
    assert [row for row in whole if row[0] == 6] == [
        (6, None, "cleared"),
        (6, 0, "stored"),
        (6, 1, "stored"),
        (6, 0, "attached"),
        (6, 1, "attached"),
    ]
    assert whole[-2:] == [(0, 0, "stored"), (0, 0, "attached")], "in the engine's second life"


def test_a_history_says_who_did_it() -> None:
    found = history(story, [KEYS[2]])
    by = {(one.seq, one.what): one.by for one in found}
    assert KEYS[1].hex() in by[3, "detached"]
    assert "gpu" in by[0, "stored"]
    assert "batch 5 " in next(one.by for one in found if one.what == "batches lost")


def test_a_block_nobody_ever_stored_has_no_history_of_its_own() -> None:
    found = history(story, [BlockKey(bytes(8))])
    assert {one.what for one in found} == {"batches lost", "cleared", "restarted"}


def test_a_block_stored_ahead_of_its_prefix_has_a_history_from_the_start() -> None:
    entries = [
        Entry(i, source_of(MIXED), Frame(0, i, i, False, b"", _encode([1.0, [event], 0])))
        for i, event in enumerate([stored(2, 2), stored(0, 1)])
    ]
    found = history(lambda: entries, [KEYS[2]])
    assert [(one.seq, one.what) for one in found] == [(0, "stored"), (1, "attached")]


@pytest.mark.parametrize("seed", range(4))
def test_attachment_in_a_history_is_presence_in_the_index(seed: int) -> None:
    """For every key of a real stream: what the history says at the end of each batch is what the index had."""
    recording = list(capture(MIXED))[:120]
    rng = random.Random(seed)
    timeline = Timeline()
    present: list[set[BlockKey]] = []
    for entry in recording:
        past, _ = timeline.feed(entry)
        present.append(set(past.inventory.expected()))
    keys = rng.sample(sorted(set().union(*present)), 25)
    for key in keys:
        attached, at = False, 0
        found = history(lambda: recording, [key])
        for seq in range(len(recording)):
            while at < len(found) and found[at].position <= seq:
                if found[at].what in ("attached", "detached", "left", "cleared"):
                    attached = found[at].what == "attached"
                at += 1
            assert attached == (key in present[seq]), (key.hex(), seq)
