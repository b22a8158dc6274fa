"""`metatrie tokens`, `metatrie load` and `metatrie waiting` at a small scale."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from metatrie.__main__ import main
from metatrie.proto.text import HFText
from metatrie.scripts.front_door import LoadConfig, conversations, run_load
from metatrie.scripts.waiting import WaitingConfig, arrivals, measure

TRAJECTORY = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the weather in Paris"},
    {"role": "assistant", "content": "warm", "tool_calls": None},
    {"role": "user", "content": "and tools?"},
    {"role": "assistant", "content": "called"},
]


def test_both_traces_are_read(tmp_path: Path) -> None:
    tau = tmp_path / "tau.json.gz"
    tau.write_bytes(gzip.compress(json.dumps([{"traj": TRAJECTORY}]).encode()))
    assert [len(prompt) for prompt in next(conversations(tau))] == [2, 4]
    agent = tmp_path / "agent.jsonl"
    inputs = [("a", "one"), ("b", "x"), ("a", "one two"), ("a", "one two three"), ("a", "other")]
    agent.write_text("".join(json.dumps({"session_id": s, "input": text}) + "\n" for s, text in inputs))
    first, second = conversations(agent)
    assert [[m["content"] for m in prompt] for prompt in first] == [
        ["one"],
        ["one", " two"],
        ["one", " two", " three"],
        ["other"],
    ]
    assert [[m["content"] for m in prompt] for prompt in second] == [["x"]]


def test_tokens_tells_whether_turns_differ(
    tmp_path: Path, tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "tau.json"
    trace.write_text(json.dumps([{"traj": TRAJECTORY}]))
    arguments = ["tokens", "--tokenizer", tokenizer_dir, str(trace)]
    said = CliRunner().invoke(main, arguments, env={"COLUMNS": "200"})
    assert said.exit_code == 0, said.output
    assert "turns that differ" in said.output
    # A split that is wrong must show.
    monkeypatch.setattr(HFText, "split", lambda self, text: [text[:7], text[7:]])
    assert CliRunner().invoke(main, arguments).exit_code == 1


async def test_load_finds_nothing_wrong() -> None:
    report = await run_load(LoadConfig(streams=4, seconds=1.5, engines=1, tokens=4, decode_step_s=0.01, probes=5))
    seen = report.seen
    assert seen.finished > 0
    assert (seen.failed, seen.refused, seen.wrong) == (0, 0, 0)
    assert seen.compared == 1
    assert seen.chunks == seen.finished * 5
    assert seen.rss


async def test_the_same_requests_wait_in_the_engines_or_in_the_router() -> None:
    config = WaitingConfig(engines=1, requests=6, rate=40, long_share=0.5, time_scale=0.1)
    one, two = arrivals(config, 1), arrivals(config, 2)
    assert one == arrivals(config, 1) != two
    assert [arrival.at for arrival in one] == sorted(arrival.at for arrival in one)
    engines, router = [await measure(config, 1, queue=queue) for queue in (False, True)]
    assert len(engines.ttft) == len(router.ttft) == 6
    assert engines.waited == 0 < router.waited
