"""What the tests of this folder share: the recorded captures as sources and recordings, and processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from metatrie.consumers.recording import (
    Entry,
    Frame,
    FramesReader,
    Malformed,
    Recorder,
    RecordingWriter,
    Source,
)
from metatrie.consumers.stream import Stream
from metatrie.engines.rules import rule_for
from metatrie.proto.hashing import Namespace

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
NAMES = sorted(path.name.removesuffix(".frames.jsonl.gz") for path in CAPTURES.glob("*.frames.jsonl.gz"))
MIXED = "vllm-0.33.0-pool-mixed"
SCHEDULER = "vllm-0.33.0-scheduler"
RESETS = "vllm-0.33.0-scheduler-resets"
NAMESPACE = Namespace(model="m")


def engine_of(name: str) -> str:
    return "sglang-dynamo" if "dynamo" in name else "sglang" if "sglang" in name else "vllm"


def source_of(name: str, replica: str = "r") -> Source:
    return Source(replica=replica, engine=engine_of(name), namespace=NAMESPACE)


def capture(name: str, replica: str = "r") -> FramesReader:
    return FramesReader(CAPTURES / f"{name}.frames.jsonl.gz", source_of(name, replica))


def frames_of(entry: Entry) -> list[bytes]:
    record = entry.record
    assert isinstance(record, Frame)
    return [record.topic, record.seq.to_bytes(8, "big"), record.payload]


def record(path: Path, name: str, *, redact: bool = False, **options: Any) -> list[Path]:
    """A capture as `metatrie record` would have written it."""
    ticks = iter(range(1_700_000_000_000_000_000, 2_000_000_000_000_000_000, 1_000_000))
    with RecordingWriter(path, **options) as writer:
        rule = rule_for(engine_of(name)) if redact else None
        recorder = Recorder(writer, source_of(name), redact=rule, clock=lambda: next(ticks))
        stream = Stream(replay=False, journal=recorder)
        for entry in capture(name):
            stream.live(frames_of(entry), 0.0)
            if options:
                writer.flush()
    return writer.files


def same_record(one: Entry, other: Entry) -> bool:
    """Equal but for the time."""
    a, b = one.record, other.record
    if isinstance(a, Frame) and isinstance(b, Frame):
        return (a.seq, a.topic, a.payload) == (b.seq, b.topic, b.payload)
    return isinstance(a, Malformed) and isinstance(b, Malformed) and a.frames == b.frames


def metatrie(*argv: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """One command, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "metatrie", *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=90,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
    )


def said(*argv: object) -> Any:
    """What a command printed as JSON; the last document, if processes announced themselves before."""
    done = metatrie(*argv)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    return json.loads(text if text[0] == "[" else text[text.rindex("\n{") + 1 :] if "\n{" in text else text)


class Process:
    """A command that runs until it is told to stop. Its first line says where it serves."""

    def __init__(self, *argv: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metatrie", *map(str, argv)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.process.communicate()[1])
        self.ready: dict[str, Any] = json.loads(line)

    def stop(self) -> str:
        """Ask it to end; returns the rest of its output."""
        self.process.terminate()
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err
        return out

    def errors(self) -> str:
        """End it, and return what it said on standard error."""
        self.process.kill()
        return self.process.communicate(timeout=30)[1]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


async def eventually(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.01)


def positions(entries: Iterable[Entry]) -> Sequence[int]:
    return [entry.position for entry in entries]
