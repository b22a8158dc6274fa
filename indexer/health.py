"""Which engines to send requests to: passive and active health, ejection and gentle return. No I/O.

    healthy → (failures in a row reach `eject_after`) → ejected → (time is up, and a probe succeeds) → returning
    returning → (`ramp_s` later) → healthy, or, at the first failure → ejected, for twice as long as before

Failures are those of the connection, and of probes; what an engine answers is its health only where the answer says
that it cannot serve (502, 504). A probe without an answer says nothing of an engine that answers requests meanwhile:
it is busy, and taking it from an overloaded fleet would only overload the rest.

A returning engine is given requests gradually: its share of the usual bound grows from one request over `ramp_s`.
What is reserved on it is not ours, and stays as it is through all of this: an engine that comes back still owes what
was running on it, until those requests end or expire.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["healthy", "returning", "ejected"]
Probe = Literal["good", "bad", "silent"]
"""bad: it answered that it is not well. silent: it did not answer in time, or could not be reached."""


@dataclass(slots=True)
class _Engine:
    failures: int = 0
    """Of requests, in a row."""
    missed: int = 0
    """Probes, in a row: an engine may well answer what it has while it says that it should get no more."""
    answered: bool = False
    """Some request, since the last probe."""
    phase: Phase = "healthy"
    since: float = 0.0
    """When the phase began."""
    eject_s: float = 0.0
    """How long the last ejection was."""
    busy_until: float = 0.0


class Health:
    """Of engines by URL; one nobody heard of is healthy. Bounded by `keep`."""

    def __init__(
        self,
        *,
        eject_after: int = 3,
        eject_s: float = 2.0,
        max_eject_s: float = 60.0,
        ramp_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._eject_after = eject_after
        self._eject_s = eject_s
        self._max_eject_s = max_eject_s
        self._ramp_s = ramp_s
        self._clock = clock
        self._engines: dict[str, _Engine] = {}

    def phase(self, url: str) -> Phase:
        engine = self._engines.get(url)
        if engine is None:
            return "healthy"
        if engine.phase == "returning" and self._clock() - engine.since >= self._ramp_s:
            engine.phase, engine.eject_s = "healthy", 0.0
        return engine.phase

    def room(self, url: str, limit: int) -> int:
        """How many requests it may have at a time, of `limit` usually; 0: none now."""
        phase, engine = self.phase(url), self._engines.get(url)
        if phase == "ejected" or (engine is not None and engine.busy_until > self._clock()):
            return 0
        if phase == "returning":
            assert engine is not None
            return 1 + int((limit - 1) * (self._clock() - engine.since) / self._ramp_s)
        return limit

    def busy(self, url: str, seconds: float) -> None:
        """It said that it has too much to do: nothing more for it until then."""
        self._of(url).busy_until = self._clock() + seconds

    def succeeded(self, url: str) -> None:
        """It answered a request."""
        engine = self._of(url)
        engine.failures, engine.answered = 0, True

    def failed(self, url: str) -> bool:
        """It could not be reached, or broke off. True if that ejected it."""
        engine = self._of(url)
        engine.failures += 1
        return self._judge(url, engine, engine.failures)

    def _judge(self, url: str, engine: _Engine, in_a_row: int) -> bool:
        phase = self.phase(url)
        if phase == "ejected" or (phase == "healthy" and in_a_row < self._eject_after):
            return False
        engine.eject_s = min(self._max_eject_s, 2 * engine.eject_s or self._eject_s)
        engine.phase, engine.since = "ejected", self._clock()
        return True

    def probed(self, url: str, result: Probe) -> bool:
        """A probe's result; a good one alone brings an ejected engine back. True if this one ejected the engine."""
        engine = self._of(url)
        answered, engine.answered = engine.answered, False
        if result == "good":
            self._passed(engine)
        elif result == "bad" or not answered:
            engine.missed += 1
            return self._judge(url, engine, engine.missed)
        return False

    def _passed(self, engine: _Engine) -> None:
        engine.missed = 0
        if engine.phase == "ejected" and self._clock() - engine.since >= engine.eject_s:
            engine.phase, engine.since, engine.failures = "returning", self._clock(), 0

    def keep(self, urls: Iterable[str]) -> None:
        """Forget engines that are not among these."""
        for url in self._engines.keys() - set(urls):
            del self._engines[url]

    def _of(self, url: str) -> _Engine:
        return self._engines.setdefault(url, _Engine())
