"""Fixtures of the chart's tests. They run only where `ROWLOCK_HELM` names the program."""

import os

import pytest

from tests.support.helm import Helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    return Helm(program=os.environ["ROWLOCK_HELM"])
