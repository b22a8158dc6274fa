"""A consumer's local file: everything it knows, so that it can resume without the engine restarting.

What is in it. The stream's position and the whole inventory, both of the same moment: engine hash, canonical hash,
parent, tiers and copies of every block. From there a replay brings it up to date, and proves by the last batch that
the same engine process still answers; if it does not, or if the replay no longer reaches back so far, the stream
notices as it always does. A store cannot replace this file: copies, engine hashes and detached blocks are not in it.

A resumed consumer always publishes a new incarnation, so the file need not agree with what the store had when it was
written, and one may be written while the store is away.

How it is written. To a temporary file beside it, synced, then renamed over the old one: a crash leaves the old or
the new one. A digest over all of it tells damage; a damaged or foreign file is refused, and the consumer starts from
nothing. Token ids of blocks that still wait for their parent are in it, so it is readable by its owner only.

Who may use it. Whoever holds an exclusive lock beside it. With the lock comes the owner name under which the replica
was claimed before, so a consumer that was killed takes its own registration back at once; the kernel drops the lock
with the process, however it ended. A second consumer on the same directory, or one that is merely stopped and not
dead, therefore never shares a name with the first: the later one stands by.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
import uuid
from pathlib import Path
from typing import Final

import msgspec

from ..proto.errors import BadCheckpoint, ConfigError
from ..proto.hashing import NamespaceId
from ..proto.index import ReplicaRef
from .inventory import CopyMode, HashMode, InventoryState
from .stream import Position

FIRST_LINE: Final = b"metatrie checkpoint, format 1\n"
MAX_BYTES: Final = 4 << 30
"""Larger files are not read; four million blocks take about 1 GB."""
_DIGEST_BYTES: Final = 32
_OWNER_CHARS: Final = 32


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Everything one consumer knows, at one moment."""

    namespace: NamespaceId
    replica: str
    dp_rank: int
    engine: str
    hash_mode: HashMode
    copy_mode: CopyMode
    position: Position
    inventory: InventoryState


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Checkpoint).decode


class CheckpointFile:
    """The checkpoint of one replica in one directory, and the lock that says who may use it."""

    def __init__(self, directory: Path, namespace: NamespaceId, ref: ReplicaRef) -> None:
        """Creates the directory. Raises ConfigError if it cannot be used."""
        name = hashlib.sha256(ref.replica.encode()).hexdigest()[:16]
        self.path = directory / f"{namespace}-{name}-{ref.dp_rank}.checkpoint"
        self.owner = uuid.uuid4().hex
        """The name to claim under: a fresh one, or once `acquire` succeeded the one that comes with the file."""
        self._lock: int | None = None
        self._saving = threading.Lock()
        """Saves run in threads, and the last one of a process may meet another still under way."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("checkpoint_dir", f"cannot be created ({error.strerror})", "name another") from None

    @property
    def held(self) -> bool:
        """The lock is ours."""
        return self._lock is not None

    def acquire(self, *, keep_owner: bool = False) -> bool:
        """Try to get the lock, and with it the owner name. Raises ConfigError if the directory cannot be written.

        keep_owner: we claimed under our own name already, so that is the one to come with the file from now on.
        """
        if self._lock is not None:
            return True
        try:
            lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("checkpoint_dir", f"cannot be written ({error.strerror})", "name another") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            known = os.read(lock, _OWNER_CHARS + 1).decode("ascii", "replace")
            if not keep_owner and len(known) == _OWNER_CHARS and known.isalnum():
                self.owner = known
            else:
                os.ftruncate(lock, 0)
                os.pwrite(lock, self.owner.encode(), 0)
        except OSError:  # somebody else has it, or the file system knows no locks
            os.close(lock)
            return False
        self._lock = lock
        return True

    def release(self) -> None:
        """Give up the lock. Idempotent; waits for a save under way."""
        with self._saving:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def load(self) -> Checkpoint | None:
        """What was saved last; None if nothing was. Raises BadCheckpoint for anything but an intact file."""
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise BadCheckpoint("is larger than any we write")
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadCheckpoint(f"cannot be read ({error.strerror})") from None
        body = memoryview(raw)[len(FIRST_LINE) + _DIGEST_BYTES :]
        if not raw.startswith(FIRST_LINE):
            raise BadCheckpoint("is none of this version")
        if hashlib.sha256(body).digest() != raw[len(FIRST_LINE) : len(FIRST_LINE) + _DIGEST_BYTES]:
            raise BadCheckpoint("is damaged")
        try:
            return _decode(body)
        except msgspec.DecodeError:
            raise BadCheckpoint("is none of this version") from None

    def save(self, checkpoint: Checkpoint) -> int:
        """Replace the file; needs the lock. Returns its size. Raises OSError, with the old file in place."""
        body = _encode(checkpoint)
        with self._saving:
            self._replace(body)
        return len(body)

    def _replace(self, body: bytes) -> None:
        assert self._lock is not None, "only the holder of the lock may save"
        temporary = self.path.with_suffix(".new")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(FIRST_LINE)
                file.write(hashlib.sha256(body).digest())
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
