"""What the manifests say twice, and what they say about the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rowlock import __version__
from rowlock.settings import Settings as NodeSettings
from rowlock_operator.masterjob import HTTP_PORT
from rowlock_operator.pools import parse_pools
from rowlock_operator.settings import Settings as OperatorSettings

MANIFESTS = Path(__file__).parents[2] / "manifests"

Object = dict[str, Any]


def load(path: str) -> Object:
    found: Object = yaml.safe_load((MANIFESTS / path).read_text())
    return found


WORKER = load("worker/deployment.yaml")["spec"]["template"]["spec"]
OPERATOR = load("operator/deployment.yaml")["spec"]["template"]["spec"]


def test_the_pod_of_a_master_is_that_of_a_worker() -> None:
    (pool,) = load("operator/pools.yaml")["pools"].values()
    master = pool["template"]["spec"]
    # What makes a worker: it drains, it is probed, it is spread.
    of_a_worker = {"terminationGracePeriodSeconds", "topologySpreadConstraints"}
    of_its_container = {"args", "ports", "startupProbe", "livenessProbe", "readinessProbe"}
    expected = {name: value for name, value in WORKER.items() if name not in of_a_worker}
    (container,) = expected.pop("containers")
    (own,) = master.pop("containers")
    # A master lives for one execution, and a Secret that is missing is told of its environment at once:
    # it takes no file with the connection string.
    assert [one["name"] for one in container["env"]] == ["ROWLOCK_DSN_FILE"]
    assert [one["name"] for one in own["env"]] == ["ROWLOCK_DSN"]
    container = {**container, "env": own["env"], "volumeMounts": container["volumeMounts"][1:]}
    expected["volumes"] = expected["volumes"][1:]
    assert master == expected
    assert own == {name: one for name, one in container.items() if name not in of_its_container}


def test_the_operator_reads_the_pools() -> None:
    pools = parse_pools(load("operator/pools.yaml"))
    (arguments,) = (one["args"] for one in WORKER["containers"])
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert pools.keys() == {given["--pool"]}
    assert str(pools[given["--pool"]].slots) == given["--slots"]
    assert given["--http"] == str(HTTP_PORT)


def test_an_overlay_replaces_the_image_and_nothing_else() -> None:
    # kustomize cuts the file at its double quotes and replaces the second piece.
    text = (MANIFESTS / "operator" / "pools.yaml").read_text()
    assert text.split('"')[1] == WORKER["containers"][0]["image"]


def test_a_worker_has_time_to_drain() -> None:
    assert WORKER["terminationGracePeriodSeconds"] > NodeSettings().drain_seconds


def test_the_operators_settings_are_right() -> None:
    (container,) = OPERATOR["containers"]
    given = {one["name"]: one.get("value", "") for one in container["env"]}
    # The file is not here, but a connection string is.
    del given["ROWLOCK_DSN_FILE"]
    settings = OperatorSettings.from_environment({**given, "ROWLOCK_DSN": "dbname=x"})
    (port,) = container["ports"]
    assert settings.http_port == port["containerPort"]
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert str(settings.pools_file).rpartition("/")[0] in mounted


def test_images_have_the_version_of_this_source() -> None:
    found = [
        (path.name, tag)
        for path in MANIFESTS.rglob("*")
        if path.suffix in {".yaml", ".sh"} or path.name == "Dockerfile"
        for tag in re.findall(
            r"(?:image: \"?[\w/.-]+:|newTag: |rowlock-\w+:|^VERSION=)([\d.]+)",
            path.read_text(),
            re.MULTILINE,
        )
    ]
    assert len(found) > 8
    assert {tag for _, tag in found} == {__version__}, found
