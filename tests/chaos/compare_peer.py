"""The same faults, side by side: this index and Dynamo's standalone indexer, from the same scripted engine.

    python tests/chaos/compare_peer.py --peer-python /path/to/venv/bin/python

The peer's environment needs `ai-dynamo-runtime` (1.6.1 was measured); without the option only our side runs. Both
follow the same sockets, one after the other, each in fresh processes, and answer the same questions after the same
events. Prints a table; exits with 1 if our side answers anything but what is right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import cbor2

sys.path.insert(0, str(Path(__file__).parent))

from chaos_script import BLOCK, Prompt, ScriptedEngine, tokens_of
from metatrie.proto.hashing import Namespace
from metatrie.scripts.chaos import Sidecar, World, WorldConfig, free_port, lose

NAMESPACE = Namespace(model="chaos", block_size=BLOCK)
QUIET_S = 3.0
"""How long an answer may take to become what it should be."""


class Index(Protocol):
    """One of the two, following one engine."""

    async def follow(self, engine: ScriptedEngine, *, replay: bool) -> None: ...

    async def depth(self, prompt: Prompt) -> int:
        """Leading blocks found for the engine."""
        ...

    async def standing(self) -> str:
        """What it says of its own picture."""
        ...

    async def restart(self, engine: ScriptedEngine, *, replay: bool) -> None:
        """Kill it and start it again, as an operator would."""
        ...


class Ours:
    def __init__(self, world: World) -> None:
        self._world = world
        self._sidecar: Sidecar

    async def follow(self, engine: ScriptedEngine, *, replay: bool) -> None:
        kept, engine.replay = engine.replay, engine.replay if replay else None
        self._sidecar = self._world.make_sidecar(f"sidecar-{time.monotonic_ns()}", engine)
        engine.replay = kept
        await self._sidecar.start()

    async def depth(self, prompt: Prompt) -> int:
        try:
            return max(0, await self._world.depth("scripted", prompt.tokens))
        except aiohttp.ClientError:
            return 0

    async def standing(self) -> str:
        state, cause = await self._world.state("scripted")
        return f"{state} ({cause})" if cause else state

    async def restart(self, engine: ScriptedEngine, *, replay: bool) -> None:
        await asyncio.gather(self._world.router.kill(), self._sidecar.process.kill())
        await asyncio.gather(self._world.start_router(), self._sidecar.start())

    async def stop(self) -> None:
        await self._sidecar.process.stop()


class Dynamo:
    def __init__(self, python: str, session: aiohttp.ClientSession) -> None:
        self._python, self._session = python, session
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""

    async def follow(self, engine: ScriptedEngine, *, replay: bool) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._process = await asyncio.create_subprocess_exec(
            *(self._python, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        await self._until_up()
        body = {
            "instance_id": 1,
            "endpoint": f"tcp://127.0.0.1:{engine.events.port}",
            "model_name": "chaos",
            "block_size": BLOCK,
        }
        if replay and engine.replay is not None:
            body["replay_endpoint"] = f"tcp://127.0.0.1:{engine.replay.port}"
        async with self._session.post(f"{self._url}/register", json=body) as response:
            assert response.status in (200, 201), await response.text()

    async def _until_up(self) -> None:
        for _ in range(500):
            with contextlib.suppress(aiohttp.ClientError):
                async with self._session.get(f"{self._url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.02)
        raise RuntimeError("the peer did not start")

    async def depth(self, prompt: Prompt) -> int:
        body = {"token_ids": prompt.tokens, "model_name": "chaos"}
        async with self._session.post(f"{self._url}/query", json=body) as response:
            if response.status != 200:
                return 0
            answer: Any = await response.json()
        return _deepest(answer)

    async def standing(self) -> str:
        async with self._session.get(f"{self._url}/workers") as response:
            workers = await response.json()
        found = {str(listener.get("status")) for worker in workers for listener in _listeners(worker)}
        return ", ".join(sorted(found)) or "unknown"

    async def restart(self, engine: ScriptedEngine, *, replay: bool) -> None:
        await self.stop()
        await self.follow(engine, replay=replay)

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


def _listeners(worker: Any) -> list[Any]:
    listeners = worker.get("listeners", [])
    return list(listeners.values()) if isinstance(listeners, dict) else list(listeners)


def _deepest(answer: Any) -> int:
    """Blocks of the only worker, from a `scores` answer in tokens: {worker: {rank: tokens}}."""
    scores = answer.get("scores", {})
    return max((int(tokens) // BLOCK for ranks in scores.values() for tokens in ranks.values()), default=0)


# Scenarios: each returns (what it found, whether that is right)

Result = tuple[str, bool]
Scenario = Callable[[Index, ScriptedEngine], Awaitable[Result]]


async def settles(index: Index, prompt: Prompt, blocks: int) -> int:
    """The depth, once it is as expected or the time is over."""
    deadline = time.monotonic() + QUIET_S
    # Another process sets no event.
    while (depth := await index.depth(prompt)) != blocks and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return depth


_numbers = iter(range(10_000, 10**9))


def fresh(blocks: int) -> Prompt:
    return Prompt(NAMESPACE, tokens_of(next(_numbers), blocks))


async def warm(index: Index, engine: ScriptedEngine, *, replay: bool = True) -> Prompt:
    """Follow the engine, and wait until events come through."""
    await index.follow(engine, replay=replay)
    prompt = fresh(2)
    deadline = time.monotonic() + 10
    while await index.depth(prompt) != 2 and time.monotonic() < deadline:
        engine.publish(prompt.stored())
        await asyncio.sleep(0.2)
    return prompt


async def plain(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine)
    prompt = fresh(10)
    engine.publish(prompt.stored())
    depth = await settles(index, prompt, 10)
    return f"{depth} of 10 blocks", depth == 10


async def engine_restart(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine)
    old = [fresh(1) for _ in range(50)]
    for prompt in old:
        engine.publish(prompt.stored())
    await settles(index, old[-1], 1)
    await engine.restart()
    new = [fresh(1) for _ in range(5)]
    for prompt in new:
        engine.publish(prompt.stored())
    await settles(index, new[-1], 1)
    await settles(index, old[0], 0)
    stale = sum([await index.depth(prompt) for prompt in old])
    found = sum([await index.depth(prompt) for prompt in new])
    return f"{stale} of 50 old still counted, {found} of 5 new found", (stale, found) == (0, 5)


async def gap_without_replay(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine, replay=False)
    engine.events.loses = lose(3)
    for _ in range(3):
        engine.publish(fresh(1).stored())
    after = fresh(1)
    engine.publish(after.stored())
    await settles(index, after, 1)
    await asyncio.sleep(0.5)
    standing = await index.standing()
    return f"says “{standing}”", standing.startswith("degraded")


async def late(index: Index, engine: ScriptedEngine) -> Result:
    prompts = [fresh(1) for _ in range(20)]
    for prompt in prompts:
        engine.publish(prompt.stored())
    await index.follow(engine, replay=True)
    await settles(index, prompts[-1], 1)
    found = sum([await index.depth(prompt) for prompt in prompts])
    return f"{found} of 20 found before the next event", found == 20


async def orphan(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine)
    prompt = fresh(10)
    engine.publish(prompt.stored(4))
    engine.publish(prompt.stored(0, 4))
    depth = await settles(index, prompt, 10)
    return f"{depth} of 10 blocks once the head came", depth == 10


async def byte_names(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine)
    prompt = fresh(6)
    digests = digests_of(prompt, None)
    engine.publish(prompt.stored() | {"block_hashes": digests})
    depth = await settles(index, prompt, 6)
    return f"{depth} of 6 blocks", depth == 6


async def salted(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine)
    prompt = fresh(6)
    extra = [["secret-of-a-tenant"], *([None] * 5)]
    names = [int.from_bytes(d[-8:], "big") for d in digests_of(prompt, "secret-of-a-tenant")]
    other = fresh(1)
    engine.publish(prompt.stored() | {"block_hashes": names, "extra_keys": extra})
    engine.publish(other.stored())
    await settles(index, other, 1)
    depth = await index.depth(prompt)
    return f"{depth} of 6 salted blocks match an unsalted prompt", depth == 0


async def index_restart(index: Index, engine: ScriptedEngine) -> Result:
    await warm(index, engine, replay=False)
    prompt = fresh(10)
    engine.publish(prompt.stored())
    await settles(index, prompt, 10)
    await asyncio.sleep(6)  # our checkpoint interval is 5 s
    await index.restart(engine, replay=False)
    depth = await settles(index, prompt, 10)
    return f"{depth} of 10 blocks known afterwards", depth == 10


def digests_of(prompt: Prompt, salt: str | None) -> list[bytes]:
    """Block hashes as vLLM computes them, all 32 bytes; the salt tagged, in the first block."""
    parent, found = bytes(NAMESPACE.root), []
    for at in range(len(prompt.names)):
        extra = [["cache_salt", salt]] if salt is not None and at == 0 else None
        tokens = prompt.tokens[at * BLOCK : (at + 1) * BLOCK]
        parent = hashlib.sha256(cbor2.dumps([parent, tokens, extra], canonical=True)).digest()
        found.append(parent)
    return found


SCENARIOS: dict[str, Scenario] = {
    "nothing wrong": plain,
    "engine restarts, sequence numbers from 0": engine_restart,
    "gap, no replay endpoint": gap_without_replay,
    "registered late, engine silent": late,
    "tail announced before its head": orphan,
    "32-byte block hashes": byte_names,
    "raw cache salt in extra keys": salted,
    "the index itself restarts, no replay endpoint": index_restart,
}


async def run(python: str | None) -> bool:
    right = True
    print("| fault | metatrie |" + (" Dynamo 1.6.1 |" if python else ""))
    print("|---|---|" + ("---|" if python else ""))
    async with aiohttp.ClientSession() as session:
        for name, scenario in SCENARIOS.items():
            cells = []
            async with World(WorldConfig(engines=0)) as world:
                ours = Ours(world)
                found, good = await _one(scenario, ours)
                await ours.stop()
            cells.append(_cell(found, good))
            right = right and good
            if python is not None:
                peer = Dynamo(python, session)
                found, good = await _one(scenario, peer)
                await peer.stop()
                cells.append(_cell(found, good))
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    return right


async def _one(scenario: Scenario, index: Index) -> Result:
    engine = ScriptedEngine("scripted")
    await engine.start()
    try:
        return await scenario(index, engine)
    finally:
        await engine.stop()


def _cell(found: str, good: bool) -> str:
    return found if good else f"**{found}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer-python", help="interpreter of an environment with ai-dynamo-runtime")
    if not asyncio.run(run(parser.parse_args().peer_python)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
