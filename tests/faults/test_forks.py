"""Author code that forks: a copy of an executor must not speak for it."""

from tests.support.fault_jobs import parts, step
from tests.support.fleet import Fleet


def test_forks_of_author_code_harm_neither_the_node_nor_its_connections(fleet: Fleet) -> None:
    """Children end as programs do, with exit hooks and closed files, and share the sockets they were
    born with: neither the channel to the supervisor nor an open transaction may suffer. (Job libraries
    have lost the parent's database connection this way.)"""
    node = fleet.node("one", slots=4)
    plain = fleet.request(parts=parts(60, step("fork"), step("rows", 1), prefix="plain"))
    inside = fleet.request(parts=parts(40, step("fork_in_transaction"), prefix="inside"))

    fleet.wait(plain)
    fleet.wait(inside)

    forked = fleet.ledger().of("forked")
    assert len(forked) == 100
    assert all(e.more["status"] == 0 and e.more["doubled"] == [2, 4, 6] for e in forked)
    assert fleet.value("SELECT count(*) FROM fleet.effects") == 60 + 2 * 40
    assert fleet.was_begun_once(plain)
    assert fleet.was_begun_once(inside)
    assert len(node.incarnations) == 1
    assert not node.events("protocol_error")
