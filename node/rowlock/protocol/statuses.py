"""The states of executions and partitions, as the CHECK constraints of the schema list them."""

from typing import Final

EXECUTION_STATUSES: Final = (
    "REQUESTED",
    "PLANNING",
    "RUNNING",
    "CLOSING",
    "FINISHING",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "ABANDONED",
)

ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "ABANDONED"})
"""The states that an execution never leaves."""

PARTITION_STATUSES: Final = ("PENDING", "CLAIMED", "COMPLETED", "FAILED", "CANCELLED")
