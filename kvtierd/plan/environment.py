"""Complete environments for units: nothing is inherited, so everything needed is named here."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvtierd.plan.hardware import series_env
from kvtierd.plan.inventory import AscendInstall, Inventory, MemcacheInstall
from kvtierd.plan.model import Series
from kvtierd.plan.toolchain import Toolchain
from kvtierd.settings import MetaSettings

MAX_HASH_SEED = 2**32 - 1
_PATH_VARIABLES = frozenset({"LD_LIBRARY_PATH", "PATH", "PYTHONPATH"})


def merge_env(*parts: Mapping[str, str]) -> dict[str, str]:
    """Later wins; search paths are joined instead, the later part in front, each directory once."""
    merged: dict[str, str] = {}
    for part in parts:
        for name, value in part.items():
            if name in _PATH_VARIABLES and merged.get(name):
                entries = [*value.split(":"), *merged[name].split(":")]
                merged[name] = ":".join(dict.fromkeys(e for e in entries if e))
            else:
                merged[name] = value
    return merged


def is_hash_seed(text: str) -> bool:
    """Whether Python takes this as a fixed PYTHONHASHSEED (not ``random``)."""
    return re.fullmatch(r"[0-9]{1,10}", text) is not None and int(text) <= MAX_HASH_SEED


def find_install(meta: MetaSettings, inventory: Inventory) -> MemcacheInstall | None:
    """The MemCache this node will run: the settings' interpreter or run package, else the first that works."""
    boxed = (
        meta.runner == "docker"
    )  # then the settings name what is in the image: the host's is for engines alone
    runtime = "wheel" if boxed else meta.runtime
    wanted = [i for i in inventory.memcache if i.runtime == runtime]
    if runtime == "binary":
        return next((i for i in wanted if i.home == meta.home), None)
    if meta.python and not boxed:
        return next((i for i in wanted if i.python == meta.python), None)
    usable = [i for i in wanted if i.problem is None]
    return usable[0] if usable else (wanted[0] if wanted else None)


def memcache_env(
    toolchain: Toolchain, series: Series, protocol: str, inventory: Inventory, install: MemcacheInstall | None
) -> dict[str, str]:
    """What MemCache needs in any process: library paths, the Ascend driver (or the emulated one)."""
    libraries = (
        {"LD_LIBRARY_PATH": ":".join(install.library_dirs)} if install and install.library_dirs else {}
    )
    if toolchain.emulation is not None and series == "emulated":
        return merge_env(toolchain.emulation.env, libraries)
    return merge_env(_ascend_env(inventory.ascend), libraries, series_env(series, protocol))


def _ascend_env(ascend: AscendInstall) -> dict[str, str]:
    env: dict[str, str] = {}
    libraries: list[str] = []
    if ascend.driver_home:
        base = f"{ascend.driver_home}/driver/lib64"
        libraries += [base, f"{base}/common", f"{base}/driver"]
    if ascend.cann_home:
        env["ASCEND_HOME_PATH"] = ascend.cann_home
        libraries.append(f"{ascend.cann_home}/lib64")
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    return env
