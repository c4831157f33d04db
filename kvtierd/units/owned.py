"""Which processes on this host are our units', without a daemon: by the shims' records and systemd's files."""

from __future__ import annotations

from pathlib import Path

import psutil

from kvtierd.host.containers import container_pid
from kvtierd.plan.docker import container_of
from kvtierd.units import procfs
from kvtierd.units.shim_record import read_record
from kvtierd.units.systemd_files import pids_under_systemd


def owned_pids(runtime: Path) -> frozenset[int]:
    """Process ids of all running units of the daemon with this runtime directory, whichever backend keeps them."""
    services = set().union(*pids_under_systemd(runtime).values())
    for pid in services.copy():
        services |= _in_container(pid)
    return pids_under_shims(runtime / "units") | services


def pids_under_shims(units_directory: Path) -> frozenset[int]:
    """Process ids of all running units with everything below them; empty when there are none or we may not look.

    Processes in a unit's container count: they are no children of docker's client, but its ports are the unit's.
    A recorded number that another process has by now is not ours: start time and boot are compared.
    """
    pids: set[int] = set()
    try:
        directories = [d for d in units_directory.iterdir() if d.is_dir()]
    except OSError:
        return frozenset()
    boot = procfs.boot_id()
    for directory in directories:
        record = read_record(str(directory))
        if record is None or record["exit"] is not None or record["boot_id"] != boot:
            continue
        if procfs.find_process(record["pid"], record["start_ticks"]) is None:
            continue
        try:
            process = psutil.Process(record["pid"])
            pids |= _family(process)
            pids |= _in_container(record["pid"])
        except psutil.Error:
            continue
    return frozenset(pids)


def _in_container(pid: int) -> set[int]:
    """The processes of the container whose client this is, if it is one."""
    try:
        container = container_of(psutil.Process(pid).cmdline())
        inside = container_pid(*container) if container else None
        return _family(psutil.Process(inside)) if inside is not None else set()
    except psutil.Error:
        return set()


def _family(process: psutil.Process) -> set[int]:
    return {process.pid, *(child.pid for child in process.children(recursive=True))}
