"""Many runs, the report, and the command."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from metatrie.__main__ import main
from metatrie.proto.errors import ConfigError
from metatrie.scripts.simulate import report, study, suite
from metatrie.scripts.simulate.fleet import FleetConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One small trace."""
    rows = [
        {
            "timestamp": i * 100,
            "input_length": 2048,
            "output_length": 20,
            "hash_ids": [i % 7, 7 + i % 14, 50 + i, 999],
        }
        for i in range(120)
    ]
    (tmp_path / "mooncake_small.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


SETTINGS = suite.settings(["mooncake_small.jsonl"], ["ample", "very_tight"], [2], [0.5])
MORE = suite.settings(["mooncake_small.jsonl"], ["ample"], [1, 2], [0.5, 0.9], requests=80)
ENTRIES = ("bound", "priced_delay", "round_robin")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_suite_resumes_and_agrees_with_itself(folder: Path, jobs: int) -> None:
    results = folder / "results.jsonl"
    ran: list[str] = []

    def run(entries: tuple[str, ...], path: Path = results) -> list[suite.Result]:
        wanted = dict.fromkeys(SETTINGS, entries)
        return suite.run(folder, path, wanted, jobs=jobs, progress=lambda r: ran.append(r.policy))

    run(ENTRIES[:2])
    assert sorted(ran) == ["bound", "bound", "priced_delay", "priced_delay"]
    with results.open("ab") as file:
        file.write(b'{"cut short')
    whole = run(ENTRIES)
    assert ran[4:] == ["round_robin", "round_robin"]
    assert [(r.setting, r.policy) for r in whole] == [(s, e) for s in SETTINGS for e in ENTRIES]
    assert suite.read(results) == sorted(suite.read(results), key=lambda r: whole.index(r)) or len(whole) == 6
    assert run(ENTRIES, folder / "again.jsonl") == whole


def test_a_suite_agrees_whoever_runs_it(folder: Path) -> None:
    def run(path: str, jobs: int, settings: list[suite.Setting]) -> list[suite.Result]:
        wanted = dict.fromkeys(settings, ENTRIES[1:2])
        return suite.run(folder, folder / path, wanted, jobs=jobs, progress=lambda r: None)

    alone = run("a", 1, MORE)
    assert run("b", 2, MORE) == alone
    run("c", 1, MORE[:3])
    assert run("c", 1, MORE) == alone
    assert {r.outcome.requests for r in alone} == {72}
    assert suite.complete(suite.read(folder / "c"), ENTRIES[1:2]) == alone
    assert suite.complete(alone, ENTRIES) == []


def test_what_the_suite_found_is_written_into_a_page(folder: Path) -> None:
    results = folder / "r.jsonl"
    suite.run(folder, results, dict.fromkeys(SETTINGS, ENTRIES), jobs=1, progress=lambda r: None)
    page = folder / "page.md"
    page.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    for _ in range(2):
        policies = [flag for entry in ENTRIES for flag in ("--policy", entry)]
        invoke("--recorded", "--results", str(results), "--write", str(page), *policies)
        text = page.read_text()
        assert text.startswith("before\n")
        assert text.endswith("\nafter\n")
        assert "old" not in text
        assert "2 settings: mooncake_small (2)." in text
        assert "| `priced_delay` | 1.000 |" in text


def faster(result: suite.Result, factor: float, policy: str | None = None) -> suite.Result:
    """The same run with another mean."""
    ttft = msgspec.structs.replace(result.outcome.ttft, mean=result.outcome.ttft.mean * factor)
    outcome = msgspec.structs.replace(result.outcome, ttft=ttft)
    return msgspec.structs.replace(result, outcome=outcome, policy=policy or result.policy)


def test_where_the_default_is_beaten_the_page_says_why(folder: Path) -> None:
    """Real runs of the study, below a winner made up."""
    results = folder / "r.jsonl"
    ours = suite.run(folder, results, {SETTINGS[0]: ENTRIES[1:2]}, jobs=1, progress=lambda r: None)[0]
    with results.open("ab") as file:
        file.write(msgspec.json.encode(faster(ours, 0.8, "round_robin")) + b"\n")
    page = folder / "page.md"
    page.write_text(report.BEGIN + report.END)
    two = ("--policy", "priced_delay", "--policy", "round_robin", "--results", str(results), "--write", str(page))
    invoke("--recorded", *two)
    assert "more than 3 % better in 1:" in page.read_text()
    assert "| `round_robin` | 0.800 | – |" in page.read_text()
    assert "not studied" in page.read_text()
    invoke("--study", "--traces", str(folder), "--jobs", "1", *two)
    (setting, found), *none = study.studies([(SETTINGS[0], "round_robin", 0.8)], suite.read(results)).items()
    assert not none
    assert setting == SETTINGS[0]
    assert (len(found.jittered), len(found.without)) == (2, len(study.PARTS))
    outcomes = {r.policy: r.outcome for r in suite.read(results)}
    reason = found.reason(outcomes["priced_delay"], outcomes["round_robin"])
    assert f"| {reason} |" in page.read_text()
    runs = len(suite.read(results))
    assert runs == 2 + len(study.entries("round_robin"))
    invoke("--study", "--traces", str(folder), "--jobs", "1", *two)
    assert len(suite.read(results)) == runs


@pytest.mark.parametrize(
    ("jittered", "without", "reason"),
    [
        ((0.8, 0.98), (0.7, 1, 1, 1), "chance"),
        ((0.8, 0.8), (0.7, 1, 0.95, 1), "the price: it keeps"),
        ((0.8, 0.8), (1.2, 0.9, 0.95, 1), "the price is too low"),
        ((0.8, 0.8), (1.2, 0.95, 0.9, 1), "the decode term"),
        ((0.8, 0.8), (1.2, 0.95, 1, 0.85), "the exemption"),
        ((0.8, 0.8), (1.2, 0.95, 0.91, 1), "no part of the default"),
    ],
)
def test_a_study_names_the_part_that_closes_half_of_the_gap(
    folder: Path, jittered: tuple[float, ...], without: tuple[float, ...], reason: str
) -> None:
    wanted = {SETTINGS[0]: ENTRIES[1:2]}
    ours = suite.run(folder, folder / "r", wanted, jobs=1, progress=lambda r: None)[0].outcome
    assert study.Study(SETTINGS[0], "hybrid", 0.8, jittered, without).reason(ours, ours).startswith(reason)


@pytest.mark.parametrize(
    ("hit", "p99", "latency", "reason"),
    [
        (0.1, 2, 1, "it lets some conversations wait far longer"),
        (0.1, 1, 1, "it keeps more in the caches"),
        (0, 1, 1.1, "it trades latency"),
        (0, 1, 0.9, "no part"),
    ],
)
def test_what_no_part_explains_is_told_by_what_the_runs_show(
    folder: Path, hit: float, p99: float, latency: float, reason: str
) -> None:
    wanted = {SETTINGS[0]: ENTRIES[1:2]}
    ours = suite.run(folder, folder / "r", wanted, jobs=1, progress=lambda r: None)[0].outcome
    replace = msgspec.structs.replace
    other = replace(
        ours,
        hit=ours.hit + hit,
        ttft=replace(ours.ttft, p99=ours.ttft.p99 * p99),
        latency=replace(ours.latency, mean=ours.latency.mean * latency),
    )
    found = study.Study(SETTINGS[0], "hybrid", 0.8, (0.8, 0.8), (1.0, 1.0, 1.0, 1.0))
    assert found.reason(ours, other).startswith(reason)


def test_entries_have_parameters_and_arrival_times_of_their_own() -> None:
    config = FleetConfig(stretch=2.0)
    name = suite.entry("hybrid", stretched=0.5, max_skew=4)
    assert name == "hybrid;max_skew=4@0.5"
    one = suite.entry_config(name, config)
    assert (one.policy, one.parameters, one.stretch) == ("hybrid", {"max_skew": 4}, 1.0)
    assert suite.entry_config("hybrid", config) == FleetConfig(stretch=2.0, policy="hybrid")
    for part in study.PARTS:
        assert suite.entry_config(part.without, config).parameters


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl"):
        suite.read(tmp_path / "r.jsonl")


def test_comparison_and_losses_are_relative_to_the_default(folder: Path) -> None:
    results = suite.run(folder, folder / "r", dict.fromkeys(SETTINGS, ENTRIES), jobs=1, progress=lambda r: None)
    compared = {c.policy: c for c in suite.compare(results)}
    assert compared.keys() == {"priced_delay", "round_robin"}
    assert compared["priced_delay"].relative == 1
    assert compared["round_robin"].settings == 2
    assert all(policy != "bound" and ratio < 0.97 for _, policy, ratio in suite.losses(results))


def invoke(*argv: str) -> Any:
    done = CliRunner().invoke(main, ["simulate", *argv])
    assert done.exit_code == 0, done.output
    return done


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_the_command_runs_a_suite_into_a_report_complete_in_itself(folder: Path) -> None:
    html = folder / "report.html"
    done = invoke(
        *("--suite", "--traces", str(folder), "--results", str(folder / "r.jsonl"), "--jobs", "1"),
        *("--html", str(html), "--json", "--only", "none_such"),
    )
    assert json.loads(done.stdout) == []
    done = invoke(str(folder / "mooncake_small.jsonl"), "--replicas", "2", "--html", str(html), "--json")
    found = json.loads(done.stdout)
    assert {r["policy"] for r in found} >= {"bound", "priced_delay", "sticky", "round_robin"}
    assert {"hit", "ttft", "latency", "goodput", "work_skew", "evicted_blocks", "windows"} <= found[0][
        "outcome"
    ].keys()
    tags = _Tags()
    tags.feed(html.read_text())
    assert sum(tag == "polyline" for tag, _ in tags.seen) >= 3 * min(8, len(found))
    assert not [a for _, a in tags.seen if "src" in a or str(a.get("href", "#"))[0] != "#"]
    assert not re.search(r"https?://", html.read_text())


def test_the_command_prints_the_examples() -> None:
    said = invoke("--example").output
    for figure in ("0.7596", "3,904", "1,296", "13,800", "10,000", "45 hits", "unsalted True, salted False"):
        assert figure in said


def test_parameters_are_for_one_policy(folder: Path) -> None:
    trace = str(folder / "mooncake_small.jsonl")
    done = CliRunner().invoke(main, ["simulate", trace, "--set", "max_skew=1"])
    assert done.exit_code == 1
    assert "one policy" in done.output
    found = json.loads(invoke(trace, "--policy", "hybrid", "--set", "max_skew=1", "--json").stdout)
    assert [r["policy"] for r in found] == ["hybrid"]
