"""Every request and response of the router's HTTP API, as typed structs: the bounds here are the bounds of the API.

Unknown fields are ignored, wrong types and values out of range are refused by the decoder, and rules that span
fields raise InvalidField from `__post_init__`. No error text carries a value the caller sent. Fields are named and
ordered as they appear on the wire, in JSON and MessagePack alike.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .errors import InvalidField
from .hashing import BlockSize, MediaItem
from .index import State

MAX_PROMPT_TOKENS = 1 << 20
MAX_PROMPT_CHARS = 4 << 20
MAX_MESSAGES = 4096
MAX_MEDIA = 1024
MAX_LISTED = 4096
"""Replicas one answer may list."""
DEFAULT_LISTED = 64

Count = Annotated[int, msgspec.Meta(ge=0)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
ReplicaName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]
PolicyName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
ReservationId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
IndexHealth = Literal["ok", "unavailable"]
"""unavailable: the store could not be asked, so the answer knows the last fleet and no blocks."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RFC 9457 problem document: the body of every error (`application/problem+json`)."""

    type: str
    """URI of the kind of problem; `about:blank` when the status says it all."""
    title: str
    status: int
    detail: str
    field: str | None = None
    """Path of the offending field, as in `media[0].offset`."""
    remedy: str | None = None
    """What to send or do instead."""


class Status(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `/healthz` and `/readyz`."""

    status: Literal["alive", "ready"]
    models: Count | None = None
    replicas: Count | None = None
    """Replicas whose blocks count now."""


# Replicas


class RegisterReplica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/replicas`: follow this engine worker's events."""

    replica: ReplicaName
    engine: Annotated[str, msgspec.Meta(min_length=1, max_length=32, pattern=r"^[a-z0-9_-]+$")]
    """Engine family: `vllm`, `sglang`."""
    model: ModelName
    block_size: BlockSize
    """Tokens per index block; a multiple of the engine's own block size."""
    events: Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^(tcp|ipc|inproc)://.+")]
    """ZeroMQ endpoint of the worker's event publisher."""
    dp_rank: Rank = 0
    replay: Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^(tcp|ipc|inproc)://.+")] | None = None
    """ZeroMQ endpoint that replays buffered events; without one, gaps cannot be healed."""
    topic: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """Topic prefix to subscribe to."""
    url: Annotated[str, msgspec.Meta(max_length=1024, pattern=r"^https?://[^@\s]+$")] | None = None
    """Base URL of the worker's OpenAI-compatible server, without credentials."""
    role: Literal["both", "prefill", "decode"] = "both"
    hash_mode: Literal["auto", "engine", "recompute"] = "auto"
    """Whether engine hashes may serve as block keys."""
    hash_seed: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] = "0"
    """Text the first block's parent hash is derived from."""
    revision: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """Model weights revision; part of what must agree for KV to be reusable."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine said of its own load, and what this router has outstanding there."""

    running: Count | None
    waiting: Count | None
    kv_usage: float | None
    """Share of KV blocks in use, 0 to 1. These three are null until the engine was scraped."""
    reserved_requests: Count
    reserved_tokens: Count
    """Uncached prompt tokens of routed requests whose prefill is not known to be done."""


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One registered replica as the index sees it now."""

    replica: str
    dp_rank: int
    model: str
    namespace: str
    """Digest of everything that must agree for KV to be reusable."""
    block_size: int
    engine: str
    role: str
    url: str | None
    events: str | None
    state: State
    cause: str
    """Why the state is not exact; empty when it is."""
    incarnation: int | None
    blocks: Count
    detached: Count
    """Engine blocks held but absent from the index, since their prefix is not."""
    lag_s: float
    """Event time to acknowledged write, newest flush."""
    load: ReplicaLoad


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    index: IndexHealth
    replicas: list[ReplicaInfo]
    """By model, then name and rank; at most `limit`."""
    total: Count


# Prompts


class PromptRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What names a prompt's blocks, in every request about one. Exactly one of token_ids, prompt and messages."""

    model: ModelName
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)] | None = None
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = None
    """Text, tokenised by one of the model's engines."""
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """Chat messages, templated and tokenised by one of the model's engines."""
    lora: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    """Name of the LoRA adapter the request runs under."""
    tenant: Annotated[str, msgspec.Meta(min_length=1, max_length=256)] | None = None
    """Whose prefixes these are; decides the cache salt where tenants are isolated."""
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    """The salt the engines would be given; from trusted callers only."""
    media: Annotated[list[MediaItem], msgspec.Meta(max_length=MAX_MEDIA)] | None = None
    """Multimodal inputs: content identifier and the token span each occupies."""
    replicas: Annotated[list[ReplicaName], msgspec.Meta(min_length=1, max_length=MAX_LISTED)] | None = None
    """Consider only replicas of these names."""

    def __post_init__(self) -> None:
        given = (self.token_ids is not None) + (self.prompt is not None) + (self.messages is not None)
        if given != 1:
            raise InvalidField(
                "the prompt is missing" if not given else "the prompt is given more than once",
                field="token_ids",
                remedy="send exactly one of token_ids, prompt and messages",
            )


