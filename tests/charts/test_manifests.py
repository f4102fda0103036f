"""The chart and manifests/ install the same: what a manifest says of a core object, the chart says too."""

from pathlib import Path
from typing import Any, Final, cast

import pytest
import yaml

from tests.charts.cases import Values
from tests.support.helm import ROOT, Helm, Object, Rendered, environment, main_container

MANIFESTS: Final = ROOT / "manifests"

# The Secret of the manifests, and their numbers.
AS_THE_MANIFESTS: Final[Values] = {
    "fullnameOverride": "rowlock",
    "database": {
        "existingSecret": "rowlock-database",
        "secrets": {role: {"key": role} for role in ("owner", "node", "operator", "reader")},
    },
    "workers": {
        "image": {"repository": "my-jobs"},
        "drainSeconds": 30,
        "terminationGracePeriodSeconds": 45,
    },
}
SAME_OF_A_POD: Final = ("automountServiceAccountToken", "terminationGracePeriodSeconds")
SAME_OF_A_CONTAINER: Final = (
    *("image", "imagePullPolicy", "args", "resources", "securityContext", "ports"),
    *("startupProbe", "livenessProbe", "readinessProbe"),
)


@pytest.fixture(scope="module")
def chart(helm: Helm) -> Rendered:
    return Rendered(helm.render(AS_THE_MANIFESTS, namespace="rowlock"))


def manifest(*names: str) -> list[Object]:
    path = MANIFESTS.joinpath(*names)
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def pools(text: str) -> Object:
    return cast(Object, yaml.safe_load(text)["pools"])


def deployments() -> list[Path]:
    """Files of the manifests that hold pods, but those of the quick start."""
    found = [
        path
        for path in MANIFESTS.rglob("*.yaml")
        if path.parts[-2] not in {"demo", "samples"}
        and any(one["kind"] in {"Deployment", "Job"} for one in manifest_if_kinds(path))
    ]
    return sorted(found)


def manifest_if_kinds(path: Path) -> list[Object]:
    documents = [one for one in yaml.safe_load_all(path.read_text()) if one]
    return [one for one in documents if "kind" in one]


@pytest.mark.parametrize("path", deployments(), ids=lambda path: path.parts[-2])
def test_a_pod_is_that_of_the_manifests(chart: Rendered, path: Path) -> None:
    (ours,) = (one for one in manifest_if_kinds(path) if one["kind"] in {"Deployment", "Job"})
    component = ours["metadata"]["labels"]["app.kubernetes.io/component"]
    (theirs,) = (
        one
        for one in chart.of(ours["kind"])
        if one["metadata"]["labels"]["app.kubernetes.io/component"] == component
    )
    assert_same_pod(ours["spec"]["template"], theirs["spec"]["template"])
    for field in ("replicas", "backoffLimit"):
        assert ours["spec"].get(field) == theirs["spec"].get(field), field


def test_a_master_s_pod_is_that_of_the_manifests(chart: Rendered) -> None:
    ours = pools((MANIFESTS / "operator" / "pools.yaml").read_text())
    theirs = pools(chart.one("ConfigMap", "rowlock-pools")["data"]["pools.yaml"])
    assert ours.keys() == theirs.keys() == {"default"}
    assert ours["default"]["slots"] == theirs["default"]["slots"]
    assert_same_pod(ours["default"]["template"], theirs["default"]["template"])


def assert_same_pod(ours: Object, theirs: Object) -> None:
    for field in SAME_OF_A_POD:
        if field in ours["spec"]:
            assert ours["spec"][field] == theirs["spec"][field], field
    assert ours["spec"]["securityContext"] == theirs["spec"]["securityContext"]
    for field in SAME_OF_A_CONTAINER:
        if field in main_container(ours):
            assert main_container(ours)[field] == main_container(theirs)[field], field
    # The chart says more: how certificates are checked, and every default of its values.
    assert environment(theirs).items() >= environment(ours).items()
    assert mounts(theirs) >= mounts(ours)


def mounts(template: Object) -> set[str]:
    return {one["mountPath"] for one in main_container(template)["volumeMounts"]}


def test_the_workers_spread_and_their_budget_is_that_of_the_manifests(chart: Rendered) -> None:
    (worker,) = manifest("worker", "deployment.yaml")
    (budget,) = manifest("worker", "poddisruptionbudget.yaml")

    def without_selectors(spreads: list[Any]) -> list[Any]:
        return [{k: v for k, v in one.items() if k != "labelSelector"} for one in spreads]

    theirs = chart.one("Deployment", "worker-default")["spec"]["template"]["spec"]
    spread = "topologySpreadConstraints"
    assert without_selectors(theirs[spread]) == without_selectors(
        worker["spec"]["template"]["spec"][spread]
    )
    spec = chart.one("PodDisruptionBudget")["spec"]
    for field in ("maxUnavailable", "unhealthyPodEvictionPolicy"):
        assert spec[field] == budget["spec"][field]


def test_the_kind_is_that_of_the_manifests(chart: Rendered) -> None:
    (ours,) = manifest("crd", "crd.yaml")
    theirs = chart.one("CustomResourceDefinition")
    assert theirs["spec"] == ours["spec"]
    assert theirs["metadata"]["name"] == ours["metadata"]["name"]


@pytest.mark.parametrize(
    "names,suffix",
    [
        (("rbac", "namespaced", "role.yaml"), "rowlock-operator"),
        (("rbac", "users", "edit.yaml"), "batchjobs-edit"),
        (("rbac", "users", "view.yaml"), "batchjobs-view"),
    ],
)
def test_rights_are_those_of_the_manifests(
    chart: Rendered, names: tuple[str, ...], suffix: str
) -> None:
    (ours,) = manifest(*names)
    assert chart.one("ClusterRole", suffix)["rules"] == ours["rules"]
