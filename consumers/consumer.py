"""One replica's consumer: subscription → stream → inventory → writer, plus the engine's own load figures.

The same class runs in the sidecar (index in Redis) and inside `metatrie serve` (index in this process).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import aiohttp
import msgspec

from ..proto.api import BlocksResponse
from ..proto.engine import HashRule
from ..proto.errors import BadCheckpoint
from ..proto.events import EngineHash
from ..proto.hashing import BlockKey
from ..proto.index import Index, Load, ReplicaRef, ReplicaSpec, ReplicaStatus
from .checkpoint import Checkpoint, CheckpointFile
from .evidence import Departures, evidence
from .inventory import DEFAULT_MAX_BLOCKS, CopyMode, HashMode, Inventory
from .lag import Lag
from .sampler import IndexSampler
from .stream import Action, Apply, Doubted, Dropped, LossPolicy, Phase, Restarted, Stream
from .subscriber import Subscriber
from .writer import IndexWriter

SYNC_PATIENCE_S: Final = 30.0
"""How long a takeover waits for the engine before its (empty) view replaces the predecessor's."""
SCRAPE_S: Final = 1.0
MAX_SCRAPE_BYTES: Final = 4 << 20
CHECKPOINT_S: Final = 5.0
"""Least time between two checkpoints; more if writing them would take over a hundredth of our time."""
SAMPLE_S: Final = 10.0
"""Time between two comparisons of samples of index and inventory."""
MAX_TRUTH_BYTES: Final = 256 << 20
REPAIR_TRIES: Final = 50
"""Looks at an engine's own table, until none of its steps came in between."""
REPAIR_WAIT_S: Final = 0.1

_log = logging.getLogger("metatrie.consumer")

_LOAD_METRICS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:gpu_cache_usage_perc": "kv_usage",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "kv_usage",
}


