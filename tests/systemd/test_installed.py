"""The packages under a real systemd: installed, started, killed, hung, upgraded, downgraded, removed, purged.

Through all of it one client streams completions; none may fail, and MetaService, pool holder and engine keep their
processes. Packages are built here, unless KVTIERD_TEST_DIST and KVTIERD_TEST_DIST_NEXT name directories with this version's
and a higher one's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab import ROOT, CannotBootError, Guest, booted

from kvtierd.assembly import cache_directory

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
PACKAGES = ("kvtierd_", "kvtierd-plugin-refengine_")
NEXT_VERSION = "99.0.0"
SETTINGS = """
[node]
series = "emulated"
[pool]
dram = "128MiB"
host_reserve = "1GiB"
[[engine]]
name = "ref"
plugin = "refengine"
model = "refengine"
port = 8113
args = { preset = "tiny" }
"""
# Asks again and again until a file appears, and writes down how many answers there were and what failed.
CLIENT = """
    import json, pathlib, sys, time
    from kvtierd.workload.stream import complete
    answers, failures, longest = 0, [], 0.0
    out = pathlib.Path("/mnt/client.json")
    while not pathlib.Path("/mnt/enough").exists():
        started = time.monotonic()
        try:
            complete("127.0.0.1", 8113, model="refengine", prompt="tell me more " * 40, max_tokens=16)
            answers += 1
        except Exception as error:
            failures.append(str(error))
        longest = max(longest, time.monotonic() - started)
        out.write_text(json.dumps([answers, failures[:5], longest]))
        time.sleep(0.05)
"""


def build(out: Path, *arguments: str) -> Path:
    architecture = {"x86_64": "x86_64", "aarch64": "aarch64"}[os.uname().machine]
    subprocess.run(
        [sys.executable, str(ROOT / "packaging/build.py"), "--out", str(out), "--form", "deb", "--arch", architecture,
         *arguments],
        check=True, timeout=900, capture_output=True,
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def dists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories with this version's packages and with a higher one's."""
    named, following = os.environ.get("KVTIERD_TEST_DIST"), os.environ.get("KVTIERD_TEST_DIST_NEXT")
    this = Path(named) if named else build(tmp_path_factory.mktemp("dist"))
    higher = Path(following) if following else build(
        tmp_path_factory.mktemp("next"), "--package-version", NEXT_VERSION
    )  # fmt: skip
    return this, higher


def debs(directory: Path) -> list[Path]:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    return [next(directory.glob(f"{name}*_{machine}.deb")) for name in PACKAGES]


