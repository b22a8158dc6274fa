"""What the router counts, and gauges of the fleet as it last saw it."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..proto.errors import StoreError
from ..proto.hashing import NamespaceId
from .answers import INDEX_UNAVAILABLE, Space, doubted
from .feedback import OUTCOMES, Feedbacks
from .load import Reservations
from .queueing import RouterQueue

MAX_CAUSES = 32
"""Distinct causes the fleet metric tells apart; the rest are summed as `other`."""


class RouterMetrics(Collector):
    """What the router counts. Labels come from fixed sets: policies, reasons, error classes. What every query counts
    is a plain number here, and a metric only when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"metatrie_router_{name}", text, labels, registry=registry)

        self.prompt_blocks = 0
        self.matched_blocks = 0
        registry.register(self)
        self.blind_answers = counter("blind_answers", "Lookups answered without the index, since it was away")
        self.swept_pages = counter("swept_pages", "Pages of dead incarnations reclaimed")
        self.ignored_namespaces = counter("ignored_namespaces", "Times namespaces were ignored at the bound")
        self._decisions = counter("decisions", "Routing decisions", "policy", "reason")
        self._predicted = counter("predicted_tokens", "Cached prompt tokens predicted, of requests with feedback")
        self._served = counter("served_tokens", "Cached prompt tokens engines reported for the same requests")
        self._over = counter("overpredicted_tokens", "Tokens predicted and not served")
        self._under = counter("underpredicted_tokens", "Tokens served and not predicted")
        self._feedbacks = counter("feedbacks", "Requests with feedback")
        self._outcomes = counter("feedback_outcomes", "Requests with feedback, by what became of it", "outcome")
        self._missed = counter("missed_tokens", "Cached tokens a request could have had, by why it did not", "cause")
        for outcome in OUTCOMES:
            self._outcomes.labels(outcome)
        self._store_errors = counter("store_errors", "Store operations that failed", "error")

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "metatrie_router_prompt_blocks", "Full blocks in the prompts looked up", value=self.prompt_blocks
        )
        yield CounterMetricFamily(
            "metatrie_router_matched_blocks",
            "Of those, held by the chosen replica (route) or the deepest one (match)",
            value=self.matched_blocks,
        )

    def decision(self, policy: str, reason: str) -> None:
        self._decisions.labels(policy, reason).inc()

    def predicted(self, predicted: int, served: int) -> None:
        self._feedbacks.inc()
        self._predicted.inc(predicted)
        self._served.inc(served)
        self._over.inc(max(0, predicted - served))
        self._under.inc(max(0, served - predicted))

    def judged(self, outcome: str, missed: int, diverted: int) -> None:
        self._outcomes.labels(outcome).inc()
        if missed:
            self._missed.labels(outcome).inc(missed)
        if diverted:
            self._missed.labels("diverted").inc(diverted)

    def store_error(self, error: StoreError) -> None:
        self._store_errors.labels(type(error).__name__).inc()


class QueueCollector(Collector):
    """The router's own queue, as it is when somebody scrapes."""

    def __init__(self, queue: RouterQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        queue = self._queue
        yield GaugeMetricFamily(
            "metatrie_router_queue_works",
            "Whether requests wait in the router: 0 where it is off, or another router shares the load",
            value=queue.works(),
        )
        yield GaugeMetricFamily(
            "metatrie_router_queue_waiting", "Requests that wait in the router now", value=len(queue.line)
        )
        for name, text, value in (
            ("waits", "Requests that waited in the router", queue.waits),
            ("waited_seconds", "Time they waited, in all", queue.waited_s),
            (
                "timeouts",
                "Requests that waited too long, and went to their best replica all the same",
                queue.timeouts,
            ),
            ("overflows", "Requests that found the queue full, and went to their best replica", queue.overflows),
        ):
            yield CounterMetricFamily(f"metatrie_router_queue_{name}", text, value=value)


class FleetCollector(Collector):
    """Gauges computed when somebody scrapes, from what the router last saw."""

    def __init__(self, spaces: Mapping[NamespaceId, Space], reservations: Reservations, feedbacks: Feedbacks) -> None:
        self._spaces = spaces
        self._reservations = reservations
        self._feedbacks = feedbacks

    def collect(self) -> Iterable[Metric]:
        fleet: Tally[tuple[str, str, str]] = Tally()
        causes: set[str] = set()
        for space in self._spaces.values():
            for view in space.fleet.replicas if space.fleet else ():
                doubt = doubted(view, self._feedbacks.doubts)
                state, cause = ("degraded", doubt) if doubt else (view.state, view.cause)
                if space.down:
                    state, cause = "stale", INDEX_UNAVAILABLE
                if cause not in causes:
                    if len(causes) >= MAX_CAUSES:
                        cause = "other"
                    causes.add(cause)
                fleet[space.index.namespace.model, state, cause] += 1
        replicas = GaugeMetricFamily(
            "metatrie_router_replicas",
            "Registered replicas by state and its cause",
            labels=["model", "state", "cause"],
        )
        for labels, count in fleet.items():
            replicas.add_metric(labels, count)
        yield replicas
        yield GaugeMetricFamily(
            "metatrie_router_namespaces_down",
            "Namespaces whose index cannot be used",
            value=sum(space.down for space in self._spaces.values()),
        )
        yield GaugeMetricFamily(
            "metatrie_router_sweep_backlog",
            "Dead incarnations still to be reclaimed, as this router's last sweep left them",
            value=sum(space.backlog for space in self._spaces.values()),
        )
        counts = self._reservations.counts()
        yield GaugeMetricFamily("metatrie_router_reservations", "Reservations held", value=counts.held)
        yield CounterMetricFamily(
            "metatrie_router_reservations_expired", "Reservations nobody freed", value=counts.expired
        )
        yield CounterMetricFamily(
            "metatrie_router_reservations_dropped", "Reservations dropped at the bound", value=counts.dropped
        )
        yield CounterMetricFamily(
            "metatrie_router_reservations_unshared",
            "Changes of reservations other routers could not be told of",
            value=counts.unshared,
        )
