"""Continuous batching as vLLM v1 does it, without I/O: who computes which tokens in the next step.

Strategy. Each step has a token budget. Running sequences come first, oldest first; each needs one token to decode,
or as many as are left of its (re)computation, chunked to the budget. When blocks run out, the newest running
sequence is preempted: its blocks are freed and it goes back to the head of the queue, to be recomputed. Then waiting
sequences are admitted while budget, blocks and `max_num_seqs` allow. A sequence whose tokens are all computed by the
step yields one new token at the step's end.

The model's speed is a formula (`ServiceModel`), the model's output a pseudo-random function of the prompt, time a
parameter: same requests, same times, same result.

Invariants: at least one sequence makes progress in every step, given that each fits the pool on its own; a sequence
is in exactly one of waiting, running, done; tokens scheduled in a step never exceed the budget.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence as TokenList
from typing import Annotated, Literal

import msgspec

from .pool import BlockPool, Lora, PoolEvent, Sequence

DEFAULT_TOKEN_BUDGET = 2048
"""vLLM's default without a large GPU; it takes 8192 on some. Smaller steps keep decode latency steadier."""
DEFAULT_MAX_NUM_SEQS = 256

FinishReason = Literal["length", "stop", "abort"]

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class ServiceModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a step takes: prefill tokens at their rate, plus the decode part if any sequence decodes.

    Defaults: the order of magnitude of an 8B model on one data-centre GPU.
    """

    prefill_tokens_per_s: _Positive = 10_000.0
    decode_step_s: _NonNegative = 0.020
    decode_seq_s: _NonNegative = 0.0003

    def duration(self, prefill_tokens: int, decodes: int) -> float:
        """Seconds of one step."""
        decode = self.decode_step_s + decodes * self.decode_seq_s if decodes else 0.0
        return prefill_tokens / self.prefill_tokens_per_s + decode


class Request:
    """One sequence to complete, and what became of it. Times are those given to the scheduler, in seconds."""

    __slots__ = (
        "_state",
        "arrival_s",
        "cached_tokens",
        "ends",
        "finish",
        "first_token_s",
        "last_token_s",
        "max_tokens",
        "preemptions",
        "prompt_tokens",
        "scheduled_s",
        "sequence",
    )

    def __init__(
        self, sequence: Sequence, max_tokens: int, *, seed: int = 0, ends: Literal["length", "stop"] = "length"
    ) -> None:
        """max_tokens: tokens it will generate; seed: same prompt and seed, same output; ends: why it stops then."""
        self.sequence = sequence
        self.prompt_tokens = len(sequence.tokens)
        self.max_tokens = max_tokens
        self.ends = ends
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        """Prompt tokens found in the cache when it was first scheduled."""
        self.preemptions = 0
        self.arrival_s = self.scheduled_s = -1.0
        self.first_token_s = self.last_token_s = -1.0
        digest = hashlib.blake2b(array("Q", sequence.tokens).tobytes(), digest_size=8, salt=_seed_bytes(seed))
        self._state = int.from_bytes(digest.digest(), "little")

    @property
    def generated(self) -> int:
        return len(self.sequence.tokens) - self.prompt_tokens

    def draw(self, vocabulary: TokenList[int]) -> int:
        """The next token of its output (a 64-bit linear congruential generator)."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
        return vocabulary[(self._state >> 33) % len(vocabulary)]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One engine step. Its tokens exist `duration_s` after it started."""

    duration_s: float
    tokens: list[tuple[Request, int]]
    finished: list[Request]
    """Subset of the requests in `tokens`."""
    events: list[PoolEvent]
    """What the cache announced since the previous step, in order."""
    prefill_tokens: int
    decodes: int
    """Sequences that decoded one token, as opposed to finishing their prefill."""


class Counters:
    """Monotonic totals since the start, as vLLM counts them."""

    __slots__ = ("generation_tokens", "hits", "preemptions", "prompt_tokens", "queries")

    def __init__(self) -> None:
        self.queries = 0
        """Tokens looked up in the prefix cache, once per request."""
        self.hits = 0
        """Of these, tokens found."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0


