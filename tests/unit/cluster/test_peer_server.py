"""The peers' server over real gRPC: who gets in, what is bounded, what is counted and logged once."""

import asyncio
import contextlib
import types

import grpc
import pytest
import trustme
from certificates_lab import CLUSTER, put, yesterday
from grpc_health.v1 import health_pb2, health_pb2_grpc
from peer_lab import free_port, settings
from structlog.testing import capture_logs

from kvtierd.cluster import peer_server as module
from kvtierd.cluster.election_messages import EpochAnswer, EpochQuery, Refusal
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.peer_wire import MAX_MESSAGE_BYTES, election_to_wire
from kvtierd.cluster.standing import ClusterView, Standing
from kvtierd.cluster.tls import PeerTls
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.cluster.v1 import peers_pb2_grpc
from kvtierd.errors import ClusterError
from kvtierd.events import Event

NAMES = ("a", "b", "c")


class Served:
    """Node a serves; ``caller(name)`` calls it as that node."""

    def __init__(self, directory, ca, port, **more):
        self.directory, self.ca, self.port, self.more = directory, ca, port, more
        self.stack = contextlib.AsyncExitStack()
        chosen = self.settings("a")
        self.network = PeerNetwork(chosen, "a", PeerTls(chosen), facts=lambda: NodeFacts("a", hash_seed="0"))

    def settings(self, name, ca=None, **issue):
        if self.ca is None:
            return settings(NAMES, self.port, **self.more)
        tls = self.directory / f"{name}-{len(list(self.directory.iterdir()))}"
        put(tls, ca or self.ca, name, **issue)
        return settings(NAMES, self.port, tls=tls, **self.more)

    @property
    def refused(self):
        return self.network.refusals.counts

    def caller(self, name, *, options=(), **issue):
        channel = PeerTls(self.settings(name, **issue)).channel(
            "a", options=[("grpc.use_local_subchannel_pool", 1), *options]
        )
        self.stack.push_async_callback(channel.close)
        return types.SimpleNamespace(stub=peers_pb2_grpc.PeersStub(channel), channel=channel)

    def link_of(self, name, **issue):
        """The network of another node, for its link to a; it does not serve."""
        chosen = self.settings(name, **issue)
        network = PeerNetwork(chosen, name, PeerTls(chosen), facts=lambda: NodeFacts(name))
        self.stack.push_async_callback(network.close)
        return network


@contextlib.asynccontextmanager
async def serving(directory, ca, **more):
    served = Served(directory, ca, free_port(len(NAMES)), **more)
    await served.network.server.start()
    try:
        yield served
    finally:
        await served.stack.aclose()
        await served.network.close()


@pytest.fixture
def ca():
    return trustme.CA()


@pytest.fixture
async def plain(tmp_path):
    async with serving(tmp_path, None) as served:
        yield served


@pytest.fixture
async def secure(tmp_path, ca):
    async with serving(tmp_path, ca) as served:
        yield served


def hello(node="b", cluster=CLUSTER, **more):
    return pb.HelloRequest(cluster=cluster, facts=pb.NodeFacts(node=node, **more))


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


QUERY = EpochQuery(CLUSTER, "digest", "b", 0, 7)
DENIED = grpc.StatusCode.PERMISSION_DENIED


# -- what it answers


async def test_hello_is_answered_with_facts_view_and_times_and_both_sides_note_the_contact(secure):
    secure.network.board.publish(ClusterView(4, "a", "10.0.0.1"))
    secure.network.standing = Standing("master", 4, "a")
    other = secure.link_of("b")
    link = other.links["a"]
    assert await other.greet(["a", "c"], 5.0) == {"a"}
    assert (link.facts.hash_seed, link.facts.role, link.facts.epoch) == ("0", "master", 4)
    assert other.board.newest == ClusterView(4, "a", "10.0.0.1")
    assert abs(link.clock.seconds) < 1.0
    assert link.last_contact_seconds is not None
    mine = secure.network.links["b"]
    assert mine.facts.node == "b"
    assert secure.network.contact("b").last_contact_seconds < 5.0
    assert "cannot" not in other.contact("c").problem
    assert other.contact("c").problem


