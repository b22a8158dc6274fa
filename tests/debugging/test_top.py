"""`metatrie top`, in a real terminal: keys, resizing, a thousand replicas; and its picture in the docs."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pyte
import pytest
from metatrie.indexer.http_api import make_app
from metatrie.indexer.memory import MemoryStore
from metatrie.indexer.router import Router, RouterConfig
from metatrie.proto.api import Decided, Feedback, Lookup, RouteRequest
from metatrie.proto.hashing import Chain, Namespace
from metatrie.proto.http import HttpServer
from metatrie.proto.index import (
    PAGE_SPAN,
    BlockWrite,
    Load,
    PageHead,
    ReplicaRef,
    ReplicaSpec,
    ReplicaStatus,
    TierMask,
)
from metatrie.scripts.top import Sort, View, columns_for, hot_prefixes, keys_of, seconds

REPLICAS = 1000
NAMESPACE = Namespace(model="m")
SHARED = list(range(16 * 40))


class Terminal:
    """A terminal of some size with a program in it, and what is on its screen."""

    def __init__(self, lines: int, columns: int, *argv: str) -> None:
        self._own, theirs = pty.openpty()
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._size(lines, columns)
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "metatrie", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**environment, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        os.set_blocking(self._own, False)

    def _size(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._own, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def resize(self, lines: int, columns: int) -> None:
        self._screen.resize(lines, columns)
        self._size(lines, columns)

    def press(self, keys: str) -> None:
        os.write(self._own, keys.encode())

    def read(self) -> list[str]:
        """The screen, line by line, after taking in what the program wrote."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self._own, 65536):
                self._stream.feed(data)
        return [line.rstrip() for line in self._screen.display]

    async def until(self, condition: Callable[[list[str]], bool], what: str) -> list[str]:
        deadline = time.monotonic() + 30
        while not condition(screen := self.read()):
            assert time.monotonic() < deadline, f"never: {what}\n" + "\n".join(screen)
            assert self.process.poll() is None, (self.process.stderr and self.process.stderr.read(), screen)
            await asyncio.sleep(0.02)
        return screen

    async def end(self) -> int:
        """Its exit status, once it has ended by itself."""
        deadline = time.monotonic() + 30
        while self.process.poll() is None:
            self.read()
            assert time.monotonic() < deadline, "it does not end"
            await asyncio.sleep(0.02)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=30)
        if self.process.stderr is not None:
            self.process.stderr.close()
        os.close(self._own)


async def fill(store: MemoryStore, replicas: int) -> None:
    """Replicas of every state; the first ones hold a shared prefix."""
    index = await store.open(NAMESPACE)
    keys = Chain(NAMESPACE.root, 16, SHARED).keys(40)
    for i in range(replicas):
        ref = ReplicaRef(f"replica-{i:04}")
        spec = ReplicaSpec(ref=ref, engine="vllm", url=f"http://10.0.{i // 250}.{i % 250}:8000")
        claim = await index.claim(spec, owner="o", lease_s=3600 if i % 100 else 0.001, activate=True)
        if i < 8:
            await index.write(
                claim.incarnation,
                1,
                [
                    BlockWrite(key, keys[d - 1] if d else None, PageHead(keys[d - d % PAGE_SPAN]), d, TierMask(1))
                    for d, key in enumerate(keys)
                ],
            )
        if i % 100:
            status = ReplicaStatus(
                state="degraded" if i % 50 == 7 else "exact",
                cause="gap" if i % 50 == 7 else "",
                blocks=i * 10,
                detached=i % 3,
                lag_s=i / 1000,
                load=Load(running=i % 17, waiting=i % 5, kv_usage=(i % 100) / 100),
            )
            await index.renew(ref, owner="o", incarnation=claim.incarnation, status=status, lease_s=3600)


@pytest.fixture
async def served() -> AsyncIterator[tuple[str, Router]]:
    """A router over a thousand replicas, with decisions behind it."""
    store = MemoryStore()
    await fill(store, REPLICAS)
    async with Router(store, RouterConfig(policy="affinity_only")) as router:
        for i in range(30):
            tokens = SHARED[: 16 * (20 if i % 3 else 40)] + [10_000 + i] * 64
            routed = await router.route(RouteRequest(model="m", token_ids=tokens))
            feedback = Feedback(reservation=routed.reservation, cached_tokens=routed.reusable_tokens, finished=True)
            await router.feedback(feedback)
        async with HttpServer(make_app(router)) as server:
            yield server.url, router


