"""What the tests of unit backends share: units that are Python text, and waiting for what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from kvtierd.plan.model import UnitSpec
from kvtierd.units import procfs
from kvtierd.units.backend import UnitBackend, UnitProcess
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.systemd_backend import SystemdBackend

Factory = Callable[[], UnitBackend]


def make_shim(base: Path) -> ShimBackend:
    return ShimBackend(base / "run", base / "log", log_max_bytes=64 * 1024, log_keep=3)


def make_systemd(base: Path) -> SystemdBackend:
    return SystemdBackend(base / "run")


BACKENDS: dict[str, Callable[[Path], UnitBackend]] = {"shim": make_shim, "systemd": make_systemd}
# Set by tests/systemd for the tests that it runs inside a booted systemd of its own; nowhere else may they start units.
IN_GUEST = os.environ.get("TESTS_RUN_IN_GUEST") == "1"


@contextlib.asynccontextmanager
async def backends(kind: str, base: Path) -> AsyncIterator[Factory]:
    """Makes backends on one state, as successive daemons would; nothing of theirs is left at the end."""
    made: list[UnitBackend] = []

    def make() -> UnitBackend:
        made.append(BACKENDS[kind](base))
        return made[-1]

    yield make
    last = make()
    for process in await last.list():
        if process.running:
            await last.kill(process.unit_id)
            await wait_ended(last, process.unit_id)
        await last.forget(process.unit_id)
    for backend in made:
        await backend.close()


def unit(code: str, name: str = "a", **changes: object) -> UnitSpec:
    """A unit that runs this Python text."""
    fields: dict[str, object] = {
        "id": f"kvtier-engine-{name}",
        "kind": "engine",
        "name": name,
        "argv": (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code)),
    }
    return UnitSpec.model_validate(fields | changes)


SLEEPER = "import time\nprint('up')\ntime.sleep(300)"
# Ignores TERM, and leaves a grandchild in another session, reparented, that ignores it too.
STUBBORN_TREE = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(1, b"grandchild %d\\n" % os.getpid())
            time.sleep(300)
        os._exit(0)
    if os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(300)
    os.wait()
    os.write(1, b"main %d\\n" % os.getpid())
    LAST
"""


# The same in one session: that is all that can be found once the shim has been killed.
SESSION_TREE = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(1, b"grandchild %d\\n" % os.getpid())
            time.sleep(300)
        os._exit(0)
    if os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(300)
    os.wait()
    os.write(1, b"main %d\\n" % os.getpid())
    time.sleep(300)
"""


async def wait_ended(backend: UnitBackend, unit_id: str, seconds: float = 15.0) -> UnitProcess:
    deadline = time.monotonic() + seconds
    while True:
        process = await backend.find(unit_id)
        assert process is not None
        if not process.running:
            return process
        assert time.monotonic() < deadline, f"{unit_id} still runs: {process}"
        await backend.wait_change(0.2)


async def wait_lines(backend: UnitBackend, unit_id: str, count: int, seconds: float = 10.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while len(lines := await backend.tail(unit_id, 50)) < count:
        assert time.monotonic() < deadline, f"only {lines}"
        await asyncio.sleep(0.02)
    return lines


async def tree_pids(backend: UnitBackend, unit_id: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in (line.split() for line in await wait_lines(backend, unit_id, 3))}


def is_alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and not stat.ended


DAEMON = """
import asyncio, sys
from pathlib import Path
from kvtierd.plan.model import UnitSpec
sys.path.append(sys.argv[3])
from backend_lab import BACKENDS

async def main():
    backend = BACKENDS[sys.argv[1]](Path(sys.argv[2]))
    for text in sys.argv[4:]:
        print((await backend.start(UnitSpec.model_validate_json(text))).pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@contextlib.contextmanager
def daemon_with(kind: str, base: Path, *specs: UnitSpec) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that started these units, and their pids."""
    argv = [
        sys.executable,
        "-c",
        DAEMON,
        kind,
        str(base),
        str(Path(__file__).parent),
        *(spec.model_dump_json() for spec in specs),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as daemon:
        try:
            assert daemon.stdout is not None
            yield daemon, [int(daemon.stdout.readline()) for _ in specs]
        finally:
            daemon.kill()
