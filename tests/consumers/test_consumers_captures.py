"""Recorded streams of real engines: after every batch the picture equals the engine's own, the index the oracle's.

The oracle (consumer_oracle.py) recomputes everything from the events by brute force.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from consumer_oracle import Oracle, chained, sglang_name, sha256_cbor, vllm_name
from metatrie.consumers.inventory import Delta, Inventory
from metatrie.engines.rules import rule_for
from metatrie.indexer.connect import open_store
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.events import Batch, decode_batch
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.index import Incarnation, Index, ReplicaRef, ReplicaSpec

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
NAMES = sorted(p.name.removesuffix(".frames.jsonl.gz") for p in CAPTURES.glob("*.frames.jsonl.gz"))
FULL_REPORT = "vllm-0.33.0-pool-full-report"
NAMESPACE = Namespace(model="m", block_size=16)
SPEC = ReplicaSpec(ref=ReplicaRef("recorded"), engine="vllm")
ROOT = sha256_cbor("0")


def name_of(raw: str) -> tuple[int, int]:
    """(group, engine hash) from a truth key: `<group>:<hash>`, or the hash alone in SGLang's."""
    group, _, text = raw.rpartition(":")
    # 32-byte hashes are in hex, 64-bit ones in signed or unsigned decimal.
    value = int(text[-16:], 16) if len(text) == 64 else int(text)
    return int(group or 0), value & 0xFFFF_FFFF_FFFF_FFFF


@cache
def recorded(name: str) -> tuple[tuple[Batch, dict[tuple[int, int], int]], ...]:
    """(batch, what was resident after its step), in order."""
    with gzip.open(CAPTURES / f"{name}.truth.jsonl.gz", "rt") as lines:
        steps = [json.loads(line) for line in lines]
    truth = {s["seq"]: {name_of(k): n for k, n in s["resident"].items()} for s in steps if s["seq"] is not None}
    with gzip.open(CAPTURES / f"{name}.frames.jsonl.gz", "rt") as lines:
        frames = [[bytes.fromhex(f) for f in json.loads(line)] for line in lines]
    return tuple((decode_batch(payload), truth[int.from_bytes(seq, "big")]) for _, seq, payload in frames)


@cache
def requests(name: str) -> tuple[tuple[list[int], str | None, str | None], ...]:
    """Every sequence that was asked of the pool: (tokens, adapter, salt)."""
    with gzip.open(CAPTURES / f"{name}.truth.jsonl.gz", "rt") as lines:
        steps = [json.loads(line) for line in lines]
    grown: dict[str, tuple[list[int], Any, Any]] = {}
    done: list[tuple[list[int], Any, Any]] = []
    for op in (op for step in steps for op in step.get("ops", ())):
        match op:
            case ["admit", rid, tokens, lora, salt, _]:
                if rid in grown:
                    done.append(grown.pop(rid))
                grown[rid] = (list(tokens), lora, salt)
            case ["decode", rid, token]:
                grown[rid][0].append(token)
    return (*done, *grown.values())


def engine_of(name: str) -> str:
    if name.startswith("vllm"):
        return "vllm"
    return "sglang-dynamo" if name.endswith("dynamo") else "sglang"


def oracle_for(name: str, *, rule: bool = False) -> Oracle:
    predict = None
    if rule:
        dynamo = engine_of(name) == "sglang-dynamo"
        predict = partial(vllm_name, root=ROOT) if name.startswith("vllm") else partial(sglang_name, dynamo=dynamo)
    return Oracle(predict=predict, set_mode=name == FULL_REPORT)


def inventory_for(name: str, *, rule: bool = False) -> Inventory:
    return Inventory(
        NAMESPACE,
        rule=rule_for(engine_of(name)) if rule else None,
        hash_mode="auto" if rule else "recompute",
        copy_mode="set" if name == FULL_REPORT else "count",
    )


class Written:
    """Carries deltas into an index the way the contract asks for."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.incarnation = Incarnation(0)
        self.version = 0

    async def take(self, delta: Delta) -> None:
        if delta.reset or not self.incarnation:
            claim = await self.index.claim(SPEC, owner="test", lease_s=600, activate=True)
            self.incarnation, self.version = claim.incarnation, 0
        appear = sorted((w for w in delta.writes if w.tiers), key=lambda w: w.depth)
        vanish = sorted((w for w in delta.writes if not w.tiers), key=lambda w: -w.depth)
        if delta.writes:
            self.version += 1
            await self.index.write(self.incarnation, self.version, appear + vanish)

    async def held(self) -> dict[bytes, int]:
        return {bytes(k): int(t) for k, t in (await self.index.held(self.incarnation)).items()}


def masks(oracle: Oracle) -> dict[bytes, int]:
    return {key: row.tiers for key, row in oracle.rows().items()}


def shown(inventory: Inventory) -> dict[bytes, int]:
    return {bytes(k): int(t) for k, t in inventory.expected().items()}


def played(name: str, inventory: Inventory, oracle: Oracle) -> Iterator[tuple[Delta, dict[tuple[int, int], int]]]:
    for batch, truth in recorded(name):
        delta = inventory.apply(batch)
        oracle.apply(batch)
        yield delta, truth


def test_every_recording_is_there() -> None:
    assert len(NAMES) == 11


@pytest.mark.parametrize("rule", [False, True], ids=["recompute", "rule"])
@pytest.mark.parametrize("name", NAMES)
async def test_inventory_and_memory_index_follow_the_engine(name: str, rule: bool) -> None:
    inventory, oracle = inventory_for(name, rule=rule), oracle_for(name, rule=rule)
    index = Written(await MemoryStore().open(NAMESPACE))
    most = 0
    for delta, truth in played(name, inventory, oracle):
        await index.take(delta)
        if name == FULL_REPORT:
            assert inventory.resident().keys() == truth.keys()
            assert set(inventory.resident().values()) <= {1}
        else:
            assert inventory.resident() == truth
        assert inventory.resident() == oracle.resident()
        rows = oracle.rows()
        assert shown(inventory) == masks(oracle) == await index.held()
        assert {
            bytes(w.key): (w.parent, bytes(w.head), w.depth, int(w.tiers)) for w in inventory.attached_writes()
        } == {key: tuple(row) for key, row in rows.items()}
        most = max(most, len(rows))
    assert most > 4
    assert not inventory.flaws
    assert inventory.stats.unknown_removals == 0


@pytest.mark.parametrize("name", NAMES)
async def test_redis_index_follows_the_engine(name: str, redis_url: str) -> None:
    inventory, oracle = inventory_for(name), oracle_for(name)
    store = await open_store(redis_url)
    try:
        index = Written(await store.open(NAMESPACE))
        every = 8 if "scheduler" in name else 1
        steps = list(recorded(name))
        for i, (delta, _) in enumerate(played(name, inventory, oracle)):
            await index.take(delta)
            if i % every == 0 or i == len(steps) - 1:
                assert await index.held() == masks(oracle)
    finally:
        await store.close()


def test_counting_copies_drifts_on_full_reports_and_sets_do_not() -> None:
    """vLLM's report mode `full` announces reused blocks again and never takes that back."""
    counting = Inventory(NAMESPACE, hash_mode="recompute", copy_mode="count")
    drifted = 0
    for batch, truth in recorded(FULL_REPORT):
        counting.apply(batch)
        drifted += counting.resident() != truth
    assert drifted


