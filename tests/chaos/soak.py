"""Ten times what a sidecar can take, for minutes: memory stays flat, the loss is flagged, and it recovers in full.

    python tests/chaos/soak.py [--seconds 240] [--write docs/reliability.md]

A publisher process with vLLM's replay ring (10,000 batches) and queue (100,000 messages) sends stores and removals at
the pace it is asked for, straight to a real sidecar over a real Redis. First the rate the sidecar keeps up with is
measured, then ten times that is offered, then the engine clears its cache and goes on at a normal pace.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from chaos_script import BLOCK, Prompt, encode, tokens_of
from metatrie.engines.publisher import Publisher, PublisherConfig
from metatrie.engines.versions import traits_of
from metatrie.proto.hashing import Namespace
from metatrie.scripts.chaos import World, WorldConfig, free_port
from metatrie.scripts.stack import Child

NAMESPACE = Namespace(model="chaos", block_size=BLOCK)
BLOCKS = 16
"""Per batch."""
PROMPTS = 2000
"""Stored and removed in turn; the engine never holds more than half of them."""
LAST = 100
"""Prompts stored at the end, for the comparison."""
MARK = "<!-- soak -->"


def publisher(events: int, replay: int, orders: Connection) -> None:
    """The engine: does what the orders say, and says what it did."""
    asyncio.run(_publish(events, replay, orders))


async def _publish(events: int, replay: int, orders: Connection) -> None:
    config = PublisherConfig(endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://127.0.0.1:{replay}")
    engine = Publisher(config, traits_of("0.33.0"))
    engine.start()
    prompts = [Prompt(NAMESPACE, tokens_of(i, BLOCKS)) for i in range(PROMPTS)]
    stored = [encode([prompt.stored()]) for prompt in prompts]
    removed = [encode([prompt.removed()]) for prompt in prompts]
    half, at = PROMPTS // 2, 0
    while True:
        while not orders.poll():  # noqa: ASYNC110 -- another process sets no event
            await asyncio.sleep(0.005)
        order, amount, rate = orders.recv()
        started = time.monotonic()
        sent = 0
        match order:
            case "flood":
                # `rate` batches a second for `amount` seconds; 0: as fast as it goes, `amount` batches.
                while sent < amount if not rate else time.monotonic() - started < amount:
                    due = amount if not rate else int((time.monotonic() - started) * rate)
                    for _ in range(min(200, int(due) - sent)):
                        engine.publish(stored[at % PROMPTS])
                        engine.publish(removed[(at + half) % PROMPTS])
                        at, sent = at + 1, sent + 2
                    await asyncio.sleep(0)
            case "clear":
                engine.publish(encode([{"type": "AllBlocksCleared"}]))
                for payload in stored[:LAST]:
                    engine.publish(payload)
                    await asyncio.sleep(0.001)
            case "stop":
                await engine.close()
                return
        orders.send((engine.next_seq, time.monotonic() - started))


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    sustainable_batches_per_s: float
    offered_batches_per_s: float
    seconds: float
    batches: int
    lost_batches: int
    gaps: int
    memory_start_mib: float
    memory_mib: list[float]
    held_most: int
    cause: str
    recovered_s: float
    matched: int


async def soak(seconds: float) -> Soak:
    events, replay = free_port(), free_port()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=publisher, args=(events, replay, theirs), daemon=True)
    process.start()
    try:
        async with World(WorldConfig(engines=0)) as world:
            argv = [
                *("sidecar", "--redis", world.store_url, "--port", "0", "--model", "chaos", "--replica", "flooded"),
                *("--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"),
            ]
            sidecar = Child("flooded", argv, world.directory / "flooded.log")
            url = (await sidecar.start())["url"]
            try:
                return await _measure(world, sidecar, url, ours, seconds)
            finally:
                await sidecar.stop()
    finally:
        ours.send(("stop", 0, 0))
        process.join(10)
        process.kill()


async def _measure(world: World, sidecar: Child, url: str, orders: Connection, seconds: float) -> Soak:
    async def order(what: str, amount: float, rate: float = 0) -> tuple[int, float]:
        orders.send((what, amount, rate))
        while not orders.poll():  # noqa: ASYNC110 -- another process sets no event
            await asyncio.sleep(0.02)
        answer: tuple[int, float] = orders.recv()
        return answer

    async def page() -> dict[str, Any]:
        async with world.session.get(f"{url}/v1/inventory", params={"limit": "1"}) as response:
            found: dict[str, Any] = await response.json()
            return found

    async def metric(name: str) -> float:
        async with world.session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0] == f"metatrie_{name}")

    async def caught_up(seq: int) -> None:
        while (now := await page())["next_seq"] < seq or now["pending"]:  # noqa: ASYNC110 -- nor does this one
            await asyncio.sleep(0.05)

    async def connected() -> None:
        while (await page())["state"] != "exact":  # noqa: ASYNC110 -- nor does this one
            await asyncio.sleep(0.05)

    await connected()
    # Fewer than the replay ring, so that nothing can be lost while the pace is taken.
    started = time.monotonic()
    seq, _ = await order("flood", 8000)
    await caught_up(seq)
    sustainable = 8000 / (time.monotonic() - started)
    start = world.memory_of(sidecar) / 2**20
    offered = asyncio.create_task(order("flood", seconds, 10 * sustainable))
    memory: list[float] = []
    held = 0
    cause = ""
    while not offered.done():
        await asyncio.wait([offered], timeout=seconds / 10)
        memory.append(round(world.memory_of(sidecar) / 2**20, 1))
        held = max(held, int(await metric("stream_held_batches")))
        cause = (await page())["cause"] or cause
    last, took = await offered
    over = time.monotonic()
    seq, _ = await order("clear", 0)
    await caught_up(seq)
    await connected()
    recovered = time.monotonic() - over
    prompts = [Prompt(NAMESPACE, tokens_of(i, BLOCKS)) for i in range(LAST)]
    depths = [await world.depth("flooded", prompt.tokens) for prompt in prompts]
    return Soak(
        sustainable_batches_per_s=round(sustainable),
        offered_batches_per_s=round((last - 8000) / took),
        seconds=round(took, 1),
        batches=last - 8000,
        lost_batches=int(await metric("stream_gap_batches_total")),
        gaps=int(await metric("stream_gaps_total")),
        memory_start_mib=round(start, 1),
        memory_mib=memory,
        held_most=held,
        cause=cause,
        recovered_s=round(recovered, 2),
        matched=sum(depth == BLOCKS for depth in depths),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--write", type=Path, help="page to put the figures on")
    options = parser.parse_args()
    found = asyncio.run(soak(options.seconds))
    text = msgspec.json.format(msgspec.json.encode(found)).decode()
    print(text)
    if options.write is not None:
        page = options.write.read_text("utf-8")
        before, _, rest = page.partition(f"{MARK}\n")
        _, _, after = rest.partition(f"{MARK}\n")
        options.write.write_text(f"{before}{MARK}\n```json\n{text}\n```\n{MARK}\n{after}", "utf-8")
    if found.matched != LAST or max(found.memory_mib) > 2048:
        raise SystemExit(1)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
