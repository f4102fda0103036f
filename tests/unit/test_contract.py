"""Contracts: strict both ways, equal after a round trip, refused with the path.

ROWLOCK_PAYLOAD_MEGABYTES is the size of the largest payload that is refused (20); it takes eight times as much memory.
"""

from __future__ import annotations

import enum
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, computed_field, field_validator
from typing_extensions import TypedDict

import rowlock
from rowlock import contract
from rowlock.contract import Codec, check_against_schema, contract_hash
from rowlock.errors import ContractError, JobDefinitionError
from tests.unit.typechecks.settle import Day, Month, Settle, Settled, Summary

LIMIT = 262_144
LARGEST_MEGABYTES = int(os.environ.get("ROWLOCK_PAYLOAD_MEGABYTES") or 20)


def codec(tp: Any, what: str = "slice") -> Codec[Any]:
    return Codec(tp, what, LIMIT)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ContractError) as caught:
        call()
    return str(caught.value)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Lax(BaseModel):
    """Everything that its own configuration can loosen is loosened."""

    model_config = ConfigDict(extra="allow", strict=False, allow_inf_nan=True)
    number: int
    share: float = 0.5


@dataclass(frozen=True)
class Line:
    amount: Decimal
    tags: tuple[str, ...] = ()


class Extra(TypedDict, total=False):
    note: str
    parent: Extra


@dataclass
class Invoice:
    lines: list[Line]
    day: date
    lax: Lax
    extra: Extra = field(default_factory=Extra)
    colour: Colour = Colour.RED


INVOICE = Invoice(
    lines=[Line(Decimal("1.10"), ("a", "b"))],
    day=date(2026, 2, 3),
    lax=Lax(number=3),
    extra={"note": "x", "parent": {"note": "y"}},
    colour=Colour.BLUE,
)
INVOICE_TEXT = (
    '{"lines":[{"amount":"1.10","tags":["a","b"]}],"day":"2026-02-03",'
    '"lax":{"number":3,"share":0.5},"extra":{"note":"x","parent":{"note":"y"}},"colour":"blue"}'
)


# -- decode ------------------------------------------------------------------------------------


def test_models_dataclasses_and_typed_dicts_are_read_and_written() -> None:
    both = codec(Invoice)
    assert both.encode(INVOICE) == INVOICE_TEXT
    assert both.decode(INVOICE_TEXT) == INVOICE
    assert both.decode(INVOICE_TEXT.encode()) == INVOICE


@pytest.mark.parametrize(
    "old, new, message",
    [
        ('"number":3', '"number":"3"', "$.lax.number: expected int, got str '3'"),
        ('"number":3', '"number":3.0', "$.lax.number: expected int, got float 3.0"),
        ('"number":3', '"number":true', "$.lax.number: expected int, got bool True"),
        ('"number":3', '"number":null', "$.lax.number: expected int, got null"),
        ('"share":0.5', '"share":"0.5"', "$.lax.share: expected float, got str '0.5'"),
        ('"share":0.5', '"share":NaN', "$.lax.share: NaN is no JSON; use null or a number"),
        (
            '"share":0.5',
            '"shared":0.5',
            "$.lax.shared: is no known field; did you mean 'share'?",
        ),
        (
            '"note":"y"',
            '"zzz":1',
            "$.extra.parent.zzz: is no known field; the fields are: note, parent",
        ),
        (
            '"tags":["a","b"]',
            '"tgs":[]',
            "$.lines[0].tgs: is no known field; did you mean 'tags'?",
        ),
        ('"tags":["a","b"]', '"tags":["a",1]', "$.lines[0].tags[1]: expected str, got int 1"),
        ('"tags":["a","b"]', '"tags":{}', "$.lines[0].tags: expected a valid array, got dict {}"),
        (
            '"blue"',
            '"green"',
            "$.colour: expected 'red' or 'blue', got str 'green'",
        ),
        (
            ',"colour":"blue"',
            ',"colour":"blue","colour":"red"',
            "$.colour: is given twice; keep one",
        ),
    ],
)
def test_a_broken_contract_is_refused_with_its_path(old: str, new: str, message: str) -> None:
    raw = INVOICE_TEXT.replace(old, new)
    assert raw != INVOICE_TEXT
    assert refusal(lambda: codec(Invoice).decode(raw)) == f"slice {message}"


