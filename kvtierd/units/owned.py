"""Which processes on this host are our units', without a daemon: by the shims' records."""

from __future__ import annotations

from pathlib import Path

import psutil

from kvtierd.units import procfs
from kvtierd.units.shim_record import read_record


def owned_pids(units_directory: Path) -> frozenset[int]:
    """Process ids of all running units with everything below them. Empty when there are none or we may not look.

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
            pids.update((process.pid, *(child.pid for child in process.children(recursive=True))))
        except psutil.Error:
            continue
    return frozenset(pids)
