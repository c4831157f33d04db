"""Clusters whose nodes are processes, over real TLS: killed, frozen, cut off from their files.

The processes share one clock, so their own words about their leases can be laid side by side.
"""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme

from kvtierd.cluster.clock import boottime_seconds

CLUSTER = "prod"
PROGRAM = Path(__file__).with_name("peer_process.py")
SPARE_SECONDS = 3.0  # that a failover may take beyond the lease


class Process:
    """One node."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.directory = cluster.directory / name
        self.out = self.directory / "out.jsonl"
        self.process = None
        self._make_files()

    def _make_files(self):
        self.directory.mkdir()
        issued = self.cluster.ca.issue_cert(self.name, f"{self.name}.{CLUSTER}.kvtierd")
        (self.directory / "ca.pem").write_bytes(self.cluster.ca.cert_pem.bytes())
        (self.directory / "node.pem").write_bytes(issued.cert_chain_pems[0].bytes())
        key = self.directory / "node.key"
        key.write_bytes(issued.private_key_pem.bytes())
        key.chmod(0o600)
        files = {"ca": "ca.pem", "cert": "node.pem", "key": "node.key"}
        settings = self.cluster.settings | {
            "tls": {what: str(self.directory / file) for what, file in files.items()}
        }
        config = {"node": self.name, "cluster": settings, "state": str(self.directory), "out": str(self.out)}
        (self.directory / "config.json").write_text(json.dumps(config))

    def start(self):
        log = (self.directory / "log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(self.directory / "config.json")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        log.close()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait(10)
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def lines(self):
        if not self.out.exists():
            return []
        whole = self.out.read_text().splitlines()
        return [json.loads(line) for line in whole if line.endswith("}")]

    def last(self):
        """What it last said, if it said so lately."""
        if not self.out.exists():
            return None
        with self.out.open("rb") as file:
            file.seek(max(0, self.out.stat().st_size - 4096))
            whole = [
                line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")
            ]
        return json.loads(whole[-1]) if whole else None


class Processes:
    def __init__(self, directory, names, **settings):
        self.directory = directory
        self.ca = trustme.CA()
        peers = [{"name": n, "address": f"127.0.78.{i}"} for i, n in enumerate(names, start=1)]
        self.settings = {"name": CLUSTER, "peers": peers, "port": _free_port(peers), **settings}
        self.nodes = {name: Process(self, name) for name in names}

    def __getitem__(self, name):
        return self.nodes[name]

    def running(self):
        return [node for node in self.nodes.values() if node.process is not None]

    def until(self, condition, seconds, what):
        end = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > end:
                told = "\n".join(f"{n.name}: {n.last()}" for n in self.nodes.values())
                raise AssertionError(f"{what} did not come true within {seconds} s\n{told}")
            time.sleep(0.02)
        return found

    def master(self, seconds, *, among=None):
        """The one master, once all of these nodes name it."""
        nodes = among or self.running()

        def agreed():
            last = {node.name: node.last() for node in nodes}
            now = boottime_seconds()
            if any(line is None or now - line["at"] > 1.0 for line in last.values()):
                return None
            masters = [name for name, line in last.items() if line["role"] == "master"]
            if len(masters) == 1 and all(
                (line["master"], line["epoch"]) == (masters[0], last[masters[0]]["epoch"])
                for line in last.values()
            ):
                return self[masters[0]]
            return None

        return self.until(agreed, seconds, "agreement on one master")

    def terms(self):
        """(epoch, node, from, until) of each node's terms, by its own words alone, in order."""
        found = []
        for node in self.nodes.values():
            for here, after in itertools.pairwise([*node.lines(), {"at": 1e300, "how": "end"}]):
                if here["role"] == "master":
                    assert here["at"] < here["until"], (
                        f"{node.name} took a lease for valid that was over: {here}"
                    )
                    # Until the process says otherwise, or the lease ends: a frozen or killed one says nothing.
                    end = here["until"] if after["how"] == "end" else min(here["until"], after["at"])
                    found.append((here["epoch"], node.name, here["at"], end))
        return sorted(found)

    def assert_never_two(self):
        terms = self.terms()
        assert terms
        for (epoch, name, _, until), (later, other, start, _) in itertools.pairwise(terms):
            if name != other:
                assert later > epoch
                assert until <= start, f"{name} until {until} in {epoch}, {other} from {start} in {later}"


