from __future__ import annotations

import pytest

from kvtierd.host.containers import container_pid


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
