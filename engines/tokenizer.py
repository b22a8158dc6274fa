"""Tokenizers for the simulated worker: a built-in one over bytes, and Hugging Face `tokenizer.json` directories.

What turns text into ids is shared with the router (proto/text.py). Here is what only an engine needs: decoding, whole
and streamed, and the *plain* token ids a simulated model may generate. Plain ids survive decoding and encoding again,
so a conversation that sends the generated text back hits the cache as it would with a real model.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol

from ..proto.errors import InvalidField
from ..proto.text import ByteText, HFText, TextTokenizer

MAX_PLAIN_IDS = 4096
"""Vocabulary of the simulated model; enough for variety, cheap to find."""


class StreamDecoder(Protocol):
    """Decodes one growing sequence without ever taking back text."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these tokens; special tokens have none."""
        ...

    def flush(self) -> str:
        """What is left at the end of the sequence, with U+FFFD for an incomplete character."""
        ...


class Tokenizer(TextTokenizer, Protocol):
    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def plain_ids(self) -> Sequence[int]:
        """Ids a simulated model may generate, at least one."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens written out. Raises InvalidField for an id outside the vocabulary."""
        ...

    def stream(self) -> StreamDecoder:
        """A decoder for a new sequence."""
        ...


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """`byte` for the built-in one, else a directory with `tokenizer.json`. Raises ConfigError."""
    return ByteTokenizer() if name_or_path == "byte" else HFTokenizer(name_or_path)


class ByteTokenizer(ByteText):
    """Bytes both ways."""

    plain_ids: Sequence[int] = b"etaoinshrdlu etaoin "

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[bytes] = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                _no_such_token(self.vocab_size)
            parts.append(bytes((token,)) if token < 256 else self.SPECIAL[token - 256].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def stream(self) -> StreamDecoder:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class HFTokenizer(HFText):
    """A Hugging Face fast tokenizer from a local directory, both ways."""

    def __init__(self, path: str) -> None:
        """path: a directory holding tokenizer.json, and tokenizer_config.json for special tokens and the template."""
        super().__init__(path)
        self.plain_ids: Sequence[int] = self._find_plain_ids()

    def decode(self, ids: Sequence[int]) -> str:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            _no_such_token(self.vocab_size)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def stream(self) -> StreamDecoder:
        return _HFStream(self._tokenizer, self._special)

    def _find_plain_ids(self) -> list[int]:
        """Whole words with their leading space: pre-tokenizers split there, so such text encodes back to itself."""
        size = self.vocab_size
        words = (i for i in range(size) if re.fullmatch(r" [a-z]{2,12}", self._tokenizer.decode([i])))
        plain: list[int] = []
        while len(plain) < MAX_PLAIN_IDS and (chunk := list(itertools.islice(words, 1024))):
            texts = [self._tokenizer.decode([i]) for i in chunk]
            encoded = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            plain += [i for i, e in zip(chunk, encoded, strict=True) if e.ids == [i]]
        if plain:
            return plain[:MAX_PLAIN_IDS]
        # Tokenizers without a leading-space convention: anything that is not special.
        return [i for i in range(size) if i not in self._special][:MAX_PLAIN_IDS] or [0]


class _HFStream:
    """Decodes a short window of tokens with and without the new ones; the difference is the new text.

    Text is held back while it ends in U+FFFD, since a character may be spread over several tokens, but not for more
    than MAX_HELD of them: then the bytes are simply no character.
    """

    MAX_HELD = 16

    def __init__(self, tokenizer: Any, special: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._window: list[int] = []
        self._read = 0
        """Tokens of the window whose text was already given out."""

    def push(self, ids: Iterable[int]) -> str:
        self._window += (i for i in ids if i not in self._special)
        text = self._pending()
        if text.endswith("\ufffd") and len(self._window) - self._read <= self.MAX_HELD:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._pending())

    def _pending(self) -> str:
        before: str = self._tokenizer.decode(self._window[: self._read])
        after: str = self._tokenizer.decode(self._window)
        return after[len(before) :]

    def _accept(self, text: str) -> str:
        # The last tokens given out stay as context: some decoders treat the start of a sequence differently.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text


def _no_such_token(vocab_size: int) -> NoReturn:
    raise InvalidField("a token id is out of range", field="tokens", remedy=f"send ids from 0 to {vocab_size - 1}")
