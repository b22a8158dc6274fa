"""What the documentation promises about the program: every metric explained, every link alive."""

from __future__ import annotations

import re
from pathlib import Path

import metatrie
import pytest

ROOT = Path(metatrie.__file__).parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    dead = [
        target
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not dead
