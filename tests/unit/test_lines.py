"""Where a node begins to look in the lines of the executions."""

import random
from typing import Any
from uuid import UUID, uuid4

from rowlock.protocol.lines import LOOK_SECONDS, LOOK_SECONDS_MAX, Lines
from rowlock.protocol.model import Claim, Place

LINE = UUID(int=1)


def a_claim(
    place: Place, *, execution: UUID = LINE, alone: bool = False, started: bool = True
) -> Claim:
    rest: dict[str, Any] = {"step": "main", "key": "k", "claims": 1, "failures": 0, "lost": 0}
    return Claim(
        **rest,
        weight=place[0],
        id=place[1],
        execution_id=execution,
        alone=alone,
        token=uuid4(),
        started=started,
        delivery="AT_LEAST_ONCE",
        slice="1",
        checkpoint=None,
        waited=None,
    )


def test_claims_begin_at_the_heads_of_all_lines_but_those_that_were_slow_at_the_last_look() -> None:
    lines = Lines()
    assert lines.must_look(0.0), "nothing is known yet"

    lines.looked({LINE: (0, 7)}, 10.0, 10.1)
    assert lines.passed == {LINE: (0, 7)}
    lines.looked({}, 20.0, 20.1)
    assert lines.passed == {}
    lines.claimed([a_claim((0, 8))])
    assert lines.passed == {}, "what was claimed says nothing of what waits before it"


def test_a_look_is_rare_and_takes_at_most_its_share_of_the_time_for_ten_seconds_at_most() -> None:
    lines = Lines()
    lines.looked({}, 1.0, 1.0)
    assert not lines.must_look(1.0 + LOOK_SECONDS * 0.99)
    assert lines.must_look(1.0 + LOOK_SECONDS)

    for seconds, pause in ((0.01, 0.1), (0.5, 5.0), (30.0, LOOK_SECONDS_MAX)):
        lines.looked({LINE: (0, 1)}, 100.0, 100.0 + seconds)
        assert not lines.must_look(100.0 + seconds + pause * 0.99)
        assert lines.must_look(100.0 + seconds + pause * 1.01)


def test_after_a_look_without_an_answer_claims_go_on_from_what_was_known() -> None:
    """It took longer than any statement may: the next exchange must not begin with another."""
    lines = Lines()
    lines.looked({LINE: (0, 7)}, 0.0, 1.0)
    assert lines.must_look(20.0)
    assert not lines.must_look(25.0)
    assert lines.passed == {LINE: (0, 7)}
    assert lines.must_look(20.0 + LOOK_SECONDS_MAX)


def test_the_place_moves_on_with_what_is_claimed_and_never_back(seed: int) -> None:
    """Others claim too: what this node passed over a moment ago it need not pass over again."""
    lines = Lines()
    rng = random.Random(seed)
    places = [(rng.choice((-1, 0, 9)), number) for number in range(2, 40)]
    lines.looked({LINE: (9, 1)}, 0.0, 1.0)

    lines.claimed([a_claim(place) for place in rng.sample(places, len(places))])

    last = max(p for p in places if p[0] == min(places)[0])
    assert lines.passed == {LINE: last}
    lines.claimed([a_claim((9, 3))])
    assert lines.passed == {LINE: last}


def test_what_is_prefetched_moves_no_place_because_what_was_lost_is_left_before_it() -> None:
    lines = Lines()
    lines.looked({LINE: (0, 1)}, 0.0, 1.0)
    lines.claimed([a_claim((0, 9), started=False)])
    assert lines.passed == {LINE: (0, 1)}
    lines.claimed([a_claim((0, 9), started=False), a_claim((0, 4))])
    assert lines.passed == {LINE: (0, 4)}


def test_only_lines_that_were_looked_over_have_a_place_and_what_runs_alone_stands_in_none() -> None:
    lines = Lines()
    lines.looked({LINE: (0, 1)}, 0.0, 1.0)
    lines.claimed([a_claim((0, 5), execution=uuid4()), a_claim((0, 9), alone=True)])
    assert lines.passed == {LINE: (0, 1)}
