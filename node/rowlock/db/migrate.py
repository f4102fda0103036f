"""Brings a database to the schema that this code knows, and says when the two do not agree.

Migrations are numbered .sql files that only go forward. Each runs in a transaction together with
its row in `rowlock.schema_migrations`, so that it is there as a whole or not at all. A file whose
first line is `-- no-transaction` (CREATE INDEX CONCURRENTLY) holds a single statement that may be
run again, because a kill can come between it and its row.

Any number of runners may start at once: one works, the others look again every 50 ms. They must not
queue in pg_advisory_lock(): a waiting call holds a snapshot that CREATE INDEX CONCURRENTLY waits
for, and the two end in a deadlock.

A release must work on the schema of the next one, or nodes and operators could not be replaced one
after the other. Which code may go on, the migration says in the comment that it begins with:
`-- works with: 8` means all that knows schema 8 or a later one. It is kept beside the version, since
the code that asks does not have the file. Without that line no code goes on that lacks the file.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from rowlock.db.connect import connect, first_line
from rowlock.errors import (
    Refused,
    SchemaAhead,
    SchemaBehind,
    SchemaMismatch,
    Unavailable,
    UsageError,
)
from rowlock.protocol.model import Schema

log = logging.getLogger(__name__)

LOWEST_SERVER_VERSION: Final = 150000
LOCK_SECONDS: Final = (0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0)
"""How long each attempt at a migration waits for a table, and so holds up everybody who comes after it.

The first ones are shorter than a beat. Later ones are longer, because transactions of seconds that
overlap leave no short gap, and no longer than half a lease, in which beats fail but no work stops."""
PAUSE_FACTOR: Final = 2.0
"""How long the others then have their turn, as a multiple of that. With the longest attempts, a reader
of one minute (a backup of a large database takes its locks for longer) is waited for."""
CONCURRENTLY_SECONDS: Final = 60.0
"""The same for what waits for old transactions without being in anybody's way."""
RUNNER_POLL_SECONDS: Final = 0.05
RUNNER_WAIT_SECONDS: Final = 300.0

# "rowlock" and a zero in ASCII. Advisory locks are per database; nobody else's key looks like this.
_RUNNER_LOCK: Final = int.from_bytes(b"rowlock\0")
# A deadlock, too, is a lock that somebody else has: a node that holds one table and waits for another.
_NO_LOCK: Final = (pg.LockNotAvailable, pg.DeadlockDetected)
_FILE_NAME: Final = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_NO_TRANSACTION: Final = "-- no-transaction"
_HEAD: Final = re.compile(rb"(?:--.*\n)*")
_WORKS_WITH: Final = re.compile(rb"^-- works with: (\d+)$", re.MULTILINE)

SCHEMA: Final[LiteralString] = (
    "SELECT coalesce(max(version), 0) AS version, coalesce(max(works_with), 0) AS works_with"
    " FROM rowlock.schema_migrations"
)
"""What is asked of a database that has a schema, for `refusal` to judge."""

AnyConnection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One numbered file."""

    version: int
    name: str
    checksum: str
    """SHA-256 of the file, in hex."""
    script: bytes
    in_transaction: bool
    works_with: int
    """The lowest schema version that code must know to go on once this one is applied."""

    @property
    def label(self) -> str:
        """Version and name as in the file's name."""
        return f"{self.version:04}_{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one run did with one file."""

    version: int
    name: str
    seconds: float


def read_migrations(folder: Traversable) -> tuple[Migration, ...]:
    """The migrations in a folder, in their order.

    Args:
        folder: Where the files are, as `importlib.resources.files` or a `Path`.

    Raises:
        ValueError: A name has not the form 0001_words.sql, the numbers do not run from 1 without a
            gap, or a file works with what comes after it. Only a mistake in rowlock itself can
            cause it.
    """
    found = sorted(
        (_read(file) for file in folder.iterdir() if file.name.endswith(".sql")),
        key=lambda migration: migration.version,
    )
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations must be numbered 1, 2, 3, …: {[m.label for m in found]}")
    return tuple(found)


