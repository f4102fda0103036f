"""`rowlock exporter`: what it serves, and what it does not serve when the database is away."""

from __future__ import annotations

import os
import re
import signal
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from rowlock.db.readings import Ending, Pool
from rowlock.exporter import JOB_NAMES_MAX, POOLS_MAX, READ_SECONDS, Exporter, Reading
from rowlock.runtime.health import HealthServer
from tests.support.builders import Scene
from tests.support.postgres import Cluster, Database
from tests.support.releases import KNOWN, forget_migration, record_migration
from tests.support.waiting import wait_until

UP = 'rowlock_database_up{component="exporter"}'
PENDING = 'rowlock_queue_partitions{pool="%s",state="pending"}'


@contextmanager
def exporting(dsn: str) -> Generator[Exporter]:
    exporter = Exporter(dsn, read_seconds=0.1)
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.stop()


def series(exporter: Exporter) -> dict[str, float]:
    """What a scrape gets, by name and labels as Prometheus writes them."""
    body, _ = exporter.render("")
    pairs = re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in pairs}


def wait_up(exporter: Exporter, up: int = 1) -> dict[str, float]:
    wait_until(lambda: series(exporter)[UP] == up, seconds=30, every_seconds=0.05, what=f"up {up}")
    return series(exporter)


def gauges(found: dict[str, float]) -> set[str]:
    """The names of all series that speak of more than the exporter itself."""
    return {key.split("{")[0] for key in found} - {"rowlock_database_up", "rowlock_build_info"}


def test_a_pool_is_served_as_it_is(scene: Scene) -> None:
    scene.an_execution(3)
    scene.claim(scene.a_node(slots=2), slots=1)

    with exporting(scene.database.dsn_as("rowlock_reader")) as exporter:
        found = wait_up(exporter)

    pool = f'pool="{scene.pool}"'
    assert found[f'rowlock_queue_partitions{{{pool},state="pending"}}'] == 2
    assert found[f'rowlock_queue_partitions{{{pool},state="claimed"}}'] == 1
    assert found[f'rowlock_nodes{{{pool},status="active"}}'] == 1
    assert found[f'rowlock_nodes{{{pool},status="unreachable"}}'] == 0
    assert found[f'rowlock_executions{{{pool},status="running"}}'] == 1
    assert found["rowlock_schema_version"] >= 8
    assert exporter.readyz() is None


def test_both_expositions_can_be_read(scene: Scene) -> None:
    scene.an_execution(1)
    with exporting(scene.database.dsn_as("rowlock_reader")) as exporter:
        wait_up(exporter)
        text, kind = exporter.render("application/openmetrics-text; version=1.0.0")

    assert kind.startswith("application/openmetrics-text")
    parse: Any = getattr(openmetrics, "text_string_to_metric_families")  # noqa: B009  it has no types
    assert list(parse(text.decode()))


def test_without_the_database_no_old_number_is_served(private_postgres: Cluster) -> None:
    database = private_postgres.create()
    with Scene(database) as scene:
        scene.an_execution(3)
    with exporting(database.dsn_as("rowlock_reader")) as exporter:
        assert "rowlock_queue_partitions" in gauges(wait_up(exporter))

        database.server.down()
        gone = wait_up(exporter, 0)

        assert gauges(gone) == set()
        assert exporter.readyz() is not None
        assert exporter.livez() is None

        database.server.up()
        assert "rowlock_queue_partitions" in gauges(wait_up(exporter))


def test_a_newer_schema_is_read_while_it_works_with_this_code(database: Database) -> None:
    with exporting(database.dsn_as("rowlock_reader")) as exporter:
        wait_up(exporter)
        record_migration(database, works_with=KNOWN)
        wait_until(
            lambda: series(exporter).get("rowlock_schema_version") == KNOWN + 1, what="it is read"
        )
        assert exporter.readyz() is None
        forget_migration(database)

        record_migration(database, works_with=KNOWN + 1)
        assert gauges(wait_up(exporter, 0)) == set()
        assert "upgrade rowlock" in str(exporter.readyz())

        forget_migration(database)
        wait_up(exporter)


