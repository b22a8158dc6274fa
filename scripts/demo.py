"""`metatrie up --demo`: one workload, once through round robin and once through prefix-aware routing, side by side.

The driver is an ordinary OpenAI client: it streams every turn from a router's `/v1/chat/completions` and measures
until the first token. There is one router per policy, over the same index, and each policy gets emptied caches. Hit
ratio, times and load are what the engines and the clock said; of the routers only the prediction is taken, from the
answer's headers, to be held against what the engine served, and their count of why the two differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..indexer.connect import open_store
from ..indexer.proxy import HEADER
from ..proto.hashing import BlockKey, Namespace
from .stack import Engine, Stack
from .workload import Conversation, WorkloadConfig, conversations

BASELINE: Final = "round_robin"
QUIET_S: Final = 20.0
"""How long to wait for the index to settle before comparing it with the engines."""


class Turn(msgspec.Struct, frozen=True):
    """What one request experienced."""

    replica: str
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


class Agreement(msgspec.Struct, frozen=True):
    """Index against engine truth, in blocks, over all replicas, after the run."""

    engine: int
    """Distinct blocks the engines hold."""
    detached: int
    """Of those, unusable since their prefix was evicted: absent from the index on purpose."""
    missing: int
    """Usable, yet absent from the index."""
    stale: int
    """In the index, yet gone from the engine."""


class Outcome(msgspec.Struct, frozen=True):
    policy: str
    turns: list[Turn]
    failures: int
    wall_s: float
    causes: dict[str, int]
    """Why predicted and served differ, as the router counted it; see docs/front-door.md."""
    agreement: Agreement


async def demonstrate(stack: Stack, workload: WorkloadConfig, console: Console) -> list[Outcome]:
    """Run the workload under each policy of the stack on emptied caches, and print the comparison."""
    plans = conversations(workload)
    outcomes: list[Outcome] = []
    connector = aiohttp.TCPConnector(limit=0)
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("turns"),
        TimeElapsedColumn(),
    )
    async with aiohttp.ClientSession(connector=connector) as session:
        with Progress(*columns, console=console) as progress:
            for policy in stack.routers:
                await _empty_caches(session, stack)
                task = progress.add_task(policy.replace("_", " "), total=workload.users * workload.turns)
                advance = partial(progress.advance, task)
                turns, failures, wall_s = await _drive(session, stack, plans, policy, workload, advance)
                causes = await _causes(session, stack.routers[policy], len(turns))
                agreement = await _compare_index(session, stack)
                outcomes.append(Outcome(policy, turns, failures, wall_s, causes, agreement))
    console.print(_table(outcomes, [e.name for e in stack.engines]))
    console.print(_verdict(outcomes))
    return outcomes


async def _drive(
    session: aiohttp.ClientSession,
    stack: Stack,
    plans: Sequence[Conversation],
    policy: str,
    workload: WorkloadConfig,
    advance: Callable[[], None],
) -> tuple[list[Turn], int, float]:
    turns: list[Turn] = []
    failures = 0
    started = time.perf_counter()

    async def converse(plan: Conversation) -> None:
        nonlocal failures
        await asyncio.sleep(plan.start_s)
        messages = plan.opening()
        for question, pause_s in zip(plan.questions, plan.pauses_s, strict=True):
            await asyncio.sleep(pause_s)
            messages.append({"role": "user", "content": question})
            try:
                turn, answer = await _ask(session, stack, policy, messages, workload.output_tokens)
            except (aiohttp.ClientError, TimeoutError):
                failures += 1
                return
            finally:
                advance()
            turns.append(turn)
            messages.append({"role": "assistant", "content": answer})

    await asyncio.gather(*map(converse, plans))
    return turns, failures, time.perf_counter() - started


async def _ask(
    session: aiohttp.ClientSession, stack: Stack, policy: str, messages: list[dict[str, Any]], output_tokens: int
) -> tuple[Turn, str]:
    body = {
        "model": stack.config.model,
        "messages": messages,
        "max_tokens": output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    first_s: float | None = None
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    async with session.post(f"{stack.routers[policy]}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = msgspec.json.decode(line[6:])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text = choice["delta"].get("content")
                if text or choice.get("finish_reason"):
                    first_s = first_s or time.perf_counter() - started
                if text:
                    pieces.append(text)
    total_s = time.perf_counter() - started
    turn = Turn(
        response.headers[HEADER + "Replica"].partition("/")[0],
        usage["prompt_tokens"],
        int(response.headers[HEADER + "Reusable-Tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"] or 0,
        first_s or total_s,
        total_s,
    )
    return turn, "".join(pieces)


async def _causes(session: aiohttp.ClientSession, router: str, requests: int) -> dict[str, int]:
    """Requests by what became of their prediction, once the router has judged them all."""
    deadline = time.monotonic() + QUIET_S
    while True:
        async with session.get(f"{router}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        counted = {
            sample.labels["outcome"]: int(sample.value)
            for family in families
            for sample in family.samples
            if sample.name == "metatrie_router_feedback_outcomes_total" and sample.value
        }
        if sum(counted.values()) >= requests:
            counted.pop("equal", None)
            return counted
        if time.monotonic() > deadline:
            raise TimeoutError(f"the router did not judge all {requests} requests within {QUIET_S:.0f} s")
        await asyncio.sleep(0.05)


async def _empty_caches(session: aiohttp.ClientSession, stack: Stack) -> None:
    """Reset every engine's prefix cache and wait until the index knows.

    An engine publishes the reset with its next step that has requests, so each gets one token's worth of work.
    """
    for engine in stack.engines:
        async with session.post(f"{engine.url}/reset_prefix_cache") as response:
            response.raise_for_status()
        body = {"model": stack.config.model, "prompt": "ok", "max_tokens": 1}
        async with session.post(f"{engine.url}/v1/completions", json=body) as response:
            response.raise_for_status()
    await _settle(session, stack, lambda inventory: inventory["total"] == 0)


async def _settle(
    session: aiohttp.ClientSession, stack: Stack, until: Callable[[dict[str, Any]], bool] = lambda _: True
) -> None:
    """Wait until every sidecar has applied its engine's last batch and the store has acknowledged everything."""
    deadline = time.monotonic() + QUIET_S
    for engine in stack.engines:
        while True:
            async with session.get(f"{engine.url}/debug/cache") as response:
                published = int(response.headers["X-Next-Seq"])
            async with session.get(f"{engine.sidecar_url}/v1/inventory", params={"limit": 1}) as response:
                inventory = await response.json()
            if inventory["next_seq"] >= published and not inventory["pending"] and until(inventory):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{engine.name}: its sidecar did not catch up within {QUIET_S:.0f} s")
            await asyncio.sleep(0.05)


