"""HTTP conventions shared by every server of ours: problem documents, typed bodies, bounds, metrics, lifecycle.

Strategy. One middleware, and thin functions that handlers call; a request costs what aiohttp costs plus a few
microseconds. An endpoint that must cost less is made *hot* with `add_hot_route`: http_front.py then answers its plain
requests without aiohttp, under the same conventions. Every error leaves as an RFC 9457 problem document, including
those aiohttp raises by itself (404, 405, 413); only a request so malformed that no HTTP parser accepts it gets
aiohttp's own 400.

Bounds. A body is at most `max_body_bytes`, after decompression, and must arrive within `body_timeout_s`. At most
`max_in_flight` requests run at a time, more are answered 503. An idle or header-less connection is closed after
`KEEPALIVE_S`.

Invariants: no error text or log line carries a value from a request body, since those are prompts and salts; an
unexpected exception is logged once per place it was raised at, without its message, and counted after that.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .api import MAX_PROMPT_TOKENS, Problem, PromptRequest
from .errors import (
    BodyTooLarge,
    CallerError,
    ConfigError,
    InvalidField,
    StoreError,
    StoreRefused,
    Superseded,
    TooManyRequests,
)
from .hashing import token_ids_of
from .http_front import Front, HotAnswer, HotHead, HotRoute, HotRoutes, RequestHead, header_fields
from .native import Kernel, kernel
from .soon import Soon

DEFAULT_MAX_BODY_BYTES = 8 << 20
"""8 MiB: about a million token ids in JSON; a prompt of 128k tokens takes less than 1 MiB."""
DEFAULT_BODY_TIMEOUT_S = 30.0
DEFAULT_MAX_IN_FLIGHT = 1024
KEEPALIVE_S = 75.0
RETRY_AFTER_S = 1

JSON = "application/json"
MSGPACK = "application/msgpack"
PROBLEM_JSON = "application/problem+json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")
P = TypeVar("P", bound=PromptRequest)

_log = logging.getLogger("metatrie.http")
_json_encode = msgspec.json.Encoder().encode
_msgpack_encode = msgspec.msgpack.Encoder().encode
_PROBLEM_TYPE = "urn:problem-type:metatrie:"
_MAX_LOGGED_CAUSES = 256
_LATENCY_BUCKETS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
_BUCKET_BOUNDS = (*(str(bound) for bound in _LATENCY_BUCKETS), "+Inf")
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


# Problems


def problem_response(problem: Problem, *, retry_after_s: int | None = None) -> web.Response:
    """The response that carries a problem document. Always JSON: RFC 9457 defines no MessagePack form."""
    headers = {"Content-Type": PROBLEM_JSON}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return web.Response(status=problem.status, body=_json_encode(problem), headers=headers)


def problem_of(error: CallerError | StoreError | Superseded | web.HTTPException) -> Problem:
    """The problem document for an error raised on purpose, by us or by aiohttp."""
    match error:
        case CallerError():
            return Problem(
                type=_PROBLEM_TYPE + re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__).lower(),
                title=error.title,
                status=error.status,
                detail=error.detail,
                field=error.field,
                remedy=error.remedy,
            )
        case StoreError():
            # The store's own text may name hosts; it belongs in our logs, not in a caller's hands.
            refused = isinstance(error, StoreRefused)
            return Problem(
                type=_PROBLEM_TYPE + ("store-refused" if refused else "store-unavailable"),
                title="Index store refused" if refused else "Index store unavailable",
                status=503,
                detail="the index store is unfit or full" if refused else "the index store cannot be reached",
                remedy="see /readyz and the server's log" if refused else "retry later",
            )
        case Superseded():
            return Problem(
                type=_PROBLEM_TYPE + "superseded",
                title="Superseded",
                status=409,
                detail="another consumer owns this replica's registration",
                remedy="unregister it first, or wait until its lease has run out",
            )
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return _plain(405, error.reason, "this path does not take this method", f"use one of: {allowed}")
        case web.HTTPNotFound():
            return _plain(404, error.reason, "there is nothing at this path", None)
        case _:
            return _plain(error.status, error.reason, "the request cannot be served", None)


def _plain(status: int, title: str, detail: str, remedy: str | None) -> Problem:
    return Problem(type="about:blank", title=title, status=status, detail=detail, remedy=remedy)


# Bodies


async def read_body(request: web.Request, *, timeout_s: float = DEFAULT_BODY_TIMEOUT_S) -> bytes:
    """The body as it came, decompressed. Raises InvalidField, and aiohttp's 413 and 408."""
    try:
        if request.content.is_eof():  # it came with the headers: no timer to pay for
            return await request.read()
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except web.RequestPayloadError:
        raise InvalidField(
            "the body does not follow its own framing or encoding headers",
            remedy="check Content-Length, Transfer-Encoding and Content-Encoding",
        ) from None


