"""Takes the whole inventory of a host at once: everything concurrent, everything with a deadline."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvtierd.host import npu_smi
from kvtierd.host.ascend import AscendFindings, find_ascend
from kvtierd.host.interpreters import DEFAULT_BINARY_HOME, probe_interpreter, probe_run_package
from kvtierd.host.memory import read_memory
from kvtierd.host.network import read_nics, read_ports
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import AscendInstall, Inventory, MemcacheInstall, Nic, Npu, NpuProcess, PortOwner

NPU_SMI_TIMEOUT_SECONDS = 10.0
FILES_TIMEOUT_SECONDS = 5.0
_NPU_SMI_HOME = "/usr/local/bin/npu-smi"  # where the driver package puts it, for services with a short PATH

T = TypeVar("T")


async def take_inventory(
    view: HostView,
    *,
    python: Sequence[str],
    packages: Sequence[str] = (),
    binary_homes: Sequence[str] = (DEFAULT_BINARY_HOME,),
    npu_smi_timeout_seconds: float = NPU_SMI_TIMEOUT_SECONDS,
    python_timeout_seconds: float = 5.0,
) -> Inventory:
    """What this host has.

    Args:
        view: The host.
        packages: Distributions whose version is asked of each interpreter (engines).
        python: Interpreters to ask for MemCache's wheel, absolute paths.
        binary_homes: Directories where the run package may be; one that does not exist is passed over.
        npu_smi_timeout_seconds: How long a hung ``npu-smi`` may hold up the inventory.
        python_timeout_seconds: The same for each interpreter.

    Returns:
        The inventory. Each thing that could not be found out is a line in ``problems``.

    Raises:
        HostError: the amount of memory is unknown (``host.meminfo``); nothing can be planned then.
    """
    problems: list[str] = []
    memory = await asyncio.to_thread(read_memory, view)
    no_nics: tuple[Nic, ...] = ()
    no_ports: tuple[PortOwner, ...] = ()
    no_installs: tuple[MemcacheInstall, ...] = ()
    no_ascend = AscendFindings(install=AscendInstall())
    async with asyncio.TaskGroup() as group:
        ascend_task = group.create_task(
            _read("driver and CANN", lambda: find_ascend(view), no_ascend, problems)
        )
        nics_task = group.create_task(_read("network interfaces", lambda: read_nics(view), no_nics, problems))
        ports_task = group.create_task(_read("listening ports", lambda: read_ports(view), no_ports, problems))
        packages_task = group.create_task(
            _read("run packages", lambda: _run_packages(view, binary_homes), no_installs, problems)
        )
        npus_task = group.create_task(read_npus(view, timeout_seconds=npu_smi_timeout_seconds))
        wheel_tasks = [
            group.create_task(
                probe_interpreter(view, path, packages=packages, timeout_seconds=python_timeout_seconds)
            )
            for path in dict.fromkeys(python)
        ]
    ascend = ascend_task.result()
    npus, npu_problems, npu_processes = npus_task.result()
    wheels = [task.result() for task in wheel_tasks]
    installs = (*wheels, *packages_task.result())
    return Inventory(
        hostname=view.text("/proc/sys/kernel/hostname") or socket.gethostname(),
        machine=view.machine,
        kernel=view.text("/proc/sys/kernel/osrelease") or (os.uname().release if view.live else ""),
        memory_total_bytes=memory.total_bytes,
        memory_available_bytes=memory.available_bytes,
        kernel_page_size_bytes=memory.kernel_page_size_bytes,
        default_hugepage_size_bytes=memory.default_hugepage_size_bytes,
        hugepages=memory.hugepages,
        numa_nodes=memory.numa_nodes,
        npus=npus,
        npu_processes=npu_processes,
        nics=nics_task.result(),
        ports_in_use=ports_task.result(),
        ascend=ascend.install,
        memcache=installs,
        shm_total_bytes=memory.shm_total_bytes,
        problems=(
            *memory.problems,
            *ascend.problems,
            *npu_problems,
            *(install.problem for install in installs if install.problem),
            *problems,
        ),
    )


async def read_npus(
    view: HostView, *, timeout_seconds: float = NPU_SMI_TIMEOUT_SECONDS
) -> tuple[tuple[Npu, ...], tuple[str, ...], tuple[NpuProcess, ...]]:
    """The dies, what is wrong with the answer, and who holds them, from ``npu-smi info``, ``-m`` and, at worst, ``-l``.

    All three run at once, so that a driver that hangs costs one time limit and not three.
    """
    program = "npu-smi"
    if view.live and shutil.which(program) is None:
        program = _NPU_SMI_HOME
    info, mapping, listing = await asyncio.gather(
        *(
            view.runner.run([program, *words], timeout_seconds=timeout_seconds)
            for words in (["info"], ["info", "-m"], ["info", "-l"])
        )
    )
    if info.error:
        return (), (f"no NPU is listed: {info.describe()}",), ()
    report = npu_smi.parse_info(info.stdout)
    problems = [] if info.ok else [info.describe()]
    chips = npu_smi.parse_mapping(mapping.stdout) if mapping.ok else ()
    if report.npus:
        npus = npu_smi.apply_mapping(report.npus, chips)
        problems += report.problems
    else:
        problems += report.problems if info.ok else ()
        npus = npu_smi.from_mapping(chips)
        if not npus and listing.ok:
            cards = npu_smi.parse_list(listing.stdout)
            npus = tuple(Npu(device=index, card=card) for index, card in enumerate(cards))
        if npus:
            problems.append(
                "names, health and memory of the NPUs may be unknown: only npu-smi -m or -l answered"
            )
    return tuple(_with_numa_node(view, npu) for npu in npus), tuple(problems), report.processes


def _with_numa_node(view: HostView, npu: Npu) -> Npu:
    if npu.bus_id is None:
        return npu
    node = view.integer(f"/sys/bus/pci/devices/{npu.bus_id.lower()}/numa_node")
    # -1 is the kernel's "not known".
    return npu if node is None or node < 0 else npu.model_copy(update={"numa_node": node})


def _run_packages(view: HostView, homes: Sequence[str]) -> tuple[MemcacheInstall, ...]:
    found = (probe_run_package(view, home) for home in dict.fromkeys(homes))
    return tuple(install for install in found if install is not None)


async def _read(what: str, read: Callable[[], T], default: T, problems: list[str]) -> T:
    """A blocking reader, bounded: files of a dead mount or a broken driver may never answer."""
    try:
        return await asyncio.wait_for(asyncio.to_thread(read), FILES_TIMEOUT_SECONDS)
    except TimeoutError:
        problems.append(f"{what}: no answer within {FILES_TIMEOUT_SECONDS:.0f} s")
    except OSError as exc:
        problems.append(f"{what}: {exc.strerror or exc}")
    return default
