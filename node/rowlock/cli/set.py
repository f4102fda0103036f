"""`rowlock set`: changes the priority, the limit and the deadline of an execution while it runs."""

from __future__ import annotations

import argparse
from typing import Any

from rowlock.cli.control import control
from rowlock.cli.database import actor
from rowlock.errors import UsageError


def run(given: argparse.Namespace) -> int:
    """Change what was named, and nothing else."""
    changes = changes_of(given)
    return control(
        given,
        "set",
        lambda store, execution: store.set_limits(execution, changes, actor(), given.reason),
        {
            "changed": f"now has {_words(changes)}",
            "same": "it had these before; nothing has changed",
        },
    )


def changes_of(given: argparse.Namespace) -> dict[str, Any]:  # Any: a number, or None for no limit
    """The changes that a command line asks for.

    Raises:
        UsageError: It asks for none.
    """
    asked = {
        "priority": given.priority,
        "parallelism": given.parallelism,
        "deadline_seconds": given.deadline,
    }
    changes = {
        name: None if value == "none" else value
        for name, value in asked.items()
        if value is not None
    }
    if not changes:
        raise UsageError(
            "rowlock set changes nothing without --priority, --parallelism or --deadline"
        )
    return changes


def _words(changes: dict[str, Any]) -> str:  # Any: as above
    names = {"deadline_seconds": "a deadline in seconds after the request"}
    return ", ".join(
        f"{names.get(name, name)} of {'none' if value is None else value}"
        for name, value in changes.items()
    )
