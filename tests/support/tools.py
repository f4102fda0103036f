"""Programs and libraries that tests break things with: of this machine, or unpacked by make."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NoReturn

import pytest

FETCHED: Final = Path(__file__).parents[2] / ".tools" / "faults"
"""Where `make faults` unpacks Debian's packages."""

_LIBRARIES: Final = "usr/lib/*"


def program(name: str) -> Path:
    """The path of a program.

    Without it the test is skipped; on a build server it fails, so that nobody takes it for tested.
    """
    folders = [os.environ.get("PATH", os.defpath), "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        found = next((str(path) for path in FETCHED.glob(f"usr/*bin/{name}")), None)
    return Path(found) if found else _missing(name)


def library(name: str) -> Path:
    """The path of a shared library below a folder of libraries, for example "faketime/x.so.1".

    Without it the test is skipped; on a build server it fails.
    """
    for root in (Path("/"), FETCHED):
        for path in root.glob(f"{_LIBRARIES}/{name}"):
            return path
    return _missing(name)


def library_path() -> str:
    """What LD_LIBRARY_PATH must say for the programs that were unpacked."""
    return os.pathsep.join(str(path) for path in FETCHED.glob(_LIBRARIES))


def unavailable(reason: str) -> NoReturn:
    """Skip the test, since this machine cannot do it; on a build server it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def _missing(name: str) -> NoReturn:
    unavailable(f"{name} is missing: make faults brings it on Debian; else install it")
