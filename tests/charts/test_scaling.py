"""What pools are scaled by exists, and says what it should."""

from collections.abc import Generator

import pytest

from charts import catalogue
from tests.charts.cases import of_pool
from tests.support.builders import Scene
from tests.support.helm import Helm, Rendered
from tests.support.postgres import Database
from tests.support.promql import selectors


@pytest.fixture
def scene(database: Database) -> Generator[Scene]:
    with Scene(database) as made:
        yield made


def trigger(helm: Helm, pool: str, **keda: str) -> dict[str, str]:
    values = of_pool()
    values["workers"]["pools"] = {pool: {"autoscaling": {"type": "keda", "keda": keda}}}
    scaled = Rendered(helm.render(values)).one("ScaledObject", pool)
    metadata: dict[str, str] = scaled["spec"]["triggers"][0]["metadata"]
    return metadata


def wanted(helm: Helm, scene: Scene) -> int:
    """What KEDA reads, with the rights that it has."""
    query = trigger(helm, scene.pool, trigger="postgresql")["query"]
    with scene.database.connect(role="rowlock_reader") as db:
        row = db.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])


def test_the_metrics_of_a_scaledobject_exist_with_these_labels(helm: Helm) -> None:
    query = trigger(helm, "own", trigger="prometheus", serverAddress="http://prometheus")["query"]
    known = {series: one.labels for one in catalogue.families() for series in one.series}
    for selector in selectors(query):
        assert selector.labels <= set(known[selector.metric])


def test_the_metric_of_an_hpa_exists_with_these_labels(helm: Helm) -> None:
    rendered = Rendered(helm.render(of_pool(autoscaling={"type": "hpa"})))
    metric = rendered.one("HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]["metric"]
    (family,) = (one for one in catalogue.families() if metric["name"] in one.series)
    assert set(family.labels) == {"pool", "state"}


def test_a_pool_without_work_wants_no_node(helm: Helm, scene: Scene) -> None:
    assert wanted(helm, scene) == 0


def test_waiting_and_running_partitions_count_alike(helm: Helm, scene: Scene) -> None:
    scene.an_execution(5)
    assert wanted(helm, scene) == 5
    node = scene.a_node(slots=3)
    claims = scene.claim(node, slots=3)
    assert wanted(helm, scene) == 5
    scene.complete(node, claims[0])
    assert wanted(helm, scene) == 4


def test_no_more_nodes_than_a_limit_lets_work(helm: Helm, scene: Scene) -> None:
    run = scene.an_execution(9)
    scene.store.set_limits(run.id, {"parallelism": 2}, "test", None)
    assert wanted(helm, scene) == 2


def test_what_is_suspended_needs_a_node_only_for_what_runs(helm: Helm, scene: Scene) -> None:
    run = scene.an_execution(4)
    scene.claim(scene.a_node(slots=1), slots=1)
    scene.store.suspend(run.id, "test", None)
    assert wanted(helm, scene) == 1


def test_what_was_requested_wants_a_node_to_adopt_it(helm: Helm, scene: Scene) -> None:
    scene.a_request()
    assert wanted(helm, scene) == 1


def test_another_pool_s_work_does_not_count(helm: Helm, scene: Scene) -> None:
    scene.an_execution(4)
    query = trigger(helm, "elsewhere", trigger="postgresql")["query"]
    with scene.database.connect(role="rowlock_reader") as db:
        assert db.execute(query.encode()).fetchone() == (0,)
