"""Trace formats, on files made here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from metatrie.proto.errors import ConfigError
from metatrie.scripts.simulate.suite import ideal_hit
from metatrie.scripts.simulate.traces import Trace, load


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def shape(trace: Trace) -> list[tuple[int, int, int]]:
    return [(r.prompt_tokens, r.output_tokens, r.chain.blocks) for r in trace.requests]


def test_mooncake_drops_partial_blocks_and_spreads_equal_times(tmp_path: Path) -> None:
    rows = [
        {"timestamp": t, "input_length": tokens, "output_length": 5, "hash_ids": ids}
        for t, tokens, ids in ((0, 1100, [0, 1, 2]), (0, 1024, [0, 3]), (3000, 600, [0, 4]))
    ]
    trace = load(write(tmp_path / "mooncake_x.jsonl", rows))
    assert trace.block_size == 512
    assert [r.at for r in trace.requests] == [0.0, 1.5, 3.0]
    assert shape(trace) == [(1100, 5, 2), (1024, 5, 2), (600, 5, 1)]
    assert ideal_hit(trace, 0) == pytest.approx(1024 / 2724)


def test_sessions_are_apart_nested_and_causal(tmp_path: Path) -> None:
    one = {"type": "n", "out": 7, "api_time": 2.0}
    session = {
        "id": "s",
        "block_size": 64,
        "requests": [
            {**one, "t": 0.0, "in": 130, "hash_ids": [1, 2]},
            {"type": "subagent", "t": 1.0, "requests": [{**one, "t": 0.0, "in": 70, "hash_ids": [9]}]},
            {**one, "t": 500.0, "in": 200, "hash_ids": [1, 2, 3]},
        ],
    }
    trace = load(write(tmp_path / "weka_x.jsonl", [session, {**session, "id": "t"}]))
    by_session: dict[str | None, list[Any]] = {}
    for request in trace.requests:
        by_session.setdefault(request.session, []).append(request)
    assert len(by_session) == 4  # two sessions, two copies
    whole = next(rows for rows in by_session.values() if len(rows) == 3)
    assert [r.chain.blocks for r in whole] == [2, 1, 3]
    # The subagent starts before its caller is over, the last turn after both.
    assert [r.after for r in whole] == [None, None, 1]
    assert whole[2].at - whole[1].at == pytest.approx(60)  # a longer pause is cut
    keys = {s: rows[0].chain.keys(1)[0] for s, rows in by_session.items()}
    assert len(set(keys.values())) == 4


def test_texts_share_the_blocks_of_their_common_beginning(tmp_path: Path) -> None:
    rows = [
        {"timestamp": str(10**6 * i), "input": "x" * 128 + tail, "output": "y" * 40, "session_id": 1}
        for i, tail in enumerate(("a" * 64, "b" * 64))
    ]
    trace = load(write(tmp_path / "lmcache_x.jsonl", rows))
    assert shape(trace) == [(48, 10, 3), (48, 10, 3)]
    first, second = (r.chain.keys(3) for r in trace.requests)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert [(r.turn, r.after) for r in trace.requests] == [(0, None), (1, 0)]


def test_trajectories_ask_once_per_assistant_message(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "s" * 500},
        {"role": "user", "content": "u" * 200},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "u" * 200},
        {"role": "assistant", "content": "b"},
    ]
    path = tmp_path / "taubench_x.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{"traj": talk}]).encode()))
    trace = load(path)
    assert len(trace.requests) == 10  # five copies of two
    turns = [r for r in trace.requests if r.session == "0"]
    assert turns[0].chain.blocks < turns[1].chain.blocks
    assert turns[1].after == 0
    # Copies share the system prompt and nothing else.
    blocks = len({r.chain.keys(99)[-1] for r in trace.requests})
    assert blocks == 10
    assert len({r.chain.keys(1)[0] for r in trace.requests}) == 1


def test_lengths_share_nothing(tmp_path: Path) -> None:
    path = tmp_path / "azure_x.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.9799600,4808,8\n"
    )
    trace = load(path)
    assert trace.span_s == pytest.approx(1.0)
    assert ideal_hit(trace, 0) == 0


def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"other\.jsonl"):
        load(write(tmp_path / "other.jsonl", []))
    for name, content in (("mooncake_a.jsonl", "{"), ("mooncake_b.jsonl", '{"a": 1}\n'), ("weka_c.jsonl.gz", "x")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            load(tmp_path / name)
    with pytest.raises(ConfigError, match="no requests"):
        load(write(tmp_path / "mooncake_d.jsonl", []))
