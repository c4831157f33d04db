from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.errors import HostError
from kvtierd.host import ports
from kvtierd.host.network import parse_listeners, read_nics, read_ports
from kvtierd.host.ports import check_ports, find_owner, require_ports
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import Nic, PortOwner

from .tree import plant

TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1388 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 31 1 0 100 0 0 10 0
   1: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 32 1 0 100 0 0 10 0
   2: 0100007F:D431 0100007F:1388 01 00000000:00000000 00:00000000 00000000     0        0 33 1 0 20 4 30 10 -1
garbage
"""
TCP6 = """  sl  local_address                         remote_address                        st
   0: 00000000000000000000000001000000:1770 00000000000000000000000000000000:0000 0A 00000000:00000000
"""


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_free_port() -> None:
    port = free_port()
    (check,) = check_ports([("127.0.0.1", port)])
    assert (check.free, check.reason) == (True, "")
    require_ports([("127.0.0.1", port)])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_names_its_owner(taken: int, address: str) -> None:
    (check,) = check_ports([(address, taken)])
    assert not check.free
    assert check.owner is not None
    assert check.owner.pid == os.getpid()
    assert f"{address}:{taken} is taken by " in check.reason
    assert f"(pid {os.getpid()})" in check.reason


def test_requiring_names_all_that_are_taken(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        second = other.getsockname()[1]
        with pytest.raises(HostError) as caught:
            require_ports([("127.0.0.1", taken), ("127.0.0.1", free_port()), ("127.0.0.1", second)])
    assert caught.value.stable_code == "host.port-taken"
    assert str(taken) in caught.value.message
    assert str(second) in caught.value.message


def test_an_owner_that_may_not_be_seen(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "read_ports", lambda _: (PortOwner(address="127.0.0.1", port=taken),))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (check,) = check_ports([("127.0.0.1", taken)])
    assert "can only be seen as root" in check.reason


def test_a_connection_in_time_wait_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        client = socket.create_connection(address)
        served, _ = server.accept()
        served.close()  # the server's side closes first and waits
        client.close()
    (check,) = check_ports([address])
    assert check.free


@pytest.mark.parametrize(
    ("address", "port", "words"),
    [
        ("203.0.113.7", 5000, "does not have the address"),
        ("not-an-address", 5000, "numeric address"),
        ("127.0.0.1", 70000, "1 to 65535"),
        ("127.0.0.1", 0, "1 to 65535"),
    ],
)
def test_other_reasons(address: str, port: int, words: str) -> None:
    (check,) = check_ports([(address, port)])
    assert not check.free
    assert words in check.reason


def test_which_listener_is_in_the_way() -> None:
    listeners = [PortOwner(address="192.0.2.1", port=5000), PortOwner(address="0.0.0.0", port=8000, pid=4)]
    assert find_owner("127.0.0.1", 5000, listeners) is None
    assert find_owner("0.0.0.0", 5000, listeners) == listeners[0]
    assert find_owner("127.0.0.1", 8000, listeners) == listeners[1]


def test_listeners_of_another_root(tmp_path: Path) -> None:
    view = HostView(plant(tmp_path, {"/proc/net/tcp": TCP, "/proc/net/tcp6": TCP6}))
    assert read_ports(view) == (
        PortOwner(address="127.0.0.1", port=5000),
        PortOwner(address="::1", port=6000),
        PortOwner(address="0.0.0.0", port=8000),
    )
    assert parse_listeners("") == []


def test_interfaces_of_another_root(tmp_path: Path) -> None:
    files = {
        "/sys/class/net/enp1s0/operstate": "up\n",
        "/sys/class/net/enp1s0/speed": "25000\n",
        "/sys/class/net/enp2s0/operstate": "down\n",
        "/sys/class/net/enp2s0/speed": "-1\n",
    }
    assert read_nics(HostView(plant(tmp_path, files))) == (
        Nic(name="enp1s0", speed_mbit=25000),
        Nic(name="enp2s0", up=False),
    )


def test_this_host(taken: int) -> None:
    nics = {nic.name: nic for nic in read_nics(HostView())}
    assert "127.0.0.1" in nics["lo"].addresses
    mine = [owner for owner in read_ports(HostView()) if owner.port == taken]
    assert [(owner.pid, bool(owner.process)) for owner in mine] == [(os.getpid(), True)]
