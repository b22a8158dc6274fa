"""Speculative placement: what is on its way counts, once per request, and no longer than it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.placement import LAGS, MARGIN_S, UNCONFIRMED_S, Placements
from metatrie.proto.hashing import BlockKey
from metatrie.proto.index import Incarnation

ONE, TWO = Incarnation(1), Incarnation(2)


def keys(text: str) -> list[BlockKey]:
    return [BlockKey(text[: i + 1].encode()) for i in range(len(text))]


def depth(placements: Placements, incarnation: Incarnation, prompt: list[BlockKey], matched: int) -> int:
    held = [matched, 0]
    placements.deepen([incarnation, Incarnation(9)], prompt, held)
    assert held[1] == 0
    return held[0]


def test_what_was_sent_counts_for_that_incarnation_only() -> None:
    placements = Placements()
    assert not placements
    placements.sent("r", ONE, keys("abcd"), 1, now=0)
    assert placements
    assert depth(placements, ONE, keys("abcdef"), 1) == 4
    assert depth(placements, ONE, keys("abxy"), 1) == 2
    # The engine's events arrive little by little.
    assert depth(placements, ONE, keys("abcd"), 3) == 4
    assert depth(placements, TWO, keys("abcd"), 1) == 1
    # The index lost the beginning: what hangs below it does not count.
    assert depth(placements, ONE, keys("abcd"), 0) == 0


def test_it_counts_until_the_event_must_have_come() -> None:
    placements = Placements(ttl_s=100, settle_s=10)
    for request in "pqr":
        placements.sent(request, ONE, keys(request + "x"), 0, now=0)
    placements.computed("p", 50)
    placements.cancel("q")
    placements.cancel("p")  # past its prefill: the blocks are there
    depths = {}
    for now in (59, 60, 99, 100):
        placements.expire(now)
        depths[now] = [depth(placements, ONE, keys(r + "x"), 0) for r in "pqr"]
    assert depths == {59: [2, 0, 2], 60: [0, 0, 2], 99: [0, 0, 2], 100: [0, 0, 0]}
    assert not placements


def test_it_counts_no_longer_than_the_events_lag() -> None:
    placements = Placements(settle_s=10)
    lags = {"a": None, "b": 0.0, "c": 0.5, "d": 60.0}
    for request, lag_s in lags.items():
        placements.sent(request, ONE, keys(request), 0, now=0, lag_s=lag_s)
        placements.computed(request, 1)
    ends: dict[str, float] = {}
    for tenths in range(10, 130):
        placements.expire(tenths / 10)
        for request in lags:
            if not depth(placements, ONE, keys(request), 0):
                ends.setdefault(request, tenths / 10)
    assert ends == {"a": 11, "b": 1 + MARGIN_S, "c": 1 + MARGIN_S + LAGS * 0.5, "d": 11}


def test_what_no_event_will_confirm_counts_longer() -> None:
    placements = Placements()
    placements.sent("r", ONE, keys("abc"), 1, now=0, lag_s=0.0, confirmed=False)
    placements.computed("r", 10)
    for now, blocks in ((10 + UNCONFIRMED_S - 1, 3), (10 + UNCONFIRMED_S, 1)):
        placements.expire(now)
        assert depth(placements, ONE, keys("abcd"), 1) == blocks


def test_an_earlier_requests_end_never_removes_a_later_ones_blocks() -> None:
    placements = Placements(ttl_s=10)
    placements.sent("early", ONE, keys("abc"), 0, now=0)
    placements.sent("late", ONE, keys("abcd"), 0, now=5)
    placements.expire(10)
    assert depth(placements, ONE, keys("abcd"), 0) == 4
    placements.expire(15)
    assert depth(placements, ONE, keys("abcd"), 0) == 0


def test_at_the_bound_the_oldest_is_dropped() -> None:
    placements = Placements(capacity=6)
    for request in "pqr":
        placements.sent(request, ONE, keys(request + "xy"), 0, now=0)
    assert [depth(placements, ONE, keys(r + "xy"), 0) for r in "pqr"] == [0, 3, 3]
    placements.sent("huge", ONE, keys("abcdefg"), 0, now=0)
    assert depth(placements, ONE, keys("abcdefg"), 0) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("sdcx"), st.text("ab", min_size=1, max_size=6), st.integers(0, 5)), max_size=50
    )
)
def test_it_equals_the_union_of_what_is_under_way(steps: list[tuple[str, str, int]]) -> None:
    placements = Placements(ttl_s=20, settle_s=3)
    model: dict[str, tuple[float, set[BlockKey], bool]] = {}
    now = 0.0
    for number, (step, text, n) in enumerate(steps):
        named = list(model)[n % len(model)] if model else "unknown"
        match step:
            case "s":
                placements.sent(str(number), ONE, keys(text), 0, now)
                model[str(number)] = now + 20, set(keys(text)), False
            case "d":
                placements.computed(named, now)
                if named in model and not model[named][2]:
                    model[named] = now + 3, model[named][1], True
            case "c":
                placements.cancel(named)
                if named in model and not model[named][2]:
                    del model[named]
            case "x":
                now += n
        placements.expire(now)
        model = {k: v for k, v in model.items() if v[0] > now}
        held = set().union(*(blocks for _, blocks, _ in model.values()))
        expected = next((i for i, key in enumerate(keys(text)) if key not in held), len(text))
        assert depth(placements, ONE, keys(text), 0) == expected
