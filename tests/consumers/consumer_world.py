"""Random engines: streams of events as wild as the contract allows, and their encoding for the wire.

`Wild` publishes what real engines publish only now and then, all the time: duplicates, missing parents, children
before parents, several tiers and groups, offload placeholders, chunks of other sizes, adapters, salts, media, clears.
Its hashes bind what they name, as those of real engines do. `pool_batches` drives the simulated vLLM block pool.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
from metatrie.engines.pool import BlockPool, Cleared, Lora, Removed, Stored
from metatrie.proto.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from metatrie.proto.hashing import none_hash

MEDIA = ("gpu", "gpu", "gpu", "cpu", "cpu_pinned", "disk")
CHUNK = 256
WINDOW = 32


class Wild:
    """One engine process. `batch` publishes its next step."""

    def __init__(
        self, rng: random.Random, *, page: int, hybrid: bool = False, extras: bool = True, clears: bool = True
    ) -> None:
        self.rng, self.page, self.hybrid, self.clears = rng, page, hybrid, clears
        self.ts = rng.uniform(1e9, 2e9)
        self.begun = False
        self.names: dict[Any, int] = {}
        self.held: list[tuple[str, int, int]] = []
        """(medium, group, hash) of every copy, as this engine sees it."""
        self.paths: list[list[tuple[int, list[int], list[Any] | None]]] = [
            self._path(extras) for _ in range(rng.randint(2, 4))
        ]
        self.loras = [rng.choice([None, None, "sql", "chat"]) if extras else None for _ in self.paths]
        self.salts = [rng.choice([None, None, "s1", "s2"]) if extras else None for _ in self.paths]
        for path, lora, salt in zip(self.paths, self.loras, self.salts, strict=True):
            prefix: tuple[Any, ...] = (lora, salt)
            for i, (_, tokens, media) in enumerate(path):
                prefix = (*prefix, tuple(tokens), repr(media))
                path[i] = (self.names.setdefault(prefix, rng.getrandbits(64)), tokens, media)

    def _path(self, extras: bool) -> list[tuple[int, list[int], list[Any] | None]]:
        """One prompt: forks of few variants, so that prompts share prefixes."""
        rng, page = self.rng, self.page
        blocks = rng.randint(1, max(4, 160 // page))
        images = []
        if extras and rng.random() < 0.3:
            offset = rng.randrange(blocks * page)
            images = [(f"img{rng.randint(0, 1)}", offset, rng.randint(1, 3 * 16))]
        path = []
        for i in range(blocks):
            variant = rng.choice([0, 0, 0, 1]) if i else rng.choice([0, 1])
            start = i * page
            media = [[m, o - start] for m, o, n in images if o < start + page and o + n > start]
            path.append((0, [variant * 100_000 + (start + k) * 7 % 9001 for k in range(page)], media or None))
        return path

    def batch(self) -> Batch:
        rng = self.rng
        self.ts += rng.uniform(0.001, 1)
        # Blocks are computed in GPU memory before they can be anywhere else.
        first = [] if self.begun else [self._hold(self._store("gpu"))]
        self.begun = True
        events = [*first, *(self._event() for _ in range(rng.randint(1, 5)))]
        return Batch(self.ts, events, 0)

    def empty(self) -> Batch:
        """The batch that removes everything that is held."""
        self.ts += 1
        events: list[Event] = [BlockRemoved(hashes=[h], medium=m, group=g) for m, g, h in self.held]
        self.rng.shuffle(events)
        self.held.clear()
        return Batch(self.ts, events, 0)

    def _event(self) -> Event:
        rng = self.rng
        dice = rng.random()
        if dice < 0.02 and self.clears:
            self.held.clear()
            return AllBlocksCleared()
        if dice < 0.40 and self.held:
            taken = [
                self.held.pop(rng.randrange(len(self.held))) for _ in range(min(len(self.held), rng.randint(1, 3)))
            ]
            medium, group, _ = taken[0]
            self.held += [t for t in taken if t[:2] != (medium, group)]
            return BlockRemoved(
                hashes=[h for m, g, h in taken if (m, g) == (medium, group)], medium=medium, group=group
            )
        if dice < 0.43:
            return BlockRemoved(hashes=[rng.getrandbits(64)], medium=rng.choice(MEDIA))
        if dice < 0.48 and (known := [h for m, g, h in self.held if m == "gpu" and not g]):
            return self._hold(
                BlockStored(hashes=[rng.choice(known)], parent=None, tokens=[], block_size=0, medium="cpu")
            )
        if dice < 0.51:
            chunk = BlockStored(
                hashes=[rng.getrandbits(64)], parent=None, tokens=[1] * CHUNK, block_size=CHUNK, medium="cpu"
            )
            return self._hold(chunk)
        return self._hold(self._store())

    def _store(self, medium: str | None = None) -> BlockStored:
        rng = self.rng
        at = rng.randrange(len(self.paths))
        path, lora, salt = self.paths[at], self.loras[at], self.salts[at]
        # Mostly from the start, so that much is attached; else anywhere, so that parents are missing.
        start = 0 if rng.random() < 0.5 else rng.randrange(len(path))
        run = path[start : start + rng.randint(1, max(2, 128 // self.page))]
        extra: list[Any] = []
        for i, (_, _, media) in enumerate(run):
            keys = [lora] if lora else []
            keys += [list(m) for m in media or ()]
            keys += [salt] if salt and start + i == 0 else []
            extra.append(keys or None)
        store = BlockStored(
            hashes=[h for h, _, _ in run],
            parent=path[start - 1][0] if start else None,
            tokens=[t for _, tokens, _ in run for t in tokens],
            block_size=self.page,
            medium=medium or rng.choice(MEDIA),
            kind="full_attention" if self.hybrid else None,
            lora_name=lora,
            lora_id=7 if lora else None,
            extra_keys=extra if any(extra) else None,
        )
        if self.hybrid and medium is None and rng.random() < 0.4:
            shown = [h for h in store.hashes if rng.random() < 0.5]
            masked = {"hashes": shown, "extra_keys": None, "group": 1, "kind": "sliding_window", "medium": "gpu"}
            masked["window"] = WINDOW
            return msgspec.structs.replace(store, **masked)
        return store

    def _hold(self, event: BlockStored) -> BlockStored:
        self.held += [(event.medium, event.group, h) for h in event.hashes]
        return event


def pool_batches(rng: random.Random, steps: int, *, blocks: int = 24, hybrid: bool = False) -> Iterator[Batch]:
    """The simulated vLLM pool under random requests; its own hashes are canonical for plain text."""
    windows = (None, 32) if hybrid else (None,)
    pool = BlockPool(blocks, 16, none_hash("0"), windows=windows)
    running: list[Any] = []
    ts = rng.uniform(1e9, 2e9)
    for _ in range(steps):
        dice = rng.random()
        if dice < 0.45:
            shared = [rng.choice([0, 1])] * (16 * rng.randint(0, 4))
            tokens = shared + [rng.randint(0, 3) for _ in range(rng.randint(1, 60))]
            lora = rng.choice([None, None, None, Lora(name="sql", path="/adapters/sql")])
            seq = pool.sequence(tokens, lora=lora, salt=rng.choice([None, None, None, "s1"]))
            if pool.allocate(seq, len(tokens), pool.match(seq)):
                running.append(seq)
        elif dice < 0.75 and running:
            seq = rng.choice(running)
            seq.tokens.append(rng.randint(0, 3))
            if not pool.allocate(seq, len(seq.tokens)):
                seq.tokens.pop()
        elif running:
            pool.free(running.pop(rng.randrange(len(running))))
        if not running and rng.random() < 0.1:
            pool.reset()
        events = [_pool_event(e) for e in pool.take_events()]
        if events:
            ts += 1
            yield Batch(ts, events, 0)


def _pool_event(event: Stored | Removed | Cleared) -> Event:
    match event:
        case Stored():
            return BlockStored(
                hashes=[_short(d) for d in event.digests],
                parent=None if event.parent is None else _short(event.parent),
                tokens=event.tokens,
                block_size=16,
                group=event.group,
                kind="full_attention" if event.window is None else "sliding_window",
                window=event.window,
                lora_id=None if event.lora is None else event.lora.id,
                lora_name=None if event.lora is None else event.lora.name,
                extra_keys=event.extra_keys if any(event.extra_keys) else None,
            )
        case Removed():
            return BlockRemoved(hashes=[_short(event.digest)], group=event.group)
        case Cleared():
            return AllBlocksCleared()


def _short(digest: bytes) -> Any:
    return int.from_bytes(digest[-8:], "big")


def encode(batch: Batch) -> bytes:
    """One payload frame, in the map form of vLLM ≥ 0.24."""
    events = []
    for event in batch.events:
        match event:
            case BlockStored():
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": event.hashes,
                        "parent_block_hash": event.parent,
                        "token_ids": event.tokens,
                        "block_size": event.block_size,
                        "lora_id": event.lora_id,
                        "medium": event.medium.upper(),
                        "lora_name": event.lora_name,
                        "extra_keys": event.extra_keys,
                        "group_idx": event.group,
                        "kv_cache_spec_kind": event.kind,
                        "kv_cache_spec_sliding_window": event.window,
                    }
                )
            case BlockRemoved():
                events.append(
                    {
                        "type": "BlockRemoved",
                        "block_hashes": event.hashes,
                        "medium": event.medium.upper(),
                        "group_idx": event.group,
                    }
                )
            case AllBlocksCleared():
                events.append({"type": "AllBlocksCleared"})
    return msgspec.msgpack.encode([batch.ts, events, batch.rank])
