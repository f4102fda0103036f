"""`rowlock purge`: deletes what ended long enough ago, now, as nodes do by themselves.

Instances stay, and so do the starts of AT_MOST_ONCE work: what ran once is not run again because its
history was deleted.
"""

from __future__ import annotations

import argparse
from typing import Final

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db.store import Store
from rowlock.errors import UsageError
from rowlock.settings import DAY_SECONDS

ROWS_MAX: Final = 5000
"""Rows deleted in one transaction."""


def run(given: argparse.Namespace) -> int:
    """Delete in small transactions until nothing is left that is old enough."""
    asked = (given.completed_days, given.failed_days, given.events_days)
    if asked == ("never", "never", "never"):
        raise UsageError(
            "rowlock purge deletes nothing without --completed-days, --failed-days or --events-days"
        )
    completed, failed, events = (None if one == "never" else one * DAY_SECONDS for one in asked)
    counts = {"executions": 0, "partitions": 0, "events": 0, "nodes": 0}
    with opened(arguments.dsn_of(given), "purge") as db:
        store = Store(db)
        more = True
        while more:
            done = store.retain(
                completed_seconds=completed,
                failed_seconds=failed,
                events_seconds=events,
                limit=ROWS_MAX,
            )
            for name in counts:
                counts[name] += getattr(done, name)
            more = done.more
    if given.json:
        output.print_json(counts)
    else:
        print("deleted " + ", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0
