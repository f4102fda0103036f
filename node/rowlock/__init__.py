"""rowlock runs large batch jobs on many pods, with PostgreSQL as the only coordination plane.

These names are the public API; every other module may change. Importing them loads no database
driver and starts nothing.
"""

from rowlock.errors import (
    ContractError,
    Fail,
    JobDefinitionError,
    LeaseLost,
    NotFound,
    Refused,
    RetryLater,
    RowlockError,
    SchemaMismatch,
    SettingsError,
    Stopped,
    Unavailable,
    UsageError,
)
from rowlock.job import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    Cluster,
    Context,
    Delivery,
    Job,
    NodeInfo,
    Outcome,
    Retry,
)

__all__ = [
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "Cluster",
    "Context",
    "ContractError",
    "Delivery",
    "Fail",
    "Job",
    "JobDefinitionError",
    "LeaseLost",
    "NodeInfo",
    "NotFound",
    "Outcome",
    "Refused",
    "Retry",
    "RetryLater",
    "RowlockError",
    "SchemaMismatch",
    "SettingsError",
    "Stopped",
    "Unavailable",
    "UsageError",
]


def __getattr__(name: str) -> str:
    # Reading the distribution's metadata costs milliseconds that most imports need not pay.
    if name == "__version__":
        from importlib import metadata

        return metadata.version("rowlock")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
