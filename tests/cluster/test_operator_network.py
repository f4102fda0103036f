"""Between the operator and the API server: streams that die in silence, pauses, lost history, kill -9.

A proxy stands between the two, so that a test chooses the moment and counts every request.
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.support.apiproxy import ApiProxy
from tests.support.cluster import Kubectl, Operators, becomes, shows
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until

STATUS = "/batchjobs/[^/]+/status$"
LAST_EVENT = "rowlock_operator_watch_last_event_timestamp_seconds"
WATCH_SECONDS = 20
REQUEST_SECONDS = 30
"""A request that has no answer by then is given up."""


@pytest.mark.parametrize(
    "step, jobs_before",
    [(("POST", "/jobs$"), 0), (("PATCH", STATUS), 1)],
    ids=["before-the-job", "before-the-status"],
)
def test_an_operator_that_is_killed_between_two_steps_of_a_launch_is_taken_over_and_launches_once(
    operators: Operators,
    scene: OperatorScene,
    proxy: ApiProxy,
    step: tuple[str, str],
    jobs_before: int,
) -> None:
    """A controller restarted between creating a run and noting it must not run it twice.

    Known from apache/airflow#35676, argoproj/argo-workflows#13986 and nolar/kopf#916.
    """
    namespace = operators.kubectl
    operator = operators.start()
    held = proxy.hold(*step)
    namespace.apply(scene.batchjob("nightly"))
    assert held.arrived.wait(60)
    execution = scene.execution_of("nightly").execution_id
    operator.kill()
    proxy.release(held)
    assert len(namespace.items("jobs")) == jobs_before
    assert "status" not in namespace.get("batchjob", "nightly")

    operators.start()

    shows(namespace, "nightly", executionID=str(execution), masterJobName="nightly-1")
    becomes(namespace, "nightly", "Accepted", "True")
    assert len(scene.executions("nightly")) == 1
    assert [job["metadata"]["name"] for job in namespace.items("jobs")] == ["nightly-1"]


def test_streams_that_die_in_silence_and_a_pause_of_the_api_server_are_survived_without_a_restart(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy
) -> None:
    """A watch whose connection is dropped by a balancer, without a word, must not end the watching.

    Known from nolar/kopf#698, #860 and #1276, and kubernetes-client/python#801: the process
    lives, is ready, and sees nothing until somebody restarts it. The same with an API server that
    hangs for longer than any request may take.
    """
    operator = operators.start(ROWLOCK_RESYNC_SECONDS="5", ROWLOCK_WATCH_SECONDS=str(WATCH_SECONDS))
    namespace.apply(scene.batchjob("before"))
    becomes(namespace, "before", "Accepted", "True")
    run = scene.plan(scene.execution_of("before").execution_id)
    shows(namespace, "before", phase="Running")

    frozen_at, frozen_clock = time.monotonic(), time.time()
    proxy.pause()
    namespace.apply(scene.batchjob("during"))
    # Nobody may think that it needs another pod: that would find the same API server.
    wait_until(
        lambda: not operator.answers("/readyz"),
        seconds=REQUEST_SECONDS + 60,
        what="the list that fails",
        every_seconds=0.2,
    )
    assert operator.answers("/livez")
    scene.work(run, 4)
    assert scene.advance(run) == "COMPLETED"

    proxy.go_on()

    woken_at = time.monotonic()
    becomes(namespace, "during", "Accepted", "True", seconds=REQUEST_SECONDS + 60)
    shows(namespace, "before", phase="Succeeded", seconds=REQUEST_SECONDS + 60)
    print(f"handled after {time.monotonic() - woken_at:.1f} s")  # noqa: T201  # pytest keeps it

    # Lists alone would do; but the watches have to come back too.
    namespace.run("label", "batchjob", "during", "turn=1")
    wait_until(
        lambda: proxy.seen("GET", "/batchjobs$", since=frozen_at + 1, query="watch=true"),
        seconds=60,
        what="a new watch",
        every_seconds=0.2,
    )
    print(f"watched again after {time.monotonic() - frozen_at:.1f} s")  # noqa: T201
    wait_until(
        lambda: operator.metric(LAST_EVENT) > frozen_clock, what="an event", every_seconds=0.1
    )
    started = time.monotonic()
    namespace.apply(scene.batchjob("after"))
    becomes(namespace, "after", "Accepted", "True")
    assert time.monotonic() - started < 4
    assert operator.process.poll() is None
    assert [len(scene.executions(name)) for name in ("before", "during", "after")] == [1, 1, 1]


def test_an_api_server_that_is_restarted_is_found_again(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy
) -> None:
    """Known from nolar/kopf#787 and #1276: after a restart of the API server nothing was seen any more."""
    operator = operators.start(ROWLOCK_RESYNC_SECONDS="5")
    namespace.apply(scene.batchjob("before"))
    becomes(namespace, "before", "Accepted", "True")

    proxy.refuse()
    wait_until(
        lambda: not operator.answers("/readyz"), seconds=60, what="noticed", every_seconds=0.1
    )
    assert operator.answers("/livez")
    namespace.apply(scene.batchjob("during"))
    namespace.patch("batchjob", "before", {"spec": {"priority": 7}})
    back = time.monotonic()
    proxy.go_on()

    becomes(namespace, "during", "Accepted", "True")
    operator.ready()
    wait_until(
        lambda: proxy.seen("GET", "/batchjobs$", since=back, query="watch=true"),
        seconds=60,
        what="a watch again",
        every_seconds=0.1,
    )
    wait_until(
        lambda: scene.execution_of("before").priority == 7,
        seconds=60,
        what="the change",
        every_seconds=0.1,
    )
    assert operator.process.poll() is None
    assert [len(scene.executions(name)) for name in ("before", "during")] == [1, 1]


