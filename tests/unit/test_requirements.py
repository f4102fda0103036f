"""The files that images install from say what uv.lock says: one set of versions for all."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def uv() -> str:
    """As the Makefile finds it."""
    found = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    assert Path(found).exists(), "make setup brings uv"
    return found


@pytest.mark.parametrize(
    "file,extra",
    [
        ("node/requirements.txt", None),
        ("operator/requirements.txt", "operator"),
        ("manifests/demo/requirements.txt", "embedded"),
    ],
)
def test_an_image_installs_what_the_lock_file_names(file: str, extra: str | None) -> None:
    ended = subprocess.run(
        [
            *(uv(), "export", "--quiet", "--frozen", "--no-dev", "--no-emit-project"),
            *("--no-annotate", "--no-header", *(("--extra", extra) if extra else ())),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (ROOT / file).read_text() == ended.stdout, f"make requirements brings {file} up to date"
