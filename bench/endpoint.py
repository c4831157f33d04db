"""What the endpoint costs: the same calls straight to the MetaService, through the endpoint, and through two of them.

``python -m bench.endpoint``: needs the real wheel and the emulated driver. Prints p50 in microseconds of exist, put
and get of 1 KB, and how many lookups one core of the endpoint carries. "hop" is what a client on another node has: its
own endpoint, mutual TLS, the master's endpoint; both on this machine, so that no network is in it. The ways are
measured in turns, so that a busy machine hurts all alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import trustme

from bench import report
from kvtierd.endpoint.names import certificate_names
from kvtierd.workload.demo import free_ports

CALLS = 400
ROUNDS = 5
LOAD_SECONDS = 4.0
LOAD_CLIENTS = 4
WAYS = ("direct", "endpoint", "hop")
PORTS = (
    "meta",
    "store",
    "http",
    "meta-endpoint",
    "store-endpoint",
    "meta-hop",
    "store-hop",
    "peers-endpoint",
    "peers-hop",
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One printed line; ``limit`` is the number to hold, if there is one."""

    name: str
    direct: float
    endpoint: float
    hop: float
    unit: str
    limit: str = ""

    def __str__(self) -> str:
        numbers = f"{self.direct:>10.0f}{self.endpoint:>10.0f}{self.endpoint - self.direct:>+10.0f}"
        hop = f"{self.hop:>10.0f}{self.hop - self.endpoint:>+10.0f}"
        return f"{self.name:<28}{numbers}{hop}  {self.unit:<4} {self.limit}"


def _worker(kind: str) -> None:
    """A client process: asks for calls on stdin, answers with a JSON list of microseconds (or a count)."""
    from memcache_hybrid import DistributedObjectStore

    store = DistributedObjectStore()
    if store.init(0, init_bm=kind != "S") != 0:
        raise SystemExit("init failed")
    print("ready", flush=True)
    value, counter = bytes(1024), 0
    for line in sys.stdin:
        call, _, amount = line.strip().partition(" ")
        if call == "load":
            end, done = time.perf_counter() + float(amount), 0
            while time.perf_counter() < end:
                store.batch_is_exist(["warm"])
                done += 1
            print(json.dumps(done), flush=True)
            continue
        times = []
        for _ in range(int(amount)):
            counter += 1
            started = time.perf_counter()
            if call == "exist":
                result: Any = store.is_exist("warm") == 1
            elif call == "seed":
                result = store.put("warm", value) == 0
            elif call == "put":
                result = store.put(f"{os.getpid()}-{counter % 2000}", value) == 0
            else:
                result = len(store.get_batch(["warm"])[0]) == len(value)
            times.append((time.perf_counter() - started) * 1e6)
            if not result:
                raise SystemExit(f"{call} failed")
        print(json.dumps(times), flush=True)
    os._exit(0)


