"""Reservations in Redis: any number of routers see what each of them has outstanding, within milliseconds.

Strategy. Each router owns one HASH: its reservations, and their totals per replica (lua/reservations.lua). Only
scripts change it, so a reservation may be ended through any router, whose name is part of the reservation's id. Every
change is one round trip to one key. Before a decision a router reads the totals of all, in one round trip that runs
beside the lookup, and not again within `REFRESH_S`.

Routers that decide at the same moment do not know of each other. So a reservation is followed, in the same round
trip, by another look: of two routers one at least then sees what the other did, since one server executes both in
order (in a cluster too: a hash tag keeps all of this on one node). Where that is on the replica it chose
itself, it chooses again, and moves its reservation if that comes out differently.

When a router dies its HASH expires, `lease_s` after its last sign of life, and its load is gone from every view. What
nobody frees is freed by its own router after `ttl_s`.

What is ours counts at once: the local view has it before Redis does. It is corrected from Redis, where another router
may have ended one of ours, whenever nothing of ours changed while the totals were read, and at least each heartbeat.

When Redis is away, reservations are local, as if this router were the only one; that is counted. The first failure
marks it away; from then on only the heartbeat asks it, so no request waits for it, until one gets through.

Bounds: `capacity` reservations per router, as in LocalReservations; `MAX_ROUTERS` routers are read.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from ..proto.errors import CallerError, StoreError
from ..proto.index import ReplicaRef
from .load import (
    DEFAULT_CAPACITY,
    DEFAULT_TTL_S,
    NOTHING_PENDING,
    Pending,
    PerReplica,
    Reservation,
    ReservationCounts,
    Totals,
    Wanted,
    report_defect,
)
from .redis_link import Command, RedisLink, script

LEASE_S = 5.0
"""This long after a router's last sign of life its load stops counting."""
REFRESH_S = 0.002
"""Age at which other routers' totals are read again."""
MAX_CHOICES = 3
"""Of one request: the last stands, whoever chose the same."""
MAX_ROUTERS = 256
MAX_NAMES = 65_536
"""Replica names remembered; the oldest goes first."""

_RESERVE, _COMPUTED, _UNRESERVE = (
    script(name, after="reservations") for name in ("reserve", "computed", "unreserve")
)
_ALIVE, _ROUTERS_SCRIPT = script("alive"), script("routers")
_TOTAL = struct.Struct("<8sIIQ")
_ROUTERS = b"mt:l:{l}"
"""HASH of router names that gave a sign of life; dead ones are dropped by whoever notices. No TTL, 20 bytes each."""


def _load_key(router: str) -> bytes:
    """HASH of one router's reservations and totals (lua/reservations.lua); TTL `lease_s`; about 60 bytes each."""
    return b"mt:l:{l}:" + router.encode()


@lru_cache(MAX_NAMES)
def _name(ref: ReplicaRef) -> bytes:
    return blake2b(f"{ref.replica}\0{ref.dp_rank}".encode(), digest_size=8).digest()


