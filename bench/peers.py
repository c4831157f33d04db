"""What the network of peers costs: one master with many observers, all over TLS, at rest.

``python -m bench.peers [OBSERVERS]``: three voters as processes, and all observers in one more (their streams,
greetings and connections are real, their servers are left out). The master's CPU, its memory and the bytes on its
connections are read from the kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import structlog

from bench.report import Row, print_table

OBSERVERS = 500
VOTERS = ("v1", "v2", "v3")
SECONDS = 30.0
SETTLE_SECONDS = 20.0
HEADER_BYTES = 52  # of IP and TCP, a segment
CPU_SHARE, MEMORY_BYTES, NODE_BYTES_PER_SECOND = 0.10, 150e6, 2000.0


def _address(number: int) -> str:
    return f"127.79.{number // 250}.{number % 250 + 1}"


def _names(observers: int) -> list[str]:
    return [*VOTERS, *(f"o{number}" for number in range(observers))]


def _settings(directory: Path, observers: int, port: int, node: str) -> Any:
    from kvtierd.settings.cluster import ClusterSettings

    peers = [
        {"name": name, "address": _address(number), "voter": name in VOTERS}
        for number, name in enumerate(_names(observers))
    ]
    return ClusterSettings.model_validate(
        {"mode": "lease", "name": "bench", "port": port, "peers": peers, "tls": _tls(directory, node)}
    )


def _tls(directory: Path, node: str) -> dict[str, str]:
    return {
        "ca": str(directory / "ca.pem"),
        "cert": str(directory / f"{node}.pem"),
        "key": str(directory / f"{node}.key"),
    }


def _certificates(directory: Path, observers: int) -> None:
    import trustme

    ca = trustme.CA()
    (directory / "ca.pem").write_bytes(ca.cert_pem.bytes())
    for name in _names(observers):
        issued = ca.issue_cert(name, f"{name}.bench.kvtierd")
        (directory / f"{name}.pem").write_bytes(issued.cert_chain_pems[0].bytes())
        key = directory / f"{name}.key"
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)


# -- the processes


async def _voter(directory: Path, observers: int, port: int, node: str) -> None:
    from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
    from kvtierd.cluster.following import Following
    from kvtierd.cluster.lease import LeaseCoordinator, elector_config
    from kvtierd.cluster.network import PeerNetwork
    from kvtierd.cluster.tls import PeerTls

    settings = _settings(directory, observers, port, node)
    network = PeerNetwork(settings, node, PeerTls(settings))
    following = Following(
        network.board, SeenEpochStore(directory / f"{node}-seen", "bench"), network.refusals
    )
    config = elector_config(settings, node)
    store = EpochStore(directory / f"{node}-epoch", config)
    coordinator = LeaseCoordinator(config, network, store, following)

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            state = {"role": coordinator.standing.role, "streams": network.server.streams}
            (directory / f"{node}.state").write_text(json.dumps(state))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(network.run())
        tasks.create_task(coordinator.run(lambda _: None))
        tasks.create_task(report())


async def _observers(directory: Path, observers: int, port: int) -> None:
    from kvtierd.cluster.greeter import Greeter, round_seconds
    from kvtierd.cluster.hello import NodeFacts
    from kvtierd.cluster.peer_link import PeerLink
    from kvtierd.cluster.peer_wire import LARGE_CLUSTER_KEEPALIVE_SECONDS
    from kvtierd.cluster.refusals import Refusals
    from kvtierd.cluster.tls import PeerTls
    from kvtierd.cluster.view_board import ViewBoard
    from kvtierd.cluster.view_stream import ViewStream

    names = set(_names(observers))
    base = _settings(directory, observers, port, "o0")
    async with asyncio.TaskGroup() as tasks:
        for number in range(observers):
            node = f"o{number}"
            settings = base.model_copy(update={"tls": base.tls.model_copy(update=_tls(directory, node))})
            security, refusals = PeerTls(settings), Refusals()
            links = {
                name: PeerLink(
                    node, "bench", name, security, refusals, keepalive_seconds=LARGE_CLUSTER_KEEPALIVE_SECONDS
                )
                for name in VOTERS
            }
            board = ViewBoard(node, names, refusals)
            facts = NodeFacts(node, "0.2.0", "1.3.0", "0", 16, "device_rdma", "0123456789abcdef")
            greeter = Greeter(
                "bench", links, board, lambda facts=facts: facts,  # type: ignore[misc]
                round_seconds=round_seconds(len(names)),
            )  # fmt: skip
            tasks.create_task(ViewStream(node, links, board, first=VOTERS).run())
            tasks.create_task(greeter.run())
            await asyncio.sleep(0.02)


# -- measuring


@dataclasses.dataclass(frozen=True, slots=True)
class _Traffic:
    connections: int
    total_bytes: int

    @classmethod
    def of(cls, address: str, port: int) -> _Traffic:
        """What went over this server's connections so far, headers included, both ways."""
        told = subprocess.run(
            ["ss", "-Htin", f"src {address}:{port}"], capture_output=True, text=True, check=True
        ).stdout
        counters = re.findall(r"\b(bytes_sent|bytes_received|segs_out|segs_in):(\d+)", told)
        total = sum(int(n) * (HEADER_BYTES if what.startswith("segs") else 1) for what, n in counters)
        return cls(told.count("segs_out"), total)


