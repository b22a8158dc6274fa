"""HTTP conventions shared by every server of ours: problem documents, typed bodies, bounds, metrics, lifecycle.

Strategy. One middleware, and thin functions that handlers call; a request costs what aiohttp costs plus a few
microseconds. Every error leaves as an RFC 9457 problem document, including those aiohttp raises by itself (404,
405, 413); only a request so malformed that no HTTP parser accepts it gets aiohttp's own 400.

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
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

from .api import Problem
from .errors import (
    BodyTooLarge,
    CallerError,
    ConfigError,
    InvalidField,
    StoreError,
    StoreRefused,
    Superseded,
)

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

_log = logging.getLogger("metatrie.http")
_json_encode = msgspec.json.Encoder().encode
_msgpack_encode = msgspec.msgpack.Encoder().encode
_PROBLEM_TYPE = "urn:problem-type:metatrie:"
_MAX_LOGGED_CAUSES = 256
_LATENCY_BUCKETS = (
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
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
        decode: Callable[[bytes], T]
        declared = request.headers.get("Content-Type")
        if declared is None or declared == JSON:
            decode = self._json
        else:
            media_type = declared.partition(";")[0].strip().lower()
            if media_type == JSON or media_type.endswith("+json"):
                decode = self._json
            elif media_type.endswith("msgpack"):
                decode = self._msgpack
            else:
                raise web.HTTPUnsupportedMediaType
        try:
            if request.content.is_eof():  # it came with the headers: no timer to pay for
                raw = await request.read()
            else:
                async with asyncio.timeout(self._timeout_s):
                    raw = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        except web.RequestPayloadError:
            raise InvalidField(
                "the body does not follow its own framing or encoding headers",
                remedy="check Content-Length, Transfer-Encoding and Content-Encoding",
            ) from None
        return decode_as(decode, raw)


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
    headers = request.headers
    wanted = headers.get("Accept")
    if wanted is None or wanted == "*/*":
        wanted = headers.get("Content-Type", JSON)
    if "msgpack" in wanted:
        return web.Response(status=status, body=_msgpack_encode(value), headers={"Content-Type": MSGPACK})
    return web.Response(status=status, body=_json_encode(value), headers={"Content-Type": JSON})


# Metrics


class HttpMetrics:
    """Requests and latency by route. Routes are the server's own templates, so the label set is fixed."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        """process: `router`, `sidecar`, …: the metrics are named `metatrie_<process>_http_…`."""
        self._requests = Counter(
            f"metatrie_{process}_http_requests", "Requests answered", ["route", "status"], registry=registry
        )
        self._seconds = Histogram(
            f"metatrie_{process}_http_request_seconds",
            "Time from a request's headers to the end of its handler",
            ["route"],
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.unexpected = Counter(
            f"metatrie_{process}_http_unexpected_errors",
            "Requests that failed for a defect of ours",
            registry=registry,
        )
        self._children: dict[tuple[object, int], tuple[Counter, Histogram]] = {}

    def observe(self, request: web.Request, status: int, seconds: float) -> None:
        route = request.match_info.route
        key: tuple[object, int] = (route if route.resource is not None else None, status)
        children = self._children.get(key)
        if children is None:
            label = f"{route.method} {route.resource.canonical}" if route.resource is not None else "unmatched"
            children = self._requests.labels(label, str(status)), self._seconds.labels(label)
            self._children[key] = children
        children[0].inc()
        children[1].observe(seconds)


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
    return web.Application(
        middlewares=[_conventions(metrics, max_body_bytes, max_in_flight)], client_max_size=max_body_bytes
    )


def _conventions(metrics: HttpMetrics, max_body_bytes: int, max_in_flight: int) -> Middleware:
    in_flight = 0
    logged: set[tuple[type[BaseException], str, int]] = set()

    def unexpected(error: Exception) -> web.Response:
        metrics.unexpected.inc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = (type(error), frame.filename, frame.lineno or 0)
        if cause not in logged and len(logged) < _MAX_LOGGED_CAUSES:
            logged.add(cause)
            # Frames only: the exception's text may quote a prompt.
            where = "".join(traceback.format_tb(error.__traceback__))
            _log.error("unexpected %s while serving a request\n%s", type(error).__name__, where)
        return problem_response(_plain(500, "Internal Server Error", "this is a defect of the server", None))

    def refusal(error: web.HTTPException) -> web.Response:
        match error:
            case web.HTTPRequestEntityTooLarge():
                return problem_response(
                    problem_of(
                        BodyTooLarge(
                            f"the body is larger than {max_body_bytes} bytes",
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
            case _:
                response = problem_response(problem_of(error))
                if "Allow" in error.headers:
                    response.headers["Allow"] = error.headers["Allow"]
                return response

    def overloaded() -> web.Response:
        return problem_response(
            _plain(503, "Service Unavailable", "too many requests are in flight", "retry later, or elsewhere"),
            retry_after_s=RETRY_AFTER_S,
        )

    @web.middleware
    async def conventions(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal in_flight
        started = time.perf_counter()
        response: web.StreamResponse
        in_flight += 1
        try:
            response = await handler(request) if in_flight <= max_in_flight else overloaded()
        except CallerError as error:
            retry_after_s = RETRY_AFTER_S if error.status == 503 else None
            response = problem_response(problem_of(error), retry_after_s=retry_after_s)
        except StoreError as error:
            response = problem_response(problem_of(error), retry_after_s=RETRY_AFTER_S)
        except Superseded as error:
            response = problem_response(problem_of(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = refusal(error)
        except Exception as error:  # the edge of the process: whatever it is must become a 500, and be seen
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                raise  # the caller hung up while sending; there is nobody to answer
            response = unexpected(error)
        finally:
            in_flight -= 1
        metrics.observe(request, response.status, time.perf_counter() - started)
        return response

    return conventions


class HttpServer:
    """One application on one listening socket.

        async with HttpServer(app, port=0) as server:
            ... server.url ...

    Stopping refuses new connections at once and gives running requests `grace_s` to end.
    """

    def __init__(self, app: web.Application, *, host: str = "127.0.0.1", port: int = 0, grace_s: float = 5.0) -> None:
        """port 0: the operating system picks one, see `port` after `start`."""
        self._host = host
        self._port = port
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=KEEPALIVE_S, shutdown_timeout=grace_s)

    async def start(self) -> Self:
        """Raises ConfigError if the address cannot be listened on."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port, backlog=1024).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                "port",
                f"cannot listen on {self._host}:{self._port} ({error.strerror})",
                "choose another host or port",
            ) from error
        self._port = int(self._runner.addresses[0][1])
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
        await self._runner.cleanup()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
