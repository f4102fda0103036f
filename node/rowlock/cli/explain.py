"""`rowlock explain`: says why an execution does not move, or why it ended as it did, and what to do."""

from __future__ import annotations

import argparse
from typing import Final
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.cli.obstacles import NAMES_MAX, Facts, reasons
from rowlock.db import diagnosis, views
from rowlock.db.views import Connection

NODES_MAX: Final = 10_000


def run(given: argparse.Namespace) -> int:
    """Print every reason; the exit code is 0 whatever they are."""
    with opened(arguments.dsn_of(given), "explain") as db:
        facts = read(db, views.find_execution(db, given.execution))
    found = reasons(facts)
    one = facts.execution
    if given.json:
        output.print_json(
            {"execution_id": one.execution_id, "status": one.status, "reasons": found}
        )
        return 0
    print(output.printable(f"execution {one.execution_id} of {one.job_name} is {one.status}:"))
    for reason in found:
        print(f"- {reason.text}")
        if reason.remedy:
            print(f"  → {reason.remedy}")
    return 0


def read(db: Connection, execution_id: UUID) -> Facts:
    """Read what the reasons are found from, from the views alone."""
    one = views.execution(db, execution_id)
    closing = diagnosis.closing_since(db, execution_id) if one.status == "CLOSING" else None
    return Facts(
        execution=one,
        nodes=views.nodes(db, limit=NODES_MAX),
        waiting=diagnosis.waiting(db, execution_id),
        holders=[] if one.ended else views.holders(db, execution_id),
        ahead=diagnosis.waiting_before(db, pool=one.pool, priority=one.priority),
        closing_since=closing,
        interrupted=diagnosis.interrupted(db, execution_id),
        failed=views.partitions(db, execution_id, statuses=["FAILED"], limit=1)
        if one.failed
        else [],
        unresolved=diagnosis.unresolved(db, execution_id, limit=NAMES_MAX + 1)
        if one.failed
        else [],
        later=diagnosis.restart_of(db, execution_id),
    )
