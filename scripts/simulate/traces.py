"""Traces: recorded requests, reduced to what a simulation needs: when, how long, and which blocks.

A block's key binds its whole prefix, as in the index, so equal keys mean reusable KV. Only full blocks count. Traces
name blocks in their own way: prefix-chained ids (Mooncake; per session in the kv-cache-tester format), or text, which
is cut into blocks of `TEXT_BLOCK` tokens of `CHARS_PER_TOKEN` characters and chained here.

Time. A trace without arrival times gets synthetic ones; every generator is seeded. The load of a run is set by
stretching the whole trace in time (fleet.py).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import accumulate, groupby, product, zip_longest
from pathlib import Path
from typing import Any

import msgspec

from ...proto.errors import ConfigError
from ...proto.hashing import BlockHash, BlockKey, Chain

CHARS_PER_TOKEN = 4
TEXT_BLOCK = 16
MOONCAKE_BLOCK = 512


class KnownChain(Chain):
    """A chain whose keys a trace gives."""

    __slots__ = ()

    def __init__(self, block_size: int, keys: list[BlockKey]) -> None:
        super().__init__(BlockHash(b""), block_size, ())
        self.blocks = len(keys)
        self._keys = keys


class Request(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request of a trace."""

    at: float
    """Seconds from the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    chain: Chain
    session: str | None = None
    turn: int = 0
    """Number in its session."""
    after: int | None = None
    """The turn it continues: it never arrives before that has finished, however slow the fleet."""


class Trace(msgspec.Struct, frozen=True):
    """Requests by arrival."""

    name: str
    block_size: int
    requests: list[Request]

    @property
    def span_s(self) -> float:
        return self.requests[-1].at - self.requests[0].at

    def first(self, requests: int) -> Trace:
        """Its beginning; 0: all of it."""
        return Trace(self.name, self.block_size, self.requests[:requests]) if requests else self


def _trace(name: str, block_size: int, requests: Iterable[Request]) -> Trace:
    ordered = sorted(requests, key=lambda r: r.at)
    if not ordered:
        raise ConfigError("trace", f"{name} has no requests", "check the file")
    return Trace(name, block_size, ordered)


# Formats


def mooncake(path: Path) -> Trace:
    """JSONL of timestamp (ms), input_length, output_length, hash_ids (512 tokens, global, prefix-chained).

    The last id may be of a partial block, which is left out. Recorded times are rounded (to 3 s in the conversation
    trace); requests of one recorded time are spread evenly until the next.
    """

    def requests() -> Iterator[Request]:
        rows = [msgspec.json.decode(line) for line in _lines(path)]
        for row, at in zip(rows, _spread([row["timestamp"] / 1e3 for row in rows]), strict=True):
            full = row["hash_ids"][: row["input_length"] // MOONCAKE_BLOCK]
            yield Request(
                at=at,
                prompt_tokens=max(1, row["input_length"]),
                output_tokens=max(1, row["output_length"]),
                chain=KnownChain(MOONCAKE_BLOCK, [_id_key(i) for i in full]),
            )

    return _trace(_stem(path), MOONCAKE_BLOCK, requests())


def _spread(times: list[float]) -> Iterator[float]:
    """Equal times, in order, spread evenly until the next time; the last group as wide as the one before it."""
    groups = [(at, len(list(group))) for at, group in groupby(times)]
    width = 0.0
    for (at, count), after in zip_longest(groups, groups[1:]):
        width = width if after is None else after[0] - at
        yield from (at + width * i / count for i in range(count))


def sessions(path: Path, *, copies: int = 2, hours: float = 1.0, pause_s: float = 60.0, seed: int = 1) -> Trace:
    """JSONL of one session a line: id, block_size, requests of t (s from its start), in, out, hash_ids (of this
    session), subagents nested.

    Sessions have no common clock: they start at random within `hours`. Pauses between two requests of a session are
    cut to `pause_s`, and what would come after the last start is left out. Every session is played `copies` times, as
    so many that share nothing: as recorded, there are too few to load a fleet without pressing their pauses to
    nothing.
    """
    rng = random.Random(seed)
    until = hours * 3600
    requests: list[Request] = []
    block_size = 0
    decoded = (msgspec.json.decode(line) for line in _lines(path))
    for session, copy in product(decoded, range(copies)):
        block_size = session["block_size"]
        name = f"{session['id']}/{copy}"
        tag = hashlib.blake2b(name.encode(), digest_size=4).digest()
        rows = sorted(_flat(session["requests"], 0.0), key=lambda row: row[0])
        at, before = rng.uniform(0, until), rows[0][0]
        keys: dict[int, BlockKey] = {}
        ends: list[tuple[float, int]] = []
        """Recorded end of each turn, and its number."""
        for turn, (t, row) in enumerate(rows):
            at += min(pause_s, t - before)
            before = t
            if at > until:
                break
            over = max((end for end in ends if end[0] <= t), default=None)
            ends.append((t + row.get("api_time", 0.0), turn))
            full = row["hash_ids"][: row["in"] // block_size]
            for i in full:
                if i not in keys:
                    keys[i] = BlockKey(tag + i.to_bytes(4, "big"))
            requests.append(
                Request(
                    at=at,
                    prompt_tokens=max(1, row["in"]),
                    output_tokens=max(1, row["out"]),
                    chain=KnownChain(block_size, [keys[i] for i in full]),
                    session=name,
                    turn=turn,
                    after=None if over is None else over[1],
                )
            )
    return _trace(_stem(path), block_size, requests)


def _flat(rows: list[dict[str, Any]], start: float) -> Iterator[tuple[float, dict[str, Any]]]:
    for row in rows:
        if row["type"] == "subagent":
            yield from _flat(row["requests"], start + row["t"])
        else:
            yield start + row["t"], row


def prompts(path: Path) -> Trace:
    """JSONL of timestamp (µs), input and output text, session_id."""
    blocks = _TextBlocks()

    def requests() -> Iterator[Request]:
        rows = [msgspec.json.decode(line) for line in _lines(path)]
        first = min(int(row["timestamp"]) for row in rows)
        turns: Counter[str] = Counter()
        for row in sorted(rows, key=lambda row: int(row["timestamp"])):
            text, session = row["input"], str(row["session_id"])
            turn = turns[session]
            turns[session] += 1
            yield Request(
                at=(int(row["timestamp"]) - first) / 1e6,
                prompt_tokens=max(1, len(text) // CHARS_PER_TOKEN),
                output_tokens=max(1, len(row["output"]) // CHARS_PER_TOKEN),
                chain=blocks.chain(text),
                session=session,
                turn=turn,
                after=turn - 1 if turn else None,
            )

    return _trace(_stem(path), TEXT_BLOCK, requests())


def trajectories(path: Path, *, copies: int = 5, pause_s: float = 10.0, seed: int = 1) -> Trace:
    """JSON list of {traj: chat messages}: every assistant message is one request for what comes before it.

    No times are recorded: conversations start as a Poisson process, one per `pause_s` on average, and pause that long
    on average, exponentially, between turns. The list is short, so it is played `copies` times, in random order;
    copies share the system prompt and nothing else.
    """
    rng = random.Random(seed)
    blocks = _TextBlocks()
    requests: list[Request] = []
    conversations = [(copy, one) for one in msgspec.json.decode(_bytes(path)) for copy in range(copies)]
    rng.shuffle(conversations)
    start = 0.0
    for number, (copy, one) in enumerate(conversations):
        start += rng.expovariate(1 / pause_s)
        at, text, turn = start, "", 0
        for message in one["traj"]:
            said = msgspec.json.encode(message).decode()
            if message["role"] != "system":
                said = f"{copy}{said}"
            if message["role"] == "assistant":
                requests.append(
                    Request(
                        at=at,
                        prompt_tokens=max(1, len(text) // CHARS_PER_TOKEN),
                        output_tokens=max(1, len(said) // CHARS_PER_TOKEN),
                        chain=blocks.chain(text),
                        session=str(number),
                        turn=turn,
                        after=turn - 1 if turn else None,
                    )
                )
                turn += 1
                at += rng.expovariate(1 / pause_s)
            text += said
    return _trace(_stem(path), TEXT_BLOCK, requests)


def lengths(path: Path) -> Trace:
    """CSV of TIMESTAMP, ContextTokens, GeneratedTokens: no two prompts share anything."""

    def requests() -> Iterator[Request]:
        rows = list(csv.DictReader(io.StringIO(_bytes(path).decode())))
        times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
        for number, (row, at) in enumerate(zip(rows, times, strict=True)):
            tokens = max(1, int(row["ContextTokens"]))
            keys = [BlockKey(number.to_bytes(4, "big") + i.to_bytes(4, "big")) for i in range(tokens // TEXT_BLOCK)]
            yield Request(
                at=at - times[0],
                prompt_tokens=tokens,
                output_tokens=max(1, int(row["GeneratedTokens"])),
                chain=KnownChain(TEXT_BLOCK, keys),
            )

    return _trace(_stem(path), TEXT_BLOCK, requests())


def synthetic(*, conversations: int = 200, turns: int = 5, shared_tokens: int = 2_000, seed: int = 1) -> Trace:
    """Conversations that share one system prompt; lengths and pauses exponential, arrivals Poisson."""
    rng = random.Random(seed)
    size = TEXT_BLOCK
    root = [BlockKey(b"\0\0\0\0" + i.to_bytes(4, "big")) for i in range(shared_tokens // size)]
    requests: list[Request] = []
    start = 0.0
    for number in range(1, conversations + 1):
        start += rng.expovariate(1.0)
        at, tokens = start, shared_tokens
        keys = list(root)
        for turn in range(turns):
            tokens += 1 + int(rng.expovariate(1 / 500))
            while (len(keys) + 1) * size <= tokens:
                keys.append(BlockKey(number.to_bytes(4, "big") + len(keys).to_bytes(4, "big")))
            output = 1 + int(rng.expovariate(1 / 200))
            requests.append(
                Request(
                    at=at,
                    prompt_tokens=tokens,
                    output_tokens=output,
                    chain=KnownChain(size, list(keys)),
                    session=str(number),
                    turn=turn,
                    after=turn - 1 if turn else None,
                )
            )
            tokens += output
            at += 1 + rng.expovariate(1 / 20)
    return _trace("synthetic", size, requests)


class _TextBlocks:
    """Chains texts, sharing the keys of equal prefixes."""

    def __init__(self) -> None:
        self._keys: dict[tuple[BlockKey, str], BlockKey] = {}

    def chain(self, text: str) -> Chain:
        width = TEXT_BLOCK * CHARS_PER_TOKEN
        parts = (text[i : i + width] for i in range(0, len(text) - width + 1, width))
        keys = list(accumulate(parts, self._next, initial=BlockKey(b"")))[1:]
        return KnownChain(TEXT_BLOCK, keys)

    def _next(self, parent: BlockKey, part: str) -> BlockKey:
        key = self._keys.get((parent, part))
        if key is None:
            key = self._keys[parent, part] = _id_key(len(self._keys))
        return key


def _id_key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "big"))


# Files

FORMATS: dict[str, Callable[[Path], Trace]] = {
    "mooncake": mooncake,
    "weka": sessions,
    "lmcache": prompts,
    "taubench": trajectories,
    "azure": lengths,
}
"""By how a file's name starts."""


def load(path: Path, kind: str | None = None) -> Trace:
    """Read a trace; the format is told from the file's name unless given. Raises ConfigError."""
    kind = kind or next((k for k in FORMATS if path.name.startswith(k)), None)
    if kind not in FORMATS:
        raise ConfigError("trace", f"{path.name}: unknown format", f"name it with --format: {', '.join(FORMATS)}")
    try:
        return FORMATS[kind](path)
    except (OSError, EOFError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "trace", f"{path.name} is not a {kind} trace ({type(error).__name__})", "check the file"
        ) from None


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]


def _bytes(path: Path) -> bytes:
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            return file.read()
    if path.suffix == ".zst":
        program = shutil.which("zstd")
        if program is None:
            raise ConfigError(
                "trace", f"{path.name} is compressed with zstd", "install the zstd command, or unpack it"
            )
        done = subprocess.run([program, "-dc", "--long=31", str(path)], capture_output=True, check=False)  # noqa: S603 - a fixed program and a path
        if done.returncode:
            raise ConfigError("trace", f"{path.name} cannot be unpacked", "check the file")
        return done.stdout
    return path.read_bytes()


def _lines(path: Path) -> list[bytes]:
    return [line for line in _bytes(path).split(b"\n") if line.strip()]
