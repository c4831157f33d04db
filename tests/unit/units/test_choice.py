from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.units import choice, procfs
from kvtierd.units.systemd_files import pids_under_systemd
from kvtierd.units.systemd_properties import Marker


@pytest.mark.parametrize(
    ("wanted", "problem", "shims", "services", "expected", "noted"),
    [
        ("auto", None, 0, 0, "systemd", False),
        ("auto", "no systemd", 0, 0, "shim", False),
        ("shim", None, 0, 0, "shim", False),
        ("systemd", None, 0, 0, "systemd", False),
        # what runs is never started a second time
        ("auto", None, 2, 0, "shim", True),
        ("systemd", None, 2, 0, "shim", True),
        ("systemd", "no bus", 2, 0, "shim", True),
        ("auto", "no systemd", 2, 0, "shim", False),
        ("shim", None, 2, 0, "shim", False),
        ("shim", None, 0, 3, "systemd", True),
        ("auto", "the bus is away", 0, 3, "systemd", False),
        ("auto", None, 0, 3, "systemd", False),
    ],
)
def test_the_backend(wanted, problem, shims, services, expected, noted):
    kind, note = choice.decide(wanted, problem, shims, services)
    assert kind == expected
    assert bool(note) is noted


@pytest.mark.parametrize(
    ("wanted", "problem", "shims", "services", "code"),
    [("systemd", "no bus", 0, 0, "unit.no-systemd"), ("auto", None, 1, 1, "unit.two-backends")],
)
def test_what_is_refused(wanted, problem, shims, services, code):
    with pytest.raises(UnitError) as caught:
        choice.decide(wanted, problem, shims, services)
    assert caught.value.stable_code == code


async def test_without_systemd_it_is_the_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "BOOTED", tmp_path / "none")
    chosen = await choice.choose_backend("auto", tmp_path / "run", tmp_path / "log")
    assert (chosen.backend.name, chosen.note) == ("shim", "")
    with pytest.raises(UnitError) as caught:
        await choice.choose_backend("systemd", tmp_path / "run", tmp_path / "log")
    assert "not systemd" in caught.value.why


async def test_a_running_shim_keeps_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def usable() -> None:
        return None

    monkeypatch.setattr(choice, "systemd_problem", usable)
    directory = tmp_path / "run" / "units" / "kvtier-engine-a"
    directory.mkdir(parents=True)
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    record = {"unit_id": "u", "instance": "i", "pid": stat.pid, "start_ticks": stat.start_ticks, "exit": None}
    (directory / "record.json").write_text(json.dumps(record | {"boot_id": procfs.boot_id()}))
    chosen = await choice.choose_backend("auto", tmp_path / "run", tmp_path / "log")
    assert chosen.backend.name == "shim"
    assert "1 units still run under shims" in chosen.note
    (directory / "record.json").write_text(json.dumps(record | {"boot_id": "another"}))
    assert choice.running_under_shims(tmp_path / "run" / "units") == 0


def test_pids_are_those_of_this_daemon_s_services(tmp_path: Path) -> None:
    transient, groups = tmp_path / "transient", tmp_path / "groups"
    transient.mkdir()
    for name, owner, pids in (("a", "/run/k%t", "1\n2\n"), ("b", "/run/other", "3\n"), ("c", "/run/k%t", "")):
        text = Marker(owner, "d", "aa").text().replace("%", "%%")
        (transient / f"kvtier-engine-{name}.service").write_text(f"[Unit]\nDescription={text}\n")
        group = groups / "kvtierd.slice" / f"kvtier-engine-{name}.service"
        group.mkdir(parents=True)
        (group / "cgroup.procs").write_text(pids)
    inner = groups / "kvtierd.slice" / "kvtier-engine-a.service" / "inner"
    inner.mkdir()
    (inner / "cgroup.procs").write_text("5\n")
    (transient / "kvtier-engine-d.service").write_bytes(b"\xff nothing")
    found = pids_under_systemd(Path("/run/k%t"), transient, [groups, tmp_path / "none"])
    assert found == {"kvtier-engine-a": {1, 2, 5}}
    assert pids_under_systemd(Path("/run/k%t"), tmp_path / "none", [groups]) == {}
