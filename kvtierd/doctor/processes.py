"""The processes of the host that is looked at, by its ``/proc``: engines, their workers, and who started them.

Of an environment only the variables that are asked for are kept: the rest may hold secrets.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvtierd.checks import CannotTellError
from kvtierd.host.view import HostView
from kvtierd.units.procfs import parse_stat

MAX_PROCESSES: Final = 50_000
SEED: Final = "PYTHONHASHSEED"
WANTED: Final = (SEED, "ASCEND_HOME_PATH")

# What engines call their processes: setproctitle's names (with and without "VLLM::"), cut to 15 characters in comm.
WORKER: Final = re.compile(
    r"VLLM::?(EngineCore|Worker)|EngineCore(_DP\d+)?\b|VLLM_?Worker|VllmWorker|Worker(Proc)?(_[A-Z]+\d+)+|"
    r"sglang::(scheduler|detokenizer|data_parallel)"
)
SERVER: Final = re.compile(
    r"\bvllm(\s|\S*/vllm\s)+serve\b|/vllm\s+serve\b|vllm\.entrypoints|sglang\.launch_server|sglang\s+serve\b"
)
BOX: Final = re.compile(
    r"(?:docker|containerd|crio|libpod|kubepods)\S*?([0-9a-f]{12,64})", flags=re.IGNORECASE
)
REAPERS: Final = frozenset(
    {"systemd", "init", "containerd-shim", "conmon", "tini", "dumb-init", "docker-init"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One process. ``env`` is ``None`` where we may not read it, else the wanted variables that are set.

    ``box`` names the container it is in, "" for the host itself.
    """

    pid: int
    ppid: int
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] | None
    box: str = ""

    @property
    def command(self) -> str:
        """The command line, for looking only: never show it."""
        return " ".join(self.argv)

    @property
    def is_worker(self) -> bool:
        """A part of an engine that holds a card, or computes for one."""
        return WORKER.match(self.command) is not None or WORKER.match(self.name) is not None

    @property
    def is_server(self) -> bool:
        """An engine's API server: the process that an operator starts."""
        program = self.argv[0].rsplit("/", 1)[-1]
        # Not the shell, the sudo or the docker client that started it.
        ran = re.fullmatch(r"python[\d.]*|vllm|sglang", program) is not None
        return ran and not self.is_worker and SERVER.search(self.command) is not None

    @property
    def shown(self) -> str:
        """Its name and number. The command line is not shown: it may hold a key."""
        title = self.command.split(" ", 1)[0].rsplit("/", 1)[-1]
        return f"{title if self.is_worker and title else self.name} (pid {self.pid})"


def read_processes(view: HostView) -> dict[int, Process]:
    """All processes by id; those that end meanwhile, and zombies, are left out.

    Raises:
        CannotTellError: there is no /proc, or too many processes in it.
    """
    pids = [int(name) for name in view.names("/proc") if name.isascii() and name.isdigit()]
    if not pids:
        raise CannotTellError("/proc shows no processes")
    if len(pids) > MAX_PROCESSES:
        raise CannotTellError(f"/proc shows {len(pids)} processes: too many to look at")
    found = (_read(view, pid) for pid in pids)
    return {process.pid: process for process in found if process is not None}


def engine_processes(processes: Mapping[int, Process]) -> tuple[Process, ...]:
    """API servers and workers, by id."""
    return tuple(p for _, p in sorted(processes.items()) if p.is_server or p.is_worker)


def orphans(processes: Mapping[int, Process]) -> tuple[Process, ...]:
    """Workers above which nobody is left who could end them.

    A killed parent's children go to process 1 or to a subreaper (systemd --user, a container's shim). Process 1 of a
    container may be the API server itself, and a script that uses vLLM as a library is its workers' parent too.
    """
    return tuple(p for _, p in sorted(processes.items()) if p.is_worker and _is_left(p, processes))


def _is_left(process: Process, processes: Mapping[int, Process]) -> bool:
    top = next((a for a in _ancestors(process, processes) if not a.is_worker), None)
    if top is None:
        return True
    return not top.is_server and (top.pid == 1 or top.name in REAPERS)


def families(processes: Mapping[int, Process]) -> dict[int, tuple[Process, ...]]:
    """API server -> itself and its workers."""
    servers = [p for p in engine_processes(processes) if p.is_server]
    return {
        server.pid: (
            server,
            *(p for p in engine_processes(processes) if server in tuple(_ancestors(p, processes))),
        )
        for server in servers
    }


def _ancestors(process: Process, processes: Mapping[int, Process]) -> Iterable[Process]:
    seen = {process.pid}
    while (parent := processes.get(process.ppid)) is not None and parent.pid not in seen:
        seen.add(parent.pid)
        yield parent
        process = parent


def _read(view: HostView, pid: int) -> Process | None:
    try:
        stat = parse_stat(view.read(f"/proc/{pid}/stat").encode())
    except (OSError, ValueError, IndexError):
        return None
    if stat.ended:
        return None
    argv = tuple((view.text(f"/proc/{pid}/cmdline") or "").strip("\0").split("\0"))
    # Only of engines: they are what it is asked of, and a host has thousands of others.
    shell = Process(pid, stat.ppid, stat.comm, argv, None)
    if shell.is_worker or shell.is_server:
        return dataclasses.replace(shell, env=_environment(view, pid), box=_box(view, pid))
    return shell


def _box(view: HostView, pid: int) -> str:
    match = BOX.search(view.text(f"/proc/{pid}/cgroup") or "")
    return match[1][:12] if match else ""


def _environment(view: HostView, pid: int) -> dict[str, str] | None:
    try:
        text = view.read(f"/proc/{pid}/environ")
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals and name in WANTED}