@pytest.fixture(scope="module", params=["v2", "v1"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """``v1``: the hybrid control groups of older distributions."""
    try:
        with booted("installed", request.param) as running:
            yield running
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")


class Host:
    """The guest with kvtierd on it."""

    def __init__(self, guest: Guest, dists: tuple[Path, Path]) -> None:
        self.guest = guest
        self._versions: dict[str, list[str]] = {}
        for name, directory in zip(("this", "next"), dists, strict=True):
            target = guest.shared / name
            target.mkdir()
            self._versions[name] = [
                f"/mnt/{name}/{Path(shutil.copy(deb, target)).name}" for deb in debs(directory)
            ]

    def run(self, *command: str, check: bool = True, timeout: float = 120.0) -> str:
        done = self.guest.run(*command, check=check, timeout=timeout)
        return done.stdout + done.stderr

    def install(self, version: str) -> None:
        # The guest has Debian's python3.11 in parts; what kvtierd needs of it is there.
        self.run("dpkg", "--force-depends", "--force-confold", "--install", *self._versions[version])

    def status(self) -> dict[str, Any]:
        done = self.guest.run("kvtierctl", "status", "--json", check=False)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            found = {}
        return found if "units" in found else {"units": [], "said": done.stdout + done.stderr}

    def pids(self) -> dict[str, int]:
        """Of MetaService, pool holder, endpoint and engine, once all of them are ready and nothing is wrong."""
        deadline = time.monotonic() + 90
        while True:
            status = self.status()
            units = status["units"]
            if units and all(u["state"] == "ready" for u in units) and not status["problems"]:
                return {u["id"]: u["pid"] for u in units}
            assert time.monotonic() < deadline, (
                status,
                self.run("journalctl", "-u", "kvtierd", "-n", "40", check=False),
            )
            time.sleep(0.3)

    def daemon_pid(self) -> int:
        return int(self.run("systemctl", "show", "-P", "MainPID", "kvtierd").strip() or 0)

    def until_another_daemon(self, old: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.daemon_pid() in {0, old}:
            assert time.monotonic() < deadline, self.run("systemctl", "status", "kvtierd", check=False)
            time.sleep(0.2)


@pytest.fixture(scope="module")
def host(guest: Guest, dists: tuple[Path, Path]) -> Host:
    made = Host(guest, dists)
    prepare(made)
    return made


def prepare(made: Host) -> None:
    """Installs this version, with what emulation needs."""
    made.install("this")
    # There is no C compiler in the guest: the emulated driver is the one made outside.
    made.run("mkdir", "-p", "/var/cache/kvtierd", "/etc/systemd/system/kvtierd.service.d")
    made.run("cp", "-a", str(cache_directory()), "/var/cache/kvtierd/")
    made.run(
        "cp", "/usr/share/doc/kvtierd/examples/kvtierd.service.d/emulation.conf",
        "/etc/systemd/system/kvtierd.service.d/",
    )  # fmt: skip


@pytest.fixture(scope="module")
def started(host: Host) -> dict[str, int]:
    """Started as the install page says; the processes of the units."""
    assert host.run("systemctl", "is-enabled", "kvtierd", check=False).strip() == "disabled", (
        "nothing starts by itself"
    )
    (host.guest.shared / "kvtierd.toml").write_text(SETTINGS)
    host.run("cp", "/mnt/kvtierd.toml", "/etc/kvtierd/kvtierd.toml")
    host.run("systemctl", "daemon-reload")
    host.run("systemctl", "start", "kvtierd")
    return host.pids()


@pytest.fixture(scope="module")
def client(host: Host, started: dict[str, int]) -> Iterator[None]:
    """Streams throughout, from outside of the packages."""
    script = host.guest.shared / "client.py"
    script.write_text(textwrap.dedent(CLIENT))
    process = subprocess.Popen(host.guest.argv(sys.executable, "/mnt/client.py"))
    yield
    (host.guest.shared / "enough").touch()
    process.wait(60)


def answered(host: Host) -> tuple[int, list[str], float]:
    answers, failures, longest = json.loads((host.guest.shared / "client.json").read_text())
    return answers, failures, longest


def test_it_starts_in_order_and_status_tells(host: Host, started: dict[str, int]) -> None:
    assert {name.split("-")[1] for name in started} == {"endpoint", "meta", "pool", "engine"}
    status = host.status()
    assert status["backend"] == "systemd"
    order = [
        int(host.run("systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", unit))
        for unit in ("kvtierd-hugepages", "kvtierd")
    ]
    assert 0 < order[0] <= order[1], "hugepages first"
    assert "kvtier-engine-ref.service" in host.run("systemctl", "list-units", "--plain", "kvtier-*")
    assert "ready: model tiny" in host.run("kvtierctl", "logs", "ref"), "the journal is read"


def test_hugepages_and_the_sandbox_leave_no_complaint(host: Host, started: dict[str, int]) -> None:
    said = host.run("journalctl", "-q", "-u", "kvtierd", "-u", "kvtierd-hugepages")
    assert "EPERM" not in said
    assert "Permission denied" not in said
    assert "Traceback" not in said


def test_no_notify_socket_reaches_a_unit(host: Host, started: dict[str, int]) -> None:
    for pid in started.values():
        names = host.run("sh", "-c", f"tr '\\0' '\\n' < /proc/{pid}/environ | cut -d= -f1").split()
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} & set(names)


def test_a_killed_daemon_comes_back_and_adopts(host: Host, started: dict[str, int], client: None) -> None:
    old = host.daemon_pid()
    host.run("kill", "-9", str(old))
    host.until_another_daemon(old, 30)
    assert host.pids() == started


def test_a_hung_daemon_is_replaced_by_the_watchdog(host: Host, started: dict[str, int], client: None) -> None:
    old = host.daemon_pid()
    host.run("kill", "-STOP", str(old))
    host.until_another_daemon(old, 90)
    assert host.pids() == started


def test_a_reload_is_taken_or_refused_and_said(host: Host, started: dict[str, int], client: None) -> None:
    host.run("systemctl", "reload", "kvtierd")
    host.run("sh", "-c", "echo 'pool = 5' >> /etc/kvtierd/kvtierd.toml")
    assert host.guest.run("systemctl", "reload", "kvtierd", check=False).returncode != 0
    assert "active" in host.run("systemctl", "is-active", "kvtierd")
    host.run("cp", "/mnt/kvtierd.toml", "/etc/kvtierd/kvtierd.toml")
    host.run("systemctl", "reload", "kvtierd")
    assert host.pids() == started


def test_an_upgrade_and_a_downgrade_leave_units_and_settings(
    host: Host, started: dict[str, int], client: None
) -> None:
    for version, shown in (("next", NEXT_VERSION), ("this", None)):
        old = host.daemon_pid()
        host.install(version)
        host.until_another_daemon(old, 60)
        assert host.pids() == started
        installed = host.run("dpkg-query", "-W", "-f", "${Version}", "kvtierd")
        assert (shown is None) != installed.startswith(NEXT_VERSION)
        assert 'preset = "tiny"' in host.run("cat", "/etc/kvtierd/kvtierd.toml")
        assert host.run("systemctl", "is-enabled", "kvtierd", check=False).strip() == "disabled"


def test_no_request_failed_in_all_this(host: Host, client: None) -> None:
    answers, failures, _ = answered(host)
    assert failures == []
    assert answers > 50


def test_a_stop_of_the_daemon_leaves_its_units(host: Host, started: dict[str, int]) -> None:
    host.run("systemctl", "stop", "kvtierd")
    for pid in started.values():
        assert host.guest.run("test", "-d", f"/proc/{pid}", check=False).returncode == 0
    host.run("systemctl", "start", "kvtierd")
    assert host.pids() == started


def test_removal_stops_everything_and_a_purge_leaves_nothing(host: Host, started: dict[str, int]) -> None:
    names = ("kvtierd-plugin-refengine", "kvtierd")
    host.run("dpkg", "--remove", *names)
    for pid in started.values():
        assert host.guest.run("test", "-d", f"/proc/{pid}", check=False).returncode != 0
    assert host.guest.run("test", "-e", "/etc/kvtierd/kvtierd.toml", check=False).returncode == 0
    host.run("dpkg", "--purge", *names)
    for path in ("/etc/kvtierd", "/var/lib/kvtierd", "/var/log/kvtierd", "/usr/lib/kvtierd"):
        assert host.guest.run("test", "-e", path, check=False).returncode != 0, path
