"""Fixtures every test folder may use: one real redis-server per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from metatrie.indexer.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedRedis]:
    """A private redis-server for the whole session. Tests that kill or reconfigure a server start their own."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """URL of that server, emptied."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url
