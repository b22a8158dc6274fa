"""Recordings: what engines published, in a file that can be replayed, and given away.

What is written. A `Recorder` is the journal of a `Stream`: it writes each batch once, in sequence order, the moment
it is taken, with the time and the source. So a recording is the engine's stream as a consumer understood it: what a
replay recovered is in its place, what was lost is a hole, a restart is a mark. Frames that are no batches are kept
verbatim, apart.

How it is written. A file is a line of text and then *chunks*, each a raw deflate stream of whole records that needs
no other chunk, behind a header that says its length, its checksum and the position of its first record. Nothing is
ever rewritten. Deflate can be decoded as far as it goes, so a file cut at any byte gives every record that is whole
before the cut; a damaged chunk costs what cannot be decoded of itself, and the reader goes on at the next header.

Deflate and not Zstandard because of that property (a Zstandard block of 128 KiB is all or nothing) and because the
standard library has it: at level 1 it packs more than 150 MB a second, an engine publishes a few.

Bounds: a record waits at most as long as the caller leaves between two calls of `flush`, or until CHUNK_BYTES wait;
that much is lost by a kill -9. A record is at most MAX_RECORD_BYTES. A redactor's inventory has the inventory's
bound.

Redaction. A redacted recording holds no token id, text, adapter, salt or media name: a batch becomes what it changed
in the index, as events under canonical keys, which replay (hash mode `engine`) to the same index at every batch. A
key is a hash of the whole prefix: whoever has exactly that text can recognise it, nobody can read it back.
"""

from __future__ import annotations

import gzip
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, Self

import msgspec

from ..proto.engine import HashRule
from ..proto.errors import BadRecording, ConfigError, MalformedBatch
from ..proto.events import AllBlocksCleared, BlockRemoved, decode_batch
from ..proto.hashing import BlockKey, Namespace
from ..proto.index import BlockWrite, ReplicaRef, Tier
from .inventory import CopyMode, HashMode, Inventory

SUFFIX: Final = ".mtrec"
FIRST_LINE: Final = b"metatrie recording, format 1\n"
CHUNK_BYTES: Final = 256 << 10
"""Raw bytes that make a chunk; a record that is larger makes one of its own."""
MAX_RECORD_BYTES: Final = 96 << 20
"""More than the largest message a subscriber takes."""

_HEADER: Final = struct.Struct("<4sIIIQI")
"""Mark, compressed bytes, raw bytes, CRC-32 of the compressed bytes, position of the first record, records."""
_CRC: Final = struct.Struct("<I")
_PREFIX: Final = struct.Struct("<II")
"""Of a record: bytes, CRC-32 of them."""
_HEADER_BYTES: Final = _HEADER.size + _CRC.size
_MARK: Final = b"MTch"
_MAX_RAW: Final = CHUNK_BYTES + _PREFIX.size + MAX_RECORD_BYTES
_PIECE: Final = 64


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One replica whose stream was recorded, and how to understand it."""

    replica: str
    dp_rank: int = 0
    engine: str = "vllm"
    namespace: Namespace
    events: str = ""
    """The ZeroMQ endpoint recorded from; empty in redacted recordings."""
    hash_mode: HashMode = "auto"
    copy_mode: CopyMode = "count"
    redacted: bool = False
    """Hashes are canonical keys and token ids zeros."""

    @property
    def ref(self) -> ReplicaRef:
        return ReplicaRef(self.replica, self.dp_rank)


class Declared(msgspec.Struct, frozen=True, array_like=True, tag="source"):
    """Entries with this `index` are of this source, in this file."""

    index: int
    source: Source


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame", gc=False):
    """One batch, as the engine sent it."""

    index: int
    at: int
    """When it was taken, nanoseconds since 1970 on the recorder's clock: when it arrived, unless it had to wait for a
    replay of what comes before it."""
    seq: int
    replayed: bool
    """It came from the engine's replay socket."""
    topic: bytes
    payload: bytes


class Mark(msgspec.Struct, frozen=True, array_like=True, tag="mark", gc=False):
    """Something about the stream that no batch says."""

    index: int
    at: int
    what: str
    """`restarted`: frames from here on are another engine process's. Otherwise the phase the recorder's own
    subscription got into; informative only."""
    cause: str = ""


