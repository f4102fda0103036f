"""The demonstration's own connections, beside those that rowlock makes for its jobs."""

from __future__ import annotations

import os
from typing import TypeAlias

import psycopg
from psycopg.rows import TupleRow

from rowlock.db import connect as db

Connection: TypeAlias = psycopg.Connection[TupleRow]


def connect(dsn: str | None = None) -> Connection:
    """An autocommit connection.

    Args:
        dsn: Where; None: where the node's work transactions go, by ROWLOCK_WORK_DSN, else
            ROWLOCK_DSN, else libpq's own variables.

    Raises:
        Unavailable: The database cannot be reached.
    """
    if dsn is None:
        dsn = os.environ.get("ROWLOCK_WORK_DSN") or os.environ.get("ROWLOCK_DSN") or ""
    return db.connect(dsn, application_name="rowlock demo")
