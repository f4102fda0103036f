"""Turns every exception that can reach the end of a command into one line and an exit code."""

from __future__ import annotations

import re
import sys
from typing import Final, NamedTuple

from rowlock.errors import NotFound, Refused, RowlockError, SchemaMismatch, Unavailable

_LISTED_BY: Final = {
    "execution": "rowlock executions",
    "job": "rowlock jobs",
    "contract": "rowlock jobs",
    "node": "rowlock nodes",
}

_PARTS_MAX: Final = 12
"""Lines of a long message that fit into ours."""


class Failure(NamedTuple):
    """What to print, and what to exit with."""

    text: str
    exit_code: int


def explain(error: Exception) -> Failure:
    """What a person should read about an error, and what a program should see."""
    translated = _of_the_database(error) or error
    if isinstance(translated, RowlockError):
        text = one_line(str(translated))
        if isinstance(translated, NotFound) and not translated.near:
            text += f": {_LISTED_BY.get(translated.what, 'rowlock --help')} lists those there are"
            if translated.what == "job":  # often launched before the first node was ready
                text += ", once a node has published them; --import MODULE takes a job from code"
        return Failure(text, translated.exit_code)
    name = type(error).__name__
    return Failure(
        f"unexpected {name}: {one_line(str(error)) or 'no message'}; "
        "set ROWLOCK_DEBUG=1 to see where it comes from",
        1,
    )


def one_line(text: str) -> str:
    """A message of several lines as one: a list becomes "a; b", what follows a colon follows it."""
    parts = [re.sub(r"^[-*•]\s+", "", line.strip()) for line in text.splitlines()]
    parts = [part for part in parts if part]
    if len(parts) > _PARTS_MAX:
        parts[_PARTS_MAX:] = [f"and {len(parts) - _PARTS_MAX} more lines"]
    joined = ""
    for part in parts:
        between = " " if joined.endswith((":", ",", ";")) else "; "
        joined = f"{joined}{between}{part}" if joined else part
    return "".join(
        char if char.isprintable() else f"\\x{ord(char):02x}" for char in joined.replace("\t", " ")
    )


def _of_the_database(error: Exception) -> RowlockError | None:
    """Our error for one of the driver's; None for any other."""
    if "psycopg" not in sys.modules:  # then it is none of its errors, and it need not be loaded
        return None
    import psycopg

    if not isinstance(error, psycopg.Error):
        return None
    state = error.sqlstate
    primary = error.diag.message_primary or one_line(str(error)) or type(error).__name__
    if state == "42501":
        return Refused(
            f"{primary}: log in as a member of rowlock_admin, who may do all of it (rowlock_operator "
            "may not resolve, abandon or purge, rowlock_reader may read, rowlock_node may run a node)"
        )
    if state in {"42P01", "42883", "3F000"}:  # no such table, function or schema
        return SchemaMismatch(f"{primary}: run rowlock migrate")
    if state == "25006":
        return Unavailable(
            f"{primary}: this server only reads; name the primary in --dsn or ROWLOCK_DSN"
        )
    if isinstance(error, psycopg.OperationalError):
        return Unavailable(f"the connection to the database was lost: {primary}; try again")
    return None
