"""Other systems' policies: each does what its source says, where that differs from its neighbours."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from metatrie.indexer.policies import POLICIES, Candidate, Policy, RoutingRequest, make_policy
from metatrie.proto.hashing import Chain, none_hash
from metatrie.proto.index import Load, ReplicaRef


def policy(name: str, **parameters: object) -> Policy:
    return make_policy(name, parameters, random.Random(5))


def candidate(
    name: str, *, reusable: int = 0, requests: int = 0, tokens: int = 0, kv: float | None = None
) -> Candidate:
    return Candidate(
        ref=ReplicaRef(name),
        matched_blocks=reusable // 16,
        reusable_tokens=reusable,
        tiers=(reusable // 16, 0, 0),
        reserved_requests=requests,
        reserved_prefills=requests,
        reserved_tokens=tokens,
        load=None if kv is None else Load(running=requests, kv_usage=kv),
    )


def prompt(*parts: int, blocks: int = 64, now: float = 0.0, session: str | None = None) -> RoutingRequest:
    tokens = [part * 100_000 + i for part in parts for i in range(blocks * 16)]
    return RoutingRequest(
        prompt_tokens=len(tokens), chain=Chain(none_hash("0"), 16, tokens), now=now, session=session
    )


def chosen(decided: Policy, fleet: list[Candidate], request: RoutingRequest) -> str:
    return decided.choose(fleet, request).candidate.ref.replica


ABC = [candidate(name) for name in "abc"]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_documents_formula_source_and_defaults(name: str) -> None:
    text = POLICIES[name].__doc__ or ""
    assert "Formula:" in text
    assert "Source:" in text
    assert "efault" in text or "No parameters" in text


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_explains_what_it_looked_at(name: str) -> None:
    explanation = policy(name).choose(ABC, prompt(1, session="s")).explain()
    assert all("cost" in one.terms for one in explanation.candidates)
    assert explanation.formula == POLICIES[name].formula


def test_random_draws_everybody_and_power_of_two_avoids_the_busiest() -> None:
    fleet = [candidate("busy", requests=9), candidate("b", requests=1), candidate("c")]
    draws = Counter(chosen(policy_, fleet, prompt(1)) for policy_ in [policy("random")] for _ in range(300))
    assert min(draws.values()) > 60
    pairs = Counter(chosen(policy_, fleet, prompt(1)) for policy_ in [policy("power_of_two")] for _ in range(300))
    assert "busy" not in pairs
    assert pairs["c"] > pairs["b"] > 0


def test_a_session_stays_and_leaves_only_with_its_replica() -> None:
    decided = policy("session_affinity")
    homes = {s: chosen(decided, ABC, prompt(1, session=s)) for s in map(str, range(60))}
    assert set(homes.values()) == set("abc")
    without_a = {s: chosen(decided, ABC[1:], prompt(1, session=s)) for s in homes}
    assert all(without_a[s] == home for s, home in homes.items() if home != "a")
    assert chosen(decided, [candidate("a", requests=3), candidate("b")], prompt(1)) == "b"


def test_sticky_follows_a_conversation_and_spreads_those_that_share_only_a_system_prompt() -> None:
    decided = policy("sticky", shared_branches=4)
    loads: Counter[str] = Counter()
    for user in range(40):
        fleet = [candidate(n, reusable=1024 if n == "a" else 0, tokens=loads[n]) for n in "abc"]
        loads[chosen(decided, fleet, prompt(1, 2 + user))] += 1024
    assert max(loads.values()) < 25 * 1024
    held = [candidate("a", reusable=2048, tokens=90_000), candidate("b", reusable=1024)]
    assert chosen(decided, held, prompt(1, 2)) == "a"


@pytest.mark.parametrize("name", ["ray_serve", "sglang_gateway", "approximate_score"])
def test_history_stands_in_for_an_index(name: str) -> None:
    decided = policy(name)
    first = chosen(decided, ABC, prompt(1, 2))
    assert {chosen(decided, ABC, prompt(1, 2)) for _ in range(5)} == {first}
    # What the index says does not matter to it.
    other = next(n for n in "abc" if n != first)
    fleet = [candidate(n, reusable=2048 if n == other else 0) for n in "abc"]
    assert chosen(decided, fleet, prompt(1, 2)) == first


def test_history_forgets_the_oldest() -> None:
    decided = policy("ray_serve", capacity_blocks=128)
    one = [candidate("a")]
    for part in (1, 2, 3):
        decided.choose(one, prompt(part))
    shares = []
    for part in (1, 2, 3):
        explanation = decided.choose(one, prompt(part), dry=True).explain()
        shares.append(explanation.candidates[0].terms["history_share"])
    assert shares == [0, 1, 1]


def test_ray_serve_gives_the_unknown_to_the_smallest_history_and_may_be_balanced() -> None:
    decided = policy("ray_serve")
    assert {chosen(decided, ABC, prompt(part)) for part in (1, 2, 3)} == set("abc")
    balanced = policy("ray_serve", imbalanced_threshold=5.0)
    home = chosen(balanced, ABC, prompt(1))
    skewed = [candidate(n, requests=20 if n == home else 0) for n in "abc"]
    assert chosen(balanced, skewed, prompt(1)) != home


def test_the_gateway_switches_affinity_off_for_all_when_imbalanced() -> None:
    decided = policy("sglang_gateway")
    home = chosen(decided, ABC, prompt(1))
    for pending, expected in ((64, True), (65, False)):
        fleet = [candidate(n, requests=pending if n == home else 0) for n in "abc"]
        assert (chosen(decided, fleet, prompt(1)) == home) is expected


def test_weighted_scores_add_prefix_queue_and_memory() -> None:
    fleet = [candidate("a", reusable=1024, requests=10, kv=0.9), candidate("b", requests=0, kv=0.1)]
    # 3·1 + 2·0 + 2·0.1 = 3.2 against 0 + 2·1 + 2·0.9 = 3.8
    assert chosen(policy("weighted_score"), fleet, prompt(1)) == "b"
    assert chosen(policy("weighted_score", prefix_weight=4.0), fleet, prompt(1)) == "a"


def test_block_cost_counts_blocks_to_compute_and_to_decode_with() -> None:
    # 64 blocks to compute against 40 pending and none to compute: its own sequence counts on both.
    fleet = [candidate("holder", reusable=1024, requests=1), candidate("idle")]
    assert chosen(policy("block_cost", decode_blocks_per_request=65.0), fleet, prompt(1)) == "idle"
    assert chosen(policy("block_cost", decode_blocks_per_request=63.0), fleet, prompt(1)) == "holder"
    assert (
        chosen(policy("block_cost", decode_blocks_per_request=65.0, prefill_scale=4.0), fleet, prompt(1)) == "holder"
    )


def test_a_prefix_has_two_homes_and_takes_the_other_one_past_the_objective() -> None:
    decided = policy("dual_hash", objective_s=1.0)
    fleet = [candidate(n) for n in "abcdefgh"]
    homes = {chosen(decided, fleet, prompt(7, 8 + i)) for i in range(8)}
    assert len(homes) == 2
    home, other = sorted(homes)
    loaded = [candidate(n, reusable=2000 if n == home else 0, tokens=5_000 if n == home else 0) for n in "abcdefgh"]
    assert chosen(decided, loaded, prompt(7, 8)) == home
    late = [candidate(n, reusable=2000 if n == home else 0, tokens=20_000 if n == home else 0) for n in "abcdefgh"]
    assert chosen(decided, late, prompt(7, 8)) == other


def test_exploits_where_most_is_cached_and_explores_otherwise() -> None:
    decided = policy("exploit_explore")
    most = [candidate("holder", reusable=1600), candidate("idle")]
    assert chosen(decided, most, prompt(1, 2)) == "holder"
    # Two thirds missing: the load it was given before counts, and the idle one is cheaper.
    for _ in range(20):
        decided.choose([candidate("holder", reusable=600)], prompt(1, 2))
    assert chosen(decided, [candidate("holder", reusable=600), candidate("idle")], prompt(1, 2)) == "idle"
    # Load is forgotten with its window.
    later = prompt(1, 2, now=1_000.0)
    assert chosen(decided, [candidate("holder", reusable=600), candidate("idle")], later) == "holder"
