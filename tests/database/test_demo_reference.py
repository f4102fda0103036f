"""The flights in PostgreSQL, the SQL reference beside the rule in Python, and what the check sees."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import astuple

import psycopg
import pytest

from rowlock.demo import archive, bank, data, reference
from rowlock.demo.archive import Flight
from rowlock.demo.rule import compensation
from rowlock.errors import Unavailable, UsageError
from tests.support.postgres import Cluster, Database

CLAIMS = 37_747
CENTS = 71_086_819_513
JANUARY = 1


@pytest.fixture(scope="module")
def loaded(postgres: Cluster) -> Generator[Database]:
    made = postgres.create(migrated=False)
    data.load(made.dsn)
    yield made
    postgres.drop(made.name)


@pytest.fixture(scope="module")
def flights() -> list[Flight]:
    return list(archive.flights())


@pytest.fixture
def settled_january(loaded: Database, flights: list[Flight]) -> Database:
    """A database whose ledger is right for January and empty otherwise."""
    data.reset(loaded.dsn)
    settle(loaded, (flight for flight in flights if flight.flight_date.month == JANUARY))
    return loaded


def settle(database: Database, flights: Iterable[Flight]) -> None:
    """Write what the rule says for these flights, without any job."""
    seats = {plane.tail_number: plane.seats for plane in archive.planes()}
    with (
        database.connect() as connection,
        connection.cursor() as cursor,
        cursor.copy("COPY demo.ledger FROM STDIN") as copy,
    ):
        for flight in flights:
            owed = compensation(
                departure_delay=flight.departure_delay,
                arrival_delay=flight.arrival_delay,
                distance_miles=flight.distance_miles,
                seats=None if flight.tail_number is None else seats.get(flight.tail_number),
            )
            copy.write_row(
                (
                    flight.flight_id,
                    flight.flight_date,
                    flight.carrier,
                    owed.reason.value,
                    owed.cents,
                    1,
                )
            )


def change(database: Database, statement: bytes) -> int:
    """Run a statement and say how many rows it changed."""
    with database.connect() as connection:
        return connection.execute(statement).rowcount


# -- loading -----------------------------------------------------------------------------------


def test_every_flight_arrives_as_the_file_has_it(loaded: Database, flights: list[Flight]) -> None:
    rows = loaded.rows(
        "SELECT flight_id, flight_date, carrier, number, origin, destination, distance_miles,"
        " scheduled_departure, tail_number, departure_delay, arrival_delay"
        " FROM demo.flights ORDER BY flight_id"
    )

    assert len(rows) == archive.FLIGHTS
    assert all(row == astuple(flight) for row, flight in zip(rows, flights, strict=True))


def test_planes_and_carriers_arrive_too(loaded: Database) -> None:
    assert dict(loaded.rows("SELECT * FROM demo.carriers")) == archive.carriers()
    assert loaded.rows('SELECT * FROM demo.planes ORDER BY tail_number COLLATE "C"') == [
        astuple(plane) for plane in archive.planes()
    ]


def test_a_second_load_begins_anew(empty_database: Database, flights: list[Flight]) -> None:
    data.load(empty_database.dsn)
    settle(empty_database, flights[:10])

    assert data.load(empty_database.dsn) == archive.FLIGHTS
    assert empty_database.value("SELECT count(*) FROM demo.flights") == archive.FLIGHTS
    assert empty_database.value("SELECT count(*) FROM demo.ledger") == 0


def test_a_schema_of_somebody_else_is_left_alone(empty_database: Database) -> None:
    change(empty_database, b"CREATE SCHEMA demo CREATE TABLE precious (value integer)")

    with pytest.raises(UsageError, match="not rowlock's"):
        data.load(empty_database.dsn)

    assert empty_database.value("SELECT count(*) FROM demo.precious") == 0


def test_a_load_that_fails_leaves_nothing(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Iterator[archive.Day]:
        raise ValueError("damaged")

    monkeypatch.setattr(archive, "days", broken)

    with pytest.raises(ValueError, match="damaged"):
        data.load(empty_database.dsn)

    assert empty_database.value("SELECT to_regnamespace('demo')") is None


def test_no_database_is_said_in_one_line() -> None:
    with pytest.raises(Unavailable) as caught:
        data.load("postgresql://nobody@127.0.0.1:1/nothing")

    assert len(str(caught.value).splitlines()) == 1


# -- the reference -----------------------------------------------------------------------------


def test_the_sql_reference_equals_the_rule_in_python_for_every_flight_of_the_year(
    loaded: Database, flights: list[Flight]
) -> None:
    data.reset(loaded.dsn)
    settle(loaded, flights)

    comparison = reference.compare(loaded.dsn)

    assert comparison.equal
    assert (comparison.days, comparison.flights) == (archive.DAYS, archive.FLIGHTS)
    assert comparison.ledger_entries == archive.FLIGHTS
    assert comparison.claims == CLAIMS
    assert comparison.ledger_cents == comparison.reference_cents == CENTS
    assert (comparison.doubled, comparison.missing) == (0, 0)


def test_one_month_is_compared_alone(settled_january: Database) -> None:
    comparison = reference.compare(settled_january.dsn, month=JANUARY)

    assert comparison.equal
    assert (comparison.days, comparison.flights) == (31, 27_004)


def test_an_empty_ledger_differs_on_every_day(loaded: Database) -> None:
    data.reset(loaded.dsn)

    comparison = reference.compare(loaded.dsn)

    assert len(comparison.differences) == archive.DAYS
    assert comparison.missing == archive.FLIGHTS
    assert (comparison.ledger_entries, comparison.ledger_cents) == (0, 0)


DAMAGES = {
    "a flight settled twice, with nothing due": (
        b"INSERT INTO demo.ledger SELECT * FROM demo.ledger WHERE flight_id = 1"
    ),
    "a flight forgotten": b"DELETE FROM demo.ledger WHERE flight_id = 1",
    "a flight settled twice and its neighbour forgotten": (
        b"UPDATE demo.ledger SET flight_id = 1 WHERE flight_id = 2"
    ),
    "a cent too much": b"UPDATE demo.ledger SET cents = cents + 1 WHERE flight_id = 1",
    "errors that cancel each other out in the day's sum": (
        b"UPDATE demo.ledger SET cents = cents + CASE"
        b" WHEN flight_id = (SELECT min(flight_id) FROM demo.ledger WHERE cents > 0) THEN 1"
        b" ELSE -1 END"
        b" WHERE flight_id IN (SELECT flight_id FROM demo.ledger WHERE cents > 0"
        b" ORDER BY flight_id LIMIT 2)"
    ),
    "an amount of another airline": b"UPDATE demo.ledger SET carrier = 'UA' WHERE flight_id = 1",
    "an amount of another day": (
        b"UPDATE demo.ledger SET flight_date = flight_date + 1 WHERE flight_id = 1"
    ),
    "an entry for no flight": (
        b"INSERT INTO demo.ledger VALUES (0, '2013-01-01', 'UA', 'on time', 0, 1)"
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_check_sees(damage: str, settled_january: Database) -> None:
    assert change(settled_january, DAMAGES[damage]) > 0

    comparison = reference.compare(settled_january.dsn, month=JANUARY)

    assert not comparison.equal
    assert len(comparison.differences) == 1


def test_a_difference_says_what_it_is(settled_january: Database) -> None:
    change(
        settled_january, b"INSERT INTO demo.ledger SELECT * FROM demo.ledger WHERE flight_id = 1"
    )

    comparison = reference.compare(settled_january.dsn, month=JANUARY)

    assert comparison.doubled == 1
    assert str(comparison.differences[0]).startswith(
        "2013-01-01: 843 entries (0 wrong) for 842 of 842 flights, 73 of 73 claims,"
    )


# -- the bank ----------------------------------------------------------------------------------


@pytest.fixture
def bank_of_january(settled_january: Database, monkeypatch: pytest.MonkeyPatch) -> Database:
    """The bank that `bank.pay` reaches, and a ledger with January's amounts due."""
    monkeypatch.setenv("ROWLOCK_WORK_DSN", settled_january.dsn)
    return settled_january


