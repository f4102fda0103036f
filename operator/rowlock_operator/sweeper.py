"""Find executions whose BatchJob is gone without our noticing: deleted while no operator ran.

Cancelling work is the worst mistake that an operator can make by misreading its world, so an
execution counts as orphaned only if a list of its namespace succeeded and did not hold its BatchJob,
twice, some time apart. No list, or one of a kind that nobody serves, says nothing. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from uuid import UUID

from rowlock_operator.database import Row
from rowlock_operator.model import DeletionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The BatchJobs that lists returned which began after the executions were read."""

    uids: Collection[str]
    namespaces: Collection[str] | None
    """The namespaces whose lists succeeded; None: all of the cluster in one list."""

    def covers(self, namespace: str) -> bool:
        """Whether a BatchJob of this namespace would be in it."""
        return self.namespaces is None or namespace in self.namespaces


def suspects(live: Iterable[Row], *, is_known: Collection[str]) -> list[Row]:
    """The executions that are to be cancelled if their BatchJob is gone, and that nobody has seen.

    Args:
        live: Executions that have not ended.
        is_known: uids of BatchJobs that were there when we looked last.
    """
    return [
        row
        for row in live
        if row.execution.deletion_policy == DeletionPolicy.CANCEL.stored
        and not row.execution.cancel_requested
        and row.uid not in is_known
    ]


class Absences:
    """Since when each execution's BatchJob has been missing."""

    def __init__(self, apart_seconds: float) -> None:
        """Make an empty record.

        Args:
            apart_seconds: How far apart two lists have to be that miss a BatchJob.
        """
        self._apart_seconds = apart_seconds
        self._since: dict[UUID, float] = {}

    def orphans(self, rows: Iterable[Row], listing: Listing, now: float) -> list[Row]:
        """The executions that are orphaned by now.

        Args:
            rows: Suspects that were read before the lists began.
            listing: What the lists returned.
            now: Monotonic seconds.
        """
        missing = {
            row.execution.execution_id: row
            for row in rows
            if listing.covers(row.namespace) and row.uid not in listing.uids
        }
        # Whoever is not missing this time, or could not be looked for, starts again from nothing.
        self._since = {one: self._since.get(one, now) for one in missing}
        return [
            missing[one] for one, since in self._since.items() if now - since >= self._apart_seconds
        ]