async def test_a_view_in_a_hello_is_news_for_the_server_too(secure):
    other = secure.link_of("b")
    other.board.offer(ClusterView(9, "c"), 3, 0.0, "c")
    await other.greet(["a"], 5.0)
    assert secure.network.board.newest == ClusterView(9, "c")
    assert secure.network.board.posted.revision == 3


async def test_an_election_message_goes_to_the_elector_and_its_answers_come_back(secure):
    async def elect(message):
        assert message == QUERY
        return [EpochAnswer(CLUSTER, "digest", "a", 3, 7, True, 1.2)]

    secure.network.desk.elect = elect
    other = secure.link_of("b")
    assert await other.elect("a", QUERY, 5.0) == [EpochAnswer(CLUSTER, "digest", "a", 3, 7, True, 1.2)]


async def test_a_voter_with_other_settings_is_counted_and_logged_once(secure):
    async def elect(message):
        return [Refusal(CLUSTER, "digest", "a", 0, 7, "digest-differs")]

    secure.network.desk.elect = elect
    other = secure.link_of("b")
    with capture_logs() as logs:
        for _ in range(5):
            await other.elect("a", QUERY, 5.0)
    assert secure.refused == {("b", "digest-differs"): 5}
    assert len(logs) == 1
    assert "list of voters" in logs[0]["why"]


async def test_a_voter_that_does_not_vote_says_why(secure):
    async def elect(message):
        raise ClusterError("this voter does not vote at present: no space", code="cluster.no-vote")

    secure.network.desk.elect = elect
    other = secure.link_of("b")
    with pytest.raises(ClusterError) as raised:
        await other.elect("a", QUERY, 5.0)
    assert "no space" in raised.value.why
    assert "no space" in other.contact("a").problem


async def test_answers_that_are_from_somebody_else_are_refused_by_the_link(secure):
    async def elect(message):
        return [EpochAnswer(CLUSTER, "digest", "c", 3, 7, True, 1.2)]

    secure.network.desk.elect = elect
    other = secure.link_of("b")
    with pytest.raises(ClusterError, match="says it is from c"):
        await other.elect("a", QUERY, 5.0)
    assert other.refusals.counts == {("a", "malformed-answer"): 1}


async def test_taking_over_and_its_refusal_cross_with_code_reason_and_hint(secure):
    async def take_over(sender, epoch):
        if epoch == 1:
            raise ClusterError("a cannot", why="paused", hint="resume", code="cluster.unfit")
        return epoch + 1

    secure.network.desk.take_over = take_over
    other = secure.link_of("b")
    assert await other.take_over("a", 4, 5.0) == 5
    with pytest.raises(ClusterError) as raised:
        await other.take_over("a", 1, 5.0)
    error = raised.value
    assert (error.stable_code, error.message, error.why, error.hint) == (
        "cluster.unfit", "a cannot", "paused", "resume",
    )  # fmt: skip


async def test_preparing_and_its_refusal_cross_with_code_reason_and_hint(secure):
    asked = []

    async def prepare(sender, epoch, seconds):
        asked.append((sender, epoch, seconds))
        if epoch == 1:
            raise ClusterError("it does not come up", why="port taken", code="cluster.not-fit")

    other = secure.link_of("b")
    with pytest.raises(ClusterError, match="cannot become the master"):
        await other.prepare("a", 4, 40.0, 5.0)
    secure.network.desk.prepare = prepare
    await other.prepare("a", 4, 40.0, 5.0)
    with pytest.raises(ClusterError) as raised:
        await other.prepare("a", 1, 40.0, 5.0)
    assert (raised.value.stable_code, raised.value.why) == ("cluster.not-fit", "port taken")
    with pytest.raises(ClusterError):
        await other.prepare("a", 4, 3600.0, 5.0)  # nobody is given an hour without a lease
    assert asked == [("b", 4, 40.0), ("b", 1, 40.0)]


async def test_what_happened_is_told_to_a_peer_and_to_nobody_else(secure):
    events = [Event(n, 5.0, "info", "k", "", f"event {n}") for n in (1, 2, 3)]
    secure.network.desk.events = lambda: events
    other = secure.link_of("b")
    assert await other.links["a"].events(0, 1, 5.0) == events[1:]
    caller = secure.caller("x")
    request = pb.PeerEventsRequest(cluster=CLUSTER, sender="x")
    assert await status_of(caller.stub.Events(request, timeout=5)) == DENIED


