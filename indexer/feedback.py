"""Predicted against served: what became of each prediction, and what follows from it.

Strategy. When a request is routed, the keys of the blocks it was predicted to hit are kept under its reservation.
When the engine's own count arrives, the two are compared, and the index is asked again about just these keys: whether
it still shows them tells a block that was evicted meanwhile from one the index should not have shown at all. A block
that was evicted and then computed for this very request is back in the index by then; so before the index is blamed,
the replica's consumer is asked when the missing blocks last left. Several are asked about, since one that leaves and
returns within a single engine step is not seen to leave; engines evict ends of prompts before beginnings, so where a
later block left after the decision, the earlier ones did.

Causes, of requests (`outcome`), the first that fits:
  equal          served as predicted; of a prompt known in part, at least that
  tokenisation   the engine counted other prompt tokens: the text was tokenised differently, nothing else can be told
  unseen         more was served than predicted: the index lags behind the engine
  unfinished     the index knew no more than was served; the rest was counted on from requests on their way there
  evicted        the missing blocks left the cache after the decision
  last_block     exactly one block less: the engine computed the last cached block again (speculative decoding does)
  stale_index    the index still shows blocks the engine does not have
And of tokens, beside these, `diverted`: what the deepest replica held beyond the chosen one, passed over for load.

What follows. A stale path is cut: for `cut_s` the replica's matches end before the first block the engine did not
have, unless a later request is served it. And where most of the last predictions for an incarnation failed for the
index's fault (stale_index, tokenisation, last_block), its state becomes `degraded` with that cause, until
predictions come true again. Both are this router's own view; the index is its writers'. Neither follows from
feedback of untrusted callers: a tenant must not be able to turn others away from a replica.

Bounds: CAPACITY predictions and MAX_KEY_BYTES of keys, the oldest going first; CUTS cut paths; one record of
agreement per incarnation, at most INCARNATIONS. Keys are hashes; no token, prompt or salt is kept.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, Protocol

import aiohttp
import msgspec

from ..proto.api import BlocksRequest, BlocksResponse
from ..proto.hashing import KEY_BYTES, BlockKey, Chain
from ..proto.index import Depth, Incarnation, Index, ReplicaSpec

CAPACITY: Final = 16_384
MAX_KEY_BYTES: Final = 64 << 20
CUTS: Final = 4096
INCARNATIONS: Final = 4096
DEFAULT_CUT_S: Final = 10.0
SKEW_S: Final = 0.5
"""How far an engine's clock may be behind ours when it tells when a block left."""
MAX_ANSWER_BYTES: Final = 64 << 10
ASKED: Final = 8
"""Missing blocks the consumer is asked about, from the first to the last."""
_WEIGHT: Final = 0.05
"""Of the newest prediction in the share of failed ones: about the last 20 count."""
_DEGRADED, _RESTORED = 0.3, 0.1
"""Share of failures at which a replica becomes degraded, and at which it is restored."""
_LEAST: Final = 16
"""Predictions before any judgement."""

Outcome = Literal["equal", "tokenisation", "unseen", "unfinished", "evicted", "last_block", "stale_index"]
OUTCOMES: Final[tuple[Outcome, ...]] = (
    *("equal", "tokenisation", "unseen", "unfinished", "evicted", "last_block", "stale_index"),
)
_FAULTS: Final = frozenset({"stale_index", "tokenisation", "last_block"})


