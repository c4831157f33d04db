"""Runs ``docker run`` in the foreground for a unit: ``python -m kvtierd.engines.docker_run --name N -- run ...``.

What plain ``docker run`` does not do, and a supervisor needs: a container of the same name that an earlier run left
behind is removed first; SIGTERM becomes ``docker stop``, repeated until it has worked; however this ends, the
container ends with it; and the exit status is the container's. Standard library only, argument lists only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from types import FrameType

EXIT_NO_DOCKER = 78  # trying again cannot help
SHORT_SECONDS = 15.0
STOP_AGAIN_SECONDS = 2  # a stop that came before the container was there has stopped nothing


def main() -> int:
    """The process; its exit status is the container's."""
    parser = argparse.ArgumentParser(prog="kvtierd.engines.docker_run")
    parser.add_argument("--name", required=True)
    parser.add_argument("--docker", help="the program; default: by PATH")
    parser.add_argument("--stop-seconds", type=float, default=20.0)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    docker = shutil.which(options.docker or "docker")
    if docker is None:
        missing = (
            f"{options.docker} cannot be run" if options.docker else "docker is not installed, or not on PATH"
        )
        print(f"kvtierd: {missing}", file=sys.stderr)
        return EXIT_NO_DOCKER
    _quietly([docker, "rm", "--force", options.name])
    stops: list[subprocess.Popen[bytes]] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        # One that still waits must not be repeated: many programs take a second SIGTERM for impatience.
        if not stops or stops[-1].poll() is not None:
            stops[:] = [subprocess.Popen(
                [docker, "stop", "--time", str(int(options.stop_seconds)), options.name],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )]  # fmt: skip
        signal.alarm(STOP_AGAIN_SECONDS)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, stop)
    # A session of its own: our signals must not reach docker's client, which would pass them on and stop waiting.
    process = subprocess.Popen([docker, *arguments], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait()
    finally:
        signal.alarm(0)
        _quietly([docker, "rm", "--force", options.name])
    return code if code >= 0 else 128 - code


def _quietly(argv: list[str]) -> None:
    """A command whose failure does not matter, bounded."""
    try:
        subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            timeout=SHORT_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        print(f"kvtierd: {' '.join(argv[1:])} did not end", file=sys.stderr)


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
