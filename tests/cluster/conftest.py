"""Fixtures of the tests that need Kubernetes. They run only where `ROWLOCK_CLUSTER_LEVEL` says on what.

bed          what the environment says about the cluster (session)
kubectl      kubectl for the whole cluster, with the CRD of this source applied (session)
namespace    kubectl in a namespace of this test's own
postgres, database   as everywhere, on a server that pods can reach
secret       the Secret with the database's connection strings, in the namespace
operators    starts operators as processes here, with the minimal rights in the namespace
scene        a published job, and everything that tests of the operator do in the database
proxy        stands between the operators and the API server, from its request on

Marks: `nodes` for tests whose pods must run, `fault` for those that break the cluster. What a
cluster cannot do is deselected, and said in one line.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.apiproxy import ApiProxy
from tests.support.cluster import (
    MANIFESTS,
    SECRET,
    Bed,
    BedError,
    Kubectl,
    Operators,
    database_secret,
    operators_of_the_cluster,
    temporary_namespace,
)
from tests.support.operator_scene import OperatorScene
from tests.support.postgres import Cluster, Database

HERE = Path(__file__).parent
TEST_SECONDS = 300
_LEFT_OUT = pytest.StashKey[dict[str, int]]()


def _bed() -> Bed:
    try:
        return Bed.from_environment(os.environ)
    except BedError as problem:
        raise pytest.UsageError(str(problem)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    bed = _bed()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    left_out: dict[str, int] = {}
    for item in items:
        if not item.path.is_relative_to(HERE):
            kept.append(item)
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
        reason = _why_not(item, bed)
        if reason:
            left_out[reason] = left_out.get(reason, 0) + 1
            dropped.append(item)
        else:
            kept.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    config.stash[_LEFT_OUT] = left_out


def _why_not(item: pytest.Item, bed: Bed) -> str:
    if item.get_closest_marker("nodes") and bed.level != "nodes":
        return f"no pod runs at ROWLOCK_CLUSTER_LEVEL={bed.level}"
    if item.get_closest_marker("fault") and not bed.fault:
        return "ROWLOCK_CLUSTER_FAULT names no command that breaks things"
    return ""


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    left_out = config.stash[_LEFT_OUT]
    return [f"not run here: {count} tests, because {why}" for why, count in left_out.items()]


@pytest.fixture(scope="session")
def bed() -> Bed:
    return _bed()


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    kubectl = Kubectl()
    others = operators_of_the_cluster(kubectl)
    assert not others, f"take away the operator for the whole cluster in {', '.join(others)}"
    kubectl.run("apply", "--server-side", "--force-conflicts", "-k", str(MANIFESTS / "crd"))
    kubectl.wait("crd/batchjobs.batch.rowlock.dev", "condition=Established")
    return kubectl


@pytest.fixture
def namespace(kubectl: Kubectl, request: pytest.FixtureRequest) -> Generator[Kubectl]:
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())
    name = f"{words[:40].strip('-')}-{secrets.token_hex(3)}"
    with temporary_namespace(kubectl, name) as inside:
        yield inside


@pytest.fixture(scope="session")
def postgres(bed: Bed) -> Generator[Cluster]:
    cluster = Cluster.private(bed.database_address)
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def secret(namespace: Kubectl, database: Database) -> str:
    namespace.apply(database_secret(database))
    return SECRET


@pytest.fixture
def operators(namespace: Kubectl, database: Database, tmp_path: Path) -> Generator[Operators]:
    operators = Operators.inside(namespace, database, tmp_path)
    try:
        yield operators
    finally:
        operators.close()


@pytest.fixture
def scene(database: Database) -> Generator[OperatorScene]:
    with OperatorScene(database) as made:
        yield made


@pytest.fixture
def proxy(operators: Operators) -> Generator[ApiProxy]:
    with ApiProxy(operators.kubeconfig) as made:
        operators.kubeconfig = made.kubeconfig
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, for a test that failed, what was in its namespace and what its operators said."""
    report = yield
    fixtures = getattr(item, "funcargs", {})
    inside = fixtures.get("namespace")
    if report.failed and isinstance(inside, Kubectl):
        for what in ("batchjobs,jobs,pods", "events"):
            shown = inside.run("get", what, "-o", "wide", check=False)
            report.sections.append((f"kubectl get {what}", shown.stdout[-8000:]))
    operators = fixtures.get("operators")
    if report.failed and isinstance(operators, Operators):
        for number, one in enumerate(operators.started, start=1):
            report.sections.append((f"log of operator {number}", one.log[-8000:]))
    return report
