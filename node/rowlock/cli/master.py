"""`rowlock master`: the process of a master run, which drives one execution to its end.

It becomes the master, or stays beside the one there is, works its slots, and takes over when that one
goes. Whatever happens to the database, it waits; its exit code is the outcome of the execution.
"""

from __future__ import annotations

import argparse
import logging

from rowlock.cli.follow import EXIT_CODES
from rowlock.cli.main import INTERRUPTED
from rowlock.cli.node import prepared

log = logging.getLogger(__name__)


def run(given: argparse.Namespace) -> int:
    """Drive it. Logs go to standard error; SIGTERM and SIGINT drain it, a second one ends it."""
    from rowlock.runtime.driver import drive

    settings, registry = prepared(given)
    result = drive(
        settings,
        registry,
        given.execution,
        pool=given.pool,
        slots=given.slots,
        imports=tuple(given.imports),
        http_port=given.http,
        on_superseded=_say_who_is_master,
    )
    return INTERRUPTED if result.left else EXIT_CODES[result.status]


def _say_who_is_master() -> None:
    log.info(
        "another node is the master: working beside it, and taking over when it goes",
        extra={"event": "master_is_another"},
    )
