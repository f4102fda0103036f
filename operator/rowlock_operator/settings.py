"""The operator's settings, read from its environment and checked together before it does anything.

Unlike a node, the operator has little to decide: which database, under which cluster name it signs
its requests, which namespaces it watches, and how often it looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict

from rowlock.errors import SettingsError, near_names

# What Kubernetes itself accepts as the name of a namespace (RFC 1123 label).
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_SECRETS = ("password", "sslpassword")

_LONGEST_SECONDS: Final = 86_400.0
_BOOLEANS: Final = {"true": True, "false": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the operator needs to know, complete and valid."""

    dsn: str = ""
    """Connection string of the rowlock database (`ROWLOCK_DSN`), as a member of rowlock_operator.

    It may name a `passfile`, which is read at each connection.
    """
    dsn_file: Path | None = None
    """A file that holds the connection string (`ROWLOCK_DSN_FILE`), in place of `ROWLOCK_DSN`.

    It is read again at each connection: mount a Secret there, and its password may be rotated
    without a restart.
    """
    cluster: str
    """Name of this Kubernetes cluster (`ROWLOCK_CLUSTER`), a label of at most 63 characters.

    It is part of every requester, so that two clusters may share one database. It must not change
    while BatchJobs exist: their runs would belong to nobody.
    """
    namespaces: frozenset[str] = frozenset()
    """Namespaces to watch (`ROWLOCK_NAMESPACES`, comma-separated). Empty: the whole cluster."""
    pools_file: Path | None = None
    """The pod templates of the pools (`ROWLOCK_POOLS_FILE`), a YAML file. None: there are none, and
    only BatchJobs with `master.mode: Pool` can run."""
    allow_pod_template: bool = True
    """Whether a BatchJob may bring its own image, service account and pod template
    (`ROWLOCK_ALLOW_POD_TEMPLATE`, true or false)."""
    http_port: int = 8080
    """Where /livez, /readyz and /metrics answer (`ROWLOCK_HTTP_PORT`). 0: nowhere."""
    sync_seconds: float = 2.0
    """How often the database is asked what has changed. Seconds (`ROWLOCK_SYNC_SECONDS`)."""
    resync_seconds: float = 60.0
    """How often everything is listed and looked at again, whatever the watches said. Seconds
    (`ROWLOCK_RESYNC_SECONDS`)."""
    watch_seconds: float = 70.0
    """After so long without a word from the API server a watch is made anew: its connection may have
    been dropped in silence. Seconds (`ROWLOCK_WATCH_SECONDS`). A word comes each minute, so below
    that quiet watches are made anew all the time."""
    sweep_seconds: float = 30.0
    """How often executions are looked for whose BatchJob is gone; it must be missing twice, so far
    apart. Seconds (`ROWLOCK_SWEEP_SECONDS`)."""
    stale_seconds: float = 30.0
    """After so long without the database a BatchJob says that its status is stale. Seconds
    (`ROWLOCK_STALE_SECONDS`)."""
    log_format: str = "json"
    """`json` or `human` (`ROWLOCK_LOG_FORMAT`)."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        """Read and check every setting.

        Args:
            env: Environment variables, usually `os.environ`. An empty value counts as not set.

        Raises:
            SettingsError: One or more are missing or wrong; all of them are listed.
        """
        given = {f.name: env.get(_variable(f.name), "").strip() for f in fields(cls)}
        listed = [name.strip() for name in given["namespaces"].split(",")]
        namespaces = [name for name in listed if name]
        problems = [
            *_misspelt(env, given),
            *_problems_of_database(given["dsn"], given["dsn_file"]),
            *_problems_of_cluster(given["cluster"]),
            *_problems_of_namespaces(namespaces),
        ]
        values: dict[str, Any] = {
            "dsn": given["dsn"],
            "cluster": given["cluster"],
            "namespaces": frozenset(namespaces),
        }
        for name in ("dsn_file", "pools_file"):
            values[name] = Path(given[name]) if given[name] else None
        for name, read in _READERS.items():
            if not given[name]:
                continue
            try:
                values[name] = read(given[name])
            except ValueError as problem:
                problems.append(f"{_variable(name)}={given[name]} {problem}")
        if problems:
            raise SettingsError(problems)
        return cls(**values)

    def connection_string(self) -> str:
        """The connection string as it is now; a file is read again.

        Raises:
            SettingsError: The file cannot be read, or holds no connection string.
        """
        if self.dsn_file is None:
            return self.dsn
        try:
            dsn = self.dsn_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                [f"ROWLOCK_DSN_FILE={self.dsn_file} cannot be read: {_reason(error)}"]
            ) from None
        problems = list(_problems_of_dsn(dsn, f"ROWLOCK_DSN_FILE={self.dsn_file}"))
        if problems:
            raise SettingsError(problems)
        return dsn

    def describe(self) -> dict[str, object]:
        """The settings for people and logs: the connection string without its passwords."""
        parts = conninfo_to_dict(self.connection_string())
        shown: dict[str, object] = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name != "dsn_file"
        }
        if self.dsn_file is not None:
            shown["dsn_file"] = str(self.dsn_file)
        shown["dsn"] = {key: "***" if key in _SECRETS else value for key, value in parts.items()}
        shown["namespaces"] = sorted(self.namespaces) or "all"
        shown["pools_file"] = str(self.pools_file) if self.pools_file else None
        return shown


def _variable(name: str) -> str:
    return f"ROWLOCK_{name.upper()}"


def _misspelt(env: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """Variables that are nearly ours. Others are none of our business: Kubernetes sets some."""
    variables = [_variable(name) for name in known]
    for variable in sorted(set(env).difference(variables)):
        near = (
            near_names(variable, variables, cutoff=0.9) if variable.startswith("ROWLOCK_") else ()
        )
        if near:
            yield f"{variable} is no setting of the operator; did you mean {near[0]}?"


def _problems_of_database(dsn: str, dsn_file: str) -> Iterator[str]:
    if dsn and dsn_file:
        yield "ROWLOCK_DSN and ROWLOCK_DSN_FILE are both set: give one of them"
    elif dsn_file:
        try:
            Settings(dsn_file=Path(dsn_file), cluster="-").connection_string()
        except SettingsError as error:
            yield from error.problems
    elif dsn:
        yield from _problems_of_dsn(dsn, "ROWLOCK_DSN")
    else:
        yield (
            "ROWLOCK_DSN is not set: give the rowlock database, for example host=db dbname=app, or"
            " the file that holds it in ROWLOCK_DSN_FILE"
        )


def _problems_of_dsn(dsn: str, where: str) -> Iterator[str]:
    if not dsn:
        yield f"{where} is empty: write a connection string into it"
        return
    try:
        conninfo_to_dict(dsn)
    except ProgrammingError as problem:
        # libpq quotes what it could not read, which may be the password: only its first words.
        reason = str(problem).split('"', maxsplit=1)[0].strip().rstrip(":")
        yield f"{where} is no connection string of libpq ({reason})"


def _problems_of_cluster(cluster: str) -> Iterator[str]:
    if not cluster:
        yield "ROWLOCK_CLUSTER is not set: give this cluster a name that no other one uses"
    elif not _LABEL.fullmatch(cluster):
        yield f"ROWLOCK_CLUSTER={cluster!r} must be up to 63 of a-z, 0-9 and inner hyphens"


def _problems_of_namespaces(namespaces: list[str]) -> Iterator[str]:
    for name in namespaces:
        if not _LABEL.fullmatch(name):
            yield (
                f"ROWLOCK_NAMESPACES names {name!r}, which cannot be a namespace: use up to 63 of"
                " a-z, 0-9 and inner hyphens, separated by commas"
            )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number of seconds") from None
    if not 0 < value <= _LONGEST_SECONDS:
        raise ValueError(f"must be above 0 and at most {_LONGEST_SECONDS:g} seconds")
    return value


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) > 65_535:
        raise ValueError("must be a port, 0 to 65535")
    return int(text)


def _boolean(text: str) -> bool:
    try:
        return _BOOLEANS[text.lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def _log_format(text: str) -> str:
    if text not in {"json", "human"}:
        raise ValueError("must be json or human")
    return text


_READERS: Final = {
    "allow_pod_template": _boolean,
    "http_port": _port,
    "sync_seconds": _seconds,
    "resync_seconds": _seconds,
    "watch_seconds": _seconds,
    "sweep_seconds": _seconds,
    "stale_seconds": _seconds,
    "log_format": _log_format,
}


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "it is no text"