def test_a_frozen_database_delays_no_scrape_and_keeps_no_number(
    private_postgres: Cluster,
) -> None:
    database = private_postgres.create()
    with exporting(database.dsn_as("rowlock_reader")) as exporter:
        wait_up(exporter)
        (pid,) = database.rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'rowlock exporter'"
        )[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            scrapes: list[float] = []
            began = time.monotonic()
            while True:
                asked = time.monotonic()
                found = series(exporter)
                scrapes.append(time.monotonic() - asked)
                if found[UP] == 0:
                    break
                assert time.monotonic() - began < 20
                time.sleep(0.01)
        finally:
            os.kill(pid, signal.SIGCONT)

        assert gauges(found) == set()
        assert max(scrapes) < 0.5
        assert statistics.median(scrapes) < 0.1
        wait_up(exporter)


def test_a_reading_that_is_refused_costs_only_its_own_series(database: Database) -> None:
    with database.connect() as admin:
        admin.execute("REVOKE SELECT ON rowlock.pools FROM rowlock_reader")
    with exporting(database.dsn_as("rowlock_reader")) as exporter:
        found = wait_up(exporter)

        assert found['rowlock_exporter_reading_up{reading="pools"}'] == 0
        assert found['rowlock_exporter_reading_up{reading="server"}'] == 1
        assert "rowlock_queue_partitions" not in gauges(found)
        assert "rowlock_table_dead_tuples" in gauges(found)
        assert exporter.readyz() == "no reading of pools"


def test_its_statements_are_bounded_and_cannot_write(database: Database) -> None:
    exporter = Exporter(database.dsn_as("rowlock_reader"))
    db = exporter._connected()
    try:
        assert db.execute("SHOW statement_timeout").fetchone() == ("2s",)
        assert db.execute("SHOW default_transaction_read_only").fetchone() == ("on",)
    finally:
        exporter._drop()


def a_pool(name: str, pending: int = 1) -> Pool:
    numbers = dict.fromkeys(
        (
            *(
                "limited",
                "delayed",
                "suspended",
                "claimed",
                "requested",
                "planning",
                "running",
                "closing",
            ),
            *(
                "finishing",
                "unserved",
                "nodes_active",
                "nodes_unreachable",
                "nodes_draining",
                "slots",
            ),
        ),
        0,
    )
    return Pool(
        pool=name,
        pending=pending,
        oldest_pending_seconds=float(pending),
        paused=False,
        silent_seconds=0.0,
        **numbers,
    )


def test_the_number_of_series_has_a_bound_and_the_rest_is_summed() -> None:
    exporter = Exporter("")
    pools = [a_pool(f"pool-{n}", pending=n) for n in range(1000)]
    endings = [
        Ending(pool=f"pool-{n % 1000}", job_name=f"job-{n}", status="FAILED", number=1)
        for n in range(5000)
    ]
    exporter.read_as(Reading(pools=pools, endings=endings))

    found = series(exporter)

    sums = [v for key, v in found.items() if re.match(r"rowlock_queue_partitions.*pending", key)]
    assert len(sums) == POOLS_MAX + 1
    assert sum(sums) == sum(range(1000))
    assert found['rowlock_queue_oldest_pending_age_seconds{pool="other"}'] == 999
    jobs = set(re.findall(r'job_name="([^"]+)"', " ".join(found)))
    assert len(jobs) == JOB_NAMES_MAX + 1
    assert sum(v for key, v in found.items() if key.startswith("rowlock_executions_ended")) == 5000
    again = series(exporter)
    assert set(again) == set(found), "a name that has its series keeps it"


def test_no_label_is_an_id(scene: Scene) -> None:
    run = scene.an_execution(2)
    scene.store.cancel(run.id, "test", None)
    scene.claim(scene.a_node(), slots=1)
    with exporting(scene.database.dsn_as("rowlock_reader")) as exporter:
        found = wait_up(exporter)

    assert not [key for key in found if re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-", key)]


def test_a_thousand_executions_and_a_hundred_names_of_nodes_make_no_more_series(
    scene: Scene,
) -> None:
    """Ids as labels are series without bound (docket#164, zksync-era#4864, prefect-exporter#84,
    airflow-exporter#77), and a scrape that asks for everything is most of the database's work
    (pawtograder#946): this one takes less than a twentieth of the time between two readings."""
    scene.an_execution(1)
    scene.claim(scene.a_node(), slots=1)
    with exporting(scene.database.dsn_as("rowlock_reader")) as exporter:
        before = wait_up(exporter)

    scene.admin.execute(
        "INSERT INTO rowlock.batch_job_coordination (execution_id, job_name, contract_hash, policy,"
        "  delivery, instance_key, parameters, pool, status, adopt_after, requested_at, started_at, step, total)"
        " SELECT gen_random_uuid(), e.job_name, e.contract_hash, e.policy, e.delivery, 'key-' || g, '{}',"
        "  e.pool, 'RUNNING', now(), now(), now(), 'main', 20"
        " FROM generate_series(1, 1000) g, rowlock.batch_job_coordination e"
    )
    scene.admin.execute(
        "INSERT INTO rowlock.batch_partitions (execution_id, step, partition_key, delivery, slice,"
        "  available_at) SELECT e.execution_id, 'main', 'key-' || g, 'AT_LEAST_ONCE', '{}', now()"
        " FROM generate_series(1, 20) g, rowlock.batch_job_coordination e WHERE e.total = 20"
    )
    for _ in range(100):
        scene.a_node()
    scene.admin.execute("ANALYZE")
    with exporting(scene.database.dsn_as("rowlock_reader")) as exporter:
        wait_up(exporter)
        wait_until(lambda: series(exporter)[PENDING % scene.pool] == 20_000, what="it has read")
        after = series(exporter)

    assert set(after) == set(before)
    assert not [key for key in after if re.search(r"[0-9a-f]{8}-|key-|node-", key)]
    took = [v for k, v in after.items() if k.startswith("rowlock_exporter_reading_duration")]
    assert len(took) == 3
    assert sum(took) < 0.05 * READ_SECONDS


def answer(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize(
    "path, status",
    [("/metrics", 200), ("/livez", 200), ("/readyz", 503), ("/", 404), ("/metrics/x", 404)],
)
def test_it_answers_three_paths_without_a_database(path: str, status: int) -> None:
    exporter = Exporter("host=127.0.0.1 port=1")
    http = HealthServer(0, render=exporter.render, livez=exporter.livez, readyz=exporter.readyz)
    try:
        assert answer(http.port, path) == status
    finally:
        http.close()


@pytest.fixture
def scene(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made


@pytest.fixture(scope="module")
def private_postgres() -> Generator[Cluster]:
    cluster = Cluster.private()
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.close()
