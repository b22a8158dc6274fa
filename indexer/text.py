"""Tokenising in the router: beside the event loop, and only what was not tokenised before.

Strategy. A prompt's text is rendered and cut into pieces that tokenise independently of each other (proto/text.py:
at the template's special tokens), and each piece's ids are kept. A conversation's next turn repeats all its pieces
but the newest, so only those are tokenised. Rendering, cutting and tokenising run in a small thread pool; the
tokenizers library releases the interpreter lock while it works.

Bounds. `threads` at work, `waiting` prompts in line, more are refused (429). Per model `cache_bytes` of pieces, the
ones unused longest going first; a piece of more than an eighth of that is not kept.

Privacy. Pieces are kept per scope (a tenant's salt), or how fast an answer comes would tell one tenant what another
has sent.

Media. How many tokens an image becomes is for the engine's processor to know. The prompt is followed up to the last
piece that ends before the first message with a media part; the answer says so (`note`).
"""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from ..proto.api import MAX_PROMPT_TOKENS, PromptRequest
from ..proto.errors import InvalidField, TooManyRequests
from ..proto.text import (
    ByteText,
    ChatPrompt,
    HFText,
    Message,
    TextTokenizer,
    media_at,
    render,
)
from .models import ModelConfig, Target
from .tokenize import MEDIA_NOTE, Tokenize, Tokens

DEFAULT_THREADS: Final = 2
DEFAULT_WAITING: Final = 256
DEFAULT_CACHE_BYTES: Final = 64 << 20
_SENTINEL: Final = "\ue000media\ue001"
"""Stands for a message with media; private-use characters no template and no tokenizer gives a meaning."""
_PIECE_OVERHEAD: Final = 300
"""Bytes a kept piece costs beside its text and ids, about."""


class PieceCache:
    """Token ids of pieces of text, by scope. Thread-safe."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self.bytes = 0
        self.hits = 0
        self.misses = 0

    def encode(self, tokenizer: TextTokenizer, text: str, *, add_special_tokens: bool, scope: str = "") -> list[int]:
        """What `tokenizer.encode` returns for the same arguments."""
        frame = tokenizer.frame() if add_special_tokens else ([], [])
        if frame is None:
            return tokenizer.encode(text)
        pieces = tokenizer.split(text)
        found = self._look_up(scope, pieces)
        missing = list(dict.fromkeys(piece for piece in pieces if piece not in found))
        if missing:
            fresh = {p: array("I", ids) for p, ids in zip(missing, tokenizer.encode_pieces(missing), strict=True)}
            self._keep(scope, fresh)
            found |= fresh
        ids = array("I", frame[0])
        for piece in pieces:
            ids += found[piece]
        ids.extend(frame[1])
        return ids.tolist()

    def _look_up(self, scope: str, pieces: Sequence[str]) -> dict[str, array[int]]:
        found: dict[str, array[int]] = {}
        with self._lock:
            for piece in pieces:
                key = scope, piece
                ids = self._kept.get(key)
                if ids is None:
                    self.misses += 1
                else:
                    self._kept.move_to_end(key)
                    found[piece] = ids
                    self.hits += 1
        return found

    def _keep(self, scope: str, fresh: Mapping[str, array[int]]) -> None:
        with self._lock:
            for piece, ids in fresh.items():
                size = _size(piece, ids)
                if size > self._max_bytes // 8 or (scope, piece) in self._kept:
                    continue
                self._kept[scope, piece] = ids
                self.bytes += size
                while self.bytes > self._max_bytes:
                    (_, oldest), gone = self._kept.popitem(last=False)
                    self.bytes -= _size(oldest, gone)


def _size(piece: str, ids: array[int]) -> int:
    return 4 * len(piece) + ids.itemsize * len(ids) + _PIECE_OVERHEAD  # 4: no character takes more


class TextTokenize:
    """Tokenises here for the models that have a tokenizer declared, and asks an engine for all others."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        engines: Tokenize,
        *,
        threads: int = DEFAULT_THREADS,
        waiting: int = DEFAULT_WAITING,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        """engines: for models without a tokenizer; closed with this. Raises ConfigError if a tokenizer cannot be
        loaded. Loading takes seconds for a large one: construct before serving."""
        self._engines = engines
        self._models = models
        self._tokenizers = {name: load(config) for name, config in models.items() if config.tokenizer != "engine"}
        self.caches = {name: PieceCache(cache_bytes) for name in self._tokenizers}
        """By model."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize") if self._tokenizers else None
        self._room = threads + waiting

    async def __call__(
        self, request: PromptRequest, urls: Sequence[str], *, target: Target | None = None, scope: str = ""
    ) -> Tokens:
        model = request.model if target is None else target.model
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            return await self._engines(request, urls, target=target, scope=scope)
        if not self._room:
            raise TooManyRequests("too many prompts wait to be tokenised", remedy="retry later")
        self._room -= 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pool, self._tokenize, tokenizer, self.caches[model], self._models[model], request, scope
            )
        finally:
            self._room += 1

    async def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        await self._engines.close()

    @staticmethod
    def _tokenize(
        tokenizer: TextTokenizer, cache: PieceCache, config: ModelConfig, request: PromptRequest, scope: str
    ) -> Tokens:
        """In a worker thread."""
        note = None
        special = request.add_special_tokens
        if request.prompt is not None:
            text = request.prompt
            special = True if special is None else special
        else:
            chat = _chat(request, config)
            at = media_at(chat.messages)
            if at is None:
                text = render(tokenizer, chat)
            else:
                text, note = _before_media(tokenizer, chat, at), MEDIA_NOTE
        ids = cache.encode(tokenizer, text, add_special_tokens=bool(special), scope=scope)
        if len(ids) > MAX_PROMPT_TOKENS:
            raise InvalidField(f"the prompt has more than {MAX_PROMPT_TOKENS} tokens", field=_field(request))
        if not ids and note is None:
            raise InvalidField("the prompt is empty", field=_field(request))
        return Tokens(ids, note)


def load(config: ModelConfig) -> TextTokenizer:
    """The tokenizer a model declares. Raises ConfigError."""
    if config.tokenizer == "byte":
        return ByteText()
    return HFText(config.tokenizer, content_format=None if config.content_format == "auto" else config.content_format)


def _chat(request: PromptRequest, config: ModelConfig) -> ChatPrompt:
    assert request.messages is not None
    return ChatPrompt(
        messages=request.messages,
        tools=request.tools,
        documents=request.documents,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template_kwargs={**config.chat_template_kwargs, **(request.chat_template_kwargs or {})},
    )


def _before_media(tokenizer: TextTokenizer, chat: ChatPrompt, first: int) -> str:
    """The rendered text up to a place where it certainly is as the engine renders it, and tokenises independently
    of what follows. Messages with media are replaced as a whole: an engine may put their placeholders anywhere in
    them."""
    messages: list[Message] = []
    for index, message in enumerate(chat.messages):
        with_media = index >= first and media_at([message]) is not None
        messages.append({**message, "content": _SENTINEL} if with_media else message)
    chat = ChatPrompt(
        messages=messages,
        tools=chat.tools,
        documents=chat.documents,
        add_generation_prompt=True,
        chat_template_kwargs=chat.chat_template_kwargs,
    )
    pieces = tokenizer.split(render(tokenizer, chat).partition(_SENTINEL)[0])
    return "".join(pieces[:-1])


def _field(request: PromptRequest) -> str:
    return "prompt" if request.prompt is not None else "messages"
