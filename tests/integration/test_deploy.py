"""What deploy/ holds: its processes start as the manifests have it, and its queries ask for metrics that exist."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import metatrie
import pytest
import yaml
from metatrie.scripts.stack import Child, StackConfig, running

DEPLOY = Path(metatrie.__file__).parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FIELDS = {"status.podIP": "127.0.0.1", "metadata.name": "vllm-6f7c9-abcde"}


def manifests() -> list[dict[str, Any]]:
    named = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [document for name in named for document in yaml.safe_load_all((KUBERNETES / name).read_text())]


def containers() -> dict[str, dict[str, Any]]:
    """By name, from every Deployment."""
    return {
        container["name"]: container
        for document in manifests()
        if document["kind"] == "Deployment"
        for container in document["spec"]["template"]["spec"]["containers"]
    }


def environment(container: dict[str, Any]) -> dict[str, str]:
    """What Kubernetes would set."""
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        value = entry.get("value") or FIELDS[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda m: found[m[1]], value)
    return found


def tenants_file(folder: Path) -> Path:
    file = folder / "tenants.toml"
    file.write_text('shared = true\n[tenants.acme]\ntokens = ["0123456789abcdef"]\n')
    file.chmod(0o440)  # as the volume has it
    return file


@pytest.mark.parametrize("name", ["router", "metatrie"])
async def test_a_process_starts_as_its_manifest_has_it(name: str, tmp_path: Path, redis_url: str) -> None:
    container = containers()[name]
    tenants = tenants_file(tmp_path)
    args = [a.replace("/etc/metatrie/", f"{KUBERNETES}/") for a in container["args"]]
    given = environment(container)
    here = {  # what is another on this machine
        "METATRIE_REDIS": redis_url,
        "METATRIE_ROUTER_HOST": "127.0.0.1",
        "METATRIE_SIDECAR_HOST": "127.0.0.1",
        "METATRIE_ROUTER_PORT": "0",
        "METATRIE_SIDECAR_PORT": "0",
        "METATRIE_SIDECAR_CHECKPOINT_DIR": str(tmp_path),
    }
    if "METATRIE_ROUTER_TENANTS" in given:
        here["METATRIE_ROUTER_TENANTS"] = str(tenants)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "metatrie", *args),
        env={**os.environ, **given, **here},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if line:
            url = json.loads(line)["url"]
            async with aiohttp.ClientSession() as session, session.get(f"{url}/healthz") as response:
                assert response.status == 200
    finally:
        if process.returncode is None:
            process.terminate()
        said = (await process.communicate())[1].decode()
    assert process.returncode == 0, said


def test_every_variable_of_a_manifest_is_an_option() -> None:
    from metatrie.__main__ import main

    named = 0
    for name, command in (("router", "router"), ("metatrie", "sidecar")):
        known = {f"METATRIE_{command}_{p.name}".upper() for p in main.commands[command].params}
        ours = {v for v in environment(containers()[name]) if v.startswith("METATRIE_")}
        assert ours <= known
        named += len(ours)
    assert named >= 5


def test_services_and_probes_lead_to_ports_that_are_open() -> None:
    ports = {c["name"]: {p["name"]: p["containerPort"] for p in c["ports"]} for c in containers().values()}
    assert (ports["router"], ports["metatrie"]) == ({"http": 8080}, {"metatrie": 9400})
    for container in containers().values():
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["port"] in ports[container["name"]]
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in manifests() if d["kind"] == "Deployment"]
    for service in (d["spec"] for d in manifests() if d["kind"] == "Service"):
        assert any(service["selector"].items() <= labels.items() for labels in pods)


def test_no_service_can_set_an_option() -> None:
    """Kubernetes gives pods METATRIE_ROUTER_PORT for a Service of that name, unless told not to."""
    for document in manifests():
        if document["kind"] == "Deployment":
            assert document["spec"]["template"]["spec"]["enableServiceLinks"] is False


async def test_alerts_and_dashboard_ask_for_metrics_there_are(tmp_path: Path) -> None:
    rules = [r for g in yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"] for r in g["rules"]]
    panels = json.loads((DEPLOY / "grafana/metatrie.json").read_text())["panels"]
    asked = [r["expr"] for r in rules] + [t["expr"] for p in panels for t in p["targets"]]
    names = {re.sub(r"_bucket$", "", name) for expr in asked for name in re.findall(r"\bmetatrie_\w+", expr)}
    shown: set[str] = set()
    with_tenants = Child(
        "serve", ["serve", "--port", "0", "--tenants", str(tenants_file(tmp_path))], tmp_path / "log"
    )
    try:
        serve = (await with_tenants.start())["url"]
        async with running(StackConfig(engines=1, port=0)) as stack, aiohttp.ClientSession() as session:
            for url in (stack.router_url, stack.engines[0].sidecar_url, serve):
                async with session.get(f"{url}/metrics") as response:
                    shown |= set(re.findall(r"^# HELP (metatrie_\S+)", await response.text(), re.MULTILINE))
    finally:
        await with_tenants.stop()
    assert len(names) > 20
    assert names <= shown