async def test_a_node_without_elections_refuses_them(secure):
    caller = secure.caller("b")
    assert await status_of(caller.stub.Elect(election_to_wire(QUERY), timeout=5)) == DENIED
    assert (
        await status_of(caller.stub.TakeOver(pb.TakeOverRequest(cluster=CLUSTER, sender="b"), timeout=5))
        == DENIED
    )
    assert secure.refused == {("b", "no-elections"): 1, ("b", "no-take-over"): 1}


async def test_the_health_service_answers(secure):
    stub = health_pb2_grpc.HealthStub(secure.caller("b").channel)
    for service in ("", "kvtierd.v1.Peers"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# -- who gets in


async def test_a_node_that_is_not_listed_is_refused_whatever_it_says(secure):
    caller = secure.caller("x")
    with capture_logs() as logs:
        assert await status_of(caller.stub.Hello(hello("x"), timeout=5)) == DENIED
        assert await status_of(caller.stub.Hello(hello("x"), timeout=5)) == DENIED
        assert await status_of(caller.stub.Hello(hello("b"), timeout=5)) == DENIED
    assert sorted(cause for _, cause in secure.refused) == ["not-listed", "not-that-node"]
    assert sum(secure.refused.values()) == 3
    assert len(logs) == 2
    assert all("b" not in peer for peer, _ in secure.refused)  # not counted against the honest node


async def test_a_node_may_not_speak_for_another_one(secure):
    caller = secure.caller("c")
    assert await status_of(caller.stub.Elect(election_to_wire(QUERY), timeout=5)) == DENIED
    call = caller.stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=5)
    assert await status_of(call.read()) == DENIED


async def test_a_node_of_another_cluster_is_refused_by_name_even_without_tls(plain):
    caller = plain.caller("b")
    assert await status_of(caller.stub.Hello(hello(cluster="test"), timeout=5)) == DENIED
    assert plain.refused == {("b", "cluster-differs"): 1}
    assert await status_of(caller.stub.Hello(hello("x"), timeout=5)) == DENIED


async def test_the_node_itself_is_no_peer(plain):
    assert await status_of(plain.caller("a").stub.Hello(hello("a"), timeout=5)) == DENIED


@pytest.mark.parametrize("wrong", ["authority", "expired", "none", "plain"])
async def test_a_caller_without_a_right_certificate_gets_no_call_through_and_is_counted(secure, wrong, ca):
    if wrong == "none":
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        options = [("grpc.ssl_target_name_override", f"a.{CLUSTER}.kvtierd")]
        channel = grpc.aio.secure_channel(f"127.0.77.1:{secure.port}", credentials, options=options)
    elif wrong == "plain":
        channel = grpc.aio.insecure_channel(f"127.0.77.1:{secure.port}")
    elif wrong == "authority":
        # It trusts the right authority, but its own certificate is signed by another one.
        channel = _channel_with(secure, trustme.CA(), ca)
    else:
        channel = _channel_with(secure, ca, ca, expires_at=yesterday())
    secure.stack.push_async_callback(channel.close)
    stub = peers_pb2_grpc.PeersStub(channel)
    with capture_logs() as logs:
        for _ in range(2):
            assert await status_of(stub.Hello(hello(), timeout=3)) == grpc.StatusCode.UNAVAILABLE
        secure.network.server.handshakes.look()
        secure.network.server.handshakes.look()
        secure.network.server.handshakes.look()
    assert set(secure.refused) == {("(unknown)", "no-handshake")}
    assert len(logs) == 1
    assert "certificate" in logs[0]["why"]


def _channel_with(served, ca, trusted, **issue):
    issued = ca.issue_cert("b", f"b.{CLUSTER}.kvtierd", not_after=issue.get("expires_at"))
    credentials = grpc.ssl_channel_credentials(
        trusted.cert_pem.bytes(), issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    )
    options = [("grpc.ssl_target_name_override", f"a.{CLUSTER}.kvtierd")]
    return grpc.aio.secure_channel(f"127.0.77.1:{served.port}", credentials, options=options)