class Scheduler:
    """The queues of one engine core over its block pool. Synchronous; nobody else may use the pool to allocate."""

    def __init__(
        self,
        pool: BlockPool,
        model: ServiceModel,
        vocabulary: TokenList[int],
        *,
        max_model_len: int,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    ) -> None:
        """vocabulary: ids to generate. Raises ValueError if max_model_len tokens cannot fit the pool."""
        if -(-max_model_len // pool.block_size) * len(pool.windows) > pool.num_blocks - 1:
            raise ValueError("the pool cannot hold one sequence of max_model_len tokens")
        self.pool = pool
        self.counters = Counters()
        self._model = model
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_requests(self) -> bool:
        return bool(self._running or self._waiting)

    def new_request(
        self,
        tokens: list[int],
        max_tokens: int,
        *,
        lora: Lora | None = None,
        salt: str | None = None,
        seed: int = 0,
        ends: Literal["length", "stop"] = "length",
        report_full: bool = False,
    ) -> Request:
        """A request over a prompt, not yet queued. Raises ValueError unless 1 ≤ len(tokens) < max_model_len."""
        if not 1 <= len(tokens) < self._max_model_len:
            raise ValueError("prompt length out of range")
        sequence = self.pool.sequence(list(tokens), lora=lora, salt=salt, report_full=report_full)
        return Request(sequence, min(max_tokens, self._max_model_len - len(tokens)), seed=seed, ends=ends)

    def add(self, request: Request, now: float) -> None:
        """Queue a request, first come first served."""
        request.arrival_s = now
        self._waiting.append(request)

    def end(self, request: Request, reason: FinishReason = "abort") -> None:
        """Stop a request early and free its blocks. Does nothing to one that has finished."""
        if request.finish is not None:
            return
        request.finish = reason
        if request in self._running:
            self._running.remove(request)
            self.pool.free(request.sequence)
        else:
            self._waiting.remove(request)

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget every cached block; the event leaves with the next step. False while a sequence holds blocks.

        reset_running: preempt what runs first, so that it cannot fail.
        """
        if reset_running:
            while self._running:
                self._preempt(self._running.pop())
        return self.pool.reset()

    def step(self, now: float) -> Step | None:
        """Schedule and compute one step that starts at `now`; None when there is no request."""
        if not self.has_requests:
            return None
        scheduled: list[tuple[Request, int]] = []
        budget = self._token_budget
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            sequence = request.sequence
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self.pool.allocate(sequence, sequence.computed + count):
                victim = self._running.pop()
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                scheduled.append((request, count))
                budget -= count
                index += 1
        # After a preemption nobody is admitted: the freed blocks belong to those that still run.
        if not preempted:
            self._admit(now, budget, scheduled)
        return self._compute(now, scheduled)

    def _admit(self, now: float, budget: int, scheduled: list[tuple[Request, int]]) -> None:
        while self._waiting and budget > 0 and len(self._running) < self._max_num_seqs:
            request = self._waiting[0]
            sequence = request.sequence
            hit = self.pool.match(sequence)
            count = min(len(sequence.tokens) - hit.tokens, budget)
            if not self.pool.allocate(sequence, hit.tokens + count, hit):
                return
            self._running.append(self._waiting.popleft())
            scheduled.append((request, count))
            budget -= count
            if request.scheduled_s < 0:
                request.scheduled_s = now
                request.cached_tokens = hit.tokens
                self.counters.queries += request.prompt_tokens
                self.counters.hits += hit.tokens
                self.counters.prompt_tokens += request.prompt_tokens

    def _compute(self, now: float, scheduled: list[tuple[Request, int]]) -> Step:
        producing: list[Request] = []
        prefill = decodes = 0
        for request, count in scheduled:
            complete = request.sequence.computed == len(request.sequence.tokens)
            if complete:
                producing.append(request)
            if complete and count == 1 and request.generated:
                decodes += 1
            else:
                prefill += count
        duration = self._model.duration(prefill, decodes)
        end = now + duration
        tokens: list[tuple[Request, int]] = []
        finished: list[Request] = []
        for request in producing:
            token = request.draw(self._vocabulary)
            request.sequence.tokens.append(token)
            tokens.append((request, token))
            if request.first_token_s < 0:
                request.first_token_s = end
            request.last_token_s = end
            if request.generated >= request.max_tokens:
                request.finish = request.ends
                finished.append(request)
                self.pool.free(request.sequence)
        if finished:
            self._running = [r for r in self._running if r.finish is None]
        self.counters.generation_tokens += len(tokens)
        return Step(
            duration_s=duration,
            tokens=tokens,
            finished=finished,
            events=self.pool.take_events(),
            prefill_tokens=prefill,
            decodes=decodes,
        )

    def _preempt(self, request: Request) -> None:
        self.pool.free(request.sequence)
        request.preemptions += 1
        self.counters.preemptions += 1
        self._waiting.appendleft(request)


def _seed_bytes(seed: int) -> bytes:
    return (seed & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
