"""The engine model: times worked out by hand from its formula."""

from __future__ import annotations

import math

import pytest
from metatrie.indexer.policies import Speed
from metatrie.proto.hashing import BlockKey
from metatrie.scripts.simulate.engine import Engine, EngineConfig, Job, Keys

SPEED = Speed(prefill_tokens_per_s=10_000, step_s=0.02, sequence_step_s=0.0003, chunk_tokens=2048)


def nothing(keys: Keys, start: int, end: int) -> None:
    pass


class Bench:
    """One engine and the time."""

    def __init__(self, capacity_tokens: int = 1_000_000, max_sequences: int = 256) -> None:
        config = EngineConfig(speed=SPEED, capacity_tokens=capacity_tokens, max_sequences=max_sequences)
        self.first: dict[int, float] = {}
        self.done: dict[int, float] = {}
        self.engine = Engine(
            config,
            16,
            stored=nothing,
            removed=nothing,
            first_token=lambda job, now: self.first.update({job.index: now}),
            finished=lambda job, now: self.done.update({job.index: now}),
        )
        self.jobs = 0

    def submit(self, at: float, prompt: int, output: int, *, name: str = "", shared: int = 0) -> Job:
        self.run(at)
        keys = [BlockKey(f"{name if i * 16 >= shared else ''}{i}".encode()) for i in range(prompt // 16)]
        job = Job(self.jobs, keys, prompt, output, at)
        self.jobs += 1
        self.engine.submit(job, at)
        return job

    def run(self, until: float = math.inf) -> None:
        while self.engine.wake_at <= until and self.engine.wake_at != math.inf:
            self.engine.wake(self.engine.wake_at)


def test_a_prefill_takes_its_chunks_and_a_decode_its_steps() -> None:
    bench = Bench()
    bench.submit(1.0, 3000, 11)
    bench.run()
    assert bench.first[0] == pytest.approx(1.0 + 3000 / 10_000 + 2 * 0.02)
    assert bench.done[0] == pytest.approx(bench.first[0] + 10 * (0.02 + 0.0003))


def test_a_request_of_one_token_ends_with_it() -> None:
    bench = Bench()
    bench.submit(0.0, 100, 1)
    bench.run()
    assert bench.first == bench.done == {0: pytest.approx(0.03)}


def test_requests_share_a_chunk_and_wait_for_those_before_them() -> None:
    bench = Bench()
    bench.submit(0.0, 3000, 1, name="a")
    bench.submit(0.0, 500, 1, name="b")
    bench.run()
    # The first step was begun for the first alone; the second has room for the rest of it and all of the other.
    assert bench.first[0] == bench.first[1] == pytest.approx(2048 / 1e4 + 0.02 + (952 + 500) / 1e4 + 0.02)


def test_decoding_slows_a_prefill_and_a_prefill_slows_decoding() -> None:
    bench = Bench()
    bench.submit(0.0, 160, 1000, name="a")
    began = bench.submit(0.1, 1600, 2, name="b").arrived
    bench.run()
    first = 0.016 + 0.02
    # It waits for the end of the decode step that runs when it arrives.
    step = 0.0203
    starts = first + math.ceil((began - first) / step) * step
    assert bench.first[1] == pytest.approx(starts + 0.16 + 0.02 + 0.0003)
    alone = first + 999 * step
    assert bench.done[0] == pytest.approx(alone + 0.16 + 0.0003)


def test_what_is_cached_is_not_computed_but_for_the_last_token() -> None:
    bench = Bench()
    bench.submit(0.0, 1600, 1)
    again = bench.submit(10.0, 1600, 1)
    longer = bench.submit(20.0, 1700, 1)
    bench.run()
    assert (again.cached, longer.cached) == (1584, 1600)
    assert bench.first[1] == pytest.approx(10 + 16 / 1e4 + 0.02)
    assert bench.engine.prefill_tokens == 1600 + 16 + 100


def test_no_more_than_max_sequences_run_at_once() -> None:
    bench = Bench(max_sequences=2)
    for name in "abc":
        bench.submit(0.0, 160, 101, name=name)
    bench.run()
    assert bench.first[2] > min(bench.done[0], bench.done[1])


def test_a_prompt_waits_for_room() -> None:
    bench = Bench(capacity_tokens=320)
    bench.submit(0.0, 320, 51, name="a")
    bench.submit(0.0, 320, 1, name="b")
    bench.run()
    assert bench.first[1] > bench.done[0]
    assert bench.engine.cache.evicted == 20


def test_a_prompt_larger_than_the_cache_is_served_without_it() -> None:
    bench = Bench(capacity_tokens=160)
    bench.submit(0.0, 1600, 2)
    bench.run()
    assert bench.done
    assert bench.engine.cache.blocks == 10


def test_a_crash_returns_every_unfinished_request() -> None:
    bench = Bench()
    for name in "abc":
        bench.submit(0.0, 3000, 50, name=name)
    bench.run(0.6)
    lost = bench.engine.crash()
    assert [job.index for job in lost] == [0, 1, 2]
    assert bench.engine.wake_at == math.inf
    bench.submit(1.0, 160, 1, name="d")
    bench.run()
    assert bench.done == {3: pytest.approx(1.036)}
