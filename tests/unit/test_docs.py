"""What the documents name exists: tests, files, links between pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_every_test_that_the_guarantees_name_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)

    assert len(named) > 30
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, f"{path} has no {name}"


def test_every_guarantee_of_the_readme_has_its_chapter() -> None:
    promised = re.findall(r"^\| (G\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = re.findall(r"^## (G\d+) ", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)

    assert promised == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
