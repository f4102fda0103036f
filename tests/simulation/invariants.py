"""What must hold after every step, asked of the rows themselves: no model is needed to say it.

I1  one living owner for each claim: a CLAIMED partition has an owner that is not removed, or whose claims
    are still to be recovered
I2  claims of a partition only grow, by one, and only when it is taken
I3  terminal states never change, of partitions and of executions
I4  a write under an old token changes nothing
I5  AT_MOST_ONCE work starts at most once, over all executions of its instance (`Ledger`)
I6  an execution ends only when nothing of it is live, and COMPLETED only over a whole plan with no more
    failures than it tolerates; its counters say what its rows say
I7  an execution that has begun has a living master, or gets one soon (`simulation`, once faults are over)
I8  what authors commit is there exactly once: one row for each partition that one of their transactions
    completed, and none of anybody else
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation.model import ENDED, OVER, Database
from tests.simulation.snapshot import Snapshot


def check(before: Snapshot, after: Snapshot) -> None:
    """Compare two moments with one step between them.

    Raises:
        AssertionError: An invariant is broken.
    """
    _check_owners(after.db)
    _check_rows(before.db, after.db)
    _check_executions(before.db, after.db)
    _check_business(after)
    _check_counts(after)


def _check_owners(db: Database) -> None:
    for number, row in enumerate(db.partitions):
        if row.status == "CLAIMED":
            assert row.owner is not None, f"I1: nobody holds partition {number}"
            owner = db.nodes[row.owner]
            assert not owner.recovered, f"I1: partition {number} belongs to a node that is gone"
    waiting = {
        (db.executions[p.execution].instance, p.key)
        for p in db.partitions
        if p.status == "PENDING" and p.delivery == "AT_MOST_ONCE"
    }
    for start in db.starts:
        assert (start.instance, start.key) not in waiting, f"I5: {start} is to start again"


def _check_rows(before: Database, after: Database) -> None:
    for number, (old, new) in enumerate(zip(before.partitions, after.partitions, strict=False)):
        taken = old.status == "PENDING" and new.status == "CLAIMED"
        assert new.claims == old.claims + taken, f"I2: partition {number}: {old} to {new}"
        assert old.status not in OVER or old == new, f"I3: partition {number}: {old} to {new}"
    for number, (was, is_) in enumerate(zip(before.executions, after.executions, strict=False)):
        assert was.status not in ENDED or was == is_, f"I3: execution {number}: {was} to {is_}"


def _check_executions(before: Database, after: Database) -> None:
    for number, execution in enumerate(after.executions):
        if execution.status not in ENDED or (
            number < len(before.executions) and before.executions[number].status in ENDED
        ):
            continue
        rows = [p for p in after.partitions if p.execution == number]
        statuses = Counter(p.status for p in rows)
        assert set(statuses) <= OVER, f"I6: execution {number} has ended with {statuses}"
        if execution.total is not None:
            assert execution.carried + len(rows) == execution.total, f"I6: {number} has no plan"
        if execution.status == "COMPLETED":
            assert statuses["CANCELLED"] == 0, f"I6: execution {number}: {statuses}"
            assert statuses["FAILED"] <= (execution.max_failed or 0), f"I6: {number}: {statuses}"


def _check_business(after: Snapshot) -> None:
    counts = Counter(row for row, _ in after.business)
    for (row, token), n in Counter(after.business).items():
        partition = after.db.partitions[row]
        assert n == counts[row] == 1, f"I8: partition {row} has its effect {counts[row]} times"
        assert (partition.status, partition.claims) == ("COMPLETED", token), (
            f"I8: claim {token} of partition {row} left its effect: {partition}"
        )


def _check_counts(after: Snapshot) -> None:
    for number in range(len(after.db.executions)):
        statuses = Counter(p.status for p in after.db.partitions if p.execution == number)
        rows = (statuses["COMPLETED"], statuses["FAILED"], statuses["CANCELLED"])
        counted = after.counts.get(number, (0, 0, 0))
        assert counted == rows, f"I6: the counters of execution {number} say {counted}, not {rows}"


def check_write(before: Snapshot, after: Snapshot, row: int, token: int) -> None:
    """A holder, or who believes to be one, has written under this token.

    Raises:
        AssertionError: The claim was not its any more, and something has changed.
    """
    was = before.db.partitions[row]
    if was.status != "CLAIMED" or was.claims != token:
        assert before == after, f"I4: claim {token} is gone, and changed {was}"


@dataclass(slots=True)
class Ledger:
    """What author code has really done, whatever the database says."""

    begun: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    """Starts of AT_MOST_ONCE partitions, by instance and key."""
    attempts: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Claims whose author code has begun."""
    done: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Claims whose author code came to its end."""

    def begin(self, db: Database, row: int, token: int) -> None:
        """Author code begins.

        Raises:
            AssertionError: It may not.
        """
        assert (row, token) not in self.attempts, f"I1: claim {token} of partition {row} ran twice"
        self.attempts.add((row, token))
        partition = db.partitions[row]
        if partition.delivery == "AT_MOST_ONCE":
            key = (db.executions[partition.execution].instance, partition.key)
            self.begun[key] += 1
            assert self.begun[key] == 1, f"I5: {partition.key} was started twice"

    def end(self, row: int, token: int) -> None:
        """Author code has done all of its work."""
        self.done.add((row, token))

    def check_end(self, db: Database) -> None:
        """What is COMPLETED was done, by the attempt whose completion was accepted.

        Raises:
            AssertionError: It was not.
        """
        for number, row in enumerate(db.partitions):
            if row.status == "COMPLETED":
                assert (number, row.claims) in self.done, f"O1: {row} was completed by nobody"
