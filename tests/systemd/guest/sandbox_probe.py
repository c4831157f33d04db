"""Tries, from inside the sandbox of kvtierd.service, what the daemon needs and what it must not be able to do.

Run as the service's main process; prints one JSON object: probe -> "" when it did what it should, else what happened.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import pwd
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

PROBES: dict[str, Callable[[], None]] = {}
TALKER = "kvtierd-sandbox-talker.service"
PAGES = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
CLONE_NEWNS = 0x20000


def probe(function: Callable[[], None]) -> Callable[[], None]:
    PROBES[function.__name__] = function
    return function


def rewrite(path: str) -> None:
    """Writes what is there already: the right is tried, nothing changes."""
    now = Path(path).read_text()
    Path(path).write_text(now)


def refused(what: Callable[[], object]) -> None:
    try:
        what()
    except OSError:
        return
    raise AssertionError("it was allowed")


# -- what must work


@probe
def hugepages_of_the_host_can_be_written() -> None:
    rewrite(PAGES)


@probe
def the_kernel_s_vm_settings_can_be_written() -> None:
    rewrite("/proc/sys/vm/nr_hugepages")


@probe
def hugepages_of_each_numa_node_can_be_written() -> None:
    for node in Path("/sys/devices/system/node").glob("node*/hugepages/hugepages-2048kB/nr_hugepages"):
        rewrite(str(node))


@probe
def its_own_directories_can_be_written() -> None:
    for path in ("/run/kvtierd", "/var/lib/kvtierd", "/var/cache/kvtierd"):
        (Path(path) / "probe").write_text("x")
        (Path(path) / "probe").unlink()


@probe
def both_log_directories_can_be_written() -> None:
    for path in ("/var/log/kvtierd", "/var/log/memfabric_hybrid"):  # the second is MemFabric's, and fixed
        (Path(path) / "probe").write_text("x")
        (Path(path) / "probe").unlink()


@probe
def a_directory_can_be_given_to_a_unit_s_user() -> None:
    path = Path("/var/lib/kvtierd/probe-of-user")
    path.mkdir(mode=0o700)
    nobody = pwd.getpwnam("nobody").pw_uid
    os.chown(path, nobody, -1)
    (path / "file").write_text("written though it is another user's")
    (path / "file").unlink()
    path.rmdir()


@probe
def systemd_answers_over_d_bus_and_starts_a_unit() -> None:
    unit = "kvtierd-sandbox-started.service"
    subprocess.run(
        ["systemd-run", "--quiet", "--wait", "--collect", f"--unit={unit}", "true"], check=True, timeout=30
    )


@probe
def the_journal_of_a_unit_can_be_followed() -> None:
    from kvtierd.units.journal import follow, of_service

    async def first_line() -> None:
        async with asyncio.timeout(20):
            async for line in follow(of_service(TALKER), 0):
                assert line == "talking"
                return

    asyncio.run(first_line())


@probe
def devices_of_a_driver_can_be_opened() -> None:
    os.close(os.open("/dev/davinci0", os.O_RDWR))


@probe
def other_users_open_files_can_be_seen() -> None:
    service = subprocess.run(
        ["systemctl", "show", "-P", "MainPID", TALKER], capture_output=True, text=True, check=True, timeout=20
    )
    assert os.listdir(f"/proc/{service.stdout.strip()}/fd")
    os.readlink(f"/proc/{service.stdout.strip()}/fd/0")


@probe
def the_host_s_home_directories_can_be_read() -> None:
    os.listdir("/root")


@probe
def networks_and_addresses_can_be_used() -> None:
    import psutil

    assert "lo" in psutil.net_if_addrs()
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname(), 5):
        pass
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"{directory}/s")


@probe
def programs_can_be_run_and_threads_started() -> None:
    subprocess.run(
        [sys.executable, "-c", "import threading; threading.Thread().start()"], check=True, timeout=30
    )


@probe
def memory_can_be_locked() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    block = ctypes.create_string_buffer(1 << 20)
    assert libc.mlock(block, len(block)) == 0, os.strerror(ctypes.get_errno())


# -- what must not


@probe
def nothing_else_of_the_system_can_be_written() -> None:
    for path in ("/usr/probe", "/etc/probe", "/root/probe", "/boot/probe", "/var/lib/probe"):
        refused(lambda path=path: Path(path).write_text("x"))
    refused(lambda: rewrite("/proc/sys/kernel/printk"))
    refused(lambda: Path("/sys/fs/cgroup/probe").mkdir())


@probe
def no_namespace_can_be_made() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS) == -1


@probe
def no_raw_socket_can_be_opened() -> None:
    refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))


@probe
def no_process_of_another_user_can_be_killed() -> None:
    shown = subprocess.run(
        ["systemctl", "show", "-P", "MainPID", TALKER], capture_output=True, text=True, check=True, timeout=20
    )
    refused(lambda: os.kill(int(shown.stdout), 0))


@probe
def no_privilege_can_be_gained() -> None:
    status = Path("/proc/self/status").read_text()
    assert "NoNewPrivs:\t1" in status
    capabilities = int(status.split("CapBnd:")[1].split()[0], 16)
    assert capabilities.bit_count() == 4, hex(capabilities)


def main() -> None:
    results = {}
    for name, function in PROBES.items():
        try:
            function()
            results[name] = ""
        except BaseException as error:
            results[name] = "".join(traceback.format_exception_only(error)).strip()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
