"""The demonstration's jobs, run by the real context over the real protocol, and interrupted.

One node lives in the test's own process: it plans, claims and runs one attempt at a time.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

import rowlock
from rowlock import contract
from rowlock.db.connect import connect
from rowlock.db.store import Store
from rowlock.demo import bank, data, jobs, reference
from rowlock.demo.jobs import Day, Order, PayoutRun, Period, Settle
from rowlock.job import AnyJob
from rowlock.protocol.model import FIRST_STEP, Claim, Completion
from rowlock.runtime.context import ExecutorContext, ExecutorOutcome
from rowlock.runtime.messages import Finish, Progress, Reply, Results, Run, ToSupervisor
from rowlock.runtime.transaction import WorkSession
from tests.support.postgres import Cluster, Database

FEBRUARY = Period(month=2)


@pytest.fixture(scope="module")
def loaded(postgres: Cluster) -> Generator[Database]:
    made = postgres.create()
    data.load(made.dsn)
    yield made
    postgres.drop(made.name)


@pytest.fixture
def node(loaded: Database, monkeypatch: pytest.MonkeyPatch) -> Generator[Node]:
    monkeypatch.setenv("ROWLOCK_WORK_DSN", loaded.dsn)
    data.reset(loaded.dsn)
    with connect(loaded.dsn, application_name="node of a test") as connection:
        connection.execute(
            "TRUNCATE rowlock.batch_job_coordination, rowlock.batch_nodes, rowlock.batch_instances"
            " CASCADE"
        )
        node = Node(database=loaded, store=Store(connection), line=Line(WorkSession(loaded.dsn)))
        node.register()
        yield node
        node.line.session.close()


@dataclass
class Line:
    """The executor around a context."""

    session: WorkSession
    results: Callable[[int], list[tuple[int, str, str | None]]] = lambda _after: []

    def tell(self, message: ToSupervisor) -> None:
        assert isinstance(message, Progress)

    def ask(self, request: Callable[[int], ToSupervisor]) -> Reply:
        message = request(1)
        assert isinstance(message, Results), "chunks with transactions need no other checkpoint"
        return Reply(request=1, ok=True, body=json.dumps(self.results(message.after)))

    def stop_asked(self, attempt: int) -> bool:
        return False

    def work_session(self) -> WorkSession:
        return self.session


@dataclass
class Node:
    """A node with one slot."""

    database: Database
    store: Store
    line: Line
    id: uuid.UUID = field(default_factory=uuid.uuid4)

    def register(self) -> None:
        accepted = {"flights.settle": ["h"], "flights.payout": ["h"]}
        self.store.register(
            self.id, name="test", pool="default", slots=1, jobs=accepted, version="0"
        )

    def launch(self, job: AnyJob, params: Any) -> uuid.UUID:
        """Request an execution, become its master, and plan it."""
        codecs = contract.codecs(type(job))
        execution, _ = self.store.request(
            uuid.uuid4(),
            job=job.name,
            contract_hash="h",
            policy=job.policy(),
            delivery=job.delivery,
            instance_key=str(uuid.uuid4()),
            parameters=codecs.parameters.encode(params),
            pool="default",
        )
        mastership = self.store.adopt(self.id, execution)
        assert mastership is not None
        parts = list(job.partition(params, rowlock.Cluster()))
        staged = self.store.stage(
            execution,
            mastership.epoch,
            0,
            keys=[str(job.key(part)) for part in parts],
            slices=[codecs.slice.encode(part) for part in parts],
            weights=[job.weight(part) for part in parts],
        )
        assert staged
        sealed = self.store.seal(execution, mastership.epoch, FIRST_STEP, len(parts))
        assert sealed == ("sealed", None)
        return execution

    def claim(self) -> Claim | None:
        claims = self.store.claim(self.id, slots=1, prefetch=0, idle=True, seed=1)
        return claims[0] if claims else None

    def context(self, claim: Claim, params: Any, *, number: int = 1) -> ExecutorContext:
        run = Run(
            attempt=1,
            job="test",
            execution_id=str(claim.execution_id),
            instance_key="i",
            step=claim.step,
            partition_id=claim.id,
            key=claim.key,
            claim_token=str(claim.token),
            attempt_number=number,
            slice=claim.slice,
            parameters="{}",
            checkpoint=claim.checkpoint,
            handshake=False,
        )
        return ExecutorContext(run, params, self.line)

    def attempt(self, job: AnyJob, params: Any, claim: Claim, *, number: int = 1) -> Any:
        """Run one attempt and write its completion; what it raises leaves the claim as it is."""
        codecs = contract.codecs(type(job))
        ctx = self.context(claim, params, number=number)
        try:
            result = job.process(codecs.slice.decode(claim.slice), ctx)
        except BaseException:
            ctx.rollback()
            raise
        finally:
            self.line.session.end_attempt(keep=False)
        text = codecs.result.encode(result)
        done = self.store.complete(
            self.id, [Completion(id=claim.id, token=claim.token, result=text)]
        )
        assert done == {claim.id: "completed"}
        return result

    def run_all(self, job: AnyJob, params: Any) -> int:
        """Run what is left; how many partitions."""
        count = 0
        while claim := self.claim():
            self.attempt(job, params, claim)
            count += 1
        return count

    def finish(self, job: AnyJob, params: Any, execution: uuid.UUID) -> Any:
        """What `finish()` says of the results in the database."""
        self.line.results = lambda after: self.store.results(execution, after, 10)
        counts = json.dumps({"total": 0, "completed": 0, "failed": 0, "cancelled": 0})
        finish = Finish(
            attempt=1,
            job=job.name,
            execution_id=str(execution),
            epoch=1,
            parameters="{}",
            counts=counts,
        )
        codecs = contract.codecs(type(job))
        summary = job.finish(params, ExecutorOutcome(finish, codecs.result, self.line))
        assert codecs.summary.decode(codecs.summary.encode(summary)) == summary
        return summary


def written(node: Node) -> int:
    """Rows in the ledger."""
    return len(node.database.rows("SELECT FROM demo.ledger"))


def attempts_in_ledger(database: Database, claim: Claim) -> list[tuple[int, int]]:
    """How many rows each attempt wrote for the day of a claim."""
    return database.rows(
        "SELECT attempt, count(*) FROM demo.ledger WHERE flight_date = %s::date"
        " GROUP BY attempt ORDER BY attempt",
        (claim.key,),
    )


# -- flights.settle ----------------------------------------------------------------------------


def test_a_month_is_settled_like_the_reference(node: Node) -> None:
    execution = node.launch(Settle(), FEBRUARY)

    assert node.run_all(Settle(), FEBRUARY) == 28

    comparison = reference.compare(node.database.dsn, month=2)
    assert comparison.equal
    summary = node.finish(Settle(), FEBRUARY, execution)
    assert (summary.days, summary.flights) == (comparison.days, comparison.flights)
    assert (summary.claims, summary.cents) == (comparison.claims, comparison.reference_cents)


def test_busy_days_come_first_under_their_date(node: Node) -> None:
    node.launch(Settle(), FEBRUARY)

    claim = node.claim()

    assert claim is not None
    flights = json.loads(claim.slice)["flights"]
    assert json.loads(claim.slice)["flight_date"] == claim.key
    busiest = node.database.value(
        "SELECT max(flights) FROM (SELECT count(*) AS flights FROM demo.flights"
        " WHERE extract(month FROM flight_date) = 2 GROUP BY flight_date) AS days"
    )
    assert flights == busiest


def test_an_attempt_that_stops_continues_elsewhere_after_its_checkpoint(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.launch(Settle(), FEBRUARY)
    claim = node.claim()
    assert claim is not None

    def after_two_chunks(_attempt: int) -> bool:
        return written(node) == 500

    with monkeypatch.context() as patch:
        patch.setattr(node.line, "stop_asked", after_two_chunks)
        with pytest.raises(rowlock.Stopped):
            node.attempt(Settle(), FEBRUARY, claim)
    node.store.release(node.id, [(claim.id, claim.token)], unstarted=False)
    again = node.claim()
    assert again is not None
    assert again.id == claim.id
    result = node.attempt(Settle(), FEBRUARY, again, number=2)

    flights = json.loads(claim.slice)["flights"]
    assert attempts_in_ledger(node.database, claim) == [(1, 500), (2, flights - 500)]
    assert result.flights == flights, "the result covers what the first attempt had settled"
    node.run_all(Settle(), FEBRUARY)
    assert reference.compare(node.database.dsn, month=2).equal


def test_a_chunk_of_a_holder_whose_claim_is_gone_leaves_no_row(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.launch(Settle(), FEBRUARY)
    claim = node.claim()
    assert claim is not None

    def lose_the_claim(_milliseconds: float) -> None:
        node.store.release(node.id, [(claim.id, claim.token)], unstarted=False)

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_pace", lose_the_claim)  # called after each chunk
        with pytest.raises(rowlock.LeaseLost):
            node.attempt(Settle(), FEBRUARY, claim)

    assert attempts_in_ledger(node.database, claim) == [(1, 250)]
    node.run_all(Settle(), FEBRUARY)
    assert reference.compare(node.database.dsn, month=2).equal


def test_a_flight_that_is_missing_fails_the_day_for_good(node: Node) -> None:
    node.launch(Settle(), FEBRUARY)
    claim = node.claim()
    assert claim is not None
    slice_ = {**json.loads(claim.slice), "flight_date": "2013-01-01"}
    wrong = Day.model_validate_json(json.dumps(slice_))

    ctx = node.context(claim, FEBRUARY)
    with pytest.raises(rowlock.Fail, match="load the data again"):
        Settle().process(wrong, ctx)
    ctx.rollback()

    assert node.database.value("SELECT count(*) FROM demo.ledger") == 0


def test_the_pace_of_a_day_is_spread_over_its_chunks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(jobs, "_pace", waited.append)
    params = Period(month=2, pace_ms=100, chunk_flights=300)
    node.launch(Settle(), params)
    claim = node.claim()
    assert claim is not None

    node.attempt(Settle(), params, claim)

    assert len(waited) == 4
    assert sum(waited) == pytest.approx(100)


@pytest.mark.parametrize(
    "text, path",
    [
        ('{"month": 13}', "$.month"),
        ('{"month": "2"}', "$.month"),
        ('{"chunk_flights": 0}', "$.chunk_flights"),
        ('{"pace": 1}', "$.pace"),
    ],
)
def test_wrong_parameters_are_refused_with_their_path(text: str, path: str) -> None:
    with pytest.raises(rowlock.ContractError) as caught:
        contract.codecs(Settle).parameters.decode(text)

    assert caught.value.path == path


def test_no_parameters_mean_the_whole_year() -> None:
    assert contract.codecs(Settle).parameters.decode("{}") == Period()


# -- flights.payout ----------------------------------------------------------------------------


def test_every_order_is_paid_once_under_the_key_of_its_partition(node: Node) -> None:
    node.launch(Settle(), FEBRUARY)
    node.run_all(Settle(), FEBRUARY)
    execution = node.launch(jobs.Payout(), PayoutRun())

    orders = node.run_all(jobs.Payout(), PayoutRun())

    payments = bank.statement(node.database.dsn)
    assert len({payment.reference for payment in payments}) == len(payments) == orders
    comparison = reference.compare_payments(node.database.dsn)
    assert len(comparison.paid_once) == orders
    assert comparison.paid_cents == reference.compare(node.database.dsn, month=2).reference_cents
    summary = node.finish(jobs.Payout(), PayoutRun(), execution)
    assert (summary.payments, summary.cents) == (orders, comparison.paid_cents)


def test_an_empty_ledger_makes_no_orders(node: Node) -> None:
    assert list(jobs.Payout().partition(PayoutRun(), rowlock.Cluster())) == []


def test_an_order_is_named_after_airline_and_half_year() -> None:
    assert jobs.Payout().key(Order(carrier="UA", half="2013H1", cents=1)) == "UA-2013H1"


def test_half_of_the_pace_lies_before_the_payment_and_half_after(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []

    def pay(**_order: object) -> int:
        events.append("paid")
        return 1

    node.launch(Settle(), FEBRUARY)
    node.run_all(Settle(), FEBRUARY)
    monkeypatch.setattr(jobs, "_pace", events.append)
    monkeypatch.setattr(bank, "pay", pay)
    params = PayoutRun(pace_ms=100)
    node.launch(jobs.Payout(), params)
    claim = node.claim()
    assert claim is not None

    node.attempt(jobs.Payout(), params, claim)

    assert events == [50, "paid", 50]
