"""An engine that publishes exactly what a test says, from this process, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import random
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from metatrie.proto.hashing import Chain, Namespace
from metatrie.scripts.chaos import VOCABULARY, Wire, free_port

BLOCK = 16


class Prompt:
    """Tokens, and vLLM's names for their blocks under seed "0"."""

    def __init__(self, namespace: Namespace, tokens: list[int]) -> None:
        self.tokens = tokens
        chain = Chain(namespace.root, BLOCK, tokens)
        self.names = [int.from_bytes(key, "big") for key in chain.keys(chain.blocks)]

    def stored(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """The event that stores some of its blocks."""
        names = self.names[start:stop]
        return {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": self.names[start - 1] if start else None,
            "token_ids": self.tokens[start * BLOCK : (start + len(names)) * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }

    def removed(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": self.names[start:stop], "medium": "GPU"}


def encode(events: Sequence[Any]) -> bytes:
    return msgspec.msgpack.encode([time.time(), list(events), 0])


class ScriptedEngine:
    """Sockets of one engine, on fixed ports. `restart` is a new process as far as anybody can tell."""

    def __init__(self, name: str, *, ring: int = 10_000, hwm: int = 100_000) -> None:
        self.name = name
        self.url = ""
        self._ports = free_port(), free_port()
        self.events = Wire(("127.0.0.1", self._ports[0]), zeromq=True)
        self.replay: Wire | None = Wire(("127.0.0.1", self._ports[1]), zeromq=True)
        self.hwm = hwm
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.next = 0
        self._context, self._plain = zmq.asyncio.Context(), zmq.Context()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        assert self.replay is not None
        await self.events.start()
        await self.replay.start()
        await self._open()

    async def stop(self) -> None:
        assert self.replay is not None
        await self._close()
        self._context.destroy(0)
        self._plain.destroy(0)
        await self.events.stop()
        await self.replay.stop()

    async def restart(self) -> None:
        """Begin again at sequence number 0, with an empty ring."""
        await self._close()
        self.ring.clear()
        self.next = 0
        await self._open()

    def publish(self, *events: Any) -> int:
        """One batch; returns its sequence number."""
        return self.send(encode(events))

    def send(self, payload: bytes) -> int:
        """One batch, whatever it is."""
        seq, self.next = self.next, self.next + 1
        self.ring.append((seq, payload))
        self._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        return seq

    def send_raw(self, *frames: bytes) -> None:
        """A message that is no batch."""
        self._pub.send_multipart(frames, zmq.NOBLOCK)

    async def _open(self) -> None:
        self._pub = self._plain.socket(zmq.PUB)
        self._pub.linger = 0
        self._pub.sndhwm = self.hwm
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = 0
        for socket, port in zip((self._pub, self._router), self._ports, strict=True):
            while True:
                try:
                    socket.bind(f"tcp://127.0.0.1:{port}")
                    break
                except zmq.ZMQError as error:  # ZeroMQ closes the one before in the background
                    if error.errno != errno.EADDRINUSE:
                        raise
                    await asyncio.sleep(0.01)
        self._serving = asyncio.create_task(self._serve())

    async def _close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self._serving = None
            self._pub.close(0)
            self._router.close(0)

    async def _serve(self) -> None:
        while True:
            peer, _, start = await self._router.recv_multipart()
            for at, (seq, payload) in enumerate([e for e in self.ring if e[0] >= int.from_bytes(start, "big")]):
                if at % 256 == 0:
                    await asyncio.sleep(0)
                await self._router.send_multipart([peer, b"", seq.to_bytes(8, "big"), payload])
            await self._router.send_multipart([peer, b"", b"\xff" * 8, b""])


def tokens_of(number: int, blocks: int) -> list[int]:
    """A prompt of its own for each number."""
    rng = random.Random(number)
    return [rng.randrange(VOCABULARY) for _ in range(blocks * BLOCK)]
