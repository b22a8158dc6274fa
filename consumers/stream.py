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
  another process answers, so the engine restarted. If the ring has moved past it, also when asked again, nothing
  proves anything, and after a reconnect that is a loss. Without a replay endpoint a restart while disconnected shows
  only if the numbers do not happen to go on where they were.
- A replay that failed is no loss yet: `degraded` then ends with the next replay that succeeds.
- A batch lost before the engine falls idle is missed by nobody, and a subscription takes effect some time after the
  connection reports it. So after a while of silence the replay is asked for anything newer than what was applied
  last: a *probe*, which changes no phase and, unlike a recovery, may fail.
- Replayed and live batches are applied in sequence order, never interleaved.

Bounds: at most `max_held` batches and `max_held_bytes` wait during a replay (beyond that the newest are dropped and
replayed later); MEMORY payload digests are kept; a replay is asked for at most MAX_ATTEMPTS times without progress.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from enum import Enum
from typing import Final, Literal, Protocol

import msgspec

from ..proto.errors import MalformedBatch
from ..proto.events import AllBlocksCleared, Batch, decode_batch

END_MARKER: Final = 0xFFFF_FFFF_FFFF_FFFF
MAX_ATTEMPTS: Final = 3
FIRST_PROBE_S: Final = 1.0
"""Silence after a replay that makes the first probe."""
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


class Doubted(msgspec.Struct, frozen=True):
    """Policy `keep`: something was lost, so what is known may be stale from here on."""


class Position(msgspec.Struct, frozen=True):
    """Where a stream was, for another process to resume from."""

    expected: int
    """The next sequence number; at least one batch was applied."""
    length: int
    """Of the payload of the batch before it; with `crc`, what proves that it is still the same engine process."""
    crc: int
    cause: str
    """What was lost for good before; empty if nothing was."""


