"""Load: what routers have outstanding where, and what work costs each replica.

Reservations make the load a router causes known the moment it is caused.

Strategy. An engine's own metrics tell of a request a scrape interval late, which is long enough for a burst to pile
up on one replica. So each routed request reserves its share of the chosen replica at once, and gives back its prefill
part when the first token is reported and the rest when it ends. Totals per replica are kept up to date by each
change, so reading them costs nothing per reservation.

Bounds. A reservation nobody frees expires after `ttl_s`; at most `capacity` are held, the oldest is dropped beyond
that. Both are counted. All share one TTL, so insertion order is expiry order and the oldest is at the front.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from ..proto.index import ReplicaRef
from .policies import TYPICAL_SPEED, Speed, Speeds

_log = logging.getLogger("metatrie.router")

Row = TypeVar("Row", bound=tuple[Any, ...])

DEFAULT_TTL_S = 600.0
DEFAULT_CAPACITY = 100_000
LAYOUTS = 16
"""Fleets whose load and speeds are kept in columns: models a router decides about in turn."""


class Reservation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One routed request that is not known to be over."""

    id: str
    """Random and unguessable: whoever has it may free it."""
    ref: ReplicaRef
    predicted_tokens: int
    """Prompt tokens expected to be found in the replica's cache."""
    uncached_tokens: int
    """Prompt tokens expected to be computed; 0 once the prefill is over."""
    prefilling: bool
    expires_at: float
    """On the owner's clock."""


class Wanted(NamedTuple):
    """What a routed request will be to the replica chosen for it."""

    ref: ReplicaRef
    predicted_tokens: int
    """Prompt tokens expected to be found in its cache."""
    uncached_tokens: int
    """And to be computed."""


class Pending(NamedTuple):
    """What is reserved on one replica, or a change of it."""

    requests: int = 0
    prefills: int = 0
    """Requests whose prefill is not known to be done."""
    tokens: int = 0
    """Their uncached prompt tokens."""

    def plus(self, other: Pending) -> Pending:
        return Pending(self.requests + other.requests, self.prefills + other.prefills, self.tokens + other.tokens)


NOTHING_PENDING = Pending()


class Totals(NamedTuple):
    """`Pending` of several replicas, in columns."""

    requests: Sequence[int]
    prefills: Sequence[int]
    tokens: Sequence[int]


class _Layout:
    """Columns for one fleet."""

    __slots__ = ("at", "columns", "given", "refs")

    def __init__(self, refs: Sequence[ReplicaRef], rows: Sequence[tuple[Any, ...]], width: int) -> None:
        """width: cells of a row."""
        self.refs = refs
        self.at = {ref: at for at, ref in enumerate(refs)}
        self.columns = [[row[cell] for row in rows] for cell in range(width)]
        self.given = False
        """Somebody has these very columns."""


class PerReplica(Generic[Row]):
    """Rows by replica, at hand in columns for the fleets asked about last: decisions are about the same few fleets
    again and again, and between two of them few rows change. Rows are bounded by its user."""

    def __init__(self, default: Row, *, layouts: int = LAYOUTS) -> None:
        """layouts: fleets that are laid out at a time, at most."""
        self._default = default
        self._most = layouts
        self._rows: dict[ReplicaRef, Row] = {}
        self._layouts: OrderedDict[int, _Layout] = OrderedDict()
        """By identity of the sequence asked about; the one asked about last at the end."""

    def __getitem__(self, ref: ReplicaRef) -> Row:
        return self._rows.get(ref, self._default)

    def __setitem__(self, ref: ReplicaRef, row: Row) -> None:
        self._rows[ref] = row
        self._lay_out(ref, row)

    def __contains__(self, ref: ReplicaRef) -> bool:
        return ref in self._rows

    def drop(self, ref: ReplicaRef) -> None:
        """Back to the default."""
        if self._rows.pop(ref, None) is not None:
            self._lay_out(ref, self._default)

    def columns(self, refs: Sequence[ReplicaRef]) -> tuple[Sequence[Any], ...]:
        """Of these, in this order, as they are now: what was given away never changes. Cheap for a
        sequence asked about before, which nobody may change after that."""
        layout = self._layouts.get(id(refs))
        if layout is None:
            layout = self._layouts[id(refs)] = _Layout(refs, [self[ref] for ref in refs], len(self._default))
            if len(self._layouts) > self._most:
                self._layouts.popitem(last=False)
        else:
            self._layouts.move_to_end(id(refs))
        layout.given = True
        return tuple(layout.columns)

    def _lay_out(self, ref: ReplicaRef, row: Row) -> None:
        for layout in self._layouts.values():
            at = layout.at.get(ref)
            if at is not None:
                if layout.given:
                    layout.columns = [column.copy() for column in layout.columns]
                    layout.given = False
                for column, cell in zip(layout.columns, row, strict=True):
                    column[at] = cell


