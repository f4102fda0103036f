"""The Kubernetes cluster that tests run on, and what they do in it.

Which cluster is said from outside, by variables: any that KUBECONFIG leads to, made by kind or by
anything else. Nothing here starts or stops one.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, get_args

import yaml

from tests.support.ports import free_port
from tests.support.postgres import Database
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
MANIFESTS: Final = ROOT / "manifests"

Level = Literal["apiserver", "nodes"]
Object = dict[str, Any]
"""A Kubernetes object as its API gives it; its shape is Kubernetes' business."""

SECRET: Final = "rowlock-database"
"""The Secret with the connection strings, as the manifests name it."""
COMMAND_SECONDS: Final = 60.0


class BedError(Exception):
    """The environment does not say enough about the cluster, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """What the environment says about the cluster under test."""

    level: Level
    """`ROWLOCK_CLUSTER_LEVEL`. apiserver: objects and controllers, but pods stay Pending. nodes:
    pods run, as they do on kind."""
    database_address: str
    """`ROWLOCK_CLUSTER_DB_ADDRESS`: an address of this machine that pods reach, where the tests'
    PostgreSQL listens."""
    node_image: str
    """`ROWLOCK_CLUSTER_NODE_IMAGE`: node/Dockerfile, built and known to all nodes."""
    operator_image: str
    """`ROWLOCK_CLUSTER_OPERATOR_IMAGE`: operator/Dockerfile."""
    demo_image: str
    """`ROWLOCK_CLUSTER_DEMO_IMAGE`: manifests/demo/Dockerfile."""
    fault: tuple[str, ...]
    """`ROWLOCK_CLUSTER_FAULT`: the command that breaks things, empty where there is none. Its verbs:
    `node-crash I`, `node-start I`, `node-partition I on|off`, `pod-freeze NS POD on|off`,
    `pod-kill9 NS POD`, `pod-cut NS POD PORT on|off`."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Self:
        """Read it.

        Raises:
            BedError: Something is missing or wrong; all of it is listed.
        """
        level = env.get("ROWLOCK_CLUSTER_LEVEL", "")
        address = env.get("ROWLOCK_CLUSTER_DB_ADDRESS", "")
        problems: list[str] = []
        if not env.get("KUBECONFIG"):
            problems.append("KUBECONFIG is not set: name the cluster to test on")
        if level not in get_args(Level):
            problems.append(f"ROWLOCK_CLUSTER_LEVEL={level} must be one of {get_args(Level)}")
        if level == "nodes" and not address:
            problems.append("ROWLOCK_CLUSTER_DB_ADDRESS is not set: pods cannot find the database")
        if problems:
            raise BedError("; ".join(problems))
        return cls(
            level="nodes" if level == "nodes" else "apiserver",
            database_address=address or "127.0.0.1",
            node_image=env.get("ROWLOCK_CLUSTER_NODE_IMAGE", "localhost/rowlock-node:test"),
            operator_image=env.get(
                "ROWLOCK_CLUSTER_OPERATOR_IMAGE", "localhost/rowlock-operator:test"
            ),
            demo_image=env.get("ROWLOCK_CLUSTER_DEMO_IMAGE", "localhost/rowlock-demo:test"),
            fault=tuple(shlex.split(env.get("ROWLOCK_CLUSTER_FAULT", ""))),
        )

    def break_something(self, *words: str) -> None:
        """Run the fault command; only for tests marked `fault`."""
        subprocess.run([*self.fault, *words], check=True, timeout=COMMAND_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """kubectl, which speaks to the cluster as its user does. With a namespace it stays in there."""

    namespace: str | None = None
    kubeconfig: Path | None = None
    """Whose rights it has; None: those of KUBECONFIG."""

    def run(
        self,
        *words: str,
        stdin: str | None = None,
        check: bool = True,
        seconds: float = COMMAND_SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command.

        Args:
            words: For example "get", "pods".
            stdin: What it reads with `-f -`.
            check: Whether its failure fails the test, with what it said.
            seconds: The longest time it may take.
        """
        where = ["--namespace", self.namespace] if self.namespace else []
        who = ["--kubeconfig", str(self.kubeconfig)] if self.kubeconfig else []
        ended = subprocess.run(
            ["kubectl", *who, *where, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if check and ended.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(words)}: {ended.stderr or ended.stdout}")
        return ended

    def text(self, *words: str) -> str:
        """What a command prints."""
        return self.run(*words).stdout

    def get(self, *words: str) -> Object:
        """An object, or a list of them under `items`.

        Args:
            words: What `kubectl get` takes, for example "batchjob", "nightly".
        """
        found: Object = json.loads(self.text("get", *words, "-o", "json"))
        return found

    def find(self, *words: str) -> Object | None:
        """An object, or None if there is none of that name."""
        text = self.text("get", *words, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def items(self, *words: str) -> list[Object]:
        """The objects of a list."""
        items: list[Object] = self.get(*words)["items"]
        return items

    def apply(self, *objects: Object, server_side: bool = False) -> str:
        """Apply objects; what kubectl prints about them."""
        # A chart that was installed before may own fields of the kind.
        flags = ["--server-side", "--force-conflicts"] if server_side else []
        return self.run("apply", *flags, "-f", "-", stdin=as_text(*objects)).stdout

    def refusal(self, *objects: Object, verb: str = "apply") -> str:
        """Why the API server refuses objects; empty if it takes them."""
        ended = self.run(verb, "-f", "-", stdin=as_text(*objects), check=False)
        return ended.stderr if ended.returncode != 0 else ""

    def patch(self, kind: str, name: str, change: Object, *flags: str) -> None:
        """Merge a change into an object."""
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(change), *flags)

    def set_status(self, kind: str, name: str, status: Object) -> None:
        """Merge a change into an object's status, as its controller does."""
        self.patch(kind, name, {"status": status}, "--subresource=status")

    def wait(self, what: str, condition: str, *, seconds: float = 60.0) -> None:
        """`kubectl wait`.

        Args:
            what: For example "batchjob/nightly".
            condition: For example "condition=Finished".
            seconds: How long.
        """
        self.run("wait", what, f"--for={condition}", f"--timeout={seconds}s", seconds=seconds + 30)

    def delete(self, *words: str) -> None:
        """Delete without waiting for the end."""
        self.run("delete", *words, "--wait=false", "--ignore-not-found")

    def within(self, namespace: str) -> Kubectl:
        """The same in another namespace."""
        return Kubectl(namespace=namespace, kubeconfig=self.kubeconfig)

    def build(self, kustomization: Path) -> list[Object]:
        """The objects of a kustomization."""
        return from_yaml(self.text("kustomize", str(kustomization)))


def as_text(*objects: Object) -> str:
    """Objects as kubectl reads them, one or a list."""
    if len(objects) == 1:
        return json.dumps(objects[0])
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})


