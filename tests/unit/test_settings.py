"""Settings: read once, validated together, every mistake named at once."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock.db.connect import parameters_of
from rowlock.errors import SettingsError, Unavailable
from rowlock.settings import Settings


def problems_of(env: dict[str, str], **overrides: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(env, **overrides)
    return caught.value.problems


def test_the_defaults_are_those_of_the_design() -> None:
    settings = Settings.from_environment({})
    assert (settings.beat_seconds, settings.unreachable_seconds) == (1, 5)
    assert (settings.removal_grace_seconds, settings.lease_margin_seconds) == (5, 1)
    assert (settings.drain_seconds, settings.cancel_seconds, settings.poll_seconds) == (30, 10, 10)
    assert settings.removal_seconds == 10
    assert settings.lease_seconds == 9


def test_values_come_from_the_environment_and_the_command_line_wins() -> None:
    env = {"ROWLOCK_DRAIN_SECONDS": "7.5", "ROWLOCK_POLL_SECONDS": "3"}
    settings = Settings.from_environment(env, poll_seconds=4.0, cancel_seconds=None)
    assert settings.drain_seconds == 7.5
    assert (settings.poll_seconds, settings.cancel_seconds) == (4.0, 10.0)


def test_evidence_is_a_switch() -> None:
    assert Settings().evidence
    assert not Settings.from_environment({"ROWLOCK_EVIDENCE": "Off"}).evidence
    assert problems_of({"ROWLOCK_EVIDENCE": "no"}) == ["ROWLOCK_EVIDENCE=no must be on or off"]


def test_an_empty_variable_counts_as_not_set() -> None:
    assert Settings.from_environment({"ROWLOCK_BEAT_SECONDS": " "}) == Settings()


def test_what_ended_is_kept_for_days_or_for_ever() -> None:
    settings = Settings.from_environment(
        {"ROWLOCK_RETENTION_COMPLETED_DAYS": "Never", "ROWLOCK_RETENTION_EVENTS_DAYS": "0.5"}
    )
    assert settings.retention_completed_days is None
    assert settings.retention_failed_days == 90
    assert settings.retention_events_days == 0.5


def test_every_mistake_is_listed_at_once() -> None:
    problems = problems_of(
        {
            "ROWLOCK_BEAT_SECONDS": "2",
            "ROWLOCK_DRAIN_SECONDS": "-1",
            "ROWLOCK_RECYCLE_ATTEMPTS": "1.5",
            "ROWLOCK_POLL_SECONDS": "nan",
            "ROWLOCK_CANCEL_SECONDS": "soon",
            "ROWLOCK_LOG_FORMAT": "xml",
            "ROWLOCK_RETENTION_EVENTS_DAYS": "always",
        }
    )
    assert problems == [
        "ROWLOCK_CANCEL_SECONDS=soon must be a number of seconds",
        "ROWLOCK_RETENTION_EVENTS_DAYS=always must be a number of days, or never",
        "ROWLOCK_RECYCLE_ATTEMPTS=1.5 must be a whole number, 0 or more",
        "ROWLOCK_DRAIN_SECONDS=-1.0 must be from 0 to 86400 seconds",
        "ROWLOCK_POLL_SECONDS=nan must be from 0 to 86400 seconds",
        "ROWLOCK_LOG_FORMAT=xml must be json or human",
        "ROWLOCK_UNREACHABLE_SECONDS=5 must be at least 3 times ROWLOCK_BEAT_SECONDS=2",
    ]


@pytest.mark.parametrize(
    "env, problem",
    [
        ({"ROWLOCK_BEAT_SECONDS": "0"}, "ROWLOCK_BEAT_SECONDS=0.0 must be above 0"),
        ({"ROWLOCK_LEASE_MARGIN_SECONDS": "0"}, "ROWLOCK_LEASE_MARGIN_SECONDS=0.0 must be above 0"),
        (
            {"ROWLOCK_LEASE_MARGIN_SECONDS": "5"},
            "ROWLOCK_LEASE_MARGIN_SECONDS=5 must be less than ROWLOCK_REMOVAL_GRACE_SECONDS=5",
        ),
        (
            {"ROWLOCK_REMOVAL_GRACE_SECONDS": "1.9"},
            "ROWLOCK_REMOVAL_GRACE_SECONDS=1.9 must be at least 2 times ROWLOCK_BEAT_SECONDS=1",
        ),
        (
            {"ROWLOCK_POLL_SECONDS": "0.5"},
            "ROWLOCK_POLL_SECONDS=0.5 must be at least ROWLOCK_BEAT_SECONDS=1",
        ),
        (
            {"ROWLOCK_RETENTION_FAILED_DAYS": "0"},
            "ROWLOCK_RETENTION_FAILED_DAYS=0.0 must be above 0 and at most 36500 days, or never",
        ),
        (
            {"ROWLOCK_BEAT_SECOND": "2"},
            "ROWLOCK_BEAT_SECOND is no setting; did you mean ROWLOCK_BEAT_SECONDS?",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(env: dict[str, str], problem: str) -> None:
    """Reported as pgqueuer#430 and #323, airflow#16573: a heartbeat and a threshold that do not fit together are
    taken, and healthy long work is picked a second time."""
    assert problems_of(env) == [problem]


def test_variables_of_others_are_left_alone() -> None:
    # Kubernetes makes these for a Service named rowlock.
    env = {"ROWLOCK_PORT": "tcp://10.0.0.1:80", "ROWLOCK_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert Settings.from_environment(env) == Settings()


def test_times_of_a_tenth_of_a_second_fit_together_in_spite_of_rounding() -> None:
    settings = Settings.from_environment(
        {
            "ROWLOCK_BEAT_SECONDS": "0.1",
            "ROWLOCK_UNREACHABLE_SECONDS": "0.3",
            "ROWLOCK_REMOVAL_GRACE_SECONDS": "0.2",
            "ROWLOCK_LEASE_MARGIN_SECONDS": "0.1",
            "ROWLOCK_POLL_SECONDS": "0.1",
        }
    )
    assert settings.lease_seconds == pytest.approx(0.4)


def test_settings_made_directly_are_validated_as_well() -> None:
    with pytest.raises(SettingsError, match="3 times ROWLOCK_BEAT_SECONDS=2"):
        Settings(beat_seconds=2)


def test_an_unknown_override_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="beats"):
        Settings.from_environment({}, beats=1)


def test_a_password_does_not_show_in_a_log_line() -> None:
    settings = Settings(dsn="postgresql://u:secret@h/d", work_dsn="postgresql://u:secret@h/d")
    assert "secret" not in repr(settings)


seconds = st.floats(min_value=0.01, max_value=100, allow_nan=False)


@given(beat=seconds, unreachable=seconds, grace=seconds, margin=seconds)
def test_whatever_is_accepted_leaves_a_lease_of_more_than_two_beats(
    beat: float, unreachable: float, grace: float, margin: float
) -> None:
    try:
        settings = Settings(
            beat_seconds=beat,
            unreachable_seconds=unreachable,
            removal_grace_seconds=grace,
            lease_margin_seconds=margin,
            poll_seconds=100,
        )
    except SettingsError:
        return
    assert settings.lease_seconds > 2 * beat
    assert 0 < settings.lease_seconds < settings.removal_seconds


def test_a_connection_string_may_be_in_a_file_that_is_read_at_each_connection(
    tmp_path: Path,
) -> None:
    file = tmp_path / "dsn"
    file.write_text("host=db password=first\n")
    env = {"ROWLOCK_DSN_FILE": str(file), "ROWLOCK_WORK_DSN": "host=db"}

    settings = Settings.from_environment(env)
    assert (settings.dsn, settings.work_dsn) == (f"@{file}", "host=db")
    assert parameters_of(settings.dsn or "")["password"] == "first"
    file.write_text("host=db password=second\n")
    assert parameters_of(settings.dsn or "")["password"] == "second"
    assert Settings.from_environment(env, dsn="host=other").dsn == "host=other"
    assert problems_of({**env, "ROWLOCK_DSN": "host=db"}) == [
        "ROWLOCK_DSN and ROWLOCK_DSN_FILE are both set: give one of them"
    ]
    file.unlink()
    with pytest.raises(Unavailable, match="cannot be read: No such file"):
        parameters_of(settings.dsn or "")
    (problem,) = problems_of(env)
    assert problem == f"ROWLOCK_DSN_FILE={file} cannot be read: No such file or directory"
