"""Finds out why an execution does not move, or why it ended as it did: facts in, reasons out.

It asks nobody and knows no database. `rowlock explain` reads the facts and prints the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from rowlock.cli import output
from rowlock.db.diagnosis import Waiting
from rowlock.db.views import Event, Execution, Holder, Node, Partition

INFRASTRUCTURE_TIMES_MIN: Final = 3
"""So many of the latest retries after failures of the infrastructure are a pattern."""
NAMES_MAX: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of an execution, all read at about the same time."""

    execution: Execution
    nodes: Sequence[Node]
    """All that are not removed, of every pool."""
    waiting: Waiting
    holders: Sequence[Holder]
    ahead: int
    """Partitions that wait in executions of higher priority in the same pool."""
    closing_since: datetime | None
    interrupted: Sequence[Event]
    """Its latest attempts that the infrastructure ended, newest last."""
    failed: Sequence[Partition]
    """The first of its partitions that FAILED."""
    unresolved: Sequence[str]
    """Keys of the first of those whose outcome is unknown, and that nobody has resolved."""
    later: Execution | None
    """The execution that restarted this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason, for people, and a stable word for programs."""

    reason: str
    text: str
    remedy: str | None = None
    """What to do about it: a command, or a sentence; None: nothing, but wait."""


def reasons(facts: Facts) -> list[Reason]:
    """Why the execution is where it is, the most decisive first; never empty."""
    one = facts.execution
    if one.ended:
        found = [*_ended(facts), *_unresolved(facts)]
    elif one.status == "CLOSING":
        found = [*_closing(facts), *_master(facts)]
    elif one.status == "RUNNING":
        found = [*_suspended(facts), *_waiting(facts), *_infrastructure(facts)]
        found += [*_holders(facts), *_master(facts), *_unresolved(facts)]
    else:
        found = [*_suspended(facts), *_master(facts), *_driven(facts)]
    return list(dict.fromkeys(found)) or [_moving(facts)]


# -- nodes -------------------------------------------------------------------------------------


def _accepts(node: Node, one: Execution) -> bool:
    mine = node.only_execution in {None, one.execution_id}
    return mine and one.contract_hash in node.jobs.get(one.job_name, ())


def _names(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes[:NAMES_MAX]]
    more = len(nodes) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _nobody(facts: Facts, *, to: str, pool: str | None) -> Reason | None:
    """Why no node at all can do something for it; None if one can.

    Args:
        facts: The facts.
        to: What it would have to do, as in "no node is there to".
        pool: Only nodes of this pool can; None: of any.
    """
    one = facts.execution
    start = f"rowlock node --pool {one.pool} --import MODULE, with the code of {one.job_name}"
    if not facts.nodes:
        return Reason(
            reason="no_node", text="no node is alive in this database at all", remedy=start
        )
    able = [node for node in facts.nodes if _accepts(node, one)]
    if pool is not None:
        able = [node for node in able if node.pool == pool and node.slots]
    if not able:
        where = f" of pool {pool!r} with slots" if pool is not None else ""
        return Reason(
            reason="nobody_accepts",
            text=f"no living node{where} registers job {one.job_name!r} with contract "
            f"{one.contract_hash}, to {to}; there are {_registered(facts)}",
            remedy=start,
        )
    free = [node for node in able if node.status == "ACTIVE" and not node.draining]
    if not free:
        return Reason(
            reason="nobody_takes_work",
            text=f"every node that could {to} is draining or unreachable: {_names(able)}",
            remedy="rowlock nodes; start another node",
        )
    return None


def _registered(facts: Facts) -> str:
    """Which contracts of the job are there, and in which pools; or which pools."""
    one = facts.execution
    there = sorted(
        {
            f"contract {known} in pool {node.pool!r}"
            + ("" if node.slots else " without slots")
            + (
                ""
                if node.only_execution in {None, one.execution_id}
                else " for one other execution"
            )
            for node in facts.nodes
            for known in node.jobs.get(one.job_name, ())
        }
    )
    if there:
        return ", ".join(there)
    pools = ", ".join(sorted({repr(node.pool) for node in facts.nodes}))
    return f"{len(facts.nodes)} nodes, in pool {pools}, and none knows this job"


# -- what holds an execution up ----------------------------------------------------------------


def _suspended(facts: Facts) -> Iterator[Reason]:
    one = facts.execution
    if one.suspended:
        yield Reason(
            reason="suspended",
            text="it is suspended: nothing more of it begins",
            remedy=f"rowlock resume {one.execution_id}",
        )


