"""What the router decided lately, and what became of it: for explaining requests after the fact.

Kept of a decision are lengths, block keys, its candidates and what the policy noted, never token ids, prompts or
salts; an explanation is put together when somebody asks. A key is a hash: it tells whether two prompts share a
prefix, so only trusted callers may read this.

Bounds: the newest `capacity` decisions, and of their keys MAX_KEY_BYTES and of their candidates MAX_CANDIDATES in
all, the oldest going first; of a decision its keys as far as one block past the deepest match. Told of it are LISTED
candidates. The log, if there is one, is a file of at most `max_log_bytes`, after which it is renamed to `NAME.1`,
over the one before.
"""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from ..proto.api import Decided, Holding, IndexHealth, Lookup, Served
from ..proto.errors import ConfigError
from ..proto.hashing import Chain, Namespace
from .policies import Candidate, Decision

DEFAULT_CAPACITY: Final = 1024
LISTED: Final = 8
"""Candidates told of a decision: the cheapest, the deepest, and the one chosen."""
MAX_CANDIDATES: Final = 1 << 18
"""About 100 bytes each."""
COLD_KEYS: Final = 32
"""Keys kept of a prompt nobody holds, as far as they were hashed."""
MAX_KEY_BYTES: Final = 32 << 20
LOG_BUFFER: Final = 64 << 10

_encode = msgspec.json.Encoder().encode
_logger = logging.getLogger("metatrie.router")


class Looked(msgspec.Struct, frozen=True, gc=False):
    """One namespace in which a prompt was looked up."""

    namespace: Namespace
    chain: Chain
    deepest: int
    """Leading blocks the deepest replica held."""

    def keys(self) -> bytes:
        """Those worth keeping, end to end: to one past the deepest match, and a few of a prompt nobody holds."""
        return b"".join(self.chain.keys(self.deepest + 1)[: max(self.deepest + 1, COLD_KEYS)])

    def lookup(self) -> Lookup:
        """With every key of the prompt, whatever hashing them costs."""
        return _lookup(self.namespace, self.chain.blocks, b"".join(self.chain.keys(self.chain.blocks)))


def _lookup(namespace: Namespace, blocks: int, keys: bytes) -> Lookup:
    return Lookup(namespace=namespace, id=namespace.id, prompt_blocks=blocks, keys=keys.hex())


class _Kept(msgspec.Struct, kw_only=True, gc=False):
    """A decision as it is kept: what is needed to tell of it, put together only when somebody asks."""

    id: str
    at: float
    model: str
    prompt_tokens: int
    looked: list[tuple[Namespace, int, bytes]]
    """Namespace, blocks of the prompt, keys end to end."""
    policy: str
    decision: Decision
    index: IndexHealth
    reservation: str
    served_tokens: int | None = None

    @property
    def key_bytes(self) -> int:
        return sum(len(keys) for _, _, keys in self.looked)

    def told(self) -> Decided:
        decision, chosen = self.decision, self.decision.candidate
        return Decided(
            id=self.id,
            at=self.at,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            lookups=[_lookup(*looked) for looked in self.looked],
            index=self.index,
            candidates=len(decision.candidates),
            holdings=holdings(decision.candidates, chosen),
            policy=self.policy,
            reason=decision.reason,
            replica=str(chosen.ref),
            matched_blocks=chosen.matched_blocks,
            reusable_tokens=chosen.reusable_tokens,
            explanation=decision.explain(LISTED),
            served_tokens=self.served_tokens,
        )