class Malformed(msgspec.Struct, frozen=True, array_like=True, tag="malformed", gc=False):
    """A message that is no `[topic, seq, payload]`."""

    index: int
    at: int
    frames: list[bytes]


Record = Declared | Frame | Mark | Malformed
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One record with its place in the recording."""

    position: int
    """Records before it, over all files of the recording."""
    source: Source
    record: Frame | Mark | Malformed


# ---- writing ------------------------------------------------------------------------------------------------------


class RecordingWriter:
    """Appends records to a file, or to a numbered series of them. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int | None = None,
        max_age_s: float | None = None,
        keep: int | None = None,
        level: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes, max_age_s: begin a new file when the current one is larger, or older; files are then named
        `NAME-000001.mtrec` and so on. keep: of those, how many to leave on disk. level: of deflate, 1 to 9.

        Raises ConfigError if a file is there already or cannot be written. Files are readable by their owner only,
        since token ids are what users wrote.
        """
        self._path, self._level, self._clock = path, level, clock
        self._max_bytes, self._max_age_s, self._keep = max_bytes, max_age_s, keep
        self._rotates = max_bytes is not None or max_age_s is not None
        self._sources: list[Source] = []
        self._raw = bytearray()
        self._waiting = 0
        self.position = 0
        """Records written, or waiting to be."""
        self.bytes = 0
        """Written, over all files."""
        self.files: list[Path] = []
        """Written so far and still there, oldest first."""
        self._number = 0
        self._size = 0
        self._file = self._open()

    def declare(self, source: Source) -> int:
        """A new source; returns the index its records carry."""
        self._sources.append(source)
        self._append(Declared(len(self._sources) - 1, source))
        return len(self._sources) - 1

    def write(self, record: Frame | Mark | Malformed) -> None:
        """Append. Reaches the file with the next `flush`, or when CHUNK_BYTES wait. Raises OSError, as on a full
        disk; what is in the file then stays readable."""
        self._append(record)
        if len(self._raw) >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system (a kill -9 of this process then loses none of it), and begin a new
        file if it is time."""
        self._cut()
        full = self._max_bytes is not None and self._size >= self._max_bytes
        if full or (self._max_age_s is not None and self._clock() - self._opened >= self._max_age_s):
            self._rotate()

    def sync(self) -> None:
        """Have the operating system put what was flushed on the disk. Blocks; may be called from another thread."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        if not self._file.closed:
            self._cut()
            self.sync()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, record: Record) -> None:
        body = _encode(record)
        if len(body) > MAX_RECORD_BYTES:
            return  # no engine sends such a batch, and no consumer would take it
        self._raw += _PREFIX.pack(len(body), zlib.crc32(body))
        self._raw += body
        self._waiting += 1
        self.position += 1

    def _cut(self) -> None:
        if not self._waiting:
            return
        compressor = zlib.compressobj(self._level, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = compressor.compress(self._raw) + compressor.flush()
        first = self.position - self._waiting
        header = _HEADER.pack(_MARK, len(packed), len(self._raw), zlib.crc32(packed), first, self._waiting)
        self._put(header + _CRC.pack(zlib.crc32(header)) + packed)
        self._raw.clear()
        self._waiting = 0

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._file.write(view)
            view = view[written:]
        self._size += len(data)
        self.bytes += len(data)

    def _open(self) -> BinaryIO:
        path = self._path
        if self._rotates:
            self._number += 1
            path = path.with_name(f"{path.stem}-{self._number:06}{path.suffix}")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except FileExistsError:
            raise ConfigError("recording", f"{path} is there already", "choose another name") from None
        except OSError as error:
            raise ConfigError("recording", f"{path}: {error.strerror}", "choose another place") from None
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self.files.append(path)
        self._size, self._opened = 0, self._clock()
        self._put(FIRST_LINE)
        return self._file

    def _rotate(self) -> None:
        self.close()
        self._open()
        for index, source in enumerate(self._sources):
            self._append(Declared(index, source))
        while self._keep is not None and len(self.files) > self._keep:
            self.files.pop(0).unlink(missing_ok=True)


class Recorder:
    """The journal of one stream: writes down what it takes."""

    def __init__(
        self,
        writer: RecordingWriter,
        source: Source,
        *,
        redact: HashRule | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """redact: replace token ids by canonical keys; the rule is the engine family's. clock: nanoseconds since
        1970."""
        self._writer, self._clock = writer, clock
        self._redactor = None if redact is None else Redactor(source, redact)
        self._index = writer.declare(source if self._redactor is None else self._redactor.source)
        self._topic = b""
        self._phase = ("", "")
        self.frames = 0
        """Batches written."""

    def heard(self, frames: Sequence[bytes]) -> None:
        """A message of the subscription, before the stream looks at it."""
        if len(frames) == 3 and len(frames[1]) == 8:
            self._topic = frames[0] if self._redactor is None else b""
        elif self._redactor is None:
            self._writer.write(Malformed(self._index, self._clock(), list(frames)))
        else:
            self._writer.write(Malformed(self._index, self._clock(), []))

    def taken(self, seq: int, payload: bytes, replayed: bool) -> None:
        """The next batch in sequence."""
        if self._redactor is not None:
            payload = self._redactor.batch(payload)
        self._writer.write(Frame(self._index, self._clock(), seq, replayed, self._topic, payload))
        self.frames += 1

    def restarted(self) -> None:
        """What is taken from here on is another engine process's."""
        if self._redactor is not None:
            self._redactor.restarted()
        self._writer.write(Mark(self._index, self._clock(), "restarted"))

    def phase(self, phase: str, cause: str) -> None:
        """What the subscription is going through, if that changed."""
        if (phase, cause) != self._phase:
            self._phase = (phase, cause)
            self._writer.write(Mark(self._index, self._clock(), phase, cause))


