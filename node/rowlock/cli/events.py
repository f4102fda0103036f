"""`rowlock events`: lists what happened off the happy path, and who did it."""

from __future__ import annotations

import argparse
import re
from typing import Final

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views
from rowlock.db.views import Event

HEADINGS: Final = ("ID", "AT", "AGE", "EVENT", "EXECUTION", "PARTITION", "NODE", "BY", "DETAIL")


def run(given: argparse.Namespace) -> int:
    """Print one page, newest last."""
    with opened(arguments.dsn_of(given), "events") as db:
        execution_id = views.find_execution(db, given.execution) if given.execution else None
        found = views.events(
            db,
            execution_id=execution_id,
            node=given.node,
            event=given.event,
            before=given.before,
            limit=given.limit + 1,
        )
    page = found[-given.limit :]
    next_page = page[0].id if len(found) > len(page) else None
    if given.json:
        output.print_json({"events": page, "next_before": next_page})
        return 0
    if next_page is not None:
        print(f"there are earlier ones: --before {next_page}")
    output.print_table(HEADINGS, [line(one) for one in page], empty="no events")
    return 0


def line(one: Event) -> tuple[object, ...]:
    """An event as a row under `HEADINGS`."""
    return (
        one.id,
        output.local(one.at),
        output.age(one.at, one.read_at),
        one.event,
        None if one.execution_id is None else str(one.execution_id)[:8],
        one.partition_key,
        one.node_name,
        _short(one.actor),
        output.compact(one.detail) if one.detail else None,
    )


def _short(actor: str) -> str:
    """An actor with only the beginning of the id that nodes are named by."""
    return re.sub(r"^(node [0-9a-f]{8})-[0-9a-f-]{27}$", r"\1", actor)
