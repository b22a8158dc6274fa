"""One event stream, as a state machine without sockets or clocks.

Frames and signals go in; what must be done comes out as actions, in order. It is the only place that knows what a
sequence number means.

    phase        what it means
    connecting   no live connection yet
    syncing      joined (or the engine restarted): history is being replayed, live batches wait
    exact        every batch since the engine started, or since its last clear, was applied in order
    recovering   a gap was seen: the missing batches are being replayed, live batches wait
    degraded     something is lost for good; `cause` says what. A clear or a restart makes the stream exact again

The stream is exact exactly while five things hold: the subscription is up, no replay runs, every batch heard of is
applied, nothing is lost, and nothing is in *doubt*. Doubt is what sequence numbers cannot show: whether batches went
by before the first one heard, and whether the process behind a new connection is still the same one.

Rules, from running the engines (wire-format notes, section 1):

- Sequence numbers start at 0 with the engine process. A lower one than expected, if it is not a copy of a batch seen
  before, means that the engine restarted: everything known is void. Copies are told by length and CRC-32 of the
  payload, since live messages overtake and repeat what a replay delivers.
- A replay may start later than asked (the ring forgot) and may lose batches in the middle (send marks), without
  saying so. Contiguity is checked here; a hole is asked for once more before it is taken for real.
- Every replay starts at the last batch applied: if its payload differs, or the ring has neither it nor a later one,
  another process answers, so the engine restarted. If the ring has moved past it, nothing proves anything, and after
  a reconnect that is a loss. Without a replay endpoint a restart while disconnected shows only if the numbers do not
  happen to go on where they were.
- A replay that failed is no loss yet: `degraded` then ends with the next replay that succeeds.
- Replayed and live batches are applied in sequence order, never interleaved.

Bounds: at most `max_held` batches and `max_held_bytes` wait during a replay (beyond that the newest are dropped and
replayed later); MEMORY payload digests are kept; a replay is asked for at most MAX_ATTEMPTS times without progress.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, Protocol

import msgspec

from ..proto.errors import MalformedBatch
from ..proto.events import AllBlocksCleared, Batch, decode_batch

END_MARKER: Final = 0xFFFF_FFFF_FFFF_FFFF
MAX_ATTEMPTS: Final = 3
MEMORY: Final = 16_384
"""Digests of applied batches kept to tell copies from restarts: more than an engine's default replay ring."""


class Phase(Enum):
    CONNECTING = "connecting"
    SYNCING = "syncing"
    EXACT = "exact"
    RECOVERING = "recovering"
    DEGRADED = "degraded"


class Signal(Enum):
    """What can happen to a stream, as far as its phase is concerned."""

    JOIN = "join"
    LEAVE = "leave"
    RESTART = "restart"
    GAP = "gap"
    COMPLETE = "complete"
    LOSS = "loss"
    RESET = "reset"


TRANSITIONS: Final[dict[tuple[Phase, Signal], Phase]] = {
    (Phase.CONNECTING, Signal.JOIN): Phase.SYNCING,
    (Phase.SYNCING, Signal.JOIN): Phase.SYNCING,
    (Phase.EXACT, Signal.JOIN): Phase.RECOVERING,
    (Phase.RECOVERING, Signal.JOIN): Phase.RECOVERING,
    (Phase.DEGRADED, Signal.JOIN): Phase.DEGRADED,
    (Phase.CONNECTING, Signal.LEAVE): Phase.CONNECTING,
    (Phase.SYNCING, Signal.LEAVE): Phase.CONNECTING,
    (Phase.EXACT, Signal.LEAVE): Phase.RECOVERING,
    (Phase.RECOVERING, Signal.LEAVE): Phase.RECOVERING,
    (Phase.DEGRADED, Signal.LEAVE): Phase.DEGRADED,
    (Phase.CONNECTING, Signal.RESTART): Phase.CONNECTING,
    (Phase.SYNCING, Signal.RESTART): Phase.SYNCING,
    (Phase.EXACT, Signal.RESTART): Phase.SYNCING,
    (Phase.RECOVERING, Signal.RESTART): Phase.SYNCING,
    (Phase.DEGRADED, Signal.RESTART): Phase.SYNCING,
    (Phase.EXACT, Signal.GAP): Phase.RECOVERING,
    (Phase.DEGRADED, Signal.GAP): Phase.DEGRADED,
    (Phase.SYNCING, Signal.COMPLETE): Phase.EXACT,
    (Phase.RECOVERING, Signal.COMPLETE): Phase.EXACT,
    (Phase.CONNECTING, Signal.LOSS): Phase.DEGRADED,
    (Phase.SYNCING, Signal.LOSS): Phase.DEGRADED,
    (Phase.EXACT, Signal.LOSS): Phase.DEGRADED,
    (Phase.RECOVERING, Signal.LOSS): Phase.DEGRADED,
    (Phase.DEGRADED, Signal.LOSS): Phase.DEGRADED,
    (Phase.DEGRADED, Signal.RESET): Phase.EXACT,
}
"""Every transition there is. A pair that is missing cannot happen; reaching one is our bug."""


