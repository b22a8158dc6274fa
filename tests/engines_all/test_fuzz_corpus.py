"""The fuzzer's targets, without a fuzzer: over the corpus kept in the repository, and over mutations of it."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from metatrie.consumers.inventory import Inventory
from metatrie.consumers.stream import Stream
from metatrie.proto.events import Batch
from metatrie.scripts import fuzz
from metatrie.scripts.fuzz import TARGETS, check_decoder, check_stream, mutate

CORPUS = Path(__file__).parents[1] / "data" / "fuzz"


def inputs(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_breaks_nothing(target: str) -> None:
    found = inputs(target)
    assert len(found) > 10
    assert sum(map(len, found)) < 200_000, "kept small"
    for data in found:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_mutations_of_it_break_nothing(target: str) -> None:
    rng = random.Random(1)
    found = inputs(target)
    changed = 0
    for seed in range(400):
        data = rng.choice(found)
        for step in range(rng.randrange(1, 6)):
            mutated = mutate(data, 4096, random.Random(seed * 10 + step))
            changed += mutated is not None
            data = mutated if mutated is not None else data
        TARGETS[target](data)
    assert changed > 100


def test_the_targets_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail is none: with bounds that anything exceeds, both targets say so."""
    batch = msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None]], 0])
    history = msgspec.msgpack.encode([[2], [0, 5, batch]])
    check_stream(history)
    monkeypatch.setattr(fuzz, "_check_inventory", _refuse)
    with pytest.raises(AssertionError, match="looked at"):
        check_decoder(batch)
    monkeypatch.setattr(Stream, "held", property(lambda self: fuzz.MAX_HELD + 1))
    with pytest.raises(AssertionError):
        check_stream(history)


def _refuse(held: Inventory, batch: Batch) -> None:
    raise AssertionError("looked at")
