"""The packages under a real systemd: installed, started, killed, hung, upgraded, downgraded, removed, purged.

Through all of it one client streams completions; none may fail, and MetaService, pool holder and engine keep their
processes. It is installed and started by the commands in README.md, word for word.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian import commands
from installed import DEB_ARCH, PAGES, Host, debs
from lab import INSTALLING, ROOT, CannotBootError, Guest, booted
from packages import NEXT_VERSION, OTHER_SETTINGS, with_other_settings

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
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


def readme() -> list[str]:
    """What README.md tells root to type, for this machine's architecture."""
    lines = commands("install")  # README.md has the same: tests/unit/packaging/test_docs.py
    return [line.replace("_amd64", f"_{DEB_ARCH[os.uname().machine]}") for line in lines]


@pytest.fixture(scope="module", params=["v2", "v1"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """``v1``: the hybrid control groups of older distributions."""
    try:
        with booted("installed", request.param, INSTALLING) as running:
            yield running
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")


@pytest.fixture(scope="module")
def host(guest: Guest, dists: tuple[Path, Path]) -> Host:
    made = Host(guest, dists)
    # `make packages` makes them for all architectures: the command must not take those of another.
    for name in ("kvtierd_0-1_amd64.deb", "kvtierd_0-1_arm64.deb"):
        if not name.endswith(f"{DEB_ARCH[os.uname().machine]}.deb"):
            (guest.shared / "this/dist" / name).touch()
    made.type(list(itertools.takewhile(lambda line: "systemctl" not in line, readme())))
    made.allow_emulation()
    made.stand_in_for_hugepages()
    return made


@pytest.fixture(scope="module")
def started(host: Host) -> dict[str, int]:
    """Started as README.md says; the processes of the units."""
    assert host.run("systemctl", "is-enabled", "kvtierd", check=False).strip() == "disabled", (
        "nothing starts by itself"
    )
    last = list(itertools.dropwhile(lambda line: "systemctl" not in line, readme()))
    said = host.type(last, check=False)  # the status of a node that is still starting is not 0
    assert "(systemd)" in said, "the last command shows the status"
    assert "wants/kvtierd.service" in said, "enabled"
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


def test_the_packages_that_the_readme_installs_are_those_that_are_built_here() -> None:
    assert "$ make packages\n# cd dist\n" in (ROOT / "README.md").read_text()
    done = subprocess.run(
        ["make", "--dry-run", "packages"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].split() == [".venv/bin/python", "packaging/build.py"]


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
    assert host.hugepages() == PAGES
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
        assert host.enabled() == "enabled"


def test_an_edited_settings_file_is_kept_and_the_new_one_is_put_beside_it(
    host: Host, dists: tuple[Path, Path], started: dict[str, int], client: None
) -> None:
    other = with_other_settings(debs(dists[0])[0], host.guest.shared / "other", "deb")
    old = host.daemon_pid()
    host.run("dpkg", "--force-confold", "--install", f"/mnt/other/{other.name}")
    host.until_another_daemon(old, 60)
    assert host.pids() == started
    assert 'preset = "tiny"' in host.run("cat", "/etc/kvtierd/kvtierd.toml")
    assert OTHER_SETTINGS in host.run("cat", "/etc/kvtierd/kvtierd.toml.dpkg-dist")
    old = host.daemon_pid()
    host.install("this")
    host.until_another_daemon(old, 60)
    assert host.pids() == started


def test_a_disabled_and_a_masked_service_stay_so(host: Host, started: dict[str, int], client: None) -> None:
    host.run("systemctl", "disable", "kvtierd")
    old = host.daemon_pid()
    host.install("next")
    host.until_another_daemon(old, 60)
    assert host.enabled() == "disabled"
    host.run("systemctl", "mask", "kvtierd")
    host.install("this")  # it cannot be restarted now, and that is no reason to fail
    assert host.enabled() == "masked"
    host.run("systemctl", "unmask", "kvtierd")
    host.run("systemctl", "restart", "kvtierd")
    assert host.pids() == started


def test_a_service_that_does_not_run_is_not_started_by_an_upgrade(
    host: Host, started: dict[str, int], client: None
) -> None:
    host.run("systemctl", "stop", "kvtierd")
    host.run("systemctl", "enable", "kvtierd")
    host.install("this")
    assert host.run("systemctl", "is-active", "kvtierd", check=False).strip() == "inactive"
    assert host.enabled() == "enabled"
    host.run("systemctl", "start", "kvtierd")
    assert host.pids() == started


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
    names = ("kvtierd-plugin-refengine", "kvtierd-plugin-vllm", "kvtierd")
    host.run("dpkg", "--remove", *names)
    for pid in started.values():
        assert host.guest.run("test", "-d", f"/proc/{pid}", check=False).returncode != 0
    assert host.guest.run("test", "-e", "/etc/kvtierd/kvtierd.toml", check=False).returncode == 0
    assert host.hugepages() == 0
    host.run("dpkg", "--purge", *names)
    for path in ("/etc/kvtierd", "/var/lib/kvtierd", "/var/log/kvtierd", "/usr/lib/kvtierd"):
        assert host.guest.run("test", "-e", path, check=False).returncode != 0, path
