"""Values that a callback brings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from metatrie.proto.soon import Soon


async def test_it_is_made_when_it_is_brought() -> None:
    soon: Soon[int] = Soon(int)
    seen: list[object] = []
    soon.when(lambda it: seen.append(it.result()))
    assert seen == []
    soon.bring("7")
    assert seen == [7]


async def test_brought_too_early_it_is_told_from_the_loop() -> None:
    soon: Soon[int] = Soon(int)
    told = asyncio.Event()
    soon.bring("7")
    soon.when(lambda _: told.set())
    assert not told.is_set()
    async with asyncio.timeout(5):
        await told.wait()
    assert soon.result() == 7


async def test_a_step_sees_the_value_or_what_went_wrong() -> None:
    def worded(made: Callable[[], int | Awaitable[int]]) -> str:
        try:
            return f"got {made()}"
        except ValueError:
            return "no number"

    for brought, expected in (("7", "got 7"), ("x", "no number")):
        soon: Soon[int] = Soon(int)
        mapped = soon.map(worded).map(lambda made: [made()])
        mapped.when(lambda _: None)
        soon.bring(brought)
        assert mapped.result() == [expected]


async def test_what_making_it_raises_is_the_waiters() -> None:
    soon: Soon[int] = Soon(int)
    soon.when(lambda _: None)
    soon.bring("x")
    with pytest.raises(ValueError, match="invalid literal"):
        soon.result()
