"""Mode etcd over real etcds that lose members, leases and data, and that have users. Epochs only rise."""

import asyncio
import base64
import contextlib
import json
import shutil
import ssl
import urllib.error
import urllib.request

import pytest
import trustme
from coordinator_suite import NODES, Cluster
from etcd_drivers import LEASE_SECONDS, serving
from etcd_lab import Etcd

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_client import EtcdClient, EtcdError
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.cluster.etcd_keys import Keys
from kvtierd.settings.cluster import EtcdTlsSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def master_epochs(cluster):
    return [s[3] for s in cluster.services()]


async def test_each_of_three_members_is_killed_in_turn(three):
    """One of them is etcd's leader. The master stays, or its successor has a later epoch; two dead end every term."""
    cluster, _ = await serving(three)
    for member in three.etcd.members:
        member.kill()
        await asyncio.sleep(LEASE_SECONDS + 1)
        await cluster.until(cluster.agreed)
        member.start()
        await asyncio.sleep(2.0)
    await cluster.until(cluster.agreed)
    for member in three.etcd.members[1:]:
        member.kill()
    dead = boottime_seconds()
    await cluster.until(lambda: not cluster.masters(), LEASE_SECONDS + 2)
    assert boottime_seconds() - dead < LEASE_SECONDS + 1.0
    three.etcd.members[1].start()
    await cluster.until(cluster.agreed)
    await cluster.close()
    cluster.check()
    assert master_epochs(cluster) == sorted(master_epochs(cluster))


async def test_a_lease_that_is_revoked_ends_the_term_at_once(one):
    """As by ``etcdctl lease revoke``: the watch tells, nobody waits for the next renewal."""
    cluster, master = await serving(one)
    epoch = cluster.standing(master).epoch
    client = EtcdClient(one.etcd.endpoints, None, attempt_seconds=2.0)
    found = await client.read(Keys("/kvtierd", "prod").read())
    lease = next(pair.lease for pair in found.kvs if pair.lease)
    revoked = boottime_seconds()
    await client.revoke(lease)
    await client.close()
    await cluster.until(lambda: any(e.at_seconds > revoked and e.standing.role != "master"
                                    for e in cluster.said[master]), 5.0)  # fmt: skip
    ended = next(
        e.at_seconds for e in cluster.said[master] if e.at_seconds > revoked and e.standing.role != "master"
    )
    assert ended - revoked < LEASE_SECONDS / 3
    again = await cluster.until(cluster.agreed)
    assert cluster.standing(again).epoch > epoch
    await cluster.close()
    cluster.check()


async def test_a_lease_that_expires_while_the_master_is_cut_off(one):
    """The master has ended by its own clock before etcd lets go of the key."""
    cluster, master = await serving(one)
    await one.lose(master)
    client = EtcdClient(one.etcd.endpoints, None, attempt_seconds=2.0)
    keys = Keys("/kvtierd", "prod")
    while True:
        ended = cluster.standing(master).role != "master"  # before the key is looked at
        found = await client.read(keys.read())
        holder = keys.snapshot(found.header, found).holder
        if holder is None or holder.node != master:
            break
        await asyncio.sleep(0.02)
    assert ended
    await client.close()
    others = [name for name in NODES if name != master]
    await cluster.until(lambda: cluster.agreed(*others))
    await cluster.close()
    cluster.check()


async def test_two_candidates_for_one_place_again_and_again(one):
    """Both see the vacancy in the same moment; one transaction goes through."""
    names = ["a", "b"]
    await one.make(names)
    client = EtcdClient(one.etcd.endpoints, None, attempt_seconds=2.0)
    keys = Keys("/kvtierd", "prod")
    cluster = Cluster(one, names, [one.coordinator(name, names) for name in names])
    cluster.begin()
    epochs = []
    for _ in range(10):
        master = await cluster.until(lambda: cluster.agreed(*names))
        epochs.append(cluster.standing(master).epoch)
        found = await client.read(keys.read())
        await client.revoke(keys.snapshot(found.header, found).holder.lease)
        await cluster.until(
            lambda epoch=epochs[-1]: (m := cluster.agreed(*names)) and cluster.standing(m).epoch > epoch
        )
    assert epochs == sorted(set(epochs))
    await client.close()
    await cluster.close()
    cluster.check()


async def test_an_etcd_that_was_emptied_while_all_nodes_were_down(one):
    """What the nodes have on disk is all that is left to tell of the epochs before."""
    cluster, master = await serving(one)
    for to in [name for name in NODES if name != master]:
        await cluster.hand_over(await cluster.until(cluster.agreed), to)
        await cluster.until(lambda to=to: cluster.agreed() == to)
    master = cluster.agreed()
    epoch = cluster.standing(master).epoch
    await cluster.close()
    cluster.check()
    member = one.etcd.members[0]
    member.kill()
    member.wipe()
    member.start()
    # One has seen the latest, one an earlier epoch, one is new. Whoever is first, no epoch of before is given out.
    seen = {NODES[0]: (epoch, master), NODES[1]: (epoch - 1, ""), NODES[2]: (0, "")}
    cluster = Cluster(
        one, NODES,
        [one.coordinator(n, highest_epoch=e, highest_master=m) for n, (e, m) in seen.items()],
    )  # fmt: skip
    cluster.begin()
    again = await cluster.until(lambda: (a := cluster.agreed()) and cluster.standing(a).epoch > epoch and a)
    assert cluster.standing(again).epoch > epoch
    await cluster.may_serve(again)
    assert all(e.standing.epoch >= seen[name][0] for name in NODES for e in cluster.said[name])
    followed = [e.standing for e in cluster.said[NODES[0]] if e.standing.master]
    assert all(standing.epoch > epoch for standing in followed)
    await cluster.close()
    cluster.check()


