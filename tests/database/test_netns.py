"""The namespace in which other tests lose packets is joined to this machine, until it is told not to be."""

import subprocess
import sys

from tests.support.netns import Island
from tests.support.pgproxy import PgProxy
from tests.support.postgres import Database

SELECT_ONE = """
import psycopg, sys
try:
    psycopg.connect(sys.argv[1], connect_timeout=2).execute("SELECT 1")
except psycopg.OperationalError as error:
    print(type(error).__name__)
else:
    print("answered")
"""


def test_what_runs_inside_reaches_one_port_until_its_packets_are_dropped(
    database: Database,
) -> None:
    with Island() as island, PgProxy(database.dsn, host=island.host) as proxy:

        def ask(dsn: str) -> str:
            argv = [*island.argv, sys.executable, "-c", SELECT_ONE, dsn]
            return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()

        assert ask(proxy.dsn) == "answered"
        assert ask(database.dsn) == "OperationalError", "another loopback: nobody listens there"
        island.drop(proxy.port)
        assert ask(proxy.dsn) == "ConnectionTimeout", "no refusal, only silence"
        island.heal()
        assert ask(proxy.dsn) == "answered"

    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert island.name not in names.stdout