async def _compare_index(session: aiohttp.ClientSession, stack: Stack) -> Agreement:
    """What the store holds for each replica, against the engine's own table."""
    await _settle(session, stack)
    store = await open_store(stack.redis_url)
    try:
        index = await store.open(Namespace(model=stack.config.model, block_size=stack.config.block_size))
        fleet = {view.spec.ref.replica: view for view in (await index.fleet()).replicas}
        held = detached = missing = stale = 0
        for engine in stack.engines:
            truth = await _engine_keys(session, engine)
            view = fleet[engine.name]
            assert view.incarnation is not None, "a settled replica has an incarnation"
            indexed = set(await index.held(view.incarnation))
            held += len(truth)
            stale += len(indexed - truth)
            # What the sidecar holds back for want of its prefix; anything else absent is an error of ours.
            absent = len(truth - indexed)
            back = min(absent, view.status.detached)
            detached += back
            missing += absent - back
    finally:
        await store.close()
    return Agreement(held, detached, missing, stale)


async def _engine_keys(session: aiohttp.ClientSession, engine: Engine) -> set[BlockKey]:
    async with session.get(f"{engine.url}/debug/cache") as response:
        resident = await response.json()
    return {BlockKey(int(name).to_bytes(8, "big")) for name in resident}


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile; 0 for no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def hit_ratio(turns: Sequence[Turn]) -> float:
    """Prompt tokens served from cache, by the engines' own count."""
    prompt = sum(t.prompt_tokens for t in turns)
    return sum(t.cached_tokens for t in turns) / prompt if prompt else 0.0


def _table(outcomes: Sequence[Outcome], replicas: Sequence[str]) -> Table:
    table = Table(title="Same conversations, same engines, emptied caches", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.policy.replace("_", " "), justify="right")

    def row(name: str, cell: Callable[[Outcome], str]) -> None:
        table.add_row(name, *(cell(outcome) for outcome in outcomes))

    row("requests", lambda o: f"{len(o.turns)}")
    row("failed", lambda o: f"{o.failures}")
    row("prompt tokens", lambda o: f"{sum(t.prompt_tokens for t in o.turns):,}")
    row("cached tokens", lambda o: f"{sum(t.cached_tokens for t in o.turns):,}")
    row("hit ratio", lambda o: f"{hit_ratio(o.turns):.3f}")
    row("time to first token p50", lambda o: f"{percentile((t.ttft_s for t in o.turns), 0.5) * 1e3:,.0f} ms")
    row("time to first token p99", lambda o: f"{percentile((t.ttft_s for t in o.turns), 0.99) * 1e3:,.0f} ms")
    row("request time p50", lambda o: f"{percentile((t.total_s for t in o.turns), 0.5) * 1e3:,.0f} ms")
    row("wall time", lambda o: f"{o.wall_s:.1f} s")
    row("requests per replica", lambda o: " / ".join(str(sum(t.replica == r for t in o.turns)) for r in replicas))
    row(
        "prefilled tokens per replica",
        lambda o: " / ".join(
            f"{sum(t.prompt_tokens - t.cached_tokens for t in o.turns if t.replica == r) / 1000:.0f}k"
            for r in replicas
        ),
    )
    row("predicted = served", lambda o: f"{_exact(o.turns):.1%}")
    row("  else, by cause", lambda o: ", ".join(f"{cause} {n}" for cause, n in sorted(o.causes.items())) or "none")
    table.add_section()
    row("blocks in engines", lambda o: f"{o.agreement.engine:,}")
    row("  detached (prefix evicted)", lambda o: f"{o.agreement.detached:,}")
    row("  missing from the index", lambda o: f"{o.agreement.missing:,}")
    row("  stale in the index", lambda o: f"{o.agreement.stale:,}")
    return table


def _exact(turns: Sequence[Turn]) -> float:
    return sum(t.predicted_tokens == t.cached_tokens for t in turns) / len(turns) if turns else 0.0


def _verdict(outcomes: Sequence[Outcome]) -> str:
    before, after = outcomes[0], outcomes[-1]
    fresh = [sum(t.prompt_tokens - t.cached_tokens for t in o.turns) for o in (before, after)]
    median, tail = (
        percentile((t.ttft_s for t in after.turns), share)
        / max(1e-9, percentile((t.ttft_s for t in before.turns), share))
        - 1
        for share in (0.5, 0.99)
    )
    return (
        f"{after.policy} against {before.policy}: hit ratio {hit_ratio(before.turns):.2f} → "
        f"{hit_ratio(after.turns):.2f}, prefilled tokens {fresh[1] / max(1, fresh[0]) - 1:+.0%}, "
        f"time to first token p50 {median:+.0%}, p99 {tail:+.0%}"
    )
