"""What `metatrie bench` writes: measured parts of a page, kept apart from what people wrote in it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from metatrie.scripts.bench.measure import Curve, Figure
from metatrie.scripts.bench.report import BEGIN, END, Results, plot, write_page

GROWTH = Curve("growth", "A < B & C", "blocks", "µs", {"memory": [(32, 10), (8192, 4000)], "redis": [(32, 90)]})


def run(title: str, value: float, curves: list[Curve]) -> Results:
    figures = [Figure("match", "query", value, target="≤ 5")]
    return Results(
        machine="2 cores", command=f"metatrie bench --part {title}", sections={title: figures}, curves=curves
    )


def test_a_later_run_replaces_what_it_measured_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Ours\n\nbefore\n\n{BEGIN}\nold\n{END}\nafter\n")
    write_page(page, run("hot", 1.5, [GROWTH]))
    write_page(page, run("layouts", 7, []))
    write_page(page, run("hot", 1234.5, []))
    text = page.read_text()
    assert text.startswith("# Ours\n\nbefore\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert text.count("### hot\n") == text.count("### layouts\n") == 1
    assert "| match | query | 1,234 µs | ≤ 5 |" in text or "| match | query | 1,235 µs | ≤ 5 |" in text
    assert "| match | query | 7.00 µs | ≤ 5 |" in text
    assert "(performance/growth.svg)" in text
    assert (tmp_path / "performance" / "growth.svg").exists()


def test_a_plot_is_well_formed_and_draws_every_point() -> None:
    drawing = ElementTree.fromstring(plot(GROWTH))
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{name}circle")) == 3
    assert any(text.text == "A < B & C" for text in drawing.iter(f"{name}text"))
    for circle in drawing.findall(f"{name}circle"):
        assert 0 < float(circle.attrib["cx"]) < 640
        assert 0 < float(circle.attrib["cy"]) < 280


def test_a_flat_curve_can_be_drawn() -> None:
    assert "polyline" in plot(Curve("flat", "flat", "x", "y", {"a": [(1, 0), (2, 0)]}, log_x=False))
