"""The recording's file: what is written is read, whatever happens to its tail, and to its middle."""

from __future__ import annotations

import itertools
import os
import random
import stat
import zlib
from pathlib import Path

import pytest
from debugging_world import MIXED, NAMES, RESETS, capture, frames_of, record, same_record, source_of
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.consumers.recording import (
    FIRST_LINE,
    Entry,
    Frame,
    FramesReader,
    Malformed,
    Mark,
    Recorder,
    RecordingReader,
    RecordingWriter,
    open_recording,
)
from metatrie.consumers.stream import Stream
from metatrie.proto.errors import BadRecording, ConfigError

HEADER = 32
"""Bytes before a chunk's own."""


def written(path: Path, frames: list[Frame], *, every: int) -> None:
    """A recording whose chunks hold `every` frames each."""
    with RecordingWriter(path) as writer:
        index = writer.declare(source_of(MIXED))
        assert index == 0
        for number, frame in enumerate(frames, 1):
            writer.write(frame)
            if number % every == 0:
                writer.flush()


def some_frames(count: int, seed: int = 1) -> list[Frame]:
    rng = random.Random(seed)
    return [Frame(0, 1_000 + i, i, False, b"t", rng.randbytes(rng.randrange(200))) for i in range(count)]


def chunks_of(raw: bytes) -> list[tuple[int, int]]:
    """(start, end) of every chunk, by the lengths in their headers, independently of the reader."""
    found, at = [], len(FIRST_LINE)
    while at < len(raw):
        end = at + HEADER + int.from_bytes(raw[at + 4 : at + 8], "little")
        found.append((at, end))
        at = end
    return found


def whole_records(raw: bytes, upto: int) -> int:
    """Records whose every byte can be decoded from the first `upto` bytes of a file."""
    count = 0
    for start, end in chunks_of(raw):
        body = zlib.decompressobj(-15).decompress(raw[min(start + HEADER, upto) : min(end, upto)])
        at = 0
        while at + 8 <= len(body):
            at += 8 + int.from_bytes(body[at : at + 4], "little")
            count += at <= len(body)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_is_recorded_frame_by_frame(tmp_path: Path, name: str) -> None:
    files = record(tmp_path / "a.mtrec", name)
    read = [entry for entry in RecordingReader(files) if not isinstance(entry.record, Mark)]
    original = list(capture(name))
    assert len(read) == len(original)
    assert all(map(same_record, read, original))
    assert read[0].source == source_of(name)
    assert stat.S_IMODE(os.stat(files[0]).st_mode) == 0o600


def test_a_recording_cut_at_any_byte_gives_every_record_before_the_cut(tmp_path: Path) -> None:
    frames, path = some_frames(24), tmp_path / "a.mtrec"
    written(path, frames, every=7)
    raw = path.read_bytes()
    reader_of_cut = tmp_path / "cut.mtrec"
    for cut in range(len(raw) + 1):
        reader_of_cut.write_bytes(raw[:cut])
        reader = RecordingReader([reader_of_cut])
        read = [entry.record for entry in reader]
        whole = max(0, whole_records(raw, cut) - 1)  # the source's own record comes first
        assert read == frames[:whole], cut
        edges = {len(FIRST_LINE), *(end for _, end in chunks_of(raw))}
        assert [d.kind for d in reader.damage] == ([] if cut in edges or cut < len(FIRST_LINE) else ["cut"]), cut