def _spawn(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bench.peers", *arguments], stdin=subprocess.DEVNULL)


def _state(directory: Path, node: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        state: dict[str, Any] = json.loads((directory / f"{node}.state").read_text())
        return state
    return {"role": "", "streams": 0}


def _master(directory: Path, observers: int) -> str:
    """The master, once nearly everybody watches it."""
    deadline = time.monotonic() + 180.0
    while time.monotonic() < deadline:
        for node in VOTERS:
            state = _state(directory, node)
            if state["role"] == "master" and state["streams"] >= observers + len(VOTERS) - 1:
                return node
        time.sleep(0.5)
    raise SystemExit(f"not settled: {[_state(directory, node) for node in VOTERS]}")


def rows(observers: int = OBSERVERS) -> list[Row]:
    """The measurement; takes about two minutes."""
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch)
        _certificates(directory, observers)
        with socket.socket() as probe:
            probe.bind((_address(0), 0))
            port = probe.getsockname()[1]
        processes = {n: _spawn("voter", scratch, str(observers), str(port), n) for n in VOTERS}
        processes["observers"] = _spawn("observers", scratch, str(observers), str(port))
        for process in processes.values():
            stack.callback(process.wait)
            stack.callback(process.kill)
        master = _master(directory, observers)
        time.sleep(SETTLE_SECONDS)
        measured = psutil.Process(processes[master].pid)
        address = _address(VOTERS.index(master))
        cpu, traffic, started = measured.cpu_times(), _Traffic.of(address, port), time.monotonic()
        time.sleep(SECONDS)
        after, flow, seconds = measured.cpu_times(), _Traffic.of(address, port), time.monotonic() - started
        share = (after.user + after.system - cpu.user - cpu.system) / seconds
        memory = measured.memory_info().rss
        per_node = (flow.total_bytes - traffic.total_bytes) / seconds / observers
    what = f"a master with {observers} observers at rest"
    return [
        Row(f"{what}: CPU", f"{share:.1%} of a core", "<= 10 %", share <= CPU_SHARE),
        Row(f"{what}: memory", f"{memory / 1e6:.0f} MB", "<= 150 MB", memory <= MEMORY_BYTES),
        Row(
            f"{what}: traffic for each, both ways", f"{per_node:.0f} B/s", "<= 2 kB/s",
            per_node <= NODE_BYTES_PER_SECOND,
        ),
    ]  # fmt: skip


def main() -> None:
    if len(sys.argv) < 3:
        print_table(rows(int(sys.argv[1]) if len(sys.argv) > 1 else OBSERVERS))
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    role, directory, observers, port, *node = sys.argv[1:]
    if role == "voter":
        asyncio.run(_voter(Path(directory), int(observers), int(port), node[0]))
    else:
        asyncio.run(_observers(Path(directory), int(observers), int(port)))


if __name__ == "__main__":
    main()
