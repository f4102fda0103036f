"""`helm test`: creates a BatchJob and follows it, with the standard library and its own small rights.

It ends with 0 when the BatchJob has finished well, or, where no job of the installation is known,
when the operator has answered that nobody registers it.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time
from http import HTTPStatus
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, Final

GROUP: Final = "/apis/batch.rowlock.dev/v1alpha1"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_SECONDS: Final = 30.0
POLL_SECONDS: Final = 1.0

Object = dict[str, Any]
"""A Kubernetes object; its shape is Kubernetes' business."""


def main() -> int:
    """Run it; the exit status says how it went."""
    batchjob = {
        "apiVersion": "batch.rowlock.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"generateName": "helm-test-"},
        "spec": json.loads(os.environ["SPEC"]),
    }
    name: str = call("POST", "", batchjob)["metadata"]["name"]
    print(f"created BatchJob {name}: {json.dumps(batchjob['spec'])}", flush=True)
    problem = follow(name, os.environ["EXPECT"], float(os.environ["TIMEOUT_SECONDS"]))
    if problem:
        # It stays, to be looked at: kubectl describe batchjob.
        print(f"FAILED: {problem}", flush=True)
        return 1
    call("DELETE", f"/{name}")
    return 0


def follow(name: str, expected: str, seconds: float) -> str:
    """Wait for the end of a BatchJob; why it is not the expected one, empty if it is.

    Args:
        name: Of the BatchJob.
        expected: Finished, or the reason of a refusal.
        seconds: How long to wait.
    """
    deadline = time.monotonic() + seconds
    shown = ""
    while time.monotonic() < deadline:
        status: Object = call("GET", f"/{name}").get("status", {})
        line = f"{status.get('phase', 'Pending')} {status.get('progress', '')} {status.get('message', '')}"
        if line != shown:
            print(shown := line, flush=True)
        conditions = {one["type"]: one for one in status.get("conditions", [])}
        if conditions.get("Finished", {}).get("status") == "True":
            complete = conditions.get("Complete", {}).get("status") == "True"
            return "" if complete and expected == "Finished" else f"it finished as {line}"
        accepted = conditions.get("Accepted", {})
        if accepted.get("status") == "False":
            if accepted.get("reason") == expected:
                return ""
            if accepted.get("reason") != "UnknownJob":  # nodes that only just start register it yet
                return f"refused: {accepted}"
        time.sleep(POLL_SECONDS)
    return f"not {expected} after {seconds:g} s; is there a live node in its pool?"


def call(method: str, path: str, body: Object | None = None) -> Object:
    """One request to the API server.

    Args:
        method: Of HTTP.
        path: Below the BatchJobs of the namespace.
        body: To send as JSON.
    """
    connection = HTTPSConnection(
        os.environ["KUBERNETES_SERVICE_HOST"],
        int(os.environ["KUBERNETES_SERVICE_PORT"]),
        timeout=REQUEST_SECONDS,
        context=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
    )
    connection.request(
        method,
        f"{GROUP}/namespaces/{os.environ['NAMESPACE']}/batchjobs{path}",
        body=None if body is None else json.dumps(body),
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
            "Content-Type": "application/json",
        },
    )
    with connection.getresponse() as reply:
        answer: Object = json.load(reply)
    if reply.status >= HTTPStatus.BAD_REQUEST:
        raise SystemExit(f"FAILED: {method} BatchJob: {answer.get('message', reply.status)}")
    return answer


if __name__ == "__main__":
    sys.exit(main())
