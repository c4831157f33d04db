"""Agreement between kvtierd's checker and the real MemCache's parser.

Every case goes both ways: what the checker calls an error, the real one refuses or reads otherwise than the operator
meant; what the checker passes, the real one takes as it was meant. Where the checker is stricter on purpose, the
case says why.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conf_cases import ALL_CASES, FINE, GB, HARM, HTTP, META, MISREAD, REFUSED, STORE, Case, text

from kvtierd.emulator.build import EmulatedDriver
from kvtierd.emulator.launch import cleanup
from kvtierd.mmc_conf.check import check_local, check_meta
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo, check_conf_path
from kvtierd.mmc_conf.render import render_local, render_meta
from kvtierd.mmc_conf.sglang import (
    SglangMetaConf,
    SglangStorageConf,
    render_sglang_meta,
    render_sglang_storage,
)
from kvtierd.mmc_conf.sglang_check import check_sglang_meta, check_sglang_storage

pytestmark = pytest.mark.real

VERSION = "1.3.0"
ANSWER_SECONDS = 20.0


class Oracle:
    """The real MemCache in a process of its own, asked over pipes with a deadline."""

    def __init__(self, driver: EmulatedDriver, root: Path) -> None:
        self.root = root
        self.directory = root / "conf"
        self.logs = root / "log"
        self.link = root / "link"
        self.directory.mkdir(parents=True)
        self.logs.mkdir()
        self.link.symlink_to(self.logs)
        self.errors = (root / "stderr").open("wb")
        argv = [sys.executable, "-m", "kvtierd.emulator.launch", "--root", str(root / "emulation"), "--"]
        argv += [sys.executable, str(Path(__file__).with_name("conf_oracle.py")), str(self.directory)]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=driver.env({"PATH": "/usr/bin:/bin"}),
        )

    def place(self, data: bytes) -> bytes:
        """The file with the placeholders for paths filled in."""
        return data.replace(b"LOGDIR", bytes(self.logs)).replace(b"LOGLINK", bytes(self.link))

    def ask(self, kind: str, data: bytes, *, link: bool = False) -> dict[str, Any]:
        """What the real one makes of the file."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"kind": kind, "data": data.decode("latin-1"), "link": link}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS)
        assert ready, f"no answer in {ANSWER_SECONDS} s; stderr: {(self.root / 'stderr').read_text()[-500:]}"
        line = self.process.stdout.readline()
        assert line, f"the oracle ended; stderr: {(self.root / 'stderr').read_text()[-500:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the process and removes its shared memory."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        cleanup(self.root / "emulation")


