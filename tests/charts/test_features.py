"""Each feature of the chart, by what it renders."""

import json
from typing import Any

import pytest
import yaml

from tests.charts.cases import BASE, DEMO, HOST, PEER, POD, Values, of_pool, with_values
from tests.support.helm import (
    Helm,
    HelmRefused,
    Object,
    Rendered,
    environment,
    main_container,
)

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
WORKER = "Deployment/r-rowlock-worker-default"
OPERATOR = "Deployment/r-rowlock-operator"
EXPORTER = "Deployment/r-rowlock-exporter"
MIGRATE = "Job/r-rowlock-migrate"
MASTER = "master/default"


@pytest.fixture
def render(helm: Helm) -> Any:
    def rendered(values: Values, **options: Any) -> Rendered:
        return Rendered(helm.render(values, **options))

    return rendered


def refusal(helm: Helm, values: Values) -> str:
    with pytest.raises(HelmRefused) as refused:
        helm.render(values)
    return str(refused.value)


# -- pools -------------------------------------------------------------------------------------


def test_each_pool_has_a_deployment_and_a_template_for_its_masters(render: Any) -> None:
    pools = {"fast": {"slots": 8, "replicas": 3}, "slow": {"slots": 1}}
    chart = render(with_values(BASE, workers={"pools": pools}))
    assert {one["metadata"]["name"] for one in chart.of("Deployment")} >= {
        "r-rowlock-worker-default",
        "r-rowlock-worker-fast",
        "r-rowlock-worker-slow",
    }
    fast = chart.one("Deployment", "worker-fast")
    assert fast["spec"]["replicas"] == 3
    args = main_container(fast["spec"]["template"])["args"]
    assert args == ["node", "--pool", "fast", "--slots", "8", "--http", "8080"]
    assert [name for name in chart.pods() if name.startswith("master/")] == [
        "master/default",
        "master/fast",
        "master/slow",
    ]
    # Each selects its own pods and nobody else's.
    selectors = [
        tuple(sorted(one["spec"]["selector"]["matchLabels"].items()))
        for one in chart.of("Deployment")
    ]
    assert len(set(selectors)) == len(selectors)


def test_the_default_pool_can_be_taken_away(render: Any) -> None:
    chart = render(with_values(BASE, workers={"pools": {"default": None, "own": {}}}))
    assert [name for name in chart.pods() if "worker" in name or "master" in name] == [
        "master/own",
        "Deployment/r-rowlock-worker-own",
    ]


def test_a_pool_says_otherwise_than_workers_and_those_than_the_defaults_of_all_pods(
    render: Any,
) -> None:
    chart = render(
        with_values(
            BASE,
            podDefaults={"priorityClassName": "all", "nodeSelector": {"a": "1"}},
            workers={
                "nodeSelector": {"b": "2"},
                "pools": {"own": {"priorityClassName": "own", "nodeSelector": {"b": "3"}}},
            },
        )
    )
    pods = chart.pods()
    chosen = {
        name: (pod["spec"]["priorityClassName"], pod["spec"]["nodeSelector"])
        for name, pod in pods.items()
    }
    assert chosen["Deployment/r-rowlock-worker-own"] == ("own", {"a": "1", "b": "3"})
    assert chosen["master/own"] == ("own", {"a": "1", "b": "3"})
    assert chosen[WORKER] == ("all", {"a": "1", "b": "2"})
    assert chosen[OPERATOR] == ("all", {"a": "1"})


def without_database(named: list[Any]) -> list[Any]:
    """Volumes, or mounts, without that of the file with the connection string."""
    assert [one["name"] for one in named].count("database") == 1
    return [one for one in named if one["name"] != "database"]


def test_a_master_s_pod_is_that_of_the_worker_without_probes(render: Any) -> None:
    chart = render(of_pool(**POD, settings={"ROWLOCK_POLL_SECONDS": 5}))
    worker, master = (chart.pods()[name]["spec"] for name in (WORKER, MASTER))
    container = dict(worker["containers"][0])
    for only in ("args", "livenessProbe", "readinessProbe", "startupProbe"):
        del container[only]
    # A master lives for one execution, and a Secret that is missing is told of its environment at once.
    container["env"] = [*master["containers"][0]["env"][:1], *container["env"][1:]]
    container["volumeMounts"] = without_database(container["volumeMounts"])
    worker["volumes"] = without_database(worker["volumes"])
    assert master["containers"] == [container, *worker["containers"][1:]]
    own = ("containers", "topologySpreadConstraints")
    assert {name: value for name, value in master.items() if name not in own} == {
        name: value for name, value in worker.items() if name not in own
    }


