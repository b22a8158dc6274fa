"""The simulator's prefix cache against vLLM's block pool, which it stands for, and its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from metatrie.engines.pool import BlockPool
from metatrie.proto.hashing import BlockKey, none_hash
from metatrie.scripts.simulate.engine import Keys, PrefixCache


class Watched:
    """A cache, and what its events say it holds."""

    def __init__(self, capacity: int) -> None:
        self.held: set[BlockKey] = set()
        self.cache = PrefixCache(capacity, stored=self._stored, removed=self._removed)

    def _stored(self, keys: Keys, start: int, end: int) -> None:
        assert self.held.isdisjoint(keys[start:end])
        self.held.update(keys[start:end])

    def _removed(self, keys: Keys, start: int, end: int) -> None:
        assert self.held.issuperset(keys[start:end])
        self.held.difference_update(keys[start:end])


def keys_of(text: str) -> list[BlockKey]:
    """Prefix-chained keys of a prompt whose blocks are its letters."""
    return [BlockKey(text[: i + 1].encode()) for i in range(len(text))]


@given(st.lists(st.text("ab", min_size=2, max_size=7), max_size=40), st.integers(7, 14))
def test_requests_served_one_by_one_leave_what_a_block_pool_would_hold(prompts: list[str], capacity: int) -> None:
    watched = Watched(capacity)
    pool = BlockPool(capacity + 1, 1, none_hash("0"))
    for prompt in prompts:
        keys = keys_of(prompt)
        handle, blocks = watched.cache.lock(keys, len(keys) - 1)
        sequence = pool.sequence([ord(letter) for letter in prompt])
        hit = pool.match(sequence)
        assert hit.tokens == blocks
        assert pool.allocate(sequence, len(prompt), hit)
        watched.cache.unlock(watched.cache.extend(handle, keys, blocks, len(keys)))
        pool.free(sequence)
        resident = pool.resident()
        # A prompt computed to its last token again is a second copy there, and none here.
        if max(resident.values(), default=1) > 1:
            return
        assert len(resident) == len(watched.held) == watched.cache.blocks


@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=8), st.integers(0, 3)), max_size=60), st.integers(1, 12)
)
def test_what_is_locked_stays_and_the_bound_holds(steps: list[tuple[str, int]], capacity: int) -> None:
    watched = Watched(capacity)
    cache = watched.cache
    running: list[tuple[object, list[BlockKey]]] = []
    for prompt, keep in steps:
        keys = keys_of(prompt)
        handle, blocks = cache.lock(keys, len(keys))
        assert blocks == cache.matched(keys)
        before = cache.blocks
        handle = cache.extend(handle, keys, blocks, len(keys))
        running.append((handle, keys[: cache.matched(keys)]))
        assert cache.blocks <= capacity
        assert cache.blocks == len(watched.held)
        assert before - capacity <= cache.evicted
        for _, held in running:
            assert watched.held.issuperset(held)
        while len(running) > keep:
            done, _ = running.pop(0)
            cache.unlock(done)  # type: ignore[arg-type]  # handles are opaque
    while running:
        cache.unlock(running.pop()[0])  # type: ignore[arg-type]
    assert cache.locked == 0
    # Whatever is held, its prefix is held too.
    assert all(key[:-1] in watched.held for key in watched.held if len(key) > 1)


def test_the_end_of_the_least_recently_used_prompt_goes_first() -> None:
    watched = Watched(6)
    cache = watched.cache
    for prompt in ("abc", "xyz", "abc", "abd"):
        keys = keys_of(prompt)
        handle, blocks = cache.lock(keys, 3)
        cache.unlock(cache.extend(handle, keys, blocks, 3))
    assert cache.evicted == 1
    assert cache.matched(keys_of("xyz")) == 2
    assert cache.matched(keys_of("abc")) == cache.matched(keys_of("abd")) == 3


def test_a_crash_forgets_without_a_word() -> None:
    watched = Watched(4)
    keys = keys_of("abc")
    handle, _ = watched.cache.lock(keys, 3)
    watched.cache.extend(handle, keys, 0, 3)
    watched.cache.clear()
    assert (watched.cache.blocks, watched.cache.locked, watched.cache.matched(keys)) == (0, 0, 0)
    assert len(watched.held) == 3
