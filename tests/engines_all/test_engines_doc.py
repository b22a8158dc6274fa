"""docs/engines.md says what the code does: generated tables, options that exist, facts that the samples show."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from metatrie.__main__ import main
from metatrie.consumers.consumer import ReplicaConfig
from metatrie.engines.adapters import ADAPTERS, adapter_for, support_tables
from metatrie.proto.hashing import Namespace

ROOT = Path(__file__).parents[2]
WIRE = ROOT / "tests" / "data" / "vectors" / "wire"
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_tables_are_those_of_the_adapters() -> None:
    written = PAGE.partition("<!-- support tables -->\n")[2].partition("<!-- end of support tables -->")[0]
    assert written.strip() == support_tables().strip()


def test_commands_and_options_exist() -> None:
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    ours = [shlex.split(line) for line in lines if line.startswith("metatrie ")]
    assert len(ours) >= 5
    for _, name, *words in ours:
        command = main.commands[name]
        flags = {flag: p for p in command.params if isinstance(p, click.Option) for flag in p.opts}
        for word in words:
            if word.startswith("--"):
                assert word in flags, f"metatrie {name} {word}"
        given = {flags[w].name for w in words if w.startswith("--")}
        assert {p.name for p in command.params if p.required and not p.envvar} <= given
    for module in re.findall(r"python -m (metatrie\.[\w.]+)", PAGE):
        assert importlib.util.find_spec(module) is not None, module


def test_engine_settings_are_json() -> None:
    settings = [
        json.loads(text)
        for block in blocks("sh")
        for text in re.findall(r"--kv-events-config '(.*?)'", block, re.DOTALL)
    ]
    assert len(settings) == 2
    for one in settings:
        assert one["publisher"] == "zmq"
        assert one["endpoint"] != one["replay_endpoint"]


def test_file_entries_are_valid() -> None:
    lookahead, replicas = map(tomllib.loads, blocks("toml"))
    assert msgspec.convert(lookahead["namespace"], Namespace).lookahead == 1
    (entry,) = replicas["replicas"]
    assert msgspec.convert(entry, ReplicaConfig).ignore_media == ("cpu", "cxl")


def version_of(path: Path) -> tuple[int, ...]:
    return tuple(map(int, path.stem.rpartition("-")[2].split(".")))


def events_in(path: Path) -> list[Any]:
    return [event for sample in json.loads(path.read_text()) for event in sample["decoded"][1]]


VLLM = sorted(WIRE.glob("vllm-*.json"), key=version_of)
POSITIONS = {"lora_name": 7, "extra_keys": 8, "group_idx": 9, "kv_cache_spec_kind": 10}
"""Of optional fields in array events."""


def has(events: list[Any], field: str) -> bool:
    """Does this version's `BlockStored` have the field, in either form?"""
    stored = [e for e in events if (e[0] if isinstance(e, list) else e["type"]) == "BlockStored"]
    return any(field in e if isinstance(e, dict) else len(e) > POSITIONS[field] for e in stored)


def limit(engine: str, words: str) -> Any:
    (found,) = [one for one in adapter_for(engine).limits if words in one.what]
    return found


def test_every_sampled_version_is_within_what_is_claimed() -> None:
    for name in ("vllm", "sglang"):
        sampled = [version_of(p) for p in WIRE.glob(f"{name}-*.json")]
        adapter = ADAPTERS[name]
        assert adapter.oldest is not None
        assert adapter.newest == max(sampled)
        assert adapter.oldest <= min(sampled)


@pytest.mark.parametrize("path", VLLM, ids=lambda p: p.stem)
def test_what_a_vllm_version_does_not_tell_is_what_its_samples_lack(path: Path) -> None:
    events, version = events_in(path), version_of(path)
    told = adapter_for("vllm").limits_of(version)
    assert (limit("vllm", "a number and no name on the wire") in told) == (not has(events, "lora_name"))
    salts = limit("vllm", "cache salts and media are not on the wire")
    unpredicted = limit("vllm", "names cannot be predicted")
    assert (salts in told or unpredicted in told) == (not has(events, "extra_keys"))
    kinds = has(events, "group_idx") and not has(events, "kv_cache_spec_kind")
    assert (limit("vllm", "a number and no kind") in told) == kinds
    assert (limit("vllm", "also depends on tokens after it") in told) == any(
        isinstance(e, dict) and "lookahead_token_ids" in e for e in events
    )


def test_limits_follow_the_version() -> None:
    assert limit("vllm", "report mode") in adapter_for("vllm").limits_of((0, 26, 0))
    assert limit("vllm", "report mode") not in adapter_for("vllm").limits_of((0, 25, 1))
    assert limit("sglang", "no medium") in adapter_for("sglang").limits_of((0, 5, 8))
    assert limit("sglang", "no medium") not in adapter_for("sglang").limits_of((0, 5, 9))
