"""One act: an execution that is launched, watched, and robbed of a node in its middle.

It launches, looks and kills. What becomes of the work, the nodes decide by themselves.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypeVar
from uuid import UUID

from rowlock.db.store import Store
from rowlock.demo import narration
from rowlock.demo.crew import Crew
from rowlock.demo.database import Connection
from rowlock.demo.findings import Ended, Kill
from rowlock.demo.lookout import Claimed, Lookout
from rowlock.demo.screen import Screen, View
from rowlock.demo.tempo import Tempo
from rowlock.demo.victim import Held, Holding, choose_victim
from rowlock.errors import RowlockError
from rowlock.job import AnyJob
from rowlock.registry import Registry

SECONDS_MAX: Final = 180.0
"""How long anything may take. What takes longer will not come any more."""

Describe = Callable[[Claimed], Held]
"""Says how far a claimed partition is, which each job knows for itself."""


T = TypeVar("T")


class Stuck(RowlockError):
    """Something did not happen within its time. The logs of the nodes are the place to look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """What all acts share."""

    screen: Screen
    tempo: Tempo
    crew: Crew
    db: Connection
    pool: str
    victims: set[UUID] = field(default_factory=set[UUID])
    """Incarnations that were killed."""

    @property
    def lookout(self) -> Lookout:
        """For asking the database."""
        return Lookout(self.db, self.pool)

    def wait(self, look: Callable[[], T], what: str, seconds: float = SECONDS_MAX) -> T:
        """Look until there is something to see: the first answer that is true in a condition.

        Raises:
            Stuck: It does not, for too long.
            NodeDied: A node ended that nobody had killed.
        """
        until = time.monotonic() + seconds
        while not (seen := look()):
            self.crew.check()
            if time.monotonic() > until:
                raise Stuck(f"{what} did not happen within {seconds:g} s")
            time.sleep(self.tempo.look_seconds)  # nobody announces claims and beats
        return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A node was killed."""

    holding: Holding
    """What it held when it died."""
    pid: int
    at: datetime


class Act:
    """An execution and what is told about it."""

    def __init__(self, house: House, job: type[AnyJob], params: Any) -> None:
        """Launch it, as `rowlock launch --detach` does: any node becomes its master.

        Args:
            house: What all acts share.
            job: The class of the job.
            params: Its parameters.
        """
        self._house = house
        self._lookout = house.lookout
        self._event = self._lookout.last_event()
        self._began = time.monotonic()
        self.instance = f"{house.pool} {job.name}"
        self.execution_id = _launch(house, job, params, self.instance)

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._began

    # -- looking -------------------------------------------------------------------------------

    def until(self, look: Callable[[], T], what: str) -> T:
        """Show what happens until there is something to see, as `House.wait` does.

        Raises:
            Stuck: It does not, for too long.
            NodeDied: A node ended that nobody had killed.
        """

        def shown() -> T:
            self._show()
            return look()

        return self._house.wait(shown, what)

    def be_calm(self) -> None:
        """Let it run undisturbed for a while, from the first claim on."""
        self.until(lambda: self._lookout.claimed(self.execution_id), "the first claim")
        until = time.monotonic() + self._house.tempo.calm_seconds
        self.until(lambda: time.monotonic() > until, "the calm before the kill")

    def is_over(self) -> bool:
        """Whether the execution has ended."""
        return self._lookout.execution(self.execution_id).ended

    def tell(self, *lines: narration.Line) -> None:
        """Put lines on the screen."""
        for line in lines:
            self._house.screen.event(self.seconds, line.text, line.tone)

    def ended(self) -> Ended:
        """How it has ended."""
        execution = self._lookout.execution(self.execution_id)
        assert execution.ended_at is not None
        attempts = sum(one.claims for one in self._lookout.partitions(self.execution_id))
        return Ended(
            execution_id=self.execution_id,
            job=execution.job_name,
            status=execution.status,
            reason=execution.failure_message,
            partitions=execution.total or 0,
            completed=execution.completed,
            failed=execution.failed,
            attempts=attempts,
            seconds=(execution.ended_at - execution.requested_at).total_seconds(),
            masters=execution.master_epoch,
        )

    def _show(self) -> None:
        if not self._house.screen.has_audience:
            return
        execution = self._lookout.execution(self.execution_id)
        nodes = narration.of_nodes(
            self._house.crew.names,
            self._lookout.nodes(),
            self._lookout.tallies(self.execution_id),
            killed=self._house.victims,
        )
        self._house.screen.show(
            View(
                completed=execution.completed,
                failed=execution.failed,
                total=execution.total,
                nodes=nodes,
            )
        )
        happenings = self._lookout.events(self._event)
        if happenings:
            self._event = happenings[-1].id
        removal_seconds = self._house.tempo.removal_seconds
        self.tell(*narration.of_happenings(happenings, removal_seconds=removal_seconds))

    # -- killing -------------------------------------------------------------------------------

    def strike(
        self, describe: Describe, *, master: bool | None = None, spared: Collection[str] = ()
    ) -> Blow:
        """Kill a node while it is in the middle of a partition, and only then.

        Args:
            describe: Says how far a claimed partition is.
            master: Only the execution's master, or only another node; None: any.
            spared: Names of nodes to leave alone.

        Raises:
            Stuck: The execution ended before there was such a node.
            NodeDied: A node ended that nobody had killed.
        """

        def struck() -> Blow | None:
            holding = choose_victim(self._holdings(describe), master=master, spared=spared)
            blow = self._strike_if_held(holding, describe) if holding else None
            if blow is None and self.is_over():
                raise Stuck("the execution ended before a node was in the middle of a partition")
            return blow

        blow = self.until(struck, "a node in the middle of a partition")
        assert blow is not None
        return blow

    def verdict_on(self, blow: Blow) -> Kill:
        """The kill, with what the other nodes made of it."""
        victim = blow.holding

        def seconds_until(*events: str) -> float | None:
            return next(
                (
                    (one.at - blow.at).total_seconds()
                    for one in self._lookout.events(0)
                    if one.event in events and one.node_id == victim.node_id
                ),
                None,
            )

        return Kill(
            node=victim.node,
            node_id=victim.node_id,
            pid=blow.pid,
            was_master=victim.is_master,
            at=blow.at,
            held=victim.partitions,
            unreachable_seconds=seconds_until("node_gone", "node_unreachable"),
            removed_seconds=seconds_until("node_removed"),
        )

    def _strike_if_held(self, holding: Holding, describe: Describe) -> Blow | None:
        """Between a look and a kill a partition may end. So: hold the node, look again, kill."""
        crew, node_id = self._house.crew, holding.node_id
        crew.hold(holding.node)
        held = self._holding_of(node_id, describe)
        if held is None or not held.still_runs(holding.halfway):
            crew.let_go(holding.node)
            return None
        at = self._lookout.now()
        self._house.victims.add(node_id)
        pid = crew.kill(holding.node)
        # What the server had received before still counts: only when it works for the dead no
        # more, what they hold is what they held.
        self._house.wait(
            lambda: not self._lookout.has_sessions(holding.node, since=at),
            "the end of the victim's sessions",
        )
        last = self._holding_of(node_id, describe) or replace(held, partitions=())
        self.tell(*narration.of_kill(last))
        return Blow(holding=last, pid=pid, at=at)

    def _holdings(self, describe: Describe) -> list[Holding]:
        """What living nodes hold."""
        claimed = self._lookout.claimed(self.execution_id)
        living = dict.fromkeys(one.node_id for one in claimed if one.is_active)
        return [_holding(node_id, claimed, describe) for node_id in living]

    def _holding_of(self, node_id: UUID, describe: Describe) -> Holding | None:
        claimed = self._lookout.claimed(self.execution_id)
        holds = any(one.node_id == node_id for one in claimed)
        return _holding(node_id, claimed, describe) if holds else None


def _holding(node_id: UUID, claimed: Sequence[Claimed], describe: Describe) -> Holding:
    own = [one for one in claimed if one.node_id == node_id]
    return Holding(
        node_id=node_id,
        node=own[0].node,
        is_master=own[0].is_master,
        partitions=tuple(map(describe, own)),
    )


def _launch(house: House, job: type[AnyJob], params: Any, instance: str) -> UUID:
    definition = Registry([job]).definition(job.name)
    execution_id, _ = Store(house.db).request(
        uuid.uuid4(),
        job=definition.name,
        contract_hash=definition.contract_hash,
        policy=definition.policy,
        delivery=definition.job.delivery,
        instance_key=instance,
        parameters=definition.parameters.encode(params),
        pool=house.pool,
        requester={"command": "rowlock demo"},
    )
    return execution_id
