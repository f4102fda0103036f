"""What a contract accepts, PostgreSQL keeps: a pair assertion between contract.py and jsonb."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rowlock import contract
from rowlock.contract import Codec, check_json, clean_text, describe_error
from rowlock.errors import ContractError
from tests.support.postgres import Cluster
from tests.unit.test_contract import EVERYTHING, Everything, everything
from tests.unit.test_failure import NASTY, messages_around_the_limit

Connection = psycopg.Connection[tuple[Any, ...]]
LIMIT = contract.RESULT_BYTES
ANY = Codec[Any](Any, "result", LIMIT)

# One connection serves all examples of a test: jsonb keeps nothing between them.
many = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def db(postgres: Cluster) -> Iterator[Connection]:
    with psycopg.connect(postgres.admin_dsn, autocommit=True) as connection:
        yield connection


def stored(db: Connection, text: str) -> str:
    """The text after a stay in a jsonb column."""
    row = db.execute("SELECT %s::jsonb::text", [text]).fetchone()
    assert row is not None
    return str(row[0])


def canonical(text: str) -> str:
    """The text without what JSON does not care for: white space and the order of fields.

    Numbers stay as they are written.
    """
    tree = json.loads(text, parse_int=lambda n: f"int {n}", parse_float=lambda n: f"float {n}")
    return json.dumps(tree, sort_keys=True)


numbers = st.integers() | st.floats() | st.decimals(allow_nan=False).map(str).map(float)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=12),
    lambda below: (
        st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=6), below, max_size=3)
    ),
    max_leaves=12,
)


@many
@given(value=values)
@example(value=[1e22, 1e23, 5e-324, 1.7976931348623157e308, -0.0, 2**53 + 1, 2**63 - 1, 1.0])
@example(value={"\U0010ffff": "\x01\x1f\x7f\u2028", "": '"\\/'})
def test_an_encoded_value_is_kept_number_by_number(db: Connection, value: Any) -> None:
    try:
        text = ANY.encode(value)
    except ContractError:
        return
    back = stored(db, text)
    assert canonical(back) == canonical(text)
    assert ANY.decode(back) == value
    # The size counts as it was written, whatever white space jsonb adds.
    assert check_json(back, "result", len(text.encode())) == back


@many
@given(value=everything)
def test_a_typed_value_comes_back_equal(db: Connection, value: Everything) -> None:
    assert EVERYTHING.decode(stored(db, EVERYTHING.encode(value))) == value


json_texts = st.one_of(
    st.text(max_size=60).map(json.dumps),
    st.from_regex(r"\A-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?\Z"),
    st.from_regex(r'\A\{"a":(1|"\\u[0-9a-fA-F]{4}(\\u[dD][c-fC-F][0-9a-f]{2})?")(,"[ab]":2)?\}\Z'),
)


@many
@given(raw=json_texts)
def test_text_that_the_pre_check_accepts_is_neither_refused_nor_altered(
    db: Connection, raw: str
) -> None:
    try:
        text = check_json(raw, "parameters", LIMIT)
    except ContractError:
        return
    assert canonical(stored(db, text)) == canonical(text)


@pytest.mark.parametrize(
    "raw", ['{"a":"\\u0000"}', '"\\ud800"', "NaN", "[Infinity]", "1e200000", "{'a':1}", '{"a":1'],
)  # fmt: skip
def test_what_jsonb_refuses_never_gets_there(db: Connection, raw: str) -> None:
    with pytest.raises(psycopg.Error):
        stored(db, raw)
    with pytest.raises(ContractError):
        check_json(raw, "parameters", LIMIT)


def test_what_jsonb_would_alter_never_gets_there(db: Connection) -> None:
    assert stored(db, '{"a":1,"a":2}') == '{"a": 2}'
    with pytest.raises(ContractError, match="is given twice"):
        check_json('{"a":1,"a":2}', "parameters", LIMIT)
    assert stored(db, "1e22") == "1" + "0" * 22  # an integer now, and too wide for one
    assert stored(db, check_json("1e22", "parameters", LIMIT)) == "1" + "0" * 22 + ".0"
    assert stored(db, "-0.0") == "0.0"
    assert check_json("-0.0", "parameters", LIMIT) == "0.0"


@pytest.mark.parametrize("error", NASTY, ids=range(len(NASTY)))
def test_every_description_of_an_error_can_be_stored(db: Connection, error: BaseException) -> None:
    text = describe_error(error)
    assert json.loads(stored(db, text)) == json.loads(text)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=messages_around_the_limit())
def test_an_error_around_the_limit_can_be_stored(db: Connection, message: str) -> None:
    text = describe_error(ValueError(message))
    assert json.loads(stored(db, text)) == json.loads(text)


json_numbers = st.from_regex(r"\A-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?\Z")


@many
@given(raw=json_numbers | json_numbers.map(json.dumps))
@example(raw="9007199254740993")
@example(raw="1.0")
@example(raw="1e2")
@example(raw="1e400")
@example(raw="2147483648")
@example(raw="-0.0")
@example(raw="007")
@example(raw='"007"')
def test_a_number_arrives_as_the_type_says_or_not_at_all(db: Connection, raw: str) -> None:
    """From the text of a parameter through the database to the function: int, float and str each take what is
    theirs, digit by digit, and refuse the rest; jsonb alone would make 100 of 1e2 and 401 digits of 1e400."""
    taken = {tp for tp in (int, float, str) if arrives(db, tp, raw)}
    assert taken <= {int, float} or taken == {str}
    if int in taken:
        assert re.fullmatch(r"-?[0-9]+", raw)


def arrives(db: Connection, tp: type, raw: str) -> bool:
    """Whether a type takes this text; if so, the function gets the same value of the same type."""
    codec = Codec[Any](tp, "parameters", LIMIT)
    try:
        value = codec.decode(raw)
    except ContractError:
        return False
    assert value == tp(json.loads(raw))
    back = codec.decode(stored(db, codec.encode(value)))
    assert type(back) is type(value) is tp
    assert back == value
    return True


@many
@given(text=st.text(max_size=50), size=st.integers(min_value=0, max_value=60))
def test_cleaned_text_can_be_stored(db: Connection, text: str, size: int) -> None:
    cleaned = clean_text(text, size)
    row = db.execute("SELECT %s::text, octet_length(%s::text)", [cleaned, cleaned]).fetchone()
    assert row == (cleaned, len(cleaned.encode()))
