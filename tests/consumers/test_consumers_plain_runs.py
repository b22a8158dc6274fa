"""The short way most stores take through the inventory leads where the long way does."""

from __future__ import annotations

import random

import msgspec
import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.engines.rules import rule_for
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event
from metatrie.proto.hashing import BlockKey, Chain, Namespace

SIZE = 4
NAMESPACE = Namespace(model="m", block_size=SIZE)


class Engine:
    """Prompts that share prefixes, stored in pieces and evicted in any order; sometimes under names of its own."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        trunk = [rng.randrange(50) for _ in range(40 * SIZE)]
        self.prompts = [
            [*trunk[: rng.choice([0, 20]) * SIZE], *(rng.randrange(50) for _ in range(rng.randrange(1, 40) * SIZE))]
            for _ in range(40)
        ]
        self.names = [
            [EngineHash(int.from_bytes(key, "big")) for key in Chain(NAMESPACE.root, SIZE, prompt).keys(999)]
            for prompt in self.prompts
        ]

    def event(self) -> Event:
        rng = self.rng
        which = rng.randrange(len(self.prompts))
        prompt, names = self.prompts[which], self.names[which]
        if rng.random() < 0.02:
            return AllBlocksCleared()
        if rng.random() < 0.25:
            return BlockRemoved(hashes=rng.sample(names, min(len(names), rng.choice([1, 1, 3]))))
        start = rng.choice([0, min(20, len(names) - 1), rng.randrange(len(names))])
        stop = rng.randrange(start, len(names)) + 1
        hashes = list(names[start:stop])
        oddity = rng.random()
        if oddity < 0.04:
            hashes[rng.randrange(len(hashes))] ^= 1
        elif oddity < 0.06 and len(hashes) > 1:
            hashes[0] = hashes[1]
        return BlockStored(
            hashes=hashes,
            parent=names[start - 1] if start else None,
            tokens=prompt[start * SIZE : stop * SIZE],
            block_size=SIZE,
            medium=rng.choice(["gpu", "gpu", "gpu", "cpu"]),
            lora_name="adapter" if oddity > 0.97 else None,
        )


def long_way(event: Event) -> Event:
    """The same, said so that it is looked at block by block."""
    if isinstance(event, BlockStored) and event.extra_keys is None:
        return msgspec.structs.replace(event, extra_keys=[None] * len(event.hashes))
    return event


class Followed:
    def __init__(self, rule: str | None, max_blocks: int) -> None:
        self.inventory = Inventory(NAMESPACE, rule=None if rule is None else rule_for(rule), max_blocks=max_blocks)
        self.index: dict[BlockKey, tuple[object, ...]] = {}

    def take(self, events: list[Event]) -> None:
        delta = self.inventory.apply(Batch(1.0, events, 0))
        if delta.reset:
            self.index.clear()
        for write in delta.writes:
            if write.tiers:
                self.index[write.key] = msgspec.structs.astuple(write)
            else:
                self.index.pop(write.key, None)

    def picture(self) -> object:
        inventory = self.inventory
        return (
            self.index,
            inventory.expected(),
            {key: dict(table) for key, table in inventory.tables().items() if table},
            (inventory.copies, inventory.held, inventory.attached, inventory.ambiguous, inventory.nodes),
            inventory.flaws,
            inventory.parity,
            inventory.stats,
            sorted(msgspec.structs.astuple(node) for node in inventory.state().nodes),
        )


@pytest.mark.parametrize("rule", ["vllm", None])
@pytest.mark.parametrize("seed", range(60))
def test_both_ways_lead_to_the_same_picture(seed: int, rule: str | None) -> None:
    rng = random.Random(seed)
    engine, bound = Engine(rng), rng.choice([50, 10_000])
    short, long = Followed(rule, bound), Followed(rule, bound)
    for _ in range(60):
        events = [engine.event() for _ in range(rng.randrange(1, 4))]
        short.take(events)
        long.take([long_way(event) for event in events])
        assert short.picture() == long.picture()