class _Bench:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        from kvtierd.emulator.build import ensure_driver
        from kvtierd.emulator.launch import cleanup

        self.folder, self.stack = folder, stack
        self.authority = trustme.CA()
        self.root = folder / "emulation"
        self.driver = ensure_driver(folder / "cache")
        stack.callback(cleanup, self.root)
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))

    def spawn(self, argv: list[str], env: dict[str, str], *, emulated: bool = True) -> subprocess.Popen[str]:
        launcher = [sys.executable, "-m", "kvtierd.emulator.launch", "--root", str(self.root), "--"]
        process = subprocess.Popen(
            [*(launcher if emulated else []), *argv],
            env={"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0", **self.driver.env(), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.stack.callback(_end, process)
        return process

    def start_meta(self) -> None:
        conf = self.folder / "meta.conf"
        conf.write_text(
            f"ock.mmc.meta_service_url = tcp://127.0.0.1:{self.ports['meta']}\n"
            f"ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:{self.ports['store']}\n"
            f"ock.mmc.meta_service.metrics_url = http://127.0.0.1:{self.ports['http']}\n"
            "ock.mmc.log_level = error\n"
        )
        script = Path(__file__).parents[1] / "kvtierd" / "memcache" / "run_meta.py"
        self.spawn([sys.executable, str(script)], {"MMC_META_CONFIG_PATH": str(conf)})
        _await_port(self.ports["meta"])
        _await_port(self.ports["store"])
        time.sleep(0.5)

    def start_endpoint(self, way: str, target: dict[str, str]) -> int:
        """The master's endpoint ("endpoint"), or that of another node ("hop"). Its process id."""
        config = {
            "listen": {
                "meta": f"127.0.0.1:{self.ports[f'meta-{way}']}",
                "config_store": f"127.0.0.1:{self.ports[f'store-{way}']}",
            },
            "target": target,
            "control_socket": str(self.folder / f"{way}.sock"),
            "state_file": str(self.folder / f"{way}.state"),
            "cluster": "bench",
            "node": way,
            "peer_listen": f"127.0.0.1:{self.ports[f'peers-{way}']}",
            "peers": [
                {"name": name, "address": f"127.0.0.1:{self.ports[f'peers-{name}']}"}
                for name in ("endpoint", "hop")
            ],
            "tls": self._certificate(way),
        }
        path = self.folder / f"{way}.json"
        path.write_text(json.dumps(config))
        process = self.spawn(
            [sys.executable, "-m", "kvtierd.endpoint", "--config", str(path)], {}, emulated=False
        )
        _await_port(self.ports[f"meta-{way}"])
        _await_port(self.ports[f"peers-{way}"])
        time.sleep(0.5)
        return process.pid

    def start_endpoints(self) -> int:
        """Both. The process id of the one that every way passes."""
        target = {
            "meta": f"127.0.0.1:{self.ports['meta']}",
            "config_store": f"127.0.0.1:{self.ports['store']}",
        }
        pid = self.start_endpoint("endpoint", target)
        self.start_endpoint("hop", {"peer": "endpoint"})
        return pid

    def _certificate(self, node: str) -> dict[str, str]:
        leaf = self.authority.issue_cert(*certificate_names(node, "bench"))
        files = {kind: str(self.folder / f"{node}.{kind}") for kind in ("ca", "cert", "key")}
        self.authority.cert_pem.write_to_path(files["ca"])
        leaf.cert_chain_pems[0].write_to_path(files["cert"])
        leaf.private_key_pem.write_to_path(files["key"])
        return files

    def client(self, kind: str, way: str) -> subprocess.Popen[str]:
        conf = self.folder / f"{kind}-{way}.conf"
        suffix = "" if way == "direct" else f"-{way}"
        conf.write_text(
            f"ock.mmc.meta_service_url = tcp://127.0.0.1:{self.ports['meta' + suffix]}\n"
            f"ock.mmc.local_service.config_store_url = tcp://127.0.0.1:{self.ports['store' + suffix]}\n"
            "ock.mmc.local_service.world_size = 16\n"
            "ock.mmc.local_service.protocol = host_shm\n"
            f"ock.mmc.local_service.dram.size = {'64MB' if kind == 'F' else '0'}\n"
            "ock.mmc.local_service.max.dram.size = 64MB\n"
            "ock.mmc.log_level = error\n"
        )
        process = self.spawn(
            [sys.executable, "-m", "bench.endpoint", kind], {"MMC_LOCAL_CONFIG_PATH": str(conf)}
        )
        _read_until(process, "ready")
        return process


def _await_port(port: int) -> None:
    import socket

    deadline = time.monotonic() + 15
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10)


def _read_until(process: subprocess.Popen[str], word: str = "") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if (word and line.strip() == word) or (not word and line[0] in "[0123456789" and _is_json(line)):
            return line
    raise SystemExit(f"a client ended ({process.wait(10)})")


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _ask(process: subprocess.Popen[str], call: str, amount: float) -> Any:
    _tell(process, call, amount)
    return json.loads(_read_until(process))


def _tell(process: subprocess.Popen[str], call: str, amount: float) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{call} {amount}\n")
    process.stdin.flush()


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def latency_rows(clients: dict[str, subprocess.Popen[str]]) -> Iterator[Row]:
    """p50 of each call, both ways in turns."""
    for call in ("exist", "put", "get"):
        times: dict[str, list[float]] = {way: [] for way in clients}
        for _ in range(ROUNDS):
            for way, client in clients.items():
                times[way] += _ask(client, call, CALLS)
        yield Row(
            f"{call} 1 KB, p50",
            statistics.median(times["direct"]),
            statistics.median(times["endpoint"]),
            statistics.median(times["hop"]),
            "us",
            "adds <= 150",
        )


def load_rows(bench: _Bench, endpoint_pid: int) -> Iterator[Row]:
    """Lookups a second with several clients asking without pause, and per core of the endpoint."""
    rates, cores = {}, {}
    for way in WAYS:
        clients = [bench.client("S", way) for _ in range(LOAD_CLIENTS)]
        before = _cpu_seconds(endpoint_pid)
        for client in clients:
            _tell(client, "load", LOAD_SECONDS)
        done = sum(json.loads(_read_until(client)) for client in clients)
        used = _cpu_seconds(endpoint_pid) - before
        rates[way] = done / LOAD_SECONDS
        cores[way] = done / max(used, 1e-9)
        for client in clients:
            _end(client)
    yield Row(f"lookups/s, {LOAD_CLIENTS} clients", rates["direct"], rates["endpoint"], rates["hop"], "/s")
    yield Row("lookups per endpoint core", 0, cores["endpoint"], cores["hop"], "/s", ">= 5000")


def run() -> list[Row]:
    """All rows. Starts everything and ends it again."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = _Bench(Path(folder), stack)
        bench.start_meta()
        endpoint_pid = bench.start_endpoints()
        clients = {way: bench.client("F", way) for way in WAYS}
        _ask(clients["direct"], "seed", 1)
        rows = list(latency_rows(clients))
        rows += load_rows(bench, endpoint_pid)
        resident = int(Path(f"/proc/{endpoint_pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        rows.append(Row("endpoint resident memory", 0, resident / 1e6, resident / 1e6, "MB"))
        return rows


def rows() -> list[report.Row]:
    """The same for the common table: what the endpoint adds, next to the direct way of the same run."""
    found = []
    for row in run():
        added = row.endpoint - row.direct
        if row.unit == "us":
            text = f"{added:+.0f} us ({row.direct:.0f} -> {row.endpoint:.0f})"
            found.append(report.Row(f"endpoint adds to {row.name}", text, "<= 150 us", added <= 150))
            text = f"{row.hop - row.endpoint:+.0f} us ({row.endpoint:.0f} -> {row.hop:.0f})"
            found.append(report.Row(f"the hop to the master adds to {row.name}", text, "-", holds=True))
        elif row.limit:
            holds = row.endpoint >= 5000
            found.append(report.Row(row.name, f"{row.endpoint:.0f} /s", ">= 5000 /s", holds))
            found.append(report.Row(f"{row.name}, from peers", f"{row.hop:.0f} /s", "-", holds=True))
        else:
            found.append(report.Row(row.name, f"{row.endpoint:.0f} {row.unit}", "-", holds=True))
    return found


def main() -> None:
    """Prints the table."""
    print(f"{'':<28}{'direct':>10}{'endpoint':>10}{'adds':>10}{'hop':>10}{'adds':>10}")
    for row in run():
        print(row)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _worker(sys.argv[1])
    else:
        main()