def from_yaml(text: str) -> list[Object]:
    """The documents of a file that are not empty."""
    return [document for document in yaml.safe_load_all(text) if document]


def batchjob(name: str, /, **spec: Any) -> Object:
    """A BatchJob to apply.

    Args:
        name: Its name.
        spec: Fields of the spec as the API names them; `job` unless given is flights.settle.
    """
    return {
        "apiVersion": "batch.rowlock.dev/v1alpha1",
        "kind": "BatchJob",
        "metadata": {"name": name},
        "spec": {"job": "flights.settle", **spec},
    }


def condition(batchjob: Object, kind: str) -> Object:
    """One of its conditions; empty while the operator has not written it."""
    conditions: Sequence[Object] = batchjob.get("status", {}).get("conditions", [])
    found = [one for one in conditions if one["type"] == kind]
    return found[0] if found else {}


def becomes(
    kubectl: Kubectl, name: str, kind: str, status: str, reason: str = "", *, seconds: float = 60
) -> Object:
    """Wait until a condition of a BatchJob has this status (and this reason), and return it."""

    def there() -> bool:
        found = condition(kubectl.get("batchjob", name), kind)
        return found.get("status") == status and (not reason or found.get("reason") == reason)

    wait_until(there, seconds=seconds, what=f"{kind}={status} {reason}", every_seconds=0.1)
    return condition(kubectl.get("batchjob", name), kind)


def shows(kubectl: Kubectl, name: str, *, seconds: float = 60, **fields: object) -> Object:
    """Wait until the status of a BatchJob has these fields, and return it."""
    status: Object = {}

    def there() -> bool:
        status.clear()
        status.update(kubectl.get("batchjob", name).get("status", {}))
        return all(status.get(field) == value for field, value in fields.items())

    wait_until(there, seconds=seconds, what=f"{name}: {fields}", every_seconds=0.1)
    return status


