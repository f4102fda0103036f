"""Requesting: idempotent by launch key, and one execution at a time of an instance."""

import json
import re
import subprocess
import sys
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from rowlock.db.store import Store
from tests.support import launchers
from tests.support.builders import AT_LEAST_ONCE, HASH, Scene, a_policy, at_once
from tests.support.supervisor import environment

PROCESSES = 20
ROUNDS = 50


def request(
    scene: Scene,
    *,
    instance: str,
    launch_key: str | None = None,
    store: Store | None = None,
    execution: UUID | None = None,
    policy: dict[str, object] | None = None,
) -> tuple[UUID, str]:
    return (store or scene.store).request(
        execution or uuid4(),
        job=scene.job,
        contract_hash=HASH,
        policy=a_policy() if policy is None else policy,
        delivery=AT_LEAST_ONCE,
        instance_key=instance,
        launch_key=launch_key,
        parameters="{}",
        pool=scene.pool,
        requester={"actor": "alice"},
    )


def test_a_request_is_kept_as_it_was_asked(scene: Scene) -> None:
    id_, outcome = request(scene, instance="2024-07", launch_key=f"{scene.job}/1")

    row = scene.execution(id_)
    assert outcome == "requested"
    assert (row.status, row.instance_key, row.policy) == ("REQUESTED", "2024-07", a_policy())
    event = scene.one("SELECT * FROM rowlock.batch_events WHERE execution_id = %s", id_)
    assert (event.event, event.actor) == ("execution_requested", "alice")


def test_the_same_launch_key_is_the_same_execution(scene: Scene) -> None:
    first = request(scene, instance="a", launch_key=f"{scene.job}/k")

    again = request(scene, instance="a", launch_key=f"{scene.job}/k")
    even_of_another_instance = request(scene, instance="b", launch_key=f"{scene.job}/k")

    assert again == even_of_another_instance == (first[0], "exists")
    rows = scene.all("SELECT FROM rowlock.batch_instances WHERE job_name = %s", scene.job)
    assert len(rows) == 1


def test_the_same_execution_id_is_the_same_execution(scene: Scene) -> None:
    """A launch without a launch key repeats its request after a lost answer."""
    id_ = uuid4()
    assert request(scene, instance="a", execution=id_) == (id_, "requested")

    assert request(scene, instance="a", execution=id_) == (id_, "exists")


def test_a_running_instance_is_refused(scene: Scene) -> None:
    run = scene.an_execution(1, instance="a")

    assert request(scene, instance="a", launch_key=f"{scene.job}/2") == (run.id, "running")
    assert request(scene, instance="b")[1] == "requested"


@pytest.mark.parametrize("outcome", ["completed", "abandoned"])
def test_an_instance_that_is_over_is_refused_with_its_state(scene: Scene, outcome: str) -> None:
    run = scene.an_execution(0 if outcome == "completed" else 1, instance="a")
    if outcome == "abandoned":
        scene.people.abandon(run.id, "test", None)
    scene.advance(run)

    assert request(scene, instance="a") == (run.id, outcome)


