"""What author code holds while it runs: the `Context` of process(), the `Outcome` of finish().

A checkpoint is one JSON document: `{"after": key of the last chunk, "items": how many so far,
"state": what ctx.save was given, "saves": its number}`. It is written by the supervisor, or by the
COMMIT of `ctx.transaction()`; both refuse when the claim is gone.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

from rowlock import contract
from rowlock.contract import Codec
from rowlock.errors import ContractError, Stopped, UsageError
from rowlock.job import Context, Outcome
from rowlock.runtime.counters import Counters
from rowlock.runtime.fate import Fate
from rowlock.runtime.messages import (
    Checkpoint,
    Finish,
    Lock,
    Progress,
    Reply,
    Results,
    Run,
    ToSupervisor,
    Unlock,
)

if TYPE_CHECKING:  # only an attempt that asks for a transaction pays for the database driver
    import psycopg
    from psycopg.rows import TupleRow

    from rowlock.runtime.transaction import Fence, Transactions, WorkSession

PROGRESS_SECONDS: Final = 0.2
"""Least time between two Progress messages of an attempt; what comes sooner is dropped."""

_COUNT_MAX: Final = 10**18

LOCK_NAME_BYTES: Final = 200
"""The longest name of a lock, in UTF-8."""

ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


class Line(Protocol):
    """What a context needs of the executor around it."""

    def tell(self, message: ToSupervisor) -> None:
        """Send a message that has no answer."""
        ...

    def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
        """Send a request, made from its number, and wait for its answer."""
        ...

    def stop_asked(self, attempt: int) -> bool:
        """Whether the supervisor wants the attempt to stop."""
        ...

    def work_session(self) -> WorkSession:
        """The executor's own connection to the work database."""
        ...


class AttemptLogger(logging.LoggerAdapter[logging.Logger]):
    """Adds the ids of the attempt to each line; fields of the call itself win."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Merge the fields (the base class would replace those of the call)."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


class Fenced(ABC):
    """What `Context` and `Outcome` share: a fate, and transactions behind one fence."""

    def __init__(self, line: Line) -> None:
        self.fate = Fate()
        self._line = line
        self._work: Transactions | None = None

    @abstractmethod
    def _fence(self) -> Fence:
        """The claim, or the mastership, that transactions stand under."""

    def _transactions(self) -> Transactions:
        if self._work is None:
            from rowlock.runtime.transaction import Transactions

            self._work = Transactions(self._line.work_session(), self._fence(), self.fate)
        return self._work

    def failing(self, error: BaseException) -> None:
        """Roll back what is open, because `error` has left the author's code.

        Raises:
            LeaseLost: The error says that the claim is gone.
            UsageError: The author has ended a transaction that was rowlock's to end.
        """
        if self._work is not None:
            self._work.fail(error)

    def rollback(self) -> None:
        """Roll back what is open. Never raises."""
        if self._work is not None:
            self._work.abandon()

    def commit_deferred(self, kind: str, body: str) -> bool:
        """Commit the waiting transaction with `body` in its fence; False: there is none.

        Args:
            kind: "completion" or "finish".
            body: JSON text of the result or of the summary.

        Raises:
            LeaseLost: The claim, or the mastership, is gone; everything was rolled back.
            CommitUncertain: The connection broke during COMMIT.
            UsageError: The author had ended the transaction.
            Exception: The server refused, or the connection broke before.
        """
        if self._work is not None and self._work.open:
            raise self.fate.refuse(
                "a transaction was entered and never left, so nothing of it was kept: use it as "
                "`with ctx.transaction() as db: ...`"
            )
        if self._work is None or not self._work.deferred:
            return False
        self._work.commit(kind, body)
        return True


@dataclass(slots=True)
class _Chunk:
    """The chunk in the author's hands."""

    after: str
    """JSON text of the key of its last item."""
    items: int
    state: str | None = None
    """JSON text of a ctx.save() in the body; it waits for the checkpoint of the chunk. On its own
    it would be about items that a later attempt runs again."""
    block_state: str | None = None
    """JSON text of a ctx.save() in the block of the chunk's transaction; undone with it."""
    committed: bool = False
    """A transaction has carried the checkpoint."""


