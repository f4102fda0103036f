"""Job classes: checked when they are defined, every mistake named with its remedy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, TypeVar

import pytest

import rowlock
from rowlock.errors import JobDefinitionError
from rowlock.job import Job, summary_type, type_arguments
from tests.unit.typechecks.settle import Day, Month, Settle, Settled, Summary

ROOT: Any = Job  # its own type parameters are open, which strict checkers mind

ItemT = TypeVar("ItemT")
OtherT = TypeVar("OtherT")


def body(**changes: Any) -> dict[str, Any]:
    def partition(self: Any, params: int, cluster: rowlock.Cluster) -> Iterator[int]:
        yield params

    def process(self: Any, part: int, ctx: rowlock.Context[int]) -> int:
        return part

    return {
        "__module__": __name__,
        "name": "a",
        "partition": partition,
        "process": process,
        **changes,
    }


def define(**changes: Any) -> type[Any]:
    class Base(rowlock.Job[int, int, int]):
        pass

    return type("Made", (Base,), body(**changes))


def mistake(call: Callable[[], object]) -> str:
    with pytest.raises(JobDefinitionError) as caught:
        call()
    return str(caught.value)


def test_a_complete_class_is_accepted() -> None:
    assert define(name="a.b-c_1").name == "a.b-c_1"


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a/b", "é", "a" * 101, 5, None, b"a"])
def test_a_name_that_cannot_be_typed_anywhere_is_refused(name: Any) -> None:
    assert f"name = {name!r} must be 1 to 100 of a-z" in mistake(lambda: define(name=name))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"delivery": "AT_LEAST_ONCE"}, "delivery = 'AT_LEAST_ONCE' must be rowlock.AT_LEAST_ONCE"),
        ({"retry": 3}, "retry = 3 must be a rowlock.Retry(…)"),
        ({"timeout_seconds": 0}, "timeout_seconds = 0 must be a number above 0, or None"),
        ({"timeout_seconds": True}, "timeout_seconds = True must be a number above 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds = inf must be a number above 0"),
        ({"timeout_seconds": "60"}, "timeout_seconds = '60' must be a number above 0"),
        ({"max_failed": -1}, "max_failed = -1 must be None, a number from 0 up, or a share"),
        ({"max_failed": 1.5}, "max_failed = 1.5 must be None"),
        ({"max_failed": True}, "max_failed = True must be None"),
        ({"max_failed": "101%"}, "max_failed = '101%' must be None"),
        ({"max_failed": "5"}, "max_failed = '5' must be None"),
        (
            {"delivery": rowlock.AT_MOST_ONCE, "retry": rowlock.Retry(max_attempts=2)},
            "contradicts delivery = AT_MOST_ONCE, which is never started twice; leave retry out",
        ),
        ({"partition": ROOT.partition}, "partition() is missing; define it, or leave `name` out"),
        ({"process": ROOT.process}, "process() is missing"),
    ],
)
def test_a_wrong_attribute_is_named_with_its_value_and_remedy(
    changes: dict[str, Any], message: str
) -> None:
    found = mistake(lambda: define(**changes))
    assert found.startswith(f"job class {__name__}.Made: ")
    assert message in found


def test_every_mistake_of_a_class_is_listed() -> None:
    lines = mistake(lambda: define(name="A", retry=3, max_failed=-1)).splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == ["name", "retry", "max_failed"]


@pytest.mark.parametrize("method", ["partition", "process", "finish", "key", "weight"])
def test_async_methods_are_refused_with_the_remedy(method: str) -> None:
    async def coroutine(self: Any, *arguments: Any) -> int:
        return await asyncio.sleep(0, 1)

    async def generator(self: Any, *arguments: Any) -> AsyncIterator[int]:
        yield await asyncio.sleep(0, 1)

    for function in (coroutine, generator):
        found = mistake(lambda function=function: define(**{method: function}))  # type: ignore[misc]
        assert f"{method}() is `async def`" in found
        assert "call asyncio.run(…) inside it" in found


@pytest.mark.parametrize("method", ["process", "finish", "key", "weight"])
def test_only_partition_may_yield(method: str) -> None:
    def generator(self: Any, *arguments: Any) -> Iterator[int]:
        yield 1

    assert f"{method}() uses `yield`" in mistake(lambda: define(**{method: generator}))


def test_finish_needs_a_return_annotation() -> None:
    def finish(self, params, outcome):  # type: ignore[no-untyped-def]
        return 1

    found = mistake(lambda: define(finish=finish))
    assert "finish() has no return annotation" in found
    assert "write `-> Summary`, or `-> None`" in found


# -- type parameters ---------------------------------------------------------------------------


def test_the_types_are_those_between_the_brackets() -> None:
    assert type_arguments(Settle) == (Month, Day, Settled)
    assert summary_type(Settle) is Summary


def test_open_type_parameters_are_refused() -> None:
    def bare() -> type[Any]:
        return type("Bare", (ROOT,), body())

    def partly() -> type[Any]:
        class Partly(Job[int, ItemT, int], Generic[ItemT]):
            name = "partly"

            def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[ItemT]:
                yield from ()

            def process(self, part: ItemT, ctx: rowlock.Context[int]) -> int:
                return 0

        return Partly

    assert "the type of the parameters is left open; write class" in mistake(bare)
    assert "the type of the slice is left open" in mistake(partly)
    assert "the type of the result" not in mistake(partly)


class Table(rowlock.Job[int, list[ItemT], dict[str, OtherT]], Generic[OtherT, ItemT]):
    """An author's own base class: it has no name, so it is no job."""

    @abstractmethod
    def items(self, params: int) -> list[ItemT]: ...

    def partition(self, params: int, cluster: rowlock.Cluster) -> Iterator[list[ItemT]]:
        yield self.items(params)

    def finish(self, params: int, outcome: rowlock.Outcome[dict[str, OtherT]]) -> list[OtherT]:
        return [value for _, result in outcome.results() for value in result.values()]