class Decisions:
    """The newest decisions of one router."""

    def __init__(
        self,
        *,
        capacity: int = DEFAULT_CAPACITY,
        log: Path | None = None,
        max_log_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """capacity 0: none are kept, unless there is a log, which must learn what became of them. log: every decision
        is appended there too, as JSON lines; call `flush` now and then. clock: seconds since 1970. Raises ConfigError
        if the log cannot be written."""
        self._capacity = capacity if log is None else capacity or DEFAULT_CAPACITY
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._by_reservation: dict[str, _Kept] = {}
        self._key_bytes = 0
        self._candidates = 0
        self._log = None if log is None else _Log(log, max_log_bytes)

    def add(
        self,
        *,
        model: str,
        prompt_tokens: int,
        looked: Sequence[Looked],
        policy: str,
        decision: Decision,
        index: IndexHealth,
        reservation: str,
    ) -> str | None:
        """Remember a decision; returns its id, or None if none are wanted."""
        if not self._capacity:
            return None
        kept = _Kept(
            id=secrets.token_hex(8),
            at=self._clock(),
            model=model,
            prompt_tokens=prompt_tokens,
            looked=[(one.namespace, one.chain.blocks, one.keys()) for one in looked],
            policy=policy,
            decision=decision,
            index=index,
            reservation=reservation,
        )
        if self._log is not None:
            self._log.write(kept.told())
        self._kept[kept.id] = self._by_reservation[reservation] = kept
        self._key_bytes += kept.key_bytes
        self._candidates += len(decision.candidates)
        while (
            len(self._kept) > self._capacity
            or self._key_bytes > MAX_KEY_BYTES
            or self._candidates > max(MAX_CANDIDATES, len(decision.candidates))
        ):
            _, oldest = self._kept.popitem(last=False)
            self._key_bytes -= oldest.key_bytes
            self._candidates -= len(oldest.decision.candidates)
            self._by_reservation.pop(oldest.reservation, None)
        return kept.id

    def served(self, reservation: str, cached_tokens: int) -> None:
        """What the engine found cached for a request routed under this reservation. The first report counts."""
        kept = self._by_reservation.get(reservation)
        if kept is None or kept.served_tokens is not None:
            return
        kept.served_tokens = cached_tokens
        if self._log is not None:
            self._log.write(Served(id=kept.id, served_tokens=cached_tokens))

    def get(self, ident: str) -> Decided | None:
        """One of those kept."""
        kept = self._kept.get(ident)
        return None if kept is None else kept.told()

    def newest(self, limit: int, *, model: str | None = None, replica: str | None = None) -> list[Decided]:
        """Newest first. replica: only those that chose it, as NAME or NAME/RANK."""
        found: list[Decided] = []
        for kept in reversed(self._kept.values()):
            if len(found) == limit:
                break
            if model is not None and kept.model != model:
                continue
            ref = kept.decision.candidate.ref
            if replica is None or replica in (ref.replica, str(ref)):
                found.append(kept.told())
        return found

    def __len__(self) -> int:
        return len(self._kept)

    def flush(self) -> None:
        """Hand the log to the operating system."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def holdings(candidates: Sequence[Candidate], chosen: Candidate) -> list[Holding]:
    """The candidates that need compute least of the prompt, best first, and the chosen one."""
    best = heapq.nsmallest(LISTED, candidates, key=lambda c: (-c.reusable_tokens, -c.matched_blocks, c.ref))
    if all(candidate.ref != chosen.ref for candidate in best):
        best[LISTED - 1 :] = [chosen]
    return [
        Holding(
            replica=str(c.ref),
            block_size=c.block_size,
            matched_blocks=c.matched_blocks,
            reusable_tokens=c.reusable_tokens,
            state=c.state,
            cause=c.cause,
        )
        for c in best
    ]


class _Log:
    """JSON lines, appended."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self.failures = 0
        self._open()

    def _open(self) -> None:
        try:
            self._file: BinaryIO = self._path.open("ab", buffering=LOG_BUFFER)
        except OSError as error:
            raise ConfigError(
                "decision_log", f"{self._path}: {error.strerror}", "choose a place that can be written"
            ) from None

    def write(self, what: Decided | Served) -> None:
        self._attempt(lambda: self._file.write(_encode(what) + b"\n"))

    def flush(self) -> None:
        self._attempt(self._flush)

    def close(self) -> None:
        self._attempt(self._file.close)

    def _flush(self) -> None:
        self._file.flush()
        if self._file.tell() > self._most:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()

    def _attempt(self, work: Callable[[], object]) -> None:
        """A full disk must not cost a request. What could not be written is not tried again."""
        try:
            work()
        except OSError as error:
            if not self.failures:
                _logger.warning("the decision log cannot be written: %s", error.strerror)
            self.failures += 1
