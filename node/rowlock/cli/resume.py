"""`rowlock resume`: a suspended execution goes on."""

from __future__ import annotations

import argparse

from rowlock.cli.control import control
from rowlock.cli.database import actor


def run(given: argparse.Namespace) -> int:
    """Resume it."""
    return control(
        given,
        "resume",
        lambda store, execution: store.resume(execution, actor(), given.reason),
        {"resumed": "resumed", "same": "it was not suspended; nothing has changed"},
    )
