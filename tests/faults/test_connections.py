"""The server has fewer connections than the nodes would need.

ROWLOCK_HERD_NODES is how many nodes start together on a server of twenty connections (12).
"""

import os
import time
from collections import Counter
from collections.abc import Generator

import pytest
from psycopg import sql

from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.pgproxy import PgProxy
from tests.support.postgres import Cluster, Database

HERD_NODES = int(os.environ.get("ROWLOCK_HERD_NODES") or 12)

OURS = "datname = current_database() AND application_name ^@ 'rowlock'"


def limit_connections(fleet: Fleet, connections: int) -> None:
    """Let the database have no more; the superuser's count, but are not refused."""
    with fleet.database.connect() as db:
        db.execute(
            sql.SQL("ALTER DATABASE {} CONNECTION LIMIT {}").format(
                sql.Identifier(fleet.database.name), sql.Literal(connections)
            )
        )


def connections_of_others(fleet: Fleet) -> int:
    """How many connections the database has that are not rowlock's."""
    return int(
        fleet.value(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND NOT application_name ^@ 'rowlock'"
        )
    )


def test_nodes_that_find_too_few_connections_share_them_so_that_some_work(fleet: Fleet) -> None:
    """Five nodes start together where there is room for two, and later all connections are lost at
    once: those that find none wait, none ends, none keeps a connection that is of no use to it, and
    the work is done. (Reported as graphile-worker#564, hatchet#1540: crash loops
    and herds keep the connections used up. Tried: nodes that register with their first connection
    take all there are, have none to beat with, and are removed, all of them.)"""
    fleet.settings.update(unreachable_seconds=3, removal_grace_seconds=3)
    run = fleet.request(parts=parts(12, step("wait", fleet.path("go")), step("effect", "done")))
    limit_connections(fleet, 6)  # one or two of them are the fleet's own
    nodes = [fleet.node(f"n{number}", wait=False) for number in range(5)]
    fleet.wait_ledger("start", "p0")
    eventually(
        lambda: all(n.events("node_registered") or n.events("database_unavailable") for n in nodes),
        "every node is registered or knows why not",
    )
    waiting = next(node for node in nodes if not node.events("node_registered"))
    assert "too many connections" in waiting.events("database_unavailable")[0]["message"]
    assert waiting.readiness() == (503, "not registered")
    assert waiting.probe("/livez") == (200, "ok")

    fleet.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
    fleet.open("go")

    assert fleet.wait(run).counts["completed"] == 12
    assert len({effect.key for effect in fleet.ledger().of("effect")}) == 12
    assert all(node.popen.poll() is None for node in nodes), "nobody ended"
    most = fleet.value(
        "SELECT max(count) FROM (SELECT count(*) FROM pg_stat_activity"
        f" WHERE {OURS} GROUP BY application_name) _"
    )
    assert most == 1, "one for the beat and one for the rest"


def test_after_an_outage_the_beat_has_the_first_connection(fleet: Fleet) -> None:
    """Both connections of a node are lost and there is room for one: it beats, and is not removed for
    an outage. (Without an order between the two it is the other one half of the time.)"""
    one = fleet.node("one")
    for _ in range(3):
        others = connections_of_others(fleet)
        limit_connections(fleet, others + 1)
        fleet.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
        one.wait_beats(5)
        limit_connections(fleet, -1)
        eventually(
            lambda: fleet.value(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}") == 2,
            "it has both again",
        )
    assert len(one.incarnations) == 1
    fleet.wait(fleet.request(parts=parts(2)))


def test_a_beat_that_finds_no_room_gets_that_of_the_other_connection(fleet: Fleet) -> None:
    """Only the beat's connection is lost, and others have taken its place meanwhile."""
    one = fleet.node("one")
    fleet.warm_up(one)
    for _ in range(3):
        others = connections_of_others(fleet)
        limit_connections(fleet, others + 1)
        fleet.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE {OURS} AND application_name ^@ 'rowlock beat'"
        )
        one.wait_beats(5)
        limit_connections(fleet, -1)
        fleet.warm_up(one)
    assert len(one.incarnations) == 1
    assert one.events("work_connection_gave_way")


