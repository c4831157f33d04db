"""The cluster's part of the loop: duties carried out on a supervisor and an endpoint that only write down what is said."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster.duty import ClientsSeen
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.standing import ClusterView, PoolRank, Standing
from kvtierd.errors import ClusterError, EndpointError
from kvtierd.node.coordination import LEASE_EPOCH_FILE, held_lease, settings_digest
from kvtierd.node.elsewhere import Elsewhere
from kvtierd.node.mastership import Mastership
from kvtierd.plan.units import LEASE_FILE, META_ID
from kvtierd.settings import Settings
from kvtierd.units.guard_file import now_seconds, read_deadline, write_deadline

PEERS = tuple({"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate("abc", start=1))
MASTER = Standing("master", 4, "a", "elected", serve_after_seconds=0.0)


class Told:
    """A supervisor, an endpoint and a board in one: remembers, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.newest: ClusterView | None = None
        self.status_now: dict[str, Any] = endpoint_status()
        self.refuse = False

    def poke(self) -> None:
        """A round is due."""

    def set_resting(self, unit: str, why: str) -> None:
        self.calls.append(("resting", unit, why))

    async def kill_now(self, unit: str) -> None:
        self.calls.append(("kill", unit))

    async def set_target(self, target: Any, *, epoch: int) -> None:
        if self.refuse:
            raise EndpointError("a higher epoch is known", code="endpoint.stale-epoch")
        self.calls.append(("point", target, epoch))

    async def status(self) -> dict[str, Any]:
        return self.status_now

    async def serve(self) -> None:
        self.calls.append(("serve",))

    async def admit(self, who: str) -> None:
        self.calls.append(("admit", who))

    def publish(self, view: ClusterView) -> bool:
        self.calls.append(("publish", view))
        return True

    def withdraw(self) -> None:
        self.calls.append(("withdraw",))

    def age_seconds(self) -> float:
        return 1.0

    def kinds(self) -> list[str]:
        return [call[0] for call in self.calls]


def endpoint_status(**changes: Any) -> dict[str, Any]:
    return {
        "protocol": 2, "epoch": 0, "epoch_seen": 0, "target": None, "mode": "serve", "admission": "all",
        "backend": {"life": None, "reachable": False}, "survivors": {"expected": 0, "back": 0},
    } | changes  # fmt: skip


class World:
    def __init__(self, directory: Path, standing: Standing = MASTER, *, guarded: bool = True) -> None:
        self.told = Told()
        self.events: list[tuple[str, str, str]] = []
        meta = SimpleNamespace(
            guard_file=str(directory / LEASE_FILE) if guarded else None, env={}, kind="meta"
        )
        address = SimpleNamespace(
            server_meta_url="tcp://127.0.0.1:5001",
            server_config_store_url="tcp://127.0.0.1:6001",
            client_meta_url="tcp://127.0.0.1:5000",
            client_config_store_url="tcp://127.0.0.1:6000",
        )
        plan = SimpleNamespace(
            node="a", meta=address, memcache_version="1.3.0", units=(), direct=None,
            pool=SimpleNamespace(world_size=16, protocol="host_shm"),
            unit=lambda unit_id: meta if unit_id == META_ID else None,
        )  # fmt: skip
        self.meta: Any = None
        self.node: Any = SimpleNamespace(
            runtime=directory, state=directory, plan=plan, supervisor=self.told, endpoint=self.told,
            endpoint_status=self.told.status_now, keeper=None, paused=None, view=lambda _: self.meta,
            settings=Settings(pool={"dram": 1 << 30}, cluster={"mode": "lease", "peers": PEERS}),
            events=SimpleNamespace(add=lambda *a, **k: self.events.append(a), last=list),
        )  # fmt: skip
        self.fit: list[tuple[bool, str]] = []
        self.links: dict[str, Any] = {}
        coordinator = SimpleNamespace(
            standing=standing, set_fit=lambda fit, why="": self.fit.append((fit, why))
        )
        network = SimpleNamespace(
            node="a", board=self.told, links=self.links, problem="", differences=dict, desk=SimpleNamespace(),
            contact=lambda name: SimpleNamespace(last_contact_seconds=self.links[name].ago),
        )  # fmt: skip
        part: Any = SimpleNamespace(
            coordinator=coordinator, network=network, security=SimpleNamespace(problem="")
        )
        self.mastership = Mastership(self.node, part)

    def stand(self, standing: Standing) -> None:
        self.mastership.coordinator.standing = standing  # type: ignore[misc]

    def peer(self, name: str, *, ago: float = 0.5, **facts: Any) -> None:
        self.links[name] = SimpleNamespace(ago=ago, facts=NodeFacts(name, world_size=16, **facts))


