"""How jobs are found: entry points, modules, and every way in which a module can be wrong."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import rowlock
from rowlock import registry
from rowlock.errors import JobDefinitionError, NotFound
from rowlock.registry import Registry
from tests.unit.typechecks.settle import Settle

JOB = """
    import rowlock

    class {cls}(rowlock.Job[int, int, int]):
        name = "{name}"
        def partition(self, params, cluster):
            yield params
        def process(self, part, ctx):
            return part
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Writes modules into an empty current directory, and forgets them afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", ".")])
    before = set(sys.modules)

    def write_module(name: str, source: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    yield write_module
    for name in set(sys.modules) - before:
        del sys.modules[name]


Write = Callable[[str, str], None]


def mistake(*imports: str) -> str:
    with pytest.raises(JobDefinitionError) as caught:
        Registry().load(imports)
    return str(caught.value)


def job(cls: str, name: str) -> str:
    return JOB.format(cls=cls, name=name)


def test_a_module_of_the_current_directory_is_found(write: Write) -> None:
    write("jobs.py", job("First", "first") + job("Second", "second"))
    found = Registry().load(["jobs"])
    assert found.names == ("first", "second")
    assert found.get("first") is found.get("first")
    assert type(found.get("first")).__name__ == "First"


def test_the_parts_of_a_package_count_and_what_it_merely_uses_does_not(write: Write) -> None:
    write("base.py", job("Other", "other") + "    class Base(rowlock.Job[int, int, int]): ...\n")
    write("package/__init__.py", "from package.part import First\nfrom base import Other, Base")
    write("package/part.py", job("First", "first"))
    assert Registry().load(["package"]).names == ("first",)


def test_all_names_what_counts_whatever_its_module(write: Write) -> None:
    write("base.py", job("Other", "other"))
    write("jobs.py", "from base import Other\n__all__ = ['Other']")
    assert Registry().load(["jobs"]).names == ("other",)


def test_one_class_can_be_named(write: Write) -> None:
    write("jobs.py", job("First", "first") + job("Second", "second"))
    assert Registry().load(["jobs:Second"]).names == ("second",)
    assert mistake("jobs:Third") == (
        "--import jobs:Third: Third is no job of module jobs; its jobs are: First, Second"
    )


def test_a_class_that_is_found_twice_is_one_job(write: Write) -> None:
    write("jobs.py", job("First", "first"))
    assert Registry().load(["jobs", "jobs:First", "jobs"]).names == ("first",)


def test_two_classes_of_one_name_are_refused_and_both_are_named(write: Write) -> None:
    write("one.py", job("First", "same"))
    write("two.py", job("Second", "same"))
    assert mistake("one", "two") == (
        "two jobs are named 'same': job class one.First and job class two.Second; rename one"
    )


@pytest.mark.parametrize(
    "source, message",
    [
        ("1 / 0", "module jobs cannot be imported: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "module jobs cannot be imported: SystemExit: 3"),
        ("x =", "module jobs cannot be imported: SyntaxError: invalid syntax (jobs.py, line 1)"),
        (
            "import no_such_library",
            (
                "module jobs cannot be imported: ModuleNotFoundError: "
                "No module named 'no_such_library'"
            ),
        ),
        ("x = 1", "module jobs defines no job; it needs a subclass of rowlock.Job with a name."),
        ("import rowlock", "module jobs defines no job"),
        (
            "import rowlock\nclass A(rowlock.Job[int, int, int]): name = 'A'",
            "job class jobs.A: name = 'A' must be 1 to 100",
        ),
    ],
)
def test_a_module_that_is_wrong_is_named_with_the_cause(
    write: Write, source: str, message: str
) -> None:
    write("jobs.py", source)
    assert mistake("jobs").startswith(f"--import jobs: {message}")


def test_a_module_that_is_not_there_is_named_with_the_remedy(write: Write) -> None:
    write("package/__init__.py", "")
    assert mistake("nowhere") == (
        "--import nowhere: there is no module 'nowhere'; install its package, or run in the "
        "directory that holds it"
    )
    assert "there is no module 'package.part'" in mistake("package.part")
    assert mistake("package/part.py") == (
        "--import package/part.py: name the module, not the file: package.part"
    )


def test_a_job_that_cannot_be_made_or_written_is_refused(write: Write) -> None:
    write(
        "jobs.py", job("First", "first") + "        def __init__(self, address): self.a = address\n"
    )
    assert mistake("jobs") == (
        "job class jobs.First: cannot be made: TypeError: First.__init__() missing 1 required "
        "positional argument: 'address'; give __init__ no required arguments"
    )
    write("other.py", job("Second", "second").replace("[int, int, int]", "[int, type, int]"))
    message = mistake("other")
    assert message.startswith("job class other.Second: the type of the slice, <class 'type'>")


def entry_point(value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name="any", value=value, group=registry.GROUP)


def test_installed_packages_offer_jobs_by_entry_points(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("installed.py", job("First", "first") + job("Second", "second"))
    offered = [entry_point("installed:First"), entry_point("installed:Second")]

    def entry_points(*, group: str) -> list[metadata.EntryPoint]:
        assert group == "rowlock.jobs"
        return offered

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    assert Registry().load().names == ("first", "second")
    offered[:] = [entry_point("gone")]
    with pytest.raises(JobDefinitionError, match="entry point any: there is no module 'gone'"):
        Registry().load()


def test_an_unknown_job_is_answered_with_near_names() -> None:
    found = Registry([Settle])
    with pytest.raises(NotFound, match=r"no job 'flights.setle'; did you mean 'flights.settle'\?"):
        found.get("flights.setle")
    with pytest.raises(NotFound, match=r"no job 'zzz'$"):
        found.definition("zzz")


def test_a_definition_holds_all_that_follows_from_the_class() -> None:
    found = Registry([Settle]).definition("flights.settle")
    assert found.policy == Settle.policy()
    assert found.contract_hash == "028c951381938c2e"
    assert sorted(found.schemas) == ["parameters", "result", "slice", "summary"]
    assert found.parameters.decode('{"year":2026,"month":1}').month == 1
    assert dict(Registry([Settle]).definitions)["flights.settle"].name == "flights.settle"


def test_a_class_without_a_name_is_no_job() -> None:
    base: Any = rowlock.Job[int, int, int]
    with pytest.raises(JobDefinitionError, match="has no name, so it is abstract"):
        registry.define(type("Base", (base.__origin__,), {}))


def test_a_console_script_finds_modules_as_python_m_does(write: Write, tmp_path: Path) -> None:
    write("jobs.py", job("First", "first"))
    script = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        "from rowlock.registry import Registry; print(*Registry().load(['jobs']).names)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout, done.stderr) == ("first\n", "")
    # Python was told not to trust the current directory: then we do not either.
    command.insert(1, "-P")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "there is no module 'jobs'" in done.stderr
