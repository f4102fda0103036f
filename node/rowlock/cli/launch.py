"""`rowlock launch`: launches a job and follows it to its end, or leaves it to the nodes.

With the job's code here, this process becomes the execution's master, and with `--slots` processes
partitions too. Without the code it asks for the execution and watches nodes run it.
"""

from __future__ import annotations

import argparse
import logging
import os
import uuid
from typing import TYPE_CHECKING, Final
from uuid import UUID

from rowlock.cli import arguments, output
from rowlock.cli.database import actor, opened
from rowlock.cli.follow import Glance, follow, print_ending, shown
from rowlock.cli.progress import Display, Snapshot, choose_display
from rowlock.cli.target import Target, has_nodes, local_target, published_target
from rowlock.db import views
from rowlock.db.store import Store, refusal
from rowlock.db.views import Connection, Execution
from rowlock.errors import Refused, UsageError
from rowlock.protocol.model import Progress
from rowlock.registry import Registry

if TYPE_CHECKING:  # a launch that detaches runs no node
    from rowlock.runtime.launch import LaunchRequest

INTERRUPTED: Final = 130


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
            _warn_if_nobody_works(db, target, execution.pool)
    _announce_as_it_is(execution, outcome, as_json=given.json)
    return 0 if given.detach else _follow(dsn, execution.execution_id, as_json=given.json)


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


def _follow(dsn: str, execution_id: UUID, *, as_json: bool) -> int:
    with shown(choose_display(as_json=as_json)) as display:
        end = follow(dsn, execution_id, command="launch", display=display)
    return print_ending(end, as_json=as_json)


def _warn_if_nobody_works(db: Connection, target: Target, pool: str) -> None:
    if not has_nodes(db, target.job, target.contract_hash, pool):
        output.warn(
            f"no living node of pool {pool!r} accepts {target.job} (contract "
            f"{target.contract_hash}): it waits for one; rowlock node starts one, and launch "
            "--slots N processes here"
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
    again = " (requested before with this launch key)" if outcome == "exists" else ""
    print(f"execution {execution_id}{again}")
    print(output.printable(f"instance  {instance}"), flush=True)


def _announce_as_it_is(one: Execution, outcome: str, *, as_json: bool) -> None:
    _announce(one.execution_id, one.job_name, one.instance_key, outcome, as_json=as_json)


# -- as the master -----------------------------------------------------------------------------


def _drive(given: argparse.Namespace, registry: Registry, target: Target) -> int:
    """Be the master until the execution ends, or somebody else is."""
    from rowlock import logs
    from rowlock.runtime.launch import LaunchRequest, launch
    from rowlock.settings import Settings

    settings = Settings.from_environment(os.environ, dsn=given.dsn)
    dsn = settings.dsn or ""
    # A node waits for its database for ever; a launch says at once what is wrong with it.
    with opened(dsn, "launch") as db:
        before = _same_launch(db, given)
        if not given.slots and not (before and before.ended):
            _warn_if_nobody_works(db, target, given.pool)
    if before is not None:
        return _follow_again(dsn, before, as_json=given.json)
    logs.configure(settings.log_format, level=logging.WARNING)
    request = LaunchRequest(
        job=target.job,
        parameters=target.parameters,
        instance_key=given.instance or str(uuid.uuid4()),
        launch_key=given.launch_key,
        pool=given.pool,
        priority=given.priority,
        requester=_requester(),
    )
    with shown(choose_display(as_json=given.json)) as display:
        narrator = _Narrator(dsn, request, display, as_json=given.json)
        try:
            result = launch(
                settings,
                registry,
                request,
                slots=given.slots or 0,
                imports=tuple(given.imports),
                http_port=given.http,
                on_progress=narrator.hear,
                on_requested=narrator.begin,
            )
        finally:
            narrator.stop()
        if result.execution_id != request.execution_id:
            # Somebody else used the launch key while we were starting.
            with opened(dsn, "launch") as db:
                before = _same_launch(db, given)
            if before is not None:
                return _follow_again(dsn, before, as_json=given.json)
        if result.left:
            output.warn(
                f"left; execution {result.execution_id} goes on as soon as a node adopts it: "
                f"rowlock status {result.execution_id} --watch"
            )
            return INTERRUPTED
        if result.superseded:
            output.warn(
                f"another node is the master of execution {result.execution_id} now: following it"
            )
        end = follow(dsn, result.execution_id, command="launch", display=display)
    return print_ending(end, as_json=given.json)


class _Narrator:
    """Passes on what the master reports, with what only the views know; never stops the master."""

    def __init__(
        self, dsn: str, request: LaunchRequest, display: Display, *, as_json: bool
    ) -> None:
        self._dsn = dsn
        self._request = request
        self._display = display
        self._as_json = as_json
        self._glance: Glance | None = None
        self._silent = False

    def begin(self, execution_id: UUID) -> None:
        """The database has taken the request."""
        job, instance = self._request.job, self._request.instance_key
        try:
            _announce(execution_id, job, instance, "requested", as_json=self._as_json)
        except OSError:
            self._silent = True
        self._glance = Glance(self._dsn, execution_id)
        self._glance.start()

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

    def stop(self) -> None:
        """The master has ended."""
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
    )
    if outcome not in {"requested", "exists"}:
        raise refusal(target.job, wanted, execution_id, outcome)
    execution = views.execution(db, execution_id)
    if outcome == "exists":
        _require_same_work(execution, given)
    return execution, outcome


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


def _follow_again(dsn: str, before: Execution, *, as_json: bool) -> int:
    _announce_as_it_is(before, "exists", as_json=as_json)
    return _follow(dsn, before.execution_id, as_json=as_json)


def _require_same_work(execution: Execution, given: argparse.Namespace) -> None:
    """A launch key that was used for something else is a mistake, not the same request again."""
    same_instance = given.instance in {None, execution.instance_key}
    if execution.job_name != given.job or not same_instance:
        raise Refused(
            f"launch key {given.launch_key!r} stands for {execution.job_name}, instance "
            f"{execution.instance_key!r} (execution {execution.execution_id}): use another "
            "--launch-key"
        )