def rows_of(screen: list[str]) -> list[str]:
    return [line.split()[0] for line in screen if line.startswith("replica-")]


async def test_it_is_driven_by_keys_and_follows_the_terminals_size(served: tuple[str, Router]) -> None:
    url, _ = served
    terminal = Terminal(40, 140, "top", "--router", url, "--interval-s", "0.2")
    try:
        screen = await terminal.until(lambda s: "1,000 replicas" in s[0], "the fleet is listed")
        assert "10 stale" in screen[0]
        assert "20 degraded" in screen[0]
        assert "970 exact" in screen[0]
        assert rows_of(screen)[:10] == [f"replica-{i:04}/0" for i in range(0, 1000, 100)], "the worst first"
        assert any("degraded: gap" in line for line in screen)
        assert "hot prefixes" in "\n".join(screen)
        assert screen[-1].startswith("1-")
        assert "of 1000" in screen[-1]
        full = len(rows_of(screen))
        assert full > 20

        terminal.press("s")
        screen = await terminal.until(lambda s: "by replica" in s[-1], "sorted by name")
        assert rows_of(screen)[:3] == ["replica-0000/0", "replica-0001/0", "replica-0002/0"]
        terminal.press("r")
        screen = await terminal.until(lambda s: "reversed" in s[-1], "the other way round")
        assert rows_of(screen)[0] == "replica-0999/0"
        terminal.press("r")
        terminal.press("\x1b[6~")
        screen = await terminal.until(lambda s: f"{full + 1}-" in s[-1], "a page down")
        assert rows_of(screen)[0] == f"replica-{full:04}/0"
        terminal.press("G")
        screen = await terminal.until(lambda s: "-1000 of 1000" in s[-1], "the end")
        assert rows_of(screen)[-1] == "replica-0999/0"
        terminal.press("gj")
        await terminal.until(lambda s: s[-1].startswith("2-"), "the second line")

        terminal.press("/gap")
        await terminal.until(lambda s: "filter: gap" in s[-1], "a filter is typed")
        terminal.press("\r")
        screen = await terminal.until(lambda s: "of 20 (of 1000)" in s[-1], "the filter holds")
        assert all("degraded: gap" in line for line in screen if line.startswith("replica-"))
        terminal.press("\x1b")
        await terminal.until(lambda s: "of 1000 " in s[-1], "the filter is gone")

        terminal.resize(18, 110)
        screen = await terminal.until(
            lambda s: s[0].startswith("metatrie") and "of 1000" in s[-1], "it fits a smaller terminal"
        )
        assert 3 <= len(rows_of(screen)) < full
        terminal.resize(50, 160)
        screen = await terminal.until(lambda s: "of 1000" in s[-1] and len(rows_of(s)) > full, "and a larger one")

        terminal.press(" ")
        await terminal.until(lambda s: "PAUSED" in s[-1], "it holds still")
        terminal.press("q")
        assert await terminal.end() == 0
    finally:
        terminal.close()


async def test_the_terminal_is_left_as_it_was_found(served: tuple[str, Router]) -> None:
    url, _ = served
    terminal = Terminal(30, 120, "top", "--router", url, "--interval-s", "0.2")
    before = termios.tcgetattr(terminal._own)
    try:
        await terminal.until(lambda s: "1,000 replicas" in s[0], "the fleet is listed")
        assert termios.tcgetattr(terminal._own)[3] != before[3], "it reads single keys"
        terminal.process.terminate()
        assert await terminal.end() == 0
        assert termios.tcgetattr(terminal._own) == before
    finally:
        terminal.close()


async def test_a_router_that_is_away_is_said_to_be(served: tuple[str, Router]) -> None:
    url, _ = served
    terminal = Terminal(30, 120, "top", "--router", url, "--router", "http://127.0.0.1:9", "--interval-s", "0.2")
    try:
        screen = await terminal.until(lambda s: "1,000 replicas" in s[0], "the other one's fleet is listed")
        assert any("127.0.0.1:9" in line and "does not answer" in line for line in screen)
        terminal.press("q")
        assert await terminal.end() == 0
    finally:
        terminal.close()


