"""The pre-check of payloads: what jsonb would refuse or change never gets there."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock import jsontext
from rowlock.errors import ContractError
from rowlock.jsontext import DEPTH, check_json

LIMIT = 10_000


def check(raw: str | bytes, max_bytes: int = LIMIT) -> str:
    return check_json(raw, "slice", max_bytes)


def refusal(raw: str | bytes, max_bytes: int = LIMIT) -> str:
    with pytest.raises(ContractError) as caught:
        check(raw, max_bytes)
    return str(caught.value)


ORDINARY = [
    '{"a":1,"b":[true,false,null,"x"]}',
    '"\\\\u0000 is six characters here"',
    '"\\ud83d\\ude00"',
    '"😀 é"',
    "[1.50,0.0,-0.5,1.0]",
    "9223372036854775807",
    "-9223372036854775808",
    "9007199254740993",
    "0.10000000000000001",
    "1.7976931348623157",
    ' { "spaced" : [ 1 , 2 ] } ',
    '"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["',
    "[" * DEPTH + "]" * DEPTH,
]


@pytest.mark.parametrize("raw", ORDINARY)
def test_ordinary_text_passes_unchanged(raw: str) -> None:
    assert check(raw) == raw
    assert check(raw.encode()) == raw


@pytest.mark.parametrize(
    "raw, text",
    [
        ("1e2", "100.0"),
        ("1E400e"[:3], "10000.0"),
        ("1e22", "10000000000000000000000.0"),
        ("-1.5e-7", "-0.00000015"),
        ("1.5e1", "15.0"),
        ("0e7", "0.0"),
        ("-0", "0"),
        ("-0.0", "0.0"),
        ("-0e5", "0.0"),
        ('{"1e5":1e5,"x":"1e5 \\" 1e6"}', '{"1e5":100000.0,"x":"1e5 \\" 1e6"}'),
    ],
)
def test_numbers_are_written_as_jsonb_keeps_them(raw: str, text: str) -> None:
    assert check(raw) == text


@pytest.mark.parametrize(
    "raw, message",
    [
        ("", "slice $: is empty; JSON is expected"),
        (" \n", "slice $: is empty; JSON is expected"),
        ('{"a":', "slice $: is not JSON: Expecting value (line 1, column 6)"),
        ("1 2", "slice $: is not JSON: Extra data (line 1, column 3)"),
        ("007", "slice $: is not JSON: Extra data (line 1, column 2)"),
        ("'a'", "slice $: is not JSON: Expecting value (line 1, column 1)"),
        ('"a\x00b"', "slice $: is not JSON: Invalid control character at (line 1, column 3)"),
        (b'"\xff"', "slice $: is not UTF-8 (byte 1)"),
        ("NaN", "slice $: NaN is no JSON; use null or a number"),
        ('{"loss":[1,-Infinity]}', "slice $.loss[1]: -Infinity is no JSON; use null or a number"),
        (
            '["\\u0000"]',
            "slice $[0]: contains the NUL character, which PostgreSQL cannot store; remove it",
        ),
        (
            '{"a":{"\\u0000b":1}}',
            (
                "slice $.a: has a field whose name contains the NUL character, "
                "which PostgreSQL cannot store; remove it"
            ),
        ),
        (
            '{"a b":"\\ud800"}',
            'slice $["a b"]: contains half of a surrogate pair (\\ud800), which is no character',
        ),
        (
            '"\udc00"',
            (
                "slice $: contains half of a surrogate pair (\\udc00), which is no character "
                "(character 1)"
            ),
        ),
        ('{"a":[{"b":1,"c":2,"b":1}]}', "slice $.a[0].b: is given twice; keep one"),
        ('{"a":1,"\\u0061":2}', "slice $.a: is given twice; keep one"),
        (
            "[9223372036854775808]",
            "slice $[0]: 9223372036854775808 does not fit into 64 bits; write it as a string",
        ),
        ("1e400", "slice $: 1e400 is beyond the range of a double; write it as a string"),
        ("-1e400", "slice $: -1e400 is beyond the range of a double; write it as a string"),
        ("1e-400", "slice $: 1e-400 is beyond the range of a double; write it as a string"),
        (
            "1e99999999999999999999",
            "slice $: 1e99999999999999999999 is beyond the range of a double; write it as a string",
        ),
        (
            "0.1000000000000000055511151231257827",
            (
                "slice $: 0.1000000000000000055511151231257827 has more digits than a double keeps; "
                "write it as a string"
            ),
        ),
        ("1" * 401, "slice $: is a number of 401 characters; at most 400 are allowed"),
        ("[" * 33 + "]" * 33, "slice $" + "[0]" * 32 + ": is nested deeper than 32 levels"),
        (
            '{"a":' * 40 + "1" + "}" * 40,
            "slice $" + ".a" * 32 + ": is nested deeper than 32 levels",
        ),
    ],
)
def test_what_jsonb_refuses_or_changes_is_refused_with_its_path(
    raw: str | bytes, message: str
) -> None:
    assert refusal(raw) == message


@pytest.mark.parametrize("levels", [1_000, 5_000, 100_000])
def test_depth_is_refused_however_deep(levels: int) -> None:
    # How deep Python's own parser goes depends on its version.
    assert refusal("[" * levels + "]" * levels, 200_000).endswith("is nested deeper than 32 levels")


def test_the_size_is_counted_in_bytes_without_white_space_between_tokens() -> None:
    assert refusal('"ééé"', 7) == "slice $: is 8 bytes long; at most 7 are allowed"
    compact = json.dumps(list(range(100)), separators=(",", ":"))
    spaced = json.dumps(list(range(100)), indent=2)  # jsonb prints spaces as well
    assert check(spaced, len(compact)) == spaced
    assert "bytes long" in refusal(spaced, len(compact) - 1)


def test_white_space_inside_strings_counts() -> None:
    assert (
        refusal(json.dumps(" " * 100), 50) == "slice $: is 102 bytes long; at most 50 are allowed"
    )


def test_a_number_that_grows_when_written_out_counts_as_it_is_stored() -> None:
    raw = json.dumps([1e300] * 30)
    assert len(raw) < 300
    assert refusal(raw, 300) == "slice $: is 9150 bytes long; at most 300 are allowed"


storable = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(storable, max_size=20),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(
            st.text(storable, max_size=8),
            below,
            max_size=4,
        )
    ),
    max_leaves=20,
)


def exactly(value: Any) -> str:
    """A text that two values share only if they are the same, to the type and the last bit."""
    return json.dumps(value) if not isinstance(value, float) else repr(value)


@given(json_values, st.booleans())
def test_accepted_values_come_back_exactly(value: Any, ascii_only: bool) -> None:
    text = check(json.dumps(value, ensure_ascii=ascii_only), 1_000_000)
    assert exactly(json.loads(text)).replace("-0.0", "0.0") == exactly(value).replace("-0.0", "0.0")
    assert check(text, 1_000_000) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_double_is_kept_to_the_last_bit(number: float) -> None:
    text = check(repr(number))
    assert "e" not in text
    assert float(text) == number
    assert isinstance(json.loads(text), float)


@given(st.text(max_size=300) | st.text('[]{}",:\\u0d8 \n1e-.tfnN', max_size=60))
def test_the_quick_look_and_the_closer_look_agree(raw: str) -> None:
    """The quick look may only say yes to what the closer look has nothing against."""
    if jsontext._is_ordinary(raw):
        assert jsontext._first_problem(raw) == ("", "")
        assert check(raw) == raw
        return
    try:
        check(raw)
    except ContractError:
        return
    # What was refused by the quick look alone is unusual, but right: Python reads it, too.
    json.loads(raw)


@pytest.mark.parametrize("piece", ['"', '"\\', "\\", "[", '{"a":', '"a', "1", "-", "\n", "[{", "é"])
def test_no_text_takes_long(piece: str) -> None:
    raw = (piece * 300_000)[:262_144]
    began = time.process_time()
    with pytest.raises(ContractError):
        check(raw, 262_144)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    "parts, path",
    [
        ([], "$"),
        (["lines", 3, "unit price"], '$.lines[3]["unit price"]'),
        (["año", "número total", "\ud800\n"], '$.año["número total"]["\\ud800\\n"]'),
        (["x" * 200, ""], "$." + "x" * 100 + '…[""]'),
    ],
)
def test_a_path_is_readable(parts: list[str | int], path: str) -> None:
    assert jsontext.path_text(parts) == path
