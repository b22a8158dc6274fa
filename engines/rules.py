"""How engine families name blocks: the HashRule of each, for consumers that predict published names.

A rule says "cannot tell" (None) where the wire does not determine the name; a wrong prediction therefore always means
a hidden input. What follows an untold block is untold as well, since names chain.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from ..proto.engine import HashRule
from ..proto.errors import ConfigError
from ..proto.events import EngineHash
from ..proto.hashing import BlockHash

_U32 = 0xFFFF_FFFF
_SALT_DOMAIN = b"sglang-cache-salt-v1\0"
_NAMESPACE_DOMAIN = b"sglang-kv-event-namespace-v1"


class VllmRule:
    """vLLM 0.10.2 and later with `sha256_cbor` and our hash seed: for text its digest *is* the canonical hash.

    The same holds for blocks that look ahead. With extra keys it need not be, and the wire does not name the version:
    before 0.31 they are hashed untagged, and since then an adapter's path is hashed, which is never published.
    """

    name = "vllm"
    canonical = True

    def root(self, canonical_root: BlockHash) -> bytes:
        return canonical_root

    def extend(
        self, parent: bytes, tokens: Sequence[int], extra_keys: Sequence[object] | None, canonical: BlockHash
    ) -> bytes | None:
        if extra_keys and not looks_ahead(extra_keys):
            return None
        return None if extra_keys and extra_keys[0] else canonical

    def published(self, digest: bytes) -> EngineHash:
        return EngineHash(int.from_bytes(digest[-8:], "big"))


class SglangRule:
    """SGLang 0.5.6 and later: SHA-256 chained over raw token words, published as its first 8 bytes.

    A cache salt takes the place of the first page's missing parent. Publishers with `format = "dynamo"` besides pass
    every name of a salted sequence through a second hash; the wire does not announce that, so it is a rule of its
    own. An `extra_key` never shows: dynamo names that depend on one are mispredicted, as they should be, while the
    default format leaves it out of its names altogether.

    A digest is the 32-byte chain hash, followed under dynamo by the 32-byte namespace of a salted sequence.
    """

    canonical = False

    def __init__(self, *, dynamo: bool = False) -> None:
        self.name = "sglang-dynamo" if dynamo else "sglang"
        self._dynamo = dynamo

    def root(self, canonical_root: BlockHash) -> bytes:
        """SGLang chains from nothing."""
        return b""

    def extend(
        self, parent: bytes, tokens: Sequence[int], extra_keys: Sequence[object] | None, canonical: BlockHash
    ) -> bytes | None:
        words: Sequence[int] = tokens
        if extra_keys and looks_ahead(extra_keys):
            # EAGLE: a page is a run of pairs, each token with the next one.
            following = [*tokens[1:], *(t for t in extra_keys[1:2] if isinstance(t, int))]
            words = [word for pair in zip(tokens, following, strict=True) for word in pair]
            extra_keys = extra_keys[0] if isinstance(extra_keys[0], list) else None
        if _has(extra_keys, "lora"):  # hashed by an id that only the server knows
            return None
        prior, namespace = parent[:32], parent[32:]
        salt = _value(extra_keys, "cache_salt")
        if salt is not None:
            prior = hashlib.sha256(_SALT_DOMAIN + salt.encode()).digest()
            namespace = sglang_namespace(None, salt) if self._dynamo else b""
        return hashlib.sha256(prior + _words(words)).digest() + namespace

    def published(self, digest: bytes) -> EngineHash:
        name, namespace = digest[:8], digest[32:]
        if namespace:
            name = hashlib.sha256(namespace + name).digest()[:8]
        return EngineHash(int.from_bytes(name, "big"))


class OpaqueRule:
    """An engine whose names cannot be predicted: nothing is compared, so nothing hidden is found out."""

    canonical = False

    def __init__(self, name: str) -> None:
        self.name = name

    def root(self, canonical_root: BlockHash) -> bytes:
        return b""

    def extend(
        self, parent: bytes, tokens: Sequence[int], extra_keys: Sequence[object] | None, canonical: BlockHash
    ) -> bytes | None:
        return None

    def published(self, digest: bytes) -> EngineHash:
        raise AssertionError("nothing is predicted")


_RULES: dict[str, HashRule] = {
    "vllm": VllmRule(),
    "sglang": SglangRule(),
    "sglang-dynamo": SglangRule(dynamo=True),
    **{name: OpaqueRule(name) for name in ("trtllm", "dynamo", "mooncake", "lmcache")},
}


def rule_for(engine: str) -> HashRule:
    """The rule of an engine family. Raises ConfigError for one that nobody knows."""
    try:
        return _RULES[engine]
    except KeyError:
        known = ", ".join(_RULES)
        raise ConfigError("engine", f"{engine!r} is no engine family", f"use one of: {known}") from None


def looks_ahead(extra_keys: Sequence[object]) -> bool:
    """Were these made by `hashing.looking_ahead`?"""
    return isinstance(extra_keys[-1], int)


def _words(tokens: Sequence[int]) -> bytes:
    """Tokens as SGLang feeds them to the hash: u32 little endian, or marked u64 words when one is larger."""
    if tokens and max(tokens) > _U32:
        return b"\xff" + struct.pack(f"<{len(tokens)}Q", *tokens)
    return struct.pack(f"<{len(tokens)}I", *tokens)


def sglang_namespace(extra_key: str | None, salt: str | None) -> bytes:
    """What SGLang's dynamo format hashes names with: each part is absent (0), or present (1) with its length."""
    parts = b""
    for part in (extra_key, salt):
        raw = b"" if part is None else part.encode()
        parts += b"\0" if part is None else b"\1" + struct.pack("<Q", len(raw)) + raw
    return hashlib.sha256(_NAMESPACE_DOMAIN + parts).digest()


def _has(extra_keys: Sequence[object] | None, tag: str) -> bool:
    return any(isinstance(key, (list, tuple)) and key and key[0] == tag for key in extra_keys or ())


def _value(extra_keys: Sequence[object] | None, tag: str) -> str | None:
    for key in extra_keys or ():
        if isinstance(key, (list, tuple)) and len(key) > 1 and key[0] == tag:
            return str(key[1])
    return None