def test_a_node_with_room_for_its_beat_alone_finds_what_it_claimed_and_works_on(
    fleet: Fleet,
) -> None:
    """Both connections are lost, with the reply to a claim, and there is room for one for as long as it takes: what
    else the node asks goes over that of the beat. The claim is handed back, as is one that the network delivers
    late, and all work is done. (Without a comparison it stays with a node that beats and does not know of it, for
    ever.)"""
    one = fleet.node("one", poll_seconds=3)
    run = fleet.request(
        parts=[
            part("busy", step("wait", fleet.path("go")), weight=3),
            part("unanswered", step("sleep", 0.3), weight=2),
            part("busy again", step("wait", fleet.path("on")), weight=1),
            part("late"),
        ]
    )
    fleet.wait_started("busy")
    claim = (
        "SELECT partition_key FROM rowlock.claim(%s, 1, 0, false, 1)"  # the node never hears of it
    )
    assert fleet.value(claim, one.incarnation) == "unanswered"
    limit_connections(fleet, connections_of_others(fleet) + 1)
    fleet.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")
    one.wait_beats(2)
    fleet.open("go")

    fleet.wait_started("busy again")
    assert fleet.value(claim, one.incarnation) == "late"
    eventually(lambda: fleet.partition("late").status == "PENDING", "it is handed back", 15)
    fleet.open("on")

    fleet.wait(run)
    assert [fleet.partition(key).claims for key in ("unanswered", "late")] == [2, 2]
    assert fleet.value(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}") == 1
    assert len(one.incarnations) == 1
    limit_connections(fleet, -1)


@pytest.fixture
def small_database() -> Generator[Database]:
    """A database on a server of twenty connections, of which nodes can have sixteen, less what the test has."""
    cluster = Cluster.private(options={"max_connections": 20})
    try:
        cluster.prepare()
        yield cluster.create()
    finally:
        cluster.close()


@pytest.mark.timeout(120 + 5 * HERD_NODES)
def test_a_herd_of_nodes_shares_a_small_server_and_does_not_come_back_in_step(
    small_database: Database,
) -> None:
    """Many nodes start together, and later their server restarts: none ends, none has more than its two
    connections, the work is done, and no tenth of a second sees more than three tenths of their tries to connect
    again. (Reported as graphile-worker#564, PostHog#4709, machine#613, hatchet#1540: crash loops and herds keep
    the connections used up.)"""
    patience = 40 + 4 * HERD_NODES
    with (
        PgProxy(small_database.dsn_as("rowlock_node")) as proxy,
        Fleet(small_database, unreachable_seconds=3, removal_grace_seconds=3) as fleet,
    ):
        work = parts(150, step("sleep", 0.2), step("effect", "done"))
        run = fleet.request(parts=work)
        nodes = [
            fleet.node(f"n{number}", wait=False, ROWLOCK_DSN=proxy.dsn)
            for number in range(HERD_NODES)
        ]
        most = 0

        def done(count: int) -> bool:
            nonlocal most
            held = fleet.value(
                "SELECT coalesce(max(count), 0) FROM (SELECT count(*) FROM pg_stat_activity"
                f" WHERE {OURS} GROUP BY split_part(application_name, ' ', 3)) _"
            )
            most = max(most, held)
            return len(fleet.ledger().of("effect")) >= count

        eventually(
            lambda: all(
                n.events("node_registered") or n.events("database_unavailable") for n in nodes
            ),
            "every node is registered or knows why not",
            patience,
        )
        eventually(lambda: done(20), "some of the work is done", patience)
        refused = [n for n in nodes if n.events("database_unavailable")]
        assert len(refused) >= HERD_NODES - 8, "there is no room for more than two times eight"

        restarted = time.monotonic()
        fleet.database.server.restart("fast")

        eventually(lambda: done(len(work)), "all of it is done", patience)
        assert fleet.wait(run).counts["completed"] == len(work)
        assert len({effect.key for effect in fleet.ledger().of("effect")}) == len(work)
        assert all(node.popen.poll() is None for node in nodes), "nobody ended"
        assert most <= 3, "two, and one whose end the server has not seen yet"

        def tries() -> list[float]:
            return [at - restarted for at in proxy.arrivals if at > restarted]

        eventually(lambda: len(tries()) >= 8 * HERD_NODES, "they try again and again", patience)
        (_, herd) = Counter(int(10 * at) for at in tries()).most_common(1)[0]
        assert herd <= 0.3 * len(tries()), f"{herd} of {len(tries())} in a tenth of a second"
