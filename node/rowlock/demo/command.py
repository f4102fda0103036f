"""`rowlock demo`: settles a year of flights over nodes of which one is killed, pays, and compares.

Exit code 0 means that the kills hit work that was running, the ledger equals the reference, and
nothing was lost or doubled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Final

from rowlock.demo import closing, tempo, venue
from rowlock.demo.findings import Findings
from rowlock.demo.screen import Screen, choose_screen, step

NODES_MIN: Final = 2
"""One is killed, and somebody must be left."""
NODES_MAX: Final = 8
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `rowlock demo` takes."""
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=_nodes,
        default=3,
        help=f"how many nodes to run, {NODES_MIN} to {NODES_MAX} (default 3)",
    )
    parser.add_argument(
        "--fast", action="store_true", help="quick heartbeats and little to watch, for tests"
    )
    parser.add_argument(
        "--dsn",
        metavar="DSN",
        help="play in this database (PostgreSQL 15 or newer, without living nodes) and take the "
        "schema demo away at the end (default: ROWLOCK_DSN, else a PostgreSQL of its own)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document at the end")


def run(given: argparse.Namespace) -> int:
    """Play it; 0 if all was as it must be."""
    began = time.monotonic()
    with _interrupted_once():
        screen = choose_screen(as_json=given.json)
        try:
            findings = _play(given, screen, began)
        finally:
            screen.release()
        if given.json:
            print(json.dumps(findings.document, indent=2))
        else:
            screen.close(closing.close(findings))
    return 1 if findings.problems else 0


def _play(given: argparse.Namespace, screen: Screen, began: float) -> Findings:
    from rowlock.demo import story  # brings the whole machinery of a node; --help needs none of it

    speed = tempo.FAST if given.fast else tempo.WATCHED
    screen.open(
        f"rowlock demo: a year of flights, {given.nodes} nodes, and one of them is killed",
        [tempo.in_words(speed)],
    )
    dsn = given.dsn if given.dsn is not None else os.environ.get("ROWLOCK_DSN")
    with ExitStack() as stack:
        with step(screen, "PostgreSQL") as opening:
            place = stack.enter_context(venue.existing(dsn) if dsn else venue.embedded())
            opening.text = f"{place.version}, {place.description}"
        return story.play(
            story.Plan(venue=place, screen=screen, tempo=speed, nodes=given.nodes, began=began)
        )


def _nodes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not NODES_MIN <= int(text) <= NODES_MAX:
        raise argparse.ArgumentTypeError(
            f"--nodes {text} must be a whole number from {NODES_MIN} to {NODES_MAX}"
        )
    return int(text)


@contextmanager
def _interrupted_once() -> Generator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end everything in order; a second one disturbs nothing."""

    def interrupt(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  as it is given
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
