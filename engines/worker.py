"""The simulated engine worker: a process that looks like one vLLM server from outside.

One worker has `dp_size` cores, each with its own block pool, event stream and replay socket, behind one HTTP server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import zmq
from aiohttp import web

from .api import Api
from .core import Clock, EngineConfig, EngineCore, ScaledClock, VirtualClock
from .metrics import Metrics
from .publisher import PublisherConfig
from .tokenizer import load_tokenizer

__all__ = ["EngineConfig", "EngineWorker", "run_engine"]

_SHUTDOWN_S = 1.0
"""How long open connections get to finish after their requests were aborted."""


class EngineWorker:
    """One simulated worker inside this event loop. Use as an async context manager, or start and stop it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        clock: Clock | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """clock: modelled time, by default as config.time_scale says. context: for inproc event endpoints.

        Raises ConfigError when the tokenizer cannot be loaded.
        """
        self.config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        if clock is None:
            clock = ScaledClock(config.time_scale) if config.time_scale else VirtualClock()
        self._context = context
        metrics = Metrics(
            config.model,
            {
                "block_size": str(config.block_size),
                "num_gpu_blocks": str(config.num_blocks),
                "enable_prefix_caching": "True",
                "prefix_caching_hash_algo": "sha256_cbor",
                "sliding_window": str(config.sliding_window),
            },
        )
        ranks = range(config.dp_rank, config.dp_rank + config.dp_size)
        self.cores = [EngineCore(config, r, self.tokenizer.plain_ids, clock, metrics.core(r)) for r in ranks]
        metrics.watch(self.cores)
        # A client that goes away cancels its handler, and with it the request.
        self._runner = web.AppRunner(
            Api(config, self.cores, self.tokenizer, metrics).app(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_S,
        )
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Base URL of the HTTP server, once started."""
        assert self._address is not None, "the worker has not been started"
        return self._address

    @property
    def event_sources(self) -> dict[int, PublisherConfig]:
        """Per rank, where its events are, with real ports."""
        return {core.rank: core.publisher.config for core in self.cores}

    async def start(self) -> None:
        """Open every socket. Raises ConfigError or OSError if one cannot be opened, with nothing left open."""
        try:
            for core in self.cores:
                core.start(self._context)
            await self._runner.setup()
            site = web.TCPSite(self._runner, self.config.host, self.config.port)
            await site.start()
        except BaseException:
            await self.stop()
            raise
        host, port = self._runner.addresses[0][:2]
        self._address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Abort what runs, answer those who wait, close every socket. Idempotent."""
        stopped = await asyncio.gather(*(core.stop() for core in self.cores), return_exceptions=True)
        await self._runner.cleanup()
        for error in stopped:
            if error is not None:
                raise error

    async def wait_failed(self) -> None:
        """Waits until a core's loop dies, and raises its error."""
        tasks = [core.task for core in self.cores if core.task is not None]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


async def run_engine(
    config: EngineConfig, *, ready: Callable[[EngineWorker], None] | None = None, stop: asyncio.Event
) -> None:
    """Run one worker until `stop` is set. ready: called once it serves. Raises ConfigError, OSError, or what killed
    a core's loop."""
    async with EngineWorker(config) as worker:
        if ready is not None:
            ready(worker)
        waiting = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(worker.wait_failed())
        try:
            await asyncio.wait((waiting, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
        finally:
            for task in (waiting, failing):
                task.cancel()
            await asyncio.gather(waiting, failing, return_exceptions=True)
