"""A front door on a real socket, over simulated engines whose events are really followed, or over scripted ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from metatrie.engines.rules import rule_for
from metatrie.engines.worker import EngineConfig, EngineWorker
from metatrie.indexer.http_api import Authenticate, make_app, trust_loopback
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.proxy import Proxy, ProxyConfig
from metatrie.indexer.router import Router, RouterConfig
from metatrie.proto.api import RegisterReplica
from metatrie.proto.hashing import Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import ReplicaRef, ReplicaSpec
from metatrie.scripts.serve import LocalConsumers

MODEL = "m"

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def build_tokenizer(path: Path, *, template: str = TEMPLATE) -> str:
    """A small byte-level BPE with ChatML markers and a pre-tokenizer like Qwen's, in Hugging Face's files."""
    tokenizers = pytest.importorskip("tokenizers")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.normalizer = tokenizers.normalizers.NFC()
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    text = "user assistant system the weather in Paris is what it was when tools were called and the answer came back"
    bpe.train_from_iterator([text] * 50, trainer)
    bpe.add_tokens(
        [tokenizers.AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>", "<think>", "</think>")]
    )
    bpe.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@dataclass
class Front:
    """One front door and what is behind it."""

    url: str
    router: Router
    proxy: Proxy
    store: MemoryStore
    session: aiohttp.ClientSession
    engines: list[EngineWorker] = field(default_factory=list)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body as JSON (None if it is none) and headers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url + path, json=body, headers=sent) as response:
            raw = await response.read()
            return response.status, json.loads(raw) if raw[:1] == b"{" else None, response.headers

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (line.rpartition(" ") for line in (await response.text()).splitlines() if line[0] != "#")
            return {name: float(value) for name, _, value in lines}

    async def reserved(self) -> int:
        return int((await self.metrics())["metatrie_router_reservations"])


OpenFront = Callable[..., Awaitable[Front]]
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def open_front() -> AsyncIterator[OpenFront]:
    """Starts front doors.

    engines: how many simulated ones; their events are followed. urls: of other engines, each registered as a replica
    `r0`, `r1`, … that holds nothing.
    """
    async with AsyncExitStack() as stack:

        async def start(
            *,
            engines: int = 0,
            urls: Sequence[str] = (),
            router: RouterConfig | None = None,
            proxy: ProxyConfig | None = None,
            authenticate: Authenticate = trust_loopback,
            engine: dict[str, Any] | None = None,
            engine_api_key: str | None = None,
            **options: Any,
        ) -> Front:
            store = MemoryStore()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            consumers = await stack.enter_async_context(LocalConsumers(store, rule_for=rule_for))
            workers = []
            for i in range(engines):
                fields = {"num_blocks": 1025, "max_model_len": 8192, "time_scale": 0, **(engine or {})}
                config = EngineConfig(
                    port=0, model=MODEL, events_endpoint="tcp://*:0", replay_endpoint="tcp://*:0", **fields
                )
                worker = await stack.enter_async_context(EngineWorker(config))
                source = worker.event_sources[0]
                await consumers.register(
                    RegisterReplica(
                        replica=f"engine-{i}",
                        engine="vllm",
                        model=MODEL,
                        block_size=config.block_size,
                        events=source.endpoint,
                        replay=source.replay_endpoint,
                        url=worker.address,
                    )
                )
                workers.append(worker)
                # A first batch, which tells its consumer that nothing is missing.
                first = {"model": MODEL, "prompt": [1] * config.block_size, "max_tokens": 1}
                async with session.post(worker.address + "/v1/completions", json=first) as response:
                    assert response.status == 200
            index = await store.open(Namespace(model=MODEL))

            async def followed() -> bool:
                for consumer in consumers.consumers():
                    consumer.writer.status_changed()  # or it would wait for the next renewal
                return all(view.state == "exact" for view in (await index.fleet()).replicas)

            await wait_for(followed)
            for i, url in enumerate(urls):
                spec = ReplicaSpec(ref=ReplicaRef(f"r{i}"), engine="vllm", url=url)
                await index.claim(spec, owner="test", lease_s=3600, activate=True)
            routed = await stack.enter_async_context(Router(store, router, witness=consumers, **options))
            proxied = await stack.enter_async_context(
                Proxy(routed, proxy or ProxyConfig(), engine_api_key=engine_api_key)
            )
            app = make_app(routed, authenticate=authenticate, proxy=proxied, registrar=consumers)
            server = await stack.enter_async_context(HttpServer(app))
            return Front(server.url, routed, proxied, store, session, workers)

        yield start


@dataclass
class Scripted:
    """An engine that does as a test says, and remembers what it was asked."""

    url: str
    requests: list[tuple[Mapping[str, str], bytes]]
    paths: list[str]
    """With their queries, as they came."""


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[..., Awaitable[Scripted]]]:
    """Starts engines whose completions are answered by the given handler."""
    async with AsyncExitStack() as stack:

        async def start(
            handler: Script, *, models: Sequence[dict[str, Any]] = ({"id": MODEL},), health: Script | None = None
        ) -> Scripted:
            requests: list[tuple[Mapping[str, str], bytes]] = []
            paths: list[str] = []

            async def completions(http: web.Request) -> web.StreamResponse:
                paths.append(http.raw_path)
                requests.append((http.headers, await http.read()))
                return await handler(http)

            async def list_models(http: web.Request) -> web.Response:
                return web.json_response({"object": "list", "data": list(models)})

            async def healthy(http: web.Request) -> web.StreamResponse:
                return await health(http) if health is not None else web.Response()

            app = web.Application()
            app.router.add_post("/v1/completions", completions)
            app.router.add_post("/v1/chat/completions", completions)
            app.router.add_get("/v1/models", list_models)
            app.router.add_get("/health", healthy)
            server = await stack.enter_async_context(HttpServer(app, grace_s=0.1))
            return Scripted(server.url, requests, paths)

        yield start


async def wait_for(condition: Callable[[], Awaitable[bool]], *, within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, "the condition never held"
        await asyncio.sleep(0.01)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """Waits until an asynchronous condition holds."""
    return wait_for
