"""The states of nodes, partitions and executions, and the moves between them that are legal.

The functions of the schema make the moves, CHECK constraints name the same states, and tests compare
the three. None as the state before a move means that the row is new.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias, TypeVar

State = TypeVar("State", bound=StrEnum)
Moves: TypeAlias = Mapping[State | None, frozenset[State]]
"""From each state, the states that may follow; those without a follower are terminal."""


class NodeStatus(StrEnum):
    """What the database believes of one incarnation of a node."""

    ACTIVE = "ACTIVE"
    UNREACHABLE = "UNREACHABLE"
    """Phase one of its removal: it may still complete what it holds, and a beat brings it back."""
    REMOVED = "REMOVED"


class PartitionStatus(StrEnum):
    """How far a partition is."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class ExecutionStatus(StrEnum):
    """How far an execution is."""

    REQUESTED = "REQUESTED"
    PLANNING = "PLANNING"
    RUNNING = "RUNNING"
    CLOSING = "CLOSING"
    """Step one of an early end: nothing new is claimed, attempts that run are waited for."""
    FINISHING = "FINISHING"
    """Everything is accounted for; the job's finish() has yet to take effect."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    ABANDONED = "ABANDONED"
    """Given up by a person; the instance is never launched again."""


def _moves(table: Mapping[State | None, set[State]]) -> Moves[State]:
    return MappingProxyType({before: frozenset(after) for before, after in table.items()})


NODE_MOVES: Final[Moves[NodeStatus]] = _moves(
    {
        None: {NodeStatus.ACTIVE},
        # A node removes itself at once when it leaves; others need both phases.
        NodeStatus.ACTIVE: {NodeStatus.UNREACHABLE, NodeStatus.REMOVED},
        NodeStatus.UNREACHABLE: {NodeStatus.ACTIVE, NodeStatus.REMOVED},
        NodeStatus.REMOVED: set(),
    }
)

PARTITION_MOVES: Final[Moves[PartitionStatus]] = _moves(
    {
        None: {
            PartitionStatus.PENDING,
            # In a restart: a start that is not repeated, and what a person has resolved.
            PartitionStatus.FAILED,
            PartitionStatus.COMPLETED,
        },
        PartitionStatus.PENDING: {PartitionStatus.CLAIMED, PartitionStatus.CANCELLED},
        PartitionStatus.CLAIMED: {
            PartitionStatus.PENDING,  # handed back, tried again, or recovered from a lost node
            PartitionStatus.COMPLETED,
            PartitionStatus.FAILED,
            PartitionStatus.CANCELLED,
        },
        PartitionStatus.COMPLETED: set(),
        PartitionStatus.FAILED: set(),
        PartitionStatus.CANCELLED: set(),
    }
)

EXECUTION_MOVES: Final[Moves[ExecutionStatus]] = _moves(
    {
        None: {
            ExecutionStatus.REQUESTED,
            ExecutionStatus.RUNNING,  # the restart of a sealed plan
        },
        ExecutionStatus.REQUESTED: {
            ExecutionStatus.PLANNING,
            ExecutionStatus.CLOSING,
            ExecutionStatus.ABANDONED,
        },
        ExecutionStatus.PLANNING: {
            ExecutionStatus.RUNNING,
            ExecutionStatus.FAILED,  # there is no plan
            ExecutionStatus.CLOSING,
            ExecutionStatus.ABANDONED,
        },
        ExecutionStatus.RUNNING: {
            ExecutionStatus.FINISHING,
            ExecutionStatus.COMPLETED,  # a job without finish()
            ExecutionStatus.FAILED,  # too many partitions failed
            ExecutionStatus.CLOSING,
            ExecutionStatus.ABANDONED,
        },
        ExecutionStatus.FINISHING: {
            ExecutionStatus.COMPLETED,
            ExecutionStatus.FAILED,  # finish() raised
            ExecutionStatus.CLOSING,
            ExecutionStatus.ABANDONED,
        },
        ExecutionStatus.CLOSING: {
            ExecutionStatus.CANCELLED,
            ExecutionStatus.FAILED,
            ExecutionStatus.ABANDONED,
        },
        ExecutionStatus.COMPLETED: set(),
        ExecutionStatus.FAILED: set(),
        ExecutionStatus.CANCELLED: set(),
        ExecutionStatus.ABANDONED: set(),
    }
)


def terminal(moves: Moves[State]) -> frozenset[State]:
    """The states that nothing follows."""
    return frozenset(state for state, after in moves.items() if state is not None and not after)
