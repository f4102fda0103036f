"""The database connection of a command, checked for the right schema before anything is asked."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Generator
from contextlib import contextmanager

from rowlock.db.connect import connect
from rowlock.db.migrate import check
from rowlock.db.views import Connection


@contextmanager
def opened(dsn: str, command: str) -> Generator[Connection]:
    """A connection for one command, in autocommit mode; closed at the end.

    Args:
        dsn: What `arguments.dsn_of` found.
        command: Its name, for `pg_stat_activity`.

    Raises:
        Unavailable: The database cannot be reached.
        SchemaMismatch: The schema is missing, older or newer; says what to run.
    """
    db = connect(dsn, application_name=f"rowlock {command}")
    try:
        check(db)
        yield db
    finally:
        # Not `with db`, which complains in the log about a connection that is broken already.
        db.close()


def actor() -> str:
    """Who does this, for the audit: user and machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = "somebody"
    return f"{user}@{socket.gethostname()}"