def test_of_twenty_racing_launchers_one_wins(scene: Scene) -> None:
    """The others get its id and no error. (Several executions, or constraint traces at the losers, elsewhere:
    reported as spring-batch#2711, #4667, #3966.)"""
    stores = [scene.a_store() for _ in range(20)]
    for round_ in range(22):
        shared_key = round_ % 2 == 0  # one user's retries, or twenty users

        def launch(n: int, round_: int = round_, shared_key: bool = shared_key) -> tuple[UUID, str]:
            key = f"{scene.job}/{round_}" + ("" if shared_key else f"/{n}")
            return request(scene, instance=f"i{round_}", launch_key=key, store=stores[n])

        answers = at_once(*(lambda n=n: launch(n) for n in range(20)))

        assert len({id_ for id_, _ in answers}) == 1
        outcomes = sorted(outcome for _, outcome in answers)
        others = "exists" if shared_key else "running"
        assert outcomes == sorted([*[others] * 19, "requested"])
        rows = scene.all(
            "SELECT FROM rowlock.batch_job_coordination WHERE job_name = %s AND instance_key = %s",
            *(scene.job, f"i{round_}"),
        )
        assert len(rows) == 1


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_of_twenty_processes_that_ask_at_once_one_wins_and_no_error_is_logged(
    alone: Scene, isolation: str
) -> None:
    """Each on a machine of its own, as it were, in a database whose default would turn the losers' answers into
    serialization failures, too: rowlock's own sessions do not take it over. (Reported as spring-batch#904,
    #1230.)"""
    name = alone.database.name
    alter = sql.SQL("ALTER DATABASE {} SET default_transaction_isolation = {}")
    alone.admin.execute(alter.format(sql.Identifier(name), isolation))
    log_start = alone.database.cluster.log_size()

    rounds = asked_by_processes(alone, PROCESSES, ROUNDS)

    assert len(rounds) == ROUNDS
    for round_, answers in enumerate(rounds):
        assert len({id_ for id_, _ in answers}) == 1
        others = "exists" if launchers.share_their_key(round_) else "running"
        outcomes = sorted(outcome for _, outcome in answers)
        assert outcomes == sorted([*[others] * (PROCESSES - 1), "requested"])
    made = alone.one("SELECT count(*) AS n FROM rowlock.batch_job_coordination")
    assert made.n == ROUNDS
    said = [
        line
        for line in alone.database.cluster.log_since(log_start).splitlines()
        if f"@{name} " in line and re.search(r"\b(ERROR|FATAL|PANIC): ", line)
    ]
    assert said == []


def asked_by_processes(scene: Scene, processes: int, rounds: int) -> list[list[tuple[str, str]]]:
    """What so many were answered in each of so many rounds."""
    words = [scene.database.dsn_as("rowlock_node"), scene.job, scene.pool, processes, rounds]
    done = subprocess.run(
        [sys.executable, "-m", launchers.__name__, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    answers: list[list[tuple[str, str]]] = json.loads(done.stdout)
    return answers


def test_a_launcher_that_rolls_back_leaves_the_instance_free(scene: Scene) -> None:
    other = scene.a_store()
    winner = scene.a_store()

    with other.connection.transaction(force_rollback=True):
        assert request(scene, instance="a", store=other)[1] == "requested"
        with scene.started(winner, lambda s: request(scene, instance="a", store=s)) as asked:
            other.connection.execute("ROLLBACK")
            assert asked.result(timeout=10)[1] == "requested"


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {**a_policy(), "max_attempts": None},
        {**a_policy(), "max_attempts": 0},
        {**a_policy(), "max_attempts": "3"},
        {**a_policy(), "max_attempts": 2.5},
        {**a_policy(), "max_attempts": 10**9},
        {**a_policy(), "max_attempts": 3.0},  # is whole, and yet no integer to a cast
        {**a_policy(), "has_finish": "yes"},
        {**a_policy(), "has_finish": None},
        {**a_policy(), "max_failed": -1},
        {**a_policy(), "max_failed": 1.5},
        {**a_policy(), "max_failed": 2.0},
        {**a_policy(), "max_failed": 10**30},
        {**a_policy(), "max_failed": "5"},
        {**a_policy(), "max_failed": "many%"},
        {**a_policy(), "max_failed": True},
    ],
)
def test_a_policy_that_could_not_be_followed_is_refused_before_it_is_a_row(
    scene: Scene, policy: dict[str, object]
) -> None:
    """Later it would stop the recovery of every claim that a lost node held beside it."""
    with pytest.raises(psycopg.errors.CheckViolation, match="policy"):
        request(scene, instance="a", policy=policy)

    assert request(scene, instance="a")[1] == "requested"


@pytest.mark.parametrize("max_failed", [None, 0, 7, "0%", "5%", "2.5%", "100%"])
def test_every_form_of_max_failed_is_accepted(scene: Scene, max_failed: int | str | None) -> None:
    policy = a_policy(max_failed=max_failed)

    assert request(scene, instance="a", policy=policy)[1] == "requested"
