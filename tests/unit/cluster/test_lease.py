"""The elector's driver: what comes before what, failing disks, frozen processes. Most electors here read from a script."""

import asyncio
import contextlib
import threading

import pytest
from fake_network import FakeNetwork

from kvtierd.cluster import lease as module
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    EpochQuery,
    EpochRaised,
    EpochState,
    Grant,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Request,
    Send,
)
from kvtierd.cluster.election_view import ElectorView
from kvtierd.cluster.elector import Elector
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.cluster.following import Following
from kvtierd.cluster.lease import LeaseCoordinator
from kvtierd.cluster.outbox import MOST_SENDS
from kvtierd.cluster.standing import ClusterView
from kvtierd.errors import ClusterError, StateError

CONFIG = ElectorConfig("prod", "a", ("a", "b", "c"), lease_seconds=1.0)


def query(sender="b", number=1):
    return EpochQuery("prod", CONFIG.digest, sender, 0, number)


MADE = []


class ScriptedElector:
    """Answers each call with the next list of effects that was put in."""

    def __init__(self, config, persisted, *, booted_at_seconds, draws, held=None):
        self.persisted, self.booted_at_seconds, self.held = persisted, booted_at_seconds, held
        self.script = asyncio.Queue()
        self.seen = []
        self.wake = float("inf")
        self.fit = None
        self.role = "follower"
        self.master = ""
        MADE.append(self)

    def next_wake_seconds(self):
        return self.wake

    def step(self, message, now_seconds):
        self.seen.append((message, now_seconds))
        return self.script.get_nowait() if not self.script.empty() else []

    def tick(self, now_seconds):
        self.wake = float("inf")
        self.seen.append(("tick", now_seconds))
        return self.script.get_nowait() if not self.script.empty() else []

    def resign(self, now_seconds, to=None):
        self.seen.append(("resign", to))
        return self.script.get_nowait()

    def set_fit(self, fit, why=""):
        self.fit = fit

    def view(self, now_seconds):
        return ElectorView(self.role, 0, self.master, 0.0, "", {"b": "it says no"})


class Disk:
    """A store whose disk can be made slow or broken."""

    path = "/epoch"

    def __init__(self):
        self.state = None
        self.saved = []
        self.broken = ""
        self.loads = 0
        self.free = threading.Event()
        self.free.set()

    def load(self):
        self.loads += 1
        if self.broken:
            raise StateError(self.broken)
        return self.state

    def save(self, state):
        self.free.wait(10)
        if self.broken:
            raise StateError(self.broken)
        self.saved.append(state)
        self.state = state


class Scene:
    def __init__(self, tmp_path, config=CONFIG, store=None, **more):
        self.offset = 0.0
        self.network = FakeNetwork(witnesses=more.pop("witnesses", ()))
        self.disk = store or Disk()
        self.following = Following(
            self.network.board, SeenEpochStore(tmp_path / "seen", "prod"), self.network.refusals
        )
        self.told = []
        self.coordinator = LeaseCoordinator(
            config, self.network, self.disk, self.following, now=self.now, **more
        )

    def now(self):
        return boottime_seconds() + self.offset

    @property
    def standing(self):
        return self.coordinator.standing

    @property
    def elector(self):
        return MADE[-1]

    async def until(self, condition, seconds=5.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)

    def script(self, *effects):
        self.elector.script.put_nowait(list(effects))

    async def message(self, *effects, message=None):
        self.script(*effects)
        return await self.coordinator.receive(message or query())

    async def gain(self, epoch=5, lasts=100.0):
        until = self.now() + lasts
        await self.message(LeaseGained(epoch, until, self.now() + 1.5))
        return until


@contextlib.asynccontextmanager
async def running(tmp_path, **more):
    scene = Scene(tmp_path, **more)
    task = asyncio.create_task(scene.coordinator.run(scene.told.append))
    try:
        await scene.until(lambda: scene.coordinator._elector is not None)
        yield scene
        if task.done():
            task.result()
    finally:
        getattr(scene.disk, "free", threading.Event()).set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scene.coordinator.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)


@pytest.fixture
async def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Elector", ScriptedElector)
    async with running(tmp_path) as scene:
        yield scene


STATE = EpochState(7, "b", 1, 1.2, 99)


