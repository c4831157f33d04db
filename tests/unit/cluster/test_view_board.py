"""Which view is the newest, and what is refused."""

import asyncio

import pytest
from structlog.testing import capture_logs

from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import ClusterView
from kvtierd.cluster.view_board import ViewBoard


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def refusals():
    return Refusals()


@pytest.fixture
def board(now, refusals):
    return ViewBoard("a", {"a", "b", "c"}, refusals, now=lambda: now[0])


def view(epoch, master, **more):
    return ClusterView(epoch, master, **more)


def test_a_later_epoch_replaces_an_earlier_one_and_not_the_other_way_round(board):
    assert board.offer(view(3, "b"), 1, 0.0, "b")
    assert board.offer(view(4, "c"), 1, 0.0, "c")
    assert not board.offer(view(3, "b"), 99, 0.0, "b")
    assert board.newest == view(4, "c")


def test_within_an_epoch_the_revision_decides(board):
    assert board.offer(view(3, "b", why="second"), 2, 0.0, "c")
    assert not board.offer(view(3, "b", why="first"), 1, 0.0, "b")
    assert not board.offer(view(3, "b", why="again"), 2, 0.0, "b")
    assert board.newest.why == "second"
    assert board.offer(view(3, "b", why="third"), 3, 0.0, "b")


def test_a_replayed_lower_epoch_is_counted_each_time_and_logged_once(board, refusals):
    board.offer(view(5, "c"), 1, 0.0, "b")
    with capture_logs() as logs:
        for _ in range(20):
            board.offer(view(4, "c"), 7, 0.0, "b")
    assert refusals.counts == {("b", "lower-epoch"): 20}
    assert len(logs) == 1
    assert "epoch 4" in logs[0]["why"]
    assert "epoch 5" in logs[0]["why"]


def test_a_replaced_master_that_still_believes_in_itself_is_counted(board, refusals):
    board.offer(view(5, "c"), 1, 0.0, "c")
    board.offer(view(4, "b"), 3, 0.0, "b")
    assert refusals.counts == {("b", "lower-epoch"): 1}


def test_a_peer_that_has_just_not_heard_yet_or_only_remembers_is_nothing_to_log(board, refusals):
    board.offer(view(5, "c"), 1, 0.0, "c")
    board.offer(view(4, "c"), 1, 0.0, "b")
    board.offer(view(3, "b"), 0, 0.0, "b")
    assert refusals.counts == {}


def test_two_masters_in_one_epoch_are_a_conflict_and_the_first_stays(board, refusals):
    told = []
    board.on_conflict = lambda view, source: told.append((view.master, source))
    board.offer(view(5, "c"), 1, 0.0, "c")
    assert not board.offer(view(5, "b"), 9, 0.0, "b")
    assert board.newest.master == "c"
    assert refusals.counts == {("b", "epoch-conflict"): 1}
    assert told == [("b", "b")]


def test_a_master_that_is_no_node_of_the_cluster_is_refused(board, refusals):
    assert not board.offer(view(5, "x"), 1, 0.0, "b")
    assert board.newest is None
    assert refusals.counts == {("b", "unknown-master"): 1}


def test_a_peer_that_knows_nothing_changes_nothing(board):
    board.offer(view(5, "c"), 1, 0.0, "c")
    assert not board.offer(None, 0, 0.0, "b")
    assert board.newest == view(5, "c")


def test_the_age_is_that_of_the_masters_word_whoever_passed_it_on(board, now):
    board.offer(view(5, "c"), 1, 40.0, "b")
    assert board.age_seconds() == pytest.approx(40.0)
    now[0] += 2.0
    assert board.age_seconds() == pytest.approx(42.0)
    board.offer(view(5, "c"), 1, 50.0, "b")  # older than what is known: no confirmation
    assert board.age_seconds() == pytest.approx(42.0)
    board.offer(view(5, "c"), 1, 0.0, "c")
    assert board.age_seconds() == pytest.approx(0.0)


def test_the_master_publishes_and_its_view_never_grows_old(board, now):
    assert board.publish(view(5, "a", why="bare"))
    assert board.publish(view(5, "a", why="full"))
    assert (board.newest.why, board.posted.revision, board.mine) == ("full", 2, True)
    now[0] += 100.0
    assert board.age_seconds() == 0.0
    board.withdraw()
    now[0] += 3.0
    assert not board.mine
    assert board.age_seconds() == pytest.approx(3.0)


def test_what_a_master_published_is_its_word_until_the_end_of_its_lease_whether_it_has_noticed_or_not(
    board, now
):
    board.mine_until_seconds = now[0] + 6.0
    board.publish(view(5, "a"))
    now[0] += 5.0
    assert (board.mine, board.age_seconds()) == (True, 0.0)
    now[0] += 11.0  # frozen meanwhile
    assert not board.mine
    assert board.age_seconds() == pytest.approx(10.0)
    board.withdraw()
    assert board.age_seconds() == pytest.approx(10.0)


def test_publishing_what_is_posted_already_wakes_nobody(board):
    board.publish(view(5, "a"))
    told = []
    board.listeners.append(lambda: told.append(1))
    assert board.publish(view(5, "a"))
    assert told == []
    assert board.posted.revision == 1


def test_a_replaced_master_can_not_publish_any_more(board):
    board.publish(view(5, "a"))
    assert board.offer(view(6, "b"), 1, 0.0, "b")
    assert not board.mine
    assert not board.publish(view(5, "a", why="still"))
    assert not board.publish(view(6, "a"))
    assert board.newest.master == "b"


def test_a_master_whose_process_was_restarted_gets_past_its_old_revision(board):
    board.publish(view(5, "a", why="new"))
    board.offer(view(5, "a", why="old"), 7, 3.0, "b")
    assert (board.newest.why, board.posted.revision) == ("new", 8)


def test_a_memory_gives_way_to_any_word_in_the_same_epoch(board):
    board.seed(5, "b", "remembered")
    board.seed(4, "c", "older")
    assert board.newest.master == "b"
    assert board.offer(view(5, "b", why="word"), 1, 0.0, "b")
    board.seed(5, "b", "remembered")
    assert board.newest.why == "word"


async def test_waiting_for_a_change(board):
    first = board.posted
    assert await board.changed(first, 0.01) is first
    waiting = asyncio.create_task(board.changed(first, 10.0))
    await asyncio.sleep(0)
    board.publish(view(1, "a"))
    async with asyncio.timeout(1):
        assert (await waiting).view == view(1, "a")
    assert (await board.changed(first, 10.0)).view == view(1, "a")
