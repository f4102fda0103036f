"""What each command takes: one function for each, which knows words and bounds and runs nothing."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Final

from rowlock.cli.arguments import (
    add_dsn,
    add_execution,
    add_http,
    add_import,
    add_json,
    add_limit,
    add_pool,
    add_reason,
    one_of,
    text_of,
    whole,
    whole_id,
    whole_or,
)
from rowlock.protocol.statuses import EXECUTION_STATUSES, PARTITION_STATUSES

SLOTS_MAX: Final = 1024
DEV_NODES_MAX: Final = 16
PRIORITY_MAX: Final = 1_000_000
KEY_BYTES_MAX: Final = 512
NAME_BYTES_MAX: Final = 200
PARALLELISM_MAX: Final = 1_000_000
DEADLINE_SECONDS_MAX: Final = 10 * 366 * 86_400
DAYS_MAX: Final = 36_500
ID_MAX: Final = 2**63 - 1
HTTP_PORT: Final = 8080
READ_SECONDS: Final = 10


def migrate(parser: ArgumentParser) -> None:
    """`rowlock migrate`."""
    add_dsn(parser)
    add_json(parser)


def node(parser: ArgumentParser) -> None:
    """`rowlock node`."""
    parser.add_argument(
        "--slots",
        metavar="N",
        type=whole("--slots", 1, SLOTS_MAX),
        help="partitions at a time (default: the CPUs it may use)",
    )
    add_pool(parser, "executions of this pool only")
    parser.add_argument(
        "--name",
        metavar="X",
        type=text_of("--name", NAME_BYTES_MAX),
        help="its name for people; need not be unique (default: the host's name)",
    )
    add_import(parser)
    add_http(parser)
    _add_log_format(parser)
    add_dsn(parser)
    add_json(parser, "log as JSON, whatever the environment says")


def exporter(parser: ArgumentParser) -> None:
    """`rowlock exporter`."""
    add_http(parser, default=HTTP_PORT)
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=whole("--every", 1, 3600),
        default=READ_SECONDS,
        help=f"how often the database is asked, whoever scrapes (default {READ_SECONDS})",
    )
    _add_log_format(parser)
    add_dsn(parser)
    add_json(parser, "log as JSON, whatever the environment says")


def launch(parser: ArgumentParser) -> None:
    """`rowlock launch`."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument(
        "--params",
        metavar="JSON",
        help="its parameters: JSON, or @ and a file, or @- for standard input "
        "(default: {}, or null for a job that takes nothing)",
    )
    parser.add_argument(
        "--instance",
        metavar="K",
        type=text_of("--instance", KEY_BYTES_MAX),
        help="name of this piece of work: it completes once, and one that failed or was cancelled "
        "is restarted (default: a new uuid)",
    )
    parser.add_argument(
        "--launch-key",
        metavar="K",
        type=text_of("--launch-key", KEY_BYTES_MAX),
        help="name of this request: made again, it finds the execution of the first time",
    )
    parser.add_argument(
        "--detach", action="store_true", help="print the execution and leave it to the nodes"
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=whole("--slots", 0, SLOTS_MAX),
        help="also process N partitions at a time here (default 0: plan and watch only)",
    )
    add_pool(parser, "the nodes that process it")
    _add_priority(parser, default=0)
    parser.add_argument(
        "--parallelism",
        metavar="N",
        type=whole("--parallelism", 1, PARALLELISM_MAX),
        help="at most N of its partitions at a time, over all nodes (default: no limit)",
    )
    parser.add_argument(
        "--deadline",
        metavar="SECONDS",
        type=whole("--deadline", 1, DEADLINE_SECONDS_MAX),
        help="end it as FAILED if it has not ended so many seconds from now (default: never)",
    )
    parser.add_argument(
        "--suspended",
        action="store_true",
        help="let nothing of it be processed before rowlock resume",
    )
    add_import(parser)
    add_http(parser)
    add_dsn(parser)
    add_json(parser, "print JSON: an object on a line for each progress, and one for the result")


