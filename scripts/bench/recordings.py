"""What recording costs, how fast a recording is replayed, and what a router pays for remembering its decisions.

The stream is a cache of a fixed size that turns over: prompts of 32 blocks come in as one batch, the blocks generated
after them one by one, the oldest prompt's blocks go when there is no room. A million block events of it are recorded,
and then replayed as fast as possible, as `metatrie replay` does it.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ...consumers.recording import Recorder, RecordingReader, RecordingWriter, Source
from ...engines.rules import rule_for
from ...indexer.memory import MemoryStore
from ...indexer.router import Router, RouterConfig
from ...proto.api import RouteRequest
from ...proto.hashing import BlockKey, Chain, Namespace
from ...proto.index import PAGE_SPAN, BlockWrite, PageHead, ReplicaRef, ReplicaSpec, TierMask
from ..replay import replay
from .measure import BLOCK_SIZE, Figure, encode, prompt, stored

_PREFILL: Final = 32
_DECODED: Final = 8
_ROUTED: Final = 500
_PROMPTS: Final = 256
"""Prompts the cache has room for."""


async def recordings(rng: random.Random, events: int = 1_000_000) -> list[Figure]:
    """Record, redacted and not, then replay into consumers and into an index in memory."""
    figures = []
    source = Source(replica="r", namespace=Namespace(model="bench"))
    with tempfile.TemporaryDirectory(prefix="metatrie-") as folder:
        stream = list(_payloads(rng, source.namespace, events))
        plain = Path(folder) / "plain.mtrec"
        for what, redact, payloads in (
            ("record", False, stream),
            ("record, redacted", True, stream[: len(stream) // 8]),
        ):
            path = Path(folder) / "redacted.mtrec" if redact else plain
            started = time.process_time()
            with RecordingWriter(path) as writer:
                recorder = Recorder(writer, source, redact=rule_for("vllm") if redact else None)
                for seq, (payload, _) in enumerate(payloads):
                    recorder.taken(seq, payload, False)
            spent = time.process_time() - started
            blocks = sum(count for _, count in payloads)
            figures.append(Figure(what, "block event", spent / blocks * 1e6))
            figures.append(Figure(f"{what}: bytes on disk", "block event", path.stat().st_size / blocks, "B"))
        recording = RecordingReader([plain])
        for what, store in (("a consumer", None), ("an index in memory", MemoryStore())):
            done = await replay(recording, store=store)
            name, events = f"replay {done.block_events:,} block events into {what}", done.block_events
            figures.append(Figure(name, "second", events / done.seconds, "block events"))
            figures.append(Figure(name, "second of processor time", events / done.cpu_seconds, "block events"))
    return figures + await _decisions(rng)


async def _decisions(rng: random.Random) -> list[Figure]:
    """What it costs a router to remember its decisions."""
    figures = []
    namespace = Namespace(model="bench")
    for replicas in (8, 64):
        store = MemoryStore()
        index = await store.open(namespace)
        tokens = prompt(rng, 500)
        keys = Chain(namespace.root, BLOCK_SIZE, tokens).keys(500)
        for i in range(replicas):
            spec = ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="vllm")
            claim = await index.claim(spec, owner="bench", lease_s=3600, activate=True)
            await index.write(
                claim.incarnation,
                1,
                [
                    BlockWrite(key, keys[d - 1] if d else None, PageHead(keys[d - d % PAGE_SPAN]), d, TierMask(1))
                    for d, key in enumerate(keys[: i * 37 % 500])
                ],
            )
        for what, kept in (("not remembered", 0), ("remembered", 1024)):
            async with Router(store, RouterConfig(decisions=kept)) as router:
                request = RouteRequest(model="bench", token_ids=tokens)
                spent = 0.0
                for _ in range(_ROUTED):
                    started = time.process_time()
                    routed = await router.route(request)
                    spent += time.process_time() - started
                    await router.free(routed.reservation)
            name = f"route 500 blocks among {replicas} replicas, decisions {what}"
            figures.append(Figure(name, "request", spent / _ROUTED * 1e6))
    return figures


def _payloads(rng: random.Random, namespace: Namespace, events: int) -> Iterator[tuple[bytes, int]]:
    """(batch, block events in it) until there are that many."""
    held: deque[list[BlockKey]] = deque()
    done, blocks = 0, _PREFILL + _DECODED
    while done < events:
        tokens = prompt(rng, blocks)
        keys = list(Chain(namespace.root, BLOCK_SIZE, tokens).keys(blocks))
        at = _PREFILL * BLOCK_SIZE
        yield encode([1.0, [stored(tokens[:at], keys[:_PREFILL], None)], 0]), _PREFILL
        for i in range(_PREFILL, blocks):
            block = tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            yield encode([1.0, [stored(block, [keys[i]], keys[i - 1])], 0]), 1
        held.append(keys)
        done += blocks
        if len(held) > _PROMPTS:
            yield encode([1.0, [_removed(key) for key in reversed(held.popleft())], 0]), blocks
            done += blocks


def _removed(key: BlockKey) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [int.from_bytes(key, "big")], "medium": "GPU"}
