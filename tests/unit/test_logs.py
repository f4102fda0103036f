"""Log lines: one event per line, whatever was logged."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from rowlock import logs
from rowlock.errors import UsageError


@pytest.fixture(autouse=True)
def root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []  # basicConfig would close those of pytest
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(form: str) -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    logs.configure(form, stream)
    return logging.getLogger("rowlock.test"), stream


def line_of(stream: io.StringIO) -> dict[str, Any]:
    (line,) = stream.getvalue().splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_json_line_has_its_event_and_its_fields() -> None:
    log, stream = logged("json")
    log.info("claimed %d", 3, extra={"event": "partitions_claimed", "node": "n1", "count": 3})
    line = line_of(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "rowlock.test",
        "event": "partitions_claimed",
        "message": "claimed 3",
        "node": "n1",
        "count": 3,
    }


class Broken:
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("value", [float("nan"), object, {1, 2}, {("a",): 1}, b"\xff", "\ud800"])
def test_a_field_that_is_no_json_is_shown_all_the_same(value: object) -> None:
    log, stream = logged("json")
    log.info("x", extra={"event": "e", "value": value})
    assert isinstance(line_of(stream)["value"], str)


def test_a_field_that_cannot_be_shown_loses_only_itself() -> None:
    log, stream = logged("json")
    log.info("x", extra={"event": "e", "value": Broken()})
    assert line_of(stream)["value"] == "<Broken that cannot be shown>"


def test_a_field_cannot_replace_what_every_line_has() -> None:
    log, stream = logged("json")
    log.info("x", extra={"event": "e", "time": "never", "level": "none"})
    line = line_of(stream)
    assert line["level"] == "info"
    assert (line["field_time"], line["field_level"]) == ("never", "none")


def test_an_error_is_part_of_its_line() -> None:
    log, stream = logged("json")
    try:
        raise ValueError("a\nb")
    except ValueError:
        log.exception("failed", extra={"event": "e"})
    error = line_of(stream)["error"]
    assert (error["type"], error["message"]) == ("ValueError", "a\nb")


@pytest.mark.parametrize("form", ["json", "human"])
def test_a_wrong_format_string_does_not_lose_the_event(form: str) -> None:
    log, stream = logged(form)
    log.info("%d of %d", 1, extra={"event": "e"})
    assert "with arguments that do not fit" in stream.getvalue()


def test_a_human_line_cannot_be_forged_or_clear_the_terminal() -> None:
    log, stream = logged("human")
    log.warning("a\nb\x1b[2J", extra={"event": "e", "node": "x\ny"})
    (line,) = stream.getvalue().splitlines()
    assert "warning" in line
    assert r"a\nb\x1b[2J" in line
    assert r"node=x\ny" in line


def test_a_human_line_is_followed_by_its_traceback() -> None:
    log, stream = logged("human")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("failed")
    lines = stream.getvalue().splitlines()
    assert lines[1] == r"ValueError: \x1b[2J"
    assert "\x1b" not in stream.getvalue()


def test_without_a_form_a_file_gets_json() -> None:
    stream = io.StringIO()
    logs.configure(None, stream)
    logging.getLogger("x").info("y")
    assert line_of(stream)["message"] == "y"


def test_configuring_again_does_not_double_the_lines() -> None:
    log, stream = logged("json")
    logs.configure("json", stream)
    log.info("once")
    assert line_of(stream)["message"] == "once"


def test_warnings_are_logged() -> None:
    _, stream = logged("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "old" in line_of(stream)["message"]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(UsageError, match="use json or human"):
        logs.configure("xml", io.StringIO())
