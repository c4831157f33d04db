"""Following the view: the master first, otherwise whoever has it, with links that do as the test says."""

import asyncio
import contextlib

import pytest

from kvtierd.cluster.peer_link import Offer
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import ClusterView
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.cluster.view_stream import ViewStream
from kvtierd.errors import ClusterError


class FakeLink:
    """A peer: ``say`` sends an offer on the open stream, ``hang_up`` ends it, ``up = False`` refuses new ones."""

    def __init__(self, name):
        self.name = name
        self.up = True
        self.last_contact_seconds = None
        self.opened = 0
        self.open = 0
        self.current = Offer(None, 0, 0.0)
        self._queues = []

    async def watch(self, timeout_seconds):
        assert timeout_seconds > 0
        self.opened += 1
        if not self.up:
            await asyncio.sleep(0.001)
            raise ClusterError("down", code="cluster.unreachable")
        queue = asyncio.Queue()
        self._queues.append(queue)
        self.open += 1
        try:
            yield self.current
            while True:
                item = await queue.get()
                if item is None:
                    raise ClusterError("hung up", code="cluster.unreachable")
                yield item
        finally:
            self.open -= 1
            self._queues.remove(queue)

    def say(self, view, revision=1, age_seconds=0.0):
        self.current = Offer(view, revision, age_seconds)
        for queue in self._queues:
            queue.put_nowait(self.current)

    def hang_up(self):
        self.up = False
        for queue in self._queues:
            queue.put_nowait(None)


