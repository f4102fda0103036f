"""What all pools together look like, for Prometheus: one reader of the schema's views.

A thread reads every few seconds, whoever scrapes and however often; a scrape never waits for the
database. What could not be read is not exported, because an old number says that all is well. Names,
labels and units are public API (docs/metrics.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, TypeVar

import psycopg
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import rowlock
from rowlock.db import readings
from rowlock.db.connect import connect, first_line, is_pooled, shut
from rowlock.db.migrate import check
from rowlock.db.readings import Connection, Ending, Pool, Server
from rowlock.errors import RowlockError

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_SECONDS: Final = 10.0
"""How often the database is asked."""
STATEMENT_SECONDS: Final = 2.0
"""How long one statement may take: the server ends it, or its connection is ended here."""
STUCK_SECONDS: Final = 10.0
"""A reading that has no answer for so long is none: the server may be frozen."""
POOLS_MAX: Final = 100
JOB_NAMES_MAX: Final = 200

_STATES: Final = ("pending", "delayed", "limited", "suspended", "claimed")
_LIVE: Final = ("requested", "planning", "running", "closing", "finishing")
_READINGS: Final = ("pools", "endings", "server")


class Names:
    """At most so many names: the first ones to come stay, those that come later are "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """The label of a name."""
        if name not in self._known and len(self._known) >= self._most:
            return "other"
        self._known.add(name)
        return name


@dataclass(slots=True)
class Reading:
    """What was read last; a part is None where that has failed."""

    pools: list[Pool] | None = None
    endings: list[Ending] | None = None
    server: Server | None = None
    xmin_held_seconds: float = 0.0
    took_seconds: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def parts(self) -> dict[str, bool]:
        """Which parts there are."""
        return {name: getattr(self, name) is not None for name in _READINGS}


class Exporter(Collector):
    """Reads the views on a connection of its own, and says what it read."""

    def __init__(self, dsn: str, *, read_seconds: float = READ_SECONDS) -> None:
        """Prepare to read; `start` begins.

        :param dsn: of a login in the role `rowlock_reader`.
        :param read_seconds: how often to ask.
        """
        self._dsn = dsn
        self._read_seconds = read_seconds
        self._connection: Connection | None = None
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._reading: Reading | None = None
        self._asked_at: float | None = None
        self._turned_at = time.monotonic()
        self._problem = "nothing was read yet"
        self._tries = 0
        self._xmin: tuple[int | None, float] = (None, 0.0)
        self._pools = Names(POOLS_MAX)
        self._jobs = Names(JOB_NAMES_MAX)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._threads = (
            threading.Thread(target=self._read_on, name="reader", daemon=True),
            threading.Thread(target=self._guard_reads, name="guard", daemon=True),
        )

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Read no more."""
        self._stop.set()
        self._shut()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)
        self._drop()

    def livez(self) -> str | None:
        """None while the reader turns, whatever the database does."""
        limit = 3 * (self._read_seconds + STUCK_SECONDS)
        return None if time.monotonic() - self._turned_at < limit else "the reader stands still"

    def readyz(self) -> str | None:
        """None while everything that is to be exported is there."""
        reading = self._fresh()
        if reading is None:
            return self._problem
        missing = [name for name, there in reading.parts.items() if not there]
        return f"no reading of {', '.join(missing)}" if missing else None

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition for a scrape with this Accept header, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    # -- reading -------------------------------------------------------------------------------

    def _read_on(self) -> None:
        while not self._stop.is_set():
            self._turned_at = time.monotonic()
            self._read()
            self._stop.wait(self._read_seconds)
        self._drop()

    def _guard_reads(self) -> None:
        """End a statement that a frozen server keeps waiting: no time limit of its own would."""
        while not self._stop.wait(STATEMENT_SECONDS / 2):
            asked_at = self._asked_at
            if asked_at is not None and time.monotonic() - asked_at > STUCK_SECONDS:
                self._shut()

    def _read(self) -> None:
        reading = Reading()
        try:
            db = self._connected()
            check(db)  # each time: a migration may have come in between
            reading.server = self._ask("server", readings.server, db, reading)
            reading.pools = self._ask("pools", readings.pools, db, reading)
            reading.endings = self._ask("endings", readings.endings, db, reading)
        except (psycopg.Error, RowlockError) as error:
            self._failed(error)
            return
        finally:
            self._asked_at = None
        if reading.server is not None:
            reading.xmin_held_seconds = self._held_for(reading.server)
        self._tries = 0
        self._problem = "the last reading is too old"
        self._reading = reading

    def _connected(self) -> Connection:
        self._asked_at = time.monotonic()
        if self._connection is None:
            connection = connect(self._dsn, application_name="rowlock exporter")
            with self._guard:
                self._connection = connection
            if not is_pooled(connection):
                connection.execute(
                    "SELECT set_config('statement_timeout', %s, false),"
                    " set_config('default_transaction_read_only', 'on', false)",
                    (str(int(STATEMENT_SECONDS * 1000)),),
                )
        return self._connection

    def _ask(
        self, name: str, read: Callable[[Connection], T], db: Connection, reading: Reading
    ) -> T | None:
        """One part; None where it alone was refused or took too long."""
        began = self._asked_at = time.monotonic()
        try:
            return read(db)
        except psycopg.Error as error:
            if db.closed or db.broken:
                raise
            log.warning(
                "no reading of %s: %s",
                name,
                first_line(error),
                extra={"event": "reading_failed", "reading": name},
            )
            return None
        finally:
            reading.took_seconds[name] = time.monotonic() - began

    def _failed(self, error: Exception) -> None:
        self._reading = None
        self._problem = first_line(error)
        self._tries += 1
        log.log(
            logging.WARNING if self._tries in {1, 10} else logging.DEBUG,
            "the database cannot be asked: %s",
            self._problem,
            extra={"event": "database_unreachable", "tries": self._tries},
        )
        self._drop()

    def _held_for(self, server: Server) -> float:
        """For how long the same transaction has been the oldest, while others came after it."""
        now = time.monotonic()
        if server.xmin is None or server.xmin_age < 2:
            self._xmin = (None, now)  # nothing came after it, so it holds nothing up
        elif self._xmin[0] != server.xmin:
            self._xmin = (server.xmin, now)
        return now - self._xmin[1]

    def _drop(self) -> None:
        with self._guard:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _shut(self) -> None:
        with self._guard:
            if self._connection is not None:
                shut(self._connection)

    def _fresh(self) -> Reading | None:
        """The last reading, unless the next one has been waiting for too long."""
        asked_at, reading = self._asked_at, self._reading
        if asked_at is not None and time.monotonic() - asked_at > 2 * STATEMENT_SECONDS:
            return None
        return reading

    def read_as(self, reading: Reading) -> None:
        """Export this, as if it had been read."""
        self._reading = reading

    # -- exporting -----------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Every series of the last reading."""
        reading = self._fresh()
        build = InfoMetricFamily("rowlock_build", "Version of rowlock.")
        build.add_metric([], {"version": rowlock.__version__})
        yield build
        yield _gauge(
            "rowlock_database_up",
            "1 while the database answers: here the exporter's readings.",
            ["component"],
            [(("exporter",), reading is not None)],
        )
        if reading is None:
            return
        yield _gauge(
            "rowlock_exporter_reading_up",
            "1 if the last reading of this part succeeded; without it its series are missing.",
            ["reading"],
            [((name,), there) for name, there in reading.parts.items()],
        )
        yield _gauge(
            "rowlock_exporter_reading_duration_seconds",
            "How long the last reading of this part took.",
            ["reading"],
            [((name,), seconds) for name, seconds in reading.took_seconds.items()],
        )
        if reading.pools is not None:
            yield from self._of_pools(reading.pools)
        if reading.endings is not None:
            yield self._of_endings(reading.endings)
        if reading.server is not None:
            yield from _of_server(reading.server, reading.xmin_held_seconds)

    def _of_pools(self, pools: list[Pool]) -> Iterator[Metric]:
        yield _gauge(
            "rowlock_queue_partitions",
            "Partitions of live executions: pending (may be claimed now), delayed (until a retry is"
            " due; at most 10,000 of an execution are counted), limited (its execution has as many"
            " claims as it may have), suspended or claimed.",
            ["pool", "state"],
            self._sums(pools, {state: attrgetter(state) for state in _STATES}),
        )
        yield _gauge(
            "rowlock_queue_oldest_pending_age_seconds",
            "How long the partition has waited that has waited longest, of those that may be claimed"
            " now: the first and the last in line of each execution. 0: none waits.",
            ["pool"],
            self._highest(pools, attrgetter("oldest_pending_seconds")),
        )
        yield _gauge(
            "rowlock_queue_paused",
            "1 if the pool has executions and all of them are suspended.",
            ["pool"],
            self._highest(pools, attrgetter("paused")),
        )
        yield _gauge(
            "rowlock_nodes",
            "Nodes with slots: active, or unreachable (marked so, or silent for half a minute).",
            ["pool", "status"],
            self._sums(
                pools,
                {status: attrgetter(f"nodes_{status}") for status in ("active", "unreachable")},
            ),
        )
        yield _gauge(
            "rowlock_nodes_draining",
            "Nodes with slots that finish what they hold and claim nothing more.",
            ["pool"],
            self._sum(pools, attrgetter("nodes_draining")),
        )
        yield _gauge(
            "rowlock_pool_slots",
            "Slots of active nodes that do not drain.",
            ["pool"],
            self._sum(pools, attrgetter("slots")),
        )
        yield _gauge(
            "rowlock_nodes_oldest_heartbeat_age_seconds",
            "How long the quietest node that is not removed has been silent.",
            ["pool"],
            self._highest(pools, attrgetter("silent_seconds")),
        )
        yield _gauge(
            "rowlock_executions",
            "Executions that have not ended, by status.",
            ["pool", "status"],
            self._sums(pools, {status: attrgetter(status) for status in _LIVE}),
        )
        yield _gauge(
            "rowlock_executions_unserved",
            "Executions that wait, and no living node can serve them: none registers their job with"
            " their contract, or none with slots in their pool.",
            ["pool"],
            self._sum(pools, attrgetter("unserved")),
        )

    def _of_endings(self, endings: list[Ending]) -> Metric:
        numbers: dict[tuple[str, ...], float] = {}
        for one in endings:
            key = (self._pools.of(one.pool), self._jobs.of(one.job_name), one.status.lower())
            numbers[key] = numbers.get(key, 0) + one.number
        return _gauge(
            "rowlock_executions_ended",
            "Executions that ended in the last 15 minutes: completed, failed, cancelled or abandoned.",
            ["pool", "job_name", "status"],
            numbers.items(),
        )

    def _sums(
        self, pools: list[Pool], figures: Mapping[str, Callable[[Pool], float]]
    ) -> Iterable[tuple[tuple[str, ...], float]]:
        """For each pool and each name of a figure, the sum of the figure."""
        sums: dict[tuple[str, ...], float] = {}
        for one in pools:
            for name, figure in figures.items():
                key = (self._pools.of(one.pool), name)
                sums[key] = sums.get(key, 0) + figure(one)
        return sums.items()

    def _sum(
        self, pools: list[Pool], figure: Callable[[Pool], float]
    ) -> Iterable[tuple[tuple[str, ...], float]]:
        """For each pool the sum of one figure."""
        return [(key[:1], value) for key, value in self._sums(pools, {"": figure})]

    def _highest(
        self, pools: list[Pool], figure: Callable[[Pool], float]
    ) -> Iterable[tuple[tuple[str, ...], float]]:
        highest: dict[tuple[str, ...], float] = {}
        for one in pools:
            key = (self._pools.of(one.pool),)
            highest[key] = max(highest.get(key, 0.0), figure(one))
        return highest.items()


