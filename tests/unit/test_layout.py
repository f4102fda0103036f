"""The shape of the repository: what must never be where, and what no import may drag in."""

import ast
import json
import operator
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Folders of particular machines. They creep in through pasted output and break for everybody else.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|farm|root|home/[a-z]+|Users/\w+)/")


def tracked_files(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def loaded_by(statement: str, modules: Iterable[str]) -> list[str]:
    """Those of the modules that are loaded after a statement in a fresh interpreter."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(set(modules) & set(json.loads(ended.stdout.splitlines()[-1])))


def test_operator_is_the_standard_library() -> None:
    # With operator/__init__.py `python -m anything` at the root dies inside `collections`.
    assert not (ROOT / "operator" / "__init__.py").exists()
    seen = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert seen == operator.__file__


WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "gmtime", "localtime", "fromtimestamp"}


def test_no_wall_clock_of_a_node_takes_part_in_coordination() -> None:
    """All times in the database are the database's, taken in the statement that needs them; a node measures
    durations by its monotonic clock. (Reported as ShedLock#132 and #231, quartznet PR#3515: an expiry from a clock
    that was read before a pause, or on another machine.)"""
    read = [
        (path.name, node.lineno)
        for part in ("protocol", "db", "runtime")
        for path in (ROOT / "node" / "rowlock" / part).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS
        if isinstance(node.value, ast.Name) and node.value.id in {"time", "datetime", "date"}
    ]
    assert [name for name, _ in read] == ["heartbeat.py"], "which only shows how far it is off"
    assert "datetime" not in (ROOT / "node" / "rowlock" / "db" / "store.py").read_text()


def test_packages_hold_no_tests() -> None:
    # pytest would put a fake `operator` into sys.modules for a test below operator/.
    strays = [
        path.relative_to(ROOT)
        for package in ("node", "operator")
        for pattern in ("**/test_*.py", "**/*_test.py", "**/conftest.py")
        for path in (ROOT / package).glob(pattern)
    ]
    assert strays == []


def test_no_test_folder_is_named_after_a_standard_module() -> None:
    folders = {path.name for path in (ROOT / "tests").rglob("*") if path.is_dir()}
    assert folders & sys.stdlib_module_names == set()


def test_every_folder_of_tests_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    missing = [path.relative_to(ROOT) for path in folders if not (path / "__init__.py").exists()]
    assert missing == []


@pytest.mark.parametrize("package", ["node/rowlock", "operator/rowlock_operator"])
def test_packages_ship_their_types(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def test_no_file_knows_the_machine_that_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        if path.suffix not in {".lock", ".xz", ".png"}
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked_files("*.py")
        if (source := path.read_text()).strip() and not ast.get_docstring(ast.parse(source))
    ]
    assert silent == []


def test_importing_rowlock_is_light() -> None:
    heavy = ["kopf", "kubernetes", "aiohttp", "yaml", "rich", "jsonschema", "prometheus_client"]
    assert loaded_by("import rowlock", heavy) == []


def test_no_module_of_rowlock_needs_kubernetes() -> None:
    # A worker's image has none of these, so a stray import would only break there.
    import_everything = (
        "import importlib, pkgutil, rowlock\n"
        "for module in pkgutil.walk_packages(rowlock.__path__, 'rowlock.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)"
    )
    heavy = ["kopf", "kubernetes", "aiohttp", "yaml", "rowlock_operator"]
    assert loaded_by(import_everything, heavy) == []
