"""The optional native kernel: what it offers, and whether this process uses it.

The kernel is a package of its own (`native/`, Rust); `make setup` builds it where a Rust toolchain is present. Every
function in it has a pure Python twin with the same answers, and the same tests run over both. It is chosen here,
once, at import: `kernel` is None where the package is missing or of another interface version, or where the
environment says `METATRIE_PURE=1`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, Protocol, cast

INTERFACE: Final = 11
"""Version of the functions below; a kernel of another one is not used."""
PURE_VARIABLE: Final = "METATRIE_PURE"


class Kernel(Protocol):
    """What the native package offers."""

    INTERFACE: int

    def split_token_ids(self, doc: bytes, max_tokens: int) -> tuple[bytes, bytes] | None:
        """Packed little-endian u32 `token_ids` of a JSON object, and the document with `[0]` in their place; None
        where the document must be decoded the ordinary way."""
        ...

    def extend_chain(
        self,
        parent: bytes,
        tokens: bytes,
        block_size: int,
        keys: list[bytes],
        extras: Sequence[bytes | None] | None = None,
        memo: object = None,
    ) -> bytes:
        """Hash consecutive blocks of packed tokens below `parent`, append their keys to `keys`, return the last hash.
        extras: CBOR of each block's extra keys. memo: a SpanMemo to look whole spans up in, and keep them."""
        ...

    def SpanMemo(self, capacity: int) -> object:  # noqa: N802 -- a class
        """Hashes of `capacity` spans seen before, the ones asked for last; about 220 bytes each."""
        ...

    def chain_hashes(self, parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
        """Hashes of consecutive blocks of packed tokens below `parent`."""
        ...

    def pack_token_ids(self, batch: bytes) -> bytes | None:
        """A msgpack event batch with each array of token ids as one extension value of packed little-endian u32, and
        no other extension value; None where it must be decoded as it is."""
        ...

    def plain_batch(self, batch: bytes) -> tuple[float, int | None, list[tuple[Any, ...]]] | None:
        """A msgpack event batch of nothing but plain blocks, as (timestamp, rank, events). An event is (hashes,
        medium, group, parent, packed tokens, block size, kind) of a store, (hashes, medium, group) of a removal, or
        () of a clear. None where it must be decoded the ordinary way."""
        ...

    def merge_writes(self, parts: Sequence[bytes]) -> bytes:
        """PackedWrites.merged, of raw parts."""
        ...

    def BlockTable(self) -> object:  # noqa: N802 -- a class
        """Twin of `BlockTable` in consumers/blocks.py."""
        ...

    def Holdings(self) -> object:  # noqa: N802 -- a class
        """Twin of `Holdings` in indexer/holdings.py."""
        ...

    def Copies(self) -> object:  # noqa: N802 -- a class
        """Twin of `Copies` there."""
        ...

    def writes_by_page(self, raw: bytes) -> list[tuple[bytes, bytes]]:
        """PackedWrites.by_page, of raw writes."""
        ...

    def pages_of_writes(self, raw: bytes) -> list[tuple[bytes, bytes]]:
        """PackedWrites.pages, of raw writes."""
        ...


def _load() -> Kernel | None:
    if os.environ.get(PURE_VARIABLE, "") not in ("", "0"):
        return None
    try:
        module = import_module("metatrie_native")
    except ImportError:
        return None
    return cast(Kernel, module) if getattr(module, "INTERFACE", None) == INTERFACE else None


kernel: Final = _load()
