"""What command lines have in common: options, kinds of values, and errors that fit in one line."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn
from uuid import UUID

from rowlock.errors import UsageError, near_names

POOL_BYTES_MAX: Final = 100
ROWS_MAX: Final = 10_000
REASON_BYTES_MAX: Final = 2000


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser whose errors are exceptions, and which guesses no abbreviations.

    An abbreviation that works today is ambiguous after the next option is added.
    """

    def __init__(self, *, prog: str, description: str = "", epilog: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Looked for by `wants_help` before anything is parsed; it stands here to be shown.
        self.add_argument("-h", "--help", action="store_true", help="show this and exit")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print with three lines of usage."""
        own = re.fullmatch(r"argument (\S+): (\1 .*)", message, re.DOTALL)
        if own:  # from one of the kinds of values below: it says everything
            raise UsageError(own[2])
        stray = re.fullmatch(r"unrecognized arguments: ((\S+).*)", message, re.DOTALL)
        if stray is None:
            raise UsageError(f"{message}; {self.prog} --help shows what it takes")
        near = near_names(stray[2], self._option_string_actions, cutoff=0.6)
        remedy = f"did you mean {' or '.join(near)}?" if near else f"see {self.prog} --help"
        raise UsageError(f"{self.prog} does not take {stray[1]}; {remedy}")


def wants_help(words: Sequence[str]) -> bool:
    """Whether somebody asks for help, also beside arguments that are wrong or missing."""
    before_dashes = words[: words.index("--")] if "--" in words else words
    return "--help" in before_dashes or "-h" in before_dashes


# -- options that several commands have --------------------------------------------------------


def add_json(parser: argparse.ArgumentParser, help: str = "print one JSON document") -> None:  # noqa: A002
    """`--json`."""
    parser.add_argument("--json", action="store_true", help=help)


def add_pool(parser: argparse.ArgumentParser, help: str) -> None:  # noqa: A002
    """`--pool P`, one pool by default."""
    parser.add_argument(
        "--pool",
        metavar="P",
        type=text_of("--pool", POOL_BYTES_MAX),
        default="default",
        help=f"{help} (default: default)",
    )


def add_dsn(parser: argparse.ArgumentParser) -> None:
    """`--dsn`."""
    parser.add_argument(
        "--dsn",
        metavar="DSN",
        help="the database, as a libpq URI or string (default: ROWLOCK_DSN, else libpq's variables)",
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    """`--import M`, as often as needed."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="module with jobs, beside those of installed packages; may be given several times",
    )


def add_execution(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """EXECUTION, as `views.find_execution` understands it."""
    parser.add_argument(
        "execution",
        metavar="EXECUTION",
        nargs="?" if optional else None,
        help="its id, the beginning of it (4 characters or more), or its number (column NO)",
    )


def add_reason(parser: argparse.ArgumentParser) -> None:
    """`--reason R`."""
    parser.add_argument(
        "--reason",
        metavar="R",
        type=text_of("--reason", REASON_BYTES_MAX),
        help="why, for the audit and for everybody who looks at the execution",
    )


def add_http(parser: argparse.ArgumentParser, *, default: int | None = None) -> None:
    """`--http PORT`."""
    parser.add_argument(
        "--http",
        metavar="PORT",
        type=whole("--http", 0, 65_535),
        default=default,
        help="serve /metrics, /livez and /readyz here; 0 takes a free port"
        f" (default: {'off' if default is None else default})",
    )


def add_limit(parser: argparse.ArgumentParser, default: int) -> None:
    """`--limit N`."""
    parser.add_argument(
        "--limit",
        metavar="N",
        type=whole("--limit", 1, ROWS_MAX),
        default=default,
        help=f"show at most N rows (default {default})",
    )


def dsn_of(arguments: argparse.Namespace) -> str:
    """The connection string to use. Empty: libpq takes everything from its own variables."""
    given: str | None = arguments.dsn
    if given is not None:
        return given
    file = os.environ.get("ROWLOCK_DSN_FILE")
    return os.environ.get("ROWLOCK_DSN") or (f"@{file}" if file else "")


# -- kinds of values ---------------------------------------------------------------------------


def whole(name: str, lowest: int, highest: int) -> Callable[[str], int]:
    """A kind of argument: a whole number within bounds."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,19}", text, re.ASCII) or not lowest <= int(text) <= highest:
            # Not raised as a ValueError, whose text argparse would replace by its own.
            raise argparse.ArgumentTypeError(
                f"{name} {text} must be a whole number from {lowest} to {highest}"
            )
        return int(text)

    return parse


def whole_or(word: str, name: str, lowest: int, highest: int) -> Callable[[str], int | str]:
    """A kind of argument: a whole number within bounds, or one word that stands for no number."""

    def parse(text: str) -> int | str:
        if text.lower() == word:
            return word
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not lowest <= int(text) <= highest:
            raise argparse.ArgumentTypeError(
                f"{name} {text} must be a whole number from {lowest} to {highest}, or {word}"
            )
        return int(text)

    return parse


def whole_id(name: str) -> Callable[[str], UUID]:
    """A kind of argument: a whole id, for commands that must not ask the database what is meant."""

    def parse(text: str) -> UUID:
        try:
            return UUID(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{name} {text[:40]!r} must be a whole id: rowlock executions --json shows it"
            ) from None

    return parse


def one_of(name: str, known: Iterable[str]) -> Callable[[str], str]:
    """A kind of argument: one of some words, written in any case."""
    words = tuple(known)

    def parse(text: str) -> str:
        if text.upper() in words:
            return text.upper()
        near = near_names(text.upper(), words) or words
        raise argparse.ArgumentTypeError(
            f"{name} {text} is unknown; did you mean {' or '.join(near)}?"
            if near != words
            else f"{name} {text} must be one of {', '.join(words)}"
        )

    return parse


def text_of(name: str, bytes_max: int) -> Callable[[str], str]:
    """A kind of argument: text that is not empty and that the database can hold."""

    def parse(text: str) -> str:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise argparse.ArgumentTypeError(f"{name} {text!r} must be valid UTF-8") from None
        if not text.strip() or size > bytes_max or "\0" in text:
            raise argparse.ArgumentTypeError(
                f"{name} {text[:40]!r} must have 1 to {bytes_max} bytes"
            )
        return text

    return parse
