"""What the verbs have in common that change one execution: find it, change it, say what became of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import opened
from rowlock.db import views
from rowlock.db.store import Store
from rowlock.errors import NotFound, Refused


def control(
    given: argparse.Namespace,
    verb: str,
    change: Callable[[Store, UUID], str],
    meaning: Mapping[str, str],
) -> int:
    """Carry out a verb; the same one again changes nothing and is no mistake.

    Args:
        given: The command line.
        verb: The word that was typed.
        change: Makes the change, and gives the database's answer.
        meaning: What to say for each answer; any other one is the state of an execution for which the
            verb came too late.

    Raises:
        NotFound: There is no such execution.
        Refused: It has ended.
    """
    with opened(arguments.dsn_of(given), verb) as db:
        execution_id = views.find_execution(db, given.execution)
        answer = change(Store(db), execution_id)
    if answer == "unknown":  # purged meanwhile
        raise NotFound("execution", given.execution)
    if answer == "superseded":
        raise Refused(
            f"execution {execution_id} is not the last one of its instance, which has been restarted: "
            f"rowlock explain {execution_id} names the one after it"
        )
    if answer not in meaning:
        raise Refused(
            f"execution {execution_id} is {answer}: there is nothing left to {verb}; "
            f"rowlock explain {execution_id} says how it ended"
        )
    if given.json:
        output.print_json({"execution_id": execution_id, "answer": answer})
    else:
        print(f"execution {execution_id}: {meaning[answer]}")
    return 0
