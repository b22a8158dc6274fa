"""Canonical block hashes: what names a KV block, and everything that must agree for KV to be reusable.

Strategy. A block's hash is ``SHA-256(CBOR([parent hash, token ids, extra keys]))`` in canonical CBOR,
byte for byte what vLLM's ``sha256_cbor`` computes (0.10.2 and later) for text, and what 0.33 computes for
media and cache salts. The first block's parent is the *none-hash*, derived from a seed text, so two
processes that share the seed share every hash.

Where we differ from vLLM on purpose: since 0.31 vLLM hashes a LoRA adapter as ``["lora", name, path]``;
the path is a detail of one pod and never on the wire, so ours is ``["lora", name]``. Blocks under an
adapter therefore have other hashes here than inside such an engine, consistently on both sides of the index.

Invariants: a chain's i-th key depends on nothing but the namespace, the first (i+1)·block_size tokens and the
extra keys that overlap them; extending a chain never changes a key it already gave out.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, NewType, cast, overload

import cbor2
import msgspec

from .errors import UnhashableBlock
from .native import kernel

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the canonical hash of a block and, through its parent, of its whole prefix."""
BlockKey = NewType("BlockKey", bytes)
"""8 bytes: the low 64 bits of a BlockHash, big endian, as vLLM truncates it for events."""
NamespaceId = NewType("NamespaceId", str)
"""16 hex digits: digest of a Namespace, used in store keys and metric labels."""

KEY_BYTES = 8
MAX_BLOCK_SIZE = 4096
DEFAULT_HASH_SEED = "0"

_sha256 = hashlib.sha256
_cbor = cbor2.dumps

BlockSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that must agree for KV blocks to be reusable. Two different namespaces never share a key.

    Free-text fields are compared verbatim; leave one empty when the whole fleet agrees on it anyway.
    """

    model: str
    """Model name as clients send it."""
    block_size: BlockSize = 16
    """Tokens per index block."""
    hash_seed: str = DEFAULT_HASH_SEED
    """Text the none-hash is derived from; set the engines' PYTHONHASHSEED to the same text for parity."""
    hash_algorithm: Literal["sha256_cbor"] = "sha256_cbor"
    revision: str = ""
    """Model weights revision."""
    tokenizer: str = ""
    """Tokenizer and chat template revision."""
    attention: str = ""
    """Attention and position configuration (RoPE scaling, sliding window, …)."""
    kv_dtype: str = ""
    kv_layout: str = ""
    lookahead: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Tokens after a block that its KV depends on as well: what the engines' drafting looks ahead (EAGLE, MTP)."""

    @property
    def id(self) -> NamespaceId:
        """Digest over every field, in declaration order; over `lookahead` only where there is one."""
        fields = [[name, getattr(self, name)] for name in self.__struct_fields__ if name != "lookahead"]
        if self.lookahead != 0:
            fields.append(["lookahead", self.lookahead])
        return NamespaceId(_sha256(_cbor(fields, canonical=True)).hexdigest()[:16])

    @property
    def root(self) -> BlockHash:
        """Parent of every first block."""
        return none_hash(self.hash_seed)


def none_hash(seed: str) -> BlockHash:
    """Parent hash of every first block: SHA-256 over the CBOR of the seed *text* (`"0"`, not 0)."""
    return BlockHash(_sha256(_cbor(seed, canonical=True)).digest())


def block_hash(parent: bytes, tokens: Sequence[int], extra_keys: Sequence[Any] | None = None) -> BlockHash:
    """Canonical hash of one full block.

    parent: 32 bytes, the preceding block's hash or the none-hash. tokens: exactly block_size ids.
    extra_keys: tagged entries in the order lora, mm, cache_salt, prompt_embeds; None when there are none.
    Source: vLLM 0.33 `hash_block_tokens` with `sha256_cbor`.
    """
    extra = None if not extra_keys else list(extra_keys)
    return BlockHash(_sha256(_cbor([parent, tokens, extra], canonical=True)).digest())


def block_key(digest: bytes) -> BlockKey:
    """The 8-byte name of a block."""
    return BlockKey(digest[-KEY_BYTES:])


