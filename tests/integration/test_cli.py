"""The command line as a user meets it: help, the environment, the file, and what is said about mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = (
    "up",
    "serve",
    "router",
    "sidecar",
    "engine",
    "bench",
    "simulate",
    "relay",
    "load",
    "tokens",
    "record",
    "replay",
    "explain",
    "top",
    "audit",
    "chaos",
    "check",
)


def metatrie(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "metatrie", *argv],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


def test_the_program_lists_its_commands() -> None:
    said = metatrie("--help")
    assert said.returncode == 0
    assert all(f"\n  {command}" in said.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_its_options(command: str) -> None:
    said = metatrie(command, "--help")
    assert said.returncode == 0
    assert "--config" in said.stdout
    assert "--log-level" in said.stdout


def test_an_unknown_policy_names_the_choices() -> None:
    said = metatrie("serve", "--policy", "psychic")
    assert said.returncode == 2
    assert "round_robin" in said.stderr


def test_options_come_from_the_environment() -> None:
    said = metatrie("serve", METATRIE_SERVE_POLICY="psychic")
    assert said.returncode == 2
    assert "psychic" in said.stderr


def test_options_come_from_the_file_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "metatrie.toml"
    config.write_text('[serve]\npolicy = "psychic"\n')
    said = metatrie("serve", "--config", str(config))
    assert said.returncode == 2
    assert "psychic" in said.stderr
    config.write_text('redis = "gopher://x"\n[serve]\npolicy = "psychic"\n')
    said = metatrie("serve", "--config", str(config), "--policy", "round_robin")
    assert "psychic" not in said.stderr
    assert "redis://" in said.stderr


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[serve]\nportt = 1\n", "portt"),
        ("nonsense = 1\n", "nonsense"),
        ("serve = 3\n", "[serve]"),
        ("[serve\n", "TOML"),
        ("[policies.hybrid]\nmax_skew = -5\n", "max_skew"),
        ("[policies.psychic]\nx = 1\n", "psychic"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, named: str) -> None:
    config = tmp_path / "metatrie.toml"
    config.write_text(text)
    said = metatrie("serve", "--config", str(config))
    assert said.returncode != 0
    assert named in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "m"], "--replica"),
        (["--model", "m", "--replica", "r"], "--events"),
        (["--replica", "r", "--events", "tcp://127.0.0.1:1"], "model"),
        (["--model", "m", "--replica", "r", "--events", "tcp://127.0.0.1:1", "--engine", "abacus"], "abacus"),
        (["--model", "m", "--replica", "r", "--events", "tcp://127.0.0.1:1", "--block-size", "0"], "block_size"),
    ],
)
def test_a_sidecar_says_what_it_lacks(argv: list[str], named: str) -> None:
    said = metatrie("sidecar", "--redis", "redis://127.0.0.1:1", "--port", "0", *argv)
    assert said.returncode != 0
    assert named in said.stderr
    assert "Traceback" not in said.stderr


def test_credentials_in_a_store_url_are_never_repeated() -> None:
    said = metatrie("serve", "--port", "0", "--redis", "redis://user:hunter2@127.0.0.1:1/0")
    assert said.returncode != 0
    assert "hunter2" not in said.stderr + said.stdout
    assert "Traceback" not in said.stderr


def test_a_simulated_engine_refuses_a_pool_too_small_for_one_sequence() -> None:
    said = metatrie("engine", "--num-blocks", "10", "--port", "0")
    assert said.returncode != 0
    assert "num_blocks" in said.stderr
    assert "max_model_len" in said.stderr
