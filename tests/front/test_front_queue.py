"""Requests that wait in the router: through the front door, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from metatrie.indexer.queueing import QueueConfig
from metatrie.indexer.router import RouterConfig

from .conftest import MODEL, Front, OpenFront, Scripted

Eventually = Callable[..., Awaitable[None]]
StartScripted = Callable[..., Awaitable[Scripted]]


class Engine:
    """Answers when a test lets it, in the order it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """First token of each prompt."""
        self.go = asyncio.Semaphore(0)
        self.fails = asyncio.Event()
        """Breaks off what is being answered, once."""

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        self.asked.append((await http.json())["prompt"][0])
        ends = [asyncio.ensure_future(end) for end in (self.go.acquire(), self.fails.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self.fails.is_set():
            self.fails.clear()
            assert http.transport is not None
            http.transport.abort()
        return web.json_response({"choices": [{"text": "x"}]})


def ask(front: Front, first: int, tokens: int) -> asyncio.Task[Any]:
    body = {"model": MODEL, "prompt": [first] * tokens}
    return asyncio.create_task(front.post("/v1/completions", body))


async def waiting(front: Front, count: int, eventually: Eventually) -> None:
    async def there() -> bool:
        return (await front.metrics())["metatrie_router_queue_waiting"] == count

    await eventually(there)


async def asked(engine: Engine, count: int, eventually: Eventually) -> None:
    async def there() -> bool:
        return len(engine.asked) == count

    await eventually(there)


async def two_busy(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> tuple[Front, list[asyncio.Task[Any]], tuple[Engine, Engine]]:
    """Two engines with a request of 20,000 tokens each."""
    one, two = Engine(), Engine()
    front = await open_front(urls=[(await scripted(engine)).url for engine in (one, two)])
    tasks = [ask(front, 1, 20_000), ask(front, 2, 20_000)]
    await asked(one, 1, eventually)
    await asked(two, 1, eventually)
    return front, tasks, (one, two)


async def test_short_work_overtakes_long_work_in_the_router(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    engine = Engine()
    front = await open_front(urls=[(await scripted(engine)).url])
    first = ask(front, 1, 20_000)
    await asked(engine, 1, eventually)
    long = ask(front, 2, 30_000)
    await waiting(front, 1, eventually)
    short = ask(front, 3, 100)
    await waiting(front, 2, eventually)
    assert engine.asked == [1]
    engine.go.release()
    await asked(engine, 3, eventually)  # the short one leaves room for the other
    for _ in range(2):
        engine.go.release()
    answers = await asyncio.gather(first, long, short)
    assert engine.asked == [1, 3, 2]
    assert [status for status, _, _ in answers] == [200, 200, 200]
    assert "X-Metatrie-Waited-Ms" not in answers[0][2]
    assert int(answers[1][2]["X-Metatrie-Waited-Ms"]) >= 0
    metrics = await front.metrics()
    assert metrics["metatrie_router_queue_waits_total"] == 2
    assert metrics["metatrie_router_queue_waited_seconds_total"] > 0


async def test_whoever_waits_goes_where_there_is_room(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    front, tasks, (one, two) = await two_busy(open_front, scripted, eventually)
    tasks.append(ask(front, 3, 1000))
    await waiting(front, 1, eventually)
    two.go.release()  # whichever it would have been bound to
    await asked(two, 2, eventually)
    one.go.release()
    two.go.release()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_a_request_whose_engine_fails_waits_for_the_next(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    front, tasks, (one, two) = await two_busy(open_front, scripted, eventually)
    tasks.append(ask(front, 3, 20_000))
    await waiting(front, 1, eventually)
    failed = one.asked[0]
    one.fails.set()
    # Where it failed there is room now: who waited goes there, and it waits for the other one.
    await asked(one, 2, eventually)
    await waiting(front, 1, eventually)
    assert (one.asked[1], two.asked) == (3, [3 - failed])
    two.go.release()
    await asked(two, 2, eventually)
    assert two.asked[1] == failed
    one.go.release()
    two.go.release()
    answers = await asyncio.gather(*tasks)
    assert [status for status, _, _ in answers] == [200] * 3
    assert answers[failed - 1][2]["X-Metatrie-Attempt"] == "2"


async def test_a_caller_that_hangs_up_while_it_waits_is_forgotten(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    engine = Engine()
    front = await open_front(urls=[(await scripted(engine)).url])
    first = ask(front, 1, 20_000)
    await asked(engine, 1, eventually)
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": [2] * 50}
        gone = asyncio.create_task(session.post(front.url + "/v1/completions", json=body))
        await waiting(front, 1, eventually)
        gone.cancel()
    await waiting(front, 0, eventually)
    engine.go.release()
    assert (await first)[0] == 200
    assert engine.asked == [1]

    async def none_reserved() -> bool:
        return await front.reserved() == 0

    await eventually(none_reserved)


@pytest.mark.parametrize("config", [QueueConfig(enabled=False), QueueConfig(threshold_s=3600)])
async def test_without_a_queue_the_engine_has_it(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually, config: QueueConfig
) -> None:
    engine = Engine()
    front = await open_front(urls=[(await scripted(engine)).url], router=RouterConfig(queue=config))
    tasks = [ask(front, n, 20_000) for n in range(3)]
    await asked(engine, 3, eventually)
    for _ in tasks:
        engine.go.release()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3


async def test_a_policy_that_ignores_load_does_not_queue(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    engine = Engine()
    front = await open_front(urls=[(await scripted(engine)).url], router=RouterConfig(policy="round_robin"))
    tasks = [ask(front, n, 20_000) for n in range(2)]
    await asked(engine, 2, eventually)
    assert (await front.metrics())["metatrie_router_queue_waits_total"] == 0
    for _ in tasks:
        engine.go.release()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 2


async def test_what_asks_for_a_decision_gets_one_at_once(
    open_front: OpenFront, scripted: StartScripted, eventually: Eventually
) -> None:
    engine = Engine()
    front = await open_front(urls=[(await scripted(engine)).url])
    first = ask(front, 1, 20_000)
    await asked(engine, 1, eventually)
    assert (await front.metrics())["metatrie_router_queue_works"] == 1
    status, routed, _ = await front.post("/v1/route", {"model": MODEL, "token_ids": [7] * 64})
    assert (status, routed["replica"]) == (200, "r0")
    engine.go.release()
    assert (await first)[0] == 200
