"""The pools file is read again when it changes; a file with a mistake changes nothing."""

from pathlib import Path

import pytest

from rowlock_operator.poolfile import PoolFile

GOOD = """
pools:
  default:
    slots: 4
    template:
      spec:
        containers:
        - {name: rowlock, image: "my-jobs:1"}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pools.yaml"
    path.write_text(GOOD)
    return path


def test_the_pools_of_the_file_are_there(path: Path) -> None:
    file = PoolFile(path)

    assert file.problem == ""
    assert file.pools["default"].slots == 4
    assert file.pools["default"].template["spec"]["containers"][0]["image"] == "my-jobs:1"


def test_without_a_file_there_are_no_pools() -> None:
    file = PoolFile(None)

    assert (dict(file.pools), file.problem, file.refresh()) == ({}, "", False)


def test_a_changed_file_is_read_again(path: Path) -> None:
    file = PoolFile(path)
    assert not file.refresh(), "nothing has changed"

    path.write_text(GOOD.replace("my-jobs:1", "my-jobs:2"))

    assert file.refresh()
    assert file.pools["default"].template["spec"]["containers"][0]["image"] == "my-jobs:2"


@pytest.mark.parametrize(
    "text, said",
    [
        ("pools: [", "is no YAML"),
        ("pools: 1", "pools"),
        (GOOD.replace("slots: 4", "slots: many"), "pools.default.slots"),
        (GOOD.replace("slots: 4", "image: x"), "pools.default.image"),
        ("", "pools"),
    ],
)
def test_a_mistake_is_named_and_the_last_good_pools_stay(path: Path, text: str, said: str) -> None:
    file = PoolFile(path)
    path.write_text(text)

    assert file.refresh()
    assert said in file.problem
    assert str(path) in file.problem
    assert file.pools["default"].slots == 4
    assert not file.refresh(), "said once"

    path.write_text(GOOD)
    assert file.refresh()
    assert file.problem == ""


def test_a_file_that_is_gone_is_a_mistake_too(path: Path) -> None:
    file = PoolFile(path)
    path.unlink()

    assert file.refresh()
    assert "cannot be read" in file.problem
    assert "default" in file.pools
