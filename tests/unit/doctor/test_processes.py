"""Engines and their workers in a made-up /proc."""

import pytest

from kvtierd.checks import CannotTellError
from kvtierd.doctor.processes import engine_processes, families, orphans, read_processes
from kvtierd.host.view import HostView

from .bedside import written


def process(root, pid, ppid, comm, *argv, env=None, state="S", cgroup=None):
    stat = f"{pid} ({comm}) {state} {ppid} {pid} {pid} 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 5000 0 0\n"
    files = {
        f"/proc/{pid}/stat": stat,
        f"/proc/{pid}/cmdline": b"".join(a.encode() + b"\0" for a in (argv or (comm,))),
    }
    if env is not None:
        files[f"/proc/{pid}/environ"] = b"".join(e.encode() + b"\0" for e in env)
    if cgroup:
        files[f"/proc/{pid}/cgroup"] = cgroup
    written(root, files)


SERVE = ("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "/m")


@pytest.mark.parametrize(
    ("comm", "argv", "role"),
    [
        ("python3", ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m"), "server"),
        ("vllm", SERVE, "server"),
        ("vllm", ("/opt/bin/vllm", "serve", "/m"), "server"),
        ("python", ("python", "-m", "sglang.launch_server"), "server"),
        ("bash", ("bash", "-c", "vllm serve /m"), ""),
        ("docker", ("docker", "run", "image", "vllm", "serve", "/m"), ""),
        ("VLLM::EngineCor", ("VLLM::EngineCore_DP0",), "worker"),
        ("VLLM::Worker_TP", ("VLLM::Worker_TP0_EP0",), "worker"),
        ("sglang::schedul", ("sglang::scheduler_TP3",), "worker"),
        ("python3", ("python3", "worker.py"), ""),
        ("Worker", ("/usr/bin/Worker", "--daemon"), ""),
    ],
)
def test_who_is_what(tmp_path, comm, argv, role):
    process(tmp_path, 7, 1, comm, *argv)
    found = read_processes(HostView(tmp_path))[7]
    assert ("server" if found.is_server else "worker" if found.is_worker else "") == role


def test_workers_whose_server_was_killed_are_left(tmp_path):
    process(tmp_path, 1, 0, "systemd")
    process(tmp_path, 20, 1, "VLLM::EngineCor", "VLLM::EngineCore")
    process(tmp_path, 21, 20, "VLLM::Worker_TP", "VLLM::Worker_TP0")
    assert [p.pid for p in orphans(read_processes(HostView(tmp_path)))] == [20, 21]


@pytest.mark.parametrize(
    "parents",
    [
        [(10, 1, "python3", SERVE)],
        # A script that uses vLLM as a library.
        [(10, 1, "python3", ("python3", "bench.py"))],
        [(9, 1, "systemd", ("systemd", "--user")), (10, 9, "vllm", SERVE)],
    ],
)
def test_workers_below_somebody_who_can_end_them_are_not_left(tmp_path, parents):
    process(tmp_path, 1, 0, "systemd")
    for pid, ppid, comm, argv in parents:
        process(tmp_path, pid, ppid, comm, *argv)
    process(tmp_path, 20, 10, "VLLM::EngineCor", "VLLM::EngineCore")
    process(tmp_path, 21, 20, "VLLM::Worker_TP", "VLLM::Worker_TP0")
    assert orphans(read_processes(HostView(tmp_path))) == ()


def test_process_1_of_a_container_may_be_the_server_itself(tmp_path):
    process(tmp_path, 1, 0, "vllm", *SERVE)
    process(tmp_path, 20, 1, "VLLM::EngineCor", "VLLM::EngineCore")
    table = read_processes(HostView(tmp_path))
    assert orphans(table) == ()
    assert [p.pid for p in families(table)[1]] == [1, 20]


def test_a_workers_parent_that_is_a_subreaper_is_nobody(tmp_path):
    process(tmp_path, 1, 0, "systemd")
    process(tmp_path, 9, 1, "containerd-shim", "/usr/bin/containerd-shim-runc-v2")
    process(tmp_path, 20, 9, "VLLM::EngineCor", "VLLM::EngineCore")
    assert [p.pid for p in orphans(read_processes(HostView(tmp_path)))] == [20]


def test_a_loop_of_parents_ends(tmp_path):
    process(tmp_path, 20, 21, "VLLM::EngineCor", "VLLM::EngineCore")
    process(tmp_path, 21, 20, "VLLM::Worker_TP", "VLLM::Worker_TP0")
    assert len(orphans(read_processes(HostView(tmp_path)))) == 2


def test_zombies_and_nonsense_are_left_out(tmp_path):
    process(tmp_path, 20, 1, "VLLM::EngineCor", "VLLM::EngineCore", state="Z")
    written(tmp_path, {"/proc/21/stat": "", "/proc/22/stat": "22 (x", "/proc/23/stat": b"\xff\xfe"})
    (tmp_path / "proc/24/stat").mkdir(parents=True)
    assert read_processes(HostView(tmp_path)) == {}


def test_only_the_wanted_variables_are_kept_and_only_of_engines(tmp_path):
    process(tmp_path, 20, 1, "vllm", *SERVE, env=["PYTHONHASHSEED=0", "HF_TOKEN=secret"])
    process(tmp_path, 30, 1, "sshd", env=["PYTHONHASHSEED=1"])
    table = read_processes(HostView(tmp_path))
    assert table[20].env == {"PYTHONHASHSEED": "0"}
    assert table[30].env is None
    assert [p.pid for p in engine_processes(table)] == [20]


def test_the_container_of_a_process(tmp_path):
    identity = "4f1c0de5a9b8" * 5
    process(tmp_path, 20, 1, "vllm", *SERVE, cgroup=f"0::/system.slice/docker-{identity}.scope\n")
    process(tmp_path, 21, 1, "vllm", *SERVE, cgroup="0::/user.slice/user-0.slice/session-1.scope\n")
    table = read_processes(HostView(tmp_path))
    assert (table[20].box, table[21].box) == ("4f1c0de5a9b8", "")


def test_a_command_line_is_never_shown(tmp_path):
    process(tmp_path, 20, 1, "vllm", *SERVE, "--api-key", "secret")
    assert read_processes(HostView(tmp_path))[20].shown == "vllm (pid 20)"


def test_a_root_without_proc(tmp_path):
    with pytest.raises(CannotTellError):
        read_processes(HostView(tmp_path))
