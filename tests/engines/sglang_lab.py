"""A real SGLang on the CPU under kvtierd's supervisor, for the tests beside this file."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
from kvtierd_sglang.plugin import SglangCpuDriver

from kvtierd.engines.proof import GenerationProof
from kvtierd.observe.log_lines import LineObserver, watch_output
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import HttpCall, UnitSpec
from kvtierd.plan.planner import make_plan
from kvtierd.plan.toolchain import Toolchain
from kvtierd.provision.carry_out import sync_files
from kvtierd.settings import load_settings
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.supervisor import Supervisor
from kvtierd.units.views import UnitView

DRIVER = SglangCpuDriver()
STAMP = ".kvtierd-stamp"
REQUEST_SECONDS = 60.0


def environment_directory() -> Path:
    """Where ``plugins/kvtierd-sglang/engine-env/setup.py`` puts SGLang when it is not told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvtierd" / "engines" / "sglang-cpu-0.5.23"


def make_model(directory: Path, python: Path) -> Path:
    """A model with random weights, made with the engine's own interpreter."""
    script = Path(__file__).parents[2] / "plugins/kvtierd-vllm/src/kvtierd_vllm/tiny_model.py"
    argv = [str(python), str(script), str(directory), "--size", "tiny"]
    subprocess.run(argv, check=True, timeout=180, capture_output=True)
    return directory


def engine_spec(
    base: Path, model: Path, python: Path, *, name: str, port: int, args: str, settings_lines: str = ""
) -> UnitSpec:
    """The unit that kvtierd plans for these settings, its files written."""
    settings = base / f"{name}.toml"
    settings.write_text(
        f'[node]\nname = "lab"\nseries = "emulated"\n[paths]\nstate = "{base}/state"\n[pool]\ndram = "64MiB"\n'
        f'[[engine]]\nname = "{name}"\nplugin = "sglang-cpu"\nmodel = "{model}"\nport = {port}\nl2 = "1GB"\n'
        f'python = "{python}"\nversion = "0.5.23"\n'
        f'env = {{ HF_HUB_OFFLINE = "1", TRANSFORMERS_OFFLINE = "1", DO_NOT_TRACK = "1", HOME = "{base}" }}\n'
        f"{settings_lines}[engine.args]\n"
        'l3 = "on"\npage-size = 64\ndtype = "bfloat16"\ncontext-length = 8192\nmax-total-tokens = 65536\n'
        f'hicache-storage-prefetch-policy = "wait_complete"\n{args}\n'
    )
    plan = make_plan(
        load_settings(settings, {}),
        Inventory(hostname="lab", memory_total_bytes=64 * 2**30, memory_available_bytes=64 * 2**30),
        {DRIVER.name: DRIVER},
        Toolchain(python="python3", run_meta_script="meta.py", run_pool_script="pool.py"),
    )
    assert not [refusal for refusal in plan.refusals if refusal.code.startswith("engine.")]
    (unit,) = (unit for unit in plan.units if unit.kind == "engine")
    sync_files(tuple(file for file in plan.files if file.path in unit.files))
    return unit.model_copy(update={"after": ()})  # no MemCache here: its L3 is files


class Engine:
    """One engine: its unit, what it is asked, and what it says."""

    def __init__(self, lab: Lab, spec: UnitSpec) -> None:
        self.lab, self.spec = lab, spec
        self.ready_after_seconds = 0.0

    @property
    def view(self) -> UnitView:
        """The unit as ``kvtierctl status`` shows it."""
        return self.lab.views[self.spec.id]

    def wait_for(self, *states: str, seconds: float) -> UnitView:
        """Until the unit is in one of these states."""
        until = time.monotonic() + seconds
        while (view := self.view).state not in states:
            if time.monotonic() > until:
                tail = "\n".join(view.last_lines)
                raise AssertionError(f"{self.spec.id} is {view.state} ({view.reason}), not {states}:\n{tail}")
            time.sleep(0.1)
        return view

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """One request to the engine's port."""
        connection = http.client.HTTPConnection("127.0.0.1", self.spec.ports[0], timeout=REQUEST_SECONDS)
        with contextlib.closing(connection):
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def call(self, call: HttpCall) -> bytes:
        """A call as the daemon makes it."""
        status, body = self.request(call.method, call.path, call.body)
        assert status in call.ok, (call.path, status, body)
        return body

    def complete(self, prompt: str, tokens: int = 4) -> bytes:
        """The answer to a prompt, over the native API."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        status, body = self.request("POST", "/generate", {"text": prompt, "sampling_params": sampling})
        assert status == 200, body
        return body

    def metric(self, name: str) -> float:
        """A metric, summed over its labels; 0 while it is not there."""
        _, body = self.request("GET", "/metrics")
        lines = (line for line in body.decode().splitlines() if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def log_lines(self) -> list[str]:
        """All that it wrote."""
        path = self.lab.base / "log" / f"{self.spec.id}.log"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Its processes, as they are now."""
        pid = self.view.pid
        if pid is None or not psutil.pid_exists(pid):
            return []
        main = psutil.Process(pid)
        return [main, *main.children(recursive=True)]


class Lab:
    """Runs the supervisor on a thread, on the backend that needs no systemd."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.views: dict[str, UnitView] = {}  # replaced by the supervisor's thread after each pass
        self._specs: list[UnitSpec] = []
        self._loop = asyncio.new_event_loop()
        self._ending = False
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )
        self._made = threading.Event()
        self.supervisor: Supervisor
        self._thread.start()
        self._made.wait(10)

    async def _run(self) -> None:
        backend = ShimBackend(self.base / "run", self.base / "log")
        proof = GenerationProof({DRIVER.name: DRIVER}.get)
        find_driver = {DRIVER.name: DRIVER}.get
        self.supervisor = Supervisor(backend, extra_checks={"engine": proof.check})
        lines = LineObserver(backend.follow)
        self._made.set()
        while not self._ending:
            await self.supervisor.step(tuple(self._specs))
            watch_output(lines, self.supervisor, tuple(self._specs), find_driver)
            self.views = {view.id: view for view in self.supervisor.views()}
            await self.supervisor.wait(0.5)
        for process in await backend.list():
            if process.running:
                await backend.kill(process.unit_id)
        await lines.close()
        await self.supervisor.close()
        await backend.close()

    def start(self, spec: UnitSpec) -> Engine:
        """Puts the unit into the plan."""
        self._specs.append(spec)
        engine = Engine(self, spec)
        until = time.monotonic() + 10
        while spec.id not in self.views and time.monotonic() < until:
            time.sleep(0.02)
        return engine

    def remove(self, engine: Engine) -> None:
        """Takes the unit out of the plan: it is stopped."""
        self._specs.remove(engine.spec)

    def do(self, what: Callable[[Supervisor], Any]) -> None:
        """Asks the supervisor something on its own thread."""

        async def ask() -> None:
            what(self.supervisor)

        self._wait(ask())

    def _wait(self, what: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(10)

    def close(self) -> None:
        """Ends everything that still runs."""
        self._ending = True
        self._thread.join(60)
