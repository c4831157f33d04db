"""``python -m kvtierd.endpoint --config FILE.json``: runs until SIGTERM; exit 69 when a port is taken."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from pathlib import Path

import uvloop

from kvtierd.endpoint.commands import Commands
from kvtierd.endpoint.config import load_config
from kvtierd.endpoint.control import ControlServer
from kvtierd.endpoint.listeners import PORT_TAKEN, bind
from kvtierd.endpoint.service import EndpointService
from kvtierd.errors import EndpointError

EXIT_PORT_TAKEN = 69  # EX_UNAVAILABLE
MOST_DESCRIPTORS = 65536
SWITCH_INTERVAL_SECONDS = 0.0005  # the thread that reads /proc must not hold up the relay


async def _serve(service: EndpointService, listeners: tuple[socket.socket, socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.stop)
    await service.start(listeners, ControlServer(service.config.control_socket, Commands(service).handle))
    gc.collect()
    gc.freeze()
    await service.run()


def _allow_many_connections() -> None:
    """Each link takes two descriptors, and the usual soft limit is 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: list[str] | None = None) -> int:
    """The process. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="kvtierd.endpoint", description="The local MemCache endpoint of kvtierd."
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see kvtierd.endpoint.config")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = load_config(options.config)
        listeners = bind(config.listen.meta), bind(config.listen.config_store)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        _allow_many_connections()

        async def run() -> None:
            await _serve(EndpointService(config, options.config), listeners)

        uvloop.run(run())
    except EndpointError as error:
        print(f"kvtierd.endpoint: {error}", file=sys.stderr)
        return EXIT_PORT_TAKEN if error.stable_code == PORT_TAKEN else error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
