"""A front for aiohttp's connections that answers the plainest requests of hot endpoints itself.

Strategy. aiohttp costs more per request than matching a prompt does. So each connection's bytes pass through a Front:
a POST to a hot path, framed by Content-Length and with nothing unusual about its head, is read and answered here;
every other request is passed on to aiohttp's own handler of the connection, byte for byte, and so is everything from
the first byte on whose framing the Front does not understand.

Invariants.
- The Front always knows where the next request starts, or has given the connection to aiohttp for good. It takes a
  hot request only while aiohttp provably waits for one (nothing parsed, nothing being answered); so answers never
  overtake each other, however a client pipelines, and a body can never pass for a head.
- What the Front answers follows the same limits as aiohttp's: head size, body size, time for a body to arrive, idle
  time. A head it would have to refuse is left to aiohttp, which words the refusal.
- A route that need not wait is answered within the callback that brought the last byte of its body, one that waits
  for one answer within the callback that brings it: a task, and turns of the loop for it, would cost as much as the
  lookup. One such answer per turn and connection, so that a client that pipelines cannot keep the loop.

Bounds. MAX_HEAD bytes of an incomplete head and one body of at most `max_body` are kept per connection; while a hot
request is answered, or its client does not read its answers, nothing more is read from its connection.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol, cast

from aiohttp import web
from multidict import CIMultiDict

from .soon import Soon

MAX_HEAD: Final = 16_384
"""Longest head that is looked into; a longer one goes to aiohttp, whose limits apply."""
MAX_HEADERS: Final = 100

_HEADER = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?[ \t]*")
_LENGTH_DIGITS: Final = 18
_LENGTH = re.compile(rb"(?:^|\r\n)content-length:[ \t]*([0-9]{1,18})(?=[ \t]*(?:\r\n|$))", re.IGNORECASE)
_UNUSUAL = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade", "trailer", "te"})
"""Headers that a hot request must not have."""
_END = b"\r\n\r\n"


class RequestHead(Protocol):
    """What deciding who may call needs of a request, from aiohttp or from here."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Case-insensitive."""
        ...

    @property
    def remote(self) -> str | None:
        """Address of the peer."""
        ...


class HotHead(NamedTuple):
    """Head of a hot request."""

    headers: Mapping[str, str]
    remote: str | None


class HotAnswer(NamedTuple):
    """What a hot endpoint answers."""

    status: int
    fields: bytes
    """Header lines, each with its end; without Content-Length and Date."""
    body: bytes


HotRoute = Callable[[HotHead, bytes], HotAnswer | Soon[HotAnswer] | Awaitable[HotAnswer]]
"""Answers one request, without a task where it can; must not raise, and neither may making what comes soon."""


def header_fields(headers: Mapping[str, str]) -> bytes:
    """Headers as HotAnswer has them."""
    return b"".join([b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in headers.items()])


class HotRoutes:
    """The hot endpoints of one server, and its connections' answers in progress."""

    def __init__(
        self,
        routes: Mapping[str, HotRoute],
        *,
        too_late: Callable[[], HotAnswer],
        max_body: int,
        body_timeout_s: float,
        idle_s: float,
    ) -> None:
        """routes: by path. too_late: what to say when a body takes longer than `body_timeout_s` to arrive.
        idle_s: how long aiohttp keeps an idle connection."""
        self.too_late = too_late
        self.by_line = {b"POST %s HTTP/1.1" % path.encode(): route for path, route in routes.items()}
        self.max_body = max_body
        self.body_timeout_s = body_timeout_s
        self.idle_s = idle_s
        self.open = True
        self.answering: set[asyncio.Task[None]] = set()
        self._awaiting = 0
        """Connections that will be answered soon."""
        self._brought = asyncio.Event()
        """None is left, while draining."""
        self._waiting: dict[Front, float] = {}
        """Connections whose body is arriving → when it is too late; in that order."""
        self._watch: asyncio.TimerHandle | None = None
        self._second = 0
        self._shared = b""

    def shared_headers(self) -> bytes:
        """Those that every answer has."""
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._shared = f"Date: {formatdate(now, usegmt=True)}\r\n".encode()
        return self._shared

    def waits(self, front: Front, loop: asyncio.AbstractEventLoop) -> None:
        """A body is arriving. One timer watches over all of them: a timer each would cost more than the request."""
        self._waiting[front] = loop.time() + self.body_timeout_s
        if self._watch is None:
            self._watch = loop.call_later(self.body_timeout_s, self._look, loop)

    def arrived(self, front: Front) -> None:
        """It did, or will not."""
        self._waiting.pop(front, None)

    def awaits(self) -> None:
        """A connection will be answered soon."""
        self._awaiting += 1

    def brought(self) -> None:
        """It was."""
        self._awaiting -= 1
        if not (self._awaiting or self.open):
            self._brought.set()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = None
        now = loop.time()
        for front, deadline in list(self._waiting.items()):
            if deadline > now:
                self._watch = loop.call_at(deadline, self._look, loop)
                break
            del self._waiting[front]
            front.too_late()

    async def drain(self, grace_s: float) -> None:
        """Leave further requests to aiohttp and wait for the answers in progress."""
        self.open = False
        if self._watch is not None:
            self._watch.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                if self._awaiting:
                    await self._brought.wait()
                if self.answering:
                    await asyncio.wait(self.answering)


