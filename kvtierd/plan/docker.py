"""PURE: a unit's command inside a container, as an argument list. Never a shell, and no value of the environment in argv.

The container is the one of the vLLM Ascend practice guide: host network, the cards' devices, the driver's tools and
libraries from the host. The directory of MemCache's files is mounted as a directory, so that a file replaced in it is
seen inside; a single mounted file would stay the old one for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvtierd.plan.inventory import AscendInstall
from kvtierd.plan.model import NO_RESOURCES, Resources
from kvtierd.plan.toolchain import Toolchain

MANAGER_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
DRIVER_MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/Ascend/driver/tools/hccn_tool",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver/lib64/",
    "/usr/local/Ascend/driver/version.info",
    "/etc/ascend_install.info",
)
IMAGE_CANN_HOME: Final = "/usr/local/Ascend/ascend-toolkit/latest"  # in vllm-ascend's container images
IMAGE_ASCEND: Final = AscendInstall(driver_home="/usr/local/Ascend", cann_home=IMAGE_CANN_HOME)
IMAGE_PYTHON: Final = "python3"  # by the image's own PATH

_WRAPPER: Final = "kvtierd.engines.docker_run"


def docker_argv(
    toolchain: Toolchain,
    *,
    name: str,
    image: str,
    command: Sequence[str],
    env: Mapping[str, str],
    devices: Iterable[int] = (),
    directories: Iterable[str] = (),
    read_only: Iterable[str] = (),
    mounts: Iterable[str] = (),
    shm_size: str | None = None,
    stop_seconds: float = 20.0,
    resources: Resources = NO_RESOURCES,
) -> tuple[str, ...]:
    """The whole command line.

    Args:
        toolchain: for the wrapper that takes care of a container left behind and of an orderly stop.
        name: the container's name; the unit's id.
        image: the image.
        command: what runs inside.
        env: its environment. Only the names go into argv; docker takes the values from its own environment.
        devices: NPU numbers (/dev/davinciN).
        directories: kvtierd's own directories that must be seen inside under the same path.
        read_only: the same, and the container may not write to them.
        mounts: the operator's, ``source:target[:ro]``.
        shm_size: of the container's /dev/shm; ``None``: docker's default.
        stop_seconds: what ``docker stop`` gives it.
        resources: its CPUs and its memory; docker has no priority to give.
    """
    program = ("--docker", toolchain.docker) if toolchain.docker else ()
    argv = [
        toolchain.python, "-m", _WRAPPER, "--name", name, *program, "--stop-seconds", f"{stop_seconds:g}", "--",
        "run", "--rm", "--name", name, *([f"--shm-size={shm_size}"] if shm_size else []), "--net=host",
    ]  # fmt: skip
    cards = [f"/dev/davinci{number}" for number in devices]
    for device in (*cards, *(MANAGER_DEVICES if cards else ())):
        argv += ["--device", device]
    for path in DRIVER_MOUNTS if cards else ():
        argv += ["-v", f"{path}:{path}"]
    for directory in dict.fromkeys(directories):
        argv += ["-v", f"{directory}:{directory}"]
    for directory in dict.fromkeys(read_only):
        argv += ["-v", f"{directory}:{directory}:ro"]
    for mount in mounts:
        argv += ["-v", mount]
    if resources.cpus:
        argv.append(f"--cpuset-cpus={resources.cpus}")
    if resources.memory_max_bytes is not None:
        argv.append(f"--memory={resources.memory_max_bytes}b")
    for variable in sorted(env):
        argv += ["-e", variable]
    return (*argv, image, *command)


def exec_argv(
    toolchain: Toolchain, *, name: str, command: Sequence[str], variables: Iterable[str] = ()
) -> tuple[str, ...]:
    """A further command in a container that runs, with these variables of docker's own environment."""
    argv = [toolchain.docker or "docker", "exec"]
    for variable in variables:
        argv += ["-e", variable]
    return (*argv, name, *command)


def container_of(argv: Sequence[str]) -> tuple[str, str] | None:
    """The container that a unit's command runs in: its name and the docker program; ``None``: it runs in none."""
    words = list(argv)
    if _WRAPPER not in words:
        return None
    own = words[words.index(_WRAPPER) + 1 :]
    own = own[: own.index("--")] if "--" in own else own
    options = dict(zip(own[::2], own[1::2], strict=False))
    return (options["--name"], options.get("--docker", "docker")) if "--name" in options else None