async def test_a_master_arms_the_guard_before_anything_else(tmp_path: Path) -> None:
    until = now_seconds() + 6
    world = World(tmp_path, dataclasses.replace(MASTER, until_seconds=until))
    await world.mastership.round()
    assert read_deadline(str(tmp_path / LEASE_FILE)) == pytest.approx(until)
    assert (tmp_path / LEASE_EPOCH_FILE).read_text() == "4"
    assert world.told.calls[0] == ("resting", META_ID, "")
    assert ("point", {"meta": "127.0.0.1:5001", "config_store": "127.0.0.1:6001"}, 4) in world.told.calls
    (_, view) = next(call for call in world.told.calls if call[0] == "publish")
    assert (view.epoch, view.master, view.address, view.served_life) == (4, "a", "10.0.0.1", "")
    assert world.fit[-1] == (True, "")


async def test_the_next_daemon_goes_on_with_the_lease_that_the_guard_enforces(tmp_path: Path) -> None:
    assert held_lease(tmp_path) is None
    until = now_seconds() + 6
    await World(tmp_path, dataclasses.replace(MASTER, until_seconds=until)).mastership.round()
    held = held_lease(tmp_path)
    assert held is not None
    assert (held.epoch, held.until_seconds) == (4, pytest.approx(until))
    write_deadline(str(tmp_path / LEASE_FILE), now_seconds() - 1)
    assert held_lease(tmp_path) is None


async def test_in_static_mode_there_is_no_guard_to_arm(tmp_path: Path) -> None:
    await World(tmp_path, guarded=False).mastership.round()
    assert not (tmp_path / LEASE_FILE).exists()


async def test_a_deposed_master_takes_the_lease_back_and_kills(tmp_path: Path) -> None:
    world = World(tmp_path, dataclasses.replace(MASTER, until_seconds=now_seconds() + 60))
    await world.mastership.round()
    world.meta = SimpleNamespace(pid=7, state="ready", reason="", instance="i")
    world.stand(Standing("follower", 5, "b", "b has it"))
    world.told.calls.clear()
    await world.mastership.round()
    assert world.told.kinds()[:3] == ["withdraw", "resting", "kill"]
    assert read_deadline(str(tmp_path / LEASE_FILE)) == 0.0
    assert [e[1] for e in world.events][-2:] == ["cluster.not-master", "cluster.meta-killed"]


async def test_a_follower_s_endpoint_goes_to_the_master_and_is_opened_by_its_word(tmp_path: Path) -> None:
    world = World(tmp_path, Standing("follower", 6, "b"))
    world.told.newest = ClusterView(6, "b", tier_state="meta_up")
    await world.mastership.round()
    assert ("point", {"peer": "b"}, 6) in world.told.calls
    held = endpoint_status(
        epoch=6,
        target={"peer": "b"},
        mode="recover",
        admission="survivors",
        backend={"life": "2f", "reachable": True},
    )
    world.node.endpoint_status = held
    world.told.newest = ClusterView(6, "b", tier_state="joinable", served_life="2f")
    await world.mastership.round()
    assert world.told.kinds()[-2:] == ["serve", "admit"]
    assert world.node.master == "b"
    assert world.node.master_tier.state == "joinable"