# ---- redaction ----------------------------------------------------------------------------------------------------

_MEDIA: Final = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.STORAGE: "STORAGE"}
_NO_BATCH: Final = b"\xc1"
"""The one byte MessagePack never uses: a malformed batch, as it was one before redaction."""
Note = Literal["stored", "attached", "evicted", "detached"]
"""Why a redacted event is there: the engine said so, or a block's prefix came or went."""


class Redactor:
    """Turns batches of one stream, in order, into batches that give the same index and say nothing else."""

    def __init__(self, source: Source, rule: HashRule) -> None:
        self.source = msgspec.structs.replace(source, events="", hash_mode="engine", copy_mode="count", redacted=True)
        self._inventory = Inventory(
            source.namespace, rule=rule, hash_mode=source.hash_mode, copy_mode=source.copy_mode
        )
        self._shown: dict[BlockKey, int] = {}
        """Tier mask of each key, as events so far tell it."""

    def restarted(self) -> None:
        self._inventory.restart()
        self._inventory.settle()
        self._shown.clear()

    def batch(self, payload: bytes) -> bytes:
        """The redacted batch: same time and rank, and as many skipped events of the same weight."""
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            return _NO_BATCH
        named = {h for event in batch.events if isinstance(event, BlockRemoved) for h in event.hashes}
        going = {key for h in named if (node := self._inventory.node(h)) is not None for key in node.keys}
        stored = {h for e in batch.events if not isinstance(e, (BlockRemoved, AllBlocksCleared)) for h in e.hashes}
        delta = self._inventory.apply(batch)
        coming = {key for h in stored if (node := self._inventory.node(h)) is not None for key in node.keys}
        events: list[dict[str, Any]] = []
        if delta.reset:
            self._shown.clear()
            events.append({"type": "AllBlocksCleared"})
        for write in sorted(delta.writes, key=lambda w: w.depth):
            was = self._shown.pop(write.key, 0)
            if write.tiers:
                self._shown[write.key] = write.tiers
            for tier, medium in _MEDIA.items():
                bit = 1 << tier
                if write.tiers & bit and not was & bit:
                    _store(events, write, medium, self._inventory.block_size, write.key in coming)
                elif was & bit and not write.tiers & bit:
                    note: Note = "evicted" if write.key in going else "detached"
                    events.append(_removal(write.key, medium, note))
        # Kinds nobody knows are harmless, broken events are not; which one it was is all that is told.
        events += [{"type": "Unknown" if s.cause == "unknown_kind" else "BlockStored"} for s in batch.skipped]
        return _encode([batch.ts, events, batch.rank])