def _read(file: Traversable) -> Migration:
    parts = _FILE_NAME.fullmatch(file.name)
    if parts is None:
        raise ValueError(f"{file.name} must be named like 0001_words.sql")
    script = file.read_bytes()
    version = int(parts["version"])
    head = _HEAD.match(script)
    said = _WORKS_WITH.search(head[0]) if head else None
    works_with = int(said[1]) if said else version
    if not 1 <= works_with <= version:
        raise ValueError(f"{file.name} cannot work with {works_with}: name 1 to {version}")
    return Migration(
        version=version,
        name=parts["name"],
        checksum=hashlib.sha256(script).hexdigest(),
        script=script,
        in_transaction=script.split(b"\n", maxsplit=1)[0].strip() != _NO_TRANSACTION.encode(),
        works_with=works_with,
    )


@cache
def known_migrations() -> tuple[Migration, ...]:
    """The migrations that this release of rowlock carries."""
    return read_migrations(resources.files("rowlock.db") / "sql" / "migrations")


def migrate(
    database: AnyConnection | str, *, migrations: Sequence[Migration] | None = None
) -> list[Applied]:
    """Apply what is missing. Safe to call at any time, by any number of programs at once.

    Args:
        database: A connection that is in no transaction, or a connection string. It must be
            direct (not through a pooler), of a superuser or of a login that owns the database and
            may create roles.
        migrations: What the schema should have; None is what this release carries.

    Returns:
        The migrations that this call applied, in order; empty when the schema was up to date, or
        newer and works with this code: an older pod that starts again migrates too.

    Raises:
        SchemaMismatch: The schema no longer works with this code, or a file was changed after it
            had been applied.
        Refused: The database did not let us: missing rights, tables that stay locked, or another
            runner that does not end.
        UsageError: The server is too old, the database is not in UTF8, or the connection goes through a pooler.
        Unavailable: The database cannot be reached.
    """
    wanted = known_migrations() if migrations is None else migrations
    with _connected(database) as db, _explained():
        _require_direct_connection(db)
        _require_utf8(db)
        with _only_runner(db):
            return [_apply(db, one) for one in _missing(_history(db), wanted)]


def current_version(db: AnyConnection) -> int:
    """The schema's version: that of its newest migration, 0 where there is no schema.

    Raises:
        Refused: The login may not look into the schema.
    """
    with _explained():
        return _schema(_history(db)).version


def check(db: AnyConnection) -> None:
    """Make sure that this code and the schema belong together, as every program does at its start.

    Raises:
        SchemaBehind: The schema is missing or too old: migrate.
        SchemaAhead: It is newer and no longer works with this code: upgrade that.
        Refused: The login may not look into the schema.
    """
    with _explained():
        problem = refusal(_schema(_history(db)), db.info.dbname)
    if problem is not None:
        raise problem


def refusal(schema: Schema, database: str) -> SchemaBehind | SchemaAhead | None:
    """Why this code must not work with a schema, naming both versions and the remedy; None if it may.

    Args:
        schema: What `SCHEMA` has found; version 0 is none.
        database: Its name, for the message.
    """
    known = len(known_migrations())
    if schema.version == 0:
        return SchemaBehind(f"database {database} has no rowlock schema: run rowlock migrate")
    if schema.version < known:
        return SchemaBehind(
            f"the schema in database {database} is version {schema.version}, this rowlock needs "
            f"{known}: run rowlock migrate"
        )
    return too_new(schema, known)


def too_new(schema: Schema, known: int | None = None) -> SchemaAhead | None:
    """Why this code must not go on with a schema that it has begun with; None if it may.

    Args:
        schema: What `SCHEMA` finds now.
        known: The newest version that the code knows; None is this release's.
    """
    if known is None:
        known = len(known_migrations())
    if schema.works_with <= known:
        return None
    return SchemaAhead(
        f"the schema is version {schema.version} and works with code that knows version "
        f"{schema.works_with}, newer than the {known} that this rowlock knows: upgrade rowlock"
    )


# -- what is there, what is missing ------------------------------------------------------------


class _Known(NamedTuple):
    """What the database remembers of a migration."""

    checksum: str
    works_with: int


