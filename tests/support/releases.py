"""Other releases of rowlock, as far as an upgrade notices them: a copy of the code with one more migration.

following = next_release(tmp_path / "next")
following.migrate(database.dsn)
fleet.node("new", PYTHONPATH=following.path)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import rowlock
import rowlock_operator
from rowlock.db.migrate import known_migrations
from tests.support.postgres import Database
from tests.support.supervisor import environment

KNOWN: Final = len(known_migrations())
"""The schema version of the code that is tested."""

EXPANSION: Final = """\
SET LOCAL ROLE rowlock_owner;
ALTER TABLE rowlock.batch_partitions ADD COLUMN note text;
ALTER TABLE rowlock.batch_job_coordination ADD COLUMN note text;
ALTER TABLE rowlock.batch_nodes ADD COLUMN note text;
CREATE FUNCTION rowlock.annotate(p_partition bigint, p_note text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, rowlock, pg_temp
AS $$ UPDATE batch_partitions SET note = p_note WHERE id = p_partition $$;
"""
"""What the first half of a change looks like: it adds, and takes nothing away. It needs every table's lock."""


@dataclass(frozen=True, slots=True)
class Release:
    """A copy of the code, in a folder of its own."""

    folder: Path

    @property
    def path(self) -> str:
        """PYTHONPATH of a process that is to run this copy."""
        return os.pathsep.join([str(self.folder), environment()["PYTHONPATH"]])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this copy's Python with these arguments, to its end."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**environment(), "PYTHONPATH": self.path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start this copy's Python with these arguments; what it says comes as one stream."""
        return subprocess.Popen(
            [sys.executable, *arguments],
            env={**environment(), "PYTHONPATH": self.path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def migrate(self, dsn: str) -> str:
        """Run this copy's `rowlock migrate`; what it says."""
        done = self.run("-m", "rowlock", "migrate", "--dsn", dsn)
        assert done.returncode == 0, done.stderr
        return done.stdout


def next_release(
    folder: Path, script: str = EXPANSION, *, works_with: int | None = KNOWN
) -> Release:
    """Copy the code and add a migration.

    Args:
        folder: Where to; it must not exist.
        script: The migration's statements.
        works_with: What the migration says in its head; None = nothing.
    """
    for package in (rowlock, rowlock_operator):
        (home,) = package.__path__
        ignored = shutil.ignore_patterns("__pycache__", "demo")
        shutil.copytree(home, folder / Path(home).name, ignore=ignored)
    head = "" if works_with is None else f"-- works with: {works_with}\n"
    migrations = folder / "rowlock" / "db" / "sql" / "migrations"
    (migrations / f"{KNOWN + 1:04}_next.sql").write_text(head + script)
    return Release(folder)


def record_migration(database: Database, *, works_with: int) -> None:
    """Let the schema look as if the next release had migrated it, without any change."""
    with database.connect() as db:
        db.execute(
            "INSERT INTO rowlock.schema_migrations (version, name, checksum, works_with)"
            " VALUES (%s, 'next', repeat('0', 64), %s)",
            [KNOWN + 1, works_with],
        )


def forget_migration(database: Database, version: int = KNOWN + 1) -> None:
    """Let the schema look as if this migration had never been applied."""
    with database.connect() as db:
        db.execute("DELETE FROM rowlock.schema_migrations WHERE version = %s", [version])
