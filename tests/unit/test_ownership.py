"""Decisions about what a node holds. That they are enough is tried in tests/simulation."""

from itertools import product

from rowlock.protocol.ownership import compare, may_begin, may_claim, outlives_removal


def test_a_claim_whose_answer_was_lost_is_unknown_and_one_taken_away_is_gone() -> None:
    difference = compare(
        {1: "mine", 2: "lost answer", 3: "newer"}, [(1, "mine"), (3, "older"), (4, "x")]
    )

    assert difference.unknown == [(2, "lost answer"), (3, "newer")]
    assert difference.gone == {(3, "older"), (4, "x")}


def test_who_agrees_with_the_database_has_nothing_to_do() -> None:
    assert compare({}, []) == compare({1: 7}, [(1, 7)])


def test_every_reason_alone_is_enough_not_to_claim_or_to_begin() -> None:
    for claimable, synced, lease, draining, alone in product((True, False), repeat=5):
        free = (claimable, synced, lease, draining, alone) == (True, True, True, False, False)
        assert free == may_claim(
            claimable=claimable, synced=synced, lease_holds=lease, draining=draining, alone=alone
        )
        may = may_begin(lease_holds=lease, draining=draining, stopping=alone)
        assert may == ((lease, draining, alone) == (True, False, False))


def test_only_what_can_never_begin_again_outlives_the_removal() -> None:
    outliving = [
        case
        for case in product((True, False), repeat=2)
        if outlives_removal(at_most_once=case[0], began=case[1])
    ]
    assert outliving == [(True, True)]
