"""What an author writes: a `Job` class, and what its methods are given.

Nothing here talks to a database or starts a process. A job class is checked when it is defined, so
that a mistake shows at import, with its remedy, and not in the middle of a run.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeAlias, TypeGuard, TypeVar

from rowlock.errors import JobDefinitionError

if TYPE_CHECKING:
    import logging
    from contextlib import AbstractContextManager

    import psycopg
    from psycopg.rows import TupleRow

__all__ = [
    "AT_LEAST_ONCE",
    "AT_MOST_ONCE",
    "AnyJob",
    "Cluster",
    "Context",
    "Delivery",
    "Job",
    "NodeInfo",
    "Outcome",
    "Retry",
    "has_finish",
    "has_key",
    "job_title",
    "summary_type",
    "type_arguments",
]

ParamsT = TypeVar("ParamsT")
SliceT = TypeVar("SliceT")
ResultT = TypeVar("ResultT")
ParamsT_co = TypeVar("ParamsT_co", covariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


class Delivery(StrEnum):
    """What happens to a partition whose node is lost while it runs."""

    AT_LEAST_ONCE = "AT_LEAST_ONCE"
    """It runs again on another node. Its effects must bear repetition, or go through
    `ctx.transaction()`, which makes them happen exactly once."""

    AT_MOST_ONCE = "AT_MOST_ONCE"
    """It is never started twice. It becomes FAILED, outcome unknown, and a person decides."""


AT_LEAST_ONCE: Final = Delivery.AT_LEAST_ONCE
AT_MOST_ONCE: Final = Delivery.AT_MOST_ONCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and how soon a failed partition is tried again.

    The wait before attempt n + 1 is drawn between 0 and
    `min(max_seconds, initial_seconds * factor ** (n - 1))`.

    Raises:
        JobDefinitionError: A value is out of its range.
    """

    max_attempts: int = 3
    """How many attempts may fail before the partition is FAILED; 1 to 1000, 1 means no retry."""

    initial_seconds: float = 1.0
    """Longest wait before the second attempt; 0 or more."""

    factor: float = 2.0
    """What the wait is multiplied by after each further failure; 1 to 100."""

    max_seconds: float = 300.0
    """Cap of the wait; at least `initial_seconds`, at most 604800 (a week)."""

    def __post_init__(self) -> None:
        problems: list[str] = []
        if not _is_whole(self.max_attempts) or not 1 <= self.max_attempts <= 1000:
            problems.append(f"max_attempts={self.max_attempts!r} must be an int from 1 to 1000")
        if not _is_number(self.initial_seconds) or self.initial_seconds < 0:
            problems.append(f"initial_seconds={self.initial_seconds!r} must be 0 or more")
        if not _is_number(self.factor) or not 1 <= self.factor <= 100:
            problems.append(f"factor={self.factor!r} must be from 1 to 100")
        if not _is_number(self.max_seconds) or not 0 <= self.max_seconds <= 604_800:
            problems.append(f"max_seconds={self.max_seconds!r} must be from 0 to 604800")
        if not problems and self.max_seconds < self.initial_seconds:
            problems.append(
                f"max_seconds={self.max_seconds!r} must be at least "
                f"initial_seconds={self.initial_seconds!r}"
            )
        if problems:
            raise JobDefinitionError("Retry: " + "; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """A live node, as `partition()` sees it."""

    name: str
    """The node's name; names need not be unique."""

    pool: str
    """The named group of nodes that it belongs to."""

    slots: int
    """How many attempts it runs at a time."""

    load: int
    """How many attempts it ran when it was last heard of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The live nodes of the pool at the moment of planning.

    It is a hint for the size of partitions: nodes come and go while the execution runs.
    """

    nodes: tuple[NodeInfo, ...] = ()

    @property
    def slots(self) -> int:
        """How many attempts all nodes together run at a time."""
        return sum(node.slots for node in self.nodes)

    @property
    def load(self) -> int:
        """How many attempts all nodes together are running."""
        return sum(node.load for node in self.nodes)


class Context(ABC, Generic[ParamsT_co]):
    """What one attempt at a partition is given. Valid until `process()` returns."""

    params: ParamsT_co
    """The parameters of the execution."""

    attempt: int
    """1 at the first claim of the partition, one more at each.

    Claims that were handed back before author code began count too, so that a number above 1 does
    not say that something was done before.
    """

    key: str
    """The key of the partition."""

    logger: logging.Logger | logging.LoggerAdapter[logging.Logger]
    """A logger whose lines carry the ids of the attempt."""

    idempotency_key: str
    """The same for every attempt at this partition, on any node, also after a restart.

    Hand it to payment providers and other systems that remember a key.
    """

    @property
    @abstractmethod
    def should_stop(self) -> bool:
        """Whether the attempt is asked to stop, because its node drains or a person cancelled.

        Code that reads it as true and returns counts as *stopped*: the partition runs again from
        its checkpoint. Work that was complete all the same returns `ctx.finished(result)`.
        """

    @abstractmethod
    def finished(self, result: ValueT) -> ValueT:
        """Say that the work is complete although `should_stop` was read as true.

        Use it as `return ctx.finished(result)`.
        """

    @abstractmethod
    def chunks(
        self,
        source: Callable[[KeyT | None], Iterable[ItemT]],
        *,
        size: int,
        key: Callable[[ItemT], KeyT],
    ) -> Iterator[list[ItemT]]:
        """Iterate over items in chunks, with a checkpoint after each.

        When the body of the loop has run without an exception, the key of the chunk's last item is
        saved. A later attempt calls `source` with the last key saved and so resumes after it. A
        `ctx.transaction()` inside the body carries that checkpoint in its own COMMIT.

        Args:
            source: Called once, with the key after which to start (None at the first attempt); it
                yields the items that follow, in the order of their keys.
            size: Items in a chunk; 1 or more.
            key: The key of an item; anything that JSON can hold.

        Raises:
            Stopped: The attempt is asked to stop; the last checkpoint stands.
            LeaseLost: The claim is gone.
        """

    @abstractmethod
    def save(self, state: object) -> None:
        """Save a checkpoint: any JSON value up to 256 KiB, read back as `ctx.checkpoint`.

        In the loop of `ctx.chunks` the state is saved together with the checkpoint of the chunk,
        when the body has run or its transaction commits, so that the two always agree.

        Raises:
            ContractError: The state cannot be kept as JSON without loss.
            Stopped: The attempt is asked to stop; this state has been saved.
            LeaseLost: The claim is gone; nothing was saved.
        """

    @property
    @abstractmethod
    def checkpoint(self) -> Any:  # Any: the author's own JSON value
        """The state that `save` last saved for this partition; None before the first."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """A transaction in rowlock's database that commits only if the claim still stands.

        Inside `ctx.chunks`, each transaction carries the checkpoint of its chunk. Outside, an
        attempt has one transaction; its COMMIT waits until `process()` returns and carries the
        completion. Either way its effects happen exactly once.

        Raises:
            UsageError: A second transaction outside `ctx.chunks`, or in one chunk.
            LeaseLost: The claim is gone; everything was rolled back.
        """

    @abstractmethod
    def lock(
        self, name: str, *, timeout_seconds: float | None = None
    ) -> AbstractContextManager[None]:
        """Hold a named lock: `with ctx.lock("tariffs"): ...`, one attempt at a time in all pools.

        Attempts of all jobs and executions over one database share the names. The lock belongs to the
        claim: when that is lost or ends, the lock is free at that moment, whatever the attempt still
        does, so fence what must not overlap with `ctx.transaction()`. A transaction inside the lock
        is committed before the lock is free, also the one whose COMMIT waits until `process()` returns.

        Waiting occupies the slot and counts for the job's `timeout_seconds`; there is no order among
        those who wait. Who takes several takes them in one order everywhere.

        Args:
            name: 1 to 200 bytes of text.
            timeout_seconds: How long to wait; 0: take it if it is free. None: no limit. While the
                database cannot answer, nobody gives up.

        Raises:
            TimeoutError: Somebody else had the lock all the time.
            Stopped: The attempt is asked to stop, and has not got the lock.
            LeaseLost: The claim is gone.
            UsageError: The name cannot be one, the attempt has this lock already, or a transaction
                is open.
        """

    @abstractmethod
    def progress(self, done: int, total: int | None = None) -> None:
        """Tell people how far the attempt is. It is no checkpoint.

        Call it as often as you like: `rowlock partitions` and `rowlock status` show it, some seconds
        late, without a statement for each call.
        """

    @abstractmethod
    def skip(self, item: object, error: BaseException | str) -> None:
        """Leave an item out and say so: it is counted, and the first ten are kept with their errors.

        The count is part of the checkpoint, so that an item whose chunk is repeated counts once. It is
        written before the partition completes. Whether so many are too many is yours to decide.

        Args:
            item: What was left out, shown by its repr, cut at 200 bytes.
            error: Why: an exception or a text, cut at 500 bytes.
        """

    @property
    @abstractmethod
    def skipped(self) -> int:
        """How many items of this partition were left out, by the attempts before as well."""


class Outcome(ABC, Generic[ResultT_co]):
    """What `finish()` is given: the end of all partitions."""

    total: int
    """All partitions of the execution."""

    completed: int
    """Partitions that ended COMPLETED."""

    failed: int
    """Partitions that ended FAILED, as many as `max_failed` allows."""

    cancelled: int
    """Partitions that ended CANCELLED."""

    @abstractmethod
    def results(self) -> Iterator[tuple[str, ResultT_co]]:
        """Stream the key and the result of each completed partition, in the order of planning."""

    @abstractmethod
    def transaction(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """A transaction whose COMMIT waits until `finish()` returns and carries the end.

        Its effects happen exactly once. `finish()` has at most one.
        """


class Job(ABC, Generic[ParamsT, SliceT, ResultT]):
    """A batch job: `class Settle(rowlock.Job[Month, Day, Settled])`.

    The three type parameters are the types of the parameters, of a partition's slice and of a
    partition's result: pydantic models, dataclasses, TypedDicts or plain types such as `int`. A
    subclass that leaves `name` out is abstract: it can be subclassed and is not registered. One
    instance serves a whole process, one call at a time.
    """

    name: ClassVar[str]
    """The name to launch the job by: lower-case letters, digits and `._-`, at most 100."""

    delivery: ClassVar[Delivery] = Delivery.AT_LEAST_ONCE
    """What happens to a partition whose node is lost."""

    retry: ClassVar[Retry] = Retry()
    """How failed partitions are tried again. AT_MOST_ONCE work has exactly one attempt."""

    timeout_seconds: ClassVar[float | None] = None
    """An attempt that runs longer is killed and counts as failed. None: no limit."""

    max_failed: ClassVar[int | str | None] = None
    """How many partitions may fail before the execution is closed: a number or "5%".

    None: every partition runs, and any that failed makes the execution FAILED.
    """

    @abstractmethod
    def partition(self, params: ParamsT, cluster: Cluster, /) -> Iterable[SliceT]:
        """Yield the slices of the work. They become visible together, after the last one."""

    @abstractmethod
    def process(self, part: SliceT, ctx: Context[ParamsT], /) -> ResultT:
        """Do the work of one slice and return its result."""

    def finish(self, params: ParamsT, outcome: Outcome[ResultT], /) -> object:
        """Optional: run once when all partitions are done; return a summary.

        The return annotation is the type of the summary. If the method raises, the execution is
        FAILED after the job's retries.
        """

    def key(self, part: SliceT, /) -> str | None:
        """Optional: a readable, unique key for a slice, at most 512 bytes.

        None: a digest of the slice.
        """

    def weight(self, part: SliceT, /) -> int:  # noqa: ARG002 - the base weighs all alike
        """Optional: how heavy a slice is. Heavier ones are claimed first."""
        return 0

    @classmethod
    def policy(cls) -> dict[str, Any]:  # Any: the JSON value that a request stores
        """The job's own policy, with nothing left open, as an execution keeps it."""
        once = cls.delivery is Delivery.AT_MOST_ONCE
        return {
            "max_attempts": 1 if once else cls.retry.max_attempts,
            "initial_seconds": float(cls.retry.initial_seconds),
            "factor": float(cls.retry.factor),
            "max_seconds": float(cls.retry.max_seconds),
            "timeout_seconds": None if cls.timeout_seconds is None else float(cls.timeout_seconds),
            "max_failed": cls.max_failed,
            "has_finish": has_finish(cls),
        }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            return
        problems = [*_attribute_problems(cls), *_method_problems(cls), *_type_problems(cls)]
        if problems:
            lines = [f"{job_title(cls)}: {problem}" for problem in problems]
            raise JobDefinitionError("\n".join(lines))


AnyJob: TypeAlias = Job[Any, Any, Any]
"""A job of whatever types: what is true of all jobs needs no more."""

_ROOT: Final[type] = Job


def job_title(job: type) -> str:
    """A job class for error messages."""
    return f"job class {job.__module__}.{job.__qualname__}"


def has_finish(job: type[AnyJob]) -> bool:
    """Whether the class has a `finish()` of its own."""
    return _definer(job, "finish") is not _ROOT


def has_key(job: type[AnyJob]) -> bool:
    """Whether the class has a `key()` of its own."""
    return _definer(job, "key") is not _ROOT


def type_arguments(job: type[AnyJob]) -> tuple[Any, Any, Any]:
    """The types of the parameters, the slice and the result, also through generic base classes.

    Raises:
        JobDefinitionError: A forward reference cannot be resolved.
    """
    params, part, result = _arguments(job, _ROOT)
    return params, part, result


def summary_type(job: type[AnyJob]) -> Any:
    """The type of the summary, from the return annotation of `finish()`; NoneType without one.

    Raises:
        JobDefinitionError: The annotation cannot be resolved.
    """
    if not has_finish(job):
        return type(None)
    definer = _definer(job, "finish")
    function = inspect.unwrap(definer.__dict__["finish"])
    annotation = _evaluated(function.__annotations__["return"], function.__globals__, definer)
    if not issubclass(definer, _ROOT):  # a mixin: it has no type parameters of Job's to bind
        return annotation
    parameters = getattr(definer, "__parameters__", ())
    return _substituted(annotation, dict(zip(parameters, _arguments(job, definer), strict=True)))


# -- checks of a class -------------------------------------------------------------------------

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_PERCENT: Final = re.compile(r"(?:100|\d{1,2}(?:\.\d{1,3})?)%")
_METHODS: Final = ("partition", "process", "finish", "key", "weight")


def _attribute_problems(cls: type[AnyJob]) -> Iterator[str]:
    name: object = cls.name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield (
            f"name = {name!r} must be 1 to 100 of a-z, 0-9, '.', '_' and '-', "
            "beginning with a letter or a digit"
        )
    delivery: object = cls.delivery
    if not isinstance(delivery, Delivery):
        yield f"delivery = {delivery!r} must be rowlock.AT_LEAST_ONCE or rowlock.AT_MOST_ONCE"
    retry: object = cls.retry
    if not isinstance(retry, Retry):
        yield f"retry = {retry!r} must be a rowlock.Retry(…)"
    # Three attempts by default are no contradiction to AT_MOST_ONCE; three that were written are.
    elif delivery is AT_MOST_ONCE and retry is not Job.retry and retry.max_attempts > 1:
        yield (
            f"retry = {retry!r} contradicts delivery = AT_MOST_ONCE, which is never started "
            "twice; leave retry out, or use AT_LEAST_ONCE"
        )
    timeout: object = cls.timeout_seconds
    if timeout is not None and not (_is_number(timeout) and timeout > 0):
        yield f"timeout_seconds = {timeout!r} must be a number above 0, or None for no limit"
    limit: object = cls.max_failed
    if isinstance(limit, str):
        allowed = _PERCENT.fullmatch(limit) is not None
    else:
        allowed = limit is None or (_is_whole(limit) and limit >= 0)
    if not allowed:
        yield f'max_failed = {limit!r} must be None, a number from 0 up, or a share such as "5%"'


def _definer(cls: type, method: str) -> type:
    """The class of the MRO whose method it is."""
    return next(base for base in cls.__mro__ if method in base.__dict__)


def _method_problems(cls: type[AnyJob]) -> Iterator[str]:
    for name in _METHODS:
        method = inspect.unwrap(getattr(cls, name))
        if getattr(method, "__isabstractmethod__", False):
            yield f"{name}() is missing; define it, or leave `name` out to keep the class abstract"
        elif inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            yield (
                f"{name}() is `async def`, which rowlock does not run; write `def {name}` and "
                "call asyncio.run(…) inside it"
            )
        elif name != "partition" and inspect.isgeneratorfunction(method):
            yield f"{name}() uses `yield`; only partition() yields, {name}() returns one value"
    if has_finish(cls) and "return" not in inspect.unwrap(cls.finish).__annotations__:
        yield (
            "finish() has no return annotation, so the summary has no type; "
            "write `-> Summary`, or `-> None` if there is none"
        )


def _type_problems(cls: type[AnyJob]) -> Iterator[str]:
    for role, bound in zip(
        ("parameters", "slice", "result"), _arguments(cls, _ROOT, evaluate=False), strict=True
    ):
        if isinstance(bound, TypeVar):
            yield (
                f"the type of the {role} is left open; "
                "write class …(rowlock.Job[Parameters, Slice, Result])"
            )
        elif getattr(bound, "__parameters__", ()):
            yield f"the type of the {role}, {bound!r}, is generic; bind its type parameters"


# -- type parameters ---------------------------------------------------------------------------


def _arguments(cls: type, target: type, *, evaluate: bool = True) -> tuple[Any, ...]:
    """What the type parameters of `target` are, seen from its subclass `cls`."""
    if cls is target:
        return tuple(getattr(target, "__parameters__", ()))
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = typing.get_origin(base) or base
        if not issubclass(origin, target):
            continue
        given = typing.get_args(base)
        if evaluate:
            namespace = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
            given = tuple(_evaluated(argument, namespace, cls) for argument in given)
        bound = dict(zip(getattr(origin, "__parameters__", ()), given, strict=False))
        above = _arguments(origin, target, evaluate=evaluate)
        return tuple(_substituted(argument, bound) for argument in above)
    raise TypeError(f"{cls!r} is no subclass of {target!r}")


def _substituted(annotation: Any, bound: Mapping[Any, Any]) -> Any:
    """The annotation with its type variables replaced by what they are bound to."""
    if isinstance(annotation, TypeVar):
        return bound.get(annotation, annotation)
    parameters = getattr(annotation, "__parameters__", ())
    if not any(parameter in bound for parameter in parameters):
        return annotation
    return annotation[tuple(bound.get(parameter, parameter) for parameter in parameters)]


def _evaluated(annotation: Any, namespace: dict[str, Any], cls: type) -> Any:
    """The annotation with its forward references resolved in the module of the class."""

    def holder() -> None: ...

    holder.__annotations__ = {"return": annotation}
    try:
        return typing.get_type_hints(holder, namespace, include_extras=True)["return"]
    except Exception as error:
        raise JobDefinitionError(
            f"{job_title(cls)}: cannot resolve the type {annotation!r} ({error}); "
            "define it at the top level of the module"
        ) from error
