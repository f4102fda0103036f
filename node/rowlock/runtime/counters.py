"""How far an attempt says it is, and which items it has left out: for people, and bounded.

Skipped items are part of the checkpoint: an attempt that goes on from one goes on counting there, so
that each counts once however often its chunk is repeated.
"""

from __future__ import annotations

import json
from typing import Any, Final

from rowlock.failure import clean_text, describe_error

SKIPS_KEPT: Final = 10
"""So many skipped items of a partition are kept with their errors; the rest are counted."""
ITEM_BYTES: Final = 200
ERROR_BYTES: Final = 500


class Counters:
    """Of one attempt."""

    def __init__(self, skipped: int = 0, first: list[dict[str, str]] | None = None) -> None:
        self.done: int | None = None
        self.total: int | None = None
        self.skipped = skipped
        """Items left out, by the attempts before as well."""
        self._first = first or []
        # What a checkpoint has kept need not be in a report yet: its attempt may have died at once.
        self._reported = 0
        self._told = 0

    @classmethod
    def of_checkpoint(cls, skips: Any) -> Counters:
        """Those that a checkpoint has kept.

        Args:
            skips: What `kept` wrote; None for a checkpoint without.

        Raises:
            KeyError, TypeError, ValueError: It did not write that.
        """
        if skips is None:
            return cls()
        first = [{"item": str(one["item"]), "error": str(one["error"])} for one in skips["first"]]
        return cls(int(skips["count"]), first[:SKIPS_KEPT])

    def skip(self, item: object, error: BaseException | str) -> None:
        """Count an item; keep the first few."""
        self.skipped += 1
        if len(self._first) < SKIPS_KEPT:
            self._first.append({"item": _shown(item), "error": _reason(error)})

    @property
    def is_reported(self) -> bool:
        """Whether all skipped items are in a report that was answered, or there are none."""
        return self.skipped == self._reported

    def reported(self) -> None:
        """Note that the last report was answered."""
        self._reported = self.skipped

    def kept(self) -> str | None:
        """What a checkpoint keeps, as JSON text; None: nothing was skipped."""
        if not self.skipped:
            return None
        return json.dumps({"count": self.skipped, "first": self._first})

    def report(self, attempt: int) -> str:
        """All of it as JSON text, for people; numbered, so that none that comes late takes the place of a later one.

        Args:
            attempt: The number of the attempt at its partition.
        """
        self._told += 1
        told: dict[str, Any] = {"done": self.done, "total": self.total}
        found = {name: value for name, value in told.items() if value is not None}
        if self.skipped:
            found |= {"skipped": self.skipped, "skips": self._first}
        return json.dumps(found | {"told": [attempt, self._told]})


def _shown(item: object) -> str:
    try:
        return clean_text(item if isinstance(item, str) else repr(item), ITEM_BYTES)
    except Exception:  # noqa: BLE001 - an item that cannot be shown is likely the one to be skipped
        return f"<{type(item).__name__} that cannot be shown>"


def _reason(error: BaseException | str) -> str:
    if isinstance(error, str):
        return clean_text(error, ERROR_BYTES)
    document = json.loads(describe_error(error))
    message = f": {document['message']}" if document["message"] else ""
    return clean_text(f"{document['type']}{message}", ERROR_BYTES)