# Match


class MatchRequest(PromptRequest, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/match`: who holds how much of this prompt?"""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)] = DEFAULT_LISTED
    """Most replicas the answer lists, deepest first."""


class TierBlocks(msgspec.Struct, frozen=True, gc=False):
    """Of the matched blocks, how many have their fastest copy where; sums to matched_blocks."""

    gpu: Count
    cpu: Count
    storage: Count


class MatchedReplica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """How far one replica holds the prompt."""

    replica: str
    dp_rank: int
    matched_blocks: Count
    """Leading full blocks held, over the union of tiers."""
    reusable_tokens: Count
    """min(matched_blocks, ⌊(prompt_tokens − 1)/block_size⌋) × block_size: an engine computes at least one token."""
    tiers: TierBlocks
    state: State
    cause: str | None = None
    """Why the state is not exact."""
    block_size: int | None = None
    """Where it differs from the answer's own."""


class MatchResponse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    model: str
    block_size: int
    """Tokens per block, in the namespace with most live replicas if a model has several."""
    prompt_tokens: Count
    prompt_blocks: Count
    """Full blocks of the prompt."""
    index: IndexHealth
    total: Count
    """Registered replicas that were considered; `replicas` lists the deepest `limit` of them."""
    replicas: list[MatchedReplica]
    """Deepest first, then by name and rank; replicas that hold nothing come last."""


# Route


class RouteRequest(PromptRequest, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/route`: which replica should serve this prompt?"""

    policy: PolicyName | None = None
    """A policy other than the router's default."""
    max_output_tokens: TokenCount | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    """Lower is served earlier, as in vLLM; policies may weigh it."""
    explain: bool = False


class ExplainedCandidate(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    dp_rank: int
    state: State
    eligible: bool
    """Whether the policy's constraint admits it."""
    terms: dict[str, float]
    """Every quantity the policy looked at, by name."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a replica was chosen."""

    policy: str
    formula: str
    parameters: dict[str, float]
    why: str
    """One sentence."""
    alternative: str | None
    """The best other candidate, as `replica/dp_rank`; null when there was none."""
    candidates: list[ExplainedCandidate]
    """Best first by the policy's own order."""
    omitted: Count
    """Candidates beyond the bound of the list."""


class RouteResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    model: str
    replica: str
    dp_rank: int
    url: str | None
    """Base URL of the chosen engine; null if it registered none."""
    block_size: int
    prompt_tokens: Count
    matched_blocks: Count
    reusable_tokens: Count
    """Prompt tokens the replica is expected to find in its cache."""
    state: State
    """`stale` when nothing live was left to choose from."""
    index: IndexHealth
    policy: str
    reason: str
    """Label of what decided."""
    reservation: str
    """Frees the request's share of load with `DELETE /v1/reservations/{id}`."""
    cause: str | None = None
    """Why the state is not exact."""
    explanation: Explanation | None = None


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/feedback`: what the engine made of a routed request."""

    reservation: ReservationId
    cached_tokens: TokenCount
    """The engine's own `usage.prompt_tokens_details.cached_tokens`."""
    finished: bool = False
    """The request is over: free its reservation, not just the prefill part of it."""


class FeedbackResponse(msgspec.Struct, frozen=True, kw_only=True):
    reservation: str
    predicted_tokens: Count
    served_tokens: Count
    freed: bool
    """Whether the reservation is gone now."""
