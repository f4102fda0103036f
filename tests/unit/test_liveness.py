"""What an observer concludes from looks at its peers, on its own clock and over its own connection."""

from uuid import UUID

from rowlock.protocol.liveness import MarkUnreachable, Observer, Remove, SeekEvidence, Verdict
from rowlock.protocol.model import Peer

PEER = UUID(int=1)
SEEK: list[Verdict] = [SeekEvidence(node_id=PEER, beat=7)]


def an_observer() -> Observer:
    return Observer(beat_seconds=1, unreachable_seconds=5, removal_grace_seconds=5)


def look(
    observer: Observer,
    at: float,
    *,
    beat: int = 7,
    unreachable: bool = False,
    connection: int | None = 1,
) -> list[Verdict]:
    """One look, answered a hundredth of a second after it was sent."""
    peer = Peer(node_id=PEER, beat=beat, unreachable=unreachable)
    return observer.look(sent_at=at, answered_at=at + 0.01, peers=[peer], connection=connection)


def test_the_third_look_at_one_beat_seeks_evidence_and_so_does_each_later_one() -> None:
    observer = an_observer()

    assert [look(observer, at) for at in (0, 1, 2, 3)] == [[], [], SEEK, SEEK]


def test_a_beat_in_between_ends_the_suspicion() -> None:
    observer = an_observer()

    assert [look(observer, at, beat=beat) for at, beat in ((0, 6), (1, 6), (2, 7), (3, 7))] == [
        *([], [], [], [])
    ]


def test_a_new_connection_of_the_observer_begins_the_observation_again() -> None:
    """Whatever ended its connection may have ended those of its peers, which come back as it did."""
    observer = an_observer()
    look(observer, 0)
    look(observer, 1)

    assert [look(observer, at, connection=2) for at in (2, 3, 4)] == [[], [], SEEK]


def test_a_failed_look_begins_the_observation_again() -> None:
    observer = an_observer()
    look(observer, 0)
    look(observer, 1)
    observer.look_failed()

    assert [look(observer, at) for at in (2, 3, 4)] == [[], [], SEEK]


def test_a_late_look_begins_the_observation_again() -> None:
    observer = an_observer()
    look(observer, 0)

    assert [look(observer, at) for at in (2.5, 3.5, 4.5)] == [[], [], SEEK]


def test_without_a_connection_that_proves_anything_only_silence_counts() -> None:
    observer = an_observer()

    found = [look(observer, at, connection=None) for at in range(7)]

    assert found == [[], [], [], [], [], [], [MarkUnreachable(node_id=PEER, beat=7)]]


def test_silence_goes_on_beside_evidence() -> None:
    observer = an_observer()
    found = [look(observer, at, unreachable=at > 6) for at in range(12)]

    assert found[6] == [MarkUnreachable(node_id=PEER, beat=7), *SEEK]
    assert found[7] == SEEK
    assert found[11] == [Remove(node_id=PEER, beat=7)]
