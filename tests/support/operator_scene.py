"""What tests of the operator bring about and look at in the database, in a line each."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from rowlock.protocol.model import FIRST_STEP
from tests.support.builders import HASH, Run, Scene, a_policy
from tests.support.cluster import Object, batchjob
from tests.support.postgres import Database
from tests.support.waiting import wait_until

PARAMETERS: Final = {
    "type": "object",
    "properties": {"month": {"type": "integer"}},
    "required": ["month"],
    "additionalProperties": False,
}


class OperatorScene(Scene):
    """A job that is published, and the executions that BatchJobs have asked for.

    It plays the nodes: an operator never touches a partition.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.pool = "default"  # the one in the pools file of the manifests
        self.publish()

    def publish(self, job: str | None = None, *, delivery: str = "AT_LEAST_ONCE") -> None:
        """Publish a contract, of the scene's job if none is named: parameters {"month": integer}."""
        self.store.publish_contract(
            job or self.job,
            HASH,
            schemas={"parameters": PARAMETERS},
            policy=a_policy(),
            delivery=delivery,
        )

    def batchjob(self, name: str, /, **spec: Any) -> Object:
        """A BatchJob of the scene's job, to apply."""
        return batchjob(name, **{"job": self.job, "parameters": {"month": 7}, **spec})

    def executions(self, name: str | None = None) -> list[Any]:
        """Rows of the executions that BatchJobs have asked for, or that this one has, oldest first."""
        return self.all(
            "SELECT * FROM rowlock.executions WHERE requester ->> 'kind' = 'BatchJob'"
            " AND (%s::text IS NULL OR requester ->> 'name' = %s) ORDER BY exec_no",
            name,
            name,
        )

    def execution_of(self, name: str, number: int = 1) -> Any:
        """An execution of a BatchJob by its number, counted from 1; waits for it."""
        wait_until(
            lambda: len(self.executions(name)) >= number,
            seconds=60,
            what=f"execution {number} of {name}",
            every_seconds=0.05,
        )
        found = self.executions(name)
        assert len(found) == number, f"{len(found)} executions of {name}"
        return found[-1]

    def status_becomes(self, execution_id: UUID, *statuses: str, seconds: float = 60) -> None:
        """Wait until an execution is in one of these states."""
        wait_until(
            lambda: self.execution(execution_id).status in statuses,
            seconds=seconds,
            what=f"{execution_id} {' or '.join(statuses)}",
            every_seconds=0.05,
        )

    def plan(self, execution_id: UUID, partitions: int = 4, *, slots: int = 2) -> Run:
        """Plan an execution as its own master pod does, which then may claim its partitions."""
        master = self.a_node(only=execution_id, slots=slots)
        taken = self.store.adopt(master, execution_id)
        assert taken is not None, "somebody else is its master, or it waits"
        run = Run(id=execution_id, master=master, epoch=taken.epoch, instance=taken.instance_key)
        self.stage(run, [f"p{number}" for number in range(partitions)])
        sealed = self.store.seal(run.id, run.epoch, FIRST_STEP, partitions)
        assert sealed == ("sealed", None), sealed
        return run

    def work(self, run: Run, count: int) -> None:
        """Complete so many partitions of an execution."""
        for _ in range(count):
            (claim,) = self.claim(run.master, slots=1, idle=True)
            assert self.complete(run.master, claim) == ["completed"]

    def run_to_the_end(self, execution_id: UUID, partitions: int = 4) -> None:
        """Plan an execution, run all of it and let it end."""
        run = self.plan(execution_id, partitions)
        self.work(run, partitions)
        assert self.advance(run) == "COMPLETED"
