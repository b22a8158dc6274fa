"""Time travel: what each replica's consumer knew at any point of a recording.

A `Timeline` feeds recorded entries to the consumer's own parts, stream and inventory, so what it shows is what a
consumer that heard this stream would have had in the index, batch by batch. It reads forward only; a point in the
past is reached by playing up to it, which costs what it costs to consume that much.

Points. `12345` is a sequence number: the state once that batch was applied. `#12345` is a place in the recording, and
the only unambiguous one after a restart (numbers begin again) or with several replicas. A time is ISO 8601 or
`@seconds` since 1970, and means the moment of receipt.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal

import msgspec

from ..consumers.evidence import Departures, evidence, missing_above
from ..consumers.inventory import Delta, Inventory
from ..consumers.recording import Entry, Frame, Malformed, Mark, Recording, Source
from ..consumers.stream import END_MARKER, Action, Apply, RequestReplay, Restarted, Stream
from ..engines.rules import rule_for
from ..proto.api import BlocksResponse
from ..proto.errors import ConfigError
from ..proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, tier_of
from ..proto.hashing import BlockKey
from ..proto.index import ReplicaRef, State, TierMask

Holdings = Mapping[ReplicaRef, Mapping[BlockKey, TierMask]]
"""What the index must hold for each replica."""


class Point(msgspec.Struct, frozen=True):
    """A place in a recording, everything before it and itself included."""

    kind: Literal["end", "seq", "position", "time"] = "end"
    value: int = 0
    """A sequence number, a position, or nanoseconds since 1970."""

    @classmethod
    def parse(cls, text: str) -> Point:
        """Raises ConfigError for what is none."""
        try:
            if text == "end":
                return cls()
            if text.isascii() and text.isdigit():
                return cls("seq", int(text))
            if text.startswith("#"):
                return cls("position", int(text[1:]))
            if text.startswith("@"):
                return cls("time", int(float(text[1:]) * 1e9))
            when = datetime.fromisoformat(text)
            return cls("time", int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e9))
        except (ValueError, OverflowError):
            raise ConfigError(
                "point", f"{text!r} is no place in a recording", "use a sequence number, #position, a time, or end"
            ) from None


END = Point()


def up_to(entries: Iterable[Entry], point: Point) -> Iterator[Entry]:
    """The entries that belong to the state at `point`.

    Raises ConfigError where a sequence number is ambiguous, since several replicas were recorded.
    """
    source: Source | None = None
    for entry in entries:
        record = entry.record
        match point.kind:
            case "position":
                if entry.position > point.value:
                    return
            case "time":
                if record.at > point.value:
                    return
            case "seq":
                if source is not None and source != entry.source:
                    raise ConfigError(
                        "point",
                        "a sequence number names no one moment of several replicas",
                        "pick one with --replica, or use #position or a time",
                    )
                source = entry.source
                if isinstance(record, Frame) and record.seq >= point.value:
                    if record.seq == point.value:
                        yield entry
                    return
        yield entry


def of_replica(entries: Iterable[Entry], replica: str | None) -> Iterator[Entry]:
    """Only what `NAME` or `NAME/RANK` published; everything for None."""
    for entry in entries:
        if replica is None or replica in (entry.source.replica, str(entry.source.ref)):
            yield entry


class Change(msgspec.Struct, frozen=True, gc=False):
    """What one batch, or a restart (then without a batch), did to a replica."""

    seq: int
    batch: Batch | None
    delta: Delta


Replay = Callable[[int], Iterable[tuple[int, bytes]]]
"""The engine's replay socket: buffered batches (number, payload) from a number on."""


