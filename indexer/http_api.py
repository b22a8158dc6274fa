"""The router's HTTP API: thin handlers over Router, and who may call them.

Every handler decodes one struct, calls one Router method and encodes one struct; errors travel as exceptions to the
shared conventions of proto/http.py. `endpoints` is the one table both the server and `/openapi.json` are made of.

Trust. With an `authenticate`, every path under `/v1` needs a caller it accepts. Without one nobody is authenticated,
and only peers on the loopback interface are trusted with fields that address other people's prefixes (see Caller). A
proxy on this machine is such a peer: requests that say they were forwarded are not trusted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Protocol

import msgspec
from aiohttp import web

from ..proto.api import (
    DEFAULT_LISTED,
    MAX_LISTED,
    Decided,
    DecisionList,
    ExplainResponse,
    Feedback,
    FeedbackResponse,
    MatchRequest,
    MatchResponse,
    PolicyList,
    RegisterReplica,
    ReplicaInfo,
    ReplicaList,
    RouteRequest,
    RouteResponse,
    Status,
)
from ..proto.errors import Conflict, Forbidden, InvalidField, NotFound
from ..proto.http import (
    JSON,
    Body,
    Encoded,
    HttpMetrics,
    PromptBody,
    add_hot_route,
    application,
    encoded,
    metrics_handler,
    reply,
)
from ..proto.http_front import HotHead, RequestHead
from ..proto.soon import Soon
from .openapi import Endpoint, Parameter, document
from .proxy import Proxy
from .router import Router
from .tenants import Caller


class Registrar(Protocol):
    """What registers replicas on request: a process that runs their consumers itself."""

    async def register(self, request: RegisterReplica) -> ReplicaInfo:
        """Follow the replica's events from now on. Returns once it is in the registry.

        Raises Conflict if the replica is registered with other settings, InvalidField for what cannot be followed.
        Registering the same again is no error.
        """
        ...

    async def unregister(self, replica: str, *, model: str | None, dp_rank: int | None) -> bool:
        """Stop following it and remove it from the registry: all of its ranks and models, or those named.
        False if nothing fitted."""
        ...


Authenticate = Callable[[RequestHead], Caller]
"""Says who is calling. Raises Unauthorized for callers it does not accept."""

_ANONYMOUS = Caller()
_LOCAL = Caller(trusted=True)


def trust_loopback(request: RequestHead) -> Caller:
    """Accepts everybody, trusts direct peers on the loopback interface."""
    peer = request.remote or ""
    if not peer.startswith(("127.", "::1", "::ffff:127.")):
        return _ANONYMOUS
    if "X-Forwarded-For" in request.headers or "Forwarded" in request.headers:
        return _ANONYMOUS
    return _LOCAL


def make_app(
    router: Router,
    *,
    registrar: Registrar | None = None,
    authenticate: Authenticate = trust_loopback,
    proxy: Proxy | None = None,
) -> web.Application:
    """The API over a started router. registrar None: replicas are registered by their sidecars, not over HTTP.
    proxy: a started one, for the OpenAI endpoints; None: there are none."""
    app = application(
        HttpMetrics(router.registry, "router"),
        max_body_bytes=router.config.max_body_bytes,
        max_in_flight=router.config.max_in_flight,
    )
    for endpoint in endpoints(router, registrar=registrar, authenticate=authenticate, proxy=proxy):
        app.router.add_route(endpoint.method, endpoint.path, endpoint.handler)
        if endpoint.hot is not None:
            add_hot_route(app, endpoint.path, endpoint.hot)
    return app


def endpoints(
    router: Router, *, registrar: Registrar | None, authenticate: Authenticate, proxy: Proxy | None = None
) -> list[Endpoint]:
    """Everything the router serves."""
    match_body, route_body = PromptBody(MatchRequest), PromptBody(RouteRequest)
    register_body, feedback_body = Body(RegisterReplica), Body(Feedback)

    def admitted(request: RequestHead) -> Caller:
        """A caller whose limits allow another request."""
        caller = authenticate(request)
        if caller.quota is not None:
            caller.quota.take()
        return caller

    def operator(request: RequestHead) -> None:
        """Refuses tenants: what all of them share, and do there, is not theirs to see or change."""
        caller = authenticate(request)
        if caller.tenant is not None and not caller.trusted:
            raise Forbidden(
                "only a trusted caller may see or change what tenants share",
                remedy="authenticate as a caller configured as trusted",
            )

    async def match(request: web.Request) -> web.Response:
        caller = admitted(request)
        return reply(request, await router.match(await match_body.read(request), caller))

    def hot_match(head: HotHead, body: bytes) -> Encoded | Soon[Encoded] | Awaitable[Encoded]:
        caller = admitted(head)
        asked = match_body.decode(head, body)
        answer = router.match_quickly(asked, caller)
        if answer is None:
            return later(head, router.match(asked, caller))
        if isinstance(answer, Soon):
            return answer.map(partial(in_time, head))
        return encoded(head, answer)

    def in_time(
        head: HotHead, answer: Callable[[], MatchResponse | Awaitable[MatchResponse]]
    ) -> Encoded | Awaitable[Encoded]:
        made = answer()
        return encoded(head, made) if isinstance(made, MatchResponse) else later(head, made)

    def hot_route(head: HotHead, body: bytes) -> Awaitable[Encoded]:
        caller = admitted(head)
        return later(head, router.route(route_body.decode(head, body), caller))

    async def later(head: HotHead, answer: Awaitable[object]) -> Encoded:
        return encoded(head, await answer)

    async def route(request: web.Request) -> web.Response:
        caller = admitted(request)
        return reply(request, await router.route(await route_body.read(request), caller))

    async def explain(request: web.Request) -> web.Response:
        caller = authenticate(request)
        return reply(request, await router.explain(await route_body.read(request), caller))

    async def decisions(request: web.Request) -> web.Response:
        caller = authenticate(request)
        query = request.query
        limit = _integer(request, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        return reply(
            request, router.decided(caller, limit=limit, model=query.get("model"), replica=query.get("replica"))
        )

    async def decision(request: web.Request) -> web.Response:
        caller = authenticate(request)
        found = router.decision(caller, request.match_info["id"])
        return reply(request, found)

    async def feedback(request: web.Request) -> web.Response:
        caller = authenticate(request)
        return reply(request, await router.feedback(await feedback_body.read(request), caller))

    async def free(request: web.Request) -> web.Response:
        authenticate(request)
        await router.free(request.match_info["id"])
        return web.Response(status=204)

    async def list_replicas(request: web.Request) -> web.Response:
        operator(request)
        limit = _integer(request, "limit", 1, MAX_LISTED) or DEFAULT_LISTED
        return reply(request, await router.replicas(model=request.query.get("model"), limit=limit))

    async def register(request: web.Request) -> web.Response:
        operator(request)
        if registrar is None:
            raise _sidecars_register()
        info = await registrar.register(await register_body.read(request))
        await router.refresh()
        return reply(request, info, status=201)

    async def unregister(request: web.Request) -> web.Response:
        operator(request)
        if registrar is None:
            raise _sidecars_register()
        rank = _integer(request, "dp_rank", 0, 65535)
        name = request.match_info["replica"]
        if not await registrar.unregister(name, model=request.query.get("model"), dp_rank=rank):
            raise NotFound("no such replica is registered", field="replica", remedy="see GET /v1/replicas")
        router.forget(name)
        await router.refresh()
        return web.Response(status=204)

    async def policies(request: web.Request) -> web.Response:
        operator(request)
        return reply(request, router.policies())

    async def alive(request: web.Request) -> web.Response:
        router.expect_alive()
        return reply(request, Status(status="alive"))

    async def ready(request: web.Request) -> web.Response:
        return reply(request, await router.ready())

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=described, headers={"Content-Type": JSON})

    async def index(request: web.Request) -> web.Response:
        return web.Response(text=listing)

    invalid = {400: "A field is missing, of the wrong type or out of range", 413: "The body is too large"}
    lookup = {
        **invalid,
        401: "No or unknown credentials",
        403: "A field only trusted callers may send",
        404: "Unknown model",
        503: "The index store is away and was never seen, or nobody can serve or tokenise this",
    }
    no_registrar = {409: "The replica is registered otherwise, or replicas are registered by their sidecars here"}
    model = Parameter(name="model", text="Only of this model")
    table = [
        Endpoint(
            method="POST", path="/v1/match", handler=match, hot=hot_match,
            request=MatchRequest, response=MatchResponse,
            text="How many leading blocks of a prompt each replica holds", problems=lookup,
        ),
        Endpoint(
            method="POST", path="/v1/route", handler=route, hot=hot_route,
            request=RouteRequest, response=RouteResponse,
            text="Which replica should serve a prompt; reserves its share of load", problems=lookup,
        ),
        Endpoint(
            method="POST", path="/v1/explain", handler=explain, request=RouteRequest, response=ExplainResponse,
            text="What route would decide now, and why; reserves nothing, for trusted callers", problems=lookup,
        ),
        Endpoint(
            method="GET", path="/v1/decisions", handler=decisions, response=DecisionList,
            text="Recent decisions, newest first, for trusted callers",
            problems={400: invalid[400], 403: "The caller is not trusted"},
            parameters=[
                model,
                Parameter(name="replica", text="Only those that chose it: NAME or NAME/RANK"),
                Parameter(name="limit", kind=int, text=f"Most to list, 1 to {MAX_LISTED}, else {DEFAULT_LISTED}"),
            ],
        ),
        Endpoint(
            method="GET", path="/v1/decisions/{id}", handler=decision, response=Decided,
            text="One decision, for trusted callers",
            problems={403: "The caller is not trusted", 404: "No such decision is kept"},
            parameters=[Parameter(name="id", path=True, text="The `decision` of a route answer")],
        ),
        Endpoint(
            method="POST", path="/v1/feedback", handler=feedback, request=Feedback, response=FeedbackResponse,
            text="What the engine found cached for a routed request",
            problems={**invalid, 404: "No such reservation"},
        ),
        Endpoint(
            method="DELETE", path="/v1/reservations/{id}", handler=free, status=204,
            text="A routed request is over", problems={404: "No such reservation"},
            parameters=[Parameter(name="id", path=True, text="The `reservation` of a route answer")],
        ),
        Endpoint(
            method="GET", path="/v1/policies", handler=policies, response=PolicyList,
            text="How requests for each model are placed", problems={403: "The caller is not trusted"},
        ),
        Endpoint(
            method="GET", path="/v1/replicas", handler=list_replicas, response=ReplicaList,
            text="Registered replicas, their state and load", problems={400: invalid[400], 404: "Unknown model"},
            parameters=[
                model,
                Parameter(name="limit", kind=int, text=f"Most to list, 1 to {MAX_LISTED}, else {DEFAULT_LISTED}"),
            ],
        ),
        Endpoint(
            method="POST", path="/v1/replicas", handler=register, request=RegisterReplica, response=ReplicaInfo,
            text="Follow an engine worker's events (`metatrie serve`)", status=201,
            problems={**invalid, **no_registrar},
        ),
        Endpoint(
            method="DELETE", path="/v1/replicas/{replica}", handler=unregister, status=204,
            text="Stop following a replica (`metatrie serve`)", problems={404: "No such replica", **no_registrar},
            parameters=[
                Parameter(name="replica", path=True, text="Its name"),
                model,
                Parameter(name="dp_rank", kind=int, text="Only this data-parallel rank"),
            ],
        ),
        *(() if proxy is None else _openai(proxy, authenticate)),
        Endpoint(method="GET", path="/healthz", handler=alive, response=Status, text="The process is alive"),
        Endpoint(
            method="GET", path="/readyz", handler=ready, response=Status, text="The index store can be used",
            problems={503: "It cannot"},
        ),
        Endpoint(
            method="GET", path="/metrics", handler=metrics_handler(router.registry), response="text/plain",
            text="Prometheus metrics",
        ),
        Endpoint(method="GET", path="/openapi.json", handler=openapi, response=JSON, text="This API, as OpenAPI 3.1"),
        Endpoint(method="GET", path="/", handler=index, response="text/plain", text="A list of the endpoints"),
    ]  # fmt: skip
    described = msgspec.json.encode(document(table, title="metatrie router", version=version("metatrie")))
    listing = "metatrie router\n\n" + "".join(f"{e.method:6} {e.path:24} {e.text}\n" for e in table)
    return table


def _openai(proxy: Proxy, authenticate: Authenticate) -> list[Endpoint]:
    """OpenAI's API, whose bodies are the engines' own."""
    problems = {
        401: "No or unknown credentials",
        403: "A field only trusted callers may send",
        404: "No such model",
        429: "Every replica is saturated, or the tenant's limit is reached; see Retry-After",
        502: "No engine answered",
        503: "No replica is healthy; see Retry-After",
    }
    named = Parameter(name="model", path=True, text="Its name")
    return [
        Endpoint(
            method="POST", path="/v1/chat/completions", handler=partial(proxy.completions, authenticate=authenticate),
            response=JSON, text="OpenAI chat completion by the replica that suits it best", problems=problems,
        ),
        Endpoint(
            method="POST", path="/v1/completions", handler=partial(proxy.completions, authenticate=authenticate),
            response=JSON, text="The same for a text completion", problems=problems,
        ),
        Endpoint(
            method="GET", path="/v1/models", handler=partial(proxy.models, authenticate=authenticate),
            response=JSON, text="Models, adapters and aliases that can be named",
        ),
        Endpoint(
            method="GET", path="/v1/models/{model}", handler=partial(proxy.models, authenticate=authenticate),
            response=JSON, text="One of them", parameters=[named], problems={404: problems[404]},
        ),
    ]  # fmt: skip


def _sidecars_register() -> Conflict:
    return Conflict(
        "replicas are registered by their sidecars here, not over HTTP",
        remedy="run `metatrie sidecar` for the engine, or `metatrie serve` instead of `metatrie router`",
    )


def _integer(request: web.Request, name: str, low: int, high: int) -> int | None:
    """A query parameter as an integer, None if it is absent."""
    text = request.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        raise InvalidField(f"{name} is no integer in range", field=name, remedy=f"use {low} to {high}")
    return int(text)
