"""What people look at: a table for the terminal, and one HTML file with plots, complete in itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined, select_autoescape
from rich.table import Table

from ...indexer.policies import DEFAULT_POLICY
from .study import Study
from .suite import QUEUED, Comparison, Result, Setting, compare, losses

BEGIN = "<!-- suite: begin; written by `metatrie simulate --suite --write`, do not edit -->"
END = "<!-- suite: end -->"
LEFT_OUT = (
    "reuse of generated tokens",
    "preemption and recomputation under memory pressure",
    "disaggregated prefill and decode",
    "slower tiers",
    "cancelled requests",
    "speculative decoding",
    "the router's own time",
)
"""What the model does not have."""

_COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")
_WIDTH, _HEIGHT = 640, 180


def table(results: Sequence[Result], title: str) -> Table:
    """One setting's policies, best mean first."""
    out = Table(title=title, title_justify="left")
    columns = (
        "policy",
        "hit",
        "reused",
        "TTFT mean",
        "p50",
        "p90",
        "p99",
        "latency",
        "met",
        "goodput/s",
        "skew",
        "evicted",
    )
    for name in columns:
        out.add_column(name, justify="left" if name == "policy" else "right")
    for result in sorted(results, key=lambda r: r.outcome.ttft.mean):
        o = result.outcome
        out.add_row(
            result.policy,
            f"{o.hit:.3f}",
            f"{o.reused_tokens / 1e6:.1f}M",
            *(f"{t:.3f}" for t in (o.ttft.mean, o.ttft.p50, o.ttft.p90, o.ttft.p99, o.latency.mean)),
            f"{o.met:.1%}",
            f"{o.goodput:.2f}",
            f"{o.work_skew:.3f}",
            f"{o.evicted_blocks:,}",
        )
    return out


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    out = Table(
        title="over all settings: geometric mean of mean TTFT, against the default policy", title_justify="left"
    )
    out.add_column("policy")
    out.add_column("settings", justify="right")
    out.add_column("relative", justify="right")
    for one in comparisons:
        out.add_row(one.policy, str(one.settings), f"{one.relative:.3f}")
    return out


def write_page(page: Path, results: Sequence[Result], studies: Mapping[Setting, Study]) -> None:
    """Replace the suite's part of a Markdown page: what was run, all policies in the mean, and where the default is
    beaten by more than 3 %, with the reason as far as that was studied."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(_markdown(results, studies)) + f"\n\n{END}{after}", "utf-8")


def _markdown(results: Sequence[Result], studies: Mapping[Setting, Study]) -> Iterator[str]:
    traces: dict[str, set[Setting]] = {}
    for result in results:
        name = str(result.setting).partition(f" {result.setting.cache} ")[0]
        traces.setdefault(name, set()).add(result.setting)
    yield (
        f"{sum(map(len, traces.values()))} settings: "
        + ", ".join(f"{name} ({len(found)})" for name, found in traces.items())
        + "."
    )
    yield "\n| policy | mean TTFT, geometric mean over settings, default = 1 |\n|---|---|"
    for one in compare(results):
        yield f"| `{one.policy}` | {one.relative:.3f} |"
    beaten = losses(results)
    yield f"\nAnother policy is more than 3 % better in {len(beaten)}:\n"
    yield (
        "| setting | best | its mean TTFT, default = 1 | arrivals 1 % closer / wider | default, queued "
        "| hit, default / best | p99, s | latency, s | default without price / copies / decode term / exemption "
        "| reason |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    found = {(r.setting, r.policy): r for r in results}
    for setting, best, ratio in beaten:
        ours, other = found[setting, DEFAULT_POLICY], found[setting, best]
        a, b = ours.outcome, other.outcome
        study = studies.get(setting)
        queued = found.get((setting, QUEUED))
        waiting = "–" if queued is None else f"{queued.outcome.ttft.mean / a.ttft.mean:.3f}"
        jittered, without, reason = "–", "–", "not studied"
        if study is not None:
            jittered, without = _ratios(study.jittered), _ratios(study.without)
            reason = study.reason(a, b)
        yield (
            f"| {setting} | `{best}` | {ratio:.3f} | {jittered} | {waiting} | {a.hit:.3f} / {b.hit:.3f} "
            f"| {a.ttft.p99:.1f} / {b.ttft.p99:.1f} | {a.latency.mean:.1f} / {b.latency.mean:.1f} "
            f"| {without} | {reason} |"
        )


def _ratios(ratios: Sequence[float]) -> str:
    return " / ".join(f"{ratio:.3f}" for ratio in ratios)


def html(results: Sequence[Result]) -> str:
    """The whole report. Plots are inline SVG; nothing is loaded from anywhere."""
    environment = Environment(
        autoescape=select_autoescape(default=True), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string((files(__package__) / "report.html.jinja").read_text("utf-8"))
    by_setting: dict[Setting, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, []).append(result)
    sections = [
        {
            "setting": str(setting),
            "anchor": f"s{number}",
            "ideal": rows[0].ideal,
            "rows": sorted(rows, key=lambda r: r.outcome.ttft.mean),
            "bars": _bars(rows),
            "plots": [
                _lines("mean TTFT over time, s", rows, "ttft_mean_s"),
                _lines("hit ratio over time", rows, "hit"),
                _lines("skew of prefill work over time", rows, "work_skew"),
            ],
        }
        for number, (setting, rows) in enumerate(by_setting.items())
    ]
    return template.render(
        sections=sections,
        comparisons=compare(results),
        losses=[(str(setting), best, ratio) for setting, best, ratio in losses(results)],
        left_out=LEFT_OUT,
    )


def _shown(rows: Sequence[Result]) -> list[Result]:
    """The best few: more lines than colours cannot be told apart."""
    return sorted(rows, key=lambda r: r.outcome.ttft.mean)[: len(_COLORS)]


def _bars(rows: Sequence[Result]) -> dict[str, object]:
    """p50, p99 and mean TTFT as bars, cut at 8 times the best p99."""
    ranked = sorted(rows, key=lambda r: r.outcome.ttft.mean)
    top = min(max(r.outcome.ttft.p99 for r in ranked), 8 * min(r.outcome.ttft.p99 for r in ranked)) or 1.0
    return {
        "height": 18 * len(ranked) + 8,
        "rows": [
            {
                "y": 18 * i + 4,
                "name": r.policy,
                "p99": min(1.0, r.outcome.ttft.p99 / top) * 420,
                "mean": min(1.0, r.outcome.ttft.mean / top) * 420,
                "label": f"{r.outcome.ttft.mean:.2f} / {r.outcome.ttft.p99:.2f} s",
            }
            for i, r in enumerate(ranked)
        ],
    }


def _lines(title: str, rows: Sequence[Result], field: str) -> dict[str, object]:
    shown = _shown(rows)
    series = [[(w.at_s, float(getattr(w, field))) for w in r.outcome.windows] for r in shown]
    last = max(x for s in series for x, _ in s) or 1.0
    # One overloaded policy must not flatten all others.
    typical = sorted(y for s in series for _, y in s)
    top = typical[int(0.98 * (len(typical) - 1))] * 1.1 or 1.0
    return {
        "title": title,
        "top": f"{top:.3g}",
        "last": f"{last:.0f} s",
        "width": _WIDTH,
        "height": _HEIGHT,
        "lines": [
            {
                "name": r.policy,
                "color": color,
                "points": " ".join(
                    f"{x / last * _WIDTH:.1f},{_HEIGHT - min(y, top) / top * _HEIGHT:.1f}" for x, y in s
                ),
            }
            for r, s, color in zip(shown, series, _COLORS, strict=False)
        ],
    }