@pytest.mark.parametrize("name", [n for n in NAMES if "pool" in n])
def test_no_index_key_promises_a_plain_prompt_what_only_a_salted_or_adapted_one_has(name: str) -> None:
    """By the recorded requests themselves, whatever the wire of that version shows."""
    inventory = inventory_for(name, rule=True)
    plain = {
        bytes(key)
        for tokens, _, _ in requests(name)
        for key in Chain(NAMESPACE.root, 16, tokens).keys(len(tokens) // 16)
    }
    # Which of those a plain request really filled, by the name the engine gave it: plain names are canonical hashes.
    for batch, truth in recorded(name):
        inventory.apply(batch)
        names = {h for _, h in truth}
        promised = inventory.expected().keys() & plain
        assert {int.from_bytes(key, "big") for key in promised} <= names


def test_salts_that_0_11_hides_are_found_out() -> None:
    name = "vllm-0.11.0-pool-mixed"
    inventory = inventory_for(name, rule=True)
    trusting = inventory_for(name)
    salted: set[bytes] = set()
    for tokens, _, salt in requests(name):
        parent = ROOT
        for i in range(len(tokens) // 16):
            # As 0.11 feeds it: the bare salt, in the first block.
            extra = [salt] if salt and i == 0 else None
            parent = sha256_cbor([parent, tokens[i * 16 : i * 16 + 16], extra])
            if salt:
                salted.add(parent[-8:])
    seen = 0
    for batch, truth in recorded(name):
        inventory.apply(batch)
        trusting.apply(batch)
        hidden = {h for _, h in truth if h.to_bytes(8, "big") in salted}
        seen = max(seen, len(hidden))
        for h in hidden:
            node = inventory.node(h)
            assert node is not None
            assert node.mask == 0
        # Everything else counts, as far as its prefix is held.
        assert inventory.attached == sum(
            h.to_bytes(8, "big") not in salted and (n := trusting.node(h)) is not None and n.mask != 0
            for _, h in truth
        )
    assert seen > 10
    assert inventory.parity
    assert inventory.stats.hidden > 0


@pytest.mark.parametrize("name", ["vllm-0.26.0-pool-mixed", "vllm-0.33.0-pool-mixed"])
def test_salts_and_adapters_on_the_wire_are_matched_by_requests_that_have_them(name: str) -> None:
    """What the wire shows is no hidden input: with the rule on, tenants and adapters keep their hits."""
    from metatrie.proto.hashing import PromptExtras

    inventory = inventory_for(name, rule=True)
    extras = {(lora, salt) for _, lora, salt in requests(name)} - {(None, None)}
    assert extras
    chains = [
        (
            frozenset(
                bytes(k) for k in Chain(NAMESPACE.root, 16, tokens, PromptExtras(lora=lora, cache_salt=salt)).keys(99)
            ),
            (lora, salt),
        )
        for tokens, lora, salt in requests(name)
        if lora or salt
    ]
    matched = set()
    for batch, _ in recorded(name):
        inventory.apply(batch)
        expected = {bytes(k) for k in inventory.expected()}
        matched |= {who for keys, who in chains if keys & expected}
    assert matched == extras


def test_sglang_extra_keys_hidden_by_the_wire_never_count() -> None:
    """The dynamo format names pages by extra_key as well, which no field shows."""
    name = "sglang-0.5.23-radix-namespaces-dynamo"
    inventory = inventory_for(name, rule=True)
    plain_names: dict[int, bytes] = {}
    for batch, _ in recorded(name):
        inventory.apply(batch)
    assert inventory.parity
    assert inventory.stats.hidden > 0
    oracle = oracle_for(name, rule=True)
    for batch, _ in recorded(name):
        oracle.apply(batch)
        for key in oracle.rows():
            plain_names[int.from_bytes(key, "big")] = key
    # Salted, without extra_key: on the wire, so it counts under the salted key.
    salted = {
        chained(ROOT, link.tokens or (), (("cache_salt", link.salt),))[-8:]
        for link in oracle.known.values()
        if link.parent is None and link.salt
    }
    assert salted & set(plain_names.values())
