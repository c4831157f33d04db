"""Two hosts without endpoints: real daemons, MetaServices, pool holders and engines follow another master by their files.

Without the host alias, since a test does not write to /etc/hosts: the reference engine follows its file (``follows_conf``).
"""

from __future__ import annotations

import re
import time

import pytest
from cluster_lab import Cluster, hits, wait_until

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

CLIENTS = ("pool-0", "engine-ref")


def lab_without_endpoints() -> Cluster:
    lab = Cluster(2, 'mode = "static"\nmaster = "a"', net=22)
    ports = lab["a"].ports
    for node in lab.nodes.values():
        text = node.settings.read_text()
        for key in ("port", "config_store_port"):  # the same on all nodes: each dials every other's
            text = re.sub(rf"^{key} = \d+$", f"{key} = {ports[key]}", text, count=1, flags=re.MULTILINE)
        node.settings.write_text(
            text.replace("[meta]\n", '[meta]\nendpoint = "direct"\nhost_alias = false\n', 1)
        )
    return lab


def wait_well(lab: Cluster, master: str, seconds: float = 120.0, *, but: tuple[str, ...] = ()) -> float:
    def well() -> bool:
        nodes = lab.living(but=but)
        return all(
            s.tier_state == "joinable"
            and s.master == master
            and not [p for p in s.problems if "heard of" not in p and "cannot be reached" not in p]
            and len(s.units) == 3
            and all(u.state in {"ready", "stopped"} for u in s.units)
            for s in (n.status() for n in nodes)
        )

    return wait_until(well, seconds, lab.told)


def kinds(lab: Cluster, name: str) -> list[str]:
    return [e.kind for e in lab[name].client.events()]


def test_clients_follow_a_switchover_and_a_lost_host_without_a_restart() -> None:
    with lab_without_endpoints() as lab:
        wait_well(lab, "a")
        before = {(n, c): lab[n].pid(c) for n in "ab" for c in CLIENTS}
        assert all(before.values())
        began = time.monotonic()
        done = lab["a"].kvtierctl("switchover", "b")
        assert done.returncode == 0, (done.stdout, done.stderr)
        wait_well(lab, "b")
        print(f"well after a switchover: {time.monotonic() - began:.1f} s")
        assert {(n, c): lab[n].pid(c) for n, c in before} == before, lab.told()
        assert "cluster.clients-led" in kinds(lab, "a")
        assert "tier.purged" in kinds(lab, "b"), "without endpoints nothing could be quiesced"
        wait_until(lambda: hits(lab, "a", "b"), 40, lab.told)
        print(f"hits after a switchover: {time.monotonic() - began:.1f} s")

        lab["b"].kill_host()
        began = time.monotonic()
        done = lab["a"].kvtierctl("promote", "--force")
        assert done.returncode == 0, (done.stdout, done.stderr)
        wait_well(lab, "a", but=("b",))
        print(f"well after a lost host and promote: {time.monotonic() - began:.1f} s")
        assert {c: lab["a"].pid(c) for c in CLIENTS} == {c: before["a", c] for c in CLIENTS}, lab.told()
