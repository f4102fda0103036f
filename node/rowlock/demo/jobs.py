"""The two jobs of the demonstration, written as any author writes jobs: only against `rowlock`.

`flights.settle` computes what is owed for every flight of a year. It may run again after a node is
lost, and its ledger is right all the same, because each chunk's entries and its checkpoint commit
together. `flights.payout` then pays through a bank that cannot take a payment back, so it is never
started twice: if its node is lost in the middle, a person looks at the bank's statement.

Run them with `rowlock node --import rowlock.demo.jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import date
from typing import NamedTuple

from psycopg.rows import TupleRow
from pydantic import BaseModel, Field

import rowlock
from rowlock.demo import bank
from rowlock.demo.database import Connection, connect
from rowlock.demo.rule import compensation

# -- flights.settle ----------------------------------------------------------------------------


class Period(BaseModel, frozen=True):
    """Which flights to settle, and how. `{}` settles the whole year as fast as it goes."""

    year: int = 2013
    month: int | None = Field(default=None, ge=1, le=12)
    """None: all months."""
    chunk_flights: int = Field(default=250, ge=1, le=10_000)
    """Flights between two checkpoints."""
    pace_ms: int = Field(default=0, ge=0, le=60_000)
    """Time that a day takes at least, in milliseconds, so that a person can watch."""


class Day(BaseModel, frozen=True):
    """A partition: the flights of one day, which have successive ids."""

    flight_date: date
    first_flight_id: int
    flights: int = Field(ge=1)

    def flight_ids(self, after: int | None) -> range:
        """The ids of the day's flights that follow this one; all for None."""
        first = self.first_flight_id if after is None else after + 1
        return range(first, self.first_flight_id + self.flights)


class Totals(BaseModel, frozen=True):
    """What has been settled so far; the checkpoint carries it from one attempt to the next."""

    flights: int = 0
    claims: int = 0
    cents: int = 0

    def with_entries(self, entries: list[Entry]) -> Totals:
        """The totals after these entries."""
        return Totals(
            flights=self.flights + len(entries),
            claims=self.claims + sum(entry.cents > 0 for entry in entries),
            cents=self.cents + sum(entry.cents for entry in entries),
        )


class Settled(Totals, frozen=True):
    """The result of a partition."""

    flight_date: date


class SettleSummary(Totals, frozen=True):
    """What the whole execution settled."""

    days: int


class Entry(NamedTuple):
    """A line of the ledger, as far as the flight decides it."""

    flight_id: int
    carrier: str
    reason: str
    cents: int


class Settle(rowlock.Job[Period, Day, Settled]):
    """Computes the compensation for every flight and writes it to the ledger, exactly once."""

    name = "flights.settle"
    delivery = rowlock.AT_LEAST_ONCE
    retry = rowlock.Retry(max_attempts=5, initial_seconds=0.5, max_seconds=30)
    timeout_seconds = 600

    def partition(self, params: Period, _cluster: rowlock.Cluster) -> Iterator[Day]:
        """One slice for each day that has flights."""
        with connect() as connection:
            days = connection.execute(
                """
                SELECT flight_date, min(flight_id), count(*)
                FROM demo.flights
                WHERE extract(year FROM flight_date) = %(year)s
                    AND (%(month)s::integer IS NULL
                         OR extract(month FROM flight_date) = %(month)s)
                GROUP BY flight_date
                ORDER BY flight_date
                """,
                {"year": params.year, "month": params.month},
            )
            for flight_date, first_flight_id, flights in days:
                yield Day(flight_date=flight_date, first_flight_id=first_flight_id, flights=flights)

    def key(self, part: Day) -> str:
        """The date, for example 2013-01-31."""
        return part.flight_date.isoformat()

    def weight(self, part: Day) -> int:
        """Busy days first, so that no long one is left for the end."""
        return part.flights

    def process(self, part: Day, ctx: rowlock.Context[Period]) -> Settled:
        """Settle the day in chunks. Entries, totals and checkpoint of a chunk commit together."""
        totals = Totals() if ctx.checkpoint is None else Totals.model_validate(ctx.checkpoint)
        for flight_ids in ctx.chunks(part.flight_ids, size=ctx.params.chunk_flights, key=_itself):
            with ctx.transaction() as connection:
                entries = _settled_flights(connection, part.flight_date, flight_ids)
                _write_entries(connection, part.flight_date, ctx.attempt, entries)
                totals = totals.with_entries(entries)
                ctx.save(totals.model_dump())
            ctx.progress(totals.flights, part.flights)
            _pace(ctx.params.pace_ms * len(flight_ids) / part.flights)
        return Settled(flight_date=part.flight_date, **totals.model_dump())

    def finish(self, _params: Period, outcome: rowlock.Outcome[Settled]) -> SettleSummary:
        """Add up the days."""
        days, flights, claims, cents = 0, 0, 0, 0
        for _, settled in outcome.results():
            days += 1
            flights += settled.flights
            claims += settled.claims
            cents += settled.cents
        return SettleSummary(days=days, flights=flights, claims=claims, cents=cents)


