"""Ejection and return of engines, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metatrie.indexer.health import Health

URL = "http://engine"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_failures_in_a_row_eject_and_a_probe_brings_back_gently(clock: Clock) -> None:
    health = Health(eject_after=3, eject_s=2, ramp_s=10, clock=clock)
    assert health.room(URL, 100) == 100
    assert not health.failed(URL)
    assert not health.failed(URL)
    health.succeeded(URL)
    assert [health.failed(URL) for _ in range(3)] == [False, False, True]
    assert (health.phase(URL), health.room(URL, 100)) == ("ejected", 0)
    health.probed(URL, "good")
    assert health.phase(URL) == "ejected", "its time is not up"
    clock.now = 2
    assert health.phase(URL) == "ejected", "time alone brings nothing back"
    health.probed(URL, "good")
    assert (health.phase(URL), health.room(URL, 101)) == ("returning", 1)
    clock.now = 7
    assert health.room(URL, 101) == 51
    clock.now = 12
    assert (health.phase(URL), health.room(URL, 101)) == ("healthy", 101)


def test_a_failure_on_return_ejects_at_once_for_twice_as_long(clock: Clock) -> None:
    health = Health(eject_after=3, eject_s=2, max_eject_s=7, clock=clock)
    for _ in range(3):
        health.failed(URL)
    clock.now += 2
    health.probed(URL, "good")
    for expected in (4, 7, 7):
        assert health.failed(URL)
        clock.now += expected - 0.1
        health.probed(URL, "good")
        assert health.phase(URL) == "ejected"
        clock.now += 0.1
        health.probed(URL, "good")
        assert health.phase(URL) == "returning"


def test_probes_count_by_themselves(clock: Clock) -> None:
    health = Health(eject_after=2, clock=clock)
    assert not health.probed(URL, "bad")
    health.succeeded(URL)
    assert health.probed(URL, "bad")
    assert health.phase(URL) == "ejected"


def test_a_silent_probe_says_nothing_of_an_engine_that_answers_requests(clock: Clock) -> None:
    health = Health(eject_after=2, clock=clock)
    for _ in range(10):
        health.succeeded(URL)
        assert not health.probed(URL, "silent")
    assert not health.probed(URL, "silent")
    assert health.probed(URL, "silent")
    assert health.phase(URL) == "ejected"


def test_a_busy_engine_is_left_alone_for_a_while(clock: Clock) -> None:
    health = Health(clock=clock)
    health.busy(URL, 1)
    assert (health.room(URL, 5), health.phase(URL)) == (0, "healthy")
    clock.now = 1
    assert health.room(URL, 5) == 5


def test_what_is_gone_is_forgotten(clock: Clock) -> None:
    health = Health(eject_after=1, clock=clock)
    health.failed(URL)
    health.keep([])
    assert health.phase(URL) == "healthy"


@given(st.lists(st.tuples(st.sampled_from("fspPbt"), st.integers(0, 5)), max_size=60))
def test_room_is_never_more_than_the_limit_and_none_while_ejected(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    health = Health(clock=clock)
    for step, n in steps:
        match step:
            case "f":
                health.failed(URL)
            case "s":
                health.succeeded(URL)
            case "p":
                health.probed(URL, "good")
            case "P":
                health.probed(URL, "bad" if n % 2 else "silent")
            case "b":
                health.busy(URL, n)
            case "t":
                clock.now += n
        room = health.room(URL, 8)
        assert 0 <= room <= 8
        if health.phase(URL) == "ejected":
            assert room == 0
