"""The native holdings of the index in memory and their pure twin tell the same."""

from __future__ import annotations

import random

import pytest
from metatrie.indexer.holdings import Holdings, holdings
from metatrie.proto.hashing import BlockKey
from metatrie.proto.index import PAGE_SPAN, BlockWrite, PackedWrites, PageHead, TierMask
from metatrie.proto.native import kernel

pytestmark = pytest.mark.skipif(kernel is None, reason="the native kernel is not installed, or METATRIE_PURE is set")
SLOTS = (0, 1, 63, 64, 130)


def key(trunk: int, depth: int) -> BlockKey:
    return BlockKey(bytes((trunk, depth >> 8, depth & 255, 0, 0, 0, 0, 1)))


def write(rng: random.Random, trunk: int, depth: int, tiers: int) -> BlockWrite:
    head = PageHead(key(0, depth - depth % PAGE_SPAN))
    return BlockWrite(key(trunk if depth % PAGE_SPAN else 0, depth), None, head, depth, TierMask(tiers))


@pytest.mark.parametrize("seed", range(60))
def test_any_writes(seed: int) -> None:
    rng = random.Random(seed)
    native, pure = holdings(), Holdings()
    trunks = rng.choice([2, 9])  # many branch off in every page
    for version in range(1, 60):
        slot, at = rng.choice(SLOTS), max(1, version - rng.choice([0, 0, 0, 3]))
        start = rng.randrange(100)
        tiers = rng.choice([0, 1, 1, 2, 3, 4, 9, 12])
        blocks = [
            write(rng, rng.randrange(trunks), depth, tiers if rng.random() < 0.9 else rng.randrange(13) & ~8)
            for depth in range(start, start + rng.randrange(1, 60))
        ]
        raw = PackedWrites.of(blocks).raw
        if rng.random() < 0.2:
            assert native.refresh(slot, at, raw) == pure.refresh(slot, at, raw)
        else:
            assert native.write(slot, at, raw) == pure.write(slot, at, raw)
        if rng.random() < 0.05:
            assert native.vacate(slot, 1000) == pure.vacate(slot, 1000)
        for who in SLOTS:
            heads = sorted(pure.heads(who))
            assert sorted(native.heads(who)) == heads
            assert dict(native.content(who, heads)) == dict(pure.content(who, heads))
        for trunk in range(trunks):
            keys = [key(trunk if depth % PAGE_SPAN else 0, depth) for depth in range(160)]
            masks = [pure.mask(one) for one in keys]
            assert [native.mask(one) for one in keys] == masks
            for who in SLOTS:
                held = next((i for i, mask in enumerate(masks) if not mask >> who & 1), len(masks))
                if held:
                    assert native.usable(who, keys, held) == pure.usable(who, keys, held)
                    assert native.tiers(who, keys, held) == pure.tiers(who, keys, held)