class Reservations(Protocol):
    """Where routers account for what they have outstanding.

    Changes are asynchronous and may raise StoreError, since routers may share them; totals are read from a local
    view, without waiting.
    """

    shared: ClassVar[bool]
    """Other routers' are in the totals, and `refresh` is worth waiting for."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def expect_alive(self) -> None:
        """Raises what killed their background work, if anything did."""
        ...

    def alone(self) -> bool:
        """No other router shares them, as far as is known."""
        ...

    async def place(self, choose: Callable[[str], Wanted]) -> Reservation:
        """Reserve what `choose` says, from now until freed or expired.

        choose(id of the reservation): called at once, and what it returns is in the totals before anything waits. It
        is called again, a few times at most and without its own reservation in the totals, where another router turns
        out to have chosen the same replica at the same moment. Raises what it raises; then nothing is reserved.
        """
        ...

    async def add(self, ref: ReplicaRef, *, predicted_tokens: int, uncached_tokens: int) -> Reservation:
        """The same for a choice that is made already."""
        ...

    async def end_prefill(self, reservation: str) -> Reservation | None:
        """Take its uncached tokens out of the totals. Returns it as it was *before*, so a repeated call shows by
        `prefilling` being False; None if there is no such reservation (any more)."""
        ...

    async def free(self, reservation: str) -> Reservation | None:
        """Remove it. Returns it as it was; None if there is no such reservation (any more)."""
        ...

    async def refresh(self) -> None:
        """See what other routers did, as of a few milliseconds ago. Raises nothing: without the store the view is the
        last one."""
        ...

    def total(self, ref: ReplicaRef) -> Pending:
        """What is reserved on one, now."""
        ...

    def totals(self, refs: Sequence[ReplicaRef]) -> Totals:
        """What is reserved on each of these, now. Cheap for a sequence asked about before."""
        ...

    def counts(self) -> ReservationCounts: ...


@runtime_checkable
class SharesReservations(Protocol):
    """A store through which routers can share what they have outstanding."""

    def reservations(self, *, ttl_s: float, capacity: int) -> Reservations: ...


class ReservationCounts(msgspec.Struct, frozen=True, kw_only=True):
    held: int
    expired: int
    """Since the start: nobody freed them."""
    dropped: int
    """Since the start: the oldest, at the bound."""
    unshared: int = 0
    """Since the start: changes other routers could not be told of."""


class LocalReservations:
    """Reservations of this process alone."""

    shared: ClassVar[bool] = False

    def __init__(
        self,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        capacity: int = DEFAULT_CAPACITY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._clock = clock
        self._held: OrderedDict[str, Reservation] = OrderedDict()
        """Oldest first; replacing a value keeps its place. Unlike a dict, it finds its first entry in O(1)."""
        self._pending = PerReplica(NOTHING_PENDING)
        self._expired = 0
        self._dropped = 0

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    def expect_alive(self) -> None:
        return None

    def alone(self) -> bool:
        return True

    async def add(self, ref: ReplicaRef, *, predicted_tokens: int, uncached_tokens: int) -> Reservation:
        return await self.place(lambda _: Wanted(ref, predicted_tokens, uncached_tokens))

    async def place(self, choose: Callable[[str], Wanted]) -> Reservation:
        self._expire()
        ident = secrets.token_urlsafe(16)
        ref, predicted_tokens, uncached_tokens = choose(ident)
        if len(self._held) >= self._capacity:
            self._remove(next(iter(self._held)))
            self._dropped += 1
        reservation = Reservation(
            id=ident,
            ref=ref,
            predicted_tokens=predicted_tokens,
            uncached_tokens=uncached_tokens,
            prefilling=True,
            expires_at=self._clock() + self._ttl_s,
        )
        self._held[reservation.id] = reservation
        self._change(ref, Pending(1, 1, uncached_tokens))
        return reservation

    async def end_prefill(self, reservation: str) -> Reservation | None:
        self._expire()
        held = self._held.get(reservation)
        if held is not None and held.prefilling:
            self._change(held.ref, Pending(0, -1, -held.uncached_tokens))
            self._held[held.id] = msgspec.structs.replace(held, uncached_tokens=0, prefilling=False)
        return held

    async def free(self, reservation: str) -> Reservation | None:
        self._expire()
        return self._remove(reservation) if reservation in self._held else None

    async def refresh(self) -> None:
        return None

    def total(self, ref: ReplicaRef) -> Pending:
        self._expire()
        return self._pending[ref]

    def totals(self, refs: Sequence[ReplicaRef]) -> Totals:
        self._expire()
        return Totals(*self._pending.columns(refs))

    def counts(self) -> ReservationCounts:
        self._expire()
        return ReservationCounts(held=len(self._held), expired=self._expired, dropped=self._dropped)

    def _expire(self) -> None:
        now = self._clock()
        while self._held:
            oldest = next(iter(self._held.values()))
            if oldest.expires_at > now:
                return
            self._remove(oldest.id)
            self._expired += 1

    def _remove(self, reservation: str) -> Reservation:
        held = self._held.pop(reservation)
        self._change(held.ref, Pending(-1, -int(held.prefilling), -held.uncached_tokens))
        return held

    def _change(self, ref: ReplicaRef, change: Pending) -> None:
        pending = self._pending[ref].plus(change)
        if pending.requests:
            self._pending[ref] = pending
        else:
            self._pending.drop(ref)


# What work costs

TYPICAL_OUTPUT_TOKENS = 256.0
_SAMPLES = 64.0
"""Requests a learned figure is the average of, with falling weight."""
_LEAST_TOKENS = 512
"""A prefill shorter than that says more about the step it waited for than about the rate."""
_DECLARED_TOKENS = 65_536.0
"""The declared rate counts as so many tokens seen, or a router's first few samples would be all it goes by."""
_OUTLIER = 8.0
"""A sample this many times off what is believed counts as that many times off."""


class _Routed(msgspec.Struct, gc=False):
    """What a request that is under way will teach."""

    ref: ReplicaRef
    at: float
    tokens: int
    """Uncached tokens ahead of it, and its own."""
    decoding: int
    first_token_at: float | None = None


class _Figures(msgspec.Struct, gc=False):
    """Falling sums of one replica."""

    ttft_s: float = 0.0
    tokens: float = 0.0
    decode: float = 1.0
    """Decode steps take this many times as long as declared."""


class Learned:
    """Each replica's prefill rate and decode cost, and the mean output length, from what it served. Not thread-safe.

    A time to first token, over the uncached tokens that were ahead plus its own, is the time per token; the time
    between tokens, over what the declared speed says for so many sequences, is the factor of the decode cost. Both
    include what nobody declared: other traffic, a slower GPU, a busy host. Without samples the declared speed holds.
    Bounds: `capacity` requests under way, oldest out first; replicas as many as were routed to lately.
    """

    def __init__(self, declared: Speed = TYPICAL_SPEED, *, capacity: int = DEFAULT_CAPACITY) -> None:
        self._declared = declared
        self._capacity = capacity
        self._routed: OrderedDict[str, _Routed] = OrderedDict()
        self._figures: dict[ReplicaRef, _Figures] = {}
        self._speeds = PerReplica(declared.row)
        self.output_tokens = TYPICAL_OUTPUT_TOKENS
        """Mean of what was served lately."""

    def speed(self, ref: ReplicaRef) -> Speed:
        return self._speeds[ref].speed

    def speeds(self, refs: Sequence[ReplicaRef]) -> Speeds:
        """Of these. Cheap for a sequence asked about before."""
        return Speeds(*self._speeds.columns(refs))

    def keep(self, refs: Collection[ReplicaRef]) -> None:
        """Forget replicas that are gone."""
        for ref in self._figures.keys() - set(refs):
            del self._figures[ref]
            self._speeds.drop(ref)

    def routed(self, request: str, ref: ReplicaRef, *, tokens: int, decoding: int, now: float) -> None:
        """tokens: uncached ones reserved on the replica, this request's included; decoding: sequences there."""
        if len(self._routed) >= self._capacity:
            self._routed.popitem(last=False)
        self._routed[request] = _Routed(ref, now, tokens, decoding)

    def first_token(self, request: str, now: float) -> None:
        """Unknown requests, and repetitions, are ignored."""
        routed = self._routed.get(request)
        if routed is None or routed.first_token_at is not None:
            return
        routed.first_token_at = now
        if routed.tokens >= _LEAST_TOKENS:
            believed = self.speed(routed.ref)
            figures = self._figures.get(routed.ref)
            if figures is None:
                figures = self._figures[routed.ref] = _Figures()
            if not figures.tokens:
                figures.tokens = _DECLARED_TOKENS
                figures.ttft_s = _DECLARED_TOKENS / believed.prefill_tokens_per_s
            expected = routed.tokens / believed.prefill_tokens_per_s
            ttft = min(max(now - routed.at, expected / _OUTLIER), expected * _OUTLIER)
            keep = 1.0 - 1.0 / _SAMPLES
            figures.ttft_s = figures.ttft_s * keep + ttft
            figures.tokens = figures.tokens * keep + routed.tokens
            self._update(routed.ref, figures)

    def finished(self, request: str, now: float, output_tokens: int | None) -> None:
        """output_tokens: None where the caller did not say. Unknown requests are ignored."""
        routed = self._routed.pop(request, None)
        if routed is None or output_tokens is None:
            return
        self.output_tokens += (output_tokens - self.output_tokens) / _SAMPLES
        if routed.first_token_at is None or output_tokens < 2:
            return
        declared = self._declared
        expected = declared.step_s + declared.sequence_step_s * max(1, routed.decoding)
        figures = self._figures.setdefault(routed.ref, _Figures())
        factor = (now - routed.first_token_at) / (output_tokens - 1) / expected
        factor = min(max(factor, figures.decode / _OUTLIER), figures.decode * _OUTLIER)
        figures.decode += (factor - figures.decode) / _SAMPLES
        self._update(routed.ref, figures)

    def _update(self, ref: ReplicaRef, figures: _Figures) -> None:
        declared = self._declared
        step_s = declared.step_s * figures.decode
        rate = declared.prefill_tokens_per_s
        if figures.tokens:
            per_token = figures.ttft_s / figures.tokens
            # The step's own time is counted apart, but never more than half of what was seen.
            rate = 1.0 / max(per_token - step_s / declared.chunk_tokens, per_token / 2)
        self._speeds[ref] = msgspec.structs.replace(
            declared,
            prefill_tokens_per_s=rate,
            step_s=step_s,
            sequence_step_s=declared.sequence_step_s * figures.decode,
        ).row


def report_defect(task: asyncio.Task[None]) -> None:
    """Callback of a background task that should end only when asked to: tells of what else ended it, when it does."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("background task %s ended for a defect of ours", task.get_name(), exc_info=error)
