"""An engine one of whose clients does not come back after a change of master is drained and started anew, no other one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from cluster_lab import Cluster, hits, wait_until
from lab import install_plugin

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(400)]

# The reference engine, and beside it a process with a client of its own, as the schedulers of real engines are.
MODULE = """
import dataclasses
import sys

from kvtierd_refengine.plugin import RefengineDriver

from kvtierd.hookspecs import hookimpl

PARENT = '''
import signal, subprocess, sys
client = ";".join((
    "import time", "from memcache_hybrid import DistributedObjectStore", "store = DistributedObjectStore()",
    "print('second client', store.init(0, False), flush=True)", "time.sleep(3600)",
))
children = [subprocess.Popen([sys.executable, "-c", client]), subprocess.Popen(sys.argv[1:])]
signal.signal(signal.SIGTERM, lambda *_: [c.terminate() for c in children])
sys.exit(children[1].wait())
'''


class TwoClients(RefengineDriver):
    name = "two-clients"

    def launch(self, context):
        launch = super().launch(context)
        return launch.model_copy(update={"argv": (sys.executable, "-c", PARENT, *launch.argv), "clients": 2})


@hookimpl
def kvtierd_engine_drivers():
    return [TwoClients()]
"""


def second_client(lab: Cluster, name: str) -> psutil.Process:
    """The engine's process that only has a client."""
    engine = psutil.Process(lab[name].pid("engine-ref"))
    return next(p for p in engine.children(recursive=True) if any("second client" in a for a in p.cmdline()))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin(tmp_path, "two-clients", MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("installed")
def test_an_engine_that_does_not_come_back_is_drained_and_started_anew() -> None:
    with Cluster(2, 'mode = "static"\nmaster = "a"', net=24) as lab:
        for node in lab.nodes.values():
            text = node.settings.read_text()
            node.settings.write_text(
                text.replace('plugin = "refengine"', 'plugin = "two-clients"\nmodel = "refengine"')
            )
        lab.wait_well(120)
        before = {name: {u: lab[name].pid(u) for u in ("engine-ref", "pool-0")} for name in "ab"}
        assert all(pid for pids in before.values() for pid in pids.values()), before
        frozen = second_client(lab, "a")
        os.kill(frozen.pid, signal.SIGSTOP)
        done = lab["a"].kvtierctl("switchover", "b")
        assert done.returncode == 0, (done.stdout, done.stderr)
        began = time.monotonic()
        wait_until(
            lambda: "cluster.client-rolled" in [e.kind for e in lab["a"].client.events()], 90, lab.told
        )
        print(f"rolled after {time.monotonic() - began:.1f} s")
        wait_until(lambda: lab["a"].pid("engine-ref") not in {0, before["a"]["engine-ref"]}, 60, lab.told)
        lab.wait_well(90)
        told = {e.kind: e.message for e in lab["a"].client.events()}
        assert "no link with the MetaService" in told["cluster.client-rolled"]
        assert "engine.drained" in told
        assert "cluster.roll-no-help" not in told
        assert not frozen.is_running()
        after = {name: {u: lab[name].pid(u) for u in ("engine-ref", "pool-0")} for name in "ab"}
        assert after["a"]["pool-0"] == before["a"]["pool-0"], "it was back"
        assert after["b"] == before["b"], "so was everything there"
        wait_until(lambda: hits(lab, "b", "a"), 40, lab.told)
