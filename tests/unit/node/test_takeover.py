"""What an action changes beside the settings becomes part of the plan in force, or leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.act.adjusted import FILE, read_adjustments, write_adjustments
from kvtierd.errors import KvtierError, PlanError, StateError
from kvtierd.events import EventLog
from kvtierd.node import takeover as takeover_module
from kvtierd.node.state import Node
from kvtierd.node.takeover import Takeover
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments
from kvtierd.plugins import load_plugins
from kvtierd.settings import load_settings

HOLDER = AddedHolder(index=0, dram_bytes=8 << 20)


class World:
    """An emulated node of its own, without units that run."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.file = directory / "s.toml"
        self.say(high=90)
        monkeypatch.setattr(takeover_module, "prepare_emulation", lambda _: None)
        backend: Any = SimpleNamespace(name="shim")
        self.views: list[Any] = []
        supervisor: Any = SimpleNamespace(
            views=lambda: self.views, poke=lambda: None, request_restart=lambda *_: None
        )
        settings = load_settings(self.file)
        self.node = Node(
            self.file, settings, load_plugins(), EventLog(directory / "state"), backend, supervisor, None, None, None  # type: ignore[arg-type]
        )  # fmt: skip
        self.takeover = Takeover(self.node, self._act)

    async def _act(self, unit: str, action: str, reason: str) -> None:
        raise AssertionError(f"{action} of {unit}: {reason}")

    def say(self, *, high: int, more: str = "") -> None:
        paths = "".join(f'{n} = "{self.directory}/{n}"\n' for n in ("state", "runtime", "logs"))
        self.file.write_text(
            f'[node]\nseries = "emulated"\n[paths]\n{paths}[pool]\ndram = "64MiB"\nhost_reserve = "1MiB"\n'
            f"evict_high = {high}\nevict_low = 60\n{more}"
        )

    def conf(self) -> str:
        assert self.node.plan is not None
        return Path(
            next(f.path for f in self.node.plan.files if f.path.endswith("mmc-meta.conf"))
        ).read_text()

    def on_disk(self) -> Adjustments:
        return read_adjustments(self.node.state)[0]

    def told(self, kind: str) -> list[str]:
        return [e.message for e in self.node.events.last() if e.kind == kind]


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path, monkeypatch)
    await made.takeover.reload(False)
    return made


def lower(before: Adjustments) -> Adjustments:
    return before.model_copy(update={"evict_high": 71, "evict_low": 51})


def more(before: Adjustments) -> Adjustments:
    return before.model_copy(update={"holders": (HOLDER,)})


async def test_it_is_in_the_plan_in_the_files_and_on_disk(world: World) -> None:
    assert "= 71" not in world.conf()
    plan = await world.takeover.adjust(lower)
    assert plan is world.node.plan
    assert "evict_threshold_high = 71" in world.conf()
    assert "evict_threshold_low = 51" in world.conf()
    assert world.on_disk() == world.node.adjusted == lower(NOTHING)
    plan = await world.takeover.adjust(more)
    assert plan.unit("kvtier-pool-added-0") is not None
    assert world.on_disk() == more(lower(NOTHING)), "one change does not take back another"
    plan = await world.takeover.adjust(lambda _: NOTHING)
    assert plan.unit("kvtier-pool-added-0") is None
    assert not (world.node.state / FILE).exists()
    assert "= 71" not in world.conf()


async def test_it_rests_on_the_settings_in_force_and_not_on_the_file(world: World) -> None:
    world.say(high=88)
    await world.takeover.adjust(more)
    assert "evict_threshold_high = 90" in world.conf(), "an operator is about to write that"
    world.file.write_text("nonsense")
    await world.takeover.adjust(lower)
    assert "evict_threshold_high = 71" in world.conf()


async def test_a_reload_keeps_what_was_changed(world: World) -> None:
    await world.takeover.adjust(lower)
    world.say(high=88)
    await world.takeover.reload(False)
    assert "evict_threshold_high = 71" in world.conf()
    assert world.node.adjusted == lower(NOTHING)


async def test_a_refused_plan_leaves_all_as_it_was(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    before, conf = world.node.plan, world.conf()
    plan_this_host = takeover_module.plan_this_host

    async def refused(*args: Any, **kwargs: Any) -> Any:
        plan = await plan_this_host(*args, **kwargs)
        return plan.model_copy(update={"refusals": (SimpleNamespace(message="no room", hint="less"),)})

    monkeypatch.setattr(takeover_module, "plan_this_host", refused)
    with pytest.raises(PlanError, match="the plan is refused: no room"):
        await world.takeover.adjust(more)
    assert (world.on_disk(), world.node.adjusted, world.node.plan) == (NOTHING, NOTHING, before)
    assert world.conf() == conf
    assert world.node.problems == [], "the settings are as good as before"


async def test_it_is_on_disk_before_anything_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    sync_files = takeover_module.sync_files
    monkeypatch.setattr(
        takeover_module, "sync_files", lambda files: (seen.append(world.on_disk()), sync_files(files))[1]
    )
    await world.takeover.adjust(lower)
    assert seen == [lower(NOTHING)]


async def test_what_cannot_be_kept_is_not_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StateError("no space", code="state.full")

    monkeypatch.setattr(takeover_module, "write_adjustments", full)
    conf = world.conf()
    with pytest.raises(StateError, match="no space"):
        await world.takeover.adjust(lower)
    assert (world.node.adjusted, world.conf()) == (NOTHING, conf)


async def test_what_cannot_be_taken_over_is_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.takeover.adjust(more)
    conf = world.conf()

    def full(*_: Any) -> None:
        raise StateError("no space", code="state.full")

    with monkeypatch.context() as patch:
        patch.setattr(takeover_module, "save_plan", full)  # after the files were written
        with pytest.raises(StateError, match="no space"):
            await world.takeover.adjust(lower)
    assert world.on_disk() == world.node.adjusted == more(NOTHING)
    assert world.conf() == conf
    assert world.told("policy.half-done") == []


async def test_what_cannot_even_be_taken_back_is_said(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StateError("no space", code="state.full")

    monkeypatch.setattr(takeover_module, "sync_files", full)
    with pytest.raises(StateError, match="no space"):
        await world.takeover.adjust(lower)
    (said,) = world.told("policy.half-done")
    assert "stays until kvtierctl reload: no space" in said


async def test_an_action_does_not_hide_what_is_wrong_with_the_settings(world: World) -> None:
    world.file.write_text("nonsense")
    with pytest.raises(KvtierError):
        await world.takeover.reload(False)
    problems = list(world.node.problems)
    assert problems
    await world.takeover.adjust(lower)
    assert world.node.problems == problems
    world.say(high=90)
    await world.takeover.reload(False)
    assert world.node.problems == []


async def test_a_damaged_file_is_said_once_and_its_change_is_not_lost_by_the_next(world: World) -> None:
    await world.takeover.adjust(more)
    (world.node.state / FILE).write_text("{")
    await world.takeover.adjust(lower)
    assert world.on_disk() == more(lower(NOTHING)), "what is in force is known without the file"
    (world.node.state / FILE).write_text("{")
    for _ in range(2):
        await world.takeover.reload(False)
    (said,) = world.told("policy.adjustments")
    assert "is damaged; thresholds and pool holders are as the settings say" in said
    assert world.node.adjusted == NOTHING
    write_adjustments(world.node.state, NOTHING)
