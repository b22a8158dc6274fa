"""What the commands share: options, settings from the environment and a TOML file, and how a process runs.

Every option can come from the command line, from the environment (`METATRIE_<COMMAND>_<OPTION>`), or from a TOML file
(`--config`): a table named for the command, or a top-level key that several commands share. The command line wins
over the environment, which wins over the file.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console

from ..consumers.consumer import ReplicaConfig
from ..engines.discovery import discover as event_sources
from ..engines.rules import rule_for
from ..indexer.decisions import DEFAULT_CAPACITY as DEFAULT_DECISIONS
from ..indexer.policies import DEFAULT_POLICY, POLICIES
from ..proto.errors import ConfigError, MetatrieError
from ..proto.hashing import DEFAULT_HASH_SEED, Namespace
from .stack import EXIT_WITH_PARENT

T = TypeVar("T")
Command = Callable[..., Any]

NAMESPACE_TABLE = "namespace"
REPLICAS_TABLE = "replicas"
POLICIES_TABLE = "policies"
MODELS_TABLE = "models"
PROXY_TABLE = "proxy"
QUEUE_TABLE = "queue"
_STRUCTURED = {NAMESPACE_TABLE, REPLICAS_TABLE, POLICIES_TABLE, MODELS_TABLE, PROXY_TABLE, QUEUE_TABLE}
"""Tables of the file that are no options: who the replicas are, what their cache depends on, policy parameters, what
is declared about models, how the front door treats engines, and which requests wait in the router."""


class Program(click.Group):
    """A group whose commands end in one line, not in a traceback, on errors raised on purpose."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MetatrieError as error:
            raise click.ClickException(str(error)) from None


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
    options = {name: _flags(command) for name, command in group.commands.items()}
    everywhere = set().union(*options.values())
    for key, value in table.items():
        if key in _STRUCTURED:
            continue
        if key in options:
            if not isinstance(value, dict):
                raise click.BadParameter(f"[{key}] must be a table of options of `metatrie {key}`")
            for unknown in value.keys() - options[key].keys():
                raise click.BadParameter(f"[{key}] {unknown}: `metatrie {key}` has no such option; see its --help")
        elif key not in everywhere:
            raise click.BadParameter(f"{key}: no such table or option; see `metatrie COMMAND --help`")
    mine = options[context.info_name]
    values = {key: value for key, value in table.items() if key in mine} | table.get(context.info_name, {})
    context.default_map = {mine[key]: value for key, value in values.items()}
    context.meta["metatrie.config"] = {key: table[key] for key in _STRUCTURED if key in table}
    return path


def _flags(command: click.Command) -> dict[str, str]:
    """Option as written in a file (the flag, with underscores) → the parameter it fills."""
    return {
        flag.lstrip("-").replace("-", "_"): parameter.name
        for parameter in command.params
        if parameter.name is not None
        for flag in parameter.opts
        if flag.startswith("--") and flag != "--config"
    }


def structured(name: str, kind: type[T], value: object) -> T:
    """A table of the configuration file as a struct. Raises ConfigError naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(name, str(error), "see docs/deployment.md for the fields") from None


def file_table(context: click.Context, name: str) -> Any:
    """One structured table of the configuration file, or None."""
    return context.meta.get("metatrie.config", {}).get(name)


def declared_namespace(context: click.Context, **given: Any) -> Namespace:
    """The declared namespace: the file's table, with options given for this process on top."""
    table = dict(file_table(context, NAMESPACE_TABLE) or {})
    for name, value in given.items():
        if value is not None and (name not in table or context.get_parameter_source(name) in _EXPLICIT):
            table[name] = value
    if not table.get("model"):
        raise ConfigError("model", "is not set", "pass --model or set model in the file's [namespace] table")
    return structured(NAMESPACE_TABLE, Namespace, table)


_EXPLICIT = {click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT}


def common_options(command: Command) -> Command:
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


def listen_options(port: int) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        command = click.option(
            "--port", type=click.IntRange(0, 65535), default=port, help="HTTP port; 0 takes any free one."
        )(command)
        return click.option("--host", default="127.0.0.1", help="Address to listen on.")(command)

    return decorate


def redis_option(required: bool) -> Callable[[Command], Command]:
    return click.option(
        "--redis",
        "redis_url",
        envvar=["METATRIE_REDIS"],
        required=required,
        metavar="URL",
        help="Index store: redis://, rediss://, unix://, redis+cluster://, redis+sentinel://…/service, embedded:"
        + ("." if required else ", memory:."),
    )


