"""The index in Redis: registry, leases, sweeper, and the pages of redis_pages behind one contract.

Strategy. Everything that fences lives in one HASH per namespace (fields: lua/record.lua), changed by single-key
scripts that judge leases by server time. Readers keep a decoded copy. Every query reads the registry's generation
along with its first pages and reads the registry again if that moved, so a restart or takeover stops counting at
once; a copy also expires by age and when a lease in it runs out by its own server time plus our monotonic clock.

Invariants. An incarnation that stops being named by its record is noted as dead in the same script, and the note
stays until its page set has been empty for a while, so that late writes of a zombie are reclaimed as well.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from ..proto.errors import StoreError, StoreRefused, Superseded
from ..proto.hashing import BlockKey, Chain, Namespace, NamespaceId
from ..proto.index import (
    BlockWrite,
    Claim,
    Fleet,
    Incarnation,
    Match,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaView,
    SweepReport,
    TierMask,
)
from ..proto.soon import Soon
from .redis_link import Command, RedisLink, script
from .redis_pages import PAGE_LIMIT, PAGE_TTL_S, PageKeys, PageReader, PageWriter, Reading
from .redis_wire import ReplyError, pack
from .shared_load import SharedReservations

FLEET_AGE_S = 0.5
"""Age at which a query reads the registry again even if its generation stands still (renewals do not move it)."""
SWEEP_LOCK_S = 30
"""Life of the sweep lock, should its holder die; a step is far shorter."""
DEAD_LINGER_S = 600
"""How long a dead incarnation is watched for late writes."""
_MAX_EXPIRING = 256
"""Lapsed replicas handled per sweep step."""
_MAX_DEAD = 1024
"""Dead incarnations looked at per sweep step, oldest first."""
_EPOCH_S = 1_735_689_600
"""2025-01-01: incarnations start from the seconds since then, and fit 30 bits until 2058."""
_MAX_AHEAD = 1 << 20
"""How far ahead of time, in seconds, the incarnations of a registry that lost its counter may start."""

_CLAIM, _ACTIVATE, _RENEW, _RELEASE, _EXPIRE, _FLEET = (
    script(name, after="record") for name in ("claim", "activate", "renew", "release", "expire", "fleet")
)
_SWEEP_PAGE = script("sweep_page", after="page")
_UNLOCK = script("unlock")

_NAMESPACES = b"mt:ns"
"""HASH of every namespace announced, digest → msgpack Namespace; its own slot, no TTL, about 150 bytes each."""

_HEADER = struct.Struct("<IIddH")
_RANK = struct.Struct(">H")
_encode = msgspec.msgpack.encode
_decode_spec = msgspec.msgpack.Decoder(ReplicaSpec).decode
_decode_status = msgspec.msgpack.Decoder(ReplicaStatus).decode
_decode_namespace = msgspec.msgpack.Decoder(Namespace).decode


class RegistryKeys:
    """Builds the keys of one namespace's registry; the hash tag keeps them in one cluster slot."""

    __slots__ = ("_canary", "lock", "registry")

    def __init__(self, namespace: NamespaceId) -> None:
        self.registry = b"mt:{%s}:r" % namespace.encode()
        """HASH, no TTL; about 400 bytes per replica and 30 per recently dead incarnation."""
        self.lock = b"mt:{%s}:sweep" % namespace.encode()
        """STRING, the sweeper's token, TTL SWEEP_LOCK_S."""
        self._canary = b"mt:c:%s:" % namespace.encode()

    def canary(self, tag: bytes) -> bytes:
        """STRING, one per server (the hash tag leads there), 16 random bytes, no TTL: gone or another one means that
        the server lost what it had."""
        return self._canary + b"{%s}" % tag


