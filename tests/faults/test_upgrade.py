"""One release takes over from another in mid-run: nodes, operator and schema in whatever order, and nothing
is lost or doubled. Reported elsewhere as work that the old version drops, crash loops on a missing column,
and stalls behind a migration (cakephp-queue#201, formbricks#9123, freehire#1284, oban#1373).

ROWLOCK_UPGRADE_ROWS is how many partitions there are in the table that is migrated (60000).
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from rowlock.db.migrate import LOCK_SECONDS
from rowlock.db.store import Store
from rowlock.protocol.model import Completion
from tests.support.builders import Scene
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, NodeProcess, eventually
from tests.support.history import fill, settle
from tests.support.latency import percentile
from tests.support.postgres import Database
from tests.support.releases import (
    KNOWN,
    Release,
    forget_migration,
    next_release,
    record_migration,
)

UPGRADE_ROWS = int(os.environ.get("ROWLOCK_UPGRADE_ROWS") or 60_000)

ONE_TABLE = """\
SET LOCAL ROLE rowlock_owner;
ALTER TABLE rowlock.batch_partitions ADD COLUMN note text;
"""

# In which files the tables are: others once one was written anew.
FILES = """
SELECT relname, pg_relation_filenode(oid) FROM pg_class
WHERE relnamespace = 'rowlock'::regnamespace AND relkind IN ('r', 'i') AND relname LIKE 'batch%' ORDER BY relname
"""

# What another release's operator does with the database, without a cluster around it.
OPERATOR = """
import asyncio, json, sys
from rowlock_operator.database import Database
from rowlock_operator.model import RequestExecution

async def main():
    dsn, request = sys.argv[1], json.loads(sys.argv[2])
    database = Database(lambda: dsn, "eu-1")
    try:
        answer = await database.act(RequestExecution(**request))
        print(answer.execution_id)
        assert await database.live()
    finally:
        await database.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return next_release(tmp_path_factory.mktemp("releases") / "next")


def completed(fleet: Fleet, execution: UUID) -> int:
    return int(
        fleet.value(
            "SELECT count(*) FROM rowlock.batch_partitions"
            " WHERE execution_id = %s AND status = 'COMPLETED'",
            execution,
        )
    )


def done_by(fleet: Fleet, *nodes: NodeProcess) -> int:
    names = {node.name for node in nodes}
    return len([entry for entry in fleet.ledger().of("end") if entry.node in names])


def once_each(fleet: Fleet, *executions: UUID) -> None:
    """Every partition took one claim of effect, none failed, and AT_MOST_ONCE work began once."""
    for execution in executions:
        for row in fleet.rows_of(execution):
            assert (row.status, row.failures, row.lost) == ("COMPLETED", 0, 0), row
    starts = [entry.key for entry in fleet.ledger().of("start") if entry.key.startswith("once")]
    assert len(starts) == len(set(starts))
    ends = [entry.key for entry in fleet.ledger().of("end")]
    assert len(ends) == len(set(ends))