@pytest.fixture(scope="module")
def oracle(driver: EmulatedDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    running = Oracle(driver, tmp_path_factory.mktemp("oracle"))
    yield running
    running.close()


def path_info(path: str) -> PathInfo:
    at = Path(path)
    return PathInfo(at.exists(), str(at.readlink()) if at.is_symlink() else None)


def judge(kind: str, data: bytes) -> tuple[ConfProblem, ...]:
    match kind:
        case "meta":
            return check_meta(data, VERSION, path_info=path_info)
        case "local":
            return check_local(data, VERSION, path_info=path_info)
        case "sglang-meta":
            return check_sglang_meta(data, VERSION, path_info=path_info)
        case _:
            return check_sglang_storage(data, VERSION, path_info=path_info)


def real_outcome(case: Case, answer: dict[str, Any], logs: Path) -> str:
    """Refused, misread or as meant."""
    if answer["outcome"] == "refused":
        return REFUSED
    if case.kind in {"local", "sglang-storage"}:
        return FINE if case.dram is None or answer["dram"] == case.dram else MISREAD
    hosts = {"127.0.0.1"} | {case.host}
    meant = {f"{host}:{port}" for host in hosts | {"0.0.0.0"} for port in case.ports}
    ports = {int(address.rpartition(":")[2]) for address in answer["listening"]}
    as_meant = ports == set(case.ports) and set(answer["listening"]) <= meant
    as_meant &= answer["log_path"] == (case.log_path or str(logs))
    as_meant &= case.log_level is None or answer["log_level"] == case.log_level
    return FINE if as_meant else MISREAD


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_checker_and_real_parser_agree(case: Case, oracle: Oracle) -> None:
    data = oracle.place(case.data)
    problems = judge(case.kind, data)
    errors = {p.code for p in problems if p.severity == "error"}
    answer = oracle.ask(case.kind, data)
    outcome = real_outcome(case, answer, oracle.logs)
    assert errors == case.codes, [p.message for p in problems]
    if case.real == HARM:
        assert outcome in {REFUSED, MISREAD}, answer
    else:
        assert outcome == case.real, answer
    # The agreement itself, whatever the table says.
    if outcome == FINE:
        assert not errors or case.stricter, f"the real one takes it, but the checker says {errors}"
    else:
        assert errors, f"the real one has it {outcome}, but the checker passes it: {answer['output']}"


def test_a_linked_file_is_refused(oracle: Oracle, tmp_path: Path) -> None:
    answer = oracle.ask("meta", oracle.place(text().encode()), link=True)
    link = tmp_path / "mmc-meta.conf"
    link.symlink_to("/etc/hostname")
    assert answer["outcome"] == "refused", answer
    assert [p.code for p in check_conf_path(str(link), path_info)] == ["symlink"]


@pytest.mark.parametrize(
    "conf",
    [
        MetaConf(),
        MetaConf(log_level="debug", evict_threshold_high=99, evict_threshold_low=98, lease_ttl_ms=5000),
        MetaConf(extra={"ock.mmc.meta_service.lru_shard_count": "4", "ock.mmc.log_output_target": "both"}),
    ],
    ids=["defaults", "every typed key", "extra keys"],
)
def test_a_rendered_meta_conf_binds_the_rendered_ports(conf: MetaConf, oracle: Oracle) -> None:
    urls = {
        "meta_service_url": f"tcp://127.0.0.1:{META}",
        "config_store_url": f"tcp://127.0.0.1:{STORE}",
        "metrics_url": f"http://127.0.0.1:{HTTP}",
        "log_path": str(oracle.logs),
    }
    answer = oracle.ask("meta", render_meta(conf.model_copy(update=urls), VERSION).encode())
    assert answer["listening"] == [f"127.0.0.1:{port}" for port in (META, STORE, HTTP)], answer
    assert answer["log_path"] == str(oracle.logs)
    assert answer["log_level"] == {"debug": 0, "info": 1}[conf.log_level]


@pytest.mark.parametrize(
    "protocol", ["host_shm", "host_rdma", "device_sdma", "device_rdma", "device_urma", "device_uboe"]
)
@pytest.mark.parametrize("dram_size_bytes", [0, GB, 128 * GB])
def test_a_rendered_local_conf_is_read_as_rendered(
    protocol: str, dram_size_bytes: int, oracle: Oracle
) -> None:
    conf = LocalConf(
        meta_service_url=f"tcp://127.0.0.1:{META}",
        config_store_url=f"tcp://127.0.0.1:{STORE}",
        protocol=protocol,
        dram_size_bytes=dram_size_bytes,
        max_dram_size_bytes=128 * GB,
    )
    answer = oracle.ask("local", render_local(conf, VERSION).encode())
    # 128 GB of memory are not there, so the pool itself may fail afterwards; what was read is what counts.
    assert answer["dram"] == dram_size_bytes, answer


def test_rendered_sglang_json_is_taken(oracle: Oracle) -> None:
    meta_conf = SglangMetaConf(
        meta_service_url=f"tcp://127.0.0.1:{META}",
        config_store_url=f"tcp://127.0.0.1:{STORE}",
        metrics_url=f"http://127.0.0.1:{HTTP}",
        log_path=str(oracle.logs),
    )
    answer = oracle.ask("sglang-meta", render_sglang_meta(meta_conf, VERSION).encode())
    assert answer["listening"] == [f"127.0.0.1:{port}" for port in (META, STORE, HTTP)], answer
    storage = SglangStorageConf(
        protocol="device_sdma", dram_size="50GB", max_dram_size="50GB", prefetch_threshold=1
    )
    assert oracle.ask("sglang-storage", render_sglang_storage(storage, VERSION).encode())["outcome"] == "up"
