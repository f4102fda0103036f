"""What the operator remembers of BatchJobs: nothing for long of those that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from rowlock_operator.cache import Cache, Seen
from rowlock_operator.database import Row
from rowlock_operator.model import FailedPartition
from rowlock_operator.observe import Observer
from tests.support.batchjobs import NAME, NAMESPACE, OPTIONS, UID, a_batchjob, an_execution

EXECUTION = an_execution(failed=1)
ROW = Row(execution=EXECUTION, number=1, namespace=NAMESPACE, name=NAME, uid=UID)


class OneExecution:
    """A database with one execution, of which a partition has failed."""

    async def execution_of(self, _uid: str) -> Row:
        return ROW

    async def failed_partitions(self, _run: object) -> tuple[FailedPartition, ...]:
        return (FailedPartition(key="p1", attempts=3, reason="ValueError", message="no flight"),)

    async def pool_nodes(self, _job: str, _pool: str) -> int:
        return 1


def remembered(observer: Observer) -> set[str]:
    """Which of its memories are not empty."""
    return {name for name, value in vars(observer).items() if isinstance(value, dict) and value}


def test_what_is_heard_of_a_batchjob_after_it_has_gone_is_not_kept() -> None:
    observer = Observer(
        cache=Cache(),
        database=cast(Any, OneExecution()),
        kubernetes=cast(Any, None),
        options=lambda: OPTIONS,
    )
    seen = asyncio.run(observer.observe(Seen(a_batchjob(), at=0.0)))
    assert seen.execution is not None
    assert len(seen.execution.failed_partitions) == 1
    observer.acted(UID)
    observer.shown(UID, EXECUTION)
    before = remembered(observer)
    assert before == {"_looks", "_acted", "_shown", "_failed"}

    observer.forget_all_but({UID})
    assert remembered(observer) == before

    observer.forget(UID)
    ended = replace(ROW, execution=an_execution("CANCELLED"))
    observer.mirrored([ended], asked_at=1.0)  # the mirror tells of the end, too
    assert "_looks" in remembered(observer)
    observer.forget_all_but({"of another one"})
    assert remembered(observer) == set()