class Apply(msgspec.Struct, frozen=True):
    """Apply this batch to the inventory."""

    seq: int
    batch: Batch
    replayed: bool


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask the engine for every batch from `start` on, over a fresh connection; older replies are void."""

    start: int
    request: int
    """Pass it back with what the replay delivers."""


class Restarted(msgspec.Struct, frozen=True):
    """The engine process was replaced: drop the inventory and begin a new incarnation."""


class Dropped(msgspec.Struct, frozen=True):
    """Policy `reset`: something was lost, so forget what may be stale. The engine itself did not restart."""


Action = Apply | RequestReplay | Restarted | Dropped
LossPolicy = Literal["keep", "reset"]
"""keep: serve on with what is known, flagged. reset: forget it, and learn again from what comes."""


class Journal(Protocol):
    """Is told what a stream takes, in order, before the stream acts on it. Must not raise for what engines send."""

    def heard(self, frames: Sequence[bytes]) -> None:
        """A message of the subscription, whatever it is."""
        ...

    def taken(self, seq: int, payload: bytes, replayed: bool) -> None:
        """The next batch in sequence, not decoded yet."""
        ...

    def restarted(self) -> None:
        """What is taken from here on is another engine process's."""
        ...


class StreamStats(msgspec.Struct):
    """Running totals; shown as metrics under the same names."""

    batches: int = 0
    events: int = 0
    duplicates: int = 0
    """Batches seen before (replay and live overlap)."""
    gaps: int = 0
    gap_batches: int = 0
    """Batches that could not be recovered."""
    replays: int = 0
    replayed_batches: int = 0
    restarts: int = 0
    malformed_frames: int = 0
    malformed_batches: int = 0
    skipped_events: int = 0
    unknown_kinds: int = 0
    wrong_rank: int = 0
    held_dropped: int = 0
    """Live batches dropped at the bound while a replay ran (replayed afterwards)."""


