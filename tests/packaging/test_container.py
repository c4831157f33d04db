"""kvtierd in a container without systemd, started by the command in docs/install.md."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from container import MIB, Container, Run, check_runc, parse, running
from debian import CONTAINER_IMAGE, CONTAINER_PACKAGES, CannotHaveError, Debian, commands, debian_image
from test_build import deb

from kvtierd.emulator.build import ensure_driver

SETTINGS = """
[node]
series = "emulated"
[pool]
dram = "128MiB"
host_reserve = "1GiB"
{pool}
[[engine]]
name = "ref"
plugin = "refengine"
model = "refengine"
port = 8113
args = {{ preset = "tiny" }}
[daemon]
stop_units_on_exit = true
"""
ASK = """
from kvtierd.workload.stream import complete
print(complete("127.0.0.1", 8113, model="refengine", prompt="tell me more " * 40, max_tokens=8).text)
"""
READY_SECONDS = 90
EMULATION = {"add": ("sys_admin",), "shm_bytes": 256 * MIB}


@pytest.fixture(scope="module")
def rootfs(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Debian without systemd, with the packages installed as an image's recipe would."""
    try:
        debian = Debian.unpack(
            debian_image(CONTAINER_IMAGE, CONTAINER_PACKAGES), tmp_path_factory.mktemp("rootfs")
        )
        check_runc(debian.root, tmp_path_factory.mktemp("probe") / "bundle")
    except CannotHaveError as error:
        pytest.skip(str(error))
    assert not debian.path("/usr/bin/systemctl").exists()
    debian.install(deb(dist), deb(dist, "kvtierd-plugin-refengine"))
    ensure_driver(debian.path("/srv/cache/kvtierd/emulator"))  # there is no compiler in the image
    return debian.root


@pytest.fixture
def fresh(rootfs: Path) -> Path:
    """The same before each container: what an earlier one wrote is gone."""
    for directory in ("run/kvtierd", "var/lib/kvtierd", "var/log/kvtierd", "tmp"):
        shutil.rmtree(rootfs / directory, ignore_errors=True)
        (rootfs / directory).mkdir()
    return rootfs


def documented(host: Path, pool: str = "", **changes: Any) -> Run:
    """The command in docs/install.md, with settings for the emulation in its volumes below ``host``."""
    command, status_command = commands("container")
    assert status_command == "docker exec kvtierd kvtierctl status"
    for directory in ("etc/kvtierd", "var/lib/kvtierd", "var/log/kvtierd"):
        (host / directory).mkdir(parents=True, exist_ok=True)
    (host / "etc/kvtierd/kvtierd.toml").write_text(SETTINGS.format(pool=pool))
    run = parse(shlex.split(command.removeprefix("docker run ")), host)
    assert run.volumes["/etc/kvtierd"][1] == "ro"
    return dataclasses.replace(run, environment={"XDG_CACHE_HOME": "/srv/cache"}, **changes)


def status(container: Container) -> dict[str, Any]:
    said = container.execute("kvtierctl", "status", "--json", check=False).stdout
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        return {"units": [], "problems": []}
    return found if "units" in found else {"units": [], "problems": []}


