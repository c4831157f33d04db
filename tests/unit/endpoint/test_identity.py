from __future__ import annotations

import os
import socket
import subprocess
import sys

from kvtierd.endpoint import identity
from kvtierd.endpoint.clients import Identity


def test_finds_the_process_at_the_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = (
            "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
        )
        child = subprocess.Popen([sys.executable, "-c", script, str(server.getsockname()[1])])
        server.settimeout(10)
        connection, remote = server.accept()
        with connection:
            found, name = identity.find_client(remote, connection.getsockname())
            assert found.pid == child.pid
            assert found == identity.identity_of(child.pid)
            assert name.startswith("python")
            assert identity.find_client(remote, connection.getsockname(), [child.pid])[0] == found
            assert identity.is_alive(found)
            assert not identity.is_alive(Identity(found.pid, found.start_ticks + 1))
        child.wait(10)
    assert not identity.is_alive(found)


def test_a_stranger_is_known_by_its_address_alone() -> None:
    found, name = identity.find_client(("192.0.2.1", 40000), ("127.0.0.1", 5000))
    assert found == Identity(address="192.0.2.1")
    assert identity.is_alive(found)
    assert name == ""


def test_nonsense_is_survived() -> None:
    assert identity.socket_inode(("not an address", 1), ("127.0.0.1", 2)) is None
    assert identity.owner_of_inode(1) is None
    assert identity.identity_of(2**22 + 5) is None
    assert identity.process_name(2**22 + 5) == ""


def test_names_the_owner_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"(pid {os.getpid()})" in identity.port_owner(server.getsockname()[1])
    assert identity.port_owner(1) == ""
