"""The radix cache and its admission order: invariants on random operations, the depth-first argument, starvation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.consumers.inventory import Inventory
from metatrie.engines.radix import (
    Cleared,
    LongestPrefixFirst,
    Node,
    RadixCache,
    Removed,
    Scope,
    Stored,
    Waiting,
    encode_batch,
)
from metatrie.engines.rules import rule_for
from metatrie.proto.errors import ConfigError
from metatrie.proto.events import decode_batch
from metatrie.proto.hashing import Chain, Namespace, PromptExtras
from metatrie.scripts.longest_prefix import distinct_pages, random_tree, serve_all

SEEDS = st.integers(0, 2**32 - 1)


def random_prompt(rng: random.Random) -> list[int]:
    """Few distinct tokens, so that prompts share prefixes of every length."""
    return [rng.randrange(2) for _ in range(rng.randrange(1, 24))]


@pytest.mark.parametrize("page_size", [1, 4])
@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_invariants_and_the_index_behind_it(page_size: int, seed: int) -> None:
    """The tree equals a set of page paths kept by brute force, and an inventory fed with its events equals both."""
    rng = random.Random(seed)
    cache = RadixCache(page_size, event_format="dynamo")
    namespace = Namespace(model="m", block_size=4)
    inventory = Inventory(namespace, rule=rule_for("sglang-dynamo"))
    held: set[tuple[Any, ...]] = set()
    locked: list[tuple[Node, list[int], Scope]] = []
    announced: set[int] = set()
    for _ in range(40):
        scope = rng.choice([Scope(), Scope(), Scope(cache_salt="a")])
        tokens = random_prompt(rng)
        whole = len(tokens) - len(tokens) % page_size
        pages = [(scope, *tokens[:end]) for end in range(page_size, whole + 1, page_size)]
        match rng.randrange(6):
            case 0 | 1 | 2:
                expected = sum(p in held for p in pages) * page_size
                assert cache.peek(tokens, scope) == expected
                handle, cached = cache.insert(tokens, scope)
                assert cached == expected
                held |= set(pages)
                if rng.random() < 0.3:
                    cache.lock(handle)
                    locked.append((handle, tokens, scope))
            case 3 if locked:
                handle, _, _ = locked.pop(rng.randrange(len(locked)))
                cache.unlock(handle)
            case 4:
                before, wanted = cache.tokens, rng.randrange(1, 30)
                freed = cache.evict(wanted)
                assert freed == before - cache.tokens
                assert freed >= wanted or cache.tokens == cache.locked_tokens
            case 5 if not locked and rng.random() < 0.1:
                cache.reset()
                held.clear()
        events = cache.take_events()
        for event in events:
            match event:
                case Stored():
                    assert not announced & set(event.names)
                    announced |= set(event.names)
                case Removed():
                    assert announced >= set(event.names)
                    announced -= set(event.names)
                case Cleared():
                    announced.clear()
        held = {p for p in held if cache.peek(p[1:], p[0]) >= len(p) - 1}
        assert cache.tokens == len(held) * page_size
        assert cache.resident() == announced
        assert len(announced) == len(held)
        for _, prompt, owner in locked:
            assert cache.peek(prompt, owner) == len(prompt) - len(prompt) % page_size
        inventory.apply(decode_batch(encode_batch(events, page_size, ts=1.0, rank=0)))
        prompt = random_prompt(rng)
        keys = Chain(namespace.root, 4, prompt, PromptExtras(cache_salt=scope.cache_salt)).keys(99)
        shown = inventory.expected()
        depth = next((i for i, key in enumerate(keys) if key not in shown), len(keys))
        assert depth == min(len(keys), cache.peek(prompt, scope) // 4)
    assert inventory.stats.hidden == inventory.stats.unknown_removals == 0
    assert not inventory.flaws


def test_extra_keys_share_names_in_the_default_format_and_not_under_dynamo() -> None:
    for event_format, names in (("default", 2), ("dynamo", 4)):
        cache = RadixCache(2, event_format=event_format)  # type: ignore[arg-type]  # a loop over both literals
        cache.insert([1, 2, 3, 4])
        cache.insert([1, 2, 3, 4], Scope(extra_key="cls-1"))
        assert cache.tokens == 8
        assert len(cache.resident()) == names


def test_a_page_has_at_least_one_token() -> None:
    with pytest.raises(ConfigError):
        RadixCache(0)


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_longest_prefix_first_computes_every_distinct_page_once(seed: int) -> None:
    """The depth-first argument on its own terms: all requests waiting, a cache of just the longest request."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    prompts = random_tree(rng, requests=rng.randrange(1, 40), page_size=page_size)
    longest = max(len(p) - len(p) % page_size for p in prompts)
    outcome = serve_all(prompts, capacity=longest, page_size=page_size, patience=None)
    assert outcome.computed == distinct_pages(prompts, page_size) * page_size


def test_first_come_first_served_does_not_with_the_same_cache() -> None:
    worse = 0
    for seed in range(20):
        prompts = random_tree(random.Random(seed), requests=30, page_size=4)
        longest = max(len(p) - len(p) % 4 for p in prompts)
        fcfs = serve_all(prompts, capacity=longest, page_size=4, patience=0)
        optimum = distinct_pages(prompts, 4) * 4
        assert fcfs.computed >= optimum
        worse += fcfs.computed > optimum
    assert worse > 15


def test_a_stranger_starves_without_patience_and_not_with_it() -> None:
    """One request that shares nothing, and a stream of others that always share: how many go before it."""

    def overtakers(patience: int | None) -> int:
        cache = RadixCache(1)
        queue: LongestPrefixFirst[str] = LongestPrefixFirst(cache, patience=patience)
        cache.insert([7] * 8)
        queue.add(Waiting("stranger", [1, 2, 3]))
        for arrived in range(500):
            queue.add(Waiting("regular", [7] * 8 + [arrived]))
            waiting = queue.pop()
            cache.insert(waiting.tokens, waiting.scope)
            if waiting.request == "stranger":
                return arrived
        return 500

    assert overtakers(None) == 500
    assert overtakers(10) == 10
    assert overtakers(0) == 0


def test_equal_prefixes_go_first_come_first_served() -> None:
    queue: LongestPrefixFirst[int] = LongestPrefixFirst(RadixCache(1))
    for i in range(5):
        queue.add(Waiting(i, [i, i]))
    assert [queue.pop().request for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        queue.pop()
