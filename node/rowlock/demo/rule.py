"""The settlement rule: what an airline owes the passengers of one flight. Pure and in whole cents.

The rule is invented for the demonstration. Its amounts are those of the European Union's regulation
261/2004, which did not apply to these flights, in dollars. DATA.md states the rule in words;
`reference.sql` states it a second time, in another form, so that each can be checked by the other.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

UNKNOWN_PLANE_SEATS: Final = 100
"""Seats of a plane that the fleet list does not have."""

FULL_CENTS: Final = (33_203, 53_124, 79_686)
"""The full amount for a passenger of a short, a medium and a long flight: 250, 400 and 600 euros at
the mean rate of 2013, 1.3281 dollars."""
_MEDIUM_AND_LONG_MILES: Final = (933, 2_176)  # more than 1,500 and 3,500 kilometres

LATE_PERCENT: Final = (0, 10, 50, 100)
"""The share of the full amount by delay at arrival: under 1 h, from 1 h, from 2 h, from 3 h."""
_LATE_MINUTES: Final = (60, 120, 180)

CANCELLED_PERCENT: Final = 100
DIVERTED_PERCENT: Final = 75


class Reason(StrEnum):
    """Why an amount is due, or none."""

    ON_TIME = "on time"
    """Arrived less than an hour late: nothing is due."""
    LATE = "late"
    CANCELLED = "cancelled"
    """Did not depart."""
    DIVERTED = "diverted"
    """Departed, and has no arrival at its destination."""


@dataclass(frozen=True, slots=True)
class Compensation:
    """What is due for one flight."""

    reason: Reason
    cents: int


def compensation(
    *,
    departure_delay: int | None,
    arrival_delay: int | None,
    distance_miles: int,
    seats: int | None,
) -> Compensation:
    """What the airline owes for a flight.

    Args:
        departure_delay: Minutes; None if the flight did not depart.
        arrival_delay: Minutes; None if it did not arrive where it should.
        distance_miles: Between the two airports.
        seats: Of the plane; None if the fleet list does not have the plane.
    """
    reason, percent = _reason(departure_delay, arrival_delay)
    if percent == 0:
        return Compensation(reason, 0)
    full_cents = FULL_CENTS[bisect_right(_MEDIUM_AND_LONG_MILES, distance_miles)]
    return Compensation(reason, passengers(seats) * share(full_cents, percent))


def passengers(seats: int | None) -> int:
    """How many passengers are assumed: four seats of five, halves rounded up."""
    return (8 * (UNKNOWN_PLANE_SEATS if seats is None else seats) + 5) // 10


def share(cents: int, percent: int) -> int:
    """A percentage of an amount, to the cent, halves rounded up."""
    return (cents * percent + 50) // 100


def _reason(departure_delay: int | None, arrival_delay: int | None) -> tuple[Reason, int]:
    if departure_delay is None:
        return Reason.CANCELLED, CANCELLED_PERCENT
    if arrival_delay is None:
        return Reason.DIVERTED, DIVERTED_PERCENT
    percent = LATE_PERCENT[bisect_right(_LATE_MINUTES, arrival_delay)]
    return (Reason.LATE if percent else Reason.ON_TIME), percent
