"""Random writers against every backend at once and a model so naive that it is obviously right."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from metatrie.indexer.connect import open_store
from metatrie.indexer.embedded import EmbeddedRedis
from metatrie.indexer.memory import MemoryStore
from metatrie.proto.hashing import BlockKey, Chain, Namespace
from metatrie.proto.index import (
    PAGE_SPAN,
    BlockWrite,
    Depth,
    Incarnation,
    Index,
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    TierMask,
)

WRITERS = 3
TRUNK = 80
_namespaces = itertools.count()


def _prompt(branch: int, fork: int, length: int) -> tuple[int, ...]:
    """One token per block: a trunk everybody shares, then a branch of its own."""
    return tuple(range(fork)) + tuple(1000 * (branch + 1) + i for i in range(length - fork))


PROMPTS = [
    _prompt(0, TRUNK, TRUNK),
    _prompt(1, 3, 40),
    _prompt(2, 3, 70),
    _prompt(3, 20, 34),
    _prompt(4, 33, 100),
    _prompt(5, 64, 66),
    _prompt(6, 1, 5),
    _prompt(7, 2, 12),
]


class Blocks:
    """Every block of every prompt in one namespace, by path."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.keys: dict[tuple[int, ...], BlockKey] = {}
        for prompt in PROMPTS:
            for depth, key in enumerate(self.chain(prompt).keys(len(prompt))):
                self.keys[prompt[: depth + 1]] = key

    def chain(self, prompt: tuple[int, ...]) -> Chain:
        return Chain(self.namespace.root, 1, list(prompt))

    def write(self, path: tuple[int, ...], tiers: int) -> BlockWrite:
        depth = len(path) - 1
        return BlockWrite(
            key=self.keys[path],
            parent=self.keys[path[:-1]] if depth else None,
            head=PageHead(self.keys[path[: depth - depth % PAGE_SPAN + 1]]),
            depth=depth,
            tiers=TierMask(tiers),
        )


@dataclass
class Model:
    """Paths held per writer, with their tiers; prefix-closed, as consumers guarantee."""

    held: list[dict[tuple[int, ...], int]] = field(default_factory=lambda: [{} for _ in range(WRITERS)])

    def extend(self, writer: int, prompt: int, length: int, tiers: int) -> dict[tuple[int, ...], int]:
        """Hold a prompt's first `length` blocks in these tiers. Returns what changes."""
        path = PROMPTS[prompt][:length]
        change = {path[: i + 1]: tiers for i in range(len(path))}
        self.held[writer].update(change)
        return change

    def cut(self, writer: int, prompt: int, length: int) -> dict[tuple[int, ...], int]:
        """Drop everything below a prompt's first `length` blocks. Returns what changes, children first."""
        path = PROMPTS[prompt][:length]
        gone = [p for p in self.held[writer] if len(p) > length and p[:length] == path]
        for p in gone:
            del self.held[writer][p]
        return dict.fromkeys(sorted(gone, key=len, reverse=True), 0)

    def depth(self, writer: int, prompt: tuple[int, ...]) -> Depth:
        counts = [0, 0, 0]
        for i in range(len(prompt)):
            tiers = self.held[writer].get(prompt[: i + 1], 0)
            if not tiers:
                break
            counts[0 if tiers & 1 else 1 if tiers & 2 else 2] += 1
        return Depth(sum(counts), (counts[0], counts[1], counts[2]))


class Subject:
    """One backend, driven like the model."""

    def __init__(self, index: Index, blocks: Blocks) -> None:
        self.index = index
        self.blocks = blocks
        self.incarnations: list[Incarnation] = []
        self.version = 0

    async def start(self, writer: int) -> None:
        spec = ReplicaSpec(ref=ReplicaRef(f"w{writer}"), engine="vllm")
        claim = await self.index.claim(spec, owner="test", lease_s=600, activate=True)
        self.incarnations[writer : writer + 1] = [claim.incarnation]

    async def write(self, writer: int, change: dict[tuple[int, ...], int]) -> None:
        self.version += 1
        writes = [self.blocks.write(path, tiers) for path, tiers in change.items()]
        await self.index.write(self.incarnations[writer], self.version, writes)

    async def refresh(self, writer: int, held: dict[tuple[int, ...], int]) -> int:
        self.version += 1
        writes = [self.blocks.write(path, held[path]) for path in sorted(held, key=len)]
        return await self.index.refresh(self.incarnations[writer], self.version, writes)

    async def check(self, model: Model) -> None:
        for prompt in PROMPTS:
            expected = {
                incarnation: depth
                for writer, incarnation in enumerate(self.incarnations)
                if (depth := model.depth(writer, prompt)).blocks
            }
            assert (await self.index.match(self.blocks.chain(prompt))).depths == expected
        for writer, incarnation in enumerate(self.incarnations):
            expected_held = {self.blocks.keys[path]: tiers for path, tiers in model.held[writer].items()}
            assert await self.index.held(incarnation) == expected_held


