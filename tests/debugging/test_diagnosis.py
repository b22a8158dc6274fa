"""Verdicts and findings that the walk-throughs do not reach, from cases put together by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from debugging_world import MIXED, SCHEDULER, capture, record, source_of
from metatrie.consumers.recording import Entry, Frame, Recorder, RecordingReader, RecordingWriter, Source
from metatrie.consumers.stream import Stream
from metatrie.proto.api import Decided, ExplainedReplica, Holding, Lookup, State
from metatrie.proto.hashing import Chain, Namespace
from metatrie.scripts.diagnosis import Case, Verdict, case_of, check_seed, report
from metatrie.scripts.timeline import Timeline

TOKENS = list(range(64))
NAMESPACE = Namespace(model="m")
KEYS = Chain(NAMESPACE.root, 16, TOKENS).keys(4)
_encode = msgspec.msgpack.Encoder().encode


def lookup(namespace: Namespace = NAMESPACE) -> Lookup:
    keys = Chain(namespace.root, namespace.block_size, TOKENS).keys(4)
    return Lookup(namespace=namespace, id=namespace.id, prompt_blocks=4, keys=b"".join(keys).hex())


def replica(
    name: str, matched: int = 0, *, state: State = "exact", cause: str = "", namespace: str = ""
) -> ExplainedReplica:
    return ExplainedReplica(
        replica=name,
        dp_rank=0,
        namespace=namespace or NAMESPACE.id,
        matched_blocks=matched,
        reusable_tokens=min(matched, 3) * 16,
        state=state,
        cause=cause,
    )


def case(*replicas: ExplainedReplica, **more: Any) -> Case:
    return Case(model="m", prompt_tokens=64, lookups=more.pop("lookups", [lookup()]), replicas=list(replicas), **more)


def verdict(one: Case) -> Verdict:
    return report(one).verdicts[0]


def past(*batches: list[dict[str, Any]], source: Source | None = None) -> Timeline:
    timeline = Timeline()
    for seq, events in enumerate(batches):
        frame = Frame(0, 0, seq, False, b"", _encode([1.0, events, 0]))
        timeline.feed(Entry(seq, source or Source(replica="r", namespace=NAMESPACE), frame))
    return timeline


def stored(first: int, last: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(key, "big") for key in KEYS[first : last + 1]],
        "parent_block_hash": int.from_bytes(KEYS[first - 1], "big") if first else None,
        "token_ids": TOKENS[first * 16 : last * 16 + 16],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [int.from_bytes(KEYS[block], "big")], "medium": "GPU"}


@pytest.mark.parametrize("cause", ["lease_expired", "not_activated", "index_unavailable"])
def test_a_stale_replica_is_said_to_be_stale_and_why(cause: str) -> None:
    said = report(case(replica("r", state="stale", cause=cause)))
    assert said.verdicts[0].reason == "stale"
    assert [finding.label for finding in said.findings] == ["stale_replica"]


def test_a_replica_of_another_namespace_is_compared_field_by_field() -> None:
    other = Namespace(model="m", revision="v2", hash_seed="7")
    said = report(case(replica("r", 2), replica("s", namespace=other.id), lookups=[lookup(), lookup(other)]))
    (there,) = [v for v in said.verdicts if v.replica == "s/0"]
    assert there.reason == "other_namespace"
    assert "revision is 'v2' and not ''" in there.text
    assert "hash_seed is '7' and not '0'" in there.text
    assert "block_size" not in there.text


def test_a_consumer_that_follows_another_namespace_than_the_router_knows_is_found() -> None:
    other = Namespace(model="m", tokenizer="b")
    timeline = past([stored(0, 3)], source=Source(replica="r", namespace=other))
    said = timeline.replicas[0].evidence(KEYS)
    found = verdict(case(replica("r"), said={"r/0": said}))
    assert found.reason == "other_namespace"
    assert "tokenizer is 'b'" in found.text


def test_a_block_that_was_evicted_is_dated_and_what_hangs_behind_it_counted() -> None:
    said = past([stored(0, 3)], [removed(1)]).replicas[0].evidence(KEYS)
    found = verdict(case(replica("r", 1), said={"r/0": said}))
    assert (found.reason, found.seq, found.block) == ("evicted", 1, KEYS[1].hex())
    assert "batch 1" in found.text
    assert "2 blocks behind it" in found.text


def test_a_block_nobody_heard_of_above_blocks_that_are_held_is_missing_not_new() -> None:
    said = past([stored(1, 3)]).replicas[0].evidence(KEYS)
    found = verdict(case(replica("r"), said={"r/0": said}))
    assert found.reason == "detached"
    assert "3 blocks behind it" in found.text


def test_what_depends_on_something_unpublished_is_said_to() -> None:
    hidden = stored(1, 1)
    hidden["block_hashes"] = [12345]  # once names were as predicted, another one means a hidden input
    said = past([stored(0, 0)], [hidden]).replicas[0].evidence(KEYS)
    found = verdict(case(replica("r", 1), said={"r/0": said}))
    assert found.reason == "hidden_input"


def test_a_block_that_is_held_and_did_not_count_is_told_apart() -> None:
    said = past([stored(0, 3)]).replicas[0].evidence(KEYS)
    found = verdict(case(replica("r", 2), said={"r/0": said}))
    assert (found.reason, found.matched_blocks) == ("uncounted", 2)


def test_without_a_consumer_to_ask_nothing_is_made_up() -> None:
    found = verdict(case(replica("r", 2)))
    assert (found.reason, found.block) == ("unknown", KEYS[2].hex())
    assert "--recording" in found.text


def test_a_recording_remembers_what_a_consumer_forgot() -> None:
    live = past([stored(0, 0)]).replicas[0].evidence(KEYS)
    recorded = past([stored(0, 3)], [removed(3), removed(2), removed(1)]).replicas[0].evidence(KEYS)
    assert verdict(case(replica("r", 1), said={"r/0": live})).reason == "never_stored"
    found = verdict(case(replica("r", 1), said={"r/0": live}, pasts={"r/0": recorded}))
    assert (found.reason, found.seq) == ("evicted", 1)


def decided(**more: Any) -> Decided:
    fields: dict[str, Any] = {
        "id": "d", "at": 1.0, "model": "m", "prompt_tokens": 64, "lookups": [lookup()], "index": "ok",
        "candidates": 2,
        "holdings": [
            Holding(replica="a/0", block_size=16, matched_blocks=4, reusable_tokens=48, state="exact"),
            Holding(replica="b/0", block_size=16, matched_blocks=0, reusable_tokens=0, state="exact"),
        ],
        "policy": "p", "reason": "r", "replica": "a/0", "matched_blocks": 4, "reusable_tokens": 48,
    }  # fmt: skip
    return Decided(**{**fields, **more})


@pytest.mark.parametrize(
    ("served", "label"), [(16, "overpredicted"), (64, "underpredicted"), (48, None), (None, None)]
)
def test_what_was_served_is_held_against_what_was_expected(served: int | None, label: str | None) -> None:
    said = report(case_of(decided(served_tokens=served)))
    assert [finding.label for finding in said.findings] == ([label] if label else [])


def test_a_decision_on_record_is_a_case() -> None:
    said = report(case_of(decided()))
    assert [(v.replica, v.matched_blocks, v.reason) for v in said.verdicts] == [
        ("a/0", 4, "whole"),
        ("b/0", 0, "unknown"),
    ]


def test_seeds_are_checked_against_real_engines(tmp_path: Path) -> None:
    """The captures were made with seed 0; declared otherwise, the seed they fit is found."""
    right = check_seed(capture(SCHEDULER))["r/0"]
    assert (right.wrong, right.fits) == (0, "0")
    assert right.checked > 10
    wrong = source_of(SCHEDULER)
    wrong = msgspec.structs.replace(wrong, namespace=Namespace(model="m", hash_seed="elsewhere"))
    with RecordingWriter(tmp_path / "a.mtrec") as writer:
        stream = Stream(replay=False, journal=Recorder(writer, wrong))
        for entry in capture(SCHEDULER):
            assert isinstance(entry.record, Frame)
            stream.live([b"", entry.record.seq.to_bytes(8, "big"), entry.record.payload], 0.0)
    found = check_seed(RecordingReader(writer.files))["r/0"]
    assert (found.wrong, found.fits) == (found.checked, "0")
    redacted = RecordingReader(record(tmp_path / "b.mtrec", MIXED, redact=True))
    assert check_seed(redacted) == {}, "a redacted recording does not tell"
