"""What a router learns of its replicas from what they served."""

from __future__ import annotations

import pytest
from metatrie.indexer.load import Learned
from metatrie.indexer.policies import TYPICAL_SPEED, Speed
from metatrie.proto.index import ReplicaRef

R = ReplicaRef("r")


def serve(learned: Learned, speed: Speed, times: int = 300, tokens: int = 4_000, output: int = 101) -> None:
    for number in range(times):
        name, decoding = str(number), number % 30
        learned.routed(name, R, tokens=tokens, decoding=decoding, now=0.0)
        first = tokens * (1 / speed.prefill_tokens_per_s + speed.step_s / speed.chunk_tokens)
        learned.first_token(name, first)
        step = speed.step_s + speed.sequence_step_s * max(1, decoding)
        learned.finished(name, first + (output - 1) * step, output)


def test_without_samples_the_declared_speed_holds() -> None:
    assert Learned().speed(R) is TYPICAL_SPEED
    assert Learned(Speed(step_s=1)).speed(R).step_s == 1


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_rates_and_costs_converge(factor: float) -> None:
    true = Speed(prefill_tokens_per_s=10_000 / factor, step_s=0.02 * factor, sequence_step_s=0.0003 * factor)
    learned = Learned()
    serve(learned, true)
    found = learned.speed(R)
    assert found.prefill_tokens_per_s == pytest.approx(true.prefill_tokens_per_s, rel=0.05)
    assert found.step_s == pytest.approx(true.step_s, rel=0.05)
    assert found.sequence_step_s == pytest.approx(true.sequence_step_s, rel=0.05)
    assert learned.output_tokens == pytest.approx(101, rel=0.05)


def test_one_stalled_request_does_not_turn_the_figures() -> None:
    learned = Learned()
    serve(learned, TYPICAL_SPEED)
    learned.routed("stalled", R, tokens=4_000, decoding=0, now=0.0)
    learned.first_token("stalled", 3_600.0)
    learned.finished("stalled", 7_200.0, 2)
    assert learned.speed(R).prefill_tokens_per_s > 8_000
    assert learned.speed(R).step_s < 0.025


def test_short_prefills_unknown_requests_and_repetitions_teach_nothing() -> None:
    learned = Learned()
    learned.routed("short", R, tokens=100, decoding=0, now=0.0)
    learned.first_token("short", 50.0)
    learned.first_token("unknown", 1.0)
    learned.finished("unknown", 1.0, 500)
    assert learned.speed(R) is TYPICAL_SPEED
    learned.routed("twice", R, tokens=4_000, decoding=0, now=0.0)
    learned.first_token("twice", 0.4)
    before = learned.speed(R)
    learned.first_token("twice", 9.0)
    assert learned.speed(R) == before


def test_replicas_that_are_gone_are_forgotten() -> None:
    learned = Learned()
    serve(learned, Speed(prefill_tokens_per_s=1_000), times=50)
    learned.keep([])
    assert learned.speed(R) is TYPICAL_SPEED


def test_the_first_samples_do_not_outweigh_what_is_declared() -> None:
    learned = Learned()
    learned.routed("first", R, tokens=4_000, decoding=0, now=0.0)
    learned.first_token("first", 1.6)
    assert learned.speed(R).prefill_tokens_per_s == pytest.approx(10_000, rel=0.2)
