"""From a settings file to a plan on this host: the steps that daemon and kvtierctl share."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Set as AbstractSet
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from kvtierd.emulator.build import ensure_driver, locate_driver
from kvtierd.errors import KvtierError
from kvtierd.plan.adjustments import NOTHING, Adjustments
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plan.planner import make_plan
from kvtierd.plan.toolchain import UNIT_PATH, Emulation, Toolchain
from kvtierd.plugins import PluginSet
from kvtierd.settings import Settings

if TYPE_CHECKING:
    from kvtierd.host.view import HostView

DEFAULT_SETTINGS = Path("/etc/kvtierd/kvtierd.toml")
SOCKET_NAME = "kvtierd.sock"
EMULATION_VARIABLE = "EMULATED_ASCEND_ROOT"
MAX_INVENTORY_BYTES = 4 * 1024 * 1024


def cache_directory() -> Path:
    """Where the emulated driver is kept between runs."""
    return Path(platformdirs.user_cache_dir("kvtierd")) / "emulator"


def emulation_root(settings: Settings) -> Path:
    """The directory whose units share one emulated host: memory and devices.

    ``EMULATED_ASCEND_ROOT`` names another one: several emulated nodes of one pool on one machine share it.
    """
    return Path(os.environ.get(EMULATION_VARIABLE) or Path(settings.paths.runtime) / "emulation")


def make_toolchain(settings: Settings) -> Toolchain:
    """Paths of our own programs. Nothing is built here: the driver's directory is known by its name."""
    scripts = resources.files("kvtierd.memcache")
    emulation = None
    if settings.node.series == "emulated":
        root = emulation_root(settings)
        emulation = Emulation(
            root=str(root),
            prefix=(sys.executable, "-m", "kvtierd.emulator.launch", "--root", str(root), "--"),
            env=locate_driver(cache_directory()).env(),
        )
    return Toolchain(
        python=sys.executable,
        run_meta_script=str(scripts.joinpath("run_meta.py")),
        run_pool_script=str(scripts.joinpath("run_pool.py")),
        emulation=emulation,
        docker=_unusual_docker(),
    )


def _unusual_docker() -> str | None:
    """The docker on our PATH, when units, whose PATH is fixed, would find another or none."""
    ours = shutil.which("docker")
    return ours if ours != shutil.which("docker", path=UNIT_PATH) else None


def purge_script() -> str:
    """Path of the stand-alone purge program."""
    return str(resources.files("kvtierd.memcache").joinpath("run_purge.py"))


def prepare_emulation(settings: Settings) -> None:
    """Builds the emulated driver if this machine does not have it yet.

    Raises:
        EmulatorError: no compiler, or it failed.
    """
    ensure_driver(cache_directory())
    emulation_root(settings).mkdir(parents=True, exist_ok=True)


async def inventory_of_this_host(
    settings: Settings,
    plugins: PluginSet,
    *,
    view: HostView | None = None,
    command_seconds: float | None = None,
) -> Inventory:
    """Looks at this host (or at that of ``view``), and at the interpreters the settings name.

    ``command_seconds``: how long npu-smi and each interpreter may take; default: as ``take_inventory`` says.
    """
    # Here, since a plan for a recorded host needs none of it and should be quick.
    from kvtierd.host.inventory import take_inventory
    from kvtierd.host.view import HostView

    # What is named for a container is not on this host.
    ours = settings.meta.python if settings.meta.runner == "host" else None
    named = [e.python for e in settings.engine if e.python and e.runner == "host"]
    pythons = list(dict.fromkeys([ours or sys.executable, *named]))
    packages = sorted({d.package for d in plugins.drivers.values() if d.package})
    homes = (
        (settings.meta.home,) if settings.meta.runtime == "binary" and settings.meta.runner == "host" else ()
    )
    limits = (
        {}
        if command_seconds is None
        else {"npu_smi_timeout_seconds": command_seconds, "python_timeout_seconds": command_seconds}
    )
    return await take_inventory(
        view or HostView(), python=pythons, packages=packages, binary_homes=homes, **limits
    )


def read_inventory(path: Path) -> Inventory:
    """A recorded inventory.

    Raises:
        KvtierError: it cannot be read or is no inventory.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_INVENTORY_BYTES + 1)
        if len(data) > MAX_INVENTORY_BYTES:
            raise ValueError("it is too large for an inventory")
        return Inventory.model_validate_json(data)
    except OSError as error:
        raise KvtierError(f"{path} cannot be read: {error.strerror}", code="inventory.unreadable") from None
    except ValueError as error:
        raise KvtierError(
            f"{path} is not an inventory",
            why=str(error).splitlines()[0]
            if len(str(error).splitlines()) == 1
            else "; ".join(str(error).splitlines()[1:3]),
            hint="record one with: kvtierctl inventory --json > FILE",
            code="inventory.invalid",
        ) from None


def plan_for(
    settings: Settings,
    inventory: Inventory,
    plugins: PluginSet,
    *,
    node: str | None = None,
    owned_pids: AbstractSet[int] = frozenset(),
    owned_pages: int = 0,
    master: str | None = None,
    adjustments: Adjustments = NOTHING,
) -> NodePlan:
    """The plan of one node with this installation's programs and plugins."""
    return make_plan(
        settings,
        inventory,
        plugins.bounded,
        make_toolchain(settings),
        node=node,
        owned_pids=owned_pids,
        owned_pages=owned_pages,
        master=master,
        adjustments=adjustments,
    )
