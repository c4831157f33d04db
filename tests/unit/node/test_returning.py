"""Clients behind the endpoint: which unit's they are, whether they are back, who is rolled and who is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster import comeback
from kvtierd.cluster.comeback import Member, Roll
from kvtierd.cluster.standing import PoolRank
from kvtierd.node.returning import RelayedClients, Returning, family_of
from kvtierd.units.procfs import process_table

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
RANKS = {1: PoolRank(1, "provider", True, 64), 2: PoolRank(2, "proxy", True)}


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """A process and its child."""
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process.pid, child
    subprocess.run(["kill", "-9", str(process.pid), str(child)], check=False)
    process.wait(10)


def row(pid: int, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid, "joined": True, "back": True, "provider": False, "stranded": False, "rank": None, **more
    }  # fmt: skip


class World:
    """A node with an endpoint, and what it says."""

    def __init__(self, directory: Path) -> None:
        self.views: list[Any] = []
        self.off: set[str] = set()
        self.events: list[tuple[str, ...]] = []
        self.problems: dict[str, str | None] = {}
        plan = SimpleNamespace(
            pool=SimpleNamespace(dram_bytes_per_provider=64),
            unit=lambda _: SimpleNamespace(argv=("engine",)),
        )
        self.node: Any = SimpleNamespace(
            state=directory, plan=plan, endpoint_status={"clients": []},
            supervisor=SimpleNamespace(
                views=lambda: self.views, set_problem=lambda u, _, text: self.problems.update({u: text})
            ),
            view=lambda unit: next((v for v in self.views if v.id == unit), None),
            detached=SimpleNamespace(is_off=lambda unit, _: unit in self.off),
            events=SimpleNamespace(add=lambda *a, **k: self.events.append(a)),
        )  # fmt: skip

    def show(self, unit: str, kind: str, pid: int | None, run: str = "r1", state: str = "ready") -> None:
        view = SimpleNamespace(id=unit, kind=kind, pid=pid, instance=run, state=state)
        self.views = [v for v in self.views if v.id != unit] + [view]

    def say(self, *rows: dict[str, Any]) -> None:
        self.node.endpoint_status = {"clients": list(rows)}


async def test_clients_are_their_units_processes_and_children(
    tmp_path: Path, family: tuple[int, int]
) -> None:
    parent, child = family
    assert family_of(parent, process_table()) == {parent, child}
    assert family_of(1 << 30, process_table()) == set()
    world = World(tmp_path)
    world.show("pool-0", "pool", parent)
    world.say(row(child, rank=1, provider=True), row(1, rank=2), row(0, rank=9))
    (seen,) = await RelayedClients(world.node).see()
    assert (seen.unit, seen.linked, seen.members) == ("pool-0", True, (Member(1, "provider", 64),))
    world.say(row(child, rank=1, provider=True, back=False, stranded=True))
    (seen,) = await RelayedClients(world.node).see()
    assert seen.linked is False
    assert "only a new process" in seen.lost


async def test_an_engine_is_back_when_all_its_processes_are(tmp_path: Path, family: tuple[int, int]) -> None:
    parent, child = family
    world = World(tmp_path)
    world.show("engine-e", "engine", parent)
    world.say(row(parent), row(child, rank=2, back=False))
    (seen,) = await RelayedClients(world.node).see()
    assert (seen.linked, seen.members) == (False, (Member(2),)), "how much it brings, its own settings say"
    world.off.add("engine-e")
    assert await RelayedClients(world.node).see() == (), "an operator took its L3 off"


async def test_what_never_joined_is_no_client(tmp_path: Path, family: tuple[int, int]) -> None:
    parent, _ = family
    world = World(tmp_path)
    world.show("engine-e", "engine", parent)
    world.say(row(parent, joined=False))
    assert await RelayedClients(world.node).see() == ()
    world.node.endpoint_status = None
    assert await RelayedClients(world.node).see() == ()
    old = row(parent)
    del old["back"]  # an endpoint of an earlier version
    world.say(old)
    assert await RelayedClients(world.node).see() == ()


class Looks:
    """Rounds of ``Returning``, one finished look each."""

    def __init__(self, world: World) -> None:
        self.rolled: list[Roll] = []
        self.returning = Returning(world.node, RelayedClients(world.node).see)

    async def look(self, epoch: int = 4, *, up: bool = True, life: str = "x") -> None:
        for _ in range(2):  # the second takes in what the first has found
            self.returning.hurry()
            self.returning.round(
                self.rolled.append, epoch=epoch, up=up, is_open=up, ranks=RANKS, life=life
            )  # fmt: skip
            assert self.returning._looking is not None
            await asyncio.wait([self.returning._looking])


async def test_one_that_does_not_come_back_is_rolled_and_a_new_daemon_knows_who_was_back(
    tmp_path: Path, family: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comeback, "DEADLINE_SECONDS", 0.0)
    parent, child = family
    world = World(tmp_path)
    world.show("engine-e", "engine", parent)
    world.say(row(child, rank=2))
    looks = Looks(world)
    await looks.look()
    assert looks.rolled == []
    world.say(row(child, rank=2, back=False))
    again = Looks(world)
    await again.look()
    assert again.rolled == [], "it has left since all were back"
    await looks.look()
    assert looks.rolled == [], "nothing has changed but its link"
    world.say(row(child, rank=2))
    await looks.look()
    world.say(row(child, rank=2, back=False))
    await looks.look(life="y")
    assert [r.unit for r in looks.rolled] == ["engine-e"]
    await looks.look(life="y")
    assert "no link" in str(world.problems["engine-e"])
    world.show("engine-e", "engine", parent, run="r2")
    await looks.look(life="y")
    assert world.events[-1][1] == "cluster.roll-no-help"
