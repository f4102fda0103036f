"""Whether the operator may do what it has to: a right that is missing is named before it is missed.

Without this an operator that may list and not watch, or launch and not tell, would be up and ready,
and only its log would know why nothing comes of it.
"""

from __future__ import annotations

from typing import Final

from rowlock_operator.client import BATCHJOBS, EVENTS, JOBS, PODS, Forbidden, Kubernetes, Resource

NEEDED: Final[tuple[tuple[str, Resource, str | None], ...]] = (
    *((verb, BATCHJOBS, None) for verb in ("get", "list", "watch", "delete")),
    ("patch", BATCHJOBS, "status"),
    *((verb, JOBS, None) for verb in ("get", "list", "watch", "create", "delete")),
    ("list", PODS, None),
    ("create", EVENTS, None),
)
"""Verb, kind and subresource of everything that the operator asks of the API server."""


async def missing(kubernetes: Kubernetes, namespace: str | None) -> str:
    """The first right that the operator does not have.

    Args:
        kubernetes: The API server.
        namespace: Where; None: in all.

    Returns:
        For example "patch batchjobs.batch.rowlock.dev/status in namespace billing"; empty if none is
        missing, or if it may not even ask: then it shows when it is used.

    Raises:
        ApiError: The API server does not answer.
    """
    for verb, resource, sub in NEEDED:
        try:
            allowed = await kubernetes.may(verb, resource, namespace, sub)
        except Forbidden:
            return ""
        if not allowed:
            where = f"namespace {namespace}" if namespace else "all namespaces"
            return f"{verb} {resource}{f'/{sub}' if sub else ''} in {where}"
    return ""
