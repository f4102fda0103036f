"""`rowlock restart`: a new execution of the same instance, with what the earlier one left undone.

The same restart again finds the execution of the first time. Nodes drive it; this process watches.
"""

from __future__ import annotations

import argparse
import uuid

from rowlock.cli import arguments
from rowlock.cli.database import actor, opened
from rowlock.cli.launch import announce, follow_to_end, warn_if_nobody_works
from rowlock.db import views
from rowlock.db.store import Store, refusal
from rowlock.errors import NotFound, Refused


def run(given: argparse.Namespace) -> int:
    """Restart it; the exit code is that of the outcome, or 0 at once with `--detach`."""
    dsn = arguments.dsn_of(given)
    with opened(dsn, "restart") as db:
        earlier = views.execution(db, views.find_execution(db, given.execution))
        of = earlier.execution_id
        execution_id, outcome = Store(db).restart(
            uuid.uuid4(),
            of,
            launch_key=f"restart {of}",
            adopt_after_seconds=0,
            actor=actor(),
            reason=given.reason,
        )
        if outcome == "unknown":  # purged meanwhile
            raise NotFound("execution", given.execution)
        if outcome == "superseded":
            raise Refused(
                f"execution {of} is not the last one of its instance, {execution_id} is: "
                f"rowlock status {execution_id} shows it, rowlock restart {execution_id} restarts it"
            )
        if outcome not in {"restarted", "exists"}:
            raise refusal(earlier.job_name, earlier.instance_key, execution_id, outcome)
        execution = views.execution(db, execution_id)
        if not execution.ended:
            warn_if_nobody_works(db, execution.job_name, execution.contract_hash, execution.pool)
    announce(execution, outcome, as_json=given.json)
    return 0 if given.detach else follow_to_end(dsn, execution_id, as_json=given.json)
