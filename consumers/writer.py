"""Writes one replica's inventory into the index, holds its lease, and knows when it has been superseded.

Strategy. There is one way to publish: take a claim (a new incarnation), write the whole attached part, then move the
pointer; from there on write deltas. A restart, a clear, a lost registration or a store that lost something all lead
back to that one path, so none of them needs a way of its own.

Whether the store lost something (or brought something back) is asked with every renewal and after every failure, by
comparing its witness with the one taken before the claim. On any doubt the old incarnation goes on counting, flagged
`republishing`, until a complete new one takes its place. What makes many consumers doubt at once is the rule here, so
each waits a random part of SPREAD_S first and writes no faster than REPUBLISH_BLOCKS_S.

Invariants: one write is in flight at a time, besides at most one verification, which is of other pages or older; what
is pending holds, per block, the newest state not yet acknowledged, so a failed write loses nothing. Nothing is
written under an incarnation that is not the newest claim of this owner.

Bound: when more than MAX_PENDING block states wait (the store has been away for long), the claim is dropped and with
it what waits; the inventory has it all and is published anew when the store is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from ..proto.errors import StoreError, StoreRefused, Superseded
from ..proto.hashing import BlockKey
from ..proto.index import Claim, Index, PackedWrites, PageHead, ReplicaSpec, ReplicaStatus
from .inventory import Delta, Inventory
from .lag import Lag

URGENT_BLOCKS: Final = 4
"""A delta of this many blocks (a prefill) is written at once; fewer (decoding) may wait for company."""
LINGER_S: Final = 0.1
CHUNK: Final = 4096
"""Blocks per write call."""
MAX_PENDING: Final = 1_000_000
"""Blocks that wait. Counted only once twice as many states of blocks have gathered, which take 32 bytes each."""
BACKOFF_S: Final = (0.05, 2.0)
"""First and longest pause after a failed call; doubles in between."""
MAX_INVISIBLE: Final = 4096
"""Batches whose way to the store is timed; of more, the oldest are not."""
REFRESH_PAGES: Final = 64
"""Pages verified per call."""
SPREAD_S: Final = 5.0
"""Longest random pause before publishing anew after a doubt; at most a lease."""
REPUBLISH_BLOCKS_S: Final = 100_000
"""Blocks per second a whole inventory is written with; a server takes several times that."""

_log = logging.getLogger("metatrie.consumer")


class WriterStats(msgspec.Struct):
    """Running totals; shown as metrics under the same names."""

    written: int = 0
    """Block states acknowledged by the store."""
    flushes: int = 0
    failures: int = 0
    """Calls the store did not complete; their blocks stayed pending."""
    refused: int = 0
    """Of those, calls the store refused (full, or unfit)."""
    claims: int = 0
    superseded: int = 0
    doubts: int = 0
    """Times the store turned out to have lost something, or may have, so that everything was published anew."""
    refreshed: int = 0
    """Block states verified."""
    repaired: int = 0
    """Verified states that were wrong in the store, and mended."""


class IndexWriter:
    """One replica's side of the index contract."""

    def __init__(
        self,
        index: Index,
        spec: ReplicaSpec,
        inventory: Inventory,
        *,
        owner: str,
        status: Callable[[], ReplicaStatus],
        synced: Callable[[], bool],
        lease_s: float = 10.0,
        refresh_s: float = 60.0,
        linger_s: float = LINGER_S,
    ) -> None:
        """status: what to report with the next renewal. synced: history is applied as far as it will ever be, so the
        pointer may move to a takeover's new incarnation. refresh_s: how often every page is verified. linger_s: how
        long a few single blocks may wait for company."""
        self.stats = WriterStats()
        self.claim: Claim | None = None
        self.active = False
        """The registry points at this claim."""
        self.registered = asyncio.Event()
        """Set once the first claim was granted."""
        self.standby = False
        """Another owner holds the registration; we wait for its lease to end."""
        self.publishing = False
        """The store does not have the whole inventory under the newest claim yet."""
        self.outage = ""
        """Metric label of why the store did not serve the last call; empty when it did."""
        self.lag_s = 0.0
        """Engine time to acknowledged write, for the newest batch of the last flush."""
        self.visible = Lag()
        """The same of every live batch: from then on every router sees it."""
        self._index, self._spec, self._inventory = index, spec, inventory
        self._owner, self._status, self._synced = owner, status, synced
        self._lease_s, self._refresh_s, self._linger_s = lease_s, refresh_s, linger_s
        self._pending: list[PackedWrites] = []
        """In the order they arose; of a block named twice, the later state counts."""
        self._gathered = 0
        """States in them."""
        self._flying = PackedWrites()
        """Block states on their way, not yet acknowledged."""
        self._fresh_life = False
        self._witness = b""
        """The store's, taken before the claim."""
        self._suspicious = False
        """A call failed: ask for the witness before anything else is written."""
        self._doubted = False
        """The store lost something: publish anew, not before `_publish_at`."""
        self._publish_at = 0.0
        self._version = 0
        self._wake = asyncio.Event()
        self._renew = asyncio.Event()
        self._urgent = False
        self._newest_ts: float | None = None
        self._invisible: deque[float] = deque(maxlen=MAX_INVISIBLE)
        """Engine times of live batches not yet acknowledged."""
        self._touched: set[PageHead] | None = None

    # ---- in -----------------------------------------------------------------------------------------------------

    def submit(self, delta: Delta, ts: float | None, *, live: bool = True) -> None:
        """Take over what changed. Never blocks. ts: engine time of the batch. live: it was not replayed, so that how
        old it is says how fast we are."""
        if delta.reset:
            self._fresh_life = True
            self._forget_pending()
            self._invisible.clear()
        if delta.writes:
            self._newest_ts = ts or None  # 0.0: the engine's clock was unreadable
        if delta.writes and ts and live:
            self._invisible.append(ts)
        if self.claim is None:
            self._wake.set()
            return  # publishing starts from the inventory, which has this already
        self._gather(delta.writes)
        if self._touched is not None:
            self._touched.update(head for head, _ in delta.writes.by_page())
        if self._gathered > 2 * MAX_PENDING and len(self._merge()) > MAX_PENDING:
            self._drop_claim()
        if delta.reset or self._gathered >= URGENT_BLOCKS:
            self._urgent = True
            self._wake.set()
        elif self._gathered:
            self._wake.set()

    def status_changed(self) -> None:
        """Report the state with the next turn of the loop, not with the next scheduled renewal."""
        self._renew.set()
        self._wake.set()

    def republish(self) -> None:
        """Write everything again under a new incarnation; the one that counts now does so until that is complete."""
        if self.claim is not None and not self._doubted:
            self.stats.doubts += 1
            self._doubted = self.publishing = True
            self._publish_at = time.monotonic() + random.uniform(0, min(SPREAD_S, self._lease_s))
            self._urgent = True
            self.status_changed()

    @property
    def pending(self) -> int:
        """Block states not yet acknowledged."""
        return len(self._merge()) + len(self._flying)

    def unacknowledged(self) -> set[BlockKey]:
        """The blocks `pending` counts: what the store has of them is anybody's guess."""
        return {*self._merge().keys(), *self._flying.keys()}

    def _gather(self, writes: PackedWrites) -> None:
        if writes:
            self._pending.append(writes)
            self._gathered += len(writes)

    def _merge(self) -> PackedWrites:
        """What is pending, each block once and in the order it is to be written."""
        merged = PackedWrites.merged(self._pending)
        self._pending, self._gathered = [merged], len(merged)
        return merged

    def _forget_pending(self) -> None:
        self._pending, self._gathered = [], 0

    @property
    def current(self) -> bool:
        """What was acknowledged is the whole of what counts: this life's, complete, and pointed at."""
        return self.active and not self.publishing and not self._fresh_life

    @property
    def idle(self) -> bool:
        """Everything applied so far is in the index and counts."""
        return self.current and not self.pending

    # ---- loops --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. The registration is left to its lease; call `release` for a farewell."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_loop())
            tasks.create_task(self._renew_loop())
            tasks.create_task(self._refresh_loop())

    async def release(self) -> None:
        """Deregister: the replica's blocks stop counting at once."""
        with contextlib.suppress(StoreError):
            await self._index.release(self._spec.ref, owner=self._owner)

    async def _write_loop(self) -> None:
        backoff = BACKOFF_S[0]
        while True:
            try:
                if self._suspicious and self.claim is not None:
                    await self._ask_witness()
                if self.claim is None or self._fresh_life or (self._doubted and time.monotonic() >= self._publish_at):
                    await self._publish()
                elif self._gathered:
                    await self._flush()
                if self._may_activate():
                    await self._activate()
                backoff = BACKOFF_S[0]
                self._served()
            except Superseded as error:
                self._served()
                await self._stand_by(error.retry_s)
            except StoreError as error:
                self._failed(error)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                backoff = min(backoff * 2, BACKOFF_S[1])
                continue
            await self._next_turn()

    def _may_activate(self) -> bool:
        return not self.active and self.claim is not None and not self.publishing and self._synced()

    async def _ask_witness(self) -> None:
        """Doubt what was written if the store is not the one it was."""
        claim = self.claim
        witness = await self._index.witness()
        self._suspicious = False
        if self.claim is claim is not None and witness != self._witness:
            self.republish()

    def _served(self) -> None:
        if self.outage:
            _log.info("%s: the index store serves again", self._spec.ref)
            self.outage = ""

    def _failed(self, error: StoreError) -> None:
        """One line per cause and outage; the rest is counted."""
        self.stats.failures += 1
        self.stats.refused += isinstance(error, StoreRefused)
        self._suspicious = True
        cause = "store_refused" if isinstance(error, StoreRefused) else "store_unavailable"
        if self.outage != cause:
            self.outage = cause
            _log.warning("%s: the index store does not serve: %s", self._spec.ref, error)

    async def _next_turn(self) -> None:
        """Sleep until there is something to write; let a few single blocks gather."""
        if self.claim is None or self._fresh_life or self._may_activate():
            return
        if self._doubted:
            await _wait(self._wake, max(0.0, self._publish_at - time.monotonic()))
        else:
            await self._wake.wait()
        if not self._urgent:
            # Wakes early when a prefill comes in meanwhile.
            self._wake.clear()
            deadline = time.monotonic() + self._linger_s
            while not self._urgent and (left := deadline - time.monotonic()) > 0:
                await _wait(self._wake, left)
                self._wake.clear()
        self._wake.clear()
        self._urgent = False

    async def _publish(self) -> None:
        """Begin a new incarnation with the whole attached part."""
        fresh = self._fresh_life
        # Before the claim: what is lost after it shows as a difference later.
        witness = await self._index.witness()
        claim = await self._index.claim(self._spec, owner=self._owner, lease_s=self._lease_s, activate=fresh)
        self.stats.claims += 1
        if self._fresh_life and not fresh:
            return  # the engine restarted meanwhile: the pointer must move at once, so claim again
        # From here no await until the snapshot is taken, so the deltas that follow are exactly what it lacks.
        self._fresh_life = self._doubted = self._suspicious = False
        self._witness = witness
        self.claim, self.active, self.standby = claim, fresh, False
        self.registered.set()
        self._version = 0
        self._forget_pending()
        self._gather(self._inventory.attached_writes())
        self.publishing = bool(self._gathered)
        self._renew.set()
        if claim.previous is None and not fresh:
            await self._activate()
        if self._gathered:
            await self._flush()

    async def _activate(self) -> None:
        claim = self.claim
        assert claim is not None
        await self._index.activate(self._spec.ref, owner=self._owner, incarnation=claim.incarnation)
        if self.claim is claim:
            self.active = True
            self._renew.set()

    async def _flush(self) -> None:
        """Write everything pending, as of now. On failure it is pending again, unless something newer came."""
        claim, ts = self.claim, self._newest_ts
        assert claim is not None
        blocks, flushed = self._merge(), len(self._invisible)
        self._forget_pending()
        try:
            self._flying = blocks
            while self._flying:
                if self._fresh_life or self.claim is not claim:
                    return  # these belong to a life, or a claim, that just ended
                self._version += 1
                await self._index.write(claim.incarnation, self._version, self._flying[:CHUNK])
                self._flying = self._flying[CHUNK:]
                if self.publishing and self._flying:
                    await asyncio.sleep(CHUNK / REPUBLISH_BLOCKS_S)
        finally:
            left, self._flying = self._flying, PackedWrites()
            self.stats.written += len(blocks) - len(left)
            if left and not self._fresh_life and self.claim is claim:
                self._pending.insert(0, left)
                self._gathered += len(left)
        self.stats.flushes += 1
        if self.publishing and not self._doubted:
            self.publishing = False
            self._renew.set()
        now = time.time()
        for _ in range(min(flushed, len(self._invisible))):
            self.visible.observe(now - self._invisible.popleft())
        if ts is not None:
            self.lag_s = max(0.0, now - ts)

    async def _renew_loop(self) -> None:
        while True:
            await _wait(self._renew, self._lease_s / 3)
            self._renew.clear()
            if not self.active:
                self._wake.set()  # whether the pointer may move by now is asked in the write loop
            claim = self.claim
            if claim is None:
                continue
            try:
                await self._ask_witness()
                await self._index.renew(
                    self._spec.ref,
                    owner=self._owner,
                    incarnation=claim.incarnation,
                    status=self._status(),
                    lease_s=self._lease_s,
                )
            except Superseded:
                # Another owner, an operator's DELETE, or a store that lost its data: the claim decides which.
                # Unless the answer is about a claim that was replaced meanwhile.
                if self.claim is claim and not self._fresh_life:
                    self.stats.superseded += 1
                    self._drop_claim()
            except StoreError as error:
                self._failed(error)

    def _drop_claim(self) -> None:
        self.claim, self.active, self.publishing, self._doubted = None, False, False, False
        self._forget_pending()
        self._wake.set()

    async def _stand_by(self, retry_s: float | None) -> None:
        """Until the other's lease ends at the earliest, but not for so long that its farewell goes unnoticed."""
        if not self.standby:
            self.stats.superseded += 1
        self.standby = True
        self._drop_claim()
        await asyncio.sleep(min(self._lease_s / 3, math.inf if retry_s is None else retry_s))

    async def _refresh_loop(self) -> None:
        """Verify every page once per `refresh_s`: renew its TTL, mend what the store lost or brought back."""
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self._refresh()
            except StoreError as error:
                self._failed(error)
            finally:
                self._touched = None

    async def _refresh(self) -> None:
        # Pages written after this line are left out of the round: their verified content would be older.
        self._touched = {head for head, _ in self._merge().by_page()}
        claim = self.claim
        pages = self._inventory.attached_writes().pages()
        heads = list(pages)
        for at in range(0, len(heads), REFRESH_PAGES):
            if claim is None or self.claim is not claim or self._fresh_life:
                return
            some = [pages[head].raw for head in heads[at : at + REFRESH_PAGES] if head not in self._touched]
            blocks = PackedWrites(b"".join(some))
            if blocks:
                self._version += 1
                self.stats.repaired += await self._index.refresh(claim.incarnation, self._version, blocks)
                self.stats.refreshed += len(blocks)
            await asyncio.sleep(0)


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set or time is up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
