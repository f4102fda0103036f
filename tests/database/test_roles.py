"""Rights: the catalogue says what docs/protocol.md says, and nothing gets in front of our objects."""

import re
from pathlib import Path
from typing import Final, LiteralString
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from rowlock.db.migrate import migrate
from tests.support.builders import Scene
from tests.support.postgres import ROLES, Database

PAGE: Final = Path(__file__).parents[2] / "docs" / "protocol.md"
COLUMNS: Final = ("rowlock_node", "rowlock_operator", "rowlock_admin", "rowlock_reader", "public")

_RIGHTS: Final[LiteralString] = """
WITH columns (grantee) AS (SELECT unnest(%s::text[])), rights AS (
    SELECT 'schema' AS kind, n.nspname AS object, c.grantee, p.privilege,
           has_schema_privilege(c.grantee, n.oid, p.privilege) AS given
    FROM pg_namespace n, columns c, unnest(ARRAY['USAGE', 'CREATE']) AS p (privilege)
    WHERE n.nspname = 'rowlock'
    UNION ALL
    SELECT CASE r.relkind WHEN 'v' THEN 'view' ELSE 'table' END, r.relname, c.grantee, p.privilege,
           has_table_privilege(c.grantee, r.oid, p.privilege)
           OR (p.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
               AND has_any_column_privilege(c.grantee, r.oid, p.privilege))
    FROM pg_class r, columns c,
         unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER'])
             AS p (privilege)
    WHERE r.relnamespace = 'rowlock'::regnamespace AND r.relkind IN ('r', 'p', 'v', 'm', 'f')
    UNION ALL
    SELECT 'sequence', r.relname, c.grantee, p.privilege,
           has_sequence_privilege(c.grantee, r.oid, p.privilege)
    FROM pg_class r, columns c, unnest(ARRAY['USAGE', 'SELECT', 'UPDATE']) AS p (privilege)
    WHERE r.relnamespace = 'rowlock'::regnamespace AND r.relkind = 'S'
    UNION ALL
    SELECT 'function', f.proname, c.grantee, p.privilege,
           has_function_privilege(c.grantee, f.oid, p.privilege)
    FROM pg_proc f, columns c, unnest(ARRAY['EXECUTE']) AS p (privilege)
    WHERE f.pronamespace = 'rowlock'::regnamespace
)
SELECT kind, object, grantee, coalesce(string_agg(privilege, ', ' ORDER BY privilege)
       FILTER (WHERE given), '') AS given
FROM rights GROUP BY 1, 2, 3
"""

Table = dict[tuple[str, str], tuple[str, ...]]


def documented() -> Table:
    """The table under the heading "Roles": kind and object, and what each role may do with it."""
    section = PAGE.read_text().split("\n## Roles\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| `", line)
    ]
    table: Table = {}
    for kind, names, *rights in ([row[1], row[0], *row[2:]] for row in rows):
        for name in re.findall(r"`([^`]+)`", names):
            assert (kind, name) not in table, f"{name} is there twice"
            table[kind, name] = tuple(rights)
    return table


def actual(scene: Scene) -> Table:
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in scene.all(_RIGHTS, list(COLUMNS)):
        found.setdefault((row.kind, row.object), {})[row.grantee] = row.given
    return {key: tuple(rights[role] for role in COLUMNS) for key, rights in found.items()}


def test_the_documented_table_is_what_the_catalogue_says(scene: Scene) -> None:
    assert documented() == actual(scene)


def test_functions_are_told_apart_by_their_names(scene: Scene) -> None:
    """The table names no arguments."""
    rows = scene.all(
        "SELECT proname FROM pg_proc WHERE pronamespace = 'rowlock'::regnamespace"
        " GROUP BY 1 HAVING count(*) > 1"
    )
    assert rows == []


def test_nobody_but_the_owner_owns_anything(scene: Scene) -> None:
    owners = scene.all(
        "SELECT DISTINCT pg_get_userbyid(o) AS owner FROM ("
        " SELECT relowner FROM pg_class WHERE relnamespace = 'rowlock'::regnamespace"
        " UNION ALL SELECT proowner FROM pg_proc WHERE pronamespace = 'rowlock'::regnamespace"
        " UNION ALL SELECT nspowner FROM pg_namespace WHERE nspname = 'rowlock') x (o)"
    )
    assert [row.owner for row in owners] == ["rowlock_owner"]


def test_the_roles_are_powerless_groups(scene: Scene) -> None:
    rows = scene.all(
        "SELECT rolname FROM pg_roles WHERE rolname = ANY (%s) AND NOT (rolcanlogin OR rolsuper"
        " OR rolcreatedb OR rolcreaterole OR rolreplication OR rolbypassrls)",
        list(ROLES),
    )
    assert {row.rolname for row in rows} == set(ROLES)
    nested = scene.all(
        "SELECT m.member::regrole::text AS member, m.roleid::regrole::text AS role FROM pg_auth_members m"
        " JOIN pg_roles r ON r.oid = m.member WHERE r.rolname = ANY (%s)",
        list(ROLES),
    )
    # The owner sees which backends live, for `recover_by_evidence`; nobody has the rights of another.
    assert [tuple(row) for row in nested] == [("rowlock_owner", "pg_read_all_stats")]


