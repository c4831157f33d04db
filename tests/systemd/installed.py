"""A booted guest with kvtierd's packages on it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import Guest

from kvtierd.provision.assembly import cache_directory

PACKAGES = ("kvtierd_", "kvtierd-plugin-vllm_", "kvtierd-plugin-refengine_")
DEB_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
PAGES = 64
SETTINGS = f"""
[node]
series = "emulated"
[pool]
dram = "128MiB"
host_reserve = "1GiB"
hugepages = {PAGES}
[[engine]]
name = "ref"
plugin = "refengine"
model = "refengine"
port = 8113
args = {{ preset = "tiny" }}
"""


def debs(directory: Path) -> list[Path]:
    """This machine's .deb files of one version."""
    machine = DEB_ARCH[os.uname().machine]
    return [p for n in PACKAGES for p in directory.glob(f"{n}*.deb") if p.stem.endswith(("_all", machine))]


class Host:
    """The guest with kvtierd on it.

    Args:
        find: The packages of one version in a directory.
    """

    def __init__(
        self, guest: Guest, dists: tuple[Path, Path], find: Callable[[Path], list[Path]] = debs
    ) -> None:
        self.guest = guest
        self._versions: dict[str, list[str]] = {}
        for name, directory in zip(("this", "next"), dists, strict=True):
            target = guest.shared / name / "dist"
            target.mkdir(parents=True)
            self._versions[name] = [
                f"/mnt/{name}/dist/{Path(shutil.copy(package, target)).name}" for package in find(directory)
            ]

    def type(self, lines: list[str], *, directory: str = "/mnt/this", check: bool = True) -> str:
        """Commands in one shell, as somebody types them; the editor writes the settings of this test."""
        (self.guest.shared / "kvtierd.toml").write_text(SETTINGS)
        script = f"cd {directory}; export EDITOR='cp /mnt/kvtierd.toml'; set -e\n" + "\n".join(lines)
        return self.run("bash", "-c", script, check=check)

    def allow_emulation(self) -> None:
        """The drop-in, and the emulated driver made outside, since there is no C compiler in the guest."""
        self.run("mkdir", "-p", "/var/cache/kvtierd", "/etc/systemd/system/kvtierd.service.d")
        self.run("cp", "-a", str(cache_directory()), "/var/cache/kvtierd/")
        self.run(
            "cp", "/usr/share/doc/kvtierd/examples/kvtierd.service.d/emulation.conf",
            "/etc/systemd/system/kvtierd.service.d/",
        )  # fmt: skip

    def stand_in_for_hugepages(self) -> None:
        """The kernel's are this machine's and stay as they are; ``test_reboot`` uses the real ones."""
        pool = self.guest.shared / "hugepages/hugepages-2048kB"
        pool.mkdir(parents=True)
        for name in ("nr", "resv", "surplus"):
            (pool / f"{name}_hugepages").write_text("0\n")
        (pool / "free_hugepages").symlink_to("nr_hugepages")  # nobody uses any
        self.run("mount", "--bind", "/mnt/hugepages", "/sys/kernel/mm/hugepages")
        # systemd-nspawn covers the boot's id, and systemd shows it uncovered to a service whose /proc it makes anew; what
        # was reserved in another boot would not be given back. The journal has to learn of it.
        self.run("sh", "-c", "while umount /proc/sys/kernel/random/boot_id 2>/dev/null; do :; done")
        self.run("systemctl", "restart", "systemd-journald")

    def run(self, *command: str, check: bool = True, timeout: float = 120.0) -> str:
        done = self.guest.run(*command, check=check, timeout=timeout)
        return done.stdout + done.stderr

    def install(self, version: str) -> None:
        self.run("dpkg", "--force-confold", "--install", *self._versions[version])

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

    def enabled(self) -> str:
        """enabled, disabled, masked."""
        return self.run("systemctl", "is-enabled", "kvtierd", check=False).strip()

    def until_another_daemon(self, old: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.daemon_pid() in {0, old}:
            assert time.monotonic() < deadline, self.run("systemctl", "status", "kvtierd", check=False)
            time.sleep(0.2)

    def hugepages(self) -> int:
        """How many the kernel's stand-in was asked for last."""
        return int((self.guest.shared / "hugepages/hugepages-2048kB/nr_hugepages").read_text())
