"""Every request and response of the router's HTTP API, as typed structs: the bounds here are the bounds of the API.

Unknown fields are ignored, wrong types and values out of range are refused by the decoder, and rules that span
fields raise InvalidField from `__post_init__`. No error text carries a value the caller sent. Fields are named and
ordered as they appear on the wire, in JSON and MessagePack alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec

from .errors import InvalidField
from .hashing import BlockSize, MediaItem, Namespace, token_ids_of
from .index import State

MAX_PROMPT_TOKENS = 1 << 20
MAX_PROMPT_CHARS = 4 << 20
MAX_MESSAGES = 4096
MAX_MEDIA = 1024
MAX_LISTED = 4096
"""Replicas one answer may list."""
DEFAULT_LISTED = 64
MAX_ASKED_BLOCKS = 4096
"""Blocks one question for evidence may name."""

Count = Annotated[int, msgspec.Meta(ge=0)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
ModelName = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
ReplicaName = Annotated[str, msgspec.Meta(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]
if TYPE_CHECKING:
    # Bytes are on the wire only: structs replace them by a sequence of the ids.
    TokenIds = list[int]
else:
    TokenIds = (
        Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
        | Annotated[bytes, msgspec.Meta(min_length=4, max_length=4 * MAX_PROMPT_TOKENS)]
    )
PolicyName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
BlockKeyHex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
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


class PolicyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How requests for one model are placed, unless they name a policy themselves."""

    model: str
    policy: str
    formula: str
    parameters: dict[str, float]


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/policies`."""

    policies: list[PolicyInfo]


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
    consumer: str | None = None
    """Base URL of the HTTP server of its consumer; null if it announced none."""


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    index: IndexHealth
    replicas: list[ReplicaInfo]
    """By model, then name and rank; at most `limit`."""
    total: Count


# Prompts


class PromptRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What names a prompt's blocks, in every request about one. Exactly one of token_ids, prompt and messages."""

    model: ModelName
    token_ids: TokenIds | None = None
    """A list, or little-endian u32 end to end: `bin` in MessagePack, base64 in JSON."""
    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PROMPT_CHARS)] | None = None
    """Text, tokenised as the model's engines do it."""
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    """Chat messages, templated and tokenised as the model's engines do it."""
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    """The chat request's tools, which templates write into the prompt."""
    documents: Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    add_generation_prompt: bool = True
    """As vLLM's chat requests have it; so have the next three."""
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """BOS and the like; null: for a prompt, not for messages."""
    chat_template_kwargs: dict[str, Any] | None = None
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
        packed = cast(object, self.token_ids)
        if isinstance(packed, bytes):
            if len(packed) % 4:
                raise InvalidField(
                    "packed token ids end within one", field="token_ids", remedy="send little-endian u32 end to end"
                )
            self.token_ids = token_ids_of(packed)
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
    role: str | None = None
    """`prefill` or `decode` where the two are separate: prompts go to a `prefill` replica, which hands KV on."""


class MatchResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
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
    note: str | None = None
    """Why only the beginning of the prompt was looked up (media parts); prompt_tokens counts no more than that."""


# Route


class RouteRequest(PromptRequest, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/route`: which replica should serve this prompt?"""

    policy: PolicyName | None = None
    """A policy other than the router's default."""
    max_output_tokens: TokenCount | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    """Lower is served earlier, as in vLLM; policies may weigh it."""
    session: Annotated[str, msgspec.Meta(min_length=1, max_length=512)] | None = None
    """Requests of one session belong together, for policies that go by it."""
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
    note: str | None = None
    """As in a match."""
    explanation: Explanation | None = None
    decision: str | None = None
    """Under this id trusted callers find the decision, while it is kept, at `GET /v1/decisions`."""


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/feedback`: what the engine made of a routed request."""

    reservation: ReservationId
    cached_tokens: TokenCount
    """The engine's own `usage.prompt_tokens_details.cached_tokens`."""
    finished: bool = False
    """The request is over: free its reservation, not just the prefill part of it."""
    output_tokens: TokenCount | None = None
    """The engine's own `usage.completion_tokens`, once finished: what decoding costs is learned from it."""
    prompt_tokens: TokenCount | None = None
    """The engine's own `usage.prompt_tokens`: tells a stale index from a prompt that was tokenised differently."""


class FeedbackResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    reservation: str
    predicted_tokens: Count
    served_tokens: Count
    freed: bool
    """Whether the reservation is gone now."""
    outcome: str | None = None
    """What became of the prediction: `equal`, or why it was wrong; absent if judged before, or if it could not be."""


# Decisions


class Lookup(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as one namespace names it."""

    namespace: Namespace
    id: str
    """The namespace's digest."""
    prompt_blocks: Count
    """Full blocks of the prompt."""
    keys: str
    """Keys of its leading blocks, 16 hex digits each, end to end: at least to one past the deepest match."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one candidate held when a decision was taken."""

    replica: str
    """As `NAME/RANK`."""
    block_size: int
    matched_blocks: Count
    reusable_tokens: Count
    state: State
    cause: str = ""


class Decided(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="decided"):
    """One routing decision. Holds keys and lengths, never tokens or text."""

    id: str
    """Empty for one that was only tried (`POST /v1/explain`)."""
    at: float
    """Router's clock, seconds since 1970."""
    model: str
    prompt_tokens: Count
    lookups: list[Lookup]
    """The namespace with most live replicas first."""
    index: IndexHealth
    candidates: Count
    """Replicas the policy chose from."""
    holdings: list[Holding]
    """The deepest of them, and the chosen one."""
    policy: str
    reason: str
    replica: str
    """The chosen one, as `NAME/RANK`."""
    matched_blocks: Count
    reusable_tokens: Count
    """Prompt tokens it was expected to find in its cache."""
    explanation: Explanation | None = None
    served_tokens: Count | None = None
    """What its engine then found there; null until it was reported."""


class Served(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="served"):
    """In a decision log: what became of an earlier decision."""

    id: str
    served_tokens: Count


class DecisionList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/decisions`."""

    decisions: list[Decided]
    """Newest first; at most `limit`."""
    kept: Count
    """Decisions this router remembers."""


class ExplainedReplica(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica of the model, as the router sees it now."""

    replica: str
    dp_rank: int
    namespace: str
    """Its digest; see `decision.lookups`."""
    matched_blocks: Count
    reusable_tokens: Count
    state: State
    cause: str = ""
    url: str | None = None
    consumer: str | None = None
    """Base URL of its consumer, which knows why (`POST /v1/blocks`)."""


class ExplainResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `POST /v1/explain`: the decision a `POST /v1/route` would take now, and what it rests on."""

    decision: Decided
    replicas: list[ExplainedReplica]
    """Deepest first; at most MAX_LISTED."""
    token_ids: list[TokenId]
    """The prompt as it was looked up."""
    unsalted_blocks: Count = 0
    """For a request with a salt: leading blocks the deepest replica holds without it."""
    unadapted_blocks: Count = 0
    """For a request with an adapter: leading blocks the deepest replica holds without it."""


# Evidence


class BlocksRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a sidecar's `POST /v1/blocks`: what do you know of these blocks?"""

    keys: Annotated[list[BlockKeyHex], msgspec.Meta(min_length=1, max_length=MAX_ASKED_BLOCKS)]
    replica: ReplicaName | None = None
    """Needed where the sidecar follows several."""
    dp_rank: Rank | None = None


class BlockEvidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one replica's consumer knows of one index block."""

    key: str
    state: Literal["attached", "detached", "hidden", "left", "unknown"]
    """attached: in the index. detached: held, but a block above it is not. hidden: held, and depends on something its
    engine does not publish. left: it was in the index once. unknown: never seen there, as far as is remembered."""
    tiers: Count = 0
    """Bit per tier it is attached in."""
    through: bool = False
    """It is attached, but no prompt can end with it: see `THROUGH` in proto/index.py."""
    branches: Count = 0
    """In how many ways the prompts that share it are known to go on, within the next few blocks."""
    left_seq: int | None = None
    """Batch with which it last left the index."""
    left_ts: float | None = None
    """Engine time of that batch, seconds since 1970."""
    missing: str | None = None
    """Of a detached block: the nearest block above it that is not held."""
    missing_left_seq: int | None = None


class BlocksResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of `POST /v1/blocks`."""

    replica: str
    dp_rank: int
    namespace: Namespace
    state: State
    cause: str
    """Why the state is not exact; empty when it is."""
    next_seq: int
    """Sequence number the consumer expects next."""
    hash_mode: Literal["auto", "engine", "recompute"]
    parity: bool
    """The engine's own names were predicted: it hashes as we do, from our seed."""
    parity_bad: Count
    """Names that were not as predicted."""
    detached: Count
    unhashable: Count
    blocks: list[BlockEvidence]
    """In the order asked."""
    emptied_seq: int | None = None
    """Batch with which everything went at once: a clear, or the engine's restart."""
