"""What is recorded of an exception: text that the database can hold, whatever was raised.

Recording a failure must never fail itself. Author code raises exceptions with megabytes of text,
NUL characters, a `__str__` that raises, or thousands of causes, so everything here is bounded and
falls back to less.
"""

from __future__ import annotations

import json
import re
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["ERROR_BYTES", "clean_text", "describe_error"]

ERROR_BYTES: Final = 16_384
"""Longest description of an error, in bytes of JSON."""

_MESSAGE_BYTES: Final = 4_096
_SECTIONS: Final = 6
"""Exceptions shown of a chain or a group; a chain may have thousands."""
_PARTS: Final = 3
"""Exceptions shown of one group."""
_FRAMES: Final = 12
"""Frames shown of one traceback, the innermost ones."""

_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
_CUT: Final = "… [cut]"


def clean_text(text: str, max_bytes: int) -> str:
    """The text with what PostgreSQL cannot hold replaced by U+FFFD, cut to a number of bytes.

    The cut never divides a character, and cut text ends with `… [cut]`.
    """
    # A character has at least one byte, so what is sliced away here could not stay anyway.
    cleaned = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text[: max_bytes + 1])
    raw = cleaned.encode()
    if len(raw) <= max_bytes:
        return cleaned
    mark = _CUT if max_bytes >= len(_CUT.encode()) else ""
    return raw[: max_bytes - len(mark.encode())].decode(errors="ignore") + mark


def describe_error(error: BaseException) -> str:
    """An exception as JSON text: an object with type, message and traceback, at most 16 KiB."""
    try:
        document = {
            "type": _type_name(error),
            "message": clean_text(_message(error), _MESSAGE_BYTES),
            "traceback": clean_text("\n".join(_sections(error)), ERROR_BYTES),
        }
    except Exception:  # noqa: BLE001 - an exception class may break anything we ask it for
        document = {"type": "unknown", "message": "<the error cannot be shown>", "traceback": ""}
    return _fitted(document)


def _fitted(document: dict[str, str]) -> str:
    """The document as JSON, its longest texts cut as far as escapes and the limit require."""
    text = json.dumps(document, ensure_ascii=False)
    while len(text.encode()) > ERROR_BYTES:
        field = "traceback" if len(document["traceback"]) > 2_000 else "message"
        size = len(document[field].encode())
        document[field] = clean_text(document[field], size * 3 // 4)
        text = json.dumps(document, ensure_ascii=False)
    return text


def _sections(error: BaseException) -> Iterator[str]:
    """One paragraph for each exception: the error itself, its causes, the parts of a group."""
    waiting: deque[tuple[str, BaseException]] = deque([("", error)])
    seen: set[int] = set()
    while waiting and len(seen) < _SECTIONS:
        label, current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        message = clean_text(_message(current), _MESSAGE_BYTES)
        yield f"{label}{_type_name(current)}: {message}\n{_frames(current)}"
        if issubclass(type(current), BaseExceptionGroup):
            parts: Sequence[BaseException] = getattr(current, "exceptions", ())
            for number, part in enumerate(parts[:_PARTS], 1):
                waiting.append((f"Part {number} of {len(parts)}: ", part))
        cause = current.__cause__
        context = None if current.__suppress_context__ else current.__context__
        if cause is not None:
            waiting.append(("Caused by ", cause))
        elif context is not None:
            waiting.append(("Raised while handling ", context))
    if waiting:
        yield "… further exceptions are left out"


def _type_name(error: BaseException) -> str:
    cls = type(error)
    name = clean_text(f"{cls.__module__}.{cls.__qualname__}", 500)
    return name.removeprefix("builtins.")


def _message(error: BaseException) -> str:
    try:
        notes = getattr(error, "__notes__", ())
        return "\n".join([str(error), *map(str, notes)])
    except BaseException:  # noqa: BLE001 - author code runs here: it may raise SystemExit as well
        return "<the message cannot be shown: __str__ raised>"


def _frames(error: BaseException) -> str:
    try:
        return "".join(traceback.format_tb(error.__traceback__, -_FRAMES))
    except Exception:  # noqa: BLE001 - a module's loader may fail to give its source
        return ""
