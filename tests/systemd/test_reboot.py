"""The machine is rebooted: enabled, everything comes back in order, hugepages first; disabled, nothing does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from installed import PAGES, SETTINGS, Host
from lab import INSTALLING, OPEN_HUGEPAGES, CannotBootError, booted

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(900)]
HOST_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
AT_BOOT = "open-hugepages.service"


@pytest.fixture(scope="module")
def host(dists: tuple[Path, Path]) -> Iterator[Host]:
    before = HOST_PAGES.read_text()
    try:
        with booted("reboot", extra=INSTALLING) as guest:
            made = Host(guest, dists)
            made.install("this")
            made.allow_emulation()
            (guest.shared / "open.sh").write_text(OPEN_HUGEPAGES)
            (guest.shared / AT_BOOT).write_text(
                "[Unit]\nDefaultDependencies=no\nAfter=local-fs.target\nBefore=kvtierd-hugepages.service\n"
                "[Service]\nType=oneshot\nExecStart=/bin/sh -e /usr/local/open.sh\n"
                "[Install]\nWantedBy=multi-user.target\n"
            )
            (guest.shared / "kvtierd.toml").write_text(SETTINGS)
            made.run("cp", "/mnt/kvtierd.toml", "/etc/kvtierd/kvtierd.toml")
            made.run("cp", "/mnt/open.sh", "/usr/local/open.sh")
            made.run("cp", f"/mnt/{AT_BOOT}", "/etc/systemd/system/")
            made.run("systemctl", "enable", AT_BOOT)
            yield made
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")
    finally:
        HOST_PAGES.write_text(before)


def entered(host: Host, unit: str) -> int:
    """When it became active, microseconds after the guest's boot; 0: it did not."""
    return int(host.run("systemctl", "show", "-P", "ActiveEnterTimestampMonotonic", unit))


def reboot(host: Host, pages: int) -> None:
    """The kernel does not reboot with the guest: its hugepages are set here, and the ledger, whose boot id would be void."""

    def as_after_a_real_one() -> None:
        HOST_PAGES.write_text(str(pages))
        host.guest.written("/var/lib/kvtierd/hugepages.json").unlink(missing_ok=True)

    host.guest.reboot(as_after_a_real_one)


def test_enabled_everything_comes_back_in_order_hugepages_first(host: Host) -> None:
    host.run("systemctl", "enable", "kvtierd")
    pages = int(HOST_PAGES.read_text())
    reboot(host, pages)
    first = host.pids()
    assert int(HOST_PAGES.read_text()) == pages + PAGES
    assert host.run("systemctl", "is-active", "kvtierd-hugepages", "kvtierd").split() == ["active", "active"]
    order = ["kvtierd-hugepages", "kvtierd", "kvtier-meta-main", "kvtier-pool-0", "kvtier-engine-ref"]
    times = [entered(host, unit) for unit in order]
    assert times == sorted(times), dict(zip(order, times, strict=True))
    assert all(times)

    reboot(host, pages)
    assert host.pids().keys() == first.keys()
    assert int(HOST_PAGES.read_text()) == pages + PAGES


def test_disabled_nothing_starts_and_the_removal_gives_the_pages_back(host: Host) -> None:
    pages = int(HOST_PAGES.read_text()) - PAGES
    host.run("systemctl", "disable", "kvtierd")
    reboot(host, pages)
    states = host.run("systemctl", "is-active", "kvtierd-hugepages", "kvtierd", check=False).split()
    assert states == ["inactive", "inactive"]
    assert host.run("systemctl", "list-units", "--plain", "--no-legend", "kvtier-*").strip() == ""
    assert int(HOST_PAGES.read_text()) == pages

    host.run("systemctl", "start", "kvtierd")
    host.pids()
    assert int(HOST_PAGES.read_text()) == pages + PAGES
    host.run("dpkg", "--remove", "kvtierd-plugin-vllm", "kvtierd-plugin-refengine", "kvtierd")
    assert int(HOST_PAGES.read_text()) == pages
