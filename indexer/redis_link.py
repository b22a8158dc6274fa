"""The wire to Redis: bounded pipelines of plain commands and scripts, and what each failure means.

A call is one pipeline, or in a cluster one per node, since every command touches exactly the one key it is given.
What the data path sends goes over wires of our own (redis_wire.py), two per server, so that queries do not wait
behind writes. Everything else, and in a cluster whatever a node redirects or cannot serve, goes through redis-py,
which knows about topologies. Nothing is retried, but for that and for a script the server does not know yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from hashlib import sha1
from importlib.resources import files
from itertools import count
from typing import Any, NamedTuple, NoReturn

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)

from ..proto.errors import StoreRefused, StoreUnavailable
from .redis_wire import ReplyError, Wire, pack

MAX_PIPELINE = 128
"""Commands on the wire before their replies are read; a longer call takes several rounds."""
MAX_CONNECTIONS = 32
"""Connections per process and server, besides the wires; callers beyond it queue."""
MAX_CALLS = 256
"""Calls in flight on the wires; callers beyond it queue."""

_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError, RuntimeError, AttributeError)
"""What a call through redis-py may raise when the store does not serve. It is not ready for a connection that closes
under its hands: uvloop's RuntimeError, and its own AttributeError, then come out of it. See `_fail`."""
_PASSING = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)
_PASSING_CODES = ("READONLY", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOREPLICAS", "BUSY", "LOADING", "UNBLOCKED")
"""A server that is failing over, starting or busy."""


class Script(NamedTuple):
    """A Lua script of one key, sent by digest."""

    text: str
    sha: str


@cache
def script(name: str, *, after: str = "") -> Script:
    """The script `lua/{name}.lua`, with the functions of `lua/{after}.lua` in front."""
    folder = files(__package__) / "lua"
    text = "".join((folder / f"{part}.lua").read_text() for part in (after, name) if part)
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


_READS = frozenset({"HGET", "HMGET"})
_WIRED = _READS | {"SADD", "SREM", "PEXPIRE", "SCARD", "SRANDMEMBER"}
"""Commands whose replies mean the same raw as through redis-py."""
_ELSEWHERE = frozenset({"MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "NOSCRIPT"})
"""What a cluster node says when another has to be asked, or later, or with more words."""
_TYPED = {
    "NOPERM": NoPermissionError,
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
    "NOSCRIPT": NoScriptError,
}
"""Reply codes whose meaning is decided by type."""

Command = tuple[str | Script | bytes | int, ...]
"""A command name or script, its key, its arguments."""


class _Cancellable:
    """A cancellation that comes within is raised at its end at the latest. Before Python 3.12 `asyncio.wait_for`,
    which redis-py sends with, may swallow one that comes with what it waits for; a loop would then go on for ever."""

    __slots__ = ("_before", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._before = self._task.cancelling() if self._task is not None else 0

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if self._task is not None and self._task.cancelling() > self._before and kind is not asyncio.CancelledError:
            raise asyncio.CancelledError


class RedisLink:
    """Runs commands on one Redis, Valkey, Sentinel service or cluster. Raises nothing but store errors."""

    def __init__(
        self, client: Redis | RedisCluster, *, closers: Sequence[Callable[[], Awaitable[object]]] = ()
    ) -> None:
        """client: returns raw bytes and retries nothing. closers: run after it on close, in order."""
        self._client = client
        self._closers = tuple(closers)
        self._closed = False
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._wires: dict[tuple[str, bool], Wire] = {}
        """By server and whether it is for reads."""
        self._first_slots: dict[str, int] = {}
        """Per primary of a cluster, the lowest slot it was seen to own."""

    async def run(self, commands: Sequence[Command], *, first: Sequence[Command] = ()) -> list[Any]:
        """Replies to `commands`, in order. `first`: executed before any of them, replies dropped.

        Raises StoreUnavailable or StoreRefused for the first command that failed; others may have been executed.
        """
        if self._closed:
            raise StoreUnavailable("the store was closed")
        with _Cancellable():
            return await self._run(commands, first)

    async def _run(self, commands: Sequence[Command], first: Sequence[Command]) -> list[Any]:
        if all(isinstance(command[0], Script) or command[0] in _WIRED for command in commands):
            return await self._wired(commands, first)
        # On a cluster commands overtake each other, so what comes first is waited for.
        groups = [first, commands] if isinstance(self._client, RedisCluster) else [[*first, *commands]]
        replies: list[Any] = []
        for group in groups:
            for at in range(0, len(group), MAX_PIPELINE):
                some = group[at : at + MAX_PIPELINE]
                if isinstance(self._client, RedisCluster):
                    replies += await self._scattered(self._client, some)
                else:
                    replies += await self._pipelined(self._client, some)
        return replies[len(first) :]

    def post(self, commands: Sequence[Command | bytes], bring: Callable[[list[Any] | Exception], None]) -> bool:
        """Send a few reads or scripts, packed or not, whose replies, or whose failure, are handed to `bring` as they
        are: error replies among the others, nothing sent again. False, where `run` must do it: the connection is not
        open yet, too much is in flight, or this is a cluster."""
        wire = None if self._closed else self._wires.get(("", True))
        if wire is None:
            return False
        packed = [c if isinstance(c, bytes) else pack(_by_digest(c)) for c in commands]
        return wire.post(packed, bring, most=MAX_CALLS)

    async def failed(self, error: Exception) -> NoReturn:
        """Raise what a failure handed to `bring` means."""
        _fail(error)

    async def settings(self, pattern: str) -> dict[str, dict[str, str]]:
        """Settings of every primary that tells, by address (a single server's is ``). Managed services often forbid
        CONFIG; then nothing."""
        return await self._from_primaries("CONFIG GET", pattern)

    async def server_infos(self, section: str) -> dict[str, dict[str, Any]]:
        """One section of INFO from every primary, by address (a single server's is ``); empty if we may not ask."""
        return await self._from_primaries("INFO", section)

    async def _from_primaries(self, command: str, argument: str) -> dict[str, dict[str, Any]]:
        try:
            if not isinstance(self._client, RedisCluster):
                (reply,) = await self.run([(command, argument)])
                return {"": reply}
            try:
                with _Cancellable():
                    await self._client.initialize()
                    return {
                        node.name: await self._client.execute_command(command, argument, target_nodes=node)
                        for node in self._client.get_primaries()
                    }
            except _FAILURES as error:
                _fail(error)
        except StoreRefused:
            return {}

    async def shard_tags(self) -> list[bytes]:
        """One hash tag per primary that leads to it, in no particular order."""
        if not isinstance(self._client, RedisCluster):
            return [b"0"]
        try:
            with _Cancellable():
                await self._client.initialize()
        except _FAILURES as error:
            _fail(error)
        slots, known = self._client.nodes_manager.slots_cache, self._first_slots
        primaries = {node.name for node in self._client.get_primaries()}
        if known.keys() != primaries or any(slots[slot][0].name != name for name, slot in known.items()):
            known = {}
            for slot in sorted(slots):
                known.setdefault(slots[slot][0].name, slot)
            self._first_slots = known
        return [_tag_of(slot) for slot in known.values()]

    async def close(self) -> None:
        self._closed = True
        self._drop_wires()
        await self._client.aclose()
        for closer in self._closers:
            await closer()

    def _drop_wires(self) -> None:
        for wire in self._wires.values():
            wire.drop()
        self._wires.clear()

    async def _wired(self, commands: Sequence[Command], first: Sequence[Command]) -> list[Any]:
        reads = bool(commands) and commands[-1][0] in _READS
        try:
            if not isinstance(self._client, RedisCluster):
                pool = self._client.connection_pool
                wire = self._wire("", reads, pool.make_connection)
                replies: list[Any] = []
                everything = [*first, *commands] if first else commands
                for at in range(0, len(everything), MAX_PIPELINE):
                    replies += await self._sent(wire, everything[at : at + MAX_PIPELINE])
                for reply in replies:
                    if isinstance(reply, ReplyError):
                        _fail(_typed(reply))
                return replies[len(first) :] if first else replies
            await self._by_node(self._client, first, reads)
            return await self._by_node(self._client, commands, reads)
        except _FAILURES as error:
            _fail(error)
        except StoreUnavailable as error:
            if "READONLY" in str(error):
                # A demoted primary: the name may lead elsewhere by now.
                self._drop_wires()
            raise

    def _wire(self, server: str, reads: bool, make: Callable[[], AbstractConnection]) -> Wire:
        wire = self._wires.get((server, reads))
        if wire is None:
            wire = self._wires[server, reads] = Wire(make)
        return wire

    async def _sent(self, wire: Wire, commands: Sequence[Command]) -> list[Any]:
        """Replies, where scripts the server did not know were sent once more with their text."""
        async with self._calls:
            replies = await wire.run([_by_digest(c) for c in commands])
            unknown = [
                i for i, r in enumerate(replies) if isinstance(r, ReplyError) and str(r).startswith("NOSCRIPT")
            ]
            if unknown:
                again = await wire.run([_by_text(commands[i]) for i in unknown])
                for i, reply in zip(unknown, again, strict=True):
                    replies[i] = reply
        return replies

    async def _by_node(self, client: RedisCluster, commands: Sequence[Command], reads: bool) -> list[Any]:
        """Replies of a cluster, in order: every node is asked once, at the same time, and redis-py does what a node
        would not (a slot that moved, or is moving) or could not do."""
        if not commands:
            return []
        await client.initialize()
        slots = client.nodes_manager.slots_cache
        groups: dict[str, list[int]] = {}
        nodes: dict[str, ClusterNode] = {}
        strays: list[int] = []
        for i, command in enumerate(commands):
            owners = slots.get(key_slot(_bytes(command[1])))
            if owners:
                nodes[owners[0].name] = owners[0]
                groups.setdefault(owners[0].name, []).append(i)
            else:
                strays.append(i)
        replies: list[Any] = [None] * len(commands)
        for at in range(0, max(map(len, groups.values()), default=0), MAX_PIPELINE):
            sent: list[tuple[list[int], asyncio.Future[list[Any]]]] = []
            async with self._calls:
                for name, indices in groups.items():
                    some = indices[at : at + MAX_PIPELINE]
                    make = partial(nodes[name].connection_class, **nodes[name].connection_kwargs)
                    try:
                        replying = await self._wire(name, reads, make).send([_by_digest(commands[i]) for i in some])
                    except (RedisError, OSError, TimeoutError):
                        strays += some
                    else:
                        sent.append((some, replying))
                for some, replying in sent:
                    try:
                        got = await replying
                    except (OSError, TimeoutError):
                        strays += some
                        continue
                    for i, reply in zip(some, got, strict=True):
                        if isinstance(reply, ReplyError) and str(reply).split(" ", 1)[0] in _ELSEWHERE:
                            strays.append(i)
                        else:
                            replies[i] = reply
        for at in range(0, len(strays), MAX_PIPELINE):
            some = strays[at : at + MAX_PIPELINE]
            for i, reply in zip(some, await self._scattered(client, [commands[i] for i in some]), strict=True):
                replies[i] = reply
        for name, reads_only in list(self._wires):
            if name not in nodes and client.get_node(node_name=name) is None:
                self._wires.pop((name, reads_only)).drop()
        for reply in replies:
            if isinstance(reply, ReplyError):
                _fail(_typed(reply))
        return replies

    async def _pipelined(self, client: Redis, commands: Sequence[Command]) -> list[Any]:
        async with self._slots:
            try:
                replies = await _execute(client, [_by_digest(c) for c in commands])
                unknown = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
                if unknown:
                    again = await _execute(client, [_by_text(commands[i]) for i in unknown])
                    for i, reply in zip(unknown, again, strict=True):
                        replies[i] = reply
                for reply in replies:
                    if isinstance(reply, RedisError):
                        raise reply
            except _FAILURES as error:
                if isinstance(error, ReadOnlyError) or "-READONLY " in str(error):
                    # A demoted primary: what is idle must not be used again, the name may lead elsewhere by now.
                    await client.connection_pool.disconnect(inuse_connections=False)
                _fail(error)
        return replies

    async def _scattered(self, client: RedisCluster, commands: Sequence[Command]) -> list[Any]:
        replies = await asyncio.gather(*(self._single(client, c) for c in commands), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return replies

    async def _single(self, client: RedisCluster, command: Command) -> Any:
        async with self._slots:
            try:
                try:
                    return await client.execute_command(*_by_digest(command))
                except NoScriptError:
                    return await client.execute_command(*_by_text(command))
            except _FAILURES as error:
                _fail(error)


@cache
def _tag_of(slot: int) -> bytes:
    """The shortest number that hashes to this cluster slot."""
    return next(tag for tag in (b"%d" % i for i in count()) if key_slot(tag) == slot)


async def _execute(client: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


def _typed(reply: Exception) -> ResponseError | RedisError:
    """An error reply as redis-py would raise it, as far as `_fail` cares."""
    text = str(reply)
    return _TYPED.get(text.split(" ", 1)[0], ResponseError)(text)


def _bytes(key: str | Script | bytes | int) -> bytes:
    assert isinstance(key, bytes)
    return key


def _by_digest(command: Command) -> tuple[Any, ...]:
    name = command[0]
    return ("EVALSHA", name.sha, 1, *command[1:]) if isinstance(name, Script) else command


def _by_text(command: Command) -> tuple[Any, ...]:
    name = command[0]
    return ("EVAL", name.text, 1, *command[1:]) if isinstance(name, Script) else command


def _came_out_of_client(error: Exception) -> bool:
    """It was raised in redis-py, or in what that called."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).startswith("redis."):
            return True
        trace = trace.tb_next
    return False


def _fail(error: Exception) -> NoReturn:
    """Raise what this failure means to the caller. No text of ours repeats a command's arguments or credentials."""
    if isinstance(error.__cause__, RedisError):
        # What a connection attempt failed of.
        error = error.__cause__
    text = str(error)
    if isinstance(error, (RuntimeError, AttributeError)) and not _came_out_of_client(error):
        raise error  # a defect of ours
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        raise StoreRefused("Redis refused our credentials; check user and password in the store URL") from None
    if isinstance(error, NoPermissionError):
        raise StoreRefused("the Redis user lacks a permission; metatrie needs ~mt:* with read, write and scripting")
    # redis-py turns a reply's code into a type, but not the code of a command that failed inside a script.
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in text:
        raise StoreRefused("Redis is out of memory; raise maxmemory, or let the sweeper reclaim dead replicas")
    if isinstance(error, MovedError) or text.startswith("MOVED "):
        raise StoreRefused("this server is part of a cluster; use a redis+cluster:// URL")
    if isinstance(error, _PASSING) or not isinstance(error, ResponseError):
        raise StoreUnavailable(f"Redis cannot be reached or cannot serve now ({type(error).__name__})") from error
    for code in _PASSING_CODES:
        if text.startswith(f"{code} ") or f"-{code} " in text:
            raise StoreUnavailable(f"Redis cannot serve now ({code})") from None
    if "MISCONF" in text:
        raise StoreRefused("Redis stopped accepting writes since it cannot persist; see its log") from None
    raise StoreRefused(f"Redis refused a command: {text.split(', with args')[0][:200]}") from None
