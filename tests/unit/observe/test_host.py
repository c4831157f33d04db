import asyncio
import time
from pathlib import Path

import pytest

from kvtierd.host.view import CommandResult, HostView, RecordedRunner
from kvtierd.observe.host import NPU_MOST_SECONDS, NpuWatch, read_host
from kvtierd.observe.picture import NumaPicture

SMI = Path(__file__).parents[2] / "fixtures" / "host" / "npu-smi"
MIB, GIB = 1024**2, 1024**3


def plant(root, files):
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def pages(node, size_kb, total, free):
    here = f"/sys/devices/system/node/node{node}/hugepages/hugepages-{size_kb}kB"
    return {f"{here}/nr_hugepages": f"{total}\n", f"{here}/free_hugepages": f"{free}\n"}


MEMINFO = {"/proc/meminfo": "MemTotal:  1000 kB\nMemFree: 100 kB\nMemAvailable:  400 kB\n"}


def test_memory_hugepages_of_each_node_and_shm(tmp_path):
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    tree = MEMINFO | pages(0, 2048, 100, 25) | pages(0, 1048576, 2, 1) | pages(1, 2048, 0, 0)
    asked = []

    def free(path):
        asked.append(path)
        return 12345

    found = read_host(HostView(plant(tmp_path, tree)), "host-a", 7.0, headroom_bytes=5, free_bytes=free)
    assert (found.node, found.at_seconds, found.headroom_bytes) == ("host-a", 7.0, 5)
    assert (found.total_bytes, found.available_bytes) == (1000 * 1024, 400 * 1024)
    assert found.hugepages == (NumaPicture(0, 200 * MIB + 2 * GIB, 50 * MIB + GIB),)
    assert found.shm_free_bytes == 12345
    assert asked == [str(tmp_path / "dev" / "shm")]


def test_without_numa_the_hosts_pools_count(tmp_path):
    here = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    tree = MEMINFO | {f"{here}/nr_hugepages": "10\n", f"{here}/free_hugepages": "4\n"}
    found = read_host(HostView(plant(tmp_path, tree)), "a", 0.0)
    assert found.hugepages == (NumaPicture(0, 20 * MIB, 8 * MIB),)


@pytest.mark.parametrize("meminfo", ["", "\xff\x00", "MemAvailable: many kB\n", "MemTotal: -5 kB\n"])
def test_what_cannot_be_read_is_unknown_and_never_zero(tmp_path, meminfo):
    found = read_host(HostView(plant(tmp_path, {"/proc/meminfo": meminfo})), "a", 0.0)
    assert found.total_bytes is None
    assert found.available_bytes is None
    assert found.hugepages == ()
    assert read_host(HostView(tmp_path / "nothing"), "a", 0.0).shm_free_bytes is None


def test_this_very_host_can_be_read():
    found = read_host(HostView(), "here", 0.0)
    assert 0 < found.available_bytes < found.total_bytes
    assert found.shm_free_bytes is not None


def runner(**results):
    return RecordedRunner(
        CommandResult(("npu-smi", "info"), **result) if result else CommandResult(("npu-smi", "info"))
        for result in results.values()
    )


async def settle(watch):
    while not watch._task.done():
        await asyncio.sleep(0.005)


async def test_npus_are_asked_for_seldom(tmp_path):
    commands = runner(info={"code": 0, "stdout": (SMI / "a2-910b3.txt").read_text()})
    watch = NpuWatch(HostView(tmp_path, commands))
    watch.step(0.0)
    await settle(watch)
    asked = len(commands.asked)
    assert watch.at_seconds == 0.0
    assert watch.npus
    assert {npu.health for npu in watch.npus} == {"OK"}
    assert watch.npus[0].hbm_total_bytes > 0
    for second in range(1, 60):
        watch.step(float(second))
    assert len(commands.asked) == asked
    watch.step(60.0)
    await settle(watch)
    assert len(commands.asked) > asked


async def test_a_hung_npu_smi_is_said_and_asked_less_and_less(tmp_path):
    hung = RecordedRunner(
        CommandResult(("npu-smi", *words), timed_out=True)
        for words in (["info"], ["info", "-m"], ["info", "-l"])
    )
    watch = NpuWatch(HostView(tmp_path, hung))
    for second in range(0, 7200, 10):
        watch.step(float(second))
        await settle(watch)
    assert "no answer within" in watch.problem
    assert watch.at_seconds is None
    assert watch.npus == ()
    assert len(hung.asked) <= 3 * 8


async def test_what_was_known_keeps_its_age_when_npu_smi_begins_to_hang(tmp_path):
    view = HostView(tmp_path, runner(info={"code": 0, "stdout": (SMI / "a3-phy-id.txt").read_text()}))
    watch = NpuWatch(view)
    watch.step(0.0)
    await settle(watch)
    known = watch.npus
    view.runner = RecordedRunner([CommandResult(("npu-smi", "info"), timed_out=True)])
    watch.step(100.0)
    await settle(watch)
    assert watch.npus == known
    assert watch.at_seconds == 0.0
    assert watch.problem


async def test_no_npu_smi_is_no_problem_and_is_not_asked_for_again_soon(tmp_path):
    commands = RecordedRunner()
    watch = NpuWatch(HostView(tmp_path, commands))
    watch.step(0.0)
    await settle(watch)
    assert (watch.problem, watch.npus) == ("", ())
    asked = len(commands.asked)
    watch.step(NPU_MOST_SECONDS - 1)
    assert len(commands.asked) == asked


async def test_a_real_hung_program_is_ended_within_its_time(tmp_path, monkeypatch):
    tool = tmp_path / "bin" / "npu-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    watch = NpuWatch(HostView(), timeout_seconds=0.3)
    started = time.monotonic()
    watch.step(0.0)
    await settle(watch)
    assert time.monotonic() - started < 3
    assert "no answer within" in watch.problem
    await watch.close()