def test_a_master_has_slots_and_resources_of_its_own(render: Any) -> None:
    chart = render(
        of_pool(slots=4, master={"slots": 0, "resources": {"limits": {"memory": "2Gi"}}})
    )
    (config,) = (one for one in chart.of("ConfigMap") if "pools.yaml" in one["data"])
    assert yaml.safe_load(config["data"]["pools.yaml"])["pools"]["default"]["slots"] == 0
    assert main_container(chart.pods()[MASTER])["resources"]["limits"] == {"memory": "2Gi"}
    assert main_container(chart.pods()[WORKER])["resources"]["limits"] == {"memory": "1Gi"}


def test_every_knob_reaches_every_pod(render: Any) -> None:
    chart = render(
        with_values(
            BASE,
            podDefaults=POD,
            workers={"topologySpreadConstraints": POD["topologySpreadConstraints"]},
        )
    )
    for name, pod in chart.pods().items():
        spec, container = pod["spec"], main_container(pod)
        for knob in (
            *("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName"),
            *("schedulerName", "hostUsers", "hostAliases", "dnsPolicy", "dnsConfig"),
        ):
            assert spec[knob] == POD[knob], (name, knob)
        assert container["env"][-1] == POD["env"][0], name
        assert container["envFrom"] == POD["envFrom"], name
        assert container["lifecycle"] == POD["lifecycle"], name
        assert container["volumeMounts"][-1] == POD["volumeMounts"][0], name
        assert spec["volumes"][-1] == POD["volumes"][0], name
        assert {"name": "tmp", "emptyDir": POD["tmp"]} in spec["volumes"], name
        assert POD["initContainers"][0] in spec["initContainers"], name
        assert spec["containers"][1:] == POD["extraContainers"], name
        assert pod["metadata"]["labels"]["team"] == "billing", name
        assert pod["metadata"]["annotations"]["note"] == "mine", name
        assert spec["securityContext"]["fsGroup"] == 2000, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert container["securityContext"] == {**RESTRICTED, "runAsUser": 1000}, name
        if "livenessProbe" in container:
            assert container["livenessProbe"]["periodSeconds"] == 33, name
            assert container["readinessProbe"]["periodSeconds"] == 34, name
            assert container["startupProbe"]["periodSeconds"] == 35, name


def test_a_spread_without_a_selector_means_the_component_s_own_pods(render: Any) -> None:
    chart = render(with_values(BASE, podDefaults=POD))
    for name, pod in chart.pods().items():
        (spread,) = pod["spec"]["topologySpreadConstraints"]
        chosen = spread["labelSelector"]["matchLabels"]
        assert pod["metadata"]["labels"].items() >= chosen.items(), name
        assert "app.kubernetes.io/component" in chosen, name
        # The operator gives a master an instance of its own.
        assert not name.startswith("master/") or "app.kubernetes.io/instance" not in chosen


def test_a_spread_with_a_selector_keeps_it(render: Any) -> None:
    mine = {
        "maxSkew": 2,
        "topologyKey": "zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchExpressions": [{"key": "x", "operator": "Exists"}]},
    }
    chart = render(of_pool(topologySpreadConstraints=[mine]))
    assert chart.pods()[WORKER]["spec"]["topologySpreadConstraints"] == [mine]


def test_settings_are_written_as_people_write_them(render: Any) -> None:
    settings = {"ROWLOCK_RECYCLE_ATTEMPTS": 1_000_000, "ROWLOCK_BEAT_SECONDS": 0.5}
    chart = render(
        of_pool(settings=settings, imports=["a.jobs", "b.jobs"], extraArgs=["--name", "x"])
    )
    worker = chart.pods()[WORKER]
    assert (
        environment(worker).items()
        >= {
            "ROWLOCK_RECYCLE_ATTEMPTS": "1000000",
            "ROWLOCK_BEAT_SECONDS": "0.5",
            "ROWLOCK_DRAIN_SECONDS": "100",
            "ROWLOCK_LOG_FORMAT": "json",
        }.items()
    )
    assert main_container(worker)["args"][-6:] == [
        *("--import", "a.jobs", "--import", "b.jobs"),
        *("--name", "x"),
    ]


def test_a_pod_is_not_killed_before_it_has_drained(helm: Helm) -> None:
    assert "terminationGracePeriodSeconds=30 must be at least 10 more than drainSeconds=100" in (
        refusal(helm, of_pool(terminationGracePeriodSeconds=30))
    )


def test_an_image_with_jobs_is_required(helm: Helm) -> None:
    values = with_values(BASE, workers={"image": {"repository": ""}})
    assert "workers.image.repository is empty" in refusal(helm, values)


