"""A real Prometheus scrapes real nodes through a run with faults; then it is asked everything that
dashboards and alerts ask.

The alerts are ours with shorter times: minutes are seconds, and thresholds are what a test can reach.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString
from uuid import UUID

import psycopg
import pytest
import yaml
from charts.dashboards import FOLDER

from rowlock.runtime.health import HealthServer
from rowlock_operator.metrics import Metrics
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, Member, NodeProcess, eventually
from tests.support.pictures import draw
from tests.support.postgres import Cluster
from tests.support.prometheus import ROOT, Prometheus
from tests.support.promql import filled

ALERTS: Final = sorted((ROOT / "charts" / "rowlock" / "alerts").glob("*.yaml"))
THRESHOLDS: Final = {
    "RowlockQueueOldestPendingTooOld": 10,
    "RowlockPartitionFailureRatioHigh": 0.1,
    "RowlockNodeChurn": 0,
    "RowlockSilentNodeNotRemoved": 20,
    "RowlockHeartbeatSlow": 0.3,
    "RowlockReaperNotRunning": 4,
    "RowlockClockSkew": 5,
    "RowlockXminHeld": 4,
    "RowlockOperatorSyncStale": 300,
}
AHEAD: Final[LiteralString] = (
    "CREATE OR REPLACE FUNCTION rowlock.now() RETURNS timestamptz LANGUAGE sql STABLE"
    " AS $$ SELECT pg_catalog.clock_timestamp() + interval '7 s' $$"
)
RIGHT: Final[LiteralString] = AHEAD.replace(" + interval '7 s'", "")
PICTURES: Final = os.environ.get("ROWLOCK_PICTURES")
"""A folder that is to get pictures of the dashboards; then there is more to be seen."""
Json = dict[str, Any]
"""Of Prometheus and Grafana."""


def shortened() -> Json:
    """Our rules with times that a test can wait for."""
    groups: list[Json] = []
    for file in ALERTS:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                shorten(rule)
            groups.append(group)
    return {"groups": groups}


def shorten(rule: Json) -> None:
    expr: str = re.sub(r"\[(\d+)m\]", r"[\1s]", rule["expr"])
    threshold = rule["annotations"].get("threshold")
    if threshold is not None:
        new = THRESHOLDS[rule["alert"]]
        expr, times = re.subn(rf"([<>]=?\s*){re.escape(threshold)}\b", rf"\g<1>{new}", expr)
        assert times == 1
    rule["expr"] = expr
    if "for" in rule:
        rule["for"] = "1s"


class Operator:
    """The operator's own registry, served as it serves it; what it counts a test says."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self._http = HealthServer(
            0, render=self.metrics.render, livez=lambda: None, readyz=lambda: None
        )
        self.port = self._http.port

    def work(self) -> None:
        """One look at a BatchJob, with all that may come of it."""
        metrics = self.metrics
        metrics.reconcile_seconds.observe(0.02)
        metrics.jobs_created.labels("created").inc()
        metrics.status_patches.labels("200").inc()
        metrics.database_up.set(1)
        for stamp in (metrics.last_sync, metrics.last_event, metrics.last_list):
            stamp.set_to_current_time()

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What there was, and what watched it."""

    fleet: Fleet
    prometheus: Prometheus
    operator: Operator
    began: float

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.time() - self.began + 1

    def wait_firing(self, *names: str) -> None:
        """Wait until these alerts fire."""
        wanted = {f"Rowlock{name}" for name in names}
        try:
            eventually(lambda: wanted <= self.prometheus.firing(), f"{wanted} fire", seconds=90)
        except AssertionError as error:
            error.add_note(f"firing: {self.prometheus.firing()}")
            raise

    def wait_metric(self, expr: str) -> None:
        """Wait until a query has an answer."""
        eventually(lambda: self.prometheus.query(expr), expr, seconds=60)

    def watch(self, member: Member) -> None:
        """Scrape a member from now on."""
        self.prometheus.scrape(member.name, member.http_port)


@contextmanager
def a_run(tmp_path: Path) -> Generator[Run]:
    """In a `with` of the test itself: an error then comes with the logs of all nodes."""
    cluster = Cluster.private()
    operator = Operator()
    try:
        cluster.prepare()
        with (
            Prometheus(tmp_path, shortened()) as prometheus,
            # Unreachable for long enough to be seen, and not because the machine is busy.
            Fleet(cluster.create(), unreachable_seconds=2, removal_grace_seconds=4) as fleet,
        ):
            yield Run(fleet=fleet, prometheus=prometheus, operator=operator, began=time.time())
    finally:
        operator.close()
        cluster.close()


@pytest.mark.timeout(280)
def test_every_panel_and_alert_shows_what_happened(tmp_path: Path) -> None:
    with a_run(tmp_path) as run:
        whole_story(run)


def whole_story(run: Run) -> None:
    fleet, prometheus = run.fleet, run.prometheus
    one, two = fleet.node("one", slots=2), fleet.node("two", slots=2)
    exporter, second = fleet.exporter(), fleet.exporter("exporter-2")
    for member in (one, two, exporter, second):
        run.watch(member)
    run.operator.work()
    prometheus.scrape("operator", run.operator.port)

    nothing_fires_while_all_is_well(run)
    work_fails(run)
    lost = a_node_is_lost_with_work_that_nobody_may_repeat(run)
    survivor = two if lost is one else one
    with old_rows_kept(run):
        beats_are_slow(run, survivor)
        clocks_differ(run)
        run.wait_firing("XminHeld")
    every_panel_has_data(run)
    the_database_goes_away_and_nothing_old_is_shown(run, survivor, exporter)
    draw_pictures(run)
    the_last_node_is_lost_with_work_that_waits(run, survivor)
    nobody_watches_any_more(run)
    every_alert_has_fired(run)


def nothing_fires_while_all_is_well(run: Run) -> None:
    run.operator.work()
    run.wait_metric('count(rowlock_claim_polls_total{result="empty"}) == 2')
    for _ in range(6 if PICTURES else 1):
        execution = run.fleet.request(parts=parts(60, step("sleep", 0.25)))
        run.fleet.wait(execution)
        run.operator.work()
    locks = step("locked", {"name": "desk", "seconds": 0.1})
    run.fleet.wait(run.fleet.request(parts=parts(8, locks, prefix="locks")))
    run.wait_metric('sum(rowlock_lock_acquisitions_total{result="waited"}) > 0')
    run.wait_metric("min(rowlock_node_memory_bytes) > 1e7")
    run.wait_metric("min(rowlock_node_cpu_seconds_total) > 0")
    run.wait_metric('rowlock_executions_ended{status="completed"} > 0')
    run.wait_metric(
        'sum(rowlock_partition_outcomes_total{namespace="batch",outcome="completed"}) >= 60'
    )
    two_exporters_count_nothing_twice(run)
    fired = run.prometheus.history('ALERTS{alertstate="firing"}', seconds=run.seconds)
    names = {one["metric"]["alertname"] for one in fired}
    # Before the first scrape of each there was nothing to be seen; a busy machine makes beats slow.
    may = {"RowlockOperatorDown", "RowlockExporterDown", "RowlockHeartbeatSlow"}
    assert names <= may, names
    eventually(lambda: not run.prometheus.firing(), "nothing fires any more")


def two_exporters_count_nothing_twice(run: Run) -> None:
    panels = json.loads((FOLDER / "queues.json").read_text())["panels"]
    queries = {one["title"]: one["targets"][0]["expr"] for one in panels if one["type"] == "stat"}
    run.wait_metric('count(rowlock_nodes{status="active"}) == 2')
    assert run.prometheus.value(filled(queries["Live nodes"])) == 2
    execution = run.fleet.request(
        parts=parts(100, step("wait", run.fleet.path("counted")), prefix="counted")
    )
    eventually(
        lambda: (
            sum(
                run.prometheus.value(filled(queries[title])) or 0
                for title in ("Queue size", "Running")
            )
            == 100
        ),
        "exactly 100 partitions wait or run",
    )
    run.fleet.open("counted")
    run.fleet.wait(execution)


def work_fails(run: Run) -> None:
    run.operator.work()
    failing = run.fleet.request(
        parts=parts(40, step("error", "it broke"), prefix="bad"), max_attempts=1
    )
    retried = run.fleet.request(
        parts=parts(10, step("error", "once", attempts=[1]), prefix="again")
    )
    late = run.fleet.request(parts=[part("late", step("sleep", 30))], timeout_seconds=0.3)
    run.fleet.wait(failing, "FAILED")
    run.fleet.wait(retried)
    run.fleet.wait(late, "FAILED")
    run.wait_firing("JobFailed", "PartitionFailureRatioHigh")
    for outcome in ("failed", "retried", "timeout"):
        run.wait_metric(f'sum(rowlock_partition_outcomes_total{{outcome="{outcome}"}}) > 0')
    failures_name_themselves(run, late)


def failures_name_themselves(run: Run, late: UUID) -> None:
    """As exemplars, which are no labels: no series is made by an execution."""

    def named(metric: str) -> bool:
        found = run.prometheus.exemplars(metric, seconds=run.seconds)
        return str(late) in {one["labels"].get("execution_id") for one in found}

    eventually(
        lambda: named('rowlock_partition_outcomes_total{outcome="timeout"}'), "the failure is named"
    )
    eventually(lambda: named("rowlock_partition_duration_seconds_bucket"), "its duration is, too")
    assert run.prometheus.query('{__name__=~"rowlock_.*", execution_id!=""}') == []


def a_node_is_lost_with_work_that_nobody_may_repeat(run: Run) -> NodeProcess:
    fleet = run.fleet
    execution = fleet.request("fault.once", parts=[part("once", step("wait", fleet.path("never")))])
    name = fleet.wait_started("once").node
    (lost,) = [one for one in fleet.members if isinstance(one, NodeProcess) and one.name == name]
    lost.crash()
    run.prometheus.forget(name)
    run.wait_firing("NodeUnreachable")
    fleet.wait(execution, "FAILED")
    run.wait_firing("NodeChurn", "NonTransferableLost")
    return lost


@contextmanager
def old_rows_kept(run: Run) -> Generator[None]:
    """A report that somebody forgot."""
    with psycopg.connect(run.fleet.database.dsn) as forgotten:
        forgotten.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        forgotten.execute("SELECT 1")
        yield
        forgotten.rollback()


def beats_are_slow(run: Run, node: NodeProcess) -> None:
    """The server process of its beats stands still for a moment, again and again."""

    def fires() -> bool:
        for row in run.fleet.rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = %s",
            f"rowlock beat {node.name}",
        ):
            with suppress(ProcessLookupError):  # on a busy machine its node gave it up meanwhile
                os.kill(row.pid, signal.SIGSTOP)
                time.sleep(0.7)  # what the fault is
                os.kill(row.pid, signal.SIGCONT)
        return "RowlockHeartbeatSlow" in run.prometheus.firing()

    eventually(fires, "RowlockHeartbeatSlow fires")


def clocks_differ(run: Run) -> None:
    with run.fleet.database.connect() as db:
        db.execute(AHEAD)
        run.wait_firing("ClockSkew")
        db.execute(RIGHT)


def every_panel_has_data(run: Run) -> None:
    empty: list[str] = []
    for file in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = filled(target["expr"], "10s").replace("[1h]", "[1m]")
                if not has_numbers(run.prometheus.history(expr, seconds=run.seconds)):
                    empty.append(f"{file.stem}: {panel['title']}: {expr}")
    assert empty == []


def has_numbers(series: list[Json]) -> bool:
    return any(math.isfinite(float(value)) for one in series for _, value in one["values"])


def the_database_goes_away_and_nothing_old_is_shown(
    run: Run, node: NodeProcess, exporter: Member
) -> None:
    server, prometheus = run.fleet.database.server, run.prometheus
    fleet, before = run.fleet, node.incarnation
    processes = {one.pid for one in (*node.executors(), *node.watchdogs())}
    waiting = fleet.request(parts=parts(3, step("wait", fleet.path("go")), prefix="calm"))
    run.wait_metric('rowlock_queue_partitions{state="claimed"} > 0')
    server.down("immediate")
    try:
        run.wait_firing("DatabaseDown", "ReaperNotRunning")
        run.wait_metric("count(max by (component) (rowlock_database_up) == 0) == 2")
        only_what_is_true_is_shown(run)
        down = {one["component"] for one, _ in prometheus.query("rowlock_database_up == 0")}
        assert down == {"node", "exporter"}
        for member in (node, exporter):
            assert member.probe("/livez")[0] == 200
            assert member.probe("/readyz")[0] == 503
            assert member.popen.poll() is None
        assert processes == {one.pid for one in (*node.executors(), *node.watchdogs())}
    finally:
        server.up()
    run.wait_metric("rowlock_queue_partitions")
    run.wait_metric("min(rowlock_database_up) == 1")
    fleet.open("go")
    fleet.wait(waiting)
    eventually(lambda: "RowlockDatabaseDown" not in prometheus.firing(), "it is over")
    assert node.incarnation == before, "nobody was removed for it"


def only_what_is_true_is_shown(run: Run) -> None:
    """Of the exporters nothing is left but that they cannot read; panels that say *well* say nothing."""
    about_itself = {
        *("rowlock_build_info", "rowlock_database_up", "rowlock_exporter_reading_up"),
        "rowlock_exporter_reading_duration_seconds",
    }
    found = run.prometheus.query('{__name__=~"rowlock_.*", pod=~"exporter.*"}')
    assert {one["__name__"] for one, _ in found} <= about_itself
    assert {value for one, value in found if one["__name__"] == "rowlock_exporter_reading_up"} <= {
        0
    }
    panels = json.loads((FOLDER / "queues.json").read_text())["panels"]
    stats = {one["title"]: one["targets"][0]["expr"] for one in panels if one["type"] == "stat"}
    for title in ("Queue size", "Running", "Oldest waiting", "Live nodes"):
        assert run.prometheus.value(filled(stats[title])) is None, title
    assert run.prometheus.value(filled(stats["Database"])) == 0


def draw_pictures(run: Run) -> None:
    """For README, where `make pictures` asks for them."""
    for file in sorted(FOLDER.glob("*.json")):
        picture = draw(json.loads(file.read_text()), run.prometheus, seconds=run.seconds)
        assert picture.count("<polyline") > 5
        if PICTURES:
            (Path(PICTURES) / f"{file.stem}.svg").write_text(picture)


def the_last_node_is_lost_with_work_that_waits(run: Run, node: NodeProcess) -> None:
    fleet = run.fleet
    fleet.request(parts=parts(30, step("wait", fleet.path("never")), prefix="left"))
    fleet.left_open = 1
    run.wait_metric(
        'sum(max by (state) (rowlock_queue_partitions{state=~"pending|claimed"})) == 30'
    )
    node.crash()
    run.prometheus.forget(node.name)
    run.wait_firing(
        "QueueStalled",
        "QueueOldestPendingTooOld",
        "SilentNodeNotRemoved",
        "NoLiveNodes",
        "ExecutionUnserved",
    )


def nobody_watches_any_more(run: Run) -> None:
    run.operator.metrics.last_sync.set(time.time() - 1000)
    run.wait_firing("OperatorSyncStale")
    run.operator.close()
    run.prometheus.forget("operator")
    for one in [one for one in run.fleet.members if one.name.startswith("exporter")]:
        assert one.terminate_and_wait() == 0
        run.prometheus.forget(one.name)
    run.wait_firing("OperatorDown", "ExporterDown")


def every_alert_has_fired(run: Run) -> None:
    fired = {
        one["metric"]["alertname"]
        for one in run.prometheus.history('ALERTS{alertstate="firing"}', seconds=run.seconds)
    }
    ours = {rule["alert"] for group in shortened()["groups"] for rule in group["rules"]}
    assert fired == ours
