"""`rowlock exporter`: serves what all pools together look like to Prometheus, until it is told to end."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading

from rowlock import logs
from rowlock.cli.arguments import dsn_of
from rowlock.exporter import Exporter
from rowlock.runtime.health import HealthServer
from rowlock.settings import Settings

log = logging.getLogger(__name__)


def run(given: argparse.Namespace) -> int:
    """Run it. It starts, and stays, whether the database answers or not."""
    form = "json" if given.json else given.log_format
    settings = Settings.from_environment(os.environ, log_format=form)
    logs.configure(settings.log_format)
    ended = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda _signum, _frame: ended.set())
    exporter = Exporter(dsn_of(given), read_seconds=given.every)
    http = HealthServer(
        given.http, render=exporter.render, livez=exporter.livez, readyz=exporter.readyz
    )
    log.info("listening", extra={"event": "http_listening", "port": http.port})
    exporter.start()
    try:
        ended.wait()
    finally:
        http.close()
        exporter.stop()
    return 0
