"""What longest-prefix-first admission is worth, and what it costs the one whose prefix nobody shares.

    python -m metatrie.scripts.longest_prefix [--json]

Strategy. One replica with a radix cache, one request at a time, in modelled time: a request takes its uncached tokens
at a fixed rate, plus a constant. Requests arrive at random: most belong to one of a few conversations, whose trees
grow, and one in twenty is a stranger that shares nothing. The same arrivals are served first come first served
(patience 0), longest prefix first with a bound on overtaking, and without one (as SGLang does it).
Reported per order and load: share of prompt tokens found in the cache, mean wait, and what strangers wait: mean, 99th
percentile, longest, and by how many later arrivals the unluckiest was overtaken.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import click
import msgspec

from ..engines.radix import LongestPrefixFirst, RadixCache, Waiting

TOKENS_PER_S: Final = 10_000.0
CONSTANT_S: Final = 0.01
PAGE_SIZE: Final = 16
MAX_PROMPT: Final = 16_384
RATES: Final = (1.0, 2.0, 4.0, 8.0)
"""Arrivals per second."""

Prompt = Sequence[int]


class Outcome(msgspec.Struct, frozen=True):
    """One set of requests, served in some order."""

    computed: int
    """Prompt tokens in whole pages that were not found in the cache."""
    prompt_tokens: int
    """Of those, all."""


def serve_all(prompts: Sequence[Prompt], *, capacity: int, page_size: int, patience: int | None) -> Outcome:
    """Serve requests that all wait already, one at a time, from a cache of `capacity` tokens."""
    cache = RadixCache(page_size)
    queue: LongestPrefixFirst[None] = LongestPrefixFirst(cache, patience=patience)
    for prompt in prompts:
        queue.add(Waiting(None, prompt))
    computed = total = 0
    while queue:
        prompt = queue.pop().tokens
        computed += _prefill(cache, prompt, capacity)
        total += len(prompt) - len(prompt) % page_size
    return Outcome(computed, total)


def distinct_pages(prompts: Sequence[Prompt], page_size: int) -> int:
    """Pages of the radix tree of these prompts: what has to be computed at least."""
    return len({tuple(p[:end]) for p in prompts for end in range(page_size, len(p) + 1, page_size)})


def random_tree(rng: random.Random, *, requests: int, page_size: int) -> list[list[int]]:
    """Prompts that share prefixes: each extends a random cut of an earlier one. In random order."""
    prompts: list[list[int]] = []
    for i in range(requests):
        base: list[int] = []
        if prompts and rng.random() < 0.9:
            base = rng.choice(prompts)
            base = base[: rng.randrange(len(base) + 1)]
        prompts.append(base + [i] * (page_size * rng.randrange(1, 5) + rng.randrange(page_size)))
    rng.shuffle(prompts)
    return prompts


def _prefill(cache: RadixCache, prompt: Prompt, capacity: int) -> int:
    """Tokens computed for one request, which holds its path while room is made for it."""
    node, cached = cache.match(prompt)
    fresh = len(prompt) - len(prompt) % cache.page_size - cached
    cache.lock(node)
    cache.evict(cache.tokens + fresh - capacity)
    cache.unlock(node)
    cache.insert(prompt)
    return fresh


class Arrival(msgspec.Struct, frozen=True):
    at: float
    prompt: list[int]
    stranger: bool


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One order under one load. Waits in seconds, from arrival to start."""

    order: str
    load: float
    """Arrivals × mean service time, first come first served."""
    hit_ratio: float
    mean_wait_s: float
    strangers_mean_s: float
    strangers_p99_s: float
    strangers_max_s: float
    most_overtaken: int


def arrivals(seed: int, *, requests: int, per_s: float, conversations: int = 40) -> list[Arrival]:
    """A Poisson stream: conversations whose prompts grow turn by turn, and every twentieth request a stranger's."""
    rng = random.Random(seed)
    histories = [[1_000_000 + c] * 1024 for c in range(conversations)]
    now, stream = 0.0, []
    for i in range(requests):
        now += rng.expovariate(per_s)
        if rng.random() < 0.05:
            stream.append(Arrival(now, [2_000_000 + i] * 2048, True))
            continue
        at = rng.randrange(conversations)
        history = histories[at] + [i] * rng.randrange(128, 512)
        stream.append(Arrival(now, history, False))
        histories[at] = history if len(history) < MAX_PROMPT else histories[at][:1024]
    return stream


def measure(
    stream: Sequence[Arrival], *, order: str, patience: int | None, capacity: int, per_s: float
) -> tuple[Row, float]:
    """Serve one stream; also the mean service time."""
    cache = RadixCache(PAGE_SIZE)
    queue: LongestPrefixFirst[Arrival] = LongestPrefixFirst(cache, patience=patience)
    now, at, computed, total = 0.0, 0, 0, 0
    waits: list[tuple[bool, float]] = []
    overtaken = 0
    busy = 0.0
    while at < len(stream) or queue:
        if not queue:
            now = max(now, stream[at].at)
        while at < len(stream) and stream[at].at <= now:
            queue.add(Waiting(stream[at], stream[at].prompt))
            at += 1
        waiting = queue.pop()
        waits.append((waiting.request.stranger, now - waiting.request.at))
        overtaken = max(overtaken, waiting.overtaken)
        fresh = _prefill(cache, waiting.tokens, capacity)
        cache.take_events()
        computed += fresh
        total += len(waiting.tokens)
        took = CONSTANT_S + fresh / TOKENS_PER_S
        busy += took
        now += took
    strangers = sorted(wait for stranger, wait in waits if stranger)
    row = Row(
        order=order,
        load=per_s * busy / len(stream),
        hit_ratio=1 - computed / total,
        mean_wait_s=sum(wait for _, wait in waits) / len(waits),
        strangers_mean_s=sum(strangers) / len(strangers),
        strangers_p99_s=strangers[int(0.99 * (len(strangers) - 1))],
        strangers_max_s=strangers[-1],
        most_overtaken=overtaken,
    )
    return row, busy / len(stream)


@click.command()
@click.option("--requests", type=click.IntRange(100, 100_000), default=3000)
@click.option("--seed", type=int, default=1)
@click.option("--capacity", type=click.IntRange(MAX_PROMPT), default=65_536, help="Cache, in tokens.")
@click.option("--json", "as_json", is_flag=True)
def command(requests: int, seed: int, capacity: int, as_json: bool) -> None:
    """Hit ratio and waits of three admission orders under growing load."""
    rows = []
    for per_s in RATES:
        stream = arrivals(seed, requests=requests, per_s=per_s)
        for order, patience in (("first come", 0), ("longest prefix, patience 50", 50), ("longest prefix", None)):
            rows.append(measure(stream, order=order, patience=patience, capacity=capacity, per_s=per_s)[0])
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return
    print(
        "requests/s  order                         load   hits  wait mean  strangers: mean    p99    max  overtaken"
    )
    for i, row in enumerate(rows):
        print(
            f"{RATES[i // 3]:10.0f}  {row.order:28} {row.load:5.2f} {row.hit_ratio:6.3f} {row.mean_wait_s:10.2f}"
            f" {row.strangers_mean_s:16.2f} {row.strangers_p99_s:6.2f} {row.strangers_max_s:6.2f}"
            f" {row.most_overtaken:10}"
        )


if __name__ == "__main__":
    command()
