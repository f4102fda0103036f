"""Partitions that take their node along: they die alone, and their neighbours live."""

from tests.support.fault_jobs import part, step
from tests.support.fleet import TERMINAL, Fleet, NodeProcess, eventually


def test_a_partition_that_kills_its_node_is_given_up_after_its_attempts(fleet: Fleet) -> None:
    """Each attempt at the poison kills the node that makes it, and a fresh one takes its place, as
    Kubernetes does. After max_attempts such deaths the partition is FAILED as poison; the others
    complete, the last time the poison ran there was nothing beside it, and no neighbour is blamed."""
    nodes: list[NodeProcess] = [fleet.node(f"node-{n}", slots=2) for n in range(2)]
    run = fleet.request(
        parts=[
            part("poison", step("kill_node"), weight=1),
            *(part(f"p{n}", step("sleep", 0.2)) for n in range(6)),
        ]
    )

    def keep_two_nodes() -> bool:
        gone = [node for node in nodes if node.popen.poll() is not None]
        for node in gone:
            nodes.remove(node)
            number = len(fleet.members)
            nodes.append(fleet.node(f"node-{number}", slots=2, wait=False))
        return fleet.status(run) in TERMINAL

    eventually(keep_two_nodes, "the execution ends", seconds=90)

    row = fleet.wait(run, "FAILED")
    assert row.counts == {"total": 7, "completed": 6, "failed": 1, "cancelled": 0}
    poison = fleet.partition("poison")
    assert (poison.status, poison.claims, poison.failures, poison.lost) == ("FAILED", 3, 3, 3)
    assert poison.last_error["outcome"] == "poison"
    kills = fleet.ledger().of("kills_node")
    assert len(kills) == len({kill.node for kill in kills}) == 3
    assert len(fleet.members) == 2 + 3, "one fresh node for each that died"
    alone = fleet.ledger().of("start", "poison")[-1]
    beside = [
        entry
        for entry in fleet.ledger()
        if entry.node == alone.node
        and entry.key.startswith("p")
        and entry.key != "poison"
        and entry.event == "start"
        and entry.at <= alone.at
        and not any(
            end.at < alone.at
            for end in fleet.ledger().ends(entry.key)
            if end.attempt == entry.attempt
        )
    ]
    assert not beside, "nothing else ran where it ran for the last time"
    for neighbour in (fleet.partition(f"p{n}") for n in range(6)):
        assert neighbour.status == "COMPLETED"
        assert neighbour.failures <= 2
