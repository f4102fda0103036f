"""What has befallen an attempt that its author cannot undo, however broadly the code catches.

A `LeaseLost` that a bare `except:` swallowed must still not end in COMPLETED. So every such event is
remembered here; later calls of the context raise it again, and the pipeline asks before it reports
a success.
"""

from __future__ import annotations

from collections.abc import Iterator

from rowlock.errors import LeaseLost, UsageError


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those that it was raised from: authors wrap a few times, a hostile chain has no end."""
    seen: BaseException | None = error
    for _ in range(20):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__ or seen.__context__


class CommitUncertain(BaseException):
    """The connection broke during COMMIT: only the database knows whether it counts.

    A BaseException for the reason of `LeaseLost`: author code that catches `Exception` and carries on
    would build upon an effect that may not exist.
    """


class Fate:
    """The irrevocable events of one attempt."""

    __slots__ = ("infrastructure", "lost", "misuse", "over", "uncertain")

    def __init__(self) -> None:
        self.lost = False
        """A fenced write changed nothing: the claim, or the mastership, is gone."""
        self.uncertain = False
        """A COMMIT had no answer."""
        self.misuse: UsageError | None = None
        """The author broke a rule of the context. Remembered, because going on would skip work."""
        self.infrastructure: BaseException | None = None
        """The error that the loss of the work connection caused; not the author's fault."""
        self.over = False
        """The attempt has been answered for; threads that author code left behind come too late."""

    def check(self) -> None:
        """Raise again what has already ended the attempt.

        Raises:
            LeaseLost: The claim is gone.
            CommitUncertain: A COMMIT had no answer.
            UsageError: The author broke a rule before, or comes too late.
        """
        if self.over:
            raise UsageError("a context was used after its attempt had ended")
        if self.lost:
            raise LeaseLost("the claim of this attempt is gone")
        if self.uncertain:
            raise CommitUncertain("the outcome of the last COMMIT is not known")
        if self.misuse is not None:
            raise self.misuse

    def lose(self, message: str) -> LeaseLost:
        """Remember that the claim is gone; the caller raises the result."""
        self.lost = True
        return LeaseLost(message)

    def refuse(self, message: str) -> UsageError:
        """Remember that the author broke a rule; the caller raises the result."""
        error = UsageError(message)
        self.misuse = self.misuse or error
        return error

    def doubt(self) -> CommitUncertain:
        """Remember that a COMMIT had no answer; the caller raises the result."""
        self.uncertain = True
        return CommitUncertain("the connection broke during COMMIT; its outcome is not known")

    def is_infrastructure(self, error: BaseException) -> bool:
        """Whether `error` is, or was caused by, the loss of the work connection."""
        return any(one is self.infrastructure for one in chain(error))
