"""`rowlock nodes`: lists nodes with what they run."""

from __future__ import annotations

import argparse

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views
from rowlock.db.views import Node


def run(given: argparse.Namespace) -> int:
    """Print them."""
    with opened(arguments.dsn_of(given), "nodes") as db:
        found = views.nodes(db, pool=given.pool, removed=given.all, limit=given.limit + 1)
    page = found[: given.limit]
    more = len(found) > len(page)
    if given.json:
        output.print_json({"nodes": page, "more": more})
        return 0
    output.print_table(
        (
            "NAME",
            "NODE",
            "POOL",
            "STATUS",
            "BUSY",
            "CLAIMS",
            "BEAT",
            "UP",
            "EVIDENCE",
            "VERSION",
            "JOBS",
        ),
        [_line(one) for one in page],
        empty="no nodes: rowlock node starts one",
    )
    if more:
        print(f"there are more than {given.limit}: --limit shows up to {arguments.ROWS_MAX}")
    return 0


def _line(one: Node) -> tuple[object, ...]:
    return (
        one.name,
        str(one.node_id)[:8],
        one.pool,
        _state(one),
        f"{one.load}/{one.slots}",
        one.claims,
        output.age(one.heartbeat_at, one.read_at),
        output.between(one.started_at, one.removed_at or one.read_at),
        one.evidence,
        one.version,
        ", ".join(sorted(one.jobs)),
    )


def _state(one: Node) -> str:
    """The status, with what qualifies it."""
    if one.status == "REMOVED":
        return f"REMOVED, {one.removed_reason}" if one.removed_reason else "REMOVED"
    return f"{one.status}, draining" if one.draining else one.status
