"""The verbs that change executions, and `explain`: what they print, write, and exit with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.terminal import JOBS, PATIENCE_SECONDS, Said, Terminal, node, numbers, one_line
from tests.support.terminal import run as run_apart
from tests.support.waiting import wait_until


def asked(terminal: Terminal, *options: str, count: int = 3, **params: object) -> str:
    """An execution that was launched and left alone."""
    launch = ("launch", "cli.count", "--params", numbers(count, **params), "--import", JOBS)
    said = terminal(*launch, "--detach", "--json", *options)
    assert said.code == 0, said
    return str(said.document["execution_id"])


def failed(served: Terminal, *options: str) -> str:
    """An execution that has FAILED, at one of its three partitions."""
    id_ = asked(served, *options, fail=[1])
    served.wait_status(id_, "FAILED")
    return id_


def events(terminal: Terminal, id_: str, event: str) -> list[dict[str, Any]]:
    """What the audit has of one kind."""
    found: list[dict[str, Any]] = terminal("events", id_, "--event", event, "--json").document[
        "events"
    ]
    return found


def shown(terminal: Terminal, id_: str) -> dict[str, Any]:
    """The execution as `status --json` shows it."""
    found: dict[str, Any] = terminal("status", id_, "--json").document["execution"]
    return found


def reasons(terminal: Terminal, id_: str) -> list[str]:
    """The words that `explain` gives for where an execution is."""
    return [one["reason"] for one in terminal("explain", id_, "--json").document["reasons"]]


# -- what all have in common -------------------------------------------------------------------

VERBS = [
    ("suspend",),
    ("resume",),
    ("set", "--priority", "5"),
    ("restart", "--detach"),
    ("abandon",),
    ("explain",),
]


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_verb_about_no_execution_is_a_usage_error(
    words: tuple[str, ...], terminal: Terminal
) -> None:
    command, *options = words
    said = terminal(command, "77777777", *options)
    assert said.code == 2
    assert one_line(said).startswith("there is no execution '77777777'")
    unresolved = terminal("resolve", "77777777", "k", "--retry")
    assert unresolved.code == 2
    assert one_line(unresolved).startswith("there is no execution '77777777'")


@pytest.mark.parametrize("verb", ["suspend", "resume", "set"])
def test_what_has_ended_is_not_changed_any_more(verb: str, terminal: Terminal) -> None:
    id_ = asked(terminal)
    terminal("cancel", id_)
    options = ("--priority", "5") if verb == "set" else ()

    said = terminal(verb, id_, *options)

    assert said.code == 2
    assert one_line(said).startswith(
        f"execution {id_} is cancelled: there is nothing left to {verb}"
    )


def test_a_role_without_the_right_is_told_which_one_it_needs(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = asked(terminal)
    for role, verbs in (
        ("rowlock_reader", VERBS[:-1]),
        ("rowlock_operator", [("abandon",), ("resolve", "k", "--retry")]),
    ):
        monkeypatch.setenv("ROWLOCK_DSN", terminal.database.dsn_as(role))
        for command, *options in verbs:
            said = terminal(command, id_, *options)
            assert said.code == 2, (role, command)
            assert "log in as a member of rowlock_admin" in one_line(said)
        assert terminal("explain", id_).code == 0


# -- suspend, resume, set ----------------------------------------------------------------------


def test_suspend_and_resume_are_idempotent_and_kept_in_the_audit(terminal: Terminal) -> None:
    id_ = asked(terminal)

    first = terminal("suspend", "1", "--reason", "the vendor is down", "--json")
    assert (first.code, first.document) == (0, {"execution_id": id_, "answer": "suspended"})
    assert shown(terminal, id_)["suspended"] is True
    assert "REQUESTED, suspended" in terminal("executions").out
    assert "status      REQUESTED, suspended" in terminal("status", id_).out
    again = terminal("suspend", id_)
    assert (again.code, again.out) == (
        0,
        f"execution {id_}: it was suspended before; nothing has changed\n",
    )
    assert terminal("resume", id_).out == f"execution {id_}: resumed\n"
    assert terminal("resume", id_, "--json").document["answer"] == "same"
    assert shown(terminal, id_)["suspended"] is False

    (event,) = events(terminal, id_, "execution_suspended")
    assert event["detail"]["reason"] == "the vendor is down"
    assert "@" in event["actor"]
    assert len(events(terminal, id_, "execution_resumed")) == 1


def test_a_launch_may_set_limits_and_be_suspended_and_set_changes_them(terminal: Terminal) -> None:
    id_ = asked(terminal, "--parallelism", "2", "--deadline", "3600", "--suspended")
    one = shown(terminal, id_)
    assert (one["parallelism"], one["suspended"], one["priority"]) == (2, True, 0)
    assert one["deadline_at"] is not None
    assert "limits      2 partitions at a time, deadline 2" in terminal("status", id_).out

    options = ("--priority", "-3", "--parallelism", "none", "--deadline", "none")
    said = terminal("set", id_, *options, "--reason", "now")
    assert said.code == 0
    assert "now has priority of -3, parallelism of none, a deadline" in said.out
    one = shown(terminal, id_)
    assert (one["parallelism"], one["deadline_at"], one["priority"]) == (None, None, -3)

    again = terminal("set", id_, *options, "--json")
    assert (again.code, again.document["answer"]) == (0, "same")
    (event,) = events(terminal, id_, "limits_changed")
    assert event["detail"]["reason"] == "now"


def test_a_suspended_launch_is_processed_after_its_resume(served: Terminal) -> None:
    id_ = asked(served, "--suspended")
    assert reasons(served, id_) == ["suspended"]

    assert served("resume", id_).code == 0

    served.wait_status(id_, "COMPLETED")


# -- restart, and launches that are one --------------------------------------------------------


def test_restart_follows_what_is_left_and_finds_the_same_execution_again(
    served: Terminal, tmp_path: Path
) -> None:
    repaired = tmp_path / "repaired"
    id_ = asked(served, "--instance", "repair", repaired=str(repaired), fail=[1])
    served.wait_status(id_, "FAILED")
    assert reasons(served, id_) == ["ended"]
    repaired.touch()

    said = served("restart", id_, "--reason", "repaired", "--json")

    assert said.code == 0, said
    first, *_, last = said.objects
    assert (first["outcome"], first["instance_key"]) == ("restarted", "repair")
    new = first["execution_id"]
    assert (last["execution_id"], last["completed"], last["total"]) == (new, 3, 3)
    assert (last["restart_of"], last["carried"], last["summary"]) == (id_, 2, {"total": 3})
    assert len(served("partitions", new, "--json").document["partitions"]) == 1
    again = served("restart", id_, "--detach", "--json").document
    assert (again["execution_id"], again["outcome"]) == (new, "exists")
    (event,) = events(served, new, "execution_restarted")
    assert event["detail"]["reason"] == "repaired"
    assert f"restart of  {id_}, 2 of its partitions are kept" in served("status", new).out
    explained = served("explain", id_)
    assert f"it was restarted as {new}" in explained.out
    assert f"→ rowlock status {new}" in explained.out

    done = served("restart", new)
    assert done.code == 2
    assert "is completed" in one_line(done)


def test_a_running_execution_is_not_restarted(terminal: Terminal) -> None:
    id_ = asked(terminal)
    said = terminal("restart", id_)
    assert said.code == 2
    assert f"is running (execution {id_})" in one_line(said)


def test_restarting_what_was_restarted_names_the_one_that_stands_for_it(served: Terminal) -> None:
    id_ = failed(served, "--instance", "again")
    new = asked(served, "--instance", "again", fail=[1])
    served.wait_status(new, "FAILED")

    said = served("restart", id_)

    assert said.code == 2
    assert f"{new} is: rowlock status {new} shows it" in one_line(said)


@pytest.mark.parametrize("local", [True, False])
def test_a_launch_of_what_failed_is_told_to_be_a_restart(served: Terminal, local: bool) -> None:
    key = f"failed {local}"
    id_ = failed(served, "--instance", key)
    imports = ("--import", JOBS) if local else ()
    launch = ("launch", "cli.count", "--instance", key, *imports)

    said = run_apart(served.database.dsn, *launch, "--params", numbers(3, fail=[1]))

    assert said.code == 4, said
    assert "(a restart: what an earlier execution of the instance completed is kept)" in said.out
    assert "2 of 3 partitions completed, 1 failed" in said.out
    other = served(*launch, "--params", numbers(4), "--detach")
    assert other.code == 2
    assert "stands for other parameters" in one_line(other)
    assert id_ not in other.out


# -- resolve, abandon --------------------------------------------------------------------------


def test_resolve_checks_the_result_and_is_idempotent(served: Terminal) -> None:
    id_ = failed(served)
    words = ("resolve", id_, "n0001", "--completed")

    wrong = served(*words, "--result", '"one"')
    assert wrong.code == 2
    assert one_line(wrong).startswith("result $: ")
    missing = served(*words)
    assert missing.code == 2
    assert one_line(missing).startswith("result $: ")
    said = served(*words, "--result", "1", "--reason", "seen in the ledger")
    assert said.code == 0
    assert said.out == (
        f"partition 'n0001': resolved as completed\nit takes effect with rowlock restart {id_}\n"
    )
    again = served(*words, "--result", "1", "--json")
    assert again.document == {"execution_id": id_, "partition_key": "n0001", "answer": "same"}
    (event,) = events(served, id_, "partition_resolved")
    assert event["detail"]["reason"] == "seen in the ledger"

    restarted = served("restart", id_, "--json")
    assert restarted.code == 0
    assert restarted.objects[-1]["summary"] == {"total": 3}
    late = served(*words, "--result", "1")
    assert late.code == 2
    assert "is not the last one of its instance" in one_line(late)


def test_only_a_partition_that_failed_is_resolved(served: Terminal) -> None:
    id_ = failed(served)
    completed = served("resolve", id_, "n0000", "--retry")
    assert completed.code == 2
    assert "has not FAILED" in one_line(completed)
    unknown = served("resolve", id_, "n9", "--retry")
    assert unknown.code == 2
    assert one_line(unknown).startswith("there is no partition 'n9'")


def test_abandon_ends_at_once_and_for_ever(served: Terminal, go: Path) -> None:
    id_ = asked(served, "--instance", "given up", wait_for=str(go))
    served.wait_status(id_, "RUNNING")

    said = served("abandon", id_, "--reason", "settled by hand")
    assert said.code == 0
    assert said.out == f"execution {id_}: abandoned; its instance is never launched again\n"
    assert "attempts that still run" in one_line(said)
    served.wait_status(id_, "ABANDONED")
    assert served("abandon", id_, "--json").document["answer"] == "abandoned"
    assert len(events(served, id_, "execution_abandoned")) == 1
    assert served("status", id_, "--watch").code == 3

    launch = ("launch", "cli.count", "--params", numbers(3, wait_for=str(go)), "--detach")
    again = served(*launch, "--instance", "given up")
    assert again.code == 2
    assert "is abandoned" in one_line(again)
    assert served("restart", id_).code == 2


def test_what_completed_is_not_abandoned(served: Terminal) -> None:
    id_ = asked(served)
    served.wait_status(id_, "COMPLETED")
    said = served("abandon", id_)
    assert said.code == 2
    assert "is completed: there is nothing left to abandon" in one_line(said)


# -- purge -------------------------------------------------------------------------------------


def test_purge_deletes_what_is_old_enough_and_keeps_what_was_not_named(terminal: Terminal) -> None:
    gone = asked(terminal, "--instance", "once", "--launch-key", "first")
    terminal("cancel", gone)
    live = asked(terminal)

    nothing = terminal("purge", "--completed-days", "0", "--failed-days", "never", "--json")
    assert nothing.document == {"executions": 0, "partitions": 0, "events": 0, "nodes": 0}
    young = terminal("purge", "--failed-days", "1", "--json").document
    assert young["executions"] == 0
    said = terminal("purge", "--failed-days", "0")

    assert said.out.startswith("deleted 1 executions, 0 partitions, 0 events")
    assert terminal("status", gone).code == 2
    assert terminal("status", live).code == 0
    launch = ("launch", "cli.count", "--params", numbers(3), "--import", JOBS)
    named = ("--instance", "once", "--launch-key", "first")
    for options in (("--detach",), ()):
        again = run_apart(terminal.database.dsn, *launch, *named, *options)
        assert again.code == 2, again
        assert "has been purged: use another --launch-key" in again.err


# -- explain -----------------------------------------------------------------------------------


def test_explain_says_who_is_missing_and_then_that_it_moves(terminal: Terminal, go: Path) -> None:
    id_ = asked(terminal, wait_for=str(go), count=5)
    said = terminal("explain", id_)
    assert said.code == 0
    assert said.out.splitlines() == [
        f"execution {id_} of cli.count is REQUESTED:",
        "- no node is alive in this database at all",
        "  → rowlock node --pool default --import MODULE, with the code of cli.count",
    ]

    with node(terminal.database.dsn, "n1"):
        terminal.wait_status(id_, "RUNNING")
        _wait_reasons(terminal, id_, ["moving"])
        terminal("set", id_, "--parallelism", "1")
        _wait_reasons(terminal, id_, ["limit"])
        terminal("suspend", id_)
        _wait_reasons(terminal, id_, ["suspended", "limit"])
        document: dict[str, Any] = terminal("explain", id_, "--json").document
        assert (document["execution_id"], document["status"]) == (id_, "RUNNING")
        assert document["reasons"][0]["remedy"] == f"rowlock resume {id_}"
        terminal("cancel", id_, "--reason", "enough")
        wait_until(
            lambda: reasons(terminal, id_) == ["ended"],
            seconds=PATIENCE_SECONDS,
            what="it has ended",
            every_seconds=0.05,
        )
    assert "it ended CANCELLED, " in terminal("explain", id_).out
    assert "Cancelled: enough" in terminal("explain", id_).out


def _wait_reasons(terminal: Terminal, id_: str, expected: list[str]) -> None:
    wait_until(
        lambda: reasons(terminal, id_) == expected,
        seconds=PATIENCE_SECONDS,
        what=f"the reasons are {expected}, not {reasons(terminal, id_)}",
        every_seconds=0.05,
    )


def test_explain_names_the_contracts_and_pools_that_are_there(served: Terminal) -> None:
    id_ = asked(served, "--pool", "nowhere")
    wait_until(
        lambda: reasons(served, id_) == ["nobody_accepts"],
        seconds=PATIENCE_SECONDS,
        what="a node has planned it, and none may process it",
        every_seconds=0.05,
    )
    said = served("explain", id_)
    assert "no living node of pool 'nowhere' with slots registers job 'cli.count'" in said.out
    assert "in pool 'default'" in said.out
    served("cancel", id_)


# -- master ------------------------------------------------------------------------------------


def test_a_master_run_drives_what_was_launched_without_a_node(terminal: Terminal) -> None:
    id_ = asked(terminal)
    said = _master(terminal, id_, "--slots", "2")
    assert (said.code, said.out) == (0, "")
    ended = [json.loads(line) for line in said.err.splitlines()]
    assert "execution_ended" in {one["event"] for one in ended}
    terminal.wait_status(UUID(id_), "COMPLETED")


def test_a_master_run_of_nothing_is_a_usage_error(terminal: Terminal) -> None:
    assert run_apart(terminal.database.dsn, "master", "0" * 32).code == 2
    said = _master(terminal, "0" * 32)
    assert said.code == 2
    assert "there is no execution '00000000-0000-0000-0000-000000000000'" in said.err


def _master(terminal: Terminal, id_: str, *options: str) -> Said:
    return run_apart(terminal.database.dsn, "master", id_, "--import", JOBS, "--json", *options)
