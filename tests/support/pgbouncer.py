"""A real PgBouncer in front of a test's database, in transaction mode unless a test says otherwise."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, LiteralString, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import dict_row

from rowlock.embedded_guardian import Identity
from rowlock.runtime import processes
from tests.support import tools
from tests.support.ports import free_port
from tests.support.postgres import ROLES, Database
from tests.support.waiting import wait_until

_CONSOLE: Final = "console"
"""The user of PgBouncer's own console."""


class PgBouncer:
    """A pooler over one database. Use it in a `with`; `dsn` and `dsn_as` are what nodes get."""

    def __init__(self, database: Database, **settings: str | int) -> None:
        """Prepare it.

        Args:
            database: What it leads to.
            settings: Of its configuration, for example `pool_mode="session"`.
        """
        self._database = database
        self._settings: dict[str, str | int] = {
            "pool_mode": "transaction",
            "default_pool_size": 2,
            "max_client_conn": 200,
            **settings,
        }
        self.port = 0
        self.folder = Path()
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        """As superuser."""
        return make_conninfo(self._database.dsn, port=self.port)

    def dsn_as(self, role: str) -> str:
        """As a login that is a member of this role alone."""
        return make_conninfo(self._database.dsn_as(role), port=self.port)

    def work_dsn_as(self, role: str) -> str:
        """The same, of a pool of its own whose sessions are read-only by default."""
        return make_conninfo(self.dsn_as(role), dbname=f"{self._database.name}_work")

    def show(self, what: LiteralString) -> list[dict[str, Any]]:
        """What the console says, for example `show("POOLS")`."""
        console = f"host=127.0.0.1 port={self.port} dbname=pgbouncer user={_CONSOLE} password=x"
        with psycopg.connect(console, autocommit=True) as db:
            # The console knows only the simple protocol.
            cursor = psycopg.ClientCursor(db, row_factory=dict_row)
            return cursor.execute(sql.SQL("SHOW {}").format(sql.SQL(what))).fetchall()

    def __enter__(self) -> Self:
        program = tools.program("pgbouncer")
        identity = Identity.choose()  # it refuses root, as PostgreSQL does
        self.folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))
        identity.own(self.folder)
        self.port = free_port()
        self._write(identity)
        # Unpacked programs may lie where that user cannot read.
        copy = Path(shutil.copy(program, self.folder / "pgbouncer"))
        copy.chmod(0o755)
        for folder in tools.library_path().split(os.pathsep):
            for name in ("libcares.so*", "libevent-2*.so*"):
                for file in Path(folder).glob(name) if folder else ():
                    shutil.copy(file, self.folder)
        self._popen = subprocess.Popen(
            [copy, self.folder / "pgbouncer.ini"],
            env={**os.environ, "LD_LIBRARY_PATH": str(self.folder)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=identity.user,
            group=identity.group,
            extra_groups=identity.groups,
            preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509  no threads
        )
        wait_until(self._listens, seconds=10, what=f"pgbouncer listens: {self.log()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
        if error is not None:
            error.add_note(f"pgbouncer: {self.log()[-4000:]}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """What it has logged."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def _write(self, identity: Identity) -> None:
        target = conninfo_to_dict(self._database.dsn)
        logins = {str(target["user"]): str(target["password"])}
        for role in ROLES:
            login = conninfo_to_dict(self._database.dsn_as(role))
            logins[str(login["user"])] = str(login["password"])
        logins[_CONSOLE] = "x"
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "auth_file": self.folder / "users",
            "admin_users": _CONSOLE,
            "logfile": self.folder / "log",
            **self._settings,
        }
        where = f"host={target['host']} port={target['port']}"
        files = {
            "users": "".join(f'"{user}" "{password}"\n' for user, password in logins.items()),
            "pgbouncer.ini": (
                f"[databases]\n* = {where}\n"
                f"{target['dbname']}_work = {where} dbname={target['dbname']}"
                " connect_query='SET default_transaction_read_only = on'\n[pgbouncer]\n"
                + "".join(f"{name} = {value}\n" for name, value in settings.items())
            ),
        }
        for name, text in files.items():
            path = self.folder / name
            path.write_text(text)
            path.chmod(0o600)
            identity.own(path)

    def _listens(self) -> bool:
        assert self._popen is not None
        assert self._popen.poll() is None, f"pgbouncer ended: {self.log()}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
