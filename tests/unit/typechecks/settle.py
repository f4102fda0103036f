"""The job of the design page, complete: type checkers accept it and rowlock runs it."""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

from pydantic import BaseModel

import rowlock


class Month(BaseModel):
    year: int
    month: int


class Day(BaseModel):
    date: date


class Settled(BaseModel):
    flights: int
    cents: int


class Summary(BaseModel):
    days: int
    cents: int


@dataclass(frozen=True)
class Flight:
    id: int
    cents: int


def read(day: Day, after: int | None) -> Iterator[Flight]:
    """Twelve flights a day, in the order of their ids, those after the given id."""
    first = day.date.toordinal() * 100
    for number in range(first, first + 12):
        if after is None or number > after:
            yield Flight(id=number, cents=number % 97)


class Settle(rowlock.Job[Month, Day, Settled]):
    name = "flights.settle"
    delivery = rowlock.AT_LEAST_ONCE
    retry = rowlock.Retry(max_attempts=5, initial_seconds=2, factor=2, max_seconds=300)
    timeout_seconds = 600

    def partition(self, params: Month, cluster: rowlock.Cluster) -> Iterator[Day]:
        for number in range(calendar.monthrange(params.year, params.month)[1]):
            yield Day(date=date(params.year, params.month, number + 1))

    def key(self, day: Day) -> str:
        return day.date.isoformat()

    def process(self, day: Day, ctx: rowlock.Context[Month]) -> Settled:
        for chunk in ctx.chunks(lambda after: read(day, after), size=5, key=lambda f: f.id):
            with ctx.transaction() as db:
                for flight in chunk:
                    db.execute(
                        "INSERT INTO ledger (flight, cents) VALUES (%s, %s)",
                        (flight.id, flight.cents),
                    )
        flights = list(read(day, None))
        settled = Settled(flights=len(flights), cents=sum(f.cents for f in flights))
        return ctx.finished(settled) if ctx.should_stop else settled

    def finish(self, params: Month, outcome: rowlock.Outcome[Settled]) -> Summary:
        return Summary(
            days=outcome.completed, cents=sum(result.cents for _, result in outcome.results())
        )
