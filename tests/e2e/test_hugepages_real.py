"""Hugepages on the kernel that runs the tests: a few pages, given back exactly."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtierd.host.hugepage_files import HugepageFiles
from kvtierd.host.hugepages import Hugepages
from kvtierd.host.ledger import Ledger
from kvtierd.plan.model import HugepagePlan

MIB2 = 2 * 1024 * 1024
NR = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")

pytestmark = [
    pytest.mark.real,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the kernel's hugepages"),
    pytest.mark.skipif(not NR.exists(), reason="this kernel has no 2 MiB hugepages"),
    pytest.mark.skipif(NR.exists() and not os.access(NR, os.W_OK), reason=f"{NR} is read-only here"),
]


@pytest.fixture
def files() -> Iterator[HugepageFiles]:
    """The real files; the page counts of before come back whatever the test does."""
    kernel = HugepageFiles()
    before = {None: kernel.read(MIB2, None).persistent}
    before |= {node: kernel.read(MIB2, node).persistent for node in kernel.nodes()}
    try:
        yield kernel
    finally:
        for node, pages in before.items():
            if kernel.read(MIB2, node).persistent != pages:
                kernel.write(MIB2, node, pages)
        after = {node: kernel.read(MIB2, node).persistent for node in before}
    assert after == before


def manager(files: HugepageFiles, tmp_path: Path) -> Hugepages:
    return Hugepages(files, Ledger(tmp_path / "hugepages.json", files.boot_id))


def test_reserve_again_and_release(files: HugepageFiles, tmp_path: Path) -> None:
    before = files.read(MIB2, None)
    plan = HugepagePlan(pages=before.total - before.committed + 48)  # what is free now, and 48 more
    report = manager(files, tmp_path).reserve(plan, deadline_seconds=5)
    assert report.complete, report.text()
    assert files.read(MIB2, None).total == before.total + 48
    again = manager(files, tmp_path).reserve(plan, deadline_seconds=5)
    assert again.complete
    assert again.pools[0].raised_pages == 48
    released = manager(files, tmp_path).release()
    assert released.given_back_bytes == 48 * MIB2
    assert files.read(MIB2, None).total == before.total


def test_reserve_on_one_numa_node(files: HugepageFiles, tmp_path: Path) -> None:
    nodes = files.nodes()
    if not nodes:
        pytest.skip("this kernel has no NUMA nodes in /sys")
    before = files.read(MIB2, nodes[0])
    pages = before.total - before.committed + 16
    report = manager(files, tmp_path).reserve(
        HugepagePlan(pages=pages, per_numa_node={nodes[0]: pages}), deadline_seconds=5
    )
    assert report.complete, report.text()
    assert files.read(MIB2, nodes[0]).total == before.total + 16
    manager(files, tmp_path).release()
    assert files.read(MIB2, nodes[0]).total == before.total


def test_pages_that_a_process_maps_are_kept_on_release(files: HugepageFiles, tmp_path: Path) -> None:
    map_hugetlb = 0x40000  # MAP_HUGETLB; Python 3.11 does not name it
    before = files.read(MIB2, None)
    manager(files, tmp_path).reserve(
        HugepagePlan(pages=before.total - before.committed + 8), deadline_seconds=5
    )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_hugetlb
    with mmap.mmap(-1, (before.total - before.committed + 8) * MIB2, flags=flags) as memory:
        memory[0] = 1
        released = manager(files, tmp_path).release()
        assert released.still_in_use_bytes == 8 * MIB2
        assert files.read(MIB2, None).surplus == 0
    assert manager(files, tmp_path).release().still_in_use_bytes == 0
    assert files.read(MIB2, None).total == before.total


def test_compacting_the_real_host_ends_in_time(files: HugepageFiles) -> None:
    assert files.make_room(5.0) in ("", "sync did not end in time")


RESERVE = """
import os, sys
from pathlib import Path
from kvtierd.errors import HugepageError
from kvtierd.host.hugepage_files import HugepageFiles
from kvtierd.host.hugepages import Hugepages
from kvtierd.host.ledger import Ledger
from kvtierd.plan.model import HugepagePlan
uid = int(sys.argv[2])
if uid:
    os.setgid(uid)
    os.setuid(uid)
files = HugepageFiles()
counts = files.read(2 * 1024 * 1024, None)
try:
    Hugepages(files, Ledger(Path(sys.argv[1]), "b")).reserve(HugepagePlan(pages=counts.total + 8), deadline_seconds=2)
except HugepageError as exc:
    print(exc.stable_code)
"""


def test_read_only_kernel_files_are_named(files: HugepageFiles, tmp_path: Path) -> None:
    # What ProtectKernelTunables= does, in a mount namespace of its own.
    script = 'mount --bind -o ro /sys /sys && exec "$@"'
    words = [
        "unshare",
        "-m",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        RESERVE,
        str(tmp_path / "l.json"),
        "0",
    ]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in result.stderr or "mount" in result.stderr:
        pytest.skip(f"no mount namespace can be made here: {result.stderr.strip()}")
    assert result.stdout == "hugepages.read-only\n", result.stderr


def test_an_ordinary_user_is_told_that_root_is_needed(files: HugepageFiles) -> None:
    # pytest's own directories may not be entered by another user.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        words = [sys.executable, "-c", RESERVE, str(Path(name) / "l.json"), "65534"]
        result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "hugepages.permission\n", result.stderr
