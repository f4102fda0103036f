"""values.yaml, its schema and its documentation say the same, and a mistake is refused."""

from typing import Any

import pytest

from charts import document
from tests.charts.cases import BASE, Values, with_values
from tests.support.helm import CHART, Helm, HelmRefused


@pytest.mark.parametrize("path", document.files(), ids=lambda path: path.name)
def test_what_follows_from_others_is_up_to_date(path: Any) -> None:
    assert path.read_text() == document.files()[path], "make reference brings it up to date"


def test_every_value_has_a_comment() -> None:
    with pytest.raises(ValueError, match=r"^b\.c has no comment"):
        document.read_values("# -- Said.\na: 1\nb:\n  # Not said.\n  c: 1\n")


def test_a_comment_may_have_several_lines() -> None:
    (value,) = document.read_values("a:\n  # -- One\n  # and two.\n  b: 1\n")
    assert (value.path, value.meaning) == ("a.b", "One and two.")


def test_a_value_whose_type_nobody_can_tell_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody can tell its type"):
        document.schema_of(document.read_values("# -- Said.\na: null\n"))


TYPOS: dict[str, Values] = {
    "a name of the root": {"replicas": 3},
    "a section": {"worker": {}},
    "a value of a component": {"operator": {"replica": 2}},
    "a value of a pool": {"workers": {"pools": {"default": {"replcas": 3}}}},
    "a value of a pool's autoscaling": {
        "workers": {"pools": {"default": {"autoscaling": {"max": 3}}}}
    },
    "a password": {"database": {"password": "secret"}},
    "a password of a user": {"database": {"users": {"node": {"password": "secret"}}}},
    "a host with more than a host": {"database": {"host": "db sslmode=disable"}},
    "a kind of autoscaling": {"workers": {"autoscaling": {"type": "vpa"}}},
    "a way to check certificates": {"database": {"sslMode": "verify"}},
    "a text in place of a number": {"operator": {"replicas": "two"}},
    "no slots": {"workers": {"slots": 0}},
    "a digest": {"image": {"digest": "latest"}},
    "a name of a pool": {"workers": {"pools": {"Fast_1": {}}}},
    "a setting that is none of a node": {"workers": {"settings": {"POLL_SECONDS": 1}}},
    "a cluster's name": {"operator": {"cluster": "my cluster"}},
    "a threshold": {"metrics": {"prometheusRule": {"thresholds": {"RowlockNodeChurn": "many"}}}},
    "a knob of all pods": {"podDefaults": {"nodeSelectors": {}}},
}


@pytest.mark.parametrize("mistake", TYPOS)
def test_a_mistake_is_refused(helm: Helm, mistake: str) -> None:
    with pytest.raises(HelmRefused, match="values don't meet the specifications"):
        helm.render(with_values(BASE, **TYPOS[mistake]))


@pytest.mark.parametrize("variable", ["enabled", "global"])
def test_a_parent_chart_s_own_values_are_taken(helm: Helm, variable: str) -> None:
    value: Any = {"registry": {"any": ["thing"]}} if variable == "global" else True
    assert helm.render(with_values(BASE, **{variable: value}))


def test_no_value_has_a_default_that_is_secret() -> None:
    for value in document.read_values((CHART / "values.yaml").read_text()):
        last = value.path.rsplit(".", maxsplit=1)[-1].lower()
        assert not last.endswith(("password", "token", "dsn")), value.path
