"""The `metatrie` command: parts composed into processes. The only place that knows all packages.

A tool with a command of its own keeps it beside its code, in scripts/; what commands share is scripts/cli.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from . import __version__
from .consumers.sidecar import ConsumerCollector, SidecarConfig, blocks_handler, run_sidecar
from .engines.core import EngineConfig
from .engines.rules import rule_for
from .engines.scheduler import ServiceModel
from .engines.worker import EngineWorker, run_engine
from .indexer.connect import open_store
from .indexer.http_api import Registrar, make_app, trust_loopback
from .indexer.proxy import Proxy, ProxyConfig
from .indexer.queueing import QueueConfig
from .indexer.router import Router, RouterConfig
from .indexer.tenants import TenantsFile
from .proto.hashing import DEFAULT_HASH_SEED
from .proto.http import HttpServer
from .proto.index import Store
from .scripts import audit, bench, chaos, check, explain, front_door, record, relay, replay, top, waiting
from .scripts.cli import (
    MODELS_TABLE,
    POLICIES_TABLE,
    PROXY_TABLE,
    QUEUE_TABLE,
    Program,
    common_options,
    decision_options,
    declared_namespace,
    file_table,
    followed_replicas,
    front_door_options,
    lease_option,
    listen_options,
    policy_option,
    redis_option,
    refresh_option,
    run_process,
    say_ready,
    stream_options,
    structured,
    until,
)
from .scripts.demo import BASELINE, demonstrate
from .scripts.serve import LocalConsumers
from .scripts.simulate import command as simulate
from .scripts.stack import StackConfig, running
from .scripts.workers import SHARED_PORT, run_workers
from .scripts.workload import WorkloadConfig


class _FrontDoor(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call a router, and how it treats engines."""

    proxy: ProxyConfig
    tenants: TenantsFile | None
    engine_api_key: str | None


async def _serve_router(
    store: Store,
    config: RouterConfig,
    front: _FrontDoor,
    stop: asyncio.Event,
    *,
    kind: str,
    consumers: LocalConsumers | None = None,
) -> None:
    tenants = front.tenants
    salt_of = None if tenants is None else tenants.salt_of
    async with (
        Router(store, config, salt_of=salt_of, witness=consumers) as router,
        Proxy(router, front.proxy, engine_api_key=front.engine_api_key) as proxy,
    ):
        if consumers is not None:
            router.registry.register(ConsumerCollector(consumers.consumers))
        registrar: Registrar | None = consumers
        authenticate = tenants or trust_loopback
        app = make_app(router, registrar=registrar, authenticate=authenticate, proxy=proxy)
        if consumers is not None:
            ask = blocks_handler(consumers.consumers, lambda request: authenticate(request).only_trusted("keys"))
            app.router.add_post("/v1/blocks", ask)
        shared = bool(os.environ.get(SHARED_PORT))
        async with HttpServer(app, host=config.host, port=config.port, share_port=shared) as server:
            say_ready(kind, url=server.url)
            if tenants is None:
                await stop.wait()
            else:
                await until(stop, tenants.follow(router.registry))


def _router_config(context: click.Context, **options: Any) -> RouterConfig:
    policies: Mapping[str, Mapping[str, float]] = file_table(context, POLICIES_TABLE) or {}
    models: Mapping[str, Any] = file_table(context, MODELS_TABLE) or {}
    queue = structured(QUEUE_TABLE, QueueConfig, file_table(context, QUEUE_TABLE) or {})
    return structured("router", RouterConfig, {**options, "policies": policies, "models": models, "queue": queue})


def _front_door(context: click.Context, tenants: Path | None, engine_api_key: str | None) -> _FrontDoor:
    return _FrontDoor(
        proxy=structured(PROXY_TABLE, ProxyConfig, file_table(context, PROXY_TABLE) or {}),
        tenants=None if tenants is None else TenantsFile(tenants),
        engine_api_key=engine_api_key,
    )


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
@decision_options
@front_door_options
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
    decisions: int,
    decision_log: str | None,
    tenants: Path | None,
    engine_api_key: str | None,
    lease_s: float,
    refresh_s: float,
) -> None:
    """Router plus in-process consumers; engines are registered over HTTP.

    The index is in memory, or in Redis with --redis.
    """
    config = _router_config(
        context, host=host, port=port, policy=policy, decisions=decisions, decision_log=decision_log
    )
    front = _front_door(context, tenants, engine_api_key)

    async def run(stop: asyncio.Event) -> None:
        store = await open_store(redis_url or "memory:")
        try:
            await store.ping()
            async with LocalConsumers(store, rule_for=rule_for, lease_s=lease_s, refresh_s=refresh_s) as consumers:
                await _serve_router(store, config, front, stop, kind="serve", consumers=consumers)
        finally:
            await store.close()

    run_process(log_level, run)