# -- what a test installs ----------------------------------------------------------------------


def kustomization(folder: Path, base: Path, *, namespace: str, **more: Any) -> Path:
    """A kustomization that takes in one of ours, as a user's would.

    Args:
        folder: Where to write it.
        base: A folder below manifests/.
        namespace: Where its objects go.
        more: Further fields, for example `images`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        # kustomize takes no absolute path.
        "resources": [os.path.relpath(base.resolve(), folder.resolve())],
        **more,
    }
    (folder / "kustomization.yaml").write_text(json.dumps(content, indent=2))
    return folder


def database_secret(database: Database) -> Object:
    """The Secret with a connection string for each role, as the manifests want it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET},
        "stringData": {
            "owner": database.dsn,
            "node": database.dsn_as("rowlock_node"),
            "operator": database.dsn_as("rowlock_operator"),
            "reader": database.dsn_as("rowlock_reader"),
        },
    }


def operators_of_the_cluster(kubectl: Kubectl) -> list[str]:
    """Namespaces with an operator that watches all others: it would answer to the tests' BatchJobs."""
    label = "app.kubernetes.io/name=rowlock,app.kubernetes.io/component=operator"
    return [
        one["metadata"]["namespace"]
        for one in kubectl.items("deployments", "--all-namespaces", "-l", label)
        for container in one["spec"]["template"]["spec"]["containers"]
        if one["spec"]["replicas"] > 0
        and "ROWLOCK_NAMESPACES" not in {variable["name"] for variable in container.get("env", ())}
    ]


def overlay(folder: Path, base: Path, *, namespace: str, bed: Bed, **more: Any) -> Path:
    """A kustomization as docs/kubernetes.md shows it to users, with the images under test.

    Args:
        folder: Where to write it.
        base: `manifests/namespaced`, or another folder that holds an installation.
        namespace: Where its objects go.
        bed: Names the images.
        more: Further fields, for example `patches`.
    """
    images = {
        "my-jobs": bed.demo_image,
        "rowlock-demo": bed.demo_image,
        "rowlock-node": bed.node_image,
        "rowlock-operator": bed.operator_image,
    }
    renamed: list[Object] = []
    for name, image in images.items():
        where, _, tag = image.rpartition(":")
        renamed.append({"name": name, "newName": where, "newTag": tag})
    image_of_the_workers = {
        "source": {
            "kind": "Deployment",
            "name": "rowlock-worker",
            "fieldPath": "spec.template.spec.containers.[name=rowlock].image",
        },
        "targets": [
            {
                "select": {"kind": "ConfigMap", "name": "rowlock-pools"},
                "fieldPaths": ["data.[pools.yaml]"],
                "options": {"delimiter": '"', "index": 1},
            }
        ],
    }
    return kustomization(
        folder,
        base,
        namespace=namespace,
        images=renamed,
        replacements=[image_of_the_workers],
        **more,
    )


def install(
    kubectl: Kubectl, bed: Bed, database: Database, folder: Path, *, workers: int = 2
) -> None:
    """Install everything into one namespace, by `kubectl apply -k`, and wait until it is ready.

    Args:
        kubectl: In the namespace.
        bed: Names the images.
        database: Where the migrations, the workers and the operator connect to.
        folder: A folder for this call alone.
        workers: How many nodes the pool has.
    """
    assert kubectl.namespace is not None
    kubectl.apply(database_secret(database))
    mine = overlay(
        folder,
        MANIFESTS / "namespaced",
        namespace=kubectl.namespace,
        bed=bed,
        replicas=[{"name": "rowlock-worker", "count": workers}],
    )
    kubectl.run("apply", "--server-side", "-k", str(mine))
    kubectl.wait("job/rowlock-migrate", "condition=Complete", seconds=120)
    kubectl.run("rollout", "status", "deployment", "--timeout=120s", seconds=150)


