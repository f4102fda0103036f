"""The bank: stands for a system outside that neither knows rowlock nor remembers a key.

It pays whatever order it receives, at once and over its own connection, so nothing can take a payment
back and a second order is a second payment. That is the kind of effect that AT_MOST_ONCE is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from rowlock.demo.database import connect


@dataclass(frozen=True, slots=True, kw_only=True)
class Payment:
    """A line of the bank's books."""

    payment_id: int
    reference: str
    """What the payer wrote on the order: `ctx.idempotency_key`."""
    carrier: str
    half: str
    cents: int
    paid_at: datetime


def pay(*, reference: str, carrier: str, half: str, cents: int) -> int:
    """Send an order to the bank and return the number of the payment.

    Args:
        reference: Printed on the statement, for people who must find the payment again.
        carrier: The airline whose account is charged.
        half: The half-year that is paid for, for example 2013H1.
        cents: More than 0.

    Raises:
        Unavailable: The bank cannot be reached.
    """
    with connect() as connection:
        row = connection.execute(
            "INSERT INTO demo.bank (reference, carrier, half, cents)"
            " VALUES (%s, %s, %s, %s) RETURNING payment_id",
            (reference, carrier, half, cents),
        ).fetchone()
    assert row is not None
    payment_id: int = row[0]
    return payment_id


def statement(dsn: str) -> list[Payment]:
    """All payments so far, in the order in which the bank made them.

    Raises:
        Unavailable: The bank cannot be reached.
    """
    with connect(dsn) as connection, connection.cursor(row_factory=class_row(Payment)) as rows:
        return rows.execute(
            "SELECT payment_id, reference, carrier, half, cents, paid_at"
            " FROM demo.bank ORDER BY payment_id"
        ).fetchall()
