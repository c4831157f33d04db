"""What operators ask of a cluster's node: who is refused and why, and in which order a switchover goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.standing import ClusterView, PeerContact, Standing
from kvtierd.errors import ClusterError
from kvtierd.node.cluster_verbs import ClusterVerbs
from kvtierd.settings import Settings

PEERS = [{"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate("abc", start=1)]
PEERS.append({"name": "d", "address": "10.0.0.4", "voter": False})
ALONE: dict[str, Any] = {"mode": "standalone"}
LEASE: dict[str, Any] = {"mode": "lease", "peers": PEERS}


class World:
    """A node that takes part, its network and its coordinator; ``calls`` in the order they came."""

    def __init__(self, directory: Path, cluster: dict[str, Any] = LEASE, *, master: bool = True) -> None:
        self.calls: list[Any] = []
        self.meta: Any = SimpleNamespace(pid=7, instance="i", state="ready")
        self.answers = {"b", "c", "d"}
        self.facts = {
            n: NodeFacts(n, memcache_version="1.3.0", world_size=16, role="follower") for n in "bcd"
        }
        self.quiet = True
        self.unprepared = False
        self.newest = ClusterView(4, "a", since_unix_seconds=1000.0)
        standing = (
            Standing("master", 4, "a", "elected") if master else Standing("follower", 4, "b", "b has it")
        )
        self.node: Any = SimpleNamespace(
            state=directory, settings=Settings(pool={"dram": 1 << 30}, cluster=cluster), paused=None, plan=object(),
            keeper=SimpleNamespace(quiesce=self.quiesce), view=lambda _: self.meta,
            events=SimpleNamespace(add=lambda *a, **k: self.calls.append(a[1])),
        )  # fmt: skip
        self.verbs = ClusterVerbs(self.node)
        links = {
            n: SimpleNamespace(facts=f, clock=SimpleNamespace(seconds=0.25)) for n, f in self.facts.items()
        }
        network: Any = SimpleNamespace(
            node="a", links=links, problem="", greet=self.greet, board=self, prepare=self.prepare,
            facts=lambda: NodeFacts("a", memcache_version="1.3.0", world_size=16, role=standing.role, epoch=4),
            contact=lambda name: PeerContact(name, True, 1.0, "" if name in self.answers else "no route"),
        )  # fmt: skip
        coordinator: Any = SimpleNamespace(
            standing=standing, mode=cluster["mode"], hand_over=self.hand_over, promote=self.promote
        )
        mastership: Any = SimpleNamespace(
            is_master=master, master="a" if master else "b", end_meta=self.end_meta, handing_over=False, clean_epoch=0,
            judge_fitness=lambda: self.calls.append("judged"),
        )  # fmt: skip
        self.mastership = mastership
        part: Any = SimpleNamespace(network=network, coordinator=coordinator)
        if cluster["mode"] != "standalone":
            self.verbs.join(part, mastership)

    def age_seconds(self) -> float:
        return 0.5

    async def quiesce(self) -> bool:
        self.calls.append("quiesce")
        return self.quiet

    async def greet(self, names: list[str]) -> set[str]:
        self.calls.append(("greet", *names))
        return self.answers & set(names)

    async def prepare(self, to: str, epoch: int, seconds: float, timeout_seconds: float) -> None:
        self.calls.append(("prepare", to, epoch))
        if self.unprepared:
            raise ClusterError("its MetaService does not come up", code="cluster.not-fit")

    async def end_meta(self, why: str) -> None:
        self.calls.append("end-meta")
        assert self.mastership.handing_over, "nothing may start it again"
        self.meta = None

    async def hand_over(self, to: str) -> None:
        self.calls.append(("hand-over", to, self.mastership.clean_epoch))
        self.newest = ClusterView(5, to, served_life="2f")

    async def promote(self) -> None:
        self.calls.append("promote")


async def test_a_switchover_goes_in_order(tmp_path: Path) -> None:
    world = World(tmp_path)
    reply = await world.verbs.switchover("b", 5.0)
    assert world.calls == [
        ("greet", "b"), ("prepare", "b", 4), "quiesce", "end-meta", ("greet", "b"), ("hand-over", "b", 4),
        "cluster.switchover",
    ]  # fmt: skip
    assert (reply.epoch, reply.note) == (5, "")
    assert not world.mastership.handing_over


async def test_a_target_whose_meta_service_does_not_come_up_costs_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.unprepared = True
    with pytest.raises(ClusterError, match="does not come up"):
        await world.verbs.switchover("b", 5.0)
    assert world.calls == [("greet", "b"), ("prepare", "b", 4)]
    assert world.meta is not None


async def test_without_a_quiet_moment_the_next_master_is_not_told_that_all_is_in_order(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    world.quiet = False
    await world.verbs.switchover("b", 5.0)
    assert ("hand-over", "b", 0) in world.calls


@pytest.mark.parametrize(
    ("to", "code", "text"),
    [
        ("x", "cluster.no-such-node", "choose one of: b, c, d"),
        ("a", "cluster.no-such-node", "choose one of: b, c, d"),
        ("d", "cluster.not-fit", "no voter"),
        ("c", "cluster.unreachable", "no route"),
    ],
)
async def test_a_target_that_cannot_be_the_master_changes_nothing(
    tmp_path: Path, to: str, code: str, text: str
) -> None:
    world = World(tmp_path)
    world.answers = {"b", "d"}
    with pytest.raises(ClusterError) as told:
        await world.verbs.switchover(to, 5.0)
    assert told.value.stable_code == code
    assert text in f"{told.value.message} {told.value.hint}"
    assert "quiesce" not in world.calls


async def test_a_target_that_does_not_fit_is_refused_with_what_differs(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.verbs._part.network.links["b"].facts = NodeFacts("b", memcache_version="1.2.0", world_size=32)  # type: ignore[union-attr]
    with pytest.raises(ClusterError, match=r"world_size is 32 there and 16 here.*memcache_version"):
        await world.verbs.switchover("b", 5.0)


async def test_only_the_master_can_hand_over(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="this node is not the master; b is"):
        await World(tmp_path, master=False).verbs.switchover("c", 5.0)


async def test_promote_needs_to_be_meant(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ClusterError):
        await world.verbs.promote(force=False)
    await world.verbs.promote(force=True)
    assert "promote" in world.calls


async def test_without_a_cluster_there_is_nothing_to_switch(tmp_path: Path) -> None:
    verbs = World(tmp_path, ALONE).verbs
    with pytest.raises(ClusterError, match="there is no cluster"):
        await verbs.switchover("b", 5.0)
    assert verbs.peers().mode == "standalone"
    assert list(verbs.peers().problems) == []


def test_peers_tell_who_is_who_and_what_is_wrong(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.answers.discard("c")
    world.verbs._part.network.links["b"].facts = NodeFacts("b", world_size=32)  # type: ignore[union-attr]
    reply = world.verbs.peers()
    assert (reply.role, reply.master, reply.epoch, reply.since) == ("master", "a", 4, 1000.0)
    assert [(p.name, p.this_node, p.voter) for p in reply.peers] == [
        ("a", True, True), ("b", False, True), ("c", False, True), ("d", False, False),
    ]  # fmt: skip
    assert reply.peers[1].clock_offset_seconds == 0.25
    assert not reply.peers[0].HasField("last_contact_seconds")
    assert [p.split(":")[0] for p in reply.problems] == ["b", "c"]
    assert "world_size" in reply.problems[0]
    assert "no route" in reply.problems[1]


def test_a_pause_outlives_the_daemon(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.verbs.pause(on=True, reason="new cards").paused
    assert world.node.paused == "new cards"
    assert "judged" in world.calls, "at once"
    again = World(tmp_path)
    assert again.node.paused == "new cards"
    assert not again.verbs.pause(on=False, reason="").paused
    assert World(tmp_path).node.paused is None
    assert not again.verbs.pause(on=False, reason="").paused, "twice is no fault"
