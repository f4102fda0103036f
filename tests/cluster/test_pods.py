"""Pods come and go, and so do the operator and the database: executions lose nothing by it.

One installation serves all tests here. Its times are short: a node that is silent for five seconds
is removed, and an outage of six times that stands for a minute with the times that are the default.
"""

import json
import operator
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, LiteralString

import pytest
import yaml

from tests.support import pod_jobs
from tests.support.cluster import (
    MANIFESTS,
    Bed,
    Kubectl,
    Object,
    batchjob,
    condition,
    database_secret,
    overlay,
    temporary_namespace,
)
from tests.support.postgres import Cluster, Database
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.nodes, pytest.mark.shared]

WORKERS: Final = "app.kubernetes.io/component=worker"
OPERATORS: Final = "app.kubernetes.io/component=operator"
MASTERS: Final = "app.kubernetes.io/component=master"
WORKER_PODS: Final = 3
WORKER_SLOTS: Final = 2 * WORKER_PODS
PATIENCE_SECONDS: Final = 90.0
"""For what takes seconds on a machine that has time."""
OUTAGE_SECONDS: Final = 30.0
NODE_SETTINGS: Final = {
    "ROWLOCK_BEAT_SECONDS": "0.5",
    "ROWLOCK_UNREACHABLE_SECONDS": "2.5",
    "ROWLOCK_REMOVAL_GRACE_SECONDS": "2.5",
    "ROWLOCK_LEASE_MARGIN_SECONDS": "0.5",
    "ROWLOCK_POLL_SECONDS": "1",
    "ROWLOCK_DRAIN_SECONDS": "10",
    "ROWLOCK_CANCEL_SECONDS": "3",
    "PYTHONPATH": "/scripted",
}
OPERATOR_SETTINGS: Final = {
    "ROWLOCK_SYNC_SECONDS": "1",
    "ROWLOCK_RESYNC_SECONDS": "5",
    "ROWLOCK_SWEEP_SECONDS": "2",
    "ROWLOCK_STALE_SECONDS": "5",
}
ALONE: Final = "alone"
"""A pool that has no workers, only the pods of masters."""


# -- the installation --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def private_postgres(bed: Bed) -> Generator[Cluster]:
    """A server that tests here may stop."""
    cluster = Cluster.private(bed.database_address)
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def namespace(kubectl: Kubectl, private_postgres: Cluster) -> Generator[Kubectl]:
    with temporary_namespace(kubectl, f"pods-{private_postgres.run}") as inside:
        yield inside


