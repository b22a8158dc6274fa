"""The front that answers hot requests without aiohttp: same answers, same order, same limits, whatever arrives."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

import pytest
from aiohttp import web
from metatrie.proto.errors import NotFound
from metatrie.proto.http import HttpMetrics, HttpServer, add_hot_route, application
from metatrie.proto.http_front import MAX_HEAD, HotHead
from prometheus_client import CollectorRegistry

MAX_BODY = 100_000
LARGE = 1 << 20


class Served:
    """`/hot` says who answered and what came; `/slow` answers when it is let."""

    def __init__(self, *, at_once: bool) -> None:
        """at_once: whether the hot route answers without a task wherever it does not wait."""
        self.registry = CollectorRegistry()
        self.let = asyncio.Event()
        self.entered = asyncio.Event()
        self.app = application(HttpMetrics(self.registry, "test"), max_body_bytes=MAX_BODY, max_in_flight=3)
        self.app.router.add_post("/hot", self.ordinary)
        self.app.router.add_post("/slow", self.slow)
        self.app.router.add_get("/plain", self.plain)
        add_hot_route(self.app, "/hot", self.hot if at_once else self.hot_in_a_task)

    async def ordinary(self, request: web.Request) -> web.Response:
        return web.Response(body=self.answer("aiohttp", await request.read()))

    def hot(self, head: HotHead, body: bytes) -> tuple[str, bytes] | Awaitable[tuple[str, bytes]]:
        if body == b"missing":
            raise NotFound("there is nothing", field="x", remedy="send something else")
        if body == b"defect":
            raise KeyError("SECRET")
        if body == b"wait":
            return self.wait()
        if body.startswith(b"large"):
            return "text/plain", b"L" * LARGE
        return "text/plain", self.answer("front", body)

    async def hot_in_a_task(self, head: HotHead, body: bytes) -> tuple[str, bytes]:
        answer = self.hot(head, body)
        return answer if isinstance(answer, tuple) else await answer

    async def wait(self) -> tuple[str, bytes]:
        self.entered.set()
        await self.let.wait()
        return "text/plain", self.answer("front", b"wait")

    async def slow(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.entered.set()
        await self.let.wait()
        return web.Response(body=self.answer("slow", body))

    async def plain(self, request: web.Request) -> web.Response:
        return web.Response(body=self.answer("plain", b""))

    @staticmethod
    def answer(by: str, body: bytes) -> bytes:
        return json.dumps([by, len(body), body[:20].decode("latin-1")]).encode()


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        """Each part in a segment of its own, as far as the kernel lets us."""
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            line, *fields = head.split("\r\n")[:-2]
            headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
            return int(line.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def said(self) -> Any:
        status, _, body = await self.answer()
        assert status == 200, (status, body)
        return json.loads(body)

    async def ended(self) -> bool:
        """The server closed the connection."""
        async with asyncio.timeout(10):
            return await self.reader.read() == b""


@pytest.fixture(params=[True, False], ids=["at-once", "in-a-task"])
async def served(request: pytest.FixtureRequest) -> Served:
    return Served(at_once=request.param)


@pytest.fixture
async def wire(served: Served) -> AsyncIterator[Wire]:
    async with HttpServer(served.app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        yield Wire(reader, writer)
        served.let.set()
        writer.close()


def post(path: str, body: bytes, *more: str, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", f"Content-Length: {len(body)}", *more]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(path: str, *chunks: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (*chunks, b""))


async def test_a_plain_request_is_answered_by_the_front(wire: Wire) -> None:
    for body in (b"a", b"bc" * 1000, b"d" * MAX_BODY):
        await wire.send(post("/hot", body))
        status, headers, content = await wire.answer()
        assert (status, headers["content-type"]) == (200, "text/plain")
        assert "date" in headers
        assert json.loads(content) == ["front", len(body), body[:20].decode()]


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_it_may_come_in_any_pieces(wire: Wire, size: int) -> None:
    everything = post("/hot", b"first") + post("/hot", b"second") + b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n"
    everything += post("/slow", b"") + post("/hot", b"third")
    served = asyncio.create_task(wire.send(*(everything[i : i + size] for i in range(0, len(everything), size))))
    assert await wire.said() == ["front", 5, "first"]
    assert await wire.said() == ["front", 6, "second"]
    assert await wire.said() == ["plain", 0, ""]
    await served
    assert not wire.reader.at_eof()


@pytest.mark.parametrize(
    "request_bytes",
    [
        post("/hot", b"x", "Connection: close"),
        post("/hot", b"x", "Expect: 100-continue"),
        post("/hot", gzip.compress(b"x"), "Content-Encoding: gzip"),
        post("/hot", b"x", "X-Twice: 1", "X-Twice: 2"),
        post("/hot", b"x", version="1.0"),
        post("/hot?a=1", b"x"),
        chunked("/hot", b"x"),
    ],
    ids=["close", "expect", "gzip", "twice", "1.0", "query", "chunked"],
)
async def test_what_is_not_plain_is_left_to_aiohttp(wire: Wire, request_bytes: bytes) -> None:
    await wire.send(request_bytes)
    status, _, body = await wire.answer() if b"Expect" not in request_bytes else await continued(wire)
    assert (status, json.loads(body)[0]) == (200, "aiohttp")
    if b"close" in request_bytes or b"HTTP/1.0" in request_bytes:
        assert await wire.ended()
        return
    await wire.send(post("/hot", b"after"))
    # A connection whose framing was not plain stays aiohttp's.
    assert await wire.said() == ["aiohttp" if b"chunked" in request_bytes else "front", 5, "after"]


async def continued(wire: Wire) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(10):
        assert (await wire.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    return await wire.answer()


async def test_answers_keep_the_order_of_requests(wire: Wire, served: Served) -> None:
    await wire.send(post("/slow", b"1") + post("/hot", b"2") + post("/hot", b"wait") + post("/hot", b"4"))
    await served.entered.wait()
    served.let.set()
    answers = [await wire.said() for _ in range(4)]
    assert [answer[2] for answer in answers] == ["1", "2", "wait", "4"]
    assert answers[0][0] == "slow"


async def test_a_hot_answer_in_progress_holds_back_what_follows(wire: Wire, served: Served) -> None:
    await wire.send(post("/hot", b"wait"))
    await served.entered.wait()
    await wire.send(post("/slow", b"2"), post("/hot", b"3"))
    served.let.set()
    assert [(await wire.said())[2] for _ in range(3)] == ["wait", "2", "3"]


@pytest.mark.parametrize("path", ["/hot", "/slow"])
async def test_a_body_never_passes_for_a_request(wire: Wire, served: Served, path: str) -> None:
    served.let.set()
    body = post("/hot", b"smuggled")
    head, _, _ = post(path, body).partition(b"\r\n\r\n")
    await wire.send(head + b"\r\n\r\n", body[:30], body[30:], post("/hot", b"next"))
    assert (await wire.said())[1] == len(body)
    assert (await wire.said())[1:] == [4, "next"]


async def test_a_body_in_chunks_never_passes_for_a_request(wire: Wire) -> None:
    body = post("/hot", b"smuggled")
    await wire.send(chunked("/hot", body[:10], body[10:]))
    assert (await wire.said())[:2] == ["aiohttp", len(body)]


@pytest.mark.parametrize(
    "lines",
    [
        ["Content-Length: 1", "Content-Length: 1"],
        ["Content-Length: 1", "Content-Length: 2"],
        ["Content-Length: 1", "Transfer-Encoding: chunked"],
        ["Content-Length : 1"],
        ["Content-Length: +1"],
        ["Content-Length: 1", " folded: x"],
        ["Content-Length: 1", "Bad\x01Name: x"],
        ["Content-Length: 0x1"],
    ],
)
async def test_ambiguous_framing_is_never_answered_by_the_front(wire: Wire, lines: Sequence[str]) -> None:
    await wire.send("\r\n".join(["POST /hot HTTP/1.1", "Host: x", *lines, "", "x"]).encode())
    wire.writer.write_eof()
    async with asyncio.timeout(10):
        assert b'["front"' not in await wire.reader.read()


@pytest.mark.parametrize("length", ["", "+1", "0x1", "1 1", "-1", "1" * 19])
async def test_a_head_like_the_last_one_must_have_a_length_like_its(wire: Wire, length: str) -> None:
    for body in (b"a", b"bc"):
        await wire.send(post("/hot", body))
        assert (await wire.said())[:2] == ["front", len(body)]
    await wire.send(f"POST /hot HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\nx".encode())
    wire.writer.write_eof()
    async with asyncio.timeout(10):
        assert b'["front"' not in await wire.reader.read()


async def test_a_client_that_does_not_read_is_not_answered_on_and_on(served: Served) -> None:
    async with HttpServer(served.app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 14)
        wire, requests = Wire(reader, writer), 64
        await wire.send(*[post("/hot", b"large %d" % i) for i in range(requests)])
        labels = {"route": "POST /hot", "status": "200"}
        other = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
        await other.send(post("/hot", b"x"))
        await other.said()
        answered = served.registry.get_sample_value("metatrie_test_http_requests_total", labels)
        assert answered is not None
        assert answered < requests / 2
        for _ in range(requests):
            assert (await wire.answer())[2] == b"L" * LARGE
        await wire.send(post("/hot", b"end"))
        assert (await wire.said())[2] == "end"
        writer.close()
        other.writer.close()


async def test_errors_are_problem_documents_and_are_counted(wire: Wire, served: Served) -> None:
    for body, status in ((b"missing", 404), (b"defect", 500)):
        await wire.send(post("/hot", body))
        got, headers, content = await wire.answer()
        assert (got, headers["content-type"]) == (status, "application/problem+json")
        assert json.loads(content)["status"] == status
        assert b"SECRET" not in content
    await wire.send(post("/hot", b"x"))
    await wire.said()
    counted = served.registry.get_sample_value
    for status in ("200", "404", "500"):
        assert counted("metatrie_test_http_requests_total", {"route": "POST /hot", "status": status}) == 1
    assert counted("metatrie_test_http_unexpected_errors_total") == 1


async def test_too_large_a_body_is_refused_as_everywhere(wire: Wire) -> None:
    await wire.send(post("/hot", b"x" * (MAX_BODY + 1)))
    status, headers, _ = await wire.answer()
    assert (status, headers["content-type"]) == (413, "application/problem+json")


async def test_too_long_a_head_is_refused_by_aiohttp(wire: Wire) -> None:
    await wire.send(b"POST /hot HTTP/1.1\r\nHost: x\r\nX: " + b"y" * (2 * MAX_HEAD))
    status, _, _ = await wire.answer()
    assert status == 400


async def test_a_body_that_does_not_arrive_is_given_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("metatrie.proto.http.DEFAULT_BODY_TIMEOUT_S", 0.05)
    async with HttpServer(served.app) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        wire = Wire(reader, writer)
        await wire.send(post("/hot", b"whole") + post("/hot", b"half")[:-2])
        assert await wire.said() == ["front", 5, "whole"]
        status, headers, _ = await wire.answer()
        assert (status, headers["connection"]) == (408, "close")
        assert await wire.ended()
        writer.close()


async def test_more_in_flight_than_allowed_are_refused(served: Served) -> None:
    async with HttpServer(served.app) as server:
        wires = [Wire(*await asyncio.open_connection("127.0.0.1", server.port)) for _ in range(4)]
        for wire in wires[:3]:
            served.entered.clear()
            await wire.send(post("/hot", b"wait"))
            await served.entered.wait()
        await wires[3].send(post("/hot", b"x"))
        status, headers, _ = await wires[3].answer()
        assert status == 503
        assert headers["retry-after"]
        served.let.set()
        for wire in wires[:3]:
            assert (await wire.said())[0] == "front"
        for wire in wires:
            wire.writer.close()


async def test_stopping_lets_answers_in_progress_out(served: Served) -> None:
    server = await HttpServer(served.app, grace_s=10).start()
    wire = Wire(*await asyncio.open_connection("127.0.0.1", server.port))
    await wire.send(post("/hot", b"wait"))
    await served.entered.wait()
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    served.let.set()
    assert (await wire.said())[0] == "front"
    await stopping
    assert await wire.ended()
    wire.writer.close()


async def test_a_caller_who_hangs_up_disturbs_nobody(wire: Wire, served: Served) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", wire.writer.get_extra_info("peername")[1])
    writer.write(post("/hot", b"wait"))
    await served.entered.wait()
    writer.close()
    await writer.wait_closed()
    served.let.set()
    await wire.send(post("/hot", b"x"))
    assert await wire.said() == ["front", 1, "x"]
