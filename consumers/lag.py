"""How long events take, as histograms cheap enough for every batch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from prometheus_client.core import HistogramMetricFamily

BOUNDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Lag:
    """Seconds from one moment to another, counted by size. The engine's clock and ours may differ: what comes out
    negative counts as zero."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self._total += seconds

    @property
    def count(self) -> int:
        """Times observed."""
        return sum(self._counts)

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """As one series of a Prometheus histogram."""
        cumulative, buckets = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family.add_metric(labels, buckets, self._total)