_NUM_GPU_BLOCKS: Final = re.compile(r'num_gpu_blocks="(\d{1,12})"')
_decode_table = msgspec.json.Decoder(dict[EngineHash, int], strict=False).decode


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What `ReplicaConsumer.repair` did."""

    engine_compared: bool
    """The inventory was brought in line with the engine's own table."""
    corrected: int
    """Blocks whose copies were not as the engine has them."""
    unknown: int
    """Blocks the engine has and that cannot be placed, since their tokens were never heard of."""


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
    ignore_media: tuple[str, ...] = ()
    """Media to keep out of the index, since their publisher never says what it dropped (docs/engines.md)."""
    replay_timeout_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0
    """Silence after which a replay is asked for anew; three times without progress, and it counts as failed."""
    probe_s: Annotated[float, msgspec.Meta(ge=0.1, le=3600)] = 5.0
    """Silence after which its replay socket is asked whether anything was missed."""
    capacity_blocks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """KV blocks its GPU memory holds: the bound on what is kept after a loss. Read from its metrics if it tells."""

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
        sample_s: float = SAMPLE_S,
        max_blocks: int | None = None,
        checkpoint: CheckpointFile | None = None,
        address: str | None = None,
    ) -> None:
        """owner: a name for this process in the registry; by default a fresh one, or the one that comes with the
        checkpoint. address: base URL of our own HTTP server, for the registry."""
        self.config = config
        self.stream = Stream(
            replay=config.replay is not None,
            dp_rank=config.dp_rank,
            on_loss=config.on_loss,
            replay_timeout_s=config.replay_timeout_s,
            probe_s=config.probe_s,
        )
        self.inventory = Inventory(
            index.namespace,
            rule=rule,
            hash_mode=config.hash_mode,
            copy_mode=config.copy_mode,
            max_blocks=DEFAULT_MAX_BLOCKS if max_blocks is None else max_blocks,
            ignore_media=config.ignore_media,
        )
        self.inventory.capacity = config.capacity_blocks
        self.namespace = index.namespace
        self.departures = Departures()
        self.received = Lag()
        """From the engine's clock when it published a live batch to ours when it was applied."""
        self.load: Load | None = None
        self.scrape_failures = 0
        self.scrapes = 0
        self.checkpoints = 0
        """Written so far."""
        self.checkpoint_failures = 0
        self.checkpoint_bytes = 0
        self._checkpoint = checkpoint
        if checkpoint is not None:
            checkpoint.acquire()
            owner = owner or checkpoint.owner
        self._saved_at: tuple[int, str] | None = None
        self._started = time.monotonic()
        self.writer = IndexWriter(
            index,
            ReplicaSpec(
                ref=config.ref,
                engine=config.engine,
                url=config.url,
                events=config.events,
                role=config.role,
                consumer=address,
            ),
            self.inventory,
            owner=owner or uuid.uuid4().hex,
            status=self.status,
            synced=self._synced,
            lease_s=lease_s,
            refresh_s=refresh_s,
        )
        self.sampler = IndexSampler(index, self.inventory, self.writer, interval_s=sample_s)
        self._subscriber = Subscriber(
            self.stream, events=config.events, replay=config.replay, topic=config.topic, handle=self._handle
        )

    async def run(self, session: aiohttp.ClientSession | None = None) -> None:
        """Until cancelled. session: for scraping; without one (or without a url) the load stays unknown."""
        self._started = time.monotonic()
        try:
            if self._checkpoint is not None and self._checkpoint.held:
                await self._resume(self._checkpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._subscriber.run())
                tasks.create_task(self.writer.run())
                tasks.create_task(self.sampler.run())
                if self._checkpoint is not None:
                    tasks.create_task(self._checkpoint_loop(self._checkpoint))
                if session is not None and self.config.url is not None:
                    tasks.create_task(self._scrape_loop(session, self.config.url.rstrip("/") + "/metrics"))
        finally:
            if self._checkpoint is not None and self._checkpoint.held:
                self._save(self._checkpoint, self._snapshot())
                self._checkpoint.release()

    async def repair(self, session: aiohttp.ClientSession) -> Repair:
        """Bring everything in line: the inventory with the engine's own table, if it shows one (`/debug/cache`, the
        simulated engine), and the index with the inventory, by publishing it anew."""
        corrected, unknown = self.inventory.stats.corrected, 0
        compared = False
        for _ in range(REPAIR_TRIES if self.config.url is not None else 0):
            found = await self._engine_table(session)
            if found is None:
                break
            next_seq, table = found
            # Only between the same two batches can both be compared.
            if next_seq == self.stream.expected and not self.stream.waiting:
                unknown = self.inventory.reconcile(table)
                self._settle()
                if not unknown and self.inventory.only_holds("gpu"):
                    self.stream.proven()
                compared = True
                break
            await asyncio.sleep(REPAIR_WAIT_S)
        self.writer.republish()
        return Repair(engine_compared=compared, corrected=self.inventory.stats.corrected - corrected, unknown=unknown)

    async def _engine_table(self, session: aiohttp.ClientSession) -> tuple[int, dict[EngineHash, int]] | None:
        """(batches published until then, copies by engine hash), or None if the engine shows no such table."""
        assert self.config.url is not None
        url, timeout = self.config.url.rstrip("/") + "/debug/cache", aiohttp.ClientTimeout(total=5.0)
        try:
            async with session.get(url, params={"dp_rank": self.config.dp_rank}, timeout=timeout) as response:
                response.raise_for_status()
                raw = await read_bounded(response, MAX_TRUTH_BYTES)
                return int(response.headers["X-Next-Seq"]), _decode_table(raw)
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError, msgspec.DecodeError):
            return None

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
        if self.writer.publishing:
            return "republishing"
        if self.inventory.flaws:
            return min(self.inventory.flaws)
        return "hidden_inputs" if self.inventory.ambiguous else ""

    def evidence(self, keys: Sequence[BlockKey]) -> BlocksResponse:
        """What is known here of single blocks, to explain what a request found. Slow if much is detached."""
        status = self.status()
        return evidence(
            keys,
            self.inventory,
            self.departures,
            self.stream,
            ref=self.config.ref,
            namespace=self.namespace,
            hash_mode=self.config.hash_mode,
            state=status.state,
            cause=status.cause,
        )

    def _synced(self) -> bool:
        if self.stream.phase in (Phase.CONNECTING, Phase.SYNCING) or self.stream.waiting:
            return time.monotonic() - self._started > SYNC_PATIENCE_S
        return True

    # ---- checkpoint ---------------------------------------------------------------------------------------------

    async def _resume(self, file: CheckpointFile) -> None:
        """Take over what was saved. Whether it still holds is for the stream to find out."""
        try:
            saved = await asyncio.to_thread(file.load)
            if saved is None:
                return
            if (saved.namespace, ReplicaRef(saved.replica, saved.dp_rank)) != (self.namespace.id, self.config.ref):
                raise BadCheckpoint("is another replica's")
            if (saved.engine, saved.hash_mode, saved.copy_mode) != self._reading:
                raise BadCheckpoint("was written under other settings")
            try:
                self.inventory.restore(saved.inventory)
            except ValueError as error:
                raise BadCheckpoint(f"contradicts itself ({error})") from None
        except BadCheckpoint as error:
            _log.warning("%s: starting without a checkpoint: the one found %s", self.config.ref, error)
            return
        self.stream.resume(saved.position)
        if saved.position.cause:
            self.inventory.doubt()
        self.inventory.settle()  # nothing was claimed yet, so publishing starts from the inventory

    @property
    def _reading(self) -> tuple[str, HashMode, CopyMode]:
        """Settings that decide what the same events mean."""
        return self.config.engine, self.config.hash_mode, self.config.copy_mode

    async def _checkpoint_loop(self, file: CheckpointFile) -> None:
        pause = CHECKPOINT_S
        while True:
            await asyncio.sleep(pause)
            if not file.held and not (self.writer.active and file.acquire(keep_owner=True)):
                continue
            started = time.perf_counter()
            snapshot = self._snapshot()
            if snapshot is not None:
                await asyncio.to_thread(self._save, file, snapshot)
            pause = max(CHECKPOINT_S, 100 * (time.perf_counter() - started))

    def _snapshot(self) -> Checkpoint | None:
        """Stream and inventory at this moment; None if nothing changed since the last one."""
        position = self.stream.position
        if position is None or self._saved_at == (position.expected, position.cause):
            return None
        engine, hash_mode, copy_mode = self._reading
        return Checkpoint(
            namespace=self.namespace.id,
            replica=self.config.replica,
            dp_rank=self.config.dp_rank,
            engine=engine,
            hash_mode=hash_mode,
            copy_mode=copy_mode,
            position=position,
            inventory=self.inventory.state(),
        )

    def _save(self, file: CheckpointFile, snapshot: Checkpoint | None) -> None:
        if snapshot is None:
            return
        try:
            self.checkpoint_bytes = file.save(snapshot)
        except OSError as error:
            if not self.checkpoint_failures:
                _log.warning("%s: no checkpoint could be written (%s)", self.config.ref, error.strerror)
            self.checkpoint_failures += 1
            return
        self.checkpoints += 1
        self._saved_at = snapshot.position.expected, snapshot.position.cause

    def _handle(self, actions: list[Action]) -> None:
        before = (self.stream.phase, self.stream.cause)
        for action in actions:
            match action:
                case Apply(seq=seq, batch=batch, replayed=replayed):
                    if batch.ts and not replayed:
                        self.received.observe(time.time() - batch.ts)
                    delta = self.inventory.apply(batch)
                    self.departures.note(delta, seq, batch.ts)
                    self.sampler.note(delta)
                    self.writer.submit(delta, batch.ts, live=not replayed)
                case Restarted():
                    self.inventory.restart()
                    self._forgot()
                case Dropped():
                    self.inventory.clear()
                    self._forgot()
                case Doubted():
                    self.inventory.doubt()
                    self._settle()
        if (self.stream.phase, self.stream.cause) != before or not self.writer.active:
            self.writer.status_changed()

    def _settle(self) -> None:
        """Pass on what changed in the inventory without a batch saying so."""
        delta = self.inventory.settle()
        self.sampler.note(delta)
        self.writer.submit(delta, None)

    def _forgot(self) -> None:
        delta = self.inventory.settle()
        self.departures.note(delta, self.stream.expected, time.time())
        self.writer.submit(delta, None)

    async def _scrape_loop(self, session: aiohttp.ClientSession, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=2.0)
        while True:
            try:
                async with session.get(url, timeout=timeout) as response:
                    response.raise_for_status()
                    text = (await read_bounded(response, MAX_SCRAPE_BYTES)).decode("utf-8", "replace")
                self.load = parse_load(text, self.config.dp_rank)
                self.inventory.capacity = self.config.capacity_blocks or parse_capacity(text, self.config.dp_rank)
                self.scrapes += 1
            except (aiohttp.ClientError, TimeoutError):
                self.load = None
                self.scrape_failures += 1
            await asyncio.sleep(SCRAPE_S)


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """At most about `limit` bytes of a body; the rest is not read."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) > limit:
            break
    return bytes(body)


def parse_capacity(text: str, dp_rank: int) -> int | None:
    """KV blocks a vLLM engine's GPU memory can hold, from its Prometheus text; None if it does not say."""
    for line in text.splitlines():
        if line.startswith("vllm:cache_config_info{") and (found := _NUM_GPU_BLOCKS.search(line)):
            if 'engine="' in line and f'engine="{dp_rank}"' not in line:
                continue
            return max(1, int(found[1]) - 1)  # one is the null block
    return None


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
