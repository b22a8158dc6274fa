"""Probes: a silent engine is asked for news, and being asked changes nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
from metatrie.consumers.stream import FIRST_PROBE_S, Apply, Phase, RequestReplay, Restarted, Stream

PROBE_S = 5.0
TIMEOUT_S = 2.0


def payload(seq: int, life: int = 0) -> bytes:
    return msgspec.msgpack.encode([1e9 + seq + life * 1000, [["Novelty"]], 0])


class Engine:
    """A ring, and the stream that follows it."""

    def __init__(self, batches: int = 3) -> None:
        self.now = 100.0
        self.life = 0
        self.ring: dict[int, bytes] = {}
        self.stream = Stream(replay=True, replay_timeout_s=TIMEOUT_S, probe_s=PROBE_S)
        self.applied: list[int] = []
        self.restarts = 0
        self.asked: list[RequestReplay] = []
        self.take(self.stream.connected(self.now))
        self.answer()
        for _ in range(batches):
            self.publish()
        assert self.stream.phase is Phase.EXACT

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Apply():
                    self.applied.append(action.seq)
                case RequestReplay():
                    self.asked.append(action)
                case Restarted():
                    self.restarts += 1
                    self.applied.clear()

    def publish(self, *, live: bool = True) -> int:
        seq = len(self.ring)
        self.ring[seq] = payload(seq, self.life)
        if live:
            self.hear(seq)
        return seq

    def hear(self, seq: int) -> None:
        self.take(self.stream.live([b"", seq.to_bytes(8, "big"), self.ring[seq]], self.now))

    def answer(self) -> None:
        """Answer the newest request whole."""
        ask = self.asked[-1]
        for seq in sorted(self.ring):
            if seq >= ask.start:
                self.take(self.stream.replayed([b"", seq.to_bytes(8, "big"), self.ring[seq]], ask.request, self.now))
        self.take(self.stream.replayed([b"", b"\xff" * 8, b""], ask.request, self.now))

    def passes(self, seconds: float) -> int:
        """Let time pass; how many requests that led to."""
        before = len(self.asked)
        self.now += seconds
        self.take(self.stream.tick(self.now))
        return len(self.asked) - before


def test_a_busy_engine_is_not_probed() -> None:
    engine = Engine()
    for _ in range(20):
        assert engine.passes(PROBE_S - 1) == 0
        engine.publish()
    assert engine.stream.stats.probes == 0


def test_a_silent_engine_is_asked_from_its_last_batch_on_once_per_interval() -> None:
    engine = Engine(batches=3)
    assert engine.passes(PROBE_S - 0.1) == 0
    for count in range(1, 5):
        assert engine.passes(PROBE_S + 0.1) == 1
        assert engine.asked[-1].start == 2
        assert engine.stream.phase is Phase.EXACT
        engine.answer()
        assert engine.passes(0.1) == 0
        assert engine.stream.stats.probes == count
    assert (engine.stream.phase, engine.stream.stats.probe_finds, engine.applied) == (Phase.EXACT, 0, [0, 1, 2])


def test_the_first_probe_follows_soon_after_a_connection() -> None:
    engine = Engine(batches=0)
    assert engine.passes(FIRST_PROBE_S - 0.1) == 0
    engine.publish(live=False)  # the subscription has not taken effect
    assert engine.passes(0.2) == 1
    engine.answer()
    assert engine.applied == [0]
    assert engine.stream.stats.probe_finds == 1


def test_what_nobody_missed_is_found() -> None:
    engine = Engine()
    for _ in range(3):
        engine.publish(live=False)
    assert engine.passes(PROBE_S + 0.1) == 1
    engine.answer()
    assert (engine.applied, engine.stream.phase) == ([0, 1, 2, 3, 4, 5], Phase.EXACT)
    assert engine.stream.stats.probe_finds == 1
    assert engine.stream.stats.gaps == 0
    engine.publish()
    assert engine.applied[-1] == 6


def test_what_is_heard_during_a_probe_waits_and_is_applied_once() -> None:
    engine = Engine()
    lost = engine.publish(live=False)
    assert engine.passes(PROBE_S + 0.1) == 1
    engine.publish()
    assert lost not in engine.applied
    engine.answer()
    assert engine.applied == [0, 1, 2, 3, 4]
    assert engine.stream.phase is Phase.EXACT


def test_a_probe_without_an_answer_harms_nobody() -> None:
    engine = Engine()
    assert engine.passes(PROBE_S + 0.1) == 1
    engine.publish()
    assert engine.passes(TIMEOUT_S + 0.1) == 0
    assert (engine.stream.phase, engine.stream.cause) == (Phase.EXACT, "")
    assert engine.applied == [0, 1, 2, 3]
    assert engine.stream.stats.probe_failures == 1
    assert engine.passes(PROBE_S + 0.1) == 1, "it is tried again"


def test_a_gap_heard_during_a_probe_without_an_answer_is_recovered_like_any_other() -> None:
    engine = Engine()
    assert engine.passes(PROBE_S + 0.1) == 1
    engine.publish(live=False)
    engine.publish()
    assert engine.passes(TIMEOUT_S + 0.1) == 1
    engine.answer()
    assert (engine.applied, engine.stream.phase) == ([0, 1, 2, 3, 4], Phase.EXACT)


def test_a_probe_finds_that_another_process_answers() -> None:
    for batches in (0, 3, 5):
        engine = Engine()
        engine.ring = {seq: payload(seq, life=1) for seq in range(batches)}
        assert engine.passes(PROBE_S + 0.1) == 1
        engine.answer()
        assert engine.restarts == 1
        engine.answer()
        assert (engine.applied, engine.stream.phase) == (list(range(batches)), Phase.EXACT)


def test_a_probe_that_succeeds_ends_a_replay_that_failed() -> None:
    engine = Engine()
    engine.take(engine.stream.disconnected(engine.now))
    engine.take(engine.stream.connected(engine.now))
    while engine.stream.waiting:
        engine.passes(TIMEOUT_S + 0.1)
    assert (engine.stream.phase, engine.stream.cause) == (Phase.DEGRADED, "replay_failed")
    assert engine.passes(PROBE_S + 0.1) == 1
    engine.answer()
    assert (engine.stream.phase, engine.stream.cause) == (Phase.EXACT, "")


def test_without_a_connection_or_a_replay_endpoint_nobody_is_probed() -> None:
    engine = Engine()
    engine.take(engine.stream.disconnected(engine.now))
    assert engine.passes(100 * PROBE_S) == 0
    stream = Stream(replay=False, probe_s=PROBE_S)
    stream.connected(0)
    assert stream.tick(100 * PROBE_S) == []