def test_nodes_are_replaced_one_after_the_other_on_the_next_schema(
    fleet: Fleet, following: Release
) -> None:
    """Migration first, beside busy nodes; these go on with the schema of the next release until they are
    replaced. A node of the next release that comes before its schema waits for it."""
    old = [fleet.node(name, slots=2, drain_seconds=20) for name in ("old-1", "old-2")]
    held, last = step("wait", fleet.path("migrated")), step("wait_or_stop", fleet.path("replaced"))
    work = fleet.request(
        parts=[
            *(part(f"held{n}", held, step("rows", 1), weight=9) for n in range(2)),
            *(part(f"plain{n}", step("rows", 1), weight=5) for n in range(10)),
            *(part(f"last{n}", last, step("rows", 1)) for n in range(4)),
        ]
    )
    once = fleet.request(
        "fault.once",
        parts=[
            *(part(f"once-held{n}", held, step("rows", 1), weight=9) for n in range(2)),
            *parts(4, step("rows", 1), prefix="once"),
        ],
    )
    early = fleet.node("new-1", slots=2, wait=False, PYTHONPATH=following.path)
    told = f"version {KNOWN}, this rowlock needs {KNOWN + 1}: run rowlock migrate"
    eventually(lambda: early.readiness()[0] == 503 and told in early.readiness()[1], told)
    for key in ("held0", "held1", "once-held0", "once-held1"):
        fleet.wait_started(key)

    assert f"applied {KNOWN + 1:04}_next" in following.migrate(fleet.database.dsn)
    fleet.open("migrated")
    eventually(lambda: completed(fleet, work) >= 12 and completed(fleet, once) == 6, "it goes on")
    assert done_by(fleet, *old) >= 4, "what the old release held, it has ended on the new schema"
    assert [node.readiness() for node in old] == [(200, "ok")] * 2

    early.wait_registered()
    assert old[0].terminate_and_wait() == 0
    late = fleet.node("new-2", slots=2, PYTHONPATH=following.path)
    assert old[1].terminate_and_wait() == 0
    fleet.open("replaced")

    fleet.wait(work)
    fleet.wait(once)
    once_each(fleet, work, once)
    assert done_by(fleet, early, late) >= 4


def request_by(release: Release, fleet: Fleet, prefix: str) -> UUID:
    """Let the operator of a release ask for an execution of ten partitions."""
    found = fleet._registry.definition("fault.work")
    uid = uuid4().hex
    request = {
        "attempt": 1,
        "job": "fault.work",
        "contract_hash": found.contract_hash,
        "policy": dict(found.policy),
        "delivery": "AT_LEAST_ONCE",
        "instance_key": uid,
        "launch_key": f"eu-1/{uid}/1",
        "parameters": fleet.script(parts(10, step("rows", 1), prefix=prefix)),
        "pool": "default",
        "priority": 0,
        "adopt_after_seconds": 0,
        "requester": {
            "kind": "BatchJob",
            "cluster": "eu-1",
            "namespace": "billing",
            "name": f"nightly-{prefix}",
            "uid": uid,
            "actor": "operator",
        },
        "options": {},
    }
    dsn = fleet.database.dsn_as("rowlock_operator")
    done = release.run("-c", OPERATOR, dsn, json.dumps(request))
    assert done.returncode == 0, done.stderr
    return UUID(done.stdout.strip())


def test_operators_and_nodes_of_two_releases_work_with_each_other(
    fleet: Fleet, following: Release, tmp_path: Path
) -> None:
    """Whichever is replaced first: what an operator of one release asks for, nodes of the other run."""
    present = Release(tmp_path)  # an empty folder in front: the code that is tested
    old = fleet.node("old")
    following.migrate(fleet.database.dsn)

    operator_first = request_by(following, fleet, "operator")
    fleet.wait(operator_first)
    new = fleet.node("new", PYTHONPATH=following.path)
    assert old.terminate_and_wait() == 0
    workers_first = request_by(present, fleet, "workers")
    fleet.wait(workers_first)

    once_each(fleet, operator_first, workers_first)
    assert {entry.node for entry in fleet.ledger().of("end")} == {old.name, new.name}


def test_a_node_whose_schema_goes_on_without_it_hands_back_and_waits_to_be_upgraded(
    fleet: Fleet, following: Release
) -> None:
    """A migration that ends what the node works with came before the node's own upgrade. The node claims
    nothing more, hands back what it holds, says so on /readyz, and neither ends nor starts again and
    again; a node of the next release does the work. When the schema fits again, it works again."""
    old = fleet.node("old", slots=2)
    run = fleet.request(
        parts=[
            part("stops", step("wait_or_stop", fleet.path("go")), step("rows", 1)),
            part("ends", step("wait", fleet.path("go")), step("rows", 1)),
            *parts(6, step("rows", 1)),
        ]
    )
    for key in ("stops", "ends"):
        fleet.wait_started(key)

    record_migration(fleet.database, works_with=KNOWN + 1)
    told = f"version {KNOWN + 1} .*version {KNOWN + 1}, newer than the {KNOWN}".split(" .*")
    old.wait_event("schema_ahead")
    fleet.wait_partition("stops", "PENDING")
    fleet.open("go")
    fleet.wait_partition("ends", "COMPLETED")  # a result that was under way is taken
    eventually(lambda: old.row().status == "REMOVED", "it has left")
    status, text = old.readiness()
    assert status == 503
    assert all(words in text for words in told), text
    assert "upgrade rowlock" in text
    assert old.probe("/livez")[0] == 200
    assert fleet.rows_of(run)[2].status == "PENDING"

    fleet.node("new", slots=2, PYTHONPATH=following.path)
    fleet.wait(run)

    forget_migration(fleet.database)
    old.wait_registered(2)
    eventually(lambda: old.readiness() == (200, "ok"), "it is ready again")
    assert old.popen.poll() is None


