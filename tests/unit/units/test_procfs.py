from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvtierd.units import procfs
from kvtierd.units.procfs import Stat


def stat(pid: int, ppid: int = 1, session: int = 0, ticks: int = 100, state: str = "S") -> Stat:
    return Stat(pid, f"p{pid}", state, ppid, session, ticks)


def table(*stats: Stat) -> dict[int, Stat]:
    return {entry.pid: entry for entry in stats}


def test_stat_of_a_command_with_spaces_and_parentheses() -> None:
    text = b"42 (a) b (c)) Z 7 42 9 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1000 20 1844\n"
    assert procfs.parse_stat(text) == Stat(42, "a) b (c)", "Z", 7, 9, 987654)


def test_zombies_count_as_ended() -> None:
    assert stat(2, state="Z").ended
    assert not stat(2, state="D").ended


def test_descendants_are_found_through_all_generations_and_zombies() -> None:
    found = procfs.descendants(
        [10], table(stat(10), stat(11, 10, state="Z"), stat(12, 11), stat(13, 12), stat(20))
    )
    assert sorted(entry.pid for entry in found) == [12, 13]


def test_a_loop_in_the_table_ends() -> None:
    """A table is read while it changes; a reused id can make it inconsistent."""
    assert {entry.pid for entry in procfs.descendants([10], table(stat(10, 11), stat(11, 10)))} == {10, 11}


def test_session_tree_holds_members_without_leader_and_what_is_below_them() -> None:
    processes = table(stat(11, session=10), stat(12, 11, session=12), stat(13, session=13))
    assert sorted(entry.pid for entry in procfs.session_tree(10, 100, processes)) == [11, 12]


def test_session_of_a_reused_leader_id_is_not_ours() -> None:
    processes = table(stat(10, session=10, ticks=999), stat(11, session=10))
    assert procfs.session_tree(10, 100, processes) == []


def test_own_process_is_found_by_its_identity_only() -> None:
    own = procfs.read_stat(os.getpid())
    assert own is not None
    assert procfs.find_process(own.pid, own.start_ticks) is not None
    assert procfs.find_process(own.pid, own.start_ticks + 1) is None
    assert procfs.process_table()[own.pid].start_ticks == own.start_ticks


def test_a_host_keeps_its_boot_id_and_a_container_gets_another_with_every_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(procfs, "HOST_PROCESSES", os.readlink("/proc/self/ns/pid"))
    on_host = procfs.boot_id()
    assert len(on_host) == 36
    monkeypatch.setattr(procfs, "HOST_PROCESSES", "pid:[1]")
    first, second = (
        monkeypatch.setattr(procfs, "read_stat", lambda _pid, t=ticks: stat(1, ticks=t)) or procfs.boot_id()
        for ticks in (5000, 9000)
    )
    assert first.startswith(on_host)
    assert len({on_host, first, second}) == 3


def test_signals_reach_only_the_process_that_was_meant() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = procfs.read_stat(child.pid)
        assert found is not None
        assert not procfs.send_signal(found._replace(start_ticks=found.start_ticks + 1), signal.SIGKILL)
        assert child.poll() is None
        assert procfs.send_signal(found, signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
        assert not procfs.send_signal(found, signal.SIGTERM)
    finally:
        child.kill()


def test_signals_work_on_kernels_without_pidfd(monkeypatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    found = procfs.read_stat(child.pid)
    assert found is not None
    assert procfs.send_signal(found, signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM
