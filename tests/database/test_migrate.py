"""Migrations go forward once, whole, in order, and however many runners start them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from rowlock.db import migrate as migration
from rowlock.db.migrate import Migration, check, current_version, known_migrations, migrate
from rowlock.embedded import Server
from rowlock.errors import Refused, SchemaAhead, SchemaMismatch, Unavailable, UsageError
from rowlock.settings import Settings
from tests.support.pooler import Pooler
from tests.support.postgres import Cluster, Database, chosen_binaries
from tests.support.releases import KNOWN, record_migration
from tests.support.waiting import wait_until

Folder = Callable[..., tuple[Migration, ...]]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Makes migrations out of scripts; rowlock's own first one, with the roles, precedes them."""

    def make(*scripts: str) -> tuple[Migration, ...]:
        first = known_migrations()[0]
        (tmp_path / f"{first.label}.sql").write_bytes(first.script)
        for version, script in enumerate(scripts, start=2):
            (tmp_path / f"{version:04}_test.sql").write_text(script)
        return migration.read_migrations(tmp_path)

    return make


def versions(database: Database) -> list[int]:
    found = database.rows("SELECT version FROM rowlock.schema_migrations ORDER BY version")
    return [version for (version,) in found]


def test_an_empty_database_gets_every_migration_once(empty_database: Database) -> None:
    wanted = [one.version for one in known_migrations()]

    applied = migrate(empty_database.dsn)
    again = migrate(empty_database.dsn)

    assert [one.version for one in applied] == wanted == versions(empty_database)
    assert again == []
    with empty_database.connect() as db:
        assert current_version(db) == wanted[-1]
        check(db)


def test_an_open_connection_is_given_back_as_it_was(empty_database: Database) -> None:
    with empty_database.connect(autocommit=False) as db:
        migrate(db)

        assert db.autocommit is False
        assert db.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_connection_inside_a_transaction_is_refused(empty_database: Database) -> None:
    with empty_database.connect(autocommit=False) as db:
        db.execute("SELECT 1")

        with pytest.raises(UsageError, match="in no transaction"):
            migrate(db)