class Body(Generic[T]):
    """Reads request bodies as one struct type, from JSON or MessagePack by Content-Type (JSON if there is none)."""

    def __init__(self, kind: type[T], *, timeout_s: float = DEFAULT_BODY_TIMEOUT_S) -> None:
        self.kind = kind
        self._timeout_s = timeout_s
        self._json = msgspec.json.Decoder(kind).decode
        self._msgpack = msgspec.msgpack.Decoder(kind).decode

    async def read(self, request: web.Request) -> T:
        """The decoded body.

        Raises InvalidField naming the field path (or no field, if the body is no document at all), and aiohttp's
        413, 408 and 415.
        """
        decode = self._decoder(request)
        return decode_as(decode, await read_body(request, timeout_s=self._timeout_s))

    def decode(self, head: RequestHead, raw: bytes) -> T:
        """As `read`, of a body that is here already."""
        return decode_as(self._decoder(head), raw)

    def _decoder(self, head: RequestHead) -> Callable[[bytes], T]:
        declared = head.headers.get("Content-Type")
        if declared is None or declared == JSON:
            return self._json
        media_type = declared.partition(";")[0].strip().lower()
        if media_type == JSON or media_type.endswith("+json"):
            return self._json
        if media_type.endswith("msgpack"):
            return self._msgpack
        raise web.HTTPUnsupportedMediaType


class PromptBody(Body[P]):
    """A body that names a prompt: the native kernel, where there is one, reads its token ids out of JSON."""

    def __init__(self, kind: type[P], *, timeout_s: float = DEFAULT_BODY_TIMEOUT_S) -> None:
        super().__init__(kind, timeout_s=timeout_s)
        if kernel is not None:
            self._json = partial(_decode_split, kernel, self._json)


def _decode_split(kernel: Kernel, decode: Callable[[bytes], P], raw: bytes) -> P:
    parts = kernel.split_token_ids(raw, MAX_PROMPT_TOKENS)
    if parts is None:
        return decode(raw)
    tokens, rest = parts
    request = decode(rest)
    request.token_ids = token_ids_of(tokens)
    return request


