"""The `metatrie` command: parts composed into processes. The only place that knows all packages.

A tool with a command of its own keeps it beside its code, in scripts/; what commands share is scripts/cli.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from rich.console import Console

from . import __version__
from .consumers.consumer import ReplicaConfig
from .consumers.sidecar import ConsumerCollector, SidecarConfig, run_sidecar
from .engines.core import EngineConfig
from .engines.rules import rule_for
from .engines.scheduler import ServiceModel
from .engines.worker import EngineWorker, run_engine
from .indexer.connect import open_store
from .indexer.http_api import Registrar, make_app
from .indexer.router import Router, RouterConfig
from .proto.hashing import DEFAULT_HASH_SEED
from .proto.http import HttpServer
from .proto.index import Store
from .scripts import bench
from .scripts.cli import (
    POLICIES_TABLE,
    REPLICAS_TABLE,
    Program,
    common_options,
    declared_namespace,
    file_table,
    lease_option,
    listen_options,
    policy_option,
    redis_option,
    refresh_option,
    run_process,
    say_ready,
    structured,
    until,
)
from .scripts.demo import demonstrate
from .scripts.serve import LocalConsumers
from .scripts.stack import StackConfig, running
from .scripts.workload import WorkloadConfig


async def _serve_router(
    store: Store,
    config: RouterConfig,
    stop: asyncio.Event,
    *,
    kind: str,
    consumers: LocalConsumers | None = None,
) -> None:
    async with Router(store, config) as router:
        if consumers is not None:
            router.registry.register(ConsumerCollector(consumers.consumers))
        registrar: Registrar | None = consumers
        async with HttpServer(make_app(router, registrar=registrar), host=config.host, port=config.port) as server:
            say_ready(kind, url=server.url)
            await stop.wait()


def _router_config(context: click.Context, **options: Any) -> RouterConfig:
    policies: Mapping[str, Mapping[str, float]] = file_table(context, POLICIES_TABLE) or {}
    return structured("router", RouterConfig, {**options, "policies": policies})


# Commands


@click.group(
    cls=Program,
    context_settings={
        "auto_envvar_prefix": "METATRIE",
        "show_default": True,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)
@click.version_option(__version__, prog_name="metatrie")
def main() -> None:
    """Which LLM engine replica holds which KV-cache blocks, and the router that uses it.

    Try `metatrie up --demo`: the whole stack on this machine, under a workload, with and without prefix routing.
    """


@main.command()
@common_options
@listen_options(8080)
@redis_option(required=False)
@policy_option
@lease_option
@refresh_option
@click.pass_context
def serve(
    context: click.Context,
    log_level: str,
    host: str,
    port: int,
    redis_url: str | None,
    policy: str,
    lease_s: float,
    refresh_s: float,
) -> None:
    """Router plus in-process consumers; engines are registered over HTTP.

    The index is in memory, or in Redis with --redis.
    """
    config = _router_config(context, host=host, port=port, policy=policy)

    async def run(stop: asyncio.Event) -> None:
        store = await open_store(redis_url or "memory:")
        try:
            await store.ping()
            async with LocalConsumers(store, rule_for=rule_for, lease_s=lease_s, refresh_s=refresh_s) as consumers:
                await _serve_router(store, config, stop, kind="serve", consumers=consumers)
        finally:
            await store.close()

    run_process(log_level, run)


@main.command()
@common_options
@listen_options(8080)
@redis_option(required=True)
@policy_option
@click.option(
    "--sweep-interval-s",
    type=click.FloatRange(0, 3600),
    default=10.0,
    help="Seconds between bounded clean-ups of dead incarnations; 0: this router does not sweep.",
)
@click.pass_context
def router(
    context: click.Context, log_level: str, host: str, port: int, redis_url: str, policy: str, sweep_interval_s: float
) -> None:
    """Router only, over Redis; run any number of them."""
    config = _router_config(context, host=host, port=port, policy=policy, sweep_interval_s=sweep_interval_s)

    async def run(stop: asyncio.Event) -> None:
        store = await open_store(redis_url)
        try:
            await _serve_router(store, config, stop, kind="router")
        finally:
            await store.close()

    run_process(log_level, run)


@main.command()
@common_options
@listen_options(9400)
@redis_option(required=True)
@lease_option
@refresh_option
@click.option("--replica", help="Name of the engine replica in the registry.")
@click.option("--dp-rank", type=click.IntRange(0, 65535), default=0, help="Data-parallel rank of this stream.")
@click.option("--engine", default="vllm", help="Engine family: vllm, sglang, sglang-dynamo.")
@click.option("--events", help="ZeroMQ endpoint of the engine's events; with a * we bind and the engine connects.")
@click.option("--replay", help="ZeroMQ endpoint of its replay socket. Without one, lost batches stay lost.")
@click.option("--topic", default="", help="Topic prefix to subscribe to.")
@click.option("--url", help="Base URL of its HTTP server, for routing and for its load figures.")
@click.option("--model", help="Model name as clients send it.")
@click.option("--block-size", type=int, default=16, help="Tokens per index block.")
@click.option(
    "--hash-seed", default=DEFAULT_HASH_SEED, help="Seed text of block hashes: the engines' PYTHONHASHSEED."
)
@click.option(
    "--hash-mode",
    type=click.Choice(["auto", "engine", "recompute"]),
    default="auto",
    help="Take block keys from the engine, or recompute them (auto: recompute, and compare).",
)
@click.pass_context
def sidecar(
    context: click.Context,
    /,
    log_level: str,
    host: str,
    port: int,
    redis_url: str,
    lease_s: float,
    refresh_s: float,
    replica: str | None,
    events: str | None,
    model: str | None,
    block_size: int,
    hash_seed: str,
    **options: Any,
) -> None:
    """Consumer for one engine, or for many (the file's [[replicas]] table)."""
    namespace = declared_namespace(context, model=model, block_size=block_size, hash_seed=hash_seed)
    listed = file_table(context, REPLICAS_TABLE)
    if replica is not None or listed is None:
        if replica is None or events is None:
            missing = "replica" if replica is None else "events"
            raise click.UsageError(f"--{missing} is not set; pass it, or list engines in the file's [[replicas]]")
        listed = [{"replica": replica, "events": events, **options}]
    replicas = structured(REPLICAS_TABLE, tuple[ReplicaConfig, ...], listed)
    for one in replicas:
        rule_for(one.engine)  # refuses an unknown family before anything is started

    def ready(server: HttpServer) -> None:
        say_ready("sidecar", url=server.url)

    async def run(stop: asyncio.Event) -> None:
        config = SidecarConfig(
            namespace=namespace, replicas=replicas, host=host, port=port, lease_s=lease_s, refresh_s=refresh_s
        )
        store = await open_store(redis_url)
        try:
            await run_sidecar(config, store, rule_for=rule_for, stop=stop, ready=ready)
        finally:
            await store.close()

    run_process(log_level, run)


@main.command()
@common_options
@listen_options(8000)
@click.option("--model", default="simulated", help="Model name it serves.")
@click.option("--version", "version", default="0.33.0", help="vLLM version whose wire format is reproduced.")
@click.option("--tokenizer", default="byte", help="`byte`, or a directory with a Hugging Face tokenizer.json.")
@click.option("--block-size", type=int, default=16, help="Tokens per KV block.")
@click.option("--num-blocks", type=int, default=8193, help="KV blocks, the null block included.")
@click.option("--max-model-len", type=int, default=32_768, help="Tokens of prompt plus output.")
@click.option("--hash-seed", default=DEFAULT_HASH_SEED, help="What PYTHONHASHSEED would be.")
@click.option("--events", "events_endpoint", default="tcp://127.0.0.1:5557", help="ZeroMQ PUB endpoint of rank 0.")
@click.option("--replay", "replay_endpoint", help="ZeroMQ ROUTER endpoint for replay of rank 0.")
@click.option("--topic", default="", help="Topic of every event message.")
@click.option("--dp-size", type=click.IntRange(1, 64), default=1, help="Data-parallel ranks in this worker.")
@click.option("--prefill-tokens-per-s", type=float, default=10_000.0, help="Modelled prefill rate.")
@click.option("--decode-step-s", type=float, default=0.02, help="Modelled decode step, seconds.")
@click.option("--time-scale", type=float, default=1.0, help="Real seconds per modelled second; 0: no waiting.")
def engine(log_level: str, prefill_tokens_per_s: float, decode_step_s: float, **options: Any) -> None:
    """One simulated engine worker: ZMQ events, replay, OpenAI-compatible HTTP."""
    service = {"prefill_tokens_per_s": prefill_tokens_per_s, "decode_step_s": decode_step_s}
    config = structured(
        "engine",
        EngineConfig,
        {**options, "service": msgspec.to_builtins(structured("engine", ServiceModel, service))},
    )

    def ready(worker: EngineWorker) -> None:
        sources = worker.event_sources
        first = sources[min(sources)]
        say_ready("engine", url=worker.address, events=first.endpoint, replay=first.replay_endpoint)

    run_process(log_level, lambda stop: run_engine(config, ready=ready, stop=stop))


@main.command()
@common_options
@redis_option(required=False)
@policy_option
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="The router's HTTP port; 0: any free one.")
@click.option("--engines", type=click.IntRange(1, 64), default=4, help="Simulated engines, each with a sidecar.")
@click.option("--model", default="demo-model", help="Model name the engines serve.")
@click.option("--demo", is_flag=True, help="Drive a workload, print the comparison, and exit.")
@click.option(
    "--users", type=click.IntRange(1, 10_000), default=WorkloadConfig().users, help="Demo: concurrent users."
)
@click.option("--turns", type=click.IntRange(1, 8), default=WorkloadConfig().turns, help="Demo: questions per user.")
@click.option("--seed", type=int, default=WorkloadConfig().seed, help="Demo: seed of the conversations.")
@click.option("--json", "as_json", is_flag=True, help="Demo: print the outcome as JSON on standard output.")
def up(
    log_level: str,
    redis_url: str | None,
    policy: str,
    port: int,
    engines: int,
    model: str,
    demo: bool,
    users: int,
    turns: int,
    seed: int,
    as_json: bool,
) -> None:
    """The whole stack on one machine: Redis, simulated engines, their sidecars, the router.

    Starts an embedded Redis unless --redis names one.
    """
    console = Console(stderr=as_json)
    config = StackConfig(engines=engines, model=model, redis=redis_url, port=0 if demo else port, policy=policy)

    async def run(stop: asyncio.Event) -> None:
        console.print(f"starting Redis, {engines} engines with sidecars, and a router …")
        async with running(config) as stack:
            if demo:
                workload = WorkloadConfig(users=users, turns=turns, seed=seed)
                outcomes = await until(stop, demonstrate(stack, workload, console))
                if as_json and outcomes is not None:
                    print(msgspec.json.format(msgspec.json.encode(outcomes)).decode())
                return
            console.print(f"router   {stack.router_url}")
            for one in stack.engines:
                console.print(f"{one.name} {one.url}  sidecar {one.sidecar_url}")
            console.print(f"redis    {stack.redis_url}\nlogs     {stack.logs}\n\ntry:")
            body = f'{{"model": "{model}", "prompt": "Hello"}}'
            console.print(
                f"  curl -s {stack.router_url}/v1/route -H 'content-type: application/json' -d '{body}'\n",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            console.print("Ctrl-C stops everything.")
            await stop.wait()

    run_process(log_level, run)


main.add_command(bench.command)


if __name__ == "__main__":
    main(prog_name="metatrie")