writers = st.integers(0, WRITERS - 1)
prompts = st.integers(0, len(PROMPTS) - 1)
lengths = st.sampled_from([1, 2, 3, 4, 5, 20, 21, 31, 32, 33, 34, 40, 63, 64, 65, 66, 80, 100])
tier_masks = st.sampled_from([1, 1, 1, 2, 3, 4, 6])
steps = st.one_of(
    st.tuples(st.just("extend"), writers, prompts, lengths, tier_masks),
    st.tuples(st.just("extend"), writers, prompts, lengths, tier_masks),
    st.tuples(st.just("cut"), writers, prompts, st.integers(0, 70)),
    st.tuples(st.just("restart"), writers),
    st.tuples(st.just("refresh"), writers),
    st.tuples(st.just("sweep"), st.integers(1, 5)),
)


async def _drive(url: str, limit: int, script: list[Any]) -> None:
    namespace = Namespace(model=f"differential-{next(_namespaces)}", block_size=1)
    blocks = Blocks(namespace)
    store = await open_store(url, page_limit=limit)
    try:
        subjects = [
            Subject(await MemoryStore().open(namespace), blocks),
            Subject(await store.open(namespace), blocks),
        ]
        model = Model()
        for subject in subjects:
            for writer in range(WRITERS):
                await subject.start(writer)
        for step in script:
            match step:
                case ("extend", writer, prompt, length, tiers):
                    change = model.extend(writer, prompt, length, tiers)
                    for subject in subjects:
                        await subject.write(writer, change)
                case ("cut", writer, prompt, length):
                    change = model.cut(writer, prompt, length)
                    for subject in subjects:
                        await subject.write(writer, change)
                case ("restart", writer):
                    model.held[writer].clear()
                    for subject in subjects:
                        await subject.start(writer)
                case ("refresh", writer):
                    for subject in subjects:
                        assert await subject.refresh(writer, model.held[writer]) == 0
                case ("sweep", pages):
                    for subject in subjects:
                        await subject.index.sweep(pages=pages, grace_s=600)
            for subject in subjects:
                await subject.check(model)
    finally:
        await store.close()


@pytest.mark.parametrize("limit", [1, 4, 512])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(steps, min_size=4, max_size=16))
@example(
    # Two writers overflow the same page in different orders, then the one that came first leaves.
    script=[
        ("extend", 0, 1, 40, 1),
        ("extend", 1, 2, 40, 1),
        ("extend", 0, 2, 66, 1),
        ("extend", 1, 1, 33, 3),
        ("cut", 0, 1, 0),
        ("extend", 2, 2, 40, 2),
        ("cut", 1, 1, 3),
        ("extend", 0, 1, 40, 1),
    ]
)
@example(
    # A block accepted beside its moved parent at the first try has to be found there again to remove it.
    script=[("extend", 0, 0, 6, 1), ("extend", 0, 0, 8, 1), ("cut", 0, 0, 6)]
)
def test_backends_agree_with_the_model(redis_server: EmbeddedRedis, limit: int, script: list[Any]) -> None:
    asyncio.run(_drive(redis_server.url, limit, script))


def test_the_model_notices_a_missing_write() -> None:
    """The comparison itself can fail."""

    async def drive() -> None:
        namespace = Namespace(model="noticed", block_size=1)
        subject = Subject(await MemoryStore().open(namespace), Blocks(namespace))
        for writer in range(WRITERS):
            await subject.start(writer)
        model = Model()
        model.extend(0, 0, 5, 1)
        await subject.check(model)

    with pytest.raises(AssertionError):
        asyncio.run(drive())
