"""`rowlock cancel`: cancels an execution; cancelling one that has ended changes nothing."""

from __future__ import annotations

import argparse
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import actor, opened
from rowlock.cli.follow import follow, shown
from rowlock.cli.progress import Nothing, choose_display
from rowlock.db import views
from rowlock.db.store import Store
from rowlock.errors import NotFound


def run(given: argparse.Namespace) -> int:
    """Cancel it. The exit code is 0 as soon as the execution is ending, or has ended before."""
    dsn = arguments.dsn_of(given)
    with opened(dsn, "cancel") as db:
        execution_id = views.find_execution(db, given.execution)
        answer = Store(db).cancel(execution_id, actor(), given.reason)
        if answer == "unknown":
            raise NotFound("execution", given.execution)
        ended = views.execution(db, execution_id).ended
    if given.wait and not ended:
        answer = _wait(dsn, execution_id, quiet=given.json)
    if given.json:
        output.print_json({"execution_id": execution_id, "answer": answer})
    else:
        print(f"execution {execution_id}: {_words(answer)}")
    return 0


def _wait(dsn: str, execution_id: UUID, *, quiet: bool) -> str:
    with shown(Nothing() if quiet else choose_display(as_json=False)) as display:
        return follow(dsn, execution_id, command="cancel", display=display).execution.status.lower()


def _words(answer: str) -> str:
    if answer == "closing":
        return "closing; attempts that run are asked to stop (--wait waits for the end)"
    return answer if answer == "cancelled" else f"{answer}; there was nothing left to cancel"
