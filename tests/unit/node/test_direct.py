"""Clients without endpoints: files and hosts file of a node led to another master, and real processes looked at."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster.comeback import Roll
from kvtierd.cluster.duty import ClientsSeen
from kvtierd.cluster.standing import PoolRank
from kvtierd.errors import HostError
from kvtierd.host.hosts_file import address_of
from kvtierd.memcache.answers import parse_cluster_status
from kvtierd.memcache.health import PoolState
from kvtierd.node.direct import DirectClients, pool_ranks
from kvtierd.plan.docker import docker_argv
from kvtierd.plan.model import DirectClient, DirectPlan, FileSpec, MetaAddress, NodePlan, PoolPlan, UnitSpec
from kvtierd.plan.toolchain import Toolchain
from kvtierd.provision.carry_out import last_plan
from kvtierd.settings import Settings

NAME = "kvtierd-meta.prod-1"


class World:
    """A node of three with one pool holder (by file) and one engine (by name)."""

    def __init__(self, directory: Path, *, port: int = 5000, argv: tuple[str, ...] = ("engine",)) -> None:
        self.directory = directory
        self.hosts = directory / "hosts"
        self.hosts.write_bytes(b"127.0.0.1 localhost")
        self.conf = directory / "conf" / "mmc-local-pool.conf"
        self.views: dict[str, Any] = {}
        self.events: list[tuple[str, ...]] = []
        self.problems: dict[str, str | None] = {}
        self.off: set[str] = set()
        self.lines = ["kvtierd-pool ready rank=3 device=0 seconds=0.1"]
        direct = DirectPlan(
            alias=NAME, master="a", addresses={n: f"127.0.21.{i}" for i, n in enumerate("abc", 1)},
            port=port, config_store_port=port + 1,
            clients=(
                DirectClient(unit="kvtier-pool-0", means="conf", why="x"),
                DirectClient(unit="kvtier-engine-e", means="alias", why="y"),
            ),
        )  # fmt: skip
        plan = NodePlan(
            node="b", master="a", series="emulated", direct=direct,
            meta=MetaAddress(
                client_meta_url=f"tcp://{NAME}:{port}", client_config_store_url=f"tcp://{NAME}:{port + 1}",
                server_meta_url=f"tcp://127.0.21.2:{port}", server_config_store_url=f"tcp://127.0.21.2:{port + 1}",
                metrics_url="http://127.0.0.1:8000",
            ),
            pool=PoolPlan(dram_bytes_per_provider=64),
            files=(FileSpec(path=str(self.conf), content=f"url = tcp://127.0.21.1:{port}\n"),),
            units=(
                UnitSpec(id="kvtier-pool-0", kind="pool", name="0", argv=("pool",), files=(str(self.conf),)),
                UnitSpec(id="kvtier-engine-e", kind="engine", name="e", argv=argv),
            ),
        )  # fmt: skip
        self.node: Any = SimpleNamespace(
            state=directory, plan=plan, view=self.views.get,
            settings=Settings(pool={"dram": 1 << 30}, paths={"state": str(directory)}),
            events=SimpleNamespace(add=lambda *a, **k: self.events.append(a)),
            supervisor=SimpleNamespace(set_problem=lambda u, _, text: self.problems.update({u: text})),
            backend=SimpleNamespace(tail=self._tail),
            detached=SimpleNamespace(is_off=lambda unit, _: unit in self.off),
        )  # fmt: skip
        self.clients = self.again()

    def again(self) -> DirectClients:
        """As a new daemon would find it."""
        return DirectClients(self.node, hosts_file=self.hosts)

    async def _tail(self, _: str, lines: int = 20) -> list[str]:
        return self.lines

    def show(
        self, unit: str, kind: str, pid: int | None, instance: str = "run-1", state: str = "ready"
    ) -> None:
        self.views[unit] = SimpleNamespace(id=unit, kind=kind, pid=pid, instance=instance, state=state)


async def test_files_and_name_are_led_and_a_new_daemon_knows_it(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.clients.seen == ClientsSeen(0, "")
    await world.clients.point(4, "c")
    assert world.conf.read_text() == "url = tcp://127.0.21.3:5000\n"
    assert world.hosts.read_bytes().startswith(b"127.0.0.1 localhost\n")
    assert address_of(world.hosts.read_bytes(), NAME) == "127.0.21.3"
    kept = last_plan(world.node.settings)
    assert kept is not None
    assert kept.master == "c"
    assert world.clients.seen == world.again().seen == ClientsSeen(4, "c")
    assert world.again().life == "epoch 4"


async def test_a_plan_that_points_elsewhere_is_led_anew(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = world.node.plan
    await world.clients.point(4, "c")
    world.node.plan = before  # as a reload with old knowledge leaves it
    assert world.clients.seen == ClientsSeen(4, "")
    await world.clients.point(4, "c")
    assert world.clients.seen == ClientsSeen(4, "c")


async def test_somebody_else_s_line_is_an_error_and_nothing_counts_as_led(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.hosts.write_text(f"10.9.9.9 {NAME}\n")
    with pytest.raises(HostError) as caught:
        await world.clients.point(4, "c")
    assert caught.value.stable_code == "hosts.foreign-line"
    assert world.clients.seen == ClientsSeen(0, "")
    with pytest.raises(HostError):
        await world.clients.point(4, "stranger")


async def test_a_container_s_own_hosts_file_is_changed_too(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    shutil.copy(Path("tests/e2e/stand_in_docker.py"), docker)
    docker.chmod(0o755)
    tools = Toolchain(python=sys.executable, run_meta_script="x", run_pool_script="y", docker=str(docker))
    argv = docker_argv(
        tools, name="kvtier-engine-e", image="i", env={}, stop_seconds=1,
        command=(sys.executable, "-c", "import time; time.sleep(30)"),
    )  # fmt: skip
    world = World(tmp_path, argv=argv)
    run = subprocess.Popen(argv)
    try:
        world.show("kvtier-engine-e", "engine", run.pid)
        file = tmp_path / "kvtier-engine-e.hosts"
        for _ in range(200):
            if (tmp_path / "kvtier-engine-e.json").exists():
                break
            await asyncio.sleep(0.05)
        inode = file.stat().st_ino
        await world.clients.point(4, "c")
        assert address_of(file.read_bytes(), NAME) == "127.0.21.3"
        assert file.stat().st_ino == inode, "the container sees this file by its inode"
    finally:
        run.terminate()
        run.wait(20)


def test_nobody_starts_towards_another_master_or_before_the_survivors(tmp_path: Path) -> None:
    clients = World(tmp_path).clients
    assert clients.gate(4, up=True, is_open=True) == "waits for a master to be led to"
    asyncio.run(clients.point(4, "c"))
    assert clients.gate(5, up=True, is_open=True) == "waits for a master to be led to"
    assert clients.gate(4, up=False, is_open=False) == "waits for the MetaService of c"
    assert "knew the MetaService" in (clients.gate(4, up=True, is_open=False) or "")
    assert clients.gate(4, up=True, is_open=True) is None


CLIENT = """
import socket, sys, time
links = [socket.create_connection((sys.argv[1], int(p))) for p in sys.argv[2:]]
print("linked", flush=True)
time.sleep(60)
"""


async def test_links_rank_role_and_memory_of_real_processes_are_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.21.3", 0)) as meta:
        port = meta.getsockname()[1]
        with socket.create_server(("127.0.21.3", port + 1)) as store:
            world = World(tmp_path, port=port)
            await world.clients.point(4, "c")
            ports = {"pool": (port, port + 1), "lost": (port + 1,)}
            processes = {
                name: subprocess.Popen(
                    [sys.executable, "-c", CLIENT, "127.0.21.3", *map(str, dialled)], stdout=subprocess.PIPE
                )
                for name, dialled in ports.items()
            }
            rolled: list[Roll] = []
            try:
                for process in processes.values():
                    assert process.stdout is not None
                    await asyncio.to_thread(process.stdout.readline)
                world.show("kvtier-pool-0", "pool", processes["pool"].pid)
                world.show("kvtier-engine-e", "engine", processes["lost"].pid)

                async def look(ranks: dict[int, PoolRank]) -> dict[str, str]:
                    clients = world.clients
                    returning = clients._returning
                    returning.hurry()
                    clients.round(rolled.append, epoch=4, up=True, is_open=True, ranks=ranks)
                    assert returning._looking is not None
                    await asyncio.wait([returning._looking])
                    return dict(returning._comeback.missing)

                right = {3: PoolRank(3, "provider", True, 64)}
                assert "role unknown" in (await look({3: PoolRank(3, "unknown", True, 64)}))["kvtier-pool-0"]
                assert "rank 3" in (await look({}))["kvtier-pool-0"]
                assert list(await look(right)) == ["kvtier-engine-e"]
                assert world.clients.missing == 1
                world.off.add("kvtier-engine-e")
                assert await look(right) == {}, "an operator took its L3 off"
                assert rolled == [], "the deadline is not over"
            finally:
                for process in processes.values():
                    process.kill()
                    process.wait(10)
            store.close()


def test_the_pool_s_members_for_the_others() -> None:
    cluster = parse_cluster_status(
        json.dumps(
            {"mf_cluster": [{"server": {"aliveRanks": [0], "groupManager": {"ranks": [
                {"rank": 0, "role": "provider", "state": "RANK_ACTIVE"},
                {"rank": 1, "role": "proxy", "state": "RANK_ACTIVE"},
            ]}}}]}
        ).encode()
    )  # fmt: skip
    segment: Any = SimpleNamespace(rank=0, total_bytes=64)
    pool = PoolState(capacity=None, segments=(segment, segment), cluster=cluster)  # type: ignore[arg-type]
    assert pool_ranks(pool) == (PoolRank(0, "provider", True, 128), PoolRank(1, "proxy", False, 0))
    assert pool_ranks(None) == ()