class ReplicaPast:
    """One replica's consumer, fed from a recording."""

    def __init__(self, source: Source, replay: Replay | None = None) -> None:
        """replay: stands for the engine's replay socket. Without one, what is missing from the entries stays so."""
        self.source = source
        self._replay = replay
        self.inventory = Inventory(
            source.namespace,
            rule=None if source.hash_mode == "engine" else rule_for(source.engine),
            hash_mode=source.hash_mode,
            copy_mode=source.copy_mode,
        )
        self.departures = Departures()
        self.stream = self._stream()
        self.life = 0
        """Engine processes before this one."""
        self.position = -1
        """Of the newest entry."""
        self.at = 0
        """Its time, nanoseconds since 1970."""
        self.batches = 0
        self.blocks = 0
        """Block events in them: blocks stored or removed."""

    def feed(self, entry: Entry) -> list[Change]:
        """Apply one entry; returns what it changed, in order."""
        record, self.position = entry.record, entry.position
        self.at = record.at
        match record:
            case Mark(what="restarted") if self._replay is None:
                # The recorder saw it. From the frames alone it shows only if they begin below the next number.
                self.stream = self._stream()
                return [self._restart()]
            case Mark(what="restarted"):
                return self.reconnect()
            case Mark():
                return []
            case Malformed(frames=frames):
                return self._act(self.stream.live(frames, 0.0))
            case Frame(seq=seq, payload=payload):
                return self._act(self.stream.live((b"", seq.to_bytes(8, "big"), payload), 0.0))

    def reconnect(self) -> list[Change]:
        """The connection breaks and comes back: the stream looks whether it missed anything."""
        self.stream.disconnected(0.0)
        return self._act(self.stream.connected(0.0))

    def _act(self, actions: Iterable[Action]) -> list[Change]:
        changes: list[Change] = []
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Apply(seq=seq, batch=batch):
                    delta = self.inventory.apply(batch)
                    self.departures.note(delta, seq, batch.ts)
                    self.batches += 1
                    changes.append(Change(seq, batch, delta))
                    for event in batch.events:
                        if not isinstance(event, AllBlocksCleared):
                            self.blocks += len(event.hashes)
                case Restarted():
                    changes.append(self._restart())
                case RequestReplay(start=start, request=request):
                    assert self._replay is not None, "only a stream that has a replay asks for one"
                    for seq, payload in self._replay(start):
                        todo += self.stream.replayed((b"", seq.to_bytes(8, "big"), payload), request, 0.0)
                    todo += self.stream.replayed((b"", END_MARKER.to_bytes(8, "big"), b""), request, 0.0)
        return changes

    @property
    def state(self) -> State:
        return "degraded" if self.cause else "exact"

    @property
    def cause(self) -> str:
        """Why the picture is not exact, as a consumer would have said; empty when it is."""
        if self.stream.cause:
            return self.stream.cause
        if self.inventory.flaws:
            return min(self.inventory.flaws)
        return "hidden_inputs" if self.inventory.ambiguous else ""

    def evidence(self, keys: Collection[BlockKey]) -> BlocksResponse:
        """What this consumer would have answered to `POST /v1/blocks`."""
        return evidence(
            list(keys),
            self.inventory,
            self.departures,
            self.stream,
            ref=self.source.ref,
            namespace=self.source.namespace,
            hash_mode=self.source.hash_mode,
            state=self.state,
            cause=self.cause,
        )

    def _stream(self) -> Stream:
        # A hole in a recording is for good: the recorder had asked for a replay where there was one.
        return Stream(replay=self._replay is not None, dp_rank=self.source.dp_rank)

    def _restart(self) -> Change:
        self.life += 1
        self.inventory.restart()
        delta = self.inventory.settle()
        self.departures.note(delta, 0, 0.0)
        return Change(0, None, delta)


class Timeline:
    """Every replica of a recording, at one moment."""

    def __init__(self, replay: Callable[[Source], Replay] | None = None) -> None:
        """replay: the replay socket of each engine, where they are to have one."""
        self._replay = replay
        self._replicas: dict[Source, ReplicaPast] = {}

    @classmethod
    def at(cls, recording: Recording, point: Point = END, replica: str | None = None) -> Timeline:
        """The state of a recording at a point."""
        timeline = cls()
        for entry in up_to(of_replica(recording, replica), point):
            timeline.feed(entry)
        return timeline

    def feed(self, entry: Entry) -> tuple[ReplicaPast, list[Change]]:
        """Apply one entry to the replica it is of."""
        past = self._replicas.get(entry.source)
        if past is None:
            replay = None if self._replay is None else self._replay(entry.source)
            past = self._replicas[entry.source] = ReplicaPast(entry.source, replay)
        return past, past.feed(entry)

    @property
    def replicas(self) -> list[ReplicaPast]:
        """Those heard of so far, by name and rank."""
        return sorted(self._replicas.values(), key=lambda past: past.source.ref)

    def holdings(self) -> Holdings:
        """What the index must hold for each replica."""
        return {past.source.ref: past.inventory.expected() for past in self.replicas}


def fingerprint(held: Mapping[BlockKey, TierMask]) -> str:
    """64 hex digits that two pictures of one replica share exactly if they are the same."""
    digest = hashlib.sha256()
    for key in sorted(held):
        digest.update(key)
        digest.update(bytes((held[key],)))
    return digest.hexdigest()