def test_security_definer_functions_look_nowhere_but_at_home(scene: Scene) -> None:
    rows = scene.all(
        "SELECT proname, proconfig FROM pg_proc"
        " WHERE pronamespace = 'rowlock'::regnamespace AND prosecdef"
    )
    assert len(rows) > 30
    for row in rows:
        paths = [setting for setting in row.proconfig if setting.startswith("search_path")]
        assert paths == ["search_path=pg_catalog, rowlock, pg_temp"], row.proname


def test_what_a_role_may_execute_runs_as_the_owner(scene: Scene) -> None:
    """Otherwise it would need rights on the tables, which no role has; now() touches none."""
    rows = scene.all(
        "SELECT f.proname FROM pg_proc f, unnest(%s::text[]) AS r (role)"
        " WHERE f.pronamespace = 'rowlock'::regnamespace AND NOT f.prosecdef"
        " AND has_function_privilege(r.role, f.oid, 'EXECUTE') GROUP BY 1",
        list(COLUMNS),
    )
    assert [row.proname for row in rows] == ["now"]


def test_a_function_made_later_is_nobodys(scene: Scene) -> None:
    with scene.admin.transaction(force_rollback=True):
        scene.admin.execute("SET LOCAL ROLE rowlock_owner")
        scene.admin.execute(
            "CREATE FUNCTION rowlock.later() RETURNS integer LANGUAGE sql AS 'SELECT 1'"
        )
        may = scene.one(
            "SELECT has_function_privilege('public', 'rowlock.later()', 'EXECUTE') AS it"
        )
    assert may.it is False


def test_a_migrated_database_gives_nobody_temporary_objects(empty_database: Database) -> None:
    migrate(empty_database.dsn)

    for role in ("public", *ROLES):
        may = empty_database.value(
            "SELECT has_database_privilege(%s, current_database(), 'TEMPORARY')", [role]
        )
        assert may is False, role


# -- tried ---------------------------------------------------------------------------------------

FORBIDDEN: dict[str, LiteralString] = {
    "claim": "SELECT rowlock.claim(gen_random_uuid(), 1, 0, true, 1)",
    "look over the lines": "SELECT rowlock.passed(gen_random_uuid(), 0)",
    "complete": "SELECT rowlock.complete(gen_random_uuid(), '{}', '{}', '{}')",
    "fail": "SELECT rowlock.fail(gen_random_uuid(), 1, gen_random_uuid(), '{}', 'never', 0)",
    "release": "SELECT rowlock.release(gen_random_uuid(), '{}', '{}', true)",
    "checkpoint": "SELECT rowlock.checkpoint(gen_random_uuid(), 1, gen_random_uuid(), '1')",
    "reap": "SELECT rowlock.remove_node(gen_random_uuid(), gen_random_uuid(), 0)",
    "mark": "SELECT rowlock.mark_unreachable(gen_random_uuid(), gen_random_uuid(), 0)",
    "recover": "SELECT rowlock.recover(gen_random_uuid())",
    "register": "SELECT rowlock.register(gen_random_uuid(), 'n', 'p', 1, '{}', NULL, '{}', 'v')",
    "adopt": "SELECT rowlock.adopt(gen_random_uuid(), NULL)",
    "finish": "SELECT rowlock.finish(gen_random_uuid(), 1, NULL, NULL, NULL)",
    "end directly": "SELECT rowlock._end(gen_random_uuid(), 'FAILED', NULL, NULL, NULL, NULL, 'x')",
    "recover directly": "SELECT rowlock._recover_claims(gen_random_uuid(), 'x')",
    "open a fence": "SELECT rowlock.fence_open(1, gen_random_uuid())",
    "read rows": "SELECT * FROM rowlock.batch_partitions",
    "write rows": "UPDATE rowlock.batch_partitions SET status = 'PENDING'",
    "write through a view": "UPDATE rowlock.jobs SET delivery = 'AT_MOST_ONCE'",
    "write through a simple view": "DELETE FROM rowlock.starts",
    "stop the clock": (
        "CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL'"
    ),
    "put something of its own there": "CREATE TABLE rowlock.mine (id int)",
}


@pytest.mark.parametrize("what", FORBIDDEN)
@pytest.mark.parametrize("role", ["rowlock_operator", "rowlock_reader", "rowlock_admin"])
def test_only_nodes_move_work(scene: Scene, role: str, what: str) -> None:
    with scene.database.connect(role=role) as db, pytest.raises(psycopg.Error) as caught:
        db.execute(FORBIDDEN[what])

    assert caught.value.sqlstate in {"42501", "55000"}, caught.value


