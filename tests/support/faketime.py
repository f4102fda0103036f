"""Wall clocks that are wrong, by libfaketime: of a node, or of a PostgreSQL server.

Only what people call the time is false. The clocks that measure how long something takes go on as
they are, as on a machine whose wall clock somebody has set.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rowlock.embedded import Binaries
from tests.support import tools

_LIBRARY: Final = "faketime/libfaketimeMT.so.1"


class WallClock:
    """A wall clock that a test sets, for the processes that get its `environment`.

    with WallClock() as clock:
        node = fleet.node("one", **clock.environment)
        clock.set("+1h")
    """

    def __init__(self, offset: str = "+0") -> None:
        """Prepare it.

        Args:
            offset: How far it is from the truth, for example "-1h" or "+90" (seconds).
        """
        self._offset = offset
        self.folder = Path()

    def __enter__(self) -> Self:
        library = tools.library(_LIBRARY)
        self.folder = Path(tempfile.mkdtemp(prefix="clock-"))
        # PostgreSQL runs as another user where the tests run as root.
        self.folder.chmod(0o755)
        Path(shutil.copy(library, self.folder)).chmod(0o755)
        self.set(self._offset)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def set(self, offset: str) -> None:
        """Set it, as `date --set` does: everybody who lives by it reads the new time at once."""
        new = self.folder / "offset.new"
        new.write_text(f"{offset}\n")
        new.chmod(0o644)
        new.replace(self.folder / "offset")  # nobody reads half of it

    @property
    def environment(self) -> dict[str, str]:
        """For a process that shall live by this clock, and for its children."""
        return {
            "LD_PRELOAD": str(self.folder / Path(_LIBRARY).name),
            "FAKETIME_TIMESTAMP_FILE": str(self.folder / "offset"),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }

    def binaries(self, real: Binaries) -> Binaries:
        """PostgreSQL's programs, with a server that lives by this clock."""
        folder = self.folder / "bin"
        folder.mkdir()
        for path in real.folder.iterdir():
            (folder / path.name).symlink_to(path)
        server = folder / "postgres"
        server.unlink()
        words = " ".join(f"{name}={value}" for name, value in self.environment.items())
        server.write_text(f'#!/bin/sh\n{words} exec {real.folder / "postgres"} "$@"\n')
        server.chmod(0o755)
        return dataclasses.replace(real, folder=folder)
