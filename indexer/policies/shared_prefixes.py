"""Which part of a prompt is a prefix that many different conversations share?

Strategy. A prefix is *shared* when new branches keep appearing below it: prompts that leave the known tree at a point
where it already went on another way. A busy conversation adds no branch, since its next turn continues its own leaf.
A prompt is sampled at marks: the last block of each `STRIDE_TOKENS` tokens, and the last of all. A small tree of
marks remembers when the newest `branches` new branches appeared at or below each. Counts only fall with depth, so the
shared part of a prompt is a leading run of its marks.

A last block seldom falls on a stride, so the next turn does not meet its mark by itself; the mark above therefore
remembers the newest `MAX_ENDS` prompts that ended below it. Beyond that many a continued conversation looks like a
branch, which below a prefix with so many ends it may.

Bounds: `MAX_MARKS` marks per prompt; two generations of at most `GENERATION` marks each. When the young generation is
full the old one is forgotten; a mark that is met again moves to the young one.

Exactness: what is shared is rounded down to whole strides.
"""

from __future__ import annotations

from collections import deque

from ...proto.hashing import BlockKey, Chain

STRIDE_TOKENS = 512
MAX_MARKS = 256
MAX_ENDS = 8
GENERATION = 65_536


class _Mark:
    """A block on the way of some prompt."""

    __slots__ = ("branches", "continued", "ends")

    def __init__(self) -> None:
        self.branches: deque[float] | None = None
        """When the newest branches at or below it appeared. Most marks never see one."""
        self.continued = False
        """Some prompt went on below it."""
        self.ends: deque[tuple[int, BlockKey, _Mark]] | None = None
        """Where the newest prompts ended between it and the next stride: (blocks before, key, mark)."""


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
            if mark is None:
                break
            branches = mark.branches
            if branches is None or len(branches) < self._newest or branches[0] < since:
                break
            shared = at
        return shared

    def saw(self, chain: Chain, now: float) -> None:
        """A prompt was routed."""
        stride = _stride(chain)
        blocks = min(chain.blocks, stride * MAX_MARKS)
        keys = chain.keys(blocks)
        path: list[_Mark] = []
        known = True
        for at in range(stride - 1, blocks, stride):
            mark = self._young.get(keys[at])
            if mark is None:
                mark, new = self._mark(keys[at])
                if new and known:
                    known = False
                    self._left(path, keys, blocks, now)
            path.append(mark)
        for mark in path[:-1]:
            mark.continued = True
        if path and blocks % stride:
            end, new = self._mark(keys[blocks - 1])
            if new:
                above = path[-1]
                if known:
                    self._left(path, keys, blocks, now)
                above.continued = True
                if above.ends is None:
                    above.ends = deque(maxlen=MAX_ENDS)
                above.ends.append((blocks - 1, keys[blocks - 1], end))

    def _left(self, path: list[_Mark], keys: list[BlockKey], blocks: int, now: float) -> None:
        """A prompt left the known tree after `path`: note a branch, unless it continues what ended there."""
        if not path:
            return
        above = path[-1]
        went_on = above.continued
        for depth, key, end in above.ends or ():
            if depth < blocks and keys[depth] == key:
                went_on, end.continued = end.continued, True
        if went_on:
            for mark in path:
                if mark.branches is None:
                    mark.branches = deque(maxlen=self._newest)
                mark.branches.append(now)

    def _mark(self, key: BlockKey) -> tuple[_Mark, bool]:
        """The mark of a block, and whether it is new."""
        mark = self._young.get(key)
        if mark is not None:
            return mark, False
        mark = self._old.get(key)
        new = mark is None
        if mark is None:
            mark = _Mark()
        if len(self._young) >= GENERATION:
            self._old, self._young = self._young, {}
        self._young[key] = mark
        return mark, new


def _stride(chain: Chain) -> int:
    return max(1, STRIDE_TOKENS // chain.block_size)
