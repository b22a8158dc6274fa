"""`metatrie record`: what engines publish, into a file. Needs no store, and changes nothing at the engine.

One subscription per replica, of the consumer's own kind: it asks for what it missed, and so records streams that are
as complete as the engine's replay ring allows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console

from ..consumers.consumer import ReplicaConfig
from ..consumers.recording import SUFFIX, Recorder, RecordingWriter, Source
from ..consumers.stream import Action, Stream
from ..consumers.subscriber import Subscriber
from ..engines.rules import rule_for
from ..proto.errors import ConfigError
from ..proto.hashing import Namespace
from .cli import (
    common_options,
    declared_namespace,
    followed_replicas,
    run_process,
    say_ready,
    stream_options,
)

FLUSH_S: Final = 0.5
"""A kill -9 loses at most what came in this time."""
SYNC_S: Final = 5.0
"""A power failure loses at most what came in this time."""
REPORT_S: Final = 10.0


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording came to."""

    files: list[str]
    frames: int
    bytes: int
    lost_batches: int
    """Published, and recovered from no replay."""


async def record(
    writer: RecordingWriter,
    replicas: Sequence[ReplicaConfig],
    namespace: Namespace,
    *,
    redact: bool,
    stop: asyncio.Event,
    duration_s: float | None = None,
    console: Console | None = None,
) -> Recorded:
    """Follow the replicas' streams until `stop` is set or `duration_s` is over. Raises OSError when the disk is full;
    what was written stays readable."""
    pairs: list[tuple[Recorder, Stream]] = []
    subscribers = []
    for config in replicas:
        source = Source(
            replica=config.replica,
            dp_rank=config.dp_rank,
            engine=config.engine,
            namespace=namespace,
            events=config.events,
            hash_mode=config.hash_mode,
            copy_mode=config.copy_mode,
        )
        recorder = Recorder(writer, source, redact=rule_for(config.engine) if redact else None)
        stream = Stream(replay=config.replay is not None, dp_rank=config.dp_rank, journal=recorder)
        pairs.append((recorder, stream))
        subscribers.append(
            Subscriber(
                stream,
                events=config.events,
                replay=config.replay,
                topic=config.topic,
                handle=partial(_note_phase, recorder, stream),
            )
        )

    async def keep() -> None:
        """Flush, sync and report, each in its own time."""
        synced = reported = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            for recorder, stream in pairs:
                _note_phase(recorder, stream, ())
            writer.flush()
            now = time.monotonic()
            if now - synced >= SYNC_S:
                synced = now
                await asyncio.to_thread(writer.sync)
            if console is not None and now - reported >= REPORT_S:
                reported = now
                console.print(_line(pairs, writer), highlight=False)

    tasks = [asyncio.create_task(work) for work in (keep(), stop.wait(), *(s.run() for s in subscribers))]
    try:
        done, _ = await asyncio.wait(tasks, timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        writer.close()
    return Recorded(
        files=[str(path) for path in writer.files],
        frames=sum(recorder.frames for recorder, _ in pairs),
        bytes=writer.bytes,
        lost_batches=sum(stream.stats.gap_batches for _, stream in pairs),
    )


def _note_phase(recorder: Recorder, stream: Stream, actions: Sequence[Action]) -> None:
    """What a consumer would do with the batches is of no interest here: the journal has them."""
    recorder.phase(stream.phase.value, stream.cause)


def _line(pairs: Sequence[tuple[Recorder, Stream]], writer: RecordingWriter) -> str:
    frames = sum(recorder.frames for recorder, _ in pairs)
    states = ", ".join(
        f"{count} {phase}" for phase, count in _tally([stream.phase.value for _, stream in pairs]).items()
    )
    return f"{frames:,} batches, {writer.bytes / 1e6:,.1f} MB in {len(writer.files)} files; {states}"


def _tally(values: Sequence[str]) -> dict[str, int]:
    return {value: values.count(value) for value in dict.fromkeys(values)}


@click.command("record")
@common_options
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@stream_options
@click.option("--redact", is_flag=True, help="Replace token ids, adapters, salts and media by canonical block keys.")
@click.option("--max-mb", type=click.FloatRange(0.001), help="Begin a new file (OUT-000001…) beyond this size.")
@click.option("--max-minutes", type=click.FloatRange(0.001), help="Begin a new file after so many minutes.")
@click.option("--keep", type=click.IntRange(1), help="With several files: leave the newest so many on disk.")
@click.option("--duration-s", type=click.FloatRange(0.001), help="Stop after so many seconds; else when interrupted.")
@click.option("--json", "as_json", is_flag=True, help="Print what was recorded as JSON on standard output.")
@click.pass_context
def command(
    context: click.Context,
    /,
    log_level: str,
    out: Path,
    redact: bool,
    max_mb: float | None,
    max_minutes: float | None,
    keep: int | None,
    duration_s: float | None,
    as_json: bool,
    model: str | None,
    block_size: int,
    hash_seed: str,
    **options: Any,
) -> None:
    """Write what an engine publishes to OUT, until interrupted. Many engines: the file's [[replicas]] table.

    A recording holds token ids, that is, what users wrote; it is readable by its owner only. With --redact it holds
    block keys instead, and can be given away.
    """
    namespace = declared_namespace(context, model=model, block_size=block_size, hash_seed=hash_seed)
    replicas = followed_replicas(context, **options)
    path = out if out.suffix else out.with_suffix(SUFFIX)
    console = Console(stderr=True)

    async def run(stop: asyncio.Event) -> None:
        writer = RecordingWriter(
            path,
            max_bytes=None if max_mb is None else int(max_mb * 1e6),
            max_age_s=None if max_minutes is None else max_minutes * 60,
            keep=keep,
        )
        say_ready("record", file=str(writer.files[0]))
        try:
            done = await record(
                writer, replicas, namespace, redact=redact, stop=stop, duration_s=duration_s, console=console
            )
        except OSError as error:
            raise ConfigError(
                "recording", f"cannot be written any more ({error.strerror})", "free the disk"
            ) from None
        console.print(f"{done.frames:,} batches, {done.bytes / 1e6:,.2f} MB; {done.lost_batches:,} batches lost")
        if as_json:
            print(msgspec.json.encode(done).decode())

    run_process(log_level, run)
