"""Look, decide, act: what of a decision is done, said or held back, and what outlives the daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.act.hands import UnitNow
from kvtierd.act.journal import FILE_NAME, ActionJournal
from kvtierd.cluster.hello import HostMemory, NodeFacts
from kvtierd.cluster.peer_server import HolderChange
from kvtierd.decide.limits import Flight
from kvtierd.decide.proposals import DetachL3, Proposal, RestartUnit
from kvtierd.errors import ActionError
from kvtierd.events import EventLog
from kvtierd.node import pilot as pilot_module
from kvtierd.node.pilot import STATE_FILE, Pilot
from kvtierd.observe.observer import Sources
from kvtierd.observe.picture import Picture
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments
from kvtierd.settings import Settings

from ..act.act_lab import GIB, FakeHands, fault, hurry, proposal
from ..decide.scenes import NOW, at, engine, picture

UNIT = "kvtier-pool-added-0"
FAILING = picture(engines=(engine("one", failed=50), engine("two")))
WELL = picture()


class Sight:
    """In the place of the observer: gives what the test shows."""

    def __init__(self) -> None:
        self.scene, self.now = WELL, NOW
        self.picture: Picture | None = None
        self.fault: Exception | None = None

    async def step(self) -> Picture:
        if self.fault is not None:
            raise self.fault
        self.picture = at(self.now, self.scene)
        return self.picture

    async def close(self) -> None:
        """Nothing is under way."""


class World:
    """A node whose pilot sees what the test shows and acts on hands that remember."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any) -> None:
        hurry(monkeypatch)
        self.sight, self.hands = Sight(), FakeHands()
        monkeypatch.setattr(pilot_module, "boottime_seconds", lambda: self.sight.now)
        monkeypatch.setattr(pilot_module, "boot_id", lambda: "this boot")
        self.events = EventLog(directory)
        self.node: Any = SimpleNamespace(
            state=directory, settings=self.settings(**policy), events=self.events, paused=None, master="a",
            supervisor=SimpleNamespace(poke=lambda: None),
            view=lambda unit: SimpleNamespace(id=unit) if unit.startswith("kvtier-engine") else None,
        )  # fmt: skip
        self.sources: Any = SimpleNamespace(
            sources=lambda: Sources(node=lambda: "a", cluster=lambda: ("a", True)), mastership=None,
            look_at_clients=self._nothing, tell=self._tell,
        )  # fmt: skip
        self.pilot = self.begin()

    @staticmethod
    def _tell(facts: NodeFacts, seen: Any) -> NodeFacts:
        return dataclasses.replace(facts, memory=HostMemory(1 if seen is not None else 0))

    @staticmethod
    async def _nothing() -> None:
        return None

    @staticmethod
    def settings(**policy: Any) -> Settings:
        return Settings(pool={"dram": GIB}, policy=policy)

    def begin(self) -> Pilot:
        """Another daemon on the same directory."""
        self.pilot = Pilot(self.node, self.sources, self.hands)  # type: ignore[arg-type]
        self.pilot.observer = self.sight  # type: ignore[assignment]
        return self.pilot

    async def see(self, scene: Picture, *, seconds: float = 5.0) -> None:
        """One step, and the end of what it began."""
        self.sight.scene, self.sight.now = scene, self.sight.now + seconds
        await self.pilot.step()
        await asyncio.sleep(0)
        while self.pilot.acting and not any(call[0] in self.hands.hangs for call in self.hands.calls):
            await asyncio.sleep(0.005)

    def told(self, kind: str) -> list[str]:
        """Texts of the events of this kind."""
        return [e.message for e in self.events.last() if e.kind == kind]

    def journal(self) -> list[tuple[str, str]]:
        return [(e.what, e.state) for e in self.pilot.journal.last() if e.state != "said"]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    made = World(tmp_path, monkeypatch)
    yield made
    made.hands.hangs.clear()
    await made.pilot.close()


ONE = "kvtier-engine-one"
DONE = ("l3", ONE, False)
DETACH = 2  # its proposal's number: that loads fail is said before


async def test_what_is_decided_is_done_written_down_and_told(world: World) -> None:
    await world.see(WELL)
    assert world.hands.calls == []
    await world.see(FAILING)
    assert world.hands.calls == [DONE]
    assert world.journal() == [(f"detach L3 from {ONE}", "done")]
    (acts,) = world.told("policy.acts")
    assert acts.startswith("failed-loads: ")
    assert acts.endswith(f"; detach L3 from {ONE}")
    assert world.told("policy.done") == [f"detach L3 from {ONE}: as was wanted"]
    assert {e.unit for e in world.events.last() if e.kind.startswith("policy.")} == {ONE}
    last = world.pilot.decider.last
    assert last is not None
    assert (last.outcome, last.text) == ("done", "as was wanted")
    await world.see(FAILING)
    assert world.hands.calls == [DONE], "once"