def _history(db: AnyConnection) -> dict[int, _Known]:
    """By version. The block leaves no transaction open behind a plain reading.

    In autocommit mode nothing is left open anyway, and a node's connection has no time to lose
    between BEGIN and COMMIT: the server ends a session that is idle there for one beat.
    """
    with nullcontext() if db.autocommit else db.transaction():
        there = db.execute("SELECT to_regclass('rowlock.schema_migrations')").fetchone()
        if there is None or there[0] is None:
            return {}
        rows = db.execute("SELECT version, checksum, works_with FROM rowlock.schema_migrations")
        return {version: _Known(checksum, works_with) for version, checksum, works_with in rows}


def _schema(history: Mapping[int, _Known]) -> Schema:
    return Schema(
        version=max(history, default=0),
        works_with=max((one.works_with for one in history.values()), default=0),
    )


def _missing(history: Mapping[int, _Known], wanted: Sequence[Migration]) -> Iterator[Migration]:
    """What is to be applied, once the history turns out to be one of ours."""
    newest = max(history, default=0)
    problem = too_new(_schema(history), len(wanted))
    if problem is not None:
        raise problem
    for migration in wanted[:newest]:
        applied = history.get(migration.version)
        if applied is None:
            raise SchemaMismatch(
                f"migration {migration.label} is missing in the database although version {newest} "
                "is there: restore the table rowlock.schema_migrations from a backup"
            )
        if applied.checksum != migration.checksum:
            raise SchemaMismatch(
                f"migration {migration.label} has changed since it was applied (checksum "
                f"{migration.checksum[:12]}…, applied {applied.checksum[:12]}…): put the file back "
                "as it was and write a new migration instead"
            )
    yield from wanted[newest:]


# -- applying ----------------------------------------------------------------------------------


def _apply(db: AnyConnection, migration: Migration) -> Applied:
    began = time.monotonic()
    for attempt, lock_seconds in enumerate(LOCK_SECONDS, start=1):
        try:
            with _naming(migration):
                _run(db, migration, lock_seconds)
            break
        except _NO_LOCK as problem:
            if attempt == len(LOCK_SECONDS):
                raise Refused(
                    f"migration {migration.label} did not get its locks in {attempt} attempts and "
                    f"{time.monotonic() - began:.0f} s, and left nothing: end the long transactions "
                    "that pg_stat_activity shows and run rowlock migrate again"
                ) from problem
            pause = PAUSE_FACTOR * lock_seconds
            log.warning(
                "migration %s waits for a lock: trying again in %g s",
                migration.label,
                pause,
                extra={"event": "migration_waits", "version": migration.version},
            )
            time.sleep(pause)
    seconds = time.monotonic() - began
    log.info(
        "applied migration %s in %.2f s",
        migration.label,
        seconds,
        extra={"event": "migration_applied", "version": migration.version, "seconds": seconds},
    )
    return Applied(version=migration.version, name=migration.name, seconds=seconds)


def _run(db: AnyConnection, migration: Migration, lock_seconds: float) -> None:
    if migration.in_transaction:
        with db.transaction():
            _limit_waiting(db, "LOCAL", lock_seconds)
            # Without parameters the whole file goes as one script, $$ bodies and all.
            db.execute(migration.script)
            _record(db, migration)
        return
    _limit_waiting(db, "SESSION", CONCURRENTLY_SECONDS)
    try:
        _drop_invalid_indexes(db)
        db.execute(migration.script)
    finally:
        db.execute("RESET lock_timeout")
    with db.transaction():
        _record(db, migration)


def _limit_waiting(db: AnyConnection, scope: str, seconds: float) -> None:
    db.execute(f"SET {scope} lock_timeout = '{seconds * 1000:.0f}ms'".encode())


def _drop_invalid_indexes(db: AnyConnection) -> None:
    """Take away what an index that could not be built has left.

    CREATE INDEX CONCURRENTLY leaves an invalid one when it fails, and IF NOT EXISTS would take that
    for the index: nobody would ever see that it is not used.
    """
    found = db.execute(
        "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_index i"
        " JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = 'rowlock' AND NOT i.indisvalid"
    ).fetchall()
    for (index,) in found:
        db.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {index}".encode())