async def test_without_a_terminal_it_prints_one_picture(served: tuple[str, Router]) -> None:
    url, router = served
    command = [sys.executable, "-m", "metatrie", "top", "--router", url, "--interval-s", "0.2"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "1,000 replicas" in lines[0]
    assert len(rows_of(lines)) == REPLICAS
    done = await asyncio.to_thread(subprocess.run, [*command, "--json"], capture_output=True, text=True, timeout=60)
    fleet = json.loads(done.stdout)
    assert (fleet["total"], len(fleet["rows"])) == (REPLICAS, REPLICAS)
    assert fleet["predicted"] == fleet["served"] > 0
    # A third of the prompts share 40 blocks, all of them the first 20.
    assert [(hot["prompts"], hot["tokens"]) for hot in fleet["hot"]] == [(30, 320), (10, 640)]
    served_by = {row["info"]["replica"]: row for row in fleet["rows"] if row["chosen"]}
    assert sum(row["chosen"] for row in served_by.values()) == 30 == len(router.decisions)
    assert all(0 < row["hit"] < 1 for row in served_by.values())


# Parts


def test_keys_are_told_apart() -> None:
    assert list(keys_of("q\x1b[6~j\x1b")) == ["q", "\x1b[6~", "j", "\x1b"]


def test_scrolling_stays_within_the_list() -> None:
    view = View()
    for key, offset in (("k", 0), ("j", 1), ("\x1b[6~", 11), ("G", 90), ("\x1b[6~", 90), ("\x1b[5~", 80), ("g", 0)):
        assert view.press(key, 10, 100)
        assert view.offset == offset, key
    assert view.press("j", 10, 3)
    assert view.offset == 0, "a list that fits does not scroll"
    assert not view.press("q", 10, 100)
    assert not View().press("\x03", 10, 100)


def test_a_filter_can_be_corrected_and_dropped() -> None:
    view = View()
    for key in "/abq\x7f":
        assert view.press(key, 10, 100)
    assert (view.filter, view.typing) == ("ab", True)
    view.press("\r", 10, 100)
    assert (view.filter, view.typing) == ("ab", False)
    view.press("\x1b", 10, 100)
    assert view.filter == ""


def test_every_column_can_be_sorted_by() -> None:
    view, seen = View(), []
    for _ in Sort:
        seen.append(view.sort)
        view.press("s", 10, 100)
    assert seen == list(Sort)
    assert view.sort == Sort.STATE


def test_a_narrow_terminal_keeps_the_most_telling_columns() -> None:
    titles = [[column.title for column in columns_for(width)] for width in (20, 60, 80, 200)]
    assert titles[0] == ["replica", "state"]
    assert titles[1] == ["replica", "state", "lag", "load"]
    assert "hit" in titles[2]
    assert "chosen" not in titles[2]
    assert len(titles[3]) == 11


def test_short_times() -> None:
    assert [seconds(s) for s in (0, 0.0034, 1.25, 300)] == ["0 ms", "3 ms", "1.2 s", "5 min"]


def test_a_prefix_all_go_on_from_alike_is_part_of_a_longer_one() -> None:
    def decided(tokens: list[int], replica: str) -> Decided:
        chain = Chain(NAMESPACE.root, 16, tokens)
        keys = b"".join(chain.keys(chain.blocks)).hex()
        lookup = Lookup(namespace=NAMESPACE, id=NAMESPACE.id, prompt_blocks=chain.blocks, keys=keys)
        return Decided(
            id="x", at=0.0, model="m", prompt_tokens=len(tokens), lookups=[lookup], index="ok", candidates=1,
            holdings=[], policy="p", reason="r", replica=replica, matched_blocks=0, reusable_tokens=0,
        )  # fmt: skip

    shared = list(range(64))
    found = hot_prefixes([decided([*shared, *[9] * 16], "a/0"), decided([*shared, *[8] * 16], "b/0")])
    assert [(hot.prompts, hot.tokens, hot.replicas) for hot in found] == [(2, 64, 2)]
    assert hot_prefixes([decided(shared, "a/0")]) == []


def test_its_picture_is_in_the_docs() -> None:
    picture = (Path(__file__).parents[2] / "docs" / "top.svg").read_text()
    assert picture.startswith("<svg")
    assert "replicas" in picture
    assert "http" not in picture.replace("http://www.w3.org", "").replace("http://127.0.0.1", "")
