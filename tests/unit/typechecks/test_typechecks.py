"""mypy --strict and pyright accept the design's example and reject every mismatch, line by line."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = {"settle.py": "settle.py", "mismatches.py": "mismatches.py.txt"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies outside the project, so that the mismatches are no part of its own checks."""
    folder = tmp_path_factory.mktemp("typechecks")
    for name, source in FILES.items():
        shutil.copyfile(HERE / source, folder / name)
    return folder


def expected_errors() -> set[tuple[str, int]]:
    lines = (HERE / FILES["mismatches.py"]).read_text().splitlines()
    return {("mismatches.py", n) for n, line in enumerate(lines, 1) if line.endswith("# error")}


def errors(command: list[str], sources: Path) -> set[tuple[str, int]]:
    done = subprocess.run(
        [*command, *FILES], cwd=sources, capture_output=True, text=True, check=False
    )
    found = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) error", done.stdout)
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    return {(name, int(line)) for name, line in found}


def test_mypy_accepts_the_example_and_rejects_the_mismatches(sources: Path) -> None:
    cache = ROOT / ".mypy_cache" / "typechecks"
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}"]
    (sources / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT / 'node'}\n")
    assert errors(command, sources) == expected_errors()


def test_pyright_accepts_the_example_and_rejects_the_mismatches(sources: Path) -> None:
    (sources / "pyrightconfig.json").write_text(
        f'{{"typeCheckingMode": "strict", "extraPaths": ["{ROOT / "node"}"]}}'
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    assert errors(command, sources) == expected_errors()