@dataclass(frozen=True, slots=True)
class Place:
    """The installation, and what happens in it."""

    namespace: Kubectl
    database: Database

    # -- runs ----------------------------------------------------------------------------------

    def launch(
        self, run: str, *, waits: Sequence[str] = (), parts: int = 10, chunks: int = 9, **spec: Any
    ) -> None:
        """Apply a BatchJob.

        Args:
            run: Its name.
            waits: Where it waits to be let on: plan, work, finish.
            parts: How many partitions.
            chunks: Checkpoints of each; one held at `work` can be moved so often less one.
            spec: Further fields.
        """
        script = {"run": run, "parts": parts, "chunks": chunks, "waits": list(waits)}
        self.namespace.apply(batchjob(run, job=pod_jobs.JOB, parameters=script, **spec))

    def let_on(self, run: str, step: str) -> None:
        """End the waiting of a run at a step."""
        with self.database.connect() as db:
            db.execute("INSERT INTO pods.opened (run, step) VALUES (%s, %s)", (run, step))

    def ledger(self, run: str) -> list[tuple[str, str]]:
        """What has happened, and in which pod."""
        return self.database.rows("SELECT what, pod FROM pods.ledger WHERE run = %s", (run,))

    def begun(self, run: str, step: str) -> list[str]:
        """The pods in which a step has begun: plan, finish, or work."""
        if step == "work":
            return [pod for what, pod in self.ledger(run) if what.endswith("/0")]
        return [pod for what, pod in self.ledger(run) if what == f"begin {step}"]

    def wait_begun(self, run: str, step: str, times: int = 1) -> list[str]:
        """Wait until a step has begun so often; the pods."""
        self.until(lambda: len(self.begun(run, step)) >= times, f"{step} of {run} has begun")
        return self.begun(run, step)

    def execution(self, run: str, columns: LiteralString) -> Any:
        """A value of its row, or several with commas."""
        (row,) = self.database.rows(
            "SELECT " + columns + " FROM rowlock.batch_job_coordination"
            " WHERE requester->>'name' = %s",
            (run,),
        )
        return row[0] if len(row) == 1 else row

    def partitions(self, run: str, column: LiteralString) -> list[Any]:
        """A value of all its partitions."""
        rows = self.database.rows(
            "SELECT part." + column + " FROM rowlock.batch_partitions AS part"
            " JOIN rowlock.batch_job_coordination AS run USING (execution_id)"
            " WHERE run.requester->>'name' = %s ORDER BY part.id",
            (run,),
        )
        return [value for (value,) in rows]

    def status(self, run: str) -> Object:
        """The status of the BatchJob."""
        status: Object = self.namespace.get("batchjob", run).get("status", {})
        return status

    def ended_well(self, run: str, *, parts: int = 10, chunks: int = 9) -> None:
        """Wait for the end: success, planned once, each chunk once, no failure, finished once."""
        self.namespace.wait(f"batchjob/{run}", "condition=Finished", seconds=PATIENCE_SECONDS)
        ended = self.namespace.get("batchjob", run)
        assert condition(ended, "Complete")["status"] == "True", ended["status"]
        assert ended["status"]["progress"] == f"{parts}/{parts}"
        assert self.partitions(run, "status") == ["COMPLETED"] * parts
        # What was lost with its node in the middle counts as a failure, nothing else has failed.
        lost = self.partitions(run, "lost")
        assert all(map(operator.le, self.partitions(run, "failures"), lost))
        done = sorted(what for what, _ in self.ledger(run) if not what.startswith("begin"))
        chunks_of_all = [f"{part}/{chunk}" for part in range(parts) for chunk in range(chunks)]
        assert done == sorted([*chunks_of_all, "finish"])
        assert self.execution(run, "status, total") == ("COMPLETED", parts)
        assert self.events("execution_ended", run) == 1

    def events(self, event: str, run: str) -> int:
        """How often something happened to its execution."""
        count: int = self.database.value(
            "SELECT count(*) FROM rowlock.batch_events"
            " JOIN rowlock.batch_job_coordination AS run USING (execution_id)"
            " WHERE event = %s AND run.requester->>'name' = %s",
            (event, run),
        )
        return count

    def lost_nodes(self) -> list[str]:
        """Names of the nodes that others have removed because they were silent."""
        return self._nodes("node_removed")

    def left_nodes(self) -> list[str]:
        """Names of the nodes that have drained and gone."""
        return self._nodes("node_left")

    def _nodes(self, event: str) -> list[str]:
        rows = self.database.rows(
            "SELECT node.name FROM rowlock.batch_events AS event"
            " JOIN rowlock.batch_nodes AS node USING (node_id)"
            " WHERE event.event = %s ORDER BY event.id",
            (event,),
        )
        return [name for (name,) in rows]

    # -- pods ----------------------------------------------------------------------------------

    def pods(self, label: str) -> list[str]:
        """The names of the pods with a label that are not on their way out."""
        pods = self.namespace.items("pods", "-l", label)
        return [
            one["metadata"]["name"] for one in pods if "deletionTimestamp" not in one["metadata"]
        ]

    def of(self, run: str) -> str:
        """The label of the pods and Jobs of a BatchJob."""
        return f"batch.rowlock.dev/batchjob={run}"

    def restarts(self, *labels: str) -> dict[str, int]:
        """How often the container of each pod with one of the labels was started again."""
        return {
            one["metadata"]["name"]: one["status"]["containerStatuses"][0]["restartCount"]
            for label in labels
            for one in self.namespace.items("pods", "-l", label)
        }

    def evict(self, pod: str) -> bool:
        """Ask for its eviction, as `kubectl drain` does; whether its budget allows it."""
        assert self.namespace.namespace is not None
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace.namespace}/pods/{pod}/eviction"
        ended = self.namespace.run(
            "create", "--raw", path, "-f", "-", stdin=json.dumps(eviction), check=False
        )
        assert ended.returncode == 0 or "disruption budget" in ended.stderr, ended.stderr
        return ended.returncode == 0

    def delete_at_once(self, *pods: str) -> None:
        """Delete pods by force."""
        self.namespace.run("delete", "pod", *pods, "--force", "--grace-period=0", "--wait=false")

    def rolled_out(self, *names: str) -> None:
        """Wait until the Deployments are as they should be."""
        for name in names or ("rowlock-worker", "rowlock-operator"):
            what = f"deployment/{name}"
            self.namespace.run("rollout", "status", what, "--timeout=120s", seconds=150)

    def scale_operator(self, replicas: int) -> None:
        """Take the operator away, or bring it back, and wait for it."""
        self.namespace.run("scale", "deployment/rowlock-operator", f"--replicas={replicas}")
        self.until(
            lambda: len(self.namespace.items("pods", "-l", OPERATORS)) == replicas, "operators"
        )
        self.rolled_out("rowlock-operator")

    def until(
        self, holds: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS
    ) -> None:
        """Wait for something that costs a little to look at."""
        wait_until(holds, seconds=seconds, what=what, every_seconds=0.25)