async def test_a_failure_reaches_the_decider(world: World) -> None:
    world.hands.fails["l3"] = fault("it was busy all the time")
    await world.see(FAILING)
    assert world.pilot.decider.limits.failures == {("failed-loads", ONE): 1}
    assert world.told("policy.failed") == [f"detach L3 from {ONE}: it was busy all the time (as it is here)"]


async def test_a_fault_in_an_action_reaches_it_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: Any) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(world.pilot._executor, "carry_out", broken)
    await world.see(FAILING)
    assert world.pilot.decider.limits.flights == {}
    assert "internal error: ZeroDivisionError: by zero" in world.told("policy.failed")[0]


async def test_what_takes_longer_than_the_deadline_is_not_begun_twice(world: World) -> None:
    world.hands.hangs.add("l3")
    await world.see(FAILING)
    for _ in range(300):  # 25 minutes
        await world.see(FAILING)
    assert world.hands.calls == [DONE]
    assert list(world.pilot.decider.limits.flights) == [DETACH], "it is under way, whatever the clock says"


async def test_the_deadline_is_the_policy_s(world: World) -> None:
    assert world.pilot._executor.deadline_seconds == 900.0
    world.node.settings = world.settings(deadline="2m")
    await world.see(WELL)
    assert world.pilot._executor.deadline_seconds == 120.0


async def test_a_dry_run_does_nothing_and_says_what_it_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, dry_run=True)
    await world.see(FAILING)
    assert world.hands.calls == []
    assert world.told("policy.dry-run")[0].endswith(f"; would detach L3 from {ONE}")
    assert world.journal() == [(f"detach L3 from {ONE}", "dry run")]
    await world.pilot.close()


async def test_advice_is_said_and_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch, failed_loads="advise")
    await world.see(FAILING)
    await world.see(FAILING)
    assert world.hands.calls == []
    said = world.told("policy.advice")
    assert len(said) == 2, "that one failed, and that too many did: each once"
    assert all(text.startswith("failed-loads: ") for text in said)
    assert [e.state for e in world.pilot.journal.last()] == ["said", "said"]
    await world.pilot.close()


async def test_nothing_is_done_while_paused(world: World) -> None:
    world.node.paused = "maintenance"
    await world.see(FAILING)
    assert world.hands.calls == []
    assert "paused by the operator" in {e.verdict for e in world.pilot.decider.explain()}
    world.node.paused = None
    await world.see(FAILING)
    assert world.hands.calls == [DONE]


async def test_without_a_master_the_pool_is_left_alone(world: World) -> None:
    everywhere = picture(engines=(engine("one", failed=50), engine("two", failed=50)))
    world.node.settings = Settings(
        pool={"dram": GIB}, policy={"failed_loads_everywhere": "purge"},
        cluster={"mode": "lease", "peers": [{"name": n, "address": f"10.0.0.{i}"} for i, n in enumerate("abc", 1)]},
    )  # fmt: skip
    world.node.master = ""
    await world.see(everywhere)
    assert world.hands.calls == []
    assert "the cluster has no master" in {e.verdict for e in world.pilot.decider.explain()}
    world.node.master = "a"
    await world.see(everywhere)
    assert world.hands.calls == [("purge",)]


async def test_another_policy_does_not_give_the_budget_anew(world: World) -> None:
    await world.see(FAILING)
    world.node.settings = world.settings(attach_after="2h")
    await world.see(FAILING)
    decider = world.pilot.decider
    assert decider.policy.attach_after_seconds == 7200
    assert [d.rule for d in decider.limits.done] == ["failed-loads"]
    assert decider.limits.next_id == DETACH + 1
    assert world.hands.calls == [DONE]


# -- over a restart


async def test_the_next_daemon_knows_what_was_done(world: World) -> None:
    await world.see(FAILING)
    await world.pilot.close()
    world.begin()
    assert world.told("policy.memory") == []
    await world.see(FAILING)
    assert world.hands.calls == [DONE]
    assert world.pilot.decider.limits.next_id == DETACH + 1


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"\xff\xfe", b'{"version": 99}', b"[" * 100_000, b" " * (5 << 20)]
)
async def test_a_memory_that_cannot_be_read_is_kept_aside_said_and_waited_out(
    world: World, tmp_path: Path, content: bytes
) -> None:
    await world.pilot.close()
    (tmp_path / STATE_FILE).write_bytes(content)
    world.begin()
    (said,) = world.told("policy.memory")
    (aside,) = tmp_path.glob(f"{STATE_FILE}.damaged-*")
    assert aside.read_bytes() == content
    assert said.startswith("what was decided before cannot be read, so nothing is done for a while: ")
    assert said.endswith(f"was set aside as {aside.name}")
    await world.see(FAILING)
    assert world.hands.calls == []
    assert "what was done before is not known" in {e.verdict for e in world.pilot.decider.explain()}
    for _ in range(180):
        await world.see(FAILING)
    assert world.hands.calls == [DONE], "a cool-down later"


