"""The whole stack on one machine, as separate processes: Redis, simulated engines, their sidecars, the router.

Each child is the same program a deployment runs (`metatrie engine`, `sidecar`, `router`). It prints one JSON line
when it serves, which tells where, and leaves when its standard input closes, so nothing survives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ..indexer.embedded import EmbeddedRedis
from ..proto.errors import MetatrieError

START_S: Final = 60.0
STOP_S: Final = 5.0
EXIT_WITH_PARENT: Final = "METATRIE_EXIT_WITH_PARENT"
"""Set for children: they stop when their standard input reaches its end."""


class ChildFailed(MetatrieError):
    """A child process ended before it was ready; the text says which and what it said last."""


class StackConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the local stack. Times and rates are the simulated engines'."""

    engines: int = 4
    model: str = "demo-model"
    block_size: int = 16
    num_blocks: int = 2049
    max_model_len: int = 16_384
    prefill_tokens_per_s: float = 10_000.0
    redis: str | None = None
    """An existing server's URL; None starts one."""
    port: int = 8080
    """The router's HTTP port; 0: any free one."""
    policy: str = "hybrid"


class Engine(msgspec.Struct, frozen=True):
    """Where one simulated engine and its sidecar answer."""

    name: str
    url: str
    sidecar_url: str


class Stack(msgspec.Struct, frozen=True):
    """A running stack."""

    config: StackConfig
    router_url: str
    redis_url: str
    engines: list[Engine]
    logs: Path
    """Directory with one log file per child."""


@contextlib.asynccontextmanager
async def running(config: StackConfig) -> AsyncIterator[Stack]:
    """Start everything, hand it over, stop it all. Raises ChildFailed if a part does not come up."""
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="metatrie-")))
        redis_url = config.redis
        if redis_url is None:
            redis_url = (await stack.enter_async_context(EmbeddedRedis())).url
        children = await stack.enter_async_context(_children())
        names = [f"engine-{i}" for i in range(config.engines)]
        engines = await asyncio.gather(*(children.start(name, logs, _engine(config)) for name in names))
        sidecars = asyncio.gather(
            *(
                children.start(f"sidecar of {name}", logs, _sidecar(config, redis_url, name, said))
                for name, said in zip(names, engines, strict=True)
            )
        )
        router_argv = ["router", "--redis", redis_url, "--port", str(config.port), "--policy", config.policy]
        router = await children.start("router", logs, router_argv)
        yield Stack(
            config,
            router["url"],
            redis_url,
            [
                Engine(name, said["url"], sidecar["url"])
                for name, said, sidecar in zip(names, engines, await sidecars, strict=True)
            ],
            logs,
        )


def _engine(config: StackConfig) -> list[str]:
    return [
        *("engine", "--port", "0", "--model", config.model),
        *("--block-size", str(config.block_size), "--num-blocks", str(config.num_blocks)),
        *("--max-model-len", str(config.max_model_len)),
        *("--prefill-tokens-per-s", str(config.prefill_tokens_per_s)),
        *("--events", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*"),
    ]


def _sidecar(config: StackConfig, redis_url: str, name: str, engine: Mapping[str, Any]) -> list[str]:
    return [
        *("sidecar", "--redis", redis_url, "--port", "0", "--engine", "vllm", "--replica", name),
        *("--model", config.model, "--block-size", str(config.block_size)),
        *("--url", engine["url"], "--events", engine["events"], "--replay", engine["replay"]),
    ]


class _Children:
    def __init__(self) -> None:
        self._processes: list[asyncio.subprocess.Process] = []
        self._drains: list[asyncio.Task[None]] = []

    async def start(self, name: str, logs: Path, argv: Sequence[str]) -> dict[str, Any]:
        """Start one child and wait for the line that says it serves."""
        log = logs / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "metatrie", *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env={**os.environ, EXIT_WITH_PARENT: "1"},
            )
        self._processes.append(process)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            said = log.read_text("utf-8", "replace").strip()[-2000:]
            raise ChildFailed(f"{name} did not start: {said or 'it said nothing'}")
        self._drains.append(asyncio.create_task(_discard(process.stdout)))
        ready: dict[str, Any] = msgspec.json.decode(line)
        return ready

    async def stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
        for process in self._processes:
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        for drain in self._drains:
            drain.cancel()
        await asyncio.gather(*self._drains, return_exceptions=True)


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


@contextlib.asynccontextmanager
async def _children() -> AsyncIterator[_Children]:
    children = _Children()
    try:
        yield children
    finally:
        await children.stop()
