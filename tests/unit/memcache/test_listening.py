from __future__ import annotations

import os
import socket
import subprocess
import sys

from kvtierd.memcache.listening import listening_addresses

CHILD = """
import socket, sys
s = socket.socket(); s.bind(("127.0.0.1", 0)); s.listen()
print(s.getsockname()[1], flush=True); sys.stdin.read()
"""


def test_only_listening_sockets_count() -> None:
    with socket.socket() as bound, socket.socket() as listening:
        bound.bind(("127.0.0.1", 0))
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = listening.getsockname()
        found = listening_addresses(os.getpid())
        assert address in found
        assert bound.getsockname() not in found
    assert address not in listening_addresses(os.getpid())


def test_children_count_and_the_dead_listen_nowhere() -> None:
    script = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {CHILD!r}]))"
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        port = int(parent.stdout.readline())
        assert ("127.0.0.1", port) in listening_addresses(parent.pid)
    finally:
        parent.communicate(timeout=10)
    assert listening_addresses(parent.pid) == frozenset()
