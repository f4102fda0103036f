"""A PostgreSQL primary with an asynchronous streaming replica, to be promoted by a test.

with Pair.started() as pair:
    database = pair.primary.create()
    pair.wait_caught_up()
    pair.primary.server.down("immediate")
    pair.promote()
    pair.replica_of(database)   # the same database on the other server
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rowlock.embedded import Server
from rowlock.embedded_guardian import Home, Identity, Note
from tests.support.postgres import OPTIONS, Cluster, Database
from tests.support.waiting import wait_until

_CAUGHT_UP: Final = (
    "SELECT count(*) > 0 AND bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"
)


@dataclass(slots=True)
class Pair:
    """Two servers: the second follows the first until it is promoted or cut off."""

    primary: Cluster
    replica: Cluster
    """The same logins and databases; it refuses writes until `promote`."""
    _folder: Path

    @classmethod
    @contextmanager
    def started(cls) -> Generator[Self]:
        """Start both, with the template and the logins, and end both."""
        primary = Cluster.private()
        folder = Path(tempfile.mkdtemp(prefix="replica-"))
        try:
            primary.prepare()
            server = _follower(primary, folder / "home")
            try:
                replica = dataclasses.replace(
                    primary, admin_dsn=server.dsn_of("postgres"), server=server
                )
                yield cls(primary, replica, folder)
            finally:
                server.stop("immediate")
        finally:
            primary.close()
            shutil.rmtree(folder, ignore_errors=True)

    def replica_of(self, database: Database) -> Database:
        """A database of the primary, as it is on the replica."""
        return dataclasses.replace(database, cluster=self.replica)

    def dsn_as(self, role: str, database: Database) -> str:
        """A connection string of both servers, for libpq to find the one that takes writes."""
        both = [conninfo_to_dict(c.admin_dsn) for c in (self.primary, self.replica)]
        where = {word: ",".join(str(one[word]) for one in both) for word in ("host", "port")}
        return make_conninfo(database.dsn_as(role), **where)

    def wait_caught_up(self) -> None:
        """Wait until the replica has all that the primary has committed so far."""
        wait_until(
            lambda: _ask(self.primary, _CAUGHT_UP), seconds=20, what="the replica catches up"
        )

    def cut(self) -> None:
        """Part the two: what the primary commits from now on never reaches the replica."""
        with psycopg.connect(self.replica.admin_dsn, autocommit=True) as db:
            db.execute("ALTER SYSTEM SET primary_conninfo = ''")
            db.execute("SELECT pg_reload_conf()")
        wait_until(
            lambda: not _ask(self.primary, "SELECT count(*) FROM pg_stat_replication"),
            seconds=20,
            what="the replica follows no longer",
        )

    def promote(self) -> None:
        """Make the replica a primary, on a timeline of its own."""
        assert _ask(self.replica, "SELECT pg_promote()"), "promoted within a minute"

    def primary_takes_no_writes(self) -> None:
        """Demote the primary softly: it answers, and its transactions are read-only by default."""
        with psycopg.connect(self.primary.admin_dsn, autocommit=True) as db:
            db.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            db.execute("SELECT pg_reload_conf()")

    def primary_crashes(self) -> None:
        """Crash the primary and start it again as a standby that follows nobody: it answers, read-only."""
        server = self.primary.server
        assert server is not None
        server.down("immediate")
        (server.folder / "data" / "standby.signal").touch()
        server.up()


def _follower(primary: Cluster, folder: Path) -> Server:
    """A copy of the primary, as a kept folder of an embedded server that follows it."""
    source = primary.server
    assert source is not None
    identity = Identity.choose()
    folder.parent.chmod(0o711)
    folder.mkdir(mode=0o711)
    home = Home(folder, throw_away=False)
    home.marker.touch()
    home.data.mkdir(mode=0o700)
    identity.own(home.data)
    password = str(conninfo_to_dict(primary.admin_dsn)["password"])
    Note(password=password, port=0, complete=True).write(home.note)
    copied = subprocess.run(
        [
            source.binaries.folder / "pg_basebackup",
            f"--dbname={primary.admin_dsn}",
            f"--pgdata={home.data}",
            *("--checkpoint=fast", "--wal-method=stream", "--write-recovery-conf", "--no-sync"),
        ],
        cwd="/",
        capture_output=True,
        text=True,
        user=identity.user,
        group=identity.group,
        extra_groups=identity.groups,
        check=False,
    )
    assert copied.returncode == 0, copied.stderr
    return Server.start(folder, options=OPTIONS, fsync=False, binaries=source.binaries)


def _ask(cluster: Cluster, query: LiteralString) -> Any:  # Any: the statement knows
    with psycopg.connect(cluster.admin_dsn, autocommit=True) as db:
        row = db.execute(query).fetchone()
    assert row is not None
    return row[0]
