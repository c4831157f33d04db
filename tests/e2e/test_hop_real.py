"""Nodes whose clients reach the real MetaService of another node. P: pool holder, F: full client, S: lookups only.

The promise: whatever happens between the nodes, no call blocks for longer than a second and no read gives bytes that
were not written under its key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import netns_lab
import pytest
from hop_lab import SIZE, HopCluster, HopNode
from lab import Lookups, RawClient, Unit, wait_until

from kvtierd.emulator.build import EmulatedDriver
from kvtierd.errors import EndpointError
from kvtierd.memcache.rest import MetaClient

pytestmark = [pytest.mark.real, pytest.mark.slow]

LONGEST_CALL_SECONDS = 1.0
Make = Callable[..., HopCluster]


@pytest.fixture
def make(tmp_path: Path, driver: EmulatedDriver) -> Iterator[Make]:
    """Makes clusters that end with the test: ``make(2)`` on loopback, ``make(3, netns=True)`` in namespaces."""
    made: list[HopCluster] = []
    labs: list[netns_lab.NetLab] = []

    def make_one(count: int, *, netns: bool = False, **more: Any) -> HopCluster:
        lab = None
        if netns:
            if why := netns_lab.why_not():
                pytest.skip(why)
            labs.append(netns_lab.NetLab(count).__enter__())
            lab = labs[-1]
        made.append(HopCluster(tmp_path, driver, count, lab))
        made[-1].start(**more)
        return made[-1]

    yield make_one
    for cluster in made:
        cluster.close()
    for lab in labs:
        lab.close()


class Load:
    """An F client that writes and reads, an S client that looks up, both on one node, and what they found."""

    def __init__(self, node: HopNode, *, threads: int = 2) -> None:
        self.node = node
        self.full = node.client()
        self.lookup = node.client(init_bm=False)
        self.keys = [f"{node.name}-{n}" for n in range(20)]
        assert self.full.put_many(self.keys, size=SIZE) == [0] * len(self.keys)
        self.full.start_load(f"load-{node.name}", size=SIZE, threads=threads, pause_seconds=0.002)
        self.lookups = Lookups(self.lookup, self.keys)

    def hits_after(self, moment: float, timeout_seconds: float = 6.0) -> None:
        try:
            wait_until(lambda: self.lookups.hits_at > moment, timeout_seconds, "the tier hits again")
        except AssertionError as error:
            raise AssertionError(
                f"{error}; {self.lookups.calls} lookups, {self.node.name}: {self.node.do('status')}"
            ) from None

    def end(self, longest_seconds: float = LONGEST_CALL_SECONDS) -> dict[str, Any]:
        self.lookups.stop()
        load = self.full.stop_load(timeout_seconds=70.0)
        longest = self.lookups.longest_seconds
        print(f"\nlongest F call {load['longest_seconds']:.3f} s, S call {longest:.3f} s, {load}"[:300])
        assert load["stuck"] == 0
        assert load.get("gets_wrong", 0) == 0
        assert load["longest_seconds"] <= longest_seconds
        assert longest <= longest_seconds
        return dict(load)


def check_values(client: RawClient, keys: list[str], *, ok_at_least: float = 0.0) -> None:
    """Every value that is there is the right one."""
    found = client.get_many(keys[-200:], size=SIZE)
    assert found.count("wrong") == 0
    assert found.count("ok") >= ok_at_least * len(found)


def restart_pool(cluster: HopCluster, node: HopNode, pool: Unit, *, device: int, proxies: int) -> Unit:
    """Starts a stranded pool holder anew, when everybody else has its role: who joins earlier is not seen by them."""
    wait_until(
        lambda: cluster.a.roles() == ["provider"] + ["proxy"] * proxies, 10.0, "the others have their roles"
    )
    pool.kill()
    node.until(lambda s: s["stranded"] == 0)
    cluster.open_up([node])
    return node.start_pool(device=device)


@pytest.mark.parametrize("netns", [False, True])
def test_a_client_on_another_node_joins_writes_and_reads(make: Make, netns: bool) -> None:
    cluster = make(2, netns=netns)
    pool = cluster.b.start_pool()
    far, near = cluster.b.client(), cluster.a.client()
    lookup = cluster.b.client(init_bm=False)
    assert far.put_many(["a", "b", "c"], size=SIZE) == [0, 0, 0]
    assert near.get_many(["a", "b", "c"], size=SIZE) == ["ok"] * 3
    assert near.put("d", size=SIZE) == 0
    assert far.get_into("d", size=SIZE) == "ok"
    assert lookup.exist_many(["a", "d", "x"]) == [1, 1, 0]
    assert cluster.a.roles() == ["provider", "proxy", "proxy"]
    status = cluster.b.do("status")
    kinds = {row["kind"]: row for row in status["clients"]}
    assert {kind: row["pid"] for kind, row in kinds.items()} == {
        "P": pool.pid,
        "F": far.unit.pid,
        "S": lookup.unit.pid,
    }
    assert [kinds[kind]["provider"] for kind in "PFS"] == [True, False, False]
    assert (kinds["S"]["lookups"], kinds["S"]["lookup_hits"]) == (3, 2)
    (row,) = cluster.a.do("status")["inbound"]["peers"]
    assert row["links"] == 5  # P and F on both ports, S on one
    assert far.leave() == 0
    assert near.get_into("a", size=SIZE) == "ok"


@pytest.mark.parametrize("attempt", range(2))
def test_the_metaservice_is_killed(make: Make, attempt: int) -> None:
    cluster = make(2, purge_on_unclean=False)
    cluster.a.start_pool()
    cluster.b.start_pool(device=1)
    far, near = Load(cluster.b), Load(cluster.a)
    time.sleep(1.0)
    roles = cluster.a.roles()
    cluster.meta.kill()
    cluster.meta = cluster.a.start_meta()
    healthy = time.monotonic()
    for node in cluster.nodes:
        node.await_back(3)
    for load in (far, near):
        load.hits_after(healthy)
    wait_until(lambda: cluster.a.roles() == roles, 6.0, "everybody has its role")
    print(f"\nall back {time.monotonic() - healthy:.2f} s after /health")
    time.sleep(1.0)
    for load in (far, near):
        load.end()
    for node in cluster.nodes:
        status = node.do("status")
        assert (status["backend"]["deaths"], status["admission"], status["stranded"]) == (1, "survivors", 0)
    assert far.full.put("after", size=SIZE) == 0
    assert near.full.get_into("after", size=SIZE) == "ok"


def test_a_purge_is_waited_for_on_all_nodes(make: Make) -> None:
    cluster = make(2)
    cluster.b.start_pool()
    far, near = cluster.b.client(), cluster.a.client()
    assert far.put("key", size=SIZE) == 0
    time.sleep(0.5)
    cluster.meta.kill()
    cluster.meta = cluster.a.start_meta()
    for node, survivors in ((cluster.a, 1), (cluster.b, 2)):
        node.await_back(survivors)
    wait_until(lambda: "key" in cluster.a.ask(MetaClient.keys), 5.0, "the key was replayed")
    cluster.b.do("serve")  # too early: the master has not said so
    assert (far.exist("key"), near.exist("key")) == (0, 0)
    assert far.put("other", size=SIZE) != 0
    cluster.a.do("serve")
    assert (far.exist("key"), near.exist("key")) == (1, 1)


@pytest.mark.parametrize("attempt", range(2))
def test_the_masters_endpoint_is_killed(make: Make, attempt: int) -> None:
    cluster = make(2)
    cluster.a.start_pool()
    cluster.b.start_pool(device=1)
    far, near = Load(cluster.b), cluster.a.client()  # near has no call in flight: nobody could answer it
    time.sleep(1.2)
    cluster.a.kill()
    time.sleep(0.5)
    cluster.a.launch()
    for node, survivors in ((cluster.a, 2), (cluster.b, 3)):
        node.await_back(survivors)
    far.hits_after(time.monotonic())
    time.sleep(1.5)
    far.end()
    status = cluster.b.do("status")
    assert (status["mode"], status["backend"]["deaths"], status["stranded"]) == ("serve", 0, 0)
    assert far.full.put("after", size=SIZE) == 0
    assert near.get_into("after", size=SIZE) == "ok"
    check_values(near, far.keys, ok_at_least=1.0)


def test_a_short_blackhole_costs_misses_and_nothing_else(make: Make) -> None:
    cluster = make(2, netns=True)
    cluster.b.start_pool()
    far, near = Load(cluster.b), Load(cluster.a)
    time.sleep(1.0)
    roles, links = cluster.a.roles(), cluster.a.do("status")["inbound"]["peers"][0]["links_total"]
    assert cluster.lab is not None
    cluster.lab.blackhole(1)
    status = cluster.b.until(lambda s: s["silent"] >= 2 and not s["backend"]["reachable"])
    assert (status["mode"], status["backend"]["deaths"]) == ("serve", 0)
    time.sleep(4.0)
    cluster.lab.heal(1)
    healed = time.monotonic()
    cluster.b.until(lambda s: s["silent"] == 0 and s["backend"]["reachable"])
    far.hits_after(healed)
    print(f"\nhits again {time.monotonic() - healed:.2f} s after the network was back")
    far.end()
    near.end()
    assert cluster.a.roles() == roles
    status = cluster.b.do("status")
    assert (status["orphans"], status["stranded"], status["mode"]) == (0, 0, "serve")
    # Questions whether the MetaService is there, and not one link of a client.
    assert cluster.a.do("status")["inbound"]["peers"][0]["links_total"] <= links + 3
    check_values(near.full, far.keys, ok_at_least=1.0)


def test_the_masters_node_is_lost_and_another_takes_over(make: Make) -> None:
    cluster = make(3, netns=True)
    lost, taken = cluster.a, cluster.c
    cluster.b.start_pool()
    cluster.c.start_pool(device=1)
    far = Load(cluster.b)
    time.sleep(1.0)
    assert cluster.lab is not None
    cluster.lab.blackhole(1)
    time.sleep(3.0)  # the lease runs out; on the lost node its guard kills the MetaService
    cluster.meta.kill()
    cluster.meta = taken.start_meta()
    cluster.follow(taken, 2, nodes=[cluster.b, cluster.c])
    served = time.monotonic()
    cluster.b.await_back(3)
    cluster.c.await_back(1)
    for node in (cluster.b, cluster.c):
        assert node.do("status")["mode"] == "recover"
    assert far.lookup.exist_many(far.keys) == [0] * len(far.keys)  # not purged yet
    wait_until(lambda: taken.roles().count("provider") == 2, 6.0, "the pool holders have their roles")
    cluster.open_up([cluster.c, cluster.b])
    far.hits_after(served)
    print(f"\nhits {time.monotonic() - served:.2f} s after the new MetaService was told of")
    time.sleep(1.0)
    far.end()
    check_values(far.full, far.keys, ok_at_least=0.9)
    # The lost node comes back and believes that it is master still.
    cluster.lab.heal(1)
    with pytest.raises(EndpointError, match="epoch 1 is over"):
        cluster.b.do("set_target", {"peer": lost.name}, epoch=1)
    lost.do("set_target", {"peer": taken.name}, epoch=2)
    cluster.open_up([lost])
    near = lost.client()
    assert near.get_many(far.keys, size=SIZE).count("wrong") == 0


def test_a_master_that_others_have_left_serves_nobody(make: Make) -> None:
    cluster = make(3, netns=True)
    cluster.a.start_pool()
    near = cluster.a.client()
    far = cluster.c.client()
    assert near.put("key", size=SIZE) == 0
    assert far.get_into("key", size=SIZE) == "ok"
    cluster.b.do("set_target", {"peer": "node-a"}, epoch=3)  # only node-b knows of an election
    cluster.a.until(lambda s: s["deposed"])
    assert (near.exist("key"), far.exist("key")) == (0, 0)
    assert near.put("other", size=SIZE) != 0
    # It was an election that it won itself: nothing is lost.
    for node in cluster.nodes:
        node.do("set_target", cluster.a.local if node is cluster.a else {"peer": "node-a"}, epoch=3)
    cluster.b.until(lambda s: bool(s["backend"]["reachable"]))
    assert (near.exist("key"), far.get_into("key", size=SIZE)) == (1, "ok")


def test_a_planned_change_of_master(make: Make) -> None:
    cluster = make(3)
    cluster.a.start_pool()
    cluster.b.start_pool(device=1)
    far, near = Load(cluster.b), Load(cluster.a)
    time.sleep(1.0)
    took = cluster.a.do("quiesce", 5.0)
    cluster.meta.kill()
    cluster.meta = cluster.c.start_meta()
    moved = time.monotonic()
    cluster.follow(cluster.c, 2)
    for node in (cluster.a, cluster.b):
        node.await_back(3)
    wait_until(lambda: cluster.c.roles().count("provider") == 2, 6.0, "the pool holders have their roles")
    cluster.open_up()
    for load in (far, near):
        load.hits_after(moved)
    print(f"\nquiet after {took:.2f} s, hits {time.monotonic() - moved:.2f} s after the change")
    time.sleep(1.0)
    written = far.end()["written"]
    near.end()
    check_values(near.full, far.keys, ok_at_least=1.0)
    check_values(near.full, written, ok_at_least=0.5)


def test_a_node_that_was_away_for_too_long(make: Make) -> None:
    cluster = make(2, netns=True, hop_seconds=3.0)
    cluster.a.start_pool()
    pool = cluster.b.start_pool(device=1)
    far, near = Load(cluster.b), Load(cluster.a)
    time.sleep(1.0)
    assert cluster.lab is not None
    cluster.lab.blackhole(2)
    wait_until(
        lambda: cluster.a.roles().count("provider") == 1, 12.0, "the MetaService has let go of its memory"
    )
    time.sleep(1.0)
    cluster.lab.heal(2)
    status = cluster.b.until(lambda s: bool(s["backend"]["reachable"]) and s["stranded"] == 1)
    assert [row["pid"] for row in status["clients"] if row["stranded"]] == [pool.pid]
    time.sleep(3.0)  # the pool goes on without it, and is not spoilt
    assert near.full.put_many([f"x{n}" for n in range(20)], size=SIZE) == [0] * 20
    pool = restart_pool(cluster, cluster.b, pool, device=1, proxies=2)
    assert cluster.a.roles().count("provider") == 2
    back = time.monotonic()
    assert far.full.put_many(far.keys, size=SIZE) == [0] * 20  # what was in the lost memory is written anew
    for load in (far, near):
        load.hits_after(back)
    time.sleep(1.0)
    for load in (far, near):
        load.end()
    segments = cluster.a.ask(MetaClient.segments)
    assert len(segments) == 2
    check_values(near.full, far.keys, ok_at_least=1.0)


def test_another_nodes_endpoint_is_killed(make: Make) -> None:
    cluster = make(2)
    cluster.a.start_pool()
    pool = cluster.b.start_pool(device=1)
    far, near = cluster.b.client(), Load(cluster.a)  # far has no call in flight: nobody could answer it
    time.sleep(1.2)
    cluster.b.kill()
    cluster.b.launch()
    cluster.b.until(lambda s: s["stranded"] == 1 and s["survivors"] == {"expected": 1, "back": 1})
    assert near.full.put("after", size=SIZE) == 0
    restart_pool(cluster, cluster.b, pool, device=1, proxies=2)
    near.hits_after(time.monotonic())
    time.sleep(1.5)
    near.end()
    assert far.get_into("after", size=SIZE) == "ok"
    assert far.put_many([f"x{n}" for n in range(20)], size=SIZE) == [0] * 20
    check_values(near.full, [f"x{n}" for n in range(20)], ok_at_least=1.0)


@pytest.mark.parametrize("fault", ["loss", "deaf-master", "deaf-node", "cable"])
def test_a_bad_network_blocks_nobody(make: Make, fault: str) -> None:
    if fault != "cable" and (why := netns_lab.why_no_filter()):
        pytest.skip(why)
    cluster = make(2, netns=True)
    cluster.b.start_pool()
    far, near = Load(cluster.b), Load(cluster.a)
    time.sleep(1.0)
    assert cluster.lab is not None
    match fault:
        case "loss":
            for number in (1, 2):
                cluster.lab.lose(number, 15)
        case "deaf-master":
            cluster.lab.deafen(1, 2)
        case "deaf-node":
            cluster.lab.deafen(2, 1)
        case _:
            cluster.lab.cut(2)
    time.sleep(5.0)
    for number in (1, 2):
        cluster.lab.heal(number)
    healed = time.monotonic()
    far.hits_after(healed, 15.0)
    print(f"\n{fault}: hits {time.monotonic() - healed:.2f} s after the network was back")
    time.sleep(1.0)
    far.end()
    near.end()
    assert cluster.b.do("status")["stranded"] == 0
    check_values(near.full, far.keys, ok_at_least=1.0)
