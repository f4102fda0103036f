"""Waits before something is tried again: longer and longer, bounded, and never in step with others."""

import random
from collections import Counter

from rowlock.protocol.backoff import reconnect_seconds


def test_waits_for_a_connection_grow_up_to_a_cap() -> None:
    longest = [reconnect_seconds(tries=n, cap_seconds=2.5, draw=1.0) for n in range(1, 9)]
    assert longest == [0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5, 2.5]
    assert reconnect_seconds(tries=10_000, cap_seconds=2.5, draw=1.0) == 2.5


def test_nodes_that_lost_their_database_at_once_do_not_come_back_at_once() -> None:
    """Of 30 nodes, none of whose first tries found room, no tenth of a second sees more than a third.
    (Reported as graphile-worker#564 and hatchet#1540: a herd keeps the server's connections used
    up.)"""
    rng = random.Random(7)
    moments = [
        sum(reconnect_seconds(tries=n, cap_seconds=2.5, draw=rng.random()) for n in range(1, 6))
        for _ in range(30)
    ]
    bins = Counter(int(moment * 10) for moment in moments)
    assert max(bins.values()) <= 10