async def test_an_answer_leaves_only_when_what_it_stands_for_is_on_disk(scene):
    scene.disk.free.clear()
    answering = asyncio.create_task(
        scene.message(Persist(STATE), Send("b", query("a", 2)), Send("c", query("a", 3)))
    )
    await asyncio.sleep(0.1)
    assert not answering.done()
    assert scene.network.sent == []
    assert scene.disk.saved == []
    scene.disk.free.set()
    assert await answering == [query("a", 2)]
    assert scene.disk.saved == [STATE]
    await scene.until(lambda: scene.network.sent == [("c", query("a", 3))])


async def test_while_the_disk_works_nothing_else_is_looked_at(scene):
    scene.disk.free.clear()
    first = asyncio.create_task(scene.message(Persist(STATE)))
    await scene.until(lambda: len(scene.elector.seen) == 1)
    second = asyncio.create_task(scene.coordinator.receive(query("c")))
    await asyncio.sleep(0.1)
    assert len(scene.elector.seen) == 1
    scene.disk.free.set()
    await asyncio.gather(first, second)
    assert [m.sender for m, _ in scene.elector.seen] == ["b", "c"]


async def test_a_caller_that_hangs_up_stops_nothing(scene):
    scene.disk.free.clear()
    calling = asyncio.create_task(scene.message(Persist(STATE), Send("c", query("a", 3))))
    await scene.until(lambda: len(scene.elector.seen) == 1)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    scene.disk.free.set()
    await scene.until(lambda: scene.network.sent == [("c", query("a", 3))])
    assert scene.disk.saved == [STATE]


async def test_answers_that_come_back_are_given_to_the_elector(scene):
    scene.network.answer = lambda to, message: [query(to, 8), query(to, 9)]
    await scene.message(Send("c", query("a", 3)))
    await scene.until(lambda: len(scene.elector.seen) == 3)
    assert [m for m, _ in scene.elector.seen[1:]] == [query("c", 8), query("c", 9)]


async def test_a_message_to_a_peer_that_does_not_answer_is_lost_and_not_more_than_a_few_wait(scene):
    never = asyncio.get_running_loop().create_future()
    scene.network.answer = lambda to, message: asyncio.shield(never)
    for number in range(30):
        await scene.message(Send("c", query("a", number)))
    assert len(scene.network.sent) <= MOST_SENDS
    await scene.message(Send("b", query("a", 99)), message=query("c"))
    await scene.until(lambda: ("b", query("a", 99)) in scene.network.sent)


async def test_a_failed_disk_throws_the_elector_away_and_nothing_that_follows_is_done(scene):
    before = scene.elector
    await scene.until(lambda: scene.standing.role == "follower")
    scene.disk.broken = "no space to write /epoch"
    answers = await scene.message(Persist(STATE), Send("b", query("a", 2)), Send("c", query("a", 3)))
    assert answers == []
    assert scene.network.sent == []
    assert scene.standing.role == "unknown"
    assert "no space" in scene.standing.why
    assert scene.told[-1] == scene.standing
    with pytest.raises(ClusterError, match="no space") as raised:
        await scene.coordinator.receive(query())
    assert raised.value.stable_code == "cluster.no-vote"
    assert len(before.seen) == 1


async def test_when_the_disk_works_again_it_begins_anew_as_a_voter_that_has_just_started(scene):
    before = scene.elector
    scene.disk.state = STATE
    scene.disk.broken = "no space"
    await scene.message(Persist(EpochState(8, "c", 1, 1.2, 99)))
    await asyncio.sleep(0.2)
    assert scene.elector is before
    scene.disk.broken = ""
    await scene.until(lambda: scene.elector is not before)
    assert scene.elector.persisted == STATE
    assert scene.disk.saved == [STATE]  # written once more, to see that it can be
    assert scene.elector.booted_at_seconds > before.booted_at_seconds
    await scene.until(lambda: scene.standing.role == "follower")


