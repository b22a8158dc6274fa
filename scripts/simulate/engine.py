"""One replica of the simulated fleet: a prefix cache and an engine that computes in steps.

Engine. A step computes up to `chunk_tokens` prompt tokens, first come first served, and one token of every sequence
past its prefill (at most `max_sequences` at a time). It takes tokens/rate + step_s + sequence_step_s · sequences.
Between two arrivals nothing happens but decoding, so those steps are taken in one go.

Cache. Blocks of a prompt are found by its leading run and locked while the request runs. What is not locked goes
least recently used first, ends of prompts before their beginnings: the order in which vLLM's free queue gives blocks
away. The cache is a radix tree whose nodes are spans of one request's key list, so that a lookup compares slices, and
the cost of a request is in its new blocks and not in its length.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import msgspec

from ...indexer.policies import Speed
from ...proto.hashing import BlockKey

Keys = Sequence[BlockKey]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's hardware."""

    speed: Speed = Speed()
    capacity_tokens: int = 4_000_000
    """KV cache."""
    max_sequences: int = 256


class _Node:
    """Blocks `start` to `end` of one prompt; what is above starts at `start`."""

    __slots__ = ("children", "end", "keys", "locks", "parent", "start", "used")

    def __init__(self, keys: Keys, start: int, end: int, parent: _Node | None) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[BlockKey, _Node] = {}
        self.locks = 0
        self.used = 0


class PrefixCache:
    """A bounded set of blocks, closed under prefixes.

    stored(keys, start, end) and removed(keys, start, end) are called with what appears and what goes: a span of a
    prompt's key list. Removals come ends first.
    """

    def __init__(
        self,
        capacity: int,
        *,
        stored: Callable[[Keys, int, int], None],
        removed: Callable[[Keys, int, int], None],
    ) -> None:
        """capacity: blocks."""
        self.capacity = capacity
        self._stored = stored
        self._removed = removed
        self._root = _Node((), 0, 0, None)
        self._ticks = 0
        self._idle: list[tuple[int, int, _Node]] = []
        """Heap of leaves by last use; an entry whose use is outdated, or that got locked or children, is skipped."""
        self.blocks = 0
        self.locked = 0
        self.evicted = 0
        """Blocks removed for want of room, ever."""

    def matched(self, keys: Keys) -> int:
        """Leading blocks held. Mutates nothing."""
        node, at = self._root, 0
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            end = child.end
            if keys[at:end] != child.keys[at:end]:
                return at + _common(keys, child.keys, at, min(end, len(keys)))
            node, at = child, end
        return at

    def lock(self, keys: Keys, limit: int) -> tuple[_Node, int]:
        """Keep the leading run of at most `limit` blocks from being evicted. Returns its handle and length."""
        node, at = self._root, 0
        while at < limit:
            child = node.children.get(keys[at])
            if child is None:
                break
            end = child.end
            if end > limit or keys[at:end] != child.keys[at:end]:
                shared = at + _common(keys, child.keys, at, min(end, limit))
                node, at = self._split(child, shared), shared
                break
            node, at = child, end
        above: _Node | None = node
        while above is not None and above is not self._root:
            if not above.locks:
                self.locked += above.end - above.start
            above.locks += 1
            above = above.parent
        return node, at

    def extend(self, handle: _Node, keys: Keys, at: int, end: int) -> _Node:
        """Add blocks `at` to `end` below a locked handle that ends at `at`; returns the handle of all of it.

        What is there already, since it was computed a second time, is locked and stays. Takes room from the least
        recently used; stops short where even that is not enough.
        """
        while at < end and (child := handle.children.get(keys[at])) is not None:
            shared = at + _common(keys, child.keys, at, min(end, child.end))
            handle = child if shared == child.end else self._split(child, shared)
            if not handle.locks:
                self.locked += handle.end - handle.start
            handle.locks += 1
            at = shared
        end = min(end, at + self.capacity - self.locked)
        if end <= at:
            return handle
        room = self.capacity - self.blocks
        if room < end - at:
            self._evict(end - at - room)
        node = _Node(keys, at, end, handle)
        handle.children[keys[at]] = node
        node.locks = 1
        self.blocks += end - at
        self.locked += end - at
        self._stored(keys, at, end)
        return node

    def unlock(self, handle: _Node) -> None:
        """The request that held it is over."""
        self._ticks += 1
        tick, node = self._ticks, handle
        while node is not self._root:
            node.locks -= 1
            node.used = tick
            if not node.locks:
                self.locked -= node.end - node.start
                if not node.children:
                    heappush(self._idle, (tick, id(node), node))
            assert node.parent is not None
            node = node.parent

    def clear(self) -> None:
        """Lose everything at once, without a word: what a crash does. Handles are void."""
        self._root = _Node((), 0, 0, None)
        self._idle = []
        self.blocks = self.locked = 0

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; returns the upper part."""
        assert node.parent is not None
        upper = _Node(node.keys, node.start, at, node.parent)
        node.parent.children[node.keys[node.start]] = upper
        upper.children[node.keys[at]] = node
        upper.locks, upper.used = node.locks, node.used
        node.parent, node.start = upper, at
        return upper

    def _evict(self, count: int) -> None:
        self.evicted += count
        while count:
            used, _, node = heappop(self._idle)
            if node.locks or node.children or node.used != used or node.end == node.start:
                continue
            take = min(count, node.end - node.start)
            node.end -= take
            count -= take
            self.blocks -= take
            self._removed(node.keys, node.end, node.end + take)
            if node.end > node.start:
                heappush(self._idle, (used, id(node), node))
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.keys[node.start]]
            if parent is not self._root and not parent.children and not parent.locks:
                heappush(self._idle, (parent.used, id(parent), parent))


def _common(a: Keys, b: Keys, start: int, end: int) -> int:
    """Equal keys from `start` on; by halving, since a key names all before it."""
    low, high = start, end
    while low < high:
        middle = (low + high) // 2
        if a[middle] == b[middle]:
            low = middle + 1
        else:
            high = middle
    return low - start


class Job:
    """One request on its way through one replica. Times are the simulation's."""

    __slots__ = (
        *("arrived", "cached", "finished", "first_token", "handle", "index", "keys"),
        *("left", "output_tokens", "prompt_tokens", "replica", "router", "wait_until"),
    )

    def __init__(self, index: int, keys: Keys, prompt_tokens: int, output_tokens: int, arrived: float) -> None:
        self.index = index
        self.keys = keys
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.arrived = arrived
        self.replica = self.router = -1
        self.cached = 0
        """Prompt tokens found in the cache."""
        self.left = 0
        """Prompt tokens still to be computed."""
        self.handle: _Node | None = None
        self.wait_until: float | None = None
        """When it goes to a replica though it should wait in its router."""
        self.first_token = self.finished = math.nan


