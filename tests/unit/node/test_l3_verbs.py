"""kvtierctl l3 on the daemon's side: what is said, remembered and refused."""

import asyncio
import dataclasses
import types

import pytest

from kvtierd.engines.l3_switch import DetachedEngines
from kvtierd.engines.talk import EngineRefusedError
from kvtierd.errors import UnitError
from kvtierd.events import EventLog
from kvtierd.node import l3_verbs as module
from kvtierd.node.l3_verbs import L3Verbs
from kvtierd.node.state import Node
from kvtierd.plan.model import EngineTalk, HttpCall, NodePlan, PoolPlan, UnitSpec
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitView

ID = "kvtier-engine-e"
VIEW = UnitView(
    id=ID, kind="engine", name="e", state=UnitState.READY, reason="", pid=7, since_unix_seconds=1.0, restarts=0,
    next_try_in_seconds=None, last_lines=(), stale=False, instance="one", last_exit=None,
)  # fmt: skip
SPEC = UnitSpec(
    id=ID, kind="engine", name="e", argv=("x",),
    talk=EngineTalk(
        base_url="http://x",
        l3_detach=(HttpCall(method="DELETE", path="/l3"),),
        l3_attach=(HttpCall(method="PUT", path="/l3"),),
    ),
)  # fmt: skip


class FakeNode:
    """The running node, as far as these verbs use it."""

    remark = Node.remark

    def __init__(self, state, placement="standalone"):
        self.seen = VIEW
        self.plan = NodePlan(
            node="n", series="A3", units=(SPEC,), pool=PoolPlan(placement=placement, providers=1)
        )
        self.events = EventLog(state)
        self.detached = DetachedEngines(state / "l3.json")
        self.observer = types.SimpleNamespace(observe_now=None)

    def view(self, unit_id):
        return self.seen

    def resolve(self, name):
        return ID

    def change(self, **changes):
        self.seen = dataclasses.replace(self.seen, **changes)

    def kinds(self):
        return [e.kind for e in self.events.last()]


@pytest.fixture
def node(tmp_path):
    return FakeNode(tmp_path)


@pytest.fixture
def engine(monkeypatch):
    """What the engine is asked; ``answer`` may raise or wait."""
    engine = types.SimpleNamespace(asked=[], answer=None)

    async def ask(spec, call, *, timeout_seconds):
        engine.asked.append(call.method)
        if engine.answer is not None:
            await engine.answer()
        return b""

    monkeypatch.setattr(module, "ask", ask)
    return engine


async def test_off_and_on_are_said_and_remembered(node, engine):
    verbs = L3Verbs(node)
    off = await verbs.switch("e", on=False, wait_seconds=5)
    assert (off.unit, off.on, engine.asked) == (ID, False, ["DELETE"])
    assert "kvtierctl l3 attach e" in off.note
    assert "part of the pool" not in off.note
    assert "detached by an operator" in node.remark(node.seen)
    on = await verbs.switch("e", on=True, wait_seconds=5)
    assert (on.on, engine.asked) == (True, ["DELETE", "PUT"])
    assert node.remark(node.seen) == ""
    assert node.kinds() == ["engine.l3-detached", "engine.l3-attached"]


async def test_who_took_it_off_is_said_and_known_to_the_next_daemon(node, engine, tmp_path):
    off = await L3Verbs(node).switch("e", on=False, wait_seconds=5, by="the policy")
    assert off.note.startswith("L3 detached by the policy")
    assert "detached by the policy" in node.remark(node.seen)
    file = tmp_path / "l3.json"
    again = DetachedEngines(file)
    assert (again.is_off(ID, node.seen.instance), again.by(ID)) == (True, "the policy")
    file.write_text(f'{{"{ID}": "{node.seen.instance}"}}')  # of an earlier version
    old = DetachedEngines(file)
    assert (old.is_off(ID, node.seen.instance), old.by(ID)) == (True, "an operator")


async def test_a_client_that_brings_memory_takes_it_along_and_that_is_said(tmp_path, engine):
    reply = await L3Verbs(FakeNode(tmp_path, "engine")).switch("e", on=False, wait_seconds=5)
    assert "part of the pool went with it" in reply.note


async def test_the_remark_is_of_one_run(node, engine):
    await L3Verbs(node).switch("e", on=False, wait_seconds=5)
    node.change(instance="two")
    assert node.remark(node.seen) == ""
    node.change(instance="one", pid=None)
    assert node.remark(node.seen) == "", "it ended"


@pytest.mark.parametrize(
    "changes", [{"state": UnitState.STARTING}, {"state": UnitState.STOPPED}, {"instance": None}]
)
async def test_an_engine_that_does_not_run_is_not_asked(node, engine, changes):
    node.change(**changes)
    with pytest.raises(UnitError) as refused:
        await L3Verbs(node).switch("e", on=False, wait_seconds=5)
    assert refused.value.stable_code == "engine.not-running"
    assert engine.asked == []


async def test_a_refusal_changes_nothing_and_is_an_event(node, engine):
    async def refuse():
        raise EngineRefusedError("e answered 401", status=401, why="Unauthorized")

    engine.answer = refuse
    with pytest.raises(EngineRefusedError):
        await L3Verbs(node).switch("e", on=False, wait_seconds=5)
    assert node.remark(node.seen) == ""
    (event,) = node.events.last()
    assert (event.kind, event.severity) == ("engine.l3-switch", "warning")
    assert "Unauthorized" in event.message


async def test_an_engine_that_restarts_meanwhile_is_not_called_detached(node, engine):
    async def restart_and_refuse():
        node.change(instance="two")
        raise EngineRefusedError("e answered 409", status=409)

    engine.answer = restart_and_refuse
    with pytest.raises(UnitError) as refused:
        await L3Verbs(node).switch("e", on=False, wait_seconds=5)
    assert refused.value.stable_code == "engine.restarted"
    assert node.remark(node.seen) == ""


async def test_two_at_once_do_not_cross(node, engine):
    gate = asyncio.Event()
    engine.answer = gate.wait
    verbs = L3Verbs(node)
    first = asyncio.create_task(verbs.switch("e", on=False, wait_seconds=5))
    await asyncio.sleep(0.01)
    with pytest.raises(UnitError) as refused:
        await verbs.switch("e", on=True, wait_seconds=5)
    assert refused.value.stable_code == "engine.l3-busy"
    gate.set()
    assert not (await first).on
    assert (await verbs.switch("e", on=True, wait_seconds=5)).on


async def test_what_cannot_be_written_down_is_said(tmp_path, engine):
    node = FakeNode(tmp_path)
    (tmp_path / "l3.json").mkdir()
    reply = await L3Verbs(node).switch("e", on=False, wait_seconds=5)
    assert "will not know it" in reply.note
    assert "detached by an operator" in node.remark(node.seen)
