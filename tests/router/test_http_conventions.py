"""The HTTP conventions every server of ours shares."""

from __future__ import annotations

import asyncio
import gzip
import io
import logging
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import aiohttp
import msgspec
import pytest
from aiohttp import web
from metatrie.proto.errors import ConfigError, StoreRefused, StoreUnavailable, Superseded
from metatrie.proto.http import Body, HttpMetrics, HttpServer, application, metrics_handler, reply
from prometheus_client import CollectorRegistry

MAX_BODY = 4096


class Sent(msgspec.Struct):
    kind: Literal["a", "b"] = "a"
    text: Annotated[str, msgspec.Meta(max_length=100_000)] = ""
    numbers: dict[str, int] = {}


class Served:
    """An application with one route for each way to fail."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.app = application(HttpMetrics(self.registry, "test"), max_body_bytes=MAX_BODY, max_in_flight=2)
        self.body = Body(Sent, timeout_s=0.1)
        self.waiting = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        router = self.app.router
        router.add_post("/echo", self.echo)
        router.add_get("/wait", self.wait)
        router.add_get("/fail/{how}", self.fail)
        router.add_get("/metrics", metrics_handler(self.registry))

    async def echo(self, request: web.Request) -> web.Response:
        return reply(request, await self.body.read(request))

    async def wait(self, request: web.Request) -> web.Response:
        self.waiting.release()
        await self.release.wait()
        return web.Response(text="done")

    async def fail(self, request: web.Request) -> web.Response:
        raise {
            "defect": KeyError("SECRET"),
            "store": StoreUnavailable("redis at SECRET"),
            "full": StoreRefused("SECRET"),
            "superseded": Superseded("SECRET"),
            "gone": web.HTTPGone(text="SECRET"),
        }[request.match_info["how"]]


@pytest.fixture
async def served() -> Served:
    return Served()


@pytest.fixture
async def server(served: Served) -> AsyncIterator[HttpServer]:
    async with HttpServer(served.app) as running:
        yield running


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url) as session:
        yield session


async def problem(response: aiohttp.ClientResponse, status: int) -> dict[str, str]:
    assert response.status == status
    assert response.content_type == "application/problem+json"
    document: dict[str, str] = await response.json(content_type=None)
    assert document["status"] == status
    assert {"type", "title", "detail"} <= document.keys()
    assert "SECRET" not in str(document)
    return document


async def test_what_aiohttp_refuses_is_a_problem_document_too(client: aiohttp.ClientSession) -> None:
    assert (await problem(await client.get("/nowhere"), 404))["type"] == "about:blank"
    wrong = await client.get("/echo")
    assert "POST" in (await problem(wrong, 405))["remedy"]
    assert wrong.headers["Allow"] == "POST"
    await problem(await client.get("/fail/gone"), 410)


async def test_store_errors_ask_to_retry_and_hide_the_store(client: aiohttp.ClientSession) -> None:
    for how in ("store", "full"):
        response = await client.get(f"/fail/{how}")
        await problem(response, 503)
        assert response.headers["Retry-After"] == "1"
    await problem(await client.get("/fail/superseded"), 409)


async def test_a_defect_is_logged_once_without_its_message(
    client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await problem(await client.get("/fail/defect"), 500)
    assert len(caplog.records) == 1
    assert "KeyError" in caplog.text
    assert "SECRET" not in caplog.text
    assert "metatrie_test_http_unexpected_errors_total 3.0" in await (await client.get("/metrics")).text()


async def test_bodies_are_bounded_also_when_compressed(client: aiohttp.ClientSession) -> None:
    fits = msgspec.json.encode({"text": "x" * (MAX_BODY - 64)})
    large = msgspec.json.encode({"text": "x" * MAX_BODY})
    kind = {"Content-Type": "application/json"}
    assert (await client.post("/echo", data=fits, headers=kind)).status == 200
    for data, encoding in ((large, {}), (gzip.compress(large), {"Content-Encoding": "gzip"})):
        document = await problem(await client.post("/echo", data=data, headers=kind | encoding), 413)
        assert str(MAX_BODY) in document["detail"]
        assert document["remedy"]
    assert (
        await client.post("/echo", data=gzip.compress(fits), headers=kind | {"Content-Encoding": "gzip"})
    ).status == 200


async def test_chunked_bodies_are_bounded(client: aiohttp.ClientSession) -> None:
    data = io.BytesIO(b'{"text": "' + b"x" * 3 * MAX_BODY)
    response = await client.post("/echo", data=data, headers={"Content-Type": "application/json"}, chunked=True)
    await problem(response, 413)


async def test_a_body_that_never_ends_times_out(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nContent-Type: application/json\r\n\r\n{")
    assert b" 408 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


async def test_unknown_body_types_are_refused_and_none_means_json(client: aiohttp.ClientSession) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        document = await problem(await client.post("/echo", data=b"{}", headers={"Content-Type": kind}), 415)
        assert "application/json" in document["remedy"]
    for kind in ("application/json; charset=utf-8", "application/ld+json", "Application/JSON"):
        assert (await client.post("/echo", data=b"{}", headers={"Content-Type": kind})).status == 200
    bare = await client.post("/echo", data=b'{"kind": "b"}', skip_auto_headers={"Content-Type"})
    assert (await bare.json())["kind"] == "b"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"kind": "SECRET"}', "kind"),
        (b'{"numbers": {"SECRET": "SECRET"}}', "numbers[...]"),
        (b'{"text": 5}', "text"),
        (b"[1]", None),
    ],
)
async def test_refused_fields_are_named_without_their_values(
    client: aiohttp.ClientSession, body: bytes, field: str | None
) -> None:
    document = await problem(await client.post("/echo", data=body, headers={"Content-Type": "application/json"}), 400)
    assert document.get("field") == field


async def test_too_many_requests_in_flight_are_turned_away(served: Served, client: aiohttp.ClientSession) -> None:
    running = [asyncio.create_task(client.get("/wait")) for _ in range(2)]
    for _ in running:
        await served.waiting.acquire()
    response = await client.get("/metrics")
    await problem(response, 503)
    assert response.headers["Retry-After"] == "1"
    served.release.set()
    assert [(await task).status for task in running] == [200, 200]
    assert (await client.get("/metrics")).status == 200


async def test_metrics_speak_openmetrics_on_request(client: aiohttp.ClientSession) -> None:
    assert (await client.get("/metrics")).content_type == "text/plain"
    asked = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert asked.content_type == "application/openmetrics-text"
    assert (await asked.text()).endswith("# EOF\n")


async def test_stopping_lets_running_requests_end(eventually: Any) -> None:
    served = Served()
    server = await HttpServer(served.app, grace_s=30).start()

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        except ConnectionError:
            return True
        writer.close()
        return False

    async with aiohttp.ClientSession(server.url) as client:
        running = asyncio.create_task(client.get("/wait"))
        await served.waiting.acquire()
        stopping = asyncio.create_task(server.stop())
        await eventually(refuses)
        served.release.set()
        response = await running
        assert (response.status, await response.text()) == (200, "done")
        await stopping
    await server.stop()


async def test_a_taken_port_is_a_configuration_error(server: HttpServer) -> None:
    with pytest.raises(ConfigError) as refused:
        await HttpServer(Served().app, port=server.port).start()
    assert refused.value.setting == "port"
    assert str(server.port) in str(refused.value)