def account_kubeconfig(kubectl: Kubectl, account: str, path: Path) -> Path:
    """Write a kubeconfig with a service account's own rights, for programs outside the cluster.

    Args:
        kubectl: In the namespace of the account.
        account: Name of the service account.
        path: The file to write.
    """
    config = json.loads(kubectl.text("config", "view", "--raw", "--minify", "-o", "json"))
    token = kubectl.text("create", "token", account, "--duration=2h").strip()
    config["users"] = [{"name": account, "user": {"token": token}}]
    config["contexts"] = [
        {
            "name": account,
            "context": {
                "cluster": config["clusters"][0]["name"],
                "user": account,
                "namespace": kubectl.namespace,
            },
        }
    ]
    config["current-context"] = account
    path.write_text(json.dumps(config))
    path.chmod(0o600)
    return path


@dataclass(slots=True)
class OperatorProcess:
    """An operator outside the cluster, with the rights of its service account and nothing else."""

    process: subprocess.Popen[bytes]
    port: int
    """Of /livez, /readyz and /metrics on 127.0.0.1."""
    log_path: Path

    @property
    def pid(self) -> int:
        """For signals."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text(errors="replace")

    def answers(self, path: str) -> bool:
        """Whether a path, for example "/readyz", is served with 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as reply:
                status: int = reply.status
                return status == 200
        except (urllib.error.URLError, OSError):
            return False

    def metrics(self) -> str:
        """The text of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as reply:
            text: str = reply.read().decode()
            return text

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        (line,) = [one for one in self.metrics().splitlines() if one.startswith(f"{name} ")]
        return float(line.split()[1])

    def ready(self, seconds: float = 90.0) -> Self:
        """Wait until it is ready; fail with its log if it ends before that."""

        def there() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the operator ended: {self.log[-4000:]}")
            return self.answers("/readyz")

        wait_until(there, seconds=seconds, what="operator ready", every_seconds=0.05)
        return self

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM, as the kubelet sends it; its exit status."""
        self.process.terminate()
        return self.process.wait(seconds)


@dataclass(slots=True)
class Operators:
    """Starts operators for one test and ends them with it."""

    kubectl: Kubectl
    """In the namespace of the test, with the rights of an administrator."""
    dsn: str
    """Of the database, as rowlock_operator."""
    kubeconfig: Path
    """Of the operator's service account."""
    folder: Path
    cluster: str = field(default_factory=lambda: f"test-{secrets.token_hex(3)}")
    """The name that this cluster has in the database."""
    started: list[OperatorProcess] = field(default_factory=list[OperatorProcess])

    @classmethod
    def inside(cls, kubectl: Kubectl, database: Database, folder: Path) -> Self:
        """Operators of a cluster of their own with the minimal rights in a namespace, and no others.

        Args:
            kubectl: In the namespace.
            database: Which they use.
            folder: Where they may write.
        """
        assert kubectl.namespace is not None
        folder.mkdir(exist_ok=True)
        rights = kustomization(
            folder / "rights", MANIFESTS / "rbac" / "namespaced", namespace=kubectl.namespace
        )
        kubectl.run("apply", "-k", str(rights))
        return cls(
            kubectl=kubectl,
            dsn=database.dsn_as("rowlock_operator"),
            kubeconfig=account_kubeconfig(
                kubectl, "rowlock-operator", folder / "operator.kubeconfig"
            ),
            folder=folder,
        )

    def start(self, *, ready: bool = True, **environment: str) -> OperatorProcess:
        """Start one more.

        Args:
            ready: Whether to wait until it says that it is.
            environment: Settings, beside those that the kit gives or instead of them.
        """
        port = free_port()
        path = self.folder / f"operator-{len(self.started) + 1}.log"
        env = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "ROWLOCK_DSN": self.dsn,
            "ROWLOCK_CLUSTER": self.cluster,
            "ROWLOCK_NAMESPACES": self.kubectl.namespace or "",
            "ROWLOCK_POOLS_FILE": str(MANIFESTS / "operator" / "pools.yaml"),
            "ROWLOCK_HTTP_PORT": str(port),
            **environment,
        }
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "rowlock_operator"],
                env=env,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        one = OperatorProcess(process, port, path)
        self.started.append(one)
        return one.ready() if ready else one

    def close(self) -> None:
        """End all of them."""
        for one in self.started:
            one.kill()


@contextmanager
def temporary_namespace(kubectl: Kubectl, name: str) -> Generator[Kubectl]:
    """A namespace under the strictest pod security, taken away afterwards without waiting."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted", "rowlock-test": "true"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    try:
        yield kubectl.within(name)
    finally:
        kubectl.delete("namespace", name)