def executions(parser: ArgumentParser) -> None:
    """`rowlock executions`."""
    parser.add_argument("--job", metavar="JOB", help="only of this job")
    _add_status(parser, EXECUTION_STATUSES)
    add_limit(parser, 20)
    parser.add_argument(
        "--before",
        metavar="NO",
        type=whole("--before", 1, ID_MAX),
        help="only those before this number (column NO): the next page",
    )
    add_dsn(parser)
    add_json(parser)


def status(parser: ArgumentParser) -> None:
    """`rowlock status`."""
    add_execution(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow it to its end and exit with its outcome; with --json one object on a line",
    )
    add_dsn(parser)
    add_json(parser)


def partitions(parser: ArgumentParser) -> None:
    """`rowlock partitions`."""
    add_execution(parser)
    _add_status(parser, PARTITION_STATUSES)
    add_limit(parser, 100)
    parser.add_argument(
        "--after",
        metavar="ID",
        type=whole("--after", 1, ID_MAX),
        help="only those behind the partition with this id (column ID): the next page",
    )
    parser.add_argument(
        "--payloads",
        action="store_true",
        help="with --json: also slices, checkpoints, results and tracebacks, which may be large",
    )
    add_dsn(parser)
    add_json(parser)


def nodes(parser: ArgumentParser) -> None:
    """`rowlock nodes`."""
    parser.add_argument("--pool", metavar="P", help="only of this pool")
    parser.add_argument("--all", action="store_true", help="also nodes that are gone")
    add_limit(parser, 100)
    add_dsn(parser)
    add_json(parser)


def events(parser: ArgumentParser) -> None:
    """`rowlock events`."""
    add_execution(parser, optional=True)
    parser.add_argument(
        "--node", metavar="X", help="only of nodes with this name, or id (8 characters or more)"
    )
    parser.add_argument("--event", metavar="E", help="only of this kind, such as node_removed")
    add_limit(parser, 50)
    parser.add_argument(
        "--before",
        metavar="ID",
        type=whole("--before", 1, ID_MAX),
        help="only those before the event with this id (column ID): the page before",
    )
    add_dsn(parser)
    add_json(parser)


def cancel(parser: ArgumentParser) -> None:
    """`rowlock cancel`."""
    add_execution(parser)
    add_reason(parser)
    parser.add_argument("--wait", action="store_true", help="wait until it has ended")
    add_dsn(parser)
    add_json(parser)


def suspend(parser: ArgumentParser) -> None:
    """`rowlock suspend`, and what every verb about one execution takes."""
    add_execution(parser)
    add_reason(parser)
    add_dsn(parser)
    add_json(parser)


def resume(parser: ArgumentParser) -> None:
    """`rowlock resume`."""
    suspend(parser)


def abandon(parser: ArgumentParser) -> None:
    """`rowlock abandon`."""
    suspend(parser)


def restart(parser: ArgumentParser) -> None:
    """`rowlock restart`."""
    add_execution(parser)
    add_reason(parser)
    parser.add_argument(
        "--detach", action="store_true", help="print the new execution and leave it to the nodes"
    )
    add_dsn(parser)
    add_json(parser, "print JSON: an object on a line for each progress, and one for the result")


def resolve(parser: ArgumentParser) -> None:
    """`rowlock resolve`."""
    add_execution(parser)
    parser.add_argument("partition_key", metavar="PARTITION_KEY", help="key of the partition")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--completed",
        action="store_true",
        help="the work was done: a restart takes the partition as COMPLETED",
    )
    how.add_argument(
        "--retry",
        action="store_true",
        help="the work may be done again: a restart runs the partition",
    )
    parser.add_argument(
        "--result",
        metavar="JSON",
        help="with --completed: its result, which finish() will see (default: null)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="with --retry: although an attempt of it may still run on a node",
    )
    add_reason(parser)
    add_dsn(parser)
    add_json(parser)


