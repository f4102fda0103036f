"""The operator's settings, read from its environment and checked together before it does anything.

Unlike a node, the operator has little to decide: which database, under which cluster name it signs
its requests, and which namespaces it watches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from rowlock.errors import SettingsError

# What Kubernetes itself accepts as the name of a namespace (RFC 1123 label).
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_SECRETS = ("password", "sslpassword")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator needs to know, complete and valid."""

    dsn: str
    """Connection string of the rowlock database (`ROWLOCK_DSN`), as a member of rowlock_operator."""
    cluster: str
    """Name of this Kubernetes cluster (`ROWLOCK_CLUSTER`), a label of at most 63 characters.

    It is part of every requester, so that two clusters may share one database. It must not change
    while BatchJobs exist: their runs would belong to nobody.
    """
    namespaces: frozenset[str]
    """Namespaces to watch (`ROWLOCK_NAMESPACES`, comma-separated). Empty: the whole cluster."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        """Read and check every setting.

        Args:
            env: Environment variables, usually `os.environ`.

        Raises:
            SettingsError: One or more are missing or wrong; all of them are listed.
        """
        dsn = env.get("ROWLOCK_DSN", "").strip()
        cluster = env.get("ROWLOCK_CLUSTER", "").strip()
        listed = [name.strip() for name in env.get("ROWLOCK_NAMESPACES", "").split(",")]
        namespaces = [name for name in listed if name]
        problems = [
            *_problems_of_dsn(dsn),
            *_problems_of_cluster(cluster),
            *_problems_of_namespaces(namespaces),
        ]
        if problems:
            raise SettingsError(problems)
        return cls(dsn=dsn, cluster=cluster, namespaces=frozenset(namespaces))

    def describe(self) -> dict[str, object]:
        """The settings for people and logs: the connection string without its passwords."""
        parts = conninfo_to_dict(self.dsn)
        shown = {key: "***" if key in _SECRETS else value for key, value in parts.items()}
        return {
            "dsn": shown,
            "cluster": self.cluster,
            "namespaces": sorted(self.namespaces) or "all",
        }


def _problems_of_dsn(dsn: str) -> list[str]:
    if not dsn:
        return ["ROWLOCK_DSN is not set: give the rowlock database, for example host=db dbname=app"]
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError as problem:
        # libpq quotes what it could not read, which may be the password: only its first words.
        reason = str(problem).split('"', maxsplit=1)[0].strip().rstrip(":")
        return [f"ROWLOCK_DSN is no connection string of libpq ({reason})"]
    return []


def _problems_of_cluster(cluster: str) -> list[str]:
    if not cluster:
        return ["ROWLOCK_CLUSTER is not set: give this cluster a name that no other one uses"]
    if not _LABEL.fullmatch(cluster):
        return [f"ROWLOCK_CLUSTER={cluster!r} must be up to 63 of a-z, 0-9 and inner hyphens"]
    return []


def _problems_of_namespaces(namespaces: list[str]) -> list[str]:
    wrong = [name for name in namespaces if not _LABEL.fullmatch(name)]
    return [
        f"ROWLOCK_NAMESPACES names {name!r}, which cannot be a namespace: use up to 63 of a-z, 0-9 "
        "and inner hyphens, separated by commas"
        for name in wrong
    ]
