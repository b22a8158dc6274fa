"""The stream machine, frame by frame: no sockets, no clock but the one the test moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from metatrie.consumers import stream as stream_module
from metatrie.consumers.stream import (
    END_MARKER,
    MAX_ATTEMPTS,
    TRANSITIONS,
    Action,
    Apply,
    Doubted,
    Dropped,
    Phase,
    RequestReplay,
    Restarted,
    Signal,
    Stream,
)

TIMEOUT_S = 5.0


def payload(life: int, seq: int, *, size: int = 0) -> bytes:
    """A well-formed batch nobody else sends: one block removed, named for its life and number."""
    event = {"type": "BlockRemoved", "block_hashes": [life * 1_000_000 + seq], "pad": "x" * size}
    return msgspec.msgpack.encode([float(life * 1000 + seq), [event], 0])


CLEAR = msgspec.msgpack.encode([9.0, [{"type": "AllBlocksCleared"}], 0])
BAD_EVENT = msgspec.msgpack.encode([9.0, [{"type": "BlockRemoved"}, {"type": "AllBlocksCleared"}], 0])
UNKNOWN_EVENT = msgspec.msgpack.encode([9.0, [{"type": "BlockMoved"}, {"type": "AllBlocksCleared"}], 0])


def frame(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Engine:
    """Drives one stream, and answers its replays from what `publish` put into the ring."""

    def __init__(self, *, topic: bool = True, **options: Any) -> None:
        options.setdefault("replay", True)
        self.stream = Stream(replay_timeout_s=TIMEOUT_S, **options)
        self.now = 100.0
        self.life = 1
        self.ring: dict[int, bytes] = {}
        self.request: RequestReplay | None = None
        self.requests: list[int] = []
        self.applied: list[tuple[int, int]] = []
        """(life, seq) of every batch to apply since the last restart or drop."""
        self.signals: list[Action] = []
        self.topic = topic

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case RequestReplay():
                    self.request = action
                    self.requests.append(action.start)
                case Apply():
                    self.applied.append((int(action.batch.ts) // 1000, action.seq))
                case Restarted() | Dropped():
                    self.signals.append(action)
                    self.applied.clear()

    def connect(self) -> None:
        self.take(self.stream.connected(self.now))

    def disconnect(self) -> None:
        self.take(self.stream.disconnected(self.now))

    def publish(self, *seqs: int, live: bool = True, **options: Any) -> None:
        """Into the ring, and (live) onto the wire."""
        for seq in seqs:
            self.ring[seq] = payload(self.life, seq, **options)
            if live:
                self.send(seq, self.ring[seq])

    def send(self, seq: int, body: bytes) -> None:
        self.take(self.stream.live([b"topic", frame(seq), body], self.now))

    def reply(self, seq: int, body: bytes, request: RequestReplay | None = None) -> None:
        asked = request or self.request
        assert asked is not None
        head = [b"", b"topic"] if self.topic else [b""]
        self.take(self.stream.replayed([*head, frame(seq), body], asked.request, self.now))

    def end(self) -> None:
        self.reply(END_MARKER, b"")

    def replay(self, *, without: Iterable[int] = ()) -> None:
        """Answer the newest request completely, but for what gets lost."""
        asked = self.request
        assert asked is not None
        for seq in sorted(self.ring):
            if seq >= asked.start and seq not in without:
                self.reply(seq, self.ring[seq], asked)
        if self.stream.waiting and self.request is asked:
            self.end()

    def replay_all(self) -> None:
        while self.stream.waiting:
            self.replay()

    def pass_time(self, seconds: float = TIMEOUT_S + 1) -> None:
        self.now += seconds
        self.take(self.stream.tick(self.now))

    def give_up(self) -> None:
        """Let a replay fail for good."""
        for _ in range(MAX_ATTEMPTS):
            self.pass_time()

    def restart(self) -> None:
        self.life += 1
        self.ring.clear()

    @property
    def phase(self) -> Phase:
        return self.stream.phase

    @property
    def cause(self) -> str:
        return self.stream.cause


def exact(*seqs: int, **options: Any) -> Engine:
    """A stream that followed these batches from the start."""
    engine = Engine(**options)
    engine.connect()
    if engine.stream.waiting:
        engine.replay()
    engine.publish(*seqs)
    assert engine.phase is Phase.EXACT or not seqs
    return engine


def lives(engine: Engine, *seqs: int, life: int = 1) -> bool:
    return engine.applied == [(life, s) for s in seqs]


# Joining


def test_join_replays_history_and_then_follows_live() -> None:
    engine = Engine()
    assert engine.phase is Phase.CONNECTING
    engine.publish(0, 1, 2, live=False)
    engine.connect()
    assert engine.phase is Phase.SYNCING
    assert engine.requests == [0]
    engine.publish(3)
    assert engine.applied == []
    engine.replay()
    assert engine.phase is Phase.EXACT
    engine.publish(4)
    assert lives(engine, 0, 1, 2, 3, 4)
    assert engine.stream.stats.replayed_batches == 4
    assert engine.stream.held == 0


@pytest.mark.parametrize("topic", [False, True], ids=["vllm-0.25", "vllm-0.26"])
def test_both_replay_framings(topic: bool) -> None:
    engine = Engine(topic=topic)
    engine.publish(0, 1, live=False)
    engine.connect()
    engine.replay()
    assert lives(engine, 0, 1)
    assert engine.phase is Phase.EXACT


def test_join_to_an_engine_that_published_nothing() -> None:
    engine = Engine()
    engine.connect()
    engine.end()
    assert engine.phase is Phase.EXACT
    engine.publish(0)
    assert lives(engine, 0)


def test_message_before_the_connection_was_reported() -> None:
    engine = Engine()
    engine.publish(0, 1)
    assert engine.phase is Phase.SYNCING
    assert engine.requests == [0]
    engine.replay()
    assert lives(engine, 0, 1)
    assert engine.phase is Phase.EXACT


def test_late_join_to_a_ring_that_forgot() -> None:
    engine = Engine()
    engine.publish(7, 8, live=False)
    engine.connect()
    engine.replay()
    assert engine.phase is Phase.SYNCING, "a hole is asked for once more"
    engine.replay()
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "history_lost")
    assert lives(engine, 7, 8)
    assert engine.stream.stats.gap_batches == 7
    engine.publish(9)
    assert lives(engine, 7, 8, 9)
    assert engine.phase is Phase.DEGRADED


def test_join_without_replay_from_the_first_batch() -> None:
    engine = exact(0, 1, replay=False)
    assert lives(engine, 0, 1)
    assert engine.requests == []


def test_join_without_replay_too_late() -> None:
    engine = Engine(replay=False)
    engine.connect()
    engine.publish(5, 6)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "joined_late")
    assert lives(engine, 5, 6)
    assert engine.stream.stats.gaps == 0


def test_idle_engine_without_replay_is_caught_up_as_soon_as_it_is_reached() -> None:
    engine = Engine(replay=False)
    assert not engine.stream.caught_up
    engine.connect()
    assert engine.phase is Phase.SYNCING
    assert engine.stream.caught_up
    with_replay = Engine()
    with_replay.connect()
    assert not with_replay.stream.caught_up
    with_replay.end()
    assert with_replay.stream.caught_up


def test_flapping_before_the_first_batch_without_replay() -> None:
    engine = Engine(replay=False)
    engine.connect()
    engine.disconnect()
    assert engine.phase is Phase.CONNECTING
    engine.connect()
    engine.publish(0)
    assert engine.phase is Phase.EXACT


# Gaps


def test_gap_is_replayed_and_live_batches_wait() -> None:
    engine = exact(0, 1)
    engine.publish(2, 3, live=False)
    engine.publish(4)
    assert engine.phase is Phase.RECOVERING
    assert engine.requests[-1] == 1, "from the last batch applied, as proof of identity"
    engine.publish(5)
    assert lives(engine, 0, 1)
    engine.replay()
    assert lives(engine, 0, 1, 2, 3, 4, 5)
    assert engine.phase is Phase.EXACT
    assert (engine.stream.stats.gaps, engine.stream.stats.gap_batches) == (1, 0)


def test_gap_without_replay_is_a_loss() -> None:
    engine = exact(0, 1, replay=False)
    engine.publish(4)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "gap")
    assert lives(engine, 0, 1, 4)
    assert (engine.stream.stats.gaps, engine.stream.stats.gap_batches) == (1, 2)


def test_hole_inside_a_replay_is_asked_for_again() -> None:
    engine = Engine()
    engine.publish(*range(6), live=False)
    engine.connect()
    engine.replay(without={2, 3})
    assert engine.phase is Phase.SYNCING
    assert lives(engine, 0, 1)
    assert engine.requests == [0, 1]
    engine.replay()
    assert lives(engine, *range(6))
    assert engine.phase is Phase.EXACT


def test_several_holes_in_several_replays() -> None:
    engine = Engine()
    engine.publish(*range(12), live=False)
    engine.connect()
    for lost in ({2, 5, 9}, {5, 9}, {9}):
        engine.replay(without=lost)
    assert lives(engine, *range(9))
    engine.replay()
    assert lives(engine, *range(12))
    assert engine.phase is Phase.EXACT


def test_hole_that_nobody_can_fill() -> None:
    """vLLM never buffers a batch that failed to encode, but its number is gone."""
    engine = exact(0, 1)
    engine.publish(3)
    engine.replay()
    assert engine.phase is Phase.RECOVERING
    engine.replay()
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "gap")
    assert lives(engine, 0, 1, 3)
    assert engine.stream.stats.gap_batches == 1
    engine.publish(4)
    assert lives(engine, 0, 1, 3, 4)


def test_live_copies_of_what_a_replay_brought_are_no_restart() -> None:
    engine = Engine()
    engine.publish(*range(5), live=False)
    engine.connect()
    engine.replay()
    for seq in range(5):
        engine.send(seq, engine.ring[seq])
    assert lives(engine, *range(5))
    assert engine.phase is Phase.EXACT
    assert engine.stream.stats.duplicates == 5
    assert engine.stream.stats.restarts == 0


def test_replies_to_an_abandoned_request_are_void() -> None:
    engine = exact(0)
    engine.publish(1, live=False)
    engine.publish(2)
    old = engine.request
    engine.pass_time()
    assert engine.request is not old
    engine.reply(1, engine.ring[1], old)
    engine.reply(END_MARKER, b"", old)
    assert lives(engine, 0)
    engine.replay()
    assert lives(engine, 0, 1, 2)


def test_lost_end_marker() -> None:
    engine = Engine()
    engine.publish(0, 1, live=False)
    engine.connect()
    engine.reply(0, engine.ring[0])
    engine.reply(1, engine.ring[1])
    engine.publish(2)
    assert engine.phase is Phase.SYNCING
    engine.pass_time()
    assert engine.requests == [0, 1]
    engine.replay()
    assert lives(engine, 0, 1, 2)
    assert engine.phase is Phase.EXACT


def test_replies_postpone_the_deadline() -> None:
    engine = Engine()
    engine.publish(*range(4), live=False)
    engine.connect()
    for seq in range(4):
        engine.pass_time(TIMEOUT_S - 1)
        engine.reply(seq, engine.ring[seq])
    assert engine.requests == [0]
    engine.end()
    assert engine.phase is Phase.EXACT


# Replays that fail


def test_replay_that_never_answers_is_given_up() -> None:
    engine = exact(0, 1)
    engine.publish(2, live=False)
    engine.publish(3)
    for attempt in range(1, MAX_ATTEMPTS):
        engine.pass_time()
        assert engine.stream.waiting
        assert len(engine.requests) == 2 + attempt
    engine.pass_time()
    assert not engine.stream.waiting
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "gap")
    assert lives(engine, 0, 1, 3)
    assert engine.stream.held == 0


def test_failed_join_is_no_loss_if_the_first_batch_is_the_first() -> None:
    engine = Engine()
    engine.connect()
    engine.give_up()
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "replay_failed")
    engine.publish(0)
    assert engine.phase is Phase.EXACT
    assert engine.cause == ""


def test_failed_check_after_a_reconnect_ends_with_the_next_that_succeeds() -> None:
    engine = exact(0, 1)
    engine.disconnect()
    engine.connect()
    engine.give_up()
    engine.publish(2)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "replay_failed"), "it may be another process"
    assert lives(engine, 0, 1, 2)
    engine.disconnect()
    engine.connect()
    engine.replay()
    assert engine.phase is Phase.EXACT
    assert lives(engine, 0, 1, 2)


def test_failed_replay_after_a_loss_does_not_hide_the_loss() -> None:
    engine = exact(0)
    engine.publish(3)
    engine.replay_all()
    assert engine.cause == "gap"
    engine.disconnect()
    engine.connect()
    engine.give_up()
    engine.disconnect()
    engine.connect()
    engine.replay_all()
    assert engine.phase is Phase.DEGRADED


def test_connection_lost_while_the_replay_runs() -> None:
    """The replay has a connection of its own: it may end while the subscription is down."""
    engine = Engine()
    engine.publish(0, live=False)
    engine.connect()
    engine.disconnect()
    assert engine.phase is Phase.CONNECTING
    engine.replay()
    assert lives(engine, 0)
    assert engine.phase is Phase.CONNECTING
    engine.publish(1, live=False)
    engine.connect()
    engine.replay()
    assert lives(engine, 0, 1)
    assert engine.phase is Phase.EXACT


def test_gap_replay_that_ends_while_disconnected_is_not_exact() -> None:
    engine = exact(0)
    engine.publish(1, live=False)
    engine.publish(2)
    engine.disconnect()
    engine.replay()
    assert lives(engine, 0, 1, 2)
    assert (engine.phase, engine.cause) == (Phase.RECOVERING, "disconnected")
    engine.connect()
    engine.replay()
    assert engine.phase is Phase.EXACT


# Restarts


def test_restart_seen_live() -> None:
    engine = exact(0, 1, 2)
    engine.restart()
    engine.publish(0)
    assert engine.phase is Phase.SYNCING
    assert engine.signals == [Restarted()]
    assert engine.requests[-1] == 0
    engine.replay()
    assert lives(engine, 0, life=2)
    assert engine.phase is Phase.EXACT


def test_restart_seen_live_in_the_middle_without_replay() -> None:
    engine = exact(*range(6), replay=False)
    engine.restart()
    engine.publish(3)
    assert engine.signals == [Restarted()]
    assert lives(engine, 3, life=2)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "joined_late")


def test_restart_seen_live_without_replay() -> None:
    engine = exact(0, 1, replay=False)
    engine.restart()
    engine.publish(0, 1, 2)
    assert engine.signals == [Restarted()]
    assert lives(engine, 0, 1, 2, life=2)
    assert engine.phase is Phase.EXACT


def test_restart_while_disconnected_last_batch_differs() -> None:
    engine = exact(0, 1, 2)
    engine.disconnect()
    assert (engine.phase, engine.cause) == (Phase.RECOVERING, "disconnected")
    engine.restart()
    engine.publish(0, 1, 2, 3, live=False)
    engine.connect()
    assert engine.requests[-1] == 2
    engine.replay_all()
    assert engine.signals == [Restarted()]
    assert lives(engine, 0, 1, 2, 3, life=2)
    assert engine.phase is Phase.EXACT


def test_restart_while_disconnected_ring_shorter_than_what_was_seen() -> None:
    engine = exact(0, 1, 2)
    engine.disconnect()
    engine.restart()
    engine.publish(0, live=False)
    engine.connect()
    engine.replay_all()
    assert engine.signals == [Restarted()]
    assert lives(engine, 0, life=2)
    assert engine.phase is Phase.EXACT


def test_restart_while_disconnected_ring_moved_past_cannot_be_told() -> None:
    engine = exact(0, 1, 2)
    engine.disconnect()
    engine.restart()
    engine.publish(3, 4, live=False)
    engine.connect()
    engine.replay_all()
    assert engine.phase is Phase.DEGRADED
    assert engine.cause == "unverified"


def test_restart_while_a_gap_is_replayed() -> None:
    """The replay connection may reach the new process before the subscription notices it is cut off."""
    engine = exact(0, 1)
    engine.publish(2, live=False)
    engine.publish(3)
    engine.restart()
    engine.publish(*range(5), live=False)
    engine.replay_all()
    assert engine.signals == [Restarted()]
    assert lives(engine, *range(5), life=2)


def test_restart_before_the_connection_is_reported() -> None:
    engine = exact(0, 1)
    engine.disconnect()
    engine.restart()
    engine.publish(0, 1, live=False)
    engine.publish(2)  # would go on where the old one was
    assert engine.applied == [(1, 0), (1, 1)]
    engine.connect()
    engine.replay_all()
    assert engine.signals == [Restarted()]
    assert lives(engine, 0, 1, 2, life=2)
    assert engine.phase is Phase.EXACT


def test_what_waited_through_an_old_connection_is_not_applied_to_a_new_process() -> None:
    engine = Engine()
    engine.publish(0, 1, 2, live=False)
    engine.connect()
    engine.publish(3)
    engine.restart()
    engine.connect()  # it dialled in before its predecessor's connection was given up
    engine.publish(*range(4))
    engine.replay_all()
    assert lives(engine, *range(4), life=2)
    assert engine.phase is Phase.EXACT


def test_old_copies_that_wait_behind_a_long_replay_do_not_restart_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replay runs past what digests remember, so the copy must be checked when its number comes by."""
    monkeypatch.setattr(stream_module, "MEMORY", 4)
    engine = Engine()
    engine.publish(*range(20), live=False)
    engine.connect()
    engine.send(2, engine.ring[2])
    engine.replay()
    assert lives(engine, *range(20))
    assert engine.signals == []
    assert engine.phase is Phase.EXACT


