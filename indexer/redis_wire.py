"""A thin connection for the data path: packed commands out, replies in, nothing in between.

Strategy. redis-py makes the connection (address, TLS, credentials, database, Sentinel) and then this module takes its
transport over: commands are packed by hiredis and written at once, replies are parsed as they arrive and handed to
whoever asked, in order. Any number of callers share one connection, so nobody waits for a free one and concurrent
queries travel in one segment. Replies are raw: bytes, integers, lists, None, and ReplyError values.

Invariants: a connection that failed in any way is closed, all its callers get ConnectionError or TimeoutError, and
the next call opens another; nothing is ever sent twice. Bounds are the caller's: calls in flight, and commands per
call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import hiredis
from redis.asyncio.connection import AbstractConnection

ReplyError = hiredis.ReplyError
"""An error reply, as a value among the others."""
Packable = Iterable[str | bytes | int]


pack = cast(Callable[[tuple[str | bytes | int, ...]], bytes], hiredis.pack_command)  # typed for one-element tuples
"""A command as it goes over the wire."""


Bring = Callable[[list[Any] | Exception], None]
"""Gets the replies to a call, in order, or what became of the connection. Must not raise."""


class _Call:
    """Commands on the wire whose replies are awaited."""

    __slots__ = ("bring", "count", "deadline", "replies")

    def __init__(self, count: int, deadline: float, bring: Bring) -> None:
        self.count, self.deadline, self.bring = count, deadline, bring
        self.replies: list[Any] = []


class _Streams(Protocol):
    """What is used of a redis-py connection beyond its interface."""

    _reader: asyncio.StreamReader | None
    _writer: asyncio.StreamWriter | None


class _Replies(asyncio.Protocol):
    """One connection, once it is made."""

    def __init__(self, connection: AbstractConnection, loop: asyncio.AbstractEventLoop) -> None:
        """connection: just made; it is left disconnected, its transport is this one's from now on."""
        self.open = True
        self._loop = loop
        self._timeout_s: float | None = connection.socket_timeout
        streams = cast(_Streams, connection)
        self._writer, streams._writer, streams._reader = streams._writer, None, None  # kept: it closes when it goes
        assert self._writer is not None
        self._transport = cast(asyncio.Transport, self._writer.transport)
        self._reader = hiredis.Reader()
        self._calls: deque[_Call] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    @property
    def in_flight(self) -> int:
        """Calls whose replies are awaited."""
        return len(self._calls)

    def send(self, packed: bytes, count: int, bring: Bring) -> None:
        """Write `count` packed commands."""
        deadline = float("inf")
        if self._timeout_s is not None:
            deadline = self._loop.time() + self._timeout_s
            if self._timer is None:
                # One timer looks after all calls: one each would cost as much as the call.
                self._timer = self._loop.call_at(deadline, self._look)
        self._calls.append(_Call(count, deadline, bring))
        try:
            self._transport.write(packed)
        except RuntimeError:  # uvloop's word for a transport that closed before anybody was told
            self.close(ConnectionError("the connection was lost"))

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        gets, calls = self._reader.gets, self._calls
        try:
            while (reply := gets()) is not False:
                call = calls[0]
                call.replies.append(reply)
                if len(call.replies) == call.count:
                    calls.popleft()
                    call.bring(call.replies)
        except (hiredis.ProtocolError, IndexError):
            self.close(ConnectionError("the server does not speak as expected"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self.close(ConnectionError("the connection was lost"))

    def close(self, error: Exception) -> None:
        """Fail everything outstanding. Idempotent."""
        self.open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()
        while self._calls:
            self._calls.popleft().bring(error)

    def _look(self) -> None:
        self._timer = None
        if self._calls and self.open:
            oldest = self._calls[0].deadline
            if oldest <= self._loop.time():
                self.close(TimeoutError("no reply in time"))
            else:
                self._timer = self._loop.call_at(oldest, self._look)


class Wire:
    """A shared connection to one server, opened when first used and again after it broke."""

    def __init__(self, make: Callable[[], AbstractConnection]) -> None:
        """make: a redis-py connection of RESP 2, not connected yet."""
        self._make = make
        self._replies: _Replies | None = None
        self._opening = asyncio.Lock()

    async def run(self, commands: Iterable[Packable]) -> list[Any]:
        """Replies to these commands, in order. Raises ConnectionError, TimeoutError, OSError, and what redis-py
        raises for a connection that cannot be made."""
        return await (await self.send(commands))

    async def send(self, commands: Iterable[Packable]) -> asyncio.Future[list[Any]]:
        """As `run`, when the commands are on their way. Waits for nothing but a connection that is not open yet."""
        packed = [pack(tuple(command)) for command in commands]
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        if not packed:
            future.set_result([])
            return future
        replies = self._replies
        if replies is None or not replies.open:
            replies = await self._open()

        def bring(brought: list[Any] | Exception) -> None:
            if future.done():
                return
            if isinstance(brought, Exception):
                future.set_exception(brought)
            else:
                future.set_result(brought)

        replies.send(b"".join(packed), len(packed), bring)
        return future

    def post(self, commands: Sequence[bytes], bring: Bring, *, most: int) -> bool:
        """Send these packed commands if the connection is open and has fewer than `most` calls in flight: `bring` is
        called when the replies arrive, without a turn of the loop in between. False: nothing was sent."""
        replies = self._replies
        if replies is None or not replies.open or replies.in_flight >= most:
            return False
        replies.send(b"".join(commands), len(commands), bring)
        return True

    async def _open(self) -> _Replies:
        async with self._opening:
            if self._replies is None or not self._replies.open:
                connection = self._make()
                try:
                    await cast(Callable[[], Awaitable[None]], connection.connect)()  # redis-py leaves it untyped
                except (RuntimeError, AttributeError) as error:  # as above, in the middle of redis-py's handshake
                    raise ConnectionError("the connection was lost while it was made") from error
                self._replies = _Replies(connection, asyncio.get_running_loop())
            return self._replies

    def drop(self) -> None:
        """Close the connection; the next call opens another, perhaps to another server of the same name."""
        if self._replies is not None:
            self._replies.close(ConnectionError("the connection was dropped"))
            self._replies = None
