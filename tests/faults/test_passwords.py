"""The password of the nodes' login is changed while they work."""

import time

from psycopg import sql

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually


def rotate(fleet: Fleet, login: str, password: str) -> None:
    """Set a password, and end every session that logged in with the one before."""
    with fleet.database.connect() as db:
        db.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(login), password))
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [login]
        )


def test_a_rotated_password_is_read_again_without_a_restart(private_fleet: Fleet) -> None:
    """Nodes and their authors' transactions log in with what files say. The password is changed, all
    sessions end, and only then are the files rewritten: until then the nodes try on, and afterwards
    they go on as they are, with the attempts that they had. (Elsewhere every new connection fails until
    somebody restarts the pods. Reported as formae PR#733, asyncpg#291, postgres-nio#431 and
    vault-k8s#85.)"""
    fleet = private_fleet
    fleet.settings["unreachable_seconds"] = 4
    login = "nodes_whose_password_changes"
    fleet.rows("CREATE ROLE nodes_whose_password_changes LOGIN IN ROLE rowlock_node")
    server = fleet.database.server
    files = [fleet.folder / name for name in ("control", "work")]

    def write(password: str) -> None:
        dsn = server.dsn_of(fleet.database.name, user=login, password=password)
        for file in files:
            new = file.with_suffix(".new")
            new.write_text(f"{dsn}\n")
            new.replace(file)

    rotate(fleet, login, "first")
    write("first")
    nodes = [
        fleet.node(
            name,
            slots=2,
            ROWLOCK_DSN="",
            ROWLOCK_DSN_FILE=str(files[0]),
            ROWLOCK_WORK_DSN_FILE=str(files[1]),
        )
        for name in ("one", "two")
    ]
    held = fleet.request(parts=[part("held", step("tick", fleet.path("go")))])
    fleet.wait_started("held")
    work = fleet.request(parts=parts(6, step("rows", 3), prefix="before"))
    fleet.wait(work)

    rotate(fleet, login, "second")
    for node in nodes:
        eventually(
            lambda: any(
                "password authentication failed" in line["message"]
                for line in node.events("database_unavailable")  # noqa: B023  asked before the next
            ),
            f"{node.name} says what its log-ins meet",
        )
    write("second")
    written = time.monotonic()

    for node in nodes:
        node.wait_beats(2)
    work = fleet.request(parts=parts(6, step("rows", 3), prefix="after"))
    fleet.wait(work)
    assert time.monotonic() - written < 30, "seconds"
    fleet.open("go")
    fleet.wait(held)
    assert fleet.partition("held").claims == 1
    assert all(len(node.incarnations) == 1 for node in nodes)
    eventually(lambda: len(fleet.rows("SELECT FROM fleet.effects")) == 36, "all rows are there")
