"""Many runs: every policy in every setting, in parallel, resumable, and the same digits every time.

A setting is a trace, a cache size, a number of replicas and a load. Its arrivals are stretched once, so that the
default policy spends the given share of time in prefill, and all policies meet the same ones. Results go to a
JSON-lines file as they come; what is in it already is not run again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ...indexer.policies import DEFAULT_POLICY, POLICIES
from ...indexer.queueing import QueueConfig
from ...proto.errors import ConfigError
from .engine import EngineConfig
from .fleet import FleetConfig, Outcome, simulate, stretch_for
from .traces import Trace, load

TRACES = (
    "mooncake_conversation.jsonl.gz",
    "mooncake_synthetic.jsonl.gz",
    "weka_cc_le128k_251.jsonl.zst",
    "taubench_gpt4o_airline.json.gz",
    "lmcache_agent_miniswe.jsonl.zst",
    "azure2023_conv.csv.gz",
)
CACHES = {"ample": 4_000_000, "tight": 1_200_000, "very_tight": 600_000}
"""KV cache per replica, tokens."""
REPLICAS = (2, 8, 32)
LOADS = (0.5, 0.75, 0.9)
ORACLE = "bound"
"""The entry that is no policy: one infinite cache, least time to first token."""
EXPECTED_TTFT = "expected_ttft"
"""The default policy without its price: both weights 1."""
QUEUED = "queued"
"""The default policy in a router that queues; in all other entries requests wait in the engines."""
ENTRIES = (ORACLE, *POLICIES, EXPECTED_TTFT, QUEUED)
_PLAIN = {"base_weight": 1.0, "max_weight": 1.0}
_OWN: Mapping[str, dict[str, Any]] = {
    ORACLE: {"policy": DEFAULT_POLICY, "parameters": _PLAIN, "oracle": True},
    EXPECTED_TTFT: {"policy": DEFAULT_POLICY, "parameters": _PLAIN},
    QUEUED: {"policy": DEFAULT_POLICY, "queue": QueueConfig()},
}
"""Runs of the entries that are no policies."""
MARGIN = 0.03
"""A policy whose mean is not further below the default's is as good as it."""


class Setting(msgspec.Struct, frozen=True, order=True):
    """What all policies of a comparison share."""

    trace: str
    """File name."""
    cache: str
    replicas: int
    load: float
    requests: int = 0
    """Only the first of the trace; 0: all."""

    def __str__(self) -> str:
        first = f" first {self.requests:,}" if self.requests else ""
        return f"{self.trace.partition('.')[0]}{first} {self.cache} {self.replicas} replicas {self.load:.0%}"


class Result(msgspec.Struct, frozen=True):
    """One entry in one setting."""

    setting: Setting
    policy: str
    """Or another entry (`entry_config`)."""
    stretch: float
    """Of the setting."""
    ideal: float
    """Share of prompt tokens that an earlier request had, after the warm-up."""
    outcome: Outcome


class Comparison(msgspec.Struct, frozen=True):
    """One policy over all settings it was run in with the default policy."""

    policy: str
    settings: int
    relative: float
    """Geometric mean of its mean TTFT over the default policy's."""


def settings(
    traces: Sequence[str] = TRACES,
    caches: Sequence[str] = tuple(CACHES),
    replicas: Sequence[int] = REPLICAS,
    loads: Sequence[float] = LOADS,
    requests: int = 0,
) -> list[Setting]:
    return [Setting(t, c, n, load, requests) for t in traces for n in replicas for c in caches for load in loads]


def entry(policy: str, *, stretched: float = 1.0, **parameters: float) -> str:
    """The name of an entry that is a policy with parameters of its own, or meets other arrival times."""
    settings = "".join(f";{name}={value:g}" for name, value in parameters.items())
    return policy + settings + (f"@{stretched:g}" if stretched != 1.0 else "")


def entry_config(entry: str, config: FleetConfig) -> FleetConfig:
    """The run of one entry of a comparison: `POLICY[;PARAMETER=VALUE …][@FACTOR on arrival times]`."""
    name, _, factor = entry.partition("@")
    name, *settings = name.split(";")
    own = _OWN.get(name, {"policy": name})
    parameters = own.get("parameters", {}) | numbers(settings)
    stretch = config.stretch * float(factor or 1)
    return msgspec.structs.replace(config, **(own | {"parameters": parameters, "stretch": stretch}))


def numbers(settings: Sequence[str]) -> dict[str, float]:
    """Parameters from `NAME=NUMBER`. Raises ConfigError."""
    found: dict[str, float] = {}
    for text in settings:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError("set", "is not NAME=NUMBER", "as in max_skew=4") from None
        found[name] = int(number) if number.is_integer() else number
    return found


