"""The operator's settings are checked together and never print a password."""

import json
from pathlib import Path

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
    wrong = {
        "ROWLOCK_CLUSTER": "EU_1",
        "ROWLOCK_NAMESPACES": "ok,-no,No",
        "ROWLOCK_SYNC_SECONDS": "0",
        "ROWLOCK_RESYNC_SECONDS": "often",
        "ROWLOCK_HTTP_PORT": "80800",
        "ROWLOCK_ALLOW_POD_TEMPLATE": "perhaps",
        "ROWLOCK_LOG_FORMAT": "xml",
        "ROWLOCK_SWEEP_SECOND": "30",
    }
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(wrong)

    assert len(caught.value.problems) == 10
    text = str(caught.value)
    for expected in ("ROWLOCK_DSN", "'EU_1'", "'-no'", "'No'", *list(wrong)[2:]):
        assert expected in text
    assert "did you mean ROWLOCK_SWEEP_SECONDS?" in text


def test_what_is_not_set_has_its_default() -> None:
    settings = Settings.from_environment(GOOD)

    assert (settings.sync_seconds, settings.resync_seconds) == (2.0, 60.0)
    assert (settings.sweep_seconds, settings.stale_seconds) == (30.0, 30.0)
    assert (settings.http_port, settings.allow_pod_template) == (8080, True)
    assert settings.pools_file is None


def test_what_is_set_counts() -> None:
    settings = Settings.from_environment(
        {
            **GOOD,
            "ROWLOCK_SYNC_SECONDS": "0.5",
            "ROWLOCK_HTTP_PORT": "0",
            "ROWLOCK_ALLOW_POD_TEMPLATE": "False",
            "ROWLOCK_POOLS_FILE": "/etc/rowlock/pools.yaml",
            "ROWLOCK_LOG_FORMAT": "human",
        }
    )

    assert settings.sync_seconds == 0.5
    assert settings.http_port == 0
    assert not settings.allow_pod_template
    assert settings.pools_file == Path("/etc/rowlock/pools.yaml")
    assert settings.log_format == "human"


def test_the_connection_string_may_be_in_a_file_that_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "dsn"
    path.write_text("host=db password=first-one\n")
    env = {**GOOD, "ROWLOCK_DSN": "", "ROWLOCK_DSN_FILE": str(path)}

    settings = Settings.from_environment(env)
    assert settings.connection_string() == "host=db password=first-one"
    path.write_text("host=db password=very-secret")
    assert settings.connection_string() == "host=db password=very-secret"
    assert "very-secret" not in json.dumps(settings.describe())

    path.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        settings.connection_string()


@pytest.mark.parametrize("text", ["", "nonsense=very-secret"])
def test_a_file_without_a_connection_string_is_named_and_not_shown(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "dsn"
    path.write_text(text)

    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**GOOD, "ROWLOCK_DSN": "", "ROWLOCK_DSN_FILE": str(path)})

    assert f"ROWLOCK_DSN_FILE={path}" in str(caught.value)
    assert "very-secret" not in str(caught.value)


def test_two_connection_strings_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="both set"):
        Settings.from_environment({**GOOD, "ROWLOCK_DSN_FILE": str(tmp_path / "dsn")})


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
