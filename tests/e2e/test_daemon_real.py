"""One host, end to end: the real daemon, MetaService, pool and the reference engine, and faults of each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from lab import RealTier

from kvtierd.control.client import ControlClient
from kvtierd.emulator.launch import shm_dir_for
from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode
from kvtierd.workload.stream import complete

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
TEXT = "The quick brown fox jumps over the lazy dog and thinks about caches. " * 12  # about 800 tokens


def quiet(_text: str) -> None:
    pass


@pytest.fixture
def node():
    with DemoNode(quiet, pool="64MiB", orderly=False) as running:
        yield running


def ask(node: DemoNode, prompt: str = TEXT, tokens: int = 4):
    return complete("127.0.0.1", node.engine_port, model="refengine", prompt=prompt, max_tokens=tokens)


def units(node: DemoNode):
    return {u.id.removeprefix("kvtier-"): u for u in node.status().units}


def wait_until(condition, seconds: float = 30.0, every: float = 0.1):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            result = condition()
        except KvtierError:
            result = None
        if result:
            return result
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {condition}")


def told(node: DemoNode) -> list[str]:
    """What is wrong, once the first plan has been tried."""
    return [p for p in node.status().problems if "is being made" not in p]


def kvtierctl(node: DemoNode, *arguments: str, code: int = 0):
    result = subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "--settings", str(node.settings), *arguments],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.returncode == code, (result.stdout, result.stderr)
    return result.stdout


def test_kill_9_of_the_daemon_costs_nothing_and_the_next_one_adopts(node):
    first = ask(node)
    before = {name: u.pid for name, u in units(node).items()}
    node.stop_daemon(signal.SIGKILL)
    assert all(psutil.pid_exists(pid) for pid in before.values())
    assert ask(node).text == first.text, "the engine serves without the daemon"
    node.start_daemon()
    node.wait_ready()
    after = units(node)
    assert {name: u.pid for name, u in after.items()} == before
    assert all(u.restarts == 0 for u in after.values())
    metas = [p for p in psutil.process_iter() if "run_meta.py" in " ".join(_cmdline(p))]
    ours = [p for p in metas if _mentions(p, str(node.directory))]
    assert len(ours) == 1, "the next daemon started no second one"


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _mentions(process: psutil.Process, text: str) -> bool:
    try:
        return any(text in value for value in [*process.cmdline(), *process.environ().values()])
    except psutil.Error:
        return False


def test_sigterm_leaves_the_units_running(node):
    before = {name: u.pid for name, u in units(node).items()}
    assert node.stop_daemon() == 0
    assert all(psutil.pid_exists(pid) for pid in before.values())


def test_a_killed_meta_service_comes_back_purged_and_no_request_fails(node):
    cold = ask(node)
    wait_until(lambda: _l3_used(node) > 0)
    meta, engine, pool = (units(node)[n] for n in ("meta-main", "engine-ref", "pool-0"))
    failures: list[Exception] = []
    stop = threading.Event()

    def load():
        number = 0
        while not stop.is_set():
            number += 1
            try:
                ask(node, f"{number} " + TEXT, 2)
            except KvtierError as error:
                failures.append(error)

    client = threading.Thread(target=load)
    client.start()
    os.kill(meta.pid, signal.SIGKILL)
    wait_until(
        lambda: units(node)["meta-main"].pid not in {0, meta.pid} and node.status().tier_state == "joinable"
    )
    stop.set()
    client.join()
    assert failures == []
    assert units(node)["engine-ref"].pid == engine.pid
    assert units(node)["pool-0"].pid == pool.pid
    kinds = [e.kind for e in node.client.events()]
    assert "tier.purged" in kinds
    assert ask(node).text == cold.text


def _l3_used(node: DemoNode) -> int:
    return next(t.used_bytes for t in node.status().tiers if t.name == "L3")


def test_an_engine_restart_finds_a_warm_pool(node):
    cold = ask(node)
    wait_until(lambda: _l3_used(node) > 0)
    time.sleep(1)
    node.restart_engine()
    warm = ask(node)
    assert warm.text == cold.text
    assert warm.usage["kvtier"]["l3_tokens"] > 700


def test_killed_units_come_back(node):
    for name in ("engine-ref", "pool-0", "endpoint-main"):
        before = units(node)[name].pid
        os.kill(before, signal.SIGKILL)
        wait_until(
            lambda name=name, before=before: (
                (u := units(node)[name]).state == "ready" and u.pid not in {0, before}
            )
        )
        # Once in hundreds of such kills the MetaService itself hangs on what it was telling the one that died;
        # kvtierd then replaces it, which takes longer than waiting for the unit alone.
        wait_until(lambda: not node.status().problems, 75)
        assert units(node)[name].restarts >= 1
        ask(node)


def test_a_pool_holder_that_dies_owing_an_answer_does_not_hang_the_meta_service(node):
    """It copies what it knows to each pool holder and waits for the answer, under the lock that it needs for all else."""
    pool, meta = units(node)["pool-0"].pid, units(node)["meta-main"].pid
    os.kill(pool, signal.SIGSTOP)
    for number in range(4):
        ask(node, f"{number} " + TEXT, 1)  # written: the MetaService tells the frozen holder
    time.sleep(1)
    os.kill(pool, signal.SIGKILL)
    wait_until(lambda: (u := units(node)["pool-0"]).state == "ready" and u.pid not in {0, pool})
    wait_until(lambda: not node.status().problems)
    assert units(node)["meta-main"].pid == meta
    assert not [e for e in node.client.events() if e.unit == "kvtier-meta-main" and e.kind == "degraded"]


def test_a_hung_meta_service_is_seen_and_replaced(node):
    pid = units(node)["meta-main"].pid
    os.kill(pid, signal.SIGSTOP)
    ask(node)  # the engine goes on
    wait_until(lambda: node.status().problems, 15)
    wait_until(
        lambda: units(node)["meta-main"].pid not in {0, pid} and node.status().tier_state == "joinable", 60
    )
    assert not psutil.pid_exists(pid)
    ask(node)


def test_a_planned_restart_of_the_meta_service_needs_no_purge(node):
    ask(node)
    wait_until(lambda: _l3_used(node) > 0)
    time.sleep(1)
    pid = units(node)["meta-main"].pid
    kvtierctl(node, "restart", "meta")
    wait_until(lambda: node.status().tier_state == "joinable")
    assert units(node)["meta-main"].pid != pid
    assert "tier.purged" not in [e.kind for e in node.client.events()]
    node.restart_engine()
    assert ask(node).usage["kvtier"]["l3_tokens"] > 700, "the keys survived"


def test_stopped_by_the_operator_stays_stopped_over_a_restart_of_the_daemon(node):
    kvtierctl(node, "stop", "ref")
    node.stop_daemon()
    node.start_daemon()
    wait_until(lambda: units(node)["pool-0"].state == "ready")
    time.sleep(1.5)
    assert units(node)["engine-ref"].state == "stopped"
    kvtierctl(node, "start", "ref")
    assert units(node)["engine-ref"].state == "ready"


def test_apply_twice_changes_nothing_and_a_changed_setting_restarts_what_it_touches(node):
    assert "nothing changed" in kvtierctl(node, "apply")
    pids = {n: u.pid for n, u in units(node).items()}
    text = node.settings.read_text()
    node.settings.write_text(text + "args = { max-queue = 3 }\n")
    assert "restart needed   kvtier-engine-ref" in kvtierctl(node, "reload")
    wait_until(lambda: units(node)["engine-ref"].stale)
    assert units(node)["engine-ref"].pid == pids["engine-ref"]
    kvtierctl(node, "apply")
    wait_until(lambda: (u := units(node)["engine-ref"]).state == "ready" and u.pid != pids["engine-ref"])
    now = {n: u.pid for n, u in units(node).items()}
    assert {n for n in now if now[n] != pids[n]} == {"engine-ref"}


def test_broken_settings_leave_everything_running(node):
    before = {n: u.pid for n, u in units(node).items()}
    good = node.settings.read_text()
    node.settings.write_text(good.replace('dram = "64MiB"', 'dram = "64 apples"'))
    with pytest.raises(KvtierError, match="apples"):
        node.client.reload(restart_changed=True)
    assert any("apples" in p for p in node.status().problems)
    node.stop_daemon()
    # A new daemon cannot start on broken settings; it says so and touches nothing.
    node.start_daemon()
    assert node._daemon.wait(20) == 1
    assert "apples" in (node.directory / "kvtierd.log").read_text()
    assert all(psutil.pid_exists(pid) for pid in before.values())
    node.settings.write_text(good)
    node.start_daemon()
    node.wait_ready()
    assert {n: u.pid for n, u in units(node).items()} == before


def test_a_refused_plan_leaves_everything_running(node):
    before = {n: u.pid for n, u in units(node).items()}
    good = node.settings.read_text()
    node.settings.write_text(good.replace('host_reserve = "256MiB"', 'host_reserve = "100TiB"'))
    with pytest.raises(KvtierError, match="leave the host"):
        node.client.reload(restart_changed=True)
    node.stop_daemon()
    node.start_daemon()
    wait_until(lambda: any("refused" in p for p in node.status().problems))
    time.sleep(1)
    assert {n: u.pid for n, u in units(node).items()} == before


def test_two_daemons_on_one_state_directory(node):
    second = subprocess.run(
        [sys.executable, "-m", "kvtierd.daemon", "--settings", str(node.settings)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"(pid {node.daemon_pid})" in second.stderr
    assert "Traceback" not in second.stderr


def test_verbs_and_their_json(node):
    ask(node)
    status = json.loads(kvtierctl(node, "status", "--json"))
    assert set(status) >= {"node", "epoch", "master", "tiers", "units", "emulated"}
    assert {"capacity_bytes", "used_bytes", "hit_rate", "hit_tokens", "query_tokens"} <= set(
        status["tiers"][0]
    )
    assert {"id", "kind", "state", "pid", "since", "restarts", "last_lines"} <= set(status["units"][0])
    assert status["emulated"] is True
    assert next(t for t in status["tiers"] if t["name"] == "L3")["capacity_bytes"] == 64 * 1024**2
    text = kvtierctl(node, "status")
    assert "EMULATED" in text
    assert "engine-ref" in text
    assert "kvtierd reference engine" in kvtierctl(node, "logs", "ref", "-n", "200")
    events = [json.loads(line) for line in kvtierctl(node, "events", "--json").splitlines()]
    assert "daemon.started" in [e["kind"] for e in events]
    wait_until(lambda: _l3_used(node) > 0)
    assert json.loads(kvtierctl(node, "purge", "--yes", "--json"))["seconds"] > 0
    wait_until(lambda: _l3_used(node) == 0)
    kvtierctl(node, "purge", code=2)
    kvtierctl(node, "restart", "nothing", code=1)
    assert json.loads(kvtierctl(node, "version", "--json"))["daemon"]
    kvtierctl(node, "stop", "--all")
    assert all(u.state == "stopped" for u in node.status().units)
    kvtierctl(node, "start", "--all")
    assert all(u.state == "ready" for u in node.status().units)
    ask(node)


def test_a_taken_port_is_named_with_its_owner():
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = taken.getsockname()[1]
    with taken:
        node = DemoNode(quiet, pool="64MiB", wait=False, orderly=False)
        text = node.settings.read_text()
        node.settings.write_text(
            text.replace(f"metrics_port = {node.metrics_port}", f"metrics_port = {port}")
        )
        with node:
            problems = wait_until(lambda: told(node))
            assert f"port {port}" in problems[0]
            assert f"(pid {os.getpid()})" in problems[0]


def test_a_missing_wheel_is_said_and_nothing_hangs(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    node = DemoNode(quiet, pool="64MiB", wait=False, orderly=False)
    node.settings.write_text(node.settings.read_text().replace("[meta]\n", f'[meta]\npython = "{python}"\n'))
    with node:
        problems = wait_until(lambda: told(node))
        assert "MemCache was not found" in problems[0]
        assert str(python) in problems[0]


@pytest.fixture
def short_directory():
    """A temporary directory with a short path: sockets are made below it."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as directory:
        yield Path(directory)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_behind(short_directory, number):
    tmp_path = short_directory
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvtierd.cli", "demo"], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    directory = wait_until(lambda: next(tmp_path.glob("kvtierd-demo-*"), None))
    shm = shm_dir_for(directory / "run" / "emulation")
    wait_until(lambda: shm.exists() and any(shm.iterdir()), 40)
    os.killpg(demo.pid, number)
    time.sleep(0.3)
    os.killpg(demo.pid, number)  # an impatient operator
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    assert not shm.exists()
    assert not [p for p in psutil.process_iter() if _mentions(p, str(directory))]