@settings(max_examples=60, deadline=None)
@given(share=st.floats(0, 1), name=st.sampled_from([MIXED, RESETS]))
def test_a_recorded_capture_cut_anywhere_is_a_prefix(
    tmp_path_factory: pytest.TempPathFactory, share: float, name: str
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (path,) = record(folder / "a.mtrec", name)
    raw, original = path.read_bytes(), list(RecordingReader([path]))
    cut = round(len(raw) * share)
    path.write_bytes(raw[:cut])
    read = list(RecordingReader([path]))
    assert read == original[: len(read)]
    assert len(read) == max(0, whole_records(raw, cut) - 1)


@settings(max_examples=80, deadline=None)
@given(at=st.integers(0), flip=st.integers(1, 255), seed=st.integers(0, 3))
def test_a_damaged_byte_costs_no_more_than_its_chunk(
    tmp_path_factory: pytest.TempPathFactory, at: int, flip: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("flip") / "a.mtrec"
    frames = some_frames(60, seed)
    written(path, frames, every=7)
    raw = bytearray(path.read_bytes())
    at = len(FIRST_LINE) + at % (len(raw) - len(FIRST_LINE))
    hit = next(i for i, (start, end) in enumerate(chunks_of(bytes(raw))) if start <= at < end)
    raw[at] ^= flip
    path.write_bytes(raw)
    reader = RecordingReader([path])
    read = list(reader)
    lost = set(range(hit * 7, hit * 7 + 7))
    intact = [frame for i, frame in enumerate(frames) if i not in lost]
    if hit == 0:
        # The first chunk says whose frames these are; without it nothing can be said of them.
        assert {entry.record.at for entry in read} <= {frame.at for frame in frames}
    else:
        assert [e.record for e in read if e.record.at - 1_000 not in lost] == intact
        assert all(e.record == frames[e.record.at - 1_000] for e in read)
        assert all(e.position == e.record.at - 1_000 + 1 for e in read), "positions hold across the damage"
    assert [damage.kind for damage in reader.damage] == ["corrupt"]


def test_files_rotate_by_size_and_the_oldest_go(tmp_path: Path) -> None:
    files = record(tmp_path / "a.mtrec", RESETS, max_bytes=20_000, keep=3)
    assert [path.name for path in files] == [path.name for path in sorted(tmp_path.iterdir())]
    assert len(files) == 3
    assert int(files[0].stem[-6:]) > 1, "older ones went"
    read = list(RecordingReader(files))
    assert list(RecordingReader([tmp_path])) == read, "a folder stands for its recordings, in order"
    original = list(capture(RESETS))
    tail = original[-len(read) :]
    assert all(map(same_record, read, tail))
    assert [b.position - a.position for a, b in itertools.pairwise(read)].count(1) >= len(read) - 3


def test_files_rotate_by_age(tmp_path: Path) -> None:
    now = 0.0
    with RecordingWriter(tmp_path / "a.mtrec", max_age_s=60, clock=lambda: now) as writer:
        writer.declare(source_of(MIXED))
        for frame in some_frames(4):
            writer.write(frame)
            now += 31
            writer.flush()
    assert [path.name for path in writer.files] == ["a-000001.mtrec", "a-000002.mtrec", "a-000003.mtrec"]
    assert [entry.record for entry in RecordingReader(writer.files)] == some_frames(4)


def test_nothing_is_ever_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.mtrec").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="there already"):
        RecordingWriter(tmp_path / "a.mtrec")
    with pytest.raises(ConfigError, match="recording"):
        RecordingWriter(tmp_path / "nowhere" / "a.mtrec")
    assert (tmp_path / "a.mtrec").read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"something else\n", "not a metatrie recording"),
        (b"metatrie recording, format 2\n", "later version"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, raw: bytes, why: str) -> None:
    path = tmp_path / "a.mtrec"
    path.write_bytes(raw)
    with pytest.raises(BadRecording, match=why):
        RecordingReader([path])
    with pytest.raises(BadRecording):
        RecordingReader([tmp_path / "missing.mtrec"])
    with pytest.raises(BadRecording, match="in this folder"):
        RecordingReader([_folder(tmp_path)])


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def test_a_chunk_is_cut_before_much_waits(tmp_path: Path) -> None:
    path = tmp_path / "a.mtrec"
    writer = RecordingWriter(path)
    writer.declare(source_of(MIXED))
    frame = Frame(0, 0, 0, False, b"", os.urandom(100_000))
    for _ in range(3):
        writer.write(frame)
    assert [entry.record for entry in RecordingReader([path])] == [frame] * 3, "readable before any flush"
    writer.write(frame)
    writer.close()
    writer.close()
    assert len(list(RecordingReader([path]))) == 4


def test_what_is_no_message_is_kept_verbatim(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a.mtrec") as writer:
        stream = Stream(replay=False, journal=Recorder(writer, source_of(MIXED)))
        stream.live([b"only", b"two"], 0.0)
        stream.live(frames_of(next(iter(capture(MIXED)))), 0.0)
    kinds = [entry.record for entry in RecordingReader(writer.files)]
    assert isinstance(kinds[0], Malformed)
    assert kinds[0].frames == [b"only", b"two"]
    assert isinstance(kinds[1], Frame)


def test_a_cut_capture_says_so_and_a_strange_one_is_refused(tmp_path: Path) -> None:
    whole = capture(MIXED)
    short = tmp_path / "cut.frames.jsonl.gz"
    short.write_bytes(whole.paths[0].read_bytes()[:20_000])
    reader = FramesReader(short, source_of(MIXED))
    read = list(reader)
    original = list(whole)
    assert 0 < len(read) < len(original)
    assert read == original[: len(read)]
    assert [damage.kind for damage in reader.damage] == ["cut"]
    strange = tmp_path / "strange.jsonl"
    strange.write_text("[1]\n")
    with pytest.raises(BadRecording, match="line 1"):
        list(FramesReader(strange, source_of(MIXED)))
    with pytest.raises(ConfigError, match="model"):
        open_recording([short], None)
    with pytest.raises(ConfigError, match="one at a time"):
        open_recording([short, short], source_of(MIXED))


def test_entries_carry_their_source_when_several_streams_share_a_file(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "a.mtrec") as writer:
        pair = [Recorder(writer, source_of(MIXED, name)) for name in ("a", "b")]
        for seq in range(3):
            for recorder in pair:
                recorder.taken(seq, b"", False)
    entries: list[Entry] = list(RecordingReader(writer.files))
    assert [(e.source.replica, e.record.seq) for e in entries if isinstance(e.record, Frame)] == [
        (name, seq) for seq in range(3) for name in ("a", "b")
    ]
