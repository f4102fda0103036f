"""`rowlock executions`: lists executions, newest first."""

from __future__ import annotations

import argparse

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views
from rowlock.db.views import Execution


def run(given: argparse.Namespace) -> int:
    """Print one page."""
    with opened(arguments.dsn_of(given), "executions") as db:
        found = views.executions(
            db,
            job=given.job,
            statuses=given.statuses,
            before=given.before,
            limit=given.limit + 1,
        )
    page = found[: given.limit]
    next_page = page[-1].exec_no if len(found) > len(page) else None
    if given.json:
        output.print_json({"executions": page, "next_before": next_page})
        return 0
    output.print_table(
        (
            "NO",
            "EXECUTION",
            "JOB",
            "INSTANCE",
            "STATUS",
            "DONE",
            "FAILED",
            "MASTER",
            "ASKED",
            "TOOK",
        ),
        [_line(one) for one in page],
        empty="no executions",
    )
    if next_page is not None:
        print(f"there are more: --before {next_page}")
    return 0


def _line(one: Execution) -> tuple[object, ...]:
    return (
        one.exec_no,
        str(one.execution_id)[:8],
        one.job_name,
        one.instance_key,
        f"{one.status}, suspended" if one.suspended and not one.ended else one.status,
        f"{one.completed}/{'?' if one.total is None else one.total}",
        one.failed,
        one.master_name,
        output.age(one.requested_at, one.read_at),
        output.between(one.requested_at, one.ended_at or one.read_at),
    )
