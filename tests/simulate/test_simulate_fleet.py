"""Whole runs on small traces: what every run must satisfy, and what each knob does."""

from __future__ import annotations

import math

import msgspec
import pytest
from metatrie.indexer.policies import POLICIES, Speed
from metatrie.indexer.queueing import QueueConfig
from metatrie.scripts.simulate.engine import EngineConfig
from metatrie.scripts.simulate.fleet import Fleet, FleetConfig, Loss, Outcome, simulate, stretch_for
from metatrie.scripts.simulate.suite import ideal_hit
from metatrie.scripts.simulate.traces import Trace, synthetic

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic(conversations=120, turns=4)


@pytest.fixture(scope="module")
def busy(trace: Trace) -> FleetConfig:
    """Four replicas at 50 % load."""
    config = FleetConfig(replicas=4)
    return replace(config, stretch=stretch_for(trace, config, 0.5))


def test_the_stretch_reaches_the_load(trace: Trace, busy: FleetConfig) -> None:
    assert simulate(trace, busy).load == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_everything_the_same_way_twice(trace: Trace, busy: FleetConfig, policy: str) -> None:
    config = replace(busy, policy=policy)
    first, second = simulate(trace, config), simulate(trace, config)
    assert first == second
    assert first.requests == sum(first.routed) == len(trace.requests) - len(trace.requests) // 10
    assert 0 < first.ttft.p50 <= first.ttft.p90 <= first.ttft.p99
    assert first.ttft.mean < first.latency.mean
    assert first.hit <= ideal_hit(trace, busy.warmup) + 0.02
    assert first.work_skew >= 1


def test_the_bound_is_not_passed(trace: Trace, busy: FleetConfig) -> None:
    bound = simulate(trace, replace(busy, oracle=True, parameters={"base_weight": 1.0, "max_weight": 1.0}))
    for policy in ("priced_delay", "sticky", "round_robin"):
        assert simulate(trace, replace(busy, policy=policy)).ttft.mean > bound.ttft.mean


def test_affinity_beats_turns_when_caches_matter(trace: Trace, busy: FleetConfig) -> None:
    default, turns = simulate(trace, busy), simulate(trace, replace(busy, policy="round_robin"))
    assert default.hit > turns.hit + 0.1
    assert default.ttft.mean < turns.ttft.mean


def test_a_fifth_of_the_cache_evicts_and_reuses_less(trace: Trace, busy: FleetConfig) -> None:
    small = simulate(trace, replace(busy, engine=EngineConfig(capacity_tokens=20_000)))
    ample = simulate(trace, busy)
    assert ample.evicted_blocks == 0 < small.evicted_blocks
    assert small.hit < ample.hit


def test_event_lag_costs_little_with_speculative_placement(trace: Trace, busy: FleetConfig) -> None:
    exact = simulate(trace, busy)
    for lag in (1.0, 10.0):
        assert simulate(trace, replace(busy, event_lag_s=lag)).hit == pytest.approx(exact.hit, abs=0.02)
    blind = simulate(trace, replace(busy, event_lag_s=10.0, speculative=False))
    assert blind.hit < exact.hit - 0.02
    assert blind.predicted_tokens < blind.reused_tokens


def test_four_routers_that_share_their_load_do_as_well_as_one(trace: Trace, busy: FleetConfig) -> None:
    one = simulate(trace, busy)
    shared = simulate(trace, replace(busy, routers=4, exchange_s=0.01))
    alone = simulate(trace, replace(busy, routers=4, exchange_s=math.inf))
    assert shared.ttft.mean <= one.ttft.mean * 1.1
    assert shared.ttft.mean < alone.ttft.mean


def test_a_queue_in_the_router_shortens_the_mean(trace: Trace, busy: FleetConfig) -> None:
    crowded = replace(busy, stretch=busy.stretch * 0.2)
    engines, router = simulate(trace, crowded), simulate(trace, replace(crowded, queue=QueueConfig()))
    assert router == simulate(trace, replace(crowded, queue=QueueConfig()))
    assert engines.queued == 0 < router.queued
    assert router.requests == engines.requests == sum(router.routed)
    assert router.ttft.mean < engines.ttft.mean * 0.95
    lost = simulate(trace, replace(crowded, queue=QueueConfig(), losses=(Loss(0.5, 0),)))
    assert lost.requests == sum(lost.routed)


@pytest.mark.parametrize("bound", [{"max_wait_s": 0.05}, {"capacity": 1}])
def test_a_queue_is_bounded(trace: Trace, busy: FleetConfig, bound: dict[str, float]) -> None:
    crowded = replace(busy, stretch=busy.stretch * 0.2, queue=msgspec.convert(bound, QueueConfig))
    outcome, free = simulate(trace, crowded), simulate(trace, replace(crowded, queue=QueueConfig()))
    assert outcome.requests == sum(outcome.routed)
    assert 0 < outcome.queued < free.queued


@pytest.mark.parametrize("other", [{"routers": 2}, {"policy": "round_robin"}])
def test_several_routers_and_policies_blind_to_load_have_no_queue(
    trace: Trace, busy: FleetConfig, other: dict[str, object]
) -> None:
    config = replace(busy, **other)
    assert simulate(trace, replace(config, queue=QueueConfig())) == simulate(trace, config)


def test_a_lost_cache_is_not_counted_on(trace: Trace, busy: FleetConfig) -> None:
    lost = simulate(trace, replace(busy, losses=(Loss(0.5, 0),)))
    assert lost.requests == sum(lost.routed)
    # What routing promised and caches had differ by no more than what was under way at the loss.
    assert lost.predicted_tokens <= lost.reused_tokens * 1.05
    assert lost.hit < simulate(trace, busy).hit


def test_a_slow_replica_gets_less(trace: Trace, busy: FleetConfig) -> None:
    slow = EngineConfig(speed=Speed(prefill_tokens_per_s=2_500))
    outcome = simulate(trace, replace(busy, engines=(slow, *[EngineConfig()] * 3)))
    assert outcome.routed[0] < min(outcome.routed[1:])


def test_learned_speeds_do_as_well_as_declared_ones(trace: Trace, busy: FleetConfig) -> None:
    engines = tuple(EngineConfig(speed=Speed(prefill_tokens_per_s=rate)) for rate in (4_000, 10_000, 10_000, 16_000))
    declared = simulate(trace, replace(busy, engines=engines))
    learned = simulate(trace, replace(busy, engines=engines, learned=True))
    assert learned.ttft.mean <= declared.ttft.mean * 1.25


def test_a_turn_never_arrives_before_the_one_it_continues_is_over(trace: Trace) -> None:
    crowded = Fleet(trace, FleetConfig(replicas=1, stretch=0.001))
    outcome = crowded.run()
    # All conversations at once on one replica: only waiting for each other keeps them apart.
    assert outcome.peak_pending <= 120


def test_windows_cover_the_run(trace: Trace, busy: FleetConfig) -> None:
    outcome: Outcome = simulate(trace, busy)
    assert [w.at_s for w in outcome.windows] == sorted(w.at_s for w in outcome.windows)
    assert all(w.pending[0] <= w.pending[1] for w in outcome.windows)