@pytest.mark.parametrize("code", [410, 500], ids=["compacted", "internal-error"])
def test_a_watch_that_ends_with_an_error_misses_nothing(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy, code: int
) -> None:
    """After a compaction of etcd a watch cannot go on where it was: 410 Gone must lead to a new list.

    Known from apache/airflow#44127 and #35354, where the watcher crashed or lost events.
    """
    operator = operators.start(ROWLOCK_RESYNC_SECONDS="10", ROWLOCK_SWEEP_SECONDS="1")
    namespace.apply(scene.batchjob("kept"), scene.batchjob("deleted"))
    for name in ("kept", "deleted"):
        becomes(namespace, name, "Accepted", "True")
    gone = scene.execution_of("deleted").execution_id
    held = proxy.hold("GET", r"/batchjobs\?.*watch=true")
    wait_until(lambda: proxy.seen("GET", "/batchjobs$", query="watch=true"), what="a watch")
    assert proxy.break_watches("/batchjobs$", code) >= 1
    assert held.arrived.wait(60)

    namespace.run("delete", "batchjob", "deleted", seconds=20)
    namespace.patch("batchjob", "kept", {"spec": {"priority": 7}})
    namespace.apply(scene.batchjob("new"))
    released = time.monotonic()
    proxy.release(held)

    becomes(namespace, "new", "Accepted", "True")
    scene.status_becomes(gone, "CLOSING", "CANCELLED")
    assert scene.execution_of("kept").priority == 7
    assert [len(scene.executions(name)) for name in ("kept", "new", "deleted")] == [1, 1, 1]
    wait_until(
        lambda: proxy.seen("GET", "/batchjobs$", query="watch=true", since=released),
        seconds=60,
        what="a watch again",
        every_seconds=0.2,
    )
    assert operator.process.poll() is None


def test_somebody_who_patches_all_the_time_while_a_launch_is_slow_causes_neither_a_second_nor_a_storm(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy
) -> None:
    """Handlers run again when somebody else patches the object meanwhile; they must not act twice.

    Known from nolar/kopf#729, #844 and #641.
    """
    operators.start()
    held = proxy.hold("POST", "/jobs$")
    namespace.apply(scene.batchjob("nightly"))
    assert held.arrived.wait(60)

    def meddle(first: int) -> None:
        for number in range(first, first + 15):
            namespace.run("label", "batchjob", "nightly", "--overwrite", f"turn=t{number}")

    meddle(0)
    proxy.release(held)
    meddle(15)

    becomes(namespace, "nightly", "Accepted", "True")
    assert len(scene.executions("nightly")) == 1
    assert len(namespace.items("jobs")) == 1
    assert len(proxy.seen("POST", "/jobs$")) == 1
    patches = proxy.seen("PATCH", STATUS)
    written = [one for one in patches if one.status == 200]
    assert len(written) <= 3, f"{len(written)} times"
    assert len(patches) <= 30, "each conflict costs a look, and no more"
    assert namespace.get("batchjob", "nightly")["metadata"]["labels"] == {"turn": "t29"}


def test_progress_is_written_every_five_seconds_at_most_and_nothing_at_all_while_nothing_happens(
    namespace: Kubectl, operators: Operators, scene: OperatorScene, proxy: ApiProxy
) -> None:
    """An operator must not flood the API server with a write for each step, or for none.

    Known from nolar/kopf#686, argoproj/argo-workflows#12802 and #14526.
    """
    operators.start(ROWLOCK_RESYNC_SECONDS="1", ROWLOCK_SYNC_SECONDS="0.5")
    names = [f"run-{number}" for number in range(5)]
    namespace.apply(*(scene.batchjob(name) for name in names))
    runs = [scene.plan(scene.execution_of(name).execution_id, 5_000) for name in names]
    for name in names:
        shows(namespace, name, phase="Running")
    started = time.monotonic()

    while time.monotonic() - started < 11:
        for run in runs:
            scene.work(run, 1)

    for name in names:
        patches = [
            one
            for one in proxy.seen("PATCH", f"/{name}/status$", since=started)
            if one.status == 200
        ]
        assert 1 <= len(patches) <= 3, f"{len(patches)} of {name}"
        gaps = [after.at - before.at for before, after in itertools.pairwise(patches)]
        assert all(gap > 4 for gap in gaps), gaps  # lastSyncTime has whole seconds
    for run in runs:
        scene.complete(run.master, *scene.claim(run.master, slots=5_000, idle=True))
        assert scene.advance(run) == "COMPLETED"
    for name in names:
        shows(namespace, name, phase="Succeeded", progress="5000/5000")

    # The same for whoever waits, has ended, or is refused.
    namespace.apply(
        scene.batchjob("waits", master={"mode": "Pool"}),
        scene.batchjob("held", suspend=True),
        scene.batchjob("refused", parameters={"month": "July"}),
    )
    becomes(namespace, "waits", "Accepted", "True")
    becomes(namespace, "held", "Suspended", "True")
    becomes(namespace, "refused", "Accepted", "False")
    settled = time.monotonic()
    wait_until(
        lambda: len(proxy.seen("GET", "/jobs$", since=settled + 1)) >= 8,
        seconds=40,
        what="some rounds of looking at everything",
        every_seconds=0.2,
    )
    assert proxy.writes(since=settled + 1) == []
