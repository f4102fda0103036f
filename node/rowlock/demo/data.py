"""Puts the flights into PostgreSQL, in a schema `demo` of their own, and empties its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from itertools import repeat
from typing import Final

from rowlock.demo import archive
from rowlock.demo.database import Connection, connect
from rowlock.errors import UsageError

MARK = "rowlock demonstration; dropped and made again by each load"
"""The comment on the schema that says it is ours; `schema.sql` sets it."""

LOCK_TIMEOUT_SECONDS: Final = 5
"""How long `drop` waits for somebody who uses the tables."""


def load(dsn: str) -> int:
    """Make the schema `demo` anew and fill it: all flights, an empty ledger, an empty bank.

    Takes one to two seconds and is one transaction: nobody sees half of it.

    Args:
        dsn: The database, by a role that may create a schema in it.

    Returns:
        How many flights were loaded, `archive.FLIGHTS`.

    Raises:
        UsageError: There is a schema `demo` that this function did not make.
        Unavailable: The database cannot be reached.
    """
    with connect(dsn) as connection:
        with connection.transaction():
            _make_schema(connection)
            _copy_carriers_and_planes(connection)
            flights = _copy_flights(connection)
            connection.execute("ALTER TABLE demo.flights ADD PRIMARY KEY (flight_id)")
        connection.execute("ANALYZE demo.flights, demo.planes, demo.carriers")
    return flights


def reset(dsn: str) -> None:
    """Empty the ledger and the books of the bank, so that the jobs can run again.

    Raises:
        Unavailable: The database cannot be reached.
    """
    with connect(dsn) as connection:
        connection.execute("TRUNCATE demo.ledger, demo.bank RESTART IDENTITY")


def drop(dsn: str) -> None:
    """Take the schema `demo` away, if there is one and this module made it.

    Raises:
        UsageError: There is a schema `demo` that `load` did not make.
        Unavailable: The database cannot be reached.
        psycopg.errors.LockNotAvailable: Somebody uses its tables, and went on to do so for
            `LOCK_TIMEOUT_SECONDS`.
    """
    with connect(dsn) as connection, connection.transaction():
        connection.execute(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_SECONDS}s'".encode())
        _drop_schema(connection)


def refuse_foreign_schema(connection: Connection) -> bool:
    """Make sure that a schema `demo`, if there is one, is ours; whether there is one.

    Raises:
        UsageError: It is somebody else's.
    """
    row = connection.execute(
        "SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = 'demo'"
    ).fetchone()
    if row is not None and row[0] != MARK:
        raise UsageError(
            f"database {connection.info.dbname!r} has a schema 'demo' that is not rowlock's; "
            "name another database, or rename that schema"
        )
    return row is not None


def _drop_schema(connection: Connection) -> None:
    if refuse_foreign_schema(connection):
        connection.execute("DROP SCHEMA demo CASCADE")


def _make_schema(connection: Connection) -> None:
    _drop_schema(connection)
    connection.execute(resources.files("rowlock.demo").joinpath("schema.sql").read_bytes())


def _copy_carriers_and_planes(connection: Connection) -> None:
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO demo.carriers (carrier, name) VALUES (%s, %s)",
            list(archive.carriers().items()),
        )
        with cursor.copy("COPY demo.planes (tail_number, seats) FROM STDIN") as copy:
            for plane in archive.planes():
                copy.write_row((plane.tail_number, plane.seats))


def _copy_flights(connection: Connection) -> int:
    # The file's columns are text in the form that COPY reads, so nothing is parsed on the way.
    # FREEZE: the rows are written as they will stay, and no later reader has to touch them up.
    with connection.cursor() as cursor:
        with cursor.copy(
            "COPY demo.flights (flight_id, flight_date, carrier, number, origin, destination,"
            " distance_miles, scheduled_departure, tail_number, departure_delay, arrival_delay)"
            " FROM STDIN WITH (FORMAT text, NULL '-', FREEZE)"
        ) as copy:
            for lines in _copy_lines():
                copy.write(lines)
        return cursor.rowcount


def _copy_lines() -> Iterator[str]:
    """The lines of COPY, a day at a time."""
    first = 1
    for day in archive.days():
        flight_ids = map(str, range(first, first + len(day)))
        rows = zip(flight_ids, repeat(day.date, len(day)), *day.columns, strict=True)
        yield "".join(f"{line}\n" for line in map("\t".join, rows))
        first += len(day)
