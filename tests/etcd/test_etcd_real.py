"""Mode etcd over real etcds that are killed, frozen and cut off. Never two standings "master" whose times overlap."""

import asyncio

import pytest
import trustme
from coordinator_suite import NODES, Cluster, CoordinatorSuite
from etcd_drivers import LEASE_SECONDS, serving
from etcd_lab import Etcd

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.errors import ClusterError
from kvtierd.settings.cluster import EtcdTlsSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class TestEtcd(CoordinatorSuite):
    """The suite of all coordinators."""

    @pytest.fixture
    def driver(self, one):
        return one


async def test_a_frozen_etcd(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    one.etcd.members[0].freeze()
    until = cluster.standing(master).until_seconds
    await cluster.until(lambda: not cluster.masters(), LEASE_SECONDS + 2)
    assert boottime_seconds() >= until - 0.05
    assert boottime_seconds() < until + 1.0
    await asyncio.sleep(2 * LEASE_SECONDS)
    assert not cluster.masters()
    followers = [name for name in NODES if name != master]
    assert {cluster.standing(name).master for name in followers} == {master}  # what they knew
    one.etcd.members[0].thaw()
    again = await cluster.until(cluster.agreed)
    assert cluster.standing(again).epoch > epoch
    await cluster.may_serve(again)
    await cluster.close()
    cluster.check()


async def test_an_etcd_that_is_frozen_for_less_than_the_lease(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    for _ in range(5):
        one.etcd.members[0].freeze()
        await asyncio.sleep(LEASE_SECONDS / 4)
        one.etcd.members[0].thaw()
        await asyncio.sleep(LEASE_SECONDS / 2)
    again = await cluster.until(cluster.agreed)
    assert cluster.standing(again).epoch >= epoch
    await cluster.close()
    cluster.check()


async def test_an_etcd_that_is_killed_and_comes_back(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    one.etcd.members[0].kill()
    await cluster.until(lambda: not cluster.masters(), LEASE_SECONDS + 2)
    assert "lease was not renewed" in next(
        e.standing.why for e in reversed(cluster.said[master]) if e.standing.role == "follower"
    )
    one.etcd.members[0].start()
    again = await cluster.until(cluster.agreed)
    assert cluster.standing(again).epoch >= epoch
    await cluster.close()
    cluster.check()


async def test_an_etcd_that_was_emptied(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    one.etcd.members[0].kill()
    one.etcd.members[0].wipe()
    one.etcd.members[0].start()
    again = await cluster.until(lambda: (a := cluster.agreed()) and cluster.standing(a).epoch > epoch and a)
    assert cluster.standing(again).epoch > epoch
    await cluster.may_serve(again)
    await cluster.close()
    cluster.check()


async def test_a_master_that_is_killed(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    lost = boottime_seconds()
    cluster.tasks.pop(master).cancel()
    others = [name for name in NODES if name != master]
    successor = await cluster.until(lambda: cluster.agreed(*others))
    took = cluster.standing(successor).serve_after_seconds - lost
    print(f"killed: the next one may serve after {took:.2f} s with a lease of {LEASE_SECONDS:g} s")
    assert cluster.standing(successor).epoch > epoch
    assert took < LEASE_SECONDS + 6
    await cluster.close()
    cluster.check()


async def test_a_restarted_kvtierd_goes_on(one):
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    cluster.tasks.pop(master).cancel()
    await cluster.nodes[master].close()
    cluster.nodes[master] = one.coordinator(
        master, highest_epoch=epoch, highest_master=master, held_epoch=epoch
    )
    cluster.begin(master)
    assert await cluster.until(cluster.agreed) == master
    assert cluster.standing(master).epoch == epoch
    assert cluster.standing(master).serve_after_seconds == 0.0
    await cluster.close()
    cluster.check()


async def test_members_are_lost_one_by_one(three):
    """One of three may be lost, whichever; of two that are lost everybody notices."""
    cluster, _ = await serving(three)
    for member in three.etcd.members:
        member.freeze()
        await asyncio.sleep(2 * LEASE_SECONDS)
        await cluster.until(cluster.agreed)
        member.thaw()
        await asyncio.sleep(1.0)
    await cluster.until(cluster.agreed)
    three.etcd.members[0].kill()
    three.etcd.members[1].kill()
    await cluster.until(lambda: not cluster.masters(), LEASE_SECONDS + 3)
    three.etcd.members[0].start()
    await cluster.until(cluster.agreed)
    await cluster.close()
    cluster.check()


async def test_a_leader_of_etcd_that_was_frozen_promises_nothing(three):
    """Frozen for about the length of a lease, and back: its word of before does not count (etcd issue 15247)."""
    cluster, _ = await serving(three)
    for round_ in range(6):
        member = three.etcd.members[round_ % 3]
        member.freeze()
        await asyncio.sleep(LEASE_SECONDS * (0.4 + 0.15 * round_))
        member.thaw()
        await asyncio.sleep(0.5)
    await cluster.until(cluster.agreed)
    await cluster.close()
    cluster.check()


async def test_over_tls(program, tmp_path):
    """Certificates both ways; without one, or with another authority's, etcd is as good as away."""
    ca, other = trustme.CA(), trustme.CA()
    files = {}
    for name, authority in (("server", ca), ("client", ca), ("stranger", other)):
        issued = authority.issue_cert("127.0.0.1", common_name=name)
        files[name] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        files[name][0].write_bytes(issued.cert_chain_pems[0].bytes())
        files[name][1].write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "ca.pem").write_bytes(ca.cert_pem.bytes())
    options = [
        "--cert-file", str(files["server"][0]), "--key-file", str(files["server"][1]),
        "--trusted-ca-file", str(tmp_path / "ca.pem"), "--client-cert-auth",
    ]  # fmt: skip
    etcd = Etcd(program, options=options)

    def coordinator(name, who):
        config = EtcdConfig("prod", name, ("a", "b"), etcd.endpoints, lease_seconds=LEASE_SECONDS)
        cert, key = files[who] if who else (tmp_path / "missing.pem", tmp_path / "missing.key")
        return EtcdCoordinator(
            config, EtcdTlsSettings(ca=str(tmp_path / "ca.pem"), cert=str(cert), key=str(key)), boot=name
        )

    try:
        etcd.start()
        cluster = Cluster(None, ["a", "b"], [coordinator("a", "client"), coordinator("b", "stranger")])
        cluster.begin()
        await cluster.until(lambda: cluster.masters() == ["a"])
        await asyncio.sleep(LEASE_SECONDS)
        assert cluster.standing("b").role == "unknown"
        cluster.tasks.pop("b").cancel()
        await cluster.nodes["b"].close()
        cluster.nodes["b"] = coordinator("b", None)
        cluster.begin("b")
        await cluster.until(
            lambda: cluster.standing("b").role == "unknown" and "missing.key" in cluster.standing("b").why
        )
        await cluster.close()
        cluster.check()
    finally:
        etcd.close()


async def test_what_is_no_etcd():
    async def hello(reader, writer):
        writer.write(b"220 hello\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    config = EtcdConfig("prod", "a", ("a",), (f"127.0.0.1:{port}", "127.0.0.1:1"), lease_seconds=1.0)
    cluster = Cluster(None, ["a"], [EtcdCoordinator(config, boot="boot")])
    cluster.begin()
    await cluster.until(lambda: cluster.standing("a").why not in {"", "etcd has not answered yet"})
    assert cluster.standing("a").role == "unknown"
    problems = {contact.name: contact.problem for contact in cluster.nodes["a"].peers()}
    assert "refused" in problems["127.0.0.1:1"].lower(), problems
    with pytest.raises(ClusterError):
        await cluster.nodes["a"].hand_over("b")
    await cluster.close()
    server.close()
