"""One node of a cluster as a process of its own: network and coordinator, nothing else.

``peer_process.py CONFIG``: CONFIG is JSON: node, cluster (the settings' table), state (directory), out (file). Every
standing goes to ``out`` as one line of JSON, with the CLOCK_BOOTTIME at which it was seen; commands come on stdin, one
a line, answered by a line on stdout: ``promote``, ``hand_over NODE``.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.cluster.following import Following
from kvtierd.cluster.lease import LeaseCoordinator, elector_config
from kvtierd.cluster.master_store import MasterStore
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.observer import ObserverCoordinator
from kvtierd.cluster.static import StaticCoordinator
from kvtierd.cluster.tls import PeerTls
from kvtierd.errors import KvtierError
from kvtierd.settings.cluster import ClusterSettings

LOOK_SECONDS = 0.02


def make_coordinator(settings, node, network, state):
    if settings.mode == "static":
        return StaticCoordinator(network, MasterStore(state / "master", settings.name))
    following = Following(network.board, SeenEpochStore(state / "seen", settings.name), network.refusals)
    if node not in settings.voters:
        return ObserverCoordinator(network, following)
    config = elector_config(settings, node)
    return LeaseCoordinator(config, network, EpochStore(state / "epoch", config), following)


async def main(path):
    config = json.loads(Path(path).read_text())
    node, settings = config["node"], ClusterSettings.model_validate(config["cluster"])
    network = PeerNetwork(settings, node, PeerTls(settings), greet_seconds=1.0)
    coordinator = make_coordinator(settings, node, network, Path(config["state"]))
    with Path(config["out"]).open("a", buffering=1) as out:

        def tell(standing, how):
            line = {
                "at": boottime_seconds(),
                "how": how,
                "role": standing.role,
                "epoch": standing.epoch,
                "master": standing.master,
                "why": standing.why,
                "until": min(standing.until_seconds, 1e300),
                "serve_after": standing.serve_after_seconds,
                "refused": {f"{p}/{c}": n for (p, c), n in network.refusals.counts.items()},
            }
            out.write(json.dumps(line) + "\n")

        async def look():
            while True:
                tell(coordinator.standing, "looked")
                await asyncio.sleep(LOOK_SECONDS)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(network.run())
            tasks.create_task(coordinator.run(lambda standing: tell(standing, "told")))
            tasks.create_task(look())
            tasks.create_task(commands(coordinator))


async def commands(coordinator):
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := (await reader.readline()).decode().split():
        try:
            if line[0] == "promote":
                await coordinator.promote()
            else:
                await coordinator.hand_over(line[1])
            print("done", flush=True)
        except KvtierError as error:
            print(error.stable_code, flush=True)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1]))
