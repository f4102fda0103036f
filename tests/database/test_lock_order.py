"""A storm of everything at once: no deadlock, no orphan, nothing ends twice, everything ends."""

import os
import random
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest

from rowlock.db.store import Store
from rowlock.protocol.model import FIRST_STEP, Claim, Completion
from rowlock.protocol.states import EXECUTION_MOVES, NODE_MOVES, PARTITION_MOVES
from tests.support import oracles
from tests.support.builders import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EVERYBODY_IS_GONE,
    HASH,
    Scene,
    a_policy,
)

SECONDS: Final = float(os.environ.get("ROWLOCK_STORM_SECONDS") or 4)
"""How long the storm lasts; longer by hand, to look for what is rare."""

MOVES: Final = {
    "claim": 20,
    "complete": 15,
    "complete_and_claim": 10,
    "fail": 8,
    "release": 5,
    "checkpoint": 2,
    "lock": 4,
    "report": 4,
    "beat": 5,
    "drive": 12,
    "adopt": 5,
    "request": 3,
    "cancel": 2,
    "restart": 4,
    "relaunch": 4,
    "suspend": 2,
    "resume": 4,
    "limit": 4,
    "expire": 2,
    "abandon": 1,
    "resolve": 3,
    "retain": 1,
    "suspect": 4,
    "remove": 4,
    "accuse": 2,
    "recover": 2,
    "promote": 3,
    "leave": 1,
    "transact": 6,
}
"""What an actor may do, and how often beside the rest."""

COMPLETED_TWICE: Final[LiteralString] = """
SELECT job_name, instance_key FROM rowlock.batch_job_coordination
GROUP BY 1, 2 HAVING count(*) FILTER (WHERE status = 'COMPLETED') > 1
"""
"""Instances that have completed more than once."""

LEGAL: Final = {
    (kind, before and before.value, after.value)
    for kind, moves in (
        ("node", NODE_MOVES),
        ("partition", PARTITION_MOVES),
        ("execution", EXECUTION_MOVES),
    )
    for before, followers in moves.items()
    for after in followers
}


