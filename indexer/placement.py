"""Speculative placement: blocks a request will put into a cache count from the moment it is routed.

Strategy. Between routing and the engine's store event lie a queue, a prefill and the event's own way; a burst of
equal prompts decided in that gap would spread over the whole fleet and be computed everywhere. So the router counts
the blocks it sent itself, on top of what the index knows, until the event must have arrived: while the prefill is
pending, and for a while after it is over, at most `ttl_s` in all. That while follows how late the replica's events
are: LAGS times that and MARGIN_S, at most `settle_s`. Longer would be wrong where a cache turns over within seconds:
what was stored and evicted since would still count. Entries belong to an incarnation: what was sent to a cache that
is gone counts for nothing.

Each block carries one reference per entry that names it, so the end of an earlier request never removes what a later
one still counts on. A request therefore names every block from the index's own depth on, also those that another
entry already covers.

Bounds: `ttl_s` per entry, `capacity` blocks in all; beyond that the oldest entry is dropped.

Precision: blocks are probed by galloping, which takes an incarnation's counted blocks of one prompt to be without
holes. A hole needs an eviction between two entries, and costs a cache miss.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import repeat
from operator import contains

import msgspec

from ..proto.hashing import BlockKey
from ..proto.index import Incarnation

DEFAULT_TTL_S = 120.0
DEFAULT_SETTLE_S = 15.0
"""Longer than any event lag worth routing by."""
MARGIN_S = 1.0
"""Longer than an event takes where nothing lags: an engine step, and what a consumer waits for company."""
LAGS = 4.0
"""The lag is as of the consumer's last renewal, and may have grown."""
UNCONFIRMED_S = 300.0
"""How long blocks count that no event will ever name (stand_ins.py). Most next turns come sooner; a cache that has
lost them by then costs what it would have cost elsewhere."""
DEFAULT_CAPACITY = 4_000_000


_NOTHING: Counter[BlockKey] = Counter()
_END = BlockKey(b"")


class _Sent(msgspec.Struct, gc=False):
    incarnation: Incarnation
    keys: Sequence[BlockKey]
    start: int
    settle_s: float
    expires_at: float


class Placements:
    """What this router sent and the index need not know yet. Not thread-safe; every method takes the caller's
    clock."""

    def __init__(
        self, *, ttl_s: float = DEFAULT_TTL_S, settle_s: float = DEFAULT_SETTLE_S, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        self._ttl_s = ttl_s
        self._settle_s = settle_s
        self._room = capacity
        self._pending: OrderedDict[str, _Sent] = OrderedDict()
        """By request, soonest expiry first."""
        self._settling: list[tuple[float, str, _Sent]] = []
        """Those whose prefill is over: a heap, soonest expiry first."""
        self._counted: dict[Incarnation, Counter[BlockKey]] = {}

    def __bool__(self) -> bool:
        """Anything counts."""
        return bool(self._counted)

    def deepen(self, incarnations: Sequence[Incarnation], keys: Sequence[BlockKey], held: list[int]) -> None:
        """Raise each incarnation's leading blocks of this prompt from what the index knows, `held`, to what it holds
        or was sent. Call `expire` first."""
        # Few of many go deeper. Those are found by one probe each, without a loop of our own.
        counted = self._counted
        probed = keys if max(held, default=0) < len(keys) else [*keys, _END]
        counters = map(counted.get, incarnations, repeat(_NOTHING))
        deeper = list(map(contains, counters, map(probed.__getitem__, held)))
        if True in deeper:
            for i, incarnation in enumerate(incarnations):
                if deeper[i]:
                    held[i] = _run(counted[incarnation], keys, held[i])

    def sent(
        self,
        request: str,
        incarnation: Incarnation,
        keys: Sequence[BlockKey],
        matched: int,
        now: float,
        *,
        lag_s: float | None = None,
        confirmed: bool = True,
    ) -> None:
        """A request was routed there. keys: all blocks of its prompt, kept until it ends; matched: what the index
        knew it to hold; lag_s: how late the replica's events are, None if that is not known; confirmed: they will
        name all of these blocks."""
        fresh = len(keys) - matched
        if fresh <= 0:
            return
        while self._room < fresh and (self._settling or self._pending):
            oldest = heapq.heappop(self._settling)[2] if self._settling else self._pending.popitem(last=False)[1]
            self._remove(oldest)
        if self._room < fresh:
            return
        self._room -= fresh
        settle_s = self._settle_s if lag_s is None else min(self._settle_s, MARGIN_S + LAGS * lag_s)
        if not confirmed:
            settle_s = UNCONFIRMED_S
        self._pending[request] = _Sent(incarnation, keys, matched, settle_s, now + self._ttl_s)
        counted = self._counted.get(incarnation)
        if counted is None:
            counted = self._counted[incarnation] = Counter()
        counted.update(keys[matched:])

    def computed(self, request: str, now: float) -> None:
        """Its prefill is over: the store event is on its way. Unknown requests are ignored."""
        sent = self._pending.pop(request, None)
        if sent is not None:
            heapq.heappush(self._settling, (now + sent.settle_s, request, sent))

    def cancel(self, request: str) -> None:
        """It ended before its prefill did. Unknown requests, and those past their prefill, are ignored."""
        sent = self._pending.pop(request, None)
        if sent is not None:
            self._remove(sent)

    def expire(self, now: float) -> None:
        while self._settling and self._settling[0][0] <= now:
            self._remove(heapq.heappop(self._settling)[2])
        while self._pending:
            sent = next(iter(self._pending.values()))
            if sent.expires_at > now:
                break
            self._pending.popitem(last=False)
            self._remove(sent)

    def _remove(self, sent: _Sent) -> None:
        self._room += len(sent.keys) - sent.start
        counted = self._counted[sent.incarnation]
        for key in sent.keys[sent.start :]:
            left = counted[key] - 1
            if left:
                counted[key] = left
            else:
                counted.pop(key)  # Counter's own deletion is Python, and half of the time of all this
        if not counted:
            del self._counted[sent.incarnation]


def _run(counted: Counter[BlockKey], keys: Sequence[BlockKey], low: int) -> int:
    """Where the run of counted blocks that block `low` begins ends."""
    step, high = 1, len(keys)
    # `low` is counted, `high` is not or is the end.
    while low + step < high:
        if keys[low + step] in counted:
            low += step
            step *= 2
        else:
            high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] in counted:
            low = middle
        else:
            high = middle
    return high
