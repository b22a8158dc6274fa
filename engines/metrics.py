"""The worker's Prometheus metrics, under vLLM's names.

Totals and gauges are read from the cores when somebody scrapes; only the latency histograms cost anything per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .scheduler import Request, Scheduler, Step

_LABELS = ["model_name", "engine"]
# vLLM's own bucket bounds.
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    *(40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TPOT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_TOKENS = tuple(float(m * 10**e) for e in range(5) for m in (1, 2, 5))
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class MeasuredCore(Protocol):
    """What the collector reads of a core."""

    @property
    def rank(self) -> int: ...

    @property
    def scheduler(self) -> Scheduler: ...


class Metrics:
    """One registry for all cores of a worker; registers nothing globally."""

    def __init__(self, model: str, cache_config: Mapping[str, str]) -> None:
        """cache_config: labels of `vllm:cache_config_info`."""
        self.registry = CollectorRegistry()
        self._model = model
        histogram = self._histogram
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token, modelled seconds.", _TTFT)
        self.itl = histogram("inter_token_latency_seconds", "Time between tokens, modelled seconds.", _TPOT)
        self.e2e = histogram("e2e_request_latency_seconds", "Request latency, modelled seconds.", _REQUEST)
        self.queue = histogram("request_queue_time_seconds", "Time in the waiting queue, modelled seconds.", _REQUEST)
        self.prompt = histogram("request_prompt_tokens", "Prompt tokens per request.", _TOKENS)
        self.generation = histogram("request_generation_tokens", "Generated tokens per request.", _TOKENS)
        self.iteration = histogram("iteration_tokens_total", "Tokens per engine step.", _ITERATION)
        self.success = Counter(
            "vllm:request_success",
            "Finished requests.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._cache_config = dict(cache_config)

    def core(self, rank: int) -> CoreMetrics:
        return CoreMetrics(self, self._model, str(rank))

    def watch(self, cores: Sequence[MeasuredCore]) -> None:
        """Expose the queues and totals of these cores. Call once."""
        self.registry.register(_CoreCollector(self._model, cores, self._cache_config))

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)


class CoreMetrics:
    """The histograms of one core, with their labels bound."""

    def __init__(self, metrics: Metrics, model: str, engine: str) -> None:
        self._ttft = metrics.ttft.labels(model, engine)
        self._itl = metrics.itl.labels(model, engine)
        self._e2e = metrics.e2e.labels(model, engine)
        self._queue = metrics.queue.labels(model, engine)
        self._prompt = metrics.prompt.labels(model, engine)
        self._generation = metrics.generation.labels(model, engine)
        self._iteration = metrics.iteration.labels(model, engine)
        self._success = {r: metrics.success.labels(model, engine, r) for r in ("stop", "length", "abort")}

    def stepped(self, step: Step) -> None:
        self._iteration.observe(step.prefill_tokens + step.decodes)

    def first_token(self, request: Request, now: float) -> None:
        """The first token was delivered; `now` on the clock of its arrival."""
        self._ttft.observe(now - request.arrival_s)
        # A step may start, in the model, before a late event loop heard of the request.
        self._queue.observe(max(0.0, request.scheduled_s - request.arrival_s))

    def next_token(self, gap_s: float) -> None:
        self._itl.observe(gap_s)

    def finished(self, request: Request, now: float) -> None:
        self._success[request.finish or "abort"].inc()
        self._e2e.observe(now - request.arrival_s)
        self._prompt.observe(request.prompt_tokens)
        self._generation.observe(request.generated)


class _CoreCollector(Collector):
    def __init__(self, model: str, cores: Sequence[MeasuredCore], cache_config: Mapping[str, str]) -> None:
        self._model = model
        self._cores = cores
        self._cache_config = cache_config

    def collect(self) -> Iterable[Metric]:
        gauges: list[tuple[str, str, Callable[[Scheduler], float]]] = [
            ("num_requests_running", "Requests in the running batch.", lambda s: s.running),
            ("num_requests_waiting", "Requests waiting to be scheduled.", lambda s: s.waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use; 1 is full.", lambda s: s.pool.usage),
        ]
        counters: list[tuple[str, str, Callable[[Scheduler], float]]] = [
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.counters.queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.counters.hits),
            ("prompt_tokens", "Prefill tokens of scheduled requests.", lambda s: s.counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", lambda s: s.counters.generation_tokens),
            ("num_preemptions", "Preemptions by recompute.", lambda s: s.counters.preemptions),
        ]
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, read in rows:
                metric = family(f"vllm:{name}", text, labels=_LABELS)
                for core in self._cores:
                    metric.add_metric([self._model, str(core.rank)], read(core.scheduler))
                yield metric
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Cache configuration.", labels=[*self._cache_config, "engine"]
        )
        for core in self._cores:
            info.add_metric([*self._cache_config.values(), str(core.rank)], 1)
        yield info
