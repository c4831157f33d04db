"""Builds the files of a made-up host below a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"

DRIVER_INFO = """UserName=HwHiAiUser
UserGroup=HwHiAiUser
Driver_Install_Type=full
Driver_Install_Path_Param=/usr/local/Ascend
Driver_Install_For_All=no
Driver_Install_Mode=normal
Driver_Install_Status=complete
"""
DRIVER_VERSION = """Version=25.0.rc1.1
ascendhal_version=7.35.23
Innerversion=V100R001C21SPC006B220
compatible_version=[V100R001C19],[V100R001C20],[V100R001C21]
compatible_version_fw=[7.0.0,7.7.99]
package_version=25.0.rc1.1
"""


def plant(root: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None) -> Path:
    """Writes ``files`` (absolute name -> text) and symbolic ``links`` (absolute name -> target) below ``root``."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in (links or {}).items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    return root


def toolkit_info(version: str, machine: str, path: str) -> str:
    """An ``ascend_toolkit_install.info``."""
    return (
        f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C23SPC001B238\n"
        f"compatible_version=[V100R001C15],[V100R001C18]\narch={machine}\nos=linux\npath={path}\n"
    )
