"""The main job with every part real and a process of its own: engines, sidecars, Redis, router."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import metatrie
import pytest
import pytest_asyncio
from metatrie.scripts.stack import Stack, StackConfig, running

MODEL = "demo-model"
CONFIG = StackConfig(engines=2, port=0, num_blocks=1025, prefill_tokens_per_s=200_000.0)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    """One stack for this file; every test has prompts of its own."""
    async with running(CONFIG) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.02)


async def call(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


def conversation(topic: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"{topic}: you are careful. " * 20},
        {"role": "user", "content": f"Tell me about {topic}. " * 10},
    ]


async def test_a_served_prompt_is_found_where_it_was_served(stack: Stack, session: aiohttp.ClientSession) -> None:
    messages = conversation("tries")
    first = stack.engines[0]
    served = await call(
        session, f"{first.url}/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8}
    )
    assert served["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompt_tokens = served["usage"]["prompt_tokens"]

    async def matched() -> dict[str, int]:
        answer = await call(session, f"{stack.router_url}/v1/match", {"model": MODEL, "messages": messages})
        assert answer["prompt_tokens"] == prompt_tokens
        return {r["replica"]: r["matched_blocks"] for r in answer["replicas"]}

    async def visible() -> bool:
        return (await matched())[first.name] == prompt_tokens // CONFIG.block_size

    await eventually(visible, "the served prompt is indexed whole")
    assert (await matched())[stack.engines[1].name] == 0
    route = await call(
        session, f"{stack.router_url}/v1/route", {"model": MODEL, "messages": messages, "policy": "affinity_only"}
    )
    assert (route["replica"], route["url"]) == (first.name, first.url)
    again = await call(
        session, f"{route['url']}/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8}
    )
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == route["reusable_tokens"] > 0
    async with session.delete(f"{stack.router_url}/v1/reservations/{route['reservation']}") as response:
        assert response.status == 204


async def test_sequential_turns_are_predicted_exactly(stack: Stack, session: aiohttp.ClientSession) -> None:
    """With one request at a time nothing happens between prediction and service, so they must be equal."""
    messages = conversation("radix trees")
    for turn in range(4):

        async def settled() -> bool:
            for engine in stack.engines:
                async with session.get(f"{engine.url}/debug/cache") as response:
                    published = int(response.headers["X-Next-Seq"])
                async with session.get(f"{engine.sidecar_url}/v1/inventory") as response:
                    inventory = await response.json()
                if inventory["next_seq"] != published or inventory["pending"] or inventory["state"] != "exact":
                    return False
            return True

        await eventually(settled, "the index caught up")
        route = await call(session, f"{stack.router_url}/v1/route", {"model": MODEL, "messages": messages})
        answer = await call(
            session, f"{route['url']}/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 20}
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == route["reusable_tokens"], f"turn {turn}"
        assert (route["reusable_tokens"] > 0) == (turn > 0)
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        messages.append({"role": "user", "content": "And then?"})


async def test_a_cleared_cache_stops_counting(stack: Stack, session: aiohttp.ClientSession) -> None:
    engine = stack.engines[0]
    body = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 1}
    await call(session, f"{engine.url}/v1/completions", body)

    async def depth() -> int:
        answer = await call(session, f"{stack.router_url}/v1/match", {"model": MODEL, "token_ids": body["prompt"]})
        return next(r["matched_blocks"] for r in answer["replicas"] if r["replica"] == engine.name)

    async def whole() -> bool:
        return await depth() == 4

    async def none() -> bool:
        return await depth() == 0

    await eventually(whole, "the prompt is indexed")
    async with session.post(f"{engine.url}/reset_prefix_cache") as response:
        assert response.status == 200
    # An engine publishes a reset with its next step that has requests.
    await call(session, f"{engine.url}/v1/completions", {"model": MODEL, "prompt": [7] * 8, "max_tokens": 1})
    await eventually(none, "the cleared blocks are gone")


async def test_states_and_metrics_are_shown(stack: Stack, session: aiohttp.ClientSession) -> None:
    async def exact() -> bool:
        async with session.get(f"{stack.router_url}/v1/replicas") as response:
            listed = (await response.json())["replicas"]
        return [r["state"] for r in listed] == ["exact", "exact"] and all(r["load"]["kv_usage"] == 0 for r in listed)

    await eventually(exact, "both replicas are exact and their load is known")
    for url in [stack.router_url, *(e.sidecar_url for e in stack.engines)]:
        for path in ("/healthz", "/readyz", "/metrics"):
            async with session.get(url + path) as response:
                assert response.status == 200, (url, path)
                text = await response.text()
        assert "metatrie_" in text


async def test_every_metric_is_explained(stack: Stack, session: aiohttp.ClientSession) -> None:
    page = (Path(metatrie.__file__).parent / "docs" / "operation.md").read_text()
    shown: set[str] = set()
    labels: dict[str, set[str]] = {}
    for url in (stack.router_url, stack.engines[0].sidecar_url):
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        shown |= set(re.findall(r"^# HELP (metatrie_\S+)", text, re.MULTILINE))
        for name, given in re.findall(r"^(metatrie_\w+)\{(.+)\} ", text, re.MULTILINE):
            labels.setdefault(name, set()).update(re.findall(r"(\w+)=\"", given))
    names = {name for name in shown if not name.endswith("_created")}
    assert len(names) > 50
    assert sorted(name for name in names if f"`{name}" not in page) == []
    explained = re.findall(r"`(metatrie_\w+)\{([\w,]+)\}`", page)
    assert len(explained) > 5
    for name, given in explained:
        if name in labels:
            assert set(given.split(",")) == labels[name] - (set() if "model" in given else {"model"}) - {
                "replica",
                "dp_rank",
            }, name
