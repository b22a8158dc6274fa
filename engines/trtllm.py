"""TensorRT-LLM's KV-cache events, which are pulled as JSON, relayed as a vLLM-style event stream.

Strategy. TensorRT-LLM has no publisher that works: events wait in a buffer until somebody takes them, over
`GET /kv_cache_events` of trtllm-serve, and are then gone. So exactly one process may take them: `TrtllmRelay`. It
publishes what it takes on a PUB socket with a replay ring, per attention data-parallel rank, and everything behind
it (sidecars, their restarts, recordings) works as with vLLM.

`Translator` keeps what the JSON leaves out. A removal names no tier, so the tier of each block is remembered. A move
between tiers is an update, published as a store in the new tier followed by a removal from the old one, in this
order, so that the prefix never breaks. A partial block ends its run and is remembered, to swallow its removal.

What the JSON does not tell is never guessed. Token ids that stand for media, and blocks with media keys, go out with
an extra key no prompt can have. LoRA adapters do not show at all: do not serve adapters and base prompts from one
namespace. Lost events (the buffer drops its oldest) leave a hole in the relayed sequence, which consumers see as the
loss it is; `event_id`s that start over are a restart, published as a clear.

Bounds: one poll's body is at most MAX_BODY bytes; at most `max_blocks` blocks are remembered, and beyond that the
oldest is forgotten, which then costs its removal a guess-free `unknown_removals`.

Wire format: wire-format notes, section 5; read from the source, not recorded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import aiohttp
import msgspec
import zmq

from ..proto.errors import ConfigError, EngineError, MalformedBatch
from .discovery import read_bounded
from .publisher import Publisher, PublisherConfig
from .versions import DEFAULT_VERSION, traits_of

MAX_BODY: Final = 64 << 20
MAX_KNOWN_BLOCKS: Final = 4_000_000
MAX_WINDOWS: Final = 16
MAX_RANKS: Final = 64
_LEVELS: Final = ("GPU", "CPU", "DISK")
_UNHASHABLE: Final = [[None]]
"""Extra keys of a block whose inputs are not all on the wire: a kind nobody knows, so no prompt can have it."""

_log = logging.getLogger("metatrie.relay")


class _Token(msgspec.Struct):
    token_id: int | str
    token_extra_id: int = 0


class _Block(msgspec.Struct):
    block_hash: int | str
    tokens: list[_Token] = []
    cache_level: int = 0
    mm_keys: list[Any] | None = None
    cache_salt: str | None = None


class _Diff(msgspec.Struct):
    old_value: int
    new_value: int


class _Data(msgspec.Struct):
    type: str
    parent_hash: int | str | None = None
    blocks: list[_Block] = []
    block_hashes: list[int | str] = []
    block_hash: int | str | None = None
    cache_level: _Diff | None = None


class TrtllmEvent(msgspec.Struct):
    """One event as trtllm-serve renders it; unknown fields are ignored."""

    event_id: Annotated[int, msgspec.Meta(ge=0)]
    data: _Data
    window_size: int | None = None
    attention_dp_rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)] | None = None


_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_event = msgspec.json.Decoder(TrtllmEvent).decode


def _name(value: int | str) -> int | bytes:
    """A block hash for the wire. Hexadecimal text is a digest; its last 8 bytes name the block, as with vLLM."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    try:
        raw = bytes.fromhex(value)
    except ValueError:
        raise MalformedBatch("hash") from None
    if len(raw) < 8:
        raise MalformedBatch("hash")
    return raw