def _store(events: list[dict[str, Any]], write: BlockWrite, medium: str, size: int, named: bool) -> None:
    """Add one block, to the event before if it goes on there."""
    note: Note = "stored" if named else "attached"
    name, parent = int.from_bytes(write.key, "big"), None
    if write.parent is not None:
        parent = int.from_bytes(write.parent, "big")
    last = events[-1] if events else None
    if last and last.get("medium") == medium and last.get("note") == note and last["block_hashes"][-1] == parent:
        last["block_hashes"].append(name)
        last["token_ids"] += [0] * size
        return
    events.append(
        {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": parent,
            # The event stays well-formed for every decoder, and compresses to nothing.
            "token_ids": [0] * size,
            "block_size": size,
            "lora_id": None,
            "medium": medium,
            "note": note,
        }
    )


def _removal(key: BlockKey, medium: str, note: Note) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [int.from_bytes(key, "big")], "medium": medium, "note": note}


# ---- reading ------------------------------------------------------------------------------------------------------


class Damage(msgspec.Struct, frozen=True):
    """A place in a file that could not be read."""

    path: Path
    offset: int
    """Bytes before it."""
    kind: Literal["cut", "corrupt"]
    """cut: the file ends inside a chunk, as after a crash. corrupt: bytes are not what was written."""


