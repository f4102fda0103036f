"""Command line of the operator's container: its version, and whether its settings are right."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rowlock.errors import SettingsError
from rowlock_operator import __version__
from rowlock_operator.settings import Settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the program's name; None takes those of the process.

    Returns:
        The exit status: 0, or 2 when settings are wrong.
    """
    parser = argparse.ArgumentParser(prog="rowlock-operator", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rowlock-operator {__version__}")
    parser.add_argument(
        "--check-settings",
        action="store_true",
        required=True,
        help="check the settings in the environment and print them without passwords",
    )
    parser.parse_args(arguments)
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as problem:
        print(f"rowlock-operator: {problem}", file=sys.stderr)
        return problem.exit_code
    print(json.dumps(settings.describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
