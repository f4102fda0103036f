"""A random walk over one instance: restarts of restarts, and after every step the numbers add up.

The storm (test_lock_order.py) does everything at once and looks at the end. Here one move follows the
other, each one is sometimes sent twice, as after a lost answer, and the whole is looked at in between.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from uuid import UUID, uuid4

import pytest

from rowlock.protocol.model import FIRST_STEP, Claim
from tests.support import oracles
from tests.support.builders import AT_LEAST_ONCE, AT_MOST_ONCE, HASH, Run, Scene, a_policy

STEPS = 200
WALKS = 8

MOVES = {
    "launch": 1,
    "restart": 1,
    "claim": 4,
    "complete": 4,
    "fail": 1,
    "release": 1,
    "drive": 4,
    "take_over": 1,
    "cancel": 1,
    "suspend": 1,
    "limit": 1,
    "expire": 1,
    "resolve": 1,
    "lose_the_node": 1,
}


class Walk:
    """One instance, one node that works and one that drives."""

    def __init__(self, scene: Scene, rng: random.Random) -> None:
        self.scene = scene
        self.rng = rng
        self.keys = [f"p{n}" for n in range(rng.choice([1, 3, 7]))]
        self.node = scene.a_node(slots=50)
        self.driver = scene.a_node(slots=0, pool="masters")
        self.held: list[Claim] = []
        self.last: UUID | None = None
        self.made = 0
        self.starts: Counter[str] = Counter()
        self.allowed = Counter(self.keys)
        self.completed: set[str] = set()
        self.launch()

    def step(self) -> None:
        (move,) = self.rng.choices(list(MOVES), list(MOVES.values()))
        getattr(self, move)()

    @property
    def execution(self) -> UUID:
        assert self.last is not None
        return self.last

    def maybe(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def one_held(self) -> Claim | None:
        return self.held.pop(self.rng.randrange(len(self.held))) if self.held else None

    # -- executions ----------------------------------------------------------------------------

    def begun(self, execution: UUID, outcome: str) -> None:
        if outcome in {"requested", "restarted"}:
            self.last = execution
            self.made += 1

    def launch(self) -> None:
        id_ = uuid4()
        policy = a_policy(
            max_attempts=2,
            has_finish=self.maybe(0.8),
            max_failed=self.rng.choice([None, 1, "50%", "100%"]),
        )
        for outcomes in ({"requested", "restarted"}, {"exists"}):
            execution, outcome = self.scene.store.request(
                id_,
                job=self.scene.job,
                contract_hash=HASH,
                policy=policy,
                delivery=self.rng.choice([AT_MOST_ONCE, AT_LEAST_ONCE]),
                instance_key="walk",
                parameters="{}",
                pool=self.scene.pool,
            )
            self.begun(execution, outcome)
            if execution != id_:
                return
            assert outcome in outcomes

    def restart(self) -> None:
        self.begun(*self.scene.store.restart(uuid4(), self.execution, actor="walk", reason=None))

    def cancel(self) -> None:
        if self.maybe(0.4):
            answers = {self.scene.store.cancel(self.execution, "walk", None) for _ in range(2)}
            assert len(answers) == 1

    def suspend(self) -> None:
        verb = self.scene.store.suspend if self.maybe(0.2) else self.scene.store.resume
        verb(self.execution, "walk", None)

    def limit(self) -> None:
        changes = {"parallelism": self.rng.choice([None, 1, 2])}
        self.scene.store.set_limits(self.execution, changes, "walk", None)

    def expire(self) -> None:
        if self.maybe(0.1):
            self.scene.admin.execute(
                "UPDATE rowlock.batch_job_coordination SET deadline_at = rowlock.now()"
                " WHERE execution_id = %s AND ended_at IS NULL",
                [self.execution],
            )
        self.scene.store.expire("walk")

    def resolve(self) -> None:
        key, how = self.rng.choice(self.keys), self.rng.choice(["completed", "retry"])
        result = json.dumps(key) if how == "completed" else None

        def say() -> str:
            return self.scene.people.resolve(
                self.execution, key, how, actor="walk", reason=None, result=result
            )

        if say() == "resolved":
            assert say() == "same"
            if how == "retry":
                self.allowed[key] = self.starts[key] + 1

    # -- the master ----------------------------------------------------------------------------

    def take_over(self) -> None:
        self.scene.store.deregister(self.driver, "walk")
        self.driver = self.scene.a_node(slots=0, pool="masters")

    def drive(self) -> None:
        taken = self.scene.store.adopt(self.driver, self.execution)
        if taken is None:
            return
        if taken.status == "PLANNING":
            run = Run(id=self.execution, master=self.driver, epoch=taken.epoch, instance="walk")
            self.scene.stage(run, self.keys)
            for _ in range(2):
                sealed = self.scene.store.seal(run.id, run.epoch, FIRST_STEP, len(self.keys))
                assert sealed == ("sealed", None)
        seen = self.scene.store.advance(self.driver, self.execution, taken.epoch)
        if seen.status == "FINISHING":
            self.read_all()
            if self.maybe():
                self.finish(taken.epoch)

    def read_all(self) -> None:
        """finish() sees each result of the chain once, in the order of the pages, whatever their size."""
        counts = self.scene.execution(self.execution).counts
        found: list[tuple[int, str, str | None]] = []
        while page := self.scene.store.results(
            self.execution, found[-1][0] if found else 0, self.rng.randrange(1, 4)
        ):
            found += page
        assert [row[0] for row in found] == sorted({row[0] for row in found})
        assert {json.loads(result or "null") for _, _, result in found} == {k for _, k, _ in found}
        assert len({key for _, key, _ in found}) == len(found) == counts["completed"]
        assert counts["completed"] + counts["failed"] == counts["total"] == len(self.keys)

    def finish(self, epoch: int) -> None:
        reason = "Failed" if self.maybe(0.6) else None
        answers = {
            self.scene.store.finish(self.execution, epoch, summary="1", reason=reason)
            for _ in range(2)
        }
        assert answers == {"FAILED" if reason else "COMPLETED"}

    # -- the node ------------------------------------------------------------------------------

    def claim(self) -> None:
        slots, prefetch = self.rng.randrange(1, 4), self.rng.randrange(2)
        for claim in self.scene.claim(self.node, slots=slots, prefetch=prefetch, idle=True):
            self.held.append(claim)
            if claim.at_most_once:
                self.starts[claim.key] += 1
                assert self.starts[claim.key] <= self.allowed[claim.key], claim

    def complete(self) -> None:
        if claim := self.one_held():
            result = json.dumps(claim.key)
            answer = self.scene.complete(self.node, claim, result=result)
            assert self.scene.complete(self.node, claim, result=result) == answer
            if answer == ["completed"]:
                assert claim.key not in self.completed
                self.completed.add(claim.key)

    def fail(self) -> None:
        if claim := self.one_held():
            kind = self.rng.choice(["retry", "never", "later"])
            answer = self.scene.fail(self.node, claim, kind)
            assert self.scene.fail(self.node, claim, kind) == answer

    def release(self) -> None:
        if claim := self.one_held():
            unstarted = self.maybe()
            answer = self.scene.release(self.node, claim, unstarted=unstarted)
            assert self.scene.release(self.node, claim, unstarted=unstarted) == answer
            if answer == ["kept"]:
                self.held.append(claim)
            elif claim.at_most_once and answer != ["lost"]:
                self.starts[claim.key] -= 1

    def lose_the_node(self) -> None:
        self.scene.store.deregister(self.node, "walk")
        self.node, self.held = self.scene.a_node(slots=50), []

    # -- what holds after every step -----------------------------------------------------------

    def look(self) -> None:
        wrong = self.scene.all(
            "SELECT * FROM rowlock.executions"
            " WHERE completed + failed + cancelled + running + pending <> total"
        )
        assert wrong == []
        assert oracles.miscounted(self.scene) == []

    def look_back(self) -> None:
        """Every execution has one beginning, and every end one event."""
        (counts,) = self.scene.all(
            "SELECT count(*) FILTER (WHERE event IN ('execution_requested', 'execution_restarted'))"
            "  AS begun, count(*) FILTER (WHERE event = 'execution_ended') AS ended,"
            " (SELECT count(*) FROM rowlock.batch_job_coordination) AS executions,"
            " (SELECT count(ended_at) FROM rowlock.batch_job_coordination) AS over"
            " FROM rowlock.batch_events"
        )
        assert counts.begun == counts.executions == self.made
        assert counts.ended == counts.over


@pytest.mark.parametrize("walk", range(WALKS))
def test_the_numbers_of_an_instance_add_up_after_every_step(alone: Scene, walk: int) -> None:
    oracles.watch(alone)
    walker = Walk(alone, random.Random(walk))

    for _ in range(STEPS):
        walker.step()
        walker.look()

    walker.look_back()
