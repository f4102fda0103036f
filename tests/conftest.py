"""Fixtures for every test.

postgres          the server of this run, with a migrated template (session)
database          a database of its own with rowlock's schema
empty_database    a database of its own without it
private_database  as `database`, on a server that this test may stop, freeze or break
seed              what chance comes from: another one in each run, told by its header and a test that failed
"""

import os
from collections.abc import Generator

import pytest

from tests.support import seeds
from tests.support.postgres import Cluster, Database

# They need a Kubernetes cluster, and `make cluster` says which; Helm, and `make chart` brings it.
_NEEDS = {"cluster": "ROWLOCK_CLUSTER_LEVEL", "charts": "ROWLOCK_HELM"}
collect_ignore = [folder for folder, variable in _NEEDS.items() if variable not in os.environ]

_LOG_START = pytest.StashKey[int]()
_SEED = pytest.StashKey[int]()


def pytest_configure() -> None:
    seeds.choose()


def pytest_report_header() -> str:
    return seeds.told()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    made = seeds.of_this_run() + int(getattr(request, "param", 0))
    request.node.stash[_SEED] = made
    return made


@pytest.fixture(scope="session")
def postgres() -> Generator[Cluster]:
    cluster = Cluster.of_this_run()
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def database(postgres: Cluster, request: pytest.FixtureRequest) -> Generator[Database]:
    request.node.stash[_LOG_START] = postgres.log_size()
    made = postgres.create()
    yield made
    postgres.drop(made.name)


@pytest.fixture
def empty_database(postgres: Cluster, request: pytest.FixtureRequest) -> Generator[Database]:
    request.node.stash[_LOG_START] = postgres.log_size()
    made = postgres.create(migrated=False)
    yield made
    postgres.drop(made.name)


@pytest.fixture
def private_database() -> Generator[Database]:
    cluster = Cluster.private()
    try:
        cluster.prepare()
        yield cluster.create()
    finally:
        cluster.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the server said during a test that failed, and what repeats its choices (not its times)."""
    report = yield
    seed = item.stash.get(_SEED, None)
    if report.failed and seed is not None:
        report.sections.append(("seed", seeds.told(seed)))
    start = item.stash.get(_LOG_START, None)
    cluster = getattr(item, "funcargs", {}).get("postgres")
    if report.failed and start is not None and isinstance(cluster, Cluster):
        report.sections.append(("PostgreSQL log", cluster.log_since(start)[-8000:]))
    return report
