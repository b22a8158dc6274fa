"""The five walk-throughs of docs/debugging.md: each cause is injected into real processes and found by the tool.

Every test runs the commands that the page shows, and the page shows nothing they do not print.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from debugging_world import CAPTURES, MIXED, Process, capture, eventually, metatrie, said
from metatrie.consumers.recording import Frame
from metatrie.proto.events import BlockStored, decode_batch
from metatrie.proto.hashing import Chain
from metatrie.scripts.timeline import Point, Timeline

MODEL = "demo"
LOCAL = "tcp://127.0.0.1:*"
DOCS = Path(__file__).parents[2] / "docs" / "debugging.md"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def call(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


class Deployment:
    """Engines with sidecars over one Redis, and a router, each a process."""

    def __init__(self, stack: contextlib.ExitStack, redis_url: str) -> None:
        self._stack, self._redis = stack, redis_url
        self.engines: dict[str, dict[str, Any]] = {}
        self.sidecars: dict[str, str] = {}
        self.router = ""

    def start(self, *argv: object) -> Process:
        return self._stack.enter_context(Process(*argv))

    def engine(self, name: str, *, engine: tuple[object, ...] = (), sidecar: tuple[object, ...] = ()) -> None:
        running = self.start(
            *("engine", "--port", "0", "--model", MODEL, "--num-blocks", "2049", "--max-model-len", "8192"),
            *("--events", LOCAL, "--replay", LOCAL, "--prefill-tokens-per-s", "200000", *engine),
        )
        self.engines[name] = running.ready
        self.follow(name, running.ready, *sidecar)

    def follow(self, name: str, engine: dict[str, Any], *sidecar: object, replay: bool = True) -> None:
        argv = ["--replica", name, "--model", MODEL, "--events", engine["events"]]
        argv += ["--replay", engine["replay"]] if replay else []
        argv += ["--url", engine["url"]] if "url" in engine else []
        running = self.start("sidecar", "--redis", self._redis, "--port", "0", *argv, *sidecar)
        self.sidecars[name] = running.ready["url"]

    def route(self, *argv: object) -> None:
        self.router = self.start("router", "--redis", self._redis, "--port", "0", *argv).ready["url"]

    async def settled(self, session: aiohttp.ClientSession) -> None:
        """Every sidecar has applied what its engine published, and the store has acknowledged it."""
        async with asyncio.timeout(30):
            for name, engine in self.engines.items():
                while True:
                    async with session.get(f"{engine['url']}/debug/cache") as response:
                        published = int(response.headers["X-Next-Seq"])
                    async with session.get(f"{self.sidecars[name]}/v1/inventory") as response:
                        inventory = await response.json()
                    if inventory["next_seq"] == published and not inventory["pending"]:
                        break
                    await asyncio.sleep(0.02)

    async def serve(self, session: aiohttp.ClientSession, name: str, messages: list[dict[str, str]]) -> int:
        """Have one engine serve a conversation; returns the prompt tokens it found cached."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        answer = await call(session, f"{self.engines[name]['url']}/v1/chat/completions", body)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)


@pytest.fixture
def deployment(redis_url: str) -> Iterator[Deployment]:
    with contextlib.ExitStack() as stack:
        yield Deployment(stack, redis_url)


async def explain(*argv: object, aloud: bool = True) -> dict[str, Any]:
    """What the command reports. aloud: look at what it prints for people, too."""
    report: dict[str, Any] = await asyncio.to_thread(said, "explain", *argv, "--json")
    if not aloud:
        return report
    people = await asyncio.to_thread(metatrie, "explain", *argv)
    assert people.returncode == 0, people.stderr
    for finding in report["findings"]:
        assert finding["label"].replace("_", " ") in people.stdout
    return report


def labels(report: dict[str, Any]) -> list[str]:
    return [finding["label"] for finding in report["findings"]]


def request(path: Path, messages: list[dict[str, str]]) -> Path:
    path.write_text(json.dumps({"model": MODEL, "messages": messages}))
    return path


def conversation(system: str, question: str = "Why is the sky blue?") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


RULES = "You are a careful assistant. Answer in short sentences, and say so when you do not know. " * 4


