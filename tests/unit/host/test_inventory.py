from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from kvtierd.errors import HostError
from kvtierd.host.inventory import read_npus, take_inventory
from kvtierd.host.view import CommandResult, HostView, RecordedRunner
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.series import detect_series

from .tree import DRIVER_INFO, DRIVER_VERSION, FIXTURES, plant, toolkit_info

MIB2 = 2 * 1024 * 1024
RECORDED = sorted((FIXTURES / "inventory").glob("*.json"))
HOST = {
    "/etc/ascend_install.info": DRIVER_INFO,
    "/usr/local/Ascend/driver/version.info": DRIVER_VERSION,
    "/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": toolkit_info(
        "8.5.0", "aarch64", "/x"
    ),
    "/proc/meminfo": "MemTotal: 1056561984 kB\nMemAvailable: 950000000 kB\nHugepagesize: 2048 kB\n",
    "/proc/sys/kernel/hostname": "a2-host\n",
    "/proc/sys/kernel/osrelease": "5.10.0\n",
    "/proc/sys/kernel/arch": "aarch64\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "0\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "0\n",
    "/sys/bus/pci/devices/0000:c1:00.0/numa_node": "3\n",
    "/sys/bus/pci/devices/0000:c2:00.0/numa_node": "-1\n",
    "/usr/local/memcache_hybrid/latest/version.info": "Version:1.0.0\nPlatform:aarch64\n",
}


def recorded(*results: tuple[list[str], str]) -> RecordedRunner:
    return RecordedRunner(CommandResult(tuple(argv), code=0, stdout=stdout) for argv, stdout in results)


def smi(name: str) -> str:
    return (FIXTURES / "host" / "npu-smi" / f"{name}.txt").read_text()


async def test_a_host_from_files_and_recordings(tmp_path: Path) -> None:
    view = HostView(plant(tmp_path, HOST), recorded((["npu-smi", "info"], smi("a2-910b3"))))
    inventory = await take_inventory(view, python=["/opt/py"])
    assert (inventory.hostname, inventory.kernel, inventory.machine) == ("a2-host", "5.10.0", "aarch64")
    assert len(inventory.npus) == 8
    assert [npu.numa_node for npu in inventory.npus[:3]] == [3, None, None]
    assert inventory.hugepages[0].page_size_bytes == MIB2
    assert inventory.ascend.cann_version == "8.5.0"
    assert [install.runtime for install in inventory.memcache] == ["wheel", "binary"]
    assert "the interpreter /opt/py is not installed, or not on PATH" in inventory.problems
    assert any("mmc_meta_service is missing" in problem for problem in inventory.problems)
    assert Inventory.model_validate_json(inventory.model_dump_json()) == inventory


async def test_the_logic_ids_of_the_driver_are_used(tmp_path: Path) -> None:
    table = smi("a2-910b3")
    mapping = "NPU ID  Chip ID  Chip Logic ID  Chip Name\n" + "".join(
        f"{n}  0  {7 - n}  910B3\n" for n in range(8)
    )
    view = HostView(tmp_path, recorded((["npu-smi", "info"], table), (["npu-smi", "info", "-m"], mapping)))
    npus, problems, _ = await read_npus(view)
    assert [(npu.card, npu.device) for npu in npus[:2]] == [(0, 7), (1, 6)]
    assert problems == ()


async def test_mapping_and_list_step_in(tmp_path: Path) -> None:
    broken = (["npu-smi", "info"], smi("driver-fault"))
    view = HostView(tmp_path, recorded(broken, (["npu-smi", "info", "-m"], smi("mapping-910b"))))
    npus, problems, _ = await read_npus(view)
    assert [npu.card for npu in npus] == [1, 2, 5, 7]
    assert len(problems) == 2
    view = HostView(tmp_path, recorded(broken, (["npu-smi", "info", "-l"], smi("list"))))
    npus, *_ = await read_npus(view)
    assert [(npu.device, npu.card) for npu in npus] == [(0, 3), (1, 5)]


async def test_no_npu_smi(tmp_path: Path) -> None:
    npus, problems, _ = await read_npus(HostView(tmp_path, RecordedRunner()))
    assert npus == ()
    assert problems == ("no NPU is listed: npu-smi info: is not installed, or not on PATH",)


async def test_a_hung_npu_smi_costs_one_time_limit(tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\ntrap '' TERM\nsleep 30\n")
    tool.chmod(0o755)

    class Redirect:
        async def run(
            self, argv: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None
        ) -> CommandResult:
            words = [str(tool), *argv[1:]] if argv[0] == "npu-smi" else argv
            return await HostView().runner.run(words, timeout_seconds=timeout_seconds, env=env)

    view = HostView(plant(tmp_path / "root", HOST), Redirect())
    started = time.monotonic()
    inventory = await take_inventory(view, python=[], npu_smi_timeout_seconds=0.5)
    assert time.monotonic() - started < 10
    assert inventory.npus == ()
    assert any("npu-smi info: no answer within" in problem for problem in inventory.problems)


async def test_no_memory_no_inventory(tmp_path: Path) -> None:
    with pytest.raises(HostError):
        await take_inventory(HostView(tmp_path, RecordedRunner()), python=[])


async def test_this_host() -> None:
    inventory = await take_inventory(HostView(), python=[])
    assert inventory.memory_total_bytes > 0
    assert any(nic.name == "lo" for nic in inventory.nics)


def test_there_are_recorded_inventories() -> None:
    names = {path.stem for path in RECORDED}
    assert names >= {
        "a2-2cards", "a2-2cards-run", "a2-8cards", "a2-port-taken", "a2-small-memory", "a3-16dies", "a5-8",
        "emulated-small", "no-hugepages",
    }  # fmt: skip


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_inventories_are_valid_and_coherent(path: Path) -> None:
    inventory = Inventory.model_validate_json(path.read_text())
    assert inventory.memory_available_bytes < inventory.memory_total_bytes
    node_bytes = sum(node.memory_total_bytes or 0 for node in inventory.numa_nodes)
    assert node_bytes <= inventory.memory_total_bytes
    sizes = {pool.page_size_bytes for pool in inventory.hugepages}
    assert all(set(node.hugepages_total) == sizes for node in inventory.numa_nodes)
    assert [npu.device for npu in inventory.npus] == list(range(len(inventory.npus)))
    assert len({npu.bus_id for npu in inventory.npus}) == len(inventory.npus)
    nodes = {node.node for node in inventory.numa_nodes}
    assert all(npu.numa_node in nodes for npu in inventory.npus)
    assert inventory.memcache


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("a2-2cards", "300I-A2"),
        ("a2-8cards", "800I-A2"),
        ("a3-16dies", "A3"),
        ("a5-8", "A5"),
        ("emulated-small", None),
    ],
)
def test_recorded_series(name: str, series: str | None) -> None:
    inventory = Inventory.model_validate_json((FIXTURES / "inventory" / f"{name}.json").read_text())
    assert detect_series(inventory.npus).series == series
