"""Every exception that rowlock raises or that an author raises to steer an attempt.

    RowlockError                 something the reader can put right; carries the exit code
    ├─ JobDefinitionError        a class is not a complete job, or a job module cannot be imported
    ├─ ContractError             a payload does not match its type; never retried, never stored
    ├─ SettingsError             lists every wrong setting at once
    ├─ UsageError                the author or the command line asked for something unsupported
    ├─ SchemaMismatch            the database schema is older or newer than this code
    │  ├─ SchemaBehind           it is missing or older
    │  └─ SchemaAhead            it is newer and no longer works with this code
    ├─ Refused                   the database said no, with its reason
    ├─ NotFound                  no such job, execution or node; suggests near names
    └─ Unavailable               the database cannot be reached (retried with backoff by services)

    Fail, RetryLater             raised by an author inside process(), finish() or partition()

    LeaseLost, Stopped           BaseExceptions that unwind author code; do not catch them

`LeaseLost` and `Stopped` are no `Exception`s, so that an author's `except Exception` cannot swallow
them (asyncio.CancelledError has the same reason). Even if somebody does catch them, the fence in
the database holds: nothing such an attempt writes afterwards is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

__all__ = [
    "ContractError",
    "Fail",
    "JobDefinitionError",
    "LeaseLost",
    "NotFound",
    "Refused",
    "RetryLater",
    "RowlockError",
    "SchemaAhead",
    "SchemaBehind",
    "SchemaMismatch",
    "SettingsError",
    "Stopped",
    "Unavailable",
    "UsageError",
]


class RowlockError(Exception):
    """Base class of the errors that a person or a program can act on."""

    exit_code: ClassVar[int] = 1
    """Exit status of a command that ends with this error."""


class JobDefinitionError(RowlockError):
    """A class is not a complete job, or its module cannot be imported. Correct the code."""

    exit_code: ClassVar[int] = 2


class ContractError(RowlockError):
    """A payload does not match its type. Correct the payload or the type.

    The error is never retried, because the same bytes would break the same contract again.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, path: str, problem: str) -> None:
        """Say which payload, where in it (`$` is its root), and what is wrong there.

        Args:
            what: The payload, for example "parameters" or "slice".
            path: Where in the payload, for example "$.lines[3].amount".
            problem: Expectation, value found and remedy, in one sentence without the path.
        """
        super().__init__(what, path, problem)
        self.what = what
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.what} {self.path}: {self.problem}"


class SettingsError(RowlockError):
    """Settings are wrong. Every problem is listed, so that one correction is enough."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(list(problems))
        self.problems = list(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = [f"- {problem}" for problem in self.problems]
        return "\n".join([f"{len(lines)} settings are wrong:", *lines])


class UsageError(RowlockError):
    """The author or the command line asked for something that is not supported."""

    exit_code: ClassVar[int] = 2


class SchemaMismatch(RowlockError):
    """The database schema is older or newer than this code. Run `rowlock migrate` or upgrade."""

    exit_code: ClassVar[int] = 2


class SchemaBehind(SchemaMismatch):
    """The database has no schema yet, or an older one: `rowlock migrate` brings it forward."""


class SchemaAhead(SchemaMismatch):
    """A migration of a later release has ended what this code works with: upgrade rowlock."""


class Refused(RowlockError):
    """The database refused the request, for the reason in the message."""

    exit_code: ClassVar[int] = 2


class NotFound(RowlockError):
    """Nothing has this name. The message suggests the names that come nearest."""

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, name: str, near: Iterable[str] = ()) -> None:
        """Say what was looked for.

        Args:
            what: The kind of thing, for example "job".
            name: The name that was asked for.
            near: Names to suggest, best first. `near_names` finds them.
        """
        suggestions = tuple(near)
        super().__init__(what, name, suggestions)
        self.what = what
        self.name = name
        self.near = suggestions

    def __str__(self) -> str:
        text = f"there is no {self.what} {self.name!r}"
        return f"{text}; did you mean {' or '.join(map(repr, self.near))}?" if self.near else text


class Unavailable(RowlockError):
    """The database cannot be reached. Check the address and the server; services retry."""

    exit_code: ClassVar[int] = 5


class Fail(Exception):
    """Raised by an author: the partition is FAILED now, whatever attempts are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RetryLater(Exception):
    """Raised by an author: try the partition again after this time.

    It does not count as a failed attempt: a partition that always raises it is tried for ever, until
    somebody cancels its execution. Work that runs AT_MOST_ONCE is never retried: there the partition
    is FAILED.
    """

    def __init__(self, seconds: float) -> None:
        """Ask for a delay.

        Args:
            seconds: How long to wait, 0 to 31,536,000 (a year).

        Raises:
            UsageError: The delay is not such a number.
        """
        given: object = seconds  # authors without a type checker write RetryLater("60")
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not 0 <= seconds <= 31_536_000:
            raise UsageError(f"RetryLater({seconds!r}): use 0 to 31536000 seconds")
        super().__init__(seconds)
        self.seconds = float(seconds)

    def __str__(self) -> str:
        return f"try again in {self.seconds:g} s"


class LeaseLost(BaseException):
    """The claim of this attempt is gone: somebody else may run it. Do not catch it.

    Nothing that the attempt writes from here on is accepted, so it can only stop.
    """


class Stopped(BaseException):
    """The attempt was asked to stop and its last checkpoint stands. Do not catch it.

    `ctx.chunks` and `ctx.save` raise it when the node drains, or the execution is cancelled. The
    partition goes back and continues elsewhere from the checkpoint.
    """


def near_names(name: str, known: Iterable[str], *, cutoff: float = 0.5) -> tuple[str, ...]:
    """At most three known names that a person who typed `name` may have meant, best first.

    Args:
        name: What was typed.
        known: The names that exist.
        cutoff: How alike they must be, 0 to 1.
    """
    import difflib  # only a command that has already failed pays for it

    return tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=cutoff))
