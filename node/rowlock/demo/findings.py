"""The facts of one demonstration, and whether all went as it must. Pure; amounts are in cents."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any
from uuid import UUID

from rowlock.demo.reference import Comparison, PaymentComparison
from rowlock.demo.victim import Held


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One node was killed with SIGKILL."""

    node: str
    node_id: UUID
    pid: int
    was_master: bool
    """It drove the execution, too."""
    at: datetime
    """By the database's clock, just before the signal was sent."""
    held: tuple[Held, ...]
    """What it held when it was dead. Empty: the kill missed."""
    unreachable_seconds: float | None
    """From the kill until it was marked UNREACHABLE."""
    removed_seconds: float | None
    """From the kill until it was REMOVED and its claims taken back."""

    @property
    def started(self) -> tuple[Held, ...]:
        """The partitions that it was running."""
        return tuple(held for held in self.held if held.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """A partition that the victim was running, and that another node has completed."""

    key: str
    node: str
    attempt: int
    seconds: float
    """From the kill until it ran again."""
    flights_kept: int
    """Settled and committed by the victim."""
    flights_settled: int
    """Settled by the later attempt, which went on behind the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A payment that was started and whose outcome nobody has recorded."""

    key: str
    cents: int
    reference: str
    """The idempotency key, which is printed on the bank's statement."""
    payment_id: int | None
    """The bank's number of the payment; None: the bank has not paid."""
    error: str
    """What the partition's row says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an execution ended."""

    execution_id: UUID
    job: str
    status: str
    reason: str | None
    partitions: int
    completed: int
    failed: int
    attempts: int
    """Claims of all partitions together."""
    seconds: float
    masters: int
    """How many nodes have driven it, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The first act."""

    ended: Ended
    kill: Kill
    recovered: tuple[Recovered, ...]
    ledger: Comparison

    @property
    def recovery_seconds(self) -> float | None:
        """From the kill until the last of the victim's running partitions ran again."""
        return max((one.seconds for one in self.recovered), default=None)

    def problems(self) -> Iterator[str]:
        """What is not as it must be."""
        yield from _kill_problems(self.kill)
        ended, ledger = self.ended, self.ledger
        if ended.status != "COMPLETED":
            yield f"{ended.job} ended {ended.status}, not COMPLETED: {ended.reason}"
        if ended.completed != ended.partitions:
            yield f"{ended.completed} of {ended.partitions} days were settled"
        missing = {held.key for held in self.kill.started} - {one.key for one in self.recovered}
        if missing:
            yield f"{', '.join(sorted(missing))} did not run again after the kill"
        if ledger.doubled:
            yield f"{ledger.doubled} flights were settled twice"
        if not ledger.equal:
            first = ledger.differences[0]
            yield f"the ledger differs from the reference on {len(ledger.differences)} days ({first})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payments:
    """The second act."""

    ended: Ended
    kill: Kill
    unknown: tuple[Unknown, ...]
    books: PaymentComparison

    @property
    def doubled(self) -> int:
        """Payments beyond the first for the same order."""
        return sum(max(0, order.payments - 1) for order in self.books.orders)

    def problems(self) -> Iterator[str]:
        """What is not as it must be."""
        yield from _kill_problems(self.kill)
        ended, books = self.ended, self.books
        if ended.status != "FAILED":
            yield f"{ended.job} ended {ended.status}, although a payment is unknown: it must be FAILED"
        if ended.completed + len(self.unknown) != ended.partitions:
            yield (
                f"{ended.completed} payments are recorded and {len(self.unknown)} unknown, of "
                f"{ended.partitions}"
            )
        missing = {held.key for held in self.kill.started} - {one.key for one in self.unknown}
        if missing:
            yield f"{', '.join(sorted(missing))} was lost with its node, but is not FAILED"
        if books.wrong:
            yield f"{len(books.wrong)} orders were paid twice, or with a wrong amount"
        unpaid = {f"{order.carrier}-{order.half}" for order in books.unpaid}
        if stray := unpaid - {one.key for one in self.unknown}:
            yield f"{', '.join(sorted(stray))} was recorded, but the bank has not paid it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that one demonstration has found."""

    rowlock: str
    """Its version."""
    postgresql: str
    """Its version."""
    embedded: bool
    nodes: int
    slots: int
    beat_seconds: float
    removal_seconds: float
    flights: int
    settlement: Settlement
    payments: Payments
    fenced_writes: int
    """Writes that came after their claim was lost, and were refused."""
    bystanders: tuple[str, ...]
    """Nodes that were removed although nobody had killed them: too slow for the heartbeat."""
    seconds: float
    left: str | None
    """What stays in the database."""

    @property
    def problems(self) -> list[str]:
        """Why this demonstration has failed; empty if it has not."""
        return [*self.settlement.problems(), *self.payments.problems()]

    @property
    def document(self) -> dict[str, Any]:
        """The same as JSON values."""
        problems = self.problems
        settlement, payments = self.settlement, self.payments
        document: dict[str, Any] = json.loads(
            json.dumps(dataclasses.asdict(self), default=_as_json)
        )
        document["settlement"]["recovery_seconds"] = settlement.recovery_seconds
        document["settlement"]["ledger"]["equal"] = settlement.ledger.equal
        document["payments"]["books"] = {
            "orders": len(payments.books.orders),
            "paid_once": len(payments.books.paid_once),
            "unpaid": len(payments.books.unpaid),
            "doubled": payments.doubled,
            "due_cents": payments.books.due_cents,
            "paid_cents": payments.books.paid_cents,
        }
        return {"ok": not problems, "problems": problems, **document}


def _kill_problems(kill: Kill) -> Iterator[str]:
    if not kill.started:
        yield f"{kill.node} was killed, but held no partition that it had started"


def _as_json(value: object) -> str:
    """What JSON has no form of its own for: moments, days and ids."""
    return value.isoformat() if isinstance(value, (datetime, date)) else str(value)
