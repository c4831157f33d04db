"""Which process on this host is a container's first one: with docker it is no child of the unit that runs its client."""

from __future__ import annotations

import subprocess

LOOK_SECONDS = 5.0


def container_pid(name: str, docker: str = "docker") -> int | None:
    """Process id on this host of the first process of a running container; ``None`` when there is none to be found.

    Args:
        name: The container's name.
        docker: The program to ask.
    """
    try:
        result = subprocess.run(
            [docker, "inspect", "--type", "container", "--format", "{{.State.Pid}}", name],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    text = result.stdout.strip()
    # 0: the container exists and does not run.
    return int(text) or None if result.returncode == 0 and text.isascii() and text.isdigit() else None