def _record(db: AnyConnection, migration: Migration) -> None:
    """Write the migration's row, in the transaction of the caller."""
    db.execute("SET LOCAL ROLE rowlock_owner")
    table = resources.files("rowlock.db") / "sql" / "schema_migrations.sql"
    db.execute(table.read_bytes())
    db.execute(
        "INSERT INTO rowlock.schema_migrations (version, name, checksum, works_with)"
        " VALUES (%s, %s, %s, %s)",
        [migration.version, migration.name, migration.checksum, migration.works_with],
    )
    db.execute("RESET ROLE")


# -- the connection ----------------------------------------------------------------------------


@contextmanager
def _connected(database: AnyConnection | str) -> Generator[AnyConnection]:
    """The connection in autocommit mode, as CREATE INDEX CONCURRENTLY and the waiting need it."""
    if isinstance(database, str):
        db = connect(database, application_name="rowlock migrate")
        with db:
            yield db
        return
    if database.info.transaction_status != TransactionStatus.IDLE:
        raise UsageError("migrate() needs a connection that is in no transaction: commit first")
    before = database.autocommit
    database.autocommit = True
    try:
        yield database
    finally:
        if not database.closed:
            database.autocommit = before


def _require_direct_connection(db: AnyConnection) -> None:
    version = db.info.server_version
    if version < LOWEST_SERVER_VERSION:
        raise UsageError(
            f"the server is PostgreSQL {version // 10000}.{version % 10000}, rowlock needs "
            f"{LOWEST_SERVER_VERSION // 10000} or newer"
        )
    row = db.execute("SELECT pg_backend_pid()").fetchone()
    if row is None or row[0] != db.info.backend_pid:
        raise UsageError(
            "this connection goes through a pooler, where a lock of the session may be left on "
            "somebody else's: give rowlock migrate the server's own address"
        )


def _require_utf8(db: AnyConnection) -> None:
    """Make sure that the database can hold every text: the write that ends an attempt must not fail."""
    encoding = db.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise UsageError(
            f"the encoding of this database is {encoding}, which cannot hold every error and every key: rowlock "
            "needs one in UTF8 (CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0)"
        )


@contextmanager
def _only_runner(db: AnyConnection) -> Generator[None]:
    until = time.monotonic() + RUNNER_WAIT_SECONDS
    while not _take_runner_lock(db):
        if time.monotonic() > until:
            raise Refused(
                f"another migration has been running for {RUNNER_WAIT_SECONDS:g} s: look for the "
                "application_name 'rowlock migrate' in pg_stat_activity"
            )
        time.sleep(RUNNER_POLL_SECONDS)
    try:
        yield
    finally:
        if not db.closed:
            db.execute("SELECT pg_advisory_unlock(%s)", [_RUNNER_LOCK])


def _take_runner_lock(db: AnyConnection) -> bool:
    row = db.execute("SELECT pg_try_advisory_lock(%s)", [_RUNNER_LOCK]).fetchone()
    return row is not None and bool(row[0])


# -- errors ------------------------------------------------------------------------------------


@contextmanager
def _naming(migration: Migration) -> Generator[None]:
    """Say which file an error of the server came from."""
    try:
        yield
    except (*_NO_LOCK, psycopg.OperationalError):
        raise
    except pg.InsufficientPrivilege as problem:
        raise Refused(
            f"migration {migration.label}: {problem.diag.message_primary}: run rowlock migrate as "
            "a superuser, or as a login that owns the database and has CREATEROLE"
        ) from problem
    except psycopg.Error as problem:
        raise Refused(
            f"migration {migration.label} failed and left nothing: {first_line(problem)}"
        ) from problem


@contextmanager
def _explained() -> Generator[None]:
    """Turn what the server says about connections and rights into our errors."""
    try:
        yield
    except pg.InsufficientPrivilege as problem:
        raise Refused(
            f"{problem.diag.message_primary}: log in as a member of rowlock_node, rowlock_operator, "
            "rowlock_admin or rowlock_reader (to migrate: as the database's owner)"
        ) from problem
    except psycopg.OperationalError as problem:
        raise Unavailable(
            f"the connection to the database was lost: {first_line(problem)}"
        ) from problem