def set(parser: ArgumentParser) -> None:  # noqa: A001  the word that people type
    """`rowlock set`."""
    add_execution(parser)
    _add_priority(parser, default=None)
    parser.add_argument(
        "--parallelism",
        metavar="N|none",
        type=whole_or("none", "--parallelism", 1, PARALLELISM_MAX),
        help="at most N of its partitions at a time; none: no limit",
    )
    parser.add_argument(
        "--deadline",
        metavar="SECONDS|none",
        type=whole_or("none", "--deadline", 1, DEADLINE_SECONDS_MAX),
        help="end it as FAILED so many seconds after it was requested; none: never",
    )
    add_reason(parser)
    add_dsn(parser)
    add_json(parser)


def explain(parser: ArgumentParser) -> None:
    """`rowlock explain`."""
    add_execution(parser)
    add_dsn(parser)
    add_json(parser)


def purge(parser: ArgumentParser) -> None:
    """`rowlock purge`."""
    for option, what in (
        ("--completed-days", "executions that COMPLETED"),
        ("--failed-days", "executions that ended in any other way"),
        ("--events-days", "events, and nodes that left,"),
    ):
        parser.add_argument(
            option,
            metavar="N|never",
            type=whole_or("never", option, 0, DAYS_MAX),
            default="never",
            help=f"delete {what} more than N days ago (default: never)",
        )
    add_dsn(parser)
    add_json(parser)


def master(parser: ArgumentParser) -> None:
    """`rowlock master`."""
    parser.add_argument(
        "execution",
        metavar="EXECUTION",
        type=whole_id("EXECUTION"),
        help="its whole id",
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=whole("--slots", 0, SLOTS_MAX),
        default=0,
        help="also process N of its partitions at a time here (default 0: plan and watch only)",
    )
    add_pool(parser, "the pool of the execution")
    add_import(parser)
    add_http(parser)
    _add_log_format(parser)
    add_dsn(parser)
    add_json(parser, "log as JSON, whatever the environment says")


def jobs(parser: ArgumentParser) -> None:
    """`rowlock jobs`."""
    add_limit(parser, 200)
    add_dsn(parser)
    add_json(parser)


def contract(parser: ArgumentParser) -> None:
    """`rowlock contract`."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument(
        "--hash",
        metavar="H",
        help="this contract, where nodes have published several (rowlock jobs lists them)",
    )
    add_import(parser)
    add_dsn(parser)
    add_json(parser)


def dev(parser: ArgumentParser) -> None:
    """`rowlock dev`."""
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=whole("--nodes", 1, DEV_NODES_MAX),
        default=2,
        help="how many nodes to run (default 2)",
    )
    parser.add_argument(
        "--slots",
        metavar="N",
        type=whole("--slots", 1, SLOTS_MAX),
        default=2,
        help="partitions at a time on each node (default 2)",
    )
    add_import(parser)
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        default=Path(".rowlock-dev"),
        help="folder that keeps the database (default .rowlock-dev)",
    )
    add_json(parser, "print the database and the nodes as one JSON document, and log as JSON")


def demo(parser: ArgumentParser) -> None:
    """`rowlock demo`, which keeps its options beside its code."""
    from rowlock.demo.command import add_arguments

    add_arguments(parser)


def _add_log_format(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--log-format",
        choices=("json", "human"),
        help="how to log (default: ROWLOCK_LOG_FORMAT, else human on a terminal, json elsewhere)",
    )


def _add_priority(parser: ArgumentParser, *, default: int | None) -> None:
    parser.add_argument(
        "--priority",
        metavar="N",
        type=whole("--priority", -PRIORITY_MAX, PRIORITY_MAX),
        default=default,
        help="executions with a larger number are served first"
        + ("" if default is None else f" (default {default})"),
    )


def _add_status(parser: ArgumentParser, known: tuple[str, ...]) -> None:
    parser.add_argument(
        "--status",
        metavar="S",
        dest="statuses",
        action="append",
        default=[],
        type=one_of("--status", known),
        help=f"only in this state, may be given several times: {', '.join(known)}",
    )