async def test_a_fault_of_ours_ends_the_elector_too_and_running_it_again_makes_another(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Elector", ScriptedElector)
    scene = Scene(tmp_path)
    running_it = asyncio.create_task(scene.coordinator.run(scene.told.append))
    await scene.until(lambda: scene.coordinator._elector is not None)
    before = scene.elector
    before.step = lambda message, now: 1 // 0
    with pytest.raises(ExceptionGroup):
        await asyncio.gather(running_it, scene.coordinator.receive(query()))
    assert scene.standing.role == "unknown"
    assert "ZeroDivisionError" in scene.standing.why
    again = asyncio.create_task(scene.coordinator.run(scene.told.append))
    await scene.until(lambda: scene.elector is not before and scene.standing.role == "follower")
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
    await scene.coordinator.close()


async def test_messages_that_wait_when_the_disk_fails_are_refused(scene):
    scene.disk.free.clear()
    first = asyncio.create_task(scene.message(Persist(STATE)))
    await scene.until(lambda: len(scene.elector.seen) == 1)
    second = asyncio.create_task(scene.coordinator.receive(query("c")))
    await asyncio.sleep(0.05)
    scene.disk.broken = "io"
    scene.disk.free.set()
    assert await first == []
    with pytest.raises(ClusterError, match="does not vote"):
        await second


async def test_a_master_whose_disk_fails_keeps_its_lease_to_the_end_and_may_go_on_with_it(scene):
    until = await scene.gain()
    scene.disk.broken = "io"
    await scene.message(Persist(STATE))
    assert (scene.standing.role, scene.standing.until_seconds, scene.standing.epoch) == ("unknown", until, 5)
    scene.disk.broken = ""
    before = scene.elector
    await scene.until(lambda: scene.elector is not before)
    assert scene.elector.held == HeldLease(5, until)


async def test_after_the_end_of_its_lease_a_master_without_a_disk_knows_that_it_is_none(scene):
    await scene.gain(lasts=0.2)
    scene.disk.broken = "io error"
    await scene.message(Persist(STATE))
    await scene.until(lambda: scene.told[-1].role == "follower")
    assert "io error" in scene.told[-1].why
    assert scene.told[-1].master == ""


async def test_gaining_renewing_raising_and_losing_a_lease_are_told(scene):
    until = await scene.gain(5)
    gained = scene.told[-1]
    assert (gained.role, gained.epoch, gained.master, gained.until_seconds) == ("master", 5, "a", until)
    assert gained.serve_after_seconds > scene.now()
    assert scene.network.board.newest.master == "a"
    await scene.until(lambda: {"b", "c"} in scene.network.greeted)
    await scene.message(LeaseRenewed(5, until + 2))
    assert scene.told[-1].until_seconds == until + 2
    assert scene.told[-1].serve_after_seconds == gained.serve_after_seconds
    scene.network.board.publish(
        ClusterView(5, "a", "10.0.0.1", "tcp://10.0.0.1:5000", why="as the daemon says")
    )
    await scene.message(EpochRaised(8, until + 3))
    assert (scene.told[-1].epoch, scene.told[-1].until_seconds) == (8, until + 3)
    assert scene.network.board.newest == ClusterView(
        8, "a", "10.0.0.1", "tcp://10.0.0.1:5000", why="as the daemon says"
    )
    await scene.message(LeaseLost(8, "nobody answers"))
    assert (scene.told[-1].role, scene.told[-1].master) == ("follower", "")
    assert "nobody answers" in scene.told[-1].why
    assert not scene.network.board.mine


async def test_the_guard_is_told_of_a_lease_before_the_other_nodes_are(scene):
    order = []
    scene.coordinator._changed = lambda standing: order.append(standing.role)
    scene.network.board.listeners.append(lambda: order.append("published"))
    await scene.gain()
    assert order[:2] == ["master", "published"]


async def test_a_process_that_was_frozen_finds_its_lease_over_before_anything_else(scene):
    await scene.gain(lasts=5.0)
    assert scene.standing.role == "master"
    scene.offset = 6.0  # nothing of ours has run meanwhile
    assert scene.standing.role == "follower"
    assert scene.standing.master == ""
    assert "run out" in scene.standing.why


async def test_the_end_of_a_lease_is_told_even_while_the_disk_hangs(scene):
    await scene.gain(lasts=0.3)
    scene.disk.free.clear()
    stuck = asyncio.create_task(scene.message(Persist(STATE)))
    await scene.until(lambda: scene.told[-1].role == "follower", seconds=3)
    assert not stuck.done()
    assert not scene.network.board.mine
    scene.disk.free.set()
    await stuck


async def test_a_disk_that_takes_long_is_named(scene, monkeypatch):
    monkeypatch.setattr(module, "SLOW_DISK_SECONDS", 0.05)
    scene.disk.free.clear()
    stuck = asyncio.create_task(scene.message(Persist(STATE)))
    await scene.until(lambda: "/epoch takes" in scene.standing.why)
    scene.disk.free.set()
    await stuck
    await scene.until(lambda: scene.standing.role == "follower")


async def test_mail_from_before_the_freeze_renews_no_lease(tmp_path):
    """The real elector: a majority's grants wait while the process is frozen."""
    store = EpochStore(tmp_path / "epoch", CONFIG)
    store.save(EpochState(5, "a", 99, 1.3, 99))
    held = HeldLease(5, boottime_seconds() + 30.0)
    async with running(tmp_path, store=store, held=held) as scene:
        requests = []
        waiting = asyncio.get_running_loop().create_future()

        def answer(to, message):
            requests.append(message)
            return asyncio.shield(waiting)

        scene.network.answer = answer
        await scene.until(lambda: any(isinstance(m, Request) for m in requests))
        request = next(m for m in requests if isinstance(m, Request))
        assert scene.standing.role == "master"
        scene.offset = 60.0
        grants = [Grant("prod", CONFIG.digest, name, 5, request.number, 0.0) for name in ("b", "c")]
        waiting.set_result(grants[:1])
        await scene.until(lambda: scene.told[-1].role == "follower")
        after = [standing for standing in scene.told if standing.role == "master"]
        assert all(standing.until_seconds <= held.until_seconds for standing in after)


async def test_a_restarted_daemon_goes_on_with_the_lease_that_its_guard_still_holds(tmp_path):
    store = EpochStore(tmp_path / "epoch", CONFIG)
    store.save(EpochState(5, "a", 99, 1.3, 99))
    held = HeldLease(5, boottime_seconds() + 30.0)
    async with running(tmp_path, store=store, held=held) as scene:
        await scene.until(lambda: bool(scene.told))
        assert (scene.told[-1].role, scene.told[-1].epoch) == ("master", 5)
        assert scene.told[-1].until_seconds == held.until_seconds
        assert scene.told[-1].serve_after_seconds <= scene.now()
        assert scene.network.board.mine


@pytest.mark.parametrize(
    ("state", "seconds"), [(EpochState(6, "b", 1, 1.3, 99), 30.0), (EpochState(5, "a", 99, 1.3, 99), -1.0)]
)
async def test_a_lease_that_is_over_or_was_given_to_somebody_else_is_not_gone_on_with(
    tmp_path, state, seconds
):
    store = EpochStore(tmp_path / "epoch", CONFIG)
    store.save(state)
    async with running(tmp_path, store=store, held=HeldLease(5, boottime_seconds() + seconds)) as scene:
        await scene.until(lambda: bool(scene.told))
        await asyncio.sleep(0.1)
        assert all(standing.role != "master" for standing in scene.told)
        assert "cannot go on" in scene.standing.why


async def test_a_damaged_file_keeps_a_voter_from_voting_until_it_is_taken_away(tmp_path):
    path = tmp_path / "epoch"
    path.write_text("{}")
    scene = Scene(tmp_path, store=EpochStore(path, CONFIG))
    task = asyncio.create_task(scene.coordinator.run(scene.told.append))
    await scene.until(lambda: "damaged" in scene.standing.why)
    assert scene.standing.role == "unknown"
    assert "move it away" in scene.standing.why
    with pytest.raises(ClusterError, match="damaged"):
        await scene.coordinator.receive(query())
    path.unlink()
    await scene.until(lambda: isinstance(scene.coordinator._elector, Elector))
    assert "epoch file is missing" in scene.standing.why
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await scene.coordinator.close()


async def test_too_much_mail_is_refused(scene, monkeypatch):
    scene.disk.free.clear()
    calls = [asyncio.create_task(scene.message(Persist(STATE)))]
    await scene.until(lambda: len(scene.elector.seen) == 1)
    calls += [asyncio.create_task(scene.coordinator.receive(query())) for _ in range(module.MOST_MAIL)]
    await asyncio.sleep(0.05)
    with pytest.raises(ClusterError, match="too slow"):
        await scene.coordinator.receive(query())
    scene.disk.free.set()
    await asyncio.gather(*calls)


async def test_mail_without_end_does_not_keep_time_from_passing(scene):
    async def flood():
        while True:
            await scene.coordinator.receive(query())

    floods = [asyncio.create_task(flood()) for _ in range(20)]
    scene.elector.wake = scene.now()
    await scene.until(lambda: any(what == "tick" for what, _ in scene.elector.seen), seconds=1.0)
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)