def _free_port(peers):
    with contextlib.ExitStack() as stack:
        port = 0
        for peer in peers:
            probe = stack.enter_context(socket.socket())
            probe.bind((peer["address"], port))
            port = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(directory, names, **settings):
    cluster = Processes(directory, names, **settings)
    try:
        for node in cluster.nodes.values():
            node.start()
        yield cluster
    finally:
        for node in cluster.nodes.values():
            node.kill()


LEASE_SECONDS = 3.0
LEASE = {"mode": "lease", "lease": f"{LEASE_SECONDS:g}s"}


@pytest.mark.slow
def test_killed_masters_are_replaced_within_the_lease_and_three_seconds(tmp_path):
    with started(tmp_path, "abc", **LEASE) as cluster:
        master = cluster.master(30.0)
        for _ in range(2):
            before = master.last()["epoch"]
            killed_at = boottime_seconds()
            master.kill()
            new = cluster.master(20.0)
            gained = next(line for line in new.lines() if line["role"] == "master" and line["epoch"] > before)
            assert gained["at"] - killed_at <= LEASE_SECONDS + SPARE_SECONDS
            assert gained["serve_after"] - killed_at <= LEASE_SECONDS + SPARE_SECONDS
            master.start()
            cluster.master(20.0)
            # A voter that has just started is silent for a while; the next round needs all three.
            time.sleep(1.3 * LEASE_SECONDS)
            master = cluster.master(20.0)
        cluster.assert_never_two()


@pytest.mark.slow
def test_a_master_frozen_for_longer_than_its_lease_wakes_up_and_knows_that_it_is_none(tmp_path):
    with started(tmp_path, "abc", **LEASE) as cluster:
        for _ in range(2):
            master = cluster.master(30.0)
            epoch = master.last()["epoch"]
            master.signal(signal.SIGSTOP)
            others = [node for node in cluster.nodes.values() if node is not master]
            new = cluster.master(LEASE_SECONDS * 1.3 + 10.0, among=others)
            assert new.last()["epoch"] > epoch
            woken_at = boottime_seconds()
            master.signal(signal.SIGCONT)
            cluster.master(10.0)
            after = [line for line in master.lines() if line["at"] >= woken_at]
            assert all(line["role"] != "master" for line in after)
            time.sleep(1.0)
        cluster.assert_never_two()


@pytest.mark.slow
def test_a_master_frozen_for_less_than_its_lease_stays_the_master(tmp_path):
    with started(tmp_path, "abc", **LEASE) as cluster:
        master = cluster.master(30.0)
        epoch = master.last()["epoch"]
        master.signal(signal.SIGSTOP)
        time.sleep(0.3)
        master.signal(signal.SIGCONT)
        time.sleep(LEASE_SECONDS + 1.0)
        assert cluster.master(10.0) is master
        assert master.last()["epoch"] == epoch


@pytest.mark.slow
def test_a_switchover_between_processes(tmp_path):
    with started(tmp_path, "abc", **LEASE) as cluster:
        master = cluster.master(30.0)
        target = next(node for node in cluster.nodes.values() if node is not master)
        assert target.ask(f"hand_over {master.name}") == "cluster.not-master"
        cluster.until(
            lambda: master.ask(f"hand_over {target.name}") == "done",
            10.0,
            "a target that has been up for long enough",
        )
        assert cluster.master(10.0) is target
        cluster.assert_never_two()


@pytest.mark.slow
def test_a_named_master_that_is_killed_replaced_and_comes_back(tmp_path):
    with started(tmp_path, "ab", mode="static", master="a") as cluster:
        assert cluster.master(30.0).name == "a"
        cluster["a"].kill()
        assert cluster["b"].ask("promote") == "done"
        assert cluster.master(10.0).name == "b"
        came_back_at = boottime_seconds()
        cluster["a"].start()
        cluster.until(lambda: cluster["a"].last()["at"] > came_back_at, 20.0, "its return")
        assert cluster.master(10.0).name == "b"
        after = [line for line in cluster["a"].lines() if line["at"] > came_back_at]
        assert all(line["role"] != "master" for line in after)
        assert cluster["b"].ask("hand_over a") == "done"
        assert cluster.master(10.0).name == "a"


@pytest.mark.slow
def test_a_named_master_that_was_frozen_while_it_was_replaced_follows_when_it_wakes(tmp_path):
    with started(tmp_path, "abc", mode="static", master="a") as cluster:
        assert cluster.master(30.0).name == "a"
        cluster["a"].signal(signal.SIGSTOP)
        assert cluster["b"].ask("promote") == "done"
        others = [cluster["b"], cluster["c"]]
        assert cluster.master(10.0, among=others).name == "b"
        cluster["a"].signal(signal.SIGCONT)
        assert cluster.master(15.0).name == "b"
