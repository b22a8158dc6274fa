"""Waiting for what other tasks bring about, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

Reached = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def reached() -> Reached:
    """Awaits a condition; TimeoutError if it does not come about within 20 seconds."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)

    return wait
