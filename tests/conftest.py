"""Fixtures every test folder may use: one real redis-server per session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, settings
from metatrie.indexer.embedded import EmbeddedRedis

# Property tests judge answers, not speed: a busy machine must not fail them.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


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
