"""Several router processes behind one port: `metatrie router --workers N`.

Each worker is the same command on a port that the kernel shares among them (SO_REUSEPORT); what they must agree on is
in Redis. One that ends takes the others with it, so that whatever supervises this process sees it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import msgspec

from ..proto.errors import ConfigError
from .cli import say_ready
from .stack import EXIT_WITH_PARENT, START_S, STOP_S, ChildFailed

SHARED_PORT: Final = "METATRIE_SHARED_PORT"
"""Set for workers: others listen on their port, too."""


async def run_workers(argv: Sequence[str], workers: int, stop: asyncio.Event, *, host: str, port: int) -> None:
    """Run `metatrie *argv` that often on one port until `stop`. port 0: the operating system picks one.

    Raises ConfigError if the port cannot be shared, ChildFailed if a worker does not start, or ends by itself.
    """
    async with AsyncExitStack() as stack:
        reserved = stack.enter_context(_reserve(host, port))
        port = reserved.getsockname()[1]
        processes: list[asyncio.subprocess.Process] = []
        stack.push_async_callback(_stop, processes)
        for _ in range(workers):
            processes.append(  # noqa: PERF401 -- one by one: what started is stopped if the next does not start
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "metatrie", *argv, "--workers", "1", "--port", str(port)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, EXIT_WITH_PARENT: "1", SHARED_PORT: "1"},
                )
            )
        lines = await asyncio.gather(*(_first_line(process) for process in processes))
        if not all(lines):
            raise ChildFailed("a worker did not start; see its messages above")
        say_ready("router", url=msgspec.json.decode(lines[0])["url"], workers=workers)
        ends = [asyncio.create_task(process.wait()) for process in processes]
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((*ends, stopped), return_when=asyncio.FIRST_COMPLETED)
        ended = not stop.is_set()
        for task in (*ends, stopped):
            task.cancel()
        await asyncio.gather(*ends, stopped, return_exceptions=True)
        if ended:
            raise ChildFailed("a worker ended by itself; see its messages above")


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that holds the port for the workers and never listens."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except (OSError, AttributeError) as error:
        reserved.close()
        raise ConfigError("workers", f"cannot share {host}:{port} ({error})", "choose another port") from None
    return reserved


async def _first_line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            return await process.stdout.readline()
    except TimeoutError:
        return b""


async def _stop(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
    for process in processes:
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