# ---- differences --------------------------------------------------------------------------------------------------


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How one replica's blocks differ between two pictures."""

    replica: str
    before: int
    after: int
    """Blocks in each."""
    gained: list[str]
    """Keys only the second has, in key order."""
    lost: list[str]
    moved: list[str]
    """Keys whose tiers differ."""

    @property
    def same(self) -> bool:
        return not (self.gained or self.lost or self.moved)


def differences(before: Holdings, after: Holdings) -> list[Difference]:
    """Replica by replica; where each side knows only one, these two, whatever they are called."""
    if len(before) == len(after) == 1:
        after = dict(zip(before, after.values(), strict=True))
    found = []
    for ref in sorted({*before, *after}):
        a, b = before.get(ref, {}), after.get(ref, {})
        found.append(
            Difference(
                replica=str(ref),
                before=len(a),
                after=len(b),
                gained=[key.hex() for key in sorted(b.keys() - a.keys())],
                lost=[key.hex() for key in sorted(a.keys() - b.keys())],
                moved=[key.hex() for key in sorted(a.keys() & b.keys()) if a[key] != b[key]],
            )
        )
    return found


# ---- history ------------------------------------------------------------------------------------------------------

What = Literal[
    "stored",
    "stored again",
    "copy removed",
    "evicted",
    "removed, never stored",
    "attached",
    "detached",
    "left",
    "cleared",
    "restarted",
    "batches lost",
]


