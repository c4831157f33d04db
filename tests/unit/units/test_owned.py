import json
import os
import subprocess
import sys
import time

import psutil

from kvtierd.plan.docker import docker_argv
from kvtierd.plan.toolchain import Toolchain
from kvtierd.units import procfs
from kvtierd.units.owned import pids_under_shims


def record(directory, pid, **changes):
    directory.mkdir(parents=True)
    fields = {
        "unit_id": "u", "instance": "i", "pid": pid, "start_ticks": procfs.read_stat(pid).start_ticks,
        "boot_id": procfs.boot_id(), "exit": None, **changes,
    }  # fmt: skip
    (directory / "record.json").write_text(json.dumps(fields))


def test_running_units_and_their_children_are_ours(tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '30']); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    try:
        record(tmp_path / "u", parent.pid)
        assert pids_under_shims(tmp_path) == {parent.pid, child}
    finally:
        os.kill(child, 9)
        parent.wait()
        parent.stdout.close()


def test_the_processes_of_a_unit_s_container_are_ours_too(tmp_path):
    inside = subprocess.Popen(["sleep", "30"])
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\n[ $1 = inspect ] && echo {inside.pid} || sleep 30\n")
    docker.chmod(0o755)
    tools = Toolchain(python=sys.executable, run_meta_script="m", run_pool_script="p", docker=str(docker))
    client = subprocess.Popen(docker_argv(tools, name="n", image="IMAGE", command=("x",), env={}))
    try:
        record(tmp_path / "units" / "u", client.pid)
        deadline = time.monotonic() + 10
        while inside.pid not in pids_under_shims(tmp_path / "units") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert {client.pid, inside.pid} <= pids_under_shims(tmp_path / "units")
    finally:
        for child in psutil.Process(client.pid).children(recursive=True):
            child.kill()
        for process in (client, inside):
            process.kill()
            process.wait()


def test_a_reused_number_another_boot_and_an_ended_run_are_not_ours(tmp_path):
    record(tmp_path / "reused", os.getpid(), start_ticks=1)
    record(tmp_path / "boot", os.getpid(), boot_id="another")
    record(tmp_path / "ended", os.getpid(), exit={"code": 0, "signal": None})
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "record.json").write_text('{"unit_id"')
    assert pids_under_shims(tmp_path) == frozenset()
    assert pids_under_shims(tmp_path / "missing") == frozenset()
