"""The mounted pools file, read again when it changes. A file with a mistake changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import yaml

from rowlock.errors import SettingsError
from rowlock_operator.model import Pool
from rowlock_operator.pools import parse_pools

log = logging.getLogger(__name__)


class PoolFile:
    """The pools in a file, as they are now."""

    def __init__(self, path: Path | None) -> None:
        """Read the file.

        Args:
            path: The file; None means that there are no pools.
        """
        self._path = path
        self._text: str | None = None
        self.pools: Mapping[str, Pool] = {}
        """The pools, as they were when the file was last right."""
        self.problem = ""
        """What is wrong with the file, in one line; empty if nothing is."""
        self.refresh()

    def refresh(self) -> bool:
        """Read the file again.

        Returns:
            Whether the pools, or what is wrong with them, have changed.
        """
        if self._path is None:
            return False
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is no text"
            return self._wrong(f"cannot be read: {reason}")
        if text == self._text:
            return False
        self._text = text
        try:
            self.pools = parse_pools(yaml.safe_load(text))
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            return self._wrong(f"is no YAML (line {mark.line + 1})" if mark else "is no YAML")
        except SettingsError as error:
            return self._wrong(f"is wrong: {'; '.join(error.problems)}")
        self.problem = ""
        log.info(
            f"read the templates of {len(self.pools)} pools",
            extra={"event": "pools_read", "pools": sorted(self.pools)},
        )
        return True

    def _wrong(self, what: str) -> bool:
        problem = f"ROWLOCK_POOLS_FILE={self._path} {what}"
        if problem == self.problem:
            return False
        self.problem = problem
        log.error(problem, extra={"event": "pools_wrong"})
        return True
