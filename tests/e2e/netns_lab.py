"""Hosts that can be cut off: network namespaces on one bridge, which lives in a namespace of its own.

Nothing of the machine's own network is touched. Host ``n`` (from 1) has 10.77.0.n/24 on eth0 and a loopback of its own::

    with NetLab(3) as lab:
        subprocess.run([*lab.enter(1), "ping", "-c1", lab.address(2)])
        lab.blackhole(2)                 # packets vanish, no carrier is lost, nobody is told
        lab.inside(3, lambda: socket.create_connection((lab.address(1), 80)))

Call ``why_not()`` first: it says why there can be no lab here, as the reason of a skip.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_PREFIX = "kvlab"
_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_numbers = itertools.count()
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why there can be no lab on this machine, ``None`` when there can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in ("ip", "bridge", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)} (iproute2, util-linux)"
    name = f"{_PREFIX}-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        tried = subprocess.run(
            ["ip", "-n", name, "link", "add", "br0", "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
        )
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


def why_no_filter() -> str | None:
    """Why single directions and random packets cannot be dropped, ``None`` when they can."""
    if shutil.which("nft") is None:
        return "needs nft (nftables)"
    tried = subprocess.run(
        ["nft", "-c", "add table inet kvlab-try"], capture_output=True, text=True, check=False
    )
    return None if tried.returncode == 0 else f"nft does not work here: {tried.stderr.strip()}"


class NetLab:
    """``count`` hosts, until ``close``. Faults: ``cut``, ``blackhole``, ``deafen``, ``lose``; ``heal`` ends them all."""

    def __init__(self, count: int) -> None:
        self._name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._count = count
        self._switch = f"{self._name}-sw"

    def __enter__(self) -> Self:
        _remove_leftovers()
        try:
            self._up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _up(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for number in self.hosts:
            host, port = self.namespace(number), f"p{number}"
            _ip("netns", "add", host)
            link = ("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port)
            _ip(*link, "netns", self._switch)
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", host, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", host, "link", "set", "eth0", "up")
            _ip("-n", host, "link", "set", "lo", "up")

    def close(self) -> None:
        """Removes the namespaces. Processes in them keep running, without a network."""
        for name in (*(self.namespace(number) for number in self.hosts), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    # -- hosts -----------------------------------------------------------------------------------

    @property
    def hosts(self) -> range:
        """Their numbers."""
        return range(1, self._count + 1)

    def namespace(self, number: int) -> str:
        """The name under which ``ip netns`` knows the host."""
        return f"{self._name}-{number}"

    def address(self, number: int) -> str:
        """The host's address."""
        return f"10.77.0.{number}"

    def enter(self, number: int) -> list[str]:
        """What to put in front of a command so that it runs on this host."""
        return ["nsenter", f"--net={_NAMESPACES / self.namespace(number)}", "--"]

    def inside(self, number: int, function: Callable[[], T]) -> T:
        """Calls the function in a thread on this host: sockets that it makes belong there."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                with (_NAMESPACES / self.namespace(number)).open("rb") as namespace:
                    if _libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                outcome.append((function(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        value, error = outcome[0]
        if error is not None:
            raise error
        result: T = value
        return result

    # -- faults ----------------------------------------------------------------------------------

    def cut(self, number: int) -> None:
        """The cable is pulled: the host loses its carrier."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "down")

    def blackhole(self, number: int) -> None:
        """Nothing reaches the host or leaves it, and nobody is told."""
        self._port_state(number, 0)

    def deafen(self, number: int, to: int) -> None:
        """This host hears nothing of the other any more; the other still hears it."""
        source = self.address(to)
        # ARP too, or the neighbour would be declared lost in both directions.
        self._filter(number, f"add rule netdev kvlab in ip saddr {source} drop")
        self._filter(number, f"add rule netdev kvlab in arp saddr ip {source} drop")

    def lose(self, number: int, percent: int) -> None:
        """So many of the packets that reach the host are lost, at random."""
        rule = f"add rule netdev kvlab in ip protocol tcp numgen random mod 100 < {percent} drop"
        self._filter(number, rule)

    def heal(self, number: int) -> None:
        """Ends every fault of this host."""
        _ip("-n", self._switch, "link", "set", f"p{number}", "up")
        self._port_state(number, 3)
        if shutil.which("nft") is not None:
            forget = [*self.enter(number), "nft", "delete table netdev kvlab"]
            subprocess.run(forget, capture_output=True, check=False)

    def _port_state(self, number: int, state: int) -> None:
        command = ["bridge", "link", "set", "dev", f"p{number}", "state", str(state)]
        _run(["nsenter", f"--net={_NAMESPACES / self._switch}", "--", *command])

    def _filter(self, number: int, rule: str) -> None:
        text = (
            "add table netdev kvlab\n"
            "add chain netdev kvlab in { type filter hook ingress device eth0 priority 0; }\n"
            f"{rule}\n"
        )
        _run([*self.enter(number), "nft", "-f", "-"], text)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(argv: list[str], text: str | None = None) -> None:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _remove_leftovers() -> None:
    """Namespaces of test processes that were killed."""
    with contextlib.suppress(OSError):
        for path in _NAMESPACES.iterdir():
            found = re.fullmatch(rf"{_PREFIX}-(\d+)-.*", path.name)
            if found and not Path(f"/proc/{found[1]}").exists():
                subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)
