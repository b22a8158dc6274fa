"""One engine core: a scheduler that runs in modelled time, publishes its events and hands tokens to its callers.

Strategy. The loop computes a step at once, waits until the step's modelled end, then publishes the step's events and
delivers its tokens. The next step starts where the last one *ended in the model*, not when the event loop got round
to it, so a late loop delays single tokens and never slows the modelled engine down; beyond `MAX_LATENESS_S` the
model gives up the lost time instead of rushing after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import zmq

from ..proto.errors import ConfigError
from ..proto.hashing import DEFAULT_HASH_SEED, BlockSize, none_hash
from .metrics import CoreMetrics
from .pool import BlockPool, Lora
from .publisher import EventEncoder, HashFormat, Publisher, PublisherConfig
from .scheduler import (
    DEFAULT_MAX_NUM_SEQS,
    DEFAULT_TOKEN_BUDGET,
    FinishReason,
    Request,
    Scheduler,
    ServiceModel,
    Step,
)
from .versions import DEFAULT_VERSION, Traits, traits_of

MAX_LATENESS_S = 1.0

_Count = Annotated[int, msgspec.Meta(ge=1)]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one simulated worker process. Raises ConfigError on values that do not fit together."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """HTTP port; 0: any free one."""
    model: Annotated[str, msgspec.Meta(min_length=1)] = "simulated"
    version: str = DEFAULT_VERSION
    """vLLM version whose wire format, hash inputs and eviction order are reproduced."""
    tokenizer: str = "byte"
    """`byte`, or a directory with a Hugging Face tokenizer.json."""
    lora_adapters: tuple[Lora, ...] = ()
    max_model_len: Annotated[int, msgspec.Meta(ge=2)] = 32_768
    """Tokens of prompt plus output per sequence."""

    block_size: BlockSize = 16
    num_blocks: Annotated[int, msgspec.Meta(ge=2)] = 8193
    """KV blocks per rank, the null block included."""
    sliding_window: _Count | None = None
    """Adds a second attention group with this window, in tokens: a hybrid model."""
    hash_seed: str = DEFAULT_HASH_SEED
    """What PYTHONHASHSEED would be."""
    hash_format: HashFormat = "int"
    """Block hashes in events: low 64 bits, or all 32 bytes."""

    events_endpoint: str = "tcp://*:5557"
    """ZeroMQ PUB endpoint of rank 0; `tcp://*:0` takes any free port. Rank r uses port + r."""
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: _Count = 10_000
    hwm: _Count = 100_000

    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """Data-parallel rank of this worker's first core."""
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Cores in this worker, each with its own cache and event stream."""

    max_num_batched_tokens: _Count = DEFAULT_TOKEN_BUDGET
    max_num_seqs: _Count = DEFAULT_MAX_NUM_SEQS
    service: ServiceModel = ServiceModel()
    time_scale: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """Real seconds per modelled second; 0: as fast as the machine allows."""
    default_output_tokens: _Count = 128
    """Mean length of a chat answer whose request sets no limit."""
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        traits = traits_of(self.version)
        groups = 1 if self.sliding_window is None else 2
        needed = groups * -(-self.max_model_len // self.block_size) + 1
        if self.num_blocks < needed:
            raise ConfigError(
                "num_blocks",
                f"{self.num_blocks} blocks cannot hold one sequence of {self.max_model_len} tokens",
                f"set at least {needed}, or a smaller max_model_len",
            )
        if groups > 1 and not traits.group_idx:
            raise ConfigError("sliding_window", "this version has no hybrid events", "use version 0.20.0 or later")
        names = [self.model, *(lora.name for lora in self.lora_adapters)]
        if len(set(names)) < len(names) or "" in names:
            raise ConfigError("lora_adapters", "two models share a name, or one has none", "name each differently")

    @property
    def kv_events(self) -> PublisherConfig:
        return PublisherConfig(
            endpoint=self.events_endpoint,
            replay_endpoint=self.replay_endpoint,
            buffer_steps=self.buffer_steps,
            hwm=self.hwm,
            topic=self.topic,
        )


class Clock(Protocol):
    """Modelled time, in seconds."""

    def now(self) -> float: ...

    async def sleep_until(self, when: float) -> None:
        """Returns at `when` or later, and lets other tasks run in any case."""
        ...


class ScaledClock:
    """Real time, stretched: one modelled second lasts `scale` real ones."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def now(self) -> float:
        return time.monotonic() / self._scale

    async def sleep_until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, (when - self.now()) * self._scale))


class VirtualClock:
    """Time that passes only by being waited for."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)
        await asyncio.sleep(0)


class Output:
    """One sequence of a completion, as its caller sees it."""

    __slots__ = ("completion", "finish", "fresh", "index", "last_s", "request")

    def __init__(self, completion: Completion, index: int, request: Request) -> None:
        self.completion = completion
        self.index = index
        self.request = request
        self.fresh: list[int] = []
        """Tokens delivered since the caller last took them."""
        self.finish: FinishReason | None = None
        """Set once the last token was delivered; the request itself knows a step earlier."""
        self.last_s: float | None = None
        """When the newest token was delivered."""


class Completion:
    """Sequences submitted together, and one place to wait for all of them. Bounded by their max_tokens."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self._changed: dict[Output, None] = {}
        self._wake = asyncio.Event()

    async def changes(self) -> list[Output]:
        """Outputs with fresh tokens or a finish since the last call, in the order they changed. Waits for some."""
        await self._wake.wait()
        self._wake.clear()
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def notify(self, output: Output) -> None:
        self._changed[output] = None
        self._wake.set()