def chain_hashes(parent: BlockHash, block_size: int, tokens: Sequence[int]) -> list[BlockHash]:
    """Canonical hashes of consecutive full blocks below `parent`, none with extra keys.

    tokens: a whole number of blocks.
    """
    packed = None if kernel is None else packed_tokens(tokens, 0, len(tokens))
    if kernel is not None and packed is not None:
        return cast("list[BlockHash]", kernel.chain_hashes(parent, packed, block_size))
    hashes = []
    for at in range(0, len(tokens), block_size):
        parent = block_hash(parent, tokens[at : at + block_size])
        hashes.append(parent)
    return hashes


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One multimodal input in a prompt: its content identifier and the token span it occupies."""

    identifier: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    offset: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


class PromptExtras(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt's blocks depend on besides its tokens."""

    lora: str | None = None
    media: tuple[MediaItem, ...] = ()
    """Kept sorted by offset, whatever order they are given in: their order enters the hash."""
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if any(a.offset > b.offset for a, b in pairwise(self.media)):
            msgspec.structs.force_setattr(self, "media", tuple(sorted(self.media, key=lambda item: item.offset)))

    def for_block(self, start: int, end: int) -> list[Any] | None:
        """Tagged extra keys of the block covering tokens [start, end), or None when there are none.

        A media item belongs to every block it overlaps, with its offset relative to the block's start
        (negative in continuation blocks); the salt enters the first block only and is chained from there.
        """
        keys: list[Any] = []
        if self.lora:
            keys.append(["lora", self.lora])
        for item in self.media:
            if item.offset >= end:
                break
            if item.offset + item.length > start:
                keys.append(["mm", item.identifier, item.offset - start])
        if start == 0 and self.cache_salt:
            keys.append(["cache_salt", self.cache_salt])
        return keys or None


NO_EXTRAS = PromptExtras()


def looking_ahead(extra_keys: Sequence[Any] | None, tokens: Sequence[int]) -> list[Any]:
    """Extra keys of a block that also depends on the tokens after it. Source: vLLM 0.33, prefill lookahead."""
    return [None if extra_keys is None else list(extra_keys), *tokens]


class PackedTokens(Sequence[int]):
    """Token ids as they travel best: little-endian u32 in one bytes object. Slices are lists."""

    __slots__ = ("_array", "raw")

    def __init__(self, raw: bytes) -> None:
        """raw: a whole number of tokens."""
        self.raw = raw
        self._array: array[int] | None = None

    @property
    def _view(self) -> array[int]:
        """Made when somebody looks at single tokens, which few do."""
        if self._array is None:
            self._array = array("I", self.raw)
            if sys.byteorder == "big":
                self._array.byteswap()
        return self._array

    def __len__(self) -> int:
        return len(self.raw) // 4

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._view[at].tolist() if isinstance(at, slice) else self._view[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self._view)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedTokens):
            return self.raw == other.raw
        return self._view.tolist() == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def __repr__(self) -> str:
        return f"PackedTokens(of {len(self)})"  # never the tokens themselves


def token_ids_of(raw: bytes) -> list[int]:
    """Packed tokens, typed as what they stand in for: everything read of `token_ids` is what sequences offer."""
    return cast("list[int]", PackedTokens(raw))


def packed_tokens(tokens: Sequence[int], start: int, stop: int) -> bytes | None:
    """tokens[start:stop] as little-endian u32; None if some token has more than 32 bits."""
    if isinstance(tokens, PackedTokens):
        return tokens.raw[4 * start : 4 * stop]
    try:
        span = array("I", tokens[start:stop])
    except OverflowError:
        return None
    if sys.byteorder == "big":
        span.byteswap()
    return span.tobytes()


MEMO_SPANS = 16_384
"""Spans of 32 blocks whose hashes this process remembers, about 500 bytes each: half a million blocks."""


class SpanMemo:
    """Hashes of spans seen before, so that a prefix many prompts share is hashed once.

    Looking a span up costs a tenth of hashing it (with the native kernel's own memo, a fifth). Kept are keys and
    hashes, never tokens: a span's name is a digest of its parent hash and its tokens.

    Bound: `capacity` spans of SPAN blocks; beyond it the ones unused longest go first.
    """

    SPAN = 32

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._spans: dict[bytes, tuple[bytes, bytes]] = {}

    def get(self, name: bytes) -> tuple[bytes, bytes] | None:
        """(keys end to end, last hash) of a span."""
        found = self._spans.pop(name, None)
        if found is not None:
            self._spans[name] = found  # now the newest
        return found

    def put(self, name: bytes, keys: Sequence[BlockKey], last: bytes) -> None:
        self._spans[name] = b"".join(keys), last
        if len(self._spans) > self.capacity:
            del self._spans[next(iter(self._spans))]


# One per process, since prompts for all models and routers share prefixes with themselves only.
_memo = SpanMemo(MEMO_SPANS)
_native_memo = None if kernel is None else kernel.SpanMemo(2 * MEMO_SPANS)  # its spans have 16 blocks


