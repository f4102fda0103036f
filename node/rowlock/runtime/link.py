"""One connection to the database that is opened again whenever it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import psycopg

from rowlock.db.connect import connect, ended_after, first_line, shut
from rowlock.db.store import Connection, Observe, Store
from rowlock.errors import Unavailable, UsageError

log = logging.getLogger(__name__)

REMINDER_TRIES: Final = 10
"""After so many failures in a row the log repeats what it has said."""

TRANSIENT = (
    Unavailable,
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
)
"""Errors after which the same statement may succeed: the server or the way to it failed, or (an
OperationalError as well) a lock or a time limit did."""


def is_lock_timeout(error: Exception) -> bool:
    """Whether the statement waited too long for a lock: somebody stands in the way of it alone."""
    return isinstance(error, psycopg.errors.LockNotAvailable)


_FINAL_CLASSES = frozenset({"22", "23", "54"})
"""Classes of SQLSTATE that blame the data: data exception, integrity, limits of the program."""


def is_final(error: Exception) -> bool:
    """Whether the database will never take the same statement, because of the data in it.

    Whatever else it refuses (a privilege was revoked, a function is missing during a migration) can
    be mended while the node lives, and no result is given up for it.
    """
    if isinstance(error, TRANSIENT) or not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate is None or error.sqlstate[:2] in _FINAL_CLASSES


class Link:
    """A connection used by one thread; it may be opened and `shut` from any."""

    def __init__(
        self,
        dsn: str,
        *,
        application_name: str,
        idle_in_transaction_seconds: float,
        lock_seconds: float,
        on_connect: Callable[[Connection], None] | None = None,
        observe: Observe | None = None,
    ) -> None:
        self._dsn = dsn
        self._application_name = application_name
        self._idle_in_transaction_seconds = idle_in_transaction_seconds
        self._lock_seconds = lock_seconds
        self._on_connect = on_connect
        self._observe = observe
        self._connection: Connection | None = None
        self._guard = threading.Lock()
        self._opening = threading.Lock()
        self._was_open = False
        self.tries = 0
        """Failures in a row: the number that the next wait is drawn from."""
        self._told: set[str] = set()

    @property
    def connection(self) -> Connection | None:
        """The open connection, if there is one."""
        return self._connection

    def store(self) -> Store:
        """The protocol over this link; connects first where needed.

        :raises Unavailable: there is no way to the database now.
        """
        return Store(self.open(), self._observe)

    def open(self) -> Connection:
        """The connection, opened where there is none. From any thread.

        :raises Unavailable: there is no way to the database now.
        :raises UsageError: no connection was ever made, and none can be made from this string.
        """
        with self._opening:
            if self._connection is not None:
                return self._connection
            connection = self._connect()
            self._was_open = True
            with self._guard:
                self._connection = connection
            if self._on_connect is not None:
                try:
                    with ended_after(connection):
                        self._on_connect(connection)
                except psycopg.Error:
                    self.drop()  # nobody would prepare it a second time
                    raise
            return connection

    def _connect(self) -> Connection:
        try:
            return connect(
                self._dsn,
                application_name=self._application_name,
                idle_in_transaction_seconds=self._idle_in_transaction_seconds,
                lock_seconds=self._lock_seconds,
            )
        except UsageError as error:
            if not self._was_open:
                raise
            # It has worked: the file is being written, or somebody has changed the login's defaults.
            raise Unavailable(str(error)) from error

    def succeeded(self) -> None:
        """The database answered."""
        self.tries = 0
        self._told.clear()

    def tell(self, error: BaseException) -> None:
        """Log that the database is away: each reason once, and again when it lasts."""
        text = first_line(error)
        is_news = text not in self._told or self.tries == REMINDER_TRIES
        self._told.add(text)
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "%s; trying again",
            text,
            extra={"event": "database_unavailable", "tries": self.tries},
        )

    def failed(self, error: BaseException) -> None:
        """Take note of an error; a connection that may be broken is dropped."""
        self.tries += 1
        connection = self._connection
        if connection is None:
            return
        # A server that turned read-only was demoted: whoever stays connected never writes again.
        demoted = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
        if demoted or connection.closed or connection.broken:
            self.drop()

    def drop(self) -> None:
        """Close the connection."""
        with self._guard:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def shut(self) -> None:
        """Make whatever waits on this connection fail now. From any thread."""
        with self._guard:
            if self._connection is not None:
                shut(self._connection)
