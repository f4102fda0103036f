"""The proxy that other tests break the network with does what it says, and nothing else."""

import threading
import time
from collections.abc import Generator
from typing import Any

import psycopg
import pytest

from tests.support.pgproxy import PgProxy
from tests.support.pooler import PRETENDED_PID, Pooler
from tests.support.postgres import Database
from tests.support.waiting import wait_until

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def proxy(database: Database) -> Generator[PgProxy]:
    with database.connect() as db:
        db.execute("CREATE TABLE notes (note text)")
    with PgProxy(database.dsn) as made:
        yield made


def opened(proxy: PgProxy) -> Connection:
    """A connection through the proxy."""
    return psycopg.connect(proxy.dsn, autocommit=True, connect_timeout=3)


class Asked(threading.Thread):
    """A statement that has no answer yet."""

    def __init__(self, db: Connection) -> None:
        super().__init__(daemon=True)
        self.db = db
        self.answer: Any = None  # of whatever type; or the error
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.db.execute("SELECT 'here'").fetchone()
        except psycopg.Error as error:
            self.answer = error


def test_it_passes_messages_of_every_size_unchanged(proxy: PgProxy) -> None:
    with opened(proxy) as db:
        for size in (0, 1, 65_531, 65_536, 3_000_000):
            text = "x" * size
            assert db.execute("SELECT %s::text", [text]).fetchone() == (text,)
    wait_until(lambda: proxy.connections == 0, what="it notices that the client has left")
    assert len(proxy.arrivals) == 1


@pytest.mark.parametrize("after, noted", [(False, 0), (True, 1)])
def test_a_cut_request_has_reached_the_server_or_not(
    proxy: PgProxy, database: Database, after: bool, noted: int
) -> None:
    """Also in a statement that was prepared before, whose text is not sent again."""
    insert = "INSERT INTO notes VALUES (%s)"
    with opened(proxy) as db, opened(proxy) as other:
        db.execute(insert, ["one"], prepare=True)
        cut = proxy.cut(b"INTO notes", after=after)

        with pytest.raises(psycopg.OperationalError):
            db.execute(insert, ["two"], prepare=True)

        cut.wait()
        assert other.execute(insert, ["three"]).rowcount == 1, "only one is cut"
    count = "SELECT count(*) FROM notes WHERE note = 'two'"
    wait_until(lambda: database.value(count) == noted, what="the row is there, or is not")


def test_of_two_requests_in_flight_the_one_before_the_cut_is_answered(proxy: PgProxy) -> None:
    with opened(proxy) as db:
        cursors: list[psycopg.Cursor[tuple[Any, ...]]] = []

        def ask_twice() -> None:
            with db.pipeline() as pipeline:
                cursors.append(db.execute("SELECT 'first'"))
                pipeline.sync()
                proxy.cut(b"second", after=True)
                db.execute("SELECT 'second'")

        with pytest.raises(psycopg.OperationalError):
            ask_twice()
        assert cursors[0].fetchone() == ("first",)


def test_a_reset_breaks_what_is_open_and_lets_clients_in_again(proxy: PgProxy) -> None:
    with opened(proxy) as db:
        proxy.reset()
        with pytest.raises(psycopg.OperationalError):
            db.execute("SELECT")
        opened(proxy).close()


def test_a_refusal_lasts_until_it_ends(proxy: PgProxy) -> None:
    proxy.refuse()
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError):
            opened(proxy)
    proxy.pass_on()
    opened(proxy).close()


def test_a_black_hole_is_silent_to_everybody_and_forgets_nothing(
    proxy: PgProxy, database: Database
) -> None:
    with opened(proxy) as db:
        proxy.blackhole()
        asked = Asked(db)
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(proxy.dsn, connect_timeout=2)
        assert asked.is_alive()

        proxy.pass_on()

        asked.join(10)
        assert asked.answer == ("here",)


def test_in_a_black_hole_the_server_sees_no_client_leave(
    proxy: PgProxy, database: Database
) -> None:
    with opened(proxy) as db:
        pid = db.info.backend_pid
        proxy.blackhole()
    there = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    assert database.value(there, [pid]) == 1
    proxy.pass_on()
    wait_until(lambda: not database.value(there, [pid]), what="the server's session ends")


def test_dropped_packets_are_not_even_acknowledged_and_come_again(proxy: PgProxy) -> None:
    with opened(proxy) as db:
        with psycopg.connect(f"{proxy.dsn} tcp_user_timeout=300", autocommit=True) as hasty:
            proxy.drop()
            asked = Asked(db)
            with pytest.raises(psycopg.OperationalError, match="timed out"):
                hasty.execute("SELECT")
            with pytest.raises(psycopg.errors.ConnectionTimeout):
                psycopg.connect(proxy.dsn, connect_timeout=2)
        assert asked.is_alive()

        proxy.pass_on()

        asked.join(10)
        assert asked.answer == ("here",)
        opened(proxy).close()


def test_a_delay_holds_requests_up(proxy: PgProxy) -> None:
    with opened(proxy) as db:
        proxy.delay(0.2)
        started = time.monotonic()
        db.execute("SELECT")
        assert time.monotonic() - started >= 0.2
        proxy.delay(0)


def test_new_clients_get_to_another_server_when_told(proxy: PgProxy, database: Database) -> None:
    with opened(proxy) as before, Pooler(database.dsn) as elsewhere:
        proxy.retarget(elsewhere.dsn)
        with opened(proxy) as after:
            assert after.info.backend_pid == PRETENDED_PID
        assert before.info.backend_pid != PRETENDED_PID
        assert before.execute("SELECT 'here'").fetchone() == ("here",)
