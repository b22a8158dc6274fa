"""Every promise of proto/index.py, once per backend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from metatrie.proto.errors import Superseded
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.index import (
    MAX_INCARNATION,
    Depth,
    Incarnation,
    Load,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    Tier,
)

A = ReplicaRef("a")
GPU, CPU, STORAGE = (1 << tier for tier in Tier)
OK = ReplicaStatus()
LONG = 60.0
SHORT = 0.02
"""A lease to be waited out; nothing is ever asserted to happen within it."""


# Registration and fencing


async def test_a_claim_that_activates_counts_at_once(harness: Any) -> None:
    claim = await harness.claim()
    (view,) = (await harness.index.fleet()).replicas
    assert claim.previous is None
    assert view.spec == ReplicaSpec(ref=A, engine="vllm", url="http://a")
    assert (view.incarnation, view.live, view.state, view.cause) == (claim.incarnation, True, "exact", "")


async def test_a_claim_counts_only_once_activated(harness: Any) -> None:
    claim = await harness.claim(activate=False)
    prompt = harness.prompt(3)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    (view,) = (await harness.index.fleet()).replicas
    assert (view.incarnation, view.live, view.state, view.cause) == (None, True, "stale", "not_activated")
    assert await harness.depths(prompt) == {}
    await harness.index.activate(A, owner="owner", incarnation=claim.incarnation)
    assert await harness.depths(prompt) == {claim.incarnation: 3}


async def test_incarnations_are_never_reused(harness: Any) -> None:
    seen = []
    for name in "abab":
        claim = await harness.claim(name)
        seen.append(claim.incarnation)
        await harness.index.release(ReplicaRef(name), owner="owner")
    assert seen == sorted(set(seen))
    assert 0 < seen[0] <= seen[-1] <= MAX_INCARNATION


async def test_a_restart_fences_the_old_life_at_once(harness: Any) -> None:
    prompt = harness.prompt(40)
    first = await harness.claim()
    await harness.index.write(first.incarnation, 1, prompt.writes())
    assert await harness.depths(prompt) == {first.incarnation: 40}
    second = await harness.claim()
    assert second.previous == first.incarnation
    assert await harness.depths(prompt) == {}
    await harness.index.write(second.incarnation, 1, prompt.writes(0, 1))
    assert await harness.depths(prompt) == {second.incarnation: 1}


async def test_the_old_life_counts_until_a_rebuilt_one_is_activated(harness: Any) -> None:
    prompt = harness.prompt(5)
    old = await harness.claim()
    await harness.index.write(old.incarnation, 1, prompt.writes())
    new = await harness.claim(activate=False)
    assert new.previous == old.incarnation
    await harness.index.write(new.incarnation, 1, prompt.writes(0, 2))
    assert await harness.depths(prompt) == {old.incarnation: 5}
    await harness.index.activate(A, owner="owner", incarnation=new.incarnation)
    assert await harness.depths(prompt) == {new.incarnation: 2}


async def test_a_running_lease_keeps_other_owners_out(harness: Any) -> None:
    claim = await harness.claim(owner="first")
    for activate in (True, False):
        with pytest.raises(Superseded):
            await harness.claim(owner="second", activate=activate)
    await harness.index.renew(A, owner="first", incarnation=claim.incarnation, status=OK, lease_s=LONG)
    assert list((await harness.index.fleet()).live()) == [claim.incarnation]


async def test_who_is_kept_out_learns_for_how_long(harness: Any) -> None:
    await harness.claim(owner="first", lease_s=LONG)
    with pytest.raises(Superseded) as caught:
        await harness.claim(owner="second")
    assert LONG / 2 < caught.value.retry_s <= LONG


async def test_a_store_that_keeps_everything_stays_witness_to_it(harness: Any) -> None:
    before = await harness.index.witness()
    claim = await harness.claim()
    prompt = harness.prompt(40)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    await harness.index.write(claim.incarnation, 2, prompt.writes(tiers=0))
    await harness.claim("b")
    await harness.index.release(A, owner="owner")
    while (await harness.index.sweep(pages=100, grace_s=0)).pages:
        pass
    assert await harness.index.witness() == before


async def test_a_takeover_after_the_lease_supersedes_the_old_owner_in_every_way(harness: Any) -> None:
    index = harness.index
    old = await harness.claim(owner="first", lease_s=SHORT)
    await harness.lapsed()
    new = await harness.claim(owner="second", activate=False)
    assert new.previous == old.incarnation
    with pytest.raises(Superseded):
        await index.renew(A, owner="first", incarnation=old.incarnation, status=OK, lease_s=LONG)
    with pytest.raises(Superseded):
        await index.activate(A, owner="first", incarnation=old.incarnation)
    with pytest.raises(Superseded):
        await index.activate(A, owner="first", incarnation=new.incarnation)
    with pytest.raises(Superseded):
        await harness.claim(owner="first")
    assert not await index.release(A, owner="first")
    await index.activate(A, owner="second", incarnation=new.incarnation)
    assert list((await index.fleet()).live()) == [new.incarnation]


async def test_a_zombies_late_writes_never_count(harness: Any) -> None:
    prompt = harness.prompt(64)
    old = await harness.claim(owner="zombie", lease_s=SHORT)
    await harness.index.write(old.incarnation, 1, prompt.writes(0, 10))
    await harness.lapsed()
    new = await harness.claim(owner="heir")
    await harness.index.write(old.incarnation, 2, prompt.writes())
    await harness.index.write(new.incarnation, 1, prompt.writes(0, 4))
    assert await harness.depths(prompt) == {new.incarnation: 4}
    assert len(await harness.index.held(old.incarnation)) == 64


async def test_activation_is_a_compare_and_set(harness: Any) -> None:
    index = harness.index
    first = await harness.claim(activate=False)
    second = await harness.claim(activate=False)
    with pytest.raises(Superseded):
        await index.activate(A, owner="owner", incarnation=first.incarnation)
    with pytest.raises(Superseded):
        await index.activate(A, owner="other", incarnation=second.incarnation)
    with pytest.raises(Superseded):
        await index.activate(ReplicaRef("nobody"), owner="owner", incarnation=second.incarnation)
    for _ in range(2):
        await index.activate(A, owner="owner", incarnation=second.incarnation)
    assert list((await index.fleet()).live()) == [second.incarnation]


# Leases and status


async def test_without_a_lease_nothing_of_the_replica_counts(harness: Any) -> None:
    prompt = harness.prompt(3)
    claim = await harness.claim(lease_s=SHORT)
    other = await harness.claim("b")
    for incarnation in (claim.incarnation, other.incarnation):
        await harness.index.write(incarnation, 1, prompt.writes())
    await harness.lapsed()
    match = await harness.index.match(prompt.chain())
    assert set(match.depths) == {other.incarnation}
    assert [(r.live, r.state, r.cause) for r in match.fleet.replicas] == [
        (False, "stale", "lease_expired"),
        (True, "exact", ""),
    ]


async def test_a_query_notices_by_itself_that_a_lease_ran_out(harness: Any) -> None:
    prompt = harness.prompt(3)
    claim = await harness.claim(lease_s=SHORT)
    await harness.index.write(claim.incarnation, 1, prompt.writes())

    async def gone() -> bool:
        return await harness.depths(prompt) == {}

    await harness.until(gone)


async def test_renewing_extends_even_a_lapsed_lease(harness: Any) -> None:
    prompt = harness.prompt(3)
    claim = await harness.claim(lease_s=SHORT)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    await harness.lapsed()
    assert await harness.depths(prompt) == {}
    await harness.index.renew(A, owner="owner", incarnation=claim.incarnation, status=OK, lease_s=LONG)
    assert await harness.depths(prompt) == {claim.incarnation: 3}


async def test_a_renewal_publishes_status_and_load(harness: Any) -> None:
    claim = await harness.claim()
    status = ReplicaStatus(
        state="degraded", cause="gap", load=Load(running=3, waiting=1, kv_usage=0.5), blocks=7, detached=2, lag_s=0.25
    )
    await harness.index.match(harness.prompt(1).chain())
    await harness.index.renew(A, owner="owner", incarnation=claim.incarnation, status=status, lease_s=LONG)
    (view,) = (await harness.index.match(harness.prompt(1).chain())).fleet.replicas
    assert view.status == status
    assert (view.state, view.cause) == ("degraded", "gap")
    assert (await harness.index.fleet()).replicas == (view,)


async def test_a_new_life_starts_with_a_clean_status(harness: Any) -> None:
    claim = await harness.claim()
    bad = ReplicaStatus(state="degraded", cause="gap")
    await harness.index.renew(A, owner="owner", incarnation=claim.incarnation, status=bad, lease_s=LONG)
    await harness.claim(activate=False)
    assert [r.state for r in (await harness.index.fleet()).replicas] == ["degraded"]
    await harness.claim()
    assert [r.state for r in (await harness.index.fleet()).replicas] == ["exact"]


async def test_a_claim_being_rebuilt_can_renew_under_either_incarnation(harness: Any) -> None:
    old = await harness.claim()
    new = await harness.claim(activate=False)
    for incarnation in (old.incarnation, new.incarnation):
        await harness.index.renew(A, owner="owner", incarnation=incarnation, status=OK, lease_s=LONG)


@pytest.mark.parametrize("why", ["owner", "incarnation", "released", "tombstoned", "never registered"])
async def test_a_superseded_renewal_is_refused(harness: Any, why: str) -> None:
    index = harness.index
    claim = await harness.claim(lease_s=SHORT if why == "tombstoned" else LONG)
    ref, owner, incarnation = A, "owner", claim.incarnation
    match why:
        case "owner":
            owner = "other"
        case "incarnation":
            await harness.claim()
        case "released":
            await index.release(A, owner="owner")
        case "tombstoned":
            await harness.lapsed()
            await harness.until(lambda: _expires(harness))
        case "never registered":
            ref = ReplicaRef("b")
    with pytest.raises(Superseded):
        await index.renew(ref, owner=owner, incarnation=incarnation, status=OK, lease_s=LONG)


async def _expires(harness: Any) -> bool:
    return bool((await harness.index.sweep(pages=100, grace_s=0)).expired)


async def test_release_is_for_the_owner_or_an_operator(harness: Any) -> None:
    prompt = harness.prompt(3)
    claim = await harness.claim()
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    assert not await harness.index.release(A, owner="other")
    assert not await harness.index.release(ReplicaRef("b"), owner=None)
    assert await harness.depths(prompt) == {claim.incarnation: 3}
    assert await harness.index.release(A, owner=None)
    assert await harness.depths(prompt) == {}
    assert (await harness.index.fleet()).replicas == ()
    assert not await harness.index.release(A, owner="owner")
    again = await harness.claim()
    assert await harness.index.release(A, owner="owner")
    assert again.previous is None


async def test_the_fleet_is_ordered_and_ranks_are_replicas_of_their_own(harness: Any) -> None:
    claims = {
        (name, rank): await harness.claim(name, rank=rank)
        for name, rank in [("b", 0), ("a", 10), ("a", 2), ("ä", 0), ("B", 0)]
    }
    fleet = await harness.index.fleet()
    assert [(r.spec.ref.replica, r.spec.ref.dp_rank) for r in fleet.replicas] == sorted(claims)
    assert set(fleet.live()) == {c.incarnation for c in claims.values()}


# Matching


@pytest.mark.parametrize("held", [0, 1, 2, 31, 32, 33, 63, 64, 65, 100, 192, 193, 260])
async def test_depth_is_the_leading_blocks_held(harness: Any, held: int) -> None:
    claim = await harness.claim()
    prompt = harness.prompt(260)
    await harness.index.write(claim.incarnation, 1, prompt.writes(0, held))
    match = await harness.index.match(prompt.chain())
    assert match.depths == ({claim.incarnation: Depth(held, (held, 0, 0))} if held else {})


@pytest.mark.parametrize("asked", [1, 31, 32, 33, 64, 65, 97, 200])
async def test_a_prompt_shorter_than_what_is_held_matches_whole(harness: Any, asked: int) -> None:
    claim = await harness.claim()
    held = harness.prompt(230)
    await harness.index.write(claim.incarnation, 1, held.writes())
    assert await harness.depths(harness.prompt(asked, of=held, shared=asked)) == {claim.incarnation: asked}


async def test_replicas_leave_a_chain_where_they_stop_holding_it(harness: Any) -> None:
    prompt = harness.prompt(220)
    depths = {}
    for i, held in enumerate([0, 1, 30, 31, 32, 33, 63, 64, 65, 66, 128, 129, 200, 219, 220, 220]):
        incarnation = (await harness.claim(f"r{i}")).incarnation
        await harness.index.write(incarnation, 1, prompt.writes(0, held))
        if held:
            depths[incarnation] = held
    assert await harness.depths(prompt) == depths


@pytest.mark.parametrize("fork", [0, 1, 31, 32, 33, 70])
async def test_prompts_share_their_common_prefix_only(harness: Any, fork: int) -> None:
    one = harness.prompt(90)
    two = harness.prompt(90, of=one, shared=fork)
    first, second = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(first, 1, one.writes())
    await harness.index.write(second, 1, two.writes())
    shared = {first: fork, second: fork} if fork else {}
    assert await harness.depths(one) == {**shared, first: 90}
    assert await harness.depths(two) == {**shared, second: 90}


async def test_pages_are_anded(harness: Any) -> None:
    prompt = harness.prompt(128)
    hole, whole = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(hole, 1, prompt.writes(0, 32) + prompt.writes(64, 128))
    await harness.index.write(whole, 1, prompt.writes())
    assert await harness.depths(prompt) == {hole: 32, whole: 128}


async def test_a_chain_without_its_first_page_matches_nothing(harness: Any) -> None:
    prompt = harness.prompt(64)
    claim = await harness.claim()
    await harness.index.write(claim.incarnation, 1, prompt.writes(32, 64))
    assert await harness.depths(prompt) == {}


async def test_a_prompt_without_a_full_block_matches_nothing(harness: Any) -> None:
    claim = await harness.claim()
    match = await harness.index.match(Chain(harness.index.namespace.root, 4, [1, 2, 3]))
    assert match.depths == {}
    assert list(match.fleet.live()) == [claim.incarnation]


class _Watched(list[int]):
    """Tokens that remember how far somebody read."""

    furthest = 0

    def __getitem__(self, index: Any) -> Any:
        self.furthest = max(self.furthest, index.stop)
        return super().__getitem__(index)


@pytest.mark.parametrize("held", [0, 10, 64, 150, 500])
async def test_hashing_is_proportional_to_what_matched(harness: Any, held: int) -> None:
    claim = await harness.claim()
    prompt = harness.prompt(4000)
    await harness.index.write(claim.incarnation, 1, prompt.writes(0, held))
    tokens = _Watched(prompt.tokens)
    match = await harness.index.match(Chain(harness.index.namespace.root, 4, tokens))
    assert sum(d.blocks for d in match.depths.values()) == held
    assert held <= tokens.furthest / 4 <= 2 * held + 64


async def test_with_nobody_live_nothing_beyond_the_first_chunk_is_hashed(harness: Any) -> None:
    prompt = harness.prompt(1000)
    claim = await harness.claim(activate=False)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    tokens = _Watched(prompt.tokens)
    await harness.index.match(Chain(harness.index.namespace.root, 4, tokens))
    assert tokens.furthest / 4 <= 64


# Tiers


async def test_each_block_counts_in_its_fastest_tier(harness: Any) -> None:
    prompt = harness.prompt(70)
    one, two = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(
        one,
        1,
        prompt.writes(0, 10, GPU | CPU | STORAGE)
        + prompt.writes(10, 20, CPU)
        + prompt.writes(20, 50, CPU | STORAGE)
        + prompt.writes(50, 60, STORAGE)
        + prompt.writes(60, 65, GPU | STORAGE),
    )
    await harness.index.write(two, 1, prompt.writes(0, 40, CPU))
    match = await harness.index.match(prompt.chain())
    assert match.depths == {one: Depth(65, (15, 40, 10)), two: Depth(40, (0, 40, 0))}


async def test_a_block_is_held_until_its_last_tier_goes(harness: Any) -> None:
    prompt = harness.prompt(40)
    incarnation = (await harness.claim()).incarnation
    for version, (tiers, counts) in enumerate(
        [
            (GPU, (40, 0, 0)),
            (GPU | CPU, (40, 0, 0)),
            (CPU, (0, 40, 0)),
            (CPU | STORAGE, (0, 40, 0)),
            (STORAGE, (0, 0, 40)),
        ],
        start=1,
    ):
        await harness.index.write(incarnation, version, prompt.writes(tiers=tiers))
        match = await harness.index.match(prompt.chain())
        assert match.depths == {incarnation: Depth(40, counts)}
    await harness.index.write(incarnation, 9, prompt.writes(tiers=0))
    assert (await harness.index.match(prompt.chain())).depths == {}
    assert await harness.index.held(incarnation) == {}


async def test_tiers_mix_within_and_across_pages(harness: Any) -> None:
    prompt = harness.prompt(100)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 1, prompt.writes())
    await harness.index.write(incarnation, 2, prompt.writes(5, 6, CPU) + prompt.writes(64, 80, STORAGE))
    match = await harness.index.match(prompt.chain())
    assert match.depths == {incarnation: Depth(100, (83, 1, 16))}


# Writing


async def test_writing_is_idempotent(harness: Any) -> None:
    prompt = harness.prompt(50)
    incarnation = (await harness.claim()).incarnation
    for version in (1, 1, 2):
        await harness.index.write(incarnation, version, prompt.writes())
    assert await harness.depths(prompt) == {incarnation: 50}
    for version in (3, 3, 4):
        await harness.index.write(incarnation, version, prompt.writes(20, tiers=0))
    assert await harness.depths(prompt) == {incarnation: 20}
    assert await harness.index.held(incarnation) == dict.fromkeys(prompt.keys[:20], GPU)


async def test_an_older_version_is_ignored_within_a_page_only(harness: Any) -> None:
    prompt = harness.prompt(64)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 7, prompt.writes(0, 5))
    await harness.index.write(incarnation, 6, prompt.writes(0, 40))
    assert await harness.index.held(incarnation) == dict.fromkeys([*prompt.keys[:5], *prompt.keys[32:40]], GPU)
    await harness.index.write(incarnation, 6, prompt.writes(0, 5, tiers=0))
    await harness.index.write(incarnation, 7, prompt.writes(0, 6))
    assert await harness.depths(prompt) == {incarnation: 6}


async def test_an_older_write_cannot_bring_back_what_was_removed(harness: Any) -> None:
    prompt = harness.prompt(5)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 1, prompt.writes())
    await harness.index.write(incarnation, 3, prompt.writes(tiers=0))
    await harness.index.write(incarnation, 2, prompt.writes())
    assert await harness.index.held(incarnation) == {}
    await harness.index.write(incarnation, 4, prompt.writes())
    assert await harness.depths(prompt) == {incarnation: 5}


async def test_a_removal_of_nothing_outruns_an_older_write_too(harness: Any) -> None:
    prompt = harness.prompt(5)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 2, prompt.writes(tiers=0))
    await harness.index.write(incarnation, 1, prompt.writes())
    assert await harness.index.held(incarnation) == {}


async def test_versions_of_different_incarnations_are_independent(harness: Any) -> None:
    prompt = harness.prompt(5)
    one, two = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(one, 100, prompt.writes())
    await harness.index.write(two, 1, prompt.writes())
    assert await harness.depths(prompt) == {one: 5, two: 5}


async def test_removals_of_one_replica_leave_the_others(harness: Any) -> None:
    prompt = harness.prompt(40)
    incarnations = [(await harness.claim(f"r{i}")).incarnation for i in range(12)]
    for incarnation in incarnations:
        await harness.index.write(incarnation, 1, prompt.writes())
    for incarnation in incarnations[::2]:
        await harness.index.write(incarnation, 2, prompt.writes(tiers=0))
    assert await harness.depths(prompt) == dict.fromkeys(incarnations[1::2], 40)
    # Later holders take the freed places without inheriting anything.
    late = [(await harness.claim(f"late{i}")).incarnation for i in range(9)]
    for incarnation in late:
        await harness.index.write(incarnation, 1, prompt.writes(0, 35))
    assert await harness.depths(prompt) == {**dict.fromkeys(incarnations[1::2], 40), **dict.fromkeys(late, 35)}


async def test_a_batch_of_thousands_is_written_whole(harness: Any) -> None:
    prompts = [harness.prompt(30)]
    prompts += [harness.prompt(31, of=prompts[0], shared=20) for _ in range(40)]
    prompts.append(harness.prompt(2500))
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 1, [write for prompt in prompts for write in prompt.writes()])
    for prompt in prompts:
        assert await harness.depths(prompt) == {incarnation: len(prompt.keys)}
    assert set(await harness.index.held(incarnation)) == {key for prompt in prompts for key in prompt.keys}


async def test_writes_of_one_incarnation_may_overlap_in_time(harness: Any) -> None:
    incarnation = (await harness.claim()).incarnation
    prompts = [harness.prompt(40) for _ in range(20)]
    await asyncio.gather(
        *(harness.index.write(incarnation, i + 1, prompt.writes()) for i, prompt in enumerate(prompts))
    )
    await asyncio.gather(
        *(harness.index.write(incarnation, i + 100, p.writes(10, tiers=0)) for i, p in enumerate(prompts))
    )
    for prompt in prompts:
        assert await harness.depths(prompt) == {incarnation: 10}


async def test_an_empty_write_is_fine(harness: Any) -> None:
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 1, [])
    assert await harness.index.refresh(incarnation, 2, []) == 0


# Verifying


async def test_refreshing_what_is_right_changes_nothing(harness: Any) -> None:
    prompt = harness.prompt(75)
    incarnation = (await harness.claim()).incarnation
    writes = prompt.writes(0, 40) + prompt.writes(40, 75, CPU | STORAGE)
    await harness.index.write(incarnation, 1, writes)
    assert await harness.index.refresh(incarnation, 2, writes) == 0
    assert (await harness.index.match(prompt.chain())).depths == {incarnation: Depth(75, (40, 35, 0))}


async def test_refresh_writes_what_is_missing_and_clears_what_is_surplus(harness: Any) -> None:
    one = harness.prompt(64)
    two = harness.prompt(30, of=one, shared=10)
    incarnation, other = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(incarnation, 1, two.writes() + one.writes(0, 12))
    await harness.index.write(other, 1, two.writes())
    # Page one should hold the first prompt only: 20 missing, 20 surplus, and one in the wrong tier.
    wanted = one.writes(0, 5) + one.writes(5, 6, CPU) + one.writes(6, 64)
    assert await harness.index.refresh(incarnation, 2, wanted) == 20 + 20 + 1 + 32
    assert await harness.depths(one) == {incarnation: 64, other: 10}
    assert await harness.depths(two) == {incarnation: 10, other: 30}
    assert (await harness.index.held(incarnation))[one.keys[5]] == CPU
    assert await harness.index.refresh(incarnation, 3, wanted) == 0


async def test_refresh_leaves_pages_it_does_not_name(harness: Any) -> None:
    prompt = harness.prompt(64)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 1, prompt.writes())
    assert await harness.index.refresh(incarnation, 2, prompt.writes(0, 31)) == 1
    assert set(await harness.index.held(incarnation)) == {*prompt.keys[:31], *prompt.keys[32:]}


async def test_an_older_refresh_is_ignored(harness: Any) -> None:
    prompt = harness.prompt(10)
    incarnation = (await harness.claim()).incarnation
    await harness.index.write(incarnation, 5, prompt.writes())
    assert await harness.index.refresh(incarnation, 4, prompt.writes(0, 3)) == 0
    assert await harness.depths(prompt) == {incarnation: 10}


async def test_held_is_everything_of_one_incarnation(harness: Any) -> None:
    prompt = harness.prompt(300)
    one, two = (await harness.claim("a")).incarnation, (await harness.claim("b")).incarnation
    await harness.index.write(one, 1, prompt.writes(0, 150) + prompt.writes(150, 300, CPU | STORAGE))
    await harness.index.write(two, 1, prompt.writes(0, 20))
    assert await harness.index.held(one) == {
        **dict.fromkeys(prompt.keys[:150], GPU),
        **dict.fromkeys(prompt.keys[150:], CPU | STORAGE),
    }
    assert await harness.index.held(two) == dict.fromkeys(prompt.keys[:20], GPU)
    assert await harness.index.held(Incarnation(1 << 29)) == {}


# Sweeping


async def test_a_lapsed_replica_is_tombstoned_then_removed(harness: Any) -> None:
    index = harness.index
    await harness.claim("a", lease_s=SHORT)
    await harness.claim("b")
    await harness.lapsed()
    expired = []

    async def removed() -> bool:
        expired.extend((await index.sweep(pages=10, grace_s=0)).expired)
        return len((await index.fleet()).replicas) == 1

    await harness.until(removed)
    assert expired == [A, A]
    assert (await index.fleet()).replicas[0].spec.ref == ReplicaRef("b")


async def test_nothing_expires_within_the_grace(harness: Any) -> None:
    claim = await harness.claim(lease_s=SHORT)
    await harness.lapsed()
    assert (await harness.index.sweep(pages=10, grace_s=3600)).expired == ()
    await harness.index.renew(A, owner="owner", incarnation=claim.incarnation, status=OK, lease_s=LONG)
    assert list((await harness.index.fleet()).live()) == [claim.incarnation]


async def test_a_tombstoned_replica_can_be_claimed_anew(harness: Any) -> None:
    old = await harness.claim(owner="first", lease_s=SHORT)
    await harness.lapsed()
    await harness.until(lambda: _expires(harness))
    (view,) = (await harness.index.fleet()).replicas
    assert (view.live, view.state, view.cause) == (False, "stale", "lease_expired")
    with pytest.raises(Superseded):
        await harness.index.activate(A, owner="first", incarnation=old.incarnation)
    new = await harness.claim(owner="second")
    assert new.previous is None
    assert list((await harness.index.fleet()).live()) == [new.incarnation]


async def test_the_dead_are_reclaimed_in_bounded_steps(harness: Any) -> None:
    index = harness.index
    prompt = harness.prompt(320)
    old = await harness.claim()
    other = await harness.claim("b")
    await index.write(old.incarnation, 1, prompt.writes())
    await index.write(other.incarnation, 1, prompt.writes(0, 100))
    new = await harness.claim()
    await index.write(new.incarnation, 1, prompt.writes(0, 50))
    reports = [await index.sweep(pages=3, grace_s=LONG) for _ in range(5)]
    assert [(r.pages, r.incarnations, r.remaining) for r in reports] == [
        (3, 0, 1),
        (3, 0, 1),
        (3, 0, 1),
        (1, 1, 0),
        (0, 0, 0),
    ]
    assert await index.held(old.incarnation) == {}
    assert await harness.depths(prompt) == {other.incarnation: 100, new.incarnation: 50}


async def test_whatever_ends_a_life_leaves_it_to_the_sweeper(harness: Any) -> None:
    index = harness.index
    prompt = harness.prompt(40)
    dead = []
    for name in ("restarted", "released", "rebuilt", "abandoned", "lapsed"):
        claim = await harness.claim(name, activate=name != "abandoned", lease_s=SHORT if name == "lapsed" else LONG)
        await index.write(claim.incarnation, 1, prompt.writes())
        dead.append(claim.incarnation)
    await harness.claim("restarted")
    await index.release(ReplicaRef("released"), owner="owner")
    rebuilt = await harness.claim("rebuilt", activate=False)
    await index.activate(ReplicaRef("rebuilt"), owner="owner", incarnation=rebuilt.incarnation)
    await harness.claim("abandoned")
    await harness.lapsed("lapsed")
    await harness.until(lambda: _expires(harness))

    async def reclaimed() -> bool:
        return (await index.sweep(pages=100, grace_s=LONG)).remaining == 0

    await harness.until(reclaimed)
    assert [await index.held(incarnation) for incarnation in dead] == [{}] * 5


async def test_what_a_zombie_writes_after_the_sweep_is_swept_again(harness: Any) -> None:
    index = harness.index
    prompt, another = harness.prompt(40), harness.prompt(40)
    old = await harness.claim()
    await index.write(old.incarnation, 1, prompt.writes())
    await harness.claim()
    assert (await index.sweep(pages=100, grace_s=LONG)).incarnations == 1
    await index.write(old.incarnation, 2, another.writes())
    assert len(await index.held(old.incarnation)) == 40
    assert (await index.sweep(pages=100, grace_s=LONG)).incarnations == 1
    assert await index.held(old.incarnation) == {}


async def test_concurrent_sweeps_do_not_get_in_each_others_way(harness: Any) -> None:
    index = harness.index
    prompt = harness.prompt(640)
    old = await harness.claim()
    await index.write(old.incarnation, 1, prompt.writes())
    await harness.claim()
    reports = await asyncio.gather(*(index.sweep(pages=1000, grace_s=LONG) for _ in range(5)))
    assert sum(r.pages for r in reports) == 20
    assert sum(r.incarnations for r in reports) == 1
    assert await index.held(old.incarnation) == {}


async def test_a_sample_of_what_is_held_is_some_whole_pages_of_it(harness: Any) -> None:
    claim = await harness.claim()
    prompt = harness.prompt(320)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    everything = await harness.index.held(claim.incarnation)
    assert await harness.index.held(claim.incarnation, pages=100) == everything
    sample = await harness.index.held(claim.incarnation, pages=3)
    assert len(sample) == 3 * 32
    assert sample.items() <= everything.items()


# Namespaces


async def test_namespaces_are_announced_once_and_share_nothing(harness: Any) -> None:
    store = harness.store
    other = await store.open(Namespace(model="m", block_size=4, kv_dtype="fp8"))
    again = await store.open(harness.index.namespace)
    await store.ping()
    assert await store.namespaces() == []
    for _ in range(2):
        claim = await harness.claim()
    assert await store.namespaces() == [harness.index.namespace]
    await other.claim(ReplicaSpec(ref=A, engine="vllm"), owner="owner", lease_s=LONG, activate=True)
    assert {n.id for n in await store.namespaces()} == {harness.index.namespace.id, other.namespace.id}
    assert len(await store.namespaces()) == 2
    prompt = harness.prompt(10)
    await harness.index.write(claim.incarnation, 1, prompt.writes())
    assert (await again.match(prompt.chain())).depths == {claim.incarnation: Depth(10, (10, 0, 0))}
    match = await other.match(prompt.chain())
    assert match.depths == {}
    assert [view.spec.ref for view in match.fleet.replicas] == [A]


async def test_a_thousand_replicas_share_a_prefix(harness: Any) -> None:
    prompt = harness.prompt(64)
    incarnations = [(await harness.claim(f"r{i}")).incarnation for i in range(1000)]
    for i, incarnation in enumerate(incarnations):
        await harness.index.write(incarnation, 1, prompt.writes(0, 1 + i % 64))
    assert await harness.depths(prompt) == {inc: 1 + i % 64 for i, inc in enumerate(incarnations)}
    for incarnation in incarnations[:990]:
        await harness.index.write(incarnation, 2, prompt.writes(tiers=0))
    assert set(await harness.depths(prompt)) == set(incarnations[990:])
