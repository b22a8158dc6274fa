"""docs/performance.md and its plots, from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from .measure import Curve, Figure

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 34, 46
BEGIN: Final = "<!-- measured: begin; written by `metatrie bench --write`, do not edit -->"
END: Final = "<!-- measured: end -->"


class Results(msgspec.Struct, kw_only=True):
    """One run."""

    machine: str
    command: str
    sections: dict[str, list[Figure]] = {}
    curves: list[Curve] = []


def write_page(page: Path, results: Results) -> None:
    """Replace the measured part of a Markdown page, and draw the plots beside it in a folder of the page's name.

    Sections and curves of earlier runs that this one did not measure stay: each section names its own command.
    """
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    everything: dict[str, Results] = {}
    if kept.exists():
        everything = msgspec.json.decode(kept.read_bytes(), type=dict[str, Results])
    for title, figures in results.sections.items():
        everything[title] = Results(machine=results.machine, command=results.command, sections={title: figures})
    for curve in results.curves:
        if not any(curve.series.values()):
            continue  # stopped before its first point
        everything[curve.name] = Results(machine=results.machine, command=results.command, curves=[curve])
        (folder / f"{curve.name}.svg").write_text(plot(curve), "utf-8")
    kept.write_bytes(msgspec.json.encode(everything) + b"\n")
    text = page.read_text("utf-8") if page.exists() else f"# Performance\n\n{BEGIN}\n{END}\n"
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n".join([*_tables(everything), *_plots(everything, folder.name)])
    page.write_text(f"{before}{BEGIN}\n\n{body}\n{END}{after}", "utf-8")


def _tables(everything: dict[str, Results]) -> Iterable[str]:
    for title, run in everything.items():
        for figures in run.sections.values():
            yield f"### {title}\n"
            yield f"`{run.command}`, on {run.machine}.\n"
            targets = any(figure.target for figure in figures)
            yield "| what | per | measured |" + (" target |" if targets else "")
            yield "|---|---|---:|" + ("---|" if targets else "")
            for figure in figures:
                row = f"| {figure.what} | {figure.per} | {amount(figure)} |"
                yield row + (f" {figure.target} |" if targets else "")
            yield ""


def _plots(everything: dict[str, Results], folder: str) -> Iterable[str]:
    yield "### Curves\n"
    for run in everything.values():
        for curve in run.curves:
            yield f"![{curve.title}]({folder}/{curve.name}.svg)\n"
            yield f"`{run.command}`, on {run.machine}.\n"


def amount(figure: Figure) -> str:
    """A value with its unit, in as many digits as mean something."""
    value = figure.value
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {figure.unit}"


def plot(curve: Curve) -> str:
    """A line plot as one SVG. An axis may be logarithmic, and is where its values span a factor of thirty."""
    points = [point for series in curve.series.values() for point in series]
    x_of, x_ticks = _axis([x for x, _ in points], _LEFT, _WIDTH - _RIGHT, zero=False, log=curve.log_x)
    y_of, y_ticks = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _TOP, zero=True, log=True)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="11"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(curve.title)}</text>',
    ]
    for value in y_ticks:
        y = y_of(value)
        out.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
    for value in x_ticks:
        x = x_of(value)
        out.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_short(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(f'<text x="{middle}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(curve.x)}</text>')
    out.append(
        f'<text transform="translate(14 {(_TOP + _HEIGHT - _BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(curve.y)}</text>"
    )
    for i, (name, series) in enumerate(curve.series.items()):
        color = _COLORS[i % len(_COLORS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in series)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3" fill="{color}"/>' for x, y in series]
        at = _WIDTH - _RIGHT - 110 * (len(curve.series) - i)
        out.append(f'<text x="{at}" y="16" fill="{color}">{escape(name)}</text>')
    return "\n".join([*out, "</svg>\n"])


def _axis(
    values: Sequence[float], start: float, stop: float, *, zero: bool, log: bool
) -> tuple[Callable[[float], float], list[float]]:
    """Value → pixel between `start` and `stop`, and the values to label."""
    low, high = min(values), max(values)
    if log and low > 0 and high / low > 30:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [10.0**e for e in range(first, last + 1)]
        decades = max(1, last - first)
        return (lambda v: start + (math.log10(v) - first) / decades * (stop - start)), ticks
    low = 0.0 if zero else low
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-9)))
    if (high - low) / step < 4:
        step /= 2
    ticks = [low + step * i for i in range(int((high - low) / step) + 2)]
    span = max(ticks[-1] - low, 1e-9)
    return (lambda v: start + (v - low) / span * (stop - start)), ticks


def _short(value: float) -> str:
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
