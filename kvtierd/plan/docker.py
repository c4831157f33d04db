"""PURE: a unit's command inside a container, as an argument list. Never a shell, and no value of the environment in argv.

The container is the one of the vLLM Ascend practice guide: host network, the cards' devices, the driver's tools and
libraries from the host. The directory of MemCache's files is mounted as a directory, so that a file replaced in it is
seen inside; a single mounted file would stay the old one for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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


def docker_argv(
    toolchain: Toolchain,
    *,
    name: str,
    image: str,
    command: Sequence[str],
    env: Mapping[str, str],
    devices: Iterable[int] = (),
    directories: Iterable[str] = (),
    mounts: Iterable[str] = (),
    shm_size: str = "500g",
    stop_seconds: float = 20.0,
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
        mounts: the operator's, ``source:target[:ro]``.
        shm_size: of the container's /dev/shm.
        stop_seconds: what ``docker stop`` gives it.
    """
    argv = [
        toolchain.python, "-m", "kvtierd.engines.docker_run", "--name", name, "--stop-seconds", f"{stop_seconds:g}", "--",
        "run", "--rm", "--name", name, f"--shm-size={shm_size}", "--net=host",
    ]  # fmt: skip
    cards = [f"/dev/davinci{number}" for number in devices]
    for device in (*cards, *(MANAGER_DEVICES if cards else ())):
        argv += ["--device", device]
    for path in DRIVER_MOUNTS if cards else ():
        argv += ["-v", f"{path}:{path}"]
    for directory in dict.fromkeys(directories):
        argv += ["-v", f"{directory}:{directory}"]
    for mount in mounts:
        argv += ["-v", mount]
    for variable in sorted(env):
        argv += ["-e", variable]
    return (*argv, image, *command)
