"""The demonstration from the first line to the last: two acts, and a node killed in each.

Everything in it is real: a PostgreSQL, nodes that are processes of their own, SIGKILL.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import rowlock
from rowlock.db.migrate import migrate
from rowlock.demo import archive, data, narration, reference
from rowlock.demo.act import Act, Blow, House
from rowlock.demo.crew import Crew
from rowlock.demo.database import connect
from rowlock.demo.findings import Findings, Payments, Recovered, Settlement, Unknown
from rowlock.demo.jobs import Payout, PayoutRun, Period, Settle
from rowlock.demo.lookout import Claimed, Fate
from rowlock.demo.screen import Screen, step
from rowlock.demo.tempo import Tempo
from rowlock.demo.venue import Venue
from rowlock.demo.victim import Held
from rowlock.errors import RowlockError
from rowlock.protocol.model import FIRST_STEP
from rowlock.runtime.context import idempotency_key

ORDERS: Final = 32
"""Payments in the second act: 16 airlines, two half-years."""

START_SECONDS_MAX: Final = 60.0
LOG_LINES: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played."""

    venue: Venue
    screen: Screen
    tempo: Tempo
    nodes: int
    began: float
    """When the command started, on the monotonic clock."""


def play(plan: Plan) -> Findings:
    """Prepare, play both acts, end the nodes, and say what was found.

    Raises:
        Stuck: Something did not happen within its time.
        NodeDied: A node ended that nobody had killed.
        RowlockError: Something that the database makes impossible; says what would help.
    """
    dsn, pool = plan.venue.dsn, f"demo-{uuid.uuid4().hex[:8]}"
    crew = Crew(
        folder=plan.venue.folder,
        environment={**plan.tempo.environment(), "ROWLOCK_DSN": dsn, "ROWLOCK_WORK_DSN": dsn},
        words=["--pool", pool, "--slots", str(plan.tempo.slots)],
    )
    with crew:
        try:
            findings = _play(plan, crew, pool)
        except KeyboardInterrupt:
            plan.screen.release()
            print("rowlock: interrupted, ending the nodes", file=sys.stderr)
            raise
        except RowlockError:
            plan.screen.release()
            _show_logs(plan, crew)
            raise
        if findings.problems:
            _show_logs(plan, crew)
        return findings


def _play(plan: Plan, crew: Crew, pool: str) -> Findings:
    dsn, screen, tempo = plan.venue.dsn, plan.screen, plan.tempo
    with step(screen, "Schema") as schema:
        applied = migrate(dsn)
        schema.text = f"{len(applied)} migrations applied" if applied else "up to date"
    # They start while the flights are loaded, which leaves one of two processors idle.
    for number in range(1, plan.nodes + 1):
        crew.start(f"node-{number}")
    with step(screen, "Flights") as flights:
        loaded = data.load(dsn)
        flights.text = f"{loaded:,} flights of {archive.DAYS} days loaded"
    with connect(dsn) as db:
        house = House(screen=screen, tempo=tempo, crew=crew, db=db, pool=pool)
        with step(screen, "Nodes") as nodes:
            wait_for_nodes(house)
            nodes.text = f"{', '.join(crew.names)}, slots of each: {tempo.slots}"
        settlement = settle(house, dsn)
        payments = pay(house, dsn, spared=settlement.kill.node)
        bystanders = tuple(_bystanders(house))
    crew.end()
    return Findings(
        rowlock=rowlock.__version__,
        postgresql=plan.venue.version,
        embedded=plan.venue.embedded,
        nodes=plan.nodes,
        slots=tempo.slots,
        beat_seconds=tempo.beat_seconds,
        removal_seconds=tempo.removal_seconds,
        flights=loaded,
        settlement=settlement,
        payments=payments,
        fenced_writes=crew.fenced_writes(),
        bystanders=bystanders,
        seconds=time.monotonic() - plan.began,
        left=plan.venue.left,
    )


def _show_logs(plan: Plan, crew: Crew) -> None:
    """They are gone with this process, and something went wrong that they may explain."""
    logs = {"the server": plan.venue.server_log, **crew.logs}
    for name, log in logs.items():
        if log is not None:
            print(f"-- the end of the log of {name}", file=sys.stderr)
            lines = log.read_text(errors="replace").splitlines()
            print(*lines[-LOG_LINES:], sep="\n", file=sys.stderr)


def wait_for_nodes(house: House) -> None:
    """Wait until every name has a node that beats."""

    def all_here() -> bool:
        here = {node.name for node in house.lookout.nodes() if node.status == "ACTIVE"}
        return here >= set(house.crew.names)

    house.wait(all_here, "the start of all nodes", START_SECONDS_MAX)


# -- the first act -----------------------------------------------------------------------------


