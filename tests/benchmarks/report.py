"""What every measurement is made on, and how it is told."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from tests.support.fleet import Fleet
from tests.support.postgres import Cluster

DEFAULTS: Final[dict[str, float | str]] = {
    "beat_seconds": 1,
    "unreachable_seconds": 5,
    "removal_grace_seconds": 5,
    "lease_margin_seconds": 1,
    "poll_seconds": 10,
}
"""A fleet's own times are shorter."""


@contextmanager
def fleet_on(cluster: Cluster, **settings: float | str) -> Generator[Fleet]:
    """A fleet over a database of its own."""
    database = cluster.create()
    try:
        with Fleet(database, **(settings or DEFAULTS)) as fleet:
            yield fleet
    finally:
        cluster.drop(database.name)


def say(name: str, text: str) -> None:
    """One line of the report."""
    print(f"{name:<12} {text}", flush=True)