class ExecutorContext(Fenced, Context[Any]):
    """The context of one attempt in an executor."""

    def __init__(self, run: Run, params: Any, line: Line) -> None:
        """Build the context.

        Args:
            run: The attempt.
            params: Its decoded parameters.
            line: The way to the supervisor.

        Raises:
            ContractError: The stored checkpoint is no checkpoint.
        """
        super().__init__(line)
        self.params = params
        self.attempt = run.attempt_number
        self.key = run.key
        self.has_finished = False
        """The author has called `finished`."""
        self.stop_seen = False
        """The author has read `should_stop` as true."""
        self.stop_raised = False
        """`Stopped` was raised; author code that swallows it has still not done the work."""
        self._run = run
        self._after, self._items, self._state, self._counters, self._saves = _read_checkpoint(
            run.checkpoint
        )
        self._chunk: _Chunk | None = None
        self._chunked = False
        self._chunk_committed = False
        self._progress_at = -math.inf
        self._locks: dict[str, object] = {}

    # -- what an author reads ------------------------------------------------------------------

    @property
    def logger(self) -> AttemptLogger:  # type: ignore[override]  # made when first asked for
        """A logger whose lines carry the ids of the attempt."""
        run = self._run
        return AttemptLogger(
            logging.getLogger(f"rowlock.job.{run.job}"),
            {
                "execution_id": run.execution_id,
                "job": run.job,
                "partition_key": run.key,
                "attempt": run.attempt_number,
            },
        )

    @property
    def idempotency_key(self) -> str:  # type: ignore[override]  # made when asked for
        """The same for every attempt at this partition, on any node, also after a restart."""
        run = self._run
        return idempotency_key(run.job, run.instance_key, run.step, run.key)

    @property
    def should_stop(self) -> bool:
        """Whether the attempt is asked to stop; see `rowlock.Context`."""
        if self._line.stop_asked(self._run.attempt):
            self.stop_seen = True
            return True
        return False

    @property
    def checkpoint(self) -> Any:
        """The state that `save` last saved; None before the first."""
        chunk = self._chunk
        if chunk is None or chunk.committed:
            return json.loads(self._state)
        return json.loads(chunk.block_state or chunk.state or self._state)

    # -- what an author says -------------------------------------------------------------------

    def finished(self, result: ValueT) -> ValueT:
        """Say that the work is complete although `should_stop` was read as true."""
        self.has_finished = True
        return result

    def progress(self, done: int, total: int | None = None) -> None:
        """Tell people how far the attempt is; at most five times a second, and at the end."""
        if time.monotonic() - self._progress_at < PROGRESS_SECONDS and done != total:
            return
        for name, value in (("done", done), ("total", total)):
            if value is not None and not (_is_whole(value) and abs(value) < _COUNT_MAX):
                raise UsageError(
                    f"ctx.progress: {name}={value!r} must be an int of at most 18 digits"
                )
        self._counters.done, self._counters.total = done, total
        self._tell_progress()

    def skip(self, item: object, error: BaseException | str) -> None:
        """Count an item that is left out; see `rowlock.Context`."""
        self.fate.check()
        self._counters.skip(item, error)
        if time.monotonic() - self._progress_at >= PROGRESS_SECONDS:
            self._tell_progress()

    @property
    def skipped(self) -> int:
        """How many items of the partition were left out."""
        return self._counters.skipped

    def _tell_progress(self) -> None:
        self._progress_at = time.monotonic()
        self._line.tell(Progress(attempt=self._run.attempt, counters=self._report()))

    def _report(self) -> str:
        return self._counters.report(self._run.attempt_number)

    def _report_skips(self) -> None:
        """Have it written before the completion is: what was left out is not to be lost."""
        if self._counters.is_reported:
            return
        attempt, counters = self._run.attempt, self._report()
        reply = self._line.ask(
            lambda number: Progress(request=number, attempt=attempt, counters=counters)
        )
        if not reply.ok:
            raise self.fate.lose("the claim was taken away; what was skipped is not recorded")
        self._counters.reported()

    def save(self, state: object) -> None:
        """Save a checkpoint; see `rowlock.Context`."""
        self.fate.check()
        text = _state_text(state)
        work, chunk = self._work, self._chunk
        if work is not None and (work.deferred or (work.open and chunk is None)):
            raise self.fate.refuse(
                "ctx.save() while the attempt's transaction is not committed: if it were rolled "
                "back, the checkpoint would stand without its rows. Save before it, or write "
                "inside ctx.chunks, where each transaction carries its own checkpoint"
            )
        if chunk is not None and not chunk.committed:
            self._document(chunk.after, self._items, text)  # what is too large is refused here
            if work is not None and work.open:
                chunk.block_state = text
            else:
                chunk.state = text
            return
        self._write_checkpoint(self._after, self._items, text)
        self._stop_if_asked()

    def chunks(
        self,
        source: Callable[[KeyT | None], Iterable[ItemT]],
        *,
        size: int,
        key: Callable[[ItemT], KeyT],
    ) -> Iterator[list[ItemT]]:
        """Iterate over items in chunks, with a checkpoint after each; see `rowlock.Context`."""
        self.fate.check()
        if not _is_whole(size) or size < 1:
            raise self.fate.refuse(f"ctx.chunks: size={size!r} must be an int of 1 or more")
        if self._chunked:
            raise self.fate.refuse(
                "a second ctx.chunks in one attempt: a partition has one place to resume at. "
                "Chain the sources into one, or keep the state of the second with ctx.save"
            )
        work = self._work
        if work is not None and (work.open or work.deferred):
            raise self.fate.refuse(
                "ctx.chunks inside, or after, the attempt's one ctx.transaction(): its checkpoints "
                "would stand even if that were rolled back. Open the transaction inside the loop"
            )
        self._chunked = True
        return self._chunks(source, size, key)

    def transaction(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """A transaction behind the fence; see `rowlock.Context`."""
        self.fate.check()
        work = self._transactions()
        if work.open:
            raise self.fate.refuse(
                "ctx.transaction() inside ctx.transaction(): use the connection you have, with a "
                "savepoint where you need one: `with db.transaction(): ...`"
            )
        if self._chunk is not None:
            if self._chunk.committed:
                raise self.fate.refuse(
                    "a second ctx.transaction() in one chunk: the first has already committed the "
                    "chunk's checkpoint, so after a failure here the rest would never be written. "
                    "Put both into one"
                )
            self._chunk.block_state = None  # of a block in this chunk that was rolled back
            return work.block(self._commit_chunk)
        if work.deferred:
            raise self.fate.refuse(
                "a second ctx.transaction() in one attempt: the first is committed together with "
                "the completion, when process() returns. Put both into one, or use ctx.chunks"
            )
        if self._chunk_committed:
            raise self.fate.refuse(
                "ctx.transaction() outside the loop of ctx.chunks, after transactions inside it: "
                "an attempt uses one form or the other. Write the rest in the last chunk, or in a "
                "job's finish()"
            )
        return work.block(work.defer)

    @contextmanager
    def lock(self, name: str, *, timeout_seconds: float | None = None) -> Generator[None]:
        """Hold a named lock of the whole cluster; see `rowlock.Context`."""
        self._want_lock(name, timeout_seconds)
        try:
            self._wait_for_lock(name, timeout_seconds)
        except BaseException:
            del self._locks[name]
            raise
        try:
            yield
        finally:
            self._give_back_lock(name)

    def _want_lock(self, name: str, timeout_seconds: float | None) -> None:
        self.fate.check()
        problem = _lock_problem(name, timeout_seconds)
        work, mark = self._work, object()
        if problem is None and work is not None and (work.open or work.deferred):
            problem = (
                f"{name!r} while a transaction is open: its rows would be committed after the lock is"
                " given back. Take the lock first, and open the transaction inside it"
            )
        # In one step: of two threads of the author's, one is refused.
        if problem is None and self._locks.setdefault(name, mark) is not mark:
            problem = f"{name!r} inside itself, or in two threads: an attempt has a lock once"
        if problem is not None:
            raise self.fate.refuse(f"ctx.lock: {problem}")

    def _wait_for_lock(self, name: str, timeout_seconds: float | None) -> None:
        self._stop_if_asked()
        attempt = self._run.attempt
        reply = self._line.ask(
            lambda number: Lock(
                request=number, attempt=attempt, name=name, timeout_seconds=timeout_seconds
            )
        )
        if not reply.ok:
            raise self.fate.lose(f"the claim was taken away; the lock {name!r} was not taken")
        if reply.body == "stopped":
            self.stop_raised = True
            raise Stopped(f"the attempt was asked to stop while it waited for the lock {name!r}")
        if reply.body == "timed_out":
            raise TimeoutError(f"the lock {name!r} was not free within {timeout_seconds:g} s")

    def _give_back_lock(self, name: str) -> None:
        work, fate = self._work, self.fate
        if work is not None and (work.open or work.deferred):
            return  # held until its COMMIT, which ends the claim, and the lock with it
        if fate.over or fate.lost or fate.uncertain:
            return  # as is the claim that it is held by, or that will be
        attempt = self._run.attempt
        self._line.ask(lambda number: Unlock(request=number, attempt=attempt, name=name))
        del self._locks[name]

    def check_end(self) -> None:
        """Look whether a plain return from process() can be a completion, and report what it left out.

        Raises:
            Stopped: The attempt stopped early.
            BaseException: What has ended the attempt before, even if author code caught it.
        """
        self.fate.check()
        if self.stop_raised or (self.stop_seen and not self.has_finished):
            raise Stopped
        self._report_skips()

    # -- checkpoints ---------------------------------------------------------------------------

    def _chunks(
        self,
        source: Callable[[KeyT | None], Iterable[ItemT]],
        size: int,
        key: Callable[[ItemT], KeyT],
    ) -> Iterator[list[ItemT]]:
        after = _key_from(json.loads(self._after))
        self._stop_if_asked()
        iterator = iter(source(after))
        while chunk := list(islice(iterator, size)):
            last = key(chunk[-1])
            if after is not None and key(chunk[0]) == after:
                raise self.fate.refuse(
                    f"ctx.chunks: an item with the key {after!r} comes again after the checkpoint "
                    "at that key. source(after) must begin behind the key, and keys must be unique"
                )
            held = _Chunk(after=self._key_text(last), items=len(chunk))
            short = len(chunk) < size
            self._chunk = held
            try:
                yield chunk
            finally:
                self._chunk = None
            self.fate.check()
            if not held.committed:
                state = held.state or self._state
                self._write_checkpoint(held.after, self._items + held.items, state)
            if short:  # the source has ended: no further look is needed to know that all is done
                return
            after = last
            self._stop_if_asked()

    def _key_text(self, key: object) -> str:
        try:
            return json.dumps(_key_to(key), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.fate.refuse(f"ctx.chunks: {error}") from error

    def _commit_chunk(self) -> None:
        chunk, work = self._chunk, self._transactions()
        if chunk is None:  # the loop was left inside the block
            work.abandon()
            raise self.fate.refuse("the loop of ctx.chunks ended inside its ctx.transaction()")
        items = self._items + chunk.items
        state = chunk.block_state or chunk.state or self._state
        work.commit("checkpoint", self._document(chunk.after, items, state))
        self._after, self._items, self._state = chunk.after, items, state
        self._saves += 1
        chunk.committed = self._chunk_committed = True

    def _document(self, after: str, items: int, state: str) -> str:
        skips = self._counters.kept()
        more = "" if skips is None else f',"skips":{skips}'
        text = (
            f'{{"after":{after},"items":{items},"state":{state},"saves":{self._saves + 1}{more}}}'
        )
        return contract.check_json(text, "checkpoint", contract.CHECKPOINT_BYTES)

    def _write_checkpoint(self, after: str, items: int, state: str) -> None:
        document = self._document(after, items, state)
        attempt = self._run.attempt
        reply = self._line.ask(
            lambda number: Checkpoint(request=number, attempt=attempt, checkpoint=document)
        )
        if not reply.ok:
            raise self.fate.lose("the claim was taken away; the checkpoint was not written")
        self._after, self._items, self._state = after, items, state
        self._saves += 1

    def _fence(self) -> Fence:
        from rowlock.runtime.transaction import partition_fence

        return partition_fence(self._run.partition_id, self._run.claim_token)

    def _stop_if_asked(self) -> None:
        if self._line.stop_asked(self._run.attempt):
            self.stop_raised = True
            raise Stopped("the attempt was asked to stop; its last checkpoint stands")


class ExecutorOutcome(Fenced, Outcome[Any]):
    """What `finish()` is given in an executor."""

    def __init__(self, finish: Finish, results: Codec[Any], line: Line) -> None:
        super().__init__(line)
        counts = json.loads(finish.counts)
        self.total = counts["total"]
        self.completed = counts["completed"]
        self.failed = counts["failed"]
        self.cancelled = counts["cancelled"]
        self._finish = finish
        self._codec = results

    def results(self) -> Iterator[tuple[str, Any]]:
        """Stream the key and the result of each completed partition, page by page."""
        after = 0
        while page := self._page(after):
            for _, key, text in page:
                yield key, self._decoded(key, text or "null")
            after = page[-1][0]

    def transaction(self) -> AbstractContextManager[psycopg.Connection[TupleRow]]:
        """A transaction whose COMMIT waits until `finish()` returns; see `rowlock.Outcome`."""
        self.fate.check()
        work = self._transactions()
        if work.open or work.deferred:
            raise self.fate.refuse(
                "a second outcome.transaction(): the first is committed together with the end of "
                "the execution, when finish() returns. Put both into one"
            )
        return work.block(work.defer)

    def _fence(self) -> Fence:
        from rowlock.runtime.transaction import finish_fence

        return finish_fence(self._finish.execution_id, self._finish.epoch)

    def _decoded(self, key: str, text: str) -> Any:
        try:
            return self._codec.decode(text)
        except ContractError as error:
            what = f"{error.what} of partition {key!r}"
            raise ContractError(what, error.path, error.problem) from error

    def _page(self, after: int) -> list[tuple[int, str, str | None]]:
        self.fate.check()
        attempt = self._finish.attempt
        reply = self._line.ask(lambda number: Results(request=number, attempt=attempt, after=after))
        if not reply.ok:
            raise self.fate.lose("another node is the master of this execution now")
        page: list[tuple[int, str, str | None]] = json.loads(reply.body or "[]")
        return page


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lock_problem(name: object, timeout_seconds: object) -> str | None:
    """Why a lock cannot have this name, or be waited for so long."""
    if not isinstance(name, str):
        return f"the name must be a str, not {name!r}"
    size = len(name.encode(errors="surrogatepass"))
    if not name or "\0" in name or size > LOCK_NAME_BYTES or not _is_text(name):
        return f"{name[:50]!r}… is no name of a lock: use 1 to {LOCK_NAME_BYTES} bytes of text without NUL"
    if timeout_seconds is None:
        return None
    number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
    if not number or not 0 <= cast("float", timeout_seconds) < math.inf:
        return (
            f"timeout_seconds={timeout_seconds!r} must be a number of seconds, 0 or more, or None"
        )
    return None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a character
        return False
    return True


# -- checkpoints as JSON -----------------------------------------------------------------------


def _read_checkpoint(text: str | None) -> tuple[str, int, str, Counters, int]:
    """The key after which to resume, the items done so far, the author's state, what was skipped, and the
    number of the checkpoint.

    Key and state are JSON texts.
    """
    if text is None:
        return "null", 0, "null", Counters(), 0
    try:
        document = json.loads(text)
        items, saves = document["items"], document.get("saves", 0)
        if not isinstance(items, int) or not isinstance(saves, int):
            raise TypeError(items, saves)
        counters = Counters.of_checkpoint(document.get("skips"))
        after, state = json.dumps(document["after"]), json.dumps(document["state"])
        return after, items, state, counters, saves
    except (ValueError, KeyError, TypeError) as error:
        problem = "expected an object with after, items and state, as rowlock writes it"
        raise ContractError("checkpoint", "$", problem) from error


def _state_text(state: object) -> str:
    try:
        text = json.dumps(state, allow_nan=False)
        same = json.loads(text) == state
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError("checkpoint", "$.state", f"{error}; {_JSON_ONLY}") from error
    if not same:  # a tuple would come back as a list, the key 1 as "1"
        raise ContractError("checkpoint", "$.state", f"it would come back changed; {_JSON_ONLY}")
    return text


_JSON_ONLY: Final = "use only None, bool, int, float, str, list, and dict with str keys"

_SCALARS: Final[dict[str, tuple[type, Callable[[Any], str], Callable[[str], object]]]] = {
    # datetime before date, of which it is a subclass
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
}
"""Key types that JSON has not, by their tag in the document: `{"date": "2013-01-01"}`."""


def _key_to(key: Any) -> Any:  # whatever the author's key() returns
    """A chunk key as a JSON value from which `_key_from` makes an equal one again.

    Raises:
        TypeError: No such value exists.
    """
    if isinstance(key, (bool, int, float, str)):
        return key
    if isinstance(key, (tuple, list)):
        tag = "tuple" if isinstance(key, tuple) else "list"
        parts = cast("Iterable[Any]", key)  # narrowing leaves its items unknown
        return {tag: [_key_to(part) for part in parts]}
    for tag, (cls, dump, _) in _SCALARS.items():
        if isinstance(key, cls):
            return {tag: dump(key)}
    raise TypeError(
        f"key(item) returned {key!r}: it must be a str, int, float, date, datetime, Decimal, UUID, "
        "or a tuple of these, so that a later attempt can resume after it"
    )


def _key_from(value: Any) -> Any:  # JSON that _key_to wrote
    if not isinstance(value, dict):
        return value
    ((tag, inner),) = cast("dict[str, Any]", value).items()  # narrowing leaves them unknown
    if tag in ("tuple", "list"):
        parts = [_key_from(part) for part in inner]
        return tuple(parts) if tag == "tuple" else parts
    return _SCALARS[tag][2](inner)


def idempotency_key(job: str, instance_key: str, step: str, key: str) -> str:
    """What identifies a partition over attempts, nodes and restarts: 64 hexadecimal digits."""
    identity = json.dumps([job, instance_key, step, key], ensure_ascii=True)
    return hashlib.sha256(identity.encode()).hexdigest()
