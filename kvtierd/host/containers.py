"""What docker knows of a unit's container: its first process, which is no child of the unit, and its hosts file."""

from __future__ import annotations

import subprocess
from pathlib import Path

LOOK_SECONDS = 5.0


def container_pid(name: str, docker: str = "docker") -> int | None:
    """Process id on this host of the first process of a running container; ``None`` when there is none to be found.

    Args:
        name: The container's name.
        docker: The program to ask.
    """
    text = _inspect(name, docker, "{{.State.Pid}}")
    # 0: the container exists and does not run.
    return int(text) or None if text.isascii() and text.isdigit() else None


def container_hosts_file(name: str, docker: str = "docker") -> Path | None:
    """The file on this host that a container sees as its /etc/hosts; ``None``: docker does not say.

    Docker copies the host's when it makes the container, also with the host's network; later changes of the host's do not
    reach it. It is mounted as a file: whoever changes it must write in place.
    """
    text = _inspect(name, docker, "{{.HostsPath}}")
    return Path(text) if text.startswith("/") and text.isprintable() else None


def _inspect(name: str, docker: str, form: str) -> str:
    """One answer of docker; "" for none."""
    try:
        result = subprocess.run(
            [docker, "inspect", "--type", "container", "--format", form, name],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
