"""`rowlock migrate`: brings the database to the schema that this version knows."""

from __future__ import annotations

import argparse

from rowlock.cli import arguments, output
from rowlock.db.connect import connect
from rowlock.db.migrate import current_version, known_migrations, migrate


def run(given: argparse.Namespace) -> int:
    """Apply what is missing; safe to run at any time, by any number of programs at once."""
    with connect(arguments.dsn_of(given), application_name="rowlock migrate") as db:
        applied = migrate(db)
        version = current_version(db)
    if given.json:
        output.print_json({"version": version, "applied": applied})
        return 0
    for one in applied:
        print(f"applied {one.version:04}_{one.name} in {one.seconds:.2f} s")
    if version > known_migrations()[-1].version:
        print(f"the schema is version {version}, newer than this rowlock, and works with it")
    else:
        print(f"the schema is {'now' if applied else 'up to date:'} version {version}")
    return 0
