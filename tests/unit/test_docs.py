"""What the documents name exists: tests, files, links between pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from rowlock.settings import Settings
from rowlock_operator.conditions import Type
from rowlock_operator.refusal import Reason
from tests.support.postgres import Database

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", ["guarantees.md", "failure-modes.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)

    assert named
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, f"{path} has no {name}"


def test_every_failure_mode_says_all_and_names_its_test() -> None:
    text = (ROOT / "docs" / "failure-modes.md").read_text()
    for section in text.split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        head, _rule, *rows = [line for line in lines if line.startswith("|")]
        columns = head.count("|")
        assert rows, f"{heading}: no row"
        for row in rows:
            cells = [cell.strip() for cell in row.strip("|").split("|")]
            assert row.count("|") == columns, f"{heading}: {row}"
            assert all(cells), f"{heading}: {row}"
            if "Shown by" in head:
                assert "`tests/" in cells[-1], f"{heading}: names no test: {row}"


def test_every_guarantee_of_the_readme_has_its_chapter() -> None:
    promised = re.findall(r"^\| (G\d+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    shown = re.findall(r"^## (G\d+) ", (ROOT / "docs" / "guarantees.md").read_text(), re.MULTILINE)

    assert promised == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_settings_are_described_with_their_defaults() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    rows = re.findall(r"^\| `ROWLOCK_(\w+)` \|.*\| ([\w.` ]+) \|$", text, re.MULTILINE)
    defaults = Settings()

    assert len(rows) > 8
    for name, default in rows:
        value = getattr(defaults, name.lower())
        assert _told(value) == default, name


def test_every_variable_that_tests_read_is_told_and_sizes_are_listed_with_what_is_usual() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = dict(re.findall(r"^\| `(ROWLOCK_\w+)` \| (\d+) \| \d+ \|", text, re.MULTILINE))
    source = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")))
    read = set(re.findall(r'environ(?:\.get\(|\[)\s*"(ROWLOCK_\w+)"', source))
    # Tests of the cluster and of pictures have theirs from the Makefile, pods have the settings of nodes.
    elsewhere = {*re.findall(r"ROWLOCK_\w+", (ROOT / "Makefile").read_text()), "ROWLOCK_DSN"}
    number = (
        r'(?:int|float)\(\s*(?:os\.)?environ(?:\.get\(|\[)\s*"(ROWLOCK_\w+)"(?:\) or ([\d_]+)\))?'
    )
    sizes = dict(re.findall(number, source))
    usual = {name: size.replace("_", "") for name, size in sizes.items() if size}

    assert len(usual) > 7
    assert read - elsewhere <= set(re.findall(r"ROWLOCK_\w+", text))
    assert sizes.keys() == listed.keys()
    assert usual.items() <= listed.items()


def _told(value: float | None) -> str:
    match value:
        case None:
            return "as `ROWLOCK_DSN`"
        case bool():
            return "on" if value else "off"
        case int():
            return str(value)  # a float of a million has an exponent; a count never has
        case _:
            return f"{value:g}"


def test_the_job_and_its_test_that_are_shown_pass(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "jobs.md").read_text()
    made: dict[str, ModuleType] = {}
    for name, source in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", text, re.DOTALL):
        made[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, made[name])
        exec(compile(source, f"{name}.py", "exec"), made[name].__dict__)
    with psycopg.connect(database.dsn, autocommit=True) as db:
        db.execute("CREATE TABLE lines (file int, line int, PRIMARY KEY (file, line))")

        made["test_loading"].test_every_file_is_in_one_partition()
        made["test_loading"].test_a_crash_in_each_file_loads_no_line_twice(database.dsn)

        assert db.execute("SELECT count(*) FROM lines").fetchone() == (750,)


def test_every_reason_that_the_operator_gives_is_explained() -> None:
    text = (ROOT / "docs" / "operator.md").read_text()
    told = re.findall(
        r'emit\(\s*batchjob, "(\w+)"',
        "".join(
            (ROOT / "operator" / "rowlock_operator" / f"{name}.py").read_text()
            for name in ("events", "reconcile")
        ),
    )
    reasons = re.findall(
        r"reason='(\w+)'|'(\w+Exceeded)'|'(\w+Failed)'|\"((?:Plan|Finish|Duplicate)[A-Z]\w+)\"",
        "".join(
            path.read_text()
            for path in [
                *(ROOT / "node" / "rowlock" / "db" / "sql" / "migrations").glob("*.sql"),
                ROOT / "node" / "rowlock" / "runtime" / "masters.py",
            ]
        ),
    )
    given = {word for words in reasons for word in words if word}

    assert len(told) > 8
    assert {"PlanFailed", "FinishFailed", "DeadlineExceeded", "PartitionsFailed"} <= given
    for reason in (*told, *given, *Reason, *Type):
        assert f"`{reason}`" in text, reason
