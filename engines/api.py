"""The HTTP surface of a vLLM server, over the simulated cores.

Request bodies are read like vLLM reads them: unknown fields are ignored, wrong types and values refused with an
OpenAI error body. A client that disconnects cancels its handler, which frees what its request held.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from ..proto.errors import BodyTooLarge, CallerError, InvalidField, NotFound
from ..proto.text import ChatPrompt, render
from .core import Completion, EngineConfig, EngineCore, Output
from .metrics import Metrics
from .pool import Lora
from .scheduler import Request
from .tokenizer import Tokenizer

MAX_SEQUENCES = 256
"""Prompts × n per HTTP request."""
MAX_STOP_CHARS = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""

_json_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 413: "RequestEntityTooLarge", 503: "ServiceUnavailable"}

_Limit = Annotated[int, msgspec.Meta(ge=1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both completion endpoints understand. Sampling parameters beyond these do not change the simulation."""

    model: str | None = None
    max_tokens: _Limit | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_SEQUENCES)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None


class _CompletionRequest(_Sampling, frozen=True, kw_only=True):
    prompt: Any = None
    add_special_tokens: bool = True


class _ChatRequest(_Sampling, frozen=True, kw_only=True):
    """Also what /tokenize takes for a conversation."""

    max_completion_tokens: _Limit | None = None
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class _HasMessages(msgspec.Struct, frozen=True):
    """Whether a /tokenize body is a conversation, without decoding it."""

    messages: msgspec.Raw = msgspec.Raw()


class _TokenizePrompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class _Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


_Body = TypeVar("_Body")


