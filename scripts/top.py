"""`metatrie top`: the fleet at a glance, refreshed in place.

Everything comes over HTTP from what a deployment runs anyway: the routers' lists, counters and recent decisions, and
the metrics of those consumers whose rows are on the screen. So its cost does not grow with the fleet: one list from a
router, and as many scrapes as the terminal has lines.

`Fleet` is what was last heard, `View` what the user wants to see of it, and `render` a function of the two and the
size of the terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

import click
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..proto.api import MAX_LISTED, Decided, DecisionList, ReplicaInfo, ReplicaList
from ..proto.hashing import KEY_BYTES
from .cli import common_options, run_process
from .explain import Asker, Unanswered

DECISIONS: Final = 256
"""Recent decisions read from each router, for hit ratios and hot prefixes."""
DEEP: Final = 512
"""Blocks of a prompt considered for hot prefixes."""
HOT: Final = 5
"""Prefixes shown."""
SCRAPED: Final = 100
"""Most consumers scraped in one round."""
AT_ONCE: Final = 16
"""Of those, at the same time."""
MIN_INTERVAL_S: Final = 0.2
PRINTED_WIDTH: Final = 130
PICTURED_LINES: Final = 40


# ---- what is known ------------------------------------------------------------------------------------------------


class Row(msgspec.Struct, kw_only=True):
    """One replica."""

    info: ReplicaInfo
    hit: float | None = None
    """Share of prompt tokens expected in its cache, over recent decisions for it; None without any."""
    chosen: int = 0
    """Recent decisions for it."""
    events_per_s: float | None = None
    """None until its consumer was scraped twice."""

    @property
    def name(self) -> str:
        return f"{self.info.replica}/{self.info.dp_rank}"


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix recent prompts share."""

    prompts: int
    tokens: int
    key: str
    """Of its last block."""
    replicas: int
    """To how many replicas these prompts went."""


class Fleet(msgspec.Struct, kw_only=True):
    """What was last heard of everything."""

    rows: list[Row] = []
    total: int = 0
    healthy: bool = True
    """The index can be asked."""
    decisions_per_s: float | None = None
    prompt_hit: float | None = None
    """Share of full prompt blocks found where requests went, since the round before."""
    predicted: int = 0
    served: int = 0
    """Cached tokens predicted and reported, over recent decisions with a report."""
    hot: list[HotPrefix] = []
    problems: list[str] = []


