"""The sidecar process: consumers for one engine or many, their HTTP side, and their metrics.

HTTP: `/healthz` (the process lives), `/readyz` (every consumer has synced and its registration counts), `/metrics`,
`POST /v1/blocks` (why single blocks are in the index or not),
`GET /v1/inventory` (what a replica's index must hold, in key order, page by page, for audits), `GET /v1/copies` (what
its engine holds, by the engine's own names, likewise), `POST /v1/repair` (bring both in line with the engine and anew
into the index).

A sidecar starts whether or not the index store can be reached: it follows its engines, and publishes when it can. It
refuses to start only on a store that is unfit.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..proto.api import BlocksRequest
from ..proto.engine import HashRule
from ..proto.errors import ConfigError, InvalidField, NotFound, StoreUnavailable
from ..proto.hashing import BlockKey, Namespace
from ..proto.http import Body, Handler, HttpMetrics, HttpServer, application, metrics_handler, reply
from ..proto.index import Index, Store
from .checkpoint import CheckpointFile
from .consumer import SAMPLE_S, ReplicaConfig, ReplicaConsumer

MAX_PAGE: Final = 10_000
_ANY_HOST: Final = frozenset({"0.0.0.0", "::", ""})  # noqa: S104  recognised here, not chosen


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
    sample_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = SAMPLE_S
    """Time between two comparisons of samples of index and inventory."""
    checkpoint_dir: str | None = None
    """Directory for files to resume from after a restart; None: a restarted sidecar relies on replay alone."""
    advertise: str | None = None
    """Base URL under which audits reach us; by default where we listen, unless that is every interface."""

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
    with contextlib.suppress(StoreUnavailable):
        await store.ping()
    index = await store.open(config.namespace)
    consumers: list[ReplicaConsumer] = []
    async with aiohttp.ClientSession() as session:
        server = HttpServer(make_app(consumers, session), host=config.host, port=config.port)
        async with server:
            address = config.advertise or (None if config.host in _ANY_HOST else server.url)
            consumers += [
                _consumer(config, replica, index, rule_for(replica.engine), address) for replica in config.replicas
            ]
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


def _consumer(
    config: SidecarConfig, replica: ReplicaConfig, index: Index, rule: HashRule, address: str | None
) -> ReplicaConsumer:
    checkpoint = None
    if config.checkpoint_dir is not None:
        checkpoint = CheckpointFile(Path(config.checkpoint_dir), config.namespace.id, replica.ref)
    return ReplicaConsumer(
        replica,
        index,
        rule=rule,
        lease_s=config.lease_s,
        refresh_s=config.refresh_s,
        sample_s=config.sample_s,
        checkpoint=checkpoint,
        address=address,
    )


def make_app(consumers: Sequence[ReplicaConsumer], session: aiohttp.ClientSession) -> web.Application:
    """The sidecar's HTTP application. session: to reach engines with."""
    registry = CollectorRegistry()
    registry.register(ConsumerCollector(lambda: consumers))
    app = application(HttpMetrics(registry, "sidecar"))

    async def healthz(request: web.Request) -> web.StreamResponse:
        return reply(request, {"status": "ok"})

    async def readyz(request: web.Request) -> web.StreamResponse:
        waiting = {
            str(c.config.ref): c.writer.outage or ("standby" if c.writer.standby else c.cause()) or "not_registered"
            for c in consumers
            if not c.writer.active or not c.stream.caught_up
        }
        if waiting or not consumers:
            return reply(request, {"status": "waiting", "waiting": waiting}, status=503)
        return reply(request, {"status": "ok", "waiting": waiting})

    async def inventory(request: web.Request) -> web.StreamResponse:
        return reply(request, _inventory_page(_pick(consumers, request), request))

    async def copies(request: web.Request) -> web.StreamResponse:
        return reply(request, _copies_page(_pick(consumers, request), request))

    async def repair(request: web.Request) -> web.StreamResponse:
        return reply(request, await _pick(consumers, request).repair(session), status=202)

    app.router.add_post("/v1/blocks", blocks_handler(lambda: consumers))
    app.router.add_get("/v1/copies", copies)
    app.router.add_post("/v1/repair", repair)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics_handler(registry))
    app.router.add_get("/v1/inventory", inventory)
    return app


def blocks_handler(
    consumers: Callable[[], Sequence[ReplicaConsumer]],
    authorize: Callable[[web.Request], None] = lambda request: None,
) -> Handler:
    """`POST /v1/blocks`: what these consumers know of single blocks. authorize: raises if a caller may not ask."""
    body = Body(BlocksRequest)

    async def blocks(request: web.Request) -> web.StreamResponse:
        authorize(request)
        asked = await body.read(request)
        consumer = _picked(consumers(), asked.replica, asked.dp_rank)
        return reply(request, consumer.evidence([BlockKey(bytes.fromhex(key)) for key in asked.keys]))

    return blocks


def _pick(consumers: Sequence[ReplicaConsumer], request: web.Request) -> ReplicaConsumer:
    name = request.query.get("replica")
    rank = _number(request, "dp_rank", 0, 65535) if "dp_rank" in request.query else None
    return _picked(consumers, name, rank)


