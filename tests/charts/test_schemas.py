"""Everything that the chart renders is what Kubernetes takes, in the oldest, the tested and the newest minor."""

import json
from collections.abc import Callable
from functools import cache
from importlib import import_module

import pytest

from tests.charts.cases import CASES
from tests.support.helm import Helm, HelmRefused, Object, Rendered

MINORS = (32, 34, 37)
# Kinds of others, whose schemas Kubernetes does not have.
FOREIGN = {
    "BatchJob",
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "ServiceMonitor",
    "TriggerAuthentication",
}
_validate: Callable[[Object, str, bool], None] = import_module("kubernetes_validate").validate


@cache
def _validate_once(text: str, minor: int) -> None:
    _validate(json.loads(text), f"1.{minor}", True)


def validate(one: Object, minor: int) -> None:
    """Raise if an object is not valid; most objects are the same in many cases."""
    _validate_once(json.dumps(one, sort_keys=True), minor)


@pytest.fixture(scope="module", params=CASES, ids=str)
def rendered(helm: Helm, request: pytest.FixtureRequest) -> Rendered:
    case: str = request.param
    return Rendered(helm.render(CASES[case]))


@pytest.mark.parametrize("minor", MINORS)
def test_every_object_is_valid(rendered: Rendered, minor: int) -> None:
    for one in rendered.objects:
        if one["kind"] not in FOREIGN:
            validate(one, minor)


@pytest.mark.parametrize("minor", MINORS)
def test_the_pods_of_masters_are_valid(rendered: Rendered, minor: int) -> None:
    for name, template in rendered.pods().items():
        if name.startswith("master/"):
            metadata = {**template["metadata"], "name": "master"}
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": metadata,
                "spec": template["spec"],
            }
            validate(pod, minor)


def test_no_name_is_used_twice(rendered: Rendered) -> None:
    names = [
        (one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"])
        for one in rendered.objects
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", CASES)
def test_lint_finds_nothing(helm: Helm, case: str) -> None:
    helm.lint(CASES[case])


def test_lint_finds_nothing_without_values(helm: Helm) -> None:
    helm.lint({})


def test_an_older_kubernetes_is_refused(helm: Helm) -> None:
    with pytest.raises(HelmRefused, match=r"incompatible with Kubernetes v1\.31\.0"):
        helm.render(CASES["least"], minor=31)
