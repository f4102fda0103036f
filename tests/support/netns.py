"""A network namespace of a test's own, joined to this machine by one pair of virtual cables.

    with Island() as island, PgProxy(dsn, host=island.host) as proxy:
        node = fleet.node("cut", inside=island, ROWLOCK_DSN=proxy.dsn)
        island.drop(proxy.port)
        ...

What runs inside reaches this machine by `host`, and nothing else: there is no way further. Only root
can make one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from types import TracebackType
from typing import Final, Self

import pytest

_PROGRAMS: Final = ("ip", "iptables")


class Island:
    """A namespace with two addresses: ours and its own. Use `with`."""

    def __init__(self) -> None:
        """Make it.

        The test is skipped for whoever is not root; but root in CI must have the programs.
        """
        missing = [program for program in _PROGRAMS if shutil.which(program) is None]
        if os.geteuid() != 0:
            pytest.skip("only root can make a network namespace")
        if missing and "CI" not in os.environ:
            pytest.skip(f"needs {', '.join(missing)} (Debian: iproute2, iptables)")
        assert not missing, f"CI lacks {missing}"
        tag = secrets.token_hex(4)
        self.name = f"rowlock-{tag}"
        self._cable, end = f"rl{tag}", f"ri{tag}"
        # One of 16 384 networks of four addresses, so that two runs of the tests rarely meet.
        number = secrets.randbelow(1 << 14) * 4
        network = f"10.213.{number >> 8}.{number & 255}"
        base, _, last = network.rpartition(".")
        self.host = f"{base}.{int(last) + 1}"
        """This machine's address, as seen from inside."""
        self.address = f"{base}.{int(last) + 2}"
        """The address of what runs inside, as seen from this machine."""
        _run("ip", "netns", "add", self.name)
        try:
            _run(
                *("ip", "link", "add", self._cable, "type", "veth"),
                *("peer", "name", end, "netns", self.name),
            )
            _run("ip", "address", "add", f"{self.host}/30", "dev", self._cable)
            _run("ip", "link", "set", self._cable, "up")
            self._inside("ip", "link", "set", "lo", "up")
            self._inside("ip", "address", "add", f"{self.address}/30", "dev", end)
            self._inside("ip", "link", "set", end, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def argv(self) -> list[str]:
        """What to write before a command that is to run inside; it becomes that very process."""
        return ["ip", "netns", "exec", self.name]

    def drop(self, port: int) -> None:
        """Lose every packet to and from a port of this machine, without a word, until `heal`."""
        self._inside("iptables", "-A", "OUTPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")
        self._inside("iptables", "-A", "INPUT", "-p", "tcp", "--sport", str(port), "-j", "DROP")

    def heal(self) -> None:
        """Lose nothing any more."""
        self._inside("iptables", "-F")

    def close(self) -> None:
        """Take it away, with the cable; what still runs inside is cut off."""
        subprocess.run(["ip", "link", "delete", self._cable], check=False, capture_output=True)
        _run("ip", "netns", "delete", self.name)

    def _inside(self, *command: str) -> None:
        _run(*self.argv, *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