def test_subscription_and_replay_that_reach_different_processes() -> None:
    engine = Engine()
    engine.connect()
    engine.publish(0, 1)
    engine.reply(0, payload(7, 0))
    assert engine.signals == [Restarted()]
    engine.replay_all()
    assert lives(engine, 0, 1)
    assert engine.phase is Phase.EXACT


def test_reconnect_to_the_same_process() -> None:
    engine = exact(0, 1)
    engine.disconnect()
    engine.publish(2, 3, live=False)
    engine.connect()
    engine.publish(4)
    engine.replay()
    assert lives(engine, *range(5))
    assert engine.signals == []
    assert engine.phase is Phase.EXACT


def test_reconnect_without_replay_goes_on_or_shows_the_gap() -> None:
    engine = exact(0, 1, replay=False)
    engine.disconnect()
    engine.connect()
    assert engine.phase is Phase.RECOVERING
    engine.publish(2)
    assert engine.phase is Phase.EXACT
    engine.disconnect()
    engine.connect()
    engine.publish(4)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "gap")


# Bounds


def test_held_batches_are_bounded_and_what_was_dropped_is_replayed() -> None:
    engine = exact(0, max_held=3)
    engine.publish(1, live=False)
    engine.publish(*range(2, 10))
    assert engine.stream.held == 3
    assert engine.stream.stats.held_dropped == 5
    engine.ring = {s: b for s, b in engine.ring.items() if s < 5}  # as of the request
    engine.replay()
    assert engine.phase is Phase.RECOVERING, "batches up to 9 were heard of"
    engine.ring.update({s: payload(1, s) for s in range(5, 10)})
    engine.replay()
    assert lives(engine, *range(10))
    assert engine.phase is Phase.EXACT


