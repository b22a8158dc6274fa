"""`metatrie check`: preflight of a live deployment. Every line says PASS, WARN or FAIL, and what to do.

Nothing is taken from configuration that can be asked of the thing itself: the store is asked for its settings, each
engine for its model, block size and events, and (unless --no-probe) served one short prompt, whose event is then
compared with what we would have predicted: topic, rank, block size, token ids, block hashes. A probe costs an engine
a few blocks of its cache.

The store is only read. Engines that publish to an endpoint we would have to bind are not probed, since their sidecar
has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import click
import msgspec
import zmq
import zmq.asyncio
from rich.console import Console
from rich.markup import escape
from zmq.utils.monitor import parse_monitor_message

from ..consumers.consumer import ReplicaConfig
from ..consumers.subscriber import attach
from ..engines.rules import rule_for
from ..indexer.connect import open_store
from ..indexer.redis_store import RedisStore, ServerFacts
from ..proto.errors import MalformedBatch, StoreError
from ..proto.events import MAX_PAYLOAD_BYTES, Batch, BlockStored, decode_batch
from ..proto.hashing import BlockHash, Namespace, block_hash
from ..proto.index import Store
from .cli import (
    NAMESPACE_TABLE,
    REPLICAS_TABLE,
    common_options,
    declared_namespace,
    file_table,
    followed_replicas,
    redis_option,
    run_process,
    stream_options,
    until,
)

Grade = Literal["PASS", "WARN", "FAIL"]
END_MARKER: Final = b"\xff" * 8
OLDEST_REDIS: Final = (6, 2)
MAX_ANSWER_BYTES: Final = 8 << 20
PROBE_BLOCKS: Final = 4
PROBES: Final = 3
"""Prompts tried until an event is seen: a subscription takes effect some time after it is made."""
_GAUGE: Final = "cache_config_info"


class Line(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    grade: Grade
    subject: str
    """`store`, `config`, or a replica."""
    found: str
    remedy: str = ""


class Report:
    """Collects lines about one subject."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.lines: list[Line] = []

    def passed(self, found: str) -> None:
        self.lines.append(Line("PASS", self.subject, found))

    def warn(self, found: str, remedy: str) -> None:
        self.lines.append(Line("WARN", self.subject, found, remedy))

    def fail(self, found: str, remedy: str) -> None:
        self.lines.append(Line("FAIL", self.subject, found, remedy))


# Store


async def check_store(url: str, namespace: Namespace | None) -> list[Line]:
    """Is the store reachable and fit, and who is registered in the namespace?"""
    report = Report("store")
    store = await open_store(url)
    try:
        started = time.perf_counter()
        await store.ping()
        report.passed(
            f"reachable, {1e3 * (time.perf_counter() - started):.1f} ms; no eviction policy that drops any key"
        )
        if isinstance(store, RedisStore):
            for facts in await store.facts():
                _check_server(report, facts)
        if namespace is not None:
            await _check_registry(report, store, namespace)
    except StoreError as error:
        report.fail(str(error), "fix that first: sidecars wait for it, and routers answer by load only")
    finally:
        await store.close()
    return report.lines


def _check_server(report: Report, facts: ServerFacts) -> None:
    where = f"{facts.address} " if facts.address else ""
    name = "Valkey" if facts.valkey else "Redis"
    numbers = facts.version.split(".")
    version = tuple(int(n) for n in numbers[:2] if n.isdigit())
    if facts.valkey or version >= OLDEST_REDIS:
        report.passed(f"{where}{name} {facts.version}")
    else:
        report.fail(f"{where}{name} {facts.version} is too old", "use Redis 6.2 or later, or Valkey")
    if facts.clock_s is not None:
        apart = facts.clock_s - time.time()
        report.passed(
            f"{where}leases are judged by the server's clock; ours is {apart:+.2f} s from it, and plays no part"
        )
    settings = facts.settings
    if not settings:
        report.warn(
            f"{where}does not tell its settings",
            "make sure that maxmemory-policy is noeviction or volatile-*, and hash-max-listpack-entries 64",
        )
        return
    policy, limit = settings.get("maxmemory-policy", ""), int(settings.get("maxmemory", "0") or 0)
    if policy.startswith("volatile-"):
        report.warn(
            f"{where}maxmemory-policy {policy} may drop pages in use; they are written again within a minute",
            "`CONFIG SET maxmemory-policy noeviction`, unless the server is shared",
        )
    elif policy:
        report.passed(f"{where}maxmemory-policy {policy}")
    if not limit:
        report.warn(
            f"{where}maxmemory is not set", "set it below the machine's memory: full is noticed, swapping is not"
        )
    else:
        report.passed(f"{where}maxmemory {limit >> 20} MiB")
    entries = settings.get("hash-max-listpack-entries") or settings.get("hash-max-ziplist-entries")
    if entries is not None:
        if int(entries) == 64:
            report.passed(f"{where}small pages are kept compact up to 64 entries")
        else:
            report.warn(
                f"{where}hash-max-listpack-entries is {entries}",
                "`CONFIG SET hash-max-listpack-entries 64`: fast writes and small pages",
            )


