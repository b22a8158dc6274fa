"""Why does another policy win where it does?

Two questions are put to every setting in which one is better than the default. Is it more than chance: does it still
win when all arrivals are one percent closer, or further apart? If so, which part of the default costs that: it is run
without each of them, and one of them may close the gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...indexer.policies import DEFAULT_POLICY
from .fleet import Outcome
from .suite import EXPECTED_TTFT, MARGIN, Result, Setting, entry

JITTER = (0.99, 1.01)
"""Factors on all arrival times."""


class Part(NamedTuple):
    """Of the default policy: the entry that lacks it, and what it means if that one is better."""

    without: str
    reason: str


PARTS = (
    Part(EXPECTED_TTFT, "the price: it keeps requests waiting for their prefix that had better be computed again"),
    Part(
        entry(DEFAULT_POLICY, base_weight=1000, max_weight=1000),
        "the price is too low: copies made for a shorter queue evict what is needed again",
    ),
    Part(entry(DEFAULT_POLICY, decode_factor=0), "the decode term: it buys latency with time to first token"),
    Part(
        entry(DEFAULT_POLICY, shared_branches=1024), "the exemption of shared prefixes: they are copied too readily"
    ),
)


class Study(NamedTuple):
    """One setting in which another policy is better. Ratios are mean times to first token over the default's."""

    setting: Setting
    best: str
    ratio: float
    jittered: tuple[float, ...]
    """The same at each of JITTER."""
    without: tuple[float, ...]
    """The default without each of PARTS."""

    def reason(self, ours: Outcome, other: Outcome) -> str:
        """ours, other: the runs compared, for what no part of the default explains."""
        if max(self.jittered) > 1 - MARGIN:
            return "chance: it does not win by as much when arrivals are a percent closer or further apart"
        closest = min(self.without)
        if 1 - closest >= (1 - self.ratio) / 2:
            return PARTS[self.without.index(closest)].reason
        if other.hit > ours.hit + 0.01:
            if other.ttft.p99 > ours.ttft.p99 * 1.1:
                return "it lets some conversations wait far longer, and so keeps more of the others in the caches"
            return (
                "it keeps more in the caches: it spreads what they have to hold, which the default does not look at"
            )
        if other.latency.mean > ours.latency.mean:
            return "it trades latency for time to first token: whole answers are over sooner with the default"
        return "no part of the default alone"


def entries(best: str) -> list[str]:
    """What to run in a setting where `best` is better."""
    jittered = [entry(policy, stretched=factor) for factor in JITTER for policy in (DEFAULT_POLICY, best)]
    return [*jittered, *(part.without for part in PARTS)]


def studies(losses: Iterable[tuple[Setting, str, float]], results: Sequence[Result]) -> dict[Setting, Study]:
    """Of those settings all of whose entries were run."""
    found: dict[Setting, dict[str, float]] = {}
    for result in results:
        found.setdefault(result.setting, {})[result.policy] = result.outcome.ttft.mean
    return {
        setting: _study(setting, best, ratio, found[setting])
        for setting, best, ratio in losses
        if found[setting].keys() >= {DEFAULT_POLICY, *entries(best)}
    }


def _study(setting: Setting, best: str, ratio: float, means: Mapping[str, float]) -> Study:
    jittered = tuple(means[entry(best, stretched=f)] / means[entry(DEFAULT_POLICY, stretched=f)] for f in JITTER)
    without = tuple(means[part.without] / means[DEFAULT_POLICY] for part in PARTS)
    return Study(setting, best, ratio, jittered, without)
