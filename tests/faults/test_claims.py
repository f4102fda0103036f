"""Claims: who runs what, how much at a time, and what is never begun."""

import signal
import time

from tests.support.fault_jobs import parts, step
from tests.support.fleet import TIMES, Fleet, eventually
from tests.support.supervisor import state
from tests.support.waiting import SLACK_SECONDS

# Lets a session of a certain name wait in its claim, at a lock that the test holds. A policy for
# updates is asked when the statement that locks the rows has its snapshot, and has not locked them.
HELD_CLAIMS = """
CREATE FUNCTION fleet.passes() RETURNS boolean LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
DECLARE
    gate integer := CASE current_setting('application_name')
        WHEN 'rowlock node slow' THEN 1 WHEN 'rowlock node quick' THEN 2 END;
BEGIN
    IF gate IS NOT NULL AND current_query() LIKE '%rowlock.claim(%' THEN
        PERFORM pg_advisory_lock_shared(gate);
        PERFORM pg_advisory_unlock_shared(gate);
    END IF;
    RETURN true;
END
$$;
GRANT EXECUTE ON FUNCTION fleet.passes TO PUBLIC;
ALTER TABLE rowlock.batch_partitions ENABLE ROW LEVEL SECURITY;
ALTER TABLE rowlock.batch_partitions FORCE ROW LEVEL SECURITY;
CREATE POLICY looked_at ON rowlock.batch_partitions FOR SELECT USING (true);
CREATE POLICY planned ON rowlock.batch_partitions FOR INSERT WITH CHECK (true);
CREATE POLICY locked ON rowlock.batch_partitions FOR UPDATE USING (fleet.passes()) WITH CHECK (true);
"""


def test_many_nodes_that_claim_at_once_run_each_partition_once(fleet: Fleet) -> None:
    """Nodes of several slots, more partitions than slots: each is begun once, by its claimer."""
    for name in ("one", "two", "three"):
        fleet.node(name, slots=2)

    run = fleet.request(parts=parts(200))

    row = fleet.wait(run)
    assert row.counts == {"total": 200, "completed": 200, "failed": 0, "cancelled": 0}
    starts = fleet.ledger().of("start")
    assert len(starts) == len({start.key for start in starts}) == 200
    # who began with a partition is compared with who claimed it after every test: Fleet.check


def test_a_node_whose_claim_came_too_late_begins_nothing(fleet: Fleet) -> None:
    """A claim statement is held up after its snapshot shows the row and before it locks it; another
    node claims the row meanwhile. The late one gets nothing. (A system that looks and then updates
    by primary key runs it twice.)"""
    fleet.rows(HELD_CLAIMS)
    gates = fleet.database.connect()
    for gate in (1, 2):
        gates.execute("SELECT pg_advisory_lock(%s)", [gate])
    slow = fleet.node("slow", unreachable_seconds=10)
    fleet.node("quick", unreachable_seconds=10)
    run = fleet.request(parts=parts(1, step("wait", fleet.path("go"))))

    def waits(name: str) -> bool:
        return bool(
            fleet.rows(
                "SELECT FROM pg_stat_activity WHERE application_name = %s"
                " AND wait_event = 'advisory' AND query LIKE '%%rowlock.claim(%%'",
                f"rowlock node {name}",
            )
        )

    eventually(lambda: waits("slow") and waits("quick"), "both are in the middle of their claims")
    polled = slow.metrics().get('rowlock_claim_polls_total{pool="default",result="empty"}', 0)
    gates.execute("SELECT pg_advisory_unlock(2)")
    fleet.wait_started("p0")
    gates.execute("SELECT pg_advisory_unlock(1)")
    eventually(
        lambda: (
            slow.metrics().get('rowlock_claim_polls_total{pool="default",result="empty"}', 0)
            > polled
        ),
        "the slow claim is answered",
    )
    gates.close()
    fleet.open("go")

    fleet.wait(run)
    assert [start.node for start in fleet.ledger().starts("p0")] == ["quick"]
    assert fleet.partition("p0").claims == 1


def test_a_node_that_slept_before_or_after_its_claim_begins_nothing_when_it_wakes(
    fleet: Fleet,
) -> None:
    """One node stands still when it has decided to claim and has not asked yet; another when its claim is
    committed and it has not read the answer. Both are removed meanwhile. The one claims nothing as whom it was,
    the other does not begin with what it had: both begin anew.

    Reported as ShedLock#132 (an expiry from a *now* before the pause: two holders) and solid_queue#455 (work is
    claimed by a node that was already declared dead).
    """
    before = fleet.node("before", pool="b", failpoint="claim:before:stop@1")
    after = fleet.node("after", pool="a", failpoint="claim:after:stop@1")
    asleep = [before, after]
    runs = [
        fleet.request(parts=parts(1, prefix="b"), pool="b"),
        fleet.request(parts=parts(1, prefix="a"), pool="a"),
    ]
    eventually(lambda: all(state(node.process) == "T" for node in asleep), "both stand still")
    first = [node.incarnation for node in asleep]
    fleet.node("peer", pool="elsewhere")
    eventually(
        lambda: {event.node_id for event in fleet.db_events("node_removed")} == set(first),
        "both are removed",
    )
    assert not fleet.ledger().of("start")

    for node in asleep:
        node.cont()

    for node in asleep:
        node.wait_registered(2)
    for run in runs:
        fleet.wait(run)
    assert [(s.node, s.attempt) for s in fleet.ledger().starts("b0")] == [("before", 1)]
    assert [(s.node, s.attempt) for s in fleet.ledger().starts("a0")] == [("after", 2)]
    assert fleet.partition("b0").assigned_node == before.incarnation != first[0]
    assert fleet.partition("a0").assigned_node == after.incarnation != first[1]


