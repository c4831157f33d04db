"""Endpoints of several nodes as processes, with certificates, before a fake MetaService on node-a's loopback."""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from endpoint_lab import Client, EndpointCluster, FakeMeta, answer_of, exist

from kvtierd.errors import EndpointError
from kvtierd.memcache import framing
from kvtierd.memcache.framing import Opcode
from kvtierd.workload.demo import free_ports

MISS, LOST = framing.RESULT_NOT_FOUND, framing.RESULT_NOT_LINKED


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[str], EndpointCluster]]:
    made: list[EndpointCluster] = []

    def make_one(letters: str) -> EndpointCluster:
        made.append(EndpointCluster(tmp_path, letters))
        return made[-1]

    yield make_one
    for cluster in made:
        await cluster.close()


@pytest.fixture
async def pair(make: Callable[[str], EndpointCluster]) -> EndpointCluster:
    """node-a is master, node-b reaches it."""
    cluster = make("ab")
    await cluster.start()
    return cluster


def register(sequence: int, *, memory: bool) -> bytes:
    body = struct.pack("<hhIQQ", 0, Opcode.REGISTER, 0, 3, int(memory)) + bytes(32)
    return framing.encode_frame(Opcode.REGISTER, sequence, body)


async def store_link(
    cluster: EndpointCluster, letter: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on a node's config-store port that works."""
    reader, writer = await asyncio.open_connection(cluster[letter].ip, cluster[letter].store)
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.read(100), 5) == b"HELLO"
    return reader, writer


