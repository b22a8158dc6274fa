"""`POST /v1/route`, reservations and feedback over HTTP."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
from metatrie.indexer.load import LocalReservations
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.models import ModelConfig
from metatrie.indexer.policies import POLICIES
from metatrie.indexer.router import RouterConfig
from metatrie.proto.errors import ConfigError
from metatrie.proto.hashing import Namespace
from metatrie.proto.index import Load, ReplicaStatus

if TYPE_CHECKING:
    from .conftest import Api, Hold, ServeApi

TOKENS = list(range(1000, 1100))


async def test_the_holder_is_chosen_and_its_load_reserved(api: Api, hold: Hold) -> None:
    await hold("holder", TOKENS, blocks=4, url="http://10.0.0.1:8000")
    await hold("other")
    routed = await api.route(token_ids=TOKENS, max_output_tokens=64, priority=-1)
    reservation = routed.pop("reservation")
    assert len(routed.pop("decision")) == 16
    assert routed == {
        "model": "m",
        "replica": "holder",
        "dp_rank": 0,
        "url": "http://10.0.0.1:8000",
        "block_size": 16,
        "prompt_tokens": 100,
        "matched_blocks": 4,
        "reusable_tokens": 64,
        "state": "exact",
        "index": "ok",
        "policy": "priced_delay",
        "reason": "cheapest",
    }
    listed = (await api.call("GET", "/v1/replicas?model=m")).json["replicas"]
    reserved = {r["replica"]: (r["load"]["reserved_requests"], r["load"]["reserved_tokens"]) for r in listed}
    assert reserved == {"holder": (1, 36), "other": (0, 0)}
    assert (await api.call("DELETE", f"/v1/reservations/{reservation}")).status == 204
    again = await api.call("DELETE", f"/v1/reservations/{reservation}")
    assert (again.status, again.json["field"]) == (404, "id")
    assert (await api.metrics())["metatrie_router_reservations"] == 0


async def test_a_burst_on_one_prefix_spreads_by_the_configured_skew(
    store: MemoryStore, serve_api: ServeApi, hold: Hold
) -> None:
    api = await serve_api(store, RouterConfig(policy="hybrid", policies={"hybrid": {"max_skew": 2}}))
    for name in ("holder", "a", "b"):
        await hold(name, TOKENS if name == "holder" else ())
    chosen = Counter([(await api.route(token_ids=TOKENS))["replica"] for _ in range(30)])
    assert sum(chosen.values()) == 30
    assert max(chosen.values()) - min(chosen.values()) <= 3
    assert chosen["holder"] == max(chosen.values())


async def test_a_request_may_name_its_policy(api: Api, hold: Hold) -> None:
    for name in "abc":
        await hold(name, TOKENS if name == "c" else ())
    other = list(range(2000, 2100))
    turns = [(await api.route(token_ids=other, policy="round_robin"))["replica"] for _ in range(4)]
    assert turns == ["a", "b", "c", "a"]
    routed = await api.route(token_ids=TOKENS, policy="affinity_only")
    assert (routed["replica"], routed["policy"]) == ("c", "affinity_only")
    metrics = await api.metrics()
    assert metrics['metatrie_router_decisions_total{policy="round_robin",reason="turn"}'] == 4
    assert metrics['metatrie_router_decisions_total{policy="affinity_only",reason="deepest"}'] == 1


async def test_turns_are_taken_per_model(api: Api, hold: Hold) -> None:
    for name in "ab":
        await hold(name)
        await hold(name, namespace=Namespace(model="n"))
    body = {"token_ids": TOKENS, "policy": "round_robin"}
    turns = [(await api.route(**{**body, "model": model}))["replica"] for model in "mnmn"]
    assert turns == ["a", "a", "b", "b"]


async def test_unknown_policies_are_refused_with_the_choices(api: Api, hold: Hold) -> None:
    await hold("r")
    answer = await api.call("POST", "/v1/route", {"model": "m", "token_ids": TOKENS, "policy": "best"})
    assert (answer.status, answer.json["field"]) == (400, "policy")
    assert all(name in answer.json["remedy"] for name in POLICIES)


async def test_an_explanation_is_given_on_request_only(api: Api, hold: Hold) -> None:
    await hold("holder", TOKENS)
    await hold("other")
    explanation = (await api.route(token_ids=TOKENS, explain=True))["explanation"]
    assert "explanation" not in await api.route(token_ids=TOKENS)
    assert explanation["policy"] == "priced_delay"
    assert explanation["alternative"] == "other/0"
    assert [(c["replica"], c["terms"]["reusable_tokens"]) for c in explanation["candidates"]] == [
        ("holder", 96),
        ("other", 0),
    ]


async def test_engine_reported_load_counts(api: Api, hold: Hold) -> None:
    await hold("busy", TOKENS, status=ReplicaStatus(load=Load(running=20, waiting=5, kv_usage=0.5)))
    await hold("idle", status=ReplicaStatus(load=Load()))
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["reason"]) == ("idle", "cheapest")
    (busy, idle) = (await api.call("GET", "/v1/replicas")).json["replicas"]
    assert (busy["load"]["running"], busy["load"]["waiting"], busy["load"]["kv_usage"]) == (20, 5, 0.5)
    assert idle["load"]["running"] == 0


async def test_only_named_replicas_are_candidates(api: Api, hold: Hold) -> None:
    await hold("a", TOKENS)
    await hold("b")
    assert (await api.route(token_ids=TOKENS, replicas=["b"]))["replica"] == "b"
    answer = await api.call("POST", "/v1/route", {"model": "m", "token_ids": TOKENS, "replicas": ["c"]})
    assert (answer.status, answer.json["field"]) == (503, "replicas")
    assert answer.headers["Retry-After"] == "1"


async def test_decode_only_replicas_are_no_candidates(api: Api, hold: Hold) -> None:
    await hold("decoder", TOKENS, role="decode")
    await hold("prefiller", role="prefill")
    assert (await api.route(token_ids=TOKENS))["replica"] == "prefiller"


async def test_replicas_of_both_namespaces_compete_by_tokens(api: Api, hold: Hold) -> None:
    await hold("small", TOKENS, blocks=4)
    await hold("large", TOKENS, namespace=Namespace(model="m", block_size=32))
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["block_size"], routed["reusable_tokens"]) == ("large", 32, 96)


async def test_a_stale_replica_is_the_last_resort_and_says_so(serve_api: ServeApi, hold: Hold) -> None:
    now = [0.0]
    store = MemoryStore(clock=lambda: now[0])
    api = await serve_api(store)
    await hold("gone", TOKENS, store=store, lease_s=1)
    await hold("lives", store=store, lease_s=3)
    assert (await api.route(token_ids=TOKENS))["replica"] == "gone"
    now[0] = 2
    for _ in range(4):
        routed = await api.route(token_ids=TOKENS, policy="round_robin")
        assert (routed["replica"], routed["state"]) == ("lives", "exact")
    now[0] = 4
    routed = await api.route(token_ids=TOKENS)
    assert (routed["state"], routed["cause"], routed["reusable_tokens"]) == ("stale", "lease_expired", 0)


async def test_degraded_replicas_are_candidates_like_others(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS, status=ReplicaStatus(state="degraded", cause="gap"))
    await hold("s")
    routed = await api.route(token_ids=TOKENS)
    assert (routed["replica"], routed["state"], routed["cause"]) == ("r", "degraded", "gap")


# Feedback


async def test_feedback_ends_the_prefill_and_compares_prediction_with_service(api: Api, hold: Hold) -> None:
    await hold("r", TOKENS, blocks=4)
    tails = TOKENS[64:], list(range(2000, 2036))
    over, under = [(await api.route(token_ids=TOKENS[:64] + tail))["reservation"] for tail in tails]
    answer = await api.call("POST", "/v1/feedback", {"reservation": over, "cached_tokens": 16, "usage": {}})
    expected = {"reservation": over, "predicted_tokens": 64, "served_tokens": 16, "freed": False}
    assert answer.json == {**expected, "outcome": "stale_index"}
    (replica,) = (await api.call("GET", "/v1/replicas")).json["replicas"]
    assert (replica["load"]["reserved_requests"], replica["load"]["reserved_tokens"]) == (2, 36)

    body = {"reservation": under, "cached_tokens": 80, "finished": True}
    assert (await api.call("POST", "/v1/feedback", body)).json["freed"]
    assert (await api.call("POST", "/v1/feedback", body)).status == 404
    (replica,) = (await api.call("GET", "/v1/replicas")).json["replicas"]
    assert (replica["load"]["reserved_requests"], replica["load"]["reserved_tokens"]) == (1, 0)

    # A second report about the first request ends it, and is not counted again.
    assert (await api.call("POST", "/v1/feedback", {**body, "reservation": over})).json["freed"]
    metrics = await api.metrics()
    names = ("feedbacks", "predicted_tokens", "served_tokens", "overpredicted_tokens", "underpredicted_tokens")
    assert [metrics[f"metatrie_router_{name}_total"] for name in names] == [2, 128, 96, 48, 16]
    assert metrics["metatrie_router_reservations"] == 0


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"reservation": "nope", "cached_tokens": 1}, 404, "reservation"),
        ({"reservation": "x" * 65, "cached_tokens": 1}, 400, "reservation"),
        ({"cached_tokens": 1}, 400, "reservation"),
        ({"reservation": "x"}, 400, "cached_tokens"),
        ({"reservation": "x", "cached_tokens": -1}, 400, "cached_tokens"),
        ({"reservation": "x", "cached_tokens": 1, "finished": "yes"}, 400, "finished"),
    ],
)
async def test_feedback_is_checked(api: Api, body: object, status: int, field: str) -> None:
    answer = await api.call("POST", "/v1/feedback", body)
    assert (answer.status, answer.json["field"]) == (status, field)
    assert answer.json["remedy"]


async def test_reservations_expire_as_configured(store: MemoryStore, serve_api: ServeApi, hold: Hold) -> None:
    now = [0.0]
    api = await serve_api(store, reservations=LocalReservations(ttl_s=10, clock=lambda: now[0]))
    await hold("r", TOKENS)
    reservation = (await api.route(token_ids=TOKENS))["reservation"]
    now[0] = 10
    assert (await api.call("DELETE", f"/v1/reservations/{reservation}")).status == 404
    metrics = await api.metrics()
    assert metrics["metatrie_router_reservations"] == 0
    assert metrics["metatrie_router_reservations_expired_total"] == 1


# Configuration


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"port": 70000}, "port"),
        ({"policy": "best"}, "policy"),
        ({"policies": {"hybrid": {"skew": 1}}}, "policies.hybrid.skew"),
        ({"policies": {"hybrid": {"max_skew": -1}}}, "policies.hybrid.max_skew"),
        ({"policies": {"best": {}}}, "policies.best"),
        ({"poll_interval_s": 0}, "poll_interval_s"),
        ({"reservation_ttl_s": 0.5}, "reservation_ttl_s"),
        ({"max_body_bytes": 1}, "max_body_bytes"),
    ],
)
def test_a_wrong_setting_is_named_on_construction(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RouterConfig(**settings)
    assert refused.value.setting == named


OWN = RouterConfig(
    policy="least_loaded",
    policies={"hybrid": {"max_skew": 2}},
    models={
        "m": ModelConfig(policy={"name": "affinity_only"}, aliases=("alias",)),
        "h": ModelConfig(policy={"name": "hybrid"}),
        "k": ModelConfig(policy={"name": "hybrid", "max_skew": 5}),
        "l": ModelConfig(),
    },
)


async def test_a_model_may_have_a_policy_of_its_own(serve_api: ServeApi, store: MemoryStore, hold: Hold) -> None:
    api = await serve_api(store, OWN)
    await hold("a", TOKENS)
    assert [(await api.route(token_ids=TOKENS, model=name))["policy"] for name in ("m", "alias")] == [
        "affinity_only",
        "affinity_only",
    ]
    assert (await api.route(token_ids=TOKENS, policy="round_robin"))["policy"] == "round_robin"
    listed = (await api.call("GET", "/v1/policies")).json["policies"]
    assert [(p["model"], p["policy"], p["parameters"]) for p in listed] == [
        ("h", "hybrid", {"max_skew": 2}),
        ("k", "hybrid", {"max_skew": 5}),
        ("l", "least_loaded", {}),
        ("m", "affinity_only", {}),
    ]
    assert listed[0]["formula"] == POLICIES["hybrid"].formula
    assert (await api.route(token_ids=TOKENS, explain=True))["explanation"]["policy"] == "affinity_only"


@pytest.mark.parametrize(
    ("policy", "setting", "remedy"),
    [
        ({"name": "best"}, "models.m.policy", "hybrid"),
        ({"name": "hybrid", "skew": 1}, "models.m.policy.skew", "max_skew"),
        ({"name": "hybrid", "max_skew": -1}, "models.m.policy.max_skew", "hybrid"),
        ({"max_skew": 1}, "models.m.policy.max_skew", "base_weight"),
    ],
)
def test_a_models_policy_that_does_not_fit_is_refused_by_name(
    policy: dict[str, str | int | float], setting: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        RouterConfig(models={"m": ModelConfig(policy=policy)})
    assert refused.value.setting == setting
    assert remedy in str(refused.value)
