"""Fixtures of the tests with real nodes that are killed, paused and cut off.

fleet            nodes over a database of this test's own
private_postgres a server that only tests of one module use, one after the other (module)
private_fleet    nodes over it, for tests that stop or freeze it, and let it run again
"""

from collections.abc import Generator

import pytest

from tests.support.fleet import Fleet
from tests.support.postgres import Cluster, Database

_FAILED = pytest.StashKey[bool]()


@pytest.fixture
def fleet(database: Database, request: pytest.FixtureRequest) -> Generator[Fleet]:
    yield from _fleet(Fleet(database), request)


@pytest.fixture(scope="module")
def private_postgres() -> Generator[Cluster]:
    cluster = Cluster.private()
    try:
        cluster.prepare()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def private_fleet(private_postgres: Cluster, request: pytest.FixtureRequest) -> Generator[Fleet]:
    yield from _fleet(Fleet(private_postgres.create()), request)


def _fleet(made: Fleet, request: pytest.FixtureRequest) -> Generator[Fleet]:
    try:
        yield made
    finally:
        made.close(check=not request.node.stash.get(_FAILED, False))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the nodes said during a test that failed."""
    report = yield
    item.stash[_FAILED] = item.stash.get(_FAILED, False) or report.failed
    arguments = getattr(item, "funcargs", {})
    for value in arguments.values():
        if report.failed and isinstance(value, Fleet):
            story = value.story if report.when == "teardown" else value.tell()
            report.sections.append(("nodes", story))
    return report