def _waiting(facts: Facts) -> Iterator[Reason]:
    """Why what waits is not claimed."""
    one, waiting = facts.execution, facts.waiting
    if not waiting.total:
        return
    nobody = _nobody(facts, to="process its partitions", pool=one.pool)
    if nobody is not None:
        yield nobody
        return
    if one.parallelism is not None and one.running >= one.parallelism:
        yield Reason(
            reason="limit",
            text=f"its limit is reached: {one.running} of at most {one.parallelism} partitions "
            "are claimed",
            remedy=f"rowlock set {one.execution_id} --parallelism N|none",
        )
    if waiting.delayed == waiting.total:
        yield Reason(
            reason="delayed",
            text=f"all {waiting.delayed} partitions that wait are delayed after a failure or by "
            f"their own wish; the next may run {output.age(waiting.next_at, one.read_at)}",
            remedy=f"rowlock partitions {one.execution_id} --status PENDING shows their errors",
        )
    elif not one.suspended:
        yield from _busy(facts)


def _busy(facts: Facts) -> Iterator[Reason]:
    one, waiting = facts.execution, facts.waiting
    able = [node for node in facts.nodes if _accepts(node, one) and node.pool == one.pool]
    able = [node for node in able if node.status == "ACTIVE" and not node.draining and node.slots]
    slots, load = sum(node.slots for node in able), sum(node.load for node in able)
    if waiting.alone:
        yield Reason(
            reason="suspect",
            text=f"{waiting.alone} of its partitions wait for a node that runs nothing else: "
            "their nodes were lost again and again, and the next loss is the last; until then "
            f"nodes of pool {one.pool!r} begin nothing else",
            remedy=f"rowlock events {one.execution_id} --event partition_recovered",
        )
    if load < slots:
        return
    if facts.ahead:
        yield Reason(
            reason="priority",
            text=f"{facts.ahead} partitions of executions with a higher priority than "
            f"{one.priority} wait before it, and all {slots} slots of pool {one.pool!r} are busy",
            remedy=f"rowlock set {one.execution_id} --priority N, or more nodes",
        )
    elif not one.running:
        yield Reason(
            reason="busy",
            text=f"all {slots} slots of pool {one.pool!r} are busy with other work",
            remedy=f"more nodes, or rowlock set {one.execution_id} --priority N",
        )


def _infrastructure(facts: Facts) -> Iterator[Reason]:
    if len(facts.interrupted) >= INFRASTRUCTURE_TIMES_MIN:
        last = facts.interrupted[-1]
        yield Reason(
            reason="infrastructure",
            text=f"attempts fail again and again because the database of ctx.transaction() does "
            f"({len(facts.interrupted)} times lately, the last one a {last.detail.get('type')} on "
            f"{last.node_name or 'a node that is gone'} "
            f"{output.age(last.at, facts.execution.read_at)}); this costs them no attempt and is "
            "repeated for ever",
            remedy="look at ROWLOCK_WORK_DSN of the nodes and at that server",
        )


def _holders(facts: Facts) -> Iterator[Reason]:
    """What runs on nodes that are silent; and the last attempts, which everything waits for."""
    one = facts.execution
    silent = {node.node_id: node for node in facts.nodes if node.status == "UNREACHABLE"}
    for holder in facts.holders:
        node = silent.get(holder.node_id)
        if node is not None:
            yield _silent(node, f"{holder.running + holder.waiting} of its partitions are")
    if facts.holders and not facts.waiting.total:
        yield Reason(
            reason="last_attempts",
            text=f"it waits for its last attempts: {_held(facts)}",
            remedy=f"rowlock partitions {one.execution_id} --status CLAIMED",
        )


def _held(facts: Facts) -> str:
    now = facts.execution.read_at
    return "; ".join(
        f"{holder.running + holder.waiting} on {holder.node_name or holder.node_id}"
        + (f", the oldest for {output.between(holder.oldest_at, now)}" if holder.oldest_at else "")
        for holder in facts.holders[:NAMES_MAX]
    )


_WITHOUT_EVIDENCE: Final = {
    "off": "; sooner only by evidence, which it has switched off (ROWLOCK_EVIDENCE)",
    "pooler": "; sooner only by evidence, which its pooler hides",
    "unreadable": "; sooner only by evidence, for which a superuser must GRANT pg_read_all_stats TO "
    "rowlock_owner",
    "hidden": "; sooner only by evidence, which this database service does not show",
}


def _silent(node: Node, what: str) -> Reason:
    return Reason(
        reason="unreachable",
        text=f"{what} on node {node.name}, which has been silent for "
        f"{output.duration(node.heartbeat_age_seconds)}; should it stay so it is removed, and its "
        f"work goes to others{_WITHOUT_EVIDENCE.get(node.evidence, '')}",
    )


# -- its master --------------------------------------------------------------------------------


