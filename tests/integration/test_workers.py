"""Several router processes behind one port."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from metatrie.indexer.embedded import EmbeddedRedis


def workers_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]


@pytest.fixture
def router() -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    with EmbeddedRedis() as redis:
        process = subprocess.Popen(
            [sys.executable, "-m", "metatrie", "router", "--redis", redis.url, "--port", "0", "--workers", "2"],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds the workers through /proc")
def test_workers_share_the_port_and_stop_together(router: tuple[subprocess.Popen[bytes], dict[str, Any]]) -> None:
    process, said = router
    assert said["workers"] == 2
    children = workers_of(process.pid)
    assert len(children) == 2
    address = urlsplit(said["url"])
    started: set[str] = set()
    deadline = time.monotonic() + 20
    while len(started) < 2:
        # The kernel picks a worker per connection; each tells its own start time.
        assert time.monotonic() < deadline
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
        connection.request("POST", "/v1/match", json.dumps({"model": "none", "token_ids": [1]}))
        assert connection.getresponse().read()
        connection.request("GET", "/metrics")
        metrics = connection.getresponse().read().decode()
        started.add(
            next(line for line in metrics.splitlines() if line.startswith("metatrie_router_http_requests_cr"))
        )
        connection.close()
    os.kill(children[0], signal.SIGKILL)
    assert process.wait(20) != 0
    assert not any(os.path.exists(f"/proc/{child}") for child in children)
