"""The `metatrie` command: settings in, parts composed, processes run. The only place that knows all packages.

Every option can come from the command line, from the environment (`METATRIE_<COMMAND>_<OPTION>`), or from a TOML file
(`--config`): a table named for the command, or a top-level key that several commands share. The command line wins
over the environment, which wins over the file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

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
from .indexer.policies import POLICIES
from .indexer.router import Router, RouterConfig
from .proto.errors import ConfigError, MetatrieError
from .proto.hashing import DEFAULT_HASH_SEED, Namespace
from .proto.http import HttpServer
from .proto.index import Store
from .scripts.bench import bench as measure
from .scripts.demo import demonstrate
from .scripts.serve import LocalConsumers
from .scripts.stack import EXIT_WITH_PARENT, StackConfig, running
from .scripts.workload import WorkloadConfig

T = TypeVar("T")
Command = Callable[..., Any]

_NAMESPACE_TABLE = "namespace"
_REPLICAS_TABLE = "replicas"
_POLICIES_TABLE = "policies"
_STRUCTURED = {_NAMESPACE_TABLE, _REPLICAS_TABLE, _POLICIES_TABLE}
"""Tables of the file that are no options: who the replicas are, what their cache depends on, policy parameters."""


# Settings


def _load_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Make the file's values the defaults of this command's options."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path.name} cannot be read as TOML: {error}") from None
    assert context.info_name is not None
    assert context.parent is not None
    group = context.parent.command
    assert isinstance(group, click.Group)
    options = {name: {p.name for p in command.params} for name, command in group.commands.items()}
    everywhere = set().union(*options.values())
    for key, value in table.items():
        if key in _STRUCTURED:
            continue
        if key in options:
            if not isinstance(value, dict):
                raise click.BadParameter(f"[{key}] must be a table of options of `metatrie {key}`")
            for unknown in value.keys() - options[key]:
                raise click.BadParameter(f"[{key}] {unknown}: `metatrie {key}` has no such option; see its --help")
        elif key not in everywhere:
            raise click.BadParameter(f"{key}: no such table or option; see `metatrie COMMAND --help`")
    mine = options[context.info_name]
    defaults = {key: value for key, value in table.items() if key in mine}
    context.default_map = {**defaults, **table.get(context.info_name, {})}
    context.meta["metatrie.config"] = {key: table[key] for key in _STRUCTURED if key in table}
    return path


def _structured(name: str, kind: type[T], value: object) -> T:
    """A table of the configuration file as a struct. Raises ConfigError naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(name, str(error), "see docs/deployment.md for the fields") from None


def _namespace(context: click.Context, **given: Any) -> Namespace:
    """The declared namespace: the file's table, with options given for this process on top."""
    table = dict(context.meta.get("metatrie.config", {}).get(_NAMESPACE_TABLE, {}))
    for name, value in given.items():
        if value is not None and (name not in table or context.get_parameter_source(name) in _EXPLICIT):
            table[name] = value
    if not table.get("model"):
        raise ConfigError("model", "is not set", "pass --model or set model in the file's [namespace] table")
    return _structured(_NAMESPACE_TABLE, Namespace, table)


_EXPLICIT = {click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT}


def _common(command: Command) -> Command:
    """Options every command has."""
    command = click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        callback=_load_config,
        is_eager=True,
        expose_value=False,
        help="TOML file with defaults for every option; see docs/deployment.md.",
    )(command)
    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        help="Least severe messages to log, on standard error.",
    )(command)


def _listen(port: int) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        command = click.option(
            "--port", type=click.IntRange(0, 65535), default=port, help="HTTP port; 0 takes any free one."
        )(command)
        return click.option("--host", default="127.0.0.1", help="Address to listen on.")(command)

    return decorate


def _redis(required: bool) -> Callable[[Command], Command]:
    return click.option(
        "--redis",
        "redis_url",
        envvar=["METATRIE_REDIS"],
        required=required,
        metavar="URL",
        help="Index store: redis://, rediss://, unix://, redis+cluster://, redis+sentinel://…/service, embedded:"
        + ("." if required else ", memory:."),
    )