async def test_a_hash_seed_mismatch(deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """The sidecar takes the engine's hashes as keys, and the engine was started with another PYTHONHASHSEED."""
    deployment.engine("engine-0", engine=("--hash-seed", "42"), sidecar=("--hash-mode", "engine"))
    deployment.route()
    engine = deployment.engines["engine-0"]
    out = tmp_path / "engine-0.mtrec"
    recorder = deployment.start(
        *("record", out, "--replica", "engine-0", "--model", MODEL, "--hash-mode", "engine"),
        *("--events", engine["events"], "--replay", engine["replay"]),
    )
    messages = conversation(RULES)
    assert await deployment.serve(session, "engine-0", messages) == 0
    assert await deployment.serve(session, "engine-0", messages) > 0, "the engine finds its own blocks"
    await deployment.settled(session)
    recorder.stop()
    prompt = request(tmp_path / "request.json", messages)
    report = await explain(prompt, "--router", deployment.router, "--recording", out)
    (verdict,) = report["verdicts"]
    assert (verdict["matched_blocks"], verdict["reason"]) == (0, "never_stored")
    assert labels(report)[0] == "hash_seed_mismatch"
    text = report["findings"][0]["text"]
    assert "PYTHONHASHSEED=42" in text
    assert "no prompt ever matches" in text


async def test_a_timestamp_in_the_system_prompt(
    deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Every request begins alike, and then says what time it is."""
    for name in ("engine-0", "engine-1"):
        deployment.engine(name)
    deployment.route()
    for minute in range(6):
        messages = conversation(f"{RULES}It is 2026-03-01 09:{minute:02}:17. {RULES}")
        body = {"model": MODEL, "messages": messages}
        routed = await call(session, f"{deployment.router}/v1/route", body)
        await deployment.serve(session, routed["replica"], messages)
        await deployment.settled(session)
    prompt = request(tmp_path / "request.json", conversation(f"{RULES}It is 2026-03-01 10:30:00. {RULES}"))
    report = await explain(prompt, "--router", deployment.router)
    assert labels(report)[0] == "changing_text"
    text = report["findings"][0]["text"]
    assert "It reads: " in text
    assert "10:30" in text or "2026-03-01" in text
    deepest = report["verdicts"][0]
    assert 0 < deepest["matched_blocks"] < deepest["prompt_blocks"]
    assert deepest["branches"] >= 3
    assert deepest["reason"] == "never_stored"


def chat_tokenizer(path: Path, template: str) -> Path:
    """A tokenizer of one token per byte, with a chat template of its own."""
    tokenizers = pytest.importorskip("tokenizers")
    path.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


async def test_a_chat_template_that_drifted(
    deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """One engine was updated, and its chat template begins with a line the others' does not have."""
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    old = chat_tokenizer(tmp_path / "old", turns)
    new = chat_tokenizer(tmp_path / "new", "Knowledge cutoff: June.\n" + turns)
    for name, tokenizer in (("engine-0", old), ("engine-1", old), ("engine-2", new)):
        deployment.engine(name, engine=("--tokenizer", tokenizer))
    deployment.route()
    messages = conversation(RULES)
    for name in deployment.engines:
        await deployment.serve(session, name, messages)
    await deployment.settled(session)
    prompt = request(tmp_path / "request.json", messages)
    report = await explain(prompt, "--router", deployment.router)
    assert labels(report)[0] == "chat_template_drift"
    drifted = {one["replica"] for one in report["tokenisations"] if one.get("differs_at") is not None}
    # Whoever the router asked is taken to be right; the others differ from it.
    assert drifted in ({"engine-2/0"}, {"engine-0/0", "engine-1/0"})
    assert all(one["differs_at"] == 0 for one in report["tokenisations"] if one.get("differs_at") is not None)
    held = {verdict["replica"]: verdict["matched_blocks"] for verdict in report["verdicts"]}
    assert all((held[name] == 0) == (name in drifted) for name in held)


UNTIL = 263
"""The last batch before the recorded engine cleared its cache, and with it every trace of the loss."""


async def test_lost_events(deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Events get lost between an engine without a replay endpoint and its sidecar."""
    file = CAPTURES / f"{MIXED}.frames.jsonl.gz"
    faults = ("--drop", "0.3", "--seed", "4", "--speed", "max", "--until", UNTIL)
    engine = deployment.start("replay", file, "--model", MODEL, "--into", LOCAL, "--hold", *faults)
    deployment.follow("engine-0", engine.ready, replay=False)
    deployment.route()
    async with asyncio.timeout(30):
        while True:
            async with session.get(f"{deployment.sidecars['engine-0']}/v1/inventory") as response:
                inventory = await response.json()
            if inventory["next_seq"] > UNTIL - 6 and not inventory["pending"]:
                break
            await asyncio.sleep(0.02)
    assert (inventory["state"], inventory["cause"]) == ("degraded", "gap")
    path, held, matched = await impaired(deployment, session, tmp_path)
    report = await explain(path, "--router", deployment.router)
    assert labels(report)[0] == "lost_events"
    (verdict,) = report["verdicts"]
    assert verdict["matched_blocks"] == matched
    assert "gap" in verdict["text"]
    # The engine's own stream, which the test has whole, tells that it holds more.
    at = ("--model", MODEL, "--query", path, "--at", UNTIL)
    (truth,) = await asyncio.to_thread(said, "replay", file, *at, "--json")
    assert truth["matched_blocks"] == held > matched
    at = ("--model", MODEL, "--history", verdict["block"], "--until", UNTIL)
    history = await asyncio.to_thread(said, "replay", file, *at, "--json")
    last = [one["what"] for one in history if one.get("block")][-1]
    assert last in ("attached", "copy removed"), "by all that the engine said, it is there"


async def impaired(deployment: Deployment, session: aiohttp.ClientSession, folder: Path) -> tuple[Path, int, int]:
    """A prompt of which the engine holds more than the index knows: a file with it, and both depths in blocks."""
    (past,) = Timeline.at(capture(MIXED), Point("seq", UNTIL)).replicas
    for tokens in prompts_of(capture(MIXED)):
        keys = Chain(past.source.namespace.root, 16, tokens).keys(len(tokens) // 16)
        held = sum(block.state == "attached" for block in past.evidence(keys).blocks)
        answer = await call(session, f"{deployment.router}/v1/match", {"model": MODEL, "token_ids": tokens})
        matched = answer["replicas"][0]["matched_blocks"]
        if matched < held:
            path = folder / "request.json"
            path.write_text(json.dumps({"model": MODEL, "token_ids": tokens}))
            return path, held, matched
    raise AssertionError("no prompt of the recording was hit by a loss")


def prompts_of(recording: Any) -> list[list[int]]:
    """Prompts as the engine announced them, each once."""
    found: dict[tuple[int, ...], None] = {}
    for entry in recording:
        assert isinstance(entry.record, Frame)
        for event in decode_batch(entry.record.payload).events:
            if isinstance(event, BlockStored) and event.parent is None and not (event.lora_name or event.extra_keys):
                found[tuple(event.tokens)] = None
    return [list(tokens) for tokens in found if tokens]


async def test_a_request_diverted_by_load(
    deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """The replica that holds the prompt has too much to do, and the policy sends the request elsewhere."""
    log = tmp_path / "decisions.jsonl"
    config = tmp_path / "metatrie.toml"
    config.write_text("[policies.hybrid]\nmax_skew = 2\n")
    for name in ("engine-0", "engine-1"):
        deployment.engine(name)
    deployment.route("--policy", "hybrid", "--config", config, "--decision-log", log)
    messages = conversation(RULES)
    await deployment.serve(session, "engine-0", messages)
    await deployment.settled(session)
    body = {"model": MODEL, "messages": messages}
    # Nobody reports an end, so they count as being served.
    decisions = [await call(session, f"{deployment.router}/v1/route", body) for _ in range(4)]
    assert [d["replica"] for d in decisions] == ["engine-0"] * 3 + ["engine-1"]
    last = decisions[-1]
    reported = {"reservation": last["reservation"], "cached_tokens": 0}
    await call(session, f"{deployment.router}/v1/feedback", reported)
    for where in (("--router", deployment.router), ("--log", log)):
        # The log is handed to the system once a second.
        await eventually(lambda: '"served"' in log.read_text(), "the report is in the log")
        report = await explain("--decision", last["decision"], *where, aloud=where[0] == "--log")
        assert "load_diversion" in labels(report)
        text = next(f["text"] for f in report["findings"] if f["label"] == "load_diversion")
        assert "engine-0/0 holds" in text
        assert "ruled out by the policy's constraint" in text
        assert "pending_requests 3 against 0" in text
        assert report["decision"]["replica"] == "engine-1/0"
        assert report["decision"]["served_tokens"] == 0
    first = await explain("--decision", decisions[0]["decision"], "--router", deployment.router, aloud=False)
    assert "load_diversion" not in labels(first)


async def test_serve_answers_for_the_replicas_it_follows(
    deployment: Deployment, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    engine = deployment.start("engine", "--port", "0", "--model", MODEL, "--events", LOCAL, "--replay", LOCAL)
    serve = deployment.start("serve", "--port", "0").ready["url"]
    where = {"events": engine.ready["events"], "replay": engine.ready["replay"], "url": engine.ready["url"]}
    body = {"replica": "engine-0", "engine": "vllm", "model": MODEL, "block_size": 16, **where}
    async with session.post(f"{serve}/v1/replicas", json=body) as response:
        assert response.status == 201
    tokens = list(range(64))
    prompt = {"model": MODEL, "prompt": tokens, "max_tokens": 1}
    await call(session, f"{engine.ready['url']}/v1/completions", prompt)
    asked = {"model": MODEL, "token_ids": [*tokens[:48], *[200] * 48]}
    async with asyncio.timeout(30):
        while True:
            answer = await call(session, f"{serve}/v1/match", asked)
            if answer["replicas"][0]["matched_blocks"] == 3:
                break
            await asyncio.sleep(0.02)
    path = tmp_path / "request.json"
    path.write_text(json.dumps(asked))
    (verdict,) = (await explain(path, "--router", serve))["verdicts"]
    assert (verdict["reason"], verdict["matched_blocks"], verdict["branches"]) == ("never_stored", 3, 1)


def test_every_walk_through_is_in_the_docs() -> None:
    text = DOCS.read_text("utf-8")
    for label in ("hash seed mismatch", "changing text", "chat template drift", "lost events", "load diversion"):
        assert f"{label}:" in text, f"what the tool prints of it: {label}"