def test_dropped_batches_nobody_can_replay_are_a_loss() -> None:
    engine = exact(0, max_held=1)
    engine.publish(1, live=False)
    engine.publish(2, 3)
    del engine.ring[3]
    engine.replay_all()
    assert lives(engine, 0, 1, 2)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "gap")
    engine.publish(4)
    assert lives(engine, 0, 1, 2, 4)


def test_held_bytes_are_bounded() -> None:
    engine = exact(0, max_held_bytes=3000)
    engine.publish(1, live=False)
    engine.publish(*range(2, 8), size=1000)
    assert engine.stream.held == 2
    engine.replay_all()
    assert lives(engine, *range(8))
    assert engine.phase is Phase.EXACT
    assert engine.stream.held == 0


def test_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MEMORY", 4)
    engine = exact(*range(10))
    engine.send(7, engine.ring[7])
    assert engine.stream.stats.duplicates == 1
    engine.send(2, engine.ring[2])
    assert engine.signals == [Restarted()], "older than what is remembered: taken for a restart, which is safe"
    engine.replay_all()
    assert lives(engine, *range(10))
    assert engine.phase is Phase.EXACT


# Malformed input


@pytest.mark.parametrize(
    "frames", [[], [b"t"], [b"t", b"\0" * 8], [b"t", b"\0" * 7, b"x"], [b"t", b"\xff" * 8, b"x"], [b""] * 4]
)
def test_malformed_frames(frames: list[bytes]) -> None:
    engine = exact(0)
    engine.take(engine.stream.live(frames, engine.now))
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "malformed_frame")
    assert engine.stream.stats.malformed_frames == 1
    engine.publish(1)
    assert lives(engine, 0, 1)


