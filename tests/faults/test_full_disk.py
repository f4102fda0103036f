"""The disk of the database is full for a while."""

import os
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from rowlock.errors import Unavailable
from tests.support.fault_jobs import part, parts, step
from tests.support.fleet import Fleet, eventually
from tests.support.postgres import Cluster

SIZE_MB = 200


@contextmanager
def small_disk() -> Generator[Path]:
    """A file system of its own. Only root may mount one."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    folder = Path(tempfile.mkdtemp(prefix="disk-"))
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m,mode=755", "tmpfs", str(folder)]
        subprocess.run(mount, check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        folder.rmdir()


@pytest.fixture
def disk() -> Generator[Path]:
    with small_disk() as folder:
        yield folder


@pytest.fixture
def fleet(disk: Path) -> Generator[Fleet]:
    options = {"min_wal_size": "32MB", "max_wal_size": "48MB"}
    cluster = Cluster.private(folder=disk / "server", options=options)
    try:
        cluster.prepare()
        with Fleet(cluster.create()) as fleet:
            yield fleet
    finally:
        cluster.close()


def fill(disk: Path) -> Path:
    """Take all the space there is; the file that holds it."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as taken:
        for size in (1 << 20, 4096):
            try:
                while True:
                    taken.write(bytes(size))
            except OSError:
                continue
    return file


def crash_for_want_of_log(fleet: Fleet) -> None:
    """Have the server want a new segment of its log until it gives up, as it does by itself some time."""
    write = "SELECT pg_logical_emit_message(true, 'a', 'b'), pg_switch_wal()"
    try:
        with fleet.database.connect() as db:
            for _ in range(10):
                db.execute(write)
    except psycopg.OperationalError:
        return
    raise AssertionError("the server found space for ten segments")


def bring_back(fleet: Fleet) -> None:
    """Start the server where it could not start by itself."""

    def answers() -> bool:
        try:
            with fleet.database.connect():
                return True
        except psycopg.OperationalError:
            pass
        try:
            assert fleet.database.server.pid
        except Unavailable:
            fleet.database.server.up()
        return False

    eventually(answers, "the server runs again")


def test_a_full_disk_costs_no_attempt_and_no_node(fleet: Fleet, disk: Path) -> None:
    """The disk fills up while attempts run: business rows cannot be written, then the server crashes and
    cannot start, for longer than the lease. When there is space again, results that were kept are
    written, work that was frozen goes on, what met the full disk runs again without a failure, and
    nobody was removed. (Elsewhere work is marked failed, or handed to others in a mass. Reported as
    jobseek#6117, NixOS/infra#534, openlibrary#13549 and dokku-postgres#150.)"""
    nodes = [fleet.node(name, slots=3) for name in ("one", "two")]
    ends = fleet.request(
        "fault.once", parts=parts(2, step("wait", fleet.path("full")), prefix="ends")
    )
    run = fleet.request(
        parts=[
            *parts(2, step("tick", fleet.path("go")), prefix="works"),
            part("writes", step("wait", fleet.path("write")), step("rows", 3000)),
        ]
    )
    for key in ("ends0", "ends1", "works0", "works1", "writes"):
        fleet.wait_started(key)
    size = fleet.database.cluster.log_size()

    filler = fill(disk)
    fleet.open("write")
    eventually(
        lambda: "could not extend file" in fleet.database.cluster.log_since(size),
        "business rows find no space",
    )
    crash_for_want_of_log(fleet)
    fleet.open("full")
    for key in ("ends0", "ends1"):
        fleet.wait_ledger("end", key)
    for node in nodes:
        node.wait_event("lease_ended")
    filler.unlink()
    bring_back(fleet)

    fleet.open("go")
    fleet.wait(ends)
    fleet.wait(run)
    assert {row.failures for row in (*fleet.rows_of(run), *fleet.rows_of(ends))} == {0}
    assert all(fleet.partition(key).claims == 1 for key in ("ends0", "ends1", "works0", "works1"))
    assert fleet.value("SELECT count(*) FROM fleet.effects WHERE key = 'writes'") == 3000
    assert not fleet.db_events("node_removed")
    assert all(len(node.incarnations) == 1 for node in nodes)
