"""The moves of the protocol: one typed method for each function of the schema, one round trip each.

Nothing is decided here. A method says what the database answered; zero rows is an answer.
"""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, LiteralString, TypeAlias
from uuid import UUID

import psycopg

from rowlock.errors import Refused
from rowlock.protocol.model import (
    FIRST_STEP,
    BeatAnswer,
    Claim,
    Completion,
    Evidence,
    Evident,
    ExecutionFacts,
    Mastership,
    Peer,
    Place,
    Progress,
    Purged,
    Recovered,
    Schema,
    ServerIdentity,
)

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

NOWHERE: Final[Mapping[UUID, Place]] = MappingProxyType({})
"""Lines are looked at from their heads."""

_CLAIM: LiteralString = (
    "SELECT id, execution_id, step, partition_key, claim_token, claims, failures, lost, alone, weight,"
    " started, delivery, slice, checkpoint, waited FROM rowlock.claim(%s, %s, %s, %s, %s, %s)"
)
_COMPLETE: LiteralString = (
    "SELECT id, outcome FROM rowlock.complete(%s, %s::bigint[], %s::uuid[], %s::text[]::jsonb[])"
)
# One statement, so that the server has the whole of it or nothing. Of two statements in a pipeline the
# first may arrive alone: a node that froze or vanished there held its own row, and nobody could remove
# it (idle_in_transaction_session_timeout does not see a half-sent pipeline). The branches of UNION ALL
# run in their order, and each function sees what the one before it wrote.
_COMPLETE_AND_CLAIM: LiteralString = (
    "SELECT outcome, id, NULL AS execution_id, NULL AS step, NULL AS partition_key,"
    " NULL AS claim_token, NULL AS claims, NULL AS failures, NULL AS lost, NULL AS alone,"
    " NULL AS weight, NULL AS started, NULL AS delivery, NULL AS slice, NULL AS checkpoint, NULL AS waited"
    " FROM rowlock.complete(%s, %s::bigint[], %s::uuid[], %s::text[]::jsonb[])"
    " UNION ALL"
    " SELECT NULL, id, execution_id, step, partition_key, claim_token, claims, failures, lost, alone, weight,"
    " started, delivery, slice, checkpoint, waited FROM rowlock.claim(%s, %s, %s, %s, %s, %s)"
)


Observe: TypeAlias = Callable[[str, float], None]
"""Told the name of an operation and how many seconds its answer, or its error, took."""


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Store, *args: Any, **kwargs: Any) -> Any:
        observe = self.observe
        if observe is None:
            return method(self, *args, **kwargs)
        began = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            observe(name, time.perf_counter() - began)

    return run