class Watcher:
    """Asks routers and consumers, round after round."""

    def __init__(self, asker: Asker, routers: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._asker, self._clock = asker, clock
        self._routers = [url.rstrip("/") for url in routers]
        self._counters: dict[str, tuple[float, Mapping[str, float]]] = {}

    async def look(self, visible: Callable[[Sequence[Row]], Sequence[Row]]) -> Fleet:
        """One round. visible: which of the rows are worth asking their consumers about."""
        fleet = Fleet()
        decisions: list[Decided] = []
        rates: list[tuple[float, float, float]] = []
        for router in self._routers:
            try:
                listed = await self._asker.get(f"{router}/v1/replicas?limit={MAX_LISTED}", ReplicaList)
                fleet.healthy = fleet.healthy and listed.index == "ok"
                if listed.total >= fleet.total:
                    # Routers over one store list the same fleet.
                    fleet.total = listed.total
                    fleet.rows = [Row(info=info) for info in listed.replicas]
                recent = await self._asker.get(f"{router}/v1/decisions?limit={DECISIONS}", DecisionList)
                decisions += recent.decisions
                rate = await self._rates(
                    f"{router}/metrics",
                    ("metatrie_router_decisions", "metatrie_router_matched_blocks", "metatrie_router_prompt_blocks"),
                )
                if rate is not None:
                    rates.append((rate[0], rate[1], rate[2]))
            except Unanswered as error:
                fleet.problems.append(str(error))
        _add_decisions(fleet, decisions)
        if rates:
            fleet.decisions_per_s = sum(rate[0] for rate in rates)
            asked = sum(rate[2] for rate in rates)
            fleet.prompt_hit = sum(rate[1] for rate in rates) / asked if asked else None
        await self._scrape([row for row in visible(fleet.rows) if row.info.consumer is not None][:SCRAPED])
        return fleet

    async def _scrape(self, rows: Sequence[Row]) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(row: Row) -> None:
            where = {"replica": row.info.replica, "dp_rank": str(row.info.dp_rank)}
            with contextlib.suppress(Unanswered):
                async with slots:
                    url = f"{row.info.consumer}/metrics"
                    rate = await self._rates(url, ("metatrie_stream_events",), where, key=f"{url} {row.name}")
                if rate is not None:
                    row.events_per_s = rate[0]

        await asyncio.gather(*map(one, rows))

    async def _rates(
        self, url: str, names: Sequence[str], where: Mapping[str, str] | None = None, *, key: str | None = None
    ) -> list[float] | None:
        """Growth of counters per second since this was last asked; None the first time, and after a restart."""
        now, values = self._clock(), _counters(await self._asker.text(url), names, where or {})
        before = self._counters.get(key or url)
        self._counters[key or url] = now, values
        if before is None or now <= before[0] or any(values[name] < before[1][name] for name in names):
            return None
        return [(values[name] - before[1][name]) / (now - before[0]) for name in names]


def _counters(text: str, names: Sequence[str], where: Mapping[str, str]) -> dict[str, float]:
    """Sums of counters over all of their series that carry these labels."""
    found = dict.fromkeys(names, 0.0)
    wanted = {f"{name}_total": name for name in names}
    lines = "\n".join(line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted)
    for family in text_string_to_metric_families(lines + "\n"):
        for sample in family.samples:
            name = wanted.get(sample.name)
            if name is not None and all(sample.labels.get(label) == value for label, value in where.items()):
                found[name] += sample.value
    return found


def _add_decisions(fleet: Fleet, decisions: Sequence[Decided]) -> None:
    prompt: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    chosen: Counter[str] = Counter()
    for decided in decisions:
        chosen[decided.replica] += 1
        prompt[decided.replica] += decided.prompt_tokens
        cached[decided.replica] += decided.reusable_tokens
        if decided.served_tokens is not None:
            fleet.predicted += decided.reusable_tokens
            fleet.served += decided.served_tokens
    for row in fleet.rows:
        row.chosen = chosen[row.name]
        if prompt[row.name]:
            row.hit = cached[row.name] / prompt[row.name]
    fleet.hot = hot_prefixes(decisions)


def hot_prefixes(decisions: Sequence[Decided]) -> list[HotPrefix]:
    """The prefixes by which most prompt blocks are shared, none of them a part of another in the list with as many
    prompts."""
    width = 2 * KEY_BYTES
    prompts: Counter[str] = Counter()
    places: dict[str, tuple[int, int]] = {}
    went: dict[str, set[str]] = {}
    longer: dict[str, int] = {}
    for decided in decisions:
        above = ""
        for lookup in decided.lookups[:1]:
            for depth in range(min(len(lookup.keys) // width, DEEP)):
                key = lookup.keys[depth * width : depth * width + width]
                prompts[key] += 1
                places[key] = depth + 1, lookup.namespace.block_size
                went.setdefault(key, set()).add(decided.replica)
                if above:
                    longer[above] = max(longer.get(above, 0), prompts[key])
                above = key
    # A prefix that all its prompts go on from in the same way is a part of a longer one.
    ends = [key for key, count in prompts.items() if count > 1 and longer.get(key, 0) < count]
    ends.sort(key=lambda key: (-prompts[key] * places[key][0], key))
    return [
        HotPrefix(prompts=prompts[key], tokens=places[key][0] * places[key][1], key=key, replicas=len(went[key]))
        for key in ends[:HOT]
    ]


# ---- what is shown ------------------------------------------------------------------------------------------------


def _load(row: Row) -> float:
    load = row.info.load
    return float(max((load.running or 0) + (load.waiting or 0), load.reserved_requests))


_STATES: Final = {"stale": 0, "degraded": 1, "exact": 2}


class Sort(Enum):
    """Columns one can sort by; worst, or most, first."""

    STATE = "state"
    NAME = "replica"
    LOAD = "load"
    BLOCKS = "blocks"
    LAG = "lag"
    HIT = "hit"
    EVENTS = "events/s"

    def of(self, row: Row) -> tuple[float, str]:
        match self:
            case Sort.STATE:
                value: float = _STATES[row.info.state]
            case Sort.NAME:
                value = 0.0
            case Sort.LOAD:
                value = -_load(row)
            case Sort.BLOCKS:
                value = -row.info.blocks
            case Sort.LAG:
                value = -row.info.lag_s
            case Sort.HIT:
                value = -(row.hit or 0.0)
            case Sort.EVENTS:
                value = -(row.events_per_s or 0.0)
        return value, row.name


class View(msgspec.Struct, kw_only=True):
    """What the user wants to see."""

    sort: Sort = Sort.STATE
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    """The filter is being typed."""
    offset: int = 0
    paused: bool = False

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Filtered and sorted. A filter is part of a replica's name, state, cause or model."""
        wanted = self.filter.lower()
        found = [
            row for row in rows if wanted in f"{row.name} {row.info.state} {row.info.cause} {row.info.model}".lower()
        ]
        found.sort(key=self.sort.of, reverse=self.reverse)
        return found

    def press(self, key: str, page: int, total: int) -> bool:
        """One key; False: leave. page: rows on the screen. total: rows there are."""
        if self.typing:
            if key in ("\r", "\n"):
                self.typing = False
            elif key == "\x1b":
                self.typing, self.filter = False, ""
            elif key in ("\x7f", "\b"):
                self.filter = self.filter[:-1]
            elif key.isprintable() and len(key) == 1:
                self.filter += key
            self.offset = 0
            return True
        match key:
            case "q" | "\x03":
                return False
            case "s":
                order = list(Sort)
                self.sort = order[(order.index(self.sort) + 1) % len(order)]
                self.offset = 0
            case "r":
                self.reverse = not self.reverse
            case "/":
                self.typing, self.filter = True, ""
            case " ":
                self.paused = not self.paused
            case "\x1b":
                self.filter = ""
            case _:
                step = {"j": 1, "\x1b[B": 1, "k": -1, "\x1b[A": -1, "\x1b[6~": page, "\x1b[5~": -page}.get(key, 0)
                step = {"g": -total, "\x1b[H": -total, "G": total, "\x1b[F": total}.get(key, step)
                self.offset += step
        self.offset = max(0, min(self.offset, total - page))
        return True


_KEYS: Final = "q quit  s sort  r reverse  / filter  j k PgUp PgDn scroll  space pause"
_COLOURS: Final = {"exact": "green", "degraded": "yellow", "stale": "red"}


def table_height(fleet: Fleet, height: int) -> int:
    """Rows the table has room for."""
    return max(1, height - 5 - (len(fleet.hot) + 1 if fleet.hot else 0) - len(fleet.problems[:2]))


def render(fleet: Fleet, view: View, width: int, height: int) -> RenderableType:
    """The whole screen, exactly `height` lines of at most `width` columns."""
    rows, room = view.rows(fleet.rows), table_height(fleet, height)
    offset = max(0, min(view.offset, len(rows) - room))
    shown = rows[offset : offset + room]
    lines: list[RenderableType] = [_line(text) for text in _head(fleet)]
    lines += [Text(problem, "red", no_wrap=True, overflow="ellipsis") for problem in fleet.problems[:2]]
    lines.append(_table(shown, view, width))
    lines += [Text("")] * (room - len(shown))
    if fleet.hot:
        lines.append(_line("hot prefixes: prompts, shared tokens, replicas they went to, key of the last block"))
        for hot in fleet.hot:
            lines.append(_line(f"  {hot.prompts:>5}  {hot.tokens:>7,} tokens  {hot.replicas:>4} replicas  {hot.key}"))
    where = f"{offset + 1 if shown else 0}-{offset + len(shown)} of {len(rows)}"
    if len(rows) != len(fleet.rows):
        where += f" (of {len(fleet.rows)})"
    if view.typing:
        foot = f"filter: {view.filter}▏  Enter keeps it, Esc drops it"
    else:
        foot = f"{where}  by {view.sort.value}{' reversed' if view.reverse else ''}"
        foot += f"  filter: {view.filter}" if view.filter else ""
        foot += "  PAUSED" if view.paused else ""
        foot += f"  {_KEYS}"
    lines.append(Text(foot, "reverse", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def picture(fleet: Fleet, width: int, height: int) -> str:
    """The screen as an SVG document that needs nothing from elsewhere."""
    console = Console(record=True, file=io.StringIO(), width=width, height=height)
    console.print(render(fleet, View(), width, height))
    drawn = console.export_svg(title="metatrie top")
    # Rich names a font on the web; any fixed-width font will do.
    drawn = re.sub(r"<!--.*?-->\n?", "", drawn, flags=re.DOTALL)
    return re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _head(fleet: Fleet) -> Iterator[str]:
    states = Counter(row.info.state for row in fleet.rows)
    told = ", ".join(f"{states[state]} {state}" for state in ("exact", "degraded", "stale") if states[state])
    yield (
        f"metatrie  {fleet.total:,} replicas: {told or 'none'}"
        f"   index {'ok' if fleet.healthy else 'UNAVAILABLE'}   {sum(row.info.blocks for row in fleet.rows):,} blocks"
    )
    rate = "–" if fleet.decisions_per_s is None else f"{fleet.decisions_per_s:,.1f}"
    hit = "–" if fleet.prompt_hit is None else f"{fleet.prompt_hit:.1%}"
    served = f"{fleet.served / fleet.predicted:.1%}" if fleet.predicted else "–"
    yield f"{rate} decisions/s   prompt blocks found {hit}   served of predicted {served}"
    yield ""


def _table(rows: Sequence[Row], view: View, width: int) -> Table:
    columns = columns_for(width)
    table = Table(box=None, pad_edge=False, padding=(0, 1), width=width, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column.title + ("▾" if column.title == view.sort.value else ""),
            no_wrap=True,
            overflow="ellipsis",
            width=None if column is _NAME else column.width,
            ratio=1 if column is _NAME else None,
            justify="left" if column in (_NAME, _STATE) else "right",
        )
    for row in rows:
        table.add_row(*(Text(column.cell(row), column.colour(row)) for column in columns))
    return table


class Column(msgspec.Struct, frozen=True):
    """One column of the table."""

    title: str
    width: int
    cell: Callable[[Row], str]
    colour: Callable[[Row], str] = lambda row: ""


def _state(row: Row) -> str:
    return f"{row.info.state}: {row.info.cause}" if row.info.cause else row.info.state


_NAME: Final = Column("replica", 18, lambda row: row.name)
_STATE: Final = Column("state", 20, _state, lambda row: _COLOURS[row.info.state])
_COLUMNS: Final = (
    _NAME,
    _STATE,
    Column("blocks", 10, lambda row: f"{row.info.blocks:,}"),
    Column("detached", 8, lambda row: f"{row.info.detached:,}" if row.info.detached else ""),
    Column("lag", 7, lambda row: seconds(row.info.lag_s)),
    Column("events/s", 8, lambda row: "" if row.events_per_s is None else f"{row.events_per_s:,.0f}"),
    Column("hit", 6, lambda row: "" if row.hit is None else f"{row.hit:.0%}"),
    Column("chosen", 6, lambda row: f"{row.chosen}" if row.chosen else ""),
    Column("load", 5, lambda row: f"{_load(row):.0f}"),
    Column("kv", 5, lambda row: "" if (used := row.info.load.kv_usage) is None else f"{used:.0%}"),
    Column("queued tok", 10, lambda row: f"{n:,}" if (n := row.info.load.reserved_tokens) else ""),
)
_LAST_TO_GO: Final = ("replica", "state", "load", "lag", "hit", "blocks", "events/s", "kv", "queued tok", "detached")


def columns_for(width: int) -> list[Column]:
    """Those that fit, the least telling left out first; the replica's name and state always stay."""
    ranked = sorted(
        _COLUMNS, key=lambda c: _LAST_TO_GO.index(c.title) if c.title in _LAST_TO_GO else len(_LAST_TO_GO)
    )
    kept: list[Column] = []
    left = width
    for column in ranked:
        left -= column.width + 2
        if left < 0 and len(kept) > 1:
            break
        kept.append(column)
    return [column for column in _COLUMNS if column in kept]


def seconds(value: float) -> str:
    """Short: 3 ms, 1.2 s, 5 min."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f} s" if value < 100 else f"{value / 60:.0f} min"


# ---- the terminal -------------------------------------------------------------------------------------------------

_ESCAPES: Final = ("\x1b[A", "\x1b[B", "\x1b[H", "\x1b[F", "\x1b[5~", "\x1b[6~")


def keys_of(text: str) -> Iterator[str]:
    """Keystrokes in what a terminal sent: single characters, and the escape sequences of keys we know."""
    at = 0
    while at < len(text):
        known = next((escape for escape in _ESCAPES if text.startswith(escape, at)), text[at])
        yield known
        at += len(known)


@contextlib.contextmanager
def keyboard(pressed: Callable[[str], None]) -> Iterator[None]:
    """Hand every keystroke to `pressed`, unechoed and at once, while open. Does nothing without a terminal."""
    stream = sys.stdin
    if not stream.isatty():
        yield
        return
    descriptor, loop = stream.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        for key in keys_of(os.read(descriptor, 1024).decode("utf-8", "replace")):
            pressed(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def watch(watcher: Watcher, console: Console, interval_s: float, stop: asyncio.Event) -> None:
    """Until `q` or `stop`."""
    view, fleet = View(), Fleet()
    changed = asyncio.Event()

    def page() -> int:
        return table_height(fleet, console.height)

    def pressed(key: str) -> None:
        if not view.press(key, page(), len(view.rows(fleet.rows))):
            stop.set()
        changed.set()

    def visible(rows: Sequence[Row]) -> Sequence[Row]:
        return view.rows(rows)[view.offset : view.offset + page()]

    async def refresh() -> None:
        nonlocal fleet
        while True:
            if not view.paused:
                fleet = await watcher.look(visible)
                changed.set()
            await asyncio.sleep(interval_s)

    async def draw() -> None:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            size = console.size
            while True:
                live.update(render(fleet, view, console.width, console.height), refresh=True)
                # A new size sends no event everywhere, so it is looked for.
                while not changed.is_set() and console.size == size:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await changed.wait()
                size = console.size
                changed.clear()

    with keyboard(pressed):
        tasks = [asyncio.create_task(work) for work in (refresh(), draw(), stop.wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@click.command("top")
@common_options
@click.option(
    "--router",
    "routers",
    multiple=True,
    default=("http://127.0.0.1:8080",),
    metavar="URL",
    help="A router; several over one store add up.",
)
@click.option(
    "--interval-s", type=click.FloatRange(MIN_INTERVAL_S, 3600), default=2.0, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Print one picture and exit; the default without a terminal.")
@click.option("--svg", type=click.Path(path_type=Path), help="Save one picture as SVG, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print what is known as JSON, once, and exit.")
def command(
    log_level: str, routers: tuple[str, ...], interval_s: float, once: bool, svg: Path | None, as_json: bool
) -> None:
    """Replicas, state, lag, hit ratio, load, event rates and hot prefixes, live in the terminal.

    Keys: q quit, s next sort column, r reverse, / filter, j k arrows PgUp PgDn scroll, space pause.
    """

    async def run(stop: asyncio.Event) -> None:
        async with Asker() as asker:
            watcher = Watcher(asker, routers)
            console = Console()
            if sys.stdout.isatty() and not (once or as_json or svg):
                await watch(watcher, console, interval_s, stop)
                return
            await watcher.look(lambda rows: rows)
            await asyncio.sleep(interval_s)  # rates need two looks
            fleet = await watcher.look(lambda rows: rows)
            if as_json:
                print(msgspec.json.format(msgspec.json.encode(fleet)).decode())
                return
            width = console.width if sys.stdout.isatty() else PRINTED_WIDTH
            height = len(fleet.rows) + len(fleet.hot) + len(fleet.problems) + 6
            if svg is None:
                Console(width=width).print(render(fleet, View(), width, height))
                return
            svg.write_text(picture(fleet, PRINTED_WIDTH, min(height, PICTURED_LINES)), "utf-8")  # noqa: ASYNC240 - once, at the end

    run_process(log_level, run)
