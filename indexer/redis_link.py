"""The wire to Redis: bounded pipelines of plain commands and scripts, and what each failure means.

A single server (or a Sentinel-managed one) gets one pipeline per call; a cluster gets the same commands one by one,
concurrently, since its client refuses scripts in pipelines. Every script touches exactly the one key it is given, so
both are the same thing to the caller. Nothing is retried, but for a script the server does not know yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, NamedTuple, NoReturn

from redis.asyncio import Redis, RedisCluster
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

MAX_PIPELINE = 128
"""Commands on the wire before their replies are read; a longer call takes several rounds."""
MAX_CONNECTIONS = 32
"""Connections per process and server; callers beyond it queue."""

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


Command = tuple[str | Script | bytes | int, ...]
"""A command name or script, its key, its arguments."""


class RedisLink:
    """Runs commands on one Redis, Valkey, Sentinel service or cluster. Raises nothing but store errors."""

    def __init__(
        self, client: Redis | RedisCluster, *, closers: Sequence[Callable[[], Awaitable[object]]] = ()
    ) -> None:
        """client: returns raw bytes and retries nothing. closers: run after it on close, in order."""
        self._client = client
        self._closers = tuple(closers)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def run(self, commands: Sequence[Command], *, first: Sequence[Command] = ()) -> list[Any]:
        """Replies to `commands`, in order. `first`: executed before any of them, replies dropped.

        Raises StoreUnavailable or StoreRefused for the first command that failed; others may have been executed.
        """
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

    async def eviction_policies(self) -> list[str]:
        """maxmemory-policy of every primary that tells; managed services often forbid CONFIG."""
        try:
            if not isinstance(self._client, RedisCluster):
                (setting,) = await self.run([("CONFIG GET", "maxmemory-policy")])
                return list(setting.values())
            try:
                primaries = self._client.get_primaries()
                settings = [
                    await self._client.execute_command("CONFIG GET", "maxmemory-policy", target_nodes=node)
                    for node in primaries
                ]
            except (RedisError, RedisClusterException, OSError) as error:
                _fail(error)
            return [policy for setting in settings for policy in setting.values()]
        except StoreRefused:
            return []

    async def close(self) -> None:
        await self._client.aclose()
        for closer in self._closers:
            await closer()

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
            except (RedisError, OSError, TimeoutError) as error:
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
            except (RedisError, RedisClusterException, OSError, TimeoutError) as error:
                _fail(error)


async def _execute(client: Redis, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    pipeline = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


def _by_digest(command: Command) -> tuple[Any, ...]:
    name = command[0]
    return ("EVALSHA", name.sha, 1, *command[1:]) if isinstance(name, Script) else command


def _by_text(command: Command) -> tuple[Any, ...]:
    name = command[0]
    return ("EVAL", name.text, 1, *command[1:]) if isinstance(name, Script) else command


def _fail(error: Exception) -> NoReturn:
    """Raise what this failure means to the caller. No text of ours repeats a command's arguments or credentials."""
    if isinstance(error.__cause__, RedisError):
        # What a connection attempt failed of.
        error = error.__cause__
    text = str(error)
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
