"""The default policy: its formula, term by term, and what follows from it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.policies import Candidate, Policy, RoutingRequest, Speed, make_policy
from metatrie.proto.hashing import Chain, none_hash
from metatrie.proto.index import ReplicaRef


def policy(**parameters: object) -> Policy:
    return make_policy("priced_delay", parameters, random.Random(0))


def candidate(
    name: str,
    *,
    reusable: int = 0,
    requests: int = 0,
    prefills: int = 0,
    tokens: int = 0,
    tiers: tuple[int, int, int] | None = None,
    speed: Speed | None = None,
) -> Candidate:
    blocks = reusable // 16
    return Candidate(
        ref=ReplicaRef(name),
        matched_blocks=blocks,
        reusable_tokens=reusable,
        tiers=tiers or (blocks, 0, 0),
        reserved_requests=requests,
        reserved_prefills=prefills,
        reserved_tokens=tokens,
        speed=speed or Speed(),
    )


def costs(decided: Policy, fleet: list[Candidate], **request: object) -> dict[str, float]:
    given = {"prompt_tokens": 10_000, "expected_output_tokens": 400.0, **request}
    explanation = decided.choose(fleet, RoutingRequest(**given)).explain()  # type: ignore[arg-type]
    return {c.replica: c.terms["cost"] for c in explanation.candidates}


def test_the_formula_by_hand() -> None:
    fleet = [candidate("a", reusable=6_000, requests=12, prefills=2, tokens=3_000), candidate("b")]
    found = costs(policy(base_weight=3, max_weight=3), fleet)
    s_a = 1e-4 + (0.02 + 0.0003 * 10) / 2048
    s_b = 1e-4 + 0.02 / 2048
    assert found["a"] == pytest.approx((3_000 + 4_000) * s_a + 2 * 4_000 * 1e-4 + 0.0003 * 12 * 400)
    assert found["b"] == pytest.approx(10_000 * s_b + 2 * 10_000 * 1e-4)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8))
def test_the_terms_of_an_explanation_add_up_to_the_cost(shape: list[tuple[int, int, int]]) -> None:
    fleet = [
        candidate(f"r{i}", reusable=16 * d, requests=p + q, prefills=p, tokens=700 * p)
        for i, (d, p, q) in enumerate(shape)
    ]
    for parameters in ({}, {"decode_factor": 2.0, "stall_factor": 0.1}):
        explanation = policy(**parameters).choose(fleet, RoutingRequest(prompt_tokens=10_000)).explain()
        for one in explanation.candidates:
            parts = ("queue_s", "prefill_s", "price_s", "moving_s", "slowdown_s", "stall_s")
            assert sum(one.terms[part] for part in parts) == pytest.approx(one.terms["cost"])


def test_the_price_rises_with_load_up_to_its_bound_and_falls_again() -> None:
    decided = policy(base_weight=3, max_weight=10, load_window_s=20)
    busy, idle = [candidate("a", requests=1, prefills=1, tokens=1)], [candidate("a")]

    def weight(fleet: list[Candidate], now: float) -> float:
        explanation = decided.choose(fleet, RoutingRequest(prompt_tokens=16, now=now)).explain()
        return explanation.candidates[0].terms["weight"]

    assert weight(idle, 0) == 3
    rising = [weight(busy, now) for now in (1, 10, 30, 100, 1000)]
    assert rising == sorted(rising)
    assert rising[0] < 3.2
    assert rising[-1] == 10
    assert weight(idle, 1100) < 3.1


def test_holding_most_of_a_prompt_outweighs_a_short_queue_and_not_a_long_one() -> None:
    near = [candidate("holder", reusable=9_000, requests=4, prefills=4, tokens=20_000), candidate("idle")]
    far = [candidate("holder", reusable=9_000, requests=9, prefills=9, tokens=45_000), candidate("idle")]
    request = RoutingRequest(prompt_tokens=10_000)
    plain = policy(base_weight=1, max_weight=1)
    assert policy().choose(near, request).candidate.ref.replica == "holder"
    assert policy().choose(far, request).candidate.ref.replica == "idle"
    assert plain.choose(near, request).candidate.ref.replica == "idle"


def test_a_shared_prefix_carries_no_price() -> None:
    decided = policy(shared_branches=3)
    system = list(range(4096))

    def request(user: int, now: float = 0.0) -> RoutingRequest:
        tokens = system + [10_000 + user] * 64
        return RoutingRequest(prompt_tokens=len(tokens), chain=Chain(none_hash("0"), 16, tokens), now=now)

    fleet = [candidate("holder", reusable=4096, requests=4, prefills=4, tokens=5_000), candidate("idle")]
    first = decided.choose(fleet, request(0)).candidate.ref.replica
    later = [decided.choose(fleet, request(user)).candidate.ref.replica for user in range(1, 6)]
    assert first == "holder"
    assert later[-1] == "idle"


def test_a_slow_replica_is_charged_at_its_own_rate() -> None:
    slow = Speed(prefill_tokens_per_s=1_000)
    fleet = [candidate("slow", reusable=3_200, speed=slow), candidate("fast")]
    assert policy().choose(fleet, RoutingRequest(prompt_tokens=6_400)).candidate.ref.replica == "fast"


def test_slower_tiers_cost_a_load_and_not_a_prefill() -> None:
    fleet = [
        candidate("gpu", reusable=8_000),
        candidate("cpu", reusable=8_000, tiers=(100, 400, 0)),
        candidate("storage", reusable=8_000, tiers=(100, 0, 400)),
        candidate("none"),
    ]
    found = costs(policy(), fleet)
    assert found["gpu"] < found["cpu"] < found["storage"] < found["none"]
    assert found["cpu"] - found["gpu"] == pytest.approx(400 * 16 / Speed().cpu_tokens_per_s)


def test_where_kv_can_be_moved_an_idle_replica_fetches_instead_of_computing() -> None:
    def fleet(speed: Speed) -> list[Candidate]:
        busy = candidate("holder", reusable=9_600, requests=3, prefills=3, tokens=14_000, speed=speed)
        return [busy, candidate("idle", speed=speed)]

    request = RoutingRequest(prompt_tokens=10_000)
    assert policy().choose(fleet(Speed()), request).candidate.ref.replica == "holder"
    moving = Speed(transfer_tokens_per_s=100_000)
    assert policy().choose(fleet(moving), request).candidate.ref.replica == "idle"
    # A transfer slower than computing is not used.
    assert policy().choose(fleet(Speed(transfer_tokens_per_s=5_000)), request).candidate.ref.replica == "holder"