async def _check_registry(report: Report, store: Store, namespace: Namespace) -> None:
    known = [one for one in await store.namespaces() if one.model == namespace.model]
    if namespace.id not in {one.id for one in known}:
        others = ", ".join(one.id for one in known) or "none"
        report.warn(
            f"nobody ever registered for {namespace.model} under namespace {namespace.id} (of this model: {others})",
            "start a sidecar; if one runs, its [namespace] differs from the one given here",
        )
        return
    fleet = await (await store.open(namespace)).fleet()
    for view in fleet.replicas:
        line = f"{view.spec.ref} is {view.state}" + (f" ({view.cause})" if view.cause else "")
        if view.state == "exact":
            report.passed(f"{line}, {view.status.blocks} blocks, {view.status.lag_s:.3f} s behind")
        elif view.state == "degraded":
            report.warn(line, "docs/operation.md explains each cause")
        else:
            report.fail(line, "its sidecar is gone; start it")


# Configuration


def check_ports(replicas: Sequence[ReplicaConfig]) -> list[Line]:
    """Do the endpoints of different ranks and purposes keep out of each other's way?"""
    report = Report("config")
    uses: dict[str, str] = {}
    for config in replicas:
        for purpose, endpoint in (("events", config.events), ("replay", config.replay)):
            if endpoint is None or not endpoint.startswith("tcp://"):
                continue
            use = f"{purpose} of {config.ref}"
            if endpoint in uses:
                report.fail(
                    f"{endpoint} is both {uses[endpoint]} and {use}",
                    "rank r publishes on port + r and replays on replay port + r: leave room between the two",
                )
            uses.setdefault(endpoint, use)
    by_name: dict[str, list[ReplicaConfig]] = {}
    for config in replicas:
        by_name.setdefault(config.replica, []).append(config)
    for name, ranks in by_name.items():
        base = {_port(config.events, -config.dp_rank) for config in ranks}
        if len(ranks) > 1 and len(base - {None}) > 1:
            report.warn(
                f"the ranks of {name} are not on consecutive event ports",
                "vLLM and SGLang publish rank r on the base port + r",
            )
    if not report.lines:
        report.passed(f"{len(replicas)} replica(s), no two on one endpoint")
    return report.lines


def _port(endpoint: str, shift: int) -> int | None:
    try:
        port = urlsplit(endpoint).port
    except ValueError:
        return None
    return None if port is None else port + shift


# Engines


async def check_replica(
    config: ReplicaConfig, namespace: Namespace, session: aiohttp.ClientSession, *, probe: bool, patience_s: float
) -> list[Line]:
    """One engine worker: its HTTP server, its replay socket, its events."""
    report = Report(str(config.ref))
    engine = _Engine(config, namespace, session, report, patience_s)
    try:
        if config.url is None:
            report.warn("no url is configured", "set one: for routing, load figures and this preflight")
        else:
            await engine.check_http()
        await engine.check_replay()
        await engine.check_events(probe=probe)
    finally:
        engine.close()
    return report.lines


