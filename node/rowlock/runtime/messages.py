"""The messages between a supervisor and its executors: one frozen dataclass each, JSON on the wire.

Payloads of the author (parameters, slices, results, checkpoints) travel as JSON *text* inside the
message, so that the supervisor never decodes them: a payload that breaks its contract can only
fail its own attempt.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

# -- supervisor → executor ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run one attempt of a partition."""

    attempt: int
    """Number of the attempt inside this supervisor; every answer names it."""
    job: str
    execution_id: str
    instance_key: str
    step: str
    partition_id: int
    key: str
    claim_token: str
    attempt_number: int
    """1 for the first attempt of the partition in this execution, as `ctx.attempt` shows it."""
    slice: str
    parameters: str
    checkpoint: str | None
    handshake: bool
    """True for AT_MOST_ONCE: decode, answer `Ready`, wait for `Go`, only then run author code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """The answer to `Ready`: author code may begin."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Ask the attempt to stop at its next checkpoint (`ctx.should_stop` becomes true)."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Run the job's `partition()` and stream what it yields."""

    attempt: int
    job: str
    execution_id: str
    step: str
    parameters: str
    cluster: str
    """JSON text: a list of objects with name, pool, slots and load, one for each live node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Run the job's `finish()`."""

    attempt: int
    job: str
    execution_id: str
    epoch: int
    parameters: str
    counts: str
    """JSON text: an object with total, completed, failed and cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to a request of the executor (`Checkpoint`, `Lock`, …)."""

    request: int
    ok: bool
    """False: the claim or the mastership is gone."""
    body: str | None = None
    """For `Results` JSON text, a list of [id, key, result text], empty at the end; for `Lock`
    'acquired', 'timed_out', or 'stopped' if the attempt is to stop and has not got it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Leave when the running attempt is over."""


# -- executor → supervisor ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The executor has imported its jobs and waits for work."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Decoded, author code not begun; waits for `Go` (AT_MOST_ONCE only)."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The attempt returned a result that keeps its contract."""

    attempt: int
    result: str | None
    committed: bool
    """True: `ctx.transaction()` has already written the completion in its own COMMIT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempt ended with an error."""

    attempt: int
    error: str
    """JSON text: an object with type, message and traceback; NUL-free, at most 16 KiB."""
    retry: str
    """'policy' (an ordinary exception), 'never' (Fail or a broken contract), 'later' (RetryLater),
    'infrastructure' (the work database went away: costs no failure)."""
    delay_seconds: float | None = None
    """Only with 'later'."""
    started: bool = True
    """False: author code did not begin (the slice could not be decoded)."""
    worn: bool = False
    """True: the process has run out of files or threads, and leaves: no other attempt could run in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The attempt stopped because it was asked to; its last checkpoint stands."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A fenced write of the attempt changed nothing: its claim is gone."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnknown:
    """The connection broke during the COMMIT of `ctx.transaction()`; the attempt has ended.

    The supervisor finds out with a fenced write (release): *completed by this token* or not.
    """

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Write the attempt's checkpoint; the supervisor answers with `Reply`."""

    request: int
    attempt: int
    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """Take a named lock; the supervisor answers with `Reply` when that has come to an end."""

    request: int
    attempt: int
    name: str
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlock:
    """Give a named lock back; the supervisor answers with `Reply` when it is free."""

    request: int
    attempt: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the attempt says it is, and what it has skipped (for people)."""

    attempt: int
    counters: str
    """JSON text."""
    request: int = 0
    """Answered with `Reply` once it is written; 0: it is written when there is time, and not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Part of a plan: parallel lists; the supervisor stages it and answers with `Reply`."""

    request: int
    attempt: int
    keys: list[str]
    slices: list[str]
    weights: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """`partition()` has yielded everything; all `Slices` were answered."""

    attempt: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Ask for results of the execution after the given partition id (0 = from the start)."""

    request: int
    attempt: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`finish()` returned."""

    attempt: int
    summary: str | None
    committed: bool
    """True: the transaction of `finish()` has already ended the execution in its own COMMIT."""


ToExecutor: TypeAlias = Run | Go | Stop | Plan | Finish | Reply | Exit
ToSupervisor: TypeAlias = (
    Hello
    | Ready
    | Completed
    | Failed
    | Stopped
    | Lost
    | CommitUnknown
    | Checkpoint
    | Lock
    | Unlock
    | Progress
    | Slices
    | Planned
    | Results
    | Finished
)
Message: TypeAlias = ToExecutor | ToSupervisor

_CLASSES: Final[dict[str, type[Any]]] = {
    cls.__name__: cls
    for cls in (
        *(Run, Go, Stop, Plan, Finish, Reply, Exit),
        *(Hello, Ready, Completed, Failed, Stopped, Lost, CommitUnknown, Checkpoint, Progress),
        *(Lock, Unlock, Slices, Planned, Results, Finished),
    )
}
_FIELDS: Final = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _CLASSES.values()}
_encode_json: Final = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(message: Message) -> bytes:
    """The JSON bytes of a message: an array of its class name and its fields in order.

    An array and a ready encoder because the supervisor does this for every partition: half the
    time of `json.dumps` on an object with names.
    """
    cls = type(message)
    return _encode_json([cls.__name__, *[getattr(message, name) for name in _FIELDS[cls]]]).encode()


def decode(raw: bytes) -> Message:
    """The message that `encode` made.

    Raises:
        ValueError, KeyError, TypeError: The bytes are no message.
    """
    name, *values = json.loads(raw.decode())
    cls = _CLASSES[name]
    message: Message = cls(**dict(zip(_FIELDS[cls], values, strict=True)))
    return message
