"""What is recorded of an exception, whatever was raised: recording never fails."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowlock.failure import ERROR_BYTES, clean_text, describe_error


class Silent(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Unnamed(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no cause")


class BadNotes(Exception):
    __notes__: Any = 7


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class WeirdMeta(type):
    @property
    def __module__(cls) -> Any:  # type: ignore[override]
        raise RuntimeError("no module")


class Weird(Exception, metaclass=WeirdMeta):
    pass


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - all kinds are raised
        return caught


def deep_chain(length: int) -> Exception:
    error = ValueError(0)
    for number in range(1, length):
        above = ValueError(number)
        above.__cause__ = error
        error = above
    return error


def deep_stack(depth: int) -> BaseException:
    def fall(left: int) -> None:
        if left:
            fall(left - 1)
        raise ValueError("at the bottom")

    try:
        fall(depth)
    except ValueError as error:
        return error
    raise AssertionError("unreachable")


def circular() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


NASTY: list[BaseException] = [
    ValueError("x" * 5_000_000),
    ValueError("é😀" * 10_000),
    ValueError("\x01" * 20_000),
    ValueError('"\\' * 20_000),
    ValueError("a\0b\ud800"),
    Silent(),
    Unnamed(),
    BadNotes(),
    Unpicklable("x"),
    Weird("x"),
    deep_chain(3000),
    circular(),
    deep_stack(200),
    ExceptionGroup("g", [ValueError(n) for n in range(1000)]),
    ExceptionGroup("g", [ExceptionGroup("h", [Silent()])]),
    KeyError("k"),
    SystemExit(1),
    KeyboardInterrupt(),
    type("X" * 10_000, (Exception,), {})("long name"),
]


@pytest.mark.parametrize("error", NASTY, ids=range(len(NASTY)))
def test_any_exception_can_be_recorded(error: BaseException) -> None:
    text = describe_error(raised(error))
    assert len(text.encode()) <= ERROR_BYTES
    assert "\0" not in text
    assert "\\u0000" not in text
    document = json.loads(text)
    assert list(document) == ["type", "message", "traceback"]
    assert all(isinstance(part, str) for part in document.values())
    assert document["type"]


pieces = st.sampled_from(["a", "é", "e\u0301", "😀", "\0", "\x01", '"', "\\", "\ud800", "\n"])


@st.composite
def messages_around_the_limit(draw: st.DrawFn) -> str:
    """Texts whose bytes, as they are or escaped, are nearly as many as are kept, or a few more."""
    pattern = "".join(draw(st.lists(pieces, min_size=1, max_size=6)))
    size = len(pattern.encode(errors="replace"))
    target = draw(st.sampled_from([ERROR_BYTES // 6, ERROR_BYTES // 2, ERROR_BYTES]))
    return "start " + pattern * (max(0, target + draw(st.integers(-200, 200))) // size)


@settings(max_examples=200, deadline=None)
@given(message=messages_around_the_limit())
def test_a_message_around_the_limit_is_cut_and_never_lost(message: str) -> None:
    """(The update that records a failure fails itself elsewhere, and the job stays running for ever: reported as
    spring-batch#2940, #3368, #2283, #4309, #854.)"""
    document = described(ValueError(message))
    assert document["type"] == "ValueError"
    assert document["message"].startswith("start ")
    assert document["message"] == clean_text(message, len(message) * 4) or document[
        "message"
    ].endswith("… [cut]")


def described(error: BaseException) -> dict[str, str]:
    found: dict[str, str] = json.loads(describe_error(raised(error)))
    return found


def test_type_message_and_the_line_that_raised_are_told() -> None:
    document = described(ValueError("no such day"))
    assert (document["type"], document["message"]) == ("ValueError", "no such day")
    assert "raise error" in document["traceback"]
    assert described(Unpicklable("x"))["type"] == f"{__name__}.Unpicklable"


def test_notes_belong_to_the_message() -> None:
    error = ValueError("no such day")
    error.add_note("partition 2026-02-30")
    assert described(error)["message"] == "no such day\npartition 2026-02-30"


def test_the_innermost_frames_are_kept() -> None:
    traceback = json.loads(describe_error(deep_stack(200)))["traceback"]
    assert "at the bottom" in traceback
    assert traceback.count("File ") <= 12


def test_causes_and_parts_follow_the_error() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    assert "Caused by KeyError: 'inner'" in described(error)["traceback"]
    group = described(ExceptionGroup("g", [ValueError("a"), ValueError("b")]))
    assert "Part 2 of 2: ValueError: b" in group["traceback"]
    context = ValueError("outer")
    context.__context__ = KeyError("inner")
    assert "Raised while handling KeyError" in described(context)["traceback"]
    context.__suppress_context__ = True
    assert "KeyError" not in described(context)["traceback"]
    assert described(deep_chain(3000))["traceback"].endswith("… further exceptions are left out")


def test_a_message_of_escapes_is_cut_and_not_lost() -> None:
    assert described(ValueError("\x01" * 20_000))["message"].startswith("\x01\x01")
    assert described(ValueError('"' * 20_000))["message"].startswith('""')


@given(st.text(max_size=200), st.integers(min_value=0, max_value=300))
def test_cut_text_fits_and_stays_text(text: str, size: int) -> None:
    cut = clean_text(text, size)
    assert len(cut.encode()) <= size
    assert "\0" not in cut
    if len(text.encode(errors="replace")) * 3 <= size:
        assert cut == text.replace("\0", "\ufffd")


@pytest.mark.parametrize(
    "text, size, cut",
    [
        ("héllo", 10, "héllo"),
        ("a\0b", 10, "a\ufffdb"),
        ("a\ud800", 10, "a\ufffd"),
        ("x" * 30, 20, "x" * 11 + "… [cut]"),
        ("é" * 30, 20, "é" * 5 + "… [cut]"),
        ("😀😀", 5, "😀"),
        ("abc", 0, ""),
    ],
)
def test_text_is_cut_between_characters_and_says_so(text: str, size: int, cut: str) -> None:
    assert clean_text(text, size) == cut


def test_five_megabytes_of_message_cost_little() -> None:
    error = raised(ValueError("é" * 5_000_000))
    began = time.process_time()
    describe_error(error)
    assert time.process_time() - began < 1.0
