"""What latencies are compared by cannot miss slow calls, and is not moved by a machine that is busy for a while."""

import random

import pytest

from tests.support.latency import percentile, slow_ones


def calls(slow_share: float, seed: int) -> list[float]:
    """A thousand of about a millisecond, some of which, wherever they come, take five."""
    chance = random.Random(seed)
    return [
        chance.uniform(0.0009, 0.0011) * (5 if chance.random() < slow_share else 1)
        for _ in range(1000)
    ]


@pytest.mark.parametrize("percent, slow_share", [(95, 0.2), (95, 0.1), (99, 0.2), (99, 0.05)])
def test_a_share_of_slow_calls_cannot_hide(percent: int, slow_share: float) -> None:
    for seed in range(200):
        usual, slowed = calls(0, seed), calls(slow_share, seed)
        assert slow_ones(slowed, percent) > 4 * slow_ones(usual, percent), seed


def test_calls_that_are_all_slower_are_seen_by_as_much() -> None:
    values = calls(0, 1)
    assert slow_ones([2 * value for value in values]) == pytest.approx(2 * slow_ones(values))


@pytest.mark.parametrize("percent", [95, 99])
def test_a_machine_that_is_busy_for_a_while_moves_little(percent: int) -> None:
    values = calls(0, 1)
    busy = [value * (20 if 300 <= number < 600 else 1) for number, value in enumerate(values)]
    assert slow_ones(busy, percent) < 1.1 * slow_ones(values, percent)


def test_too_few_calls_are_no_measurement() -> None:
    with pytest.raises(AssertionError, match="no five stretches"):
        slow_ones([0.001] * 199)


@pytest.mark.parametrize("percent, found", [(95, 95), (99, 99), (100, 100)])
def test_a_percentile_is_one_of_the_values(percent: int, found: int) -> None:
    assert percentile(range(100, 0, -1), percent) == found