def _observed(store: type[Store]) -> type[Store]:
    """Time every public method: each is one operation, or two of which the first is nothing without."""
    for name, method in list(vars(store).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(store, name, _timed(name, method))
    return store


@_observed
class Store:
    """The protocol over one connection in autocommit mode; used by one thread at a time."""

    def __init__(self, connection: Connection, observe: Observe | None = None) -> None:
        self.connection = connection
        self.observe = observe

    # -- nodes -------------------------------------------------------------------------------

    def register(
        self,
        node: UUID,
        *,
        name: str,
        pool: str,
        slots: int,
        jobs: Mapping[str, Sequence[str]],
        version: str,
        only_execution: UUID | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Register a new incarnation. `jobs` maps a job's name to the contract hashes it accepts."""
        self._run(
            "SELECT rowlock.register(%s, %s, %s, %s, %s, %s, %s, %s)",
            (
                *(node, name, pool, slots, json.dumps(dict(jobs)), only_execution),
                *(json.dumps(dict(labels or {})), version),
            ),
        )

    def connected(
        self, node: UUID, purpose: Literal["beat", "work"], *, evidence: bool
    ) -> Evidence:
        """Announce this connection as one of the node's two: whether it can prove the node's death.

        :param evidence: the node allows to be judged by it.
        """
        client_pid = self.connection.info.backend_pid if evidence else None
        answer: Evidence = self._value(
            "SELECT rowlock.connected(%s, %s, %s, %s)",
            # The clock that a process never sees go back numbers what it announces.
            (node, purpose, client_pid, time.monotonic_ns()),
        )
        return answer

    def publish_contract(
        self,
        job: str,
        contract_hash: str,
        *,
        schemas: Mapping[str, Any],
        policy: Mapping[str, Any],
        delivery: str,
    ) -> None:
        """Publish what a job accepts, for launches that do not have its code."""
        self._run(
            "SELECT rowlock.publish_contract(%s, %s, %s, %s, %s)",
            (job, contract_hash, json.dumps(dict(schemas)), json.dumps(dict(policy)), delivery),
        )

    def beat(
        self,
        node: UUID,
        *,
        load: int,
        draining: bool,
        orphans: Sequence[Mapping[str, Any]] = (),
        executions: Iterable[UUID] = (),
        look: bool = True,
    ) -> BeatAnswer:
        """Beat once.

        :param executions: those this node runs or drives, to hear when one ends.
        :param look: whether to look for work that waits; else the answer is that there is none.
        """
        alive, claimable, adoptable, due, unrecovered, ended, peers, at, *schema = self._one(
            "SELECT alive, claimable, adoptable, due, unrecovered, ended, peers, at,"
            " schema_version, schema_works_with"
            " FROM rowlock.beat(%s, %s, %s, %s, %s::uuid[], %s)",
            (node, load, draining, json.dumps(list(orphans)), list(executions), look),
        )
        return BeatAnswer(
            alive=alive,
            claimable=claimable,
            adoptable=adoptable,
            due=due,
            unrecovered=unrecovered,
            ended=tuple(ended),
            peers=tuple(
                Peer(node_id=UUID(peer), beat=beat, unreachable=status == "UNREACHABLE")
                for peer, beat, status in peers
            ),
            at=at,
            schema=Schema(version=schema[0], works_with=schema[1]),
        )

    def notice_server(self, node: UUID) -> ServerIdentity:
        """Which database this is. The first node on another server or timeline leaves an event."""
        system_identifier, database, timeline = self._one(
            "SELECT system_identifier, database, timeline FROM rowlock.notice_server(%s)", (node,)
        )
        return ServerIdentity(
            system_identifier=system_identifier, database=database, timeline=timeline
        )

    def mark_unreachable(self, observer: UUID, node: UUID, beat: int) -> bool:
        """Phase one. False: it beat meanwhile, or another observer was first."""
        return bool(
            self._value("SELECT rowlock.mark_unreachable(%s, %s, %s)", (observer, node, beat))
        )

    def remove_node(self, observer: UUID, node: UUID, beat: int) -> tuple[bool, Recovered]:
        """Phase two: whether it was removed, and what became of its claims."""
        removed, *recovered = self._one(
            "SELECT removed, moved, failed, unknown FROM rowlock.remove_node(%s, %s, %s)",
            (observer, node, beat),
        )
        return removed, Recovered(*recovered)

    def recover_by_evidence(self, observer: UUID, node: UUID, beat: int) -> Evident:
        """Take what may be repeated from a node that missed two beats, if its connections are gone."""
        return Evident(
            *self._one(
                "SELECT acted, moved, failed, freed FROM rowlock.recover_by_evidence(%s, %s, %s)",
                (observer, node, beat),
            )
        )

    def recover(self, actor: UUID) -> Recovered:
        """Recover claims whose owner is REMOVED or absent."""
        return Recovered(
            *self._one("SELECT moved, failed, unknown FROM rowlock.recover(%s)", (actor,))
        )

    def end_stranded(self) -> int:
        """End transactions of authors whose claim or mastership is gone: how many were ended.

        They could not commit, but the locks of one that sleeps would hold up the next attempt.
        """
        return int(
            self._value(
                "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid))"
                " FROM rowlock.stranded_sessions()",
                (),
            )
        )

    def deregister(self, node: UUID, reason: str) -> bool:
        """Leave. False: this incarnation was removed already."""
        return bool(self._value("SELECT rowlock.deregister(%s, %s)", (node, reason)))

    def promote(self, limit: int) -> int:
        """Make at most `limit` delayed partitions that are due claimable."""
        return int(self._value("SELECT rowlock.promote(%s)", (limit,)))

    # -- claims ------------------------------------------------------------------------------

    def claim(
        self,
        node: UUID,
        *,
        slots: int,
        prefetch: int = 0,
        idle: bool | None,
        seed: int,
        after: Mapping[UUID, Place] = NOWHERE,
    ) -> list[Claim]:
        """Claim up to `slots` partitions to start at once and `prefetch` more to keep ready.

        :param after: look only behind these places of the executions' lines.
        """
        return self._claim(node, slots, prefetch, idle, seed, _places(after))

    def passed(self, node: UUID, seconds: float) -> dict[UUID, Place]:
        """Up to which place of a line nothing waits, where it takes so long to find that."""
        cursor = self.connection.execute(
            "SELECT execution_id, weight, id FROM rowlock.passed(%s, %s)", (node, seconds)
        )
        return {execution: (weight, id_) for execution, weight, id_ in cursor.fetchall()}

    def _claim(self, *arguments: Any) -> list[Claim]:
        return [_claim(row) for row in self.connection.execute(_CLAIM, arguments).fetchall()]

    def complete(self, node: UUID, completions: Sequence[Completion]) -> dict[int, str]:
        """Write results; for each id 'completed' or 'lost'."""
        cursor = self.connection.execute(_COMPLETE, _complete_arguments(node, completions))
        return dict(cursor.fetchall())

    def complete_and_claim(
        self,
        node: UUID,
        completions: Sequence[Completion],
        *,
        slots: int,
        prefetch: int,
        idle: bool | None,
        seed: int,
        after: Mapping[UUID, Place] = NOWHERE,
    ) -> tuple[dict[int, str], list[Claim]]:
        """Both in one transaction and one round trip: what a busy node does all the time.

        Without completions it only claims. After any error of it nothing was written; send the
        completions again alone.
        """
        if not completions:
            return {}, self._claim(node, slots, prefetch, idle, seed, _places(after))
        cursor = self.connection.execute(
            _COMPLETE_AND_CLAIM,
            (
                *_complete_arguments(node, completions),
                *(node, slots, prefetch, idle, seed, _places(after)),
            ),
        )
        outcomes: dict[int, str] = {}
        claims: list[Claim] = []
        for outcome, *row in cursor.fetchall():
            if outcome is None:
                claims.append(_claim(tuple(row)))
            else:
                outcomes[row[0]] = outcome
        return outcomes, claims

    def fail(
        self,
        node: UUID,
        partition: int,
        token: UUID,
        *,
        error: str,
        kind: str,
        delay_seconds: float,
    ) -> str:
        """End an attempt without a result: 'retry', 'failed', 'cancelled', 'completed' or 'lost'.

        :param error: JSON text with type and message.
        :param kind: 'retry', 'never', 'unknown' or 'later'; see `rowlock.fail` in the schema.
        """
        return str(
            self._value(
                "SELECT rowlock.fail(%s, %s, %s, %s, %s, %s)",
                (node, partition, token, error, kind, delay_seconds),
            )
        )

    def release(
        self,
        node: UUID,
        claims: Sequence[tuple[int, UUID]],
        *,
        unstarted: bool,
        died: bool = False,
    ) -> dict[int, str]:
        """Hand claims back; for each id 'released', 'cancelled', 'kept', 'completed' or 'lost'.

        :param unstarted: author code has not begun.
        :param died: because the process that was to run it died, which counts as a failure.
        """
        ids = [partition for partition, _ in claims]
        tokens = [token for _, token in claims]
        cursor = self.connection.execute(
            "SELECT id, outcome FROM rowlock.release(%s, %s::bigint[], %s::uuid[], %s, %s)",
            (node, ids, tokens, unstarted, died),
        )
        return dict(cursor.fetchall())

    def checkpoint(self, node: UUID, partition: int, token: UUID, checkpoint: str) -> bool:
        """Write a checkpoint (JSON text). False: the claim is gone."""
        return bool(
            self._value(
                "SELECT rowlock.checkpoint(%s, %s, %s, %s)", (node, partition, token, checkpoint)
            )
        )

    def report(self, node: UUID, reports: Sequence[tuple[int, UUID, str]]) -> set[int]:
        """Write what attempts tell of themselves: partition, token, JSON text; whose claims stand."""
        ids, tokens, counters = zip(*reports, strict=True)
        cursor = self.connection.execute(
            "SELECT rowlock.report(%s, %s::bigint[], %s::uuid[], %s::text[]::jsonb[])",
            (node, list(ids), list(tokens), list(counters)),
        )
        return {row[0] for row in cursor.fetchall()}

    def acquire_lock(
        self, node: UUID, partition: int, token: UUID, name: str, number: int = 0
    ) -> str:
        """Take a named lock for a claim: 'acquired', 'busy', or 'lost' if the claim is gone."""
        return str(
            self._value(
                "SELECT rowlock.acquire_lock(%s, %s, %s, %s, %s)",
                (node, partition, token, name, number),
            )
        )

    def release_lock(self, token: UUID, name: str, number: int = 0) -> bool:
        """Give a lock back. False: this claim did not have it, or not any more."""
        return bool(self._value("SELECT rowlock.release_lock(%s, %s, %s)", (token, name, number)))

    def claims_of(self, node: UUID) -> dict[int, UUID]:
        """The claims that the database says this node holds: id and token."""
        cursor = self.connection.execute(
            "SELECT id, claim_token FROM rowlock.claims_of(%s)", (node,)
        )
        return dict(cursor.fetchall())

    def record_evidence(self, partition: int, token: UUID, evidence: Mapping[str, Any]) -> bool:
        """Keep what an AT_MOST_ONCE attempt reported after its claim was taken away."""
        return bool(
            self._value(
                "SELECT rowlock.record_evidence(%s, %s, %s)",
                (partition, token, json.dumps(dict(evidence))),
            )
        )

    def execution_of(self, execution: UUID) -> ExecutionFacts | None:
        """What attempts of an execution need to know of it; None if it does not exist."""
        row = self.connection.execute(
            "SELECT job_name, instance_key, parameters, policy FROM rowlock.execution_of(%s)",
            (execution,),
        ).fetchone()
        if row is None:
            return None
        job, instance_key, parameters, policy = row
        return ExecutionFacts(
            job=job, instance_key=instance_key, parameters=parameters, policy=policy
        )

    # -- executions --------------------------------------------------------------------------

    def request(
        self,
        execution: UUID,
        *,
        job: str,
        contract_hash: str,
        policy: Mapping[str, Any],
        delivery: str,
        instance_key: str,
        parameters: str,
        pool: str,
        priority: int = 0,
        launch_key: str | None = None,
        adopt_after_seconds: float = 0,
        requester: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> tuple[UUID, str]:
        """Ask for an execution: its id, and 'requested', 'restarted', 'exists', or why it is refused.

        Refused are 'running', 'completed', 'abandoned' and 'parameters'; see `refusal`.

        :param options: `parallelism`, `deadline_seconds` (from now), `suspended`, `deletion_policy`.
        """
        execution_id, outcome = self._one(
            "SELECT execution_id, outcome FROM rowlock.request_execution("
            "%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
            (
                *(execution, job, contract_hash, json.dumps(dict(policy)), delivery, instance_key),
                *(launch_key, parameters, pool, priority, adopt_after_seconds),
                *(json.dumps(dict(requester or {})), json.dumps(dict(options or {}))),
            ),
        )
        return execution_id, outcome

    def restart(
        self,
        execution: UUID,
        of: UUID,
        *,
        actor: str,
        reason: str | None,
        launch_key: str | None = None,
        adopt_after_seconds: float = 0,
        requester: Mapping[str, Any] | None = None,
    ) -> tuple[UUID, str]:
        """Do what an ended execution left unfinished, as a new execution with its limits.

        :param execution: the id of the new execution.
        :param of: the one that has ended.
        :param requester: kept from `of` if not given.
        :returns: the new id and 'restarted' or 'exists'; or the last execution of the instance and
            'unknown', 'superseded', 'running', 'completed' or 'abandoned'.
        """
        execution_id, outcome = self._one(
            "SELECT execution_id, outcome FROM rowlock.restart(%s, %s, %s, %s, %s, %s, %s)",
            (
                *(execution, of, launch_key, adopt_after_seconds, actor, reason),
                None if requester is None else json.dumps(dict(requester)),
            ),
        )
        return execution_id, outcome

    def adopt(self, node: UUID, execution: UUID | None = None) -> Mastership | None:
        """Become master of this execution, or of the first that waits; None: nothing to take."""
        row = self.connection.execute(
            "SELECT execution_id, epoch, status, job_name, contract_hash, policy, delivery,"
            " instance_key, parameters, pool, masters_lost FROM rowlock.adopt(%s, %s)",
            (node, execution),
        ).fetchone()
        if row is None:
            return None
        return Mastership(
            execution_id=row[0],
            epoch=row[1],
            status=row[2],
            job=row[3],
            contract_hash=row[4],
            policy=row[5],
            delivery=row[6],
            instance_key=row[7],
            parameters=row[8],
            pool=row[9],
            masters_lost=row[10],
        )

    def resign(self, node: UUID, execution: UUID, epoch: int) -> bool:
        """Give a mastership back, for another node to take at once."""
        return bool(self._value("SELECT rowlock.resign(%s, %s, %s)", (node, execution, epoch)))

    def masterships_of(self, node: UUID) -> dict[UUID, int]:
        """The executions that the database says this node drives, with their epochs."""
        cursor = self.connection.execute(
            "SELECT execution_id, epoch FROM rowlock.masterships_of(%s)", (node,)
        )
        return dict(cursor.fetchall())

    def cluster(self, pool: str) -> str:
        """JSON text: the living nodes of a pool, for a planner."""
        return str(self._value("SELECT rowlock.cluster(%s)::text", (pool,)))

    def stage(
        self,
        execution: UUID,
        epoch: int,
        chunk: int,
        *,
        keys: Sequence[str],
        slices: Sequence[str],
        weights: Sequence[int],
    ) -> bool:
        """Keep one chunk of a plan. False: superseded, or no longer planning."""
        return bool(
            self._value(
                "SELECT rowlock.stage(%s, %s, %s, %s::text[], %s::text[]::jsonb[], %s::int[])",
                (execution, epoch, chunk, list(keys), list(slices), list(weights)),
            )
        )

    def seal(self, execution: UUID, epoch: int, step: str, total: int) -> tuple[str, str | None]:
        """Make the plan visible: 'sealed', 'superseded', 'duplicate' or 'incomplete', and a detail."""
        outcome, detail = self._one(
            "SELECT outcome, detail FROM rowlock.seal(%s, %s, %s, %s)",
            (execution, epoch, step, total),
        )
        return outcome, detail

    def advance(self, node: UUID, execution: UUID, epoch: int) -> Progress:
        """Look at an execution that this node drives, and end its step if nothing is live."""
        row = self._one(
            "SELECT status, total, completed, failed, cancelled, failure_message"
            " FROM rowlock.advance(%s, %s, %s)",
            (node, execution, epoch),
        )
        return _progress(row)

    def progress(self, execution: UUID) -> Progress | None:
        """Look at an execution that another node drives; None if it does not exist."""
        row = self.connection.execute(
            "SELECT status, total, completed, failed, cancelled, failure_message"
            " FROM rowlock.executions WHERE execution_id = %s",
            (execution,),
        ).fetchone()
        return None if row is None else _progress(row)

    def fail_plan(self, node: UUID, execution: UUID, epoch: int, reason: str, message: str) -> bool:
        """End an execution whose plan could not be made."""
        return bool(
            self._value(
                "SELECT rowlock.fail_plan(%s, %s, %s, %s, %s)",
                (node, execution, epoch, reason, message),
            )
        )

    def finish(
        self,
        execution: UUID,
        epoch: int,
        *,
        summary: str | None = None,
        reason: str | None = None,
        message: str | None = None,
    ) -> str:
        """End a FINISHING execution: the status that stands, or SUPERSEDED."""
        return str(
            self._value(
                "SELECT rowlock.finish(%s, %s, %s, %s, %s)",
                (execution, epoch, summary, reason, message),
            )
        )

    def results(self, execution: UUID, after: int, limit: int) -> list[tuple[int, str, str | None]]:
        """One page of results: partition id, key, result as JSON text."""
        cursor = self.connection.execute(
            "SELECT id, partition_key, result FROM rowlock.results(%s, %s, %s)",
            (execution, after, limit),
        )
        return list(cursor.fetchall())

    def cancel(self, execution: UUID, actor: str, reason: str | None) -> str:
        """Cancel an execution: 'closing', 'unknown', or the terminal status it has."""
        # First, and committed: nothing more is claimed. Otherwise the lock of the second statement
        # may wait for as long as claims overlap.
        self._run("SELECT rowlock.request_cancel(%s, %s, %s)", (execution, actor, reason))
        return str(self._value("SELECT rowlock.cancel(%s, %s, %s)", (execution, actor, reason)))

    def suspend(self, execution: UUID, actor: str, reason: str | None) -> str:
        """Let nothing more be claimed: 'suspended', 'same', 'unknown' or the terminal status."""
        return str(self._value("SELECT rowlock.suspend(%s, %s, %s)", (execution, actor, reason)))

    def resume(self, execution: UUID, actor: str, reason: str | None) -> str:
        """End a suspend: 'resumed', 'same', 'unknown' or the terminal status."""
        return str(self._value("SELECT rowlock.resume(%s, %s, %s)", (execution, actor, reason)))

    def set_limits(
        self, execution: UUID, changes: Mapping[str, Any], actor: str, reason: str | None
    ) -> str:
        """Change limits: 'changed', 'same', 'unknown' or the terminal status.

        :param changes: `priority`, `parallelism` (None: unlimited), `deadline_seconds` (from the
            request; None: none), `deletion_policy`.
        """
        statement: LiteralString = "SELECT rowlock.set_limits(%s, %s, %s, %s)"
        arguments = (execution, json.dumps(dict(changes)), actor, reason)
        answer = str(self._value(statement, arguments))
        if answer == "changed" and changes.get("parallelism") is not None:
            self._run(statement, arguments)  # settles it: waits for claims that know nothing of it
        return answer

    def abandon(self, execution: UUID, actor: str, reason: str | None) -> str:
        """Give an instance up for ever: 'abandoned', 'completed', 'superseded' or 'unknown'."""
        # As in `cancel`: first nothing more is claimed, or the second lock might wait for long.
        self._run("SELECT rowlock.request_cancel(%s, %s, %s)", (execution, actor, reason))
        return str(self._value("SELECT rowlock.abandon(%s, %s, %s)", (execution, actor, reason)))

    def resolve(
        self,
        execution: UUID,
        partition_key: str,
        how: str,
        *,
        actor: str,
        reason: str | None,
        result: str | None = None,
        force: bool = False,
        step: str = FIRST_STEP,
    ) -> str:
        """Say what became of a FAILED partition; the next execution of the instance goes by it.

        :param how: 'completed' or 'retry'.
        :param result: JSON text, of one that is completed.
        :param force: also while the attempt in doubt is known to run still.
        :returns: 'resolved', 'same', 'unknown', 'not_failed', 'orphan', 'superseded', or the state of an
            instance that has no next execution: 'completed' or 'abandoned'.
        """
        return str(
            self._value(
                "SELECT rowlock.resolve(%s, %s, %s, %s, %s, %s, %s, %s)",
                (execution, partition_key, how, result, force, actor, reason, step),
            )
        )

    def expire(self, actor: str) -> int:
        """Do what deadlines demand, and settle new limits: how many deadlines were found."""
        return int(self._value("SELECT rowlock.expire(%s)", (actor,)))

    def retain(
        self,
        *,
        completed_seconds: float | None,
        failed_seconds: float | None,
        events_seconds: float | None,
        limit: int,
    ) -> Purged:
        """Delete what is older, at most `limit` rows of each kind; None keeps for ever."""
        executions, partitions, events, nodes, more = self._one(
            "SELECT executions, partitions, events, nodes, more"
            " FROM rowlock.retain(%s, %s, %s, %s)",
            (completed_seconds, failed_seconds, events_seconds, limit),
        )
        return Purged(
            executions=executions, partitions=partitions, events=events, nodes=nodes, more=more
        )

    # -- plumbing ----------------------------------------------------------------------------

    def _run(self, statement: LiteralString, arguments: Sequence[Any]) -> None:
        self.connection.execute(statement, arguments)

    def _one(self, statement: LiteralString, arguments: Sequence[Any]) -> tuple[Any, ...]:
        row = self.connection.execute(statement, arguments).fetchone()
        if row is None:  # every function called through here returns exactly one row
            raise AssertionError(f"no row from: {statement}")
        return row

    def _value(self, statement: LiteralString, arguments: Sequence[Any]) -> Any:
        return self._one(statement, arguments)[0]


def refusal(job: str, instance_key: str, execution: UUID, state: str) -> Refused:
    """Why an instance cannot be launched (the answer of `Store.request`), and what to do instead."""
    remedy = "launch it with another --instance"
    if state == "running":
        remedy = f"follow it with rowlock status {execution} --watch, or {remedy}"
    elif state == "parameters":
        return Refused(
            f"instance {instance_key!r} of job {job!r} stands for other parameters (execution"
            f" {execution}): restart it with those, or {remedy}"
        )
    return Refused(
        f"instance {instance_key!r} of job {job!r} is {state} (execution {execution}): {remedy}"
    )


def _complete_arguments(node: UUID, completions: Sequence[Completion]) -> tuple[Any, ...]:
    return (
        node,
        [c.id for c in completions],
        [c.token for c in completions],
        [c.result for c in completions],
    )


def _progress(row: tuple[Any, ...]) -> Progress:
    return Progress(
        status=row[0],
        total=row[1],
        completed=row[2],
        failed=row[3],
        cancelled=row[4],
        failure_message=row[5],
    )


def _claim(row: tuple[Any, ...]) -> Claim:
    return Claim(
        id=row[0],
        execution_id=row[1],
        step=row[2],
        key=row[3],
        token=row[4],
        claims=row[5],
        failures=row[6],
        lost=row[7],
        alone=row[8],
        weight=row[9],
        started=row[10],
        delivery=row[11],
        slice=row[12],
        checkpoint=row[13],
        waited=row[14],
    )


def _places(after: Mapping[UUID, Place]) -> str:
    return json.dumps({str(execution): place for execution, place in after.items()})
