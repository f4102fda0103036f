"""Why a BatchJob is not launched: the reasons that its condition Accepted may have."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reasons of `Accepted=False`. Programs compare them: they are public."""

    INVALID_SPEC = "InvalidSpec"
    """A field is not what it should be; an older or newer CRD has let it through."""
    UNKNOWN_JOB = "UnknownJob"
    """No node has ever published a job of this name. Launched as soon as one does."""
    INVALID_PARAMETERS = "InvalidParameters"
    """`spec.parameters` break the published contract of the job."""
    INVALID_POLICY = "InvalidPolicy"
    """`spec.partitions` contradict the job, for example AtLeastOnce for a job of AtMostOnce."""
    POOL_UNKNOWN = "PoolUnknown"
    """The operator has no pod template for `spec.pool`."""
    POD_TEMPLATE_FORBIDDEN = "PodTemplateForbidden"
    """This operator lets nobody choose image, service account or pod template."""
    INVALID_POD_TEMPLATE = "InvalidPodTemplate"
    """`spec.master.podTemplate` cannot be laid over the template of the pool."""
    NAME_CONFLICT = "NameConflict"
    """A Job that is not ours has the name of the master Job."""
    DUPLICATE_INSTANCE = "DuplicateInstance"
    """The database knows this instance already, see the message."""
    RUN_NOT_FOUND = "RunNotFound"
    """The execution was requested once and is in the database no more; a person decides."""
    CANCELLED = "Cancelled"
    """Cancelled before it was launched."""


class Refusal(Exception):
    """A BatchJob is not launched, for this reason."""

    def __init__(self, reason: Reason, message: str, *, final: bool = False) -> None:
        """Say why.

        Args:
            reason: For programs.
            message: For people: what is wrong and what to do.
            final: No change of circumstances can heal it; only a new attempt is a new question.
        """
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.final = final
