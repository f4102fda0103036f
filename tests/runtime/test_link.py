"""A connection that is opened again: what may go wrong after it has worked, and what never worked."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowlock.errors import Unavailable, UsageError
from rowlock.runtime.link import Link
from tests.support.postgres import Database


def a_link(file: Path) -> Link:
    """A link that reads its connection string from a file."""
    return Link(f"@{file}", application_name="test", idle_in_transaction_seconds=1, lock_seconds=1)


def test_a_file_that_was_never_right_is_a_mistake(tmp_path: Path) -> None:
    file = tmp_path / "dsn"
    file.write_text("host=localhost password='half")

    with pytest.raises(UsageError):
        a_link(file).open()


def test_a_file_that_is_half_written_for_a_moment_is_read_again(
    database: Database, tmp_path: Path
) -> None:
    file = tmp_path / "dsn"
    file.write_text(database.dsn_as("rowlock_node"))
    link = a_link(file)
    link.open()
    link.drop()

    file.write_text("host=localhost port=5432 password='half")
    with pytest.raises(Unavailable) as unavailable:
        link.open()
    file.write_text(database.dsn_as("rowlock_node"))
    link.open()
    link.drop()

    assert "half" not in str(unavailable.value)