async def test_an_etcd_that_was_restored_from_a_backup(one):
    """It is back at an earlier revision, with the key of a master of long ago, whose lease it revives."""
    cluster, master = await serving(one)
    member = one.etcd.members[0]
    member.kill()
    backup = member.data.with_name("backup")
    shutil.copytree(member.data, backup)
    member.start()
    restarted = boottime_seconds()
    await cluster.until(
        lambda: (a := cluster.agreed()) and cluster.standing(a).until_seconds > restarted + LEASE_SECONDS
    )
    for to in [name for name in NODES if name != master]:
        await cluster.hand_over(await cluster.until(cluster.agreed), to)
        await cluster.until(lambda to=to: cluster.agreed() == to)
        await cluster.may_serve(to)
    epoch = cluster.standing(cluster.agreed()).epoch
    member.kill()
    member.wipe()
    shutil.copytree(backup, member.data)
    member.start()
    again = await cluster.until(lambda: (a := cluster.agreed()) and cluster.standing(a).epoch > epoch and a)
    await cluster.may_serve(again)
    await cluster.close()
    cluster.check()


async def test_a_node_that_knows_better_than_etcd_from_the_others(one):
    """Another epoch was followed already, as a peer says: the master gives up its own and takes a later one."""
    cluster, master = await serving(one)
    known = (cluster.standing(master).epoch + 1000, next(name for name in NODES if name != master))
    cluster.nodes[master]._fence = lambda: known
    again = await cluster.until(
        lambda: (a := cluster.agreed()) and cluster.standing(a).epoch > known[0] and a
    )
    assert cluster.standing(again).serve_after_seconds > 0.0
    await cluster.close()
    cluster.check()


# -- users


def ask(etcd, context, verb, **what):
    """One request to etcd's JSON gateway."""
    request = urllib.request.Request(f"https://{etcd.endpoints[0]}/v3/{verb}", json.dumps(what).encode())
    try:
        with urllib.request.urlopen(request, context=context, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{verb}: {error.read().decode()}") from None


def in_base64(text):
    return base64.b64encode(text.encode()).decode()


async def test_an_etcd_with_users(program, tmp_path):
    """The certificate's name is the user; what docs/cluster.md grants is enough, and nothing outside can be written."""
    ca = trustme.CA()
    (tmp_path / "ca.pem").write_bytes(ca.cert_pem.bytes())
    names = {"server": "", "kvtierd": "kvtierd", "stranger": "stranger"}
    for name, common_name in names.items():
        issued = ca.issue_cert("127.0.0.1", common_name=common_name or None)
        (tmp_path / f"{name}.pem").write_bytes(issued.cert_chain_pems[0].bytes())
        (tmp_path / f"{name}.key").write_bytes(issued.private_key_pem.bytes())

    def tls(who):
        return EtcdTlsSettings(
            ca=str(tmp_path / "ca.pem"), cert=str(tmp_path / f"{who}.pem"), key=str(tmp_path / f"{who}.key")
        )

    def coordinator(name, who):
        config = EtcdConfig("prod", name, ("a", "b"), etcd.endpoints, lease_seconds=LEASE_SECONDS)
        return EtcdCoordinator(config, tls(who), boot=name)

    options = [
        "--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key"),
        "--trusted-ca-file", str(tmp_path / "ca.pem"), "--client-cert-auth",
    ]  # fmt: skip
    etcd = Etcd(program, options=options)
    try:
        etcd.start()
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
        for user in ("root", "kvtierd", "stranger"):
            ask(etcd, context, "auth/user/add", name=user, options={"no_password": True})
        for role in ("root", "kvtierd"):
            ask(etcd, context, "auth/role/add", name=role)
            ask(etcd, context, "auth/user/grant", user=role, role=role)
        permission = {
            "permType": "READWRITE",
            "key": in_base64("/kvtierd/prod/"),
            "range_end": in_base64("/kvtierd/prod0"),
        }
        ask(etcd, context, "auth/role/grant", name="kvtierd", perm=permission)
        ask(etcd, context, "auth/enable")

        cluster = Cluster(None, ["a", "b"], [coordinator("a", "kvtierd"), coordinator("b", "kvtierd")])
        cluster.begin()
        first = await cluster.until(cluster.agreed)
        await cluster.may_serve(first)
        await asyncio.sleep(LEASE_SECONDS)
        to = "b" if first == "a" else "a"
        await cluster.hand_over(first, to)
        assert await cluster.until(cluster.agreed) == to
        await cluster.close()
        cluster.check()

        stranger = Cluster(None, ["a"], [coordinator("a", "stranger")])
        stranger.begin()
        await stranger.until(lambda: "permission denied" in stranger.standing("a").why)
        await asyncio.sleep(LEASE_SECONDS)
        assert stranger.standing("a").role == "unknown"
        await stranger.close()

        client = EtcdClient(etcd.endpoints, tls("kvtierd"), attempt_seconds=2.0)
        with pytest.raises(EtcdError, match="permission denied"):
            await client.read(Keys("/kvtierd", "other").read())
        with contextlib.suppress(EtcdError):
            await client.close()
    finally:
        etcd.close()
