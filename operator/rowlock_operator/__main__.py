"""Command line of the operator's container: it runs, or checks its settings, or says its version."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pwd
import sys
from collections.abc import Sequence

from rowlock import logs
from rowlock.errors import RowlockError, SettingsError
from rowlock_operator import __version__
from rowlock_operator.settings import Settings

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the program's name; None takes those of the process.

    Returns:
        The exit status: 0 after a signal, or 2 when settings are wrong.
    """
    parser = argparse.ArgumentParser(prog="rowlock-operator", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rowlock-operator {__version__}")
    parser.add_argument(
        "--check-settings",
        action="store_true",
        help="check the settings in the environment and print them without passwords",
    )
    options = parser.parse_args(arguments)
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as problem:
        print(f"rowlock-operator: {problem}", file=sys.stderr)
        return problem.exit_code
    if options.check_settings:
        print(json.dumps(settings.describe()))
        return 0
    return _run(settings)


def _run(settings: Settings) -> int:
    from rowlock_operator import handlers  # kopf takes half a second that the other words need not

    logs.configure(settings.log_format)
    # kopf tells of each event that it hands over.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_without_ballast)
    _have_a_name()
    log.info(
        f"operator {__version__} of cluster {settings.cluster}",
        extra={"event": "operator_started", "settings": json.dumps(settings.describe())},
    )
    try:
        handlers.run(settings)
    except RowlockError as problem:
        print(f"rowlock-operator: {problem}", file=sys.stderr)
        return problem.exit_code
    log.info("operator ended", extra={"event": "operator_ended"})
    return 0


def _without_ballast(record: logging.LogRecord) -> bool:
    """Take from kopf's lines what it adds for its own use: all its settings, with each of them."""
    for name in ("settings", "k8s_skip") if record.name.startswith("kopf") else ():
        vars(record).pop(name, None)
    return True


def _have_a_name() -> None:
    """kopf asks who it runs as; a container's user often has no name."""
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("USER", "rowlock")


if __name__ == "__main__":
    sys.exit(main())