def ideal_hit(trace: Trace, warmup: float) -> float:
    """Share of prompt tokens in blocks that an earlier request had, after the warm-up; nothing evicted, no
    waiting."""
    seen: set[bytes] = set()
    first = int(len(trace.requests) * warmup)
    reused = prompt = 0
    for number, request in enumerate(trace.requests):
        chain = request.chain
        keys = chain.keys(chain.blocks)
        held = next((i for i, key in enumerate(keys) if key not in seen), len(keys))
        seen.update(keys[held:])
        if number >= first:
            reused += min(held, (request.prompt_tokens - 1) // trace.block_size) * trace.block_size
            prompt += request.prompt_tokens
    return reused / prompt


def read(path: Path) -> list[Result]:
    """Results of earlier runs; empty if there is no such file. A last line cut short is dropped. Raises
    ConfigError."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    decode = msgspec.json.Decoder(Result).decode
    try:
        return [decode(line) for line in lines[:-1]]
    except msgspec.DecodeError:
        raise ConfigError("results", f"{path.name} holds no results of this version", "name another file") from None


def run(
    folder: Path,
    results: Path,
    wanted: Mapping[Setting, Sequence[str]],
    *,
    jobs: int,
    progress: Callable[[Result], None],
) -> list[Result]:
    """Run what `results` lacks of the entries wanted per setting, append it there, and return all that was wanted.
    `jobs` processes."""
    done = {(r.setting, r.policy): r for r in read(results)}
    missing: dict[Setting, list[str]] = {}
    for setting, entries in wanted.items():
        lacking = [entry for entry in entries if (setting, entry) not in done]
        if lacking:
            missing[setting] = lacking
    known = {r.setting: r.stretch for r in done.values()}
    groups: dict[tuple[str, int, int], list[Setting]] = {}
    for setting in wanted:
        groups.setdefault((setting.trace, setting.replicas, setting.requests), []).append(setting)
    if results.exists() and (text := results.read_bytes()) and not text.endswith(b"\n"):
        results.write_bytes(text[: text.rfind(b"\n") + 1])
    with results.open("ab") as file:
        for result in _all(folder, missing, list(groups.values()), known, jobs):
            done[result.setting, result.policy] = result
            file.write(msgspec.json.encode(result) + b"\n")
            file.flush()
            progress(result)
    return [done[setting, entry] for setting, entries in wanted.items() for entry in entries]


def _all(
    folder: Path,
    missing: dict[Setting, list[str]],
    groups: list[list[Setting]],
    known: dict[Setting, float],
    jobs: int,
) -> Iterator[Result]:
    if jobs == 1:
        for group in groups:
            for setting, stretch in _stretches(folder, group, known):
                for entry in missing.get(setting, ()):
                    yield _one(folder, setting, entry, stretch)
        return
    with ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(5,)) as pool:
        running: set[Future[Result | list[tuple[Setting, float]]]] = {
            pool.submit(_all_stretches, folder, group, known) for group in groups
        }
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                found = future.result()
                if isinstance(found, Result):
                    yield found
                    continue
                for setting, stretch in found:
                    running |= {pool.submit(_one, folder, setting, e, stretch) for e in missing.get(setting, ())}


def _stretches(folder: Path, group: list[Setting], known: dict[Setting, float]) -> Iterator[tuple[Setting, float]]:
    """Of settings that differ in cache and load only; each is the first guess for the next, so that the digits depend
    on what is wanted and not on who runs it when."""
    start: float | None = None
    for setting in group:
        stretch = known.get(setting)
        if stretch is None:
            trace = _trace(folder / setting.trace, setting.requests)
            guess = None if start is None else start / setting.load
            stretch = stretch_for(trace, _config(setting), setting.load, start=guess)
        yield setting, stretch
        start = stretch * setting.load


def _all_stretches(folder: Path, group: list[Setting], known: dict[Setting, float]) -> list[tuple[Setting, float]]:
    return list(_stretches(folder, group, known))


@cache
def _trace(path: Path, requests: int) -> Trace:
    return load(path).first(requests)


@cache
def _ideal(path: Path, requests: int, warmup: float) -> float:
    return ideal_hit(_trace(path, requests), warmup)


def _config(setting: Setting) -> FleetConfig:
    return FleetConfig(replicas=setting.replicas, engine=EngineConfig(capacity_tokens=CACHES[setting.cache]))


def _one(folder: Path, setting: Setting, entry: str, stretch: float) -> Result:
    path = folder / setting.trace
    config = entry_config(entry, msgspec.structs.replace(_config(setting), stretch=stretch))
    ideal = _ideal(path, setting.requests, config.warmup)
    return Result(setting, entry, stretch, ideal, simulate(_trace(path, setting.requests), config))


def compare(results: Sequence[Result]) -> list[Comparison]:
    """Policies by geometric mean over settings, best first; the bound is not among them."""
    default = {r.setting: r.outcome.ttft.mean for r in results if r.policy == DEFAULT_POLICY}
    logs: dict[str, list[float]] = {}
    for result in results:
        if result.policy != ORACLE and result.setting in default:
            ratio = result.outcome.ttft.mean / default[result.setting]
            logs.setdefault(result.policy, []).append(math.log(ratio))
    found = [Comparison(name, len(v), math.exp(sum(v) / len(v))) for name, v in logs.items()]
    return sorted(found, key=lambda c: c.relative)


def complete(results: Sequence[Result], entries: Sequence[str] = ENTRIES) -> list[Result]:
    """Of every setting in which all of these were run, their results; of a repeated run the last."""
    by_setting: dict[Setting, dict[str, Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, {})[result.policy] = result
    return [found[entry] for found in by_setting.values() if found.keys() >= set(entries) for entry in entries]


def losses(results: Sequence[Result], margin: float = MARGIN) -> list[tuple[Setting, str, float]]:
    """Settings where another policy's mean TTFT is more than `margin` below the default's: (setting, best, ratio)."""
    by_setting: dict[Setting, dict[str, float]] = {}
    for result in results:
        if result.policy not in (ORACLE, QUEUED):
            by_setting.setdefault(result.setting, {})[result.policy] = result.outcome.ttft.mean
    found = []
    for setting, means in by_setting.items():
        if DEFAULT_POLICY in means:
            best = min(means, key=means.__getitem__)
            ratio = means[best] / means[DEFAULT_POLICY]
            if ratio < 1 - margin:
                found.append((setting, best, ratio))
    return found
