"""Prometheus and promtool: where they are, a server over some targets, and what it answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from rowlock.runtime import processes
from tests.support.ports import free_port
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
FETCHED: Final = ROOT / ".tools" / "prometheus" / "usr" / "bin"
"""Where `make observability` puts Debian's programs."""

Sample = tuple[dict[str, str], float]
"""Labels and value."""


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; a test that needs it fails without it."""
    found = shutil.which(name) or shutil.which(name, path=str(FETCHED))
    assert found is not None, (
        f"{name} is missing: make observability brings it on Debian, or install the package "
        "prometheus and put it on PATH"
    )
    return found


class Prometheus:
    """A server that scrapes what it is told to, every second. Use it in a `with`."""

    def __init__(self, folder: Path, rules: Mapping[str, Any], *, every: str = "1s") -> None:
        """Prepare its folder.

        Args:
            folder: Where it keeps everything.
            rules: Groups of rules, as in a file of rules.
            every: How often it scrapes and evaluates.
        """
        self._folder = folder
        self._targets = folder / "targets.json"
        self._targets.write_text("[]")
        (folder / "rules.yaml").write_text(json.dumps(rules))
        (folder / "prometheus.yaml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": every, "evaluation_interval": every},
                    "rule_files": ["rules.yaml"],
                    "scrape_configs": [
                        {
                            "job_name": "rowlock",
                            "file_sd_configs": [
                                {"files": ["targets.json"], "refresh_interval": "1s"}
                            ],
                        }
                    ],
                }
            )
        )
        self.port = free_port()
        self._popen: subprocess.Popen[bytes] | None = None
        self._known: dict[str, int] = {}

    def __enter__(self) -> Self:
        log = (self._folder / "log").open("wb")
        with log:
            self._popen = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={self._folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--enable-feature=exemplar-storage",
                    "--log.level=warn",
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                preexec_fn=partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509  no threads
            )
        wait_until(self._is_ready, seconds=60, every_seconds=0.1, what="Prometheus is ready")
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            error.add_note(f"--- Prometheus\n{(self._folder / 'log').read_text()[-4000:]}")
            up = self.query("up") if self._is_ready() else "not ready"
            error.add_note(f"targets: {up}\n{self._targets.read_text()}")
        if self._popen is not None:
            self._popen.terminate()
            self._popen.wait(30)

    def _is_ready(self) -> bool:
        assert self._popen is not None
        assert self._popen.poll() is None, (self._folder / "log").read_text()
        try:
            with urllib.request.urlopen(f"{self._address}/-/ready", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # -- targets -------------------------------------------------------------------------------

    def scrape(self, pod: str, port: int) -> None:
        """Scrape this pod from now on."""
        self._known[pod] = port
        self._write()

    def forget(self, pod: str) -> None:
        """Its pod is gone, as Kubernetes would say."""
        self._known.pop(pod, None)
        self._write()

    def _write(self) -> None:
        text = json.dumps(
            [
                {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "batch", "pod": pod}}
                for pod, port in self._known.items()
            ]
        )
        # Renamed, so that half a file is never read.
        new = self._targets.with_suffix(".new")
        new.write_text(text)
        new.replace(self._targets)

    # -- questions -----------------------------------------------------------------------------

    def query(self, expr: str) -> list[Sample]:
        """The samples of an expression now."""
        found = self._get("query", query=expr)
        return [(one["metric"], float(one["value"][1])) for one in found["result"]]

    def value(self, expr: str) -> float | None:
        """The only sample of an expression; None: there is none."""
        samples = self.query(expr)
        assert len(samples) <= 1, samples
        return samples[0][1] if samples else None

    def history(self, expr: str, *, seconds: float, step: float = 1.0) -> list[Any]:
        """Series of an expression up to now, as Prometheus gives them."""
        now = time.time()
        found = self._get(
            "query_range", query=expr, start=str(now - seconds), end=str(now), step=str(step)
        )
        series: list[Any] = found["result"]
        return series

    def exemplars(self, expr: str, *, seconds: float) -> list[Any]:
        """The exemplars of these series in the last seconds, as Prometheus gives them."""
        now = time.time()
        found: Any = self._get(
            "query_exemplars", query=expr, start=str(now - seconds), end=str(now)
        )
        return [one for series in found for one in series["exemplars"]]

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return {
            one["labels"]["alertname"]
            for one in self._get("alerts")["alerts"]
            if one["state"] == "firing"
        }

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        url = f"{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data