class SharedReservations:
    """Reservations of all routers on one Redis. Start it before use, close it after."""

    shared: ClassVar[bool] = True

    def __init__(
        self,
        link: RedisLink,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        capacity: int = DEFAULT_CAPACITY,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._lease_s = lease_s
        self._clock = clock
        self._router = secrets.token_hex(8)
        self._held: OrderedDict[str, Reservation] = OrderedDict()
        """Ours, oldest first."""
        self._names: OrderedDict[bytes, ReplicaRef] = OrderedDict()
        self._ours: dict[ReplicaRef, Pending] = {}
        self._others: dict[bytes, Pending] = {}
        """Totals of the other routers, by replica name."""
        self._totals = PerReplica(NOTHING_PENDING)
        """Ours and others', of every replica remembered."""
        self._asked: Sequence[ReplicaRef] = ()
        """About whom last; all of them are remembered."""
        self._routers: list[str] = []
        self._changes = 0
        """Of ours, sent or done."""
        self._in_flight = 0
        self._looks = self._seen = 0
        """Begun, and the newest one whose answer the view has."""
        self._corrected_at = 0.0
        self._refreshed_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._heart: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._away = False
        self._expired = self._dropped = self._unshared = 0

    # Lifecycle

    async def start(self) -> None:
        """A store that is away does not keep it from starting."""
        self._closing.clear()
        await self._beat()
        self._heart = asyncio.create_task(self._live(), name="router-load")
        self._heart.add_done_callback(report_defect)

    async def close(self) -> None:
        """Free what is ours. Idempotent."""
        heart, self._heart = self._heart, None
        if heart is not None:
            # Asked, not cancelled: what is on the wire is waited for, which the link bounds.
            self._closing.set()
            await asyncio.wait([heart])
            if self._refreshing is not None:
                await self._refreshing
            if self._away:
                return
            with suppress(StoreError):
                await self._link.run(
                    [(_ALIVE, _load_key(self._router), 0), (_ROUTERS_SCRIPT, _ROUTERS, "", self._router)]
                )

    def expect_alive(self) -> None:
        if self._heart is not None and self._heart.done():
            self._heart.result()

    def alone(self) -> bool:
        return not self._routers

    async def _live(self) -> None:
        while not self._closing.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._closing.wait()
                return
            await self._beat()

    async def _beat(self) -> None:
        lease_ms = int(self._lease_s * 1000)
        try:
            await self._link.run(
                [(_ALIVE, _load_key(self._router), lease_ms), (_ROUTERS_SCRIPT, _ROUTERS, self._router)]
            )
            self._away = False
        except StoreError:
            self._away = True
        await self._free_expired()
        await self.refresh()

    async def _free_expired(self) -> None:
        now = self._clock()
        while self._held:
            oldest = next(iter(self._held.values()))
            if oldest.expires_at > now:
                return
            self._expired += 1
            await self.free(oldest.id)

    # Changes

    async def add(self, ref: ReplicaRef, *, predicted_tokens: int, uncached_tokens: int) -> Reservation:
        return await self.place(lambda _: Wanted(ref, predicted_tokens, uncached_tokens))

    async def place(self, choose: Callable[[str], Wanted]) -> Reservation:
        ident = f"{self._router}.{secrets.token_urlsafe(12)}"
        wanted = choose(ident)
        lease_ms = int(self._lease_s * 1000)
        withdraw = _UNRESERVE, _load_key(self._router), ident
        for choices in range(1, MAX_CHOICES + 1):
            reservation = self._hold(ident, wanted)
            name = _name(wanted.ref)
            before = self._others.get(name, NOTHING_PENDING)
            if choices > 1:
                await self._send(withdraw)
            tokens = wanted.uncached_tokens, wanted.predicted_tokens
            reserve = _RESERVE, _load_key(self._router), ident, name, *tokens, lease_ms
            await self._send(reserve, look=True)
            now = self._others.get(name, NOTHING_PENDING)
            unchanged = now.requests <= before.requests and now.tokens <= before.tokens
            if choices == MAX_CHOICES or self._away or unchanged:
                break
            # Others chose it too, at the same moment: seen from here, theirs came first.
            if self._held.pop(ident, None) is None:
                break  # dropped at the bound
            self._change(wanted.ref, Pending(-1, -1, -wanted.uncached_tokens))
            try:
                again = choose(ident)
            except CallerError:
                await self._send(withdraw)
                raise
            if again == wanted:
                reservation = self._hold(ident, wanted)
                break
            wanted = again
        if len(self._held) > self._capacity:
            self._dropped += 1
            await self.free(next(iter(self._held)))
        return reservation

    def _hold(self, ident: str, wanted: Wanted) -> Reservation:
        ref, predicted_tokens, uncached_tokens = wanted
        if _name(ref) not in self._names:
            self._remember(ref)
        reservation = self._held[ident] = Reservation(
            id=ident,
            ref=ref,
            predicted_tokens=predicted_tokens,
            uncached_tokens=uncached_tokens,
            prefilling=True,
            expires_at=self._clock() + self._ttl_s,
        )
        self._change(ref, Pending(1, 1, uncached_tokens))
        return reservation

    async def end_prefill(self, reservation: str) -> Reservation | None:
        held = self._held.get(reservation)
        if held is None:
            return self._foreign(reservation, await self._send_foreign(_COMPUTED, reservation))
        if held.prefilling:
            self._held[reservation] = msgspec.structs.replace(held, uncached_tokens=0, prefilling=False)
            self._change(held.ref, Pending(0, -1, -held.uncached_tokens))
            await self._send((_COMPUTED, _load_key(self._router), reservation))
        return held

    async def free(self, reservation: str) -> Reservation | None:
        held = self._held.pop(reservation, None)
        if held is None:
            return self._foreign(reservation, await self._send_foreign(_UNRESERVE, reservation))
        self._change(held.ref, Pending(-1, -int(held.prefilling), -held.uncached_tokens))
        await self._send((_UNRESERVE, _load_key(self._router), reservation))
        return held

    def _change(self, ref: ReplicaRef, change: Pending) -> None:
        pending = self._ours.get(ref, NOTHING_PENDING).plus(change)
        if pending.requests > 0:
            self._ours[ref] = pending
        else:
            self._ours.pop(ref, None)
        self._add_up(ref)

    async def _send(self, change: Command, *, look: bool = False) -> None:
        """A change of ours, known locally already. look: see the others' as they are after it, in the same round
        trip: of two routers that do so on one server, one at least sees what the other did."""
        if self._away:
            self._unshared += 1
            return
        self._changes += 1
        self._in_flight += 1
        try:
            if look:
                await self._look(change)
            else:
                await self._link.run([change])
        except StoreError:
            self._lost()
            self._unshared += 1
        finally:
            self._in_flight -= 1
            self._changes += 1

    async def _send_foreign(self, what: Any, reservation: str) -> list[Any]:
        """A change of another router's reservation; unknown while Redis is away. Raises StoreError."""
        router, dot, _ = reservation.partition(".")
        if self._away or not dot or router == self._router or len(router) != len(self._router):
            return []
        (reply,) = await self._link.run([(what, _load_key(router), reservation)])
        self._refreshed_at = float("-inf")
        found: list[Any] = reply
        return found

    def _foreign(self, reservation: str, reply: list[Any]) -> Reservation | None:
        if not reply:
            return None
        name, prefilling, tokens, predicted = reply
        return Reservation(
            id=reservation,
            ref=self._names.get(name, _UNKNOWN),
            predicted_tokens=predicted,
            uncached_tokens=tokens,
            prefilling=bool(prefilling),
            expires_at=0.0,
        )

    def _remember(self, ref: ReplicaRef) -> None:
        """From now on others' part is in its total."""
        self._names[_name(ref)] = ref
        if len(self._names) > MAX_NAMES:
            self._totals.drop(self._names.popitem(last=False)[1])
            self._asked = ()
        self._add_up(ref)

    def _add_up(self, ref: ReplicaRef) -> None:
        """Its total anew."""
        others = self._others.get(_name(ref), NOTHING_PENDING)
        self._totals[ref] = others.plus(self._ours.get(ref, NOTHING_PENDING))

    # The view

    async def refresh(self) -> None:
        if self._away or self._clock() - self._refreshed_at < REFRESH_S:
            return
        if self._refreshing is None:
            self._refreshing = asyncio.create_task(self._read(), name="router-load-read")
        await asyncio.shield(self._refreshing)

    async def _read(self) -> None:
        try:
            await self._look()
        except StoreError:
            self._lost()
        finally:
            self._refreshing = None

    def _lost(self) -> None:
        self._away = True
        self._see({})  # without news, others' load is as likely over as not

    async def _look(self, *first: Command) -> None:
        """Read what every router has outstanding, after these changes of ours. Raises StoreError."""
        began, changes, quiet = self._clock(), self._changes, not self._in_flight
        self._looks += 1
        look = self._looks
        routers = [self._router, *self._routers]
        replies = await self._link.run(
            [
                *first,
                (_ROUTERS_SCRIPT, _ROUTERS, ""),
                *(("HMGET", _load_key(router), "alive", "t") for router in routers),
            ]
        )
        names, *replies = replies[len(first) :]
        if look < self._seen:
            return  # a later one was faster
        self._seen = look
        others: dict[bytes, Pending] = {}
        dead = []
        for router, (alive, totals) in zip(routers, replies, strict=True):
            if router == self._router:
                due = began - self._corrected_at >= self._lease_s / 3
                if alive and ((quiet and changes == self._changes) or due):
                    self._correct(totals or b"")
                    self._corrected_at = began
            elif alive:
                for name, *total in _TOTAL.iter_unpack(totals or b""):
                    others[name] = others.get(name, NOTHING_PENDING).plus(Pending(*total))
            else:
                dead.append(router)
        self._see(others)
        known = set(self._routers)
        found = sorted(name.decode() for name in names)
        self._routers = [name for name in found if name != self._router][:MAX_ROUTERS]
        self._refreshed_at = began if known >= set(self._routers) else float("-inf")
        if dead:
            await self._link.run([(_ROUTERS_SCRIPT, _ROUTERS, "", *dead)])

    def _see(self, others: dict[bytes, Pending]) -> None:
        """What the other routers have outstanding."""
        before, self._others = self._others, others
        for name in before.keys() | others.keys():
            ref = self._names.get(name)
            if ref is not None and before.get(name) != others.get(name):
                self._add_up(ref)

    def _correct(self, totals: bytes) -> None:
        """What Redis says of ours."""
        before = self._ours
        self._ours = {
            self._names[name]: Pending(*total) for name, *total in _TOTAL.iter_unpack(totals) if name in self._names
        }
        for ref in before.keys() | self._ours.keys():
            self._add_up(ref)

    def total(self, ref: ReplicaRef) -> Pending:
        if ref not in self._totals:
            self._remember(ref)
        return self._totals[ref]

    def totals(self, refs: Sequence[ReplicaRef]) -> Totals:
        if refs is not self._asked:
            self._asked = refs
            for ref in refs:
                if ref not in self._totals:
                    self._remember(ref)
        return Totals(*self._totals.columns(refs))

    def counts(self) -> ReservationCounts:
        return ReservationCounts(
            held=len(self._held), expired=self._expired, dropped=self._dropped, unshared=self._unshared
        )


_UNKNOWN = ReplicaRef("unknown")
"""Of a reservation another router made, where this one never chose that replica."""