class Chain:
    """The block keys of one prompt, hashed only as far as somebody asks.

    A lookup that stops at the first miss pays for the matched prefix plus one chunk, not for the prompt.
    """

    __slots__ = ("_extras", "_hash", "_keys", "_lookahead", "_tokens", "block_size", "blocks")

    def __init__(
        self,
        root: BlockHash,
        block_size: int,
        tokens: Sequence[int],
        extras: PromptExtras = NO_EXTRAS,
        *,
        lookahead: int = 0,
    ) -> None:
        """tokens: the whole prompt; only its full blocks have keys, and those only with `lookahead` tokens after
        them."""
        self.block_size = block_size
        self.blocks = max(0, len(tokens) - lookahead) // block_size
        self._tokens = tokens
        self._extras = None if (extras is NO_EXTRAS or extras == NO_EXTRAS) and not lookahead else extras
        self._lookahead = lookahead
        self._hash: bytes = root
        self._keys: list[BlockKey] = []

    @classmethod
    def of_keys(cls, keys: Sequence[BlockKey]) -> Chain:
        """A chain whose keys are known already, for audits: the prompt itself is not needed."""
        chain = cls(BlockHash(b""), 1, ())
        chain.blocks = len(keys)
        chain._keys = list(keys)
        return chain

    def keys(self, count: int) -> list[BlockKey]:
        """At least the first min(count, blocks) keys, in order. The list is the chain's own: do not change it."""
        keys = self._keys
        count = min(count, self.blocks)
        if count > len(keys):
            extend = self._extend_natively if kernel is not None else self._extend
            extend(len(keys), count)
        return keys

    def first(self) -> BlockKey:
        """Key of the first block, of which there must be one, hashed alone where nothing is hashed yet."""
        if self._keys or self._extras is not None:
            return self.keys(1)[0]
        size = self.block_size
        packed = None if kernel is None else packed_tokens(self._tokens, 0, size)
        if kernel is None or packed is None:
            return block_key(block_hash(self._hash, self._tokens[:size]))
        return block_key(kernel.chain_hashes(self._hash, packed, size)[0])

    def _extend_natively(self, start: int, stop: int) -> None:
        assert kernel is not None
        size = self.block_size
        packed = packed_tokens(self._tokens, start * size, stop * size)
        if packed is None:
            self._hash_each(start, stop)
            return
        encoded: list[bytes | None] | None = None
        if self._extras is not None:
            encoded = []
            for i in range(start, stop):
                extra = self._extra(self._extras, i)
                encoded.append(None if extra is None else _cbor(extra, canonical=True))
        self._hash = kernel.extend_chain(
            self._hash, packed, size, cast("list[bytes]", self._keys), encoded, _native_memo
        )

    def _extra(self, extras: PromptExtras, index: int) -> list[Any] | None:
        start, end = index * self.block_size, (index + 1) * self.block_size
        keys = extras.for_block(start, end + self._lookahead)
        return looking_ahead(keys, self._tokens[end : end + self._lookahead]) if self._lookahead else keys

    def _extend(self, start: int, stop: int) -> None:
        """Whole aligned spans through the memo, the rest block by block."""
        span, size = SpanMemo.SPAN, self.block_size
        while start < stop:
            end = min(stop, start + span - start % span)
            packed = None
            if end - start == span and self._extras is None:
                packed = packed_tokens(self._tokens, start * size, end * size)
            if packed is None:
                self._hash_each(start, end)
            else:
                name = _sha256(b"%b%d:%b" % (self._hash, size, packed)).digest()
                known = _memo.get(name)
                if known is not None:
                    flat, self._hash = known
                    self._keys += [BlockKey(flat[i : i + KEY_BYTES]) for i in range(0, len(flat), KEY_BYTES)]
                else:
                    self._hash_each(start, end)
                    _memo.put(name, self._keys[start:end], self._hash)
            start = end

    def _hash_each(self, start: int, stop: int) -> None:
        keys, size, extras = self._keys, self.block_size, self._extras
        parent = self._hash
        for i in range(start, stop):
            at = i * size
            extra = self._extra(extras, i) if extras is not None else None
            parent = _sha256(_cbor([parent, self._tokens[at : at + size], extra], canonical=True)).digest()
            keys.append(BlockKey(parent[-KEY_BYTES:]))
        self._hash = parent


def event_extra_keys(
    raw: Sequence[Any] | None, *, lora_name: str | None, lora_id: int | None, first: bool, salt: str | None
) -> list[Any] | None:
    """Tagged extra keys of one block, from what an event publishes about it (wire-format notes: 2.5, 3.3).

    raw: the event's untagged `extra_keys` entry for this block. first: the block starts at token 0.
    salt: a `cache_salt` the event names itself (SGLang).
    Raises UnhashableBlock where the wire leaves the inputs open; a guess could match a prompt it must not.
    """
    if lora_id is not None and not lora_name:
        raise UnhashableBlock("lora_without_name")
    entries = list(raw or ())
    keys: list[Any] = []
    media: list[Any] = []
    embeds: list[Any] = []
    if lora_name:
        keys.append(["lora", lora_name])
        # The adapter comes first, once. Only that entry is its name: a salt of the same text must not vanish with it.
        if entries and entries[0] == lora_name:
            del entries[0]
    for entry in entries:
        match entry:
            case str() if first and salt is None:
                salt = entry
            case str():
                # vLLM 0.17 and 0.18 publish media identifiers without their offset.
                raise UnhashableBlock("media_without_offset")
            case bytes():
                embeds.append(["prompt_embeds", entry])
            case [str() as identifier, int() as offset] if not isinstance(offset, bool):
                media.append(["mm", identifier, offset])
            case _:
                raise UnhashableBlock("unknown_extra_key")
    keys += media
    if first and salt:
        keys.append(["cache_salt", salt])
    keys += embeds
    return keys or None