_policy = click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default="hybrid",
    help="Routing policy where a request names none. Parameters: the file's [policies.NAME] tables.",
)
_lease = click.option(
    "--lease-s",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    help="Proof of life, seconds: this long after a consumer dies its replica stops counting.",
)
_refresh = click.option(
    "--refresh-s",
    type=click.FloatRange(0.1, 86400),
    default=60.0,
    help="Every page is verified, and its TTL renewed, once per this many seconds.",
)


# Running


def _run(log_level: str, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run one process until a signal, or its parent's end, asks it to stop."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop.set)
        if os.environ.get(EXIT_WITH_PARENT):
            os.set_blocking(0, False)
            loop.add_reader(0, _parent_watch, loop, stop)
        await main(stop)

    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(supervised())
    except* MetatrieError as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _parent_watch(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(0, 4096):
        loop.remove_reader(0)
        stop.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # it is not built for every platform
        return None
    return uvloop.new_event_loop


def _ready(kind: str, **where: Any) -> None:
    """One line on standard output that says where this process serves, for whoever started it."""
    print(msgspec.json.encode({"ready": kind, **where}).decode(), flush=True)


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
            _ready(kind, url=server.url)
            await stop.wait()


def _router_config(context: click.Context, **options: Any) -> RouterConfig:
    policies: Mapping[str, Mapping[str, float]] = context.meta.get("metatrie.config", {}).get(_POLICIES_TABLE, {})
    return _structured("router", RouterConfig, {**options, "policies": policies})


# Commands


class _Program(click.Group):
    """A group whose commands end in one line, not in a traceback, on errors raised on purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MetatrieError as error:
            raise click.ClickException(str(error)) from None


@click.group(
    cls=_Program,
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
@_common
@_listen(8080)
@_redis(required=False)
@_policy
@_lease
@_refresh
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

    _run(log_level, run)


@main.command()
@_common
@_listen(8080)
@_redis(required=True)
@_policy
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

    _run(log_level, run)


@main.command()
@_common
@_listen(9400)
@_redis(required=True)
@_lease
@_refresh
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
    namespace = _namespace(context, model=model, block_size=block_size, hash_seed=hash_seed)
    listed = context.meta.get("metatrie.config", {}).get(_REPLICAS_TABLE)
    if replica is not None or listed is None:
        if replica is None or events is None:
            missing = "replica" if replica is None else "events"
            raise click.UsageError(f"--{missing} is not set; pass it, or list engines in the file's [[replicas]]")
        listed = [{"replica": replica, "events": events, **options}]
    replicas = _structured(_REPLICAS_TABLE, tuple[ReplicaConfig, ...], listed)
    for one in replicas:
        rule_for(one.engine)  # refuses an unknown family before anything is started

    def ready(server: HttpServer) -> None:
        _ready("sidecar", url=server.url)

    async def run(stop: asyncio.Event) -> None:
        config = SidecarConfig(
            namespace=namespace, replicas=replicas, host=host, port=port, lease_s=lease_s, refresh_s=refresh_s
        )
        store = await open_store(redis_url)
        try:
            await run_sidecar(config, store, rule_for=rule_for, stop=stop, ready=ready)
        finally:
            await store.close()

    _run(log_level, run)


@main.command()
@_common
@_listen(8000)
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
    config = _structured(
        "engine",
        EngineConfig,
        {**options, "service": msgspec.to_builtins(_structured("engine", ServiceModel, service))},
    )

    def ready(worker: EngineWorker) -> None:
        sources = worker.event_sources
        first = sources[min(sources)]
        _ready("engine", url=worker.address, events=first.endpoint, replay=first.replay_endpoint)

    _run(log_level, lambda stop: run_engine(config, ready=ready, stop=stop))


@main.command()
@_common
@_redis(required=False)
@_policy
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
                outcomes = await _until(stop, demonstrate(stack, workload, console))
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

    _run(log_level, run)


@main.command()
@_common
@_redis(required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output.")
def bench(log_level: str, redis_url: str | None, as_json: bool) -> None:
    """What the hot paths cost on this machine, per block and per request.

    Starts an embedded Redis unless --redis names one, which must be there for this alone.
    """

    async def run(stop: asyncio.Event) -> None:
        figures = await _until(stop, measure(Console(stderr=as_json), redis_url=redis_url))
        if as_json and figures is not None:
            print(msgspec.json.format(msgspec.json.encode(figures)).decode())

    _run(log_level, run)


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None if `stop` came first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


if __name__ == "__main__":
    main(prog_name="metatrie")