NODE_FORBIDDEN: Final = (
    "end directly",
    "recover directly",
    "read rows",
    "write rows",
    "write through a view",
    "write through a simple view",
    "stop the clock",
    "put something of its own there",
)


@pytest.mark.parametrize("what", NODE_FORBIDDEN)
def test_a_node_has_the_moves_and_nothing_else(scene: Scene, what: str) -> None:
    with scene.database.connect(role="rowlock_node") as db, pytest.raises(psycopg.Error) as caught:
        db.execute(FORBIDDEN[what])

    assert caught.value.sqlstate in {"42501", "55000"}, caught.value


def test_the_operator_requests_cancels_and_reads(scene: Scene) -> None:
    with scene.database.connect(role="rowlock_operator") as db:
        id_ = uuid4()
        db.execute(
            "SELECT rowlock.request_execution(%s, 'j', 'h', %s, 'AT_LEAST_ONCE', %s, 'k', '{}', 'p',"
            " 0, 0, '{}')",
            [id_, '{"max_attempts": 1, "has_finish": false}', id_.hex],
        )
        assert db.execute("SELECT rowlock.cancel(%s, 'o', NULL)", [id_]).fetchone() == (
            "cancelled",
        )
        for view in ("nodes", "executions", "partitions", "events", "jobs", "starts"):
            query = sql.SQL("SELECT count(*) FROM rowlock.{}")
            db.execute(query.format(sql.Identifier(view)))


def test_what_stands_in_front_of_our_objects_is_not_taken_for_them(alone: Scene) -> None:
    """A login with every chance to shadow: temporary tables, functions, operators, its search_path."""
    node, claim = alone.a_claim()
    login = alone.database.cluster.login("rowlock_node")
    name = sql.Identifier
    alone.admin.execute(
        sql.SQL("GRANT TEMPORARY, CREATE ON DATABASE {} TO {}").format(
            name(alone.database.name), name(login)
        )
    )
    alone.admin.execute(sql.SQL("GRANT CREATE ON SCHEMA public TO {}").format(name(login)))

    with alone.database.connect(role="rowlock_node") as db:
        db.execute("CREATE SCHEMA front")
        db.execute("CREATE TABLE public.stolen (what text)")
        for table in ("batch_nodes", "batch_partitions", "batch_job_coordination", "batch_events"):
            for schema in ("pg_temp", "front"):
                make = sql.SQL("CREATE TABLE {}.{} (LIKE rowlock.nodes)")
                db.execute(make.format(name(schema), name(table)))
        for schema in ("pg_temp", "front", "public"):
            for function in (
                "now() RETURNS timestamptz",
                "_event(text, uuid, bigint, uuid, text, jsonb) RETURNS void",
                "_accepts(jsonb, text, text) RETURNS boolean",
                "gen_random_uuid() RETURNS uuid",
                "pg_notify(text, text) RETURNS void",
                "coalesce_(text) RETURNS text",
            ):
                db.execute(
                    sql.SQL(
                        "CREATE FUNCTION {}.{} LANGUAGE plpgsql AS $$ BEGIN"
                        " INSERT INTO public.stolen VALUES (current_user); RETURN NULL; END $$"
                    ).format(name(schema), sql.SQL(function))
                    if "void" not in function
                    else sql.SQL(
                        "CREATE FUNCTION {}.{} LANGUAGE plpgsql AS $$ BEGIN"
                        " INSERT INTO public.stolen VALUES (current_user); END $$"
                    ).format(name(schema), sql.SQL(function))
                )
        db.execute(
            "CREATE FUNCTION front.same(uuid, uuid) RETURNS boolean LANGUAGE plpgsql AS"
            " $$ BEGIN INSERT INTO public.stolen VALUES (current_user); RETURN true; END $$"
        )
        db.execute(
            "CREATE OPERATOR front.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = front.same)"
        )
        db.execute("SET search_path = pg_temp, front, public, pg_catalog, rowlock")

        db.execute("SELECT rowlock.beat(%s, 1, false, '[]', '{}')", [node])
        db.execute("SELECT rowlock.checkpoint(%s, %s, %s, '1')", [node, claim.id, claim.token])
        db.execute("SELECT rowlock.claim(%s, 1, 0, true, 1)", [node])
        db.execute("SELECT rowlock.promote(5)")
        db.execute("SELECT count(*) FROM rowlock.executions")
        db.execute("SELECT rowlock.recover(%s)", [node])
        db.execute(
            "SELECT rowlock.complete(%s, ARRAY[%s::bigint], ARRAY[%s::uuid], ARRAY['1'::jsonb])",
            [node, claim.id, claim.token],
        )

    assert alone.all("SELECT * FROM public.stolen") == []
    assert alone.partition(claim).status == "COMPLETED"
    assert alone.beat_of(node) == 1
