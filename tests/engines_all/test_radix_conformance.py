"""Our radix cache against recordings of SGLang's: the same resident pages after every step, and the same events.

The recordings name each operation by its length and scope ("step 85 insert 78 tokens {}"). Its tokens follow from the
pages it stored, up to the part page that no cache keeps. An insert that stored nothing shows no tokens: all that is
known is that some path of that length was in the tree, and was used again. Which one matters later, when the least
recently used leaf goes. RETOUCHED names, for each such insert, the last page of a path under which every later
eviction agrees; every other insert is as recorded.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from metatrie.engines.radix import Cleared, RadixCache, Removed, Scope, Stored, encode_batch

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
PAGE, CAPACITY = 16, 4096
"""Tokens; the recorded driver evicted down to this after each insert."""
PLAIN, DYNAMO = "sglang-0.5.23-radix", "sglang-0.5.23-radix-namespaces-dynamo"

RETOUCHED = {
    PLAIN: {
        27: 8358915860259896192,
        36: -1078769319575462343,
        47: 2635247468496142874,
        52: 2635247468496142874,
        56: 490645444893789193,
        68: -4493326600073473524,
        88: 490645444893789193,
        95: 3136054368013919784,
        138: 1999716335566814748,
        142: 490645444893789193,
        145: 490645444893789193,
    },
    DYNAMO: {
        42: -2438389429333965725,
        49: 5974052928503304791,
        61: -2438389429333965725,
        67: 2635247468496142874,
        100: 6357261552662673062,
    },
}
INSERT = re.compile(r"step (\d+) insert (\d+) tokens (.*)")


class Recording:
    """The operations of one recording, with what the engine did at each."""

    def __init__(self, name: str) -> None:
        with gzip.open(CAPTURES / f"{name}.frames.jsonl.gz", "rt") as lines:
            self.payloads = {int(seq, 16): bytes.fromhex(payload) for _, seq, payload in map(json.loads, lines)}
        with gzip.open(CAPTURES / f"{name}.truth.jsonl.gz", "rt") as lines:
            self.steps = [json.loads(line) for line in lines]
        self.retouched = RETOUCHED[name]
        self.pages: dict[int, tuple[int | None, list[int]]] = {}

    def tokens_to(self, page: int) -> list[int]:
        tokens: list[int] = []
        at: int | None = page
        while at is not None:
            at, own = self.pages[at]
            tokens = own + tokens
        return tokens

    def operations(self) -> Iterator[tuple[str, list[int] | None, Scope, list[dict[str, Any]], set[int]]]:
        """(note, tokens or None for a reset, scope, published events, resident pages after it)."""
        for step in self.steps:
            events = [] if step["seq"] is None else msgspec.msgpack.decode(self.payloads[step["seq"]])[1]
            resident = {int(name) for name in step["resident"]}
            found = INSERT.fullmatch(step["note"])
            if found is None:
                yield step["note"], None, Scope(), events, resident
                continue
            last = None
            for event in events:
                if event["type"] == "BlockStored":
                    last = event["parent_block_hash"]
                    for i, page in enumerate(event["block_hashes"]):
                        self.pages[page] = last, event["token_ids"][i * PAGE : (i + 1) * PAGE]
                        last = page
            if last is None:
                last = self.retouched[int(found[1])]
            tokens = self.tokens_to(last)
            assert len(tokens) == int(found[2]) // PAGE * PAGE, "the recorded length, whole pages"
            yield step["note"], tokens, Scope(**ast.literal_eval(found[3])), events, resident


def names_by_kind(events: list[Any]) -> Counter[tuple[str, int]]:
    return Counter((e["type"], name) for e in events for name in e.get("block_hashes", ()))


@pytest.mark.parametrize("name", [PLAIN, DYNAMO])
def test_same_resident_pages_and_events_as_sglang(name: str) -> None:
    cache = RadixCache(PAGE, event_format="dynamo" if name == DYNAMO else "default")
    evictions = steps = 0
    for note, tokens, scope, theirs, resident in Recording(name).operations():
        if tokens is not None:
            cache.insert(tokens, scope)
            if cache.tokens > CAPACITY:
                cache.evict(cache.tokens - CAPACITY)
        elif note.startswith("reset"):
            cache.reset()
        events = cache.take_events()
        ours = msgspec.msgpack.decode(encode_batch(events, PAGE, ts=0.0, rank=0))[1]
        # With namespaces SGLang's two tree cores split the same pages into different events.
        assert names_by_kind(ours) == names_by_kind(theirs), note
        if name == PLAIN:
            assert ours == theirs, note
        assert cache.resident() == resident, note
        assert cache.tokens == len(resident) * PAGE
        evictions += any(isinstance(e, Removed) for e in events)
        steps += 1
    assert steps == {PLAIN: 152, DYNAMO: 122}[name]
    assert evictions >= {PLAIN: 9, DYNAMO: 27}[name]


SAMPLES = json.loads((CAPTURES.parent / "vectors/wire/sglang-0.5.23.json").read_text())
SCOPES = {
    "none": Scope(),
    "cache_salt": Scope(cache_salt="tenant-a"),
    "extra_key": Scope(extra_key="cls-1"),
    "both": Scope(cache_salt="tenant-a", extra_key="cls-1"),
}


@pytest.mark.parametrize("event_format", ["default", "dynamo"])
@pytest.mark.parametrize("scope", SCOPES)
def test_samples_of_every_namespace_byte_for_byte(scope: str, event_format: Any) -> None:
    (sample,) = [
        s
        for s in SAMPLES
        if s["description"].endswith(f"namespace={scope}, format={event_format}") and "insert" in s["description"]
    ]
    theirs = bytes.fromhex(sample["hex"])
    ts, (event,), rank = msgspec.msgpack.decode(theirs)
    cache = RadixCache(PAGE, event_format=event_format)
    cache.take_events()
    cache.insert(event["token_ids"], SCOPES[scope])
    assert encode_batch(cache.take_events(), PAGE, ts=ts, rank=rank) == theirs


def test_a_new_tree_announces_that_it_is_empty() -> None:
    (sample,) = [s for s in SAMPLES if s["description"].startswith("first batch after engine start")]
    ts, _, rank = msgspec.msgpack.decode(bytes.fromhex(sample["hex"]))
    assert encode_batch(RadixCache().take_events(), 1, ts=ts, rank=rank).hex() == sample["hex"]


def test_one_token_pages_and_the_branch_after_a_split() -> None:
    """SGLang's default page size; a branch names a page in the middle of what was stored at once."""
    (whole,) = [s for s in SAMPLES if s["description"].startswith("page_size 1")]
    (branch,) = [s for s in SAMPLES if s["description"].startswith("branch after split")]
    cache = RadixCache(1)
    cache.take_events()
    cache.insert([5, 6, 7, 8])
    ts, _, rank = msgspec.msgpack.decode(bytes.fromhex(whole["hex"]))
    assert encode_batch(cache.take_events(), 1, ts=ts, rank=rank).hex() == whole["hex"]
    cache.insert([5, 6, 9, 10])
    assert encode_batch(cache.take_events(), 1, ts=ts, rank=rank).hex() == branch["hex"]


def test_array_events_of_older_versions() -> None:
    events = [Stored([-5], None, [1, 2], "salt"), Removed([-5]), Cleared()]
    assert msgspec.msgpack.decode(encode_batch(events, 2, ts=1.0, rank=3, map_events=False)) == [
        1.0,
        [["BlockStored", [-5], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [-5], "GPU"], ["AllBlocksCleared"]],
        3,
    ]
