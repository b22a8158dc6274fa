"""`explain` against a recomputation that shares no code with it: random histories, random prompts, random load."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import cbor2
import msgspec
import pytest
from metatrie.consumers.recording import Entry, Frame, Source
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.proto.api import RouteRequest
from metatrie.proto.hashing import Namespace
from metatrie.scripts.diagnosis import Case, report
from metatrie.scripts.replay import IndexFeed
from metatrie.scripts.timeline import Timeline

SIZE = 4
NAMESPACE = Namespace(model="m", block_size=SIZE)
REPLICAS = ("a", "b", "c")
SALTS = (None, None, "s")
MAX_SKEW = 1
_encode = msgspec.msgpack.Encoder().encode


def names(tokens: list[int], salt: str | None) -> list[int]:
    """What sha256_cbor calls the blocks of a prompt, from its specification."""
    parent, found = hashlib.sha256(cbor2.dumps("0", canonical=True)).digest(), []
    for at in range(0, len(tokens) - len(tokens) % SIZE, SIZE):
        extra = [["cache_salt", salt]] if salt and not at else None
        parent = hashlib.sha256(cbor2.dumps([parent, tokens[at : at + SIZE], extra], canonical=True)).digest()
        found.append(int.from_bytes(parent[-8:], "big"))
    return found


class Prompt:
    def __init__(self, tokens: list[int], salt: str | None) -> None:
        self.tokens, self.salt, self.names = tokens, salt, names(tokens, salt)


def prompts(rng: random.Random) -> list[Prompt]:
    """A few families that share beginnings, some of them under a salt."""
    found: list[Prompt] = []
    for _ in range(rng.randrange(3, 7)):
        base = rng.choice(found) if found and rng.random() < 0.6 else None
        tokens = list(base.tokens[: SIZE * rng.randrange(1, 5)]) if base else []
        tokens += [rng.randrange(10_000) for _ in range(rng.randrange(2, 25))]
        found.append(Prompt(tokens, base.salt if base else rng.choice(SALTS)))
    return found


class Engine:
    """One replica's history as a list of facts, and what follows from it, by looking through all of it."""

    def __init__(self) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self._copies: Counter[int] = Counter()
        self._parents: dict[int, int | None] = {}
        self.present: set[int] = set()
        self.left: dict[int, int] = {}
        self.emptied: int | None = None

    def act(self, rng: random.Random, among: list[Prompt]) -> None:
        seq = len(self.batches)
        prompt, roll = rng.choice(among), rng.random()
        held = [name for name, copies in self._copies.items() if copies]
        if roll < 0.55:
            # Usually from the start; at times as if the beginning had been announced before anybody listened.
            first = 0 if rng.random() < 0.8 else rng.randrange(len(prompt.names)) if prompt.names else 0
            chain = prompt.names[first : first + rng.randrange(1, 8)]
            if not chain:
                return
            parent = prompt.names[first - 1] if first else None
            event: dict[str, Any] = {
                "type": "BlockStored", "block_hashes": chain, "parent_block_hash": parent, "block_size": SIZE,
                "token_ids": prompt.tokens[first * SIZE : (first + len(chain)) * SIZE], "lora_id": None,
                "medium": "GPU",
            }  # fmt: skip
            if prompt.salt and not first:
                event["extra_keys"] = [[prompt.salt], *[None] * (len(chain) - 1)]
            for name in chain:
                self._copies[name] += 1
                self._parents.setdefault(name, parent)
                parent = name
        elif roll < 0.95 and held:
            gone = rng.sample(held, min(len(held), rng.randrange(1, 4)))
            event = {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}
            for name in gone:
                self._copies[name] -= 1
        elif roll > 0.97:
            event = {"type": "AllBlocksCleared"}
            self._copies.clear()
            self._parents.clear()
            self.left.clear()
            self.present = set()
            self.emptied = seq
        else:
            return
        self.batches.append([event])
        # A block counts if it and everything above it, up to a prompt's start, is held.
        present = {name for name, copies in self._copies.items() if copies and self._rooted(name)}
        self.left.update(dict.fromkeys(self.present - present, seq))
        self.present = present

    def _rooted(self, name: int) -> bool:
        at: int | None = name
        while at is not None:
            if not self._copies[at] or at not in self._parents:
                return False
            at = self._parents[at]
        return True

    def depth(self, chain: list[int]) -> int:
        return next((i for i, name in enumerate(chain) if name not in self.present), len(chain))

    def reason(self, chain: list[int]) -> tuple[str, int | None]:
        depth = self.depth(chain)
        if depth == len(chain):
            return "whole", None
        if chain[depth] in self.left:
            return "evicted", self.left[chain[depth]]
        if any(self._copies[name] for name in chain[depth + 1 :]):
            return "detached", None
        if self.emptied is not None and not depth:
            return "cleared", self.emptied
        return "never_stored", None


