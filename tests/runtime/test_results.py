"""Results that finish() reads travel in messages, and a message has a limit."""

import json

import pytest

from rowlock.runtime.channel import FRAME_BYTES_MAX, frame
from rowlock.runtime.masters import fitting_results
from rowlock.runtime.messages import Reply

Row = tuple[int, str, str | None]

LARGEST = 262_144


@pytest.mark.parametrize("text", ["x", "é", "\U0001f600", '\\"', "\\\\"])
def test_a_page_of_the_largest_results_fits_into_a_message(text: str) -> None:
    result = '"' + text * ((LARGEST - 2) // len(text.encode())) + '"'
    rows: list[Row] = [(n, "k" * 512, result) for n in range(500)]

    page = fitting_results(rows)

    assert 1 <= len(page) < 500
    assert page == rows[: len(page)]
    reply = Reply(request=1, ok=True, body=json.dumps(page))
    assert len(frame(reply)) < FRAME_BYTES_MAX


def test_a_page_of_small_results_is_not_cut() -> None:
    rows: list[Row] = [(n, f"key {n}", "1") for n in range(500)]
    assert fitting_results(rows) == rows


def test_an_empty_page_is_the_end() -> None:
    assert fitting_results([]) == []
