"""What the observer and the other nodes are told: ranks, room, thresholds, peers' memory, engines elsewhere."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster.comeback import ClientSeen, Member
from kvtierd.cluster.hello import EngineFacts, HostMemory, NodeFacts, OwnRank
from kvtierd.node import sources as node_sources
from kvtierd.node.sources import NodeSources
from kvtierd.observe.picture import EngineIdentity, HostPicture
from kvtierd.plan.adjustments import NOTHING, Adjustments
from kvtierd.plan.units import META_ID
from kvtierd.settings import Settings

from ..decide.scenes import picture

GIB = 1024**3
MIB = 1024**2
NOW = 5000.0
ENGINE, HOLDER = "kvtier-engine-e", "kvtier-pool-0"
CLIENTS = (
    ClientSeen(HOLDER, "pool", "1", members=(Member(0, "provider", GIB),), linked=True),
    ClientSeen(ENGINE, "engine", "1", members=(Member(4), Member(5)), linked=False),
)


def unit(unit_id: str, kind: str, **more: Any) -> Any:
    return SimpleNamespace(
        **{
            "id": unit_id,
            "kind": kind,
            "group": None,
            "uses_pool": True,
            "talk": None,
            "env": {},
            "l2_bytes": None,
            **more,
        }
    )


OPEN = {"clients": [], "mode": "serve", "admission": "all", "backend": {"reachable": True}}


class World:
    """A node as its sources see it."""

    def __init__(self) -> None:
        pool = SimpleNamespace(
            protocol="host_shm", placement="standalone", providers=1, dram_bytes_per_provider=8 * GIB,
            alignment_bytes=2 * MIB,
        )  # fmt: skip
        talk = SimpleNamespace(l3_detach=("POST /detach",))
        engine = unit(ENGINE, "engine", group="chat", talk=talk, env={"PYTHONHASHSEED": "0"}, l2_bytes=GIB)
        self.plan: Any = SimpleNamespace(
            node="a", units=(unit(META_ID, "meta"), unit(HOLDER, "pool"), engine), pool=pool, emulated=True, dies=2,
            hugepages=SimpleNamespace(pages=0), tls=None, meta=SimpleNamespace(metrics_url="http://127.0.0.1:8000"),
        )  # fmt: skip
        self.views: dict[str, Any] = {
            u.id: SimpleNamespace(id=u.id, instance="1", pid=1, ready=True, state="ready")
            for u in self.plan.units
        }
        self.node: Any = SimpleNamespace(
            plan=self.plan, settings=Settings(pool={"dram": 8 * GIB, "host_free": 4 * GIB}), adjusted=NOTHING,
            keeper=SimpleNamespace(pool="the pool"), endpoint_status=OPEN, view=self.views.get,
            observer=SimpleNamespace(samples={}, problems={ENGINE: "no answer"}),
            lines=SimpleNamespace(readings={}), detached=SimpleNamespace(is_off=lambda unit, run: run == "off"),
            state=Path("/nowhere"),
        )  # fmt: skip
        self.links: dict[str, Any] = {}
        self.own = NodeSources(self.node)
        self.asked = self.own.sources()
        self.clients: Any = CLIENTS

    async def see_clients(self) -> Any:
        if isinstance(self.clients, Exception):
            raise self.clients
        return self.clients

    def join(self, *, is_master: bool = True, direct: bool = True) -> None:
        self.node.settings = Settings(
            pool={"dram": 8 * GIB, "host_free": 4 * GIB},
            cluster={"mode": "lease", "peers": [{"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate("abc", 1)]},
        )  # fmt: skip
        mastership: Any = SimpleNamespace(
            master="a" if is_master else "b", is_master=is_master,
            clients=SimpleNamespace(plan=object() if direct else None, see=self.see_clients),
            pool_is_open=True,
            part=SimpleNamespace(network=SimpleNamespace(links=self.links)),
        )  # fmt: skip
        self.own.mastership = mastership

    def peer(self, name: str, *, age: float = 1.0, **facts: Any) -> None:
        self.links[name] = SimpleNamespace(facts=NodeFacts(name, **facts), facts_at_seconds=NOW - age)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(node_sources, "boottime_seconds", lambda: NOW)
    return World()


async def test_alone_this_node_is_the_master(world: World) -> None:
    assert world.asked.cluster() == ("a", True)
    assert (world.asked.node(), world.asked.headroom_bytes()) == ("a", 4 * GIB)
    assert (world.asked.peers(), world.asked.engines_elsewhere()) == ([], [])
    world.join(is_master=False)
    assert world.asked.cluster() == ("b", False)
    world.own.mastership = None
    assert world.asked.cluster() == ("", False), "who is the master is not known yet"


# -- ranks


async def test_ranks_have_owners_here_and_there(world: World) -> None:
    world.join()
    world.peer("b", ranks=(OwnRank(1, HOLDER), OwnRank(5, "kvtier-engine-x")))
    await world.own.look_at_clients()
    source = world.asked.pool()
    assert source is not None
    assert source.owners == {0: ("a", HOLDER), 1: ("b", HOLDER), 4: ("a", ENGINE), 5: ("a", ENGINE)}, (
        "ours is certain"
    )


async def test_a_node_that_is_long_silent_owns_nothing(world: World) -> None:
    world.join()
    world.peer("b", age=31.0, ranks=(OwnRank(1, HOLDER),), engines=(EngineFacts("kvtier-engine-x"),))
    source = world.asked.pool()
    assert source is not None
    assert source.owners == {}
    assert world.asked.engines_elsewhere() == []


async def test_links_tell_who_is_registered(world: World) -> None:
    world.join()
    (before,) = world.asked.engines()
    assert before.registered is None, "not looked at yet"
    await world.own.look_at_clients()
    (look,) = world.asked.engines()
    assert (look.registered, look.can_switch_l3, look.l3_detached) == (False, True, False)
    assert (look.group, look.hash_seed, look.l2_capacity_bytes, look.problem) == (
        "chat",
        "0",
        GIB,
        "no answer",
    )
    world.views[ENGINE].instance = "off"
    assert world.asked.engines()[0].l3_detached
    world.plan.units[2].uses_pool = False
    assert world.asked.engines()[0].registered is None


@pytest.mark.parametrize("fault", [OSError("no such process"), ZeroDivisionError("by zero")])
async def test_a_fault_in_looking_at_clients_leaves_them_unknown_and_nothing_else(
    world: World, fault: Exception
) -> None:
    world.join()
    await world.own.look_at_clients()
    world.clients = fault
    await world.own.look_at_clients()
    assert world.asked.engines()[0].registered is None, "what was seen before is not now"
    world.clients = CLIENTS
    await world.own.look_at_clients()
    assert world.asked.engines()[0].registered is False


async def test_a_look_at_clients_that_hangs_is_given_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_sources, "CLIENTS_SECONDS", 0.02)
    world.join()

    async def hang() -> None:
        await asyncio.Event().wait()

    world.own.mastership.clients.see = hang  # type: ignore[union-attr,assignment]
    await asyncio.wait_for(world.own.look_at_clients(), 1.0)


async def test_without_an_endpoint_there_is_nobody_to_see(world: World) -> None:
    world.node.endpoint_status = None
    await world.own.look_at_clients()
    assert world.asked.engines()[0].registered is None


# -- the pool


async def test_thresholds_are_those_in_force(world: World) -> None:
    source = world.asked.pool()
    assert source is not None
    settings = world.node.settings.pool
    assert (source.evict_high_percent, source.evict_low_percent) == (settings.evict_high, settings.evict_low)
    world.node.adjusted = Adjustments(evict_high=71, evict_low=51)
    source = world.asked.pool()
    assert source is not None
    assert (source.evict_high_percent, source.evict_low_percent) == (71, 51)
    assert (source.instance, source.state, source.metrics_base_url) == (
        "1",
        "the pool",
        "http://127.0.0.1:8000",
    )
    world.node.adjusted = Adjustments(evict_high=71)
    source = world.asked.pool()
    assert source is not None
    assert source.evict_high_percent == settings.evict_high, "half a pair says nothing"


async def test_the_pool_is_the_master_s(world: World) -> None:
    world.join(is_master=False)
    assert world.asked.pool() is None
    world.join()
    world.views[META_ID].pid = None
    source = world.asked.pool()
    assert source is not None
    assert source.instance is None
    world.node.keeper = None
    assert world.asked.pool() is None


# -- memory


def host(**changes: Any) -> HostPicture:
    return HostPicture(
        **{"node": "a", "at_seconds": NOW, "available_bytes": 20 * GIB, "shm_free_bytes": 6 * GIB, **changes}
    )


async def test_room_is_what_is_left_beside_twice_what_must_stay(world: World) -> None:
    room = world.asked.room_bytes
    assert room(host()) == 6 * GIB, "the memory goes to /dev/shm"
    assert room(host(available_bytes=10 * GIB + 1)) == 2 * GIB, "10 GiB less twice 4, aligned"
    assert room(host(available_bytes=GIB)) == 0
    assert room(host(available_bytes=None)) is None
    assert room(host(shm_free_bytes=None)) is None
    world.plan.hugepages.pages = 512
    assert room(host(shm_free_bytes=None)) == 8 * GIB, "no rank may bring more than the others"
    world.plan.emulated = False
    assert room(host(holders=("kvtier-pool-added-0",))) == 0, "each needs a die of its own"
    world.plan.pool.placement = "engine"
    assert room(host()) == 0
    world.node.plan = None
    assert room(host()) is None


async def test_added_holders_are_known_by_their_names(world: World) -> None:
    assert world.asked.holders() == ()
    world.plan.units += (unit("kvtier-pool-added-3", "pool"),)
    assert world.asked.holders() == ("kvtier-pool-added-3",)


async def test_the_master_knows_the_others_memory_and_its_age(world: World) -> None:
    world.join()
    world.peer("b", age=700.0, memory=HostMemory(9 * GIB, 64 * GIB, 4 * GIB, GIB, ("kvtier-pool-added-0",)))
    world.peer("c", memory=HostMemory(9 * GIB, 0, 4 * GIB, None))
    world.peer("d")
    world.links["e"] = SimpleNamespace(facts=None, facts_at_seconds=None)
    b, c = world.asked.peers()
    assert b == HostPicture(
        "b", NOW - 700.0, 9 * GIB, 64 * GIB, 4 * GIB, holders=("kvtier-pool-added-0",), room_bytes=GIB
    )
    assert (c.node, c.total_bytes, c.room_bytes) == ("c", None, None), "0 and unknown are not the same"
    world.join(is_master=False)
    assert world.asked.peers() == []


# -- what the others are told


async def test_others_are_told_of_memory_ranks_and_engines(world: World) -> None:
    world.join()
    await world.own.look_at_clients()
    seen = picture(
        host=host(
            total_bytes=64 * GIB, headroom_bytes=4 * GIB, room_bytes=GIB, holders=("kvtier-pool-added-0",)
        )
    )
    facts = world.own.tell(NodeFacts("a", version="1"), seen)
    assert facts.version == "1"
    assert facts.memory == HostMemory(20 * GIB, 64 * GIB, 4 * GIB, GIB, ("kvtier-pool-added-0",))
    assert facts.ranks == (OwnRank(0, HOLDER), OwnRank(4, ENGINE), OwnRank(5, ENGINE))
    assert facts.engines == (EngineFacts(ENGINE, "chat", "0"),)
    assert world.own.tell(NodeFacts("a"), None).memory is None
    assert world.own.tell(NodeFacts("a"), picture(host=host(available_bytes=None))).memory is None


async def test_engines_elsewhere(world: World) -> None:
    world.join(is_master=False)
    world.peer("b", engines=(EngineFacts("kvtier-engine-x", "chat", "1", "qwen", 128),))
    assert world.asked.engines_elsewhere() == [
        EngineIdentity("b", "kvtier-engine-x", "chat", "1", "qwen", 128)
    ]


async def test_before_the_first_plan_there_is_nothing(world: World) -> None:
    world.node.plan = None
    asked: dict[str, Any] = defaultdict(lambda: None)
    for name in ("node", "engines", "pool", "holders", "peers"):
        asked[name] = getattr(world.asked, name)()
    assert (asked["node"], asked["engines"], asked["pool"], asked["holders"], asked["peers"]) == (
        "",
        [],
        None,
        (),
        [],
    )


@pytest.mark.parametrize(
    "status",
    [
        None,
        OPEN | {"backend": {"reachable": False}},
        OPEN | {"mode": "recover"},
        OPEN | {"admission": "survivors"},
    ],
    ids=["no word", "not reached", "recovering", "survivors first"],
)
async def test_a_pool_out_of_reach_is_no_fault_of_the_engines(world: World, status: Any) -> None:
    """Else a cut network would have engines started anew."""
    world.join(direct=True)
    await world.own.look_at_clients()
    assert world.asked.engines()[0].registered is False
    world.own.mastership.pool_is_open = False  # type: ignore[union-attr]
    assert world.asked.engines()[0].registered is None
    world.own.mastership.clients.plan = None  # type: ignore[union-attr]
    assert world.asked.engines()[0].registered is False
    world.node.endpoint_status = status
    assert world.asked.engines()[0].registered is None
