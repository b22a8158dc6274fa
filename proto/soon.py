"""A value that a callback will bring, for one waiter: what a future is, without the turn of the loop in between.

A request that needs one answer from a connection of ours begins in one callback of the loop and ends in another. A
task and a future for it would cost as much as everything else about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
U = TypeVar("U")


class Soon(Generic[T]):
    """Will be a T, or an awaitable of one where more has to be waited for than was thought.

    Whoever makes it calls `bring` once; whoever gets it may `map` it, and calls `when`, before returning to the loop.
    """

    __slots__ = ("_brought", "_here", "_then", "make")

    def __init__(self, make: Callable[[Any], T | Awaitable[T]]) -> None:
        """make: turns what is brought into the value; may raise."""
        self.make: Callable[[Any], object] = make
        self._then: Callable[[Soon[T]], None] | None = None
        self._here = False
        self._brought: object = None

    def bring(self, brought: object) -> None:
        """What the value is made of."""
        self._brought, self._here = brought, True
        if self._then is not None:
            self._then(self)

    def when(self, then: Callable[[Soon[T]], None]) -> None:
        """Call `then`, from the loop, as soon as there is a value. It must not raise."""
        if self._here:
            asyncio.get_running_loop().call_soon(then, self)
        self._then = then

    def map(self, step: Callable[[Callable[[], T | Awaitable[T]]], U | Awaitable[U]]) -> Soon[U]:
        """The same, made into something else by one step more, which gets a call that returns the value or raises."""
        make = self.make
        self.make = lambda brought: step(cast("Callable[[], T | Awaitable[T]]", partial(make, brought)))
        return cast("Soon[U]", self)

    def result(self) -> T | Awaitable[T]:
        """The value, once `then` is called. Raises what making it raises."""
        return cast("T | Awaitable[T]", self.make(self._brought))