async def test_a_client_reaches_the_other_node(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    for sequence in range(1, 21):
        assert answer_of(await client.ask(exist(sequence))) == 0
    _, store_writer = await store_link(pair, "b")
    status = await pair["b"].control.status()
    assert (status["clients"][0]["lookups"], status["clients"][0]["lookup_hits"]) == (20, 20)
    assert status["target"] == {"peer": "node-a"}
    assert status["outbound"]["peer"] == "node-a"
    master = await pair["a"].control.status()
    assert status["backend"]["life"] == master["backend"]["life"]
    assert master["connections"] == 0  # the peers' links are counted for themselves
    (row,) = master["inbound"]["peers"]
    assert (row["name"], row["links"], row["refused"]) == ("node-b", 2, {})
    assert row["bytes_from"] > 20 * 20
    assert row["bytes_to"] > 20 * 20
    client.writer.close()
    store_writer.close()
    master = await pair["a"].until(lambda s: s["inbound"]["links"] == 0)
    assert master["inbound"]["peers"][0]["bytes_from"] == row["bytes_from"]
    assert (
        master["inbound"]["peers"][0]["links_total"] >= 3
    )  # and the question whether the MetaService is there


async def test_the_metaservice_dies_and_returns(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    pair.fake.frozen = True
    client.writer.write(exist(2))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    pair.fake.kill()
    pair.fake.frozen = False
    assert answer_of(await client.frame()) == LOST
    assert time.monotonic() - started < 0.3
    status = await pair["b"].until(lambda s: s["backend"]["deaths"] == 1)
    assert (status["mode"], status["admission"]) == ("recover", "survivors")
    assert answer_of(await client.ask(exist(3))) == MISS
    await pair.fake.start()
    await client.ended()
    again = await pair["b"].client()
    await pair["b"].control.serve()
    assert (
        answer_of(await again.ask(exist(4))) == MISS
    )  # the master has not purged yet, whatever node-b was told
    await pair["a"].control.serve()
    assert answer_of(await again.ask(exist(5))) == 0
    again.writer.close()


async def test_a_death_that_node_b_did_not_see_is_noticed(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    await cluster.start()
    life = (await cluster["b"].control.status())["backend"]["life"]
    cluster.fake.kill()  # node-b has no link that could break
    newcomer = asyncio.create_task(Client.connect(cluster["a"].meta))  # node-a has one, and so notices
    await cluster["a"].until(lambda s: s["backend"]["deaths"] == 1)
    await cluster.fake.start()
    await cluster["a"].until(lambda s: s["backend"]["reachable"])
    (await newcomer).writer.close()
    status = await cluster["b"].control.status()
    assert (status["backend"]["deaths"], status["backend"]["reachable"]) == (0, True)
    link = await Client.connect(cluster["b"].meta, host=cluster["b"].ip)  # would take a survivor's rank
    await cluster["a"].until(lambda s: s["inbound"]["refused"].get("not-admitted", 0) >= 1)
    with pytest.raises(TimeoutError):
        await link.greeted(0.3)
    await cluster["a"].control.admit("all")
    # Told by the answer to its hello.
    status = await cluster["b"].until(lambda s: s["backend"]["deaths"] == 1 and s["waiting"] == 1)
    assert (status["mode"], status["admission"]) == ("recover", "survivors")
    assert status["backend"]["life"] not in (life, None)
    await cluster["b"].control.admit("all")
    assert await link.greeted() == framing.HANDSHAKE_ACCEPTED
    link.writer.close()


async def test_the_masters_endpoint_is_killed(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    await asyncio.sleep(0.7)  # the state is saved in the background
    pair.fake.frozen = True
    client.writer.write(exist(2))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    pair["a"].kill()
    assert answer_of(await client.frame()) == LOST
    assert time.monotonic() - started < 0.3
    pair.fake.frozen = False
    assert answer_of(await client.ask(exist(3))) == MISS
    status = await pair["b"].until(lambda s: not s["backend"]["reachable"])
    assert "node-a" in status["backend"]["last_error"]
    pair["a"].launch()
    await client.ended()
    again = await pair["b"].client()
    status = await pair["b"].control.status()
    # The same MetaService, so nothing it knows is in doubt.
    assert (status["mode"], status["backend"]["deaths"], status["stranded"]) == ("serve", 0, 0)
    assert answer_of(await again.ask(exist(4))) == 0
    again.writer.close()


async def test_a_frozen_master_blocks_nobody_and_costs_no_link(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    assert pair["a"].process is not None
    pair["a"].process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    assert answer_of(await client.ask(exist(2))) == LOST
    assert 0.7 < time.monotonic() - started < 1.2
    started = time.monotonic()
    assert answer_of(await client.ask(exist(3))) == MISS
    assert time.monotonic() - started < 0.2
    status = await pair["b"].until(lambda s: not s["backend"]["reachable"])
    assert (status["silent"], status["mode"], status["backend"]["deaths"]) == (1, "serve", 0)
    pair["a"].process.send_signal(signal.SIGCONT)
    await pair["b"].until(lambda s: s["backend"]["reachable"] and s["silent"] == 0)
    assert answer_of(await client.ask(exist(4))) == 0  # on the same connection
    client.writer.close()


async def test_another_master(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("abc")
    await cluster.start()
    other = FakeMeta(*free_ports(2))
    await other.start()
    target = {"meta": f"127.0.0.1:{other.ports[0]}", "config_store": f"127.0.0.1:{other.ports[1]}"}
    try:
        client = await cluster["b"].client()
        local = await cluster["a"].client()
        await client.ask(exist(1))
        await local.ask(exist(1))
        cluster.fake.frozen = True
        client.writer.write(exist(2))
        await asyncio.sleep(0.05)
        started = time.monotonic()
        await cluster["c"].control.set_target(target, epoch=2)
        await cluster["b"].control.set_target({"peer": "node-c"}, epoch=2)
        assert answer_of(await client.frame()) == LOST
        assert time.monotonic() - started < 0.5
        cluster.fake.frozen = False
        status = await cluster["b"].control.status()
        assert (status["mode"], status["admission"], status["epoch"]) == ("recover", "survivors", 2)
        assert status["survivors"] == {"expected": 1, "back": 0}
        await client.ended()  # node-c is there
        client = await cluster["b"].client()
        assert (await cluster["b"].control.status())["survivors"]["back"] == 1
        cluster.fake.seen.clear()
        for letter in "bc":
            await cluster[letter].control.serve()
            await cluster[letter].control.admit("all")
        assert answer_of(await client.ask(exist(3))) == 0
        assert (other.seen, cluster.fake.seen) == ([Opcode.IS_EXIST], [])
        # node-a hears of it last, and its clients go over as well
        await cluster["a"].control.set_target({"peer": "node-c"}, epoch=2)
        await local.ended()
        local = await cluster["a"].client()
        await cluster["a"].control.serve()
        assert answer_of(await local.ask(exist(4))) == 0
        assert other.seen == [Opcode.IS_EXIST] * 2
        for one in (client, local):
            one.writer.close()
    finally:
        other.kill()


async def test_epochs_are_kept_and_obeyed(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    await cluster.start(epoch=5)
    node = cluster["a"]

    async def refusal(target: dict[str, str] | None, epoch: int | None) -> str:
        with pytest.raises(EndpointError) as caught:
            await node.control.set_target(target, epoch=epoch)
        return caught.value.stable_code

    client = await node.client()
    await node.control.set_target(cluster.local, epoch=5)  # again: nothing happens
    assert answer_of(await client.ask(exist(1))) == 0
    for _ in range(2):
        assert await refusal(cluster.local, 4) == "endpoint.stale-epoch"
        assert await refusal(None, 4) == "endpoint.stale-epoch"
        assert await refusal(cluster.local, None) == "endpoint.stale-epoch"
        assert await refusal({"peer": "node-b"}, 5) == "endpoint.epoch-conflict"
        assert await refusal({"peer": "node-x"}, 6) == "endpoint.request"
        assert await refusal({"peer": "node-a"}, 6) == "endpoint.request"
        node.kill()  # set_target is on disk when it is answered
        node.launch()
        status = await node.until(lambda s: s["backend"]["reachable"])
        assert (status["epoch"], status["target"]) == (5, cluster.local)
    client.writer.close()
    node.kill()
    state = node.folder / "state.json"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    state.write_text(state.read_text().replace(boot_id, "an earlier boot"))
    node.launch()
    status = await node.until(lambda s: s["epoch"] == 5)
    assert status["target"] is None  # after a reboot the daemon has to say whether that is still so
    assert await refusal(cluster.local, 4) == "endpoint.stale-epoch"
    assert await refusal({"peer": "node-b"}, 5) == "endpoint.epoch-conflict"
    await node.control.set_target(cluster.local, epoch=5)
    await node.until(lambda s: s["backend"]["reachable"])


async def test_who_is_behind_cannot_reach_the_master(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    await pair["a"].control.set_target(pair.local, epoch=2)  # the same master, elected again
    assert answer_of(await client.ask(exist(2))) == 0  # what is there may stay
    status = await pair["b"].control.status()
    assert (status["epoch"], status["epoch_seen"]) == (1, 1)
    _, writer = await asyncio.open_connection(pair["b"].ip, pair["b"].store)
    status = await pair["b"].until(lambda s: s["epoch_seen"] == 2)
    assert (status["outbound"]["refused"], status["deposed"]) == ("stale-epoch", False)
    assert answer_of(await client.ask(exist(3))) == MISS  # what node-b was told is over
    assert pair.fake.seen == [Opcode.IS_EXIST] * 2
    with pytest.raises(EndpointError, match="epoch 1 is over"):
        await pair["b"].control.set_target({"peer": "node-a"}, epoch=1)
    await pair["b"].control.set_target({"peer": "node-a"}, epoch=2)
    assert answer_of(await client.ask(exist(4))) == 0  # on the link of before: the master is the same
    client.writer.close()
    writer.close()


async def test_a_deposed_master_serves_nobody(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("abc")
    await cluster.start()
    local, remote = await cluster["a"].client(), await cluster["c"].client()
    assert answer_of(await local.ask(exist(1))) == 0
    assert answer_of(await remote.ask(exist(1))) == 0
    await cluster["b"].control.set_target({"peer": "node-a"}, epoch=7)  # node-b knows more than node-a
    status = await cluster["a"].until(lambda s: s["deposed"])
    assert (status["epoch"], status["epoch_seen"], status["mode"]) == (1, 7, "serve")
    await cluster["b"].until(
        lambda s: s["outbound"]["refused"] == "deposed" and not s["backend"]["reachable"]
    )
    for client in (local, remote):
        assert answer_of(await client.ask(exist(2))) == MISS
    waiting = await Client.connect(cluster["c"].meta, host=cluster["c"].ip)
    await cluster["c"].until(lambda s: s["epoch_seen"] == 7 and s["waiting"] == 1)  # it asked, and was told
    assert len(cluster.fake.seen) == 2
    waiting.writer.close()
    cluster["a"].kill()
    cluster["a"].launch()  # it knows that still
    assert (await cluster["a"].until(lambda s: s["epoch_seen"] == 7))["deposed"]
    with pytest.raises(EndpointError, match="epoch 7 is known here"):
        await cluster["a"].control.set_target(cluster.local, epoch=6)
    await cluster["a"].control.set_target(cluster.local, epoch=7)
    await cluster["b"].until(lambda s: s["backend"]["reachable"])
    for client in (local, remote):
        client.writer.close()


async def test_who_is_not_master_relays_for_nobody(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("abc")
    await cluster.start()
    await cluster["c"].control.set_target({"peer": "node-b"}, epoch=2)
    status = await cluster["c"].until(lambda s: s["outbound"]["refused"] == "not-master")
    assert not status["backend"]["reachable"]
    status = await cluster["b"].until(lambda s: s["epoch_seen"] == 2)
    assert (status["deposed"], status["inbound"]["refused"]["not-master"] >= 1) == (False, True)


async def test_no_master_at_present(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    await cluster.fake.start()
    node = cluster["a"]
    node.launch()
    await node.until(lambda s: s["target"] is None and not s["backend"]["reachable"])
    waiting = await Client.connect(node.meta)
    await node.until(lambda s: s["waiting"] == 1)
    await node.control.set_target(cluster.local, epoch=1)
    await node.control.admit("all")
    assert await waiting.greeted() == framing.HANDSHAKE_ACCEPTED
    await node.control.serve()
    assert answer_of(await waiting.ask(exist(1))) == 0
    await node.control.set_target(None, epoch=1)  # the master is away, and nobody follows it yet
    status = await node.until(lambda s: s["suspended"])
    assert not status["backend"]["reachable"]
    assert answer_of(await waiting.ask(exist(2))) == MISS
    newcomer = await Client.connect(node.meta)
    await node.until(lambda s: s["waiting"] == 1)
    await node.control.set_target(cluster.local, epoch=1)
    assert await newcomer.greeted() == framing.HANDSHAKE_ACCEPTED
    assert answer_of(await waiting.ask(exist(3))) == 0  # on the same link
    await node.control.set_target(None, epoch=2)  # an election without a result
    assert answer_of(await waiting.ask(exist(4))) == MISS
    status = await node.control.status()
    assert (status["target"], status["epoch"], status["orphans"]) == (None, 2, 0)
    await node.control.set_target({"peer": "node-b"}, epoch=2)  # now it is another one
    status = await node.until(lambda s: s["orphans"] == 2)
    assert (status["target"], status["suspended"]) == ({"peer": "node-b"}, False)
    assert answer_of(await waiting.ask(exist(5))) == MISS
    assert len(cluster.fake.seen) == 2
    for client in (waiting, newcomer):
        client.writer.close()


async def test_the_masters_quiesce_holds_for_all(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    await pair["a"].control.quiesce(2.0, quiet_seconds=0.1)
    started = time.monotonic()
    assert answer_of(await client.ask(exist(2))) == MISS
    assert 0.2 < time.monotonic() - started < 0.6
    client.writer.write(exist(3))
    await asyncio.sleep(0.1)
    await pair["a"].control.serve()
    assert answer_of(await client.frame()) == 0
    pair.fake.frozen = True
    client.writer.write(exist(4))
    await asyncio.sleep(0.05)
    with pytest.raises(EndpointError, match="1 requests in flight"):
        await pair["a"].control.quiesce(0.2)
    pair.fake.frozen = False
    client.writer.close()


async def provider(cluster: EndpointCluster) -> tuple[Client, asyncio.StreamWriter]:
    """A client on node-b that brings memory, with both its links."""
    _, store = await store_link(cluster, "b")
    client = await cluster["b"].client()
    await client.ask(register(1, memory=True))
    return client, store


async def test_memory_that_comes_back_alone_is_not_taken_back(pair: EndpointCluster) -> None:
    client, store = await provider(pair)
    # All together is no harm: nobody was told that somebody left.
    assert await pair["a"].control.cut() == 2
    await client.ended()
    store.close()
    client, store = await provider(pair)
    assert (await pair["b"].control.status())["stranded"] == 0
    assert (await pair["a"].control.drop_peer("node-b")) == 2  # as a network would that was away for too long
    await client.ended()
    store.close()
    _, writer = await asyncio.open_connection(pair["b"].ip, pair["b"].store)
    status = await pair["b"].until(lambda s: s["stranded"] == 1)
    assert status["survivors"] == {"expected": 0, "back": 0}
    assert status["clients"][0]["stranded"]
    assert pair["b"].log.count("started anew") == 1
    assert (await pair["a"].control.status())["inbound"]["peers"][0]["refused"]["late-return"] == 1
    await asyncio.sleep(0.7)
    pair["b"].kill()
    pair["b"].launch()  # it knows that still
    assert (await pair["b"].until(lambda s: s["backend"]["reachable"]))["stranded"] == 1
    await pair["a"].control.cut()
    await asyncio.sleep(0.2)
    assert (await pair["b"].control.status())["stranded"] == 1  # the others do not take it back in any era
    writer.close()


async def test_a_client_without_memory_may_come_back(pair: EndpointCluster) -> None:
    _, store = await store_link(pair, "b")
    client = await pair["b"].client()
    await client.ask(register(1, memory=False))
    await pair["a"].control.drop_peer("node-b")
    await client.ended()
    store.close()
    _, store = await store_link(pair, "b")
    client = await pair["b"].client()
    assert answer_of(await client.ask(exist(2))) == 0
    client.writer.close()
    store.close()


async def test_only_the_master_cuts(pair: EndpointCluster) -> None:
    with pytest.raises(EndpointError, match="cannot be cut here") as caught:
        await pair["b"].control.cut()
    assert caught.value.stable_code == "endpoint.not-master"


async def test_links_of_one_peer_are_bounded(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    cluster["a"].config["max_peer_links"] = 2
    await cluster.start()
    clients = [await cluster["b"].client() for _ in range(2)]
    third = await Client.connect(cluster["b"].meta, host=cluster["b"].ip)
    # Where a question of the other endpoint's is under way, there is one link more for a moment.
    await cluster["a"].until(
        lambda s: s["inbound"]["refused"].get("too-many", 0) >= 1 and s["inbound"]["peers"][0]["links"] == 2
    )
    clients[0].writer.close()
    assert await third.greeted() == framing.HANDSHAKE_ACCEPTED
    for client in (*clients, third):
        client.writer.close()


async def test_the_list_of_peers_is_read_again(pair: EndpointCluster) -> None:
    client = await pair["b"].client()
    await client.ask(exist(1))
    node = pair["a"]
    peers = node.config["peers"]
    node.config["peers"] = [peer for peer in peers if peer["name"] != "node-b"]
    node.write_config()
    await node.control.reload()
    await pair["b"].until(lambda s: s["outbound"]["refused"] == "unknown-peer")
    assert answer_of(await client.ask(exist(2))) == MISS
    node.config["peers"] = peers
    node.write_config()
    assert await node.control.reload() == ["node-a", "node-b"]
    await client.ended()
    client = await pair["b"].client()
    assert answer_of(await client.ask(exist(3))) == 0
    client.writer.close()
    node.config["max_connections"] = 7
    node.write_config()
    with pytest.raises(EndpointError, match="max_connections: cannot change") as caught:
        await node.control.reload()
    assert caught.value.stable_code == "endpoint.restart-needed"


async def test_plain_tcp_between_nodes_when_written_out(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    for node in cluster.nodes.values():
        node.config |= {"tls": None, "insecure": True}
    await cluster.start()
    client = await cluster["b"].client()
    assert answer_of(await client.ask(exist(1))) == 0
    status = await cluster["a"].control.status()
    assert status["tls"] is None
    assert status["inbound"]["peers"][0]["name"] == "node-b"
    client.writer.close()


async def test_a_late_address_is_waited_for(make: Callable[[str], EndpointCluster]) -> None:
    cluster = make("ab")
    node = cluster["a"]
    taken = await asyncio.start_server(lambda r, w: w.close(), node.ip, node.peer_port)
    await cluster.fake.start()
    node.launch()
    status = await node.until(lambda s: "is taken" in s["inbound"]["listen_error"])
    assert status["protocol"] == 2
    await node.control.set_target(cluster.local, epoch=1)
    await node.control.admit("all")
    client = await node.client()  # this host's clients are served meanwhile
    taken.close()
    await node.until(lambda s: s["inbound"]["listen_error"] == "")
    client.writer.close()


async def test_what_an_endpoint_of_before_clusters_left_behind(
    make: Callable[[str], EndpointCluster],
) -> None:
    cluster = make("ab")
    await cluster.fake.start()
    node = cluster["a"]
    node.config = {
        key: node.config[key] for key in ("listen", "control_socket", "state_file", "silence_seconds")
    } | {"target": cluster.local, "purge_on_unclean": True}
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (node.folder / "state.json").write_text(
        '{"version":1,"mode":"recover","mode_reason":"command","quiesced":false,"admission":"survivors",'
        f'"target":{{"meta":"{cluster.local["meta"]}","config_store":"{cluster.local["config_store"]}"}},'
        f'"configured_target":{{"meta":"{cluster.local["meta"]}","config_store":"{cluster.local["config_store"]}"}},'
        f'"survivors":[{{"pid":1,"start_ticks":0,"address":"","name":"x","has_rank":true}}],"boot_id":"{boot_id}"}}'
    )
    node.launch()
    status = await node.until(lambda s: s["backend"]["reachable"])
    assert (status["mode"], status["admission"], status["epoch"]) == ("recover", "survivors", 0)
    assert (status["inbound"]["listen"], status["outbound"], status["deposed"]) == (None, None, False)
    await node.control.serve()
    await node.control.admit("all")
    client = await node.client()
    assert answer_of(await client.ask(exist(1))) == 0
    # The daemon of before knows only this form, and no epochs.
    await node.control.set_target(cluster.local)
    client.writer.close()