@dataclass(slots=True)
class Record:
    """What the actors saw, for the oracles. Appending is atomic, so they share it."""

    nodes: list[UUID] = field(default_factory=list[UUID])
    executions: list[UUID] = field(default_factory=list[UUID])
    accepted: list[tuple[int, UUID]] = field(default_factory=list[tuple[int, UUID]])
    """Partition and token of every completion that was answered with 'completed'."""
    instances: dict[UUID, str] = field(default_factory=dict[UUID, str])
    """The instance of every execution that somebody asked for."""
    starts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Instance and key of every AT_MOST_ONCE attempt whose author code began."""
    again: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """The same, of every one that a person has let start once more."""
    done: Counter[str] = field(default_factory=Counter[str])

    def started(self, claim: Claim) -> None:
        """Author code of an AT_MOST_ONCE attempt begins."""
        self.starts[self.instances[claim.execution_id], claim.key] += 1


class Actor:
    """One connection that does what nodes, masters, observers and people do, by chance."""

    def __init__(self, scene: Scene, record: Record, rng: random.Random) -> None:
        self.scene = scene
        self.store: Store = scene.a_store()
        self.people: Store = scene.a_store(role="rowlock_admin")
        self.work = scene.a_store().connection
        """The connection of an executor, for transactions of an author."""
        self.record = record
        self.rng = rng
        self.node = uuid4()
        self.held: list[Claim] = []
        self.driven: dict[UUID, int] = {}
        self.register()

    def act(self) -> None:
        """Do one thing."""
        (move,) = self.rng.choices(list(MOVES), list(MOVES.values()))
        getattr(self, move)()
        self.record.done[move] += 1

    # -- a node ----------------------------------------------------------------------------------

    def register(self) -> None:
        self.node = uuid4()
        self.held, self.driven = [], {}
        self.store.register(
            self.node,
            name="storm",
            pool=self.scene.pool,
            slots=4,
            jobs={self.scene.job: [HASH]},
            version="test",
        )
        self.record.nodes.append(self.node)

    def take(self, claims: list[Claim]) -> None:
        for claim in claims:
            # Before `go`, a start is handed back now and then; afterwards never.
            if claim.at_most_once and self.rng.random() < 0.2:
                pairs = [(claim.id, claim.token)]
                self.store.release(self.node, pairs, unstarted=True)
                continue
            if claim.at_most_once:
                self.record.started(claim)
            self.held.append(claim)

    def how(self) -> dict[str, Any]:
        """How many, and sometimes only behind what this one holds already."""
        seed, held = self.rng.getrandbits(62), self.held if self.rng.random() < 0.5 else []
        after = {claim.execution_id: (claim.weight, claim.id) for claim in held}
        slots, prefetch = self.rng.randrange(4), self.rng.randrange(3)
        return {"slots": slots, "prefetch": prefetch, "seed": seed, "after": after}

    def claim(self) -> None:
        self.take(self.store.claim(self.node, idle=not self.held, **self.how()))

    def some(self) -> list[Claim]:
        self.rng.shuffle(self.held)
        n = self.rng.randrange(len(self.held) + 1)
        chosen, self.held = self.held[:n], self.held[n:]
        return chosen

    def sent(self) -> list[Completion]:
        return [Completion(id=c.id, token=c.token, result="1") for c in self.some()]

    def accept(self, sent: list[Completion], answers: dict[int, str]) -> None:
        self.record.accepted += [(c.id, c.token) for c in sent if answers[c.id] == "completed"]

    def complete(self) -> None:
        sent = self.sent()
        if sent:
            self.accept(sent, self.store.complete(self.node, sent))
            if self.rng.random() < 0.2:  # the answer was lost
                self.accept(sent, self.store.complete(self.node, sent))

    def complete_and_claim(self) -> None:
        sent, idle = self.sent(), not self.held
        answers, claims = self.store.complete_and_claim(self.node, sent, idle=idle, **self.how())
        self.accept(sent, answers)
        self.take(claims)

    def fail(self) -> None:
        if not self.held:
            return
        claim = self.held.pop(self.rng.randrange(len(self.held)))
        self.store.fail(
            self.node,
            claim.id,
            claim.token,
            error='{"type": "Storm"}',
            kind=self.rng.choice(["retry", "retry", "retry", "never", "later"]),
            delay_seconds=self.rng.choice([0, 0, 0.05]),
        )

    def release(self) -> None:
        back = [claim for claim in self.some() if not claim.at_most_once]
        if back:
            pairs = [(claim.id, claim.token) for claim in back]
            self.store.release(self.node, pairs, unstarted=False)

    def checkpoint(self) -> None:
        if self.held:
            claim = self.rng.choice(self.held)
            self.store.checkpoint(self.node, claim.id, claim.token, "1")

    def report(self) -> None:
        told = self.rng.sample(self.held, min(len(self.held), 3))
        if told:
            text = f'{{"skipped": {self.rng.randrange(9)}}}'
            self.store.report(self.node, [(claim.id, claim.token, text) for claim in told])

    def lock(self) -> None:
        """A named lock; sometimes it is given back, sometimes it is left to the end of the claim."""
        if not self.held:
            return
        claim, name = self.rng.choice(self.held), self.rng.choice("ab")
        answer = self.store.acquire_lock(self.node, claim.id, claim.token, name)
        if answer == "acquired" and self.rng.random() < 0.5:
            self.store.release_lock(claim.token, name)

    def transact(self) -> None:
        """One transaction of an author, under the fence: a checkpoint or the completion."""
        if not self.held:
            return
        claim = self.held.pop(self.rng.randrange(len(self.held)))
        kind = self.rng.choice(["checkpoint", "completion"])
        try:
            with self.work.transaction():
                opened = "SELECT rowlock.fence_open(%s, %s)"
                fence = self.work.execute(opened, [claim.id, claim.token]).fetchone()
                assert fence is not None
                self.work.execute("SELECT rowlock.fence_arm(%s, %s, '1')", [fence[0], kind])
        except psycopg.Error as error:
            if error.sqlstate != "RL002":
                raise
            return
        if kind == "completion":
            self.record.accepted.append((claim.id, claim.token))
        else:
            self.held.append(claim)

    def beat(self) -> None:
        alive = self.store.beat(self.node, load=len(self.held), draining=False).alive
        if not alive:
            self.register()

    def leave(self) -> None:
        self.store.deregister(self.node, "storm")
        self.register()

    # -- a master --------------------------------------------------------------------------------

    def adopt(self) -> None:
        taken = self.store.adopt(self.node)
        if taken is None:
            return
        self.driven[taken.execution_id] = taken.epoch
        if taken.status != "PLANNING":
            return
        if self.rng.random() < 0.05:
            self.store.fail_plan(self.node, taken.execution_id, taken.epoch, "Storm", "no plan")
            return
        total = self.rng.randrange(30)
        keys = [f"p{n}" for n in range(total)]
        weights = [self.rng.randrange(5) for _ in keys]
        self.store.stage(
            taken.execution_id, taken.epoch, 0, keys=keys, slices=["{}"] * total, weights=weights
        )
        self.store.seal(taken.execution_id, taken.epoch, FIRST_STEP, total)

    def drive(self) -> None:
        if not self.driven:
            return
        execution = self.rng.choice(list(self.driven))
        epoch = self.driven[execution]
        status = self.store.advance(self.node, execution, epoch).status
        if status == "FINISHING":
            reason = "Storm" if self.rng.random() < 0.2 else None
            self.store.finish(execution, epoch, summary="1", reason=reason)
        elif status not in {"PLANNING", "RUNNING", "CLOSING"}:
            del self.driven[execution]
        elif self.rng.random() < 0.1:
            self.store.resign(self.node, execution, epoch)
            del self.driven[execution]

    # -- observers and people --------------------------------------------------------------------

    def peer(self) -> tuple[UUID, int] | None:
        peers = self.store.beat(self.node, load=0, draining=False).peers
        if not peers:
            return None
        peer = self.rng.choice(peers)
        return peer.node_id, peer.beat

    def suspect(self) -> None:
        if peer := self.peer():
            self.store.mark_unreachable(self.node, *peer)

    def remove(self) -> None:
        if peer := self.peer():
            self.store.remove_node(self.node, *peer)

    def accuse(self) -> None:
        """The evidence is false; that must cost no more than an attempt."""
        if peer := self.peer():
            self.store.recover_by_evidence(self.node, *peer)

    def recover(self) -> None:
        self.store.recover(self.node)

    def promote(self) -> None:
        self.store.promote(10)

    def recent(self) -> UUID:
        return self.rng.choice(self.record.executions[-6:])

    def cancel(self) -> None:
        self.store.cancel(self.recent(), "storm", None)

    def restart(self) -> None:
        new, of = uuid4(), self.recent()
        self.record.instances[new] = self.record.instances[of]
        _, outcome = self.store.restart(new, of, actor="storm", reason=None)
        if outcome == "restarted":
            self.record.executions.append(new)

    def suspend(self) -> None:
        self.store.suspend(self.recent(), "storm", None)

    def resume(self) -> None:
        self.store.resume(self.recent(), "storm", None)

    def limit(self) -> None:
        changes: dict[str, Any] = {
            "priority": self.rng.randrange(3),
            "parallelism": self.rng.choice([None, 1, 3]),
        }
        if self.rng.random() < 0.1:
            changes["deadline_seconds"] = 1
        self.store.set_limits(self.recent(), changes, "storm", None)

    def expire(self) -> None:
        self.store.expire("storm")

    def abandon(self) -> None:
        self.people.abandon(self.recent(), "storm", None)

    def resolve(self) -> None:
        of, key = self.recent(), f"p{self.rng.randrange(30)}"
        how = self.rng.choice(["completed", "retry"])
        answer = self.people.resolve(of, key, how, actor="storm", reason=None)
        if (how, answer) == ("retry", "resolved"):
            self.record.again[self.record.instances[of], key] += 1

    def retain(self) -> None:
        self.store.retain(completed_seconds=None, failed_seconds=1, events_seconds=None, limit=100)

    def request(self) -> None:
        self.ask_for(uuid4().hex)

    def relaunch(self) -> None:
        """Mostly refused; else a restart with another policy and delivery, also after a purge."""
        self.ask_for(self.record.instances[self.recent()])

    def ask_for(self, instance: str) -> None:
        id_ = uuid4()
        self.record.instances[id_] = instance
        _, outcome = self.store.request(
            id_,
            job=self.scene.job,
            contract_hash=HASH,
            policy=a_policy(
                max_attempts=self.rng.choice([1, 2, 3]),
                max_failed=self.rng.choice([None, 0, "30%"]),
                has_finish=self.rng.random() < 0.5,
            ),
            delivery=self.rng.choice([AT_LEAST_ONCE, AT_MOST_ONCE]),
            instance_key=instance,
            parameters="{}",
            pool=self.scene.pool,
            priority=self.rng.randrange(3),
            options={
                "parallelism": self.rng.choice([None, None, 2]),
                "suspended": self.rng.random() < 0.1,
            },
        )
        if outcome in {"requested", "restarted"}:
            self.record.executions.append(id_)


def calm(actor: Actor) -> None:
    """After the storm one node is left; it recovers, runs and ends whatever there is."""
    scene, store = actor.scene, actor.store
    for node in actor.record.nodes:
        store.deregister(node, "the storm is over")
    actor.register()
    for execution in actor.record.executions:
        store.resume(execution, "calm", None)
    until = time.monotonic() + 30 + 2 * SECONDS
    while time.monotonic() < until:
        store.recover(actor.node)
        store.expire("calm")
        scene.admin.execute(
            "UPDATE rowlock.batch_partitions SET available_at = now()"
            " WHERE status = 'PENDING' AND NOT ready"
        )
        store.promote(10_000)
        while store.beat(actor.node, load=0, draining=False).adoptable:
            actor.adopt()
        while claims := store.claim(actor.node, slots=50, prefetch=0, idle=True, seed=1):
            for claim in claims:
                if claim.at_most_once:
                    actor.record.started(claim)
            sent = [Completion(id=c.id, token=c.token, result="1") for c in claims]
            actor.accept(sent, store.complete(actor.node, sent))
        for execution, epoch in list(actor.driven.items()):
            status = store.advance(actor.node, execution, epoch).status
            if status == "FINISHING":
                store.finish(execution, epoch, summary="1")
            elif status not in {"PLANNING", "RUNNING", "CLOSING"}:
                del actor.driven[execution]
        if not scene.all(
            "SELECT FROM rowlock.batch_job_coordination WHERE ended_at IS NULL LIMIT 1"
        ):
            return
    left = scene.all(
        "SELECT e.execution_id, e.status, e.master_node, p.status AS partition, p.alone, p.ready"
        " FROM rowlock.batch_job_coordination e LEFT JOIN rowlock.batch_partitions p"
        " ON p.execution_id = e.execution_id AND p.ended_at IS NULL WHERE e.ended_at IS NULL"
    )
    raise AssertionError(f"never ended: {left[:5]}")


def test_a_storm_of_everything_deadlocks_nowhere_and_loses_nothing(alone: Scene, seed: int) -> None:
    """Eight nodes do everything at once, and die of it. (Reported as kestra PR#9096, durable-workflow#408, hatchet
    PR#241, web2py#2244, pg-boss#832: reaper, heartbeat and completion lock rows in different orders.)"""
    oracles.watch(alone)
    alone.admin.execute(EVERYBODY_IS_GONE)
    record = Record()
    # The moves are the seed's, their interleaving is the machine's.
    actors = [Actor(alone, record, random.Random(seed + n)) for n in range(8)]
    for _ in range(4):
        actors[0].request()
    until = time.monotonic() + SECONDS

    def storm(actor: Actor) -> None:
        while time.monotonic() < until:
            actor.act()

    with ThreadPoolExecutor(len(actors)) as threads:
        for running in [threads.submit(storm, actor) for actor in actors]:
            running.result()
    for actor in actors[1:]:
        actor.store.connection.close()
        actor.people.connection.close()
        actor.work.close()
    calm(actors[0])

    assert all(record.done[move] for move in MOVES), record.done
    assert oracles.deadlocks(alone) == 0
    assert oracles.orphans(alone) == []
    assert oracles.miscounted(alone) == []
    assert alone.all("SELECT FROM rowlock.batch_staging") == []
    repeated = [one for one, n in record.starts.items() if n > 1 + record.again[one]]
    assert repeated == [], "an AT_MOST_ONCE start was repeated"
    tokens: dict[int, set[UUID]] = defaultdict(set)
    for partition, token in record.accepted:
        tokens[partition].add(token)
    assert all(len(one) == 1 for one in tokens.values()), "two attempts were accepted"
    # But for those that a person has resolved, and without those that were purged.
    there = alone.all("SELECT id, status, resolution FROM rowlock.batch_partitions")
    accepted = {row.id for row in there if row.status == "COMPLETED" and row.resolution is None}
    assert accepted == set(tokens) & {row.id for row in there}
    assert alone.all(COMPLETED_TWICE) == []
    ends = alone.all(
        "SELECT execution_id FROM rowlock.batch_events WHERE event = 'execution_ended'"
        " GROUP BY 1 HAVING count(*) > 1"
    )
    assert ends == []
    assert oracles.moves(alone) <= LEGAL


def test_the_watcher_sees_a_terminal_row_change(alone: Scene) -> None:
    """The storm's oracle can fail."""
    oracles.watch(alone)
    node, claim = alone.a_claim()
    alone.complete(node, claim)

    with pytest.raises(psycopg.errors.RaiseException, match="a terminal partition was changed"):
        alone.admin.execute("UPDATE rowlock.batch_partitions SET result = '2'")
