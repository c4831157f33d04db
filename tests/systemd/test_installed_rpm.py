"""The .rpm and what its scripts do, with dnf under a real systemd: installed, upgraded, downgraded, removed.

The guest is a Debian, whose packages rpm knows nothing of: an empty package stands for what kvtierd's ask of a distribution.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from debian import commands
from installed import PAGES, Host, debs
from kvpack.nfpm import DEPENDS_RPM, program
from lab import INSTALLING, CannotBootError, Guest, booted
from packages import NEXT_VERSION, OTHER_SETTINGS, OTHER_VERSION, with_other_settings

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = ("kvtierd-[0-9]", "kvtierd-plugin-vllm-", "kvtierd-plugin-refengine-")
SETTINGS_FILE = "/etc/kvtierd/kvtierd.toml"


def rpms(directory: Path) -> list[Path]:
    """This machine's .rpm files of one version."""
    suffixes = (".noarch.rpm", f".{os.uname().machine}.rpm")
    return [p for n in NAMES for p in directory.glob(f"{n}*.rpm") if p.name.endswith(suffixes)]


class RpmHost(Host):
    """The guest with dnf."""

    def prepare(self) -> None:
        """What a distribution with rpm has by itself."""
        stand_in = {
            "name": "stand-in", "arch": "all", "version": "1", "license": "MIT", "maintainer": "Test <test@example.org>",
            "description": "What this Debian has without rpm's knowledge.", "provides": [*DEPENDS_RPM, "/bin/sh"],
        }  # fmt: skip
        config, package = self.guest.shared / "stand-in.json", self.guest.shared / "stand-in.rpm"
        config.write_text(json.dumps(stand_in))
        subprocess.run(
            [program(), "package", "--config", str(config), "--packager", "rpm", "--target", str(package)],
            check=True, capture_output=True,
        )  # fmt: skip
        self.run("sh", "-c", "echo assumeyes=True >>/etc/dnf/dnf.conf")
        self.run("dnf", "install", "/mnt/stand-in.rpm")

    def install(self, version: str) -> None:
        """Another version than the one that is there."""
        verb = "downgrade" if version == "this" else "upgrade"
        said = self.run("dnf", verb, *self._versions[version])
        assert "scriptlet failed" not in said, said

    def version(self) -> str:
        """Of the package that is installed."""
        return self.run("rpm", "--query", "--queryformat", "%{VERSION}", "kvtierd")


@pytest.fixture(scope="module")
def guest() -> Iterator[Guest]:
    try:
        with booted("rpm", extra=INSTALLING) as running:
            yield running
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")


@pytest.fixture(scope="module")
def host(guest: Guest, rpm_dists: tuple[Path, Path]) -> RpmHost:
    made = RpmHost(guest, rpm_dists, find=rpms)
    made.prepare()
    (command,) = commands("rpm")
    said = made.type([command.replace("x86_64", os.uname().machine)], directory="/mnt/this/dist")
    assert "scriptlet failed" not in said, said
    made.allow_emulation()
    made.stand_in_for_hugepages()
    return made


@pytest.fixture(scope="module")
def started(host: RpmHost) -> dict[str, int]:
    """Enabled and started; the processes of the units."""
    host.type(["${EDITOR:-vi} /etc/kvtierd/kvtierd.toml", "systemctl enable --now kvtierd"])
    return host.pids()


def test_the_installation_makes_user_and_directories_and_starts_nothing(host: RpmHost) -> None:
    assert host.enabled() == "disabled"
    assert host.run("systemctl", "is-active", "kvtierd", check=False).strip() == "inactive"
    assert "kvtierd" in host.run("getent", "passwd", "kvtierd")
    assert host.run("stat", "-c", "%a %U", "/var/lib/kvtierd", "/var/log/kvtierd").split() == [
        "755", "root", "755", "root",
    ]  # fmt: skip
    verified = host.run("rpm", "--verify", "--nodeps", "kvtierd", "kvtierd-plugin-vllm", check=False)
    assert verified == "", "every file is as the package has it"


def test_it_runs_and_reserves_hugepages(host: RpmHost, started: dict[str, int]) -> None:
    assert {name.split("-")[1] for name in started} == {"endpoint", "meta", "pool", "engine"}
    assert host.hugepages() == PAGES


def test_an_upgrade_and_a_downgrade_restart_the_daemon_and_nothing_else(
    host: RpmHost, started: dict[str, int]
) -> None:
    this = host.version()
    for version, shown in (("next", NEXT_VERSION), ("this", this)):
        old = host.daemon_pid()
        host.install(version)
        host.until_another_daemon(old, 60)
        assert host.pids() == started
        assert host.version() == shown
        assert 'preset = "tiny"' in host.run("cat", SETTINGS_FILE)
        assert host.enabled() == "enabled"


def test_an_edited_settings_file_is_kept_and_the_new_one_is_put_beside_it(
    host: RpmHost, dists: tuple[Path, Path], started: dict[str, int]
) -> None:
    other = with_other_settings(debs(dists[0])[0], host.guest.shared / "other", "rpm")
    old = host.daemon_pid()
    host.run("dnf", "upgrade", f"/mnt/other/{other.name}")
    assert host.version() == OTHER_VERSION
    host.until_another_daemon(old, 60)
    assert host.pids() == started
    assert 'preset = "tiny"' in host.run("cat", SETTINGS_FILE)
    assert OTHER_SETTINGS in host.run("cat", f"{SETTINGS_FILE}.rpmnew")
    old = host.daemon_pid()
    host.install("this")
    host.until_another_daemon(old, 60)
    assert host.pids() == started


def test_a_disabled_and_a_masked_service_stay_so(host: RpmHost, started: dict[str, int]) -> None:
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
    host: RpmHost, started: dict[str, int]
) -> None:
    host.run("systemctl", "stop", "kvtierd")
    host.run("systemctl", "enable", "kvtierd")
    host.install("next")
    assert host.run("systemctl", "is-active", "kvtierd", check=False).strip() == "inactive"
    assert host.enabled() == "enabled"
    host.run("systemctl", "start", "kvtierd")
    assert host.pids() == started


def test_removal_stops_everything_and_gives_the_hugepages_back(
    host: RpmHost, started: dict[str, int]
) -> None:
    said = host.run("dnf", "remove", "kvtierd")
    assert "scriptlet failed" not in said, said
    for pid in started.values():
        assert host.guest.run("test", "-d", f"/proc/{pid}", check=False).returncode != 0
    assert host.run("systemctl", "is-active", "kvtierd.slice", check=False).strip() == "inactive"
    assert host.hugepages() == 0
    assert 'preset = "tiny"' in host.run("cat", f"{SETTINGS_FILE}.rpmsave")
    assert host.guest.run("test", "-e", "/usr/lib/kvtierd", check=False).returncode != 0
    links = "/etc/systemd/system/multi-user.target.wants/kvtierd.service"
    assert host.guest.run("test", "-L", links, check=False).returncode != 0


def test_a_preset_of_the_administrator_enables_it_with_the_installation(host: RpmHost) -> None:
    host.run("mkdir", "-p", "/etc/systemd/system-preset")
    host.run("sh", "-c", "echo 'enable kvtierd.service' >/etc/systemd/system-preset/10-kvtierd.preset")
    host.type(commands("rpm"), directory="/mnt/this/dist")
    assert host.enabled() == "enabled"
    assert host.run("systemctl", "is-active", "kvtierd", check=False).strip() == "inactive"