class _Engine:
    def __init__(
        self,
        config: ReplicaConfig,
        namespace: Namespace,
        session: aiohttp.ClientSession,
        report: Report,
        patience_s: float,
    ) -> None:
        self._config, self._namespace, self._session = config, namespace, session
        self._report, self._patience_s = report, patience_s
        self._context = zmq.asyncio.Context()

    def close(self) -> None:
        self._context.destroy(linger=0)

    # HTTP

    async def check_http(self) -> None:
        report, namespace = self._report, self._namespace
        raw = await self._get("/v1/models")
        if raw is None:
            report.fail(f"{self._config.url} does not answer /v1/models", "is the engine up, and the url right?")
            return
        with contextlib.suppress(msgspec.DecodeError):
            names = [model["id"] for model in msgspec.json.decode(raw, type=_Models).data]
            if namespace.model in names:
                report.passed(f"serves {namespace.model}")
            else:
                report.fail(
                    f"serves {', '.join(names) or 'nothing'}, not {namespace.model}",
                    "set model to the name that clients send",
                )
        text = (await self._get("/metrics") or b"").decode("utf-8", "replace")
        labels = _labels(text, self._config.dp_rank)
        if labels is None:
            report.warn("its metrics do not tell its cache configuration", "compare block sizes by hand")
            return
        if labels.get("enable_prefix_caching", "True") not in ("True", "true", "1"):
            report.fail("prefix caching is off", "start it with --enable-prefix-caching: nothing is reused otherwise")
        self._check_block_size(int(labels.get("block_size") or 0), "its metrics say")

    def _check_block_size(self, size: int, who: str) -> None:
        ours, report = self._namespace.block_size, self._report
        if size == ours:
            report.passed(f"{who} blocks of {size} tokens, as the index")
        elif size > 0 and (ours % size == 0 or size % ours == 0):
            report.passed(f"{who} blocks of {size} tokens; the index has {ours}, which divides evenly")
        else:
            report.fail(f"{who} blocks of {size} tokens, the index has {ours}", "set block_size to the engine's")

    async def _get(self, path: str) -> bytes | None:
        return await self._call("GET", path, None)

    async def _post(self, path: str, body: Any) -> bytes | None:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: Any) -> bytes | None:
        """The answer's body, or None if there is none."""
        assert self._config.url is not None
        headers = {"X-data-parallel-rank": str(self._config.dp_rank)} if self._config.dp_rank else {}
        timeout = aiohttp.ClientTimeout(total=self._patience_s)
        try:
            async with self._session.request(
                method, self._config.url.rstrip("/") + path, json=body, headers=headers, timeout=timeout
            ) as response:
                response.raise_for_status()
                return await response.content.read(MAX_ANSWER_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    # Replay

    async def check_replay(self) -> None:
        report, endpoint = self._report, self._config.replay
        if endpoint is None:
            report.warn(
                "no replay endpoint is configured: lost batches stay lost, and a late sidecar knows nothing",
                "give the engine a replay_endpoint, and name it here",
            )
            return
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_PAYLOAD_BYTES)
        attach(dealer, endpoint)
        first = last = None
        holes = 0
        try:
            await dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                async with asyncio.timeout(self._patience_s):
                    frames = await dealer.recv_multipart()
                if len(frames) < 2 or len(frames[-2]) != 8:
                    continue
                if frames[-2] == END_MARKER and not frames[-1]:
                    break
                seq = int.from_bytes(frames[-2], "big")
                holes += last is not None and seq != last + 1
                first, last = (seq if first is None else first), seq
        except TimeoutError:
            report.fail(
                f"no replay from {endpoint}" + (" to its end" if first is not None else ""),
                "check replay_endpoint in the engine's --kv-events-config, the port (+ rank), and firewalls",
            )
            return
        finally:
            dealer.close(0)
        if first is None:
            report.passed("replay answers; nothing was published yet")
        elif holes:
            report.fail(f"its replay has {holes} hole(s)", "raise the engine's hwm; a slow link drops replies")
        elif first:
            report.warn(
                f"its replay begins at batch {first}: what came before is out of reach for a sidecar that starts now",
                "start sidecars with their engines, use --checkpoint-dir, or raise buffer_steps",
            )
        else:
            report.passed(f"replay is complete: batches 0 to {last}")

    # Events

    async def check_events(self, *, probe: bool) -> None:
        report, config = self._report, self._config
        if "*" in config.events:
            report.warn(
                f"{config.events} is bound by the sidecar, so nobody else can listen",
                "see the sidecar's /readyz instead",
            )
            return
        sub = self._context.socket(zmq.SUB)
        sub.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_PAYLOAD_BYTES)
        sub.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            attach(sub, config.events)
            async with asyncio.timeout(self._patience_s):
                parse_monitor_message(await monitor.recv_multipart())
        except TimeoutError:
            report.fail(
                f"nobody publishes at {config.events}",
                "enable kv events on the engine; it binds an endpoint with a * and connects to any other",
            )
            return
        except zmq.ZMQError as error:
            report.fail(f"{config.events} cannot be used ({error.strerror})", "write it like tcp://host:5557")
            return
        else:
            report.passed(f"publishes at {config.events}")
            if not probe or config.url is None:
                report.warn("events were not looked at", "run without --no-probe, and with a url, to compare them")
                return
            await self._probe(sub)
        finally:
            sub.disable_monitor()
            sub.close(0)

    async def _probe(self, sub: zmq.asyncio.Socket) -> None:
        """Have a prompt served, find its event, and compare it with what it should be."""
        report, config = self._report, self._config
        for _ in range(PROBES):
            tokens, served, found = await self._serve_one(sub)
            if not served:
                report.fail("did not serve a completion of one token", "is it ready, and is this its model's name?")
                return
            if found is not None:
                break
        else:
            report.fail(
                f"published nothing within {self._patience_s:g} s of a request, {PROBES} times",
                "enable kv events and prefix caching; events of a request come with the engine's step",
            )
            return
        topic, batch, stored = found
        if topic.startswith(config.topic.encode()):
            report.passed(f"events are on, under topic {topic.decode('utf-8', 'replace')!r}")
        else:
            report.fail(
                f"publishes under topic {topic.decode('utf-8', 'replace')!r}, which {config.topic!r} does not match",
                "set topic to a prefix of it, or to nothing",
            )
        if batch.rank in (None, config.dp_rank):
            report.passed(f"events are of rank {config.dp_rank}")
        else:
            report.fail(f"events are of rank {batch.rank}, not {config.dp_rank}", "each rank has a port: base + rank")
        if batch.skipped:
            report.warn(
                f"{len(batch.skipped)} event(s) of the batch cannot be read ({batch.skipped[0].cause})",
                "compare the engine's version with docs/deployment.md",
            )
        self._check_block_size(stored.block_size, "its events have")
        self._check_tokens(tokens, stored)
        self._check_hashes(stored)

    async def _serve_one(
        self, sub: zmq.asyncio.Socket
    ) -> tuple[list[int] | None, bool, tuple[bytes, Batch, BlockStored] | None]:
        """(token ids of a new prompt if the engine tells, whether it was served, what was published of it)."""
        model, rng = self._namespace.model, random.Random()
        words = PROBE_BLOCKS * self._namespace.block_size // 4 + 1
        prompt = " ".join(["metatrie check", *(f"{rng.getrandbits(32):08x}" for _ in range(words))])
        tokens: list[int] | None = None
        raw = await self._post("/tokenize", {"model": model, "prompt": prompt})
        if raw is not None:
            with contextlib.suppress(msgspec.DecodeError):
                tokens = msgspec.json.decode(raw, type=_Tokens).tokens
        listening = asyncio.create_task(self._find(sub, tokens))
        if await self._post("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1}) is None:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            return tokens, False, None
        return tokens, True, await listening

    async def _find(
        self, sub: zmq.asyncio.Socket, tokens: list[int] | None
    ) -> tuple[bytes, Batch, BlockStored] | None:
        """The event that starts the prompt; without its tokens, the first event that starts any."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                while True:
                    frames = await sub.recv_multipart()
                    if len(frames) != 3:
                        continue
                    try:
                        batch = decode_batch(frames[2])
                    except MalformedBatch:
                        continue
                    for event in batch.events:
                        if (
                            isinstance(event, BlockStored)
                            and event.parent is None
                            and event.tokens
                            and (tokens is None or self._same_size(event.tokens, tokens))
                        ):
                            return frames[0], batch, event
        return None

    @staticmethod
    def _same_size(published: Sequence[int], tokens: Sequence[int]) -> bool:
        """Could these be the blocks of that prompt? Token by token is for the check to compare."""
        return 0 < len(published) <= len(tokens)

    def _check_tokens(self, tokens: list[int] | None, stored: BlockStored) -> None:
        if tokens is None:
            self._report.warn(
                "has no /tokenize", "prompts then need token ids from the client, or a tokenizer at the router"
            )
        elif stored.tokens == tokens[: len(stored.tokens)]:
            self._report.passed("tokenizer parity: /tokenize gives the ids that were cached")
        else:
            self._report.fail(
                "/tokenize gives other ids than were cached for the same prompt",
                "another template or tokenizer is at work; or it served others meanwhile: try again",
            )

    def _check_hashes(self, stored: BlockStored) -> None:
        report, rule = self._report, rule_for(self._config.engine)
        size = stored.block_size
        parent, digest = self._namespace.root, rule.root(self._namespace.root)
        for at, name in enumerate(stored.hashes):
            block = stored.tokens[at * size : (at + 1) * size]
            parent = BlockHash(block_hash(parent, block))
            extended = rule.extend(digest, block, None, parent)
            if extended is None:
                report.passed("block hashes are recomputed from tokens: this engine's rule is not known")
                return
            digest = extended
            if rule.published(digest) != name:
                report.warn(
                    "its block hashes are not those of our rule and seed; they are recomputed from tokens instead",
                    "PYTHONHASHSEED equal to hash_seed, and vLLM's --prefix-caching-hash-algo sha256_cbor, let "
                    "hidden inputs be found out",
                )
                return
        report.passed("hash parity: its block hashes are what our rule and seed predict")


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _labels(text: str, dp_rank: int) -> dict[str, str] | None:
    """Labels of the engine's cache_config_info, of this rank where they differ by rank."""
    for line in text.splitlines():
        name, brace, rest = line.partition("{")
        if not brace or not name.endswith(_GAUGE):
            continue
        pairs = (part.partition("=") for part in rest.rpartition("}")[0].split(","))
        labels = {key.strip(): value.strip().strip('"') for key, _, value in pairs}
        if labels.get("engine", str(dp_rank)) == str(dp_rank):
            return labels
    return None


# Command


@click.command("check")
@common_options
@redis_option(required=False)
@stream_options
@click.option("--probe/--no-probe", default=True, help="Have each engine serve one short prompt, to see its events.")
@click.option("--patience-s", type=click.FloatRange(0.1, 600), default=5.0, help="How long to wait for each answer.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines as JSON on standard output.")
@click.pass_context
def command(
    context: click.Context,
    /,
    log_level: str,
    redis_url: str | None,
    model: str | None,
    block_size: int,
    hash_seed: str,
    probe: bool,
    patience_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Look a live deployment over: store, engines, events, hashes, tokenizer.

    Takes what a sidecar takes: stream options for one engine, or the file's [[replicas]]. Exits with 1 if a line
    says FAIL.
    """
    replicas: tuple[ReplicaConfig, ...] = ()
    if options["replica"] or options.get("discover") or file_table(context, REPLICAS_TABLE):
        replicas = followed_replicas(context, **options)
    namespace: Namespace | None = None
    if model is not None or file_table(context, NAMESPACE_TABLE) or replicas:
        namespace = declared_namespace(context, model=model, block_size=block_size, hash_seed=hash_seed)
    if redis_url is None and not replicas:
        raise click.UsageError("there is nothing to check; pass --redis, a replica, or a --config that names them")
    lines: list[Line] = []

    async def run(stop: asyncio.Event) -> None:
        async def work() -> None:
            if redis_url is not None:
                lines.extend(await check_store(redis_url, namespace))
            if replicas:
                assert namespace is not None
                lines.extend(check_ports(replicas))
                async with aiohttp.ClientSession() as session:
                    for config in replicas:
                        lines.extend(
                            await check_replica(config, namespace, session, probe=probe, patience_s=patience_s)
                        )

        await until(stop, work())

    run_process(log_level, run)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines)).decode())
    else:
        _show(lines, Console(highlight=False))
    if any(line.grade == "FAIL" for line in lines):
        raise SystemExit(1)


_COLOURS: Final = {"PASS": "green", "WARN": "yellow", "FAIL": "red"}


def _show(lines: Sequence[Line], console: Console) -> None:
    for line in lines:
        colour = _COLOURS[line.grade]
        console.print(f"[{colour}]{line.grade}[/{colour}]  {escape(line.subject)}: {escape(line.found)}")
        if line.remedy:
            console.print(f"      → {escape(line.remedy)}")
