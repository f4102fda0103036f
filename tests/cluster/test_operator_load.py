"""Much of something: partitions, failures, parameters, BatchJobs that come and go quickly."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from rowlock.protocol.model import FIRST_STEP
from tests.support.apiproxy import ApiProxy
from tests.support.builders import HASH, Run, a_policy
from tests.support.cluster import Kubectl, Operators, as_text, becomes, shows
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until

PARTITIONS = 100_000
FAILURES = 5_000
CHUNK = 10_000
BATCHJOB_BYTES_MAX = 4_096


def test_a_hundred_thousand_partitions_make_a_batchjob_no_larger_and_no_busier(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy
) -> None:
    """A status must not grow with the work, and not be written for each step of it.

    Known from argoproj/argo-workflows#12802 and #6256 (etcd full of nodes), nolar/kopf#1087.
    """
    operators.start()
    wanted = scene.batchjob("nightly", partitions={"maxFailed": "10%"})
    namespace.run("create", "-f", "-", stdin=json.dumps(wanted))
    run = plan(scene, scene.execution_of("nightly").execution_id)
    shows(namespace, "nightly", progress=f"0/{PARTITIONS}", seconds=60)
    started = time.monotonic()

    for _ in range(FAILURES // 500):
        for claim in scene.claim(run.master, slots=500, idle=True):
            assert scene.fail(run.master, claim, "never") == "failed"

    wait_until(
        lambda: namespace.get("batchjob", "nightly")["status"]["partitions"]["failed"] == FAILURES,
        seconds=60,
        what="the failures",
        every_seconds=0.5,
    )
    seconds = time.monotonic() - started
    batchjob = namespace.get("batchjob", "nightly")
    assert len(batchjob["status"]["failedPartitions"]) <= 10
    size = len(json.dumps(batchjob, separators=(",", ":")))
    assert size < BATCHJOB_BYTES_MAX, f"{size} bytes"
    patches = [
        one.at
        for one in proxy.seen("PATCH", "/nightly/status$", since=started)
        if one.status == 200
    ]
    assert len(patches) <= 1 + seconds / 5, f"{len(patches)} in {seconds:.0f} s"
    assert all(after - before > 4 for before, after in itertools.pairwise(patches))
    told = [one for one in namespace.items("events") if one["reason"] == "PartitionsFailed"]
    assert len(told) == 1


def plan(scene: OperatorScene, execution: UUID) -> Run:
    """Plan the whole of it by its own master, in chunks."""
    master = scene.a_node(only=execution, slots=500)
    taken = scene.store.adopt(master, execution)
    assert taken is not None
    run = Run(id=execution, master=master, epoch=taken.epoch, instance=taken.instance_key)
    for chunk, first in enumerate(range(0, PARTITIONS, CHUNK)):
        scene.stage(
            run, [f"partition-{number:06}" for number in range(first, first + CHUNK)], chunk=chunk
        )
    assert scene.store.seal(run.id, run.epoch, FIRST_STEP, PARTITIONS)[0] == "sealed"
    return run


def test_large_parameters_are_passed_on_and_copied_nowhere_and_too_large_ones_are_refused(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """A framework that keeps the spec in an annotation fails at 256 KiB, and the object with it.

    Known from nolar/kopf#1087 and metal3-io/cluster-api-provider-metal3#266.
    """
    job = f"{scene.job}-free"
    scene.store.publish_contract(
        job,
        HASH,
        schemas={"parameters": {"type": "object"}},
        policy=a_policy(),
        delivery="AT_LEAST_ONCE",
    )
    operators.start()
    large, too_large = {"text": "x" * 250_000}, {"text": "x" * 300_000}
    wanted = [
        scene.batchjob("large", job=job, parameters=large),
        scene.batchjob("too-large", job=job, parameters=too_large),
    ]
    # As it must be at this size: apply without --server-side keeps a copy of its own.
    namespace.apply(*wanted, server_side=True)

    becomes(namespace, "large", "Accepted", "True")
    assert scene.execution_of("large").parameters == large
    found = namespace.get("batchjob", "large")
    assert found["spec"].pop("parameters") == large
    assert len(json.dumps(found)) < BATCHJOB_BYTES_MAX
    (made,) = namespace.items("jobs")
    assert len(json.dumps(made)) < 10_000
    refused = becomes(namespace, "too-large", "Accepted", "False", "InvalidParameters")
    assert "at most 262144" in refused["message"]
    assert [row.requester["name"] for row in scene.executions()] == ["large"]


def test_two_hundred_batchjobs_that_come_and_go_past_a_starved_and_restarted_operator_end_as_they_should(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """What happens while nobody looks, or too quickly to be seen, must not leave anything stuck.

    Known from dask/dask-kubernetes#968, argoproj/argo-workflows#4560 and apache/airflow#44127.
    """
    names = [f"run-{number:03}" for number in range(200)]
    wanted = {name: scene.batchjob(name, master={"mode": "Pool"}) for name in names}
    first = operators.start()
    os.setpriority(os.PRIO_PROCESS, first.pid, 19)

    def create(some: list[str]) -> None:
        namespace.run("create", "-f", "-", stdin=as_text(*(wanted[name] for name in some)))

    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(create, names[:120])
        wait_until(
            lambda: len(scene.executions()) > 20, seconds=60, what="some", every_seconds=0.05
        )
        namespace.run("delete", "batchjobs", *names[:60:2], seconds=60)  # seen or not yet
        created.result(timeout=60)
    first.kill()
    # In the gap: new ones, some that are gone before anybody sees them, and known ones that go.
    create(names[120:])
    namespace.run("delete", "batchjobs", *names[60:200:2], seconds=60)

    second = operators.start(ROWLOCK_SWEEP_SECONDS="1")
    os.kill(second.pid, signal.SIGSTOP)  # starved
    namespace.run("label", "batchjobs", "--all", "turn=1", seconds=60)
    os.kill(second.pid, signal.SIGCONT)

    kept = set(names[1::2])

    def settled() -> bool:
        accepted = {
            one["metadata"]["name"]
            for one in namespace.items("batchjobs")
            for condition in one.get("status", {}).get("conditions", [])
            if condition["type"] == "Accepted" and condition["status"] == "True"
        }
        live = {
            row.requester["name"]
            for row in scene.executions()
            if row.status not in {"CANCELLED", "CLOSING"}
        }
        return accepted == kept and live == kept

    wait_until(settled, seconds=60, what="database and API agree", every_seconds=0.5)
    rows = scene.executions()
    assert len({row.requester["uid"] for row in rows}) == len(rows), "none was launched twice"
