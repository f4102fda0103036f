"""`rowlock node`: runs a node until it is told to drain."""

from __future__ import annotations

import argparse
import os
import socket

from rowlock import logs
from rowlock.errors import UsageError
from rowlock.registry import Registry
from rowlock.settings import Settings


def run(given: argparse.Namespace) -> int:
    """Run it. Logs go to standard error; SIGTERM and SIGINT drain it, a second one ends it."""
    from rowlock.runtime.node import Node, NodeOptions  # not for `dev`, which only wants no_jobs

    settings, registry = prepared(given)
    options = NodeOptions(
        name=given.name or socket.gethostname(),
        pool=given.pool,
        slots=given.slots or usable_cpus(),
        imports=tuple(given.imports),
        http_port=given.http,
    )
    Node(settings, registry, options).run()
    return 0


def prepared(given: argparse.Namespace) -> tuple[Settings, Registry]:
    """The settings and jobs of a process that is a node; it logs in their form from here on.

    Raises:
        UsageError: There are no jobs.
        SettingsError: Settings are wrong.
    """
    form = "json" if given.json else given.log_format
    settings = Settings.from_environment(os.environ, dsn=given.dsn, log_format=form)
    registry = Registry().load(given.imports)
    if not registry.names:
        raise no_jobs()
    logs.configure(settings.log_format)
    return settings, registry


def no_jobs() -> UsageError:
    """Why a node does not start that could never claim anything."""
    return UsageError(
        "there are no jobs here: name a module that defines some with --import, or install a "
        "package with entry points in the group rowlock.jobs"
    )


def usable_cpus() -> int:
    """How many CPUs this process may use, which in a container may be fewer than there are."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
