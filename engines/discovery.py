"""Where an engine publishes: asked of its own HTTP server, one source per data-parallel rank.

vLLM (0.31 and later) answers `GET /kv_event_sources` with every rank's resolved configuration; SGLang answers
`GET /server_info` with the ports its ranks count up from. Both name the interface they bound, which may be any: a
client then dials the host it asked.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ..proto.engine import EventSource
from ..proto.errors import ConfigError

MAX_RANKS: Final = 1024
MAX_BODY: Final = 1 << 20
RETRY_S: Final = 1.0
_WILDCARDS: Final = frozenset({"", "*", "0.0.0.0", "::", "[::]"})  # noqa: S104  recognised here, not bound


def vllm_sources(body: object, host: str) -> list[EventSource]:
    """From the body of `/kv_event_sources`. Raises ValueError for anything else."""
    if not isinstance(body, dict) or not 0 < len(body) <= MAX_RANKS:
        raise ValueError("no map of ranks")
    sources = []
    for rank, settings in body.items():
        if not isinstance(settings, dict) or not str(rank).isascii() or not str(rank).isdigit():
            raise ValueError("no map of ranks")
        if not settings.get("enable_kv_cache_events", True) or settings.get("publisher") == "null":
            raise ValueError("events are switched off")
        replay = settings.get("replay_endpoint")
        sources.append(
            EventSource(
                dp_rank=int(rank),
                events=_dialled(settings.get("endpoint"), host),
                replay=None if replay is None else _dialled(replay, host),
                topic=_text(settings.get("topic") or ""),
            )
        )
    return sorted(sources, key=lambda source: source.dp_rank)


def sglang_sources(body: object, host: str) -> list[EventSource]:
    """From the body of `/server_info`. Raises ValueError for anything else."""
    events = body.get("kv_events") if isinstance(body, dict) else None
    if not isinstance(events, dict) or events.get("publisher") != "zmq":
        raise ValueError("events are switched off")
    where, base, replay = events.get("endpoint_host"), events.get("endpoint_port_base"), None
    replay_base, ranks = events.get("replay_endpoint_port_base"), events.get("dp_size") or 1
    if type(base) is not int or type(ranks) is not int or not 0 < ranks <= MAX_RANKS:
        raise ValueError("no ports")
    dial = host if where is None or where in _WILDCARDS else _text(where)
    block_size = events.get("block_size")
    sources = []
    for rank in range(ranks):
        if type(replay_base) is int:
            replay = f"tcp://{dial}:{replay_base + rank}"
        sources.append(
            EventSource(
                dp_rank=rank,
                events=f"tcp://{dial}:{base + rank}",
                replay=replay,
                topic=_text(events.get("topic") or ""),
                block_size=block_size if type(block_size) is int else None,
            )
        )
    return sources


_ASK: Final[dict[str, tuple[str, Any]]] = {
    "vllm": ("/kv_event_sources", vllm_sources),
    "sglang": ("/server_info", sglang_sources),
    "sglang-dynamo": ("/server_info", sglang_sources),
}


async def discover(url: str, engine: str, *, timeout_s: float = 60.0) -> list[EventSource]:
    """Every rank's source, by rank. Waits for an engine that does not answer yet, at most `timeout_s`.

    url: its HTTP server. Raises ConfigError, saying what to do, if the family cannot be asked, the engine does not
    publish, or it did not answer in time.
    """
    if engine not in _ASK:
        raise ConfigError(
            "discover", f"{engine} engines cannot be asked", f"use one of {', '.join(_ASK)}, or --events"
        )
    path, parse = _ASK[engine]
    host = urlsplit(url).hostname
    if host is None:
        raise ConfigError("discover", f"{url} names no host", "write it like http://127.0.0.1:8000")
    if ":" in host:
        host = f"[{host}]"
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while True:
            try:
                async with session.get(url.rstrip("/") + path) as response:
                    if response.status in (404, 405):
                        raise ConfigError(
                            "discover",
                            f"{url} has no {path}",
                            "upgrade the engine, or pass --events (docs/engines.md)",
                        )
                    response.raise_for_status()
                    body = await read_bounded(response, MAX_BODY)
                sources: list[EventSource] = parse(msgspec.json.decode(body), host)
                return sources
            except (ValueError, msgspec.DecodeError) as error:
                raise ConfigError(
                    "discover", f"{url}{path}: {error}", "start the engine with --kv-events-config (docs/engines.md)"
                ) from None
            except (aiohttp.ClientError, TimeoutError):
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        "discover", f"{url} does not answer", "start the engine first, or pass --events"
                    ) from None
                await asyncio.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))


async def read_bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """A response's body, cut off after `most` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        body += chunk
        if len(body) >= most:
            break
    return bytes(body[:most])


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("not text where text belongs")
    return value


def _dialled(endpoint: object, host: str) -> str:
    """An endpoint as a client on another machine dials it."""
    text = _text(endpoint)
    if not text.startswith("tcp://"):
        return text
    name, _, port = text.removeprefix("tcp://").rpartition(":")
    return f"tcp://{host if name in _WILDCARDS else name}:{port}"