def _picked(consumers: Sequence[ReplicaConsumer], name: str | None, rank: int | None) -> ReplicaConsumer:
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
    inventory = consumer.inventory
    keys = heapq.nsmallest(limit + 1, (key for key in inventory.index_keys() if key > start))
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
        "total": inventory.index_blocks,
        "blocks": [
            {"key": key.hex(), "tiers": int(inventory.tiers(key)), "parent": _hex(inventory.parent(key))}
            for key in keys[:limit]
        ],
        "next": keys[limit - 1].hex() if len(keys) > limit else None,
    }


def _hex(key: bytes | None) -> str | None:
    return None if key is None else key.hex()


def _copies_page(consumer: ReplicaConsumer, request: web.Request) -> dict[str, Any]:
    """The GPU table of the full-attention group, by engine hash in decimal: comparable with an engine's own."""
    limit = max(1, _number(request, "limit", 1000, MAX_PAGE))
    after = _number(request, "after", -1, (1 << 64) - 1)
    table = consumer.inventory.main_copies()
    names = heapq.nsmallest(limit + 1, (name for name in table if name > after))
    return {
        "replica": consumer.config.replica,
        "dp_rank": consumer.config.dp_rank,
        "next_seq": consumer.stream.expected,
        "total": len(table),
        "copies": {str(name): table[name] for name in names[:limit]},
        "next": str(names[limit - 1]) if len(names) > limit else None,
    }


class ConsumerCollector(Collector):
    """Every consumer's counters and state, read when scraped. Labels: model, replica, dp_rank (bounded by config)."""

    def __init__(self, consumers: Callable[[], Iterable[ReplicaConsumer]]) -> None:
        self._consumers = consumers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        labels = ["model", "replica", "dp_rank"]

        def add(kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, value: float) -> None:
            family = families.get(name)
            if family is None:
                family = families[name] = kind(f"metatrie_{name}", _HELP.get(name, name), labels=labels)
            family.add_metric(where, value)

        errors = CounterMetricFamily(
            "metatrie_stream_decode_errors",
            "Batches and events that could not be applied, by cause",
            labels=[*labels, "cause"],
        )
        received = HistogramMetricFamily(
            "metatrie_event_receipt_seconds", "Engine time of a live batch to its being applied here", labels=labels
        )
        visible = HistogramMetricFamily(
            "metatrie_event_visible_seconds",
            "Engine time of a live batch to the acknowledged write that shows it to routers",
            labels=labels,
        )
        state = GaugeMetricFamily(
            "metatrie_replica_state", "1 for the state a replica is in", labels=[*labels, "state", "cause"]
        )
        for consumer in list(self._consumers()):
            where = [consumer.namespace.model, consumer.config.replica, str(consumer.config.dp_rank)]
            for prefix, stats in (
                ("stream", consumer.stream.stats),
                ("inventory", consumer.inventory.stats),
                ("writer", consumer.writer.stats),
                ("audit", consumer.sampler.stats),
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
            add(GaugeMetricFamily, "inventory_unsure", inventory.unsure)
            add(GaugeMetricFamily, "audit_precision", consumer.sampler.precision)
            add(GaugeMetricFamily, "audit_recall", consumer.sampler.recall)
            add(CounterMetricFamily, "checkpoints", consumer.checkpoints)
            add(CounterMetricFamily, "checkpoint_failures", consumer.checkpoint_failures)
            add(GaugeMetricFamily, "checkpoint_bytes", consumer.checkpoint_bytes)
            add(GaugeMetricFamily, "stream_expected_seq", consumer.stream.expected)
            add(GaugeMetricFamily, "stream_held_batches", consumer.stream.held)
            add(GaugeMetricFamily, "writer_pending", writer.pending)
            add(GaugeMetricFamily, "writer_lag_seconds", writer.lag_s)
            add(GaugeMetricFamily, "writer_active", writer.active)
            for cause, count in consumer.stream.decode_errors.items():
                errors.add_metric([*where, cause], count)
            consumer.received.add_to(received, where)
            writer.visible.add_to(visible, where)
            status = consumer.status()
            state.add_metric([*where, status.state, status.cause], 1)
        yield from families.values()
        yield from (errors, received, visible, state)


_HELP: Final = {
    "inventory_copies": "Physical block copies held, over all media and groups",
    "inventory_index_blocks": "Index blocks attached",
    "inventory_detached": "Engine blocks held but absent from the index, since their prefix is not held",
    "inventory_ambiguous_blocks": "Index blocks several engine hashes claim: some input is hidden",
    "inventory_unsure": "Copies that a loss may have removed, and nothing vouched for since",
    "audit_precision": "Share of sampled blocks of the index that are right",
    "audit_recall": "Share of sampled blocks of the inventory that readers find",
    "checkpoint_bytes": "Size of the newest checkpoint",
    "hash_parity": "1 once a published hash equalled the predicted one: the engine runs our hash rule and seed",
    "stream_expected_seq": "Next sequence number expected",
    "stream_held_batches": "Live batches waiting for a replay to end",
    "writer_pending": "Block states not yet acknowledged by the store",
    "writer_lag_seconds": "Engine time to acknowledged write, newest flush",
    "writer_active": "1 while the registry points at this consumer's incarnation",
}
