"""Checks what the jobs did against SQL that was written without them, to the cent and the row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from importlib import resources

from psycopg.rows import class_row

from rowlock.demo.database import connect


@dataclass(frozen=True, slots=True, kw_only=True)
class DayComparison:
    """One day: what the reference computes from the flights, and what the ledger says."""

    flight_date: date | None
    """None: ledger entries for flights that do not exist."""
    reference_flights: int
    reference_claims: int
    """Flights for which something is due."""
    reference_cents: int
    ledger_entries: int
    ledger_flights: int
    """Different flights among the entries; fewer than entries: some were settled twice."""
    ledger_claims: int
    ledger_cents: int
    wrong_entries: int
    """Entries with another amount, carrier or date than the reference's."""

    @property
    def equal(self) -> bool:
        """Whether the day has one correct entry for each flight, and no other."""
        return (
            self.ledger_entries == self.ledger_flights == self.reference_flights
            and self.ledger_claims == self.reference_claims
            and self.ledger_cents == self.reference_cents
            and self.wrong_entries == 0
        )

    def __str__(self) -> str:
        return (
            f"{self.flight_date or 'no such flight'}: {self.ledger_entries} entries"
            f" ({self.wrong_entries} wrong) for {self.ledger_flights}"
            f" of {self.reference_flights} flights,"
            f" {self.ledger_claims} of {self.reference_claims} claims,"
            f" {self.ledger_cents} of {self.reference_cents} cents"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The ledger beside the reference. Amounts are in cents."""

    days: int
    """Days that the reference has flights on."""
    flights: int
    """Flights by the reference."""
    claims: int
    """Claims by the reference."""
    reference_cents: int
    ledger_entries: int
    ledger_cents: int
    doubled: int
    """Entries beyond the first for the same flight."""
    missing: int
    """Flights without an entry."""
    differences: tuple[DayComparison, ...]
    """The days that are not equal."""

    @property
    def equal(self) -> bool:
        """Whether every day has exactly one correct entry for each of its flights."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderComparison:
    """One payment order: what is due by the ledger, and what the bank's books say."""

    carrier: str
    half: str
    due_cents: int
    payments: int
    paid_cents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaymentComparison:
    """The bank's books beside what is due."""

    orders: tuple[OrderComparison, ...]

    @property
    def due_cents(self) -> int:
        """What should be paid in all."""
        return sum(order.due_cents for order in self.orders)

    @property
    def paid_cents(self) -> int:
        """What was paid in all."""
        return sum(order.paid_cents for order in self.orders)

    @property
    def paid_once(self) -> tuple[OrderComparison, ...]:
        """Orders paid with one payment of the right amount."""
        return tuple(
            order
            for order in self.orders
            if order.payments == 1 and order.paid_cents == order.due_cents
        )

    @property
    def unpaid(self) -> tuple[OrderComparison, ...]:
        """Orders without a payment."""
        return tuple(order for order in self.orders if order.payments == 0)

    @property
    def wrong(self) -> tuple[OrderComparison, ...]:
        """Orders paid more than once, or with a wrong amount, or that were never due."""
        return tuple(
            order
            for order in self.orders
            if order.payments > 1 or (order.payments and order.paid_cents != order.due_cents)
        )


def compare(dsn: str, *, month: int | None = None) -> Comparison:
    """Compare the ledger with the reference, day by day and flight by flight.

    Args:
        dsn: The database that `rowlock.demo.data.load` filled.
        month: 1 to 12 if only that month was settled; None: the whole year.

    Raises:
        Unavailable: The database cannot be reached.
    """
    with (
        connect(dsn) as connection,
        connection.cursor(row_factory=class_row(DayComparison)) as rows,
    ):
        days = rows.execute(_statement("reference.sql"), {"month": month}).fetchall()
    return Comparison(
        days=sum(day.reference_flights > 0 for day in days),
        flights=sum(day.reference_flights for day in days),
        claims=sum(day.reference_claims for day in days),
        reference_cents=sum(day.reference_cents for day in days),
        ledger_entries=sum(day.ledger_entries for day in days),
        ledger_cents=sum(day.ledger_cents for day in days),
        doubled=sum(day.ledger_entries - day.ledger_flights for day in days),
        missing=sum(max(0, day.reference_flights - day.ledger_flights) for day in days),
        differences=tuple(day for day in days if not day.equal),
    )


def compare_payments(dsn: str) -> PaymentComparison:
    """Compare the bank's books with what the ledger says is due, order by order.

    Raises:
        Unavailable: The database cannot be reached.
    """
    with (
        connect(dsn) as connection,
        connection.cursor(row_factory=class_row(OrderComparison)) as rows,
    ):
        orders = rows.execute(_statement("payments.sql")).fetchall()
    return PaymentComparison(orders=tuple(orders))


def _statement(name: str) -> bytes:
    return resources.files("rowlock.demo").joinpath(name).read_bytes()