Action = Apply | RequestReplay | Restarted | Dropped | Doubted
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
    probes: int = 0
    """Times a silent engine was asked whether there is anything new."""
    probe_finds: int = 0
    """Of those, times there was: batches nobody had missed."""
    probe_failures: int = 0
    """Of those, times there was no answer."""
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
        probe_s: float | None = None,
        max_held: int = 20_000,
        max_held_bytes: int = 256 << 20,
        journal: Journal | None = None,
    ) -> None:
        """replay: the engine has a replay endpoint. replay_timeout_s: silence after which a replay is asked anew.
        probe_s: silence of the subscription after which the replay is asked for news; None: never."""
        self.stats = StreamStats()
        self.phase = Phase.CONNECTING
        self.cause = ""
        """Why the phase is degraded; a metric label."""
        self.expected = 0
        """The next sequence number."""
        self.last_ts: float | None = None
        """Engine time of the newest applied batch."""
        self.decode_errors: Counter[str] = Counter()
        """Batches and events that could not be applied, by cause: labels of a fixed set."""
        self._replay = replay
        self._rank = dp_rank
        self._on_loss = on_loss
        self._timeout = replay_timeout_s
        self._probe_s = probe_s if replay else None
        self._probe_at = 0.0
        """When to probe next, if nothing is heard until then."""
        self._probing = False
        """The running replay is a probe."""
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
        self._passed = False
        """The running replay went past that seq without showing it."""
        self._progress = 0
        self._newest = -1
        """Highest seq heard of, applied or not."""
        self._linked = False
        """The subscription is up, as far as we were told."""
        self._heard = False
        """A batch of this engine process was applied."""
        self._applied = -1
        """The last one that was; before `expected - 1` if what came after it was given up."""
        self._doubt = True
        self._lost = False
        """Something is lost for good, until a clear or a restart."""
        self._loss = ""
        """What it was, last."""

    # ---- over a restart of ours ---------------------------------------------------------------------------------

    @property
    def position(self) -> Position | None:
        """What `resume` needs, together with everything applied so far; None where no batch can prove it."""
        last = self._digests.get(self.expected - 1)
        if not self._heard or last is None:  # nothing yet, or what came last is lost
            return None
        length, crc = last
        return Position(self.expected, length, crc, self._loss if self._lost else "")

    def resume(self, position: Position) -> None:
        """Go on where another process was, before anything was connected. The replay will tell whether it holds."""
        self._heard = True
        self.expected = position.expected
        self._newest = self._applied = position.expected - 1
        self._digests[self._newest] = position.length, position.crc
        if position.cause:
            self._lost, self._loss = True, position.cause
            self._signal(Signal.LOSS)
            self.cause = position.cause

    def proven(self) -> None:
        """The picture was compared with the engine's own at this position, and they are equal: nothing is lost."""
        self._lost = self._doubt = False
        self._complete()

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
        # What waits came through another connection, so perhaps from another process. The replay has it again.
        self._forget_held()
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
        self._probe_in(now, math.inf)
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
        if self._verify is not None and seq >= self._verify:
            if seq == self._verify:
                self._verify = None
                return [] if self._digests.get(seq) == _digest(payload) else self._restart(now)
            if self._doubt:
                # The ring has moved past it, or this replay lost it: who answers is open until its end.
                self._passed = True
                self._hold(seq, payload)
                return []
            self._verify = None
        if seq < self.expected:
            self.stats.duplicates += 1
            return []
        if seq > self.expected:
            self._hold(seq, payload)
            return []
        waiting = self._held.pop(seq, None)
        if waiting is not None:
            self._held_bytes -= len(waiting)
            self.stats.duplicates += 1
            if waiting != payload:
                return self._restart(now)  # the subscription and the replay reach different processes
        return self._apply(seq, payload, replayed=True)

    def tick(self, now: float) -> list[Action]:
        """Time passed. Call at least every second."""
        if self._request is None:
            if self._probe_s is None or not self._linked or now < self._probe_at:
                return []
            return self._ask(now, probe=True)
        if now < self._deadline:
            return []
        if self._probing:
            self.stats.probe_failures += 1
            self._request, self._verify, self._probing = None, None, False
            self._probe_in(now, math.inf)
            return self._drain(now, again=True)
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
        self._heard, self._applied = True, seq
        self._digests[seq] = _digest(payload)
        if len(self._digests) > MEMORY:
            self._digests.popitem(last=False)
        stats = self.stats
        stats.batches += 1
        if self._journal is not None:
            self._journal.taken(seq, payload, replayed)
        try:
            batch = decode_batch(payload, pack_tokens=True)
        except MalformedBatch as error:
            stats.malformed_batches += 1
            self.decode_errors[error.cause] += 1
            return self._lose("malformed_batch")
        stats.events += len(batch.events)
        self.last_ts = batch.ts
        if batch.rank is not None and batch.rank != self._rank:
            stats.wrong_rank += 1
        actions: list[Action] = []
        harmful = 0
        for skipped in batch.skipped:
            self.decode_errors[skipped.cause] += 1
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
        self.expected, self._heard = 0, False
        self._doubt, self._lost = True, False
        self._digests.clear()
        self._attempts = 0
        self._forget_held()
        actions: list[Action] = [Restarted()]
        return actions + self._ask(now) if self._replay else actions

    # ---- replay -------------------------------------------------------------------------------------------------

    def _ask(self, now: float, *, probe: bool = False) -> list[Action]:
        """From the last applied batch on: the copy of it proves that the same process answers."""
        self._verify, self._passed = (self._applied if self._heard else None), False
        self._probing = probe
        self.stats.probes += probe
        self.stats.replays += not probe
        self._requests += 1
        self._request = self._requests
        self._progress = self.expected
        self._deadline = now + self._timeout
        return [RequestReplay(self.expected if self._verify is None else self._verify, self._requests)]

    def _replay_ended(self, now: float) -> list[Action]:
        probing, self._probing = self._probing, False
        if probing and self.expected > self._progress:
            self.stats.probe_finds += 1
        # The first one soon: until the subscription took effect, what was published went nowhere.
        self._probe_in(now, math.inf if probing else FIRST_PROBE_S)
        actions: list[Action] = []
        if self._verify is not None:
            if not self._passed:
                # The ring has neither the batch applied last nor a later one: another process owns it.
                return self._restart(now)
            self._attempts += 1
            if self._attempts < MAX_ATTEMPTS - 1:
                return self._ask(now)
            # Nothing proves that the same process answers.
            self._verify = None
            actions = self._lose("unverified")
        if self.expected > self._progress:
            self._attempts = 0
        self._request = None
        self._doubt = False
        return actions + self._drain(now, again=True)

    def _probe_in(self, now: float, at_most_s: float) -> None:
        if self._probe_s is not None:
            self._probe_at = now + min(self._probe_s, at_most_s)

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
        if seq < self.expected and self._digests.get(seq) == _digest(payload):
            self.stats.duplicates += 1
            return
        self._newest = max(self._newest, seq)
        if seq in self._held:
            return
        if len(self._held) >= self._max_held or self._held_bytes + len(payload) > self._max_held_bytes:
            self.stats.held_dropped += 1
            return
        self._held_bytes += len(payload)
        self._held[seq] = payload

    def _forget_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self._newest = self.expected - 1

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
        self._lost, self._loss = True, cause
        self._signal(Signal.LOSS)
        self.cause = cause
        return [Dropped() if self._on_loss == "reset" else Doubted()]


def _digest(payload: bytes) -> tuple[int, int]:
    return len(payload), zlib.crc32(payload)