def test_a_node_that_starts_beside_a_schema_too_new_waits_and_can_be_ended(fleet: Fleet) -> None:
    fleet.left_open = 1
    record_migration(fleet.database, works_with=KNOWN + 1)
    node = fleet.node("old", wait=False)
    run = fleet.request(parts=parts(2, step("rows", 1)))
    eventually(lambda: "upgrade rowlock" in node.readiness()[1], "it says what it needs")
    assert node.readiness()[0] == 503
    assert fleet.value("SELECT count(*) FROM rowlock.batch_nodes") == 0
    assert fleet.status(run) == "REQUESTED"
    assert len(node.events("operation_put_off")) <= 2  # not once for each look

    assert node.terminate_and_wait() == 0


def test_a_schema_that_has_lost_even_the_beat_of_a_node_makes_it_stand_aside(fleet: Fleet) -> None:
    node = fleet.node("old")
    record_migration(fleet.database, works_with=KNOWN + 1)
    fleet.rows("ALTER FUNCTION rowlock.beat RENAME TO beat_of_the_next_release")

    node.wait_event("schema_ahead")
    eventually(lambda: "upgrade rowlock" in node.readiness()[1], "it says what it needs")

    fleet.rows("ALTER FUNCTION rowlock.beat_of_the_next_release RENAME TO beat")
    forget_migration(fleet.database)
    node.wait_registered(2)


def test_a_launch_whose_schema_goes_on_without_it_ends_and_the_execution_goes_on(
    fleet: Fleet, following: Release
) -> None:
    launch = fleet.launch(parts=[part("a", step("rows", 1), step("wait", fleet.path("go")))])
    run = launch.execution
    record_migration(fleet.database, works_with=KNOWN + 1)

    assert launch.wait_exit() == 2
    assert "upgrade rowlock" in launch.log_path.read_text()
    fleet.node("new", PYTHONPATH=following.path)
    fleet.open("go")
    fleet.wait(run)


def test_a_migration_that_waits_behind_a_long_reader_stalls_nobody_for_long(
    fleet: Fleet, following: Release
) -> None:
    """The migration needs a lock that a long reader keeps from it (pg_dump, a report), and everybody else
    queues behind the migration: for one short attempt at a time. Reported as oban#1373, freehire#1284,
    taskcluster#3632, good_job#287."""
    nodes = [fleet.node(name, slots=2) for name in ("one", "two")]
    runs = [fleet.request(parts=[part("through", step("wait", fleet.path("go")))])]
    fleet.wait_started("through")
    with fleet.database.connect(autocommit=False) as reader:
        reader.execute("SELECT count(*) FROM rowlock.batch_partitions")
        migration = following.start("-m", "rowlock", "migrate", "--dsn", fleet.database.dsn)
        assert migration.stdout is not None
        with migration:
            for number in range(2):
                assert "waits for a lock: trying again" in migration.stdout.readline()
                runs.append(fleet.request(parts=parts(8, step("rows", 1), prefix=f"r{number}-")))
                fleet.wait(runs[-1])
            assert migration.poll() is None, "all that while the migration has been waiting"
            reader.rollback()
            assert f"applied {KNOWN + 1:04}_next" in migration.stdout.read()
    fleet.open("go")
    fleet.wait(runs[0])
    once_each(fleet, *runs)
    assert not fleet.db_events("node_removed")
    assert all(node.popen.poll() is None for node in nodes)


