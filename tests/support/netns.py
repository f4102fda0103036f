"""A machine of its own for a node, as far as the network goes: what is lost is lost for the server as well.

    with Machine() as machine:
        server = Cluster.private(machine.host)
        ...
        one = fleet.node("one", machine=machine)
        machine.vanish()

It is a network namespace, joined to this one by a pair of virtual interfaces. `PgProxy.drop` takes the packets of
a client away before it; the server's own connection goes on to the proxy, which lives. Here the server talks to
somebody who is not there any more, and has to find that out. Needs root on Linux; traffic stays on this machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Final, Self

import pytest

from tests.support.tools import unavailable

# 198.18.0.0/15 is for such tests (RFC 2544): no real network has it.
_NETWORK: Final = 198 << 24 | 18 << 16
_ROOM: Final = 1 << 17
_NOBODY: Final = "02:00:00:00:00:01"  # a hardware address that no interface has
_numbers = itertools.count()


class Machine:
    """A network namespace that reaches this machine at one address. Use it in a `with`.

    Who may not make one gets the test skipped; on a build server that is root it fails.
    """

    def __init__(self) -> None:
        """Choose names and addresses: by the process, so that runs beside each other have their own."""
        if os.geteuid() != 0:
            pytest.skip("a network of a test's own needs root")
        ip = shutil.which("ip", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
        if ip is None:
            unavailable("ip is missing: install iproute2")
        self._ip: Final = ip
        number = next(_numbers)
        self.name = f"rowlock-{os.getpid()}-{number}"
        self._link = f"rl{os.getpid()}n{number}"
        first = _NETWORK + 4 * (4 * os.getpid() + number) % _ROOM
        self.host, self.address = (".".join(map(str, (first + n).to_bytes(4))) for n in (1, 2))
        """Address of this machine in that network, and of the one that may vanish."""

    def __enter__(self) -> Self:
        try:
            self._run(self._ip, "netns", "add", self.name)
            self._run(
                *(self._ip, "link", "add", self._link, "type", "veth"),
                *("peer", "name", "eth0", "netns", self.name),
            )
            self._run(self._ip, "address", "add", f"{self.host}/30", "dev", self._link)
            self._run(self._ip, "link", "set", self._link, "up")
            self._run(*self.inside, self._ip, "address", "add", f"{self.address}/30", "dev", "eth0")
            for link in ("lo", "eth0"):
                self._run(*self.inside, self._ip, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            self.close()
            unavailable(
                f"no network of a test's own: {' '.join(error.cmd)}: {error.stderr.strip()}"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take away whatever is there of it. Processes inside keep a network without a way out."""
        for what in (("link", "delete", self._link), ("netns", "delete", self.name)):
            subprocess.run([self._ip, *what], check=False, capture_output=True)

    @property
    def inside(self) -> list[str]:
        """What a command line begins with, to be run there. The process is that of the command."""
        return [self._ip, "netns", "exec", self.name]

    def vanish(self) -> None:
        """Lose every packet in both directions, without a word to anybody, until `come_back`."""
        self._neighbours("replace", "lladdr", _NOBODY, "nud", "permanent")

    def come_back(self) -> None:
        """Be in the network again."""
        self._neighbours("delete")

    def _neighbours(self, what: str, *how: str) -> None:
        # Each side sends its packets to nobody. No side learns of it, as it would of a missing route.
        neighbour = (self._ip, "neighbour", what)
        self._run(*neighbour, self.address, "dev", self._link, *how)
        self._run(*self.inside, *neighbour, self.host, "dev", "eth0", *how)

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)