async def test_what_was_cut_off_is_told_once_and_has_failed(world: World) -> None:
    world.hands.hangs.add("l3")
    await world.see(FAILING)
    entry = world.pilot.journal.last()[-1]
    assert entry.state == "under way"
    await world.pilot.close()
    world.begin()
    last = world.pilot.journal.last()[-1]
    assert (last.state, last.outcome) == ("half done", "kvtierd was stopped meanwhile")
    assert world.pilot.decider.limits.flights == {}
    assert world.pilot.decider.limits.failures == {("failed-loads", ONE): 1}
    await world.pilot.close()
    # Killed, this time.
    journal = ActionJournal(world.node.state, "a")
    journal.begin(proposal(DetachL3(ONE)))
    journal.close()
    for _ in range(3):
        world.begin()
        await world.pilot.close()
    assert world.told("policy.half-done") == [
        f"kvtierd ended while it was to detach L3 from {ONE}: how far it came is not known"
    ]
    world.begin()


async def test_a_damaged_journal_is_set_aside_and_said(world: World, tmp_path: Path) -> None:
    await world.pilot.close()
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    world.begin()
    await asyncio.sleep(0)
    (said,) = world.told("policy.journal")
    assert "was set aside as" in said
    await world.see(FAILING)
    assert world.journal() == [(f"detach L3 from {ONE}", "done")]


async def test_a_journal_that_is_damaged_later_costs_no_action(world: World, tmp_path: Path) -> None:
    await world.see(WELL)
    assert world.pilot.journal._db is not None
    world.pilot.journal._db.close()
    world.pilot.journal._db = sqlite3.connect(tmp_path / "nothing", check_same_thread=False)
    await world.see(FAILING)
    await asyncio.sleep(0.01)
    assert world.hands.calls == [DONE]
    assert "go on without being written down" in world.told("policy.journal")[0]


async def test_closing_does_not_wait_for_what_hangs(world: World) -> None:
    world.hands.hangs |= {"l3", "stop"}
    await world.see(FAILING)
    await asyncio.wait_for(world.pilot.close(), 2.0)
    kept = json.loads((world.node.state / STATE_FILE).read_text())
    assert [p["id"] for _, p in kept["limits"]["flights"]] == [DETACH]
    world.begin()


# -- the loop


async def test_a_fault_is_said_once_and_does_not_end_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_module, "KEEP_SECONDS", 0.0)
    world.node.settings = Settings(pool={"dram": GIB}, observe={"interval": "100ms"})
    world.sight.fault = ZeroDivisionError("by zero")

    async def rounds(count: int) -> None:
        for _ in range(count):
            world.pilot._next_seconds = 0.0
            world.pilot.round()
            assert world.pilot._stepping is not None
            await world.pilot._stepping

    await rounds(3)
    assert world.told("policy.internal") == ["internal error: ZeroDivisionError: by zero"]
    world.sight.fault, world.sight.scene = None, FAILING
    await rounds(1)
    assert world.hands.calls or world.pilot.acting
    world.sight.fault = ZeroDivisionError("by zero")
    await rounds(2)
    assert len(world.told("policy.internal")) == 2, "it is news again after it was over"


async def test_one_step_at_a_time_at_the_interval(world: World) -> None:
    world.pilot.round()
    first = world.pilot._stepping
    world.pilot.round()
    assert world.pilot._stepping is first
    assert first is not None
    await first
    world.pilot.round()
    assert world.pilot._stepping is first, "not before the interval is over"


async def test_pictures_are_kept_one_in_a_while(world: World) -> None:
    for _ in range(10):
        await world.see(WELL)
    assert [p.now_seconds - NOW for p in world.pilot.pictures] == [5.0, 20.0, 35.0, 50.0]
    assert world.pilot.pictures.maxlen == 240


async def test_memory_is_written_from_one_moment(world: World) -> None:
    """What is remembered is made on the loop: in a thread it could change under the one who reads it."""
    import threading

    threads = []
    remember = world.pilot.decider.remember

    def watched(boot: str) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return remember(boot)

    world.pilot.decider.remember = watched  # type: ignore[method-assign]
    await world.see(FAILING)
    assert set(threads) == {threading.get_ident()}


# -- reset


