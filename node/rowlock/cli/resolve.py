"""`rowlock resolve`: a person says what became of a partition that FAILED.

For AT_MOST_ONCE work that was lost after its start only a person can know. It takes effect in the next
execution of the instance; the FAILED row itself stays as it is.
"""

from __future__ import annotations

import argparse
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import actor, opened
from rowlock.db import views
from rowlock.db.store import Store
from rowlock.db.views import Connection
from rowlock.errors import NotFound, Refused, UsageError
from rowlock.jsontext import RESULT_BYTES, check_json


def run(given: argparse.Namespace) -> int:
    """Write the resolution; the same one again changes nothing."""
    _refuse_idle_options(given)
    key: str = given.partition_key
    with opened(arguments.dsn_of(given), "resolve") as db:
        execution_id = views.find_execution(db, given.execution)
        answer = Store(db).resolve(
            execution_id,
            key,
            how="completed" if given.completed else "retry",
            result=_result(db, execution_id, given.result) if given.completed else None,
            force=given.force,
            actor=actor(),
            reason=given.reason,
        )
    if answer == "unknown":
        raise NotFound("partition", key)
    if answer not in {"resolved", "same"}:
        raise _refusal(answer, execution_id, key)
    if given.json:
        output.print_json({"execution_id": execution_id, "partition_key": key, "answer": answer})
    else:
        print(output.printable(f"partition {key!r}: {_words(given, answer)}"))
        print(f"it takes effect with rowlock restart {execution_id}")
    return 0


def _refuse_idle_options(given: argparse.Namespace) -> None:
    """Options that would do nothing are mistakes."""
    if given.result is not None and not given.completed:
        raise UsageError("--result needs --completed: work that is done again has no result yet")
    if given.force and not given.retry:
        raise UsageError("--force needs --retry: nothing else can be in its way")


def _result(db: Connection, execution_id: UUID, given: str | None) -> str:
    """The result as JSON text, as the job's contract wants it: finish() will read it."""
    from rowlock.contract_schema import check_against_schema

    text = check_json("null" if given is None else given, "result", RESULT_BYTES)
    execution = views.execution(db, execution_id)
    schema = views.schemas(db, execution.job_name, execution.contract_hash)["result"]
    check_against_schema(schema, text, "result")
    return text


def _refusal(answer: str, execution_id: UUID, key: str) -> Refused:
    if answer in {"completed", "abandoned"}:
        return Refused(
            f"the instance of execution {execution_id} is {answer}: it never runs again, so that "
            f"nothing of it can be resolved"
        )
    return Refused(
        {
            "not_failed": f"partition {key!r} of execution {execution_id} has not FAILED: only what "
            "failed can be resolved",
            "orphan": f"an attempt at partition {key!r} still runs on a node that was removed "
            "(rowlock nodes --all --json, orphans): wait for its end, or use --force",
            "superseded": f"execution {execution_id} is not the last one of its instance: resolve "
            "the partition in the last one",
        }[answer]
    )


def _words(given: argparse.Namespace, answer: str) -> str:
    if answer == "same":
        return "it was resolved like this before; nothing has changed"
    return "resolved as completed" if given.completed else "resolved: it may be done again"
