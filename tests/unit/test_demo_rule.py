"""The settlement rule: its bands, its rounding, and what must hold for any flight."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock.demo.rule import Compensation, Reason, compensation, passengers, share

minutes = st.integers(-120, 3000)
miles = st.integers(1, 6000)
seats_of_a_plane = st.integers(1, 600)


def owed(
    arrival_delay: int | None = 0,
    *,
    departure_delay: int | None = 0,
    distance_miles: int = 500,
    seats: int | None = 100,
) -> Compensation:
    return compensation(
        departure_delay=departure_delay,
        arrival_delay=arrival_delay,
        distance_miles=distance_miles,
        seats=seats,
    )


@pytest.mark.parametrize(
    "delay, reason, cents",
    [
        (-40, Reason.ON_TIME, 0),
        (59, Reason.ON_TIME, 0),
        (60, Reason.LATE, 80 * 33_20),
        (119, Reason.LATE, 80 * 33_20),
        (120, Reason.LATE, 80 * 166_02),
        (179, Reason.LATE, 80 * 166_02),
        (180, Reason.LATE, 80 * 332_03),
        (1272, Reason.LATE, 80 * 332_03),
    ],
)
def test_the_share_follows_the_delay_at_arrival(delay: int, reason: Reason, cents: int) -> None:
    assert owed(delay) == Compensation(reason, cents)


@pytest.mark.parametrize(
    "distance, full_cents",
    [(80, 332_03), (932, 332_03), (933, 531_24), (2175, 531_24), (2176, 796_86), (4983, 796_86)],
)
def test_the_full_amount_follows_the_distance(distance: int, full_cents: int) -> None:
    assert owed(180, distance_miles=distance).cents == 80 * full_cents


def test_a_cancelled_flight_owes_the_full_amount() -> None:
    assert owed(None, departure_delay=None) == Compensation(Reason.CANCELLED, 80 * 332_03)


def test_a_diverted_flight_owes_three_quarters_rounded_to_the_cent_for_each_passenger() -> None:
    assert owed(None) == Compensation(Reason.DIVERTED, 80 * 249_02)


def test_an_unknown_plane_counts_a_hundred_seats() -> None:
    assert owed(200, seats=None) == owed(200, seats=100)


@given(earlier=minutes, later=minutes, distance=miles, seats=seats_of_a_plane)
def test_a_longer_delay_never_owes_less(
    earlier: int, later: int, distance: int, seats: int
) -> None:
    earlier, later = sorted((earlier, later))

    first, second = (owed(d, distance_miles=distance, seats=seats) for d in (earlier, later))

    assert 0 <= first.cents <= second.cents


@given(delay=minutes | st.none(), nearer=miles, farther=miles, seats=seats_of_a_plane)
def test_a_longer_flight_never_owes_less(
    delay: int | None, nearer: int, farther: int, seats: int
) -> None:
    nearer, farther = sorted((nearer, farther))

    first, second = (owed(delay, distance_miles=d, seats=seats) for d in (nearer, farther))

    assert first.cents <= second.cents
    assert first.reason == second.reason


@given(delay=minutes | st.none(), distance=miles, few=seats_of_a_plane, many=seats_of_a_plane)
def test_a_bigger_plane_never_owes_less(
    delay: int | None, distance: int, few: int, many: int
) -> None:
    few, many = sorted((few, many))

    first, second = (owed(delay, distance_miles=distance, seats=s) for s in (few, many))

    assert first.cents <= second.cents


@given(delay=minutes | st.none(), distance=miles, seats=seats_of_a_plane)
def test_nothing_owes_more_than_a_cancelled_flight(
    delay: int | None, distance: int, seats: int
) -> None:
    cancelled = owed(None, departure_delay=None, distance_miles=distance, seats=seats)

    assert owed(delay, distance_miles=distance, seats=seats).cents <= cancelled.cents


@given(delay=minutes | st.none(), distance=miles, seats=seats_of_a_plane | st.none())
def test_something_is_owed_for_every_reason_but_on_time(
    delay: int | None, distance: int, seats: int | None
) -> None:
    result = owed(delay, distance_miles=distance, seats=seats)

    assert (result.cents == 0) == (result.reason is Reason.ON_TIME)


@given(cents=st.integers(0, 10**9), percent=st.integers(0, 100))
def test_a_share_is_rounded_to_the_cent_with_halves_up(cents: int, percent: int) -> None:
    exact = Decimal(cents) * percent / 100

    assert share(cents, percent) == int(exact.quantize(Decimal(1), ROUND_HALF_UP))


@given(seats=seats_of_a_plane)
def test_passengers_are_four_fifths_of_the_seats_with_halves_up(seats: int) -> None:
    exact = Decimal(seats) * 4 / 5

    assert passengers(seats) == int(exact.quantize(Decimal(1), ROUND_HALF_UP))
