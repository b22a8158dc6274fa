"""`metatrie up`, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from metatrie.indexer.feedback import OUTCOMES
from metatrie.indexer.policies import DEFAULT_POLICY


def test_the_demo_shows_prefix_routing_ahead_and_an_index_that_agrees() -> None:
    argv = ("up", "--demo", "--engines", "2", "--users", "10", "--turns", "2", "--json", "--log-level", "error")
    said = subprocess.run(
        [sys.executable, "-m", "metatrie", *argv],
        capture_output=True,
        text=True,
        timeout=110,
        stdin=subprocess.DEVNULL,
    )
    assert said.returncode == 0, said.stderr
    before, after = json.loads(said.stdout)
    assert [before["policy"], after["policy"]] == ["round_robin", DEFAULT_POLICY]

    def cached(outcome: dict[str, Any]) -> int:
        return sum(turn["cached_tokens"] for turn in outcome["turns"])

    for outcome in (before, after):
        assert outcome["failures"] == 0
        assert len(outcome["turns"]) == 20
        assert outcome["agreement"]["engine"] > 0
        assert outcome["agreement"]["missing"] == outcome["agreement"]["stale"] == 0
        other = [turn for turn in outcome["turns"] if turn["predicted_tokens"] != turn["cached_tokens"]]
        assert len(other) <= 2, "nothing is evicted: predicted is served, unless events are late on a busy machine"
        assert sum(outcome["causes"].values()) == len(other)
        assert outcome["causes"].keys() <= set(OUTCOMES)
    assert cached(after) > cached(before)


def test_nothing_survives_the_process_that_started_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "metatrie", "up", "--engines", "1", "--port", "0", "--log-level", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        children = _descendants(process.pid)
        assert len(children) >= 4, "redis, engine, sidecar, router"
    finally:
        process.kill()  # not even a chance to clean up
        process.communicate()
    deadline = time.monotonic() + 20
    while left := [pid for pid in children if _alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def _descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        parents.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        todo += (below := parents.get(todo.pop(), []))
        found += below
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return True