def _master(facts: Facts) -> Iterator[Reason]:
    """What is the matter with the one that drives it."""
    one = facts.execution
    if one.master_node is not None:
        master = next((node for node in facts.nodes if node.node_id == one.master_node), None)
        if master is not None:
            if master.status == "UNREACHABLE":
                yield _silent(master, "its master runs")
            return
        lost = f"its master {one.master_name or one.master_node} is gone"
    elif one.suspended and one.status == "REQUESTED":
        return  # which says it all: no node adopts it by itself
    else:
        lost = "it has no master yet" if one.master_epoch == 0 else "its master has resigned"
    nobody = _nobody(facts, to="drive it", pool=None)
    if nobody is not None:
        yield nobody
    elif one.master_node is None and one.adopt_after > one.read_at:
        yield Reason(
            reason="waiting_for_master",
            text=f"{lost}: whoever launched it may become that until "
            f"{output.local(one.adopt_after)} ({output.age(one.adopt_after, one.read_at)}), and "
            "any node that knows the job from then on",
        )
    else:
        able = [node for node in facts.nodes if _accepts(node, one)]
        yield Reason(
            reason="waiting_for_adoption",
            text=f"{lost}: {_names(able)} may take over, within a beat unless busy with the plan or "
            "the finish() of another execution, of which a node does one at a time",
            remedy="should it last: the logs of these nodes (event executor_failed), or another node",
        )


def _driven(facts: Facts) -> Iterator[Reason]:
    """PLANNING and FINISHING: author code that the master runs."""
    one = facts.execution
    master = one.master_name or one.master_node
    if one.master_node is None:
        return
    if one.status == "PLANNING":
        yield Reason(
            reason="planning",
            text=f"partition() makes its plan on node {master}; it was requested "
            f"{output.age(one.requested_at, one.read_at)}, and nothing of a plan is visible before "
            "it is whole",
            remedy="should it last: the log of that node",
        )
    elif one.status == "FINISHING":
        yield Reason(
            reason="finishing",
            text=f"all its partitions are accounted for; finish() runs on node {master}, or waits to "
            "be run again after an error",
            remedy="should it last: the log of that node (event finish_failed)",
        )


def _closing(facts: Facts) -> Iterator[Reason]:
    one = facts.execution
    since = output.with_age(facts.closing_since, one.read_at)
    why = f"it is ending early{f', since {since}' if since else ''}: {_why(one)}"
    if not facts.holders:
        yield Reason(reason="closing", text=f"{why}; its master ends it at its next look")
        return
    yield Reason(
        reason="closing",
        text=f"{why}; it waits for attempts that run: {_held(facts)}",
        remedy="nodes kill what does not stop within their ROWLOCK_CANCEL_SECONDS",
    )
    silent = {node.node_id: node for node in facts.nodes if node.status == "UNREACHABLE"}
    for holder in facts.holders:
        if holder.node_id in silent:
            yield _silent(silent[holder.node_id], "attempts run")


def _moving(facts: Facts) -> Reason:
    one = facts.execution
    if not facts.waiting.total and not facts.holders:
        return Reason(
            reason="moving",
            text="everything is accounted for; its master ends it at its next look",
        )
    return Reason(
        reason="moving",
        text=f"nothing holds it up: {facts.waiting.total} partitions wait, "
        f"{one.running} are claimed by {one.nodes} nodes",
    )


# -- the end -----------------------------------------------------------------------------------

_RESTARTED: Final = frozenset({"FAILED", "CANCELLED"})


def _ended(facts: Facts) -> Iterator[Reason]:
    one = facts.execution
    when = output.with_age(one.ended_at, one.read_at)
    text = f"it ended {one.status}, {when}" + (
        "" if one.status == "COMPLETED" else f": {_why(one)}"
    )
    if facts.failed:
        first = facts.failed[0]
        error = output.cut(output.printable(first.error_text or "?"), 200)
        text += f"; {one.failed} partitions failed, first {output.printable(first.partition_key)!r}: {error}"
    remedy = None
    if facts.later is not None:
        text += f"; it was restarted as {facts.later.execution_id}"
        remedy = f"rowlock status {facts.later.execution_id}"
    elif one.status in _RESTARTED:
        remedy = f"rowlock restart {one.execution_id}, which keeps what has been completed"
        if facts.failed:
            remedy += (
                f"; rowlock partitions {one.execution_id} --status FAILED shows all that failed"
            )
    elif one.status == "ABANDONED":
        remedy = "launch it with another --instance: this one is never run again"
    yield Reason(reason="ended", text=text, remedy=remedy)


def _unresolved(facts: Facts) -> Iterator[Reason]:
    one = facts.execution
    if not facts.unresolved or facts.later is not None:
        return
    keys = ", ".join(repr(output.printable(key)) for key in facts.unresolved[:NAMES_MAX])
    more = " and more" if len(facts.unresolved) > NAMES_MAX else ""
    yield Reason(
        reason="unresolved",
        text=f"AT_MOST_ONCE partitions were lost after their start, and only a person can know "
        f"whether the work was done: {keys}{more}; a restart carries them as FAILED",
        remedy=f"rowlock resolve {one.execution_id} KEY --completed or --retry, then rowlock restart "
        f"{one.execution_id}",
    )


def _why(one: Execution) -> str:
    if one.failure_reason is None:
        return "no reason was given"
    message = f": {output.printable(one.failure_message)}" if one.failure_message else ""
    return f"{one.failure_reason}{message}"
