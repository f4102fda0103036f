"""The closing table: what happened to the two jobs, side by side, and what it proves. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rowlock.demo.findings import Ended, Findings, Kill, Payments, Settlement, Unknown

GAP: Final = "  "
NOTHING: Final = "-"


class Row(NamedTuple):
    """One line of the table: what it is about, and what it was in each act."""

    label: str
    settle: str
    payout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Everything that is said at the end."""

    headings: Row
    rows: tuple[Row, ...]
    unknown: tuple[str, ...]
    """Lines about the payments that a person must look at."""
    verdict: str
    ok: bool
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """As plain text."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        yield _aligned(self.headings, widths)
        yield _aligned(["-" * width for width in widths], widths)
        for row in self.rows:
            yield _aligned(row, widths)
        if self.unknown:
            yield ""
            yield from self.unknown
        yield ""
        yield self.verdict
        yield from self.notes


def close(findings: Findings) -> Closing:
    """The closing table of these findings."""
    settlement, payments = findings.settlement, findings.payments
    problems = findings.problems
    return Closing(
        headings=Row("", settlement.ended.job, payments.ended.job),
        rows=tuple(_rows(findings, settlement, payments)),
        unknown=tuple(_unknown_lines(payments.unknown)),
        verdict=(
            f"Not as it must be: {'; '.join(problems)}."
            if problems
            else "The ledger equals the reference to the cent. Nothing was lost, nothing doubled."
        ),
        ok=not problems,
        notes=tuple(_notes(findings)),
    )


def dollars(cents: int) -> str:
    """An amount for people: 12345 is $123.45."""
    return f"${cents // 100:,}.{cents % 100:02}"


def listed(keys: Sequence[str]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    *first, last = keys
    return f"{', '.join(first)} and {last}" if first else last


def _rows(findings: Findings, settlement: Settlement, payments: Payments) -> Iterator[Row]:
    settled, paid = settlement.ended, payments.ended
    ledger, books = settlement.ledger, payments.books
    yield Row("delivery", "AT_LEAST_ONCE", "AT_MOST_ONCE")
    yield Row("completed", _partitions(settled), _partitions(paid))
    yield Row("attempts", f"{settled.attempts:,}", f"{paid.attempts:,}")
    yield Row("killed (SIGKILL)", _killed(settlement.kill), _killed(payments.kill))
    yield Row(
        "while it ran",
        _several(len(settlement.kill.started), "partition"),
        _several(len(payments.kill.started), "payment"),
    )
    yield Row(
        "recovered work",
        f"{len(settlement.recovered):,} ran again elsewhere",
        f"none; {_several(len(payments.unknown), 'payment')} unknown",
    )
    kept = sum(one.flights_kept for one in settlement.recovered)
    yield Row("kept by checkpoints", f"{kept:,} of their flights", NOTHING)
    yield Row(
        "recovery time",
        _seconds(settlement.recovery_seconds),
        _seconds(payments.kill.removed_seconds),
    )
    if findings.fenced_writes:
        yield Row("late writes refused", f"{findings.fenced_writes:,}", "")
    yield Row("execution", settled.status, paid.status)
    yield Row("ledger / bank", dollars(ledger.ledger_cents), dollars(books.paid_cents))
    yield Row("reference / due", dollars(ledger.reference_cents), dollars(books.due_cents))
    yield Row(
        "one by one",
        f"{ledger.flights:,} flights {'equal' if ledger.equal else 'NOT EQUAL'}",
        f"{len(books.paid_once)} of {len(books.orders)} orders paid",
    )
    yield Row("doubled", f"{ledger.doubled:,} flights", f"{payments.doubled:,} payments")


def _partitions(ended: Ended) -> str:
    return f"{ended.completed:,} of {ended.partitions:,} partitions"


def _several(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _killed(kill: Kill) -> str:
    return f"{kill.node}, the master" if kill.was_master else kill.node


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:.1f} s after the kill"


def _unknown_lines(unknown: Sequence[Unknown]) -> Iterator[str]:
    if not unknown:
        return
    yield "flights.payout is FAILED on purpose: no unknown payment is taken for done, or"
    yield "made again. A person asks the bank, by the idempotency key on its statement:"
    for one in unknown:
        answer = "never paid" if one.payment_id is None else f"payment {one.payment_id}"
        yield f"  {one.key:<10} {dollars(one.cents):>15}  {one.reference[:12]}...  {answer}"


def _notes(findings: Findings) -> Iterator[str]:
    yield (
        f"{findings.nodes} nodes, PostgreSQL {findings.postgresql}, rowlock {findings.rowlock},"
        f" {findings.seconds:.0f} s in all."
    )
    if findings.bystanders:
        yield (
            f"{listed(findings.bystanders)} was removed too, alive: this machine is too busy for a "
            f"beat every {findings.beat_seconds:g} s. It changed nothing in the result."
        )
    if findings.left:
        yield f"Left in the database: {findings.left}."


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return f"  {GAP.join(padded)}".rstrip()
