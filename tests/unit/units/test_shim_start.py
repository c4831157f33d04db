import os
import sys
import time

import pytest

from kvtierd.units import shim_record, shim_start


@pytest.fixture
def request_of_a_start(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return {
        "unit_id": "kvtier-engine-a",
        "instance": "i",
        "spec_digest": "d",
        "watch": [],
        "secret_files": [],
        "stop_signal": 15,
        "stop_timeout_seconds": 5.0,
        "argv": [sys.executable, "-I", "-S", "-c", "raise SystemExit(78)"],
        "cwd": "/",
        "user": None,
        "cpus": [],
        "nice": 0,
        "note": "",
        "guard_file": "",
        "env": {},
        "log": str(tmp_path / "log"),
        "log_max_bytes": 1 << 20,
        "log_keep": 1,
    }


def test_a_unit_that_ends_at_once_keeps_its_exit_status_for_the_keeper(request_of_a_start, monkeypatch):
    really_write = shim_record.write_record

    def write_slowly(directory, record):
        """A disk that takes its time: the unit is over before its start is."""
        really_write(directory, record)
        deadline = time.monotonic() + 20
        while record["pid"] and time.monotonic() < deadline:
            with open(f"/proc/{record['pid']}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return
            time.sleep(0.01)

    monkeypatch.setattr(shim_record, "write_record", write_slowly)
    fifo = shim_start.open_fifo(keep_existing=False)
    try:
        record = shim_start.start_unit(request_of_a_start, fifo)
        pid, status = os.waitpid(record["pid"], 0)
        assert pid == record["pid"]
        assert os.waitstatus_to_exitcode(status) == 78
    finally:
        os.close(fifo)
        shim_start._STARTED.clear()
