"""Reservations: the load a router causes, known the moment it is caused.

Strategy. An engine's own metrics tell of a request a scrape interval late, which is long enough for a burst to pile
up on one replica. So each routed request reserves its share of the chosen replica at once, and gives back its prefill
part when the first token is reported and the rest when it ends. Totals per replica are kept up to date by each
change, so reading them costs nothing per reservation.

Bounds. A reservation nobody frees expires after `ttl_s`; at most `capacity` are held, the oldest is dropped beyond
that. Both are counted. All share one TTL, so insertion order is expiry order and the oldest is at the front.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from ..proto.index import ReplicaRef

DEFAULT_TTL_S = 600.0
DEFAULT_CAPACITY = 100_000


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


class Pending(msgspec.Struct, gc=False):
    """What is reserved on one replica. Belongs to its Reservations: do not change it."""

    requests: int = 0
    tokens: int = 0
    """Uncached prompt tokens still to be computed."""


class Reservations(Protocol):
    """Where routers account for what they have outstanding.

    Changes are asynchronous and may raise StoreError, since routers may share them; totals are read from a local
    view, without waiting.
    """

    async def add(self, ref: ReplicaRef, *, predicted_tokens: int, uncached_tokens: int) -> Reservation:
        """Reserve, from now until freed or expired."""
        ...

    async def end_prefill(self, reservation: str) -> Reservation | None:
        """Take its uncached tokens out of the totals. Returns it as it was *before*, so a repeated call shows by
        `prefilling` being False; None if there is no such reservation (any more)."""
        ...

    async def free(self, reservation: str) -> bool:
        """Remove it. False if there is no such reservation (any more)."""
        ...

    def pending(self) -> Mapping[ReplicaRef, Pending]:
        """Totals of every replica that has any, now. A live view: read it before the next await."""
        ...

    def counts(self) -> ReservationCounts: ...


class ReservationCounts(msgspec.Struct, frozen=True, kw_only=True):
    held: int
    expired: int
    """Since the start: nobody freed them."""
    dropped: int
    """Since the start: the oldest, at the bound."""


class LocalReservations:
    """Reservations of this process alone."""

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
        self._pending: dict[ReplicaRef, Pending] = {}
        self._expired = 0
        self._dropped = 0

    async def add(self, ref: ReplicaRef, *, predicted_tokens: int, uncached_tokens: int) -> Reservation:
        self._expire()
        if len(self._held) >= self._capacity:
            self._remove(next(iter(self._held)))
            self._dropped += 1
        reservation = Reservation(
            id=secrets.token_urlsafe(16),
            ref=ref,
            predicted_tokens=predicted_tokens,
            uncached_tokens=uncached_tokens,
            prefilling=True,
            expires_at=self._clock() + self._ttl_s,
        )
        self._held[reservation.id] = reservation
        pending = self._pending.get(ref)
        if pending is None:
            pending = self._pending[ref] = Pending()
        pending.requests += 1
        pending.tokens += uncached_tokens
        return reservation

    async def end_prefill(self, reservation: str) -> Reservation | None:
        self._expire()
        held = self._held.get(reservation)
        if held is not None:
            self._pending[held.ref].tokens -= held.uncached_tokens
            self._held[held.id] = msgspec.structs.replace(held, uncached_tokens=0, prefilling=False)
        return held

    async def free(self, reservation: str) -> bool:
        self._expire()
        if reservation not in self._held:
            return False
        self._remove(reservation)
        return True

    def pending(self) -> Mapping[ReplicaRef, Pending]:
        self._expire()
        return self._pending

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

    def _remove(self, reservation: str) -> None:
        held = self._held.pop(reservation)
        pending = self._pending[held.ref]
        pending.requests -= 1
        pending.tokens -= held.uncached_tokens
        if not pending.requests:
            del self._pending[held.ref]
