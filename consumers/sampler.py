"""Is the index what this consumer believes it to be? Asked all the time, of a few pages, the way readers ask.

Two samples per round. *Precision*: random pages that the index holds under our incarnation, compared block by block
with the inventory; finds what should have gone. *Recall*: random prompts of the inventory, looked up as a router
would; finds what is absent, and what is present where no reader looks. Blocks that change meanwhile, or that the
store has not acknowledged, are left out, so what is found is never explained by delay: the writer then publishes
everything anew, which mends all of it.

Cost per round: at most `PAGES` pages read and `PROMPTS` lookups.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from ..proto.errors import StoreError
from ..proto.hashing import BlockKey, Chain
from ..proto.index import THROUGH, Index
from .inventory import Delta, Inventory
from .writer import IndexWriter

PAGES: Final = 64
PROMPTS: Final = 32
PATIENCE_S: Final = 600.0
"""Longest pause between two publications anew for what rounds found. It doubles from their interval while they go on
to find things, so that a difference which publishing does not mend costs the store little."""


class SamplerStats(msgspec.Struct):
    """Running totals; shown as metrics under the same names."""

    rounds: int = 0
    void: int = 0
    """Rounds of which nothing can be said: the store was away, or a new incarnation is being written."""
    checked: int = 0
    """Blocks compared."""
    stale: int = 0
    """Blocks found in the index that are not held, or not in these tiers."""
    missing: int = 0
    """Blocks of looked-up prompts that no reader finds."""


class IndexSampler:
    """Watches one replica's part of the index."""

    def __init__(
        self,
        index: Index,
        inventory: Inventory,
        writer: IndexWriter,
        *,
        interval_s: float,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """interval_s: mean time between two rounds."""
        self.stats = SamplerStats()
        self.precision = 1.0
        """Share of the sampled blocks of the index that are right, in the last round that says anything."""
        self.recall = 1.0
        """Share of the sampled blocks of the inventory that readers find, in that round."""
        self._index, self._inventory, self._writer = index, inventory, writer
        self._rng, self._clock = rng or random.Random(), clock
        self._interval_s = interval_s
        self._mended_at = self._patience_s = 0.0
        self._moving: set[BlockKey] | None = None
        """Blocks in motion since the running round began; None between rounds."""

    async def run(self) -> None:
        """A round each interval, until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.5, 1.5))
            await self.round()

    def note(self, delta: Delta) -> None:
        """What the inventory changed: nothing can be said of these blocks in the round that runs."""
        if self._moving is not None:
            self._moving.update(delta.writes.keys())

    async def round(self) -> bool:
        """Compare one sample. False if nothing can be said of it."""
        writer, inventory, claim = self._writer, self._inventory, self._writer.claim
        if claim is None or not writer.current:
            return self._voided()
        self._moving = moving = writer.unacknowledged()
        try:
            shown = await self._index.held(claim.incarnation, pages=PAGES)
            stale = [key for key, tiers in shown.items() if key not in moving and inventory.tiers(key) != tiers]
            asked: list[tuple[list[BlockKey], int]] = []
            for keys in self._prompts():
                match = await self._index.match(Chain.of_keys(keys))
                depth = match.depths.get(claim.incarnation)
                asked.append((keys, 0 if depth is None else depth.blocks))
        except StoreError:
            return self._voided()
        finally:
            self._moving = None
        if writer.claim is not claim or not writer.current:
            return self._voided()
        asked = [(keys, depth) for keys, depth in asked if moving.isdisjoint(keys)]
        wanted, found = sum(len(keys) for keys, _ in asked), sum(depth for _, depth in asked)
        stats = self.stats
        stats.rounds += 1
        stats.checked += len(shown) + wanted
        stats.stale += len(stale)
        stats.missing += wanted - found
        self.precision = 1 - len(stale) / len(shown) if shown else 1.0
        self.recall = found / wanted if wanted else 1.0
        now = self._clock()
        if not stale and found == wanted:
            self._patience_s = 0.0
        elif now >= self._mended_at + self._patience_s:
            self._mended_at = now
            self._patience_s = min(max(2 * self._patience_s, self._interval_s), PATIENCE_S)
            writer.republish()
        return True

    def _voided(self) -> bool:
        self.stats.void += 1
        return False

    def _prompts(self) -> Iterator[list[BlockKey]]:
        count = self._inventory.index_blocks
        if not count:
            return
        # Neighbours in the inventory were stored together, so a few strides are spread enough.
        start = self._rng.randrange(count)
        step = max(1, count // PROMPTS)
        keys = self._inventory.index_keys(start % step, step)
        for key in self._rng.sample(keys, min(len(keys), PROMPTS)):
            chain = self._inventory.chain(key)
            while chain and self._inventory.tiers(chain[-1]) & THROUGH:
                chain.pop()  # no prompt ends there
            if chain:
                yield chain
