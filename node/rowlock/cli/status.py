"""`rowlock status`: shows one execution, or follows it to its end."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from rowlock.cli import arguments, events, output
from rowlock.cli.database import opened
from rowlock.cli.follow import (
    FAILURES_SHOWN,
    follow,
    print_ending,
    print_failures,
    shown,
    snapshot_of,
)
from rowlock.cli.progress import choose_display, details
from rowlock.db import views
from rowlock.db.views import Connection, Event, Execution, Holder, Look, Partition, Payloads

EVENTS_SHOWN: Final = 10
VALUE_CHARS: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is shown of one execution."""

    execution: Execution
    payloads: Payloads
    look: Look
    holders: list[Holder]
    failed: list[Partition]
    events: list[Event]


def run(given: argparse.Namespace) -> int:
    """Print it once, or follow it."""
    dsn = arguments.dsn_of(given)
    with opened(dsn, "status") as db:
        execution_id = views.find_execution(db, given.execution)
        report = None if given.watch else read(db, execution_id)
    if report is None:
        with shown(choose_display(as_json=given.json)) as display:
            end = follow(dsn, execution_id, command="status", display=display)
        return print_ending(end, as_json=given.json)
    if given.json:
        output.print_json(_document(report))
    else:
        _print(report)
    return 0


def read(db: Connection, execution_id: UUID) -> Report:
    """Read everything about one execution, in a handful of statements."""
    execution = views.execution(db, execution_id)
    return Report(
        execution=execution,
        payloads=views.payloads(db, execution_id),
        look=views.look(db, execution_id),
        holders=views.holders(db, execution_id),
        failed=views.partitions(db, execution_id, statuses=["FAILED"], limit=FAILURES_SHOWN)
        if execution.failed
        else [],
        events=views.events(db, execution_id=execution_id, limit=EVENTS_SHOWN),
    )


def _document(report: Report) -> dict[str, Any]:
    return {
        "execution": {**output.fields_of(report.execution), **output.fields_of(report.payloads)},
        "running": report.look.running,
        "holders": report.holders,
        "failed_partitions": report.failed,
        "events": report.events,
    }


def _print(report: Report) -> None:
    one, now = report.execution, report.execution.read_at
    pending = _pending(report)
    output.print_fields(
        {
            "execution": f"{one.execution_id} (number {one.exec_no})",
            "job": f"{one.job_name}, contract {one.contract_hash}, {one.delivery}",
            "instance": one.instance_key,
            "status": _state(one),
            "partitions": details(snapshot_of(report.look))
            + (f", {pending} waiting" if pending else ""),
            "skipped": f"{one.skipped} items" if one.skipped else None,
            "failure": _failure(one),
            "master": _master(one),
            "pool": one.pool if one.priority == 0 else f"{one.pool}, priority {one.priority}",
            "limits": _limits(one),
            "restart of": None
            if one.restart_of is None
            else f"{one.restart_of}, {one.carried} of its partitions are kept",
            "requested": output.with_age(one.requested_at, now),
            "started": output.with_age(one.started_at, now),
            "ended": output.with_age(one.ended_at, now),
            "took": output.between(one.requested_at, one.ended_at),
            "by": report.payloads.requester.get("actor"),
            "parameters": output.compact(report.payloads.parameters, limit=VALUE_CHARS),
            "summary": None
            if report.payloads.summary is None
            else output.compact(report.payloads.summary, limit=VALUE_CHARS),
        }
    )
    if report.holders:
        print()
        output.print_table(
            ("NODE", "RUNNING", "AHEAD", "LONGEST", "ITEMS", "PARTITIONS"),
            [_holder(holder, report) for holder in report.holders],
            empty="",
        )
    if report.failed:
        print("\nfailed:")
        print_failures(one, report.failed)
    if report.events:
        print()
        output.print_table(events.HEADINGS, map(events.line, report.events), empty="")


def _pending(report: Report) -> int | None:
    one, look = report.execution, report.look
    if one.total is None or one.ended:
        return None
    held = sum(holder.running + holder.waiting for holder in report.holders)
    return max(0, one.total - look.completed - look.failed - look.cancelled - held)


def _state(one: Execution) -> str:
    if one.ended:
        return one.status
    asked = {"suspended": one.suspended, "cancel requested": one.cancel_requested}
    return ", ".join([one.status, *(word for word, is_so in asked.items() if is_so)])


def _limits(one: Execution) -> str | None:
    limits = [f"{one.parallelism} partitions at a time"] if one.parallelism is not None else []
    if one.deadline_at is not None:
        limits.append(f"deadline {output.with_age(one.deadline_at, one.read_at)}")
    return ", ".join(limits) or None


def _failure(one: Execution) -> str | None:
    if one.failure_reason is None:
        return None
    return (
        f"{one.failure_reason}: {one.failure_message}"
        if one.failure_message
        else one.failure_reason
    )


def _master(one: Execution) -> str | None:
    if one.master_node is None:
        return None if one.ended else "none yet"
    return f"{one.master_name or 'unknown'} ({one.master_node}), epoch {one.master_epoch}"


def _holder(holder: Holder, report: Report) -> tuple[object, ...]:
    return (
        holder.node_name or str(holder.node_id)[:8],
        holder.running,
        holder.waiting,
        output.between(holder.oldest_at, report.execution.read_at),
        output.share(holder.done, holder.total),
        json.dumps(holder.keys, ensure_ascii=False)[1:-1],
    )
