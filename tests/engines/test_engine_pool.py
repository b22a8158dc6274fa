"""The block pool's invariants, under arbitrary use."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from metatrie.engines.pool import BlockPool, Cleared, Lora, Removed, Sequence, Stored
from metatrie.proto.hashing import NO_EXTRAS, Chain, block_key, none_hash

ROOT = none_hash("0")
SIZE = 4


def pool_of(blocks: int, **options: Any) -> BlockPool:
    return BlockPool(blocks, SIZE, ROOT, **options)


def admit(pool: BlockPool, tokens: list[int], **extras: Any) -> tuple[Sequence, int]:
    sequence = pool.sequence(list(tokens), **extras)
    hit = pool.match(sequence)
    assert pool.allocate(sequence, len(tokens), hit)
    return sequence, hit.tokens


class PoolMachine(RuleBasedStateMachine):
    """Random admissions, decodes, frees and resets; a second counter follows the events alone."""

    sequences = Bundle("sequences")
    windows: tuple[int | None, ...] = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, SIZE, ROOT, windows=self.windows)
        self.live: list[Sequence] = []
        self.seen: Counter[tuple[int, bytes]] = Counter()

    @rule(
        target=sequences,
        # A small alphabet makes prefixes meet.
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30),
        salt=st.sampled_from([None, "a"]),
        chunk=st.integers(1, 40),
    )
    def admit(self, tokens: list[int], salt: str | None, chunk: int) -> Sequence | None:
        sequence = self.pool.sequence(list(tokens), salt=salt)
        hit = self.pool.match(sequence)
        assert hit.tokens <= (len(tokens) - 1) // SIZE * SIZE
        free = self.pool.free_blocks
        upto = min(len(tokens), hit.tokens + chunk)
        if self.pool.allocate(sequence, upto, hit):
            assert sequence.computed == upto
            self.live.append(sequence)
            return sequence
        assert self.pool.free_blocks == free
        return None

    @rule(sequence=sequences, token=st.integers(0, 1))
    def extend(self, sequence: Sequence | None, token: int) -> None:
        if sequence in self.live:
            assert sequence is not None
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(token)
            before = sequence.computed
            if not self.pool.allocate(sequence, before + 1):
                assert sequence.computed == before

    @rule(sequence=consumes(sequences))
    def free(self, sequence: Sequence | None) -> None:
        if sequence in self.live:
            assert sequence is not None
            self.live.remove(sequence)
            self.pool.free(sequence)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.live)

    @invariant()
    def events_explain_the_cache(self) -> None:
        for event in self.pool.take_events():
            match event:
                case Stored():
                    assert len(event.digests) == len(event.extra_keys)
                    self.seen.update((event.group, digest) for digest in event.digests)
                case Removed():
                    key = (event.group, event.digest)
                    assert self.seen[key] > 0
                    self.seen[key] -= 1
                case Cleared():
                    self.seen.clear()
        resident = {(g, d): n for g in range(len(self.windows)) for d, n in self.pool.resident(g).items()}
        assert +self.seen == resident

    @invariant()
    def references_and_free_queue_agree(self) -> None:
        held = Counter(b.id for s in self.live for own in s.blocks for b in own)
        held.pop(0, None)  # the null block is nobody's
        assert self.pool.free_blocks == self.pool.num_blocks - 1 - len(held)
        refs = {b.id: b.refs for s in self.live for own in s.blocks for b in own if b.id}
        assert refs == held

    @invariant()
    def tables_cover_what_is_computed(self) -> None:
        for sequence in self.live:
            for own in sequence.blocks:
                assert len(own) * SIZE >= sequence.computed


class HybridPoolMachine(PoolMachine):
    windows = (None, 6)


TestPool = PoolMachine.TestCase
TestHybridPool = HybridPoolMachine.TestCase
TestPool.settings = TestHybridPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_digests_are_the_canonical_chain() -> None:
    pool = pool_of(10)
    tokens = list(range(14))
    admit(pool, tokens)
    (stored,) = pool.take_events()
    assert isinstance(stored, Stored)
    assert [block_key(d) for d in stored.digests] == Chain(ROOT, SIZE, tokens, NO_EXTRAS).keys(3)
    assert (stored.parent, stored.tokens) == (None, tokens[:12])


def test_the_last_token_of_a_prompt_is_always_recomputed() -> None:
    pool = pool_of(10)
    tokens = list(range(8))
    admit(pool, tokens)
    _, hit = admit(pool, tokens)
    assert hit == 4
    assert sorted(pool.resident().values()) == [1, 2]


def test_eviction_is_oldest_first_and_tail_first_and_precedes_the_new_content() -> None:
    pool = pool_of(5)
    first, _ = admit(pool, list(range(8)))
    second, _ = admit(pool, list(range(100, 108)))
    pool.free(first)
    pool.free(second)
    pool.take_events()
    admit(pool, list(range(200, 212)))
    *removed, stored = pool.take_events()
    assert [e.digest for e in removed if isinstance(e, Removed)] == [
        first.digests[1],
        first.digests[0],
        second.digests[1],
    ]
    assert isinstance(stored, Stored)


def test_a_hit_takes_blocks_out_of_the_free_queue() -> None:
    pool = pool_of(5)
    kept, _ = admit(pool, list(range(9)))
    pool.free(kept)
    again, hit = admit(pool, list(range(9)))
    assert (hit, pool.free_blocks) == (8, 1)
    pool.take_events()
    # One block is free: a prompt needing two must not take what is referenced again.
    other = pool.sequence(list(range(50, 58)))
    assert not pool.allocate(other, 8, pool.match(other))
    assert pool.take_events() == []
    pool.free(again)
    assert pool.free_blocks == 4


@pytest.mark.parametrize(("unhashed_first", "survivors"), [(True, 2), (False, 1)])
def test_where_freed_blocks_without_a_hash_queue(unhashed_first: bool, survivors: int) -> None:
    pool = pool_of(4, unhashed_first=unhashed_first)
    sequence, _ = admit(pool, list(range(8)))
    pool.free(sequence)
    partial, _ = admit(pool, [99])
    pool.free(partial)
    admit(pool, [98])
    # Three usable blocks: two cached, and one never full, which only the newer order takes first.
    assert sum(pool.resident().values()) == survivors


def test_salt_and_adapter_separate_prefixes() -> None:
    pool = pool_of(20)
    tokens = list(range(9))
    admit(pool, tokens)
    assert admit(pool, tokens, salt="tenant")[1] == 0
    assert admit(pool, tokens, lora=Lora("a", "/a"))[1] == 0
    assert admit(pool, tokens, lora=Lora("b", "/b"))[1] == 0
    assert admit(pool, tokens, salt="")[1] == 8
    assert admit(pool, tokens, salt="tenant")[1] == 8


def test_reset_needs_every_block_free() -> None:
    pool = pool_of(6)
    sequence, _ = admit(pool, list(range(5)))
    assert not pool.reset()
    pool.free(sequence)
    assert pool.reset()
    assert not pool.resident()
    assert isinstance(pool.take_events()[-1], Cleared)
    assert admit(pool, list(range(5)))[1] == 0


def test_a_sliding_window_needs_only_its_tail_and_frees_what_it_left() -> None:
    pool = pool_of(20, windows=(None, 6))
    sequence, _ = admit(pool, list(range(16)))
    sequence.tokens.append(16)
    assert pool.allocate(sequence, 17)
    full, sliding = sequence.blocks
    assert [b.id == 0 for b in sliding] == [True, True, False, False, False]
    assert all(b.id for b in full)
    pool.free(sequence)
    again = pool.sequence(list(range(17)))
    hit = pool.match(again)
    assert hit.tokens == 16
    assert [b.id == 0 for b in hit.blocks[1]] == [True, True, False, False]


def test_full_report_announces_reused_blocks_again() -> None:
    pool = pool_of(10)
    admit(pool, list(range(9)))
    pool.take_events()
    admit(pool, list(range(9)), report_full=True)
    (again,) = pool.take_events()
    assert isinstance(again, Stored)
    assert (len(again.digests), again.parent) == (2, None)
    assert sum(pool.resident().values()) == 2
