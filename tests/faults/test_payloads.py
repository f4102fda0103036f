"""Results and errors that cannot be kept, rows that cannot be read, and announcements that nobody hears."""

import pytest

from tests.support.fault_jobs import POISON, part, parts, step
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


REFUSED = {
    # results, by their names in POISON: what the failure says
    "object": "cannot be written as JSON",
    "set": "$: is set {1, 2}, which would come back as list [1, 2]",
    "bytes": "$: is bytes b'x', which would come back as str 'x'",
    "decimal": "$: is Decimal",
    "datetime": "$: is datetime",
    "circular": "is nested deeper than 32 levels, or refers to itself",
    "generator": "which would come back as list [0, 1, 2]",
    "nan": "$.loss: nan is no JSON",
    "infinity": "$[0]: inf is no JSON",
    "nul": "$.text: contains the NUL character",
    "nul in a name": "has a field whose name contains the NUL character",
    "half a character": "contains half of a surrogate pair",
    "2 MB": "is 2000002 bytes long; at most 262144 are allowed",
    "20 MB": "is 20000004 bytes long; at most 262144 are allowed",
}
RAISED = {
    # errors: their type, and the message
    "unprintable error": ("tests.support.fault_jobs._Unprintable", "<the message cannot be shown"),
    "unpicklable error": ("tests.support.fault_jobs._Unpicklable", "x"),
    "group of errors": ("ExceptionGroup", "many (1000 sub-exceptions)"),
    "long chain of errors": ("ValueError", "2999"),
    "nul in an error": ("ValueError", "a\ufffdb"),
    "long error": ("ValueError", "é😀\ufffdé😀"),
    "exit": ("SystemExit", "3"),
    "interrupt": ("KeyboardInterrupt", ""),
}


def test_a_result_or_an_error_that_cannot_be_kept_fails_its_partition_and_nothing_else(
    fleet: Fleet,
) -> None:
    """Results that are no JSON, would come back as something else, or are too large fail their partition at
    once, with the place and the reason or the size and the limit; errors that cannot be printed, pickled or
    stored are kept as far as they can be told. The executor lives on, and nothing is COMPLETED without
    its result. (Elsewhere the unit is lost, the worker crashes, or success is recorded with a part of the
    result: reported as prefect PR#4605, ray#4149, windmill#10860, Polaris#287, awa#85, spring-batch#2940.)"""
    one = fleet.node("one")
    good = [f"good{n}" for n in range(5)]
    fleet.warm_up(one)
    (executor,) = one.executors()

    run = fleet.request("fault.returned", parts=[part(key) for key in (*POISON, *good)])
    row = fleet.wait(run, "FAILED")

    assert {*REFUSED, *RAISED} == POISON.keys() - {"literal nul"}
    ended = {"completed": len(good) + 1, "failed": len(REFUSED) + len(RAISED), "cancelled": 0}
    assert row.counts == {"total": len(POISON) + len(good), **ended}
    for key, message in REFUSED.items():
        refused = fleet.partition(key, run)
        assert (refused.status, refused.failures, refused.result) == ("FAILED", 1, None), key
        assert refused.last_error["type"] == "rowlock.errors.ContractError"
        assert message in refused.last_error["message"]
    for key, (kind, message) in RAISED.items():
        raised = fleet.partition(key, run)
        assert (raised.status, raised.failures) == ("FAILED", 2), key
        assert raised.last_error["type"] == kind
        assert raised.last_error["message"].startswith(message)
    assert fleet.partition("long error", run).last_error["message"].endswith("… [cut]")
    assert fleet.partition("literal nul", run).result == {"text": "\\u0000"}
    assert not fleet.rows(
        "SELECT FROM rowlock.batch_partitions WHERE execution_id = %s"
        " AND status = 'COMPLETED' AND result IS NULL",
        run,
    )
    assert {begin.pid for begin in fleet.ledger().of("begin")} == {executor.pid}
    assert len(one.incarnations) == 1


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
    cancels are noticed all the same, because every beat tells whether something waits. (Queues elsewhere lose what
    was announced while nobody listened: "Listen carefully" at FOSDEM 2026, minhle.xyz on dropped jobs.)"""
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