def test_two_nodes_of_one_name_leave_each_other_alone(fleet: Fleet) -> None:
    """A name is for people. Two nodes have the same one, as when a rolling restart overlaps or an environment
    was copied: neither takes the other's work, and one that is told to leave claims nothing more. One that takes
    the place of a killed one under its name begins without its work, and does not keep its claims alive.

    Reported as dbos-transact-py#804, quartznet#703 and #3436, procrastinate#1518, oban#862.
    """
    leaving, killed = (fleet.node("twin", slots=2, drain_seconds=60) for _ in range(2))
    held = fleet.request(parts=parts(4, step("wait", fleet.path("go")), prefix="held"))
    eventually(lambda: len(fleet.ledger().of("start")) == 4, "each runs two")
    assert leaving.incarnation != killed.incarnation
    assert [fleet.most_claimed(node) for node in (leaving, killed)] == [2, 2]

    leaving.kill(signal.SIGTERM)
    leaving.wait_event("node_draining")
    of_killed = fleet.rows(
        "SELECT partition_key AS key FROM rowlock.batch_partitions WHERE assigned_node = %s",
        killed.incarnation,
    )
    killed.crash()
    heir = fleet.node("twin", slots=4)
    more = fleet.request(parts=parts(20, prefix="more"))
    fleet.wait(more)
    for row in of_killed:
        fleet.wait_started(row.key, 2)
    fleet.open("go")
    fleet.wait(held)

    leaving.wait_gone()
    taken = fleet.rows(
        "SELECT DISTINCT node FROM fleet.transitions WHERE key ^@ 'more' AND became = 'CLAIMED'"
    )
    assert [row.node for row in taken] == [heir.incarnation]
    repeated = {row.partition_key for row in fleet.rows_of(held) if row.claims > 1}
    assert repeated == {row.key for row in of_killed}
    eventually(
        lambda: (
            [event.node_id for event in fleet.db_events("node_removed")] == [killed.incarnation]
        ),
        "the killed one is removed, and nobody else",
    )


def test_a_node_never_holds_more_than_its_slots_and_one_that_joins_gets_work_at_once(
    fleet: Fleet,
) -> None:
    """Hundreds of partitions that take time, one node, then a second. (A system that hands work out
    ahead leaves nothing for the second one.)

    Reported as kombu#337, celery#5306 and #2599: what was fetched ahead expires unstarted, and is delivered again.
    """
    one = fleet.node("one", slots=3)
    run = fleet.request(parts=parts(300, step("wait", fleet.path("go"))))
    eventually(lambda: len(fleet.ledger().of("start")) == 3, "all slots of the first are busy")

    two = fleet.node("two", slots=2)
    joined = time.monotonic()
    eventually(lambda: len(fleet.ledger().of("start")) == 5, "all slots of the second are busy")
    assert time.monotonic() - joined < TIMES["poll_seconds"] + SLACK_SECONDS

    held = fleet.rows(
        "SELECT assigned_node AS node, count(*) FROM rowlock.batch_partitions"
        " WHERE status = 'CLAIMED' GROUP BY 1"
    )
    assert {row.node: row.count for row in held} == {one.incarnation: 3, two.incarnation: 2}
    assert fleet.most_claimed(one) == 3
    assert fleet.most_claimed(two) == 2
    fleet.open("go")
    fleet.wait(run)
    assert fleet.was_begun_once(run)


def test_a_node_claims_no_partition_of_a_job_or_contract_that_it_does_not_have(
    fleet: Fleet,
) -> None:
    """Versions are mixed: one node lacks the jobs, and no node has the contract of some executions.
    (A system that lets any node claim fails the work there.)"""
    other = fleet.node("other", slots=4, jobs="tests.support.author_jobs")
    jobs = ("fault.work", "fault.once")
    fleet.left_open = 2
    foreign = [fleet.request(job, parts=parts(3), contract_hash="another") for job in jobs]
    runs = [fleet.request(job, parts=parts(6, prefix=job)) for job in jobs]
    other.wait_beats(5)
    assert {fleet.status(run) for run in [*foreign, *runs]} == {"REQUESTED"}

    fleet.node("knows")

    for run in runs:
        fleet.wait(run)
    assert [start.node for start in fleet.ledger().of("start")] == ["knows"] * 12
    assert fleet.most_claimed(other) == 0
    assert {fleet.status(run) for run in foreign} == {"REQUESTED"}


def test_what_a_node_keeps_ready_is_handed_back_when_the_work_before_it_takes_long(
    fleet: Fleet,
) -> None:
    """After work of milliseconds a node claims ahead. When what it then runs takes long, it hands back
    what waits behind it, to its executor as well, and a node that joins runs it."""
    fleet.node("one")
    quick = fleet.request(parts=parts(200, prefix="quick"))
    fleet.wait(quick)
    slow = fleet.request(parts=parts(20, step("wait", fleet.path("go")), prefix="slow"))
    ahead = "SELECT count(*) FROM fleet.transitions WHERE key ^@ 'slow' AND became = 'CLAIMED'"
    eventually(lambda: fleet.value(ahead) > 8, "the node has claimed ahead")

    fleet.node("two")

    eventually(
        lambda: any(s.node == "two" for s in fleet.ledger().of("start")), "the other one has work"
    )
    held = "SELECT count(*) FROM rowlock.batch_partitions WHERE status = 'CLAIMED'"
    eventually(lambda: fleet.value(held) == 2, "each node holds what it runs")
    fleet.open("go")
    fleet.wait(slow)
    assert len(fleet.ledger().of("start")) == 220
    assert fleet.was_begun_once(quick)
    assert fleet.was_begun_once(slow)
