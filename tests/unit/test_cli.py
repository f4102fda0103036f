"""Command lines before any command runs: help, near misses, documents, and what is not imported."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rowlock.cli.main import COMMANDS, main, parser_of
from rowlock.errors import UsageError
from tests.unit.test_layout import loaded_by

ROOT = Path(__file__).parents[2]
COMMANDS_DOCUMENT = (ROOT / "docs" / "commands.md").read_text()

Captured = pytest.CaptureFixture[str]


def section(command: str) -> str:
    """What docs/commands.md says about one command."""
    _, _, rest = COMMANDS_DOCUMENT.partition(f"\n## {command}\n")
    return rest.partition("\n## ")[0]


def options_of(command: str) -> set[str]:
    """The long options that a command takes, beside --help."""
    taken: set[str] = set()
    for action in parser_of(command)._actions:
        taken.update(option for option in action.option_strings if option.startswith("--"))
    return taken - {"--help"}


# -- help and mistakes -------------------------------------------------------------------------


def test_without_a_command_the_help_goes_to_standard_error_and_the_exit_code_is_2(
    capsys: Captured,
) -> None:
    assert main([]) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: rowlock COMMAND" in said.err


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_with_what_it_is_for(words: list[str], capsys: Captured) -> None:
    assert main(words) == 0

    said = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", said, re.MULTILINE)


def test_the_version_is_that_of_the_distribution(capsys: Captured) -> None:
    import rowlock

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rowlock {rowlock.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("beside", [[], ["--no-such-option"]])
def test_every_command_shows_its_help_also_beside_a_mistake(
    command: str, beside: list[str], capsys: Captured
) -> None:
    assert main([command, *beside, "--help"]) == 0

    said = capsys.readouterr().out
    assert said.startswith(f"usage: rowlock {command}")
    assert "exit codes:" in said


@pytest.mark.parametrize(
    "words, says",
    [
        (["lanch"], "there is no command 'lanch'; did you mean launch?"),
        (["stat"], "there is no command 'stat'; did you mean status?"),
        (["zzz"], "there is no command 'zzz': rowlock --help lists them"),
        (
            ["--dsn", "x", "nodes"],
            "option --dsn comes before a command: write rowlock COMMAND --dsn",
        ),
        (["status"], "required: EXECUTION; rowlock status --help shows what it takes"),
        (["status", "1", "--wach"], "rowlock status does not take --wach; did you mean --watch?"),
        (["status", "1", "2"], "rowlock status does not take 2; see rowlock status --help"),
        (["nodes", "--limit", "0"], "--limit 0 must be a whole number from 1 to 10000"),
        (["nodes", "--limit", "ten"], "--limit ten must be a whole number from 1 to 10000"),
        (["nodes", "--limit"], "argument --limit: expected one argument; rowlock nodes --help"),
        (["executions", "--status", "runing"], "--status runing is unknown; did you mean RUNNING"),
        (["partitions", "1", "--status", "xyz"], "--status xyz must be one of PENDING, CLAIMED,"),
        (["cancel", "1", "--reason", " "], "--reason ' ' must have 1 to 2000 bytes"),
        (["launch", "j", "--instance", "x" * 513], "must have 1 to 512 bytes"),
        (["launch", "j", "--instance", "a\udc80"], "must be valid UTF-8"),
        (["launch", "j", "--priority", "1.5"], "--priority 1.5 must be a whole number from"),
        (["node", "--slots", "0"], "--slots 0 must be a whole number from 1 to 1024"),
        (["node", "--http", "99999"], "--http 99999 must be a whole number from 0 to 65535"),
        (["node", "--log-format", "xml"], "invalid choice: 'xml'"),
        (["launch", "j", "--parallelism", "0"], "--parallelism 0 must be a whole number from 1 to"),
        (["launch", "j", "--deadline", "1.5"], "--deadline 1.5 must be a whole number from 1 to"),
        (["set", "1", "--parallelism", "all"], "from 1 to 1000000, or none"),
        (["set", "1", "--deadline", "0"], "--deadline 0 must be a whole number from 1 to"),
        (["set", "1"], "rowlock set changes nothing without --priority, --parallelism or"),
        (["resolve", "1", "k"], "one of the arguments --completed --retry is required"),
        (["resolve", "1", "k", "--retry", "--completed"], "not allowed with argument"),
        (["resolve", "1", "k", "--retry", "--result", "1"], "--result needs --completed"),
        (["resolve", "1", "k", "--completed", "--force"], "--force needs --retry"),
        (["master", "1"], "EXECUTION '1' must be a whole id: rowlock executions --json"),
        (["purge"], "deletes nothing without --completed-days, --failed-days or --events-days"),
        (["purge", "--failed-days", "soon"], "from 0 to 36500, or never"),
        (["suspend", "1", "--reason", ""], "--reason '' must have 1 to 2000 bytes"),
        (["dev", "--nodes", "17"], "--nodes 17 must be a whole number from 1 to 16"),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_remedy(
    words: list[str], says: str, capsys: Captured
) -> None:
    assert main(words) == 2

    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("rowlock: ")
    assert said.err.count("\n") == 1
    assert says in said.err


def test_options_are_not_abbreviated() -> None:
    with pytest.raises(UsageError, match="did you mean --detach"):
        parser_of("launch").parse_args(["j", "--detac"])


# -- documents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_in_the_document_with_an_example(command: str) -> None:
    text = section(command)

    assert f"$ rowlock {command}" in text, f"docs/commands.md has no example of {command}"
    missing = [one for one in sorted(options_of(command)) if not re.search(rf"`{one}\b", text)]
    assert missing == [], f"docs/commands.md does not say what {missing} of {command} means"
    assert f"| [{command}](#{command}) | {COMMANDS[command].summary} |" in COMMANDS_DOCUMENT


@pytest.mark.parametrize("command", COMMANDS)
def test_the_document_names_no_option_that_a_command_does_not_take(command: str) -> None:
    table = re.findall(r"^\| (`--.*?) \|", section(command), re.MULTILINE)
    named = {option for cell in table for option in re.findall(r"`(--[\w-]+)", cell)}
    assert named <= options_of(command)


def test_examples_in_the_document_are_command_lines_that_parse() -> None:
    import shlex

    examples = re.findall(r"^\$ rowlock (.+)$", COMMANDS_DOCUMENT, re.MULTILINE)
    assert len(examples) >= len(COMMANDS)
    for example in examples:
        command, *words = shlex.split(example.partition(" | ")[0])
        assert isinstance(parser_of(command).parse_args(words), argparse.Namespace)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json_and_all_but_dev_a_dsn(command: str) -> None:
    assert "--json" in options_of(command)
    assert ("--dsn" in options_of(command)) == (command != "dev")


# -- what is loaded ----------------------------------------------------------------------------

HEAVY = ("psycopg", "pydantic", "rich", "prometheus_client", "jsonschema", "asyncio", "kopf")


@pytest.mark.parametrize("words", [["--help"], ["status", "--help"], ["launch", "--help"], ["zz"]])
def test_help_and_mistakes_load_nothing_heavy(words: list[str]) -> None:
    program = (
        "import contextlib, io\n"
        "from rowlock.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        f"    main({words!r})"
    )
    assert loaded_by(program, HEAVY) == []


def test_the_modules_of_reading_commands_load_neither_pydantic_nor_rich() -> None:
    modules = [
        "executions",
        "status",
        "partitions",
        "nodes",
        "events",
        "explain",
        "jobs",
        "migrate",
    ]
    modules += ["cancel", "suspend", "resume", "set", "abandon", "purge"]
    program = "\n".join(f"import rowlock.cli.{module}" for module in modules)
    assert loaded_by(program, ("pydantic", "rich", "prometheus_client", "jsonschema")) == []


def test_python_m_rowlock_is_the_command() -> None:
    said = subprocess.run(
        [
            *(sys.executable, "-m", "rowlock", "contract", "cli.count", "--json"),
            *("--import", "tests.support.cli_jobs"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert json.loads(said)["job"] == "cli.count"
