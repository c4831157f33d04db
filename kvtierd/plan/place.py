"""Where MemCache's own processes run, MetaService and pool holders: on the host or in containers of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePosixPath

from kvtierd.plan.docker import IMAGE_ASCEND, IMAGE_PYTHON, docker_argv
from kvtierd.plan.environment import memcache_env, merge_env
from kvtierd.plan.inventory import Inventory, MemcacheInstall
from kvtierd.plan.model import Series
from kvtierd.plan.toolchain import Toolchain
from kvtierd.settings import MetaSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """The containers that the operator asked for.

    Attributes:
        image: The image; MemCache is in it.
        mounts: The operator's own, ``source:target[:ro]``.
        directories: kvtierd's that are seen inside under the same path: MemCache's files and its logs.
        scripts: The directory of our start scripts, seen inside but not written.
    """

    image: str
    mounts: tuple[str, ...]
    directories: tuple[str, ...]
    scripts: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemcachePlace:
    """What starts MemCache's processes.

    Attributes:
        python: The interpreter that has the wheel.
        program: The run package's ``mmc_meta_service``; ``None``: the wheel's MetaService.
        meta_env: What the MetaService needs beside its configuration.
        pool_env: The same for pool holders, which use the driver.
        container: ``None``: processes of the host.
        user: Who runs them, or docker's client; ``None``: kvtierd's own.
    """

    python: str
    program: str | None
    meta_env: Mapping[str, str]
    pool_env: Mapping[str, str]
    container: Container | None = None
    user: str | None = None

    def command(
        self,
        toolchain: Toolchain,
        *,
        name: str,
        command: tuple[str, ...],
        env: Mapping[str, str],
        devices: tuple[int, ...] = (),
        directories: tuple[str, ...] = (),
        stop_seconds: float,
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """A unit's argv and environment for a command with what it needs in its environment."""
        if self.container is None:
            return (*toolchain.prefix, *command), merge_env(toolchain.base_env, env)
        # The image's own PATH finds its interpreter; ours is for docker's client alone.
        inner = merge_env({k: v for k, v in toolchain.base_env.items() if k != "PATH"}, env)
        argv = docker_argv(
            toolchain,
            name=name,
            image=self.container.image,
            command=command,
            env=inner,
            devices=devices,
            directories=(*self.container.directories, *directories),
            read_only=(self.container.scripts,),
            mounts=self.container.mounts,
            stop_seconds=stop_seconds,
        )
        return (*toolchain.prefix, *argv), merge_env(toolchain.base_env, inner)


def memcache_place(
    meta: MetaSettings,
    inventory: Inventory,
    toolchain: Toolchain,
    *,
    series: Series,
    protocol: str,
    install: MemcacheInstall | None,
    python: str,
    directories: tuple[str, ...],
) -> MemcachePlace:
    """The place that the settings ask for.

    Args:
        meta: the settings.
        inventory: the host.
        toolchain: our own programs.
        series: the hardware.
        protocol: MemCache's transport.
        install: the MemCache of the host, for ``runner`` "host".
        python: the host's interpreter, likewise.
        directories: what a container must see of ours: MemCache's files and logs.
    """
    home_program = f"{meta.home}/{inventory.machine}-linux/bin/mmc_meta_service"
    if meta.runner == "host":
        env = memcache_env(toolchain, series, protocol, inventory, install)
        binary = meta.runtime == "binary"
        program = ((install.executable if install else None) or home_program) if binary else None
        return MemcachePlace(python, program, env, env, user=meta.user)
    # Nothing of the host's CANN and wheel is in the image: there it is where the vLLM Ascend images have it.
    boxed = inventory.model_copy(update={"ascend": IMAGE_ASCEND})
    libraries = tuple(f"{home}/{inventory.machine}-linux/lib64" for home in (meta.home, meta.fabric_home))
    package = MemcacheInstall(runtime="binary", home=meta.home, library_dirs=libraries)
    inside = package if meta.runtime == "binary" else None
    pool_env = memcache_env(toolchain, series, protocol, boxed, inside)
    # The wheel's MetaService and a client without memory load nothing of the driver, so that LD_LIBRARY_PATH stays
    # the image's own.
    search = {"LD_LIBRARY_PATH": ":".join(libraries)} if inside else {}
    meta_env = search if toolchain.emulation is None else pool_env
    return MemcachePlace(
        python=meta.python or IMAGE_PYTHON,
        program=home_program if inside else None,
        meta_env=meta_env,
        pool_env=pool_env,
        container=Container(
            image=meta.image or "",
            mounts=meta.mounts,
            directories=directories,
            scripts=str(PurePosixPath(toolchain.run_meta_script).parent),
        ),
        user=meta.user,
    )
