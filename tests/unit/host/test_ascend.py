from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.host.ascend import AscendFindings, find_ascend
from kvtierd.host.view import HostView

from .tree import DRIVER_INFO, DRIVER_VERSION, plant, toolkit_info

DRIVER = {"/etc/ascend_install.info": DRIVER_INFO, "/usr/local/Ascend/driver/version.info": DRIVER_VERSION}
A = "/usr/local/Ascend"


def find(
    root: Path, files: dict[str, str], links: dict[str, str] | None = None, machine: str = "aarch64"
) -> AscendFindings:
    return find_ascend(HostView(plant(root, files, links), machine=machine))


def toolkit(home: str, version: str, machine: str = "aarch64") -> dict[str, str]:
    return {
        f"{home}/{machine}-linux/ascend_toolkit_install.info": toolkit_info(
            version, machine, f"{home}/{machine}-linux"
        )
    }


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_cann_8_3(tmp_path: Path, machine: str) -> None:
    found = find(
        tmp_path,
        {**DRIVER, **toolkit(f"{A}/ascend-toolkit/8.3.RC2", "8.3.RC2", machine)},
        {f"{A}/ascend-toolkit/latest": "8.3.RC2"},
        machine,
    )
    assert found.problems == ()
    assert found.install.driver_home == A
    assert found.install.driver_version == "25.0.rc1.1"
    assert found.install.driver_inner_version == "V100R001C21SPC006B220"
    assert (found.install.cann_home, found.install.cann_version) == (f"{A}/ascend-toolkit/latest", "8.3.RC2")


@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
def test_cann_8_5_behind_an_absolute_link(tmp_path: Path, machine: str) -> None:
    found = find(
        tmp_path,
        {**DRIVER, **toolkit(f"{A}/cann-8.5.0", "8.5.0", machine)},
        {f"{A}/cann": f"{A}/cann-8.5.0"},
        machine,
    )
    assert (found.install.cann_home, found.install.cann_version) == (f"{A}/cann", "8.5.0")


def test_the_newer_of_two_is_taken(tmp_path: Path) -> None:
    files = {
        **DRIVER,
        **toolkit(f"{A}/ascend-toolkit/latest", "8.3"),
        **toolkit(f"{A}/cann-8.5.0", "8.5.0"),
        **toolkit(f"{A}/cann-8.10.1", "8.10.1"),
    }
    assert find(tmp_path, files).install.cann_home == f"{A}/cann-8.10.1"


def test_a_release_candidate_is_older_than_its_release(tmp_path: Path) -> None:
    files = {
        **DRIVER,
        **toolkit(f"{A}/cann-a8.5.RC1", ""),
        **toolkit(f"{A}/cann-8.5.RC2", "8.5.RC2"),
        **toolkit(f"{A}/cann-8.5", "8.5"),
    }
    assert find(tmp_path, files).install.cann_version == "8.5"


def test_an_empty_version_is_read_from_the_path(tmp_path: Path) -> None:
    assert find(tmp_path, {**DRIVER, **toolkit(f"{A}/cann-8.5.0", "")}).install.cann_version == "8.5.0"


def test_an_empty_version_without_a_path_is_unknown(tmp_path: Path) -> None:
    found = find(tmp_path, {**DRIVER, f"{A}/cann/aarch64-linux/ascend_toolkit_install.info": "version=\n"})
    assert found.install.cann_home == f"{A}/cann"
    assert found.install.cann_version is None
    assert "empty version" in found.problems[0]


def test_another_driver_path(tmp_path: Path) -> None:
    found = find(
        tmp_path,
        {
            "/etc/ascend_install.info": "Firmware_Install_Type=full\nDriver_Install_Path_Param=/var/davinci/\n"
            "Driver_Install_Mode=vnpu_guest\n",
            "/var/davinci/driver/version.info": DRIVER_VERSION,
            **toolkit(f"{A}/cann", "8.5.0"),
        },
    )
    assert found.install.driver_home == "/var/davinci"
    assert found.install.driver_version == "25.0.rc1.1"
    assert found.install.cann_home == f"{A}/cann"
    assert found.problems == ()


def test_nothing_at_all(tmp_path: Path) -> None:
    found = find(tmp_path, {})
    assert found.install.driver_home is None
    assert found.install.cann_home is None
    assert len(found.problems) == 1
    assert "no Ascend driver" in found.problems[0]


def test_a_container_without_the_install_info(tmp_path: Path) -> None:
    found = find(tmp_path, {f"{A}/driver/version.info": DRIVER_VERSION, **toolkit(f"{A}/cann", "8.5.0")})
    assert found.install.driver_version == "25.0.rc1.1"
    assert "mount it into the container" in found.problems[0]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"/etc/ascend_install.info": DRIVER_INFO}, "version is unknown"),
        ({"/etc/ascend_install.info": "UserName=x\n"}, "no Driver_Install_Path_Param"),
        ({**DRIVER, f"{A}/driver/version.info": "Version=1\n"}, "no Innerversion"),
        (DRIVER, "no CANN toolkit for aarch64"),
        ({**DRIVER, **toolkit(f"{A}/cann", "8.5.0", "x86_64")}, "another machine type"),
    ],
)
def test_problems(tmp_path: Path, files: dict[str, str], words: str) -> None:
    assert any(words in problem for problem in find(tmp_path, files).problems)
