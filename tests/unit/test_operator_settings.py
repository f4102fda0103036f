"""The operator's settings are checked together and never print a password."""

import json

import pytest

from rowlock.errors import SettingsError
from rowlock_operator import __version__
from rowlock_operator.__main__ import main
from rowlock_operator.settings import Settings

GOOD = {
    "ROWLOCK_DSN": "postgresql://rowlock:very-secret@db.example/app",
    "ROWLOCK_CLUSTER": "eu-1",
    "ROWLOCK_NAMESPACES": "billing, reports,",
}


def test_good_settings_are_read() -> None:
    settings = Settings.from_environment(GOOD)

    assert settings.cluster == "eu-1"
    assert settings.namespaces == {"billing", "reports"}
    assert settings.dsn == GOOD["ROWLOCK_DSN"]


def test_no_namespaces_mean_the_whole_cluster() -> None:
    settings = Settings.from_environment({**GOOD, "ROWLOCK_NAMESPACES": " "})

    assert settings.namespaces == frozenset()
    assert settings.describe()["namespaces"] == "all"


def test_every_mistake_is_listed_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({"ROWLOCK_CLUSTER": "EU_1", "ROWLOCK_NAMESPACES": "ok,-no,No"})

    assert len(caught.value.problems) == 4
    text = str(caught.value)
    for expected in ("ROWLOCK_DSN", "'EU_1'", "'-no'", "'No'"):
        assert expected in text


@pytest.mark.parametrize(
    "dsn",
    ["host=db very-secret", "postgresql://u:very-secret@db:port:/x?bad=1", "nonsense=very-secret"],
)
def test_a_wrong_connection_string_is_refused_without_being_shown(dsn: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**GOOD, "ROWLOCK_DSN": dsn})

    assert "ROWLOCK_DSN" in str(caught.value)
    assert "very-secret" not in str(caught.value)


def test_the_command_prints_settings_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)

    assert main(["--check-settings"]) == 0

    shown = capsys.readouterr().out
    assert "very-secret" not in shown
    assert json.loads(shown)["dsn"]["host"] == "db.example"


def test_the_command_says_what_is_wrong_and_exits_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in GOOD:
        monkeypatch.delenv(name, raising=False)

    assert main(["--check-settings"]) == 2

    assert "ROWLOCK_CLUSTER is not set" in capsys.readouterr().err


def test_the_command_knows_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"rowlock-operator {__version__}"
