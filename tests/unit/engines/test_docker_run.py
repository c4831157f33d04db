"""The container wrapper against a stand-in docker on PATH that does what the real one's client does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.plan.docker import container_of, docker_argv
from kvtierd.plan.toolchain import Toolchain

STAND_IN = """#!/usr/bin/env python3
import json, os, signal, subprocess, sys, time
from pathlib import Path
home = Path(os.environ["STAND_IN_HOME"])
with (home / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
verb, rest = sys.argv[1], sys.argv[2:]
if verb == "run":
    time.sleep(float(os.environ.get("SLOW_START", "0")))
    image = rest.index("IMAGE")
    child = subprocess.Popen(rest[image + 1 :], start_new_session=True)
    (home / "container").write_text(str(child.pid))
    sys.exit(child.wait() % 256)
if verb == "stop" and not (home / "container").exists():
    sys.exit(1)
if verb in ("stop", "rm") and (home / "container").exists():
    pid = int((home / "container").read_text())
    try:
        os.kill(pid, signal.SIGTERM if verb == "stop" else signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_HOME", str(tmp_path))
    return tmp_path


def argv(*command, **options):
    tools = Toolchain(python=sys.executable, run_meta_script="m", run_pool_script="p")
    return docker_argv(tools, name="kvtier-engine-e", image="IMAGE", command=command, env={}, **options)


def calls(home):
    import json

    return [json.loads(line) for line in (home / "calls").read_text().splitlines()]


def test_the_container_s_status_is_the_unit_s_and_what_was_left_behind_is_removed_first(docker):
    result = subprocess.run(argv("sh", "-c", "exit 3"), timeout=30)
    assert result.returncode == 3
    assert [c[0] for c in calls(docker)] == ["rm", "run", "rm"]
    assert calls(docker)[0] == ["rm", "--force", "kvtier-engine-e"]


def test_sigterm_becomes_docker_stop(docker):
    process = subprocess.Popen(argv("sleep", "60"))
    while not (docker / "container").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) != 0
    assert ["stop", "--time", "20", "kvtier-engine-e"] in calls(docker)


def test_a_stop_that_comes_before_the_container_is_repeated_and_one_that_waits_is_not(docker, monkeypatch):
    monkeypatch.setenv("SLOW_START", "1.5")
    process = subprocess.Popen(argv("sleep", "60"))
    while ["run"] != [c[0] for c in calls(docker)][1:] if (docker / "calls").exists() else True:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) != 0
    assert [c[0] for c in calls(docker)].count("stop") == 2


def test_a_docker_at_an_unusual_place_is_used_from_there(docker, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    tools = Toolchain(
        python=sys.executable, run_meta_script="m", run_pool_script="p", docker=f"{docker}/bin/docker"
    )
    made = docker_argv(tools, name="n", image="IMAGE", command=("true",), env={})
    assert subprocess.run(made, timeout=30).returncode == 0
    assert container_of(made) == ("n", f"{docker}/bin/docker")


def test_a_unit_s_container_is_known_by_its_command():
    assert container_of(("launch", "--", *argv("x", "--name", "not-this"))) == ("kvtier-engine-e", "docker")
    assert container_of(("python", "-m", "kvtierd.endpoint", "--name", "x")) is None


def test_without_docker_it_says_so_and_trying_again_cannot_help(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = subprocess.run(argv("x"), capture_output=True, text=True, timeout=30)
    assert result.returncode == 78
    assert "docker is not installed" in result.stderr


def test_the_seed_s_container_comes_out():
    tools = Toolchain(python="/opt/python", run_meta_script="m", run_pool_script="p")
    made = docker_argv(
        tools, name="kvtier-engine-q", image="quay.io/ascend/vllm-ascend:releases-v0.13.0-openeuler",
        command=("python", "-m", "vllm"), env={"PYTHONHASHSEED": "0", "API_KEY": "secret"}, devices=(0, 1),
        directories=("/var/lib/kvtierd/conf",), mounts=("/data/weights:/root/.cache",), shm_size="500g",
    )  # fmt: skip
    text = " ".join(made)
    for part in (
        "--shm-size=500g --net=host", "--device /dev/davinci0 --device /dev/davinci1", "--device /dev/davinci_manager",
        "--device /dev/devmm_svm", "--device /dev/hisi_hdc", "-v /usr/local/dcmi:/usr/local/dcmi",
        "-v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi", "-v /etc/ascend_install.info:/etc/ascend_install.info",
        "-v /var/lib/kvtierd/conf:/var/lib/kvtierd/conf", "-v /data/weights:/root/.cache", "-e PYTHONHASHSEED",
        "quay.io/ascend/vllm-ascend:releases-v0.13.0-openeuler python -m vllm",
    ):  # fmt: skip
        assert part in text
    assert "secret" not in text, "values of the environment are not in argv"
    assert not {"sh", "bash"} & {Path(a).name for a in made}
