"""The named master: epochs, the durable record, who asks whom, and what an operator's word does."""

import asyncio
import contextlib
import threading

import pytest
from fake_network import FakeNetwork

from kvtierd.cluster import static as module
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.master_store import MasterRecord, MasterStore
from kvtierd.cluster.standing import FOREVER, ClusterView
from kvtierd.cluster.static import StaticCoordinator
from kvtierd.errors import ClusterError, StateError


class Store(MasterStore):
    """The real file, on a disk that can be broken or slow."""

    broken = ""

    def __init__(self, path):
        super().__init__(path, "prod")
        self.free = threading.Event()
        self.free.set()
        self.saved = None

    def save(self, record):
        self.free.wait(10)
        if self.broken:
            raise StateError(self.broken)
        super().save(record)
        self.saved = record


class Scene:
    def __init__(self, tmp_path, node="a", named="a", names=("a", "b", "c")):
        self.network = FakeNetwork(node, names, master=named)
        self.store = Store(tmp_path / "master")
        self.told = []
        self.coordinator = StaticCoordinator(self.network, self.store, ask_seconds=0.5)

    @property
    def standing(self):
        return self.coordinator.standing

    def offer(self, epoch, master, source="b", revision=1, **more):
        self.network.board.offer(ClusterView(epoch, master, **more), revision, 0.0, source)

    async def until(self, condition, seconds=5.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)

    async def becomes(self, role, epoch, master):
        await self.until(lambda: self.told and (self.told[-1].role, self.told[-1].epoch) == (role, epoch))
        assert self.standing.master == master


@contextlib.asynccontextmanager
async def running(tmp_path, **more):
    scene = Scene(tmp_path, **more)
    async with started(scene):
        yield scene


@contextlib.asynccontextmanager
async def started(scene):
    task = asyncio.create_task(scene.coordinator.run(scene.told.append))
    try:
        yield scene
        if task.done():
            task.result()
    finally:
        scene.store.free.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await scene.coordinator.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "FIRST_TELL_SECONDS", 0.02)


# -- starting


