"""What can be set from outside: read once at start, validated together, then frozen.

The times form one arithmetic (beat, unreachable, grace, margin give the lease). A combination that
would remove healthy nodes, or start work twice, is refused before a node registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from rowlock.errors import SettingsError, near_names

__all__ = ["DAY_SECONDS", "FILE_VARIABLES", "Settings"]

DAY_SECONDS: Final = 86_400.0

_PREFIX: Final = "ROWLOCK_"
_FROM_FILES: Final = ("dsn", "work_dsn")
FILE_VARIABLES: Final = tuple(f"{_PREFIX}{name.upper()}_FILE" for name in _FROM_FILES)
"""Variables that name a file which holds a connection string."""
_LONGEST_SECONDS: Final = 86_400.0
_LONGEST_DAYS: Final = 36_500.0
_ROUNDING: Final = 1e-9
"""0.3 must count as three times 0.1, which in doubles is a little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings; each has an environment variable of the same name: `ROWLOCK_BEAT_SECONDS`.

    Raises:
        SettingsError: The values do not fit together; it lists every problem.
    """

    beat_seconds: float = 1.0
    """How often a node tells the database that it is alive. Seconds, above 0."""

    unreachable_seconds: float = 5.0
    """A node that shows no beat for this long is marked UNREACHABLE. Seconds, at least 3 beats."""

    removal_grace_seconds: float = 5.0
    """How long after that it is REMOVED and its work goes to others. Seconds, at least 2 beats."""

    lease_margin_seconds: float = 1.0
    """How much earlier than it may be removed a silent node stops its own work. Seconds, above 0
    and less than the grace."""

    drain_seconds: float = 30.0
    """How long running work may go on after SIGTERM. Seconds; 0 hands everything back at once.
    A pod's terminationGracePeriodSeconds must be longer."""

    cancel_seconds: float = 10.0
    """How long a cancelled attempt may go on before it is killed. Seconds; 0 kills at once."""

    poll_seconds: float = 10.0
    """How often an idle node looks for work that no notification announced. Seconds, jittered, at
    least one beat."""

    evidence: bool = True
    """Whether a node that misses two beats, and whose connections the server has ended, loses what
    others may repeat at once. `off`: this node waits for the silence of others, and others for its own."""

    retention_completed_days: float | None = 30.0
    """How long executions that COMPLETED are kept with their partitions. Days, above 0; None, in the
    environment `never`, keeps them for ever."""

    retention_failed_days: float | None = 90.0
    """The same for executions that ended in any other way."""

    retention_events_days: float | None = 90.0
    """The same for events, and for nodes that are gone."""

    dsn: str | None = field(default=None, repr=False)
    """Where the control plane is: a PostgreSQL connection string, or "@" and the path of a file that
    holds one (in the environment `ROWLOCK_DSN_FILE`). The file, like a `passfile` that the string
    names, is read at each connection, so a password may be rotated without a restart. None: libpq's
    own variables."""

    work_dsn: str | None = field(default=None, repr=False)
    """Where `ctx.transaction()` connects to: the same database. A file is named by
    `ROWLOCK_WORK_DSN_FILE`. None: the same as `dsn`."""

    log_format: str | None = None
    """`json` or `human`. None: human on a terminal, otherwise json."""

    recycle_attempts: int = 10_000
    """An executor is replaced after so many attempts. 0: never."""

    executor_memory_mb: int = 0
    """An executor that holds more memory than this is replaced after its attempt. Megabytes; 0:
    no limit."""

    plan_partitions_max: int = 10_000_000
    """A plan of more partitions fails its execution: a partition() that never ends must not fill the
    database. 0: no limit."""

    def __post_init__(self) -> None:
        problems = list(_problems({f.name: getattr(self, f.name) for f in fields(self)}))
        if problems:
            raise SettingsError(problems)

    @classmethod
    def from_environment(cls, env: Mapping[str, str], **overrides: object) -> Settings:
        """Read the settings.

        Args:
            env: Environment variables. An empty value counts as not set.
            overrides: Values of the command line, by the names above; None counts as not given.

        Raises:
            SettingsError: One or more are wrong; it lists every problem.
        """
        values: dict[str, Any] = {f.name: f.default for f in fields(cls)}
        problems = list(_misspelt(env, values))
        wrong: set[str] = set()
        for name, default in list(values.items()):
            given = overrides.pop(name, None)
            text = env.get(_variable(name), "").strip()
            file = env.get(f"{_variable(name)}_FILE", "").strip() if name in _FROM_FILES else ""
            if file and given is None:
                problems.extend(_problems_of_file(name, file, text))
                text = f"@{file}"
            try:
                if given is not None:
                    values[name] = given
                elif text:
                    values[name] = _parsed(name, text, default)
            except ValueError as error:
                wrong.add(name)
                problems.append(f"{_variable(name)}={text} {error}")
        if overrides:
            raise TypeError(f"no such settings: {', '.join(overrides)}")
        problems.extend(_problems(values, wrong))
        if problems:
            raise SettingsError(problems)
        return cls(**values)

    @property
    def lease_seconds(self) -> float:
        """How long a node may go on without an answered beat before it stops its own work."""
        return self.removal_seconds - self.lease_margin_seconds

    @property
    def removal_seconds(self) -> float:
        """How long a node must be silent before its work goes to others."""
        return self.unreachable_seconds + self.removal_grace_seconds


