"""How far a picture is off after losses, and how fast a late one becomes whole. Prints the figures of the docs.

    python tests/chaos/measure.py [TRACE.jsonl.gz]

TRACE is a Mooncake trace (one JSON object a line with `hash_ids`); without one, the conversations are synthetic. One
engine with the simulated vLLM block pool serves every request in turn; each hash id of the trace is one block.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from metatrie.consumers.inventory import Inventory
from metatrie.engines.pool import BlockPool, Cleared, Removed, Stored
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event
from metatrie.proto.hashing import Namespace, none_hash

BLOCK = 16
NAMESPACE = Namespace(model="m", block_size=BLOCK)


def prompts_of(trace: Path) -> Iterator[list[int]]:
    """Block ids per request."""
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def synthetic(seed: int, requests: int) -> Iterator[list[int]]:
    """Conversations that grow turn by turn, a tenth of them alive at a time."""
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    talks: list[list[int]] = []
    for _ in range(requests):
        if not talks or (len(talks) < 60 and rng.random() < 0.2):
            talks.append([next(fresh) for _ in range(rng.randint(5, 40))])
        talk = rng.choice(talks)
        yield list(talk)
        talk += [next(fresh) for _ in range(rng.randint(1, 8))]
        if len(talk) > 120:
            talks.remove(talk)


class SimulatedEngine:
    """One request after another through a block pool."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks + 1, BLOCK, none_hash("0"))
        self.capacity = blocks

    def serve(self, ids: Sequence[int]) -> Batch | None:
        ids = ids[: self.capacity]
        tokens = [token for block in ids for token in (block & 0xFFFF, block >> 16, *range(BLOCK - 2))]
        sequence = self.pool.sequence([*tokens, 0])
        if not self.pool.allocate(sequence, len(tokens), self.pool.match(sequence)):
            return None
        self.pool.free(sequence)
        events = [_event(event) for event in self.pool.take_events()]
        return Batch(1.0, events) if events else None

    def truth(self) -> set[bytes]:
        return {digest[-8:] for digest in self.pool.resident()}


def _event(event: Stored | Removed | Cleared) -> Event:
    match event:
        case Stored():
            parent = None if event.parent is None else _name(event.parent)
            return BlockStored(
                hashes=[_name(d) for d in event.digests], parent=parent, tokens=event.tokens, block_size=BLOCK
            )
        case Removed():
            return BlockRemoved(hashes=[_name(event.digest)])
        case Cleared():
            return AllBlocksCleared()


def _name(digest: bytes) -> EngineHash:
    return EngineHash(int.from_bytes(digest[-8:], "big"))


class Drift:
    """Averages of how a picture differs from the engine, over many looks."""

    def __init__(self) -> None:
        self.stale = self.missing = self.shown = self.held = 0

    def look(self, inventory: Inventory, truth: set[bytes]) -> None:
        shown = {bytes(key) for key in inventory.index_keys()}
        self.stale += len(shown - truth)
        self.missing += len(truth - shown)
        self.shown += len(shown)
        self.held += len(truth)

    @property
    def stale_share(self) -> float:
        return self.stale / max(1, self.shown)

    @property
    def missing_share(self) -> float:
        return self.missing / max(1, self.held)


def losses(
    prompts: Sequence[Sequence[int]], *, share: float, blocks: int, bounded: bool, known: bool = True, seed: int = 1
) -> Drift:
    """Lose this share of batches. bounded: the policy `keep` as it is, or nothing but applying what arrives."""
    rng = random.Random(seed)
    engine, inventory, drift = SimulatedEngine(blocks), Inventory(NAMESPACE), Drift()
    inventory.capacity = blocks if known else None
    for at, ids in enumerate(prompts):
        batch = engine.serve(ids)
        if batch is None:
            continue
        if rng.random() < share:
            if bounded:
                inventory.doubt()
            continue
        inventory.apply(batch)
        if at > len(prompts) // 4 and at % 20 == 0:
            drift.look(inventory, engine.truth())
    return drift


def late_join(batches: Sequence[tuple[Batch, set[bytes]]], at: int) -> list[tuple[int, float]]:
    """Join after `at` batches with no history: (batches since, share of what the engine holds that is matched)."""
    inventory = Inventory(NAMESPACE)
    seen: list[tuple[int, float]] = []
    for since, (batch, truth) in enumerate(batches[at:], 1):
        inventory.apply(batch)
        shown = {bytes(key) for key in inventory.index_keys()}
        seen.append((since, len(shown & truth) / max(1, len(truth))))
    return seen


def main() -> None:
    trace = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    prompts = list(synthetic(1, 6000)) if trace is None else list(prompts_of(trace))[:6000]
    blocks = 2000
    print(
        f"{len(prompts)} requests, an engine of {blocks} blocks; shares are averages over the last three quarters\n"
    )
    print("| batches lost | stale, nothing done | stale, `keep` | missing, nothing done | missing, `keep` |")
    print("|---|---|---|---|---|")
    for share in (0.001, 0.01, 0.05):
        plain = losses(prompts, share=share, blocks=blocks, bounded=False)
        kept = losses(prompts, share=share, blocks=blocks, bounded=True)
        cells = (plain.stale_share, kept.stale_share, plain.missing_share, kept.missing_share)
        print(f"| {share:.1%} | " + " | ".join(f"{cell:.2%}" for cell in cells) + " |")
    engine = SimulatedEngine(blocks)
    steps = [(batch, engine.truth()) for ids in prompts if (batch := engine.serve(ids)) is not None]
    at = len(steps) // 2
    seen = late_join(steps, at)
    stored = 0
    marks = iter((0.25, 0.5, 0.75, 0.9, 0.95, 0.99))
    mark = next(marks, None)
    print("\n| of what the engine holds is matched | after batches | after blocks stored, in engine capacities |")
    print("|---|---|---|")
    for (since, share), (batch, _) in zip(seen, steps[at:], strict=True):
        stored += sum(len(e.hashes) for e in batch.events if isinstance(e, BlockStored))
        while mark is not None and share >= mark:
            print(f"| {mark:.0%} | {since} | {stored / blocks:.2f} |")
            mark = next(marks, None)
    if mark is not None:
        print(f"| {seen[-1][1]:.1%}, no more | {len(seen)} | {stored / blocks:.2f} |")


if __name__ == "__main__":
    main()
