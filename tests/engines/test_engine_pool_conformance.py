"""Our block pool against recordings of vLLM's: same hits, same cache, and the same bytes on the wire, step by step.

Every recording was made with 65 physical blocks of 16 tokens; no other number reproduces them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from metatrie.engines.pool import BlockPool, Lora, Sequence
from metatrie.engines.publisher import EventEncoder
from metatrie.engines.versions import traits_of
from metatrie.proto.hashing import none_hash

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
NUM_BLOCKS = 65
ADAPTER = Lora(name="sql-adapter", path="/adapters/sql-adapter", id=7)


def read_lines(name: str) -> Iterator[Any]:
    with gzip.open(CAPTURES / f"{name}.jsonl.gz", "rt") as lines:
        yield from map(json.loads, lines)


class Driver:
    """Repeats on our pool what was asked of vLLM's."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.sequences: dict[str, Sequence] = {}

    def apply(self, op: list[Any], *, report_full: bool) -> None:
        match op:
            case ["admit", name, tokens, lora, salt, expected]:
                adapter = ADAPTER if lora else None
                sequence = self.pool.sequence(list(tokens), lora=adapter, salt=salt, report_full=report_full)
                hit = self.pool.match(sequence)
                admitted = self.pool.allocate(sequence, len(tokens), hit)
                assert (hit.tokens if admitted else None) == expected
                if admitted:
                    self.sequences[name] = sequence
            case ["decode", name, token]:
                # vLLM's driver ignored a token that found no block; so does ours.
                sequence = self.sequences[name]
                sequence.tokens.append(token)
                self.pool.allocate(sequence, len(sequence.tokens))
            case ["free", name]:
                # A request that did not fit was freed as well, which did nothing.
                if name in self.sequences:
                    self.pool.free(self.sequences.pop(name))
            case ["reset"]:
                assert self.pool.reset()
            case _:
                raise AssertionError(op[0])


@pytest.mark.parametrize(
    ("capture", "hash_format", "window"),
    [
        ("vllm-0.11.0-pool-mixed", "int", None),
        ("vllm-0.26.0-pool-mixed", "int", None),
        ("vllm-0.33.0-pool-mixed", "int", None),
        ("vllm-0.33.0-pool-bytes", "bytes", None),
        ("vllm-0.33.0-pool-dup", "int", None),
        ("vllm-0.33.0-pool-full-report", "int", None),
        ("vllm-0.33.0-pool-hybrid", "int", 32),
    ],
)
def test_same_cache_and_same_bytes_as_vllm(capture: str, hash_format: Any, window: int | None) -> None:
    traits = traits_of(capture.split("-")[1])
    pool = BlockPool(
        NUM_BLOCKS,
        16,
        none_hash("0"),
        extra_keys=traits.hash_extras,
        unhashed_first=traits.unhashed_first,
        windows=(None,) if window is None else (None, window),
    )
    encoder = EventEncoder(traits, 16, hash_format)
    payloads = {int(seq, 16): bytes.fromhex(payload) for _, seq, payload in read_lines(f"{capture}.frames")}
    driver = Driver(pool)
    published = 0
    for step in read_lines(f"{capture}.truth"):
        where = f"seq {step['seq']}, {step['note']}"
        report_full = "report mode full" in (step["note"] or "")
        for op in step["ops"]:
            driver.apply(op, report_full=report_full)
        events = pool.take_events()
        if step["seq"] is None:
            assert not events, where
        else:
            theirs = payloads[step["seq"]]
            ts, their_events, rank = msgspec.msgpack.decode(theirs)
            ours = encoder.batch(events, ts=ts, rank=rank)
            if any("session_id" in event for event in their_events if isinstance(event, dict)):
                # The recording tags this request with a session, which the simulated engine has no notion of.
                theirs = msgspec.msgpack.encode([ts, [_without_session(e) for e in their_events], rank])
                ours = msgspec.msgpack.encode(msgspec.msgpack.decode(ours))
            assert ours == theirs, where
            published += 1
        resident = {
            f"{group}:{name.hex() if isinstance(name, bytes) else name}": copies
            for group in range(len(pool.windows))
            for digest, copies in pool.resident(group).items()
            for name in [encoder.block_hash(digest)]
        }
        assert resident == step["resident"], where
    assert published == len(payloads)


def _without_session(event: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key != "session_id"}


HASH_VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors" / "hash-vectors.json").read_text())["vllm"]


@pytest.mark.parametrize("version", ["0.33.0", "0.26.0", "0.11.0"])
@pytest.mark.parametrize("extra", ["none", "lora", "salt", "salt_unicode", "salt_empty", "lora_salt"])
def test_each_version_hashes_adapters_and_salts_its_own_way(version: str, extra: str) -> None:
    inputs = HASH_VECTORS["extras"][extra]
    adapter = inputs.get("lora")
    lora = None if adapter is None else Lora(adapter["lora_name"], adapter["lora_path"], adapter["lora_int_id"])
    checked = 0
    for vector in HASH_VECTORS["vectors"]:
        if (vector["algo"], vector["extra"], vector["lookahead"]) != ("sha256_cbor", extra, 0):
            continue
        blocks = vector["blocks"]
        agreement = vector["agreement"].get(version, "same")
        if agreement == "not_available":
            continue
        if agreement != "same":
            blocks = vector["other_versions"][version]
        tokens = HASH_VECTORS["sequences"][vector["seq"]][: len(blocks) * vector["block_size"]]
        root = none_hash(vector["pythonhashseed"] or "vllm-none-hash")
        pool = BlockPool(len(blocks) + 2, vector["block_size"], root, extra_keys=traits_of(version).hash_extras)
        sequence = pool.sequence(tokens, lora=lora, salt=inputs.get("salt"))
        assert pool.allocate(sequence, len(tokens), pool.match(sequence))
        assert [d.hex() for d in sequence.digests] == [b["hash_hex"] for b in blocks], vector["id"]
        checked += 1
    assert checked
