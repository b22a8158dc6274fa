"""The whole stack on one machine, as separate processes: Redis, simulated engines, their sidecars, the router.

Each child is the same program a deployment runs (`metatrie engine`, `sidecar`, `router`). It prints one JSON line
when it serves, which tells where, and leaves when its standard input closes, so nothing survives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from ..indexer.embedded import EmbeddedRedis
from ..indexer.policies import DEFAULT_POLICY
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
    num_blocks: int = 4097
    max_model_len: int = 16_384
    prefill_tokens_per_s: float = 6_000.0
    redis: str | None = None
    """An existing server's URL; None starts one."""
    port: int = 8080
    """The first router's HTTP port, the others take any free one; 0: so does the first."""
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    """One router each, over the same index."""


class Engine(msgspec.Struct, frozen=True):
    """Where one simulated engine and its sidecar answer."""

    name: str
    url: str
    sidecar_url: str


class Stack(msgspec.Struct, frozen=True):
    """A running stack."""

    config: StackConfig
    routers: dict[str, str]
    """By policy: where its router answers."""
    redis_url: str
    engines: list[Engine]
    logs: Path
    """Directory with one log file per child."""

    @property
    def router_url(self) -> str:
        """Of the first policy."""
        return self.routers[self.config.policies[0]]


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
        routers: dict[str, str] = {}
        for policy in config.policies:
            port = 0 if routers else config.port
            argv = ["router", "--redis", redis_url, "--port", str(port), "--policy", policy]
            routers[policy] = (await children.start(f"router {policy}", logs, argv))["url"]
        await asyncio.gather(*(_until_ready(sidecar["url"]) for sidecar in await sidecars))
        yield Stack(
            config,
            routers,
            redis_url,
            [
                Engine(name, said["url"], sidecar["url"])
                for name, said, sidecar in zip(names, engines, await sidecars, strict=True)
            ],
            logs,
        )


async def _until_ready(url: str) -> None:
    """Wait until a sidecar's registration counts, so that the first request finds the fleet whole."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_S):
        while True:
            async with session.get(f"{url}/readyz") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.02)


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


class Child:
    """One `metatrie` command as a process of its own, which may be killed, stopped and started again."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self._argv = argv
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._drain: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Started, and not ended since."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> dict[str, Any]:
        """Start it and return what its first line says. Raises ChildFailed if it does not serve within START_S."""
        with self._log.open("ab") as err:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "metatrie", *self._argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=err,
                env={**os.environ, EXIT_WITH_PARENT: "1"},
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            said = self.log_text().strip()[-2000:]
            raise ChildFailed(f"{self.name} did not start: {said or 'it said nothing'}")
        self._drain = asyncio.create_task(_discard(process.stdout))
        ready: dict[str, Any] = msgspec.json.decode(line)
        return ready

    def signal(self, number: int) -> None:
        """Send a signal; harmless when it has ended."""
        if self.running and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def log_text(self) -> str:
        """What it wrote to standard error, over all its starts."""
        return self._log.read_text("utf-8", "replace")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL if it takes longer than STOP_S."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(STOP_S):
                await self.wait()
        except TimeoutError:
            await self.kill()

    async def wait(self) -> None:
        """Until it has ended."""
        if self._process is not None:
            await self._process.wait()
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)


class _Children:
    def __init__(self) -> None:
        self._children: list[Child] = []

    async def start(self, name: str, logs: Path, argv: Sequence[str]) -> dict[str, Any]:
        """Start one child and wait for the line that says it serves."""
        child = Child(name, argv, logs / f"{name.replace(' ', '-')}.log")
        self._children.append(child)
        return await child.start()

    async def stop(self) -> None:
        for child in self._children:
            child.signal(signal.SIGTERM)
        for child in self._children:
            await child.stop()


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