@main.command()
@common_options
@listen_options(8080)
@redis_option(required=True)
@policy_option
@decision_options
@front_door_options
@click.option(
    "--sweep-interval-s",
    type=click.FloatRange(0, 3600),
    default=10.0,
    help="Seconds between bounded clean-ups of dead incarnations; 0: this router does not sweep.",
)
@click.option(
    "--sweep-grace-s",
    type=click.FloatRange(0, 86400),
    default=30.0,
    help="Seconds after its lease that a replica stays in the registry.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=1,
    help="Processes that answer on the same port. Each has metrics of its own: scrape them by other means.",
)
@click.pass_context
def router(
    context: click.Context,
    log_level: str,
    host: str,
    port: int,
    redis_url: str,
    policy: str,
    decisions: int,
    decision_log: str | None,
    tenants: Path | None,
    engine_api_key: str | None,
    sweep_interval_s: float,
    sweep_grace_s: float,
    workers: int,
) -> None:
    """Router only, over Redis; run any number of them."""
    if workers > 1:
        argv = sys.argv[1:]
        run_process(log_level, lambda stop: run_workers(argv, workers, stop, host=host, port=port))
        return
    config = _router_config(
        context,
        host=host,
        port=port,
        policy=policy,
        decisions=decisions,
        decision_log=decision_log,
        sweep_interval_s=sweep_interval_s,
        sweep_grace_s=sweep_grace_s,
    )
    front = _front_door(context, tenants, engine_api_key)

    async def run(stop: asyncio.Event) -> None:
        store = await open_store(redis_url)
        try:
            await _serve_router(store, config, front, stop, kind="router")
        finally:
            await store.close()

    run_process(log_level, run)


@main.command()
@common_options
@listen_options(9400)
@redis_option(required=True)
@lease_option
@refresh_option
@stream_options
@click.option(
    "--checkpoint-dir",
    type=click.Path(file_okay=False),
    help="Directory for files to resume from after a restart; without one, a restart relies on replay alone.",
)
@click.option("--advertise", metavar="URL", help="Base URL under which `metatrie audit` reaches this sidecar.")
@click.option(
    "--sample-s",
    type=click.FloatRange(0.1, 86400),
    default=10.0,
    help="Seconds between two comparisons of samples of the index with what the engine holds.",
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
    model: str | None,
    block_size: int,
    hash_seed: str,
    checkpoint_dir: str | None,
    advertise: str | None,
    sample_s: float,
    **options: Any,
) -> None:
    """Consumer for one engine, or for many (the file's [[replicas]] table)."""
    namespace = declared_namespace(context, model=model, block_size=block_size, hash_seed=hash_seed)
    replicas = followed_replicas(context, **options)

    def ready(server: HttpServer) -> None:
        say_ready("sidecar", url=server.url)

    async def run(stop: asyncio.Event) -> None:
        config = SidecarConfig(
            namespace=namespace,
            replicas=replicas,
            host=host,
            port=port,
            lease_s=lease_s,
            refresh_s=refresh_s,
            sample_s=sample_s,
            checkpoint_dir=checkpoint_dir,
            advertise=advertise,
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
@click.option("--buffer-steps", type=click.IntRange(min=1), default=10_000, help="Batches kept for replay.")
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
    policies = (BASELINE, policy) if demo else (policy,)
    config = StackConfig(engines=engines, model=model, redis=redis_url, port=0 if demo else port, policies=policies)

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
            body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 8}}'
            console.print(
                f"  curl -si {stack.router_url}/v1/chat/completions -H 'content-type: application/json' "
                f"-d '{body}'\n",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            console.print("Ctrl-C stops everything.")
            await stop.wait()

    run_process(log_level, run)


main.add_command(audit.command)
main.add_command(bench.command)
main.add_command(chaos.command)
main.add_command(check.command)
main.add_command(explain.command)
main.add_command(front_door.load_command)
main.add_command(front_door.tokens_command)
main.add_command(waiting.command)
main.add_command(record.command)
main.add_command(relay.command)
main.add_command(replay.command)
main.add_command(top.command)
main.add_command(simulate.command)


if __name__ == "__main__":
    main(prog_name="metatrie")
