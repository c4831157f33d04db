"""Real MemCache for tests: a MetaService, pool holders and raw clients on the emulated driver.

One ``RealTier`` is one private pool: its emulation root, its ports, its processes. Several run side by side.
Use it through the fixture ``real_tier``::

    @pytest.mark.real
    def test_something(real_tier):
        real_tier.start_meta()
        real_tier.start_pool(dram="64MB")
        client = real_tier.client()                     # "F": a full client that brings no memory
        reader = real_tier.client(init_bm=False)        # "S": lookups only, takes no rank
        assert client.put("key", size=4096) == 0
        assert client.get_into("key", size=4096) == "ok"

Everything ends by process id at teardown, also what a test has forgotten or broken.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import kvtierd.memcache
from kvtierd.emulator.build import EmulatedDriver
from kvtierd.emulator.launch import cleanup
from kvtierd.errors import MemcacheError
from kvtierd.memcache.rest import MetaClient
from kvtierd.workload.demo import free_ports

SCRIPTS = Path(kvtierd.memcache.__file__).parent
RAW_CLIENT = Path(__file__).with_name("raw_client.py")
T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_seconds: float, what: str) -> T:
    """Polls until the condition is truthy and returns its value; an AssertionError names ``what`` otherwise."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds:g} s: {what}")
        time.sleep(0.02)


def install_plugin(directory: Path, name: str, text: str) -> None:
    """Makes a directory for PYTHONPATH hold a plugin as pip would have installed it: one module, one entry point."""
    module = name.replace("-", "_")
    (directory / f"{module}.py").write_text(textwrap.dedent(text))
    info = directory / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvtierd.plugins]\n{name} = {module}\n")


class Unit:
    """One process in the emulation. ``log`` holds its stdout and stderr."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int:
        """The exit status (negative: the signal). Raises subprocess.TimeoutExpired."""
        return self.process.wait(timeout_seconds)

    def stop(self, timeout_seconds: float = 15.0) -> int:
        """SIGTERM and wait: the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_seconds)

    def kill(self) -> None:
        """SIGKILL and wait. Fine on a process that has ended."""
        if self.alive:
            self.process.kill()
        self.process.wait(10)

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def await_output(self, text: str, timeout_seconds: float) -> str:
        """The first line that contains ``text``. Fails at once when the process has ended without it."""

        def found() -> str | None:
            ended = not self.alive
            line = next((line for line in self.output().splitlines() if text in line), None)
            assert line or not ended, (
                f"{self.name} ended ({self.process.returncode}):\n{self.output()[-2000:]}"
            )
            return line

        line = wait_until(found, timeout_seconds, f"{self.name} says {text!r}")
        assert line is not None
        return line


