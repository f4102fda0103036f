"""Chooses the node that dies: one that is in the middle of a partition at this very moment. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A partition that a node has claimed."""

    partition_id: int
    key: str
    attempt: int
    started: bool
    """It runs. False: it is kept ready for a slot that is not free yet."""
    halfway: bool
    """Something has come of it already, a checkpoint or a payment, and more is to come."""
    kept: int = 0
    """Items that are committed, and that a later attempt does not repeat."""
    done: str = ""
    """How far it is, in words; "" where that is not known."""

    def __str__(self) -> str:
        return f"{self.key} ({self.done})" if self.done else self.key


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one node holds of an execution."""

    node_id: UUID
    node: str
    """The node's name."""
    is_master: bool
    """It drives the execution, too."""
    partitions: tuple[Held, ...]

    @property
    def started(self) -> tuple[Held, ...]:
        """The partitions that it is running."""
        return tuple(held for held in self.partitions if held.started)

    @property
    def halfway(self) -> frozenset[int]:
        """The ids of the partitions that it is in the middle of."""
        return frozenset(held.partition_id for held in self.started if held.halfway)

    def still_runs(self, ids: Collection[int]) -> bool:
        """Whether it runs at least one of these partitions."""
        return any(held.partition_id in ids for held in self.started)


def choose_victim(
    holdings: Sequence[Holding], *, master: bool | None = None, spared: Collection[str] = ()
) -> Holding | None:
    """The node to kill, or None if there is no good one at the moment.

    A node that runs more comes first, so that more has to be recovered; then the first by name.

    Args:
        holdings: What every living node holds.
        master: Only the execution's master, or only another node; None: any.
        spared: Names of nodes to leave alone.
    """
    candidates = [
        holding
        for holding in holdings
        if holding.halfway and holding.node not in spared and master in {None, holding.is_master}
    ]
    return min(candidates, key=lambda one: (-len(one.started), one.node), default=None)
