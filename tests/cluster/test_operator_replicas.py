"""Operators may be doubled, killed and restarted at any moment: nothing is launched twice or lost."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.builders import a_seed
from tests.support.cluster import Kubectl, Object, OperatorProcess, Operators, as_text
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until

MANY = 100
RSS_MIB_MAX = 200
GROWTH_MIB_MAX = 30


def rss_mib(operator: OperatorProcess) -> float:
    status = Path(f"/proc/{operator.pid}/status").read_text()
    (kilobytes,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(kilobytes) / 1024


def accepted(kubectl: Kubectl) -> list[Object]:
    return [
        one
        for one in kubectl.items("batchjobs")
        if any(
            condition["type"] == "Accepted" and condition["status"] == "True"
            for condition in one.get("status", {}).get("conditions", [])
        )
    ]


def test_two_operators_that_are_killed_at_random_launch_everything_once(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    chance = random.Random(a_seed("ROWLOCK_SEED"))
    alive = [operators.start(), operators.start()]
    wanted = [scene.batchjob(f"run-{number:03}") for number in range(MANY)]

    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(namespace.apply, *wanted)
        for least in range(10, MANY, 15):
            wait_until(
                lambda least=least: len(scene.executions()) >= least,  # type: ignore[misc]
                seconds=60,
                what=f"{least} executions",
                every_seconds=0.01,
            )
            victim = alive.pop(chance.randrange(2))
            victim.kill()
            alive.append(operators.start(ready=chance.random() < 0.5))
        applied.result(timeout=120)

    wait_until(
        lambda: len(accepted(namespace)) == MANY,
        seconds=90,
        what="all accepted",
        every_seconds=0.5,
    )
    wait_until(
        lambda: len(namespace.items("jobs")) == MANY,
        seconds=60,
        what="a Job for each",
        every_seconds=0.5,
    )
    rows = scene.executions()
    assert len(rows) == MANY
    assert len({row.requester["uid"] for row in rows}) == MANY
    owners = Counter(
        job["metadata"]["ownerReferences"][0]["uid"] for job in namespace.items("jobs")
    )
    assert set(owners.values()) == {1}
    by_name = {row.requester["name"]: str(row.execution_id) for row in rows}
    for batchjob in accepted(namespace):
        name = batchjob["metadata"]["name"]
        assert batchjob["status"]["executionID"] == by_name[name]
        assert "finalizers" not in batchjob["metadata"]
        assert batchjob["metadata"].get("annotations", {}).keys() <= {
            "kubectl.kubernetes.io/last-applied-configuration"
        }


def test_three_hundred_batchjobs_fit_into_two_hundred_mebibytes_and_patches_leave_little_behind(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    operator = operators.start()
    wanted = [scene.batchjob(f"run-{number:03}", master={"mode": "Pool"}) for number in range(300)]
    namespace.run("create", "-f", "-", stdin=as_text(*wanted), seconds=120)
    wait_until(
        lambda: len(accepted(namespace)) == 300, seconds=120, what="accepted", every_seconds=1.0
    )

    def patch_all(note: str) -> None:
        namespace.run("annotate", "batchjobs", "--all", f"note-{note}={'x' * 500}", seconds=120)

    patch_all("first")  # what each object costs once is not growth
    before = rss_mib(operator)
    patch_all("second")
    patch_all("third")
    after = rss_mib(operator)

    assert after <= RSS_MIB_MAX, f"{before:.0f} MiB, then {after:.0f} MiB"
    assert after - before <= GROWTH_MIB_MAX, f"{before:.0f} MiB, then {after:.0f} MiB"
    assert len(scene.executions()) == 300
