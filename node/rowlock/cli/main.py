"""The command `rowlock`: finds the module of a subcommand, runs it, and turns errors into one line.

Only the module of the command that was typed is imported, and it imports what it needs when it
needs it, so that `rowlock --help` answers at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final, NamedTuple

from rowlock.cli import parsers
from rowlock.cli.arguments import ArgumentParser, wants_help
from rowlock.errors import UsageError, near_names

INTERRUPTED: Final = 130
"""128 + SIGINT, what a shell reports for a program that Ctrl-C ended."""

BROKEN_PIPE: Final = 141
"""128 + SIGPIPE, for a reader that went away, such as `head`."""

EXIT_CODES: Final = """\
exit codes: 0 completed, 1 unexpected error, 2 usage or contract error, 3 cancelled or abandoned,
            4 execution failed, 5 database unreachable, 130 interrupted"""


class Command(NamedTuple):
    """A subcommand: what it takes, what it is for, and where it is."""

    add_arguments: Callable[[ArgumentParser], None]
    summary: str
    module: str
    """Has `run(arguments) -> exit code`."""


COMMANDS: Final[dict[str, Command]] = {
    function.__name__: Command(function, summary, module)
    for function, summary, module in (
        (parsers.migrate, "bring the database to this version's schema", "rowlock.cli.migrate"),
        (parsers.node, "run a node: claim partitions and process them", "rowlock.cli.node"),
        (parsers.launch, "launch a job and follow it to its end", "rowlock.cli.launch"),
        (parsers.master, "drive one execution to its end", "rowlock.cli.master"),
        (parsers.executions, "list executions, newest first", "rowlock.cli.executions"),
        (parsers.status, "show one execution, or follow it to its end", "rowlock.cli.status"),
        (parsers.partitions, "list the partitions of an execution", "rowlock.cli.partitions"),
        (parsers.nodes, "list nodes", "rowlock.cli.nodes"),
        (parsers.events, "list what happened off the happy path", "rowlock.cli.events"),
        (parsers.explain, "say why an execution does not move", "rowlock.cli.explain"),
        (parsers.cancel, "cancel an execution", "rowlock.cli.cancel"),
        (parsers.suspend, "let nothing more of an execution begin", "rowlock.cli.suspend"),
        (parsers.resume, "let a suspended execution go on", "rowlock.cli.resume"),
        (parsers.set, "change what an execution is allowed", "rowlock.cli.set"),
        (parsers.restart, "run again what an execution left undone", "rowlock.cli.restart"),
        (parsers.resolve, "decide what became of a failed partition", "rowlock.cli.resolve"),
        (parsers.abandon, "give an instance up for ever", "rowlock.cli.abandon"),
        (parsers.purge, "delete old executions and events", "rowlock.cli.purge"),
        (parsers.jobs, "list the jobs that nodes have published", "rowlock.cli.jobs"),
        (parsers.contract, "show the JSON Schemas of a job", "rowlock.cli.contract"),
        (parsers.exporter, "serve the pools' metrics to Prometheus", "rowlock.cli.exporter"),
        (parsers.dev, "run a database and nodes in one terminal", "rowlock.cli.dev"),
        (parsers.demo, "settle a year of flights while a node is killed", "rowlock.demo.command"),
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: The words after `rowlock`; None takes those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _print_whatever_comes()
    # It warns of the rollback that an interrupted statement cannot have; the server rolls back.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _let_go_of_output()
        return INTERRUPTED
    except BrokenPipeError:
        _let_go_of_output()
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  the last line of defence: nobody gets a traceback
        return _report(error)
    return code


def parser_of(name: str) -> ArgumentParser:
    """The parser of one subcommand.

    Raises:
        UsageError: There is no such command; suggests those that come near.
    """
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(_unknown(name))
    parser = ArgumentParser(
        prog=f"rowlock {name}", description=_sentence(command.summary), epilog=EXIT_CODES
    )
    command.add_arguments(parser)
    return parser


def _dispatch(words: Sequence[str]) -> int:
    if not words:
        sys.stderr.write(_help())
        return 2
    first, *rest = words
    if first in {"-h", "--help", "help"}:
        # `rowlock help status` reads like what it does.
        return _dispatch([rest[0], "--help"]) if first == "help" and rest else _print_help()
    if first == "--version":
        return _print_version()
    if first.startswith("-"):
        raise UsageError(
            f"option {first} comes before a command: write rowlock COMMAND {first} "
            "(rowlock --help lists the commands)"
        )
    parser = parser_of(first)
    if wants_help(rest):
        parser.print_help()
        return 0
    arguments = parser.parse_args(rest)
    run: Callable[[object], int] = import_module(COMMANDS[first].module).run
    return run(arguments)


def _print_help() -> int:
    sys.stdout.write(_help())
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return (
        "usage: rowlock COMMAND [options]\n\n"
        "Large batch jobs on many nodes, with PostgreSQL as the only coordinator.\n\n"
        "commands:\n" + "\n".join(lines) + "\n\n"
        "rowlock COMMAND --help shows its options. The database comes from --dsn, else from\n"
        "ROWLOCK_DSN, else from libpq's variables (PGHOST, PGDATABASE, …).\n\n" + EXIT_CODES + "\n"
    )


def _print_version() -> int:
    import rowlock

    version: str = rowlock.__version__
    print(f"rowlock {version}")
    return 0


def _unknown(name: str) -> str:
    near = near_names(name, COMMANDS, cutoff=0.6)
    text = f"there is no command {name!r}"
    return f"{text}; did you mean {near[0]}?" if near else f"{text}: rowlock --help lists them"


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


# -- the end of a command ----------------------------------------------------------------------


def _report(error: Exception) -> int:
    """Say in one line what went wrong, and how to see more."""
    from rowlock.cli.failures import explain

    known = explain(error)
    if os.environ.get("ROWLOCK_DEBUG", "0") not in {"", "0"}:
        import traceback

        traceback.print_exception(error, file=sys.stderr)
    try:
        print(f"rowlock: {known.text}", file=sys.stderr)
    except OSError:
        pass  # nobody reads it; the exit code still says it
    return known.exit_code


def _print_whatever_comes() -> None:
    """Let a terminal that cannot show a character cost that character, not the command."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a test's replacement has none
            reconfigure(errors="backslashreplace")


def _let_go_of_output() -> None:
    """Keep the interpreter from complaining, at its exit, about output that nobody reads."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