def test_a_demo_whose_reader_goes_away_leaves_nothing_behind(short_directory):
    """``kvtierctl demo 2>&1 | head -3``."""
    environment = {**os.environ, "TMPDIR": str(short_directory)}
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvtierd.cli", "demo"], env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    for _ in range(3):
        assert demo.stdout.readline()
    directory = next(short_directory.glob("kvtierd-demo-*"))
    demo.stdout.close()
    demo.wait(60)
    assert list(short_directory.iterdir()) == []
    assert not shm_dir_for(directory / "run" / "emulation").exists()
    assert not [p for p in psutil.process_iter() if _mentions(p, str(directory))]


def test_a_full_disk_in_the_state_directory(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a tiny file system")
    state = tmp_path / "state"
    state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(state)], check=True)
    try:
        node = DemoNode(quiet, pool="64MiB", wait=False, orderly=False)
        text = node.settings.read_text()
        node.settings.write_text(text.replace(f'state = "{node.directory}/state"', f'state = "{state}"'))
        with node:
            wait_until(lambda: node.status().units or node.status().problems)
            with (
                (state / "filler").open("wb", buffering=0) as filler,
                pytest.raises(OSError, match="No space"),
            ):
                while True:
                    filler.write(b"x" * 512)
            with pytest.raises(KvtierError, match="no space") as raised:
                node.settings.write_text(node.settings.read_text().replace("64MiB", "96MiB"))
                node.client.reload(restart_changed=False)
            assert raised.value.stable_code == "state.full"
            assert any("no space" in p for p in node.status().problems)
            (state / "filler").unlink()
            node.client.reload(restart_changed=False)
            wait_until(lambda: not any("no space" in p for p in node.status().problems))
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


