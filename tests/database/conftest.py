"""Fixtures of the tests of the SQL.

shared    a database for all tests of a module that look only at their own scene (module)
scene     nodes, executions and claims in it
alone     a scene in a database of its own, for tests that change or measure the whole of it
"""

from collections.abc import Generator

import pytest

from tests.support.builders import Scene
from tests.support.postgres import Cluster, Database


@pytest.fixture(scope="module")
def shared(postgres: Cluster) -> Generator[Database]:
    made = postgres.create()
    yield made
    postgres.drop(made.name)


@pytest.fixture
def scene(shared: Database) -> Generator[Scene]:
    with Scene(shared) as made:
        yield made


@pytest.fixture
def alone(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made
