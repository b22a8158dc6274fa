"""The sidecar process: consumers for one engine or many, their HTTP side, and their metrics.

HTTP: `/healthz` (the process lives), `/readyz` (every consumer has synced and its registration counts), `/metrics`,
`GET /v1/inventory` (what a replica's index must hold, in key order, page by page, for audits).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..proto.engine import HashRule
from ..proto.errors import ConfigError, InvalidField, NotFound
from ..proto.hashing import Namespace
from ..proto.http import HttpMetrics, HttpServer, application, metrics_handler, reply
from ..proto.index import Store
from .consumer import ReplicaConfig, ReplicaConsumer

MAX_PAGE: Final = 10_000


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sidecar process."""

    namespace: Namespace
    replicas: Annotated[tuple[ReplicaConfig, ...], msgspec.Meta(min_length=1, max_length=1024)]
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 9400
    lease_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 10.0
    """Proof of life: this long after a consumer dies, its replica stops counting."""
    refresh_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = 60.0
    """Every page is verified, and its TTL renewed, once per this many seconds."""

    def __post_init__(self) -> None:
        seen: set[Any] = set()
        for config in self.replicas:
            if config.ref in seen:
                raise ConfigError(
                    "replicas", f"{config.ref} is listed twice", "give every (replica, dp_rank) one entry"
                )
            seen.add(config.ref)


async def run_sidecar(
    config: SidecarConfig,
    store: Store,
    *,
    rule_for: Callable[[str], HashRule],
    stop: asyncio.Event,
    ready: Callable[[HttpServer], None] = lambda server: None,
) -> None:
    """Serve until `stop` is set, then deregister. rule_for: engine family → how it names blocks."""
    index = await store.open(config.namespace)
    consumers = [
        ReplicaConsumer(
            replica,
            index,
            rule=rule_for(replica.engine),
            lease_s=config.lease_s,
            refresh_s=config.refresh_s,
        )
        for replica in config.replicas
    ]
    server = HttpServer(make_app(consumers), host=config.host, port=config.port)
    async with aiohttp.ClientSession() as session, server:
        ready(server)
        tasks = [asyncio.create_task(consumer.run(session)) for consumer in consumers]
        stopped = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()  # a consumer ends by itself only when it failed
        finally:
            for task in [stopped, *tasks]:
                task.cancel()
            await asyncio.gather(stopped, *tasks, return_exceptions=True)
            await asyncio.gather(*(consumer.writer.release() for consumer in consumers))


def make_app(consumers: Sequence[ReplicaConsumer]) -> web.Application:
    """The sidecar's HTTP application."""
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(lambda: consumers))
    app = application(HttpMetrics(registry, "sidecar"))

    async def healthz(request: web.Request) -> web.StreamResponse:
        return reply(request, {"status": "ok"})

    async def readyz(request: web.Request) -> web.StreamResponse:
        waiting = {
            str(c.config.ref): c.cause() or "not_registered"
            for c in consumers
            if not c.writer.active or not c.stream.caught_up
        }
        body = {"status": "waiting" if waiting else "ok", "waiting": waiting}
        return reply(request, body, status=503 if waiting else 200)

    async def inventory(request: web.Request) -> web.StreamResponse:
        return reply(request, _inventory_page(_pick(consumers, request), request))

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics_handler(registry))
    app.router.add_get("/v1/inventory", inventory)
    return app


def _pick(consumers: Sequence[ReplicaConsumer], request: web.Request) -> ReplicaConsumer:
    name = request.query.get("replica")
    rank = _number(request, "dp_rank", 0, 65535) if "dp_rank" in request.query else None
    found = [
        c
        for c in consumers
        if (name is None or c.config.replica == name) and (rank is None or c.config.dp_rank == rank)
    ]
    if not found:
        raise NotFound(
            "this sidecar follows no such replica", field="replica", remedy="see /metrics for its replicas"
        )
    if len(found) > 1:
        raise InvalidField(
            "this sidecar follows several replicas", field="replica", remedy="name one with ?replica=&dp_rank="
        )
    return found[0]


def _number(request: web.Request, field: str, default: int, most: int) -> int:
    text = request.query.get(field)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or int(text) > most:
        raise InvalidField("not a whole number in range", field=field, remedy=f"send 0 to {most}")
    return int(text)


