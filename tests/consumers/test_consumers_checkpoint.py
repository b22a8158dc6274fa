"""Checkpoints: what is saved is what is resumed, and nothing else is ever taken for one."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from consumer_world import Wild
from metatrie.consumers.checkpoint import FIRST_LINE, Checkpoint, CheckpointFile
from metatrie.consumers.inventory import Inventory, InventoryState
from metatrie.consumers.stream import Apply, Phase, Position, RequestReplay, Restarted, Stream
from metatrie.engines.rules import rule_for
from metatrie.proto.errors import BadCheckpoint, ConfigError
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import ReplicaRef

NAMESPACE = Namespace(model="m", block_size=16)
REF = ReplicaRef("r/1", 3)


def lived(seed: int, batches: int, *, page: int = 16) -> tuple[Inventory, Wild]:
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    engine = Wild(random.Random(seed), page=page, hybrid=seed % 2 == 0)
    for _ in range(batches):
        inventory.apply(engine.batch())
    return inventory, engine


def checkpoint(inventory: Inventory) -> Checkpoint:
    return Checkpoint(
        namespace=NAMESPACE.id,
        replica=REF.replica,
        dp_rank=REF.dp_rank,
        engine="vllm",
        hash_mode="auto",
        copy_mode="count",
        position=Position(7, 100, 42, ""),
        inventory=inventory.state(),
    )


def resumed(state: InventoryState) -> Inventory:
    inventory = Inventory(NAMESPACE, rule=rule_for("vllm"))
    inventory.restore(state)
    inventory.settle()
    return inventory


def pictures(inventory: Inventory) -> Any:
    return (
        inventory.expected(),
        {w.key: w for w in inventory.attached_writes()},
        {key: dict(table) for key, table in inventory.tables().items() if table},
        (inventory.copies, inventory.held, inventory.attached, inventory.nodes, inventory.parity, inventory.flaws),
    )


# Inventory


@pytest.mark.parametrize("page", [4, 16, 64])
@pytest.mark.parametrize("seed", range(8))
def test_a_restored_inventory_is_the_same_and_stays_the_same(seed: int, page: int, tmp_path: Path) -> None:
    original, engine = lived(seed, 60, page=page)
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    assert file.acquire()
    file.save(checkpoint(original))
    loaded = file.load()
    assert loaded is not None
    copy = resumed(loaded.inventory)
    assert pictures(copy) == pictures(original)
    for _ in range(60):
        batch = engine.batch()
        assert {w.key: w for w in copy.apply(batch).writes} == {w.key: w for w in original.apply(batch).writes}
    assert pictures(copy) == pictures(original)
    copy.apply(engine.empty())
    assert (copy.copies, copy.expected()) == (0, {})


def test_a_saved_state_does_not_change_with_the_inventory() -> None:
    inventory, engine = lived(3, 30)
    state = inventory.state()
    encoded = msgspec.msgpack.encode(state)
    for _ in range(30):
        inventory.apply(engine.batch())
    assert msgspec.msgpack.encode(state) == encoded


@pytest.mark.parametrize("how", ["twice", "orphan"])
def test_a_state_that_contradicts_itself_is_refused_whole(how: str) -> None:
    inventory, _ = lived(5, 30)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(inventory.state()), type=InventoryState)
    nodes = state.nodes
    child = next(node for node in nodes if node.parent is not None)
    nodes = [*nodes, nodes[0]] if how == "twice" else [node for node in nodes if node.hash != child.parent]
    other, _ = lived(6, 30)
    before = pictures(other)
    with pytest.raises(ValueError, match=r"twice|missing"):
        other.restore(msgspec.structs.replace(state, nodes=nodes))
    other.settle()
    assert pictures(other) == before


# File


def test_nothing_saved_is_nothing_found(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path / "a" / "b", NAMESPACE.id, REF)
    assert file.load() is None


def test_the_newest_checkpoint_is_found_and_private(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    assert file.acquire()
    for batches in (10, 20):
        newest = checkpoint(lived(1, batches)[0])
        assert file.save(newest) > 0
    assert msgspec.msgpack.encode(file.load()) == msgspec.msgpack.encode(newest)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".checkpoint", ".lock"]
    assert "r/1" not in file.path.name


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_file_is_refused(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    assert file.acquire()
    file.save(checkpoint(lived(1, 10)[0]))
    raw = bytearray(file.path.read_bytes())
    match rng.randrange(3):
        case 0:
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            del raw[rng.randrange(len(raw)) :]
        case 2:
            raw += b"\0"
    file.path.write_bytes(raw)
    with pytest.raises(BadCheckpoint):
        file.load()


def test_a_file_of_another_version_is_refused_even_if_intact(tmp_path: Path) -> None:
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    body = msgspec.msgpack.encode({"not": "one"})
    file.path.write_bytes(FIRST_LINE + hashlib.sha256(body).digest() + body)
    with pytest.raises(BadCheckpoint, match="version"):
        file.load()


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    assert file.acquire()
    old = checkpoint(lived(1, 10)[0])
    file.save(old)
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        file.save(checkpoint(lived(1, 20)[0]))
    assert msgspec.msgpack.encode(file.load()) == msgspec.msgpack.encode(old)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".checkpoint", ".lock"]


def test_a_directory_that_cannot_be_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        CheckpointFile(tmp_path / "file" / "below", NAMESPACE.id, REF)


# Lock


def test_one_process_at_a_time_goes_by_the_name_in_the_file(tmp_path: Path) -> None:
    first, second = (CheckpointFile(tmp_path, NAMESPACE.id, REF) for _ in range(2))
    assert first.acquire()
    assert first.acquire()
    assert not second.acquire()
    assert first.owner != second.owner
    first.release()
    assert second.acquire()
    assert second.owner == first.owner, "the registration is taken back under the name it was claimed with"


def test_whoever_claimed_before_it_got_the_lock_keeps_its_name(tmp_path: Path) -> None:
    first, second, third = (CheckpointFile(tmp_path, NAMESPACE.id, REF) for _ in range(3))
    assert first.acquire()
    first.release()
    name = second.owner
    assert second.acquire(keep_owner=True)
    assert second.owner == name
    second.release()
    assert third.acquire()
    assert third.owner == name


def test_ranks_and_replicas_do_not_share_a_file(tmp_path: Path) -> None:
    refs = [ReplicaRef("a"), ReplicaRef("a", 1), ReplicaRef("b")]
    files = [CheckpointFile(tmp_path, NAMESPACE.id, ref) for ref in refs]
    assert all(file.acquire() for file in files)
    assert len({file.path for file in files}) == 3


def _hold(directory: str, ready: Any) -> None:
    file = CheckpointFile(Path(directory), NAMESPACE.id, REF)
    ready.put((file.acquire(), file.owner))
    multiprocessing.Event().wait()


def test_a_killed_process_gives_up_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    process = context.Process(target=_hold, args=(str(tmp_path), ready), daemon=True)
    process.start()
    held, owner = ready.get(timeout=60)
    file = CheckpointFile(tmp_path, NAMESPACE.id, REF)
    assert held
    assert not file.acquire()
    process.kill()
    process.join()
    assert file.acquire()
    assert file.owner == owner
    ready.close()


# Stream


def _batch(seq: int, salt: int = 0) -> bytes:
    return msgspec.msgpack.encode([1e9 + seq + salt * 1000, [["Novelty", seq]], 0])


def _position(expected: int, cause: str = "") -> Position:
    stream = Stream(replay=False)
    stream.connected(0)
    for seq in range(expected):
        stream.live([b"", seq.to_bytes(8, "big"), _batch(seq)], 0)
    position = stream.position
    assert position is not None
    return msgspec.structs.replace(position, cause=cause)


def _resumed(expected: int, cause: str = "") -> tuple[Stream, int]:
    stream = Stream(replay=True)
    assert stream.position is None
    stream.resume(_position(expected, cause))
    (ask,) = stream.connected(0)
    assert isinstance(ask, RequestReplay)
    assert ask.start == expected - 1, "the last batch proves who answers"
    return stream, ask.request


def _reply(stream: Stream, request: int, *seqs: int, salt: int = 0) -> list[Any]:
    actions: list[Any] = []
    for seq in seqs:
        actions += stream.replayed([b"", seq.to_bytes(8, "big"), _batch(seq, salt)], request, 0)
    return actions + stream.replayed([b"", b"\xff" * 8, b""], request, 0)


def test_a_resumed_stream_goes_on_where_it_was() -> None:
    stream, request = _resumed(5)
    actions = _reply(stream, request, 4, 5, 6)
    assert [a.seq for a in actions if isinstance(a, Apply)] == [5, 6]
    assert (stream.phase, stream.expected) == (Phase.EXACT, 7)


def test_a_resumed_stream_recognises_another_process() -> None:
    for seqs, salt in (((4, 5), 1), ((), 0), ((0, 1), 0)):
        stream, request = _resumed(5)
        assert Restarted() in _reply(stream, request, *seqs, salt=salt)
        assert stream.phase is Phase.SYNCING


def test_a_resumed_stream_past_the_ring_is_degraded_never_quietly_wrong() -> None:
    stream, request = _resumed(5)
    asked = [a for a in _reply(stream, request, 6, 7) if isinstance(a, RequestReplay)]
    assert len(asked) == 1, "the replay may have lost it"
    _reply(stream, asked[0].request, 6, 7)
    assert (stream.phase, stream.expected) == (Phase.DEGRADED, 8)


def test_what_was_lost_before_stays_lost() -> None:
    stream, request = _resumed(5, "gap")
    assert (stream.phase, stream.cause) == (Phase.DEGRADED, "gap")
    _reply(stream, request, 4, 5)
    assert (stream.phase, stream.cause) == (Phase.DEGRADED, "gap")
    assert stream.position is not None
    assert stream.position.cause == "gap"