# -- autoscaling and disruption ----------------------------------------------------------------


def test_a_drain_takes_one_node_of_a_pool_at_a_time(render: Any) -> None:
    budget = render(BASE).one("PodDisruptionBudget")
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": render(BASE).one("Deployment", "worker-default")["spec"]["selector"],
    }


def test_one_replica_of_the_operator_has_no_budget_that_would_block_a_drain(render: Any) -> None:
    names = [one["metadata"]["name"] for one in render(BASE).of("PodDisruptionBudget")]
    assert "r-rowlock-operator" not in names
    two = render(with_values(BASE, operator={"replicas": 2}))
    assert two.one("PodDisruptionBudget", "operator")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("kind", ["none", "hpa", "keda"])
def test_replicas_are_left_to_what_scales(render: Any, kind: str) -> None:
    chart = render(of_pool(autoscaling={"type": kind}))
    spec = chart.one("Deployment", "worker-default")["spec"]
    assert ("replicas" in spec) == (kind == "none")
    assert len(chart.of("HorizontalPodAutoscaler")) == (kind == "hpa")
    assert len(chart.of("ScaledObject")) == (kind == "keda")


def test_an_hpa_scales_on_pending_and_claimed_partitions(render: Any) -> None:
    chart = render(of_pool(slots=4, autoscaling={"type": "hpa", "maxReplicas": 7}))
    spec = chart.one("HorizontalPodAutoscaler")["spec"]
    assert spec["scaleTargetRef"]["name"] == "r-rowlock-worker-default"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 7)
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    (metric,) = spec["metrics"]
    assert metric["external"] == {
        "metric": {
            "name": "rowlock_queue_partitions",
            "selector": {
                "matchLabels": {"pool": "default"},
                "matchExpressions": [
                    {"key": "state", "operator": "In", "values": ["pending", "claimed"]}
                ],
            },
        },
        "target": {"type": "AverageValue", "averageValue": "4"},
    }


def test_an_hpa_cannot_go_to_nothing(helm: Helm) -> None:
    assert "needs autoscaling.type keda" in refusal(
        helm, of_pool(autoscaling={"type": "hpa", "minReplicas": 0})
    )


def test_fewest_nodes_are_not_more_than_most(helm: Helm) -> None:
    assert "autoscaling.minReplicas=20 is more than maxReplicas=10" in refusal(
        helm, of_pool(autoscaling={"type": "keda", "minReplicas": 20})
    )