class Scene:
    def __init__(self, *names, **more):
        self.links = {name: FakeLink(name) for name in names}
        self.refusals = Refusals()
        self.board = ViewBoard("me", {"me", *names}, self.refusals)
        self.hint = ""
        self.stream = ViewStream("me", self.links, self.board, hint=lambda: self.hint, **more)

    def __getitem__(self, name):
        return self.links[name]

    async def until(self, condition, seconds=3.0):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def running(*names, **more):
    scene = Scene(*names, **more)
    scene.task = asyncio.create_task(scene.stream.run())
    try:
        yield scene
        if scene.task.done():
            scene.task.result()
    finally:
        scene.task.cancel()
        await asyncio.gather(scene.task, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("kvtierd.cluster.view_stream.FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr("kvtierd.cluster.view_stream.LONGEST_BACKOFF_SECONDS", 0.1)
    monkeypatch.setattr("kvtierd.cluster.view_stream.IGNORANT_SECONDS", 0.1)


async def test_it_finds_the_master_by_way_of_any_peer_and_then_watches_the_master():
    async with running("b", "c", first=["c"]) as scene:
        scene["c"].say(ClusterView(3, "b"))
        scene["b"].say(ClusterView(3, "b"), 2)
        await scene.until(lambda: scene.stream.source == "b")
        await scene.until(lambda: scene["c"].open == 0)
        scene["b"].say(ClusterView(3, "b", why="news"), 3)
        await scene.until(lambda: scene.board.newest.why == "news")


async def test_a_peer_that_knows_of_no_master_is_not_watched_for_long():
    async with running("b", "c", "d", first=["c"]) as scene:
        scene["d"].say(ClusterView(3, "d"))
        await scene.until(lambda: scene.stream.source == "d")
        assert scene["c"].opened >= 1


async def test_voters_are_asked_before_others():
    async with running(*"bcdefghij", first=["j"]) as scene:
        await scene.until(lambda: scene["j"].open == 1)
        assert [link.name for link in scene.links.values() if link.opened] == ["j"]


async def test_when_the_master_is_lost_the_view_stays_grows_old_and_comes_from_others():
    async with running("b", "c") as scene:
        scene["b"].say(ClusterView(3, "b"))
        scene["c"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.stream.source == "b")
        scene["b"].hang_up()
        await scene.until(lambda: scene.stream.source == "c")
        assert scene.board.newest.master == "b"
        scene["c"].say(ClusterView(3, "b"), 1, age_seconds=30.0)
        assert scene.board.age_seconds() < 30.0  # what the other one knows is older
        scene["c"].say(ClusterView(4, "c"))
        await scene.until(lambda: scene.board.newest.master == "c")


async def test_a_master_that_comes_back_is_watched_again_but_not_tried_all_the_time():
    async with running("b", "c") as scene:
        scene["b"].say(ClusterView(3, "b"))
        scene["c"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.stream.source == "b")
        scene["b"].hang_up()
        before = scene["b"].opened
        await asyncio.sleep(0.5)
        assert 2 <= scene["b"].opened - before <= 40
        scene["b"].up = True
        await scene.until(lambda: scene.stream.source == "b")


async def test_a_sign_of_life_ends_the_back_off(monkeypatch):
    monkeypatch.setattr("kvtierd.cluster.view_stream.FIRST_BACKOFF_SECONDS", 1000.0)
    monkeypatch.setattr("kvtierd.cluster.view_stream.LONGEST_BACKOFF_SECONDS", 1000.0)
    async with running("b", "c") as scene:
        scene["c"].say(ClusterView(3, "b"))
        scene["b"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.stream.source == "b")
        scene["b"].hang_up()
        await scene.until(lambda: scene.stream.source == "c")
        scene["b"].up = True
        scene["b"].last_contact_seconds = float("inf")
        scene["c"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.stream.source == "b")


async def test_a_new_master_is_followed_at_once_also_when_the_news_come_from_elsewhere():
    async with running("b", "c") as scene:
        scene["b"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.board.newest is not None and scene.stream.source == "b")
        scene["c"].say(ClusterView(4, "c"))
        scene.board.offer(ClusterView(4, "c"), 1, 0.0, "c")
        await scene.until(lambda: scene.stream.source == "c")


async def test_the_hint_of_an_election_comes_before_the_view():
    async with running("b", "c") as scene:
        scene["b"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene.board.newest is not None and scene.stream.source == "b")
        scene["c"].say(ClusterView(4, "c"))
        scene.hint = "c"
        scene.stream.look_again()
        await scene.until(lambda: scene.board.newest.master == "c")


async def test_a_replayed_lower_epoch_is_refused_and_the_stream_goes_on():
    async with running("b") as scene:
        scene["b"].say(ClusterView(5, "b"))
        await scene.until(lambda: scene.board.newest is not None)
        scene["b"].say(ClusterView(4, "b"), 99)
        scene["b"].say(ClusterView(5, "b", why="on"), 2)
        await scene.until(lambda: scene.board.newest.why == "on")
        assert scene.refusals.counts == {("b", "lower-epoch"): 1}
        assert scene["b"].opened == 1


async def test_a_stream_without_a_sign_of_life_is_given_up():
    async with running("b", "c", silence_seconds=0.1) as scene:
        scene["b"].say(ClusterView(3, "b"))
        await scene.until(lambda: scene["b"].opened >= 2)
        assert scene.board.newest.master == "b"


async def test_signs_of_life_keep_a_stream_and_changes_from_elsewhere_do_not():
    async with running("b", silence_seconds=0.2) as scene:
        scene["b"].say(ClusterView(3, "b"))
        for _ in range(10):
            await asyncio.sleep(0.05)
            scene["b"].say(ClusterView(3, "b"))
        assert scene["b"].opened == 1
        for number in range(10):
            await asyncio.sleep(0.05)
            scene.board.offer(ClusterView(3, "b"), 10 + number, 0.0, "b")
        assert scene["b"].opened >= 2


async def test_the_master_itself_watches_nobody_and_again_when_it_is_replaced():
    async with running("b") as scene:
        scene["b"].say(None)
        await scene.until(lambda: scene["b"].open == 1)
        scene.board.publish(ClusterView(3, "me"))
        await scene.until(lambda: scene["b"].open == 0)
        scene.board.offer(ClusterView(4, "b"), 1, 0.0, "b")
        await scene.until(lambda: scene["b"].open == 1)


async def test_with_nobody_up_it_neither_ends_nor_spins():
    async with running("b", "c") as scene:
        scene["b"].up = scene["c"].up = False
        await asyncio.sleep(0.5)
        assert 4 <= scene.stream.opened <= 100
        scene["c"].up = True
        scene["c"].say(ClusterView(1, "c"))
        await scene.until(lambda: scene.board.newest is not None)