def due(database: Database, carrier: str) -> int:
    cents = database.value(
        "SELECT sum(cents)::bigint FROM demo.ledger WHERE carrier = %s", (carrier,)
    )
    assert isinstance(cents, int)
    return cents


def test_an_order_paid_once_is_told_from_one_not_paid(bank_of_january: Database) -> None:
    bank.pay(reference="a", carrier="UA", half="2013H1", cents=due(bank_of_january, "UA"))

    comparison = reference.compare_payments(bank_of_january.dsn)

    assert [order.carrier for order in comparison.paid_once] == ["UA"]
    assert len(comparison.unpaid) == 15
    assert comparison.wrong == ()
    assert comparison.paid_cents == due(bank_of_january, "UA") < comparison.due_cents


def test_the_bank_pays_the_same_order_twice_and_the_check_sees_it(
    bank_of_january: Database,
) -> None:
    order = {"reference": "a", "carrier": "UA", "half": "2013H1"}
    for _ in range(2):
        bank.pay(**order, cents=due(bank_of_january, "UA"))

    comparison = reference.compare_payments(bank_of_january.dsn)

    assert [(wrong.carrier, wrong.payments) for wrong in comparison.wrong] == [("UA", 2)]
    assert comparison.paid_once == ()
    assert [payment.reference for payment in bank.statement(bank_of_january.dsn)] == ["a", "a"]


@pytest.mark.parametrize("carrier, half, extra", [("UA", "2013H1", 1), ("UA", "2013H2", 0)])
def test_a_payment_that_was_not_due_is_wrong(
    carrier: str, half: str, extra: int, bank_of_january: Database
) -> None:
    cents = due(bank_of_january, carrier) + extra
    bank.pay(reference="a", carrier=carrier, half=half, cents=cents)

    comparison = reference.compare_payments(bank_of_january.dsn)

    assert [(order.carrier, order.half) for order in comparison.wrong] == [(carrier, half)]


def test_a_payment_stands_whatever_becomes_of_the_payer(bank_of_january: Database) -> None:
    with psycopg.connect(bank_of_january.dsn) as transaction:
        transaction.execute("SELECT 1")
        bank.pay(reference="a", carrier="UA", half="2013H1", cents=1)
        transaction.rollback()

    assert [payment.cents for payment in bank.statement(bank_of_january.dsn)] == [1]