class Middle(Table[bytes, ItemT]):
    """Binds one parameter, passes the other on."""


class Words(Middle["Word"]):
    name = "words"

    def items(self, params: int) -> list[Word]:
        return [Word()]

    def process(self, part: list[Word], ctx: rowlock.Context[int]) -> dict[str, bytes]:
        return {}


class Word:
    """Defined after its use: a forward reference."""


def test_types_are_found_through_generic_base_classes() -> None:
    assert type_arguments(Words) == (int, list[Word], dict[str, bytes])
    assert summary_type(Words) == list[bytes]


class Mixin:
    def finish(self, params: Any, outcome: Any) -> Any:
        return 1, "x"

    finish.__annotations__["return"] = "tuple[int, str]"


def test_finish_may_come_from_a_mixin() -> None:
    class Mixed(Mixin, Settle):
        name = "mixed"

    assert summary_type(Mixed) == tuple[int, str]
    assert Mixed.policy()["has_finish"]


def test_a_forward_reference_to_nowhere_is_named() -> None:
    class Lost(rowlock.Job["Nowhere", int, int]):  # type: ignore[name-defined]
        name = "lost"

        def partition(self, params: Any, cluster: rowlock.Cluster) -> Iterator[int]:
            yield 1

        def process(self, part: int, ctx: Any) -> int:
            return part

    found = mistake(lambda: type_arguments(Lost))
    assert "Lost: cannot resolve the type ForwardRef('Nowhere')" in found
    assert "define it at the top level of the module" in found


def test_a_class_without_a_name_is_abstract() -> None:
    assert not hasattr(Table, "name")
    with pytest.raises(TypeError, match="abstract"):
        Table()  # type: ignore[abstract]


# -- policy ------------------------------------------------------------------------------------


def test_the_policy_leaves_nothing_open() -> None:
    assert Settle.policy() == {
        "max_attempts": 5,
        "initial_seconds": 2.0,
        "factor": 2.0,
        "max_seconds": 300.0,
        "timeout_seconds": 600.0,
        "max_failed": None,
        "has_finish": True,
    }
    policy = define(max_failed="5%").policy()
    assert (policy["max_attempts"], policy["max_failed"]) == (3, "5%")
    assert not policy["has_finish"]


def test_at_most_once_work_has_one_attempt() -> None:
    assert define(delivery=rowlock.AT_MOST_ONCE).policy()["max_attempts"] == 1
    once = rowlock.Retry(max_attempts=1)
    assert define(delivery=rowlock.AT_MOST_ONCE, retry=once).policy()["max_attempts"] == 1


@pytest.mark.parametrize(
    "values, message",
    [
        ({"max_attempts": 0}, "max_attempts=0 must be an int from 1 to 1000"),
        ({"max_attempts": True}, "max_attempts=True must be"),
        ({"max_attempts": 2.0}, "max_attempts=2.0 must be"),
        ({"initial_seconds": -1}, "initial_seconds=-1 must be 0 or more"),
        ({"initial_seconds": float("nan")}, "initial_seconds=nan must be"),
        ({"factor": 0.5}, "factor=0.5 must be from 1 to 100"),
        ({"max_seconds": 1e9}, "max_seconds=1000000000.0 must be from 0 to 604800"),
        ({"initial_seconds": 10, "max_seconds": 5}, "max_seconds=5 must be at least initial_secon"),
        ({"max_attempts": 0, "factor": 0}, "max_attempts=0 must be an int from 1 to 1000; factor"),
    ],
)
def test_a_retry_out_of_range_is_refused(values: dict[str, Any], message: str) -> None:
    assert message in mistake(lambda: rowlock.Retry(**values))


def test_a_cluster_adds_up_its_nodes() -> None:
    nodes = (
        rowlock.NodeInfo(name="a", pool="p", slots=2, load=1),
        rowlock.NodeInfo(name="b", pool="p", slots=4, load=3),
    )
    cluster = rowlock.Cluster(nodes=nodes)
    assert (cluster.slots, cluster.load) == (6, 4)
    assert rowlock.Cluster().slots == 0


# -- the package -------------------------------------------------------------------------------


def test_importing_rowlock_loads_nothing_heavy() -> None:
    """A job module is imported by every command and every executor."""
    script = (
        "import sys, rowlock\n"
        "heavy = {'psycopg', 'pydantic', 'jsonschema', 'prometheus_client', 'rich', 'kopf',"
        " 'kubernetes', 'asyncio', 'logging', 'importlib.metadata'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there() -> None:
    assert all(hasattr(rowlock, name) for name in rowlock.__all__)
    assert rowlock.__all__ == sorted(rowlock.__all__)
    assert rowlock.__version__.count(".") >= 1
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rowlock.Nothing
