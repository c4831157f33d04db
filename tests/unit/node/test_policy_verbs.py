"""What operators can ask of the policy, over a real decider and a real journal."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.act.adjusted import FILE
from kvtierd.act.journal import ActionJournal
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.decide.decider import Decider
from kvtierd.decide.proposals import DetachL3, RestartUnit
from kvtierd.decide.recorded import read_line
from kvtierd.errors import ActionError, UsageError
from kvtierd.events import EventLog
from kvtierd.node import policy_verbs
from kvtierd.node.policy_verbs import PolicyVerbs
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments
from kvtierd.plan.units import resolve_unit
from kvtierd.settings import Settings

from ..act.act_lab import GIB, proposal
from ..decide.scenes import NOW, PRESSED, at, engine, picture, policy, pool

ONE, TEN, META = "kvtier-engine-e1", "kvtier-engine-e10", "kvtier-meta-main"
FAILING = picture(
    engines=(engine("e1", failed=50), engine("e10", failed=50), engine("e2")), pool=pool(PRESSED)
)


class Flown:
    """A pilot that has seen one picture."""

    def __init__(self, directory: Path) -> None:
        self.decider = Decider(policy(failed_loads="advise"))
        self.journal = ActionJournal(directory, "a")
        self.pictures = [at(NOW + 15 * i, FAILING) for i in range(3)]
        self.acting = False
        self.undone = ["thresholds 80/70 are as the settings say again"]

    async def undo_all(self) -> list[str]:
        return self.undone


class World:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(policy_verbs, "boottime_seconds", lambda: NOW + 10)
        self.views = {
            u: SimpleNamespace(id=u, state="ready", reason="") for u in (ONE, TEN, META, "kvtier-pool-0")
        }
        self.events = EventLog(directory)
        self.node: Any = SimpleNamespace(
            state=directory, events=self.events, settings=Settings(pool={"dram": GIB}), adjusted=NOTHING,
            view=self.views.get, resolve=lambda name: resolve_unit(name, list(self.views)),
        )  # fmt: skip
        self.pilot = Flown(directory)
        self.verbs = PolicyVerbs(self.node)
        self.verbs.fly(self.pilot)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = World(tmp_path, monkeypatch)
    yield made
    made.pilot.journal.close()


async def test_before_the_daemon_looks_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verbs = PolicyVerbs(World(tmp_path, monkeypatch).node)
    for ask in (verbs.why("", 0), verbs.reset()):
        with pytest.raises(ActionError, match="has not begun to look yet") as raised:
            await ask
        assert raised.value.stable_code == "act.not-yet"
    with pytest.raises(ActionError, match="has not begun to look yet"):
        verbs.pictures()
    reply = pb.StatusReply()
    verbs.decisions(reply)
    assert not reply.HasField("last_decision")
    assert json.loads((await verbs.show()).policy_json)["dry_run"] is False


async def test_why_everything_what_holds_comes_first(world: World) -> None:
    world.pilot.decider.step(FAILING)
    reply = await world.verbs.why("", 0)
    states = [r.state for r in reply.rules]
    assert states == sorted(states, key=["holds", "between", "unknown", "clear", "off"].index)
    small = next(r for r in reply.rules if r.rule == "pool-small")
    assert (small.state, small.would) == ("holds", "add a pool holder of 16 GiB on b")
    assert small.verdict == "holds for 0.0s of 5m00s"
    assert small.next_in_seconds == pytest.approx(290.0), "ten seconds have gone by since"
    clear = next(r for r in reply.rules if r.state == "clear")
    assert not clear.HasField("next_in_seconds")


async def test_why_one_engine_is_not_about_another_whose_name_begins_alike(world: World) -> None:
    world.pilot.decider.step(FAILING)
    for unit in (ONE, TEN):
        world.pilot.journal.note(proposal(DetachL3(unit), target=unit), "done")
        world.events.add("info", "x", f"of {unit}", unit=unit)
    reply = await world.verbs.why("e1", 0)
    assert (reply.unit, reply.state) == (ONE, "ready")
    assert {r.about.split()[0] for r in reply.rules} == {ONE}
    assert [a.target for a in reply.actions] == [ONE]
    assert [e.message for e in reply.events] == [f"of {ONE}"]
    with pytest.raises(UsageError, match="there is no unit 'e3'"):
        await world.verbs.why("e3", 0)


async def test_why_the_metaservice_is_about_the_pool(world: World) -> None:
    world.pilot.decider.step(FAILING)
    world.pilot.journal.note(proposal(DetachL3(ONE), target=ONE), "done")
    world.pilot.journal.note(proposal(RestartUnit(META)), "done", "it is ready again")
    reply = await world.verbs.why("meta", 0)
    assert [a.what for a in reply.actions] == [f"restart {META} in place"]
    rules = {r.rule for r in reply.rules}
    assert {"meta-hung", "pool-small", "thresholds", "host-short", "failed-loads-everywhere"} <= rules
    assert "failed-loads" not in rules
    assert {r.rule for r in (await world.verbs.why("pool-0", 0)).rules} == rules


async def test_as_many_actions_as_are_asked_for(world: World) -> None:
    for number in range(30):
        world.pilot.journal.note(proposal(RestartUnit(META), reason=f"{number}"), "done")
    assert [a.why for a in (await world.verbs.why("", 3)).actions] == ["27", "28", "29"]
    assert len((await world.verbs.why("", 0)).actions) == 10
    entry = (await world.verbs.why("meta", 1)).actions[0]
    assert (entry.why, entry.state, entry.node, entry.rule) == ("29", "done", "a", "pool-small")
    begun = world.pilot.journal.begin(proposal(RestartUnit(META)))
    entry = (await world.verbs.why("", 1)).actions[0]
    assert (entry.id, entry.state, entry.HasField("ended")) == (begun, "under way", False)


async def test_show_has_the_policy_what_it_changed_and_what_is_wrong(world: World) -> None:
    world.node.adjusted = Adjustments(
        evict_high=80, evict_low=70, holders=(AddedHolder(index=0, dram_bytes=GIB),)
    )
    reply = await world.verbs.show()
    assert json.loads(reply.policy_json) == world.node.settings.policy.model_dump(mode="json")
    assert json.loads(reply.adjustments_json) == {
        "evict_high": 80, "evict_low": 70, "holders": [{"index": 0, "dram_bytes": GIB}],
    }  # fmt: skip
    assert list(reply.problems) == []
    (world.node.state / FILE).write_text("{")
    world.pilot.journal.problem = "the disk is full"
    damaged, full = (await world.verbs.show()).problems
    assert "is damaged" in damaged
    assert full == "the disk is full"


async def test_reset_waits_for_what_is_being_carried_out(world: World) -> None:
    world.pilot.acting = True
    with pytest.raises(ActionError, match="an action is being carried out") as raised:
        await world.verbs.reset()
    assert raised.value.stable_code == "act.busy"
    world.pilot.acting = False
    reply = await world.verbs.reset()
    assert list(reply.undone) == world.pilot.undone
    assert reply.policy_json


def test_pictures_are_lines_that_can_be_read_again(world: World) -> None:
    lines = list(world.verbs.pictures())
    assert [read_line(line, 1) for line in lines] == world.pilot.pictures


async def test_status_has_the_last_decision_and_the_next(world: World) -> None:
    reply = pb.StatusReply()
    world.verbs.decisions(reply)
    assert not reply.HasField("last_decision"), "nothing was decided yet"
    decider = world.pilot.decider = Decider(policy())
    decider.step(picture(engines=(engine("e1", failed=50), engine("e2")), pool=pool(PRESSED)))
    world.verbs.decisions(reply)
    last = reply.last_decision
    assert (last.rule, last.what, last.outcome) == ("failed-loads", f"detach L3 from {ONE}", "under way")
    assert last.age_seconds == pytest.approx(10.0)
    coming = reply.next_decision
    assert (coming.rule, coming.what) == ("pool-small", "add a pool holder of 16 GiB on b")
    assert coming.in_seconds == pytest.approx(290.0)
    decider.outcome(2, ok=False, text="it was busy", now_seconds=NOW)
    reply = pb.StatusReply()
    world.verbs.decisions(reply)
    assert reply.last_decision.outcome == "failed: it was busy"
    assert not reply.dry_run
    world.node.settings = Settings(pool={"dram": GIB}, policy={"dry_run": True})
    world.verbs.decisions(reply)
    assert reply.dry_run
