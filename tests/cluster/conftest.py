"""Fixtures of the tests that need Kubernetes. They run only where `ROWLOCK_CLUSTER_LEVEL` says on what.

bed          what the environment says about the cluster (session)
kubectl      kubectl for the whole cluster, with the CRD of this source applied (session)
namespace    kubectl in a namespace of this test's own
postgres, database   as everywhere, on a server that pods can reach
secret       the Secret with the database's connection strings, in the namespace
operators    starts operators as processes here, with the minimal rights in the namespace
scene        a published job, and everything that tests of the operator do in the database
proxy        stands between the operators and the API server, from its request on

Marks: `nodes` for tests whose pods must run, `fault` for those that break the cluster; what a cluster
cannot do is deselected, and said in one line. `alone` for tests that change what all others share:
`make cluster` runs several processes, each with a PostgreSQL of its own, on the one cluster. `shared`
for a file whose tests share an installation.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator
from contextlib import ExitStack
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
from tests.support.turns import Turns

HERE = Path(__file__).parent
TEST_SECONDS = 300
_TURN = pytest.StashKey[ExitStack]()


def _bed() -> Bed:
    try:
        return Bed.from_environment(os.environ)
    except BedError as problem:
        raise pytest.UsageError(str(problem)) from None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    bed = _bed()
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        if not item.path.is_relative_to(HERE):
            kept.append(item)
            continue
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
        is_left_out = any(item.get_closest_marker(mark) for mark in _left_out(bed))
        (dropped if is_left_out else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # Those that wait until nobody else is at work come last, so that few wait for them.
    items[:] = sorted(kept, key=_is_alone)


def _left_out(bed: Bed) -> dict[str, str]:
    """Marks of the tests that cannot be run, and why."""
    why: dict[str, str] = {}
    if bed.level != "nodes":
        why["nodes"] = f"no pod runs at ROWLOCK_CLUSTER_LEVEL={bed.level}"
    if not bed.fault:
        why["fault"] = "ROWLOCK_CLUSTER_FAULT names no command that breaks things"
    return why


def pytest_report_header() -> list[str]:
    return [
        f"not run here: tests marked {mark}, because {why}"
        for mark, why in _left_out(_bed()).items()
    ]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Let a test wait for its turn, before its time and that of its fixtures begins.

    Where a file's tests share an installation, nobody is alone before the last of them is over.
    """
    stash = item.config.stash
    turn = stash.get(_TURN, None)
    if turn is None:
        turn = stash[_TURN] = ExitStack()
        if item.path.is_relative_to(HERE):
            assert item.config.cache is not None
            turns = Turns(item.config.cache.mkdir("turns"))
            turn.enter_context(turns.alone() if _is_alone(item) else turns.beside_others())
    try:
        return (yield)
    finally:
        shares = item.get_closest_marker("shared") is not None
        if not shares or nextitem is None or nextitem.path != item.path:
            del stash[_TURN]
            turn.close()


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


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
