"""The native block table and its pure twin tell the same of any stream: of liars, of engines of any block size."""

from __future__ import annotations

import random

import msgspec
import pytest
from metatrie.consumers import inventory as module
from metatrie.consumers.blocks import BlockTable, Copies
from metatrie.consumers.inventory import Inventory
from metatrie.engines.rules import rule_for
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.native import kernel

pytestmark = pytest.mark.skipif(kernel is None, reason="the native kernel is not installed, or METATRIE_PURE is set")
SIZE = 4
NAMESPACE = Namespace(model="m", block_size=SIZE)


class Stream:
    """Events over few names, so that they collide; some of it true, some of it lies."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.page = rng.choice([1, 2, SIZE, SIZE, SIZE, 2 * SIZE])
        self.names = [rng.getrandbits(64) for _ in range(14)]
        tokens = [rng.randrange(3) for _ in range(40 * SIZE)]
        self.prompt = tokens
        self.keys = [int.from_bytes(key, "big") for key in Chain(NAMESPACE.root, SIZE, tokens).keys(99)]

    def event(self) -> Event:
        rng = self.rng
        medium, group = rng.choice(["gpu", "gpu", "cpu", "fs", "disk"]), rng.choice([0, 0, 0, 0, 1])
        if rng.random() < 0.02:
            return AllBlocksCleared()
        if self.page == SIZE and rng.random() < 0.5:
            start = rng.randrange(36)
            stop = start + rng.randrange(1, 5)
            if rng.random() < 0.4:
                return BlockRemoved(hashes=[EngineHash(h) for h in self.keys[start:stop]], medium=medium)
            start = rng.choice([0, start])
            return BlockStored(
                hashes=[EngineHash(h) for h in self.keys[start:stop]],
                parent=EngineHash(self.keys[start - 1]) if start else None,
                tokens=self.prompt[start * SIZE : stop * SIZE],
                block_size=SIZE,
                medium=medium,
            )
        names = [EngineHash(rng.choice(self.names)) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.4:
            return BlockRemoved(hashes=names, medium=medium, group=group)
        return BlockStored(
            hashes=names,
            parent=rng.choice([None, EngineHash(rng.choice(self.names))]),
            tokens=[rng.randrange(2) for _ in range(self.page * len(names))],
            block_size=self.page,
            medium=medium,
            group=group,
            kind=rng.choice([None, "full_attention"]) if group == 0 else "sliding_window",
            window=None if group == 0 else 2 * self.page,
            cache_salt="s" if rng.random() < 0.1 else None,
        )


def picture(inventory: Inventory) -> object:
    state = inventory.state()
    return (
        inventory.expected(),
        {write.key: write for write in inventory.attached_writes()},
        sorted(inventory.index_keys()),
        sorted(key for step in range(3) for key in inventory.index_keys(step, 3)),
        {key: dict(table) for key, table in inventory.tables().items()},
        [(name, group, hashes, copies) for name, group, hashes, copies in state.tables],
        (inventory.copies, inventory.held, inventory.attached, inventory.ambiguous, inventory.nodes),
        (inventory.index_blocks, inventory.unsure, inventory.parity, inventory.flaws),
        inventory.stats,
        sorted(state.nodes, key=lambda node: node.hash),
        {key: (inventory.parent(key), inventory.chain(key)) for key in inventory.index_keys()}
        if not inventory.ambiguous
        else None,
    )


@pytest.mark.parametrize("seed", range(150))
def test_any_stream(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    stream, rule, bound = Stream(rng), rng.choice([None, rule_for("vllm")]), rng.choice([12, 10_000])
    twins: list[Inventory] = []
    for pure in (False, True):
        with monkeypatch.context() as patch:
            if pure:
                patch.setattr(module, "block_table", BlockTable)
                patch.setattr(module, "copies_table", Copies)
            twins.append(Inventory(NAMESPACE, rule=rule, max_blocks=bound))
    native, ours = twins
    for _ in range(50):
        batch = Batch(1.0, [stream.event() for _ in range(rng.randrange(1, 5))])
        doubted, restarted = rng.random() < 0.05, rng.random() < 0.02
        told = []
        for inventory, pure in ((native, False), (ours, True)):
            with monkeypatch.context() as patch:
                if pure:
                    patch.setattr(module, "copies_table", Copies)
                if doubted:
                    inventory.doubt()
                if restarted:
                    inventory.restart()
                delta = inventory.apply(batch)
            told.append((delta.reset, {write.key: write for write in delta.writes}))
            assert len(delta.writes) == len(told[-1][1])
        assert told[0] == told[1]
        assert picture(native) == picture(ours)
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(native.state()), type=module.InventoryState)
    restored = Inventory(NAMESPACE, rule=rule, max_blocks=bound)
    restored.restore(saved)
    assert {write.key: write for write in restored.settle().writes} == {w.key: w for w in ours.attached_writes()}
    assert sorted(restored.state().nodes, key=lambda node: node.hash) == picture(ours)[9]  # type: ignore[index]  # above
