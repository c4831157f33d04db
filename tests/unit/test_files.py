import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtierd.errors import StateError
from kvtierd.files import DirectoryLock, write_atomic


def test_content_and_mode_are_as_asked(tmp_path):
    path = tmp_path / "sub" / "f"
    write_atomic(path, b"one", mode=0o640)
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o7777 == 0o640


def test_a_link_is_replaced_by_a_real_file(tmp_path):
    other = tmp_path / "other"
    other.write_text("kept")
    link = tmp_path / "f"
    link.symlink_to(other)
    write_atomic(link, b"new")
    assert not link.is_symlink()
    assert other.read_text() == "kept"


def test_no_reader_ever_sees_a_part(tmp_path):
    path = tmp_path / "f"
    contents = [bytes([65 + i]) * 200_000 for i in range(8)]
    write_atomic(path, contents[0])
    seen: set[bytes] = set()
    stop = threading.Event()

    def read():
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for content in contents:
        write_atomic(path, content)
    stop.set()
    reader.join()
    assert seen <= set(contents)


def test_a_full_disk_leaves_the_old_content_and_no_rubbish(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomic(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError) as raised:
        write_atomic(path, b"new")
    assert raised.value.stable_code == "state.full"
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_read_only_place_is_named(tmp_path, monkeypatch):
    def read_only(*_args, **_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", read_only)
    with pytest.raises(StateError) as raised:
        write_atomic(tmp_path / "f", b"x")
    assert raised.value.stable_code == "state.not-writable"
    assert "[paths]" in raised.value.hint


def test_a_second_daemon_is_refused_and_told_who_has_it(tmp_path):
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    with pytest.raises(StateError) as raised:
        DirectoryLock(tmp_path).acquire()
    assert raised.value.stable_code == "state.locked"
    assert str(os.getpid()) in raised.value.message
    lock.release()
    again = DirectoryLock(tmp_path)
    again.acquire()
    again.release()


def test_the_lock_ends_with_a_killed_process(tmp_path):
    code = (
        "import sys,time\nfrom pathlib import Path\nfrom kvtierd.files import DirectoryLock\n"
        "DirectoryLock(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StateError):
            DirectoryLock(Path(tmp_path)).acquire()
    finally:
        holder.kill()
        holder.wait()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()
