"""Named locks over nodes that run, die, stand still and leave."""

from itertools import pairwise

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Entries, Fleet, Member, eventually


def lock_results(*members: Member) -> dict[str, int]:
    """What nodes have counted, by result."""
    found: dict[str, int] = {}
    for member in members:
        for key, value in member.metrics().items():
            if key.startswith("rowlock_lock_acquisitions_total{"):
                result = key.split('result="')[1].split('"')[0]
                found[result] = found.get(result, 0) + int(value)
    return {result: count for result, count in found.items() if count}


def turns(ledger: Entries, name: str) -> list[str]:
    """Who had a lock, in the order of time; two at a time fail."""
    entries = [e for e in ledger if e.event in {"locked", "unlocked"} and e.more["name"] == name]
    entries.sort(key=lambda entry: entry.at)
    assert [e.event for e in entries] == ["locked", "unlocked"] * (len(entries) // 2)
    assert all(a.key == b.key for a, b in list(pairwise(entries))[::2])
    return [entry.key for entry in entries[::2]]


def test_one_attempt_at_a_time_over_all_nodes_and_executions_also_until_its_commit(
    fleet: Fleet,
) -> None:
    """Two nodes, two executions, 60 rounds of a lock around plain code, and as many around a transaction
    that reads and then writes: it is committed when process() returns, and the lock is held until then."""
    one, two = fleet.node("one", slots=2), fleet.node("two", slots=2)
    steps = (step("locked", {"name": "desk", "seconds": 0.005}), step("locked_count", "counter"))

    runs = [fleet.request(parts=parts(30, *steps, prefix=prefix)) for prefix in "ab"]

    for run in runs:
        fleet.wait(run)
    assert len(turns(fleet.ledger(), "desk")) == 60
    written = fleet.rows("SELECT item FROM fleet.effects ORDER BY item")
    assert [row.item for row in written] == list(range(1, 61))
    assert {entry.node for entry in fleet.ledger().of("locked")} == {"one", "two"}
    counted = lock_results(one, two)
    assert counted["acquired"] + counted["waited"] == 120
    assert counted["waited"] > 0
    assert set(counted) == {"acquired", "waited"}
    eventually(
        lambda: not fleet.rows("SELECT FROM rowlock.batch_locks"),
        "what was held until a COMMIT is tidied up",
    )


def test_the_lock_of_a_killed_node_passes_to_who_waits_for_it(fleet: Fleet) -> None:
    one = fleet.node("one")
    holds = step("locked", {"name": "tariffs", "until": fleet.path("never")}, attempts=[1])
    first = fleet.request(parts=[part("holds", holds)])
    fleet.wait_ledger("locked", "holds")
    two = fleet.node("two")
    second = fleet.request(parts=[part("waits", step("locked", {"name": "tariffs"}))])
    fleet.wait_started("waits", 1)

    one.crash()

    fleet.wait(second)
    fleet.wait(first)
    assert [e.key for e in fleet.ledger().of("locked")] == ["holds", "waits"]
    assert lock_results(two) == {"waited": 1}


def test_a_holder_that_slept_past_its_removal_has_lost_its_lock_and_disturbs_nobody(
    fleet: Fleet,
) -> None:
    """One of its attempts holds a lock, another waits for one: woken, both have lost their claims."""
    one = fleet.node("one", slots=2)
    kept, go = fleet.path("never"), fleet.path("go")
    first = fleet.request(
        parts=[
            part("holds", step("locked", {"name": "tariffs", "until": kept}, attempts=[1])),
            part(
                "waits",
                step("wait", fleet.path("held"), attempts=[1]),
                step("mark", "asks"),
                step("locked", {"name": "tariffs"}, attempts=[1]),
            ),
        ]
    )
    fleet.wait_ledger("locked", "holds")
    fleet.open("held")
    fleet.wait_ledger("asks", "waits")
    two = fleet.node("two", slots=3)
    second = fleet.request(parts=[part("next", step("locked", {"name": "tariffs", "until": go}))])
    fleet.wait_started("next", 1)
    one.pause()
    fleet.wait_ledger("locked", "next")

    one.resume()

    one.wait_registered(2)
    eventually(lambda: lock_results(one).get("lost") == 1, "the wait has ended with its claim")
    (held,) = fleet.rows("SELECT partition_key, node_name FROM rowlock.locks")
    assert (held.partition_key, held.node_name) == ("next", "two")
    assert not fleet.ledger().of("unlocked")
    fleet.open("go")
    fleet.wait(second)
    fleet.wait(first)
    assert lock_results(two) == {"waited": 1}


def test_who_waits_for_a_lock_gives_up_in_time_and_leaves_with_its_node(fleet: Fleet) -> None:
    """A time limit is an ordinary failure; a drain and a cancel need not wait for the lock."""
    one = fleet.node("one", slots=3)
    go = fleet.path("go")
    holding = fleet.request(parts=[part("holds", step("locked", {"name": "x", "until": go}))])
    fleet.wait_ledger("locked", "holds")

    timed = fleet.request(
        parts=[part("timed", step("locked", {"name": "x", "timeout": 0.3}))], max_attempts=1
    )

    fleet.wait(timed, "FAILED")
    error = fleet.partition("timed", timed).last_error
    assert (error["type"], "'x' was not free within 0.3 s" in error["message"]) == (
        "TimeoutError",
        True,
    )
    cancelled = fleet.request(parts=[part("cancelled", step("locked", {"name": "x"}))])
    fleet.wait_started("cancelled", 1)
    fleet.cancel(cancelled)
    fleet.wait(cancelled, "CANCELLED")
    eventually(lambda: lock_results(one).get("stopped") == 1, "the wait has ended")
    assert lock_results(one) == {"acquired": 1, "timed_out": 1, "stopped": 1}
    drained = fleet.request(parts=[part("drained", step("locked", {"name": "x"}))])
    fleet.wait_started("drained", 1)
    fleet.open("go")
    fleet.wait(holding)
    fleet.wait(drained)
