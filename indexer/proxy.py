"""The OpenAI-compatible front door: decide, send to the chosen engine, pass its answer through, close the loop.

The life of a request
1. Who calls, and may they? (tenants.py) One decode of the body finds what decides its prompt and its target.
2. The prompt becomes token ids as the engine will make them; what cannot is named by stand-ins (stand_ins.py), and a
   header says so. The router decides among replicas that are healthy (health.py), serve the model and have room.
3. The body goes out as it came. Only where it must differ, for an alias or the tenant's salt, is it put together
   again, from the caller's own bytes of every other field.
4. Until the engine's first byte a failure costs nothing: the reservation is freed, and the next replica is asked.
   From then on the answer is the engine's, byte for byte; if it breaks off, the caller gets one error and the end.
5. The engine's `usage` says what it found cached. That is feedback, and frees the reservation; without it (a stream
   whose caller did not ask for usage) the reservation is just freed.

Invariants
- A reservation ends exactly once, whatever happens: success, failure, a caller that hangs up, a defect.
- Nothing is buffered but the incomplete tail of an event, at most MAX_HELD bytes, so that an error can follow it
  cleanly, and a plain answer of up to MAX_KEPT bytes beside its forwarding, for its usage.
- A slow caller slows its engine down, and no more: one chunk is in flight between them. One that takes nothing for
  `send_timeout_s` is cut off; one that hangs up cancels the request at its engine.

Bounds. Per replica `max_in_flight` requests, beyond which all replicas count as saturated: 429 and Retry-After, at
once. The process's own bounds on bodies and requests apply as everywhere (proto/http.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Annotated, Any, Final, Self
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import Counter, Gauge, Histogram
from yarl import URL

from ..proto.api import Feedback, PromptRequest, RouteRequest, RouteResponse
from ..proto.errors import CallerError, InvalidField, NoReplica, NotFound, StoreError, TooManyRequests
from ..proto.http import read_body
from ..proto.index import ReplicaRef
from ..proto.text import media_at
from .health import Health, Probe
from .models import Target
from .policies import Candidate
from .queueing import Turn
from .router import Router
from .stand_ins import stand_ins
from .tenants import Caller, Quota
from .tokenize import Tokens

MAX_HELD: Final = 64 << 10
MAX_KEPT: Final = 4 << 20
MAX_PROBES: Final = 16
"""Engines asked for their health at a time."""
MAX_LIST_BYTES: Final = 1 << 20
"""Of an engine's list of models."""
WATCH_S: Final = 0.1
"""How soon a caller that hung up is noticed."""
KEEPALIVE_S: Final = 3.0
"""Idle life of a connection to an engine: less than the 5 s after which uvicorn closes its end."""
MODELS_EVERY: Final = 10
"""Health probes between two looks at an engine's list of models."""
BUSY_S: Final = 1.0
"""How long an engine that answered 429 or 503 is left alone."""
HEADER: Final = "X-Metatrie-"

_NOT_TOKENISED: Final = "the prompt could not be tokenised here; placed by load and by what was sent before"
_HOP_BY_HOP: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    )
)
_NOT_SENT: Final = _HOP_BY_HOP | frozenset(
    ("host", "content-length", "expect", "accept-encoding", "cookie", "x-data-parallel-rank")
)
_NOT_RETURNED: Final = _HOP_BY_HOP | frozenset(("content-length", "date", "server"))
_ERROR_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OVERHEAD_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_log = logging.getLogger("metatrie.proxy")
_encode = msgspec.json.Encoder().encode

