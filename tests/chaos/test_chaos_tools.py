"""`metatrie check`, `audit` and `chaos`, as a user runs them, against a real deployment."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis
from metatrie.consumers.consumer import ReplicaConfig
from metatrie.proto.hashing import Namespace
from metatrie.scripts.chaos import FAULTS, World, WorldConfig, free_port, plan
from metatrie.scripts.check import check_ports, check_replica, check_store

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world() -> AsyncIterator[World]:
    async with World(WorldConfig(engines=1)) as world:
        await world.busy(5)
        await world.settled()
        yield world


async def metatrie(*argv: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "metatrie", *argv),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    said, complained = await process.communicate()
    return process.returncode, said.decode(), complained.decode()


def sound(world: World) -> dict[str, str]:
    """Options of `metatrie check` that are right."""
    (engine,) = world.engines
    assert engine.replay is not None
    assert world.redis is not None
    return {
        "--redis": world.redis.url,
        "--replica": engine.name,
        "--model": world.config.model,
        "--url": engine.url,
        "--events": f"tcp://127.0.0.1:{engine.events.port}",
        "--replay": f"tcp://127.0.0.1:{engine.replay.port}",
        "--patience-s": "2",
    }


async def check(options: dict[str, str], *flags: str) -> tuple[int | None, list[dict[str, Any]]]:
    argv = [part for pair in options.items() for part in pair]
    code, said, complained = await metatrie("check", "--json", *argv, *flags)
    assert "Traceback" not in complained
    return code, json.loads(said)


def lines(found: list[dict[str, Any]], grade: str) -> str:
    return "\n".join(f"{line['found']} → {line['remedy']}" for line in found if line["grade"] == grade)


async def test_a_sound_deployment_passes_in_every_respect(world: World) -> None:
    code, found = await check(sound(world))
    assert code == 0
    assert lines(found, "FAIL") == ""
    passed = lines(found, "PASS")
    for what in (
        "reachable",
        "Redis 6" if "Redis 6" in passed else "Redis" if "Redis" in passed else "Valkey",
        "maxmemory-policy noeviction",
        "64 entries",
        "server's clock",
        "is exact",
        "no two on one endpoint",
        "serves chaos",
        "blocks of 16 tokens, as the index",
        "replay is complete",
        "publishes at",
        "events are on",
        "events are of rank 0",
        "tokenizer parity",
        "hash parity",
    ):
        assert what in passed, what


@pytest.mark.parametrize(
    ("change", "grade", "what"),
    [
        ({"--model": "another"}, "FAIL", "not another"),
        ({"--model": "another"}, "WARN", "nobody ever registered"),
        ({"--block-size": "24"}, "FAIL", "the index has 24"),
        ({"--topic": "kv@"}, "FAIL", "does not match"),
        ({"--hash-seed": "42"}, "WARN", "not those of our rule and seed"),
        ({"--events": "tcp://127.0.0.1:{free}"}, "FAIL", "nobody publishes"),
        ({"--replay": "tcp://127.0.0.1:{free}"}, "FAIL", "no replay from"),
        ({"--url": "http://127.0.0.1:{free}"}, "FAIL", "does not answer"),
        ({"--dp-rank": "1"}, "FAIL", "did not serve a completion"),
        ({"--redis": "redis://127.0.0.1:{free}"}, "FAIL", "cannot be reached"),
    ],
)
async def test_what_is_wrong_is_named_with_a_remedy(
    world: World, change: dict[str, str], grade: str, what: str
) -> None:
    options = sound(world) | {option: value.format(free=free_port()) for option, value in change.items()}
    namespace = Namespace(
        model=options["--model"],
        block_size=int(options.get("--block-size", "16")),
        hash_seed=options.get("--hash-seed", "0"),
    )
    config = ReplicaConfig(
        replica=options["--replica"],
        dp_rank=int(options.get("--dp-rank", "0")),
        events=options["--events"],
        replay=options["--replay"],
        url=options["--url"],
        topic=options.get("--topic", ""),
    )
    found = await check_store(options["--redis"], namespace)
    found += await check_replica(config, namespace, world.session, probe=True, patience_s=2)
    assert what in "\n".join(line.found for line in found if line.grade == grade)
    assert all(line.remedy for line in found if line.grade != "PASS")


async def test_a_failure_shows_in_the_exit_code(world: World) -> None:
    code, found = await check(sound(world) | {"--model": "another"})
    assert code == 1
    assert "not another" in lines(found, "FAIL")


async def test_a_store_that_evicts_is_refused(world: World) -> None:
    assert world.redis is not None
    with redis.Redis.from_url(world.redis.url) as client:
        for policy, grade in (("allkeys-lru", "FAIL"), ("volatile-ttl", "WARN")):
            client.config_set("maxmemory-policy", policy)
            try:
                code, found = await check({"--redis": world.redis.url})
            finally:
                client.config_set("maxmemory-policy", "noeviction")
            assert policy in lines(found, grade)
            assert code == (1 if grade == "FAIL" else 0)


async def test_without_a_probe_nothing_is_served(world: World) -> None:
    before = (await world.inventory(world.sidecars[0]))["next_seq"]
    code, found = await check(sound(world), "--no-probe")
    assert code == 0
    assert "events were not looked at" in lines(found, "WARN")
    assert (await world.inventory(world.sidecars[0]))["next_seq"] == before


async def test_there_must_be_something_to_check() -> None:
    code, _, complained = await metatrie("check")
    assert code == 2
    assert "--redis" in complained


def config(name: str, rank: int, events: int, replay: int) -> ReplicaConfig:
    return ReplicaConfig(
        replica=name, dp_rank=rank, events=f"tcp://h:{events}", replay=f"tcp://h:{replay}", engine="vllm"
    )


async def test_rank_ports_that_collide_are_found() -> None:
    good = [config("a", rank, 5557 + rank, 6557 + rank) for rank in range(4)]
    assert [line.grade for line in check_ports(good)] == ["PASS"]
    collide = [config("a", rank, 5557 + rank, 5558 + rank) for rank in range(2)]
    assert [line.grade for line in check_ports(collide)] == ["FAIL"]
    apart = [config("a", 0, 5557, 6557), config("a", 1, 5600, 6600)]
    assert [line.grade for line in check_ports(apart)] == ["WARN"]


# Audit


async def test_an_audit_of_nothing_says_so(world: World) -> None:
    assert world.redis is not None
    code, said, _ = await metatrie("audit", "--redis", world.redis.url, "--replica", "nobody")
    assert code == 2
    assert "no replica" in said


async def test_an_audit_that_cannot_see_a_sidecar_is_not_a_clean_one(world: World) -> None:
    assert world.redis is not None
    address = f"engine-0=http://127.0.0.1:{free_port()}"
    code, said, _ = await metatrie("audit", "--redis", world.redis.url, "--sidecar", address, "--json")
    assert code == 2
    assert "does not answer" in json.loads(said)[0]["note"]


async def test_a_clean_audit_is_a_table(world: World) -> None:
    assert world.redis is not None
    code, said, complained = await metatrie("audit", "--redis", world.redis.url)
    assert (code, complained) == (0, "")
    assert "engine-0/0" in said
    assert "exact" in said


async def test_a_malformed_address_is_refused(world: World) -> None:
    code, _, complained = await metatrie("audit", "--redis", "redis://127.0.0.1:1", "--sidecar", "nonsense")
    assert code == 2
    assert "REPLICA=URL" in complained


# Chaos


async def test_a_seed_decides_the_plan() -> None:
    assert plan(7, 300, 3) == plan(7, 300, 3)
    assert plan(7, 300, 3) != plan(8, 300, 3)
    long = plan(7, 3000, 3)
    assert {strike.fault for strike in long} == set(FAULTS)
    assert {strike.target for strike in long} == {0, 1, 2}
    assert [strike.at_s for strike in long] == sorted(strike.at_s for strike in long)


async def test_a_short_rampage_ends_with_everything_right() -> None:
    code, said, complained = await metatrie("chaos", "--seed", "3", "--seconds", "5", "--engines", "2", "--json")
    assert code == 0, complained
    outcome = json.loads(said)
    assert (outcome["seed"], outcome["wrong"]) == (3, 0)
    assert outcome["blocks"] > 0
    assert outcome["strikes"] == sum(outcome["by_fault"].values()) > 0
