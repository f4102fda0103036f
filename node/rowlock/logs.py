"""Logs: one line per event, as JSON for machines or plain for people.

Every line has a stable `event` and its facts as fields, given as `extra`:

    log.info("claimed 3 partitions", extra={"event": "partitions_claimed", "node": name})

The names of events are public; the message is for people and may change. Neither formatter ever
raises: a record that cannot be shown is shown as far as it can.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Final, TextIO

from rowlock.errors import UsageError
from rowlock.failure import clean_text, describe_error

__all__ = ["HumanFormatter", "JsonFormatter", "configure"]

_LINE_BYTES: Final = 65_536
"""Longest text of one field. Log collectors cut longer lines in the middle."""

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}
"""What every record has; all else came in as `extra`. `taskName` is there from Python 3.12 on."""

_OWN: Final = frozenset({"time", "level", "logger", "event", "message", "error"})


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, event, message, the fields, error."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", None),
            "message": _message(record),
        }
        for name, value in _fields(record).items():
            line[f"field_{name}" if name in _OWN else name] = value
        if record.exc_info and record.exc_info[1]:
            line["error"] = json.loads(describe_error(record.exc_info[1]))
        try:
            return json.dumps(line, ensure_ascii=False, allow_nan=False, default=_shown)
        except (TypeError, ValueError, RecursionError):
            return json.dumps(
                {k: v if v is None else _shown(v) for k, v in line.items()}, ensure_ascii=False
            )


class HumanFormatter(logging.Formatter):
    """One line for a terminal: time, level, message, fields; a traceback follows on its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        head = f"{clock} {record.levelname.lower():<7} {_one_line(_message(record))}"
        line = "  ".join(
            [head, *(f"{k}={_one_line(_shown(v))}" for k, v in _fields(record).items())]
        )
        if record.exc_info and record.exc_info[1]:
            error: dict[str, str] = json.loads(describe_error(record.exc_info[1]))
            line = "\n".join([line, *map(_one_line, error["traceback"].splitlines())])
        return line


def configure(
    form: str | None = None,
    stream: TextIO | None = None,
    level: int = logging.INFO,
) -> None:
    """Send all logs of this process to one stream, replacing what was configured before.

    Args:
        form: "json", "human", or None: human if the stream is a terminal, otherwise json.
        stream: Where to; standard error by default.
        level: The least level that is shown.

    Raises:
        UsageError: There is no such form.
    """
    target: TextIO = stream or sys.stderr
    kinds = {"json": JsonFormatter, "human": HumanFormatter}
    chosen = form or ("human" if target.isatty() else "json")
    if chosen not in kinds:
        raise UsageError(f"log format {chosen!r}: use json or human")
    handler = logging.StreamHandler(target)
    handler.setFormatter(kinds[chosen]())
    logging.basicConfig(handlers=[handler], level=level, force=True)
    logging.captureWarnings(capture=True)


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _message(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 - a wrong format string must not lose the event
        text = f"{record.msg!r} with arguments that do not fit"
    return clean_text(text, _LINE_BYTES)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _shown(value: object) -> str:
    try:
        return clean_text(str(value), _LINE_BYTES)
    except Exception:  # noqa: BLE001 - author code: a __str__ that raises
        return f"<{type(value).__name__} that cannot be shown>"


def _one_line(text: str) -> str:
    """The text without line breaks and terminal escapes, which would forge other lines."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