async def test_all_is_taken_back_and_what_was_is_said_even_when_the_rest_fails(world: World) -> None:
    world.hands.kept = Adjustments(
        evict_high=80,
        evict_low=70,
        holders=(AddedHolder(index=0, dram_bytes=GIB), AddedHolder(index=1, dram_bytes=GIB)),
    )
    world.hands.units = {UNIT: UnitNow("ready", "1"), "kvtier-pool-added-1": UnitNow("ready", "1")}
    world.hands.react = lambda call: (
        world.hands.fails.update(stop=fault("it did not stop")) if call == ("stop", UNIT) else None
    )
    with pytest.raises(ActionError, match="it did not stop"):
        await world.pilot.undo_all()
    assert world.told("policy.reset") == [f"by an operator: {UNIT} (1 GiB) was removed"]
    world.hands.fails.clear()
    world.hands.react = lambda call: None
    assert await world.pilot.undo_all() == [
        "kvtier-pool-added-1 (1 GiB) was removed",
        "thresholds 80/70 are as the settings say again",
    ]
    assert world.hands.kept == NOTHING
    assert await world.pilot.undo_all() == []


# -- what a master asks for

ASKED = HolderChange("m", 3, "3-x-add-1", "pool-small", add_bytes=2 * GIB, remove_unit="")


@pytest.fixture
def asked(world: World) -> Any:
    """As the peer server has it: the node knows m as the master of epoch 3."""
    board = SimpleNamespace(newest=SimpleNamespace(master="m", epoch=3))
    desk = SimpleNamespace(change_holders=None)
    network = SimpleNamespace(desk=desk, links={})
    mastership: Any = SimpleNamespace(
        board=board,
        part=SimpleNamespace(network=network),
        elsewhere=SimpleNamespace(hear_from_all=lambda: None),
    )
    world.pilot.join(mastership)
    return SimpleNamespace(take=desk.change_holders, board=board, mastership=mastership)


async def test_joining_tells_everybody_of_the_master(world: World, asked: Any) -> None:
    assert world.sources.mastership is asked.mastership
    assert world.hands.mastership is asked.mastership  # type: ignore[attr-defined]
    await world.see(WELL)
    told = asked.mastership.tell_more(NodeFacts("a"))
    assert told == NodeFacts("a", memory=HostMemory(1))


async def test_nodes_hear_what_others_disturb_and_keep_out_of_it(world: World, asked: Any) -> None:
    decider = world.pilot.decider
    disturbing = Proposal(
        "engine-unregistered", "kvtier-engine-e", RestartUnit("kvtier-engine-e"), "x", group="g", id=7
    )
    decider.limits.flights[7] = Flight(0.0, disturbing)
    assert asked.mastership.tell_more(NodeFacts("a")).busy_groups == ("g",)
    links = asked.mastership.part.network.links
    now = pilot_module.boottime_seconds()
    links["b"] = SimpleNamespace(facts=NodeFacts("b", busy_groups=("h",)), facts_at_seconds=now - 1)
    links["c"] = SimpleNamespace(facts=NodeFacts("c", busy_groups=("long ago",)), facts_at_seconds=now - 100)
    links["d"] = SimpleNamespace(facts=None, facts_at_seconds=None)
    assert world.pilot._busy_elsewhere() == {"h"}


async def test_the_master_is_obeyed_once(world: World, asked: Any) -> None:
    assert await asked.take(ASKED) == (UNIT, 2 * GIB)
    assert await asked.take(ASKED) == (UNIT, 2 * GIB)
    assert len(world.hands.kept.holders) == 1
    assert world.told("policy.asked")[:2] == [
        "m asks to add a pool holder: pool-small",
        f"m asked: {UNIT} was added (2 GiB)",
    ]
    away = dataclasses.replace(ASKED, token="3-x-remove-2", add_bytes=0, remove_unit=UNIT)
    assert await asked.take(away) == (UNIT, 2 * GIB)
    assert world.hands.kept == NOTHING


@pytest.mark.parametrize("changes", [{"sender": "other"}, {"epoch": 2}, {"epoch": 4}])
async def test_who_is_not_the_master_is_refused(world: World, asked: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(ActionError, match="does not know") as raised:
        await asked.take(dataclasses.replace(ASKED, **changes))
    assert raised.value.stable_code == "act.not-master"
    asked.board.newest = None
    with pytest.raises(ActionError, match="does not know"):
        await asked.take(ASKED)
    assert world.hands.calls == []


async def test_a_node_that_is_held_back_refuses(world: World, asked: Any) -> None:
    world.node.paused = ""
    with pytest.raises(ActionError, match="a is paused by an operator"):
        await asked.take(ASKED)
    world.node.paused, world.node.settings = None, world.settings(dry_run=True)
    with pytest.raises(ActionError, match="dry_run on"):
        await asked.take(ASKED)
    world.node.settings = world.settings()
    with pytest.raises(ActionError, match="of no size"):
        await asked.take(dataclasses.replace(ASKED, add_bytes=0))
    assert world.hands.calls == []