async def test_time_alone_makes_the_elector_look(scene):
    scene.elector.wake = scene.now() + 0.05
    await scene.message()
    await scene.until(lambda: any(what == "tick" for what, _ in scene.elector.seen))


async def test_a_host_that_slept_is_found_out_though_the_timers_did_not_run(scene):
    scene.elector.wake = scene.now() + 3600.0
    await scene.message()
    scene.offset = 3600.0
    await scene.until(lambda: any(what == "tick" for what, _ in scene.elector.seen), seconds=1.5)


async def test_it_follows_the_newest_view_that_the_fence_lets_through(scene):
    scene.network.board.offer(ClusterView(9, "b", why="elected"), 1, 0.0, "b")
    await scene.until(lambda: scene.standing.master == "b")
    assert (scene.standing.role, scene.standing.epoch) == ("follower", 9)
    assert scene.told[-1] == scene.standing


async def test_a_view_that_names_this_node_makes_it_no_master(scene):
    scene.network.board.offer(ClusterView(9, "a"), 1, 0.0, "b")
    await scene.until(lambda: scene.following.view is not None)
    assert (scene.standing.role, scene.standing.master) == ("follower", "")


async def test_whom_the_voter_believes_in_is_the_hint_for_the_view(scene):
    scene.elector.master = "c"
    await scene.message()
    assert scene.network.hint == "c"


