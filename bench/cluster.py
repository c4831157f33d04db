"""What a change of the master costs, on three real daemons over one emulated memory: ``python -m bench.cluster``."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from bench.report import Row, print_table

ROOT = Path(__file__).parent.parent
for room in ("e2e", "cluster"):
    sys.path.insert(0, str(ROOT / "tests" / room))

from cluster_lab import Cluster, ClusterNode  # noqa: E402 - the tests' clusters
from lab import RealTier  # noqa: E402
from watch import Watch  # noqa: E402

from kvtierd.emulator.build import ensure_driver  # noqa: E402
from kvtierd.provision.assembly import cache_directory  # noqa: E402

LEASE_SECONDS = 6.0
VALUE_BYTES = 4096
PAUSE_SECONDS = 0.005


def rows() -> list[Row]:
    """One cluster, one fault after the other."""
    with Cluster(3, f'mode = "lease"\nlease = "{LEASE_SECONDS:.0f}s"', net=9) as lab:
        lab.wait_well(180)
        found = [*_meta_service_killed(lab), *_switchover(lab)]
        return [*found, *_host_lost(lab)]


def _meta_service_killed(lab: Cluster) -> list[Row]:
    master = lab.wait_well()
    with Watch(lab) as watch:
        watch.wait_hits(0.0, set(lab.nodes))
        began = time.monotonic()
        os.kill(lab[master].pid("meta-main"), signal.SIGKILL)
        serving, hits = _serving_and_hits(watch, began, {master}, set(lab.nodes))
    return [
        Row(
            "MetaService killed, mended in place: it accepts again",
            f"{serving:.1f} s",
            "<= 2 s",
            serving <= 2,
        ),
        Row("  the last of three engines has hits again", f"{hits:.1f} s", "-", holds=True),
    ]


def _host_lost(lab: Cluster) -> list[Row]:
    master = lab.wait_well()
    rest = set(lab.nodes) - {master}
    with Watch(lab, load=sorted(rest)) as watch:
        watch.wait_hits(0.0, rest)
        began = time.monotonic()
        lab[master].kill_host()
        serving, hits = _serving_and_hits(watch, began, rest, rest)
    limit = LEASE_SECONDS + 3
    return [
        Row(
            "master's host lost: the new one accepts",
            f"{serving:.1f} s",
            f"<= {limit:.0f} s",
            serving <= limit,
        ),
        Row("  hits again after that", f"{hits - serving:.1f} s", "<= 4 s", hits - serving <= 4),
        Row("  requests that failed", str(len(watch.failed)), "0", not watch.failed),
    ]


def _serving_and_hits(watch: Watch, began: float, where: set[str], engines: set[str]) -> tuple[float, float]:
    deadline = began + 60
    while not (found := [s.first for n in where for s in list(watch.spans[n]) if s.first > began]):
        if time.monotonic() > deadline:
            raise SystemExit(f"no MetaService came back\n{watch.cluster.told()}")
        time.sleep(0.05)
    return min(found) - began, watch.wait_hits(min(found), engines) - began


def _switchover(lab: Cluster) -> list[Row]:
    """F clients (full, without memory) of two nodes put and get without a pause; the longest call of each counts."""
    master = lab.wait_well()
    followers = lab.others(master)
    tiers = [_tier(node) for node in (lab[master], followers[0])]
    clients = [tier.client(max_dram="64MB") for tier in tiers]
    try:
        for number, client in enumerate(clients):
            client.call(
                "start_load", prefix=f"s{number}", size=VALUE_BYTES, threads=1, pause_seconds=PAUSE_SECONDS
            )
        time.sleep(3)
        done = threading.Event()
        began = time.monotonic()
        reply = lab[master].client.switchover(followers[1].name, 60)
        took = time.monotonic() - began
        done.wait(3)
        results = [client.call("stop_load") for client in clients]
    finally:
        for tier in tiers:
            for unit in reversed(tier.units):
                unit.kill()
    longest = max(r["longest_seconds"] for r in results)
    failed = max(r.get("failed_puts", 0) + r.get("failed_gets", 0) for r in results)
    wrong = sum(r.get("gets_wrong", 0) for r in results)
    lab.wait_well()
    note = f" ({reply.note})" if reply.note else ""
    whole = failed <= 1 and not wrong
    return [
        Row("switchover: until the new master serves", f"{took:.1f} s{note}", "-", holds=True),
        Row(
            "  longest call of two clients under load",
            f"{longest * 1000:.0f} ms",
            "<= 100 ms",
            longest <= 0.1,
        ),
        Row("  failed calls of the worse client; values read wrong", f"{failed}; {wrong}", "<= 1; 0", whole),
    ]


def _tier(node: ClusterNode) -> RealTier:
    """The node's pool for clients of ours, through its endpoint."""
    tier = RealTier(node.root, ensure_driver(cache_directory()))
    tier.client_meta_port, tier.client_store_port = node.ports["port"], node.ports["config_store_port"]
    return tier


if __name__ == "__main__":
    print_table(rows())