_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[proxy]`: how the front door treats engines and callers."""

    attempts: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    """Replicas tried until one sends its first byte."""
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Requests per replica, those other routers reserved included; set it to the engine's own `max_num_seqs`."""
    connect_timeout_s: _Seconds = 5.0
    idle_timeout_s: _Seconds = 300.0
    """Longest silence of an engine, before its first byte and between two."""
    send_timeout_s: _Seconds = 60.0
    """How long a caller may take nothing of its answer."""
    health_interval_s: _Seconds = 2.0
    health_timeout_s: _Seconds = 2.0
    eject_after: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    """Failures in a row after which an engine gets no more requests."""
    eject_s: _Seconds = 2.0
    """For how long at first; doubled each time it fails on its return, up to a minute."""
    ramp_s: _Seconds = 10.0
    """Over which a returning engine comes back to its full share."""


# Bodies


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request body matters here. Loosely typed: what is wrong is for the engine to refuse."""

    model: Any = None
    prompt: Any = None
    messages: Any = None
    tools: Any = None
    documents: Any = None
    add_generation_prompt: Any = True
    continue_final_message: Any = False
    add_special_tokens: Any = None
    chat_template_kwargs: Any = None
    chat_template: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _HasUsage(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_usage = msgspec.json.Decoder(_HasUsage).decode


@dataclass(slots=True)
class _Asked:
    """One request, understood."""

    caller: Caller
    target: Target
    fields: _Fields
    body: bytes
    """As it goes to the engine."""
    tokens: Tokens
    rest: list[int]
    """Stand-ins for what `tokens` does not cover."""
    one_prompt: bool
    """Its `cached_tokens` can be compared with the prediction."""


@dataclass(slots=True, eq=False)
class _Exchange:
    """A request that occupies its caller's handler, as the watch sees it."""

    http: web.Request
    task: asyncio.Task[Any]
    sending_since: float | None = None


class _Failed(Exception):
    """No byte came, and another replica may do better. `busy`: it said that it has too much to do."""

    def __init__(self, *, busy: bool = False) -> None:
        super().__init__()
        self.busy = busy


class _Silent(Exception):
    """An engine did not answer a probe."""


@dataclass(slots=True)
class _Gate:
    """Admits the replicas a request may go to, and remembers why it turned others away."""

    name: str
    limit: int
    health: Health
    serves: Callable[[str, str], bool]
    tried: set[ReplicaRef] = field(default_factory=set)
    full: int = 0
    ejected: int = 0

    def __call__(self, candidate: Candidate) -> bool:
        url = candidate.url
        if url is None or candidate.ref in self.tried or not self.serves(url, self.name):
            return False
        room = self.health.room(url, self.limit)
        if candidate.reserved_requests < room:
            return True
        if self.health.phase(url) == "ejected":
            self.ejected += 1
        else:
            self.full += 1
        return False


class Proxy:
    """Handlers of the OpenAI endpoints over a started router. Use as an async context manager."""

    def __init__(
        self,
        router: Router,
        config: ProxyConfig | None = None,
        *,
        engine_api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        """engine_api_key: sent to the engines as bearer token, instead of what the caller sent."""
        self.config = config or ProxyConfig()
        self._router = router
        self._key = engine_api_key
        self._clock = clock
        self._rng = rng or random.Random()
        self.health = Health(
            eject_after=self.config.eject_after,
            eject_s=self.config.eject_s,
            ramp_s=self.config.ramp_s,
            clock=clock,
        )
        self._session: aiohttp.ClientSession | None = None
        self._exchanges: set[_Exchange] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._probes = 0
        self._metrics = _ProxyMetrics(router, self)

    async def __aenter__(self) -> Self:
        config = self.config
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=config.connect_timeout_s, sock_read=config.idle_timeout_s
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        await self._probe_all()
        self._tasks = [
            asyncio.create_task(self._watch(), name="proxy-watch"),
            asyncio.create_task(self._probe(), name="proxy-probe"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._background, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    # Endpoints

    async def completions(self, http: web.Request, authenticate: Callable[[web.Request], Caller]) -> _Response:
        """`/v1/completions` and `/v1/chat/completions`: the engine has the same path."""
        return await self._answer(http, authenticate, self._complete)

    async def models(self, http: web.Request, authenticate: Callable[[web.Request], Caller]) -> _Response:
        """Everything a caller may name, as the engines describe it."""
        return await self._answer(http, authenticate, self._list_models)

    async def _answer(
        self,
        http: web.Request,
        authenticate: Callable[[web.Request], Caller],
        handle: Callable[[web.Request, Caller], Coroutine[Any, Any, _Response]],
    ) -> _Response:
        """Errors in the shape OpenAI clients turn into their own exceptions."""
        try:
            return await handle(http, authenticate(http))
        except CallerError as error:
            self._metrics.refused(error)
            return _refusal(error)
        except StoreError:
            return _error(503, "the index store cannot be reached", code="store_unavailable", retry_after_s=1)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            text = "the body is too large" if error.status == 413 else error.reason
            return _error(error.status, text)

    async def _list_models(self, http: web.Request, caller: Caller) -> web.Response:
        wanted = http.match_info.get("model")
        cards = self._cards(caller)
        if not cards or not (wanted is None or wanted in cards):
            with contextlib.suppress(StoreError):
                await self._router.refresh()  # it may have been announced a moment ago
            cards = self._cards(caller)
        if wanted is None:
            return _json({"object": "list", "data": list(cards.values())})
        if wanted in cards:
            return _json(cards[wanted])
        raise _no_such_model()

    def _cards(self, caller: Caller) -> dict[str, dict[str, Any]]:
        """What this caller may name, by name."""
        cards = {card["id"]: card for card in self._router.models.cards(self._router.model_names())}
        return {name: card for name, card in cards.items() if caller.models is None or name in caller.models}

    async def _complete(self, http: web.Request, caller: Caller) -> _Response:
        started = self._clock()
        quota = caller.quota or _UNLIMITED
        quota.take()
        with quota.slot():
            task = asyncio.current_task()
            assert task is not None
            exchange = _Exchange(http, task)
            self._exchanges.add(exchange)
            try:
                asked = await self._understand(await read_body(http), caller)
                return await self._place(exchange, asked, started)
            finally:
                self._exchanges.discard(exchange)

    # Understanding

    async def _understand(self, raw: bytes, caller: Caller) -> _Asked:
        try:
            fields = _decode_fields(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise InvalidField("the body is not a JSON object") from None
        if not isinstance(fields.model, str) or not fields.model:
            raise InvalidField("a model must be named", field="model", remedy="see GET /v1/models")
        if fields.cache_salt is not None:
            caller.only_trusted("cache_salt")
        if fields.kv_transfer_params is not None:  # it names blocks in other engines, whosoever they are
            caller.only_trusted("kv_transfer_params")
        if _has_uuid(fields.messages):
            caller.only_trusted("messages.content.uuid")
        prompt, one_prompt = _prompt_request(fields)
        tokens = Tokens([], _NOT_TOKENISED)
        try:
            if prompt is not None:
                tokens = await self._router.tokenize(prompt, caller)
            else:
                await self._router.expect_model(fields.model, caller)
        except NotFound:
            raise _no_such_model() from None
        except (InvalidField, NoReplica):
            pass  # the engine refuses it in its own words, or knows better
        cut = fields.truncate_prompt_tokens
        if cut is not None and tokens.note is None:
            whole = isinstance(cut, int) and cut > 0
            tokens = Tokens(tokens.ids[-cut:]) if whole else Tokens([], _NOT_TOKENISED)
        rest: list[int] = []
        if tokens.note is not None:
            rest = await asyncio.to_thread(stand_ins, _unknown(fields, tokens))
        target = self._router.models.resolve(fields.model)
        changes: dict[str, str] = {}
        if target.name != fields.model:
            changes["model"] = target.name
        salt = None if fields.cache_salt is not None else self._router.salt_of(caller)
        if salt is not None:
            changes["cache_salt"] = salt
        return _Asked(
            caller=caller,
            target=target,
            fields=fields,
            body=_with(raw, changes) if changes else raw,
            tokens=tokens,
            rest=rest,
            one_prompt=one_prompt,
        )

    # Placing

    async def _place(self, exchange: _Exchange, asked: _Asked, started: float) -> _Response:
        fields = asked.fields
        gate = _Gate(asked.target.name, self.config.max_in_flight, self.health, self._router.models.serves)
        question = RouteRequest(
            model=fields.model,
            token_ids=asked.tokens.ids + asked.rest if asked.rest else asked.tokens.ids,
            cache_salt=fields.cache_salt if isinstance(fields.cache_salt, str) else None,
            max_output_tokens=_natural(fields.max_completion_tokens) or _natural(fields.max_tokens),
            priority=fields.priority if isinstance(fields.priority, int) else 0,
        )
        busy = 0
        turn = self._router.queue.turn()
        for attempt in range(1, self.config.attempts + 1):
            try:
                route = await self._route(question, asked, gate, turn)
            except NoReplica:
                break
            self._metrics.attempts.labels("first" if attempt == 1 else "retry").inc()
            try:
                return await self._exchange(exchange, asked, route, attempt, started, turn)
            except _Failed as failure:
                gate.tried.add(ReplicaRef(route.replica, route.dp_rank))
                busy += failure.busy
        if gate.full or busy or gate.ejected:
            # Whoever is ejected comes back in a moment, too; but full is what an autoscaler should hear of.
            if gate.full or busy:
                raise TooManyRequests(
                    "every replica of this model is saturated",
                    remedy="retry later",
                    retry_after_s=self._retry_after(),
                )
            raise NoReplica("no replica of this model is healthy", remedy="retry later")
        if gate.tried:
            raise _Upstream("no replica of this model answered", remedy="retry later")
        raise NoReplica("no replica of this model can be reached from here", remedy="see GET /v1/replicas")

    async def _route(self, question: RouteRequest, asked: _Asked, gate: _Gate, turn: Turn | None) -> RouteResponse:
        """The router's choice. A caller that hangs up meanwhile leaves no reservation behind."""
        routing = asyncio.ensure_future(
            self._router.route(question, asked.caller, admit=gate, stand_ins=len(asked.rest), turn=turn)
        )
        try:
            return await asyncio.shield(routing)
        except asyncio.CancelledError:
            if turn is not None:
                turn.leave()
            self._spawn(self._undo(routing))
            raise

    async def _undo(self, routing: asyncio.Future[RouteResponse]) -> None:
        with contextlib.suppress(CallerError):
            await self._router.free((await routing).reservation)

    def _retry_after(self) -> int:
        # Spread, or all who were refused together come back together.
        return 1 + self._rng.randrange(3)

    async def _exchange(
        self,
        exchange: _Exchange,
        asked: _Asked,
        route: RouteResponse,
        attempt: int,
        started: float,
        turn: Turn | None,
    ) -> _Response:
        """Send to the chosen replica and pass its answer on. Raises _Failed if no byte came."""
        relay = _Relay()
        reservation: str | None = route.reservation
        response: aiohttp.ClientResponse | None = None
        try:
            response, first = await self._first_bytes(exchange.http, asked, route)
            out = web.StreamResponse(status=response.status, reason=response.reason)
            _copy_headers(response.headers, out)
            _describe(out, asked, route, attempt, 0.0 if turn is None else turn.waited_s)
            relay.begin(response)
            if not relay.events and response.content_length is not None:
                out.content_length = response.content_length
            await out.prepare(exchange.http)
            self._metrics.overhead.observe(self._clock() - started)
            self._spawn(self._router.first_token(route.reservation))
            whole = await self._pass_on(exchange, out, response, relay, first, url=route.url or "")
            if whole:
                reservation = None
                self._finish(route, asked, relay.usage() if response.status < 300 else None)
                await out.write_eof()
            return out
        finally:
            if response is not None:
                response.close()  # whatever was not read is not wanted: this ends it at the engine
            if reservation is not None:
                self._spawn(self._router.free(reservation))

    async def _first_bytes(
        self, http: web.Request, asked: _Asked, route: RouteResponse
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """The engine's answer and its first bytes (none, if it has no body)."""
        url = route.url
        assert url is not None, "the gate admits only replicas with one"
        assert self._session is not None, "the proxy has not been started"
        sent = time.monotonic()
        response: aiohttp.ClientResponse | None = None
        try:
            response = await self._session.post(
                URL(f"{url.rstrip('/')}{http.path}?{http.rel_url.raw_query_string}".rstrip("?"), encoded=True),
                data=asked.body,
                headers=self._request_headers(http, asked, route.dp_rank),
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )
            if response.status in (429, 503):
                self.health.busy(url, BUSY_S)
                raise _Failed(busy=True)
            if response.status in (502, 504):
                self._failed(url)
                raise _Failed
            first = await response.content.readany()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if response is not None:
                response.close()
            self._failed(url)
            if isinstance(error, TimeoutError) and time.monotonic() - sent >= self.config.idle_timeout_s:
                raise _Upstream("the engine took too long to answer", remedy="retry later") from None
            raise _Failed from None
        except BaseException:
            if response is not None:
                response.close()
            raise
        self.health.succeeded(url)
        return response, first

    async def _pass_on(
        self,
        exchange: _Exchange,
        out: web.StreamResponse,
        response: aiohttp.ClientResponse,
        relay: _Relay,
        chunk: bytes,
        *,
        url: str,
    ) -> bool:
        """Everything from the first chunk on. False if the engine broke off, which the caller has been told."""
        read = response.content.readany
        while chunk:
            if ready := relay.feed(chunk):
                exchange.sending_since = self._clock()
                await out.write(ready)
                exchange.sending_since = None
            try:
                chunk = await read()
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                self._metrics.broken.inc()
                self._failed(url)
                await self._break_off(exchange.http, out, relay)
                return False
        if rest := relay.rest():
            await out.write(rest)
        return True

    async def _break_off(self, http: web.Request, out: web.StreamResponse, relay: _Relay) -> None:
        """One clear error: an event of a stream; of anything else a connection that ends too early."""
        if relay.events:
            await out.write(b"data: %b\n\n" % _encode(_error_body(502, "the engine broke off", code="engine_failed")))
            await out.write_eof()
        if http.transport is not None:
            if relay.events:
                out.force_close()
            else:
                http.transport.abort()

    def _finish(self, route: RouteResponse, asked: _Asked, usage: _Usage | None) -> None:
        details = usage.prompt_tokens_details if usage is not None else None
        if usage is None or not asked.one_prompt or details is None:
            self._spawn(self._router.free(route.reservation))
            return
        feedback = Feedback(
            reservation=route.reservation,
            cached_tokens=max(0, details.cached_tokens or 0),
            prompt_tokens=max(0, usage.prompt_tokens),
            output_tokens=max(0, usage.completion_tokens),
            finished=True,
        )
        self._spawn(self._report(feedback))

    async def _report(self, feedback: Feedback) -> None:
        await self._router.feedback(feedback)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Accounting that must happen though its request's handler may be cancelled."""

        async def run() -> None:
            with contextlib.suppress(NotFound, StoreError):  # it expired, or will
                await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _request_headers(self, http: web.Request, asked: _Asked, dp_rank: int) -> dict[str, str]:
        headers = {name: value for name, value in http.headers.items() if name.lower() not in _NOT_SENT}
        if asked.caller.tenant is not None or self._key is not None:
            for name in [name for name in headers if name.lower() == "authorization"]:
                del headers[name]
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        headers["Accept-Encoding"] = "identity"
        headers["X-data-parallel-rank"] = str(dp_rank)
        return headers

    # Background

    def _failed(self, url: str) -> None:
        if self.health.failed(url):
            self._metrics.ejections.inc()
            _log.warning("engine %s is ejected: it failed %d times in a row", url, self.config.eject_after)

    async def _watch(self) -> None:
        """End requests whose caller hung up, or takes nothing any more."""
        while True:
            await asyncio.sleep(WATCH_S)
            longest = self._clock() - self.config.send_timeout_s
            for exchange in list(self._exchanges):
                transport = exchange.http.transport
                gone = transport is None or transport.is_closing()
                stalled = exchange.sending_since is not None and exchange.sending_since < longest
                if gone or stalled:
                    self._exchanges.discard(exchange)
                    self._metrics.abandoned.labels("hung_up" if gone else "stalled").inc()
                    if transport is not None:
                        transport.abort()
                    exchange.task.cancel()

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval_s * self._rng.uniform(0.8, 1.2))
            await self._probe_all()

    async def _probe_all(self) -> None:
        urls = self._router.engine_urls()
        self.health.keep(urls)
        self._router.models.keep(urls)
        every = self._probes % MODELS_EVERY == 0
        self._probes += 1
        limit = asyncio.Semaphore(MAX_PROBES)

        async def probe(url: str) -> None:
            async with limit:
                try:
                    ok = await self._get(url, "/health") is not None
                    result: Probe = "good" if ok else "bad"
                except _Silent:
                    ok, result = False, "silent"
                if self.health.probed(url, result):
                    self._metrics.ejections.inc()
                    _log.warning("engine %s is ejected: it does not answer its health probe", url)
                if ok and (every or not self._router.models.knows(url)):
                    await self._learn_models(url)

        await asyncio.gather(*map(probe, urls))

    async def _learn_models(self, url: str) -> None:
        try:
            raw = await self._get(url, "/v1/models")
            listed = msgspec.json.decode(raw or b"", type=_ModelList)
        except (msgspec.DecodeError, UnicodeDecodeError, _Silent):
            return
        self._router.models.listed(url, listed.data)

    async def _get(self, url: str, path: str) -> bytes | None:
        """None if the engine says that it is not well; a path it does not have says nothing. Raises _Silent."""
        assert self._session is not None
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=self.config.health_timeout_s)
        try:
            async with self._session.get(
                url.rstrip("/") + path, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 500:
                    return None
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_LIST_BYTES:
                        return b""
                return bytes(body)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            raise _Silent from None


_Response = web.StreamResponse


class _ModelList(msgspec.Struct, frozen=True):
    data: list[dict[str, Any]]


class _Relay:
    """What passes through: whole events of a stream at a time, and a look at the usage."""

    def __init__(self) -> None:
        self.events = False
        self._held = b""
        self._last = b""
        """Of a stream: the last events that spoke of usage."""
        self._parts: list[bytes] = []
        """Of a plain answer: everything, if it is not too long."""
        self._kept = 0

    def begin(self, response: aiohttp.ClientResponse) -> None:
        self.events = response.content_type == "text/event-stream"

    def feed(self, chunk: bytes) -> bytes:
        """What to send on now."""
        if not self.events:
            self._kept += len(chunk)
            if self._kept <= MAX_KEPT:
                self._parts.append(chunk)
            return chunk
        if self._held:
            chunk = self._held + chunk
        end = max(chunk.rfind(b"\n\n") + 2, chunk.rfind(b"\r\n\r\n") + 4)
        if end < 4:
            if len(chunk) <= MAX_HELD:
                self._held = chunk
                return b""
            end = len(chunk)
        ready, self._held = chunk[:end], chunk[end:]
        if b'"usage"' in ready:
            self._last = ready
        return ready

    def rest(self) -> bytes:
        """The end of a stream that did not end with its last event."""
        held, self._held = self._held, b""
        return held

    def usage(self) -> _Usage | None:
        documents: Iterable[bytes] = (b"".join(self._parts),) if self._kept <= MAX_KEPT else ()
        if self.events:
            lines = self._last.split(b"\n")
            documents = [line[5:] for line in reversed(lines) if line.startswith(b"data:") and b'"usage"' in line]
        for document in documents:
            try:
                usage = _decode_usage(document).usage
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if usage is not None:
                return usage
        return None


class _Upstream(CallerError):
    """An engine failed the request, and nobody else could be asked."""

    status = 502
    title = "Bad gateway"


class _ProxyMetrics:
    def __init__(self, router: Router, proxy: Proxy) -> None:
        registry = router.registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"metatrie_proxy_{name}", text, labels, registry=registry)

        self.attempts = counter("attempts", "Requests sent to an engine", "kind")
        self.broken = counter("broken_streams", "Answers an engine broke off after their first byte")
        self.ejections = counter("ejections", "Times an engine was ejected")
        self.abandoned = counter("abandoned", "Requests ended since their caller went away", "how")
        self._refusals = counter("refusals", "Requests refused here", "status")
        self.overhead = Histogram(
            "metatrie_proxy_first_byte_seconds",
            "From a request's head to its answer's first byte",
            buckets=_OVERHEAD_BUCKETS,
            registry=registry,
        )
        in_flight = Gauge("metatrie_proxy_in_flight", "Requests being served", registry=registry)
        in_flight.set_function(lambda: len(proxy._exchanges))

    def refused(self, error: CallerError) -> None:
        self._refusals.labels(str(error.status)).inc()


_UNLIMITED: Final = Quota()


def _prompt_request(fields: _Fields) -> tuple[PromptRequest | None, bool]:
    """The prompt as the router takes it, or None where it cannot be known here; and whether it is the only one."""
    if fields.chat_template is not None or fields.prompt_embeds is not None:
        return None, True
    model = fields.model
    try:
        if fields.messages is not None:
            return msgspec.convert(
                {
                    "model": model,
                    "messages": fields.messages,
                    "tools": fields.tools,
                    "documents": fields.documents,
                    "add_generation_prompt": fields.add_generation_prompt,
                    "continue_final_message": fields.continue_final_message,
                    "add_special_tokens": fields.add_special_tokens,
                    "chat_template_kwargs": fields.chat_template_kwargs,
                },
                PromptRequest,
            ), True
        match fields.prompt:
            case [str() | list() as prompt, *others]:  # several: the first decides where they all go
                one = not others
            case prompt:
                one = True
        name = "prompt" if isinstance(prompt, str) else "token_ids"
        if prompt is None:
            return None, True
        return msgspec.convert(
            {"model": model, name: prompt, "add_special_tokens": fields.add_special_tokens}, PromptRequest
        ), one
    except (msgspec.ValidationError, InvalidField):
        return None, True


def _has_uuid(messages: Any) -> bool:
    """Whether some media part claims an identity of its own, which is what its blocks are found by."""
    if not isinstance(messages, list):
        return False
    parts = (
        part
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )
    return any(isinstance(part, dict) and part.get("uuid") is not None for part in parts)


def _unknown(fields: _Fields, tokens: Tokens) -> Sequence[Any]:
    """What of the prompt `tokens` does not cover."""
    if isinstance(fields.messages, list):
        readable = [message for message in fields.messages if isinstance(message, dict)]
        return readable[(media_at(readable) or 0) if tokens.ids else 0 :]
    if fields.prompt_embeds is not None:
        return [fields.prompt_embeds]
    match fields.prompt:
        case [str() | list() as prompt, *_]:
            return [prompt]
        case prompt:
            return [prompt]


def _with(raw: bytes, changes: Mapping[str, str]) -> bytes:
    """The body with some fields replaced; every other value keeps its own bytes."""
    fields: dict[str, Any] = dict(_decode_raw(raw))
    fields.update(changes)
    return _encode(fields)


def _natural(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 < value < 1 << 32 else None


def _copy_headers(headers: Mapping[str, str], out: web.StreamResponse) -> None:
    listed = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    for name, value in headers.items():
        if name.lower() not in _NOT_RETURNED and name.lower() not in listed:
            out.headers.add(name, value)


def _describe(out: web.StreamResponse, asked: _Asked, route: RouteResponse, attempt: int, waited_s: float) -> None:
    """The decision, in headers. All of it is about this caller's own prompt."""
    note = asked.tokens.note
    facts = {
        "Replica": quote(f"{route.replica}/{route.dp_rank}", safe="/ "),
        "Matched-Blocks": str(route.matched_blocks),
        "Prompt-Blocks": str(len(asked.tokens.ids) // route.block_size),
        "Reusable-Tokens": str(route.reusable_tokens),
        "State": route.state,
        "Policy": route.policy,
        "Reason": route.reason,
        "Attempt": str(attempt),
    }
    if waited_s:
        facts["Waited-Ms"] = f"{waited_s * 1000:.0f}"
    if note is not None:
        facts["Note"] = note
    if route.cause is not None:
        facts["Cause"] = quote(route.cause, safe=" _-")
    for name, value in facts.items():
        out.headers[HEADER + name] = value


# Errors


def _no_such_model() -> NotFound:
    return NotFound("The model does not exist", field="model", remedy="see GET /v1/models")


def _error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
) -> web.Response:
    response = _json(_error_body(status, message, param=param, code=code), status)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(retry_after_s)
    return response


_CODES: Final = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded", 503: "no_replica"}


def _refusal(error: CallerError) -> web.Response:
    message = f"{error.detail}; {error.remedy}" if error.remedy else error.detail
    retry_after_s = None
    if isinstance(error, TooManyRequests):
        retry_after_s = error.retry_after_s
    elif error.status >= 500:
        retry_after_s = math.ceil(BUSY_S)
    return _error(
        error.status, message, param=error.field, code=_CODES.get(error.status), retry_after_s=retry_after_s
    )


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=status, content_type="application/json")