def test_keda_scales_on_pending_and_claimed_partitions_by_prometheus(render: Any) -> None:
    keda = {"trigger": "prometheus", "serverAddress": "http://prometheus:9090"}
    chart = render(of_pool(autoscaling={"type": "keda", "partitionsPerNode": 3, "keda": keda}))
    spec = chart.one("ScaledObject")["spec"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == "3"
    assert 'pool="default", state=~"pending|claimed"' in trigger["metadata"]["query"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert chart.of("TriggerAuthentication") == []


def test_keda_asks_the_database_with_the_reader_s_login(render: Any) -> None:
    values = with_values(
        of_pool(autoscaling={"type": "keda", "minReplicas": 0}),
        database={"secrets": {"reader": {"name": "pg-reader", "key": "dsn"}}},
    )
    chart = render(values)
    authentication = chart.one("TriggerAuthentication")
    assert authentication["spec"]["secretTargetRef"] == [
        {"parameter": "connection", "name": "pg-reader", "key": "dsn"}
    ]
    spec = chart.one("ScaledObject")["spec"]
    assert spec["minReplicaCount"] == 0
    (trigger,) = spec["triggers"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    assert trigger["metadata"]["targetQueryValue"] == "2"


def test_keda_gets_host_and_login_where_there_is_no_connection_string(render: Any) -> None:
    chart = render(with_values(HOST, workers={"autoscaling": {"type": "keda"}}))
    assert chart.one("TriggerAuthentication")["spec"]["secretTargetRef"] == [
        {"parameter": "password", "name": "pw-reader", "key": "password"}
    ]
    metadata = chart.one("ScaledObject")["spec"]["triggers"][0]["metadata"]
    assert (
        metadata.items()
        >= {
            "host": "db.example",
            "port": "6432",
            "dbName": "work",
            "userName": "jobs_reader",
            "sslmode": "verify-full",
        }.items()
    )


# -- the database ------------------------------------------------------------------------------


def secret_of(pod: Any, name: str = "database") -> tuple[str, str]:
    """Name and key of the Secret that a pod mounts as a file with a connection string."""
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == name]
    (item,) = volume["secret"]["items"]
    assert (item["path"], volume["secret"]["defaultMode"]) == ("dsn", 0o444)
    return volume["secret"]["secretName"], item["key"]


def test_cloudnativepg_s_secret_works_as_it_is(render: Any) -> None:
    """What lives long reads it from a file, at each connection: a new password needs no restart."""
    pods = render(BASE).pods()
    for name in (MASTER, MIGRATE):
        assert environment(pods[name])["ROWLOCK_DSN"] == "pg-app/uri", name
    for name in (WORKER, EXPORTER, OPERATOR):
        assert environment(pods[name])["ROWLOCK_DSN_FILE"] == "/etc/rowlock-database/dsn", name
        assert "ROWLOCK_DSN" not in environment(pods[name])
        assert secret_of(pods[name]) == ("pg-app", "uri")


def test_each_role_may_have_a_secret_of_its_own(render: Any) -> None:
    secrets = {
        "owner": {"name": "pg-owner"},
        "node": {"key": "node"},
        "operator": {"name": "pg-operator", "key": "dsn"},
    }
    pods = render(with_values(BASE, database={"secrets": secrets})).pods()
    assert environment(pods[MIGRATE])["ROWLOCK_DSN"] == "pg-owner/uri"
    assert environment(pods[MASTER])["ROWLOCK_DSN"] == "pg-app/node"
    assert secret_of(pods[WORKER]) == ("pg-app", "node")
    # A reader without one of its own reads as the operator, who may do no more than that and launch.
    assert secret_of(pods[EXPORTER]) == ("pg-operator", "dsn")


def test_a_host_takes_passwords_from_secrets(render: Any) -> None:
    pods = render(HOST).pods()
    for name, role in ((WORKER, "node"), (OPERATOR, "operator"), (MIGRATE, "owner")):
        assert (
            environment(pods[name]).items()
            >= {
                "ROWLOCK_DSN": "host=db.example port=6432 dbname=work",
                "PGUSER": f"jobs_{role}",
                "PGPASSWORD": f"pw-{role}/password",
            }.items()
        )


@pytest.mark.parametrize("name", [WORKER, MASTER, OPERATOR, EXPORTER, MIGRATE])
def test_the_server_s_certificate_is_checked(render: Any, name: str) -> None:
    public = environment(render(BASE).pods()[name])
    assert public["PGSSLMODE"] == "verify-full"
    assert public["PGSSLROOTCERT"] == "/etc/ssl/certs/ca-certificates.crt"
    tls = {"caSecret": {"name": "pg-ca", "key": "own.crt"}, "certSecret": {"name": "pg-client"}}
    own = render(with_values(BASE, database={"tls": tls})).pods()[name]
    paths = {
        "PGSSLROOTCERT": "/etc/rowlock-tls/ca/ca.crt",
        "PGSSLCERT": "/etc/rowlock-tls/client/tls.crt",
        "PGSSLKEY": "/etc/rowlock-tls/client/tls.key",
    }
    assert environment(own).items() >= paths.items()
    mounts = {one["mountPath"]: one["name"] for one in main_container(own)["volumeMounts"]}
    volumes = {one["name"]: one for one in own["spec"]["volumes"]}
    authority = volumes[mounts["/etc/rowlock-tls/ca"]]["secret"]
    assert authority["items"] == [{"key": "own.crt", "path": "ca.crt"}]
    # libpq refuses a key that others can read.
    assert volumes[mounts["/etc/rowlock-tls/client"]]["secret"]["defaultMode"] == 0o440


def test_the_pooler_of_transactions_may_be_another(render: Any) -> None:
    work = {"existingSecret": "pg-work", "existingSecretKey": "dsn"}
    pods = render(with_values(BASE, database={"work": work})).pods()
    file = environment(pods[WORKER])["ROWLOCK_WORK_DSN_FILE"]
    assert file == "/etc/rowlock-work-database/dsn"
    assert secret_of(pods[WORKER], "work-database") == ("pg-work", "dsn")
    assert environment(pods[MASTER])["ROWLOCK_WORK_DSN"] == "pg-work/dsn"
    assert "ROWLOCK_WORK_DSN" not in environment(pods[OPERATOR])


@pytest.mark.parametrize(
    "values,says",
    [
        ({"database": {"existingSecret": ""}}, "name the Secret with a connection string"),
        ({"database": {"existingSecret": "", "host": "db"}}, "wants a login for each role"),
    ],
)
def test_a_database_is_required(helm: Helm, values: Values, says: str) -> None:
    assert says in refusal(helm, with_values(BASE, **values))


def test_no_password_is_in_any_object_but_the_demonstration_s_own(helm: Helm) -> None:
    for values in (BASE, HOST):
        assert Rendered(helm.render(values)).of("Secret") == []
    (secret,) = Rendered(helm.render(DEMO)).of("Secret")
    assert secret["metadata"]["name"] == "r-rowlock-demo-database"


# -- migrations --------------------------------------------------------------------------------


def test_migrations_run_before_install_and_upgrade(render: Any) -> None:
    job = render(BASE).one("Job")
    assert job["metadata"]["annotations"] == {
        "helm.sh/hook": "pre-install,pre-upgrade",
        "helm.sh/hook-weight": "0",
        "helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded",
    }
    container = main_container(job["spec"]["template"])
    assert (container["image"], container["args"]) == ("rowlock-node:0.1.0", ["migrate"])
    # It comes before every object of the release, so it uses none.
    assert "serviceAccountName" not in job["spec"]["template"]["spec"]


def test_migrations_may_run_in_the_pods(render: Any) -> None:
    chart = render(with_values(BASE, migrations={"mode": "initContainer"}))
    assert chart.of("Job") == []
    for name in (WORKER, OPERATOR, EXPORTER):
        (first,) = chart.pods()[name]["spec"]["initContainers"]
        assert (first["name"], first["args"]) == ("migrate", ["migrate"]), name
        assert first["securityContext"] == RESTRICTED, name
    # A master starts while workers run: the schema is there.
    assert "initContainers" not in chart.pods()[MASTER]["spec"]


def test_migrations_may_be_somebody_else_s(helm: Helm, render: Any) -> None:
    values = with_values(BASE, migrations={"enabled": False})
    chart = render(values)
    assert chart.of("Job") == []
    assert all("initContainers" not in pod["spec"] for pod in chart.pods().values())
    assert "run `rowlock migrate` before each upgrade" in helm.notes(values)


def test_the_notes_ask_for_the_runbooks_address_where_alerts_have_none(helm: Helm) -> None:
    rule = {"enabled": True, "runbookBaseUrl": ""}
    asked = "metrics.prometheusRule.runbookBaseUrl"
    assert asked in helm.notes(with_values(BASE, metrics={"prometheusRule": rule}))
    rule["runbookBaseUrl"] = "https://runbooks.example/rowlock"
    assert asked not in helm.notes(with_values(BASE, metrics={"prometheusRule": rule}))
    assert asked not in helm.notes(BASE)


# -- security ----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [BASE, DEMO], ids=["own database", "demo"])
def test_every_pod_meets_the_restricted_profile(render: Any, values: Values) -> None:
    for name, pod in render(values).pods().items():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, name
        assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])):
            assert container["securityContext"] == RESTRICTED, name


