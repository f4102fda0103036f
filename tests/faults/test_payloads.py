"""Rows that cannot be read, and announcements that nobody hears."""

import pytest

from tests.support.fault_jobs import parts, step
from tests.support.fleet import Fleet, eventually

SILENCE = """
CREATE FUNCTION fleet.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT';
GRANT EXECUTE ON FUNCTION fleet.pg_notify TO PUBLIC;
DO $$
DECLARE
    definition text;
BEGIN
    FOR definition IN
        SELECT pg_get_functiondef(oid) FROM pg_proc
        WHERE pronamespace = 'rowlock'::regnamespace AND prosrc LIKE '%pg_notify(%'
    LOOP
        EXECUTE replace(definition, 'pg_notify(', 'fleet.pg_notify(');
    END LOOP;
END
$$;
"""


@pytest.mark.parametrize("job", ["fault.work", "fault.once"])
def test_a_slice_that_cannot_be_decoded_is_set_aside_and_stops_nobody(
    fleet: Fleet, job: str
) -> None:
    """Rows are edited to another type, a missing and an unknown field: these partitions are FAILED
    with the reason and the path, without ever having been started; the others complete. An
    AT_MOST_ONCE one has no start left: it may be run when it is mended."""
    broken = {
        "p1": ('"text"', "slice $: "),
        "p3": ('{"steps": []}', "slice $.key: "),
        "p5": ('{"key": "p5", "more": 1}', "slice $.more: "),
        "p7": ('{"key": "p7", "weight": "3"}', "slice $.weight: "),
    }
    launch = fleet.launch(job, parts=parts(9))
    eventually(lambda: launch.out and fleet.status(launch.execution) == "RUNNING", "it is planned")
    for key, (value, _) in broken.items():
        fleet.rows(
            "UPDATE rowlock.batch_partitions SET slice = %s::jsonb WHERE partition_key = %s",
            value,
            key,
        )

    fleet.node("one", slots=2)

    assert launch.wait_exit() == 4
    row = fleet.execution(launch.execution)
    assert row.counts == {"total": 9, "completed": 5, "failed": 4, "cancelled": 0}
    for key, (_, where) in broken.items():
        failed = fleet.partition(key)
        assert failed.status == "FAILED"
        assert failed.claims == 1, "a broken contract is not tried again"
        assert failed.last_error["type"] == "rowlock.errors.ContractError"
        assert failed.last_error["message"].startswith(where)
        assert failed.last_error["outcome"] == "not started"
    started = fleet.rows("SELECT partition_key FROM rowlock.batch_starts ORDER BY 1")
    expected = ["p0", "p2", "p4", "p6", "p8"]
    assert [s.partition_key for s in started] == (expected if job == "fault.once" else [])
    assert sorted(s.key for s in fleet.ledger().of("start")) == expected


def test_without_any_notification_work_is_found_by_the_next_beat(fleet: Fleet) -> None:
    """Nothing is ever announced, and the poll comes once an hour: launches, plans, released work and
    cancels are noticed all the same, because every beat tells whether something waits."""
    fleet.rows(SILENCE)
    one = fleet.node("one", poll_seconds=3600)
    two = fleet.node("two", poll_seconds=3600, pool="later")
    one.wait_beats(3)

    fleet.wait(fleet.request("fault.summed", parts=parts(5)))

    run = fleet.request(
        pool="later", parts=parts(2, step("wait_or_stop", fleet.path("go")), prefix="moves")
    )
    eventually(lambda: len(fleet.ledger().of("start")) == 6, "two runs one of them")
    fleet.node("three", slots=2, pool="later", poll_seconds=3600)
    eventually(lambda: len(fleet.ledger().of("start")) == 7, "three runs the other")
    assert two.terminate_and_wait() == 0
    eventually(lambda: len(fleet.ledger().of("start")) == 8, "three runs what was released")
    fleet.cancel(run)
    fleet.wait(run, "CANCELLED")
    assert len(fleet.ledger().of("asked_to_stop")) == 3
