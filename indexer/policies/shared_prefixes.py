"""Which part of a prompt is a prefix that many different conversations share?

Strategy. A prefix is *shared* when new branches keep appearing below it: prompts that leave the known tree at a point
where it already went on another way. A busy conversation adds no branch, since its next turn continues its own leaf.
A prompt is sampled at marks, the last block of each `STRIDE_TOKENS` tokens, and a small tree of marks remembers when
the newest `branches` new branches appeared at or below each. Counts only fall with depth, so the shared part of a
prompt is a leading run of its marks.

Bounds: `MAX_MARKS` marks per prompt; two generations of at most `GENERATION` marks each. When the young generation
is full the old one is forgotten; a mark that is met again moves to the young one.

Exactness: what is shared is rounded down to whole strides.
"""

from __future__ import annotations

from collections import deque

from ...proto.hashing import BlockKey, Chain

STRIDE_TOKENS = 512
MAX_MARKS = 256
GENERATION = 65_536


class _Mark:
    """A block on the way of some prompt."""

    __slots__ = ("branches", "continued")

    def __init__(self, newest: int) -> None:
        self.branches: deque[float] = deque(maxlen=newest)
        """When the newest branches at or below it appeared."""
        self.continued = False
        """Some prompt went on below it."""


class SharedPrefixes:
    """Learns from every prompt. Not thread-safe."""

    def __init__(self, *, branches: int, window_s: float) -> None:
        """A prefix is shared while `branches` new branches appeared below it within `window_s`."""
        self._newest = branches
        self._window_s = window_s
        self._young: dict[BlockKey, _Mark] = {}
        self._old: dict[BlockKey, _Mark] = {}

    def shared_blocks(self, chain: Chain, now: float) -> int:
        """Leading blocks of this prompt that are a shared prefix now. Mutates nothing."""
        stride = _stride(chain)
        since = now - self._window_s
        shared = 0
        for at in range(stride, min(chain.blocks, stride * MAX_MARKS) + 1, stride):
            key = chain.keys(at)[at - 1]
            mark = self._young.get(key) or self._old.get(key)
            if mark is None or len(mark.branches) < self._newest or mark.branches[0] < since:
                break
            shared = at
        return shared

    def saw(self, chain: Chain, now: float) -> None:
        """A prompt was routed."""
        stride = _stride(chain)
        path: list[_Mark] = []
        marks = min(chain.blocks // stride, MAX_MARKS)
        keys = chain.keys(marks * stride)
        known = True
        for at in range(stride - 1, marks * stride, stride):
            key = keys[at]
            mark = self._young.get(key)
            if mark is None:
                mark = self._old.get(key)
                if mark is None:
                    mark = _Mark(self._newest)
                    if known:
                        known = False
                        if path and path[-1].continued:
                            for above in path:
                                above.branches.append(now)
                if len(self._young) >= GENERATION:
                    self._old, self._young = self._young, {}
                self._young[key] = mark
            if path:
                path[-1].continued = True
            path.append(mark)


def _stride(chain: Chain) -> int:
    return max(1, STRIDE_TOKENS // chain.block_size)
