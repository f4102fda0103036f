"""The commands over a real database and real nodes: what they print, write, and exit with."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from rowlock.cli.main import main
from tests.support.postgres import Database
from tests.support.releases import KNOWN, forget_migration, record_migration
from tests.support.terminal import (
    JOBS,
    PATIENCE_SECONDS,
    Captured,
    Said,
    Terminal,
    finished,
    finished_unread,
    node,
    numbers,
    one_line,
    run,
    start,
    variables,
)
from tests.support.waiting import wait_until

UNREACHABLE = "postgresql://127.0.0.1:1/nowhere?connect_timeout=2"


# -- the database ------------------------------------------------------------------------------


def test_migrate_says_what_it_applied_and_then_that_nothing_is_missing(
    empty_database: Database, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWLOCK_DSN", empty_database.dsn)
    terminal = Terminal(empty_database, capsys)

    before = terminal("nodes")
    assert before.code == 2
    assert one_line(before).endswith("has no rowlock schema: run rowlock migrate")

    first = terminal("migrate")
    assert first.code == 0
    assert "applied 0001_roles in" in first.out
    assert re.search(r"^the schema is now version \d+$", first.out, re.MULTILINE)

    assert terminal("migrate").out.startswith("the schema is up to date: version ")
    assert terminal("migrate", "--json").document["applied"] == []
    assert terminal("nodes").code == 0


def test_an_old_or_a_newer_schema_is_told_with_the_remedy(terminal: Terminal) -> None:
    record_migration(terminal.database, works_with=KNOWN + 1)
    newer = terminal("executions")
    assert newer.code == 2
    assert one_line(newer).endswith("upgrade rowlock")
    forget_migration(terminal.database)

    with terminal.database.connect() as db:
        db.execute("DELETE FROM rowlock.schema_migrations WHERE version > 3")
    older = terminal("executions")
    assert older.code == 2
    assert one_line(older).endswith("run rowlock migrate")


def test_a_newer_schema_that_works_with_this_code_is_worked_with(terminal: Terminal) -> None:
    record_migration(terminal.database, works_with=KNOWN)

    assert terminal("executions").code == 0
    migrated = terminal("migrate")
    assert migrated.code == 0
    assert migrated.out == (
        f"the schema is version {KNOWN + 1}, newer than this rowlock, and works with it\n"
    )
    assert terminal("migrate", "--json").document == {"version": KNOWN + 1, "applied": []}


@pytest.mark.parametrize(
    "words",
    [
        ["migrate"],
        ["nodes"],
        ["status", "1"],
        ["status", "1", "--watch"],
        ["cancel", "1"],
        ["suspend", "1"],
        ["resume", "1"],
        ["set", "1", "--priority", "1"],
        ["restart", "1"],
        ["resolve", "1", "k", "--retry"],
        ["abandon", "1"],
        ["explain", "1"],
        ["purge", "--completed-days", "1"],
        ["contract", "cli.count"],
        ["launch", "cli.count", "--detach"],
        ["launch", "cli.count", "--import", JOBS, "--params", '{"count": 1}'],
    ],
)
@pytest.mark.parametrize("by", ["environment", "option"])
def test_without_a_database_there_is_one_line_and_exit_code_5(
    words: list[str], by: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROWLOCK_DSN", raising=False)
    if by == "environment":
        monkeypatch.setenv("ROWLOCK_DSN", UNREACHABLE)
    else:
        words = [*words, "--dsn", UNREACHABLE]

    assert main(words) == 5

    said = capsys.readouterr()
    assert said.out == ""
    assert "onnection" in one_line(Said(5, said.out, said.err))


def test_without_dsn_the_variables_of_libpq_are_used(
    database: Database, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from psycopg.conninfo import conninfo_to_dict

    monkeypatch.delenv("ROWLOCK_DSN", raising=False)
    names = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER"}
    names["password"] = "PGPASSWORD"
    for key, value in conninfo_to_dict(database.dsn).items():
        if key in names:
            monkeypatch.setenv(names[key], str(value))

    assert main(["nodes"]) == 0
    assert "no nodes" in capsys.readouterr().out


def test_a_login_without_the_right_is_told_which_one_it_needs(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = _asked(terminal)
    monkeypatch.setenv("ROWLOCK_DSN", terminal.database.dsn_as("rowlock_reader"))

    assert terminal("executions").code == 0
    refused = terminal("cancel", id_)
    assert refused.code == 2
    assert "log in as a member of rowlock_admin" in one_line(refused)


def _asked(terminal: Terminal) -> str:
    """An execution that no node has taken: there are none."""
    launch = ("launch", "cli.count", "--params", numbers(3), "--import", JOBS)
    said = terminal(*launch, "--detach", "--json")
    assert said.code == 0
    return str(said.document["execution_id"])


# -- launch: what is refused -------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(
    "params, says",
    [
        ('{"count": "3"}', "parameters $.count: expected"),
        ('{"count": 3, "colour": "red"}', "parameters $.colour: "),
        ("{}", "parameters $.count: "),
        ('{"count": 1, "count": 2}', "parameters $.count: "),
        ('{"count": NaN}', "parameters $.count: "),
        ('{"count": -Infinity}', "parameters $.count: "),
        ('{"count": 1, "a\\u0000": 2}', "parameters $: has a field whose name contains the NUL"),
        ('{"count":', "parameters $: is not JSON"),
        ("@/no/such/file", "--params @/no/such/file cannot be read: No such file or directory"),
    ],
)
def test_wrong_parameters_are_refused_with_the_path_and_nothing_is_written(
    params: str, says: str, local: bool, detach: bool, served: Terminal
) -> None:
    """Before any row is written, also where only the published contract is known. (Found out when partitions
    crash one by one, or when the write fails, elsewhere: reported as awa#85, Polaris#287, langflow#11905.)"""
    before = served.executions()
    imports = ["--import", JOBS] if local else []
    options = ["--detach"] if detach else []

    said = served("launch", "cli.count", "--params", params, *imports, *options)

    assert said.code == 2
    assert one_line(said).startswith(says)
    assert said.out == ""
    assert served.executions() == before


def test_an_unknown_job_suggests_near_names_from_here_and_from_the_nodes(served: Terminal) -> None:
    before = served.executions()
    for imports in ([], ["--import", JOBS]):
        said = served("launch", "cli.cuont", *imports)
        assert said.code == 2
        assert one_line(said).startswith("there is no job 'cli.cuont'; did you mean 'cli.count'")
    said = served("launch", "zzzz")
    assert one_line(said) == (
        "there is no job 'zzzz': rowlock jobs lists those there are, once a node has published "
        "them; --import MODULE takes a job from code"
    )
    assert served.executions() == before


@pytest.mark.parametrize(
    "options, says",
    [
        (["--detach", "--slots", "2"], "--slots 2 has no effect with --detach"),
        (["--detach", "--http", "0"], "--http 0 has no effect with --detach"),
        (["--slots", "2"], "--slots 2 needs the code of cli.count here"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: list[str], says: str, served: Terminal
) -> None:
    said = served("launch", "cli.count", "--params", numbers(1), *options)
    assert said.code == 2
    assert says in one_line(said)


def test_a_module_that_cannot_be_imported_is_told(served: Terminal) -> None:
    said = served("launch", "cli.count", "--import", "no.such.module")
    assert said.code == 2
    assert "there is no module 'no" in one_line(said)


# -- launch: without the code ------------------------------------------------------------------


def test_a_detached_launch_prints_the_execution_and_the_nodes_do_the_rest(
    served: Terminal,
) -> None:
    said = served("launch", "cli.count", "--params", numbers(5), "--detach", "--instance", "march")
    assert said.code == 0
    execution, instance = said.out.splitlines()
    id_ = execution.removeprefix("execution ")
    assert instance == "instance  march"
    served.wait_status(id_, "COMPLETED")

    again = served("launch", "cli.count", "--params", numbers(5), "--instance", "march")
    assert again.code == 2
    assert one_line(again) == (
        f"instance 'march' of job 'cli.count' is completed (execution {id_}): "
        "launch it with another --instance"
    )


def test_a_launch_without_the_code_follows_the_execution_to_its_end(served: Terminal) -> None:
    said = served("launch", "cli.count", "--params", numbers(20))

    assert said.code == 0
    assert re.search(
        r"^execution \S+ of cli.count COMPLETED in .* s: 20 of 20 partitions completed$",
        said.out,
        re.MULTILINE,
    )
    assert 'summary: {"total": 190}' in said.out


def test_json_of_a_launch_is_objects_on_lines(served: Terminal) -> None:
    said = served("launch", "cli.count", "--params", numbers(3), "--json")

    assert said.code == 0
    first, *progress, last = said.objects
    assert first["type"] == "launched"
    assert {one["type"] for one in progress} <= {"progress"}
    assert (last["type"], last["exit_code"], last["status"]) == ("result", 0, "COMPLETED")
    assert (last["execution_id"], last["summary"]) == (first["execution_id"], {"total": 3})


def test_a_failed_execution_exits_4_with_the_reason_and_what_failed(served: Terminal) -> None:
    said = served("launch", "cli.count", "--params", numbers(9, fail=[1, 3, 5, 7]))

    assert said.code == 4
    assert "reason: PartitionsFailed: 4 of 9 partitions failed, 0 allowed" in said.out
    assert "n0001 (claimed once): ValueError: 1 is odd" in said.out
    assert "… and 1 more" in said.out
    more = re.search(
        r"^see more: rowlock (partitions \S+ --status FAILED)$", said.out, re.MULTILINE
    )
    assert more is not None
    listed = served(*more[1].split())
    assert listed.out.count("FAILED") == 4


def test_nothing_to_do_is_completed(served: Terminal) -> None:
    said = served("launch", "cli.nothing")
    assert said.code == 0
    assert "COMPLETED" in said.out
    assert "0 of 0 partitions completed" in said.out


def test_a_cancelled_execution_exits_3(served: Terminal, go: Path) -> None:
    params = numbers(4, wait_for=str(go))
    process = start(served.database.dsn, "launch", "cli.count", "--params", params, "--json")
    assert process.stdout is not None
    id_ = json.loads(process.stdout.readline())["execution_id"]
    served.wait_status(id_, "RUNNING")

    said = served("cancel", id_[:13], "--reason", "changed my mind", "--wait", "--json")
    assert (said.code, said.document) == (0, {"execution_id": id_, "answer": "cancelled"})

    end = finished(process)
    assert end.code == 3
    assert end.objects[-1]["failure_message"] == "changed my mind"


def test_a_running_instance_is_refused_with_its_execution(served: Terminal, go: Path) -> None:
    launch = ("launch", "cli.count", "--params", numbers(2, wait_for=str(go)), "--instance", "may")
    id_ = served(*launch, "--detach", "--json").document["execution_id"]

    said = served(*launch)
    assert said.code == 2
    assert one_line(said) == (
        f"instance 'may' of job 'cli.count' is running (execution {id_}): follow it with "
        f"rowlock status {id_} --watch, or launch it with another --instance"
    )
    local = run(served.database.dsn, *launch, "--import", JOBS)
    assert local.code == 2
    assert id_ in one_line(local)
    go.touch()
    assert served("status", id_, "--watch").code == 0


@pytest.mark.parametrize("local", [True, False])
def test_the_same_launch_key_again_finds_the_execution_of_the_first_time(
    served: Terminal, local: bool
) -> None:
    before = served.executions()
    imports = ["--import", JOBS] if local else []
    key = f"key {local}"
    launch = ("launch", "cli.count", "--params", numbers(2), "--launch-key", key, *imports)

    first = served(*launch, "--detach", "--json").document
    again = run(served.database.dsn, *launch, "--json")
    assert again.code == 0
    assert again.objects[0] == {**first, "outcome": "exists"}
    assert again.objects[-1]["status"] == "COMPLETED"
    assert served.executions() == before + 1

    other = served("launch", "cli.nothing", "--launch-key", key, *imports)
    assert other.code == 2
    assert "use another --launch-key" in one_line(other)


def test_a_launch_that_no_node_accepts_says_so(terminal: Terminal) -> None:
    launch = ("launch", "cli.count", "--params", numbers(1), "--import", JOBS, "--detach")
    said = terminal(*launch)
    assert said.code == 0
    assert one_line(said).startswith(
        "no living node of pool 'default' accepts cli.count (contract "
    )


def test_parameters_may_come_from_a_file_or_standard_input(
    served: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "params.json"
    file.write_text(numbers(2))
    said = served("launch", "cli.count", "--params", f"@{file}", "--json")
    assert said.objects[-1]["total"] == 2

    process = subprocess.run(
        [*(sys.executable, "-m", "rowlock", "launch", "cli.count"), "--params", "@-", "--json"],
        input=numbers(4),
        env=variables(served.database.dsn),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(process.stdout.splitlines()[-1])["total"] == 4


# -- launch: as the master ---------------------------------------------------------------------


def test_a_launch_with_the_code_and_slots_needs_no_node(database: Database) -> None:
    said = run(
        database.dsn,
        *("launch", "cli.count", "--params", numbers(9, fail=[4]), "--import", JOBS),
        *("--slots", "2", "--json"),
    )
    assert said.code == 4, said
    last = said.objects[-1]
    assert (last["completed"], last["failed"], last["exit_code"]) == (8, 1, 4)
    assert last["failed_partitions"][0]["last_error"]["message"] == "4 is odd"
    assert said.err == ""


def test_a_launch_that_is_told_to_leave_says_who_goes_on(served: Terminal, go: Path) -> None:
    process = start(
        served.database.dsn,
        *("launch", "cli.count", "--params", numbers(3, wait_for=str(go)), "--import", JOBS),
        "--json",
    )
    assert process.stdout is not None
    id_ = json.loads(process.stdout.readline())["execution_id"]
    served.wait_status(id_, "RUNNING")

    process.send_signal(signal.SIGINT)
    end = finished(process)
    assert end.code == 130
    assert one_line(end).startswith(f"left; execution {id_} goes on")

    go.touch()
    assert served("status", id_, "--watch").code == 0


def test_a_superseded_launch_says_so_and_exits_with_the_outcome(served: Terminal, go: Path) -> None:
    process = start(
        served.database.dsn,
        *("launch", "cli.count", "--params", numbers(3, wait_for=str(go), fail=[1])),
        *("--import", JOBS, "--json"),
    )
    assert process.stdout is not None
    id_ = json.loads(process.stdout.readline())["execution_id"]
    served.wait_status(id_, "RUNNING")

    process.send_signal(signal.SIGSTOP)  # its watchdog and executors see it go, the nodes as well
    wait_until(
        lambda: (
            served.database.value(
                "SELECT master_epoch FROM rowlock.executions WHERE execution_id = %s", [id_]
            )
            == 2
        ),
        seconds=PATIENCE_SECONDS,
        what="a node takes over",
        every_seconds=0.05,
    )
    process.send_signal(signal.SIGCONT)
    go.touch()

    end = finished(process)
    assert end.code == 4, end
    assert f"another node is the master of execution {id_} now: following it" in end.err
    assert end.objects[-1]["status"] == "FAILED"


def test_a_launch_goes_on_when_nobody_reads_what_it_says(served: Terminal, go: Path) -> None:
    process = start(
        served.database.dsn,
        *("launch", "cli.count", "--params", numbers(3, wait_for=str(go)), "--import", JOBS),
        "--json",
    )
    assert process.stdout is not None
    id_ = json.loads(process.stdout.readline())["execution_id"]
    process.stdout.close()
    served.wait_status(id_, "RUNNING")
    go.touch()
    served.wait_status(id_, "COMPLETED")
    # The result found no reader.
    assert finished_unread(process) == Said(141, "", "")


# -- status ------------------------------------------------------------------------------------


def test_status_shows_everything_of_one_execution(served: Terminal, go: Path) -> None:
    params = numbers(9, wait_for=str(go))
    id_ = served("launch", "cli.count", "--params", params, "--detach", "--json").document[
        "execution_id"
    ]
    wait_until(
        lambda: served("status", id_, "--json").document["running"] >= 2,
        seconds=PATIENCE_SECONDS,
        what="partitions run",
        every_seconds=0.05,
    )

    said = served("status", id_).out
    for words in (
        f"execution   {id_} (number ",
        "job         cli.count, contract ",
        "status      RUNNING",
        "partitions  0/9 completed, ",
        "master      n",
        "requested   20",
        "parameters  {",
        "NODE  RUNNING  AHEAD",
        "execution_requested",
    ):
        assert words in said, words

    document = served("status", id_, "--json").document
    assert document["execution"]["parameters"] == {"count": 9, "wait_for": str(go)}
    assert sum(one["running"] for one in document["holders"]) == document["running"]
    assert document["events"][0]["event"] == "execution_requested"

    go.touch()
    watched = served("status", id_, "--watch", "--json")
    assert (watched.code, watched.objects[-1]["status"]) == (0, "COMPLETED")
    said = served("status", id_).out
    assert 'summary     {"total": 36}' in said
    assert "AHEAD" not in said


def test_progress_and_skipped_items_are_shown(served: Terminal, tmp_path: Path) -> None:
    go = tmp_path / "go"
    params = json.dumps({"count": 1, "wait_for": str(go)})
    id_ = served("launch", "cli.items", "--params", params, "--detach", "--json").objects[0][
        "execution_id"
    ]
    wait_until(
        lambda: " 57/100 " in served("status", id_).out,
        seconds=PATIENCE_SECONDS,
        what="the node tells how far it is",
        every_seconds=0.2,
    )
    assert "skipped     2 items" in served("status", id_).out
    assert "57/100, 2 skipped" in served("partitions", id_).out

    go.touch()
    assert served("status", id_, "--watch", "--json").code == 0

    assert "skipped     2 items" in served("status", id_).out
    listed = served("partitions", id_)
    assert "2 skipped" in listed.out
    assert "57/100" not in listed.out, "of what is done, nothing is half done"
    (one,) = served("partitions", id_, "--json").document["partitions"]
    assert one["counters"]["skips"] == [
        {"item": f"{{'line': {number}}}", "error": "ValueError: no amount"} for number in range(2)
    ]


def test_status_of_what_is_not_there_suggests_what_is(served: Terminal) -> None:
    id_ = served("launch", "cli.nothing", "--json").objects[0]["execution_id"]
    wrong = id_[:-1] + ("0" if id_[-1] != "0" else "1")
    for command in (["status"], ["status", "--watch"], ["partitions"], ["events"], ["cancel"]):
        said = served(*command, wrong)
        assert said.code == 2
        assert one_line(said).startswith(f"there is no execution '{wrong}'; did you mean '")
        assert id_ in said.err


def test_ctrl_c_ends_watching_quietly_and_changes_nothing(terminal: Terminal) -> None:
    id_ = _asked(terminal)
    watch = start(terminal.database.dsn, "status", id_, "--watch", "--json")
    assert watch.stdout is not None
    watch.stdout.readline()

    watch.send_signal(signal.SIGINT)

    end = finished(watch)
    assert (end.code, end.err) == (130, "")
    terminal.wait_status(id_, "REQUESTED")


def test_watching_outlives_an_outage_of_the_database(private_database: Database) -> None:
    dsn = private_database.dsn
    launch = ("launch", "cli.count", "--params", numbers(2), "--import", JOBS, "--detach", "--json")
    id_ = run(dsn, *launch).document["execution_id"]
    watch = start(dsn, "status", id_, "--watch", "--json")
    assert watch.stdout is not None
    assert json.loads(watch.stdout.readline())["status"] == "REQUESTED"

    private_database.server.restart("immediate")
    with node(dsn, "n1"):
        end = finished(watch)

    assert end.code == 0, end
    assert "the database is away (" in one_line(end)
    assert end.objects[-1]["status"] == "COMPLETED"


# -- cancel ------------------------------------------------------------------------------------


def test_cancel_is_idempotent_and_kept_in_the_audit(terminal: Terminal) -> None:
    id_ = _asked(terminal)

    assert terminal("cancel", "1", "--reason", "not needed").out == f"execution {id_}: cancelled\n"
    again = terminal("cancel", id_)
    assert (again.code, again.out) == (0, f"execution {id_}: cancelled\n")
    waited = terminal("cancel", id_, "--wait", "--json")
    assert (waited.code, waited.document["answer"]) == (0, "cancelled")

    shown = terminal("status", id_).out
    assert "failure     Cancelled: not needed" in shown
    (event,) = terminal("events", id_, "--event", "cancel_requested", "--json").document["events"]
    assert event["detail"] == {"reason": "not needed"}
    assert "@" in event["actor"]


def test_cancelling_what_has_completed_changes_nothing(served: Terminal) -> None:
    id_ = served("launch", "cli.nothing", "--json").objects[0]["execution_id"]
    said = served("cancel", id_)
    assert said.code == 0
    assert said.out == f"execution {id_}: completed; there was nothing left to cancel\n"
    assert served("status", id_, "--json").document["execution"]["status"] == "COMPLETED"


def test_cancel_of_a_whole_id_that_does_not_exist_is_a_usage_error(served: Terminal) -> None:
    said = served("cancel", str(uuid4()))
    assert said.code == 2
    assert "there is no execution" in one_line(said)


# -- lists -------------------------------------------------------------------------------------


def test_lists_come_as_tables_and_as_json(served: Terminal) -> None:
    id_ = served("launch", "cli.count", "--params", numbers(3)).out.split()[1]

    executions = served("executions", "--job", "cli.count", "--status", "completed")
    assert executions.out.splitlines()[0].split() == [
        *("NO", "EXECUTION", "JOB", "INSTANCE", "STATUS", "DONE", "FAILED", "MASTER", "ASKED"),
        "TOOK",
    ]
    assert id_[:8] in executions.out
    listed = served("executions", "--limit", "1", "--json").document
    assert listed["executions"][0]["execution_id"] == id_

    partitions = served("partitions", id_, "--limit", "2")
    assert [line.split()[1] for line in partitions.out.splitlines()[1:3]] == ["n0000", "n0001"]
    page = served("partitions", id_, "--limit", "2", "--json", "--payloads").document
    assert [one["slice"] for one in page["partitions"]] == [0, 1]
    assert [one["result"] for one in page["partitions"]] == [0, 1]
    assert partitions.out.splitlines()[-1] == f"there are more: --after {page['next_after']}"
    rest = served("partitions", id_, "--after", str(page["next_after"]), "--json").document
    assert [one["partition_key"] for one in rest["partitions"]] == ["n0002"]
    assert "slice" not in rest["partitions"][0]
    assert rest["next_after"] is None

    nodes = served("nodes", "--json").document["nodes"]
    assert {"n1", "n2"} <= {one["name"] for one in nodes}
    assert "cli.count" in served("nodes").out

    (job,) = [
        one for one in served("jobs", "--json").document["jobs"] if one["job_name"] == "cli.count"
    ]
    assert job["nodes"] >= 2
    assert job["contract_hash"] in served("jobs").out

    events = served("events", id_, "--json").document["events"]
    assert [one["event"] for one in events] == ["execution_requested", "execution_ended"]
    assert served("events", "--limit", "1").out.startswith("there are earlier ones: --before ")


def test_a_contract_is_shown_from_the_code_or_as_published(served: Terminal) -> None:
    published = served("contract", "cli.count", "--json").document
    local = served("contract", "cli.count", "--import", JOBS, "--json").document

    assert (published["source"], local["source"]) == ("published", "code")
    for name in ("contract_hash", "schemas", "policy", "delivery"):
        assert published[name] == local[name]
    assert published["schemas"]["parameters"]["required"] == ["count"]

    by_hash = served("contract", "cli.count", "--hash", local["contract_hash"])
    assert [line for line in by_hash.out.splitlines() if line.endswith(":")] == [
        *("parameters:", "slice:", "result:", "summary:"),
    ]
    wrong = served("contract", "cli.count", "--hash", "beef")
    assert wrong.code == 2
    assert f"did you mean '{local['contract_hash']}'?" in one_line(wrong)
    unknown = served("contract", "cli.cuont")
    assert one_line(unknown).startswith("there is no job 'cli.cuont'; did you mean 'cli.count'")


def test_a_reader_that_goes_away_ends_a_command_quietly(database: Database) -> None:
    process = start(database.dsn, "contract", "cli.count", "--import", JOBS)
    assert process.stdout is not None
    process.stdout.close()
    assert finished_unread(process) == Said(141, "", "")


# -- node --------------------------------------------------------------------------------------


def test_a_node_without_jobs_does_not_start(database: Database) -> None:
    said = run(database.dsn, "node")
    assert said.code == 2
    assert one_line(said).startswith("there are no jobs here: name a module that defines some")


def test_a_node_lists_every_wrong_setting(database: Database) -> None:
    wrong = {"ROWLOCK_BEAT_SECONDS": "-1", "ROWLOCK_DRAIN_SECONDS": "soon"}
    said = run(database.dsn, "node", "--import", JOBS, **wrong)
    assert said.code == 2
    assert "ROWLOCK_BEAT_SECONDS=-1" in one_line(said)
    assert "ROWLOCK_DRAIN_SECONDS=soon" in said.err


def test_a_node_drains_on_sigterm_and_exits_0(terminal: Terminal) -> None:
    with node(terminal.database.dsn, "n1") as process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "node_registered"
        (shown,) = terminal("nodes", "--json").document["nodes"]
        assert (shown["name"], shown["slots"], shown["pool"]) == ("n1", 2, "default")

        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0

    assert terminal("nodes").out == "no nodes: rowlock node starts one\n"
    assert "REMOVED, drained" in terminal("nodes", "--all").out
