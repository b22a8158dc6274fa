"""One `/v1/match` of 32 blocks held by 8 replicas, taken apart: each step as the router does it, called again and
again in this process, so with everything in the processor's caches; and what a server costs that does none of it."""

from __future__ import annotations

import asyncio
import http.client
import random
import subprocess
import sys
from collections.abc import Callable

import msgspec
from multidict import CIMultiDict

from ...indexer.memory import MemoryStore
from ...indexer.router import Router, RouterConfig
from ...proto.api import MatchRequest
from ...proto.hashing import Chain, Namespace
from ...proto.http import PromptBody, encoded
from ...proto.http_front import HotHead
from .layouts import register
from .measure import BLOCK_SIZE, Figure, median_us, processor_us, prompt

_MODEL = "request"
_BLOCKS = 32
_TIMES = 2000
_ANSWERS_NOTHING = """
import asyncio, sys, uvloop

class Nothing(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.got = transport, b""

    def data_received(self, data):
        self.got += data
        head, end, body = self.got.partition(b"\\r\\n\\r\\n")
        if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].partition(b"\\r\\n")[0]):
            self.got = b""
            self.transport.write(ANSWER)

async def main():
    server = await asyncio.get_running_loop().create_server(Nothing, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

BODY = b"x" * int(sys.argv[1])
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%b" % (len(BODY), BODY)
uvloop.run(main())
"""


async def request(rng: random.Random) -> list[Figure]:
    store = MemoryStore()
    index = await store.open(Namespace(model=_MODEL))
    pages = await register(index, 8)
    tokens = prompt(rng, _BLOCKS)
    chain = Chain(index.namespace.root, BLOCK_SIZE, tokens)
    for replica in range(8):
        await pages.write(replica, chain.keys(_BLOCKS), 0, _BLOCKS)
    body = msgspec.json.encode({"model": _MODEL, "token_ids": tokens})
    head, reader = HotHead(CIMultiDict({"Content-Type": "application/json"}), "127.0.0.1"), PromptBody(MatchRequest)
    asked = reader.decode(head, body)
    assert asked.token_ids is not None
    ids = asked.token_ids
    async with Router(store, RouterConfig(sweep_interval_s=0)) as router:
        answer = await router.match(asked)
        steps: dict[str, Callable[[], object]] = {
            "read the body": lambda: reader.decode(head, body),
            "hash, a prompt seen before": lambda: Chain(index.namespace.root, BLOCK_SIZE, ids).keys(_BLOCKS),
            "look up": lambda: index.match_quickly(chain),
            "hash, look up and list": lambda: router.match_quickly(asked),
            "encode the answer": lambda: encoded(head, answer),
        }
        figures = [Figure(f"in memory: {what}", "query", median_us(step, _TIMES)) for what, step in steps.items()]
        raw = encoded(head, answer)[1]
    floor = await asyncio.to_thread(_floor, body, len(raw))
    return [*figures, Figure("processor time of a server that answers as much, unread", "query", floor)]


def _floor(body: bytes, answered: int) -> float:
    argv = [sys.executable, "-c", _ANSWERS_NOTHING, str(answered)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)  # noqa: S603 -- ours
    assert process.stdout is not None
    try:
        connection = http.client.HTTPConnection("127.0.0.1", int(process.stdout.readline()), timeout=30)
        used = 0.0
        for i in range(_TIMES):
            if i == _TIMES // 10:
                used = -processor_us(process.pid)
            msgspec.json.decode(body)  # as a client does something between its requests
            connection.request("POST", "/", body, {"content-type": "application/json"})
            connection.getresponse().read()
        connection.close()
        return (used + processor_us(process.pid)) / (_TIMES - _TIMES // 10)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
