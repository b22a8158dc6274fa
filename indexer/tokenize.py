"""Turning prompts and chats into token ids: the seam, and an implementation that asks an engine.

A router must not guess: one token that differs changes every later block hash. An engine of the model has the right
tokenizer and chat template at hand, so without a declared tokenizer (text.py) one is asked over HTTP.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import aiohttp
import msgspec

from ..proto.api import MAX_PROMPT_TOKENS, PromptRequest, TokenId
from ..proto.errors import InvalidField, NoReplica
from ..proto.text import media_at
from .models import Target

DEFAULT_TIMEOUT_S = 5.0
ATTEMPTS = 2
"""Engines asked before giving up."""
MAX_ANSWER_BYTES = 32 << 20
"""An engine may add the text of each token to its answer."""
MEDIA_NOTE = "matched up to the first media part; what it becomes is for the engine's processor to know"
_REMEDY = "send token_ids, or register replicas with the url of an engine that serves /tokenize"


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """A tokenised prompt."""

    ids: list[int]
    note: str | None = None
    """Why `ids` is only the beginning of the prompt; None: it is all of it."""


class Tokenize(Protocol):
    """Token ids of a request that came as text."""

    async def __call__(
        self, request: PromptRequest, urls: Sequence[str], *, target: Target | None = None, scope: str = ""
    ) -> Tokens:
        """request: has `prompt` or `messages`. urls: base URLs of the model's live engines. target: what the
        request's model name means, if it is not itself the model. scope: whose prompts these are; what is remembered
        of one scope never shows in another.

        Raises InvalidField if the prompt cannot be tokenised, NoReplica if nobody can be asked, TooManyRequests if
        too many wait already.
        """
        ...

    async def close(self) -> None: ...


class _Answer(msgspec.Struct):
    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]


class EngineTokenize:
    """Asks the `/tokenize` endpoint of a live engine (vLLM's API), up to ATTEMPTS different ones.

    Each attempt, connecting included, ends after `timeout_s`. What an engine says about a prompt it refuses is not
    passed on: it may quote the prompt.
    """

    def __init__(self, *, timeout_s: float = DEFAULT_TIMEOUT_S, rng: random.Random | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._decode = msgspec.json.Decoder(_Answer).decode

    async def __call__(
        self, request: PromptRequest, urls: Sequence[str], *, target: Target | None = None, scope: str = ""
    ) -> Tokens:
        field = "prompt" if request.prompt is not None else "messages"
        if not urls:
            raise NoReplica("no live replica of this model has a url to tokenise with", field=field, remedy=_REMEDY)
        body: dict[str, Any] = {"model": request.model if target is None else target.name}
        note = None
        if request.prompt is not None:
            body["prompt"] = request.prompt
        else:
            # What precedes the first media part; the engine's answer does not tell what an image will become.
            messages = request.messages or []
            first = media_at(messages)
            if first == 0:
                return Tokens([], MEDIA_NOTE)
            if first is None:
                body |= {"messages": messages, "add_generation_prompt": request.add_generation_prompt}
            else:
                note = MEDIA_NOTE
                request = msgspec.structs.replace(request, continue_final_message=False)
                body |= {"messages": messages[:first], "add_generation_prompt": False}
            for name in ("tools", "documents", "continue_final_message", "chat_template_kwargs"):
                if value := getattr(request, name):
                    body[name] = value
        if request.add_special_tokens is not None:
            body["add_special_tokens"] = request.add_special_tokens
        payload = msgspec.json.encode(body)
        for url in self._rng.sample(urls, min(ATTEMPTS, len(urls))):
            try:
                tokens = await self._ask(f"{url.rstrip('/')}/tokenize", payload, field)
            except InvalidField:
                if note is None:
                    raise
                return Tokens([], note)  # a template may refuse the beginning of what it accepts as a whole
            if tokens is not None:
                return Tokens(tokens, note)
        raise NoReplica("no engine of this model could tokenise the prompt", field=field, remedy=_REMEDY)

    async def _ask(self, url: str, payload: bytes, field: str) -> list[int] | None:
        """None: this engine cannot answer, another may."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.post(
                url, data=io.BytesIO(payload), headers={"Content-Type": "application/json"}, allow_redirects=False
            ) as response:
                if response.status in (400, 413, 422):
                    raise InvalidField("the engine refused to tokenise it", field=field, remedy=_REMEDY)
                if response.status != 200:
                    return None
                answer = bytearray()
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > MAX_ANSWER_BYTES:
                        return None
                return self._decode(answer).tokens
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError):
            return None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
