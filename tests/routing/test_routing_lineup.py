"""Candidates in columns: a policy sees what fleet, index, placements and reservations say of each replica."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.lineup import Lineup
from metatrie.indexer.load import Learned, LocalReservations, PerReplica
from metatrie.indexer.placement import Placements
from metatrie.indexer.policies import POLICIES, Candidate, Candidates, RoutingRequest, make_policy
from metatrie.proto.hashing import Chain, none_hash
from metatrie.proto.index import (
    Depth,
    Incarnation,
    Load,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    ReplicaView,
)

SIZE, BLOCKS = 16, 20
CHAIN = Chain(none_hash("0"), SIZE, list(range(SIZE * BLOCKS)))
REPLICA = st.fixed_dictionaries(
    {
        "live": st.booleans(),
        "role": st.sampled_from(["both", "prefill", "decode"]),
        "state": st.sampled_from(["exact", "degraded"]),
        "gpu": st.integers(0, 12),
        "cpu": st.integers(0, 8),
        "sent": st.integers(0, BLOCKS),
        "load": st.none() | st.builds(Load, running=st.integers(0, 5), waiting=st.integers(0, 5)),
        "reserved": st.lists(st.tuples(st.integers(0, 900), st.booleans()), max_size=3),
        "served": st.booleans(),
    }
)


async def lined_up(replicas: list[dict[str, object]]) -> tuple[Candidates, list[Candidate]]:
    """What a lineup makes of such a fleet, and the same put together by hand."""
    views, expected = [], []
    depths: dict[Incarnation, Depth] = {}
    reservations, placements, learned = LocalReservations(), Placements(), Learned()
    for i, r in enumerate(replicas):
        ref, incarnation = ReplicaRef(f"r{i:02}"), Incarnation(100 + i)
        spec = ReplicaSpec(ref=ref, engine="vllm", role=str(r["role"]), url=f"http://r{i}")
        status = ReplicaStatus(state=r["state"], cause="why" if r["state"] != "exact" else "", load=r["load"])  # type: ignore[arg-type]
        views.append(ReplicaView(spec=spec, incarnation=incarnation, live=bool(r["live"]), status=status))
        gpu, cpu = int(r["gpu"]), int(r["cpu"])  # type: ignore[call-overload]
        if gpu + cpu:
            depths[incarnation] = Depth(gpu + cpu, (gpu, cpu, 0))
        sent = int(r["sent"])  # type: ignore[call-overload]
        if sent > gpu + cpu:
            placements.sent(ref.replica, incarnation, CHAIN.keys(sent)[:sent], gpu + cpu, 0.0)
        requests = prefills = tokens = 0
        for uncached, computed in r["reserved"]:  # type: ignore[attr-defined]
            made = await reservations.add(ref, predicted_tokens=0, uncached_tokens=uncached)
            requests += 1
            if computed:
                await reservations.end_prefill(made.id)
            else:
                prefills, tokens = prefills + 1, tokens + uncached
        if r["served"]:
            learned.routed(ref.replica, ref, tokens=5000 + i, decoding=1, now=0.0)
            learned.first_token(ref.replica, 1.0)
        if r["live"] and r["role"] != "decode":
            expected.append(
                Candidate(
                    ref=ref,
                    url=spec.url,
                    matched_blocks=gpu + cpu,
                    reusable_tokens=min(max(gpu + cpu, sent), BLOCKS - 1) * SIZE,
                    tiers=(gpu, cpu, 0),
                    block_size=SIZE,
                    state=status.state,
                    cause=status.cause,
                    reserved_requests=requests,
                    reserved_prefills=prefills,
                    reserved_tokens=tokens,
                    load=status.load,
                    speed=learned.speed(ref),
                )
            )
    found = Lineup(views, SIZE).candidates(
        depths, CHAIN, SIZE * BLOCKS, placements=placements, reservations=reservations, learned=learned
    )
    return found, expected


@given(st.lists(REPLICA, max_size=6))
async def test_a_lineup_says_of_each_replica_what_its_sources_say(replicas: list[dict[str, object]]) -> None:
    found, expected = await lined_up(replicas)
    assert list(found) == expected
    assert [c.pending for c in expected] == list(found.pending)


@given(st.lists(REPLICA, min_size=1, max_size=6), st.sampled_from(sorted(POLICIES)), st.integers(0, 9))
async def test_rows_and_columns_decide_alike(replicas: list[dict[str, object]], name: str, seed: int) -> None:
    columns, rows = await lined_up(replicas)
    if not rows:
        return
    request = RoutingRequest(prompt_tokens=SIZE * BLOCKS, chain=CHAIN, session="s")
    one = make_policy(name, {}, random.Random(seed)).choose(columns, request)
    two = make_policy(name, {}, random.Random(seed)).choose(rows, request)
    assert (one.candidate, one.reason, one.explain()) == (two.candidate, two.reason, two.explain())


async def test_an_explanation_is_of_the_moment_of_the_decision() -> None:
    reservations = LocalReservations()
    views = [
        ReplicaView(
            spec=ReplicaSpec(ref=ReplicaRef(name), engine="vllm"),
            incarnation=Incarnation(i),
            live=True,
            status=ReplicaStatus(),
        )
        for i, name in enumerate("ab")
    ]
    policy = make_policy("priced_delay", {}, random.Random(0))
    lineup, placements, learned = Lineup(views, SIZE), Placements(), Learned()

    def decide(now: float):  # type: ignore[no-untyped-def]
        candidates = lineup.candidates(
            {}, CHAIN, SIZE * BLOCKS, placements=placements, reservations=reservations, learned=learned
        )
        return policy.choose(candidates, RoutingRequest(prompt_tokens=SIZE * BLOCKS, chain=CHAIN, now=now))

    first = decide(0.0)
    before = first.explain()
    for _ in range(3):
        await reservations.add(ReplicaRef("a"), predicted_tokens=0, uncached_tokens=1000)
    learned.routed("x", ReplicaRef("a"), tokens=5000, decoding=1, now=0.0)
    learned.first_token("x", 9.0)
    assert decide(60.0).candidate.ref == ReplicaRef("b")
    assert first.explain() == before


async def test_a_renewed_lease_leaves_columns_as_they_are_laid_out() -> None:
    def lineup(names: str, lag_s: float, before: Lineup | None) -> Lineup:
        specs = [ReplicaSpec(ref=ReplicaRef(name), engine="vllm") for name in names]
        status = ReplicaStatus(lag_s=lag_s)
        views = [
            ReplicaView(spec=spec, incarnation=Incarnation(i), live=True, status=status)
            for i, spec in enumerate(specs)
        ]
        return Lineup(views, SIZE, before=before)

    def refs(one: Lineup) -> object:
        return one.candidates(
            {}, CHAIN, SIZE, placements=Placements(), reservations=LocalReservations(), learned=Learned()
        ).refs

    first = lineup("ab", 0.0, None)
    renewed = lineup("ab", 1.0, first)
    grown = lineup("abc", 1.0, renewed)
    assert refs(renewed) is refs(first)
    assert refs(grown) == [ReplicaRef(name) for name in "abc"]


@given(st.lists(st.tuples(st.sampled_from("sdo"), st.integers(0, 4), st.integers(0, 9)), max_size=40))
def test_rows_per_replica_are_the_same_alone_and_in_columns(steps: list[tuple[str, int, int]]) -> None:
    refs = [ReplicaRef(f"r{i}") for i in range(5)]
    fleets = [refs[:4], refs[:1:-1], *([ref] for ref in refs)]
    rows, model, fleet = PerReplica((0, 0), layouts=3), dict.fromkeys(refs, (0, 0)), fleets[0]
    given_away = []
    for step, which, value in steps:
        match step:
            case "s":
                rows[refs[which]] = model[refs[which]] = value % 3, value
            case "d":
                rows.drop(refs[which])
                model[refs[which]] = 0, 0
            case _:
                fleet = fleets[value % len(fleets)]
        now = rows.columns(fleet)
        assert now == tuple(map(list, zip(*(model[ref] for ref in fleet), strict=True)))
        given_away.append((now, [list(column) for column in now]))
        assert [rows[ref] for ref in refs] == list(model.values())
    assert all(list(now) == then for now, then in given_away)
