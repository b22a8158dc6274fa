"""Policies: worked examples, tie-breaking, and the bound that `hybrid` promises."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.policies import MAX_EXPLAINED, POLICIES, Candidate, Policy, RoutingRequest, make_policy
from metatrie.proto.errors import InvalidField
from metatrie.proto.index import Load, ReplicaRef

REQUEST = RoutingRequest(prompt_tokens=1024)


def policy(name: str, seed: int = 0, **parameters: object) -> Policy:
    return make_policy(name, parameters, random.Random(seed))


def candidate(
    name: str, *, reusable: int = 0, requests: int = 0, tokens: int = 0, load: Load | None = None
) -> Candidate:
    return Candidate(
        ref=ReplicaRef(name),
        matched_blocks=reusable // 16,
        reusable_tokens=reusable,
        reserved_requests=requests,
        reserved_tokens=tokens,
        load=load,
    )


def names(policy: Policy, candidates: list[Candidate], times: int) -> list[str]:
    return [policy.choose(candidates, REQUEST).candidate.ref.replica for _ in range(times)]


def test_round_robin_visits_everyone_in_turn_whatever_the_order_given() -> None:
    rr = policy("round_robin")
    fleet = [candidate("b", reusable=512), candidate("a"), candidate("c", requests=9)]
    assert names(rr, fleet, 4) == ["a", "b", "c", "a"]
    assert names(rr, fleet[::-1], 2) == ["b", "c"]


def test_round_robin_keeps_its_place_when_replicas_come_and_go() -> None:
    rr = policy("round_robin")
    assert names(rr, [candidate("a"), candidate("b"), candidate("c")], 2) == ["a", "b"]
    assert names(rr, [candidate("a"), candidate("c"), candidate("d")], 3) == ["c", "d", "a"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True), st.integers(1, 40))
def test_round_robin_is_fair(ids: list[int], rounds: int) -> None:
    counts = Counter(names(policy("round_robin"), [candidate(f"r{i}") for i in ids], rounds))
    assert max(counts.values()) - min(counts.get(f"r{i}", 0) for i in ids) <= 1


def test_affinity_takes_the_deepest_however_busy() -> None:
    decision = policy("affinity_only").choose(
        [candidate("a", reusable=160), candidate("b", reusable=176, requests=1000)], REQUEST
    )
    assert (decision.candidate.ref.replica, decision.reason) == ("b", "deepest")


@pytest.mark.parametrize("name", ["affinity_only", "hybrid"])
def test_ties_go_to_the_fewest_requests_then_to_the_fewest_uncached_tokens(name: str) -> None:
    fleet = [
        candidate("a", reusable=64, requests=2, tokens=10),
        candidate("b", reusable=64, requests=1, tokens=900),
        candidate("c", reusable=64, requests=1, tokens=800),
    ]
    decision = policy(name).choose(fleet, REQUEST)
    assert (decision.candidate.ref.replica, decision.reason) == ("c", "least_loaded")


@pytest.mark.parametrize("name", ["affinity_only", "hybrid"])
def test_full_ties_are_drawn_from_the_injected_generator(name: str) -> None:
    fleet = [candidate(n, reusable=64) for n in "abcd"]
    drawn = names(policy(name, seed=7), fleet, 40)
    assert drawn == names(policy(name, seed=7), fleet, 40)
    assert set(drawn) == set("abcd")
    assert policy(name).choose(fleet, REQUEST).reason == "random"


def test_hybrid_prefers_depth_up_to_its_skew_and_no_further() -> None:
    hybrid = policy("hybrid", max_skew=3)
    at_bound = [candidate("holder", reusable=512, requests=5), candidate("idle", requests=2)]
    beyond = [candidate("holder", reusable=512, requests=6), candidate("idle", requests=2)]
    kept, moved = hybrid.choose(at_bound, REQUEST), hybrid.choose(beyond, REQUEST)
    assert (kept.candidate.ref.replica, kept.reason) == ("holder", "deepest")
    assert (moved.candidate.ref.replica, moved.reason) == ("idle", "constraint")


def test_pending_work_is_the_larger_of_reserved_and_reported() -> None:
    hybrid = policy("hybrid", max_skew=0)
    fleet = [
        candidate("reported", reusable=512, load=Load(running=3, waiting=1)),
        candidate("reserved", requests=3, load=Load(running=1)),
    ]
    assert [c.pending for c in fleet] == [4, 3]
    assert names(hybrid, fleet, 1) == ["reserved"]


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 50)), min_size=1, max_size=12),
    st.integers(0, 10),
    st.integers(0, 2**32),
)
def test_hybrid_never_exceeds_its_skew_and_takes_the_deepest_within(
    replicas: list[tuple[int, int]], max_skew: int, seed: int
) -> None:
    fleet = [candidate(f"r{i}", reusable=16 * d, requests=r) for i, (d, r) in enumerate(replicas)]
    chosen = policy("hybrid", seed, max_skew=max_skew).choose(fleet, REQUEST).candidate
    most = min(c.pending for c in fleet) + max_skew
    assert chosen.pending <= most
    assert chosen.reusable_tokens == max(c.reusable_tokens for c in fleet if c.pending <= most)


@given(st.integers(2, 8), st.integers(0, 9), st.integers(0, 2**32))
def test_one_hot_prefix_cannot_pile_up_beyond_the_skew(replicas: int, max_skew: int, seed: int) -> None:
    hybrid, pending = policy("hybrid", seed, max_skew=max_skew), [0] * replicas
    for _ in range(60):
        fleet = [candidate(f"r{i}", reusable=0 if i else 1008, requests=n) for i, n in enumerate(pending)]
        pending[int(hybrid.choose(fleet, REQUEST).candidate.ref.replica[1:])] += 1
        assert max(pending) - min(pending) <= max_skew + 1


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_single_candidate_is_chosen_by_every_policy(name: str) -> None:
    decision = policy(name).choose([candidate("only", requests=99)], REQUEST)
    assert (decision.candidate.ref.replica, decision.reason) == ("only", "only_candidate")
    assert decision.explain().alternative is None


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
def test_an_explanation_is_bounded_and_never_changes_the_decision(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 20)), min_size=1, max_size=90))
    fleet = [candidate(f"r{i}", reusable=16 * d, requests=r) for i, (d, r) in enumerate(shape)]
    plain, explained = policy(name, 3), policy(name, 3)
    for request in (REQUEST, RoutingRequest(prompt_tokens=512, now=1.0)):
        decision = explained.choose(fleet, request)
        explanation = decision.explain()
        assert decision.candidate == plain.choose(fleet, request).candidate
    listed = [c.replica for c in explanation.candidates]
    assert decision.candidate.ref.replica in listed
    assert len(listed) == len(set(listed)) == min(len(fleet), MAX_EXPLAINED)
    assert explanation.omitted == len(fleet) - len(listed)
    assert explanation.alternative != str(decision.candidate.ref)


def test_an_explanation_names_terms_winner_and_the_better_one_that_was_ruled_out() -> None:
    fleet = [candidate("holder", reusable=512, requests=9), candidate("idle", reusable=32), candidate("other")]
    explanation = policy("hybrid", max_skew=8).choose(fleet, REQUEST).explain()
    assert explanation.policy == "hybrid"
    assert explanation.parameters == {"max_skew": 8}
    assert explanation.alternative == "holder/0"
    assert "idle/0" in explanation.why
    assert "ruled out" in explanation.why
    holder, idle, other = explanation.candidates
    assert (holder.replica, holder.eligible) == ("holder", False)
    assert holder.terms == {"cost": -512, "reusable_tokens": 512, "pending_requests": 9, "reserved_tokens": 0}
    assert (idle.replica, idle.eligible, other.replica) == ("idle", True, "other")


@pytest.mark.parametrize(
    ("name", "parameters", "field", "remedy"),
    [
        ("best", {}, "policy", ", ".join(POLICIES)),
        ("hybrid", {"skew": 1}, "policy.skew", "max_skew"),
        ("hybrid", {"max_skew": -1}, "policy.max_skew", "hybrid"),
        ("hybrid", {"max_skew": "1"}, "policy.max_skew", "hybrid"),
        ("round_robin", {"max_skew": 1}, "policy.max_skew", "none"),
    ],
)
def test_unknown_policies_and_parameters_are_refused_by_name(
    name: str, parameters: dict[str, object], field: str, remedy: str
) -> None:
    with pytest.raises(InvalidField) as refused:
        make_policy(name, parameters, random.Random())
    assert refused.value.field == field
    assert remedy in (refused.value.remedy or "")