@pytest.mark.timeout(120 + UPGRADE_ROWS // 5000)
def test_claims_are_as_quick_while_a_migration_of_a_large_table_waits_for_a_reader(
    database: Database, tmp_path: Path
) -> None:
    """Four claim all the time: 99 of 100 claims take no longer than before, and the others no longer than one
    attempt of the migration; no table is written anew. Reported as pg-boss#832, margince#1844, good_job#287."""
    following = next_release(tmp_path / "next", ONE_TABLE)
    spent: dict[str, list[float]] = {"before": [], "meanwhile": []}
    phase = "before"
    with Scene(database) as scene, ThreadPoolExecutor(4) as threads:
        run = scene.an_execution(1)
        fill(scene.admin, UPGRADE_ROWS // 2, "done-", execution=run.id, result="1")
        fill(scene.admin, UPGRADE_ROWS // 2, "waits-", execution=run.id)
        settle(scene.admin)
        nodes = {scene.a_node(): scene.a_store() for _ in range(4)}
        files = scene.all(FILES)

        def work(node: UUID, store: Store) -> None:
            done: list[Completion] = []
            while now := phase:
                began, during = time.perf_counter(), spent[now]
                outcomes, claims = store.complete_and_claim(
                    node, done, slots=1, prefetch=0, idle=False, seed=len(during)
                )
                during.append(time.perf_counter() - began)
                assert claims, "ROWLOCK_UPGRADE_ROWS are too few"
                assert set(outcomes.values()) <= {"completed"}
                done = [Completion(id=one.id, token=one.token, result="1") for one in claims]

        busy = [threads.submit(work, *node) for node in nodes.items()]
        try:
            eventually(lambda: len(spent["before"]) >= 2000, "they claim")
            with database.connect(autocommit=False) as reader:
                reader.execute("SELECT count(*) FROM rowlock.batch_partitions LIMIT 1")
                phase = "meanwhile"
                migration = following.start("-m", "rowlock", "migrate", "--dsn", database.dsn)
                assert migration.stdout is not None
                with migration:
                    for _ in range(2):
                        assert "waits for a lock: trying again" in migration.stdout.readline()
                    reader.rollback()
                    assert f"applied {KNOWN + 1:04}_next" in migration.stdout.read()
        finally:
            phase = ""
        for one in busy:
            one.result()
        assert scene.all(FILES) == files

    assert percentile(spent["meanwhile"], 99) < 5 * percentile(spent["before"], 99)
    assert max(spent["meanwhile"]) < LOCK_SECONDS[1] + 1


def test_a_job_that_only_newer_nodes_know_waits_for_one_and_everybody_can_see_why(
    fleet: Fleet, tmp_path: Path
) -> None:
    """An old node neither drops nor fails nor completes what it does not know (formbricks#9123, titen#148,
    backburner#154, rq#891), and work that nobody knows does not wait in silence (dbos-transact-golang#174)."""
    old = fleet.node("old", slots=2, jobs="tests.benchmarks.jobs")
    exporter = fleet.exporter()
    run = fleet.request(parts=parts(5, step("rows", 1)))
    eventually(lambda: exporter.metric("rowlock_executions_unserved") == 1, "it is counted")
    old.wait_beats(3)
    assert fleet.status(run) == "REQUESTED"
    dsn = fleet.database.dsn_as("rowlock_reader")
    told = Release(tmp_path).run("-m", "rowlock", "explain", str(run), "--dsn", dsn)
    assert "no living node registers job 'fault.work' with contract" in told.stdout

    new = fleet.node("new")
    fleet.wait(run)

    once_each(fleet, run)
    assert {entry.node for entry in fleet.ledger().of("start")} == {new.name}
    assert fleet.was_begun_once(run)
    assert fleet.most_claimed(old) == 0
    eventually(lambda: exporter.metric("rowlock_executions_unserved") == 0, "it is over")