def decode_as(decode: Callable[[bytes], T], raw: bytes) -> T:
    """Decode, turning msgspec's errors into InvalidField without echoing what was sent."""
    try:
        return decode(raw)
    except msgspec.ValidationError as error:
        what, path = _where(str(error))
        raise InvalidField(
            what, field=path, remedy="see /openapi.json for the field's type and bounds" if path else None
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidField(
            "the body is empty or no well-formed document" if raw else "the body is empty",
            remedy=f"send {JSON} or {MSGPACK}, and name it in Content-Type",
        ) from None


def _where(message: str) -> tuple[str, str | None]:
    """Split a msgspec message into a text free of caller-supplied values, and a field path."""
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else ("the value is not allowed", None)
    if what.startswith("Invalid"):  # "Invalid enum value 'x'" quotes the value
        what = "the value is not one of the allowed ones"
    elif what.startswith("Object missing required field"):
        missing = what.split("`")[1]
        return "a required field is missing", f"{path}.{missing}" if path else missing
    elif not what.startswith("Expected"):
        what = "the value is not allowed"
    return what.replace("`", ""), path or None


def reply(request: web.Request, value: object, *, status: int = 200) -> web.Response:
    """The value as MessagePack if Accept asks for it (or, with no preference, if the request body was), else JSON."""
    media_type, body = encoded(request, value)
    return web.Response(status=status, body=body, headers={"Content-Type": media_type})


def encoded(head: RequestHead, value: object) -> Encoded:
    """Media type and body of that reply."""
    wanted = head.headers.get("Accept")
    if wanted is None or wanted == "*/*":
        wanted = head.headers.get("Content-Type", JSON)
    if "msgpack" in wanted:
        return MSGPACK, _msgpack_encode(value)
    return JSON, _json_encode(value)


# Metrics


class HttpMetrics(Collector):
    """Requests and latency by route. Routes are the server's own templates, so the label set is fixed."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        """process: `router`, `sidecar`, …: the metrics are named `metatrie_<process>_http_…`."""
        self._name = f"metatrie_{process}_http"
        self._tallies: dict[str, _Tally] = {}
        registry.register(self)
        self.unexpected = Counter(
            f"metatrie_{process}_http_unexpected_errors",
            "Requests that failed for a defect of ours",
            registry=registry,
        )

    def tally(self, label: str) -> Callable[[int, float], None]:
        """Counts one route's requests: status, seconds."""
        tally = self._tallies.get(label)
        if tally is None:
            tally = self._tallies[label] = _Tally()
        return tally.observe

    def observe(self, route: web.AbstractRoute, status: int, seconds: float) -> None:
        """route: as aiohttp resolved it."""
        resource = route.resource
        self.tally("unmatched" if resource is None else f"{route.method} {resource.canonical}")(status, seconds)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(f"{self._name}_requests", "Requests answered", labels=["route", "status"])
        seconds = HistogramMetricFamily(
            f"{self._name}_request_seconds",
            "Time from a request's headers to the end of its handler",
            labels=["route"],
        )
        for route, tally in self._tallies.items():
            for status, count in tally.statuses.items():
                requests.add_metric([route, str(status)], count, created=tally.created)
            buckets = zip(_BUCKET_BOUNDS, accumulate(tally.buckets), strict=True)
            seconds.add_metric([route], list(buckets), tally.seconds)
        yield requests
        yield seconds


class _Tally:
    """One route's requests. Plain numbers, since a request must not pay for locks and labels."""

    __slots__ = ("buckets", "created", "seconds", "statuses")

    def __init__(self) -> None:
        self.created = time.time()
        self.statuses: dict[int, int] = {}
        self.buckets = [0] * len(_BUCKET_BOUNDS)
        """Requests by the first bound they do not exceed."""
        self.seconds = 0.0

    def observe(self, status: int, seconds: float) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.buckets[bisect_left(_LATENCY_BUCKETS, seconds)] += 1
        self.seconds += seconds


def metrics_handler(registry: CollectorRegistry) -> Handler:
    """Handler of `/metrics`: Prometheus text, or OpenMetrics where the scraper asks for it."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(registry), headers={"Content-Type": content_type})

    return metrics


# Application and server


def application(
    metrics: HttpMetrics,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
) -> web.Application:
    """An empty application that follows these conventions; add routes to it."""
    conventions = _Conventions(metrics, max_body_bytes, max_in_flight)
    app = web.Application(middlewares=[conventions.middleware()], client_max_size=max_body_bytes)
    app[_CONVENTIONS] = conventions
    return app


Encoded = tuple[str, bytes]
"""Media type and body."""
HotHandler = Callable[[HotHead, bytes], Encoded | Soon[Encoded] | Awaitable[Encoded]]
"""The 200 answer to a POST with this body, without a task where it can be had without; raises as others do."""


def add_hot_route(app: web.Application, path: str, handler: HotHandler) -> None:
    """Let plain POST requests to `path` be answered without aiohttp. The application, made by `application`, must
    serve the path to all other requests as well, and to the same effect."""
    conventions = app[_CONVENTIONS]
    conventions.hot[path] = conventions.guarded(f"POST {path}", handler)


class _Conventions:
    """What becomes of every request of one application, whoever reads it off the wire."""

    def __init__(self, metrics: HttpMetrics, max_body_bytes: int, max_in_flight: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.hot: dict[str, HotRoute] = {}
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._in_flight = 0
        self._logged: set[tuple[type[BaseException], str, int]] = set()

    def middleware(self) -> Middleware:
        @web.middleware
        async def conventions(request: web.Request, handler: Handler) -> web.StreamResponse:
            started = time.perf_counter()
            response: web.StreamResponse
            self._in_flight += 1
            try:
                response = await handler(request) if self._in_flight <= self._max_in_flight else _overloaded()
            except Exception as error:  # the edge of the process: whatever it is must become an answer, and be seen
                if isinstance(error, web.HTTPException) and error.status < 400:
                    raise
                if isinstance(error, ConnectionError) and (
                    request.transport is None or request.transport.is_closing()
                ):
                    raise  # the caller hung up while sending; there is nobody to answer
                response = self._refusal(error)
            finally:
                self._in_flight -= 1
            self._metrics.observe(request.match_info.route, response.status, time.perf_counter() - started)
            return response

        return conventions

    def guarded(self, label: str, handler: HotHandler) -> HotRoute:
        """The handler of a hot route, under the same conventions."""
        observe, clock = self._metrics.tally(label), time.perf_counter

        def route(head: HotHead, body: bytes) -> HotAnswer | Soon[HotAnswer] | Awaitable[HotAnswer]:
            started = clock()
            try:
                if self._in_flight < self._max_in_flight:
                    result = handler(head, body)
                    if not isinstance(result, tuple):
                        self._in_flight += 1
                        if isinstance(result, Soon):
                            return result.map(partial(finish, started))
                        return wait(result, started)
                    answer = _success(result)
                else:
                    answer = _hot(_overloaded())
            except Exception as error:  # as above
                answer = _hot(self._refusal(error))
            observe(answer.status, clock() - started)
            return answer

        def finish(
            started: float, result: Callable[[], Encoded | Awaitable[Encoded]]
        ) -> HotAnswer | Awaitable[HotAnswer]:
            try:
                made = result()
                if not isinstance(made, tuple):
                    return wait(made, started)
                answer = _success(made)
            except Exception as error:  # as above
                answer = _hot(self._refusal(error))
            self._in_flight -= 1
            observe(answer.status, clock() - started)
            return answer

        async def wait(result: Awaitable[Encoded], started: float) -> HotAnswer:
            try:
                answer = _success(await result)
            except Exception as error:  # as above
                answer = _hot(self._refusal(error))
            finally:
                self._in_flight -= 1
            observe(answer.status, clock() - started)
            return answer

        return route

    def too_late(self) -> HotAnswer:
        return _hot(self._refusal(web.HTTPRequestTimeout()))

    def _refusal(self, error: Exception) -> web.Response:
        match error:
            case CallerError():
                retry_after_s = RETRY_AFTER_S if error.status == 503 else None
                if isinstance(error, TooManyRequests):
                    retry_after_s = error.retry_after_s
                return problem_response(problem_of(error), retry_after_s=retry_after_s)
            case StoreError():
                return problem_response(problem_of(error), retry_after_s=RETRY_AFTER_S)
            case Superseded():
                return problem_response(problem_of(error))
            case web.HTTPRequestEntityTooLarge():
                return problem_response(
                    problem_of(
                        BodyTooLarge(
                            f"the body is larger than {self.max_body_bytes} bytes",
                            remedy="send a shorter prompt, or MessagePack, or raise the server's body limit",
                        )
                    )
                )
            case web.HTTPUnsupportedMediaType():
                return problem_response(
                    _plain(415, error.reason, "the body's Content-Type is not known", f"send {JSON} or {MSGPACK}")
                )
            case web.HTTPRequestTimeout():
                return problem_response(_plain(408, error.reason, "the body took too long to arrive", None))
            case web.HTTPException():
                response = problem_response(problem_of(error))
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
                return response
            case _:
                return self._unexpected(error)

    def _unexpected(self, error: Exception) -> web.Response:
        self._metrics.unexpected.inc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = (type(error), frame.filename, frame.lineno or 0)
        if cause not in self._logged and len(self._logged) < _MAX_LOGGED_CAUSES:
            self._logged.add(cause)
            # Frames only: the exception's text may quote a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("unexpected %s while serving a request\n%s", type(error).__name__, where)
        return problem_response(_plain(500, "Internal Server Error", "this is a defect of the server", None))


_CONVENTIONS = web.AppKey("conventions", _Conventions)
_TYPE_FIELDS = {media_type: header_fields({"Content-Type": media_type}) for media_type in (JSON, MSGPACK)}


def _overloaded() -> web.Response:
    return problem_response(
        _plain(503, "Service Unavailable", "too many requests are in flight", "retry later, or elsewhere"),
        retry_after_s=RETRY_AFTER_S,
    )


def _hot(response: web.Response) -> HotAnswer:
    body = response.body
    assert isinstance(body, bytes)
    return HotAnswer(response.status, header_fields(response.headers), body)


def _success(result: Encoded) -> HotAnswer:
    media_type, content = result
    return HotAnswer(200, _TYPE_FIELDS.get(media_type) or header_fields({"Content-Type": media_type}), content)


class HttpServer:
    """One application on one listening socket.

        async with HttpServer(app, port=0) as server:
            ... server.url ...

    Stopping refuses new connections at once and gives running requests `grace_s` to end.
    """

    def __init__(
        self,
        app: web.Application,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_s: float = 5.0,
        share_port: bool = False,
    ) -> None:
        """port 0: the operating system picks one, see `port` after `start`. share_port: other processes of ours
        listen on it, too, and the kernel spreads connections over them."""
        self._share_port = share_port
        self._host = host
        self._port = port
        self._grace_s = grace_s
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=grace_s)
        self._listener: asyncio.Server | None = None
        conventions = app.get(_CONVENTIONS)
        self._hot: HotRoutes | None = None
        if conventions is not None and conventions.hot:
            self._hot = HotRoutes(
                conventions.hot,
                too_late=conventions.too_late,
                max_body=conventions.max_body_bytes,
                body_timeout_s=DEFAULT_BODY_TIMEOUT_S,
                idle_s=KEEPALIVE_S,
            )

    async def start(self) -> Self:
        """Raises ConfigError if the address cannot be listened on."""
        await self._runner.setup()
        server, hot, loop = self._runner.server, self._hot, asyncio.get_running_loop()
        assert server is not None
        connection = server if hot is None else lambda: Front(hot, server, loop)
        try:
            self._listener = await loop.create_server(
                connection, self._host, self._port, backlog=1024, reuse_port=self._share_port or None
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                "port",
                f"cannot listen on {self._host}:{self._port} ({error.strerror})",
                "choose another host or port",
            ) from error
        self._port = int(self._listener.sockets[0].getsockname()[1])
        return self

    @property
    def port(self) -> int:
        """The port listened on."""
        return self._port

    @property
    def url(self) -> str:
        """Base URL, without a trailing slash."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def stop(self) -> None:
        """Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._hot is not None:
            await self._hot.drain(self._grace_s)
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
