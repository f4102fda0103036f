"""`rowlock jobs`: lists the jobs that nodes have published, and how many nodes accept each."""

from __future__ import annotations

import argparse

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views


def run(given: argparse.Namespace) -> int:
    """Print them: one line for each contract, because nodes of two releases may run side by side."""
    with opened(arguments.dsn_of(given), "jobs") as db:
        found = views.contracts(db, limit=given.limit + 1)
    page = found[: given.limit]
    more = len(found) > len(page)
    if given.json:
        output.print_json({"jobs": page, "more": more})
        return 0
    output.print_table(
        ("JOB", "CONTRACT", "DELIVERY", "ATTEMPTS", "NODES", "PUBLISHED"),
        [
            (
                one.job_name,
                one.contract_hash,
                one.delivery,
                one.policy.get("max_attempts"),
                one.nodes,
                output.with_age(one.published_at, one.read_at),
            )
            for one in page
        ],
        empty="no jobs: a node publishes those it knows when it starts",
    )
    if more:
        print(f"there are more than {given.limit}: --limit shows up to {arguments.ROWS_MAX}")
    return 0
