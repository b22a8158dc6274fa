"""Replay: the same index from a recording as from the engine, with or without faults, in process and over sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import aiohttp
import msgspec
import pytest
from debugging_world import (
    CAPTURES,
    MIXED,
    NAMES,
    NAMESPACE,
    RESETS,
    SCHEDULER,
    Process,
    capture,
    engine_of,
    eventually,
    metatrie,
    record,
    said,
    same_record,
    wait_until,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.consumers.consumer import ReplicaConfig, ReplicaConsumer
from metatrie.consumers.recording import Entry, Frame, Mark, RecordingReader, RecordingWriter
from metatrie.engines.rules import rule_for
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.events import BlockStored, decode_batch
from metatrie.scripts.record import record as record_live
from metatrie.scripts.replay import END, Faults, IndexFeed, Pace, Wires, publish, replay
from metatrie.scripts.timeline import Timeline, fingerprint


def truth(name: str) -> str:
    """Fingerprint of the picture at the end of a capture."""
    return fingerprint(Timeline.at(capture(name)).replicas[0].inventory.expected())


@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_capture_gives_a_byte_identical_index(tmp_path: Path, redis_url: str, name: str) -> None:
    """One index from the stream itself, one from a recording of it, on both backends."""
    recording = RecordingReader(record(tmp_path / "a.mtrec", name))
    for url in ("memory:", redis_url):
        contents = []
        for source in (capture(name), recording):
            store = await open_store(url)
            feed, timeline = IndexFeed(store), Timeline()
            try:
                for entry in source:
                    past, changes = timeline.feed(entry)
                    writer = await feed.take(past)
                    for change in changes:
                        writer.submit(change.delta, None)
                await feed.settle()
                held = await feed.held(past.source)
                contents.append(b"".join(key + bytes((held[key],)) for key in sorted(held)))
            finally:
                await feed.close()
                await store.close()
        assert contents[0] == contents[1]
        assert len(contents[0]) == 9 * past.inventory.index_blocks


@pytest.mark.parametrize("name", [SCHEDULER, "sglang-0.5.23-radix"])
def test_recorded_over_sockets_and_replayed_into_redis_the_index_is_the_same(
    tmp_path: Path, redis_url: str, name: str
) -> None:
    file = CAPTURES / f"{name}.frames.jsonl.gz"
    out, total = tmp_path / "live.mtrec", len(list(capture(name)))
    shape = ("--model", "m", "--engine", engine_of(name))
    local = "tcp://127.0.0.1:*"
    with (
        Process("replay", file, *shape, "--into", local, "--replay-endpoint", local, "--hold") as engine,
        Process(
            *("record", out, "--replica", "r", *shape, "--json"),
            *("--events", engine.ready["events"], "--replay", engine.ready["replay"]),
        ) as recorder,
    ):
        wait_until(lambda: len(_frames(out)) == total, "everything is in the file")
        done = json.loads(recorder.stop().splitlines()[-1])
        engine.stop()
    assert (done["frames"], done["lost_batches"], done["files"]) == (total, 0, [str(out)])
    assert done["bytes"] == out.stat().st_size
    assert all(map(same_record, _frames(out), capture(name)))
    for target in ("consumer", "memory:", redis_url):
        (outcome,) = said("replay", out, "--into", target, "--json")["replicas"]
        assert outcome["fingerprint"] == truth(name)
        assert outcome.get("index_fingerprint") in ((None,) if target == "consumer" else (truth(name),))
        assert (outcome["state"], outcome["batches"], outcome["replica"]) == ("exact", total, "r/0")


def _frames(path: Path) -> list[Entry]:
    return [entry for entry in RecordingReader([path]) if isinstance(entry.record, Frame)]


def test_a_recorder_killed_outright_leaves_what_it_had_flushed(tmp_path: Path) -> None:
    file, out = CAPTURES / f"{MIXED}.frames.jsonl.gz", tmp_path / "live.mtrec"
    total = len(list(capture(MIXED)))
    with (
        Process("replay", file, "--model", "m", "--into", "tcp://127.0.0.1:*", "--hold") as engine,
        Process("record", out, "--replica", "r", "--model", "m", "--events", engine.ready["events"]) as recorder,
    ):
        wait_until(lambda: len(_frames(out)) == total, "everything is flushed, while it runs")
        recorder.kill()
        engine.stop()
    reader = RecordingReader([out])
    assert [e.record.seq for e in reader if isinstance(e.record, Frame)] == list(range(total))
    assert not reader.damage


async def test_a_recorder_that_joins_late_asks_for_the_history(tmp_path: Path) -> None:
    """And marks what its subscription went through."""
    name, stop = MIXED, asyncio.Event()
    total, hold = len(list(capture(name))), asyncio.Event()
    ends = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"]
    serving = asyncio.create_task(
        publish(capture(name), events=ends[0], replay_endpoint=ends[1], speed=0.0, hold=hold)
    )
    writer = RecordingWriter(tmp_path / "a.mtrec")
    config = ReplicaConfig(replica="r", events=ends[0], replay=ends[1])
    recording = asyncio.create_task(record_live(writer, [config], NAMESPACE, redact=False, stop=stop))
    await eventually(lambda: writer.position >= total + 3, "the history and the marks are written")
    stop.set()
    done = await recording
    hold.set()
    assert await serving == total
    assert done.frames == total
    marks = [e.record for e in RecordingReader(writer.files) if isinstance(e.record, Mark)]
    assert marks[-1].what == "exact"


# Faults

faults = st.builds(
    Faults,
    drop=st.sampled_from([0.0, 0.05, 0.4]),
    duplicate=st.sampled_from([0.0, 0.3]),
    reorder=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([0.0, 0.5, 20.0]),
    restart=st.sampled_from([None, 0, 1, 70]),
    seed=st.integers(0, 10_000),
)


@settings(max_examples=40, deadline=None)
@given(faults=faults, name=st.sampled_from([MIXED, RESETS, "sglang-0.5.23-radix"]))
def test_whatever_is_lost_on_the_way_is_recovered_from_the_ring(faults: Faults, name: str) -> None:
    done = asyncio.run(replay(capture(name), faults=faults))
    (outcome,) = done.replicas
    assert outcome.fingerprint == truth(name)
    assert (outcome.state, outcome.lost_batches) == ("exact", 0)
    # A restart before anything was heard is none to the consumer.
    assert outcome.restarts <= (faults.restart is not None and faults.restart > 0)


async def test_an_injected_restart_is_noticed() -> None:
    (outcome,) = (await replay(capture(MIXED), faults=Faults(restart=70))).replicas
    assert (outcome.restarts, outcome.batches) == (1, 70 + len(list(capture(MIXED))))
    assert outcome.fingerprint == truth(MIXED)


@settings(max_examples=15, deadline=None)
@given(faults=faults)
def test_the_same_seed_gives_the_same_faults(faults: Faults) -> None:
    def arrivals(seed: int) -> list[tuple[int, bool]]:
        wires = Wires(msgspec.structs.replace(faults, seed=seed))
        entries = (entry for entry, _ in wires.arriving(capture(MIXED), END, None))
        return [(e.position, isinstance(e.record, Mark)) for e in entries]

    assert arrivals(faults.seed) == arrivals(faults.seed)
    if faults.drop >= 0.4:
        assert arrivals(faults.seed) != arrivals(faults.seed + 1)


async def test_without_a_ring_what_is_lost_stays_lost_and_says_so() -> None:
    (outcome,) = (await replay(capture(MIXED), faults=Faults(drop=0.1, seed=1, ring=0))).replicas
    assert (outcome.state, outcome.cause) == ("degraded", "gap")
    assert outcome.lost_batches > 10
    assert outcome.batches + outcome.lost_batches >= len(list(capture(MIXED))) - 3


async def test_each_fault_does_what_it_says() -> None:
    def arrive(**kind: float) -> list[int]:
        wires = Wires(Faults(seed=3, **kind))  # type: ignore[arg-type]  # one keyword of several types
        return [e.position for e, _ in wires.arriving(capture(MIXED), END, None)]

    plain = arrive()
    assert plain == list(range(len(plain)))
    dropped = arrive(drop=0.2)
    assert 0.6 * len(plain) < len(dropped) < 0.95 * len(plain)
    assert dropped == sorted(dropped)
    doubled = arrive(duplicate=0.2)
    assert sorted(set(doubled)) == plain
    assert len(doubled) > 1.05 * len(plain)
    swapped = arrive(reorder=0.2)
    assert sorted(swapped) == plain
    assert swapped != plain
    assert all(abs(at - position) <= 1 for at, position in enumerate(swapped))
    delayed = arrive(delay_s=5.0)
    assert delayed == plain, "late, but in order"
    again = arrive(restart=10)
    assert again[:10] == plain[:10]
    assert again[11:] == plain, "after the restart everything comes again"


@pytest.mark.parametrize("restart", [None, 40])
async def test_a_live_consumer_recovers_from_a_faulty_replayed_engine(tmp_path: Path, restart: int | None) -> None:
    """The real thing: PUB and ROUTER sockets on one side, subscriber, stream, inventory and index on the other."""
    ends = [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"]
    hold = asyncio.Event()
    plan = Faults(drop=0.15, duplicate=0.1, reorder=0.1, restart=restart, seed=5)
    last = [e.position for e, _ in Wires(plan).arriving(capture(MIXED), END, None)][-1]
    assert last == len(list(capture(MIXED))) - 1, "a lost tail would be noticed with the next batch only"
    serving = asyncio.create_task(
        publish(capture(MIXED), events=ends[0], replay_endpoint=ends[1], faults=plan, speed=0.0, hold=hold)
    )
    store = MemoryStore()
    index = await store.open(NAMESPACE)
    config = ReplicaConfig(replica="r", events=ends[0], replay=ends[1])
    consumer = ReplicaConsumer(config, index, rule=rule_for("vllm"))
    task = asyncio.create_task(consumer.run())
    try:
        await eventually(
            lambda: consumer.stream.expected == last + 1 and consumer.writer.idle and not consumer.cause(),
            "everything was heard, or asked for again",
        )
        assert fingerprint(consumer.inventory.expected()) == truth(MIXED)
        claim = consumer.writer.claim
        assert claim is not None
        assert fingerprint(await index.held(claim.incarnation)) == truth(MIXED)
    finally:
        hold.set()
        task.cancel()
        await asyncio.gather(task, serving, return_exceptions=True)


async def test_entries_come_at_the_recorded_pace() -> None:
    now, slept = 100.0, []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    pace = Pace(10.0, clock=lambda: now, sleep=sleep)
    for at in (5_000_000_000, 6_000_000_000, 6_000_000_000, 4_000_000_000, 15_000_000_000):
        await pace.wait(at)
    assert slept == pytest.approx([0.0, 0.1, 0.0, 0.0, 0.9]), "ten times as fast; a clock set back does not stall it"
    slept.clear()
    for at in range(1000):
        await Pace(0.0, clock=lambda: now, sleep=sleep).wait(at * 10**9)
    assert not any(slept), "as fast as possible"


# The command


def test_the_command_looks_into_the_past(tmp_path: Path) -> None:
    (path,) = record(tmp_path / "a.mtrec", MIXED)
    prompt = tmp_path / "prompt.json"
    seq, tokens = next(
        (entry.record.seq, event.tokens)
        for entry in list(capture(MIXED))[40:]
        for event in _stored(entry)
        if event.parent is None and len(event.hashes) >= 3 and not event.lora_name and not event.extra_keys
    )
    prompt.write_text(json.dumps({"token_ids": tokens}))
    whole = said("replay", path, "--json")
    assert whole["replicas"][0]["fingerprint"] == truth(MIXED)
    assert whole["block_events"] > 500
    part = said("replay", path, "--until", "20", "--json")
    assert part["replicas"][0]["next_seq"] == 21
    history = said("replay", path, "--history", prompt, "--json")
    first = next(one for one in history if one["what"] == "attached" and one["seq"] == seq)
    (found,) = said("replay", path, "--query", prompt, "--at", seq, "--json")
    assert (found["reason"], found["matched_blocks"]) == ("whole", len(tokens) // 16)
    assert found["reusable_tokens"] == (len(tokens) - 1) // 16 * 16, "an engine computes at least one token"
    (found,) = said("replay", path, "--query", prompt, "--at", f"#{first['position'] - 1}", "--json")
    assert found["matched_blocks"] == first["depth"], "the first block that came with it was the first missing"
    assert found["block"] == first["block"]
    block = said("replay", path, "--history", first["block"], "--json")
    assert [one for one in history if one.get("block") in (first["block"], None)] == block
    (change,) = said("replay", path, "--diff", "20", "60", "--json")
    assert change["gained"]
    (same,) = said("replay", path, "--diff", "end", f"{path}@end", "--json")
    assert (same["gained"], same["lost"], same["moved"]) == ([], [], [])
    people = metatrie("replay", path, "--history", prompt).stdout
    assert "attached" in people
    assert "the engine, in gpu memory" in people


def _stored(entry: Entry) -> list[BlockStored]:
    assert isinstance(entry.record, Frame)
    return [e for e in decode_batch(entry.record.payload).events if isinstance(e, BlockStored)]


async def test_a_recording_is_compared_with_a_live_index_and_a_live_sidecar(tmp_path: Path, redis_url: str) -> None:
    file = CAPTURES / f"{MIXED}.frames.jsonl.gz"
    shape = ("--model", "m")
    (path,) = record(tmp_path / "a.mtrec", MIXED)
    local = "tcp://127.0.0.1:*"
    total = len(list(capture(MIXED)))
    with (
        Process("replay", file, *shape, "--into", local, "--replay-endpoint", local, "--hold") as engine,
        Process(
            *("sidecar", "--redis", redis_url, "--port", "0", "--replica", "r", *shape),
            *("--events", engine.ready["events"], "--replay", engine.ready["replay"]),
        ) as sidecar,
        Process("serve", "--port", "0"),
    ):
        async with aiohttp.ClientSession() as session, asyncio.timeout(30):
            for _ in itertools.count():
                async with session.get(f"{sidecar.ready['url']}/v1/inventory") as response:
                    inventory = await response.json()
                if inventory["next_seq"] == total and not inventory["pending"]:
                    break
                await asyncio.sleep(0.02)
        for live in (redis_url, sidecar.ready["url"]):
            (one,) = await asyncio.to_thread(said, "replay", path, "--diff", "end", live, "--json")
            assert (one["gained"], one["lost"], one["moved"], one["after"]) == ([], [], [], inventory["total"])
            (one,) = await asyncio.to_thread(said, "replay", path, "--diff", "20", live, "--json")
            assert one["gained"]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--until", "yesterday"], "point"),
        (["--speed", "0"], "speed"),
        (["--into", "gopher://x"], "scheme"),
        (["--into", "tcp://256.0.0.1:1"], "into"),
        (["--history", "xyz"], "16 hex"),
        (["--diff", "1", "nonsense"], "point"),
        (["--history", "12", "--diff", "1", "2"], "exclude"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, argv: list[str], named: str) -> None:
    (path,) = record(tmp_path / "a.mtrec", "vllm-0.33.0-pool-dup")
    done = metatrie("replay", path, *argv)
    assert done.returncode != 0
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.mtrec").write_text("hello, world")
    done = metatrie("replay", tmp_path / "x.mtrec")
    assert done.returncode != 0
    assert "x.mtrec" in done.stderr
    assert "Traceback" not in done.stderr