def test_a_missing_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with DemoNode(quiet, pool="64MiB", wait=False, orderly=False) as node:
        problems = wait_until(lambda: told(node))
        assert "no C compiler" in problems[0]
        assert "/nowhere/cc" in problems[0]


def test_a_demo_without_a_compiler_ends_at_once_and_says_what_to_install(tmp_path):
    environment = {**os.environ, "CC": "/nowhere/cc", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "demo"],
        env=environment, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert time.monotonic() - started < 20
    assert done.returncode == 1
    assert "no C compiler" in done.stderr
    assert "/nowhere/cc" in done.stderr
    assert "install gcc" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("purge", [True, False])
def test_every_value_read_after_a_kill_under_load_is_right(purge, driver):
    """Fills the pool beyond its thresholds, kills -9 under load, checks every value read afterwards."""
    node = DemoNode(quiet, pool="64MiB", orderly=False, wait=False)
    text = node.settings.read_text()
    node.settings.write_text(text.replace("[pool]\n", f"[pool]\npurge_on_unclean = {str(purge).lower()}\n"))
    with node:
        node.wait_ready()
        tier = RealTier(node.directory / "run" / "emulation", driver)
        tier.client_meta_port, tier.client_store_port = node.port, node.store_port
        try:
            client = tier.client()
            client.call("start_load", prefix="x", size=512 * 1024, threads=2)
            time.sleep(4)  # 64 MiB are full, and keys are evicted
            meta = units(node)["meta-main"].pid
            os.kill(meta, signal.SIGKILL)
            wait_until(
                lambda: (
                    units(node)["meta-main"].pid not in {0, meta} and node.status().tier_state == "joinable"
                )
            )
            time.sleep(2)
            load = client.call("stop_load")
            assert load["stuck"] == 0
            if purge:
                assert load.get("gets_wrong", 0) == 0, "a value came back wrong"
            assert load["longest_seconds"] < 2.5
            written = load["written"]
            before = written[
                : len(written) // 3
            ]  # a third of the time had passed at most: from before the kill
            found = sum(client.call("exist_many", keys=before)) if before else 0
            events = [e.kind for e in node.client.events()]
            assert ("tier.purged" in events) == purge
            if purge:
                results = client.call("get_many", keys=written[-50:], size=512 * 1024)
                assert "wrong" not in results
                assert found == 0, "keys from before the kill survived the purge"
        finally:
            for unit in reversed(tier.units):
                unit.kill()


def test_the_control_socket_answers_while_the_meta_service_hangs(node):
    pid = units(node)["meta-main"].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        slowest = 0.0
        for _ in range(30):
            started = time.monotonic()
            with ControlClient(Path(node.directory) / "run" / "kvtierd.sock") as client:
                client.status()
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.1)
        assert slowest < 1.5
    finally:
        os.kill(pid, signal.SIGCONT)