async def test_a_witness_never_becomes_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Elector", ScriptedElector)
    async with running(tmp_path, witness=True) as scene:
        assert scene.elector.fit is False
        scene.coordinator.set_fit(True)
        assert scene.elector.fit is False


async def test_fitness_reaches_this_elector_and_the_next(scene):
    scene.coordinator.set_fit(False, "paused")
    assert scene.elector.fit is False
    before = scene.elector
    scene.disk.broken = "io"
    await scene.message(Persist(STATE))
    scene.disk.broken = ""
    await scene.until(lambda: scene.elector is not before)
    assert scene.elector.fit is False


async def test_refusals_of_peers_are_shown_while_there_is_no_master(scene):
    assert {p.name: p.problem for p in scene.coordinator.peers()} == {"b": "it says no", "c": ""}
    scene.network.unreachable.add("b")
    assert scene.coordinator.peers()[0].problem == "no route"
    scene.network.unreachable.clear()
    await scene.gain()
    assert {p.problem for p in scene.coordinator.peers()} == {""}


async def test_handing_over_gives_the_lease_back_when_the_target_can_take_it(scene):
    await scene.gain()
    scene.script(LeaseLost(5, "handed over to b"), Send("b", query("a", 7)), Send("c", query("a", 7)))
    await scene.coordinator.hand_over("b")
    assert ("resign", "b") in scene.elector.seen
    assert {to for to, _ in scene.network.sent} == {"b", "c"}
    assert scene.standing.role == "follower"


@pytest.mark.parametrize("to", ["a", "x", ""])
async def test_nothing_is_handed_over_to_a_node_that_is_no_other_voter(scene, to):
    await scene.gain()
    with pytest.raises(ClusterError) as raised:
        await scene.coordinator.hand_over(to)
    assert raised.value.stable_code == "cluster.no-such-node"
    assert "b, c" in raised.value.hint
    assert scene.standing.role == "master"


async def test_nothing_is_handed_over_to_a_witness(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "Elector", ScriptedElector)
    async with running(tmp_path, witnesses=("c",)) as scene:
        await scene.gain()
        with pytest.raises(ClusterError, match="cannot become the master") as raised:
            await scene.coordinator.hand_over("c")
        assert "only votes" in raised.value.why


@pytest.mark.parametrize("trouble", ["unreachable", "new"])
async def test_nothing_is_handed_over_to_a_node_that_could_not_take_it(scene, trouble):
    await scene.gain()
    if trouble == "new":
        scene.network.uptimes["b"] = 0.5
    else:
        scene.network.unreachable.add("b")
    with pytest.raises(ClusterError) as raised:
        await scene.coordinator.hand_over("b")
    assert raised.value.stable_code == "cluster.unreachable"
    assert scene.standing.role == "master"
    assert not any(what == "resign" for what, _ in scene.elector.seen)


async def test_only_the_master_hands_over_and_nobody_is_promoted(scene):
    with pytest.raises(ClusterError) as raised:
        await scene.coordinator.hand_over("b")
    assert raised.value.stable_code == "cluster.not-master"
    with pytest.raises(ClusterError) as raised:
        await scene.coordinator.promote()
    assert raised.value.stable_code == "cluster.elects"