def stream_options(command: Command) -> Command:
    """Options that name one engine's event stream and its namespace; see `followed_replicas`."""
    for option in reversed(
        (
            click.option("--replica", help="Name of the engine replica in the registry."),
            click.option(
                "--dp-rank", type=click.IntRange(0, 65535), default=0, help="Data-parallel rank of this stream."
            ),
            click.option("--engine", default="vllm", help="Engine family, see docs/engines.md: vllm, sglang, …"),
            click.option(
                "--discover",
                metavar="URL",
                help="Ask this engine's HTTP server where its ranks publish, and follow all of them. Waits for it.",
            ),
            click.option(
                "--role",
                type=click.Choice(["both", "prefill", "decode"]),
                default="both",
                help="What it does where prefill and decode are separate; prompts are not routed to `decode`.",
            ),
            click.option(
                "--events", help="ZeroMQ endpoint of the engine's events; with a * we bind and the engine connects."
            ),
            click.option(
                "--replay", help="ZeroMQ endpoint of its replay socket. Without one, lost batches stay lost."
            ),
            click.option(
                "--replay-timeout-s",
                type=click.FloatRange(0.1, 3600),
                default=5.0,
                help="Silence after which a replay is asked for anew.",
            ),
            click.option(
                "--probe-s",
                type=click.FloatRange(0.1, 3600),
                default=5.0,
                help="Silence of the events after which the replay socket is asked whether anything was missed.",
            ),
            click.option("--topic", default="", help="Topic prefix to subscribe to."),
            click.option("--url", help="Base URL of its HTTP server, for routing and for its load figures."),
            click.option("--model", help="Model name as clients send it."),
            click.option("--block-size", type=int, default=16, help="Tokens per index block."),
            click.option(
                "--hash-seed",
                default=DEFAULT_HASH_SEED,
                help="Seed text of block hashes: the engines' PYTHONHASHSEED.",
            ),
            click.option(
                "--hash-mode",
                type=click.Choice(["auto", "engine", "recompute"]),
                default="auto",
                help="Take block keys from the engine, or recompute them (auto: recompute, and compare).",
            ),
        )
    ):
        command = option(command)
    return command


def followed_replicas(
    context: click.Context, *, replica: str | None, events: str | None, discover: str | None, **options: Any
) -> tuple[ReplicaConfig, ...]:
    """Whom to follow: the one the stream options name (with --discover, each of its ranks), else the file's
    [[replicas]].

    Raises click.UsageError if neither names anybody, ConfigError for an entry or an engine family that will not do.
    """
    listed = file_table(context, REPLICAS_TABLE)
    if discover is not None:
        if replica is None:
            raise click.UsageError("--replica is not set; --discover finds where an engine publishes, not its name")
        listed = [
            {
                **options,
                "replica": replica,
                "url": options.get("url") or discover,
                "dp_rank": source.dp_rank,
                "events": source.events,
                "replay": source.replay,
                "topic": source.topic,
            }
            for source in asyncio.run(event_sources(discover, options["engine"]))
        ]
    elif replica is not None or listed is None:
        if replica is None or events is None:
            missing = "replica" if replica is None else "events"
            raise click.UsageError(
                f"--{missing} is not set; pass it (or --discover), or list engines in the file's [[replicas]]"
            )
        listed = [{"replica": replica, "events": events, **options}]
    replicas = structured(REPLICAS_TABLE, tuple[ReplicaConfig, ...], listed)
    for one in replicas:
        rule_for(one.engine)  # refuses an unknown family before anything is started
    return replicas


policy_option = click.option(
    "--policy",
    type=click.Choice(sorted(POLICIES)),
    default=DEFAULT_POLICY,
    help="Routing policy where a request names none. Parameters: the file's [policies.NAME] tables.",
)


def front_door_options(command: Command) -> Command:
    """Who may call the router, and what it shows the engines."""
    command = click.option(
        "--engine-api-key",
        metavar="KEY",
        help="Bearer token the engines expect; better set as METATRIE_ROUTER_ENGINE_API_KEY.",
    )(command)
    return click.option(
        "--tenants",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="TOML file of callers' tokens, trust groups, limits and salts; see docs/front-door.md. Without one, "
        "callers on this machine are trusted, and all others anonymous.",
    )(command)


def decision_options(command: Command) -> Command:
    """What a router remembers of its decisions."""
    command = click.option(
        "--decision-log",
        metavar="FILE",
        help="Append every routing decision to this file, as JSON lines: keys and lengths, no tokens, no text.",
    )(command)
    return click.option(
        "--decisions",
        type=click.IntRange(0, 1_000_000),
        default=DEFAULT_DECISIONS,
        help="Decisions remembered, for `metatrie explain` and `top`; 0: none.",
    )(command)


lease_option = click.option(
    "--lease-s",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    help="Proof of life, seconds: this long after a consumer dies its replica stops counting.",
)
refresh_option = click.option(
    "--refresh-s",
    type=click.FloatRange(0.1, 86400),
    default=60.0,
    help="Every page is verified, and its TTL renewed, once per this many seconds.",
)


# Running

REPORT_WIDTH = 118
"""Columns of a report that does not go to a terminal."""


_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""


def run_process(log_level: str, main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Run one process until a signal, or its parent's end, asks it to stop."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )

    # Blocks and replicas live long and hold no garbage cycles. Passes over the young stay frequent enough for what
    # requests leave behind; looking through everything ever kept took a third of a consumer's time.
    gc.set_threshold(50_000, 20, 100)
    gc.freeze()
    # glibc gives every thread a heap of its own. Messages are born in ZeroMQ's thread and die in ours: what a burst
    # of them took would stay with that thread for good. Other C libraries have no such call.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)

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


def report_console(as_json: bool) -> Console:
    """Where a report for people goes: standard error if standard output is for machines, and wide if nobody looks."""
    stream = sys.stderr if as_json else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else REPORT_WIDTH)


def say_ready(kind: str, **where: Any) -> None:
    """One line on standard output that says where this process serves, for whoever started it."""
    print(msgspec.json.encode({"ready": kind, **where}).decode(), flush=True)


async def until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None if `stop` came first."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