def environment(settings: Mapping[str, str]) -> list[Object]:
    """Settings as a container takes them."""
    return [{"name": name, "value": value} for name, value in settings.items()]


def with_scripted_jobs(spec: Object) -> None:
    """Let a pod run the tests' job: an installed package, as far as Python can see."""
    (container,) = spec["containers"]
    container["env"] += environment(NODE_SETTINGS)
    container.setdefault("volumeMounts", []).append({"name": "scripted", "mountPath": "/scripted"})
    files = [
        {"key": "module", "path": "pod_jobs.py"},
        {"key": "metadata", "path": "scripted-1.dist-info/METADATA"},
        {"key": "entry_points", "path": "scripted-1.dist-info/entry_points.txt"},
    ]
    spec["volumes"].append({"name": "scripted", "configMap": {"name": "scripted", "items": files}})


def scripted_jobs() -> Object:
    """What `with_scripted_jobs` mounts."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "scripted"},
        "data": {
            "module": Path(pod_jobs.__file__).read_text(),
            "metadata": "Metadata-Version: 2.1\nName: scripted\nVersion: 1\n",
            "entry_points": "[rowlock.jobs]\nscripted = pod_jobs\n",
        },
    }


def adapted(item: Object) -> Object:
    """An object of the manifests as the tests want it."""
    name = item["metadata"]["name"]
    if name == "rowlock-pools":
        pools = yaml.safe_load(item["data"]["pools.yaml"])["pools"]
        with_scripted_jobs(pools["default"]["template"]["spec"])
        pools[ALONE] = pools["default"]
        item["data"]["pools.yaml"] = json.dumps({"pools": pools})
    if item["kind"] == "Deployment":
        spec = item["spec"]["template"]["spec"]
        container = spec["containers"][0]
        # As short as everything else: an outage is several times as long as a probe's patience.
        container["livenessProbe"].update(periodSeconds=2)
        container["readinessProbe"].update(periodSeconds=1)
        container["startupProbe"].update(periodSeconds=1, failureThreshold=90)
        if name == "rowlock-worker":
            item["spec"]["replicas"] = WORKER_PODS
            with_scripted_jobs(spec)
        elif name == "rowlock-operator":
            container["env"] += environment(OPERATOR_SETTINGS)
    return item


@pytest.fixture(scope="module")
def installed(
    namespace: Kubectl,
    bed: Bed,
    private_postgres: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Place:
    assert namespace.namespace is not None
    database = private_postgres.create()
    with database.connect() as db:
        db.execute(pod_jobs.SCHEMA)
    mine = overlay(
        tmp_path_factory.mktemp("mine"),
        MANIFESTS / "namespaced",
        namespace=namespace.namespace,
        bed=bed,
    )
    objects = [adapted(item) for item in namespace.build(mine)]
    namespace.apply(database_secret(database), scripted_jobs(), *objects, server_side=True)
    place = Place(namespace, database)
    place.rolled_out()
    return place


@pytest.fixture
def place(installed: Place) -> Generator[Place]:
    """The installation; what a test leaves behind does not stand in the way of the next one."""
    installed.rolled_out()
    yield installed
    installed.namespace.delete("batchjobs", "--all")


# -- workers -----------------------------------------------------------------------------------


def test_a_rolling_update_in_mid_run_hands_everything_over(place: Place) -> None:
    before = set(place.pods(WORKERS))
    place.launch("rolling", waits=["work"], parts=12)
    place.wait_begun("rolling", "work", WORKER_SLOTS)

    place.namespace.run("rollout", "restart", "deployment/rowlock-worker")
    place.rolled_out("rowlock-worker")

    place.until(lambda: before.issubset(place.left_nodes()), "all old workers have drained")
    assert before.isdisjoint(place.pods(WORKERS))
    place.let_on("rolling", "work")
    place.ended_well("rolling", parts=12)
    assert place.partitions("rolling", "lost") == [0] * 12
    # They were handed back at a checkpoint, and claimed again.
    assert sum(claims > 1 for claims in place.partitions("rolling", "claims")) >= WORKER_SLOTS
    assert before.isdisjoint(place.lost_nodes())


def test_evictions_of_workers_keep_to_the_budget_and_lose_nothing(place: Place) -> None:
    place.launch("drained", waits=["work"])
    place.wait_begun("drained", "work", WORKER_SLOTS)
    first, second, _ = place.pods(WORKERS)

    assert place.evict(first)
    assert not place.evict(second), "two at a time"
    place.until(lambda: place.evict(second), "the first one is replaced, so the second may go")

    place.until(lambda: {first, second}.issubset(place.left_nodes()), "they drain")
    place.let_on("drained", "work")
    place.ended_well("drained")
    assert place.partitions("drained", "lost") == [0] * 10


def test_a_worker_that_is_told_to_end_drains_in_time_and_ends_well(place: Place) -> None:
    place.launch("told", waits=["work"])
    place.wait_begun("told", "work", WORKER_SLOTS)
    pod = place.pods(WORKERS)[0]

    def last_end() -> Object:
        (container,) = place.namespace.get("pod", pod)["status"]["containerStatuses"]
        ended: Object = container["lastState"].get("terminated", {})
        return ended

    told = time.monotonic()
    # As the kubelet does it: to process 1 of the container.
    place.namespace.run("exec", pod, "--", "python", "-c", "import os; os.kill(1, 15)")
    place.until(last_end, "it ends")

    assert time.monotonic() - told < 45, "terminationGracePeriodSeconds"
    assert last_end()["exitCode"] == 0
    assert pod in place.left_nodes()
    place.let_on("told", "work")
    place.ended_well("told")
    assert place.partitions("told", "lost") == [0] * 10


# -- masters -----------------------------------------------------------------------------------


def test_an_evicted_master_costs_no_try_and_its_next_pod_continues(place: Place) -> None:
    place.launch("moved", waits=["work"], parts=4, pool=ALONE, master={"backoffLimit": 0})
    (pod,) = set(place.wait_begun("moved", "work", 2))
    assert place.execution("moved", "master_epoch") == 1

    assert place.evict(pod)

    place.until(lambda: place.execution("moved", "master_epoch") > 1, "another is the master")
    place.let_on("moved", "work")
    place.ended_well("moved", parts=4)
    place.namespace.wait("job/moved-1", "condition=Complete", seconds=PATIENCE_SECONDS)
    status = place.namespace.get("job", "moved-1")["status"]
    assert (status.get("failed", 0), status["succeeded"]) == (0, 1)
    assert place.partitions("moved", "lost") == [0] * 4
    (other,) = place.pods(place.of("moved"))
    # Any node may be its master, but only nodes of its pool do its work.
    assert {where for what, where in place.ledger("moved") if "/" in what} == {pod, other}


def test_a_master_that_is_deleted_before_it_begins_is_replaced(place: Place) -> None:
    place.launch("unborn", waits=["plan"])
    place.until(lambda: place.pods(place.of("unborn")), "it has a pod")
    (pod,) = place.pods(place.of("unborn"))
    place.delete_at_once(pod)
    place.until(lambda: set(place.begun("unborn", "plan")) - {pod}, "another one plans")
    place.let_on("unborn", "plan")
    place.ended_well("unborn")


@pytest.mark.parametrize("step", ["plan", "work", "finish"])
def test_a_master_that_is_killed_is_replaced_and_nothing_happens_twice(
    bed: Bed, place: Place, step: str
) -> None:
    run = f"killed-{step}"
    place.launch(run, waits=[step])
    place.wait_begun(run, step, 1 if step != "work" else WORKER_SLOTS)
    (pod,) = place.pods(place.of(run))
    # Its process is quicker than the kubelet's word of it.
    place.until(
        lambda: place.namespace.get("pod", pod)["status"]["phase"] == "Running", "the pod runs"
    )

    if bed.fault:
        bed.break_something("pod-kill9", str(place.namespace.namespace), pod)
    else:
        place.delete_at_once(pod)

    place.until(lambda: place.execution(run, "master_epoch") > 1, "another is the master")
    if step != "work":
        place.wait_begun(run, step, 2)
    place.let_on(run, step)
    place.ended_well(run)


@pytest.mark.parametrize("trouble", ["secret", "image"])
def test_a_master_that_cannot_start_says_why_and_is_not_needed(place: Place, trouble: str) -> None:
    if trouble == "secret":
        missing = "no-such-secret"
        source = {"secretKeyRef": {"name": missing, "key": "password"}}
        container = {"name": "rowlock", "env": [{"name": "PASSWORD", "valueFrom": source}]}
        master: Object = {"podTemplate": {"spec": {"containers": [container]}}}
    else:
        missing = "localhost/no-such-image:1"
        master = {"image": missing}
    run = f"no-{trouble}"
    place.launch(run, master=master)

    place.until(lambda: missing in place.status(run).get("message", ""), "it says why", 30)

    assert place.ledger(run) == []
    if trouble == "secret":
        # The minute that nodes leave to the master's pod is over.
        with place.database.connect() as db:
            db.execute(
                "UPDATE rowlock.batch_job_coordination SET adopt_after = requested_at"
                " WHERE requester->>'name' = %s",
                (run,),
            )
        place.ended_well(run)
    else:
        place.namespace.patch("batchjob", run, {"spec": {"cancel": True}})
        finished = "condition=Finished"
        place.namespace.wait(f"batchjob/{run}", finished, seconds=PATIENCE_SECONDS)
        assert place.status(run)["phase"] == "Cancelled"


def test_what_is_suspended_before_its_start_has_no_pod_until_it_is_resumed(place: Place) -> None:
    place.launch("held", suspend=True)
    place.namespace.wait("batchjob/held", "condition=Suspended=True", seconds=PATIENCE_SECONDS)
    assert place.namespace.items("jobs,pods", "-l", place.of("held")) == []
    assert place.ledger("held") == []

    place.namespace.patch("batchjob", "held", {"spec": {"suspend": False}})

    place.ended_well("held")


# -- the database, and the operator ------------------------------------------------------------


def test_an_outage_of_the_database_restarts_no_pod_and_removes_no_node(place: Place) -> None:
    place.launch("outage", waits=["work"])
    place.wait_begun("outage", "work", WORKER_SLOTS)
    everybody = (WORKERS, OPERATORS, place.of("outage"))
    restarts, lost = place.restarts(*everybody), place.lost_nodes()
    (job,) = place.namespace.items("jobs", "-l", place.of("outage"))
    server = place.database.server

    server.down("immediate")
    try:
        over = time.monotonic() + OUTAGE_SECONDS
        place.namespace.wait("batchjob/outage", "condition=StatusStale=True", seconds=25)
        place.until(lambda: time.monotonic() > over, "the outage is long enough")
    finally:
        server.up()

    place.namespace.wait("batchjob/outage", "condition=StatusStale=False", seconds=PATIENCE_SECONDS)
    place.let_on("outage", "work")
    place.ended_well("outage")
    assert place.restarts(*everybody) == restarts
    (same,) = place.namespace.items("jobs", "-l", place.of("outage"))
    assert same["metadata"]["uid"] == job["metadata"]["uid"]
    assert place.lost_nodes() == lost
    assert place.partitions("outage", "lost") == [0] * 10


def test_an_execution_completes_without_the_operator(place: Place) -> None:
    place.launch("unwatched", waits=["work"])
    place.wait_begun("unwatched", "work", WORKER_SLOTS)

    place.scale_operator(0)
    try:
        place.let_on("unwatched", "work")
        place.namespace.wait("job/unwatched-1", "condition=Complete", seconds=PATIENCE_SECONDS)
        assert place.execution("unwatched", "status") == "COMPLETED"
        assert place.status("unwatched")["phase"] != "Succeeded"
    finally:
        place.scale_operator(1)

    place.ended_well("unwatched")


def test_nothing_is_left_of_what_is_deleted_without_an_operator(place: Place) -> None:
    """In each phase: its pods, those of the workers, and then the BatchJob itself."""
    place.launch("gone-held", suspend=True)
    place.launch("gone-ended")
    place.ended_well("gone-ended")
    steps = ("plan", "work", "finish")
    for step in steps:
        # Two partitions keep no worker from the others.
        place.launch(f"gone-{step}", waits=[step], parts=2)
        place.wait_begun(f"gone-{step}", step)
    place.namespace.wait("batchjob/gone-held", "condition=Suspended", seconds=PATIENCE_SECONDS)
    runs = ["gone-held", "gone-ended", *(f"gone-{step}" for step in steps)]

    place.scale_operator(0)
    try:
        place.delete_at_once(*place.pods(WORKERS), *place.pods(MASTERS))
        for one in place.namespace.items("batchjobs"):
            assert not one["metadata"].get("finalizers"), one["metadata"]
        place.namespace.run("delete", "batchjobs", *runs, "--timeout=10s")

        place.until(lambda: not place.namespace.items("jobs,pods", "-l", MASTERS), "all are gone")
    finally:
        place.scale_operator(1)

    def ends() -> list[str]:
        return [place.execution(run, "status") for run in runs]

    expected = ["COMPLETED" if run == "gone-ended" else "CANCELLED" for run in runs]
    place.until(lambda: ends() == expected, "the operator has cancelled them")
    place.rolled_out()
    assert not place.namespace.items("jobs,pods", "-l", MASTERS)
