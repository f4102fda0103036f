"""`rowlock launch`: launches a job and follows it to its end, or leaves it to the nodes.

With the job's code here, this process becomes the execution's master, and with `--slots` processes
partitions too. Without the code it asks for the execution and watches nodes run it. A launch key that
was used before leads to the execution of the first time, which this process stays with in the same way:
should its master go, this one goes on.
"""

from __future__ import annotations

import argparse
import logging
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import actor, opened
from rowlock.cli.follow import Glance, follow, print_ending, shown
from rowlock.cli.main import INTERRUPTED
from rowlock.cli.progress import Display, Snapshot, choose_display
from rowlock.cli.target import Target, has_nodes, local_target, published_target
from rowlock.db import views
from rowlock.db.store import Store, refusal
from rowlock.db.views import Connection, Execution
from rowlock.errors import Refused, UsageError
from rowlock.protocol.model import Progress
from rowlock.registry import Registry

if TYPE_CHECKING:  # a launch that detaches runs no node
    from rowlock.runtime.driver import DriveResult
    from rowlock.settings import Settings

_MEANING: Final = {
    "requested": "",
    "restarted": " (a restart: what an earlier execution of the instance completed is kept)",
    "exists": " (requested before with this launch key)",
}


def run(given: argparse.Namespace) -> int:
    """Launch it; the exit code is that of the outcome, or 0 at once with `--detach`."""
    registry = Registry().load(given.imports)
    target = local_target(registry, given.job, given.params)
    _refuse_idle_options(given, has_code=target is not None)
    if target is not None and not given.detach:
        return _drive(given, registry, target)
    dsn = arguments.dsn_of(given)
    with opened(dsn, "launch") as db:
        if target is None:
            target = published_target(db, registry, given.job, given.params)
        execution, outcome = _request(db, given, target)
        if not execution.ended:
            warn_if_nobody_works(db, target.job, target.contract_hash, execution.pool)
    announce(execution, outcome, as_json=given.json)
    return 0 if given.detach else follow_to_end(dsn, execution.execution_id, as_json=given.json)


def _refuse_idle_options(given: argparse.Namespace, *, has_code: bool) -> None:
    """Options that would do nothing are mistakes."""
    for option, value in (("--slots", given.slots), ("--http", given.http)):
        if value is None:
            continue
        if given.detach:
            raise UsageError(f"{option} {value} has no effect with --detach: leave one of them out")
        if not has_code:
            raise UsageError(
                f"{option} {value} needs the code of {given.job} here: name its module with --import"
            )


def follow_to_end(dsn: str, execution_id: UUID, *, as_json: bool) -> int:
    """Watch an execution until it has ended, and say how; answers with the exit code."""
    with shown(choose_display(as_json=as_json)) as display:
        end = follow(dsn, execution_id, command="launch", display=display)
    return print_ending(end, as_json=as_json)


def warn_if_nobody_works(db: Connection, job: str, contract_hash: str, pool: str) -> None:
    """Warn if no living node could process a partition."""
    if not has_nodes(db, job, contract_hash, pool):
        output.warn(
            f"no living node of pool {pool!r} accepts {job} (contract {contract_hash}): it waits "
            "for one; rowlock node starts one, and launch --slots N processes here"
        )


def _announce(execution_id: UUID, job: str, instance: str, outcome: str, *, as_json: bool) -> None:
    """Say which execution stands for the launch."""
    if as_json:
        output.print_json_line(
            {
                "type": "launched",
                "execution_id": execution_id,
                "job_name": job,
                "instance_key": instance,
                "outcome": outcome,
            }
        )
        return
    print(f"execution {execution_id}{_MEANING[outcome]}")
    print(output.printable(f"instance  {instance}"), flush=True)


def announce(one: Execution, outcome: str, *, as_json: bool) -> None:
    """Say which execution stands for a launch or a restart."""
    _announce(one.execution_id, one.job_name, one.instance_key, outcome, as_json=as_json)


# -- as the master -----------------------------------------------------------------------------


def _drive(given: argparse.Namespace, registry: Registry, target: Target) -> int:
    """Drive the execution that stands for the launch, until it has ended."""
    from rowlock import logs
    from rowlock.settings import Settings

    settings = Settings.from_environment(os.environ, dsn=given.dsn)
    dsn = settings.dsn or ""
    # A node waits for its database for ever; a launch says at once what is wrong with it.
    with opened(dsn, "launch") as db:
        before = _same_launch(db, given)
        if not given.slots and not (before and before.ended):
            pool = before.pool if before else given.pool
            warn_if_nobody_works(db, target.job, target.contract_hash, pool)
    logs.configure(settings.log_format, level=logging.WARNING)
    if before is None:
        result = _launch(given, registry, settings, target)
        if result is not None:
            return result
        # Somebody else used the launch key while we were starting.
        with opened(dsn, "launch") as db:
            before = _same_launch(db, given)
        if before is None:
            raise _purged(given)
    return _join(given, registry, settings, before)


def _launch(
    given: argparse.Namespace, registry: Registry, settings: Settings, target: Target
) -> int | None:
    """Launch; None if the launch key has been used for another execution meanwhile."""
    from rowlock.runtime.launch import LaunchRequest, launch

    request = LaunchRequest(
        job=target.job,
        parameters=target.parameters,
        instance_key=given.instance or str(uuid.uuid4()),
        launch_key=given.launch_key,
        pool=given.pool,
        priority=given.priority,
        requester=_requester(),
        options=_options(given),
    )
    with _narrated(given, settings, request.execution_id) as narrator:

        def begin(outcome: str) -> None:
            narrator.begin(request.job, request.instance_key, outcome)

        result = launch(
            settings,
            registry,
            request,
            slots=given.slots or 0,
            imports=tuple(given.imports),
            http_port=given.http,
            on_progress=narrator.hear,
            on_requested=begin,
            on_superseded=narrator.superseded,
        )
        if result.execution_id != request.execution_id:
            return None
        return narrator.end(result)


