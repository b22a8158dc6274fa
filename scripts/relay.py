"""`metatrie relay`: events of an engine that only answers polls (TensorRT-LLM), as a stream to subscribe to."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import click

from ..engines.trtllm import RelayConfig, TrtllmRelay
from .cli import common_options, run_process, say_ready, structured


@click.command("relay")
@common_options
@click.option("--url", required=True, help="Base URL of trtllm-serve.")
@click.option("--block-size", type=click.IntRange(1, 4096), default=32, help="The engine's tokens_per_block.")
@click.option("--events", default="tcp://*:5557", help="ZeroMQ endpoint to publish on; rank r takes port + r.")
@click.option("--replay", default="tcp://*:6557", help="ZeroMQ endpoint that answers replay requests, likewise.")
@click.option("--ranks", type=click.IntRange(1, 64), default=1, help="Attention data-parallel ranks of the engine.")
@click.option("--poll-s", type=click.FloatRange(0.001, 60), default=0.05, help="Seconds between two polls.")
def command(log_level: str, **options: Any) -> None:
    """Take TensorRT-LLM's KV-cache events and publish them as vLLM would, for sidecars to follow.

    Whoever takes the events has them, so run exactly one relay per engine.
    """
    relay = TrtllmRelay(structured("relay", RelayConfig, options))

    async def run(stop: asyncio.Event) -> None:
        await relay.start()
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(relay.run(session))
            first = relay.publishers[0].config
            say_ready("relay", events=first.endpoint, replay=first.replay_endpoint)
            await stop.wait()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    run_process(log_level, run)