class Engine:
    """One replica. The caller wakes it at `wake_at`, and tells it of arrivals; it tells of first tokens and ends."""

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        *,
        stored: Callable[[Keys, int, int], None],
        removed: Callable[[Keys, int, int], None],
        first_token: Callable[[Job, float], None],
        finished: Callable[[Job, float], None],
    ) -> None:
        self._config = config
        self._block_size = block_size
        self.cache = PrefixCache(config.capacity_tokens // block_size, stored=stored, removed=removed)
        self._first_token = first_token
        self._finished = finished
        self.waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._computing: list[Job] = []
        """Jobs whose last prompt token is in the current step."""
        self._decoding: list[tuple[int, int, Job]] = []
        """Heap by the step that yields the last token."""
        self._step = 0
        """Steps completed."""
        self._began = 0.0
        self._steps_ahead = 0
        """Steps that end at `wake_at`; 0: idle."""
        self._step_s = 0.0
        self.wake_at = math.inf
        self.prefill_s = 0.0
        """Time of steps with prefill in them, ever."""
        self.prefill_tokens = 0

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._computing) + len(self._decoding)

    def submit(self, job: Job, now: float) -> None:
        self.waiting.append(job)
        if not self._steps_ahead:
            self._begin(now)
        elif self._steps_ahead > 1:
            # Only decoding is going on: cut it at the end of the step that runs now.
            steps = max(1, math.ceil((now - self._began) / self._step_s - 1e-9))
            if steps < self._steps_ahead:
                self._steps_ahead = steps
                self.wake_at = self._began + steps * self._step_s

    def wake(self, now: float) -> None:
        """The steps that were begun are over."""
        self._step += self._steps_ahead
        while self._decoding and self._decoding[0][0] <= self._step:
            self._finish(heappop(self._decoding)[2], now)
        for job in self._computing:
            job.first_token = now
            self._first_token(job, now)
            if job.output_tokens <= 1:
                self._finish(job, now)
            else:
                heappush(self._decoding, (self._step + job.output_tokens - 1, job.index, job))
        self._computing = []
        self._begin(now)

    def crash(self) -> list[Job]:
        """Lose cache and work. Returns the jobs that were there, unfinished."""
        lost = [*self._prefilling, *self._computing, *(job for _, _, job in self._decoding), *self.waiting]
        self.waiting.clear()
        self._prefilling.clear()
        self._computing, self._decoding = [], []
        self._steps_ahead, self.wake_at = 0, math.inf
        self.cache.clear()
        return sorted(lost, key=lambda job: job.index)

    def _finish(self, job: Job, now: float) -> None:
        job.finished = now
        assert job.handle is not None
        self.cache.unlock(job.handle)
        job.handle = None
        self._finished(job, now)

    def _begin(self, now: float) -> None:
        speed, sequences = self._config.speed, len(self._decoding)
        budget = speed.chunk_tokens
        prefilling = self._prefilling
        while budget:
            if not prefilling and not self._admit(sequences):
                break
            job = prefilling[0]
            tokens = min(budget, job.left)
            budget -= tokens
            job.left -= tokens
            if not job.left:
                prefilling.popleft()
                self._computing.append(job)
                at = job.cached // self._block_size
                assert job.handle is not None
                job.handle = self.cache.extend(job.handle, job.keys, at, len(job.keys))
        tokens = speed.chunk_tokens - budget
        self._began = now
        self._step_s = tokens / speed.prefill_tokens_per_s + speed.step_s + speed.sequence_step_s * sequences
        if tokens:
            self._steps_ahead = 1
            self.prefill_s += self._step_s
            self.prefill_tokens += tokens
        elif sequences:
            self._steps_ahead = self._decoding[0][0] - self._step
        else:
            self._steps_ahead = 0
            self.wake_at = math.inf
            return
        self.wake_at = now + self._steps_ahead * self._step_s

    def _admit(self, sequences: int) -> bool:
        """Take the next request from the queue, if there is one and it fits."""
        if not self.waiting or sequences + len(self._computing) >= self._config.max_sequences:
            return False
        job, cache, size = self.waiting[0], self.cache, self._block_size
        handle, blocks = cache.lock(job.keys, min(len(job.keys), (job.prompt_tokens - 1) // size))
        if cache.locked + len(job.keys) - blocks > cache.capacity and sequences + len(self._computing):
            cache.unlock(handle)
            return False
        self.waiting.popleft()
        job.handle = handle
        job.cached = blocks * size
        job.left = job.prompt_tokens - job.cached
        self._prefilling.append(job)
        return True