async def test_good_callers_are_not_counted_as_failed_handshakes(secure):
    for _ in range(3):
        other = secure.link_of("b")
        assert await other.greet(["a"], 5.0) == {"a"}
        assert await other.greet(["a"], 5.0) == {"a"}
    stub = health_pb2_grpc.HealthStub(secure.caller("c").channel)
    await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    for _ in range(3):
        secure.network.server.handshakes.look()
    assert secure.refused == {}


@pytest.mark.parametrize(
    ("issue", "cause", "says"),
    [
        ({"expires_at": yesterday()}, "call-tls", "has expired"),
        ({"names": ("c", f"c.{CLUSTER}.kvtierd")}, "call-tls", "is another node's"),
        ({"ca": "other"}, "call-tls", "not signed by the cluster's CA"),
    ],
)
async def test_a_server_with_a_wrong_certificate_is_not_believed_and_logged_once(
    tmp_path, ca, issue, cause, says
):
    async with serving(tmp_path, ca) as served:
        if issue.pop("ca", None):
            issue["ca"] = trustme.CA()
        # Another server at b's address, with what should not be believed.
        chosen = served.settings("b", **issue)
        other = PeerNetwork(chosen, "b", PeerTls(chosen))
        try:
            await other.server.start()
            with capture_logs() as logs:
                for _ in range(3):
                    assert await served.network.greet(["b"], 3.0) == set()
        finally:
            await other.close()
        assert served.refused == {("b", cause): 3}
        assert says in served.network.contact("b").problem
        assert len(logs) == 1


# -- what is bounded


async def test_a_message_that_is_too_large_is_refused_counted_and_logged_once(secure, monkeypatch):
    monkeypatch.setattr(module, "UNREAD_SECONDS", 0.3)
    caller = secure.caller("b", options=[("grpc.max_send_message_length", -1)])
    large = hello(version="x" * (MAX_MESSAGE_BYTES + 1))
    with capture_logs() as logs:
        for _ in range(3):
            metadata = (("kvtierd-node", "b"),)
            status = await status_of(caller.stub.Hello(large, timeout=1, metadata=metadata))
            assert status in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
        await asyncio.sleep(0.5)
    assert secure.refused == {("b", "unreadable"): 3}
    assert len(logs) == 1
    assert "262144 bytes" in logs[0]["why"]
    assert (await caller.stub.Hello(hello(), timeout=5)).facts.node == "a"


async def test_messages_that_no_kvtierd_would_send_are_counted_and_logged_once(secure):
    caller = secure.caller("b")
    with capture_logs() as logs:
        for request in (hello(version="x" * 5000), hello(role="\x1b[31m"), hello(epoch=2**60)):
            status = await status_of(caller.stub.Hello(request, timeout=5))
            assert status == grpc.StatusCode.INVALID_ARGUMENT
    assert secure.refused == {("b", "malformed"): 3}
    assert len(logs) == 1


async def test_a_peer_that_calls_without_end_is_slowed_down_and_others_are_not(secure, monkeypatch):
    monkeypatch.setattr(module, "BURST_CALLS", 10.0)
    monkeypatch.setattr(module, "CALLS_PER_SECOND", 5.0)
    caller = secure.caller("b")
    statuses = []
    for _ in range(20):
        try:
            await caller.stub.Hello(hello(), timeout=5)
        except grpc.aio.AioRpcError as error:
            statuses.append(error.code())
    assert statuses
    assert set(statuses) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert secure.refused == {("b", "too-many-calls"): len(statuses)}
    await secure.caller("c").stub.Hello(hello("c"), timeout=5)


async def views_of(call, count):
    async with asyncio.timeout(10):
        return [await call.read() for _ in range(count)]


async def test_a_watcher_gets_what_there_is_each_change_and_signs_of_life(secure, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.1)
    call = secure.caller("b").stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=20)
    (nothing,) = await views_of(call, 1)
    assert (nothing.cluster, nothing.epoch) == (CLUSTER, 0)
    secure.network.board.publish(ClusterView(3, "a", why="x"))
    while not (view := (await views_of(call, 1))[0]).epoch:
        pass
    assert (view.epoch, view.master, view.why, view.revision, view.age_seconds) == (3, "a", "x", 1, 0.0)
    again = await views_of(call, 3)
    assert all((v.epoch, v.revision) == (3, 1) for v in again)
    secure.network.board.withdraw()
    await asyncio.sleep(0.3)
    assert (await views_of(call, 4))[-1].age_seconds > 0.2
    call.cancel()