def test_several_mistakes_are_named_together() -> None:
    message = refusal(lambda: codec(Month, "parameters").decode('{"year":"x","mnth":1}'))
    assert message == (
        "parameters $.year: expected int, got str 'x'; also $.month: is required and missing; "
        "also $.mnth: is no known field; did you mean 'month'?"
    )


def test_mistakes_beyond_the_fourth_are_counted() -> None:
    message = refusal(lambda: codec(list[int]).decode('["a","b","c","d","e","f"]'))
    assert message.endswith("also $[3]: expected int, got str 'd'; and 2 more")


def test_the_members_of_a_union_are_no_part_of_the_path() -> None:
    message = refusal(lambda: codec(dict[str, int | list[int] | None]).decode('{"a":"x"}'))
    assert message == "slice $.a: expected int, got str 'x', or expected list, got str 'x'"


class Even(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number == 13:
            raise ZeroDivisionError("an accident in the author's validator")
        if number % 2:
            raise ValueError("must be even")
        return number


def test_an_authors_validator_speaks_in_its_own_words() -> None:
    assert refusal(lambda: codec(Even).decode('{"number":3}')) == (
        "slice $.number: must be even, got int 3"
    )


def test_a_validator_that_fails_is_a_broken_contract_too() -> None:
    assert refusal(lambda: codec(Even).decode('{"number":13}')) == (
        "slice $: is refused: ZeroDivisionError: an accident in the author's validator"
    )


@pytest.mark.parametrize("raw", ["2147483648", "9223372036854775807", "9007199254740993", "-1"])
def test_integers_of_64_bits_are_kept_exactly(raw: str) -> None:
    assert codec(int).decode(raw) == int(raw)
    assert codec(int).encode(int(raw)) == raw
    assert codec(Any).decode(raw) == int(raw)


def test_larger_integers_are_refused_both_ways() -> None:
    for both in (codec(int), codec(Any)):
        assert "does not fit into 64 bits" in refusal(partial(both.decode, str(2**63)))
        assert "does not fit into 64 bits" in refusal(partial(both.encode, 2**63))


@pytest.mark.parametrize("raw", ["1.0", "1e2", "3.5"])
def test_a_float_is_no_integer(raw: str) -> None:
    assert "expected int, got float" in refusal(lambda: codec(int).decode(raw))


def test_an_integer_is_a_float_where_a_float_is_expected() -> None:
    assert codec(float).decode("3") == 3.0
    assert codec(float).encode(3) == "3.0"


def test_a_bool_is_an_integer_as_python_has_it() -> None:
    assert codec(int).encode(True) == "1"


# -- encode ------------------------------------------------------------------------------------


class Cached(BaseModel):
    number: int
    _seen: int = PrivateAttr(default=0)

    @computed_field
    def double(self) -> int:
        return 2 * self.number


@dataclass(eq=False)
class WithoutEquality:
    number: int


def test_computed_and_private_fields_are_not_data() -> None:
    value = Cached(number=2)
    value._seen = 7
    assert codec(Cached).encode(value) == '{"number":2}'


def test_a_class_without_equality_is_compared_by_its_fields() -> None:
    assert codec(WithoutEquality).encode(WithoutEquality(1)) == '{"number":1}'


def circular() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = None  # type: ignore[assignment]


class Incomparable(BaseModel):  # noqa: PLW1641 - it is never hashed
    number: int

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


POISON: list[tuple[Any, str]] = [
    (object(), "cannot be written as JSON"),
    (Hostile(), "Hostile cannot be written as JSON"),
    (print, "cannot be written as JSON"),
    ({1, 2}, "is set {1, 2}, which would come back as list [1, 2]"),
    (b"x", "is bytes b'x', which would come back as str 'x'"),
    (b"\xff", "cannot be written as JSON"),
    (Decimal("1.5"), "which would come back as str '1.5'"),
    (datetime(2026, 1, 1, tzinfo=UTC), "which would come back as str"),
    (circular(), "is nested deeper than 32 levels, or refers to itself"),
    ((number for number in range(3)), "which would come back as list [0, 1, 2]"),
    ((1, 2), "is tuple (1, 2), which would come back as list [1, 2]"),
    ({1: "x"}, "is dict {1: 'x'}, which would come back as dict {'1': 'x'}"),
    (float("nan"), "$: nan is no JSON; use None or a number"),
    ({"a": [1.0, float("inf")]}, "$.a[1]: inf is no JSON; use None or a number"),
    ({"loss": None, "b": float("nan")}, "$.b: nan is no JSON"),
    ("a\0b", "contains the NUL character"),
    ({"a\0": 1}, "has a field whose name contains the NUL character"),
    (["\ud800"], "$[0]: contains half of a surrogate pair (\\ud800)"),
    ({"a": Settled(flights=1, cents=2)}, "$.a: is Settled(flights=1, cents=2), which would"),
    ("x" * LIMIT, "is 262146 bytes long; at most 262144 are allowed"),
]


@pytest.mark.parametrize("value, message", POISON, ids=range(len(POISON)))
def test_a_value_that_would_be_lost_or_changed_is_never_written(value: Any, message: str) -> None:
    assert message in refusal(lambda: codec(Any, "result").encode(value))


@pytest.mark.parametrize(
    "tp, value",
    [
        (bool, 1),
        (int, 3.0),
        (int, "3"),
        (int, None),
        (None, 0),
        (str, b"x"),
        (float | None, float("nan")),
        (list[int], (1, 2)),
        (tuple[int, int], [1, 2]),
        (Settled, {"flights": 1, "cents": 2}),
        (Settled, Month(year=1, month=2)),
        (Settled, Settled.model_construct(flights="many", cents=2)),
        (Settled, Settled.model_construct(cents=2)),
        (Line, Line("1.10")),  # type: ignore[arg-type]
        (Extra, {"note": 1}),
        (Extra, {"other": "x"}),
        (date, datetime(2026, 1, 1, tzinfo=UTC)),
        (Decimal, "1.5"),
        (Decimal, Decimal("NaN")),
        (Literal["a"], "b"),
        (dict[int, str], {"1": "x"}),
        (Incomparable, Incomparable(number=1)),
    ],
)
def test_a_value_of_another_type_is_never_written(tp: Any, value: Any) -> None:
    refusal(lambda: codec(tp, "result").encode(value))


class Alias(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    first: int = Field(alias="First")
    dropped: int = Field(default=0, exclude=True)


def test_names_on_the_wire_are_the_aliases() -> None:
    assert codec(Alias).encode(Alias(First=1)) == '{"First":1}'
    assert codec(Alias).decode('{"First":1}') == Alias(First=1)


def test_a_field_that_would_be_dropped_is_noticed() -> None:
    message = refusal(lambda: codec(Alias).encode(Alias(First=1, dropped=5)))
    assert message == "slice $.dropped: is int 5, which would come back as int 0"


@dataclass(frozen=True)
class Everything:
    whole: int
    share: float
    text: str
    flag: bool
    day: date
    at: datetime
    length: timedelta
    amount: Decimal
    identity: uuid.UUID
    colour: Colour
    words: tuple[str, ...]
    tree: dict[str, list[int] | None]
    maybe: int | str | None


storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
whole = st.integers(min_value=-(2**63), max_value=2**63 - 1)
everything = st.builds(
    Everything,
    whole=whole,
    share=st.floats(allow_nan=False, allow_infinity=False),
    text=storable,
    flag=st.booleans(),
    day=st.dates(),
    at=st.datetimes(timezones=st.just(UTC)),
    length=st.timedeltas(
        min_value=timedelta(days=-999_999_998), max_value=timedelta(days=999_999_998)
    ),
    amount=st.decimals(allow_nan=False, allow_infinity=False, places=4, max_value=10**12),
    identity=st.uuids(),
    colour=st.sampled_from(Colour),
    words=st.lists(storable, max_size=3).map(tuple),
    tree=st.dictionaries(storable, st.none() | st.lists(whole, max_size=3), max_size=3),
    maybe=st.none() | whole | storable,
)
EVERYTHING = Codec[Everything](Everything, "slice", LIMIT)


@given(everything)
def test_what_is_written_comes_back_equal(value: Everything) -> None:
    text = EVERYTHING.encode(value)
    assert EVERYTHING.decode(text) == value
    assert EVERYTHING.encode(EVERYTHING.decode(text)) == text


# -- types that are no contract ----------------------------------------------------------------


class Plain:
    pass


@pytest.mark.parametrize("tp", [Plain, Callable[[], int], "NoSuchType", Iterator[int]])
def test_a_type_that_is_no_data_is_refused_with_the_remedy(tp: Any) -> None:
    with pytest.raises(JobDefinitionError, match=r"cannot be a contract: .+; use a pydantic model"):
        codec(tp)


# -- schemas and their hash --------------------------------------------------------------------

ItemT = TypeVar("ItemT")


class Page(BaseModel, Generic[ItemT]):
    items: list[ItemT]
    last: bool = False


class Tree(BaseModel):
    name: Annotated[str, Field(max_length=10)]
    below: list[Tree] = []


def hash_of(tp: Any) -> str:
    return contract_hash({"slice": codec(tp).schema()})


def test_the_schema_forbids_unknown_fields_wherever_fields_are_listed() -> None:
    schema = codec(Invoice).schema()
    assert schema["additionalProperties"] is False
    assert all(
        definition.get("additionalProperties") is False
        for definition in schema["$defs"].values()
        if definition["type"] == "object"
    )
    assert codec(dict[str, int]).schema()["additionalProperties"] == {"type": "integer"}


def test_titles_docstrings_names_order_and_defaults_leave_the_hash_alone() -> None:
    class Branch(BaseModel):
        """The same with other words, in another order."""

        model_config = ConfigDict(title="Another title", json_schema_extra={"examples": [1]})
        below: list[Branch] = Field(default=[], description="What is below.", title="Below")
        name: Annotated[str, Field(max_length=10, examples=["x"], deprecated=True)]

    Branch.model_rebuild(_types_namespace={"Branch": Branch})

    class Blue(BaseModel):
        colour: Literal["blue", "red"]
        day: date = date(2026, 1, 1)

    @dataclass
    class Red:
        colour: Colour
        day: date = date(2027, 1, 1)

    assert hash_of(Tree) == hash_of(Branch)
    assert hash_of(Blue) == hash_of(Red)
    assert hash_of(Page[Tree]) == hash_of(Page[Branch])
    assert hash_of(int | str) == hash_of(str | int)


def model(**fields: Any) -> type[BaseModel]:
    annotations = {name: tp for name, (tp, _) in fields.items()}
    defaults = {name: value for name, (_, value) in fields.items() if value is not ...}
    return type("Made", (BaseModel,), {"__annotations__": annotations, **defaults})


BASE = {"a": (int, ...), "b": (str, "x")}


@pytest.mark.parametrize(
    "other",
    [
        {"a": (float, ...), "b": (str, "x")},
        {"a": (int, 1), "b": (str, "x")},
        {"a": (int, ...), "b": (str | None, "x")},
        {"a": (int, ...), "c": (str, "x")},
        {"a": (int, ...), "b": (str, "x"), "c": (str, "x")},
        {"a": (Annotated[int, Field(ge=0)], ...), "b": (str, "x")},
        {"a": (int, ...), "b": (Annotated[str, Field(pattern="^x")], "x")},
        {"a": (int, ...), "b": (Literal["x", "y"], "x")},
        {"a": (int, ...), "b": (Literal["x", "z"], "x")},
        {"a": (int, ...), "b": (date, "x")},
        {"a": (list[int], ...), "b": (str, "x")},
        {"a": (dict[str, int], ...), "b": (str, "x")},
        {"a": (Tree, ...), "b": (str, "x")},
        {"a": (list[Tree], ...), "b": (str, "x")},
    ],
    ids=str,
)
def test_types_required_fields_constraints_and_enums_change_the_hash(other: Any) -> None:
    assert hash_of(model(**BASE)) == hash_of(model(**dict(reversed(BASE.items()))))
    assert hash_of(model(**BASE)) != hash_of(model(**other))


def test_the_hash_of_a_job_covers_all_four_types_and_is_stable() -> None:
    schemas = contract.schemas(Settle)
    assert sorted(schemas) == ["parameters", "result", "slice", "summary"]
    assert contract_hash(schemas) == "028c951381938c2e"
    for role in schemas:
        assert contract_hash({**schemas, role: {"type": "boolean"}}) != contract_hash(schemas)


# -- launching without the author's code -------------------------------------------------------


@pytest.mark.parametrize(
    "raw, message",
    [
        ('{"year":2026,"month":"3"}', "$.month: expected integer, got str '3'"),
        ('{"year":2026.0,"month":3}', "$.year: expected integer, got float 2026.0"),
        ('{"year":true,"month":3}', "$.year: expected integer, got bool True"),
        ('{"year":2026}', "$.month: is required and missing"),
        (
            '{"year":2026,"month":3,"yaer":1}',
            "$.yaer: is no known field; did you mean 'year'?",
        ),
        ("[]", "$: expected object, got list []"),
        ('{"year":2026,"year":2027,"month":3}', "$.year: is given twice; keep one"),
    ],
)
def test_a_published_schema_refuses_what_the_types_refuse(raw: str, message: str) -> None:
    schema = codec(Month).schema()
    assert refusal(lambda: check_against_schema(schema, raw, "parameters")) == (
        f"parameters {message}"
    )
    refusal(lambda: codec(Month).decode(raw))


def test_a_published_schema_accepts_what_the_types_accept() -> None:
    assert check_against_schema(codec(Invoice).schema(), INVOICE_TEXT, "parameters") == INVOICE_TEXT
    assert (
        check_against_schema(codec(float).schema(), "1e22", "parameters") == "1" + "0" * 22 + ".0"
    )


@settings(max_examples=30)
@given(everything)
def test_the_schema_accepts_whatever_the_codec_writes(value: Everything) -> None:
    text = EVERYTHING.encode(value)
    assert check_against_schema(EVERYTHING.schema(), text, "slice") == text


@pytest.mark.parametrize(
    "tp, raw, message",
    [
        (Annotated[int, Field(ge=1)], "0", "$: int 0 breaks the rule minimum: 1"),
        (dict[str, int | None], '{"a":"x"}', "$.a: expected integer or null, got str 'x'"),
        (Literal["a", "b"], '"c"', "$: str 'c' breaks the rule enum: ['a', 'b']"),
        (date, '"2026-2-30"', "$: expected a date, got str '2026-2-30'"),
        (date, '"20260203"', "$: expected a date, got str '20260203'"),
        (uuid.UUID, '"x"', "$: expected a uuid, got str 'x'"),
    ],
)
def test_a_broken_rule_of_a_schema_is_named(tp: Any, raw: str, message: str) -> None:
    schema = codec(tp).schema()
    assert refusal(lambda: check_against_schema(schema, raw, "parameters")) == (
        f"parameters {message}"
    )


def test_a_pattern_that_is_not_pythons_is_left_to_the_node() -> None:
    schema = {"type": "string", "pattern": "(?x"}
    assert check_against_schema(schema, '"any"', "parameters") == '"any"'


# -- keys and weights --------------------------------------------------------------------------


class Keyed(rowlock.Job[int, Any, int]):
    name = "keyed"

    def __init__(self, key: Any = None, weight: Any = 0) -> None:
        self.given_key, self.given_weight = key, weight

    def partition(self, params: int, cluster: rowlock.Cluster) -> Iterable[Any]:
        return range(params)

    def process(self, part: Any, ctx: rowlock.Context[int]) -> int:
        return len(part)

    def key(self, part: Any) -> Any:
        return self.given_key

    def weight(self, part: Any) -> Any:
        return self.given_weight


@pytest.mark.parametrize("key", ["a", "A ", "é", "e\u0301", "x" * 512, "é" * 256, "a/b:c"])
def test_a_key_of_the_author_is_kept_byte_by_byte(key: str) -> None:
    assert contract.partition_key(Keyed(key), 1, "1") == key


@pytest.mark.parametrize(
    "key, message",
    [
        ("", "has 0 bytes; use 1 to 512"),
        ("x" * 513, "has 513 bytes; use 1 to 512"),
        ("😀" * 300, "has 1200 bytes; use 1 to 512"),
        ("a\0b", "contains the NUL character"),
        ("\ud800", "contains half of a surrogate pair"),
        (7, "key() returned int 7; return a str or None"),
        (b"a", "key() returned bytes b'a'; return a str or None"),
    ],
)
def test_what_cannot_be_a_key_is_refused(key: Any, message: str) -> None:
    """By its bytes, before the database sees it: an index takes 8,000 equal characters and not 8,000 others."""
    assert message in refusal(lambda: contract.partition_key(Keyed(key), 1, "1"))


def test_without_a_key_the_digest_does_not_depend_on_the_order_of_fields() -> None:
    key = contract.partition_key(Keyed(), None, '{"a":1,"b":{"c":2,"d":"é"}}')
    assert key == contract.partition_key(Keyed(), None, '{"b": {"d": "é", "c": 2}, "a": 1}')
    assert key == "sha256:4b29d6bc552284764d17022a403209ff"
    assert key != contract.partition_key(Keyed(), None, '{"a":1,"b":{"c":2,"d":"e"}}')


def test_without_a_key_a_number_and_its_digits_are_two_partitions() -> None:
    """As map keys in JSON they would be one."""
    assert contract.partition_key(Keyed(), None, "1") != contract.partition_key(
        Keyed(), None, '"1"'
    )


@pytest.mark.parametrize("weight", [1.5, "1", None, True, 2**31, -(2**31) - 1])
def test_a_weight_is_an_int_of_32_bits(weight: Any) -> None:
    message = refusal(lambda: contract.partition_weight(Keyed(weight=weight), 1))
    assert message.endswith("use an int of 32 bits")
    assert contract.partition_weight(Keyed(weight=-5), 1) == -5


def test_a_slice_with_a_set_needs_a_key_of_the_author() -> None:
    class OfSets(rowlock.Job[int, set[str], int]):
        name = "of-sets"

        def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[set[str]]:
            yield {"a", "b"}

        def process(self, part: set[str], ctx: rowlock.Context[int]) -> int:
            return len(part)

    with pytest.raises(JobDefinitionError, match=r"OfSets: the slice holds a set.*define key"):
        contract.codecs(OfSets)

    class WithKey(OfSets):
        name = "with-key"

        def key(self, part: set[str]) -> str:
            return "-".join(sorted(part))

    assert contract.codecs(WithKey).slice.decode('["a"]') == {"a"}


@pytest.mark.parametrize(
    "payload, limit", [("parameters", 262_144), ("slice", 65_536), ("result", 262_144)]
)
@pytest.mark.parametrize("size", [0, 2_000_000, LARGEST_MEGABYTES * 1_000_000])
def test_a_payload_over_its_limit_is_refused_with_both_sizes(
    payload: str, limit: int, size: int
) -> None:
    """Before anything is written; nothing is put in its place. (A stand-in is stored and the job says success
    elsewhere: reported as windmill#10860.)"""

    class OfTexts(rowlock.Job[str, str, str]):
        name = "of-texts"

        def partition(self, params: str, cluster: rowlock.Cluster) -> Iterator[str]:
            yield params

        def process(self, part: str, ctx: rowlock.Context[str]) -> str:
            return part

    both: Codec[str] = getattr(contract.codecs(OfTexts), payload)
    fits, text = "x" * (limit - 2), "x" * max(size, limit)

    assert both.decode(both.encode(fits)) == fits
    for refused in (partial(both.encode, text), partial(both.decode, f'"{text}"')):
        assert refusal(refused) == (
            f"{payload} $: is {len(text) + 2} bytes long; at most {limit} are allowed"
        )


def test_the_codecs_of_a_job_know_its_types() -> None:
    found = contract.codecs(Settle)
    assert found.parameters.decode('{"year":2026,"month":3}') == Month(year=2026, month=3)
    assert found.slice.encode(Day(date=date(2026, 3, 1))) == '{"date":"2026-03-01"}'
    assert found.result.encode(Settled(flights=1, cents=2)) == '{"flights":1,"cents":2}'
    assert found.summary.encode(Summary(days=1, cents=2)) == '{"days":1,"cents":2}'