async def test_what_goes_wrong_is_said_once_and_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.told.refuse = True
    for _ in range(3):
        await world.mastership.round()
    assert [e[1] for e in world.events].count("cluster.trouble") == 1
    world.told.refuse = False
    await world.mastership.round()
    assert "point" in world.told.kinds()


async def test_an_endpoint_of_before_epochs_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    del world.node.endpoint_status["protocol"]
    await world.mastership.round()
    assert "point" not in world.told.kinds()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"paused": "maintenance"}, "paused"),
        ({"plan": None}, "no plan"),
        (
            {"view": lambda _: SimpleNamespace(state="failed", reason="no wheel", pid=None)},
            "has failed: no wheel",
        ),
    ],
)
def test_who_cannot_be_the_master_says_so(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    world = World(tmp_path)
    for name, value in change.items():
        setattr(world.node, name, value)
    world.mastership.judge_fitness()
    assert world.fit[-1][0] is False
    assert why in world.fit[-1][1]


def test_survivors_of_other_nodes_count_as_long_as_those_nodes_are_there(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.node.endpoint_status = endpoint_status(backend={"life": "2f", "reachable": True})
    world.peer("b", endpoint_life="2f", survivors_missing=2)
    world.peer("c", endpoint_life="", survivors_missing=0)  # has not found the new MetaService yet
    assert world.mastership.elsewhere.survivors_missing() == 3
    world.peer("c", endpoint_life="", ago=10.0)
    assert world.mastership.elsewhere.survivors_missing() == 2
    world.peer("b", endpoint_life="2f")
    assert world.mastership.elsewhere.survivors_missing() == 0


async def test_an_epoch_that_its_master_ended_in_order_needs_no_purge(tmp_path: Path) -> None:
    world = World(tmp_path, Standing("follower", 3, "b"))
    world.told.newest = ClusterView(3, "b")
    await world.mastership.round()
    assert not world.mastership.elsewhere.handed_over
    world.peer("b", clean_epoch=3)
    assert world.mastership.elsewhere.handed_over
    world.peer("b", clean_epoch=2)
    assert not world.mastership.elsewhere.handed_over


def test_what_must_agree_is_in_the_digest_and_what_is_a_node_s_own_is_not() -> None:
    def digest(**sections: Any) -> str:
        return settings_digest(
            Settings(**{"pool": {"dram": 1 << 30}, "cluster": {"mode": "lease", "peers": PEERS}, **sections})
        )

    assert digest(pool={"dram": 1 << 31}) == digest()
    assert digest(node={"name": "a"}, meta={"port": 5005}) == digest()
    assert digest(pool={"dram": 1 << 30, "evict_high": 80, "evict_low": 70}) != digest()
    assert digest(cluster={"mode": "lease", "lease": "9s", "peers": PEERS}) != digest()


def test_nodes_that_ask_another_etcd_or_look_at_other_keys_differ() -> None:
    def digest(**etcd: Any) -> str:
        cluster = {"mode": "etcd", "peers": PEERS, "etcd": etcd}
        return settings_digest(Settings(pool={"dram": 1 << 30}, cluster=cluster))  # type: ignore[arg-type]

    one = digest(endpoints=["10.0.0.8:1", "10.0.0.9:1"])
    assert digest(endpoints=["10.0.0.9:1", "10.0.0.8:1"], tls={"ca": "/else/where.pem"}) == one
    assert digest(endpoints=["10.0.0.8:1"]) != one
    assert digest(endpoints=["10.0.0.8:1", "10.0.0.9:1"], prefix="/other") != one


def test_only_the_first_epoch_with_nobody_to_come_back_is_a_founding(tmp_path: Path) -> None:
    world = World(tmp_path, dataclasses.replace(MASTER, epoch=1))
    assert world.mastership.elsewhere.founding
    world.peer("b", survivors_missing=1)
    assert not world.mastership.elsewhere.founding
    world.peer("b")
    world.node.endpoint_status = endpoint_status(survivors={"expected": 1, "back": 0})
    assert not world.mastership.elsewhere.founding
    world.node.endpoint_status = endpoint_status()
    world.stand(dataclasses.replace(MASTER, epoch=2))
    assert not world.mastership.elsewhere.founding


def test_the_end_of_the_wait_for_the_master_before_begins_a_round(tmp_path: Path) -> None:
    world = World(tmp_path, dataclasses.replace(MASTER, serve_after_seconds=now_seconds() + 1.0))
    assert 0.5 < world.mastership.due_in_seconds() <= 1.0
    world.stand(dataclasses.replace(MASTER, serve_after_seconds=now_seconds() - 1.0))
    assert world.mastership.due_in_seconds() == float("inf")


async def test_the_target_of_a_switchover_has_its_meta_service_up_first(tmp_path: Path) -> None:
    world = World(tmp_path, Standing("follower", 3, "b"))
    world.told.newest = ClusterView(3, "b")
    world.meta = SimpleNamespace(pid=None, instance="", state="stopped", reason="")

    async def preparing() -> None:
        await world.mastership.prepare("b", 3, 30.0)

    task = asyncio.create_task(preparing())
    await asyncio.sleep(0.02)
    await world.mastership.round()
    assert ("resting", META_ID, "") in world.told.calls
    until = read_deadline(str(tmp_path / LEASE_FILE))
    assert until is not None, "the guard knows before it starts"
    assert 20.0 < until - now_seconds() <= 30.0
    assert not (tmp_path / LEASE_EPOCH_FILE).exists(), "it is no lease"
    assert not task.done()
    world.meta = SimpleNamespace(pid=9, instance="i", state="ready", reason="")
    await asyncio.wait_for(task, 5.0)
    world.told.calls.clear()
    await world.mastership.round()
    assert "kill" not in world.told.kinds()


async def test_a_permit_ends_when_the_meta_service_does_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.node.mastership.PERMIT_REST_SECONDS", 29.9)
    world = World(tmp_path, Standing("follower", 3, "b"))
    world.told.newest = ClusterView(3, "b")
    world.meta = SimpleNamespace(pid=9, instance="i", state="starting", reason="port 5001 is taken")
    with pytest.raises(ClusterError, match="does not come up") as told:
        await world.mastership.prepare("b", 3, 30.0)
    assert "port 5001 is taken" in told.value.why
    await world.mastership.round()
    assert "kill" in world.told.kinds()


@pytest.mark.parametrize(("master", "epoch"), [("c", 3), ("b", 2), ("b", 4)])
async def test_only_the_master_may_ask_for_a_meta_service(tmp_path: Path, master: str, epoch: int) -> None:
    world = World(tmp_path, Standing("follower", 3, "b"))
    world.told.newest = ClusterView(3, "b")
    with pytest.raises(ClusterError, match="does not know"):
        await world.mastership.prepare(master, epoch, 30.0)
    world.node.paused = "new firmware"
    with pytest.raises(ClusterError, match="paused"):
        await world.mastership.prepare("b", 3, 30.0)


def test_other_cluster_settings_wait_for_a_restart_and_say_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.mastership.show()
    assert world.node.cluster_problems == []
    peers = (*PEERS[:2], {"name": "d", "address": "10.0.0.9"})
    world.node.settings = Settings(pool={"dram": 1 << 30}, cluster={"mode": "lease", "peers": peers})
    world.mastership.show()
    assert "until kvtierd is restarted" in world.node.cluster_problems[0]


class LedClients:
    """Clients without an endpoint, as mastership sees them."""

    def __init__(self) -> None:
        self.plan: Any = object()
        self.seen: Any = ClientsSeen(3, "c")
        self.life, self.missing = "epoch 3", 2
        self.led: list[tuple[int, str]] = []
        self.looked: list[dict[str, Any]] = []

    async def point(self, epoch: int, master: str) -> None:
        self.led.append((epoch, master))
        self.seen, self.life = ClientsSeen(epoch, master), f"epoch {epoch}"

    def round(self, roll: Any, **how: Any) -> None:
        self.looked.append(how)


def without_endpoint(tmp_path: Path, standing: Standing = MASTER) -> tuple[World, LedClients]:
    world, clients = World(tmp_path, standing), LedClients()
    world.node.endpoint = world.node.endpoint_status = None
    world.mastership.clients = clients  # type: ignore[assignment]
    world.mastership.elsewhere = Elsewhere(world.node, world.mastership.part, world.mastership.clients)
    return world, clients


async def test_clients_without_endpoints_are_led_to_this_node_when_it_is_the_master(tmp_path: Path) -> None:
    world, clients = without_endpoint(tmp_path)
    await world.mastership.round()
    assert clients.led == [(4, "a")]
    (_, view) = next(call for call in world.told.calls if call[0] == "publish")
    assert view.meta_service_url == "tcp://127.0.0.1:5001", "what it listens at, not what clients are told"
    assert world.mastership.facts().endpoint_life == "epoch 4"
    assert world.mastership.facts().survivors_missing == 2
    assert world.mastership.elsewhere.inherited, "epoch 4: others were there before"
    world.stand(dataclasses.replace(MASTER, epoch=1))
    assert not world.mastership.elsewhere.inherited


async def test_they_are_led_to_another_and_looked_at_with_what_it_says_of_the_pool(tmp_path: Path) -> None:
    world, clients = without_endpoint(tmp_path, Standing("follower", 6, "b"))
    rank = PoolRank(3, "provider", True, 64)
    world.told.newest = ClusterView(6, "b", tier_state="pool_ready", pool_ranks=(rank,))
    await world.mastership.round()
    assert clients.led == [(6, "b")]
    world.mastership.look_at_clients(lambda _: None)
    assert clients.looked == [{"epoch": 6, "up": True, "is_open": False, "ranks": {3: rank}}]
    world.told.newest = ClusterView(6, "b", tier_state="down", served_life="epoch 6")
    world.mastership.look_at_clients(lambda _: None)
    assert clients.looked[-1] == {"epoch": 6, "up": False, "is_open": False, "ranks": None}


class Looked:
    """``Returning``, as mastership calls it."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def round(self, roll: Any, **how: Any) -> None:
        self.calls.append(how)


def test_clients_behind_the_endpoint_are_looked_at_by_what_it_says(tmp_path: Path) -> None:
    world, looked = World(tmp_path, Standing("follower", 6, "b")), Looked()
    world.mastership.behind_endpoint = looked  # type: ignore[assignment]
    rank = PoolRank(3, "provider", True, 64)
    world.told.newest = ClusterView(6, "b", tier_state="joinable", served_life="x", pool_ranks=(rank,))
    status = {
        "epoch": 6, "mode": "serve", "admission": "all", "backend": {"reachable": True, "life": "x"},
        "survivors": {"expected": 0, "back": 0},
    }  # fmt: skip
    world.node.endpoint_status = status
    world.mastership.look_at_clients(lambda _: None)
    assert looked.calls == [{"epoch": 6, "up": True, "is_open": True, "ranks": {3: rank}, "life": "x"}]
    world.node.endpoint_status = status | {"admission": "survivors"}
    world.mastership.look_at_clients(lambda _: None)
    assert looked.calls[-1] == {"epoch": 6, "up": True, "is_open": False, "ranks": {}, "life": "x"}
    world.node.endpoint_status = status | {"epoch": 5}
    world.mastership.look_at_clients(lambda _: None)
    assert (looked.calls[-1]["up"], looked.calls[-1]["is_open"]) == (False, False), (
        "still with the one before"
    )
    world.node.endpoint_status = None
    world.mastership.look_at_clients(lambda _: None)
    assert len(looked.calls) == 3


async def test_a_master_counts_the_survivors_of_nodes_without_endpoints(tmp_path: Path) -> None:
    world, _ = without_endpoint(tmp_path)
    world.peer("b", endpoint_life="epoch 4", survivors_missing=2)
    world.peer("c", endpoint_life="epoch 3")
    assert world.mastership.elsewhere.survivors_missing() == 3, "node c has not been led yet"