class Snapshot(msgspec.Struct, frozen=True):
    """The cache at a moment when every one of its events has been published."""

    next_seq: int
    resident: dict[int, int]
    """Copies by the low 64 bits of the block hash."""


class EngineCore:
    """One data-parallel rank: its pool, scheduler, publisher and loop."""

    def __init__(
        self, config: EngineConfig, rank: int, vocabulary: Sequence[int], clock: Clock, metrics: CoreMetrics
    ) -> None:
        self.rank = rank
        self._traits: Traits = traits_of(config.version)
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            none_hash(config.hash_seed),
            extra_keys=self._traits.hash_extras,
            unhashed_first=self._traits.unhashed_first,
            windows=(None,) if config.sliding_window is None else (None, config.sliding_window),
        )
        self.scheduler = Scheduler(
            self.pool,
            config.service,
            vocabulary,
            max_model_len=config.max_model_len,
            token_budget=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self.publisher = Publisher(config.kv_events, self._traits, rank=rank, host=config.host)
        self._encoder = EventEncoder(self._traits, config.block_size, config.hash_format)
        self._clock = clock
        self._metrics = metrics
        self._outputs: dict[Request, Output] = {}
        self._work = asyncio.Event()
        self._stepping = False
        self._audits: list[asyncio.Future[Snapshot]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """Open the event sockets and start the loop. Raises ConfigError for unusable endpoints."""
        self.publisher.start(context)
        self._task = asyncio.create_task(self._run(), name=f"engine-core-{self.rank}")

    async def stop(self) -> None:
        """Abort every request and close the sockets. Raises what killed the loop, if anything did."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        for output in list(self._outputs.values()):
            self.end(output, "abort")
            output.completion.notify(output)
        for audit in self._audits:
            audit.cancel()
        await self.publisher.close()
        if task is not None and not task.cancelled():
            task.result()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._task is not None and not self._task.done()

    @property
    def task(self) -> asyncio.Task[None] | None:
        """The running loop; done only if it was stopped or died."""
        return self._task

    def submit(self, requests: Sequence[Request]) -> Completion:
        """Queue requests made by this core's scheduler."""
        completion = Completion()
        now = self._clock.now()
        for index, request in enumerate(requests):
            output = Output(completion, index, request)
            completion.outputs.append(output)
            self._outputs[request] = output
            self.scheduler.add(request, now)
        self._work.set()
        return completion

    def end(self, output: Output, reason: FinishReason) -> None:
        """Stop a sequence and free its blocks; nothing more is delivered. Harmless when it has finished."""
        self.scheduler.end(output.request, reason)
        if self._outputs.pop(output.request, None) is not None:
            output.finish = reason
            self._metrics.finished(output.request, self._clock.now())

    def abort(self, completion: Completion) -> None:
        """The caller went away."""
        for output in completion.outputs:
            self.end(output, "abort")

    async def snapshot(self) -> Snapshot:
        """The cache between two steps."""
        if not self._stepping:
            return self._snapshot()
        audit: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._audits.append(audit)
        return await audit

    def _snapshot(self) -> Snapshot:
        resident = {int.from_bytes(digest[-8:], "big"): n for digest, n in self.pool.resident().items()}
        return Snapshot(self.publisher.next_seq, resident)

    async def _run(self) -> None:
        clock, scheduler = self._clock, self.scheduler
        end = clock.now()
        while True:
            if not scheduler.has_requests:
                self._work.clear()
                await self._work.wait()
                end = clock.now()
            now = clock.now()
            start = end if now - end < MAX_LATENESS_S else now
            step = scheduler.step(start)
            if step is None:
                continue
            self._stepping = True
            if self._traits.publish_first:
                self._publish(step)
            end = start + step.duration_s
            await clock.sleep_until(end)
            if not self._traits.publish_first:
                self._publish(step)
            self._stepping = False
            self._deliver(step)
            self._answer_audits()

    def _publish(self, step: Step) -> None:
        if step.events:
            self.publisher.publish(self._encoder.batch(step.events, ts=time.time(), rank=self.rank))

    def _deliver(self, step: Step) -> None:
        outputs, metrics, now = self._outputs, self._metrics, self._clock.now()
        for request, token in step.tokens:
            output = outputs.get(request)
            if output is None:  # ended while the step ran
                continue
            output.fresh.append(token)
            if output.last_s is None:
                metrics.first_token(request, now)
            else:
                metrics.next_token(now - output.last_s)
            output.last_s = now
            if request.finish is not None:
                output.finish = request.finish
                del outputs[request]
                metrics.finished(request, now)
            output.completion.notify(output)
        metrics.stepped(step)

    def _answer_audits(self) -> None:
        if self._audits:
            snapshot = self._snapshot()
            for audit in self._audits:
                if not audit.done():
                    audit.set_result(snapshot)
            self._audits.clear()