@pytest.mark.parametrize("frames", [[], [b"x"], [b"", b"\0" * 7, b"x"]])
def test_malformed_replies_are_holes(frames: list[bytes]) -> None:
    engine = Engine()
    engine.publish(0, 1, live=False)
    engine.connect()
    assert engine.request is not None
    engine.take(engine.stream.replayed(frames, engine.request.request, engine.now))
    engine.replay()
    assert lives(engine, 0, 1)
    assert engine.phase is Phase.EXACT
    assert engine.stream.stats.malformed_frames == 1


def test_malformed_batch_costs_itself() -> None:
    engine = exact(0)
    engine.send(1, b"\xc1")
    engine.publish(2)
    assert lives(engine, 0, 2)
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "malformed_batch")
    assert engine.stream.stats.malformed_batches == 1
    assert engine.stream.stats.gaps == 0


def test_malformed_event_costs_itself() -> None:
    engine = exact(0)
    actions = engine.stream.live([b"", frame(1), BAD_EVENT], engine.now)
    doubted, applied = actions
    assert isinstance(doubted, Doubted)
    assert isinstance(applied, Apply)
    assert len(applied.batch.events) == 1
    assert (engine.phase, engine.cause) == (Phase.DEGRADED, "skipped_event")
    assert engine.stream.stats.skipped_events == 1


