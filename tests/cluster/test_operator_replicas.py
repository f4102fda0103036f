"""Operators may be doubled, killed and restarted at any moment: nothing is launched twice or lost."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.cluster import Kubectl, Object, OperatorProcess, Operators, as_text
from tests.support.operator_scene import OperatorScene
from tests.support.waiting import wait_until

MANY = 100
WATCHED = 300
TURNS = 6
NOTE_BYTES = 16_000
RSS_MIB_MAX = 200
GROWTH_MIB_MAX = 8
"""Two turns that left behind every object they had changed would be more than twice that."""


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
    namespace: Kubectl, operators: Operators, scene: OperatorScene, seed: int
) -> None:
    chance = random.Random(seed)
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


@pytest.mark.timeout(480)
def test_three_hundred_batchjobs_fit_into_two_hundred_mebibytes_and_patches_leave_nothing_behind(
    namespace: Kubectl, operators: Operators, scene: OperatorScene
) -> None:
    """An operator's memory must follow what there is to watch, not what has happened to it.

    Known from nolar/kopf#1172.
    """
    operator = operators.start(ROWLOCK_RESYNC_SECONDS="5")
    wanted = [
        scene.batchjob(f"run-{number:03}", master={"mode": "Pool"}) for number in range(WATCHED)
    ]
    namespace.run("create", "-f", "-", stdin=as_text(*wanted), seconds=120)
    wait_until(
        lambda: len(accepted(namespace)) == WATCHED,
        seconds=120,
        what="accepted",
        every_seconds=1.0,
    )
    sizes: list[float] = []
    for turn in range(1, TURNS + 1):
        note = f"note={turn}{'x' * NOTE_BYTES}"
        namespace.run("annotate", "batchjobs", "--all", "--overwrite", note, seconds=120)
        # When this one has come through, all before it have.
        namespace.patch("batchjob", "run-000", {"spec": {"priority": turn}})
        wait_until(
            lambda turn=turn: scene.execution_of("run-000").priority == turn,  # type: ignore[misc]
            seconds=60,
            what=f"turn {turn} was seen",
            every_seconds=0.1,
        )
        sizes.append(rss_mib(operator))

    third = TURNS // 3
    print(f"MiB after each turn: {', '.join(f'{size:.1f}' for size in sizes)}")  # noqa: T201
    assert max(sizes) <= RSS_MIB_MAX, sizes
    # The first third is what each object costs once.
    assert max(sizes[-third:]) - max(sizes[third:-third]) <= GROWTH_MIB_MAX, sizes
    assert len(scene.executions()) == WATCHED