class RawClient:
    """A MemCache client in a process of its own. Every call has a limit; none blocks the test for ever.

    The methods are those of ``raw_client.Client``: ``put(key, size)``, ``get_into(key, size)`` (``"ok"``, ``"miss"``,
    ``"wrong"``), ``exist``, ``put_many``, ``get_many``, ``exist_many``, ``alloc_many``, ``remove``, ``remove_all``,
    ``rank``, ``close``, ``start_load(prefix, size, threads)``, ``stop_load()``.
    """

    def __init__(self, unit: Unit, answers: int) -> None:
        self.unit = unit
        self._next_id = 0
        self._waiting: dict[int, concurrent.futures.Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, args=(answers,), daemon=True)
        self._reader.start()

    def submit(self, op: str, **arguments: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts a call; the future gives ``{"result", "seconds"}`` or ``{"error", "seconds"}``."""
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        with self._lock:
            self._next_id += 1
            self._waiting[self._next_id] = future
            request = json.dumps({"id": self._next_id, "op": op, "arguments": arguments})
            assert self.unit.process.stdin is not None
            self.unit.process.stdin.write(request + "\n")
            self.unit.process.stdin.flush()
        return future

    def call(self, op: str, *, timeout_seconds: float = 20.0, **arguments: Any) -> Any:
        """Makes a call and returns its result. Raises TimeoutError, or AssertionError when it failed."""
        answer = self.submit(op, **arguments).result(timeout_seconds)
        assert "error" not in answer, f"{self.unit.name} {op}: {answer['error']}"
        return answer["result"]

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)

        def call(*positional: Any, **arguments: Any) -> Any:
            names = {"init": ("device", "init_bm")}.get(op, ("keys",) if op.endswith("_many") else ("key",))
            if op == "start_load":
                names = ("prefix",)
            return self.call(op, **dict(zip(names, positional, strict=False)), **arguments)

        return call

    def leave(self, timeout_seconds: float = 30.0) -> int:
        """Closes the client in good order (2.5 s, under load more) and ends its process: the exit status."""
        self.call("close", timeout_seconds=timeout_seconds)
        assert self.unit.process.stdin is not None
        self.unit.process.stdin.close()
        return self.unit.wait(timeout_seconds)

    def _read(self, answers: int) -> None:
        with os.fdopen(answers, encoding="utf-8") as lines:
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(answer["id"])
                future.set_result(answer)
        with self._lock:
            for future in self._waiting.values():
                future.set_exception(AssertionError(f"{self.unit.name} ended before it answered"))
            self._waiting.clear()


class Lookups:
    """Keeps an S client asking, one call at a time in each of ``threads`` threads."""

    def __init__(self, client: RawClient, keys: list[str], threads: int = 2) -> None:
        self.client, self.keys, self.stopping = client, keys, threading.Event()
        self.longest_seconds, self.calls, self.hits_at = 0.0, 0, 0.0
        self.threads = [threading.Thread(target=self._run, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        while not self.stopping.is_set():
            answer = self.client.submit("exist_many", keys=self.keys).result(90)
            self.longest_seconds = max(self.longest_seconds, answer["seconds"])
            self.calls += 1
            if 1 in answer.get("result", []):
                self.hits_at = time.monotonic()
            time.sleep(0.002)

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(90)


class RealTier:
    """One real MemCache pool in an emulation of its own.

    Attributes:
        root: The emulation root; ``work`` below it holds configurations and logs.
        meta_port, store_port, metrics_port: Where the MetaService is told to listen.
        client_meta_port, client_store_port: Where pool holders and clients are told to connect. Set them before
            starting clients to put something in between. ``client_host`` too.
        enter: What is put in front of every command that is started from now on, such as ``NetLab.enter(1)``.
    """

    def __init__(self, root: Path, driver: EmulatedDriver, *, python: str = sys.executable) -> None:
        self.root, self.driver, self.python = root, driver, python
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.meta_port, self.store_port, self.metrics_port = free_ports(3)
        self.client_meta_port, self.client_store_port = self.meta_port, self.store_port
        self.client_host = "127.0.0.1"
        self.enter: list[str] = []
        self.units: list[Unit] = []

    # -- processes -------------------------------------------------------------------------------

    def spawn(
        self, name: str, argv: list[str], env: Mapping[str, str], *, pass_fds: tuple[int, ...] = ()
    ) -> Unit:
        """Starts a command in the emulation with this environment, the driver's, PATH and PYTHONPATH."""
        log = self.work / f"{name}-{len(self.units)}.log"
        launcher = [sys.executable, "-m", "kvtierd.emulator.launch", "--root", str(self.root), "--"]
        passed_on = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
        with log.open("w") as output:
            process = subprocess.Popen(
                [*self.enter, *launcher, *argv],
                env={**passed_on, "PYTHONHASHSEED": "0", **self.driver.env(), **env},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=pass_fds,
            )
        unit = Unit(name, process, log)
        self.units.append(unit)
        return unit

    def start_meta(
        self,
        *,
        wait: bool = True,
        script: Path = SCRIPTS / "run_meta.py",
        conf: Mapping[str, str] | None = None,
    ) -> Unit:
        """Starts the MetaService and waits for /health. ``conf`` adds or replaces keys of mmc-meta.conf."""
        path = self.write_meta_conf(conf or {})
        unit = self.spawn("meta", [self.python, str(script)], {"MMC_META_CONFIG_PATH": str(path)})
        if wait:
            self.await_health(unit)
        return unit

    def start_pool(
        self,
        *,
        dram: str = "64MB",
        max_dram: str = "64MB",
        device: int = 0,
        init_deadline_seconds: float = 20.0,
        wait: bool = True,
    ) -> Unit:
        """Starts a pool holder ("P") and waits until it has joined."""
        conf = self.write_local_conf(f"pool-{device}", dram=dram, max_dram=max_dram)
        argv = [self.python, str(SCRIPTS / "run_pool.py"), "--device", str(device)]
        argv += ["--init-deadline", str(init_deadline_seconds)]
        unit = self.spawn(f"pool-{device}", argv, {"MMC_LOCAL_CONFIG_PATH": str(conf)})
        if wait:
            unit.await_output("kvtierd-pool ready", init_deadline_seconds + 5)
        return unit

    def client(
        self,
        *,
        init_bm: bool = True,
        dram: str = "0",
        max_dram: str = "64MB",
        init: bool = True,
        device: int = 0,
        timeout_seconds: float = 20.0,
    ) -> RawClient:
        """Starts a raw client: "F" by default, "S" with ``init_bm=False``."""
        kind = "full" if init_bm else "lookup"
        conf = self.write_local_conf(f"client-{kind}-{len(self.units)}", dram=dram, max_dram=max_dram)
        read_end, write_end = os.pipe()
        try:
            unit = self.spawn(
                f"client-{kind}",
                [self.python, str(RAW_CLIENT), str(write_end)],
                {"MMC_LOCAL_CONFIG_PATH": str(conf)},
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)
        client = RawClient(unit, read_end)
        if init:
            result = client.call("init", device=device, init_bm=init_bm, timeout_seconds=timeout_seconds)
            assert result == 0, f"init returned {result}:\n{unit.output()[-2000:]}"
        return client

    def purge(self, *, deadline_seconds: float = 10.0) -> Unit:
        """Runs run_purge.py to its end."""
        conf = self.write_local_conf("purge", dram="0", max_dram="64MB")
        argv = [self.python, str(SCRIPTS / "run_purge.py"), "--deadline", str(deadline_seconds)]
        unit = self.spawn("purge", argv, {"MMC_LOCAL_CONFIG_PATH": str(conf)})
        unit.wait(deadline_seconds + 5)
        return unit

    # -- configuration ---------------------------------------------------------------------------

    def write_meta_conf(self, more: Mapping[str, str]) -> Path:
        """Writes mmc-meta.conf. Log files land in ``root/log/memcache_hybrid``."""
        keys = {
            "ock.mmc.meta_service_url": f"tcp://127.0.0.1:{self.meta_port}",
            "ock.mmc.meta_service.config_store_url": f"tcp://127.0.0.1:{self.store_port}",
            "ock.mmc.meta_service.metrics_url": f"http://127.0.0.1:{self.metrics_port}",
            "ock.mmc.log_level": "info",
            **more,
        }
        return self._write_conf("mmc-meta.conf", keys)

    def write_local_conf(self, name: str, *, dram: str, max_dram: str) -> Path:
        """Writes an mmc-local.conf. ``max_dram`` must be the same for all members of one pool."""
        keys = {
            "ock.mmc.meta_service_url": f"tcp://{self.client_host}:{self.client_meta_port}",
            "ock.mmc.local_service.config_store_url": f"tcp://{self.client_host}:{self.client_store_port}",
            "ock.mmc.local_service.world_size": "16",
            "ock.mmc.local_service.protocol": "host_shm",
            "ock.mmc.local_service.dram.size": dram,
            "ock.mmc.local_service.max.dram.size": max_dram,
            "ock.mmc.log_level": "info",
        }
        return self._write_conf(f"{name}.conf", keys)

    def _write_conf(self, name: str, keys: Mapping[str, str]) -> Path:
        path = self.work / name
        path.write_text("".join(f"{key} = {value}\n" for key, value in keys.items()), encoding="utf-8")
        return path

    # -- looking ---------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Where the MetaService must listen."""
        return tuple(("127.0.0.1", port) for port in (self.meta_port, self.store_port, self.metrics_port))

    @property
    def meta_client(self) -> MetaClient:
        """A client of the MetaService's HTTP interface."""
        return MetaClient(f"http://127.0.0.1:{self.metrics_port}")

    def ask(self, question: Callable[[MetaClient], Coroutine[Any, Any, T]]) -> T:
        """``tier.ask(MetaClient.health)``. In a coroutine: ``await tier.meta_client.health()``."""
        return asyncio.run(question(self.meta_client))

    def healthy(self) -> bool:
        """Whether /health says ok right now."""
        try:
            return self.ask(MetaClient.health).ok
        except MemcacheError:
            return False

    def await_health(self, unit: Unit, timeout_seconds: float = 15.0) -> None:
        """Waits for /health; fails at once when the MetaService has ended."""

        def healthy() -> bool:
            assert unit.alive, f"the MetaService ended ({unit.process.returncode}):\n{unit.output()[-2000:]}"
            return self.healthy()

        wait_until(healthy, timeout_seconds, "/health says ok")

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Kills what still runs, clients first, and removes the pool's memory."""
        for unit in reversed(self.units):
            unit.kill()
            if unit.process.stdin is not None:
                with contextlib.suppress(OSError):
                    unit.process.stdin.close()
        cleanup(self.root)