class _Framing(NamedTuple):
    """What a head says of its body."""

    headers: CIMultiDict[str]
    length: int
    """Bytes of body; -1: not framed by a length."""
    plain: bool
    """Nothing in it asks for more than an answer on a connection that stays open."""


class Front(asyncio.Protocol):
    """One connection."""

    def __init__(self, routes: HotRoutes, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        self._routes, self._loop = routes, loop
        self._aiohttp = server()
        self._transport: asyncio.Transport | None = None
        self._remote: str | None = None
        self._buffer = b""
        """Bytes not yet acted on; while a hot body arrives, none."""
        self._given = False
        """aiohttp has the connection for good."""
        self._lent = 0
        """Bytes of the current request that are still to be passed on."""
        self._hot: tuple[HotRoute, HotHead] | None = None
        """The hot request whose body is arriving."""
        self._body: list[bytes] = []
        self._missing = 0
        self._known: tuple[bytes, bytes, HotRoute, HotHead] | None = None
        """The last head of a hot request before and after the digits of its body's length, and what it means: the
        next one mostly equals it."""
        self._busy = False
        """A hot request is being answered, or the next one waits for its turn."""
        self._clogged = False
        """The client does not read what it is sent."""
        self._paused = False

    # Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are none by type
        peer = transport.get_extra_info("peername")
        self._remote = str(peer[0]) if isinstance(peer, (list, tuple)) else None
        self._aiohttp.connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._routes.arrived(self)
        self._transport = None
        self._aiohttp.connection_lost(exc)

    def pause_writing(self) -> None:
        self._clogged = True
        self._aiohttp.pause_writing()

    def resume_writing(self) -> None:
        self._clogged = False
        self._aiohttp.resume_writing()
        if not self._busy:
            self._go_on()

    def eof_received(self) -> None:
        self._aiohttp.eof_received()

    def data_received(self, data: bytes) -> None:
        if self._given:
            self._aiohttp.data_received(data)
        elif self._hot is not None:
            self._feed_body(data)
        else:
            self._buffer = self._buffer + data if self._buffer else data
            if self._busy or (self._clogged and not self._lent):
                if not self._paused and self._transport is not None:
                    self._paused = True
                    self._transport.pause_reading()
            else:
                self._advance()

    # Requests

    def _advance(self) -> None:
        """Act on what is buffered, as far as it goes."""
        while self._buffer and not self._busy:
            if self._given:
                rest, self._buffer = self._buffer, b""
                self._aiohttp.data_received(rest)
            elif self._lent:
                self._lend(self._lent)
            elif self._clogged:
                return
            elif not self._take_known():
                end = self._buffer.find(_END, 0, MAX_HEAD)
                if end < 0:
                    if len(self._buffer) < MAX_HEAD:
                        return
                    self._given = True
                else:
                    self._begin(end)

    def _take_known(self) -> bool:
        """Take a hot request whose head says the same as the last one's but for the length of its body."""
        known, data = self._known, self._buffer
        if known is None or not data.startswith(known[0]):
            return False
        before, after, route, head = known
        at = len(before)
        stop = data.find(b"\r", at, at + _LENGTH_DIGITS + 1)
        if stop < 0 or not data.startswith(after, stop) or not data[at:stop].isdigit():
            return False
        length, routes = int(data[at:stop]), self._routes
        if not (0 < length <= routes.max_body and routes.open and self._aiohttp_waits()):
            return False
        self._take(route, head, stop + len(after), length)
        return True

    def _begin(self, end: int) -> None:
        """A whole head is buffered: take the request, lend it, or give the connection away."""
        line, _, fields = self._buffer[:end].partition(b"\r\n")
        framing = _framing(fields) if _is_plain(line) else None
        if framing is None or framing.length < 0:
            self._given = True
            return
        routes = self._routes
        route = routes.by_line.get(line)
        if (
            route is None
            or not framing.plain
            or not routes.open
            or not 0 < framing.length <= routes.max_body
            or not self._aiohttp_waits()
        ):
            self._lend(end + len(_END) + framing.length)
            return
        head, at = HotHead(framing.headers, self._remote), len(line) + 2
        digits = _LENGTH.search(fields)
        assert digits is not None  # there is a body
        start, stop = at + digits.start(1), at + digits.end(1)
        self._known = self._buffer[:start], self._buffer[stop : end + len(_END)], route, head
        self._take(route, head, end + len(_END), framing.length)

    def _take(self, route: HotRoute, head: HotHead, at: int, length: int) -> None:
        """A hot request's body begins at `at`."""
        self._outlive()
        self._hot, self._missing = (route, head), length
        rest, self._buffer = self._buffer[at:], b""
        if len(rest) < length:
            self._routes.waits(self, self._loop)
        if rest:
            self._feed_body(rest)

    def _lend(self, size: int) -> None:
        """Pass the next `size` bytes on to aiohttp, as they arrive."""
        some, self._buffer = self._buffer[:size], self._buffer[size:]
        self._lent = size - len(some)
        self._aiohttp.data_received(some)

    def _aiohttp_waits(self) -> bool:
        """Is aiohttp between requests? Not asked of its public interface; if it stops telling, it keeps them all."""
        waiter = getattr(self._aiohttp, "_waiter", None)
        return waiter is not None and not waiter.done()

    def _outlive(self) -> None:
        """The connection is in use, as far as aiohttp's timer for idle ones is concerned."""
        if hasattr(self._aiohttp, "_next_keepalive_close_time"):
            self._aiohttp._next_keepalive_close_time = self._loop.time() + self._routes.idle_s

    def _feed_body(self, data: bytes) -> None:
        if len(data) > self._missing:
            self._buffer = data[self._missing :]
            data = data[: self._missing]
        self._missing -= len(data)
        if self._missing or self._body:
            self._body.append(data)
            if self._missing:
                return
            data = b"".join(self._body)
            self._body.clear()
        assert self._hot is not None
        (route, head), self._hot = self._hot, None
        self._routes.arrived(self)
        answer = route(head, data)
        if isinstance(answer, HotAnswer):
            self._write(answer)
            if self._buffer:
                self._busy = True
                self._loop.call_soon(self._go_on)
            return
        self._busy = True
        if isinstance(answer, Soon):
            self._routes.awaits()
            answer.when(self._brought)
        else:
            self._wait_for(answer)

    def _brought(self, soon: Soon[HotAnswer]) -> None:
        answer = soon.result()
        if isinstance(answer, HotAnswer):
            self._end(answer)
        else:
            self._wait_for(answer)
        self._routes.brought()

    def _wait_for(self, answer: Awaitable[HotAnswer]) -> None:
        task = self._loop.create_task(self._answer(answer))
        self._routes.answering.add(task)
        task.add_done_callback(self._routes.answering.discard)

    def too_late(self) -> None:
        """The body took too long: say so and close, since there is no telling what would come next."""
        if self._transport is not None:
            self._write(self._routes.too_late(), b"Connection: close\r\n")
            self._transport.close()

    async def _answer(self, waiting: Awaitable[HotAnswer]) -> None:
        self._end(await waiting)

    def _end(self, answer: HotAnswer) -> None:
        """The answer to the request in progress, some time after it came."""
        if self._transport is None or self._transport.is_closing():
            return
        self._write(answer)
        self._outlive()
        self._go_on()

    def _go_on(self) -> None:
        """Turn to what arrived in the meantime."""
        self._busy = False
        if self._transport is None or self._transport.is_closing():
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._advance()

    def _write(self, answer: HotAnswer, more: bytes = b"") -> None:
        status, fields, content = answer
        assert self._transport is not None
        self._transport.write(
            b"HTTP/1.1 %d %b\r\n%bContent-Length: %d\r\n%b%b\r\n%b"
            % (status, _reason(status), fields, len(content), self._routes.shared_headers(), more, content)
        )


def _is_plain(line: bytes) -> bool:
    return line.endswith(b" HTTP/1.1") and line.count(b" ") == 2


def _reason(status: int) -> bytes:
    return b"OK" if status == 200 else HTTPStatus(status).phrase.encode()


def _framing(fields: bytes) -> _Framing | None:
    """None where the header lines are not of the plainest syntax, or disagree about the body's length."""
    headers: CIMultiDict[str] = CIMultiDict()
    plain, chunked, length = True, False, 0
    lines = fields.split(b"\r\n") if fields else []
    if len(lines) > MAX_HEADERS:
        return None
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            return None
        name, value = found[1].decode("ascii").lower(), (found[2] or b"").decode("ascii")
        if name in headers:
            plain = False
        if name == "content-length":
            if name in headers or not value.isdigit() or len(value) > 18:
                return None
            length = int(value)
        elif name == "connection":
            plain = plain and value.lower() == "keep-alive"
        elif name in _UNUSUAL:
            plain = False
            chunked = chunked or name == "transfer-encoding"
        headers.add(name, value)
    if "upgrade" in headers:
        return None
    return _Framing(headers, -1 if chunked else length, plain)