def test_six_programs_at_once_apply_each_migration_once(empty_database: Database) -> None:
    program = "import sys; from rowlock.db.migrate import migrate; print(len(migrate(sys.argv[1])))"
    runners = [
        subprocess.Popen(
            [sys.executable, "-c", program, empty_database.dsn], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    counts = sorted(int(runner.communicate(timeout=60)[0]) for runner in runners)

    assert [runner.returncode for runner in runners] == [0] * 6
    assert counts == [0] * 5 + [len(known_migrations())]


def test_an_index_is_built_concurrently_while_others_wait(
    empty_database: Database, folder: Folder
) -> None:
    before = folder("CREATE TABLE rowlock.big AS SELECT n FROM generate_series(1, 1000) n;")
    migrate(empty_database.dsn, migrations=before)
    migrations = folder(
        before[1].script.decode(),
        "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS big_n ON rowlock.big (n);",
    )
    with empty_database.connect() as blocker, ThreadPoolExecutor() as pool:
        # A writer's open transaction holds the index up until the other runners wait.
        with blocker.transaction():
            blocker.execute("INSERT INTO rowlock.big VALUES (0)")
            runs = [
                pool.submit(migrate, empty_database.dsn, migrations=migrations) for _ in range(4)
            ]
            wait_until(
                lambda: empty_database.rows(
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() "
                    "AND query LIKE '%%CONCURRENTLY%%' AND wait_event_type = 'Lock' AND pid <> %s",
                    [blocker.info.backend_pid],
                )
            )
            wait_until(
                lambda: empty_database.rows(
                    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND "
                    "query LIKE '%%pg_try_advisory_lock%%' AND application_name = 'rowlock migrate' "
                    "OFFSET 2",
                )
            )
        counts = sorted(len(run.result(timeout=60)) for run in runs)

    assert counts == [0, 0, 0, 1]
    valid = empty_database.value(
        "SELECT indisvalid FROM pg_index WHERE indexrelid = 'rowlock.big_n'::regclass"
    )
    assert valid is True


def test_a_failing_migration_leaves_nothing(empty_database: Database, folder: Folder) -> None:
    migrations = folder(
        "CREATE TABLE rowlock.good ();",
        "CREATE TABLE rowlock.half ();\nSELECT 1 / 0;",
        "CREATE TABLE rowlock.later ();",
    )

    with pytest.raises(Refused, match=r"0003_test failed and left nothing: division by zero"):
        migrate(empty_database.dsn, migrations=migrations)

    assert versions(empty_database) == [1, 2]
    tables = empty_database.value(
        "SELECT array_agg(relname::text ORDER BY relname) FROM pg_class "
        "WHERE relnamespace = 'rowlock'::regnamespace AND relkind = 'r'"
    )
    assert tables == ["good", "schema_migrations"]


def test_a_killed_runner_leaves_nothing_and_the_next_one_works(
    empty_database: Database, folder: Folder, tmp_path: Path
) -> None:
    folder("CREATE TABLE rowlock.half ();\nSELECT pg_sleep(60);")
    program = (
        "import sys; from pathlib import Path; from rowlock.db.migrate import *; "
        "migrate(sys.argv[1], migrations=read_migrations(Path(sys.argv[2])))"
    )
    runner = subprocess.Popen([sys.executable, "-c", program, empty_database.dsn, tmp_path])
    wait_until(
        lambda: empty_database.rows(
            "SELECT 1 FROM pg_stat_activity "
            "WHERE datname = current_database() AND wait_event = 'PgSleep'",
        )
    )
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    # The backend notices the closed socket only when its sleep ends: end it as an admin would.
    empty_database.rows(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event = 'PgSleep'"
    )

    applied = migrate(empty_database.dsn, migrations=folder("CREATE TABLE rowlock.whole ();"))

    assert [one.version for one in applied] == [2]
    assert empty_database.value("SELECT to_regclass('rowlock.half')") is None


def test_functions_with_dollar_quotes_and_percent_signs_survive(
    empty_database: Database, folder: Folder
) -> None:
    migrations = folder(
        "CREATE FUNCTION rowlock.f() RETURNS text LANGUAGE plpgsql AS $$\n"
        "BEGIN RETURN format('%s;%%', 'a'); END $$;\n"
        "CREATE TABLE rowlock.t (a text DEFAULT rowlock.f());"
    )

    migrate(empty_database.dsn, migrations=migrations)

    assert empty_database.value("SELECT rowlock.f()") == "a;%"


def test_a_changed_file_is_refused(empty_database: Database, folder: Folder) -> None:
    migrate(empty_database.dsn, migrations=folder("CREATE TABLE rowlock.t ();"))

    with pytest.raises(SchemaMismatch, match=r"0002_test has changed since it was applied"):
        migrate(empty_database.dsn, migrations=folder("CREATE TABLE rowlock.t (a int);"))


def test_a_hole_in_the_history_is_refused(empty_database: Database, folder: Folder) -> None:
    migrations = folder("SELECT 1;", "SELECT 2;")
    migrate(empty_database.dsn, migrations=migrations)
    with empty_database.connect() as db:
        db.execute("DELETE FROM rowlock.schema_migrations WHERE version = 2")

    with pytest.raises(SchemaMismatch, match=r"0002_test is missing in the database"):
        migrate(empty_database.dsn, migrations=migrations)


def test_a_newer_schema_that_works_with_this_code_is_accepted(database: Database) -> None:
    """Nodes and operators are replaced one after the other, and an old pod that starts again meanwhile
    migrates too, where that is done in an init container."""
    record_migration(database, works_with=KNOWN)

    with database.connect() as db:
        check(db)
        assert migrate(db) == []
        assert current_version(db) == KNOWN + 1


def test_a_newer_schema_that_works_with_later_code_alone_is_refused(database: Database) -> None:
    record_migration(database, works_with=KNOWN + 1)
    told = rf"version {KNOWN + 1} and works with .* version {KNOWN + 1}, .* the {KNOWN} .*: upgrade"

    with database.connect() as db:
        with pytest.raises(SchemaAhead, match=told):
            check(db)
        with pytest.raises(SchemaAhead, match=told):
            migrate(db)


def test_a_newer_schema_does_not_hide_a_changed_file(database: Database) -> None:
    record_migration(database, works_with=KNOWN)
    with database.connect() as db:
        db.execute(
            "UPDATE rowlock.schema_migrations SET checksum = repeat('1', 64) WHERE version = 1"
        )

        with pytest.raises(SchemaMismatch, match="0001_roles has changed"):
            migrate(db)


@pytest.mark.parametrize(
    "script, works_with",
    [
        ("-- Adds a column.\n-- works with: 2\nSELECT 1;", 2),
        ("-- no-transaction\n-- works with: 2\nSELECT 1;", 2),
        ("-- Takes the old column away.\nSELECT 1;", 3),  # nothing said: nothing older
        ("SELECT 1;\n-- works with: 2", 3),  # not in its head
    ],
)
def test_a_migration_says_in_its_head_which_code_may_go_on(
    empty_database: Database, folder: Folder, script: str, works_with: int
) -> None:
    """The highest of all counts: what a later migration allows does not undo what an earlier one ended."""
    migrate(empty_database.dsn, migrations=folder("SELECT 1;", script))

    rows = empty_database.rows(
        "SELECT version, works_with FROM rowlock.schema_migrations ORDER BY version"
    )
    assert rows == [(1, 1), (2, 2), (3, works_with)]


def test_what_works_with_a_later_schema_is_a_mistake_of_ours(folder: Folder) -> None:
    with pytest.raises(ValueError, match=r"0002_test.sql cannot work with 3: name 1 to 2"):
        folder("-- works with: 3\nSELECT 1;")


def test_the_end_of_older_code_outlives_later_migrations(database: Database) -> None:
    record_migration(database, works_with=KNOWN + 1)
    with database.connect() as db:
        db.execute(
            "INSERT INTO rowlock.schema_migrations (version, name, checksum, works_with)"
            " VALUES (%s, 'later', repeat('0', 64), %s)",
            [KNOWN + 2, KNOWN],
        )

        with pytest.raises(SchemaAhead, match=f"version {KNOWN + 2} .* version {KNOWN + 1}"):
            check(db)


def test_an_older_schema_is_refused_with_the_command_that_helps(database: Database) -> None:
    newest = known_migrations()[-1].version
    with database.connect() as db:
        db.execute("DELETE FROM rowlock.schema_migrations WHERE version = %s", [newest])

        with pytest.raises(
            SchemaMismatch, match=f"version {newest - 1}.*{newest}.*rowlock migrate"
        ):
            check(db)


def test_a_database_without_schema_is_refused_with_the_command_that_helps(
    empty_database: Database,
) -> None:
    with empty_database.connect() as db:
        assert current_version(db) == 0
        with pytest.raises(SchemaMismatch, match=f"{empty_database.name}.*run rowlock migrate"):
            check(db)


@pytest.mark.parametrize(
    "role", ["rowlock_node", "rowlock_operator", "rowlock_admin", "rowlock_reader"]
)
def test_every_role_may_check_the_version(database: Database, role: str) -> None:
    with database.connect(role=role, autocommit=False) as db:
        check(db)

        assert db.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_table_in_use_is_waited_for_and_then_named(
    empty_database: Database, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "LOCK_SECONDS", (0.05, 0.05, 0.05))
    first = "CREATE TABLE rowlock.t ();"
    migrate(empty_database.dsn, migrations=folder(first))
    second = folder(first, "ALTER TABLE rowlock.t ADD a int;")

    with empty_database.connect() as user, user.transaction():
        user.execute("LOCK rowlock.t IN ACCESS SHARE MODE")
        told = r"0003_test did not get its locks in 3 attempts .* left nothing: end the long"
        with pytest.raises(Refused, match=told):
            migrate(empty_database.dsn, migrations=second)

    assert len(migrate(empty_database.dsn, migrations=second)) == 1


def test_a_deadlock_with_somebody_else_costs_an_attempt_and_not_the_migration(
    empty_database: Database, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The migration has one table and waits for another; who has that wants the first. The server ends one of them."""
    first = "CREATE TABLE rowlock.a (); CREATE TABLE rowlock.b ();"
    migrate(empty_database.dsn, migrations=folder(first))
    second = folder(first, "LOCK TABLE rowlock.a; LOCK TABLE rowlock.b;")
    monkeypatch.setattr(migration, "LOCK_SECONDS", (5.0, 5.0))
    monkeypatch.setattr(migration, "PAUSE_FACTOR", 0.0)
    waits = "SELECT count(*) FROM pg_locks WHERE relation = %s::regclass AND NOT granted"
    with (
        empty_database.connect() as looks,
        empty_database.connect(autocommit=False) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        looks.execute(
            sql.SQL("ALTER DATABASE {} SET deadlock_timeout = 500").format(
                sql.Identifier(empty_database.name)
            )
        )
        other.execute("SET deadlock_timeout = '1h'")
        other.execute("LOCK TABLE rowlock.b")
        applied = thread.submit(migrate, empty_database.dsn, migrations=second)
        wait_until(lambda: empty_database.value(waits, ["rowlock.b"]) == 1, what="it waits for b")
        other.execute("LOCK TABLE rowlock.a")  # the migration looks for a deadlock, and finds it
        other.rollback()
        assert len(applied.result()) == 1


def test_all_attempts_last_for_a_minute_and_none_as_long_as_a_lease() -> None:
    """Arithmetic: a backup or a report that keeps a table for a minute is waited for, as the next test does with
    one of a moment; and at no time is anybody held up for a lease."""
    waits = migration.LOCK_SECONDS
    assert sum(waits) + sum(migration.PAUSE_FACTOR * wait for wait in waits[:-1]) > 60
    settings = Settings()
    assert max(waits) < settings.lease_seconds - settings.beat_seconds
    assert waits[0] < settings.beat_seconds


def test_others_have_their_turn_between_two_attempts(
    empty_database: Database, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that is waited for lets nobody pass, not even readers (oban#1373, freehire#1284): each attempt
    gives up soon and leaves the table alone for longer than it has held it up."""
    first = "CREATE TABLE rowlock.t ();"
    migrate(empty_database.dsn, migrations=folder(first))
    second = folder(first, "ALTER TABLE rowlock.t ADD a int;")
    pauses: list[float] = []
    looks: list[object] = []

    def look_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        with empty_database.connect() as other:
            other.execute("SET lock_timeout = '10ms'")
            looks.append(other.execute("SELECT count(*) FROM rowlock.t").fetchone())
        if len(pauses) == 3:
            user.rollback()

    monkeypatch.setattr(migration, "LOCK_SECONDS", (0.05, 0.1, 0.2, 0.3))
    monkeypatch.setattr(time, "sleep", look_meanwhile)

    with empty_database.connect(autocommit=False) as user:
        user.execute("LOCK rowlock.t IN ACCESS SHARE MODE")
        assert len(migrate(empty_database.dsn, migrations=second)) == 1

    assert pauses == pytest.approx([0.1, 0.2, 0.4])
    assert looks == [(0,)] * 3


def test_an_index_that_could_not_be_built_is_built_by_the_next_attempt(
    empty_database: Database, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves an invalid index, which IF NOT EXISTS takes for the wanted one."""
    monkeypatch.setattr(migration, "CONCURRENTLY_SECONDS", 0.1)
    monkeypatch.setattr(migration, "LOCK_SECONDS", (0.1,))
    first = "CREATE TABLE rowlock.big AS SELECT n FROM generate_series(1, 1000) n;"
    migrate(empty_database.dsn, migrations=folder(first))
    second = folder(
        first,
        "-- no-transaction\nCREATE INDEX CONCURRENTLY IF NOT EXISTS big_n ON rowlock.big (n);",
    )
    valid = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'rowlock.big_n'::regclass"
    with empty_database.connect() as writer, writer.transaction():
        writer.execute("INSERT INTO rowlock.big VALUES (0)")
        with pytest.raises(Refused, match="did not get its locks"):
            migrate(empty_database.dsn, migrations=second)
        assert empty_database.value(valid) is False

    assert len(migrate(empty_database.dsn, migrations=second)) == 1
    assert empty_database.value(valid) is True


def test_a_login_that_owns_the_database_and_makes_roles_is_enough(
    postgres: Cluster, empty_database: Database
) -> None:
    owner = f"owner_{empty_database.name}"
    with empty_database.connect() as db:
        identifiers = {
            "owner": sql.Identifier(owner),
            "database": sql.Identifier(empty_database.name),
            "password": sql.Literal("secret"),
        }
        db.execute(
            sql.SQL("CREATE ROLE {owner} LOGIN CREATEROLE PASSWORD {password}").format(
                **identifiers
            )
        )
        # The roles exist on this server already: PostgreSQL 16 and newer let only a role's
        # administrators hand it out.
        db.execute(
            sql.SQL("GRANT rowlock_owner TO {owner} WITH ADMIN OPTION").format(**identifiers)
        )
        db.execute(sql.SQL("ALTER DATABASE {database} OWNER TO {owner}").format(**identifiers))
    dsn = make_conninfo(empty_database.dsn, user=owner, password="secret")
    try:
        assert len(migrate(dsn)) == len(known_migrations())
        with psycopg.connect(dsn) as db:
            check(db)
    finally:
        postgres.drop(empty_database.name)
        with psycopg.connect(postgres.admin_dsn, autocommit=True) as db:
            db.execute(sql.SQL("DROP OWNED BY {owner}").format(**identifiers))
            db.execute(sql.SQL("DROP ROLE {owner}").format(**identifiers))


@pytest.mark.parametrize("roles_are_there", [False, True])
def test_on_a_server_of_its_own_a_login_that_owns_the_database_is_enough(
    roles_are_there: bool,
) -> None:
    # As a database operator makes it: no superuser, and either a right to make roles or the roles.
    # In the second case the owner may not see which sessions live: nodes then do without evidence.
    with Server.start(binaries=chosen_binaries()) as server:
        with psycopg.connect(server.dsn, autocommit=True) as db:
            db.execute("CREATE ROLE app LOGIN CREATEROLE PASSWORD 'secret'")
            db.execute("GRANT pg_read_all_stats TO app WITH ADMIN OPTION")
            db.execute("CREATE DATABASE app OWNER app")
            if roles_are_there:
                db.execute("REVOKE pg_read_all_stats FROM app")
                db.execute("CREATE ROLE rowlock_node; CREATE ROLE rowlock_operator")
                db.execute("CREATE ROLE rowlock_admin; CREATE ROLE rowlock_reader")
                db.execute("CREATE ROLE rowlock_owner; GRANT rowlock_owner TO app")
                db.execute("ALTER ROLE app NOCREATEROLE")
        dsn = make_conninfo(server.dsn, user="app", password="secret", dbname="app")
        assert len(migrate(dsn)) == len(known_migrations())
        with psycopg.connect(dsn) as db:
            check(db)
            sees = db.execute("SELECT pg_has_role('rowlock_owner', 'pg_read_all_stats', 'USAGE')")
            assert sees.fetchone() == (not roles_are_there,)


def test_a_login_without_rights_is_told_what_it_needs(empty_database: Database) -> None:
    with pytest.raises(Refused, match=r"migration 0001.*owns the database and has CREATEROLE"):
        migrate(empty_database.dsn_as("rowlock_reader"))


def test_an_old_server_is_refused(
    empty_database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "LOWEST_SERVER_VERSION", 990000)

    with pytest.raises(UsageError, match="rowlock needs 99 or newer"):
        migrate(empty_database.dsn)


def test_a_pooler_is_refused(empty_database: Database) -> None:
    with (
        Pooler(empty_database.dsn) as pooler,
        pytest.raises(UsageError, match="goes through a pooler"),
    ):
        migrate(pooler.dsn)

    assert empty_database.value("SELECT to_regnamespace('rowlock')") is None


def test_a_database_of_another_encoding_is_refused(postgres: Cluster) -> None:
    """It could not hold the error of an attempt, whose partition would stay CLAIMED."""
    name = f"latin_{postgres.run}"
    with psycopg.connect(postgres.admin_dsn, autocommit=True) as admin:
        admin.execute(
            sql.SQL(
                "CREATE DATABASE {} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
            ).format(sql.Identifier(name))
        )
    try:
        with pytest.raises(UsageError, match="LATIN1"):
            migrate(Database(cluster=postgres, name=name).dsn)
    finally:
        postgres.drop(name)


def test_an_unreachable_database_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1.*Connection refused"):
        migrate("postgresql://nobody@127.0.0.1:1/none")


@pytest.mark.parametrize("names", [["0001_a.sql", "0003_b.sql"], ["0001_a.sql", "0001_b.sql"]])
def test_gaps_and_twins_in_the_numbers_are_mistakes_of_ours(
    tmp_path: Path, names: Sequence[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("SELECT 1;")

    with pytest.raises(ValueError, match="numbered 1, 2, 3"):
        migration.read_migrations(tmp_path)


def test_a_wrong_file_name_is_a_mistake_of_ours(tmp_path: Path) -> None:
    (tmp_path / "1-Roles.sql").write_text("SELECT 1;")

    with pytest.raises(ValueError, match=r"1-Roles.sql must be named like 0001_words.sql"):
        migration.read_migrations(tmp_path)
