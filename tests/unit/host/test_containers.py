from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.host.containers import container_hosts_file, container_pid
from kvtierd.host.hosts_file import address_of, point_alias


@pytest.mark.parametrize(
    ("script", "pid"),
    [
        ("echo 4711", 4711),
        ("echo 0", None),  # it exists and does not run
        ("echo; exit 1", None),
        ("echo 12; exit 1", None),
        ("echo nonsense", None),
    ],
)
def test_the_first_process_of_a_container(tmp_path, script, pid):
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    program.chmod(0o755)
    assert container_pid("kvtier-meta-main", str(program)) == pid
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == "inspect --type container --format {{.State.Pid}} kvtier-meta-main"


def test_no_docker_is_no_container(tmp_path):
    assert container_pid("x", str(tmp_path / "docker")) is None


@pytest.mark.parametrize(
    ("script", "file"),
    [
        ("echo /var/lib/docker/containers/4f/hosts", "/var/lib/docker/containers/4f/hosts"),
        ("echo", None),
        ("echo nonsense", None),
        ("echo /x; exit 1", None),
    ],
)
def test_the_hosts_file_of_a_container(tmp_path, script, file):
    program = tmp_path / "docker"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{script}\n')
    program.chmod(0o755)
    assert container_hosts_file("kvtier-engine-e", str(program)) == (Path(file) if file else None)
    asked = (tmp_path / "asked").read_text().strip()
    assert asked == "inspect --type container --format {{.HostsPath}} kvtier-engine-e"


def test_a_container_s_hosts_file_is_found_and_changed_where_the_container_sees_it(tmp_path):
    """With the stand-in docker: the file that it gives a container, by inode, is the one that is written."""
    program = tmp_path / "docker"
    shutil.copy(Path("tests/e2e/stand_in_docker.py"), program)
    program.chmod(0o755)
    run = subprocess.Popen(
        [program, "run", "--rm", "--name", "kvtier-engine-e", "--net=host", "image", sys.executable, "-c",
         "import sys, time; time.sleep(30)"],
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 10
        while (file := container_hosts_file("kvtier-engine-e", str(program))) is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before, inode = file.read_bytes(), file.stat().st_ino
        point_alias("kvtierd-meta.prod-1", "10.0.0.7", path=file, in_place=True)
        assert file.stat().st_ino == inode
        assert file.read_bytes().startswith(before.rstrip(b"\n"))
        assert address_of(file.read_bytes(), "kvtierd-meta.prod-1") == "10.0.0.7"
    finally:
        subprocess.run([program, "rm", "--force", "kvtier-engine-e"], check=False)
        run.wait(10)
