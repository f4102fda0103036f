"""What the demonstration finds decides its exit code, and is said in a table."""

import json
import re
from typing import Any

import pytest

from rowlock.demo import check, closing
from rowlock.demo.findings import Findings
from rowlock.demo.reference import PaymentComparison
from tests.support.demo_findings import (
    a_difference,
    a_kill,
    a_ledger,
    a_settlement,
    an_end,
    an_order,
    an_unknown,
    the_findings,
    the_payments,
)


def test_a_good_run_has_no_problem() -> None:
    assert the_findings().problems == []


def settled(**changes: Any) -> Findings:
    return the_findings(settlement=a_settlement(**changes))


def paid(**changes: Any) -> Findings:
    return the_findings(payments=the_payments(**changes))


@pytest.mark.parametrize(
    "findings, problem",
    [
        (settled(kill=a_kill("node-1")), "node-1 was killed, but held no partition"),
        (settled(recovered=()), "2013-07-10 did not run again"),
        (settled(ledger=a_ledger(doubled=3)), "3 flights were settled twice"),
        (
            settled(ledger=a_ledger(differences=(a_difference(),))),
            r"differs from the reference on 1 days \(2013-07-10: 1005 entries",
        ),
        (
            settled(ended=an_end("j", "FAILED", partitions=2, completed=2, attempts=2)),
            "j ended FAILED, not COMPLETED",
        ),
        (
            settled(ended=an_end("j", "COMPLETED", partitions=2, completed=1, attempts=2)),
            "1 of 2 days were settled",
        ),
        (paid(kill=a_kill("node-2")), "node-2 was killed, but held no partition"),
        (paid(kill=a_kill("node-2", "AA-2013H1")), "AA-2013H1 was lost with its node, but is not"),
        (
            paid(ended=an_end("j", "COMPLETED", partitions=3, completed=2, attempts=3)),
            "must be FAILED",
        ),
        (
            paid(ended=an_end("j", "FAILED", partitions=4, completed=2, attempts=3)),
            "2 payments are recorded and 1 unknown, of 4",
        ),
        (
            paid(books=PaymentComparison(orders=(an_order("UA", payments=2),))),
            "1 orders were paid twice",
        ),
        (
            paid(books=PaymentComparison(orders=(an_order("AA", payments=0),))),
            "AA-2013H1 was recorded, but the bank has not paid it",
        ),
    ],
)
def test_what_is_wrong_is_named_and_fails_the_run(findings: Findings, problem: str) -> None:
    (found,) = findings.problems

    assert re.search(problem, found)
    assert findings.document["ok"] is False
    assert found in "\n".join(closing.close(findings).lines())


def test_a_payment_that_the_bank_has_not_made_may_be_unknown() -> None:
    books = PaymentComparison(orders=(an_order("AA"), an_order("UA", payments=0)))

    findings = paid(books=books, unknown=(an_unknown("UA-2013H1", payment_id=None),))

    assert findings.problems == []


def test_the_table_says_what_happened_to_both_jobs() -> None:
    lines = list(closing.close(the_findings()).lines())

    assert lines == [
        "                       flights.settle         flights.payout",
        "  -------------------  ---------------------  -----------------------",
        "  delivery             AT_LEAST_ONCE          AT_MOST_ONCE",
        "  completed            365 of 365 partitions  2 of 3 partitions",
        "  attempts             366                    3",
        "  killed (SIGKILL)     node-1, the master     node-2",
        "  while it ran         1 partition            1 payment",
        "  recovered work       1 ran again elsewhere  none; 1 payment unknown",
        "  kept by checkpoints  250 of their flights   -",
        "  recovery time        5.2 s after the kill   5.1 s after the kill",
        "  execution            COMPLETED              FAILED",
        "  ledger / bank        $710,868,195.13        $30.00",
        "  reference / due      $710,868,195.13        $30.00",
        "  one by one           336,776 flights equal  3 of 3 orders paid",
        "  doubled              0 flights              0 payments",
        "",
        "flights.payout is FAILED on purpose: no unknown payment is taken for done, or",
        "made again. A person asks the bank, by the idempotency key on its statement:",
        "  UA-2013H1        $1,234.56  abababababab...  payment 7",
        "",
        "The ledger equals the reference to the cent. Nothing was lost, nothing doubled.",
        "3 nodes, PostgreSQL 18.1, rowlock 1.2.3, 24 s in all.",
    ]
    assert max(map(len, lines)) <= 80


def test_the_table_adds_what_is_out_of_the_ordinary() -> None:
    findings = the_findings(fenced_writes=2, bystanders=("node-3",), left="schema rowlock")

    text = "\n".join(closing.close(findings).lines())

    assert "late writes refused  2" in text
    assert "node-3 was removed too, alive: this machine is too busy for a beat every 0.5 s" in text
    assert "Left in the database: schema rowlock." in text


def test_an_unpaid_order_is_said_to_be_unpaid() -> None:
    findings = paid(unknown=(an_unknown("UA-2013H1", payment_id=None),))

    assert any("never paid" in line for line in closing.close(findings).unknown)


@pytest.mark.parametrize(
    "keys, text", [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_names_are_listed_as_in_a_sentence(keys: list[str], text: str) -> None:
    assert closing.listed(keys) == text


def test_the_document_is_json_with_all_facts() -> None:
    document = json.loads(json.dumps(the_findings().document))

    assert document["ok"] is True
    assert document["settlement"]["kill"]["at"] == "2026-01-02T03:04:05+00:00"
    assert document["settlement"]["kill"]["held"][0]["key"] == "2013-07-10"
    assert document["settlement"]["recovery_seconds"] == 5.2
    assert document["settlement"]["ledger"]["equal"] is True
    assert document["payments"]["unknown"][0]["payment_id"] == 7
    assert document["payments"]["books"] == {
        "orders": 3,
        "paid_once": 3,
        "unpaid": 0,
        "doubled": 0,
        "due_cents": 3000,
        "paid_cents": 3000,
    }


# -- rowlock.demo.check judges for itself -------------------------------------------------------


def a_right_document() -> Any:
    orders = tuple(an_order(f"{number:02}") for number in range(32))
    ended = an_end("flights.payout", "FAILED", partitions=32, completed=31, attempts=32)
    payments = the_payments(ended=ended, books=PaymentComparison(orders=orders))
    return the_findings(payments=payments).document


def test_check_accepts_a_right_run_and_puts_it_in_a_line() -> None:
    document = a_right_document()

    assert check.is_right(document)
    assert check.in_words(document) == (
        "ledger = reference; node-1 killed, 1 recovered in 5.2 s; "
        "node-2 killed, 1 of 32 payments unknown, 0 doubled"
    )


@pytest.mark.parametrize(
    "path, value",
    [
        ("ok", False),
        ("settlement.ledger.ledger_cents", 1),
        ("settlement.ledger.doubled", 1),
        ("settlement.kill.held", []),
        ("payments.kill.held", []),
        ("payments.unknown", []),
        ("payments.books.doubled", 1),
        ("payments.books.paid_once", 31),
    ],
)
def test_check_does_not_rely_on_the_verdict_of_the_run(path: str, value: object) -> None:
    document = a_right_document()
    *sections, name = path.split(".")
    section = document
    for one in sections:
        section = section[one]

    section[name] = value

    assert not check.is_right(document)