def test_unknown_kinds_are_counted_and_harmless() -> None:
    engine = exact(0)
    engine.send(1, UNKNOWN_EVENT)
    assert engine.phase is Phase.EXACT
    assert engine.stream.stats.unknown_kinds == 1
    assert engine.stream.stats.skipped_events == 0


def test_other_ranks_are_counted() -> None:
    engine = exact(0, dp_rank=3)
    assert engine.stream.stats.wrong_rank == 1


# Healing


@pytest.mark.parametrize("replay", [True, False])
def test_clear_heals_a_loss(replay: bool) -> None:
    engine = exact(0, replay=replay)
    engine.publish(3)
    engine.replay_all()
    assert engine.phase is Phase.DEGRADED
    engine.send(4, CLEAR)
    assert engine.phase is Phase.EXACT
    assert engine.cause == ""


def test_clear_inside_a_replay_heals_once_the_replay_is_over() -> None:
    engine = exact(0)
    engine.send(1, b"\xc1")
    assert engine.phase is Phase.DEGRADED
    engine.ring[1] = b"\xc1"
    engine.ring[2] = CLEAR
    engine.publish(3)
    engine.reply(1, b"\xc1")
    engine.reply(2, CLEAR)
    assert engine.phase is Phase.DEGRADED, "batch 3 is known and not applied"
    engine.end()
    assert engine.phase is Phase.EXACT
    assert engine.applied[-1] == (1, 3)


