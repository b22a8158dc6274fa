"""A redacted recording gives the same index at every batch, and nothing of what was said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from debugging_world import MIXED, NAMES, capture, record, source_of
from metatrie.consumers.recording import Entry, Frame, RecordingReader, Redactor
from metatrie.engines.rules import rule_for
from metatrie.proto.events import BlockStored, decode_batch
from metatrie.scripts.timeline import Timeline

_encode = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize("name", NAMES)
def test_the_index_is_the_same_at_every_batch(tmp_path: Path, name: str) -> None:
    plain = RecordingReader(record(tmp_path / "plain.mtrec", name))
    redacted = RecordingReader(record(tmp_path / "redacted.mtrec", name, redact=True))
    ours, theirs = Timeline(), Timeline()
    count = 0
    for one, other in zip(plain, redacted, strict=True):
        a, _ = ours.feed(one)
        b, _ = theirs.feed(other)
        assert a.inventory.expected() == b.inventory.expected()
        assert set(a.inventory.attached_writes()) == set(b.inventory.attached_writes()), "page heads and depths, too"
        assert (a.state, a.stream.expected) == (b.state, b.stream.expected)
        count += 1
    assert count == len(list(capture(name)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_what_was_said_is_left(tmp_path: Path, name: str) -> None:
    files = record(tmp_path / "redacted.mtrec", name, redact=True)
    payloads = b""
    for entry in RecordingReader(files):
        assert isinstance(entry.record, Frame)
        assert entry.record.topic == b""
        assert entry.source.redacted
        assert entry.source.events == ""
        payloads += entry.record.payload
        for event in decode_batch(entry.record.payload).events:
            if isinstance(event, BlockStored):
                assert set(event.tokens) == {0}
                assert (event.lora_id, event.lora_name, event.extra_keys, event.cache_salt) == (None,) * 4
    secrets = set()
    for entry in capture(name):
        assert isinstance(entry.record, Frame)
        for event in decode_batch(entry.record.payload).events:
            if isinstance(event, BlockStored):
                secrets.update(text for text in (event.lora_name, event.cache_salt, event.session_id) if text)
                secrets.update(_texts(event.extra_keys))
    assert "salt" not in name or secrets
    assert not [text for text in secrets if text.encode() in payloads]


def _texts(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    return set().union(*map(_texts, value)) if isinstance(value, list) else set()


def stored(hashes: list[int], parent: int | None, first_token: int) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(range(first_token, first_token + 16 * len(hashes))),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }


def test_blocks_that_were_recorded_before_their_prefix_are_named_when_it_comes() -> None:
    """A recorder that joined late sees descendants first; so does whoever replays what it wrote."""
    source = source_of(MIXED)
    redactor, plain = Redactor(source, rule_for("vllm")), Timeline()
    redacted = Timeline()
    batches = [
        [stored([12, 13], 11, 16)],
        [stored([11], None, 0)],
        [{"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}],
        [stored([11], None, 0)],
    ]
    seen = []
    for seq, events in enumerate(batches):
        payload = _encode([1.0, events, 0])
        a, _ = plain.feed(Entry(seq, source, Frame(0, 0, seq, False, b"", payload)))
        b, _ = redacted.feed(Entry(seq, redactor.source, Frame(0, 0, seq, False, b"", redactor.batch(payload))))
        assert a.inventory.expected() == b.inventory.expected()
        seen.append(len(b.inventory.expected()))
    assert seen == [0, 3, 0, 3]


def test_a_broken_batch_and_broken_events_weigh_the_same_after_redaction() -> None:
    source = source_of(MIXED)
    redactor = Redactor(source, rule_for("vllm"))
    for payload in (b"\xc1nonsense", _encode([1.0, [stored([1], None, 0), {"type": "BlockStored"}, ["Novelty"]], 0])):
        one, other = Timeline(), Timeline()
        a, _ = one.feed(Entry(0, source, Frame(0, 0, 0, False, b"", payload)))
        b, _ = other.feed(Entry(0, redactor.source, Frame(0, 0, 0, False, b"", redactor.batch(payload))))
        assert a.cause == b.cause != ""
        assert a.stream.stats == b.stream.stats or a.stream.stats.malformed_batches == 1