class _Choice:
    """Text of one output as it grows, cut at the first stop string."""

    def __init__(self, output: Output, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.output = output
        self.tokens: list[int] = []
        self.shown = 0
        """Of these, how many a stream has carried."""
        self.finish: str | None = None
        self.stop_reason: str | None = None
        self._decoder = tokenizer.stream()
        self._stops = stops
        # Text that could still turn out to be the beginning of a stop string stays back.
        self._hold = max(map(len, stops), default=1) - 1
        self._held = ""

    def advance(self) -> str:
        """Take the output's fresh tokens; returns the text that became certain."""
        fresh, self.output.fresh = self.output.fresh, []
        parts: list[str] = []
        for token in fresh:
            self.tokens.append(token)
            parts.append(self._pass(self._decoder.push((token,))))
            if self.finish is not None:
                return "".join(parts)
        reason = self.output.finish
        if reason is not None:
            parts.append(self._pass(self._decoder.flush()))
            if self.finish is None:
                parts.append(self._held)
                self.finish = reason
        return "".join(parts)

    def _pass(self, text: str) -> str:
        held = self._held + text
        found = [(at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, self.stop_reason = min(found)
            self.finish = "stop"
            return held[:at]
        keep = len(held) - self._hold if self._hold else len(held)
        keep = max(keep, 0)
        self._held = held[keep:]
        return held[:keep]


class Api:
    """Handlers and their shared parts. `app()` builds the aiohttp application."""

    def __init__(
        self,
        config: EngineConfig,
        cores: Sequence[EngineCore],
        tokenizer: Tokenizer,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._cores = cores
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._loras: dict[str, Lora] = {lora.name: lora for lora in config.lora_adapters}
        self._created = int(time.time())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._config.max_body_bytes, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat_completions),
                web.get("/v1/models", self.models),
                web.post("/tokenize", self.tokenize),
                web.post("/detokenize", self.detokenize),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.get("/debug/cache", self.debug_cache),
            ]
        )
        return app

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """OpenAI text completion. Prompts are text, token ids, or lists of either."""
        body = await _read(http, _CompletionRequest)
        prompts = self._prompts(body)
        return await self._complete(http, body, prompts, body.max_tokens or DEFAULT_COMPLETION_TOKENS, _TextShape())

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """OpenAI chat completion."""
        body = await _read(http, _ChatRequest)
        prompt = self._chat_tokens(body)
        return await self._complete(http, body, [prompt], body.max_completion_tokens or body.max_tokens, _ChatShape())

    async def models(self, http: web.Request) -> web.Response:
        entries = [self._model_entry(self._config.model, root=self._config.model, parent=None)]
        entries += [
            self._model_entry(lo.name, root=lo.path, parent=self._config.model) for lo in self._loras.values()
        ]
        return _json({"object": "list", "data": entries})

    async def tokenize(self, http: web.Request) -> web.Response:
        """vLLM's /tokenize: a prompt, or a conversation under the chat template."""
        raw = await http.read()
        if bytes(_decode(raw, _HasMessages).messages) not in (b"", b"null"):
            chat = _decode(raw, _ChatRequest)
            self._adapter(chat.model)
            tokens = self._chat_tokens(chat)
        else:
            prompt = _decode(raw, _TokenizePrompt)
            self._adapter(prompt.model)
            tokens = self._tokenizer.encode(prompt.prompt, add_special_tokens=prompt.add_special_tokens)
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._config.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def detokenize(self, http: web.Request) -> web.Response:
        body = await _read(http, _Detokenize)
        self._adapter(body.model)
        return _json({"prompt": self._tokenizer.decode(body.tokens)})

    async def health(self, http: web.Request) -> web.Response:
        alive = all(core.alive for core in self._cores)
        return web.Response(status=200 if alive else 503)

    async def version(self, http: web.Request) -> web.Response:
        return _json({"version": self._config.version})

    async def reset_prefix_cache(self, http: web.Request) -> web.Response:
        """As vLLM: 200 whether or not the cache could be reset; `?reset_running_requests=true` makes it certain."""
        running = http.query.get("reset_running_requests", "").lower() == "true"
        for core in self._cores:
            core.scheduler.reset_prefix_cache(reset_running=running)
        return web.Response()

    async def metrics(self, http: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def kv_event_sources(self, http: web.Request) -> web.Response:
        """Where each rank publishes: `{rank: resolved configuration}`."""
        return _json({str(core.rank): msgspec.to_builtins(core.publisher.config) for core in self._cores})

    async def debug_cache(self, http: web.Request) -> web.Response:
        """Simulated engine only, for audits: `{engine hash in decimal: copies}` of one rank, between two steps.

        `?dp_rank=` names the rank (default: the first). `X-Next-Seq` counts the batches published until then; all of
        them are reflected, and nothing else but a reset whose event still waits for the next step.
        """
        rank = http.query.get("dp_rank", str(self._cores[0].rank))
        core = next((c for c in self._cores if str(c.rank) == rank), None)
        if core is None:
            raise NotFound("no such rank in this worker", field="dp_rank")
        snapshot = await core.snapshot()
        response = _json({str(name): copies for name, copies in snapshot.resident.items()})
        response.headers["X-Next-Seq"] = str(snapshot.next_seq)
        return response

    async def _complete(
        self,
        http: web.Request,
        body: _Sampling,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        shape: _Shape,
    ) -> web.StreamResponse:
        model = body.model or self._config.model
        stops = _stops(body.stop)
        core = self._core(http)
        completion = core.submit(self._requests(core, body, prompts, max_tokens))
        choices = [_Choice(output, self._tokenizer, stops) for output in completion.outputs]
        reply = _Reply(
            shape=shape,
            ident=f"{shape.prefix}-{http.headers.get('X-Request-Id', uuid.uuid4().hex)[:128]}",
            model=model,
            created=int(time.time()),
            choices=choices,
            prompts=prompts,
            per_prompt=body.n or 1,
            show_tokens=bool(body.return_token_ids),
        )
        try:
            if body.stream:
                return await self._stream(http, core, completion, reply, body.stream_options or _StreamOptions())
            texts = [""] * len(choices)
            while not reply.finished:
                for choice, text in await _advance(core, completion, choices):
                    texts[choice.output.index] += text
            return _json(reply.whole(texts))
        finally:
            core.abort(completion)

    async def _stream(
        self, http: web.Request, core: EngineCore, completion: Completion, reply: _Reply, options: _StreamOptions
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        await response.prepare(http)
        running = bool(options.include_usage and options.continuous_usage_stats)
        opening = [reply.chunk([entry], usage=running) for entry in reply.opening()]
        while not reply.finished:
            changed = await _advance(core, completion, reply.choices)
            if opening:  # with the first output, as vLLM sends it: until then nothing is known to be computed
                await response.write(_sse(opening))
                opening = []
            # Everything a step brought goes out in one write, one chunk per choice.
            chunks = [
                reply.chunk([reply.delta(choice, text)], usage=running)
                for choice, text in changed
                if text or choice.finish is not None
            ]
            if chunks:
                await response.write(_sse(chunks))
        closing = [reply.chunk([], usage=True)] if options.include_usage else []
        await response.write(_sse(closing) + b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _requests(
        self, core: EngineCore, body: _Sampling, prompts: Sequence[list[int]], max_tokens: int | None
    ) -> list[Request]:
        lora = self._adapter(body.model)
        if body.cache_salt == "":
            raise InvalidField("cache_salt must be a non-empty string if provided", field="cache_salt")
        copies = body.n or 1
        if len(prompts) * copies > MAX_SEQUENCES:
            raise InvalidField(
                f"more than {MAX_SEQUENCES} sequences", field="n", remedy="send fewer prompts or less n"
            )
        full = (body.vllm_xargs or {}).get("kv_cache_report_mode") == "full"
        limit = self._config.max_model_len
        requests = []
        for prompt in prompts:
            if not prompt:
                raise InvalidField("the prompt cannot be empty", field="prompt")
            if len(prompt) + (max_tokens or 1) > limit:
                raise InvalidField(
                    f"This model's maximum context length is {limit} tokens. However, you requested "
                    f"{max_tokens or 1} output tokens and your prompt contains {len(prompt)} input tokens.",
                    field="prompt",
                )
            for copy in range(copies):
                seed = (body.seed or 0) + copy
                request = core.scheduler.new_request(
                    prompt,
                    max_tokens or self._natural_length(prompt, seed),
                    lora=lora,
                    salt=body.cache_salt,
                    seed=seed,
                    ends="stop" if max_tokens is None else "length",
                    report_full=full,
                )
                requests.append(request)
        return requests

    def _natural_length(self, prompt: Sequence[int], seed: int) -> int:
        """Where the model ends on its own: from half to one and a half times the mean, fixed per prompt and seed."""
        mean = self._config.default_output_tokens
        return max(1, mean // 2 + (sum(prompt) * 2654435761 + seed * 40503) % (mean + 1))

    def _core(self, http: web.Request) -> EngineCore:
        wanted = http.headers.get("X-data-parallel-rank")
        if wanted is not None:
            for core in self._cores:
                if str(core.rank) == wanted:
                    return core
            raise InvalidField("no such data-parallel rank in this worker", field="X-data-parallel-rank")
        # vLLM's own balancing between ranks: waiting requests weigh four times as much as running ones.
        return min(self._cores, key=lambda c: 4 * c.scheduler.waiting + c.scheduler.running)

    def _adapter(self, model: str | None) -> Lora | None:
        """The adapter a request names, if it names one. Raises NotFound for a model this worker does not serve."""
        if model is None or model == self._config.model:
            return None
        lora = self._loras.get(model)
        if lora is None:
            raise NotFound(f"The model `{model[:200]}` does not exist.", field="model")
        return lora

    def _prompts(self, body: _CompletionRequest) -> list[list[int]]:
        match body.prompt:
            case str() as text:
                return [self._tokenizer.encode(text, add_special_tokens=body.add_special_tokens)]
            case [int(), *_] as tokens:
                return [self._token_ids(tokens)]
            case [str() | list(), *_] as prompts:
                return [
                    self._tokenizer.encode(p, add_special_tokens=body.add_special_tokens)
                    if isinstance(p, str)
                    else self._token_ids(p)
                    for p in prompts[: MAX_SEQUENCES + 1]
                ]
            case _:
                raise InvalidField("prompt must be text, token ids, or a list of either", field="prompt")

    def _token_ids(self, value: Any) -> list[int]:
        try:
            tokens = msgspec.convert(value, list[int])
        except msgspec.ValidationError:
            raise InvalidField("prompt must be text, token ids, or a list of either", field="prompt") from None
        if tokens and (min(tokens) < 0 or max(tokens) >= self._tokenizer.vocab_size):
            raise InvalidField("Token id is out of vocabulary", field="prompt")
        return tokens

    def _chat_tokens(self, body: _ChatRequest) -> list[int]:
        chat = ChatPrompt(
            messages=body.messages,
            tools=body.tools,
            documents=body.documents,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs or {},
        )
        return self._tokenizer.encode(render(self._tokenizer, chat), add_special_tokens=body.add_special_tokens)

    def _model_entry(self, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self._config.max_model_len,
        }


class _TextShape:
    """Bodies of /v1/completions."""

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None


class _ChatShape:
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}


_Shape = _TextShape | _ChatShape


class _Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What is common to all bodies of one response."""

    shape: _Shape
    ident: str
    model: str
    created: int
    choices: list[_Choice]
    prompts: Sequence[list[int]]
    per_prompt: int
    show_tokens: bool

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def whole(self, texts: Sequence[str]) -> dict[str, Any]:
        choices = [
            self._labelled(choice, self.shape.choice(text), choice.tokens)
            for choice, text in zip(self.choices, texts, strict=True)
        ]
        return {**self._head(self.shape.whole_object), "choices": choices, "usage": self.usage()}

    def chunk(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        body = {**self._head(self.shape.chunk_object), "choices": choices}
        return {**body, "usage": self.usage()} if usage else body

    def opening(self) -> list[dict[str, Any]]:
        entry = self.shape.opening()
        return [] if entry is None else [self._labelled(choice, entry, []) for choice in self.choices]

    def delta(self, choice: _Choice, text: str) -> dict[str, Any]:
        tokens = choice.tokens[choice.shown :] if self.show_tokens else []
        choice.shown = len(choice.tokens)
        return self._labelled(choice, self.shape.delta(text), tokens)

    def usage(self) -> dict[str, Any]:
        # Children of one prompt share it; it counts once, and its first child tells what was cached.
        prompt_tokens = sum(map(len, self.prompts))
        cached = sum(c.output.request.cached_tokens for c in self.choices[:: self.per_prompt])
        generated = sum(len(c.tokens) for c in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.ident, "object": kind, "created": self.created, "model": self.model}

    def _labelled(self, choice: _Choice, content: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        entry = {
            "index": choice.output.index,
            **content,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.show_tokens:
            entry["token_ids"] = tokens
        return entry


async def _advance(core: EngineCore, completion: Completion, choices: Sequence[_Choice]) -> list[tuple[_Choice, str]]:
    """Wait for new tokens and turn them into text; ends in the core what a stop string has ended here."""
    changed: list[tuple[_Choice, str]] = []
    for output in await completion.changes():
        choice = choices[output.index]
        if choice.finish is None:
            changed.append((choice, choice.advance()))
            if choice.finish is not None:
                core.end(output, "stop")
    return changed


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if any(not s or len(s) > MAX_STOP_CHARS for s in stops) or len(stops) > 64:
        raise InvalidField(
            "a stop string is empty or too long, or there are too many",
            field="stop",
            remedy=f"send at most 64 of 1 to {MAX_STOP_CHARS} characters",
        )
    return stops


def _decode(raw: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidField(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidField("the body is not valid JSON") from None


async def _read(http: web.Request, kind: type[_Body]) -> _Body:
    return _decode(await http.read(), kind)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_json_encode(body), status=status, content_type="application/json")


def _sse(chunks: Sequence[Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % _json_encode(chunk) for chunk in chunks)


def _error(status: int, message: str, field: str | None = None) -> web.Response:
    kind = _ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return _json({"error": {"message": message, "type": kind, "param": field, "code": status}}, status)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Every refusal in OpenAI's error shape."""
    try:
        return await handler(request)
    except CallerError as error:
        return _error(error.status, f"{error.detail}; {error.remedy}" if error.remedy else error.detail, error.field)
    except web.HTTPRequestEntityTooLarge:
        return _error(BodyTooLarge.status, "the body is too large")
    except web.HTTPException as error:
        response = _error(error.status, error.reason)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
