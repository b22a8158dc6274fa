"""One replica's consumer: subscription → stream → inventory → writer, plus the engine's own load figures.

The same class runs in the sidecar (index in Redis) and inside `metatrie serve` (index in this process).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Annotated, Final, Literal

import aiohttp
import msgspec

from ..proto.engine import HashRule
from ..proto.index import Index, Load, ReplicaRef, ReplicaSpec, ReplicaStatus
from .inventory import CopyMode, HashMode, Inventory
from .stream import Action, Apply, Dropped, LossPolicy, Phase, Restarted, Stream
from .subscriber import Subscriber
from .writer import IndexWriter

SYNC_PATIENCE_S: Final = 30.0
"""How long a takeover waits for the engine before its (empty) view replaces the predecessor's."""
SCRAPE_S: Final = 1.0
MAX_SCRAPE_BYTES: Final = 4 << 20

_LOAD_METRICS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine worker to follow."""

    replica: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    engine: str = "vllm"
    events: Annotated[str, msgspec.Meta(min_length=1)]
    """ZeroMQ endpoint of this rank's events; with a `*` we bind and the engine connects."""
    replay: str | None = None
    """ZeroMQ endpoint of its replay socket. Without one, lost batches stay lost, and a late start is degraded."""
    topic: str = ""
    """Topic prefix to subscribe to."""
    url: str | None = None
    """Base URL of its HTTP server: for routing, and for its load metrics."""
    role: Literal["both", "prefill", "decode"] = "both"
    hash_mode: HashMode = "auto"
    copy_mode: CopyMode = "count"
    on_loss: LossPolicy = "keep"

    @property
    def ref(self) -> ReplicaRef:
        return ReplicaRef(self.replica, self.dp_rank)


class ReplicaConsumer:
    """Follows one replica until `run` is cancelled."""

    def __init__(
        self,
        config: ReplicaConfig,
        index: Index,
        *,
        rule: HashRule | None,
        owner: str | None = None,
        lease_s: float = 10.0,
        refresh_s: float = 60.0,
        max_blocks: int | None = None,
    ) -> None:
        """owner: a name for this process in the registry; by default a fresh one."""
        self.config = config
        self.stream = Stream(replay=config.replay is not None, dp_rank=config.dp_rank, on_loss=config.on_loss)
        bound = {} if max_blocks is None else {"max_blocks": max_blocks}
        self.inventory = Inventory(
            index.namespace, rule=rule, hash_mode=config.hash_mode, copy_mode=config.copy_mode, **bound
        )
        self.namespace = index.namespace
        self.load: Load | None = None
        self.scrape_failures = 0
        self.scrapes = 0
        self._started = time.monotonic()
        self.writer = IndexWriter(
            index,
            ReplicaSpec(ref=config.ref, engine=config.engine, url=config.url, events=config.events, role=config.role),
            self.inventory,
            owner=owner or uuid.uuid4().hex,
            status=self.status,
            synced=self._synced,
            lease_s=lease_s,
            refresh_s=refresh_s,
        )
        self._subscriber = Subscriber(
            self.stream, events=config.events, replay=config.replay, topic=config.topic, handle=self._handle
        )

    async def run(self, session: aiohttp.ClientSession | None = None) -> None:
        """Until cancelled. session: for scraping; without one (or without a url) the load stays unknown."""
        self._started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._subscriber.run())
            tasks.create_task(self.writer.run())
            if session is not None and self.config.url is not None:
                tasks.create_task(self._scrape_loop(session, self.config.url.rstrip("/") + "/metrics"))

    def status(self) -> ReplicaStatus:
        """What this consumer knows of the quality of its own picture."""
        cause = self.cause()
        return ReplicaStatus(
            state="degraded" if cause else "exact",
            cause=cause,
            load=self.load,
            blocks=self.inventory.index_blocks,
            detached=self.inventory.detached,
            lag_s=self.writer.lag_s,
        )

    def cause(self) -> str:
        """Why the picture is not exact, as a metric label; empty when it is."""
        if self.stream.phase is not Phase.EXACT:
            return self.stream.cause or self.stream.phase.value
        if self.inventory.flaws:
            return min(self.inventory.flaws)
        return "hidden_inputs" if self.inventory.ambiguous else ""

    def _synced(self) -> bool:
        if self.stream.phase in (Phase.CONNECTING, Phase.SYNCING):
            return time.monotonic() - self._started > SYNC_PATIENCE_S
        return True

    def _handle(self, actions: list[Action]) -> None:
        before = (self.stream.phase, self.stream.cause)
        for action in actions:
            match action:
                case Apply(batch=batch):
                    self.writer.submit(self.inventory.apply(batch), batch.ts)
                case Restarted():
                    self.inventory.restart()
                    self.writer.submit(self.inventory.settle(), None)
                case Dropped():
                    self.inventory.clear()
                    self.writer.submit(self.inventory.settle(), None)
        if (self.stream.phase, self.stream.cause) != before or not self.writer.active:
            self.writer.status_changed()

    async def _scrape_loop(self, session: aiohttp.ClientSession, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        while True:
            try:
                async with session.get(url, timeout=timeout) as response:
                    response.raise_for_status()
                    body = bytearray()
                    async for chunk in response.content.iter_chunked(1 << 16):
                        body += chunk
                        if len(body) > MAX_SCRAPE_BYTES:
                            break
                self.load = parse_load(body.decode("utf-8", "replace"), self.config.dp_rank)
                self.scrapes += 1
            except (aiohttp.ClientError, TimeoutError):
                self.load = None
                self.scrape_failures += 1
            await asyncio.sleep(SCRAPE_S)


def parse_load(text: str, dp_rank: int) -> Load | None:
    """Load figures from an engine's Prometheus text; None if it names none of those we know.

    vLLM with data parallelism labels its series `engine="<rank>"`; only this rank's are taken then.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        field = _LOAD_METRICS.get(name)
        if field is None:
            continue
        if 'engine="' in rest and f'engine="{dp_rank}"' not in rest:
            continue
        try:
            value = float(rest.rpartition("}")[2].split()[0])
        except (ValueError, IndexError):
            continue
        if not 0.0 <= value < float("inf"):
            continue  # NaN, infinities and negative counts are legal Prometheus text
        found[field] = found.get(field, 0.0) + value if field != "kv_usage" else max(found.get(field, 0.0), value)
    if not found:
        return None
    return Load(
        running=int(found.get("running", 0)),
        waiting=int(found.get("waiting", 0)),
        kv_usage=found.get("kv_usage", 0.0),
    )