class Prediction(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What was expected of one routed request."""

    index: Index
    incarnation: Incarnation | None
    spec: ReplicaSpec | None
    decided_at: float
    """Seconds since 1970."""
    keys: bytes
    """Of the blocks predicted to be hit, end to end."""
    block_size: int
    prompt_tokens: int
    whole: bool
    """`prompt_tokens` is all of the prompt."""
    predicted_tokens: int
    indexed_tokens: int
    """Of those, what the index itself showed."""
    diverted_tokens: int
    """Reusable tokens of the deepest candidate beyond the chosen one's."""


class Witness(Protocol):
    """Who can tell what a replica's cache went through."""

    async def left_at(self, spec: ReplicaSpec, keys: Sequence[BlockKey]) -> float | None:
        """When any of these blocks last left the cache, in the engine's seconds since 1970; None if that is not
        known."""
        ...

    async def close(self) -> None: ...


class ConsumerWitness:
    """Asks the replica's own consumer, where its registration says where that is."""

    def __init__(self, *, timeout_s: float = 1.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def left_at(self, spec: ReplicaSpec, keys: Sequence[BlockKey]) -> float | None:
        if spec.consumer is None:
            return None
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        asked = BlocksRequest(keys=[key.hex() for key in keys], replica=spec.ref.replica, dp_rank=spec.ref.dp_rank)
        try:
            async with self._session.post(
                f"{spec.consumer.rstrip('/')}/v1/blocks",
                data=msgspec.json.encode(asked),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    return None
                answer = _decode_blocks(await response.content.read(MAX_ANSWER_BYTES))
        except (aiohttp.ClientError, TimeoutError, ValueError, msgspec.DecodeError):
            return None
        return max((block.left_ts for block in answer.blocks if block.left_ts is not None), default=None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class Judgement(msgspec.Struct, frozen=True, gc=False):
    outcome: Outcome
    missed_tokens: int
    """Predicted and not served."""


class _Agreement(msgspec.Struct, gc=False):
    """How an incarnation's predictions went."""

    seen: int = 0
    failed: float = 0.0
    """Share of failures, the newest weighing most."""
    cause: str = ""


class Feedbacks:
    """Predictions that wait for their feedback, and what past feedback says of each replica."""

    def __init__(
        self,
        witness: Witness,
        *,
        cut_s: float = DEFAULT_CUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._witness = witness
        self._cut_s = cut_s
        self._clock = clock
        self._waiting: OrderedDict[str, Prediction] = OrderedDict()
        self._key_bytes = 0
        self._cuts: OrderedDict[tuple[Incarnation, BlockKey], float] = OrderedDict()
        """First block the engine did not have → when to believe the index again; soonest first."""
        self._agreement: OrderedDict[Incarnation, _Agreement] = OrderedDict()
        self.doubts: dict[Incarnation, str] = {}
        """Incarnations whose predictions keep failing, and the cause."""

    def expect(self, reservation: str, prediction: Prediction) -> None:
        self._waiting[reservation] = prediction
        self._key_bytes += len(prediction.keys)
        while len(self._waiting) > CAPACITY or self._key_bytes > MAX_KEY_BYTES:
            self._key_bytes -= len(self._waiting.popitem(last=False)[1].keys)

    def take(self, reservation: str) -> Prediction | None:
        """The prediction of this request, once; None if it had feedback before or was dropped at the bound."""
        prediction = self._waiting.pop(reservation, None)
        if prediction is not None:
            self._key_bytes -= len(prediction.keys)
        return prediction

    drop = take

    async def judge(self, prediction: Prediction, *, cached_tokens: int, prompt_tokens: int | None) -> Judgement:
        """Compare, asking the index where that decides. Mutates nothing. Raises StoreError."""
        missed = prediction.predicted_tokens - cached_tokens
        outcome = await self._outcome(prediction, cached_tokens, prompt_tokens)
        return Judgement(outcome, max(0, missed))

    async def _outcome(self, prediction: Prediction, cached_tokens: int, prompt_tokens: int | None) -> Outcome:
        predicted, size = prediction.predicted_tokens, prediction.block_size
        if prediction.whole and prompt_tokens not in (None, prediction.prompt_tokens):
            return "tokenisation"
        if cached_tokens == predicted:
            return "equal"
        if cached_tokens > predicted:
            return "unseen" if prediction.whole else "equal"  # nothing was said of the rest
        if cached_tokens >= prediction.indexed_tokens:
            return "unfinished"
        shown = 0
        if prediction.incarnation is not None:
            match = await prediction.index.match(Chain.of_keys(_split(prediction.keys)))
            shown = match.depths.get(prediction.incarnation, _NO_DEPTH).blocks
        if shown * size <= cached_tokens or await self._left_since(prediction, cached_tokens // size):
            return "evicted"
        return "last_block" if predicted - cached_tokens == size else "stale_index"

    async def _left_since(self, prediction: Prediction, block: int) -> bool:
        """Whether blocks of the prediction, from this one on, left the cache after the decision."""
        missing = _split(prediction.keys[block * KEY_BYTES :])
        if prediction.spec is None or not missing:
            return False
        asked = (
            missing
            if len(missing) <= ASKED
            else [missing[i * (len(missing) - 1) // (ASKED - 1)] for i in range(ASKED)]
        )
        left_at = await self._witness.left_at(prediction.spec, asked)
        return left_at is not None and left_at >= prediction.decided_at - SKEW_S

    def learn(self, prediction: Prediction, judgement: Judgement, *, cached_tokens: int) -> None:
        """Draw the consequences, from feedback that can be believed."""
        incarnation = prediction.incarnation
        if incarnation is None:
            return
        self._agree(incarnation, judgement.outcome)
        keys = _split(prediction.keys)
        blocks = cached_tokens // prediction.block_size
        for key in keys[:blocks]:
            self._cuts.pop((incarnation, key), None)  # the engine has it
        if judgement.outcome == "stale_index" and blocks < len(keys):
            self._cuts[incarnation, keys[blocks]] = self._clock() + self._cut_s
            if len(self._cuts) > CUTS:
                self._cuts.popitem(last=False)

    def _agree(self, incarnation: Incarnation, outcome: Outcome) -> None:
        record = self._agreement.get(incarnation)
        if record is None:
            record = self._agreement[incarnation] = _Agreement()
            if len(self._agreement) > INCARNATIONS:
                oldest, _ = self._agreement.popitem(last=False)
                self.doubts.pop(oldest, None)
        failed = outcome in _FAULTS
        record.seen += 1
        record.failed += (failed - record.failed) * max(_WEIGHT, 1 / record.seen)
        if failed:
            record.cause = f"feedback_{outcome}"
        bound = _RESTORED if incarnation in self.doubts else _DEGRADED
        if record.seen >= _LEAST and record.failed > bound:
            self.doubts[incarnation] = record.cause
        else:
            self.doubts.pop(incarnation, None)

    def cut(self, chain: Chain, depths: Mapping[Incarnation, Depth]) -> Mapping[Incarnation, Depth]:
        """The depths, ending before blocks that are known to be missing."""
        if not self._cuts:
            return depths
        now = self._clock()
        while self._cuts and next(iter(self._cuts.values())) <= now:
            self._cuts.popitem(last=False)
        doubted = {incarnation for incarnation, _ in self._cuts}
        return {
            incarnation: self._shortened(incarnation, chain, depth) if incarnation in doubted else depth
            for incarnation, depth in depths.items()
        }

    def _shortened(self, incarnation: Incarnation, chain: Chain, depth: Depth) -> Depth:
        for blocks, key in enumerate(chain.keys(depth.blocks)[: depth.blocks]):
            if (incarnation, key) in self._cuts:
                return shortened(depth, blocks)
        return depth


def shortened(depth: Depth, blocks: int) -> Depth:
    """A depth cut to its first `blocks` blocks. Which tiers they are in is not known any more: the fastest keep
    theirs, as the beginning of a prompt is used most."""
    gpu = min(depth.tiers[0], blocks)
    cpu = min(depth.tiers[1], blocks - gpu)
    return Depth(blocks, (gpu, cpu, blocks - gpu - cpu))


def _split(keys: bytes) -> Sequence[BlockKey]:
    return [BlockKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


_NO_DEPTH = Depth(0, (0, 0, 0))
_decode_blocks = msgspec.json.Decoder(BlocksResponse).decode