class RecordingReader:
    """The entries of a recording, oldest first. Can be iterated any number of times."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """paths: the files of one recording, in order; a folder stands for all recordings in it, by name.

        Raises BadRecording if one cannot be opened, is no recording, or comes from a later version.
        """
        self.paths = [file for path in paths for file in _files(path)]
        for path in self.paths:
            with _opened(path) as file:
                _check(path, file.read(len(FIRST_LINE)))
        self.damage: list[Damage] = []
        """What the newest iteration had to leave out."""

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.paths)

    def __iter__(self) -> Iterator[Entry]:
        for entry, _ in self.with_progress():
            yield entry

    def with_progress(self) -> Iterator[tuple[Entry, int]]:
        """Entries, each with the bytes on disk read so far."""
        self.damage = []
        before = 0
        for path in self.paths:
            sources: dict[int, Source] = {}
            for offset, first, raw in self._chunks(path):
                for position, body in enumerate(_bodies(raw), first):
                    try:
                        record = _decode(body)
                    except msgspec.DecodeError:
                        raise BadRecording(f"{path}: written by a later version of metatrie") from None
                    if isinstance(record, Declared):
                        sources[record.index] = record.source
                    elif (source := sources.get(record.index)) is not None:
                        yield Entry(position, source, record), before + offset
            before += path.stat().st_size

    def _chunks(self, path: Path) -> Iterator[tuple[int, int, bytes]]:
        """(offset, position of the first record, raw bytes) of what can be read of each chunk."""
        with _opened(path) as file:
            offset = len(FIRST_LINE)
            while True:
                file.seek(offset)
                head = file.read(_HEADER_BYTES)
                if not head:
                    return
                if len(head) < _HEADER_BYTES:
                    self.damage.append(Damage(path, offset, "cut"))
                    return
                parsed = _parse(head)
                if parsed is None:
                    self.damage.append(Damage(path, offset, "corrupt"))
                    found = _next_header(file, offset + 1)
                    if found is None:
                        return
                    offset = found
                    continue
                packed_bytes, raw_bytes, checksum, first = parsed
                packed = file.read(packed_bytes)
                if len(packed) == packed_bytes and zlib.crc32(packed) == checksum:
                    yield offset, first, zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, raw_bytes)
                else:
                    self.damage.append(Damage(path, offset, "cut" if len(packed) < packed_bytes else "corrupt"))
                    yield offset, first, _as_far_as_it_goes(packed, raw_bytes)
                offset += _HEADER_BYTES + packed_bytes


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise BadRecording(f"{path}: no *{SUFFIX} in this folder")
        return found
    return [path]


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise BadRecording(f"{path}: {error.strerror}") from None


def _check(path: Path, line: bytes) -> None:
    # A file cut within its first line is a recording of nothing.
    if FIRST_LINE.startswith(line):
        return
    if line.startswith(FIRST_LINE[: FIRST_LINE.index(b",")]):
        raise BadRecording(f"{path}: written by a later version of metatrie")
    raise BadRecording(f"{path}: not a metatrie recording")


def _parse(head: bytes) -> tuple[int, int, int, int] | None:
    """Compressed bytes, raw bytes, checksum and first position; None if this is no header."""
    mark, packed, raw, checksum, first, _ = _HEADER.unpack_from(head)
    if mark != _MARK or _CRC.unpack_from(head, _HEADER.size)[0] != zlib.crc32(head[: _HEADER.size]):
        return None
    # The checksum held, so this is what was written; the bound is against files made to hurt.
    return (packed, raw, checksum, first) if raw <= _MAX_RAW and packed <= 2 * _MAX_RAW else None


def _next_header(file: BinaryIO, start: int) -> int | None:
    """Offset of the next header at or after `start`."""
    overlap, at = b"", start
    file.seek(start)
    while block := file.read(1 << 20):
        window = overlap + block
        base, found = at - len(overlap), window.find(_MARK)
        while found >= 0:
            here = file.tell()
            file.seek(base + found)
            head = file.read(_HEADER_BYTES)
            file.seek(here)
            if len(head) == _HEADER_BYTES and _parse(head) is not None:
                return base + found
            found = window.find(_MARK, found + 1)
        at += len(block)
        overlap = window[-(len(_MARK) - 1) :]
    return None


def _as_far_as_it_goes(packed: bytes, most: int) -> bytes:
    """What can be decoded of a cut or damaged chunk."""
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    raw = bytearray()
    try:
        for at in range(0, len(packed), _PIECE):
            raw += inflate.decompress(packed[at : at + _PIECE], max(1, most - len(raw)))
    except zlib.error:
        pass
    return bytes(raw)


def _bodies(raw: bytes) -> Iterator[bytes]:
    """Records that are whole, up to the first that is not."""
    at, end = 0, len(raw)
    while at + _PREFIX.size <= end:
        length, checksum = _PREFIX.unpack_from(raw, at)
        at += _PREFIX.size
        body = raw[at : at + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        yield body
        at += length


class FramesReader:
    """A capture in the frames format, as a recording: JSON lines, each a list of hex frames `[topic, seq, payload]`,
    plain or compressed with gzip.

    The format has no times, so the engine's own stand for the time of receipt, and no source, so that is given.
    """

    def __init__(self, path: Path, source: Source) -> None:
        """Raises BadRecording if the file cannot be opened."""
        self.paths = [path]
        self.source = source
        self.damage: list[Damage] = []
        with _opened(path) as file:
            self._compressed = file.read(2) == b"\x1f\x8b"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.paths[0].stat().st_size

    def __iter__(self) -> Iterator[Entry]:
        for entry, _ in self.with_progress():
            yield entry

    def with_progress(self) -> Iterator[tuple[Entry, int]]:
        """Entries, each with the bytes on disk read so far. Raises BadRecording where a line is no message."""
        path = self.paths[0]
        self.damage = []
        with _opened(path) as file:
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if self._compressed else file
            try:
                for position, line in enumerate(lines):
                    yield Entry(position, self.source, self._record(line, position)), file.tell()
            except EOFError:
                self.damage.append(Damage(path, self.size, "cut"))
            except (OSError, zlib.error):
                raise BadRecording(f"{path}: its compression is damaged") from None

    def _record(self, line: bytes, position: int) -> Frame | Malformed:
        try:
            frames = [bytes.fromhex(text) for text in msgspec.json.decode(line, type=list[str])]
        except (msgspec.MsgspecError, ValueError):
            raise BadRecording(f"{self.paths[0]}: line {position + 1} is no list of hex frames") from None
        if len(frames) != 3 or len(frames[1]) != 8:
            return Malformed(0, 0, frames)
        topic, seq, payload = frames
        try:
            at = int(decode_batch(payload).ts * 1e9)
        except MalformedBatch:
            at = 0
        return Frame(0, at, int.from_bytes(seq, "big"), False, topic, payload)


Recording = RecordingReader | FramesReader


def open_recording(paths: Sequence[Path], source: Source | None) -> Recording:
    """What the paths hold. source: for captures in the frames format, which name none.

    Raises BadRecording if they hold no recording, ConfigError if a capture comes without a source.
    """
    if not any(path.name.endswith((".jsonl", ".jsonl.gz")) for path in paths):
        return RecordingReader(paths)
    if len(paths) > 1:
        raise ConfigError("recording", "captures are read one at a time", "name one file")
    if source is None:
        raise ConfigError("model", "is not set", "a capture names no model; pass --model, --engine, --block-size")
    return FramesReader(paths[0], source)
