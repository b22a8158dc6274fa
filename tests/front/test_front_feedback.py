"""Predicted against served: each cause, the cut path, the replica that is not believed any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web
from metatrie.indexer.feedback import ASKED, CAPACITY, ConsumerWitness, Feedbacks, Judgement, Prediction
from metatrie.indexer.memory import MemoryIndex, MemoryStore
from metatrie.indexer.models import ModelConfig
from metatrie.indexer.router import Router, RouterConfig
from metatrie.indexer.tenants import Caller
from metatrie.proto.api import Feedback, MatchRequest, RouteRequest
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import (
    PAGE_SPAN,
    BlockWrite,
    Depth,
    Incarnation,
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    TierMask,
)

OpenFront = Callable[..., Awaitable[Any]]
Eventually = Callable[..., Awaitable[None]]
TOKENS = list(range(100))
SPACE = Namespace(model="m")


def predicted(index: MemoryIndex, keys: bytes, **changes: Any) -> Prediction:
    """64 tokens, all shown by the index."""
    fields: dict[str, Any] = {
        "incarnation": Incarnation(1),
        "spec": None,
        "decided_at": 1000.0,
        "block_size": 16,
        "prompt_tokens": 100,
        "whole": True,
        "predicted_tokens": 64,
        "indexed_tokens": 64,
        "diverted_tokens": 0,
    }
    return Prediction(index=index, keys=keys, **{**fields, **changes})


class World:
    """A router over an index in which replica `r` holds the first blocks of TOKENS."""

    def __init__(self, router: Router, index: MemoryIndex, incarnation: Incarnation) -> None:
        self.router, self.index, self.incarnation = router, index, incarnation
        self.keys = Chain(SPACE.root, 16, TOKENS).keys(6)
        self.version = 0

    async def hold(self, blocks: int, *, of: int = 6) -> None:
        self.version += 1
        writes = [
            BlockWrite(
                key=BlockKey(key),
                parent=self.keys[i - 1] if i else None,
                head=PageHead(self.keys[i - i % PAGE_SPAN]),
                depth=i,
                tiers=TierMask(i < blocks),
            )
            for i, key in enumerate(self.keys[:of])
        ]
        await self.index.write(self.incarnation, self.version, writes)

    async def route(self) -> Any:
        return await self.router.route(RouteRequest(model="m", token_ids=TOKENS))

    async def tell(self, cached: int, *, caller: Caller | None = None, **fields: int) -> str | None:
        answer = await self.route()
        feedback = Feedback(reservation=answer.reservation, cached_tokens=cached, finished=True, **fields)
        response = await self.router.feedback(feedback, caller or Caller(trusted=True))
        return response.outcome

    async def matched(self) -> int:
        answer = await self.router.match(MatchRequest(model="m", token_ids=TOKENS))
        return answer.replicas[0].matched_blocks

    async def standing(self) -> tuple[str, str]:
        (info,) = (await self.router.replicas(limit=9)).replicas
        answer = await self.router.match(MatchRequest(model="m", token_ids=TOKENS))
        assert answer.replicas[0].state == info.state
        return info.state, info.cause


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def world(clock: Clock) -> Any:
    store = MemoryStore()
    index = await store.open(SPACE)
    spec = ReplicaSpec(ref=ReplicaRef("r"), engine="vllm", url="http://r")
    claim = await index.claim(spec, owner="test", lease_s=1e9, activate=True)
    async with Router(store, RouterConfig(policy="affinity_only"), clock=clock) as router:
        world = World(router, index, claim.incarnation)
        await world.hold(4)
        yield world


async def test_every_cause_is_told_apart(world: World, clock: Clock) -> None:
    assert await world.tell(64) == "equal"
    assert (await world.route()).reusable_tokens == 96, (
        "what was just sent there counts, until its event must have come"
    )
    assert await world.tell(64) == "unfinished"
    for cached, prompt_tokens, outcome in [
        (64, 100, "equal"),
        (0, 101, "tokenisation"),
        (80, 100, "unseen"),
        (48, 100, "last_block"),
        (16, 100, "stale_index"),
    ]:
        clock.now += 1000
        assert await world.tell(cached, prompt_tokens=prompt_tokens) == outcome
    clock.now += 1000
    answer = await world.route()
    await world.hold(1)
    feedback = Feedback(reservation=answer.reservation, cached_tokens=16)
    assert (await world.router.feedback(feedback)).outcome == "evicted"
    assert (await world.router.feedback(feedback)).outcome is None, "only the first counts"


async def test_of_a_prompt_known_in_part_only_that_part_is_compared(world: World) -> None:
    feedbacks = Feedbacks(ConsumerWitness())
    partly = predicted(world.index, b"".join(world.keys[:4]), incarnation=world.incarnation, whole=False)
    for cached, outcome in ((64, "equal"), (320, "equal"), (48, "last_block")):
        assert (await feedbacks.judge(partly, cached_tokens=cached, prompt_tokens=500)).outcome == outcome


async def test_a_block_that_left_and_came_back_was_evicted(world: World, eventually: Eventually) -> None:
    """The consumer is asked, over HTTP, and what it says of any missing block decides; one that cannot be asked
    changes nothing."""
    said: list[Sequence[float | None]] = []
    asked: list[Any] = []

    async def blocks(http: web.Request) -> web.Response:
        asked.append(await http.json())
        evidence = [
            {"key": key, "state": "attached", "left_ts": left_ts}
            for key, left_ts in zip(asked[-1]["keys"], said[-1], strict=True)
        ]
        namespace = {"model": "m"}
        counts = dict.fromkeys(("next_seq", "parity_bad", "detached", "unhashable"), 0)
        rest = {"replica": "r", "dp_rank": 0, "state": "exact", "cause": "", "hash_mode": "auto", "parity": True}
        return web.json_response({**rest, **counts, "namespace": namespace, "blocks": evidence})

    app = web.Application()
    app.router.add_post("/v1/blocks", blocks)
    async with HttpServer(app) as server:
        witness = ConsumerWitness()
        feedbacks = Feedbacks(witness)
        spec = ReplicaSpec(ref=ReplicaRef("r"), engine="vllm", consumer=server.url)
        prediction = predicted(world.index, b"".join(world.keys[:4]), incarnation=world.incarnation, spec=spec)
        for left, outcome in (
            ((None, None, None), "stale_index"),
            ((998.0, 997.0, None), "stale_index"),
            ((1000.2, 1000.1, 1000.1), "evicted"),
            ((None, None, 1000.2), "evicted"),  # the first left and came back within one step, unseen
        ):
            said.append(left)
            judgement = await feedbacks.judge(prediction, cached_tokens=16, prompt_tokens=100)
            assert judgement.outcome == outcome
        assert asked[-1] == {"keys": [key.hex() for key in world.keys[1:4]], "replica": "r", "dp_rank": 0}
        said.append((None,) * ASKED)
        keys = [world.keys[0], *(BlockKey(i.to_bytes(8, "big")) for i in range(100))]
        long = msgspec.structs.replace(prediction, keys=b"".join(keys), predicted_tokens=101 * 16)
        assert (await feedbacks.judge(long, cached_tokens=0, prompt_tokens=100)).outcome == "stale_index"
        assert (asked[-1]["keys"][0], asked[-1]["keys"][-1]) == (keys[0].hex(), keys[-1].hex())
        lost = msgspec.structs.replace(
            prediction, spec=ReplicaSpec(ref=spec.ref, engine="vllm", consumer="http://127.0.0.1:1")
        )
        assert (await feedbacks.judge(lost, cached_tokens=16, prompt_tokens=100)).outcome == "stale_index"
        await witness.close()


async def test_a_stale_path_is_cut_until_it_is_served_or_time_is_up(world: World, clock: Clock) -> None:
    assert await world.tell(16) == "stale_index"
    assert await world.matched() == 1
    clock.now += 1000
    assert await world.matched() == 4
    assert await world.tell(16) == "stale_index"
    assert await world.matched() == 1


async def test_a_served_path_is_believed_again(clock: Clock) -> None:
    feedbacks = Feedbacks(ConsumerWitness(), clock=clock)
    index = await MemoryStore().open(SPACE)
    chain = Chain(SPACE.root, 16, TOKENS)
    keys = b"".join(chain.keys(4)[:4])
    prediction = predicted(index, keys)
    depths = {Incarnation(1): Depth(4, (4, 0, 0)), Incarnation(2): Depth(4, (1, 3, 0))}
    feedbacks.learn(prediction, Judgement("stale_index", 32), cached_tokens=32)
    cut = feedbacks.cut(chain, depths)
    assert cut == {Incarnation(1): Depth(2, (2, 0, 0)), Incarnation(2): Depth(4, (1, 3, 0))}
    feedbacks.learn(prediction, Judgement("equal", 0), cached_tokens=64)
    assert feedbacks.cut(chain, depths) == depths


async def test_persistent_disagreement_degrades_and_agreement_restores(world: World, clock: Clock) -> None:
    for _ in range(16):
        assert (await world.standing())[0] == "exact"
        clock.now += 1000
        assert await world.tell(0) == "stale_index"
    clock.now += 1000
    assert await world.standing() == ("degraded", "feedback_stale_index")
    answer = await world.route()
    assert (answer.state, answer.cause) == ("degraded", "feedback_stale_index")
    for _ in range(60):
        await world.tell(64)
    assert await world.standing() == ("exact", "")


async def test_eviction_and_single_failures_do_not_degrade(world: World, clock: Clock) -> None:
    for _ in range(40):
        for _ in range(4):
            await world.tell(64)
        clock.now += 1000
        await world.tell(0)
    clock.now += 1000
    assert (await world.standing())[0] == "exact"


async def test_untrusted_feedback_counts_and_changes_nothing(world: World) -> None:
    tenant = Caller(tenant="x")
    for _ in range(40):
        assert await world.tell(0, caller=tenant) == "stale_index"
    assert await world.matched() == 4
    assert await world.standing() == ("exact", "")


def test_waiting_predictions_are_bounded() -> None:
    feedbacks, index = Feedbacks(ConsumerWitness()), MemoryIndex(SPACE)
    for i in range(CAPACITY + 10):
        feedbacks.expect(str(i), predicted(index, b""))
    assert feedbacks.take("9") is None
    assert feedbacks.take("10") is not None
    for i in range(10):
        feedbacks.expect(f"big{i}", predicted(index, bytes(16 << 20)))
    assert [feedbacks.take(f"big{i}") is not None for i in range(10)] == [False] * 6 + [True] * 4


# Through the front door


async def test_the_engines_own_count_closes_the_loop(open_front: OpenFront, eventually: Eventually) -> None:
    models = {"m": ModelConfig(tokenizer="byte")}
    front = await open_front(engines=2, router=RouterConfig(models=models))
    text = "the weather in Paris is what it was " * 20
    body: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    asked = 0

    async def settled() -> bool:
        metrics = await front.metrics()
        _, answer, _ = await front.post("/v1/match", body)
        known = answer["replicas"][0]["matched_blocks"] > 40
        return bool(metrics["metatrie_router_feedbacks_total"] == asked and known)

    for streamed in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {}):
        assert (await front.post("/v1/chat/completions", {**body, **streamed}))[0] == 200
        asked += 1
        await eventually(settled)
    metrics = await front.metrics()
    assert metrics['metatrie_router_feedback_outcomes_total{outcome="equal"}'] == 3
    assert metrics["metatrie_router_served_tokens_total"] > 1000


async def test_a_tokenizer_that_is_not_the_engines_shows(open_front: OpenFront, tokenizer_dir: str) -> None:
    models = {"m": ModelConfig(tokenizer=tokenizer_dir)}  # the engines' is `byte`
    front = await open_front(engines=1, router=RouterConfig(models=models))
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "the weather in Paris"}]}
    for _ in range(20):
        assert (await front.post("/v1/chat/completions", body))[0] == 200
    await asyncio.gather(*front.proxy._background)
    metrics = await front.metrics()
    assert metrics['metatrie_router_feedback_outcomes_total{outcome="tokenisation"}'] == 20