def _inventory_page(consumer: ReplicaConsumer, request: web.Request) -> dict[str, Any]:
    limit = max(1, _number(request, "limit", 1000, MAX_PAGE))
    after = request.query.get("after", "")
    try:
        start = bytes.fromhex(after)
    except ValueError:
        raise InvalidField("not hexadecimal", field="after", remedy="send `next` of the page before") from None
    held = consumer.inventory.expected()
    keys = heapq.nsmallest(limit + 1, (key for key in held if key > start))
    claim = consumer.writer.claim
    return {
        "replica": consumer.config.replica,
        "dp_rank": consumer.config.dp_rank,
        "namespace": consumer.namespace.id,
        "incarnation": claim.incarnation if claim is not None else None,
        "state": consumer.status().state,
        "cause": consumer.cause(),
        "next_seq": consumer.stream.expected,
        "pending": consumer.writer.pending,
        "total": len(held),
        "blocks": [{"key": key.hex(), "tiers": int(held[key])} for key in keys[:limit]],
        "next": keys[limit - 1].hex() if len(keys) > limit else None,
    }


class ConsumerCollector(Collector):
    """Every consumer's counters and state, read when scraped. Labels: model, replica, dp_rank (bounded by config)."""

    def __init__(self, consumers: Callable[[], Iterable[ReplicaConsumer]]) -> None:
        self._consumers = consumers

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        labels = ["model", "replica", "dp_rank"]

        def add(kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, value: float) -> None:
            family = families.get(name)
            if family is None:
                family = families[name] = kind(f"metatrie_{name}", _HELP.get(name, name), labels=labels)
            family.add_metric(where, value)

        state = GaugeMetricFamily(
            "metatrie_replica_state", "1 for the state a replica is in", labels=[*labels, "state", "cause"]
        )
        for consumer in list(self._consumers()):
            where = [consumer.namespace.model, consumer.config.replica, str(consumer.config.dp_rank)]
            for prefix, stats in (
                ("stream", consumer.stream.stats),
                ("inventory", consumer.inventory.stats),
                ("writer", consumer.writer.stats),
            ):
                for field, value in msgspec.structs.asdict(stats).items():
                    add(CounterMetricFamily, f"{prefix}_{field}", value)
            inventory, writer = consumer.inventory, consumer.writer
            add(CounterMetricFamily, "scrapes", consumer.scrapes)
            add(CounterMetricFamily, "scrape_failures", consumer.scrape_failures)
            add(GaugeMetricFamily, "inventory_copies", inventory.copies)
            add(GaugeMetricFamily, "inventory_index_blocks", inventory.index_blocks)
            add(GaugeMetricFamily, "inventory_detached", inventory.detached)
            add(GaugeMetricFamily, "inventory_ambiguous_blocks", inventory.ambiguous)
            add(GaugeMetricFamily, "hash_parity", inventory.parity)
            add(GaugeMetricFamily, "stream_expected_seq", consumer.stream.expected)
            add(GaugeMetricFamily, "stream_held_batches", consumer.stream.held)
            add(GaugeMetricFamily, "writer_pending", writer.pending)
            add(GaugeMetricFamily, "writer_lag_seconds", writer.lag_s)
            add(GaugeMetricFamily, "writer_active", writer.active)
            status = consumer.status()
            state.add_metric([*where, status.state, status.cause], 1)
        yield from families.values()
        yield state


_HELP: Final = {
    "inventory_copies": "Physical block copies held, over all media and groups",
    "inventory_index_blocks": "Index blocks attached",
    "inventory_detached": "Engine blocks held but absent from the index, since their prefix is not held",
    "inventory_ambiguous_blocks": "Index blocks several engine hashes claim: some input is hidden",
    "hash_parity": "1 once a published hash equalled the predicted one: the engine runs our hash rule and seed",
    "stream_expected_seq": "Next sequence number expected",
    "stream_held_batches": "Live batches waiting for a replay to end",
    "writer_pending": "Block states not yet acknowledged by the store",
    "writer_lag_seconds": "Engine time to acknowledged write, newest flush",
    "writer_active": "1 while the registry points at this consumer's incarnation",
}
