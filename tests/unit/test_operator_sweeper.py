"""An execution is swept only if lists that succeeded have missed its BatchJob twice, some time apart."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from rowlock_operator.database import Row
from rowlock_operator.model import Execution
from rowlock_operator.sweeper import Absences, Listing, suspects

APART = 30.0
NOTHING = Listing(uids=(), namespaces=None)


def a_row(
    number: int = 1,
    *,
    namespace: str = "billing",
    policy: str = "CANCEL",
    cancel_requested: bool = False,
) -> Row:
    return Row(
        execution=Execution(
            execution_id=UUID(int=number),
            status="RUNNING",
            attempt=1,
            requested_at=datetime(2026, 1, 1, tzinfo=UTC),
            deletion_policy=policy,
            cancel_requested=cancel_requested,
        ),
        number=number,
        namespace=namespace,
        name=f"nightly-{number}",
        uid=f"uid-{number}",
    )


def test_a_batchjob_that_is_missing_twice_is_an_orphan() -> None:
    absences = Absences(APART)

    assert absences.orphans([a_row()], NOTHING, now=0.0) == []
    assert absences.orphans([a_row()], NOTHING, now=29.9) == [], "too soon"
    assert absences.orphans([a_row()], NOTHING, now=30.0) == [a_row()]


def test_a_batchjob_that_is_listed_in_between_starts_again() -> None:
    absences = Absences(APART)
    absences.orphans([a_row()], NOTHING, now=0.0)

    there = Listing(uids={"uid-1"}, namespaces=None)
    assert absences.orphans([a_row()], there, now=30.0) == []
    assert absences.orphans([a_row()], NOTHING, now=60.0) == []
    assert absences.orphans([a_row()], NOTHING, now=90.0) == [a_row()]


@pytest.mark.parametrize("namespaces", [(), ("reports",)])
def test_a_list_that_failed_says_nothing_about_its_namespace(namespaces: tuple[str, ...]) -> None:
    absences = Absences(APART)
    failed = Listing(uids=(), namespaces=namespaces)

    for now in (0.0, 30.0, 60.0, 90.0):
        assert absences.orphans([a_row(namespace="billing")], failed, now) == []


def test_a_list_that_failed_once_makes_the_waiting_start_again() -> None:
    absences = Absences(APART)
    absences.orphans([a_row()], NOTHING, now=0.0)
    absences.orphans([a_row()], Listing(uids=(), namespaces=()), now=30.0)

    assert absences.orphans([a_row()], NOTHING, now=60.0) == []


def test_only_the_namespaces_that_were_listed_are_swept() -> None:
    absences = Absences(APART)
    mine, other = a_row(1, namespace="billing"), a_row(2, namespace="reports")
    listing = Listing(uids=(), namespaces={"billing"})

    absences.orphans([mine, other], listing, now=0.0)
    assert absences.orphans([mine, other], listing, now=30.0) == [mine]


def test_nobody_is_suspected_who_may_live_on_or_ends_already_or_was_seen() -> None:
    rows = [
        a_row(1),
        a_row(2, policy="ORPHAN"),
        a_row(3, cancel_requested=True),
        a_row(4),
    ]

    assert suspects(rows, is_known={"uid-4"}) == [a_row(1)]
