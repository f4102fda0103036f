"""`rowlock abandon`: gives an instance up for ever; no execution of it is launched again."""

from __future__ import annotations

import argparse

from rowlock.cli import output
from rowlock.cli.control import control
from rowlock.cli.database import actor


def run(given: argparse.Namespace) -> int:
    """Abandon it."""
    code = control(
        given,
        "abandon",
        lambda store, execution: store.abandon(execution, actor(), given.reason),
        {"abandoned": "abandoned; its instance is never launched again"},
    )
    output.warn(
        "attempts that still run are asked to stop and change nothing in the database any more; "
        "what they do elsewhere until then nobody waits for"
    )
    return code
