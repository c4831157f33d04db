"""The exporter of a running node: it follows the settings, and a fault costs the page and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.events import EventLog
from kvtierd.node import showing as showing_module
from kvtierd.node.showing import Showing
from kvtierd.settings import Settings

GIB = 1024**3


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A port of somebody else."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = 100.0
        monkeypatch.setattr(
            showing_module, "time", SimpleNamespace(monotonic=lambda: self.clock, time=lambda: 1e9)
        )
        self.events = EventLog(directory)
        state = SimpleNamespace(views=(), tier=None, problems=["a problem"])
        self.node: Any = SimpleNamespace(
            events=self.events, exporter_problem="", snapshot=lambda: state, role="", master="", epoch=0,
            view_age_seconds=None, paused=None, settings=None,
        )  # fmt: skip
        pilot: Any = SimpleNamespace(
            observer=SimpleNamespace(picture=None), counts={("pool-small", "done"): 2}
        )
        self.showing = Showing(self.node, pilot)

    async def round(self, *, later: float = 1.0) -> None:
        self.clock += later
        self.showing.round()
        if self.showing._changing is not None:
            await asyncio.gather(self.showing._changing, return_exceptions=True)

    async def listen(self, address: str, **more: Any) -> None:
        self.node.settings = Settings(pool={"dram": GIB}, observe={"exporter": address, **more})
        await self.round()

    def told(self, kind: str) -> list[str]:
        return [e.message for e in self.events.last() if e.kind == kind]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = World(tmp_path, monkeypatch)
    yield made
    await made.showing.close()


async def answers(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    status = await reader.readline()
    writer.close()
    return b" 200 " in status


async def test_it_listens_and_moves_with_the_settings(world: World) -> None:
    first, second = free_port(), free_port()
    await world.listen(f"127.0.0.1:{first}")
    assert await answers(first)
    await world.round()
    assert world.told("exporter.listens") == [f"metrics and status page at http://127.0.0.1:{first}/"], "once"
    await world.listen(f"127.0.0.1:{second}")
    assert (await answers(first), await answers(second)) == (False, True)
    await world.listen("off")
    assert not await answers(second)
    await world.round(later=100.0)
    assert (world.node.exporter_problem, len(world.told("exporter.listens"))) == ("", 2)
    await world.listen(f"127.0.0.1:{second}")
    assert await answers(second)


async def test_a_port_that_is_taken_is_said_once_and_tried_again(world: World, taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    await world.listen(f"127.0.0.1:{port}")
    for _ in range(5):
        await world.round(later=31.0)
    (said,) = world.told("exporter.failed")
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert world.node.exporter_problem == f"the exporter cannot listen on 127.0.0.1:{port}"
    taken.close()
    await world.round(later=1.0)
    assert world.node.exporter_problem, "not at once: a port is not asked for in every round"
    await world.round(later=31.0)
    assert world.node.exporter_problem == ""
    assert await answers(port)


async def test_a_port_that_is_taken_does_not_keep_it_from_another(world: World, taken: socket.socket) -> None:
    port = free_port()
    await world.listen(f"127.0.0.1:{taken.getsockname()[1]}")
    await world.listen(f"127.0.0.1:{port}")
    assert (world.node.exporter_problem, await answers(port)) == ("", True)


async def test_certificates_that_cannot_be_used_are_said(world: World) -> None:
    port = free_port()
    await world.listen(f"127.0.0.1:{port}", tls={"ca": "/no/ca", "cert": "/no/cert", "key": "/no/key"})
    (said,) = world.told("exporter.failed")
    assert "certificates cannot be used" in said
    assert world.node.exporter_problem == "the exporter's certificates cannot be used"
    assert not await answers(port), "and not without them"


async def test_a_fault_of_ours_is_said_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("by zero")

    with monkeypatch.context() as patch:
        patch.setattr(showing_module, "Exporter", broken)
        await world.listen(f"127.0.0.1:{(port := free_port())}")
        await world.round(later=31.0)
    assert world.told("exporter.failed") == ["internal error: ZeroDivisionError: by zero"]
    assert world.node.exporter_problem == "internal error: ZeroDivisionError: by zero"
    await world.round(later=31.0)
    assert await answers(port)


async def test_what_is_shown_is_the_node_now(world: World) -> None:
    world.node.master, world.node.epoch, world.node.paused = "b", 4, ""
    for number in range(60):
        world.events.add("info", "x", f"{number}")
    shown = world.showing.look()
    assert (shown.cluster.master, shown.cluster.epoch, shown.cluster.paused) == ("b", 4, True)
    assert (len(shown.events), shown.problems) == (50, ["a problem"])
    assert shown.actions == {("pool-small", "done"): 2}


async def test_closing_closes_the_port(world: World) -> None:
    await world.listen(f"127.0.0.1:{(port := free_port())}")
    await world.showing.close()
    assert not await answers(port)