async def test_a_view_learned_from_one_peer_is_served_to_another_with_its_age(secure):
    secure.network.board.offer(ClusterView(3, "c"), 5, 12.0, "c")
    call = secure.caller("b").stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=20)
    (view,) = await views_of(call, 1)
    assert (view.epoch, view.master, view.revision) == (3, "c", 5)
    assert 12.0 <= view.age_seconds < 20.0
    call.cancel()


async def test_only_a_peers_newest_streams_stay_open(secure):
    caller = secure.caller("b")
    calls = []
    for _ in range(module.STREAMS_PER_PEER + 3):
        call = caller.stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=20)
        await views_of(call, 1)
        calls.append(call)
    secure.network.board.publish(ClusterView(3, "a"))  # those that are over notice with the next view
    for call in calls[:3]:
        async with asyncio.timeout(5):
            while await call.read() is not grpc.aio.EOF:
                pass
    assert secure.network.server.streams == module.STREAMS_PER_PEER
    for call in calls[3:]:
        assert not call.done()
        call.cancel()


async def test_a_watcher_that_goes_away_leaves_nothing_behind(secure):
    call = secure.caller("b").stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=20)
    await views_of(call, 1)
    assert secure.network.server.streams == 1
    call.cancel()
    async with asyncio.timeout(5):
        while secure.network.server.streams:
            await asyncio.sleep(0.01)


async def test_a_watcher_that_does_not_take_what_it_gets_is_dropped_others_go_on(secure, monkeypatch):
    monkeypatch.setattr(module, "SLOW_SECONDS", 0.5)
    slow = secure.caller("b").stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="b"), timeout=60)
    quick = secure.caller("c").stub.WatchView(pb.WatchRequest(cluster=CLUSTER, sender="c"), timeout=60)
    await views_of(slow, 1)
    last = 0
    with capture_logs() as logs:
        async with asyncio.timeout(30):
            while ("b", "slow") not in secure.refused:
                last += 1
                secure.network.board.publish(ClusterView(3, "a", why=f"{last} " + "x" * 2000))
                while (await quick.read()).revision < last:
                    pass
    assert secure.refused == {("b", "slow"): 1}
    assert len(logs) == 1
    async with asyncio.timeout(5):
        while secure.network.server.streams != 1:
            await asyncio.sleep(0.01)
    quick.cancel()
    slow.cancel()


async def test_a_port_that_is_taken_is_an_error_that_names_the_settings(plain):
    second = PeerNetwork(plain.settings("a"), "a", PeerTls(plain.settings("a")))
    try:
        with pytest.raises(ClusterError) as raised:
            await second.server.start()
        assert raised.value.stable_code == "cluster.listen"
        assert "port" in raised.value.hint
    finally:
        await second.close()


async def test_a_master_has_a_pool_holder_added_or_removed(secure):
    asked = []

    async def change_holders(change):
        asked.append(change)
        if change.remove_unit == "kvtier-engine-e":
            raise ClusterError("that is no added pool holder", code="act.not-added")
        return change.remove_unit or "kvtier-pool-added-0", change.add_bytes or 64

    other = secure.link_of("b")
    with pytest.raises(ClusterError):
        await other.change_holders("a", 4, "t1", "the pool is too small", 5.0, add_bytes=1 << 40)
    secure.network.desk.change_holders = change_holders
    assert await other.change_holders("a", 4, "t1", "too small", 5.0, add_bytes=1 << 40) == (
        "kvtier-pool-added-0",
        1 << 40,
    )
    assert await other.change_holders("a", 4, "t2", "idle", 5.0, remove_unit="kvtier-pool-added-0") == (
        "kvtier-pool-added-0",
        64,
    )
    with pytest.raises(ClusterError, match="no added pool holder") as caught:
        await other.change_holders("a", 4, "t3", "x", 5.0, remove_unit="kvtier-engine-e")
    assert caught.value.stable_code == "act.not-added"
    assert [(c.sender, c.epoch, c.token, c.add_bytes, c.remove_unit) for c in asked] == [
        ("b", 4, "t1", 1 << 40, ""),
        ("b", 4, "t2", 0, "kvtier-pool-added-0"),
        ("b", 4, "t3", 0, "kvtier-engine-e"),
    ]