def _of_server(server: Server, xmin_held_seconds: float) -> Iterator[Metric]:
    identity = InfoMetricFamily(
        "rowlock_database", "Which database it is, as nodes and operator say of theirs."
    )
    identity.add_metric([], server.identity.labels)
    yield identity
    yield _gauge(
        "rowlock_schema_version",
        "The newest migration that the database has had.",
        [],
        [((), server.schema_version)],
    )
    for name, text, position in (
        ("rowlock_table_dead_tuples", "Dead rows of a table, which a vacuum is to remove.", 0),
        ("rowlock_table_live_tuples", "Living rows of a table, as the server estimates them.", 1),
        ("rowlock_table_bytes", "Size of a table with its indexes.", 2),
    ):
        figures = [((table,), values[position]) for table, values in server.tables.items()]
        yield _gauge(name, text, ["table"], figures)
    for name, text, value in (
        (
            "rowlock_xmin_age_transactions",
            "Transactions begun since the oldest one whose view of old rows somebody holds on to.",
            server.xmin_age,
        ),
        (
            "rowlock_xmin_held_seconds",
            "For how long it has been the same one, as far as this exporter has seen.",
            xmin_held_seconds,
        ),
        ("rowlock_database_connections", "Sessions of the server.", server.connections),
        (
            "rowlock_database_connections_max",
            "How many sessions the server allows.",
            server.connections_max,
        ),
        (
            "rowlock_notify_queue_usage_ratio",
            "How full the server's queue of notifications is.",
            server.notify_queue,
        ),
    ):
        yield _gauge(name, text, [], [((), value)])


def _gauge(
    name: str,
    text: str,
    labels: list[str],
    samples: Iterable[tuple[tuple[str, ...], Any]],  # Any: int, float, bool, Decimal
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family