class Happening(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened to a block, or to the replica all of whose blocks it concerns."""

    position: int
    at: str
    """Time of receipt, ISO 8601."""
    replica: str
    seq: int | None
    what: What
    by: str
    """Who did it: the engine, or what it did to another block."""
    life: int = 0
    event: int | None = None
    """Its number within the batch."""
    block: str | None = None
    """Index block key, or the engine's own name if the index has none for it."""
    depth: int | None = None


_Name = tuple[Source, int, EngineHash]
"""A name means something within one life of one replica only."""


def history(
    entries: Callable[[], Iterable[Entry]], keys: Collection[BlockKey], names: Collection[EngineHash] = ()
) -> list[Happening]:
    """Everything that touched these blocks, given by index key or by the engine's own name, in order.

    Reads the entries twice: what a block is called is not known before its prefix was seen, which may be later.
    """
    timeline = Timeline()
    writer = _HistoryWriter(set(keys), _names(entries(), set(keys), set(names)))
    for entry in entries():
        past, changes = timeline.feed(entry)
        writer.write(past, changes, _notes(entry))
    return writer.found


def _notes(entry: Entry) -> list[str | None]:
    """Of a redacted batch, why each event is there: a block's prefix can have come or gone instead of itself."""
    if not entry.source.redacted or not isinstance(entry.record, Frame):
        return []
    try:
        return [event.get("note") for event in msgspec.msgpack.decode(entry.record.payload)[1]]
    except msgspec.DecodeError:
        return []


class _About(msgspec.Struct, frozen=True):
    """What the index calls a block an engine named, as far as that is known."""

    key: BlockKey | None = None
    depth: int | None = None


def _names(entries: Iterable[Entry], keys: set[BlockKey], names: set[EngineHash]) -> dict[_Name, _About]:
    """Every name these blocks ever went by."""
    timeline = Timeline()
    known: dict[_Name, _About] = {}

    def learn(past: ReplicaPast, name: EngineHash) -> None:
        node = past.inventory.node(name)
        if node is None:
            return
        for depth, key in enumerate(node.keys, node.depth - len(node.keys)):
            if key in keys or name in names:
                known[past.source, past.life, name] = _About(key, depth)

    for entry in entries:
        past, changes = timeline.feed(entry)
        for change in changes:
            for event in change.batch.events if change.batch else ():
                if isinstance(event, AllBlocksCleared):
                    continue
                for name in event.hashes:
                    if name in names:
                        known.setdefault((past.source, past.life, name), _About())
                    if isinstance(event, BlockStored):
                        learn(past, name)
            changed = [write.key for write in change.delta.writes if write.key in keys]
            for nodes in past.inventory.find(changed).values():
                for node in nodes:
                    learn(past, node.hash)
    return known


class _HistoryWriter:
    def __init__(self, keys: set[BlockKey], known: Mapping[_Name, _About]) -> None:
        self.found: list[Happening] = []
        self._known = known
        self._keys = keys | {about.key for about in known.values() if about.key is not None}
        self._copies: dict[tuple[Source, EngineHash, str, int], int] = {}
        self._attached: set[tuple[Source, BlockKey]] = set()
        self._lost: dict[Source, int] = {}

    def write(self, past: ReplicaPast, changes: list[Change], notes: list[str | None]) -> None:
        source = past.source
        lost = past.stream.stats.gap_batches
        if lost > self._lost.get(source, 0):
            count, last = lost - self._lost.get(source, 0), past.stream.expected - 2
            which = f"batch {last}" if count == 1 else f"batches {last - count + 1} to {last}"
            self._say(past, None, "batches lost", f"{which} never reached the recorder")
            self._lost[source] = lost
        for change in changes:
            if change.batch is None:
                self._emptied(past, None, "restarted", "another engine process took over")
                continue
            evicted = self._events(past, change.seq, change.batch, notes)
            self._attachment(past, change, evicted)

    def _events(self, past: ReplicaPast, seq: int, batch: Batch, notes: list[str | None]) -> set[BlockKey]:
        """Write down what the batch says of our blocks; returns those whose last copy went."""
        evicted: set[BlockKey] = set()
        for number, event in enumerate(batch.events):
            if isinstance(event, AllBlocksCleared):
                self._emptied(past, seq, "cleared", "the engine reset its prefix cache")
                continue
            if notes[number : number + 1] in (["attached"], ["detached"]):
                continue
            for name in event.hashes:
                about = self._known.get((past.source, past.life, name))
                if about is None:
                    continue
                what, copies = self._count(past.source, name, event)
                tier = tier_of(event.medium).name.lower()
                by = f"the engine, in {tier} memory" + (f"; copies there: {copies}" if copies > 1 else "")
                self._say(past, seq, what, by, about, number, name)
                if what == "evicted" and about.key is not None:
                    evicted.add(about.key)
        return evicted

    def _count(self, source: Source, name: EngineHash, event: BlockStored | BlockRemoved) -> tuple[What, int]:
        where = source, name, event.medium, event.group
        copies = self._copies.get(where, 0)
        if isinstance(event, BlockStored):
            self._copies[where] = copies + 1 if source.copy_mode == "count" else 1
            return ("stored again" if copies else "stored"), self._copies[where]
        if not copies:
            return "removed, never stored", 0
        self._copies[where] = copies - 1
        return ("copy removed" if copies > 1 else "evicted"), copies - 1

    def _attachment(self, past: ReplicaPast, change: Change, evicted: set[BlockKey]) -> None:
        for write in sorted(change.delta.writes, key=lambda w: w.depth):
            here, about = (past.source, write.key), _About(write.key, write.depth)
            if write.key not in self._keys:
                continue
            if write.tiers and here not in self._attached:
                self._attached.add(here)
                self._say(past, change.seq, "attached", "its whole prefix is held: it is in the index", about)
            elif not write.tiers and here in self._attached:
                self._attached.discard(here)
                if write.key in evicted:
                    self._say(past, change.seq, "left", "the index, with its last copy", about)
                    continue
                nodes = past.inventory.find((write.key,)).get(write.key, ())
                above = next((missing_above(node) for node in nodes if node.tiers), None)
                which = "a block above it" if above is None else f"block {above.hex()} above it"
                self._say(past, change.seq, "detached", f"still held, but {which} went", about)

    def _emptied(self, past: ReplicaPast, seq: int | None, what: What, by: str) -> None:
        for where in [where for where in self._copies if where[0] == past.source]:
            del self._copies[where]
        self._attached = {here for here in self._attached if here[0] != past.source}
        self._say(past, seq, what, by)

    def _say(
        self,
        past: ReplicaPast,
        seq: int | None,
        what: What,
        by: str,
        about: _About | None = None,
        event: int | None = None,
        name: EngineHash | None = None,
    ) -> None:
        about = about or _About()
        block = about.key.hex() if about.key is not None else None if name is None else f"engine:{name}"
        self.found.append(
            Happening(
                position=past.position,
                at=iso(past.at),
                replica=str(past.source.ref),
                life=past.life,
                seq=seq,
                event=event,
                what=what,
                by=by,
                block=block,
                depth=about.depth,
            )
        )


def iso(at: int) -> str:
    """Nanoseconds since 1970 as ISO 8601, to the microsecond."""
    return datetime.fromtimestamp(at // 1000 / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
