"""`rowlock partitions`: lists the partitions of an execution."""

from __future__ import annotations

import argparse

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views
from rowlock.db.views import Partition


def run(given: argparse.Namespace) -> int:
    """Print one page."""
    with opened(arguments.dsn_of(given), "partitions") as db:
        execution_id = views.find_execution(db, given.execution)
        found = views.partitions(
            db, execution_id, statuses=given.statuses, after=given.after, limit=given.limit + 1
        )
        page = found[: given.limit]
        wanted = [one.id for one in page] if given.json and given.payloads else []
        payloads = views.partition_payloads(db, wanted) if wanted else {}
    next_page = page[-1].id if len(found) > len(page) else None
    if given.json:
        lines = [
            {**output.fields_of(one), **(output.fields_of(payloads[one.id]) if payloads else {})}
            for one in page
        ]
        output.print_json(
            {"execution_id": execution_id, "partitions": lines, "next_after": next_page}
        )
        return 0
    output.print_table(
        (
            "ID",
            "KEY",
            "STATUS",
            "NODE",
            "CLAIMS",
            "FAILURES",
            "LOST",
            "TOOK",
            "ITEMS",
            "LAST ERROR",
        ),
        [_line(one) for one in page],
        empty="no partitions",
    )
    if next_page is not None:
        print(f"there are more: --after {next_page}")
    return 0


def _line(one: Partition) -> tuple[object, ...]:
    return (
        one.id,
        one.partition_key,
        _state(one),
        one.node_name,
        one.claims,
        one.failures,
        one.lost,
        output.between(one.started_at, one.ended_at or one.read_at),
        _items(one),
        one.error_text,
    )


def _items(one: Partition) -> str | None:
    """What it told of its items; of one that is done only what it left out."""
    told = one.counters or {}
    done = None if one.status == "COMPLETED" else output.share(told.get("done"), told.get("total"))
    skipped = f"{told['skipped']} skipped" if told.get("skipped") else None
    return ", ".join(part for part in (done, skipped) if part) or None


def _state(one: Partition) -> str:
    """The status; of one that waits for its next attempt, also how long."""
    if one.status == "PENDING" and not one.ready and one.available_at is not None:
        seconds = (one.available_at - one.read_at).total_seconds()
        return f"PENDING, due in {output.duration(seconds)}" if seconds > 0 else "PENDING, due"
    if one.status == "CLAIMED" and one.started_at is None:
        return "CLAIMED ahead"
    return one.status