def _settled_flights(
    connection: Connection, flight_date: date, flight_ids: list[int]
) -> list[Entry]:
    flights = connection.execute(
        """
        SELECT flight_id, carrier, departure_delay, arrival_delay, distance_miles, seats
        FROM demo.flights
        LEFT JOIN demo.planes USING (tail_number)
        WHERE flight_id BETWEEN %s AND %s
            AND flight_date = %s
        ORDER BY flight_id
        """,
        (flight_ids[0], flight_ids[-1], flight_date),
    ).fetchall()
    if [flight[0] for flight in flights] != flight_ids:
        raise rowlock.Fail(
            f"demo.flights has {len(flights)} flights of {flight_date} between"
            f" {flight_ids[0]} and {flight_ids[-1]}, not {len(flight_ids)}; load the data again"
        )
    return [_entry(flight) for flight in flights]


def _entry(flight: TupleRow) -> Entry:
    flight_id, carrier, departure_delay, arrival_delay, distance_miles, seats = flight
    owed = compensation(
        departure_delay=departure_delay,
        arrival_delay=arrival_delay,
        distance_miles=distance_miles,
        seats=seats,
    )
    return Entry(flight_id, carrier, owed.reason, owed.cents)


def _write_entries(
    connection: Connection, flight_date: date, attempt: int, entries: list[Entry]
) -> None:
    # Arrays, because one statement for the chunk is several times faster than one for each row.
    flight_ids, carriers, reasons, cents = (list(column) for column in zip(*entries, strict=True))
    connection.execute(
        """
        INSERT INTO demo.ledger (flight_id, flight_date, carrier, reason, cents, attempt)
        SELECT entry.flight_id, %s, entry.carrier, entry.reason, entry.cents, %s
        FROM unnest(%s::integer[], %s::text[], %s::text[], %s::bigint[])
            AS entry (flight_id, carrier, reason, cents)
        """,
        (flight_date, attempt, flight_ids, carriers, reasons, cents),
    )


# -- flights.payout ----------------------------------------------------------------------------


class PayoutRun(BaseModel, frozen=True):
    """Which year's compensation to pay."""

    year: int = 2013
    pace_ms: int = Field(default=0, ge=0, le=60_000)
    """How long the bank takes for an order, in milliseconds."""


class Order(BaseModel, frozen=True):
    """A partition: what one airline owes for a half-year."""

    carrier: str
    half: str
    cents: int = Field(gt=0)


class Paid(BaseModel, frozen=True):
    """The result of a partition."""

    payment_id: int
    cents: int


class PayoutSummary(BaseModel, frozen=True):
    """What the whole execution paid."""

    payments: int
    cents: int


class Payout(rowlock.Job[PayoutRun, Order, Paid]):
    """Pays what the ledger says is due: one order for each airline and half-year, never two."""

    name = "flights.payout"
    delivery = rowlock.AT_MOST_ONCE
    timeout_seconds = 120

    def partition(self, params: PayoutRun, _cluster: rowlock.Cluster) -> Iterator[Order]:
        """The orders, with their amounts: what is paid is decided before the first payment."""
        with connect() as connection:
            orders = connection.execute(
                """
                SELECT carrier,
                    to_char(flight_date, 'YYYY"H"') || ceil(extract(month FROM flight_date) / 6)
                        AS half,
                    sum(cents)::bigint
                FROM demo.ledger
                WHERE extract(year FROM flight_date) = %s
                GROUP BY carrier, half
                HAVING sum(cents) > 0
                ORDER BY carrier, half
                """,
                (params.year,),
            )
            for carrier, half, cents in orders:
                yield Order(carrier=carrier, half=half, cents=cents)

    def key(self, part: Order) -> str:
        """Airline and half-year, for example UA-2013H1."""
        return f"{part.carrier}-{part.half}"

    def process(self, part: Order, ctx: rowlock.Context[PayoutRun]) -> Paid:
        """Pay. What happens to the node on the way to the bank and back, nobody here can know."""
        _pace(ctx.params.pace_ms / 2)
        payment_id = bank.pay(
            reference=ctx.idempotency_key,
            carrier=part.carrier,
            half=part.half,
            cents=part.cents,
        )
        _pace(ctx.params.pace_ms / 2)
        return Paid(payment_id=payment_id, cents=part.cents)

    def finish(self, _params: PayoutRun, outcome: rowlock.Outcome[Paid]) -> PayoutSummary:
        """Add up the payments."""
        payments, cents = 0, 0
        for _, paid in outcome.results():
            payments += 1
            cents += paid.cents
        return PayoutSummary(payments=payments, cents=cents)


def _itself(flight_id: int) -> int:
    return flight_id


def _pace(milliseconds: float) -> None:
    if milliseconds > 0:
        time.sleep(milliseconds / 1000)
