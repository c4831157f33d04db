"""Messages there and back, and those that no kvtierd would send."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.cluster.election_messages import (
    EpochAnswer,
    EpochQuery,
    Grant,
    Probe,
    Refusal,
    Release,
    Request,
    Willing,
)
from kvtierd.cluster.hello import EngineFacts, HostMemory, NodeFacts, OwnRank
from kvtierd.cluster.peer_wire import (
    MAX_EPOCH,
    election_from_wire,
    election_to_wire,
    facts_from_wire,
    facts_to_wire,
    view_from_wire,
    view_to_wire,
)
from kvtierd.cluster.standing import ClusterView, PoolRank
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.errors import ClusterError

NAMES = st.text("abc-1", max_size=8)
NUMBERS = st.integers(0, 2**63)
EPOCHS = st.integers(0, MAX_EPOCH)
SECONDS = st.floats(0, 1e9)
BASE = (NAMES, NAMES, NAMES, EPOCHS, NUMBERS)
MESSAGES = st.one_of(
    st.builds(Probe, *BASE, NUMBERS, SECONDS),
    st.builds(Willing, *BASE),
    st.builds(Request, *BASE, NUMBERS, SECONDS),
    st.builds(Grant, *BASE, SECONDS),
    st.builds(Refusal, *BASE, st.sampled_from(["promised", "no-memory", "digest-differs"]), NAMES, SECONDS),
    st.builds(Release, *BASE, NUMBERS, NAMES),
    st.builds(EpochQuery, *BASE),
    st.builds(EpochAnswer, *BASE, st.booleans(), SECONDS),
)


@given(MESSAGES)
def test_every_election_message_comes_out_as_it_went_in(message):
    wire = pb.ElectionMessage.FromString(election_to_wire(message).SerializeToString())
    assert election_from_wire(wire) == message


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1.0])
def test_times_that_are_none_are_refused(seconds):
    for body in (
        {"grant": pb.ElectionMessage.Grant(idle_seconds=seconds)},
        {"request": pb.ElectionMessage.Request(lease_seconds=seconds)},
        {"probe": pb.ElectionMessage.Probe(lease_seconds=seconds)},
        {"refusal": pb.ElectionMessage.Refusal(reason="promised", remaining_seconds=seconds)},
        {"epoch_answer": pb.ElectionMessage.EpochAnswer(promise_seconds=seconds)},
    ):
        with pytest.raises(ClusterError, match="malformed"):
            election_from_wire(pb.ElectionMessage(sender="b", **body))
    with pytest.raises(ClusterError):
        view_from_wire(pb.View(epoch=1, master="a", age_seconds=seconds))


@pytest.mark.parametrize(
    "wire",
    [
        pb.ElectionMessage(sender="b"),
        pb.ElectionMessage(sender="b", refusal=pb.ElectionMessage.Refusal(reason="because")),
        pb.ElectionMessage(sender="b", epoch=MAX_EPOCH + 1, willing=pb.ElectionMessage.Willing()),
        pb.ElectionMessage(sender="b" * 5000, willing=pb.ElectionMessage.Willing()),
        pb.ElectionMessage(sender="b\x1b[2J", willing=pb.ElectionMessage.Willing()),
    ],
    ids=["empty", "reason", "epoch", "long", "escape"],
)
def test_messages_that_no_kvtierd_would_send_are_refused(wire):
    with pytest.raises(ClusterError) as raised:
        election_from_wire(wire)
    assert raised.value.stable_code == "cluster.malformed"


def test_a_view_there_and_back():
    urls = ("tcp://10.0.0.1:5000", "tcp://10.0.0.1:6000")
    view = ClusterView(7, "a", "10.0.0.1", *urls, 1.5e9, "elected", "joinable", "4711")
    wire = view_to_wire("prod", view, 3, 0.5)
    assert view_from_wire(wire) == view
    assert (wire.cluster, wire.revision, wire.age_seconds) == ("prod", 3, 0.5)
    assert view_from_wire(view_to_wire("prod", None, 0, 0.0)) is None


def test_a_why_that_is_too_long_to_be_taken_is_cut_before_it_is_sent():
    view = view_from_wire(view_to_wire("prod", ClusterView(1, "a", why="x" * 10_000), 1, 0.0))
    assert set(view.why) == {"x"}


@pytest.mark.parametrize(
    "wire",
    [
        pb.View(epoch=1),
        pb.View(epoch=1, master="a", revision=2**63),
        pb.View(epoch=2**60, master="a"),
        pb.View(epoch=1, master="a", meta_service_url="tcp://a\n:1"),
    ],
    ids=["master", "revision", "epoch", "url"],
)
def test_views_that_no_kvtierd_would_send_are_refused(wire):
    with pytest.raises(ClusterError, match="malformed"):
        view_from_wire(wire)


def test_facts_there_and_back():
    facts = NodeFacts("a", "0.2", "1.3", "0", 16, "host_tcp", "abc", "master", 9, "a", 12.5, "4711", 2, 8)
    assert facts_from_wire(facts_to_wire(facts)) == facts
    more = dataclasses.replace(
        facts,
        memory=HostMemory(10, 20, 5, 3, ("kvtier-pool-added-0",)),
        ranks=(OwnRank(0, "kvtier-pool-0"), OwnRank(7, "kvtier-engine-e")),
        engines=(EngineFacts("kvtier-engine-e", "g", "0", "qwen", 128), EngineFacts("kvtier-engine-f")),
        busy_groups=("g", "*"),
    )
    assert facts_from_wire(facts_to_wire(more)) == more
    unknown = dataclasses.replace(more, memory=HostMemory(), engines=(EngineFacts("e", hash_seed=""),))
    assert facts_from_wire(facts_to_wire(unknown)) == unknown, "not known, not set and 0 stay three things"
    for many in (
        {"ranks": [pb.OwnRank()] * 1025},
        {"engines": [pb.EngineIdentity()] * 65},
        {"memory": pb.HostMemory(holders=["x"] * 65)},
        {"engines": [pb.EngineIdentity(model="\x1b[2J")]},
    ):
        with pytest.raises(ClusterError, match="malformed"):
            facts_from_wire(pb.NodeFacts(node="a", **many))
    with pytest.raises(ClusterError, match="malformed"):
        facts_from_wire(pb.NodeFacts(node="a", uptime_seconds=-1))


def test_the_members_of_the_pool_travel_with_the_view() -> None:
    ranks = (PoolRank(0, "provider", True, 64 << 30), PoolRank(7, "unknown", False))
    view = ClusterView(4, "a", pool_ranks=ranks)
    assert view_from_wire(view_to_wire("prod", view, 3, 0.5)) == view
    wire = view_to_wire("prod", view, 3, 0.5)
    wire.pool_ranks[0].role = "provider\x1b[31m"
    with pytest.raises(ClusterError):
        view_from_wire(wire)
    wire = view_to_wire("prod", view, 3, 0.5)
    wire.pool_ranks.extend([wire.pool_ranks[0]] * 1024)
    with pytest.raises(ClusterError):
        view_from_wire(wire)
