"""The worked examples, to the digit."""

from __future__ import annotations

import pytest
from metatrie.indexer.policies import DEFAULT_POLICY
from metatrie.scripts.simulate.examples import (
    BURST,
    FROZEN,
    conversation,
    cross_tenant,
    families,
    pile_up,
    universal,
)


def test_a_conversation_of_five_turns() -> None:
    talk = conversation()
    assert talk.inputs == (400, 700, 1000, 1400, 1700)
    assert talk.ideal == (0, 500, 800, 1150, 1500)
    assert (sum(talk.ideal), sum(talk.inputs)) == (3950, 5200)
    assert round(talk.ideal_share, 4) == 0.7596
    assert talk.reused == (0, 496, 784, 1136, 1488)
    assert (sum(talk.reused), talk.fresh) == (3904, 1296)


def test_the_frozen_trace() -> None:
    assert " ".join(FROZEN) == "A A B A C A B D A A C B A D A B C A B A"
    robin, affinity = families("round_robin"), families("affinity_only")
    hybrid = families("hybrid", max_skew=1)
    assert (robin.reused, robin.loads) == (10_000, (7, 7, 6))
    assert (affinity.reused, affinity.loads) == (13_800, (10, 5, 5))
    assert (hybrid.reused, hybrid.loads, hybrid.skew) == (12_000, (7, 7, 6), 2)


@pytest.mark.parametrize(
    ("capacity", "trace", "expected"),
    [
        # reused, evictions, queue penalty by max_skew 0, 1, 2
        (2, FROZEN, [(11_400, 1, 0), (12_000, 0, 3), (12_800, 0, 14)]),
        (1, FROZEN, [(6_800, 10, 0), (9_600, 7, 4), (9_400, 7, 13)]),
        (2, FROZEN + BURST, [(17_400, 4, 0), (18_000, 3, 5), (20_000, 2, 18)]),
    ],
)
def test_its_sweeps(capacity: int, trace: str, expected: list[tuple[int, int, int]]) -> None:
    found = [families("hybrid", trace, capacity=capacity, max_skew=skew) for skew in (0, 1, 2)]
    assert [(p.reused, p.evictions, p.penalty) for p in found] == expected
    assert all(p.skew <= skew + 1 for skew, p in enumerate(found))


def test_a_universal_prefix_costs_one_computation_per_replica_and_nothing_after() -> None:
    spread, held = universal("round_robin"), universal("affinity_only")
    assert (spread.hits, held.hits) == (45, 49)
    assert held.reused - spread.reused == 800
    assert universal("round_robin", requests=100).hits - spread.hits == 50
    assert universal("affinity_only", requests=100).hits - held.hits == 50


def test_tenants_share_unsalted_prefixes_and_no_others() -> None:
    assert cross_tenant(salted=False)
    assert not cross_tenant(salted=True)


@pytest.mark.parametrize(("blocks", "most"), [(64, 30), (512, 40), (2048, 75)])
def test_a_burst_on_one_hot_prefix_does_not_pile_up(blocks: int, most: int) -> None:
    assert pile_up(DEFAULT_POLICY, blocks) <= most
    assert pile_up("affinity_only", blocks) == 200