@dataclass(frozen=True, slots=True)
class _Registry:
    """One decoded read of a registry."""

    fleet: Fleet
    live: Mapping[Incarnation, ReplicaView]
    generation: bytes | None
    lapsed: tuple[ReplicaRef, ...]
    """Replicas whose lease ran out, tombstoned or not."""
    dead: tuple[tuple[float, Incarnation], ...]
    """(server time of death in ms, incarnation), oldest first."""
    server_ms: float
    read_at: float
    """Our monotonic clock when the read was sent: at most later than `server_ms`, so leases never run long."""
    until: float
    """Our monotonic clock when the first live lease in it runs out."""


class _Asked(NamedTuple):
    """The first question of a match."""

    chain: Chain
    reading: Reading
    registry: _Registry | None
    """Our copy, if it is fresh enough; else the question asks for another."""
    at: float
    """Our monotonic clock when it was asked."""
    commands: list[Command | bytes]


class RedisIndex:
    """The meta-trie and registry of one namespace. Safe to share between tasks of one event loop."""

    def __init__(self, link: RedisLink, namespace: Namespace, *, page_limit: int, page_ttl_s: float) -> None:
        self._link = link
        self._namespace = namespace
        self._keys = RegistryKeys(namespace.id)
        self._page_keys = PageKeys(bytes.fromhex(namespace.id))
        self._writer = PageWriter(link, self._page_keys, limit=page_limit, ttl_s=page_ttl_s)
        self._reader = PageReader(link, self._page_keys)
        self._claimed: dict[ReplicaRef, list[Incarnation]] = {}
        """Incarnations this process claimed and may still write, by replica."""
        self._registry: _Registry | None = None
        self._rereading = False
        self._generation: Command = ("HGET", self._keys.registry, b"g")
        self._packed_generation = pack(("HGET", self._keys.registry, b"g"))

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    # Registry

    async def claim(self, spec: ReplicaSpec, *, owner: str, lease_s: float, activate: bool) -> Claim:
        await self._link.run([("HSET", _NAMESPACES, bytes.fromhex(self._namespace.id), _encode(self._namespace))])
        await refuse_eviction(self._link)
        status = ReplicaStatus()
        life = (_milliseconds(lease_s), int(activate), _EPOCH_S, _encode(spec), _encode(status), _standing(status))
        ahead = secrets.randbelow(_MAX_AHEAD)
        incarnation, previous = await self._call(_CLAIM, _field(spec.ref), owner, *life, ahead)
        if not incarnation:
            raise Superseded(f"{spec.ref} is leased by another owner", retry_s=previous / 1000)
        if activate:
            self._retire(spec.ref)
        self._claimed.setdefault(spec.ref, []).append(Incarnation(incarnation))
        return Claim(Incarnation(incarnation), Incarnation(previous) if previous else None)

    async def witness(self) -> bytes:
        keys = [self._keys.canary(tag) for tag in await self._link.shard_tags()]
        await self._link.run([("SET", key, secrets.token_bytes(16), "NX") for key in keys])
        canaries = await self._link.run([("GET", key) for key in keys])
        infos = await self._link.server_infos("replication")
        # A server that takes over another's data keeps its canaries, but starts a replication history of its own.
        histories = [str(info.get("master_replid")).encode() for info in infos.values()]
        return b"".join(sorted(canary or b"" for canary in canaries) + sorted(histories))

    async def activate(self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation) -> None:
        if not await self._call(_ACTIVATE, _field(ref), owner, incarnation):
            raise Superseded(f"{ref}: this claim is no longer the newest")
        self._retire(ref, but=incarnation)

    async def renew(
        self, ref: ReplicaRef, *, owner: str, incarnation: Incarnation, status: ReplicaStatus, lease_s: float
    ) -> None:
        report = (_milliseconds(lease_s), _encode(status), _standing(status))
        if not await self._call(_RENEW, _field(ref), owner, incarnation, *report):
            raise Superseded(f"{ref} is registered to another owner or incarnation, or not at all")

    async def release(self, ref: ReplicaRef, *, owner: str | None) -> bool:
        released = await self._call(_RELEASE, _field(ref), int(owner is not None), owner or "")
        if released:
            self._retire(ref)
        return bool(released)

    async def fleet(self) -> Fleet:
        return (await self._read_registry()).fleet

    def _retire(self, ref: ReplicaRef, *, but: Incarnation | None = None) -> None:
        """Forget what was written under this replica's earlier incarnations."""
        for incarnation in self._claimed.pop(ref, ()):
            if incarnation != but:
                self._writer.drop(incarnation)
        if but is not None:
            self._claimed[ref] = [but]

    async def _call(self, step: Any, *args: bytes | str | int) -> Any:
        (reply,) = await self._link.run([(step, self._keys.registry, *args)])
        return reply

    async def _read_registry(self) -> _Registry:
        sent = time.monotonic()
        now, fields = await self._call(_FLEET)
        self._registry = _decode_registry(now, fields, sent)
        return self._registry

    # Blocks

    async def write(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> None:
        await self._writer.write(incarnation, version, blocks)

    async def refresh(self, incarnation: Incarnation, version: int, blocks: Sequence[BlockWrite]) -> int:
        return await self._writer.refresh(incarnation, version, blocks)

    async def held(self, incarnation: Incarnation, *, pages: int | None = None) -> dict[BlockKey, TierMask]:
        return await self._writer.held(incarnation, pages)

    async def match(self, chain: Chain) -> Match:
        asked = self._ask(chain)
        try:
            replies = await self._link.run(cast("list[Command]", asked.commands))
        finally:
            self._asked(asked)
        return await self._go_on(asked, self._registry_of(asked, replies[0]), replies)

    def match_quickly(self, chain: Chain) -> Soon[Match] | None:
        asked = self._ask(chain, packed=True)
        soon: Soon[Match] = Soon(partial(self._brought, asked))
        if self._link.post(asked.commands, soon.bring):
            return soon
        self._asked(asked)
        return None

    def _ask(self, chain: Chain, *, packed: bool = False) -> _Asked:
        """What to read for a match: its first pages, and what says whether our copy of the registry still holds."""
        reading = self._reader.begin(chain, packed=packed)
        registry, now = self._registry, time.monotonic()
        fresh = registry is not None and now < registry.until
        # One query renews an aged copy, the others go on with it: the generation fences them.
        if registry is None or not fresh or (now - registry.read_at > FLEET_AGE_S and not self._rereading):
            self._rereading = True
            return _Asked(chain, reading, None, now, [(_FLEET, self._keys.registry), *reading.commands])
        generation = self._packed_generation if packed else self._generation
        return _Asked(chain, reading, registry, now, [generation, *reading.commands])

    def _asked(self, asked: _Asked) -> None:
        """It was answered, or will not be."""
        if asked.registry is None:
            self._rereading = False

    def _brought(self, asked: _Asked, replies: list[Any] | Exception) -> Match | Awaitable[Match]:
        self._asked(asked)
        if isinstance(replies, Exception):
            return self._link.failed(replies)
        if ReplyError in map(type, replies):
            return self.match(asked.chain)
        registry = self._registry_of(asked, replies[0])
        if registry is not None:
            depths = self._reader.finish(asked.chain, registry.live, asked.reading, replies[1:])
            if depths is not None:
                return Match(registry.fleet, depths)
        return self._go_on(asked, registry, replies)

    async def _go_on(self, asked: _Asked, registry: _Registry | None, replies: Sequence[Any]) -> Match:
        if registry is None:
            registry = await self._read_registry()
        depths = await self._reader.match(asked.chain, registry.live, asked.reading, replies[1:])
        return Match(registry.fleet, depths)

    def _registry_of(self, asked: _Asked, reply: Any) -> _Registry | None:
        """The registry a match is judged by; None if our copy is out of date."""
        if asked.registry is None:
            server_ms, fields = reply
            self._registry = _decode_registry(server_ms, fields, asked.at)
            return self._registry
        return asked.registry if asked.registry.generation == reply else None

    # Sweeping

    async def sweep(self, *, pages: int, grace_s: float) -> SweepReport:
        token = secrets.token_bytes(16)
        (taken,) = await self._link.run([("SET", self._keys.lock, token, "NX", "PX", SWEEP_LOCK_S * 1000)])
        if not taken:
            return SweepReport(0, 0, 0)
        try:
            registry = await self._read_registry()
            refs = registry.lapsed[:_MAX_EXPIRING]
            grace_ms = _milliseconds(grace_s)
            lapsed: list[Command] = [(_EXPIRE, self._keys.registry, _field(ref), grace_ms) for ref in refs]
            done = await self._link.run(lapsed)
            expired = tuple(ref for ref, changed in zip(refs, done, strict=True) if changed)
            if expired:
                registry = await self._read_registry()
            cleaned, reclaimed, remaining = await self._clean(registry, pages)
            return SweepReport(cleaned, reclaimed, remaining, expired)
        finally:
            # Left alone, the lock ends by itself.
            with suppress(StoreError):
                await self._link.run([(_UNLOCK, self._keys.lock, token)])

    async def _clean(self, registry: _Registry, pages: int) -> tuple[int, int, int]:
        """Clean up to `pages` pages of dead incarnations. Returns pages, incarnations reclaimed, remaining."""
        dead = registry.dead[:_MAX_DEAD]
        counts = await self._link.run([("SCARD", self._page_keys.page_set(incarnation)) for _, incarnation in dead])
        remaining = sum(1 for count in counts if count) + len(registry.dead) - len(dead)
        forgotten: list[bytes] = []
        cleaned = reclaimed = 0
        for (died_ms, incarnation), count in zip(dead, counts, strict=True):
            if not count:
                if registry.server_ms - died_ms > DEAD_LINGER_S * 1000:
                    forgotten.append(b"x" + struct.pack("<I", incarnation))
                continue
            budget = pages - cleaned
            if budget <= 0:
                break
            key = self._page_keys.page_set(incarnation)
            (members,) = await self._link.run([("SRANDMEMBER", key, budget)])
            heads = map(self._page_keys.head_of, members)
            steps: list[Command] = [(_SWEEP_PAGE, self._page_keys.page(head), incarnation) for head in heads]
            # The set shrinks after its pages are clean, so that a sweeper that dies in between leaves nothing behind.
            await self._link.run(steps)
            for at in range(0, len(members), _MAX_DEAD):
                await self._link.run([("SREM", key, *members[at : at + _MAX_DEAD])])
            cleaned += len(members)
            if len(members) == count:
                reclaimed += 1
        if forgotten:
            await self._link.run([("HDEL", self._keys.registry, *forgotten)])
        return cleaned, reclaimed, remaining - reclaimed


def _field(ref: ReplicaRef) -> bytes:
    """A replica's name within the registry's fields."""
    return _RANK.pack(ref.dp_rank) + ref.replica.encode()


def _milliseconds(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _standing(status: ReplicaStatus) -> str:
    """What readers must learn at once when it changes."""
    return f"{status.state} {status.cause}"


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _decode_registry(server_ms: float, flat: Sequence[bytes], read_at: float) -> _Registry:
    fields = dict(_pairs(flat))
    replicas: list[tuple[ReplicaRef, ReplicaView]] = []
    dead: list[tuple[float, Incarnation]] = []
    lapsed: list[ReplicaRef] = []
    until = float("inf")
    for name, value in fields.items():
        kind, ref = name[:1], name[1:]
        if kind == b"h":
            pointer, _, expires_ms, tombstoned_ms, _ = _HEADER.unpack_from(value)
            spec, status = _decode_spec(fields[b"s" + ref]), _decode_status(fields[b"t" + ref])
            live = not tombstoned_ms and server_ms < expires_ms
            if live:
                until = min(until, read_at + (expires_ms - server_ms) / 1000)
            else:
                lapsed.append(spec.ref)
            incarnation = Incarnation(pointer) if pointer else None
            view = ReplicaView(spec=spec, incarnation=incarnation, live=live, status=status)
            replicas.append((spec.ref, view))
        elif kind == b"x":
            dead.append((float(value), Incarnation(int.from_bytes(ref, "little"))))
    fleet = Fleet(tuple(view for _, view in sorted(replicas, key=lambda item: item[0])))
    return _Registry(
        fleet=fleet,
        live=fleet.live(),
        generation=fields.get(b"g"),
        lapsed=tuple(lapsed),
        dead=tuple(sorted(dead)),
        server_ms=server_ms,
        read_at=read_at,
        until=until,
    )


async def refuse_eviction(link: RedisLink) -> None:
    """Raises StoreRefused if a server may evict any key: that drops the registry and punches holes in chains."""
    for settings in (await link.settings("maxmemory-policy")).values():
        policy = settings.get("maxmemory-policy", "")
        if policy.startswith("allkeys-"):
            raise StoreRefused(
                f"Redis has maxmemory-policy {policy}, which drops keys at will; "
                "`CONFIG SET maxmemory-policy noeviction` (or volatile-ttl), and the same in its configuration"
            )


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as far as it tells."""

    address: str
    """Empty for a single server."""
    version: str
    valkey: bool
    clock_s: float | None
    """Its wall clock when it answered, seconds since 1970."""
    settings: dict[str, str]
    """Those a preflight looks at; empty where the service forbids to ask."""


class RedisStore:
    """Indexes of all namespaces on one Redis, Valkey, Sentinel service or cluster."""

    def __init__(
        self,
        link: RedisLink,
        *,
        page_limit: int = PAGE_LIMIT,
        page_ttl_s: float = PAGE_TTL_S,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """page_limit: blocks a page takes before it overflows; processes may differ in it. on_close: runs last."""
        self._link = link
        self._page_limit = page_limit
        self._page_ttl_s = page_ttl_s
        self._on_close = on_close
        self._indexes: dict[NamespaceId, RedisIndex] = {}

    async def open(self, namespace: Namespace) -> RedisIndex:
        index = self._indexes.get(namespace.id)
        if index is None:
            index = self._indexes[namespace.id] = RedisIndex(
                self._link, namespace, page_limit=self._page_limit, page_ttl_s=self._page_ttl_s
            )
        return index

    def reservations(self, *, ttl_s: float, capacity: int) -> SharedReservations:
        """Load shared with every router on this store."""
        return SharedReservations(self._link, ttl_s=ttl_s, capacity=capacity)

    async def namespaces(self) -> Sequence[Namespace]:
        (values,) = await self._link.run([("HVALS", _NAMESPACES)])
        return sorted((_decode_namespace(value) for value in values), key=lambda namespace: namespace.id)

    async def ping(self) -> None:
        """Also refuses a server set to evict any key: that would punch holes in chains and drop the registry."""
        await self._link.run([("EXISTS", _NAMESPACES)])
        await refuse_eviction(self._link)

    async def facts(self) -> list[ServerFacts]:
        """What every primary says of itself, for a preflight. Raises StoreError."""
        infos, settings = await self._link.server_infos("server"), await self._link.settings("maxmemory*")
        shape = await self._link.settings("hash-max-*")
        return [
            ServerFacts(
                address=address,
                version=str(info.get("valkey_version") or info.get("redis_version") or ""),
                valkey="valkey_version" in info,
                clock_s=info["server_time_usec"] / 1e6 if "server_time_usec" in info else None,
                settings=settings.get(address, {}) | shape.get(address, {}),
            )
            for address, info in infos.items()
        ]

    async def close(self) -> None:
        try:
            await self._link.close()
        finally:
            if self._on_close is not None:
                self._on_close()
