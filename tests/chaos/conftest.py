"""What the fault tests share. Helper modules of this folder are importable: tests are no packages here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

RECORD = "METATRIE_RELIABILITY"
"""File that `make reliability` has the measured times written to, one JSON object a line."""


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Notes a row of the table in docs/reliability.md. Times in seconds; None where there is nothing to time."""

    def note(
        fault: str, *, injected: str, asserted: str, detect: float | None = None, converge: float | None = None
    ) -> None:
        if path := os.environ.get(RECORD):
            row = {
                "fault": fault,
                "injected": injected,
                "asserted": asserted,
                "detect_s": detect,
                "converge_s": converge,
                "test": request.node.nodeid.partition("[")[0],
            }
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return note
