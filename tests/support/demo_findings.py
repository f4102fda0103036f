"""Findings of a demonstration that never took place, for tests of what is said about them."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

from rowlock.demo.findings import Ended, Findings, Kill, Payments, Recovered, Settlement, Unknown
from rowlock.demo.reference import (
    Comparison,
    DayComparison,
    OrderComparison,
    PaymentComparison,
)
from rowlock.demo.victim import Held


def held(key: str, *, started: bool = True, halfway: bool = True, done: str = "") -> Held:
    return Held(
        partition_id=abs(hash(key)),
        key=key,
        attempt=1,
        started=started,
        halfway=halfway,
        done=done,
    )


def a_kill(node: str, *keys: str, was_master: bool = False) -> Kill:
    return Kill(
        node=node,
        node_id=uuid.UUID(int=1),
        pid=4711,
        was_master=was_master,
        at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        held=tuple(map(held, keys)),
        unreachable_seconds=2.6,
        removed_seconds=5.1,
    )


def an_end(job: str, status: str, *, partitions: int, completed: int, attempts: int) -> Ended:
    return Ended(
        execution_id=uuid.UUID(int=2),
        job=job,
        status=status,
        reason=None if status == "COMPLETED" else "1 of 3 partitions failed, 0 allowed",
        partitions=partitions,
        completed=completed,
        failed=partitions - completed,
        attempts=attempts,
        seconds=8.0,
        masters=2,
    )


def a_ledger(**changes: Any) -> Comparison:
    ledger = Comparison(
        days=365,
        flights=336_776,
        claims=37_747,
        reference_cents=71_086_819_513,
        ledger_entries=336_776,
        ledger_cents=71_086_819_513,
        doubled=0,
        missing=0,
        differences=(),
    )
    return replace(ledger, **changes)


def a_difference() -> DayComparison:
    return DayComparison(
        flight_date=date(2013, 7, 10),
        reference_flights=1004,
        reference_claims=100,
        reference_cents=5,
        ledger_entries=1005,
        ledger_flights=1004,
        ledger_claims=100,
        ledger_cents=5,
        wrong_entries=0,
    )


def an_order(carrier: str, *, payments: int = 1) -> OrderComparison:
    return OrderComparison(
        carrier=carrier,
        half="2013H1",
        due_cents=1000,
        payments=payments,
        paid_cents=1000 * payments,
    )


def a_settlement(**changes: Any) -> Settlement:
    recovered = Recovered(
        key="2013-07-10",
        node="node-3",
        attempt=2,
        seconds=5.2,
        flights_kept=250,
        flights_settled=754,
    )
    settlement = Settlement(
        ended=an_end("flights.settle", "COMPLETED", partitions=365, completed=365, attempts=366),
        kill=a_kill("node-1", "2013-07-10", was_master=True),
        recovered=(recovered,),
        ledger=a_ledger(),
    )
    return replace(settlement, **changes)


def an_unknown(key: str, *, payment_id: int | None = 7) -> Unknown:
    return Unknown(
        key=key,
        cents=123_456,
        reference="ab" * 32,
        payment_id=payment_id,
        error="the node was lost",
    )


def the_payments(**changes: Any) -> Payments:
    payments = Payments(
        ended=an_end("flights.payout", "FAILED", partitions=3, completed=2, attempts=3),
        kill=a_kill("node-2", "UA-2013H1"),
        unknown=(an_unknown("UA-2013H1"),),
        books=PaymentComparison(orders=tuple(map(an_order, ("AA", "DL", "UA")))),
    )
    return replace(payments, **changes)


def the_findings(**changes: Any) -> Findings:
    findings = Findings(
        rowlock="1.2.3",
        postgresql="18.1",
        embedded=True,
        nodes=3,
        slots=2,
        beat_seconds=0.5,
        removal_seconds=5.0,
        flights=336_776,
        settlement=a_settlement(),
        payments=the_payments(),
        fenced_writes=0,
        bystanders=(),
        seconds=24.5,
        left=None,
    )
    return replace(findings, **changes)