async def test_the_named_master_asks_the_others_first_and_then_serves_at_epoch_1(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        assert [s.role for s in scene.told] == ["unknown", "master"]
        assert "asks the other nodes" in scene.told[0].why
        assert scene.network.greeted[0] == {"b", "c"}
        assert scene.standing.until_seconds == FOREVER
        assert scene.standing.serve_after_seconds == 0.0
        assert scene.network.board.mine


async def test_with_nobody_reachable_it_serves_and_says_so(tmp_path):
    scene = Scene(tmp_path)
    scene.network.unreachable = {"b", "c"}
    async with started(scene):
        await scene.becomes("master", 1, "a")
        assert "no other node could be asked" in scene.standing.why


async def test_a_master_that_was_replaced_while_it_was_away_follows_without_serving(tmp_path):
    scene = Scene(tmp_path)
    scene.network.on_greet = lambda name: scene.offer(2, "b", name)
    async with started(scene):
        await scene.becomes("follower", 2, "b")
        assert all(standing.role != "master" for standing in scene.told)
        await scene.until(lambda: scene.store.saved == MasterRecord(2, "b", "a"))


async def test_the_others_follow_whom_the_settings_name(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        assert scene.store.saved == MasterRecord(1, "a", "a")
        assert scene.network.board.newest.master == "a"


async def test_what_is_on_disk_counts_more_than_what_the_settings_name(tmp_path):
    scene = Scene(tmp_path, node="b")
    scene.store.save(MasterRecord(4, "b", "a"))
    async with started(scene):
        await scene.becomes("master", 4, "b")
        assert "before" in scene.standing.why


async def test_a_node_that_lost_its_record_is_told_by_the_others_that_it_is_the_master(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.offer(5, "b", "c")
        await scene.becomes("master", 5, "b")
        assert scene.store.saved.epoch == 5


async def test_a_damaged_record_is_refused_says_what_to_do_and_is_read_again(tmp_path):
    scene = Scene(tmp_path)
    scene.store.path.write_text("{}")
    async with started(scene):
        await scene.until(lambda: "damaged" in scene.standing.why)
        assert scene.standing.role == "unknown"
        assert "move the file away" in scene.standing.why
        with pytest.raises(ClusterError, match="cannot become the master") as raised:
            await scene.coordinator.promote()
        assert "damaged" in raised.value.why
        with pytest.raises(ClusterError):
            await scene.coordinator.take_over("a", 1)
        scene.store.path.unlink()
        await scene.becomes("master", 1, "a")


async def test_a_record_of_another_cluster_is_refused(tmp_path):
    MasterStore(tmp_path / "master", "test").save(MasterRecord(9, "x", "x"))
    async with running(tmp_path) as scene:
        await scene.until(lambda: "belongs to cluster test" in scene.standing.why)


async def test_a_master_that_is_not_fit_does_not_serve_until_it_is(tmp_path):
    scene = Scene(tmp_path)
    scene.coordinator.set_fit(False, "paused by an operator")
    async with started(scene):
        await scene.until(lambda: "paused" in scene.standing.why)
        assert scene.standing.role == "unknown"
        scene.coordinator.set_fit(True)
        await scene.becomes("master", 1, "a")
        scene.coordinator.set_fit(False, "paused by an operator")
        await asyncio.sleep(0.05)
        assert scene.standing.role == "master"


# -- another name in the settings


async def test_another_name_in_the_settings_is_an_operators_word(tmp_path):
    scene = Scene(tmp_path, node="b", named="b")
    scene.store.save(MasterRecord(4, "a", "a"))
    scene.network.on_greet = lambda name: scene.offer(6, "c", name)
    async with started(scene):
        await scene.becomes("master", 7, "b")
        assert scene.store.saved == MasterRecord(7, "b", "b")


async def test_the_others_wait_for_word_from_the_one_that_is_named_now(tmp_path):
    scene = Scene(tmp_path, node="c", named="b")
    scene.store.save(MasterRecord(4, "a", "a"))
    async with started(scene):
        await scene.until(lambda: "name b now" in scene.standing.why)
        assert (scene.standing.role, scene.standing.master) == ("follower", "")
        scene.offer(5, "b", "b")
        await scene.becomes("follower", 5, "b")


async def test_the_one_that_is_named_no_more_does_not_serve(tmp_path):
    scene = Scene(tmp_path, node="a", named="b")
    scene.store.save(MasterRecord(4, "a", "a"))
    async with started(scene):
        await scene.until(lambda: "name b now" in scene.standing.why)
        await asyncio.sleep(0.05)
        assert all(standing.role != "master" for standing in scene.told)


# -- promote


async def test_promote_takes_an_epoch_above_all_that_this_node_and_the_others_have_seen(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.network.on_greet = lambda name: scene.offer(6, "c", "c")
        await scene.coordinator.promote()
        assert (scene.standing.role, scene.standing.epoch) == ("master", 7)
        assert scene.store.saved == MasterRecord(7, "b", "a")
        assert scene.network.board.newest.epoch == 7


async def test_promote_counts_only_when_it_is_on_disk(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.store.free.clear()
        promoting = asyncio.create_task(scene.coordinator.promote())
        await asyncio.sleep(0.1)
        assert scene.standing.role == "follower"
        assert scene.network.board.newest.epoch == 1
        scene.store.free.set()
        await promoting
        assert scene.standing.role == "master"


async def test_promote_on_a_broken_disk_changes_nothing(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.store.broken = "no space"
        with pytest.raises(StateError, match="no space"):
            await scene.coordinator.promote()
        assert (scene.standing.role, scene.standing.epoch) == ("follower", 1)
        assert scene.network.board.newest.master == "a"


async def test_promote_gives_a_master_that_was_reached_time_to_stop_and_names_who_was_not(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.network.unreachable = {"c"}
        await scene.coordinator.promote()
        assert 1.0 < scene.standing.serve_after_seconds - boottime_seconds() <= 2.0
        assert "not reached at that time: c" in scene.standing.why


async def test_promote_in_place_of_a_dead_master_serves_at_once(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.network.unreachable = {"a"}
        await scene.coordinator.promote()
        assert scene.standing.serve_after_seconds <= boottime_seconds()


async def test_promote_on_the_master_and_on_a_node_that_is_not_fit(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        await scene.coordinator.promote()
        assert scene.standing.epoch == 1
    async with running(tmp_path / "b", node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.coordinator.set_fit(False, "it has no MetaService")
        with pytest.raises(ClusterError) as raised:
            await scene.coordinator.promote()
        assert (raised.value.stable_code, raised.value.why) == ("cluster.unfit", "it has no MetaService")


async def test_promote_that_is_overtaken_says_so(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.store.free.clear()
        promoting = asyncio.create_task(scene.coordinator.promote())
        await asyncio.sleep(0.05)
        scene.offer(2, "c", "c")
        scene.store.free.set()
        with pytest.raises(ClusterError) as raised:
            await promoting
        assert raised.value.stable_code == "cluster.superseded"
        await scene.becomes("follower", 2, "c")


# -- being replaced


async def test_a_master_that_hears_of_a_later_epoch_follows_at_once_and_writes_it_down(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        scene.store.free.clear()
        scene.offer(2, "b")
        await scene.becomes("follower", 2, "b")  # before it is on disk
        scene.store.free.set()
        await scene.until(lambda: scene.store.saved == MasterRecord(2, "b", "a"))


async def test_a_master_that_cannot_write_down_who_replaced_it_follows_all_the_same_and_tries_again(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        scene.store.broken = "no space"
        scene.offer(2, "b")
        await scene.until(lambda: scene.standing.role == "follower" and "no space" in scene.standing.why)
        scene.store.broken = ""
        await scene.until(lambda: scene.store.saved == MasterRecord(2, "b", "a"))
        await scene.until(lambda: "no space" not in scene.standing.why)


async def test_a_lower_epoch_replaces_nobody(tmp_path):
    scene = Scene(tmp_path, node="b")
    scene.store.save(MasterRecord(4, "b", "a"))
    async with started(scene):
        await scene.becomes("master", 4, "b")
        scene.offer(3, "a", "a", 9)
        await asyncio.sleep(0.05)
        assert scene.standing.role == "master"
        assert scene.network.refusals.counts == {("a", "lower-epoch"): 1}


async def test_everybody_is_told_also_who_comes_back_late(tmp_path):
    scene = Scene(tmp_path, node="b")
    async with started(scene):
        await scene.becomes("follower", 1, "a")
        scene.network.unreachable = {"a"}
        await scene.coordinator.promote()
        await scene.until(lambda: scene.network.greeted.count({"a"}) >= 2)
        scene.network.unreachable = set()
        await asyncio.sleep(0.5)
        before = len(scene.network.greeted)
        await asyncio.sleep(0.2)
        assert len(scene.network.greeted) == before


async def test_two_that_were_promoted_under_one_epoch_the_first_name_goes_on_by_a_new_word(tmp_path):
    async with running(tmp_path, node="a", named="c") as scene:
        await scene.becomes("follower", 1, "c")
        await scene.coordinator.promote()
        assert scene.standing.epoch == 2
        scene.offer(2, "b", "b")
        scene.offer(2, "b", "c")
        await scene.becomes("master", 3, "a")
        await asyncio.sleep(0.05)
        assert scene.standing.epoch == 3
        assert "a and b were both promoted" in scene.standing.why


async def test_the_other_one_of_the_two_waits_for_that_word(tmp_path):
    async with running(tmp_path, node="b", named="c") as scene:
        await scene.becomes("follower", 1, "c")
        await scene.coordinator.promote()
        scene.offer(2, "a", "a")
        await asyncio.sleep(0.05)
        assert (scene.standing.role, scene.standing.epoch) == ("master", 2)
        scene.offer(3, "a", "a")
        await scene.becomes("follower", 3, "a")


# -- handing over


async def test_handing_over_makes_the_other_one_the_master_when_it_has_it_on_disk(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")

        async def take_over(to, epoch):
            assert scene.standing.role == "master"
            return epoch + 1

        scene.network.on_take_over = take_over
        await scene.coordinator.hand_over("b")
        assert (scene.standing.role, scene.standing.epoch, scene.standing.master) == ("follower", 2, "b")
        assert scene.store.saved == MasterRecord(2, "b", "a")
        assert not scene.network.board.mine


async def test_an_answer_that_is_lost_is_asked_for_again(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        asked = []

        async def take_over(to, epoch):
            asked.append(to)
            if len(asked) == 1:
                raise ClusterError("lost", code="cluster.unreachable")
            return epoch + 1

        scene.network.on_take_over = take_over
        await scene.coordinator.hand_over("b")
        assert asked == ["b", "b"]
        assert scene.standing.master == "b"


async def test_when_the_answer_is_lost_for_good_it_is_looked_at_what_was_done(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")

        async def take_over(to, epoch):
            raise ClusterError("lost", code="cluster.unreachable")

        scene.network.on_take_over = take_over
        scene.network.on_greet = lambda name: scene.offer(2, "b", "b")
        await scene.coordinator.hand_over("b")
        assert scene.standing.master == "b"


@pytest.mark.parametrize(
    ("to", "code"),
    [("b", "cluster.unreachable"), ("x", "cluster.no-such-node"), ("a", "cluster.no-such-node")],
)
async def test_what_cannot_be_handed_over_stays(tmp_path, to, code):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        scene.network.unreachable = {"b"}
        with pytest.raises(ClusterError) as raised:
            await scene.coordinator.hand_over(to)
        assert raised.value.stable_code == code
        assert (scene.standing.role, scene.standing.epoch) == ("master", 1)


async def test_a_target_that_refuses_says_why(tmp_path):
    async with running(tmp_path) as scene:
        await scene.becomes("master", 1, "a")
        asked = []

        async def take_over(to, epoch):
            asked.append(to)
            raise ClusterError("b cannot become the master", why="paused", code="cluster.unfit")

        scene.network.on_take_over = take_over
        with pytest.raises(ClusterError, match="b cannot"):
            await scene.coordinator.hand_over("b")
        assert len(asked) == 1
        assert scene.standing.role == "master"


async def test_only_the_master_hands_over(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        with pytest.raises(ClusterError) as raised:
            await scene.coordinator.hand_over("c")
        assert raised.value.stable_code == "cluster.not-master"


async def test_taking_over_is_on_disk_before_it_is_confirmed_and_answers_the_same_twice(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.store.free.clear()
        asking = asyncio.create_task(scene.coordinator.take_over("a", 1))
        await asyncio.sleep(0.05)
        assert not asking.done()
        assert scene.standing.role == "follower"
        scene.store.free.set()
        assert await asking == 2
        assert scene.store.saved == MasterRecord(2, "b", "a")
        assert (scene.standing.role, scene.standing.serve_after_seconds) == ("master", 0.0)
        assert await scene.coordinator.take_over("a", 1) == 2


@pytest.mark.parametrize(("sender", "epoch"), [("c", 4), ("a", 3)])
async def test_only_the_master_of_the_latest_epoch_can_hand_over(tmp_path, sender, epoch):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        scene.offer(4, "a", "a")
        await scene.becomes("follower", 4, "a")
        with pytest.raises(ClusterError) as raised:
            await scene.coordinator.take_over(sender, epoch)
        assert raised.value.stable_code == "cluster.not-master"
        assert scene.standing.role == "follower"


async def test_taking_over_from_a_master_of_which_nothing_was_heard_yet(tmp_path):
    async with running(tmp_path, node="b") as scene:
        await scene.becomes("follower", 1, "a")
        assert await scene.coordinator.take_over("c", 8) == 9
        assert scene.standing.epoch == 9


async def test_its_peers_are_all_the_others(tmp_path):
    async with running(tmp_path) as scene:
        assert [peer.name for peer in scene.coordinator.peers()] == ["b", "c"]