@pytest.mark.parametrize("seed", range(60))
async def test_explain_agrees_with_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    among = prompts(rng)
    engines = {name: Engine() for name in REPLICAS}
    for _ in range(rng.randrange(5, 90)):
        engines[rng.choice(REPLICAS)].act(rng, among)
    store, timeline = MemoryStore(), Timeline()
    feed = IndexFeed(store)
    config = RouterConfig(policy="hybrid", policies={"hybrid": {"max_skew": MAX_SKEW}}, decisions=8)
    try:
        for name, engine in engines.items():
            source = Source(replica=name, namespace=NAMESPACE)
            for seq, events in enumerate([*engine.batches, []]):
                frame = Frame(0, 0, seq, False, b"", _encode([1.0, events, 0]))
                past, changes = timeline.feed(Entry(seq, source, frame))
                writer = await feed.take(past)
                for change in changes:
                    writer.submit(change.delta, None)
        await feed.settle()
        async with Router(store, config, rng=random.Random(seed)) as router:
            sent: dict[str, list[set[int]]] = {name: [] for name in REPLICAS}
            for _ in range(rng.randrange(6)):
                prompt = rng.choice(among)
                routed = await router.route(RouteRequest(model="m", token_ids=prompt.tokens, cache_salt=prompt.salt))
                sent[routed.replica].append(set(prompt.names))
            for prompt in among:
                await compare(router, timeline, engines, prompt, prompt.salt, sent)
                await compare(router, timeline, engines, prompt, "other", sent)
    finally:
        await feed.close()


async def compare(
    router: Router,
    timeline: Timeline,
    engines: dict[str, Engine],
    prompt: Prompt,
    salt: str | None,
    sent: dict[str, list[set[int]]],
) -> None:
    """sent: to each replica, the blocks of each prompt that was routed there and not reported on yet."""
    chain = names(prompt.tokens, salt)
    answer = await router.explain(RouteRequest(model="m", token_ids=prompt.tokens, cache_salt=salt))
    case = Case(
        model="m",
        prompt_tokens=len(prompt.tokens),
        lookups=answer.decision.lookups,
        replicas=answer.replicas,
        decision=answer.decision,
        unsalted_blocks=answer.unsalted_blocks,
    )
    keys = case.keys(NAMESPACE.id)
    assert [int.from_bytes(key, "big") for key in keys] == chain
    for past in timeline.replicas:
        case.said[str(past.source.ref)] = past.evidence(keys)
    said = report(case)

    depths = {name: engine.depth(chain) for name, engine in engines.items()}
    reusable = {name: min(depth, (len(prompt.tokens) - 1) // SIZE) * SIZE for name, depth in depths.items()}
    plain = max(engine.depth(names(prompt.tokens, None)) for engine in engines.values()) if salt else 0
    for verdict in said.verdicts:
        name = verdict.replica.removesuffix("/0")
        assert verdict.matched_blocks == depths[name], name
        assert verdict.reusable_tokens == reusable[name]
        assert verdict.prompt_blocks == len(chain)
        reason, seq = engines[name].reason(chain)
        if reason == "never_stored" and plain > depths[name]:
            reason = "other_salt"
        assert (verdict.reason, verdict.seq) == (reason, seq), (name, verdict.text)
        missing = None if depths[name] == len(chain) else f"{chain[depths[name]]:016x}"
        assert verdict.block == missing

    # The policy, recomputed: the deepest of those not too far ahead in pending work. What was sent there counts.
    pending = {name: len(sent[name]) for name in REPLICAS}
    for name, engine in engines.items():
        there = engine.present.union(*sent[name])
        depth = next((i for i, block in enumerate(chain) if block not in there), len(chain))
        reusable[name] = min(depth, (len(prompt.tokens) - 1) // SIZE) * SIZE
    idlest = min(pending.values())
    allowed = [name for name in REPLICAS if pending[name] <= idlest + MAX_SKEW]
    best = max(reusable[name] for name in allowed)
    tied = [name for name in allowed if reusable[name] == best]
    least = min(pending[name] for name in tied)
    chosen = answer.decision.replica.removesuffix("/0")
    assert chosen in [name for name in tied if pending[name] == least]
    assert answer.decision.reusable_tokens == best
    explanation = answer.decision.explanation
    assert explanation is not None
    assert len(explanation.candidates) == len(REPLICAS)
    for row in explanation.candidates:
        assert row.eligible == (row.replica in allowed)
        assert row.terms["pending_requests"] == pending[row.replica]
        assert row.terms["reusable_tokens"] == reusable[row.replica]
    diverted = [finding for finding in said.findings if finding.label == "load_diversion"]
    assert bool(diverted) == (max(reusable.values()) > reusable[chosen])
