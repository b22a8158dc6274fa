"""KV events on the wire as vLLM sends them: encoding per version, the live PUB stream, the replay ROUTER.

Strategy. `EventEncoder` turns one step's pool events into one msgpack batch, byte for byte what the chosen version
sends. `Publisher` numbers the batches and sends them from the event loop: a PUB socket never blocks, it drops for
subscribers that are `hwm` messages behind, so there is no queue of our own between engine and socket. The last
`buffer_steps` payloads are kept for replay.

Invariants: sequence numbers start at 0 and have no holes but those `skip` made; a batch without events is never
published; a replay reply is the buffered batches from the requested number on, ascending, then the end marker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from ..proto.errors import ConfigError
from .pool import Cleared, PoolEvent, Removed, Stored
from .versions import Traits

HashFormat = Literal["int", "bytes"]

END_SEQ = (-1).to_bytes(8, "big", signed=True)
_ANY_HOST = frozenset({"*", "::", "[::]", "0.0.0.0"})  # noqa: S104  recognised here, not chosen
_REPLAY_SLICE = 256
"""Replies sent to a replay request before the event loop gets a turn."""


class PublisherConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`, with its names and defaults."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Messages queued per subscriber before PUB drops."""
    topic: str = ""


# The map forms. Field order is the wire order; an optional field at its default is left out; msgspec writes a
# three-byte header when a tagged struct *declares* more than 15 keys, which is how vLLM 0.33 came to send one.
class _StoredMap(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _StoredWideMap(_StoredMap, tag="BlockStored", omit_defaults=True, gc=False):
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[Any]
    medium: str | None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class EventEncoder:
    """Pool events of one engine core to msgpack batches."""

    def __init__(self, traits: Traits, block_size: int, hash_format: HashFormat = "int") -> None:
        self._traits = traits
        self._block_size = block_size
        self._as_int = hash_format == "int"
        self._stored_map = _StoredWideMap if traits.wide_header else _StoredMap
        self._encode = msgspec.msgpack.Encoder().encode

    def batch(self, events: Sequence[PoolEvent], *, ts: float, rank: int) -> bytes:
        """One payload frame. ts: wall clock, seconds; rank: data-parallel rank."""
        return self._encode([ts, [self._event(e) for e in events], rank])

    def block_hash(self, digest: bytes) -> int | bytes:
        """The name a block has on this wire: low 64 bits of its digest, or all of it."""
        return int.from_bytes(digest[-8:], "big") if self._as_int else digest

    def _event(self, event: PoolEvent) -> Any:
        traits = self._traits
        match event:
            case Stored():
                return self._stored(event)
            case Removed():
                hashes = [self.block_hash(event.digest)]
                if traits.map_events:
                    return _RemovedMap(hashes, "GPU", event.group)
                return ["BlockRemoved", hashes, "GPU", *([event.group] if traits.group_idx else [])]
            case Cleared():
                return _ClearedMap() if traits.map_events else ["AllBlocksCleared"]

    def _stored(self, event: Stored) -> Any:
        traits, lora = self._traits, event.lora
        hashes = [self.block_hash(d) for d in event.digests]
        parent = None if event.parent is None else self.block_hash(event.parent)
        lora_id, lora_name = (None, None) if lora is None else (lora.id, lora.name)
        kind = "full_attention" if event.window is None else "sliding_window"
        if traits.map_events:
            return self._stored_map(
                hashes,
                parent,
                event.tokens,
                self._block_size,
                lora_id,
                "GPU",
                lora_name,
                event.extra_keys,
                event.group,
                kind,
                event.window,
            )
        array: list[Any] = ["BlockStored", hashes, parent, event.tokens, self._block_size, lora_id, "GPU"]
        if traits.lora_name:
            array.append(lora_name)
        if traits.extra_keys:
            array.append(event.extra_keys)
        if traits.group_idx:
            array.append(event.group)
        if traits.spec_kind:
            array += [kind, event.window]
        return array


def binds(endpoint: str) -> bool:
    """vLLM's rule: a PUB endpoint is bound if it is a wildcard or not TCP, else connected to."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of one data-parallel rank: TCP port + rank (port 0 stays 0), `_dp<rank>` for inproc."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    if not endpoint.startswith("tcp://"):
        raise ConfigError(
            "endpoint", f"{endpoint} has no place for rank {rank}", "use tcp:// or inproc:// with ranks"
        )
    base, _, port = endpoint.rpartition(":")
    try:
        number = int(port)
    except ValueError:
        raise ConfigError("endpoint", f"{endpoint} has no port", "write it like tcp://*:5557") from None
    return f"{base}:{number + rank}" if number else endpoint


class Publisher:
    """One engine core's event stream. `start`, then `publish` from the same event loop, then `close`."""

    def __init__(self, config: PublisherConfig, traits: Traits, *, rank: int = 0, host: str = "127.0.0.1") -> None:
        """host: interface for endpoints whose port is a wildcard, where vLLM takes the node's own address."""
        self._config = config
        self._topic_frame = [b""] if traits.replay_topic else []
        self._topic = config.topic.encode()
        self._rank = rank
        self._host = host
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=max(1, config.buffer_steps))
        self._next = 0
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self.config = config
        """The resolved configuration: endpoints as a client must dial them."""

    @property
    def next_seq(self) -> int:
        """Number of batches published so far."""
        return self._next

    def start(self, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """Open the sockets. Raises ConfigError when an endpoint cannot be used."""
        config = self._config
        ctx = context if context is not None else zmq.Context.instance()
        pub = ctx.socket(zmq.PUB)
        pub.linger = 0
        pub.sndhwm = config.hwm
        self._pub = pub
        try:
            endpoint = self._open(pub, config.endpoint, bind=binds(config.endpoint))
            replay = None
            if config.replay_endpoint:
                router = zmq.asyncio.Socket(ctx, zmq.ROUTER)
                router.linger = 0
                # ROUTER drops what exceeds a peer's queue: a full replay and its end marker must fit, twice.
                router.sndhwm = 2 * (config.buffer_steps + 1)
                self._router = router
                replay = self._open(router, config.replay_endpoint, bind=True)
                self._serving = asyncio.create_task(self._serve_replay(router), name="kv-replay")
        except BaseException:
            self._close_sockets()
            raise
        self.config = msgspec.structs.replace(config, endpoint=endpoint, replay_endpoint=replay)

    def publish(self, payload: bytes) -> int:
        """Send one encoded, non-empty batch now; returns its sequence number. Never blocks."""
        assert self._pub is not None, "publish needs a started publisher"
        seq = self._next
        self._next += 1
        self._ring.append((seq, payload))
        self._pub.send_multipart([self._topic, seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        return seq

    def skip(self) -> None:
        """Leave a hole in the sequence, which replay cannot fill: something was lost before it got here. Seen by
        subscribers with the next batch."""
        self._next += 1

    async def close(self) -> None:
        """Stop replay and close the sockets; as in vLLM, what subscribers have not fetched yet is lost."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
            self._serving = None
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close(0)
        self._pub = self._router = None

    def _open(self, socket: zmq.Socket[Any], endpoint: str, *, bind: bool) -> str:
        """Bind or connect; returns the address a client must dial."""
        target = rank_endpoint(endpoint, self._rank)
        if target == "tcp://*:0":
            target = f"tcp://{self._host}:0"
        try:
            if "[" in target:
                socket.setsockopt(zmq.IPV6, 1)
            if not bind:
                socket.connect(target)
                return target
            socket.bind(target)
        except zmq.ZMQError as error:
            raise ConfigError(
                "endpoint", f"{target} cannot be used ({error.strerror})", "choose another one"
            ) from None
        if not target.startswith("tcp://"):
            return target
        port = urlsplit(socket.getsockopt_string(zmq.LAST_ENDPOINT)).port
        host = target.removeprefix("tcp://").rpartition(":")[0]
        return f"tcp://{self._host if host in _ANY_HOST else host}:{port}"

    async def _serve_replay(self, router: zmq.asyncio.Socket) -> None:
        """Answer `[identity, empty, start]`; anything else gets no reply, as in vLLM. One request at a time."""
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3:
                continue
            peer, _, start_frame = frames
            start = int.from_bytes(start_frame, "big")
            topic = [self._topic] if self._topic_frame else []
            buffered = [entry for entry in self._ring if entry[0] >= start]
            for index, (seq, payload) in enumerate(buffered):
                if index % _REPLAY_SLICE == 0:
                    await asyncio.sleep(0)
                await router.send_multipart([peer, b"", *topic, seq.to_bytes(8, "big"), payload])
            await router.send_multipart([peer, b"", *self._topic_frame, END_SEQ, b""])