def test_restart_heals_a_loss() -> None:
    engine = exact(0, 1)
    engine.publish(4)
    engine.replay_all()
    engine.restart()
    engine.publish(0)
    engine.replay_all()
    assert engine.phase is Phase.EXACT


def test_policy_reset_drops_what_may_be_stale() -> None:
    engine = exact(0, on_loss="reset")
    engine.publish(3)
    engine.replay_all()
    assert engine.signals == [Dropped()]
    assert lives(engine, 3)
    assert engine.phase is Phase.DEGRADED
    engine.send(4, b"\xc1")
    assert engine.signals == [Dropped(), Dropped()]


def test_policy_reset_keeps_the_picture_while_nothing_was_skipped() -> None:
    engine = exact(0, on_loss="reset")
    engine.disconnect()
    engine.connect()
    engine.give_up()
    assert engine.cause == "replay_failed"
    assert engine.signals == []


# The table


class _Watched(dict[tuple[Phase, Signal], Phase]):
    """The transition table, noting which entries were used."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS)
        self.used: set[tuple[Phase, Signal]] = set()

    def __getitem__(self, key: tuple[Phase, Signal]) -> Phase:
        self.used.add(key)
        return super().__getitem__(key)


def test_every_transition_of_the_table_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = _Watched()
    monkeypatch.setattr(stream_module, "TRANSITIONS", watched)

    engine = Engine()
    engine.disconnect()  # CONNECTING, LEAVE
    engine.connect()  # CONNECTING, JOIN
    engine.connect()  # SYNCING, JOIN
    engine.disconnect()  # SYNCING, LEAVE
    engine.connect()
    engine.publish(0, live=False)
    engine.replay()  # SYNCING, COMPLETE
    engine.connect()  # EXACT, JOIN
    engine.connect()  # RECOVERING, JOIN
    engine.replay()  # RECOVERING, COMPLETE
    engine.disconnect()  # EXACT, LEAVE
    engine.disconnect()  # RECOVERING, LEAVE
    engine.restart()
    engine.publish(0, live=False)
    engine.connect()
    engine.replay()  # RECOVERING, RESTART
    engine.replay()
    engine.restart()
    engine.publish(0)  # EXACT, RESTART
    engine.reply(0, engine.ring[0])
    engine.connect()  # SYNCING, JOIN: asks for proof
    engine.reply(0, payload(9, 0))  # SYNCING, RESTART
    engine.replay()
    engine.publish(2)  # EXACT, GAP
    engine.replay_all()  # RECOVERING, LOSS
    assert engine.phase is Phase.DEGRADED
    engine.publish(4)  # DEGRADED, GAP
    engine.replay_all()  # DEGRADED, LOSS
    engine.disconnect()  # DEGRADED, LEAVE
    engine.connect()  # DEGRADED, JOIN
    engine.replay_all()
    engine.send(5, CLEAR)  # DEGRADED, RESET
    engine.send(6, b"\xc1")  # EXACT, LOSS
    engine.restart()
    engine.publish(0)  # DEGRADED, RESTART
    engine.send(1, b"")
    engine.give_up()  # SYNCING, LOSS

    early = Engine()
    early.take(early.stream.live([], early.now))  # CONNECTING, LOSS

    cut = Engine()
    cut.connect()
    cut.reply(0, payload(1, 0))
    cut.disconnect()
    cut.pass_time()
    cut.reply(0, payload(2, 0))  # CONNECTING, RESTART

    assert set(TRANSITIONS) - watched.used == set()