def _join(
    given: argparse.Namespace, registry: Registry, settings: Settings, before: Execution
) -> int:
    """Stay with an execution that was launched before, and drive it when its master is gone."""
    from rowlock.runtime.driver import drive

    ours = registry.definitions[before.job_name].contract_hash == before.contract_hash
    if before.ended or not ours:
        announce(before, "exists", as_json=given.json)
        return follow_to_end(settings.dsn or "", before.execution_id, as_json=given.json)
    with _narrated(given, settings, before.execution_id) as narrator:
        narrator.begin(before.job_name, before.instance_key, "exists")
        result = drive(
            settings,
            registry,
            before.execution_id,
            pool=before.pool,
            slots=given.slots or 0,
            imports=tuple(given.imports),
            http_port=given.http,
            on_progress=narrator.hear,
        )
        return narrator.end(result)


@contextmanager
def _narrated(
    given: argparse.Namespace, settings: Settings, execution_id: UUID
) -> Generator[_Narrator]:
    with shown(choose_display(as_json=given.json)) as display:
        narrator = _Narrator(settings.dsn or "", execution_id, display, as_json=given.json)
        try:
            yield narrator
        finally:
            narrator.stop()


class _Narrator:
    """Passes on what the driver reports, with what only the views know; never stops the driver."""

    def __init__(self, dsn: str, execution_id: UUID, display: Display, *, as_json: bool) -> None:
        self._dsn = dsn
        self._execution_id = execution_id
        self._display = display
        self._as_json = as_json
        self._glance: Glance | None = None
        self._silent = False

    def begin(self, job: str, instance: str, outcome: str) -> None:
        """There is an execution that stands for the launch."""
        try:
            _announce(self._execution_id, job, instance, outcome, as_json=self._as_json)
        except OSError:
            self._silent = True
        self._glance = Glance(self._dsn, self._execution_id)
        self._glance.start()

    def superseded(self) -> None:
        """Another node is the master."""
        try:
            output.warn(
                f"another node is the master of execution {self._execution_id} now: following it"
            )
        except OSError:
            self._silent = True

    def hear(self, progress: Progress) -> None:
        """One look of the master's."""
        if self._silent:
            return
        try:
            self._display.show(
                Snapshot(
                    status=progress.status,
                    total=progress.total,
                    completed=progress.completed,
                    failed=progress.failed,
                    cancelled=progress.cancelled,
                    running=self._glance.running if self._glance else None,
                    nodes=self._glance.nodes if self._glance else None,
                )
            )
        except OSError:
            # The reader of our output is gone. The work matters more than what is said about it.
            self._silent = True

    def end(self, result: DriveResult) -> int:
        """The driver has ended: say how; answers with the exit code."""
        if result.left:
            output.warn(
                f"left; execution {self._execution_id} goes on as soon as a node adopts it: "
                f"rowlock status {self._execution_id} --watch"
            )
            return INTERRUPTED
        end = follow(self._dsn, self._execution_id, command="launch", display=self._display)
        self._display.close()
        return print_ending(end, as_json=self._as_json)

    def stop(self) -> None:
        """Look no more."""
        if self._glance is not None:
            self._glance.stop()


# -- without being the master ------------------------------------------------------------------


def _request(db: Connection, given: argparse.Namespace, target: Target) -> tuple[Execution, str]:
    """Ask for the execution; answers with the one that stands for the request."""
    wanted = given.instance or str(uuid.uuid4())
    execution_id, outcome = Store(db).request(
        uuid.uuid4(),
        job=target.job,
        contract_hash=target.contract_hash,
        policy=target.policy,
        delivery=target.delivery,
        instance_key=wanted,
        parameters=target.parameters,
        pool=given.pool,
        priority=given.priority,
        launch_key=given.launch_key,
        adopt_after_seconds=0,
        requester=_requester(),
        options=_options(given),
    )
    if outcome not in _MEANING:
        raise refusal(target.job, wanted, execution_id, outcome)
    if outcome == "exists":
        before = _same_launch(db, given)
        if before is None:
            raise _purged(given)
        return before, outcome
    return views.execution(db, execution_id), outcome


def _options(given: argparse.Namespace) -> dict[str, Any]:  # Any: a number or a flag
    """What `--parallelism`, `--deadline` and `--suspended` ask for."""
    asked = {
        "parallelism": given.parallelism,
        "deadline_seconds": given.deadline,
        "suspended": given.suspended or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _requester() -> dict[str, str]:
    return {"actor": actor(), "command": "rowlock launch"}


def _same_launch(db: Connection, given: argparse.Namespace) -> Execution | None:
    """The execution that this launch key stands for already."""
    if given.launch_key is None:
        return None
    execution = views.launched_as(db, given.launch_key)
    if execution is not None:
        _require_same_work(execution, given)
    return execution


def _purged(given: argparse.Namespace) -> Refused:
    return Refused(
        f"launch key {given.launch_key!r} was used for an execution that has been purged: use another "
        "--launch-key to launch again"
    )


def _require_same_work(execution: Execution, given: argparse.Namespace) -> None:
    """A launch key that was used for something else is a mistake, not the same request again."""
    same_instance = given.instance in {None, execution.instance_key}
    if execution.job_name != given.job or not same_instance:
        raise Refused(
            f"launch key {given.launch_key!r} stands for {execution.job_name}, instance "
            f"{execution.instance_key!r} (execution {execution.execution_id}): use another "
            "--launch-key"
        )