def test_no_key_to_the_api_is_where_author_code_runs(render: Any) -> None:
    pods = render(DEMO).pods()
    tokens = {name for name, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]}
    assert tokens == {OPERATOR, "Pod/r-rowlock-test"}


def test_workers_and_masters_may_have_an_account(render: Any) -> None:
    pods = render(of_pool(serviceAccountName="billing")).pods()
    for name in (WORKER, MASTER):
        assert pods[name]["spec"]["serviceAccountName"] == "billing"
        assert pods[name]["spec"]["automountServiceAccountToken"] is False


def test_rights_are_the_cluster_s_or_a_namespace_s(render: Any) -> None:
    cluster = render(BASE)
    wide = cluster.one("ClusterRole", "operator")
    assert [one for one in cluster.of("Role") if one["metadata"]["name"] != "r-rowlock-test"] == []
    narrow = render(
        with_values(BASE, rbac={"scope": "namespace"}, operator={"watchNamespaces": ["a", "b"]})
    )
    assert narrow.of("ClusterRole") == narrow.of("ClusterRoleBinding") == []
    roles = [one for one in narrow.of("Role") if one["metadata"]["name"] == "r-rowlock-operator"]
    assert [one["metadata"]["namespace"] for one in roles] == ["a", "b"]
    assert all(one["rules"] == wide["rules"] for one in roles)
    for binding in narrow.of("RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["namespace"] == "jobs"


def test_the_operator_watches_what_it_has_rights_for(render: Any) -> None:
    def watched(**values: Any) -> object:
        return environment(render(with_values(BASE, **values)).pods()[OPERATOR])[
            "ROWLOCK_NAMESPACES"
        ]

    assert watched() == ""
    assert watched(operator={"watchNamespaces": ["a", "b"]}) == "a,b"
    assert watched(rbac={"scope": "namespace"}) == "jobs"


def test_a_namespace_s_release_touches_nothing_of_the_cluster_but_the_kind(render: Any) -> None:
    chart = render(with_values(BASE, rbac={"scope": "namespace"}))
    wide = [one["kind"] for one in chart.objects if "namespace" not in one["metadata"]]
    assert wide == ["CustomResourceDefinition"]


def test_people_s_roles_are_extended(render: Any) -> None:
    chart = render(BASE)
    edit = chart.one("ClusterRole", "batchjobs-edit")["metadata"]["labels"]
    view = chart.one("ClusterRole", "batchjobs-view")["metadata"]["labels"]
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {name for name in edit if name.startswith(prefix)} == {f"{prefix}edit", f"{prefix}admin"}
    assert {name for name in view if name.startswith(prefix)} == {f"{prefix}view"}
    without = render(with_values(BASE, rbac={"aggregateToDefaultRoles": False}))
    assert [one for one in without.of("ClusterRole") if "users" in str(one["metadata"])] == []


def test_rights_may_be_somebody_else_s(render: Any) -> None:
    account = {"create": False, "name": "op"}
    chart = render(with_values(BASE, rbac={"create": False}, operator={"serviceAccount": account}))
    names = [name for name in chart.names() if "Role" in name or "ServiceAccount" in name]
    assert all(name.endswith("/r-rowlock-test") for name in names)
    assert chart.pods()[OPERATOR]["spec"]["serviceAccountName"] == "op"


def egress_of(policy: Object) -> list[Any]:
    return [
        (rule.get("to"), sorted({one["port"] for one in rule["ports"]}))
        for rule in policy["spec"]["egress"]
    ]


def test_network_policies_name_who_speaks_with_whom(render: Any) -> None:
    assert render(BASE).of("NetworkPolicy") == []
    api = [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    own = [{"to": [PEER], "ports": [{"port": 443}]}]
    chart = render(
        with_values(
            BASE,
            networkPolicy={
                "enabled": True,
                "database": [PEER],
                "metricsFrom": [PEER],
                "apiServer": api,
                "workersEgress": own,
            },
        )
    )
    dns, database = (None, [53]), ([PEER], [5432])
    nodes = chart.one("NetworkPolicy", "nodes")
    assert egress_of(nodes) == [dns, database, ([PEER], [443])]
    assert nodes["spec"]["ingress"] == [
        {"from": [PEER], "ports": [{"port": 8080, "protocol": "TCP"}]}
    ]
    assert egress_of(chart.one("NetworkPolicy", "operator")) == [dns, database, (api, [443, 6443])]
    assert egress_of(chart.one("NetworkPolicy", "exporter")) == [dns, database]
    # Those of hooks are hooks: they are there before the pod that needs them.
    migrate = chart.one("NetworkPolicy", "migrate")
    assert egress_of(migrate) == [dns, database]
    weights = [
        int(one["metadata"]["annotations"]["helm.sh/hook-weight"])
        for one in (migrate, chart.one("Job"))
    ]
    assert weights == sorted(set(weights))


def test_every_pod_of_the_chart_is_in_one_network_policy(render: Any) -> None:
    for base in (BASE, DEMO):
        chart = render(with_values(base, networkPolicy={"enabled": True}))
        policies = [one["spec"]["podSelector"]["matchLabels"] for one in chart.of("NetworkPolicy")]
        for name, pod in chart.pods().items():
            labels = pod["metadata"]["labels"].items()
            assert len([one for one in policies if labels >= one.items()]) == 1, name


# -- the kind ----------------------------------------------------------------------------------


def test_the_kind_stays_when_the_release_goes(render: Any) -> None:
    kept = render(BASE).one("CustomResourceDefinition")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    crds = {"keep": False}
    free = render(with_values(BASE, crds=crds)).one("CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in free["metadata"].get("annotations", {})


def test_the_kind_may_be_another_release_s(render: Any) -> None:
    assert render(with_values(BASE, crds={"enabled": False})).of("CustomResourceDefinition") == []


# -- seeing it ---------------------------------------------------------------------------------


def ports_of(chart: Rendered, labels: Object) -> list[str]:
    """Names of the ports of every pod that has these labels."""
    return [
        port["name"]
        for pod in chart.pods().values()
        if pod["metadata"]["labels"].items() >= labels.items()
        for port in main_container(pod).get("ports", [])
    ]


def test_a_servicemonitor_finds_operator_and_exporter(render: Any) -> None:
    monitor_values = {"enabled": True, "labels": {"release": "prom"}, "interval": "15s"}
    chart = render(with_values(BASE, metrics={"serviceMonitor": monitor_values}))
    monitor = chart.one("ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    chosen = [
        service["metadata"]["name"]
        for service in chart.of("Service")
        if service["metadata"]["labels"].items()
        >= monitor["spec"]["selector"]["matchLabels"].items()
    ]
    assert sorted(chosen) == ["r-rowlock-exporter", "r-rowlock-operator"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {"port": "http", "interval": "15s"}
    for service in chart.of("Service"):
        assert ports_of(chart, service["spec"]["selector"]) == ["http"]


def test_a_podmonitor_finds_workers_and_masters(render: Any) -> None:
    chart = render(with_values(BASE, metrics={"podMonitor": {"enabled": True}}))
    spec = chart.one("PodMonitor")["spec"]
    assert ports_of(chart, spec["selector"]["matchLabels"]) == ["http", "http"]
    assert spec["podMetricsEndpoints"] == [{"port": "http"}]
    # Masters run where their BatchJobs are.
    assert spec["namespaceSelector"] == {"any": True}
    narrow = with_values(
        BASE, rbac={"scope": "namespace"}, metrics={"podMonitor": {"enabled": True}}
    )
    assert render(narrow).one("PodMonitor")["spec"]["namespaceSelector"] == {"matchNames": ["jobs"]}


def test_nothing_is_monitored_unless_somebody_wants_it(render: Any) -> None:
    kinds = {one["kind"] for one in render(BASE).objects}
    assert kinds.isdisjoint({"ServiceMonitor", "PodMonitor", "PrometheusRule"})


def test_liveness_has_a_path_of_its_own(render: Any) -> None:
    # /readyz asks the database; a pod that is killed because a database is away helps nobody.
    for name, pod in render(BASE).pods().items():
        if "livenessProbe" in main_container(pod):
            assert main_container(pod)["livenessProbe"]["httpGet"]["path"] == "/livez", name
            assert main_container(pod)["startupProbe"]["httpGet"]["path"] == "/livez", name
            assert main_container(pod)["readinessProbe"]["httpGet"]["path"] == "/readyz", name


# -- names and images --------------------------------------------------------------------------


def test_labels_and_annotations_reach_every_object(render: Any) -> None:
    chart = render(
        with_values(
            DEMO,
            commonLabels={"team": "billing"},
            commonAnnotations={"owner": "me"},
            networkPolicy={"enabled": True},
            metrics={kind: {"enabled": True} for kind in ("serviceMonitor", "podMonitor")},
        )
    )
    for one in chart.objects:
        metadata = one["metadata"]
        assert metadata["labels"]["team"] == "billing", metadata["name"]
        assert metadata["annotations"]["owner"] == "me", metadata["name"]
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "rowlock", metadata["name"]
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "Helm", metadata["name"]
    for name, pod in chart.pods().items():
        assert pod["metadata"]["labels"]["team"] == "billing", name


def test_an_upgrade_of_the_chart_alone_starts_no_pod_anew(render: Any) -> None:
    for name, pod in render(BASE).pods().items():
        if name != MIGRATE and not name.startswith("Pod/"):
            labels = pod["metadata"]["labels"]
            assert labels.keys().isdisjoint({"helm.sh/chart", "app.kubernetes.io/version"}), name


def test_names_follow_the_release_or_what_was_asked_for(render: Any) -> None:
    def operator(**options: Any) -> str:
        values = with_values(BASE, **options.pop("values", {}))
        return str(render(values, **options).one("Deployment", "operator")["metadata"]["name"])

    assert operator(release="prod") == "prod-rowlock-operator"
    assert operator(release="rowlock") == "rowlock-operator"
    assert operator(values={"fullnameOverride": "mine"}) == "mine-operator"
    assert operator(values={"nameOverride": "batch"}) == "r-batch-operator"


def test_the_longest_names_stay_different(render: Any) -> None:
    long = "a" * 62
    chart = render(
        with_values(
            DEMO,
            workers={"pools": {f"{long}1": {}, f"{long}2": {}}},
            grafana={"dashboards": {"enabled": True}},
        ),
        release="b" * 53,
        namespace="c" * 63,
    )
    assert len(chart.names()) == len(set(chart.names()))
    for one in chart.objects:
        # A name is that of a host for Services only.
        assert len(one["metadata"]["name"]) <= (63 if one["kind"] == "Service" else 253)


def test_objects_may_be_in_another_namespace(render: Any) -> None:
    chart = render(with_values(BASE, namespaceOverride="elsewhere"))
    assert {one["metadata"].get("namespace", "elsewhere") for one in chart.objects} == {"elsewhere"}


def test_an_image_has_a_registry_and_a_tag_or_a_digest(render: Any) -> None:
    digest = f"sha256:{'a' * 64}"
    chart = render(
        with_values(
            BASE,
            image={"registry": "registry.example", "tag": "9"},
            operator={
                "image": {"registry": "other.example", "digest": digest, "pullPolicy": "Always"}
            },
            imagePullSecrets=[{"name": "registry"}],
        )
    )
    pods = chart.pods()
    assert main_container(pods[EXPORTER])["image"] == "registry.example/rowlock-node:9"
    # Of BASE, whose repository names its registry.
    assert main_container(pods[WORKER])["image"] == "registry.example/jobs:0.1.0"
    assert main_container(render(with_values(DEMO, image={"tag": "9"})).pods()[OPERATOR])[
        "image"
    ] == ("rowlock-operator:9")
    operator = main_container(pods[OPERATOR])
    assert operator["image"] == f"other.example/rowlock-operator@{digest}"
    assert operator["imagePullPolicy"] == "Always"
    assert all(pod["spec"]["imagePullSecrets"] == [{"name": "registry"}] for pod in pods.values())


def test_further_objects_may_use_templates(render: Any) -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-mine'}\n"
    chart = render(with_values(BASE, extraObjects=[text]))
    assert chart.one("ConfigMap", "r-mine")["metadata"]["name"] == "r-mine"


# -- the first five minutes --------------------------------------------------------------------


def test_the_demonstration_needs_one_value(render: Any) -> None:
    chart = render(DEMO)
    pods = chart.pods()
    assert chart.of("Job") == []
    for name in (WORKER, MASTER):
        assert main_container(pods[name])["image"] == "rowlock-demo:0.1.0"
        assert environment(pods[name])["PGSSLMODE"] == "disable"
    assert environment(pods[MASTER])["ROWLOCK_DSN"] == "r-rowlock-demo-database/node"
    assert secret_of(pods[WORKER]) == ("r-rowlock-demo-database", "node")
    database = environment(pods["Deployment/r-rowlock-demo-database"])
    assert database["READER_DSN"] == "r-rowlock-demo-database/reader"
    service = chart.one("Service", "demo-database")
    assert ports_of(chart, service["spec"]["selector"]) == ["postgresql"]


def pasted(notes: str) -> Object:
    """The BatchJob that the notes print for a shell."""
    batchjob: Object = yaml.safe_load(notes.split("<<'EOF'\n")[1].split("\nEOF", maxsplit=1)[0])
    return batchjob


def test_the_notes_print_a_batchjob_of_the_demonstration(helm: Helm) -> None:
    batchjob = pasted(helm.notes(DEMO))
    assert batchjob["spec"]["job"] == "flights.settle"
    assert batchjob["metadata"]["namespace"] == "jobs"


def test_the_notes_print_a_batchjob_of_the_user_s(helm: Helm) -> None:
    mine = {"job": "invoices", "parameters": {"month": 3}, "pool": "slow"}
    batchjob = pasted(helm.notes(with_values(BASE, tests={"batchJob": mine})))
    assert batchjob["spec"] == mine


def test_the_notes_add_up_the_connections(helm: Helm) -> None:
    """2 nodes with 3 + 4 each, 10 with 3 + 2, 2 operators with 2, 1 exporter."""
    pools = {
        "default": {"replicas": 2, "slots": 4},
        "wide": {"autoscaling": {"type": "keda", "maxReplicas": 10}},
    }
    values = with_values(BASE, workers={"slots": 2, "pools": pools}, operator={"replicas": 2})
    assert "at most 69 connections" in helm.notes(values)
    less = with_values(values, operator={"enabled": False}, exporter={"enabled": False})
    assert "at most 64 connections" in helm.notes(less)


def test_the_notes_say_which_secrets_another_namespace_needs(helm: Helm) -> None:
    values = with_values(
        BASE,
        database={"tls": {"caSecret": {"name": "pg-ca"}}},
        imagePullSecrets=[{"name": "registry"}],
    )
    assert "(pg-app, pg-ca, registry)" in helm.notes(values)


def test_helm_test_runs_a_batchjob(render: Any) -> None:
    chart = render(DEMO)
    pod = chart.one("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    said = environment(pod)
    assert json.loads(said["SPEC"])["job"] == "flights.settle"
    assert (said["EXPECT"], said["NAMESPACE"]) == ("Finished", "jobs")
    compile(chart.one("ConfigMap", "test")["data"]["run.py"], "run.py", "exec")
    assert render(with_values(DEMO, tests={"enabled": False})).of("Pod") == []


def test_helm_test_without_a_job_waits_for_the_operator_s_refusal(render: Any) -> None:
    assert environment(render(BASE).one("Pod"))["EXPECT"] == "UnknownJob"
