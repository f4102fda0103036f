"""What is in manifests/ applies as it stands, and gives the operator no more than it needs."""

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.support.cluster import (
    MANIFESTS,
    ROOT,
    SECRET,
    Kubectl,
    Object,
    account_kubeconfig,
    as_text,
    from_yaml,
    kustomization,
)
from tests.support.waiting import wait_until

FOLDERS = sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml"))
SAMPLES = sorted(
    path for path in (MANIFESTS / "samples").glob("*.yaml") if path.stem != "kustomization"
)
INSTALLATIONS = ("cluster-wide", "namespaced", "demo")

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
RESOURCES = (
    "batchjobs.batch.rowlock.dev",
    "batchjobs.batch.rowlock.dev/status",
    "batchjobs.batch.rowlock.dev/finalizers",
    "jobs.batch",
    "jobs.batch/status",
    "pods",
    "pods/log",
    "pods/exec",
    "events",
    "secrets",
    "configmaps",
    "serviceaccounts",
    "deployments.apps",
    "roles.rbac.authorization.k8s.io",
    "leases.coordination.k8s.io",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(MANIFESTS))


def objects_of_the_namespace(kubectl: Kubectl, folder: Path) -> list[Object]:
    """The objects of a kustomization but those that belong to the whole cluster."""
    whole = {"Namespace", "CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding"}
    return [one for one in kubectl.build(folder) if one["kind"] not in whole]


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_kustomization_applies(namespace: Kubectl, tmp_path: Path, folder: Path) -> None:
    assert namespace.namespace is not None
    # In a namespace of the test's own, whatever namespace the kustomization names.
    mine = kustomization(tmp_path / "mine", folder, namespace=namespace.namespace)
    for one in namespace.build(mine):
        if one["kind"] != "Namespace":
            text = json.dumps(one)
            namespace.run("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=text)
    for one in objects_of_the_namespace(namespace, mine):
        if one["kind"] == "Deployment":
            one["spec"]["replicas"] = 0  # it is about the objects, not about what would run
        namespace.apply(one)


@pytest.mark.parametrize("folder", INSTALLATIONS)
def test_an_installation_says_nothing_that_the_server_warns_about(
    namespace: Kubectl, tmp_path: Path, folder: str
) -> None:
    assert namespace.namespace is not None
    mine = kustomization(tmp_path / "mine", MANIFESTS / folder, namespace=namespace.namespace)
    for one in objects_of_the_namespace(namespace, mine):
        ended = namespace.run(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
            stdin=json.dumps(one),
        )
        # Above all of pod security: the test's namespace is as strict as ours.
        assert ended.stderr == "", one["kind"]


@pytest.mark.parametrize("path", SAMPLES, ids=name_of)
def test_a_sample_is_accepted(namespace: Kubectl, path: Path) -> None:
    namespace.run("apply", "-f", str(path))
    (sample,) = from_yaml(path.read_text())
    stored = namespace.get("batchjob", sample["metadata"]["name"])
    assert stored["spec"].items() >= sample["spec"].items()


def test_every_sample_is_in_the_kustomization_of_samples(kubectl: Kubectl) -> None:
    names = {one["metadata"]["name"] for one in kubectl.build(MANIFESTS / "samples")}
    assert names == {
        one["metadata"]["name"] for path in SAMPLES for one in from_yaml(path.read_text())
    }


def test_the_image_of_an_overlay_is_that_of_workers_and_masters(kubectl: Kubectl) -> None:
    built = kubectl.build(MANIFESTS / "demo")
    (pools,) = (one for one in built if one["metadata"]["name"] == "rowlock-pools")
    (worker,) = (
        one
        for one in built
        if one["metadata"]["name"] == "rowlock-worker" and one["kind"] == "Deployment"
    )
    (pool,) = from_yaml(pools["data"]["pools.yaml"])
    images = [
        template["spec"]["containers"][0]["image"]
        for template in (pool["pools"]["default"]["template"], worker["spec"]["template"])
    ]
    assert images == ["rowlock-demo:0.1.0"] * 2


def test_the_secret_with_the_example_is_in_no_kustomization(kubectl: Kubectl) -> None:
    (example,) = from_yaml((MANIFESTS / "secret.example.yaml").read_text())
    assert example["metadata"]["name"] == SECRET
    for folder in FOLDERS:
        if name_of(folder) != "demo":
            assert [one for one in kubectl.build(folder) if one["kind"] == "Secret"] == []


# -- rights ------------------------------------------------------------------------------------


def documented_rights() -> dict[str, set[str]]:
    """The table of the operator's rights in docs/kubernetes.md: verbs by resource."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    section = page.split("### Rights of the operator")[1].split("\n#")[0]
    rows = re.findall(r"^\| `([a-z./]+)` \| ([a-z, ]+) \|", section, re.MULTILINE)
    return {resource: set(verbs.split(", ")) for resource, verbs in rows}


def rights(account: Kubectl) -> dict[str, set[str]]:
    """What the API server says that somebody may do in a namespace, of all that is in question."""
    questions = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"namespace": account.namespace, "verb": verb, **what}},
        }
        for what, verb in itertools.product(map(attributes, RESOURCES), VERBS)
    ]
    form = 'jsonpath={.status.allowed}{"\\n"}'
    said = account.run("create", "-o", form, "-f", "-", stdin=as_text(*questions)).stdout
    allowed: dict[str, set[str]] = {}
    pairs = itertools.product(RESOURCES, VERBS)
    for (resource, verb), answer in zip(pairs, said.split(), strict=True):
        if answer == "true":
            allowed.setdefault(resource, set()).add(verb)
    return allowed


def attributes(resource: str) -> dict[str, str]:
    """`jobs.batch/status` as a review asks about it."""
    whole, _, sub = resource.partition("/")
    plain, _, group = whole.partition(".")
    return {"resource": plain, "group": group, "subresource": sub}


def test_the_operators_rights_are_the_documented_ones(namespace: Kubectl, tmp_path: Path) -> None:
    assert namespace.namespace is not None
    folder = kustomization(
        tmp_path / "mine", MANIFESTS / "rbac" / "namespaced", namespace=namespace.namespace
    )
    namespace.run("apply", "-k", str(folder))
    config = account_kubeconfig(namespace, "rowlock-operator", tmp_path / "kubeconfig")
    account = Kubectl(namespace=namespace.namespace, kubeconfig=config)
    assert rights(account) == documented_rights()
    assert rights(account.within("default")) == {}


def test_the_rights_for_the_cluster_are_the_same_rules(kubectl: Kubectl) -> None:
    (role,) = (
        one for one in kubectl.build(MANIFESTS / "rbac" / "namespaced") if one["kind"] == "Role"
    )
    (whole,) = (
        one for one in kubectl.build(MANIFESTS / "rbac" / "cluster") if one["kind"] == "ClusterRole"
    )
    assert whole["rules"] == role["rules"]


@pytest.mark.parametrize(
    "role,verb,allowed",
    [
        ("view", "list", True),
        ("view", "create", False),
        ("edit", "create", True),
        ("edit", "patch", True),
        ("admin", "delete", True),
    ],
)
def test_people_get_their_rights_from_the_roles_that_every_cluster_has(
    kubectl: Kubectl, namespace: Kubectl, role: str, verb: str, allowed: bool
) -> None:
    kubectl.run("apply", "-k", str(MANIFESTS / "rbac" / "users"))
    namespace.run("create", "rolebinding", "somebody", f"--clusterrole={role}", "--user=somebody")

    def may() -> bool:
        said = namespace.run("auth", "can-i", verb, "batchjobs", "--as=somebody", check=False)
        return said.stdout.strip() == "yes"

    # A controller adds our rules to those roles a moment later.
    wait_until(
        lambda: "rowlock" in namespace.text("get", "clusterrole", role, "-o", "yaml"),
        seconds=30,
        what="the roles are aggregated",
        every_seconds=0.2,
    )
    assert may() == allowed
