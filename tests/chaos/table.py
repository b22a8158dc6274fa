"""Puts measured rows on docs/reliability.md: `python tests/chaos/table.py ROWS.jsonl docs/reliability.md`.

Rows come from the tests, which note them in the file METATRIE_RELIABILITY names; `make reliability` does both.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

MARK = "<!-- faults -->"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def render(rows: list[dict[str, Any]]) -> str:
    newest = {row["fault"]: row for row in rows}
    lines = ["| fault | how it is injected | what is asserted | noticed | right again |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['fault']} | {row['injected']} | {row['asserted']} | {seconds(row['detect_s'])} "
        f"| {seconds(row['converge_s'])} |"
        for row in newest.values()
    ]
    where = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    return "\n".join([f"Last run: {time.strftime('%Y-%m-%d')}, {len(newest)} rows, {where}.", "", *lines])


def main() -> None:
    rows, page = Path(sys.argv[1]), Path(sys.argv[2])
    text = render([json.loads(line) for line in rows.read_text("utf-8").splitlines()])
    before, _, rest = page.read_text("utf-8").partition(f"{MARK}\n")
    _, _, after = rest.partition(f"{MARK}\n")
    page.write_text(f"{before}{MARK}\n{text}\n{MARK}\n{after}", "utf-8")


if __name__ == "__main__":
    main()
