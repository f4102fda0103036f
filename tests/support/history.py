"""Partitions by the hundred thousand, written straight into the table: those that wait, and those that are over."""

from __future__ import annotations

from typing import Any, LiteralString
from uuid import UUID

import psycopg

_FILL: LiteralString = """
INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice, status, ended_at, result)
SELECT coalesce(%(execution)s, gen_random_uuid()), 'main', %(prefix)s || g, 'AT_LEAST_ONCE', '{}',
       CASE WHEN %(result)s::jsonb IS NULL THEN 'PENDING' ELSE 'COMPLETED' END,
       CASE WHEN %(result)s::jsonb IS NULL THEN NULL ELSE now() END, %(result)s::jsonb
  FROM generate_series(1, %(count)s) g
"""
_SETTLE: LiteralString = "VACUUM ANALYZE rowlock.batch_partitions"


def fill(
    db: psycopg.Connection[Any],
    count: int,
    prefix: str,
    *,
    execution: UUID | None,
    result: str | None = None,
) -> None:
    """Add partitions.

    Args:
        db: A superuser's connection.
        count: How many.
        prefix: What their keys begin with.
        execution: Whose they are; None: of executions that nobody knows any more, each of another.
        result: JSON; those with a result are over, the others wait.
    """
    values = {"execution": execution, "prefix": prefix, "count": count, "result": result}
    db.execute(_FILL, values)


def settle(db: psycopg.Connection[Any]) -> None:
    """Let the planner know what there is."""
    db.execute(_SETTLE)
