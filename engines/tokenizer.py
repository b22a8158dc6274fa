"""Tokenizers for the simulated worker: a built-in one over bytes, and Hugging Face `tokenizer.json` directories.

Both offer what the HTTP surface needs: encode, decode, a chat template, streaming decode, and the *plain* token ids
a simulated model may generate. Plain ids survive decoding and encoding again, so a conversation that sends the
generated text back hits the cache as it would with a real model.
"""

from __future__ import annotations

import codecs
import datetime
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.sandbox

from ..proto.errors import ConfigError, InvalidField

MAX_PLAIN_IDS = 4096
"""Vocabulary of the simulated model; enough for variety, cheap to find."""

Message = Mapping[str, Any]


class StreamDecoder(Protocol):
    """Decodes one growing sequence without ever taking back text."""

    def push(self, ids: Iterable[int]) -> str:
        """Text that became certain with these tokens; special tokens have none."""
        ...

    def flush(self) -> str:
        """What is left at the end of the sequence, with U+FFFD for an incomplete character."""
        ...


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        ...

    @property
    def plain_ids(self) -> Sequence[int]:
        """Ids a simulated model may generate, at least one."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text count as such. add_special_tokens: BOS and the like."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens written out. Raises InvalidField for an id outside the vocabulary."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidField where the template refuses it."""
        ...

    def stream(self) -> StreamDecoder:
        """A decoder for a new sequence."""
        ...


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """`byte` for the built-in one, else a directory with `tokenizer.json`. Raises ConfigError."""
    return ByteTokenizer() if name_or_path == "byte" else HFTokenizer(name_or_path)


class ByteTokenizer:
    """One token per UTF-8 byte, and ChatML role markers. Nothing to download."""

    SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

    def __init__(self) -> None:
        self.vocab_size = 256 + len(self.SPECIAL)
        self.plain_ids: Sequence[int] = b"etaoinshrdlu etaoin "
        self._ids = {text: 256 + i for i, text in enumerate(self.SPECIAL)}
        self._split = re.compile("(" + "|".join(map(re.escape, self.SPECIAL)) + ")").split

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._split(text)):
            if i % 2:
                ids.append(self._ids[part])
            else:
                ids += part.encode("utf-8", "replace")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        parts: list[bytes] = []
        for token in ids:
            if not 0 <= token < self.vocab_size:
                _no_such_token(self.vocab_size)
            parts.append(bytes((token,)) if token < 256 else self.SPECIAL[token - 256].encode())
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        turns = [f"<|im_start|>{m['role']}\n{m.get('content') or ''}<|im_end|>\n" for m in messages]
        if tools:
            turns.insert(0, f"<|im_start|>tools\n{json.dumps(list(tools), sort_keys=True)}<|im_end|>\n")
        if add_generation_prompt:
            turns.append("<|im_start|>assistant\n")
        return "".join(turns)

    def stream(self) -> StreamDecoder:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class HFTokenizer:
    """A Hugging Face fast tokenizer from a local directory, with its chat template."""

    def __init__(self, path: str) -> None:
        """path: a directory holding tokenizer.json, and tokenizer_config.json for special tokens and the template."""
        try:
            from tokenizers import Tokenizer as FastTokenizer
        except ImportError:
            raise ConfigError(
                "tokenizer", "the tokenizers package is missing", "install metatrie[hf], or use the tokenizer `byte`"
            ) from None
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("tokenizer", f"no tokenizer.json in {path}", "name such a directory, or `byte`")
        self._tokenizer = FastTokenizer.from_file(str(file))
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        self._special_texts = {
            name: value if isinstance(value, str) else value.get("content", "")
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := config.get(name)) is not None
        }
        self._template = self._load_template(directory, config)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._special = frozenset(
            i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self.plain_ids: Sequence[int] = self._find_plain_ids()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            _no_such_token(self.vocab_size)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        if self._template is None:
            raise InvalidField(
                "this tokenizer has no chat template", field="messages", remedy="send a prompt to /v1/completions"
            )
        try:
            return self._template.render(
                **{
                    **self._special_texts,
                    **kwargs,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidField(
                f"the chat template refuses these messages ({type(error).__name__})", field="messages"
            ) from None

    def stream(self) -> StreamDecoder:
        return _HFStream(self._tokenizer, self._special)

    @staticmethod
    def _load_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
        file = directory / "chat_template.jinja"
        if file.is_file():
            source = file.read_text("utf-8")
        if source is None:
            return None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        # The helpers chat templates are written against.
        def raise_exception(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda fmt: datetime.datetime.now().astimezone().strftime(fmt)
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("tokenizer", f"its chat template is broken ({error})", "repair the template") from None

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
