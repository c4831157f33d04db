"""Plugins that raise, hang or lie, in a real daemon: each costs its own engine, and is named in status and events."""

from __future__ import annotations

import time

import pytest
from lab import install_plugin

from kvtierd.workload.demo import DemoNode, free_ports
from kvtierd.workload.stream import complete

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

MODULE = """
import time

from kvtierd_refengine.plugin import RefengineDriver

from kvtierd.hookspecs import hookimpl


class HangsAtLaunch(RefengineDriver):
    name = "hangs-at-launch"

    def launch(self, context):
        while True:
            time.sleep(0.1)


class RaisesAtLaunch(RefengineDriver):
    name = "raises-at-launch"

    def launch(self, context):
        raise KeyError("no such thing")


class HangsAtReading(RefengineDriver):
    name = "hangs-at-reading"

    def read_line(self, line):
        while True:
            pass

    def observe(self, metrics_text):
        while True:
            time.sleep(0.1)


@hookimpl
def kvtierd_engine_drivers():
    return [HangsAtLaunch(), RaisesAtLaunch(), HangsAtReading()]
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Two distributions on the daemon's path: one with the drivers above, one that ends whoever imports it."""
    for name, text in {"faulty": MODULE, "leaving": "import sys; sys.exit(3)"}.items():
        install_plugin(tmp_path, name, text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def engines(*names):
    tables = []
    for name, port in zip(names, free_ports(len(names)), strict=True):
        tables.append(f'[[engine]]\nname = "{name}"\nplugin = "{name}"\nmodel = "refengine"\nport = {port}\n')
    return "".join(tables)


def test_faulty_plugins_cost_their_own_engines_and_are_named(installed):
    faulty = ("hangs-at-launch", "raises-at-launch", "hangs-at-reading")
    with DemoNode(lambda _: None, pool="64MiB", orderly=False) as node:
        node.settings.write_text(node.settings.read_text() + engines(*faulty))
        node.client.reload(restart_changed=False)
        deadline = time.monotonic() + 30
        while True:
            status = node.status()
            units = {u.name: u.state for u in status.units if u.kind == "engine"}
            told = "\n".join(status.problems)
            known = "read_line() for" in told and "observe() for" in told
            if known and units.get("hangs-at-reading") in {"ready", "degraded"}:
                break
            assert time.monotonic() < deadline, (
                [u.reason for u in status.units if u.name == "hangs-at-reading"],
                told,
            )
            time.sleep(0.2)
        assert set(units) == {"ref", "hangs-at-reading"}, "what cannot be launched is left out"
        assert units["ref"] == "ready"
        assert "'hangs-at-launch' is left out" in told
        assert "launch() has not come back within 5 s" in told
        assert "'raises-at-launch' is left out" in told
        assert "KeyError: 'no such thing'" in told
        events = [(e.kind, e.message) for e in node.client.events()]
        assert {"engine.left-out", "plugin.broken"} <= {kind for kind, _ in events}
        assert any("plugin leaving: " in message and "SystemExit" in message for _, message in events)
        started = time.monotonic()
        complete("127.0.0.1", node.engine_port, model="refengine", prompt="hello", max_tokens=2)
        node.client.reload(restart_changed=False)
        assert time.monotonic() - started < 30, "a reload asks a driver that hangs no second time"
