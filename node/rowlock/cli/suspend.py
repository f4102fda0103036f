"""`rowlock suspend`: nothing more of an execution begins; what runs comes to its end."""

from __future__ import annotations

import argparse

from rowlock.cli.control import control
from rowlock.cli.database import actor


def run(given: argparse.Namespace) -> int:
    """Suspend it."""
    return control(
        given,
        "suspend",
        lambda store, execution: store.suspend(execution, actor(), given.reason),
        {
            "suspended": f"suspended; attempts that run come to their end; "
            f"rowlock resume {given.execution} lets it go on",
            "same": "it was suspended before; nothing has changed",
        },
    )