def until(container: Container, holds: Any) -> dict[str, Any]:
    """The first status for which ``holds``."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        found = status(container)
        if holds(found):
            return found
        assert container.is_running(), container.log()
        assert time.monotonic() < deadline, (found, container.log()[-3000:])
        time.sleep(0.3)


def all_ready(found: dict[str, Any]) -> bool:
    return bool(
        found["units"] and all(u["state"] == "ready" for u in found["units"]) and not found["problems"]
    )


def pids(found: dict[str, Any]) -> dict[str, int]:
    return {u["id"]: u["pid"] for u in found["units"]}


def daemon(container: Container) -> int:
    """The process id of kvtierd, inside."""
    script = "cat /run/kvtierd/kvtierd.lock"
    return int(container.execute("sh", "-c", script).stdout.split()[0])


def kill(container: Container, pid: int) -> None:
    container.execute("sh", "-c", f"kill -9 {pid}")


def zombies(container: Container) -> list[str]:
    script = "cat /proc/[0-9]*/stat 2>/dev/null || true"
    lines = container.execute("sh", "-c", script).stdout.splitlines()
    return [line for line in lines if line.rpartition(")")[2].split()[0] == "Z"]


def ask(container: Container) -> str:
    return container.execute("/usr/lib/kvtierd/bin/python", "-I", "-c", ASK).stdout


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return tmp_path / "host"


def test_units_outlive_the_daemon_and_a_stop_is_orderly(fresh: Path, host: Path, tmp_path: Path) -> None:
    run = documented(host, **EMULATION)
    with running(fresh, tmp_path / "first", run) as container:
        found = until(container, all_ready)
        before = pids(found)
        assert found["backend"] == "shim"
        assert "(shim)" in container.execute("kvtierctl", "status").stdout
        answer = ask(container)
        assert answer.strip()

        old = daemon(container)
        kill(container, old)
        until(container, lambda s: all_ready(s) and daemon(container) != old)
        assert pids(status(container)) == before, "the units are the same processes"
        assert "units go on" in container.log()
        assert ask(container) == answer

        container.execute("kvtierctl", "restart", "ref", timeout_seconds=120)
        restarted = pids(until(container, all_ready))
        assert {u for u in before if before[u] != restarted[u]} == {"kvtier-engine-ref"}
        assert zombies(container) == []
        assert ask(container) == answer

        code, seconds = container.stop()
        assert code == 0, container.log()
        assert seconds < 60
    events = [json.loads(line) for line in (host / "var/lib/kvtierd/events.jsonl").read_text().splitlines()]
    stopped = {e["unit"] for e in events if e["kind"] == "stopped"}
    assert stopped >= set(before), events[-12:]
    assert events[-1]["kind"] == "daemon.stopped"

    # The same container started again: a new boot to its units, which begin from nothing.
    with running(fresh, tmp_path / "second", run) as container:
        found = until(container, all_ready)
        assert all(u["restarts"] == 0 for u in found["units"]), found["units"]
        assert ask(container) == answer
        container.kill()
    with running(fresh, tmp_path / "third", run) as container:  # after a kill as well
        until(container, all_ready)
        assert ask(container) == answer


def test_without_the_loop_the_container_ends_with_the_daemon(fresh: Path, host: Path, tmp_path: Path) -> None:
    run = dataclasses.replace(documented(host, **EMULATION), command=["kvtierd"])
    with running(fresh, tmp_path / "bundle", run) as container:
        until(container, lambda s: s["units"])
        kill(container, daemon(container))
        deadline = time.monotonic() + 20
        while container.is_running():
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_what_docker_does_not_give_is_named(fresh: Path, host: Path, tmp_path: Path) -> None:
    """Docker's own capabilities and system calls: the emulation cannot have its mounts, and hugepages are read-only."""
    run = documented(host, pool="hugepages = 64", shm_bytes=1024 * MIB)
    with running(fresh, tmp_path / "bundle", run) as container:
        found = until(container, lambda s: any(u["state"] == "failed" for u in s["units"]))
        (meta,) = (u for u in found["units"] if u["kind"] == "meta")
        assert "unshare: Operation not permitted" in meta["reason"]
        assert "CAP_SYS_ADMIN" in meta["reason"]
        assert any("hugepages" in p for p in found["problems"]), found["problems"]
        reserve = container.execute("kvtierctl", "hugepages", "reserve", check=False)
        assert reserve.returncode != 0
        assert "read-only" in (reserve.stdout + reserve.stderr).lower()

        started = time.monotonic()
        demo = container.execute("kvtierctl", "demo", check=False)
        assert demo.returncode != 0
        assert "CAP_SYS_ADMIN" in demo.stderr
        assert time.monotonic() - started < 45, "it does not wait for what cannot come"
        assert container.is_running()


def test_a_dev_shm_that_is_too_small_is_refused(fresh: Path, host: Path, tmp_path: Path) -> None:
    """Else the first process that writes beyond docker's 64 MB is killed, long after the start."""
    with running(fresh, tmp_path / "bundle", documented(host, add=("sys_admin",))) as container:
        found = until(container, lambda s: s["problems"] and "being made" not in s["problems"][0])
        assert "128 MiB do not fit into /dev/shm, which has 64 MiB" in found["problems"][0]
        said = container.execute("kvtierctl", "reload", check=False).stderr
        assert "--shm-size" in said
