"""The exception tree: exit codes, messages, and what author code cannot swallow by accident."""

import pickle

import pytest

import rowlock
from rowlock import errors
from rowlock.errors import ContractError, NotFound, RetryLater, SettingsError, UsageError


@pytest.mark.parametrize(
    "error, code",
    [
        (rowlock.RowlockError, 1),
        (rowlock.JobDefinitionError, 2),
        (rowlock.ContractError, 2),
        (rowlock.SettingsError, 2),
        (rowlock.UsageError, 2),
        (rowlock.SchemaMismatch, 2),
        (rowlock.Refused, 2),
        (rowlock.NotFound, 2),
        (rowlock.Unavailable, 5),
    ],
)
def test_each_error_carries_the_exit_code_of_its_command(
    error: type[rowlock.RowlockError], code: int
) -> None:
    assert error.exit_code == code


def test_a_broad_except_does_not_swallow_what_ends_an_attempt() -> None:
    for error in (rowlock.LeaseLost, rowlock.Stopped):
        assert not issubclass(error, Exception)


def test_a_contract_error_names_payload_path_and_problem() -> None:
    error = ContractError("parameters", "$.month", "expected int, got str '3'")
    assert str(error) == "parameters $.month: expected int, got str '3'"
    assert error.path == "$.month"


def test_a_settings_error_lists_every_problem() -> None:
    assert str(SettingsError(["a is wrong"])) == "a is wrong"
    assert str(SettingsError(["a", "b"])) == "2 settings are wrong:\n- a\n- b"


def test_not_found_suggests_near_names() -> None:
    near = errors.near_names("setle", ["flights.settle", "settle", "payout"])
    assert str(NotFound("job", "setle", near)).startswith("there is no job 'setle'; did you mean")
    assert near[0] == "settle"
    assert str(NotFound("job", "x")) == "there is no job 'x'"


@pytest.mark.parametrize("seconds", [-1, 31_536_001, float("nan"), float("inf"), True, "60", None])
def test_a_delay_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="0 to 31536000 seconds"):
        RetryLater(seconds)


def test_a_delay_is_kept_in_seconds() -> None:
    assert RetryLater(90).seconds == 90.0
    assert str(RetryLater(0.5)) == "try again in 0.5 s"


@pytest.mark.parametrize(
    "error",
    [
        ContractError("slice", "$", "is empty"),
        SettingsError(["a"]),
        NotFound("job", "x", ("y",)),
        rowlock.Fail("because"),
        RetryLater(3),
    ],
)
def test_errors_survive_a_process_pool_of_the_author(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
