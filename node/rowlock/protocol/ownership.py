"""What a node may begin, keep and give up of what it holds, or believes to hold.

The runtime asks here before it acts, and so does the simulation, whose nodes are virtual: what is tried in
thousands of histories is what nodes do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Generic[K, T]):
    """Where a node and the database disagree about what the node holds."""

    unknown: list[tuple[K, T]]
    """Held, says the database, and the node knows nothing of it: the answer of its claim was lost."""
    gone: frozenset[tuple[K, T]]
    """The node believes to hold it, and the database says no: taken away, or the answer of its end is on its
    way."""


def compare(held: Mapping[K, T], known: Collection[tuple[K, T]]) -> Difference[K, T]:
    """Compare partitions and their tokens, or executions and their epochs.

    :param held: what the database says this node holds.
    :param known: what the node runs, drives or is about to give up.
    """
    return Difference(
        unknown=[pair for pair in held.items() if pair not in known],
        gone=frozenset(pair for pair in known if held.get(pair[0]) != pair[1]),
    )


def may_claim(
    *, claimable: bool, synced: bool, lease_holds: bool, draining: bool, alone: bool
) -> bool:
    """Whether to ask for work at all.

    :param claimable: something may wait that this node may claim.
    :param synced: what it holds was compared with the database since the last lost answer.
    :param alone: it runs an attempt that must have the node for itself.
    """
    return claimable and synced and lease_holds and not draining and not alone


def may_begin(*, lease_holds: bool, draining: bool, stopping: bool) -> bool:
    """Whether author code may begin with what is claimed: nobody else can have it, and it can be finished.

    :param stopping: this attempt was asked to stop, for example because its execution was cancelled.
    """
    return lease_holds and not draining and not stopping


def outlives_removal(*, at_most_once: bool, began: bool) -> bool:
    """Whether an attempt runs on when its node was removed.

    AT_LEAST_ONCE work is somebody else's now. AT_MOST_ONCE work that has begun is nobody's: it can never be
    begun again, and how it ends is worth knowing.
    """
    return at_most_once and began