def settle(house: House, dsn: str) -> Settlement:
    """Settle every flight, kill the master in the middle of it, and compare the ledger."""
    house.screen.begin_act(
        "Act 1: flights.settle, AT_LEAST_ONCE",
        [
            f"{archive.DAYS} partitions, one for each day. The master of the execution is killed",
            "while it runs some of them. They must run again elsewhere, and no flight may be",
            "settled twice.",
        ],
    )
    pace_ms = house.tempo.pace_ms(nodes=len(house.crew.names), partitions=archive.DAYS)
    act = Act(house, Settle, Period(pace_ms=pace_ms, chunk_flights=house.tempo.chunk_flights))
    act.be_calm()
    blow = act.strike(_how_far_settled, master=True)
    again = _wait_for_second_attempts(house, act, blow)
    house.crew.start(blow.holding.node)
    act.tell(narration.of_restart(blow.holding.node))
    act.until(act.is_over, "the end of the execution")
    ended = act.ended()
    act.tell(narration.of_end(ended))
    house.screen.end_act()
    return Settlement(
        ended=ended,
        kill=act.verdict_on(blow),
        recovered=tuple(_recovered(house, blow, held, again) for held in blow.holding.started),
        ledger=reference.compare(dsn),
    )


def _how_far_settled(claimed: Claimed) -> Held:
    """The checkpoint says how many flights are settled and committed.

    A partition that was claimed ahead of time has no start in its row even when it runs.
    """
    done = 0 if claimed.checkpoint is None else claimed.checkpoint["items"]
    return Held(
        partition_id=claimed.partition_id,
        key=claimed.key,
        attempt=claimed.attempt,
        started=claimed.started or done > 0,
        halfway=0 < done < claimed.slice["flights"],
        kept=done,
        done=f"{done} of {claimed.slice['flights']} flights settled",
    )


def _wait_for_second_attempts(house: House, act: Act, blow: Blow) -> dict[int, Fate]:
    """What the victim ran, once each of it runs again; tells it as it happens."""
    held = {one.partition_id: one for one in blow.holding.started}
    again: dict[int, Fate] = {}

    def all_run() -> bool:
        for key, fate in house.lookout.fates(list(held)).items():
            is_new = fate.attempt > held[key].attempt and fate.started_at is not None
            if key not in again and is_new:
                again[key] = fate
                act.tell(narration.of_second_attempt(held[key], fate))
        return len(again) == len(held)

    act.until(all_run, "the recovery of the victim's partitions")
    return again


def _recovered(house: House, blow: Blow, held: Held, again: dict[int, Fate]) -> Recovered:
    fate = again[held.partition_id]
    assert fate.started_at is not None
    by_attempt = house.lookout.flights_by_attempt(held.key)
    kept = sum(count for attempt, count in by_attempt.items() if attempt <= held.attempt)
    return Recovered(
        key=held.key,
        node=fate.node or "",
        attempt=fate.attempt,
        seconds=(fate.started_at - blow.at).total_seconds(),
        flights_kept=kept,
        flights_settled=sum(by_attempt.values()) - kept,
    )


# -- the second act ----------------------------------------------------------------------------


def pay(house: House, dsn: str, *, spared: str) -> Payments:
    """Pay every order, kill a node in the middle of a payment, and look into the bank's books."""
    house.screen.begin_act(
        "Act 2: flights.payout, AT_MOST_ONCE",
        [
            f"{ORDERS} payments through a bank that cannot take one back. A node is killed while it",
            "pays. Whether it has paid, only the bank knows: nobody may pay again, and the",
            "execution must end FAILED, for a person to look at.",
        ],
    )
    # The one that was started again may be the only one left to notice the next death.
    wait_for_nodes(house)
    pace_ms = house.tempo.pace_ms(nodes=len(house.crew.names), partitions=ORDERS)
    act = Act(house, Payout, PayoutRun(pace_ms=pace_ms))

    def how_far_paid(claimed: Claimed) -> Held:
        paid = _reference(act, claimed.key) in house.lookout.paid()
        return Held(
            partition_id=claimed.partition_id,
            key=claimed.key,
            attempt=claimed.attempt,
            started=claimed.started,
            halfway=paid,
            done="the bank has paid it" if paid else "the bank has not paid it yet",
        )

    act.be_calm()
    blow = act.strike(how_far_paid, spared=[spared])
    act.until(act.is_over, "the end of the execution")
    ended = act.ended()
    act.tell(narration.of_end(ended))
    house.screen.end_act()
    return Payments(
        ended=ended,
        kill=act.verdict_on(blow),
        unknown=tuple(_unknown(house, act)),
        books=reference.compare_payments(dsn),
    )


def _reference(act: Act, key: str) -> str:
    """What the order says on the bank's statement."""
    return idempotency_key(Payout.name, act.instance, FIRST_STEP, key)


def _unknown(house: House, act: Act) -> Iterator[Unknown]:
    failed = [one for one in house.lookout.partitions(act.execution_id) if one.status == "FAILED"]
    slices = house.lookout.slices([one.id for one in failed])
    paid = house.lookout.paid()
    for one in failed:
        key = _reference(act, one.partition_key)
        yield Unknown(
            key=one.partition_key,
            cents=slices[one.id]["cents"],
            reference=key,
            payment_id=paid.get(key),
            error=str((one.last_error or {}).get("message", "")),
        )


def _bystanders(house: House) -> Iterator[str]:
    """Nodes that were removed for their silence, and lived."""
    for node in house.lookout.nodes():
        if node.removed_reason == "silence" and node.node_id not in house.victims:
            yield node.name