class Translator:
    """One rank's events, in order, to vLLM-style map events."""

    def __init__(self, block_size: int, *, max_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        """block_size: the engine's `tokens_per_block`."""
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._groups: dict[int | None, int] = {}
        """Window size → cache group, in order of appearance; the largest announced one is full attention."""
        self._levels: dict[tuple[int, int | bytes], int | None] = {}
        """(group, block) → its tier; None for a partial block, which was not announced."""
        self.partial = 0
        """Partial blocks left out."""

    def restart(self) -> list[dict[str, Any]]:
        """Another engine process answers."""
        self._groups.clear()
        self._levels.clear()
        return [{"type": "AllBlocksCleared"}]

    def translate(self, event: TrtllmEvent) -> list[dict[str, Any]]:
        """What one event means; nothing, for kinds that say nothing of single blocks. Raises MalformedBatch."""
        group = self._group(event.window_size)
        data = event.data
        match data.type:
            case "stored":
                return self._stored(data, group, event.window_size)
            case "removed":
                return self._removed(data.block_hashes, group)
            case "updated":
                return self._updated(data, group, event.window_size)
            case _:
                return []

    def _group(self, window: int | None) -> int:
        group = self._groups.get(window)
        if group is None:
            if len(self._groups) >= MAX_WINDOWS:
                raise MalformedBatch("windows")
            group = self._groups[window] = len(self._groups)
        return group

    def _where(self, group: int, window: int | None, level: int) -> dict[str, Any]:
        """Group and medium fields of a store."""
        full = window is None or window == max(w or 0 for w in self._groups)
        return {
            "medium": _LEVELS[min(max(level, 0), 2)],
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention" if full else "sliding_window",
            "kv_cache_spec_sliding_window": None if full else window,
        }

    def _stored(self, data: _Data, group: int, window: int | None) -> list[dict[str, Any]]:
        parent = None if data.parent_hash is None else _name(data.parent_hash)
        events: list[dict[str, Any]] = []
        moved: list[dict[str, Any]] = []
        at: tuple[int, str | None] | None = None
        for index, block in enumerate(data.blocks):
            name = _name(block.block_hash)
            if len(block.tokens) != self.block_size:
                # Nothing can follow a block that is not full.
                for rest in data.blocks[index:]:
                    self._remember(group, _name(rest.block_hash), None)
                    self.partial += 1
                break
            before = self._levels.get((group, name))
            if before == block.cache_level:
                at, parent = None, name  # the tree has a block once, however often it is told of
                continue
            if before is not None:
                moved.append(self._removal([name], group, before))
            hidden = bool(block.mm_keys) or any(t.token_extra_id or type(t.token_id) is not int for t in block.tokens)
            # A salt enters with the first block of a prompt, and only there.
            salt = block.cache_salt if parent is None else None
            if at != (block.cache_level, salt):
                at = block.cache_level, salt
                events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": [],
                        "parent_block_hash": parent,
                        "token_ids": [],
                        "block_size": self.block_size,
                        "lora_id": None,
                        "extra_keys": [],
                        **self._where(group, window, block.cache_level),
                        **({} if salt is None else {"cache_salt": salt}),
                    }
                )
            run = events[-1]
            run["block_hashes"].append(name)
            # Ids of media are digests in text, and of no use to anybody who hashes tokens.
            run["token_ids"] += [t.token_id if type(t.token_id) is int else 0 for t in block.tokens]
            run["extra_keys"].append(_UNHASHABLE if hidden else None)
            self._remember(group, name, block.cache_level)
            parent = name
        return events + moved

    def _removed(self, hashes: Iterable[int | str], group: int) -> list[dict[str, Any]]:
        by_level: dict[int, list[int | bytes]] = {}
        for value in hashes:
            name = _name(value)
            level = self._levels.pop((group, name), 0)
            if level is not None:
                by_level.setdefault(level, []).append(name)
        return [self._removal(names, group, level) for level, names in by_level.items()]

    def _updated(self, data: _Data, group: int, window: int | None) -> list[dict[str, Any]]:
        if data.block_hash is None or data.cache_level is None:
            return []  # a change of priority
        name, old, new = _name(data.block_hash), data.cache_level.old_value, data.cache_level.new_value
        if self._levels.get((group, name), old) is None or old == new:
            return []
        self._remember(group, name, new)
        moved = {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            **self._where(group, window, new),
        }
        return [moved, self._removal([name], group, old)]

    @staticmethod
    def _removal(names: list[int | bytes], group: int, level: int) -> dict[str, Any]:
        medium = _LEVELS[min(max(level, 0), 2)]
        return {"type": "BlockRemoved", "block_hashes": names, "medium": medium, "group_idx": group}

    def _remember(self, group: int, name: int | bytes, level: int | None) -> None:
        self._levels.pop((group, name), None)
        self._levels[group, name] = level
        if len(self._levels) > self._max_blocks:
            del self._levels[next(iter(self._levels))]


class RelayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine to take events from."""

    url: str
    """Base URL of trtllm-serve."""
    block_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    """The engine's `tokens_per_block`."""
    events: str = "tcp://*:5557"
    """ZeroMQ endpoint of rank 0; rank r gets port + r."""
    replay: str | None = "tcp://*:6557"
    host: str = "127.0.0.1"
    """Interface for endpoints with a wildcard port."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1
    """Attention data-parallel ranks."""
    poll_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 0.05


class TrtllmRelay:
    """Takes one engine's events and publishes them. `start`, then `run` until cancelled."""

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        traits = traits_of(DEFAULT_VERSION)
        settings = PublisherConfig(endpoint=config.events, replay_endpoint=config.replay)
        self.publishers = [Publisher(settings, traits, rank=r, host=config.host) for r in range(config.ranks)]
        self._translators = [Translator(config.block_size) for _ in self.publishers]
        self._next_ids: list[int | None] = [None] * config.ranks
        self.failed_polls = 0
        self.malformed = 0
        """Events that were none; each leaves a hole, as it may have been a store or a removal."""

    async def start(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """Open the sockets. Raises ConfigError for unusable endpoints, with none left open."""
        try:
            for publisher in self.publishers:
                publisher.start(context)
        except ConfigError:
            await self.close()
            raise

    async def close(self) -> None:
        """Close the sockets."""
        for publisher in self.publishers:
            await publisher.close()

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Poll until cancelled, then close the sockets."""
        url, timeout = self.config.url.rstrip("/") + "/kv_cache_events", aiohttp.ClientTimeout(total=10.0)
        reachable = True
        try:
            while True:
                try:
                    async with session.get(url, timeout=timeout) as response:
                        response.raise_for_status()
                        body = await read_bounded(response, MAX_BODY + 1)
                    self.take(body)
                    reachable = True
                except (aiohttp.ClientError, TimeoutError, EngineError) as error:
                    # Taken and not understood, or lost on the way: either way those events are gone.
                    self.failed_polls += 1
                    if isinstance(error, EngineError | aiohttp.ClientPayloadError):
                        self._lose()
                    if reachable:
                        _log.warning("%s cannot be polled: %s", self.config.url, type(error).__name__)
                    reachable = False
                await asyncio.sleep(self.config.poll_s)
        finally:
            await self.close()

    def take(self, body: bytes) -> None:
        """Translate and publish what one poll delivered. Raises MalformedBatch for a body that is no list."""
        if len(body) > MAX_BODY:
            raise MalformedBatch("too_large")
        try:
            items = _decode_items(body)
        except msgspec.DecodeError:
            raise MalformedBatch("not_an_array") from None
        for item in items:
            try:
                event = _decode_event(item)
            except msgspec.DecodeError:
                self.malformed += 1
                self._lose()
                continue
            rank = event.attention_dp_rank or 0
            if rank < len(self.publishers):
                self._relay(rank, event)

    def _relay(self, rank: int, event: TrtllmEvent) -> None:
        publisher, translator = self.publishers[rank], self._translators[rank]
        expected, self._next_ids[rank] = self._next_ids[rank], event.event_id + 1
        events: list[dict[str, Any]] = []
        if expected is not None and event.event_id < expected:
            events = translator.restart()
            expected = 0
        if event.event_id != (expected or 0):
            publisher.skip()
        try:
            events += translator.translate(event)
        except MalformedBatch:
            self.malformed += 1
            publisher.skip()
        if events:
            publisher.publish(msgspec.msgpack.encode([time.time(), events, rank]))

    def _lose(self) -> None:
        for publisher in self.publishers:
            publisher.skip()
