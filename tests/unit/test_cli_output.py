"""What commands print: tables, times, JSON, and errors in one line."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

import psycopg
import pytest

from rowlock.cli import failures, main, output, parsers
from rowlock.errors import (
    ContractError,
    JobDefinitionError,
    NotFound,
    Refused,
    RowlockError,
    SchemaMismatch,
    SettingsError,
    Unavailable,
    UsageError,
)

Captured = pytest.CaptureFixture[str]
NOW = datetime(2026, 11, 29, 17, 0, tzinfo=UTC)


# -- tables ------------------------------------------------------------------------------------


def test_columns_are_aligned_numbers_to_the_right_and_nothing_trails(capsys: Captured) -> None:
    output.print_table(
        ("NAME", "N", "NOTE"), [("a", 5, None), ("longer", 12345, "x")], empty="nothing"
    )

    assert capsys.readouterr().out == (
        "NAME        N  NOTE\n"
        "a           5  -\n"
        "longer  12345  x\n"
    )  # fmt: skip


def test_a_table_without_rows_says_so(capsys: Captured) -> None:
    output.print_table(("NAME",), [], empty="no nodes")
    assert capsys.readouterr().out == "no nodes\n"


def test_wide_characters_take_two_columns(capsys: Captured) -> None:
    output.print_table(("KEY", "X"), [("東京", "a"), ("été", "b")], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert [output.width(line.rpartition("  ")[0]) for line in lines] == [4, 4, 4]


def test_what_authors_write_cannot_steer_the_terminal() -> None:
    assert output.cell("a\x1b[31m\nb\u202e") == r"a\x1b[31m\nb\u202e"


def test_long_cells_are_cut_and_marked() -> None:
    shown = output.cell("x" * 100)
    assert len(shown) == output.CELL_MAX
    assert shown.endswith("…")


def test_fields_leave_out_what_is_not_known(capsys: Captured) -> None:
    output.print_fields({"status": "RUNNING", "ended": None, "by": "me"})
    assert capsys.readouterr().out == "status  RUNNING\nby      me\n"


# -- times -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0, "0.0 s"),
        (1.24, "1.2 s"),
        (9.96, "10.0 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (3660, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds: float, words: str) -> None:
    assert output.duration(seconds) == words


@pytest.mark.parametrize(
    "seconds, words", [(0.2, "now"), (12, "12 s ago"), (-5, "in 5.0 s"), (3600, "1 h ago")]
)
def test_ages_are_counted_by_the_clock_that_is_given(seconds: float, words: str) -> None:
    assert output.age(NOW - timedelta(seconds=seconds), NOW) == words


def test_times_are_local_and_iso(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        assert output.local(NOW) == "2026-11-29 22:30:00+05:30"
        assert output.with_age(NOW, NOW + timedelta(minutes=3)) == (
            "2026-11-29 22:30:00+05:30 (3 min ago)"
        )
    finally:
        monkeypatch.undo()
        time.tzset()


# -- JSON --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Thing:
    id: UUID
    at: datetime
    inner: object


def test_json_has_whole_ids_and_utc_times(capsys: Captured) -> None:
    output.print_json_line({"thing": Thing(UUID(int=1), NOW, {"é": [1.5, None]})})
    assert capsys.readouterr().out == (
        '{"thing": {"id": "00000000-0000-0000-0000-000000000001", '
        '"at": "2026-11-29T17:00:00+00:00", "inner": {"é": [1.5, null]}}}\n'
    )


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, line, code",
    [
        (UsageError("a=1 must be 2"), "a=1 must be 2", 2),
        (
            ContractError("parameters", "$.month", "expected int"),
            "parameters $.month: expected int",
            2,
        ),
        (SettingsError(["a is wrong", "b too"]), "2 settings are wrong: a is wrong; b too", 2),
        (JobDefinitionError("x.py: 1\nx.py: 2"), "x.py: 1; x.py: 2", 2),
        (SchemaMismatch("no schema: run rowlock migrate"), "no schema: run rowlock migrate", 2),
        (Refused("is running"), "is running", 2),
        (NotFound("job", "a", ["b"]), "there is no job 'a'; did you mean 'b'?", 2),
        (
            NotFound("job", "a"),
            (
                "there is no job 'a': rowlock jobs lists those there are, once a node has "
                "published them; --import MODULE takes a job from code"
            ),
            2,
        ),
        (
            NotFound("execution", "9"),
            "there is no execution '9': rowlock executions lists those there are",
            2,
        ),
        (Unavailable("refused\n\tIs it on?"), "refused; Is it on?", 5),
        (RowlockError("odd"), "odd", 1),
        (
            ValueError("x\x1b[2J"),
            r"unexpected ValueError: x\x1b[2J; set ROWLOCK_DEBUG=1 to see where it comes from",
            1,
        ),
        (
            psycopg.errors.InsufficientPrivilege("permission denied for function cancel"),
            (
                "permission denied for function cancel: log in as a member of rowlock_admin, who "
                "may do all of it (rowlock_operator may not resolve, abandon or purge, rowlock_reader may "
                "read, rowlock_node may run a node)"
            ),
            2,
        ),
        (psycopg.errors.UndefinedTable("no view"), "no view: run rowlock migrate", 2),
        (
            psycopg.errors.ReadOnlySqlTransaction("cannot execute"),
            "cannot execute: this server only reads; name the primary in --dsn or ROWLOCK_DSN",
            5,
        ),
        (
            psycopg.OperationalError("server closed"),
            "the connection to the database was lost: server closed; try again",
            5,
        ),
    ],
)
def test_every_error_is_one_line_with_its_exit_code(error: Exception, line: str, code: int) -> None:
    assert failures.explain(error) == (line, code)


def test_a_message_of_many_lines_is_cut() -> None:
    line = failures.one_line("\n".join(f"line {n}" for n in range(100)))
    assert line.endswith("line 11; and 88 more lines")


# -- the end of a command ----------------------------------------------------------------------


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], int]:
    """Runs a function as if it were the command `nodes`."""

    def run(function: Callable[[], int]) -> int:
        import rowlock.cli.nodes

        def call(_given: object) -> int:
            return function()

        monkeypatch.setattr(rowlock.cli.nodes, "run", call)
        return main.main([parsers.nodes.__name__])

    return run


def test_an_unexpected_error_shows_its_traceback_only_on_request(
    running: Callable[[Callable[[], int]], int],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> int:
        raise ZeroDivisionError("no")

    assert running(fail) == 1
    assert capsys.readouterr().err.count("\n") == 1

    monkeypatch.setenv("ROWLOCK_DEBUG", "1")
    assert running(fail) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.splitlines()[-1].startswith("rowlock: unexpected ZeroDivisionError: no")


def test_ctrl_c_ends_quietly(running: Callable[[Callable[[], int]], int], capsys: Captured) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert running(interrupt) == 130
    assert capsys.readouterr() == ("", "")
