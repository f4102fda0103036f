"""Commands over a database of their own, without nodes or with two."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.postgres import Cluster, Database
from tests.support.terminal import PATIENCE_SECONDS, Captured, Terminal, node
from tests.support.waiting import wait_until


@pytest.fixture
def terminal(database: Database, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Commands over a database of their own, without nodes."""
    monkeypatch.setenv("ROWLOCK_DSN", database.dsn)
    return Terminal(database, capsys)


@pytest.fixture(scope="module")
def pool(postgres: Cluster) -> Generator[Database]:
    """A database with two nodes."""
    made = postgres.create()
    with node(made.dsn, "n1"), node(made.dsn, "n2"):
        wait_until(
            lambda: made.value("SELECT count(*) FROM rowlock.nodes") == 2,
            seconds=PATIENCE_SECONDS,
            what="two nodes are registered",
            every_seconds=0.05,
        )
        yield made
    postgres.drop(made.name)


@pytest.fixture
def go(tmp_path: Path) -> Generator[Path]:
    """A file that partitions wait for; at the end they get it in any case, and free their slots."""
    file = tmp_path / "go"
    yield file
    file.touch()


@pytest.fixture
def served(pool: Database, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Commands over the database with two nodes."""
    monkeypatch.setenv("ROWLOCK_DSN", pool.dsn)
    return Terminal(pool, capsys)
