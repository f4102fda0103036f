"""The operator as a process: how it ends, and what it says then."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def test_a_port_that_is_taken_ends_it_at_once_with_the_name_of_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "rowlock_operator"],
            env={
                **os.environ,
                "KUBECONFIG": str(tmp_path / "none"),
                "ROWLOCK_DSN": "host=127.0.0.1 port=1",
                "ROWLOCK_CLUSTER": "test",
                "ROWLOCK_HTTP_PORT": str(port),
            },
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert ended.returncode == 2, ended.stderr
    assert f"ROWLOCK_HTTP_PORT={port}: cannot listen there" in ended.stderr