class Stream:
    """The state machine of one (endpoint, rank)."""

    def __init__(
        self,
        *,
        replay: bool,
        dp_rank: int = 0,
        on_loss: LossPolicy = "keep",
        replay_timeout_s: float = 5.0,
        max_held: int = 20_000,
        max_held_bytes: int = 256 << 20,
        journal: Journal | None = None,
    ) -> None:
        """replay: the engine has a replay endpoint. replay_timeout_s: silence after which a replay is asked anew."""
        self.stats = StreamStats()
        self.phase = Phase.CONNECTING
        self.cause = ""
        """Why the phase is degraded; a metric label."""
        self.expected = 0
        """The next sequence number."""
        self.last_ts: float | None = None
        """Engine time of the newest applied batch."""
        self._replay = replay
        self._rank = dp_rank
        self._on_loss = on_loss
        self._timeout = replay_timeout_s
        self._max_held, self._max_held_bytes = max_held, max_held_bytes
        self._journal = journal
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._digests: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._request: int | None = None
        self._requests = 0
        self._attempts = 0
        self._deadline = 0.0
        self._verify: int | None = None
        """The seq whose replayed payload must equal what was applied, until a reply to the running request tells."""
        self._progress = 0
        self._newest = -1
        """Highest seq heard of, applied or not."""
        self._linked = False
        """The subscription is up, as far as we were told."""
        self._heard = False
        """A batch of this engine process was applied."""
        self._doubt = True
        self._lost = False
        """Something is lost for good, until a clear or a restart."""

    # ---- signals in ---------------------------------------------------------------------------------------------

    def connected(self, now: float) -> list[Action]:
        """The subscription is up (again). Asks for history at once, not at the next event."""
        self._linked = True
        if not self._replay:
            # Whether the picture is still good shows with the next batch.
            if self.phase is Phase.CONNECTING:
                self._signal(Signal.JOIN)
            return []
        self._signal(Signal.JOIN)
        self._doubt = True
        self._attempts = 0
        return self._ask(now)

    def disconnected(self, now: float) -> list[Action]:
        """The subscription is down. What is known stays, and is checked when the connection is back."""
        self._linked, self._doubt = False, True
        self._signal(Signal.LEAVE)
        if self.phase is Phase.RECOVERING:
            self.cause = "disconnected"
        return []

    def live(self, frames: Sequence[bytes], now: float) -> list[Action]:
        """A message from the subscription: `[topic, seq, payload]`."""
        if self._journal is not None:
            self._journal.heard(frames)
        seq = int.from_bytes(frames[1], "big") if len(frames) == 3 and len(frames[1]) == 8 else END_MARKER
        if seq == END_MARKER:
            self.stats.malformed_frames += 1
            return self._lose("malformed_frame")
        # A message can arrive before the socket monitor has reported the connection.
        actions = [] if self._linked else self.connected(now)
        if self._request is not None:
            self._hold(seq, frames[2])
            return actions
        actions += self._in_order(seq, frames[2], now)
        self._complete()
        return actions

    def replayed(self, frames: Sequence[bytes], request: int, now: float) -> list[Action]:
        """A message from the replay connection, in either framing; the payload is last, the seq before it."""
        if request != self._request:
            return []
        if len(frames) < 2 or len(frames[-2]) != 8:
            self.stats.malformed_frames += 1
            return []
        self._deadline = now + self._timeout
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        if seq == END_MARKER and not payload:
            return self._replay_ended(now)
        self.stats.replayed_batches += 1
        actions: list[Action] = []
        if self._verify is not None and seq >= self._verify:
            verify, self._verify = self._verify, None
            if seq == verify:
                return [] if self._digests.get(seq) == _digest(payload) else self._restart(now)
            if self._doubt:
                # The ring has moved past what was seen last: nothing proves that the same process answers.
                actions = self._lose("unverified")
        if seq < self.expected:
            self.stats.duplicates += 1
            return actions
        if seq > self.expected:
            self._hold(seq, payload)
            return actions
        return actions + self._apply(seq, payload, replayed=True)

    def tick(self, now: float) -> list[Action]:
        """Time passed. Call at least every second while `waiting` is true."""
        if self._request is None or now < self._deadline:
            return []
        self._attempts += 1
        if self._attempts < MAX_ATTEMPTS:
            return self._ask(now)
        self._request, self._verify = None, None
        # No loss by itself: what is missing, if anything, shows when it is skipped.
        self._signal(Signal.LOSS)
        self.cause = "replay_failed"
        return self._drain(now, again=False)

    @property
    def waiting(self) -> bool:
        """A replay is under way."""
        return self._request is not None

    @property
    def caught_up(self) -> bool:
        """Nothing better comes by waiting: history is applied, given up, or out of reach for want of a replay."""
        match self.phase:
            case Phase.CONNECTING:
                return False
            case Phase.SYNCING:
                return not self._replay
            case _:
                return True

    @property
    def held(self) -> int:
        """Batches waiting for a replay to end."""
        return len(self._held)

    # ---- sequence -----------------------------------------------------------------------------------------------

    def _in_order(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch while no replay runs."""
        self._newest = max(self._newest, seq)
        if seq == self.expected:
            return self._apply(seq, payload, replayed=False)
        if seq < self.expected:
            if self._digests.get(seq) == _digest(payload):
                self.stats.duplicates += 1
                return []
            actions = self._restart(now)
            if self._request is not None:
                self._hold(seq, payload)
                return actions
            return actions + self._in_order(seq, payload, now)
        self.stats.gaps += self._heard
        if self._replay:
            self._signal(Signal.GAP)
            self._hold(seq, payload)
            self._attempts = 0
            return self._ask(now)
        return self._skip_to(seq) + self._in_order(seq, payload, now)

    def _skip_to(self, seq: int) -> list[Action]:
        """Give up what lies between the expected batch and this one."""
        self.stats.gap_batches += seq - self.expected
        self.expected = seq
        return self._lose("gap" if self._heard else "history_lost" if self._replay else "joined_late")

    def _apply(self, seq: int, payload: bytes, *, replayed: bool) -> list[Action]:
        if not replayed and (not self._replay or (seq == 0 and not self._heard)):
            self._doubt = False  # the first batch of a process; or the best there is to go by
        self.expected = seq + 1
        self._heard = True
        self._digests[seq] = _digest(payload)
        if len(self._digests) > MEMORY:
            self._digests.popitem(last=False)
        stats = self.stats
        stats.batches += 1
        if self._journal is not None:
            self._journal.taken(seq, payload, replayed)
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            stats.malformed_batches += 1
            return self._lose("malformed_batch")
        stats.events += len(batch.events)
        self.last_ts = batch.ts
        if batch.rank is not None and batch.rank != self._rank:
            stats.wrong_rank += 1
        actions: list[Action] = []
        harmful = 0
        for skipped in batch.skipped:
            if skipped.cause == "unknown_kind":
                stats.unknown_kinds += 1
            else:
                harmful += 1
        if harmful:
            stats.skipped_events += harmful
            actions += self._lose("skipped_event")
        elif (self._lost or self._doubt) and any(isinstance(e, AllBlocksCleared) for e in batch.events):
            self._lost = self._doubt = False
        actions.append(Apply(seq, batch, replayed))
        return actions

    def _restart(self, now: float) -> list[Action]:
        self.stats.restarts += 1
        if self._journal is not None:
            self._journal.restarted()
        self._signal(Signal.RESTART)
        self.expected, self._newest, self._heard = 0, -1, False
        self._doubt, self._lost = True, False
        self._digests.clear()
        self._attempts = 0
        self._held.clear()
        self._held_bytes = 0
        actions: list[Action] = [Restarted()]
        return actions + self._ask(now) if self._replay else actions

    # ---- replay -------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> list[Action]:
        """From the last applied batch on: the copy of it proves that the same process answers."""
        self._verify = self.expected - 1 if self._heard else None
        self.stats.replays += 1
        self._requests += 1
        self._request = self._requests
        self._progress = self.expected
        self._deadline = now + self._timeout
        return [RequestReplay(self.expected if self._verify is None else self._verify, self._requests)]

    def _replay_ended(self, now: float) -> list[Action]:
        if self._verify is not None:
            # The ring has neither the batch applied last nor a later one: another process owns it.
            return self._restart(now)
        if self.expected > self._progress:
            self._attempts = 0
        self._request = None
        self._doubt = False
        return self._drain(now, again=True)

    def _drain(self, now: float, *, again: bool) -> list[Action]:
        """Apply what waited, in order. again: ask once more for what is missing before it is taken for lost."""
        actions: list[Action] = []
        # What was dropped at the bound is missing like any other batch.
        for seq in [*sorted(self._held), self._newest + 1]:
            if seq > self.expected:
                self._attempts += 1
                if again and self._attempts < MAX_ATTEMPTS - 1:
                    return actions + self._ask(now)
                actions += self._skip_to(seq)
                self._attempts = 0
            payload = self._held.pop(seq, None)
            if payload is None:
                break
            self._held_bytes -= len(payload)
            actions += self._in_order(seq, payload, now)
            if self._request is not None:
                return actions  # a restart came to light: its history is being asked for
        self._attempts = 0
        self._complete()
        return actions

    def _hold(self, seq: int, payload: bytes) -> None:
        self._newest = max(self._newest, seq)
        if seq in self._held:
            return
        if len(self._held) >= self._max_held or self._held_bytes + len(payload) > self._max_held_bytes:
            self.stats.held_dropped += 1
            return
        self._held_bytes += len(payload)
        self._held[seq] = payload

    # ---- phase --------------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Become exact, if all that takes holds."""
        if (
            self._linked
            and self._request is None
            and self._newest < self.expected
            and not self._doubt
            and not self._lost
            and self.phase is not Phase.EXACT
        ):
            self._signal(Signal.RESET if self.phase is Phase.DEGRADED else Signal.COMPLETE)

    def _signal(self, signal: Signal) -> None:
        self.phase = TRANSITIONS[self.phase, signal]
        if self.phase is not Phase.DEGRADED:
            self.cause = ""

    def _lose(self, cause: str) -> list[Action]:
        self._lost = True
        self._signal(Signal.LOSS)
        self.cause = cause
        return [Dropped()] if self._on_loss == "reset" else []


def _digest(payload: bytes) -> tuple[int, int]:
    return len(payload), zlib.crc32(payload)