def _variable(name: str) -> str:
    return _PREFIX + name.upper()


def _misspelt(env: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """Variables that are nearly ours: silence would leave a default where a value was meant.

    Others are none of our business: Kubernetes sets `ROWLOCK_PORT` for a service named rowlock.
    """
    variables = [*map(_variable, known), *FILE_VARIABLES]
    for variable in sorted(set(env).difference(variables)):
        near = near_names(variable, variables, cutoff=0.9) if variable.startswith(_PREFIX) else ()
        if near:
            yield f"{variable} is no setting; did you mean {near[0]}?"


def _problems_of_file(name: str, file: str, text: str) -> Iterator[str]:
    variable = _variable(name)
    if text:
        yield f"{variable} and {variable}_FILE are both set: give one of them"
    try:
        Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        yield f"{variable}_FILE={file} cannot be read: {getattr(error, 'strerror', None) or error}"


def _parsed(name: str, text: str, default: object) -> object:
    """The value of an environment variable; the default tells its type."""
    if name.endswith("_days"):
        return _parsed_days(text)
    if isinstance(default, bool):
        if text.lower() not in _SWITCH:
            raise ValueError("must be on or off")
        return _SWITCH[text.lower()]
    if isinstance(default, int):
        if not text.isascii() or not text.isdigit():
            raise ValueError("must be a whole number, 0 or more")
        return int(text)
    if isinstance(default, float):
        try:
            return float(text)
        except ValueError:
            raise ValueError("must be a number of seconds") from None
    return text


_SWITCH: Final = {"on": True, "off": False}


def _parsed_days(text: str) -> float | None:
    if text.lower() == "never":
        return None
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number of days, or never") from None


# Names, what must hold of their values, and how to say it. lease > 2 beats follows from the rest.
_RULES: Final[Sequence[tuple[tuple[str, str], Callable[[float, float], bool], str]]] = (
    (
        ("unreachable_seconds", "beat_seconds"),
        lambda unreachable, beat: unreachable + _ROUNDING >= 3 * beat,
        "must be at least 3 times ",
    ),
    (
        ("removal_grace_seconds", "beat_seconds"),
        lambda grace, beat: grace + _ROUNDING >= 2 * beat,
        "must be at least 2 times ",
    ),
    (
        ("lease_margin_seconds", "removal_grace_seconds"),
        lambda margin, grace: margin < grace,
        "must be less than ",
    ),
    (
        ("poll_seconds", "beat_seconds"),
        lambda poll, beat: poll + _ROUNDING >= beat,
        "must be at least ",
    ),
)
_COUNTS: Final = frozenset({"recycle_attempts", "executor_memory_mb", "plan_partitions_max"})
_MAY_BE_ZERO: Final = frozenset({"drain_seconds", "cancel_seconds"})


def _problems(values: Mapping[str, Any], wrong: Iterable[str] = ()) -> Iterator[str]:
    """What is wrong with the values; those that could not even be read are left out."""
    bad = set(wrong)
    for name, value in values.items():
        problem = "" if name in bad else _range_problem(name, value)
        if problem:
            bad.add(name)
            yield f"{_variable(name)}={value} {problem}"
    for (name, other), holds, rule in _RULES:
        if bad.isdisjoint({name, other}) and not holds(values[name], values[other]):
            yield (f"{_variable(name)}={values[name]:g} {rule}{_variable(other)}={values[other]:g}")


def _range_problem(name: str, value: object) -> str:
    if name.endswith("_seconds"):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return "must be a number of seconds"
        if not 0 <= value <= _LONGEST_SECONDS:
            return f"must be from 0 to {_LONGEST_SECONDS:g} seconds"
        return "must be above 0" if value == 0 and name not in _MAY_BE_ZERO else ""
    if name.endswith("_days") and value is not None:
        # Not 0, which elsewhere means "no limit" and here would delete everything at once.
        if not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_DAYS:
            return f"must be above 0 and at most {_LONGEST_DAYS:g} days, or never"
        return ""
    if name in _COUNTS and not (type(value) is int and value >= 0):
        return "must be a whole number, 0 or more"
    if name == "log_format" and value not in (None, "json", "human"):
        return "must be json or human"
    return ""
