"""Continuous batching: who runs, how long a step takes, what is preempted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metatrie.engines.pool import BlockPool, Cleared, Stored
from metatrie.engines.scheduler import Request, Scheduler, ServiceModel, Step
from metatrie.proto.hashing import none_hash

SIZE = 16
MODEL = ServiceModel(prefill_tokens_per_s=1000, decode_step_s=0.01, decode_seq_s=0.001)


def scheduler_of(blocks: int = 1001, *, budget: int = 512, seqs: int = 64, length: int = 4096) -> Scheduler:
    length = min(length, (blocks - 1) * SIZE)
    pool = BlockPool(blocks, SIZE, none_hash("0"))
    return Scheduler(pool, MODEL, range(1000, 2000), max_model_len=length, token_budget=budget, max_num_seqs=seqs)


def run(scheduler: Scheduler, now: float = 0.0, *, limit: int = 10_000) -> list[tuple[float, Step]]:
    """Step until idle; (end time, step) of each."""
    steps = []
    while (step := scheduler.step(now)) is not None:
        now += step.duration_s
        steps.append((now, step))
        assert len(steps) < limit
    return steps


def prompt(tag: int, length: int) -> list[int]:
    return [tag * 100_000 + i for i in range(length)]


def test_time_to_first_token_is_prefill_over_rate() -> None:
    scheduler = scheduler_of()
    request = scheduler.new_request(prompt(1, 1000), 3)
    scheduler.add(request, 0.0)
    steps = run(scheduler)
    # 512 + 488 tokens at 1000/s, then two decode steps of 10 ms + 1 ms.
    assert [s.prefill_tokens for _, s in steps] == [512, 488, 0, 0]
    assert request.first_token_s == pytest.approx(1.0)
    assert request.last_token_s == pytest.approx(1.022)
    assert (request.finish, request.generated) == ("length", 3)


def test_a_cached_prefix_is_not_computed_again() -> None:
    scheduler = scheduler_of()
    first = scheduler.new_request(prompt(1, 1000), 1)
    scheduler.add(first, 0.0)
    run(scheduler)
    again = scheduler.new_request(prompt(1, 1000), 1)
    scheduler.add(again, 10.0)
    run(scheduler, 10.0)
    # 62 full blocks hold 992 tokens.
    assert (first.cached_tokens, again.cached_tokens) == (0, 992)
    assert again.first_token_s - again.arrival_s == pytest.approx(0.008)
    assert (scheduler.counters.queries, scheduler.counters.hits) == (2000, 992)


def test_same_step_arrivals_share_their_prefix() -> None:
    scheduler = scheduler_of()
    requests = [scheduler.new_request(prompt(1, 100), 1, seed=seed) for seed in (1, 2)]
    for request in requests:
        scheduler.add(request, 0.0)
    run(scheduler)
    assert [r.cached_tokens for r in requests] == [0, 96]


def test_decoding_goes_before_prefill_within_the_budget() -> None:
    scheduler = scheduler_of(budget=100)
    decoding = scheduler.new_request(prompt(1, 50), 20)
    scheduler.add(decoding, 0.0)
    scheduler.step(0.0)
    scheduler.add(scheduler.new_request(prompt(2, 250), 1), 0.0)
    mixed = [scheduler.step(0.0) for _ in range(3)]
    assert [(s.prefill_tokens, s.decodes) for s in mixed if s] == [(99, 1), (99, 1), (52, 1)]
    assert mixed[0] is not None
    assert mixed[0].duration_s == pytest.approx(0.099 + 0.01 + 0.001)


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = scheduler_of(seqs=2)
    for tag in range(3):
        scheduler.add(scheduler.new_request(prompt(tag, 20), 2), 0.0)
    scheduler.step(0.0)
    assert (scheduler.running, scheduler.waiting) == (2, 1)


def test_out_of_blocks_the_newest_is_preempted_and_recomputed() -> None:
    # 4 usable blocks. Both prompts fill two, both first decodes need a third.
    scheduler = scheduler_of(5, length=64)
    old, new = (scheduler.new_request(prompt(tag, 32), 20) for tag in (1, 2))
    for request in (old, new):
        scheduler.add(request, 0.0)
    run(scheduler)
    assert (old.preemptions, new.preemptions) == (0, 1)
    assert old.last_token_s < new.last_token_s
    assert (old.generated, new.generated) == (20, 20)
    assert scheduler.counters.preemptions == 1
    assert scheduler.pool.free_blocks == 4


def test_preemption_does_not_change_what_is_generated() -> None:
    outputs = []
    for blocks in (5, 100):
        scheduler = scheduler_of(blocks, length=64)
        requests = [scheduler.new_request(prompt(tag, 32), 20) for tag in (1, 2)]
        for request in requests:
            scheduler.add(request, 0.0)
        run(scheduler)
        outputs.append([r.sequence.tokens for r in requests])
    assert outputs[0] == outputs[1]


def test_output_depends_on_prompt_and_seed_only() -> None:
    def output(tokens: list[int], seed: int) -> list[int]:
        scheduler = scheduler_of()
        request = scheduler.new_request(tokens, 30, seed=seed)
        scheduler.add(request, 0.0)
        run(scheduler)
        return request.sequence.tokens[len(tokens) :]

    base = output(prompt(1, 20), 0)
    assert base == output(prompt(1, 20), 0)
    assert base != output(prompt(1, 20), 1)
    assert base != output(prompt(2, 20), 0)
    assert all(1000 <= token < 2000 for token in base)


def test_abort_frees_blocks_at_once_waiting_or_running() -> None:
    scheduler = scheduler_of(seqs=1)
    running, waiting = (scheduler.new_request(prompt(tag, 40), 50) for tag in (1, 2))
    for request in (running, waiting):
        scheduler.add(request, 0.0)
    scheduler.step(0.0)
    assert scheduler.pool.free_blocks == 997
    scheduler.end(waiting)
    scheduler.end(running)
    scheduler.end(running)
    assert scheduler.pool.free_blocks == 1000
    assert not scheduler.has_requests
    assert (running.finish, waiting.finish) == ("abort", "abort")


def test_a_reset_is_announced_with_the_next_step() -> None:
    scheduler = scheduler_of()
    scheduler.add(scheduler.new_request(prompt(1, 40), 1), 0.0)
    run(scheduler)
    assert scheduler.reset_prefix_cache()
    assert scheduler.step(1.0) is None
    scheduler.add(scheduler.new_request(prompt(1, 40), 1), 1.0)
    step = scheduler.step(1.0)
    assert step is not None
    assert [type(e) for e in step.events] == [Cleared, Stored]


def test_a_reset_can_preempt_what_runs() -> None:
    scheduler = scheduler_of()
    request = scheduler.new_request(prompt(1, 40), 5)
    scheduler.add(request, 0.0)
    scheduler.step(0.0)
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running=True)
    run(scheduler)
    assert (request.generated, request.preemptions) == (5, 1)


def test_output_stops_at_max_model_len() -> None:
    scheduler = scheduler_of(length=64)
    request = scheduler.new_request(prompt(1, 60), 1000)
    scheduler.add(request, 0.0)
    run(scheduler)
    assert len(request.sequence.tokens) == 64


@pytest.mark.parametrize("length", [0, 64])
def test_prompts_that_cannot_run_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="prompt length"):
        scheduler_of(length=64).new_request(prompt(1, length), 1)


def test_a_pool_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        Scheduler(BlockPool(4, SIZE, none_hash("0")), MODEL, [1], max_model_len=49)


@settings(max_examples=50, deadline=None)
@given(
    jobs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(1, 30)), min_size=1, max_size=12),
    budget=st.integers(1, 64),
    seqs=st.integers(1, 6),
    aborts=st.sets(st.integers(0, 11)),
)
def test_everything_finishes_within_budget_and_leaves_no_block(
    jobs: list[tuple[int, int, int]], budget: int, seqs: int, aborts: set[int]
) -> None:
    scheduler = scheduler_of(9, budget=budget, seqs=seqs, length=128)
    requests: list[Request] = []
    for tag, length, tokens in jobs:
        request = scheduler.new_request(prompt(tag, length), tokens)
        requests.append(request)
        scheduler.add(request, 0.0)
    scheduler.step(0.0)
    for index in aborts & set(range(len(requests))):
        scheduler.end(requests[index])
    for _, step in run(scheduler):
        assert 0 < step.prefill_tokens + step.decodes <= budget
    assert scheduler.pool.free_blocks == 8
    for request in requests:
        assert request.finish is not None
        if request.finish == "length":
            assert request.generated == request.max_tokens
