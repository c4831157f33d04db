from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from dbus_fast.message import Message
from dbus_fast.signature import Variant

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.units.systemd_backend import SystemdBackend
from kvtierd.units.systemd_bus import SystemdBus
from kvtierd.units.systemd_properties import program_of

PATH = "/org/freedesktop/systemd1/unit/x"


def signal(sender: str) -> Message:
    message = Message.new_signal(
        PATH,
        "org.freedesktop.DBus.Properties",
        "PropertiesChanged",
        "sa{sv}as",
        ["i", {"MainPID": Variant("u", 7)}, []],
    )
    message.sender = sender
    return message


def test_signals_of_anybody_else_are_not_believed():
    seen = []
    bus = SystemdBus(lambda *signal: seen.append(signal), lambda: None)
    bus._take(signal(":1.1"))
    bus._owner = ":1.1"
    bus._take(signal(":1.99"))
    assert seen == []
    bus._take(signal(":1.1"))
    assert seen == [(PATH, "PropertiesChanged", ["i", {"MainPID": 7}, []])]


@pytest.mark.parametrize("address", ["unix:path={}/none", "unix:path={}/dead"])
async def test_no_bus_is_an_error_with_a_code(address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No socket at all, and one behind which somebody hangs up."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_unix_server(hang_up, tmp_path / "dead")
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address.format(tmp_path))
    backend = SystemdBackend(tmp_path / "run")
    begun = time.monotonic()
    try:
        for call in (backend.find("kvtier-engine-a"), backend.list(), backend.stop("kvtier-engine-a")):
            with pytest.raises(UnitError) as caught:
                await call
            assert caught.value.stable_code == "unit.no-bus"
        assert await backend.wait_change(0.01) in {True, False}
        assert time.monotonic() - begun < 12
    finally:
        await backend.close()
        server.close()


def spec(*argv: str, **changes: object) -> UnitSpec:
    fields = {"id": "kvtier-engine-a", "kind": "engine", "name": "a", "argv": argv}
    return UnitSpec.model_validate(fields | changes)


def test_the_program_is_found_as_the_unit_would_find_it(tmp_path: Path):
    (tmp_path / "engine").write_text("#!/bin/sh\n")
    (tmp_path / "engine").chmod(0o755)
    assert program_of(spec("/usr/bin/x")) == "/usr/bin/x"
    assert program_of(spec("./bin/../x", cwd="/srv")) == "/srv/x"
    assert program_of(spec("engine", env={"PATH": str(tmp_path)})) == str(tmp_path / "engine")
    for bad in (spec("engine", env={"PATH": "/none"}), spec(), spec("x\0y"), spec("/x", env={"A": "a\0b"})):
        with pytest.raises(UnitError) as caught:
            program_of(bad)
        assert caught.value.stable_code == "unit.exec"
