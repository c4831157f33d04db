"""What a node has to do: one rule a test, and that nothing unsafe ever comes out, whatever is seen."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.cluster.duty import (
    ArmGuard,
    ClientsSeen,
    EndpointSeen,
    KillMeta,
    MetaSeen,
    OpenEndpoint,
    PointClients,
    PointEndpoint,
    Publish,
    RestMeta,
    Seen,
    WantMeta,
    duties,
)
from kvtierd.cluster.standing import FOREVER, ClusterView, Standing

MASTER = Standing("master", epoch=5, master="a", until_seconds=106.0, serve_after_seconds=101.0)
FOLLOWER = Standing("follower", epoch=5, master="b")
UP = MetaSeen(running=True, ready=True)


def seen(standing: Standing = MASTER, **changes: object) -> Seen:
    return dataclasses.replace(Seen(now_seconds=102.0, node="a", standing=standing), **changes)  # type: ignore[arg-type]


def of(kind: type, found: tuple[object, ...]) -> list[object]:
    return [duty for duty in found if isinstance(duty, kind)]


def test_the_guard_is_armed_before_the_meta_service_is_wanted() -> None:
    found = duties(seen())
    assert found[:2] == (ArmGuard(106.0), WantMeta())
    assert duties(seen(armed_until_seconds=106.0))[0] == WantMeta()


def test_a_new_master_waits_until_the_one_before_is_dead() -> None:
    (rest,) = of(RestMeta, duties(seen(now_seconds=100.5)))
    assert "0.5s more" in rest.why  # type: ignore[attr-defined]
    assert not of(WantMeta, duties(seen(now_seconds=100.5)))


def test_nothing_is_started_into_a_lease_that_ends() -> None:
    assert not of(WantMeta, duties(seen(now_seconds=105.8)))
    assert of(WantMeta, duties(seen(now_seconds=105.8, meta=UP))), "what runs goes on until the guard ends it"


def test_a_lease_that_has_ended_kills_even_if_nobody_said_so() -> None:
    found = duties(seen(now_seconds=106.0, meta=UP))
    assert of(KillMeta, found) == [KillMeta("its lease has ended")]
    assert not of(ArmGuard, found)
    assert not of(Publish, found)


def test_a_follower_kills_and_rests() -> None:
    found = duties(seen(FOLLOWER, meta=UP))
    assert found == (KillMeta("standby: b is the master"), RestMeta("standby: b is the master"))
    assert duties(seen(FOLLOWER)) == (RestMeta("standby: b is the master"),)


def test_not_to_know_the_master_stops_nothing_and_starts_nothing() -> None:
    unknown = Standing("unknown", why="etcd does not answer")
    assert duties(seen(unknown, meta=UP)) == ()
    (rest,) = duties(seen(unknown))
    assert isinstance(rest, RestMeta)
    assert "etcd does not answer" in rest.why


def test_the_endpoint_follows_the_higher_epoch_and_only_that() -> None:
    assert of(PointEndpoint, duties(seen(endpoint=EndpointSeen(epoch=4, target="b")))) == [
        PointEndpoint(5, "a")
    ]
    assert not of(PointEndpoint, duties(seen(endpoint=EndpointSeen(epoch=5, target="a"))))
    assert not of(PointEndpoint, duties(seen(endpoint=EndpointSeen(epoch=6, target="b"))))
    waiting = ClusterView(epoch=7, master="c", tier_state="down")
    assert not of(
        PointEndpoint, duties(seen(FOLLOWER, view=waiting, endpoint=EndpointSeen(epoch=5, target="b")))
    )
    view = ClusterView(epoch=7, master="c", tier_state="meta_up")
    pointed = duties(seen(FOLLOWER, view=view, endpoint=EndpointSeen(epoch=5, target="b")))
    assert of(PointEndpoint, pointed) == [PointEndpoint(7, "c")]
    assert not of(
        PointEndpoint, duties(seen(FOLLOWER, view=view, endpoint=EndpointSeen(epoch=8, target="d")))
    )


def test_an_endpoint_that_was_started_anew_is_pointed_again() -> None:
    assert of(PointEndpoint, duties(seen(endpoint=EndpointSeen(epoch=5, target="")))) == [
        PointEndpoint(5, "a")
    ]


def test_a_follower_s_endpoint_is_opened_for_the_process_that_the_master_has_opened() -> None:
    held = EndpointSeen(epoch=7, target="c", mode="recover", admission="survivors", life="40")
    for view, opened in (
        (ClusterView(epoch=7, master="c", served_life="40"), True),
        (ClusterView(epoch=7, master="c", served_life="39"), False),  # the process before this one
        (ClusterView(epoch=7, master="c", served_life=""), False),
        (ClusterView(epoch=6, master="c", served_life="40"), False),
    ):
        assert bool(of(OpenEndpoint, duties(seen(FOLLOWER, view=view, endpoint=held)))) is opened
    gone = dataclasses.replace(held, life="")
    view = ClusterView(epoch=7, master="c", served_life="")
    assert not of(OpenEndpoint, duties(seen(FOLLOWER, view=view, endpoint=gone)))


def test_a_master_says_which_process_is_open_only_when_it_is() -> None:
    endpoint = EndpointSeen(epoch=5, target="a", life="9")
    assert duties(seen(endpoint=endpoint, tier_serving=True, tier_state="joinable"))[-1] == Publish(
        5, "joinable", "9"
    )
    for closed in (
        seen(endpoint=endpoint, tier_serving=False),
        seen(endpoint=dataclasses.replace(endpoint, mode="recover"), tier_serving=True),
        seen(endpoint=dataclasses.replace(endpoint, admission="survivors"), tier_serving=True),
        seen(endpoint=dataclasses.replace(endpoint, epoch=4), tier_serving=True),
        seen(endpoint=None, tier_serving=True),
    ):
        (told,) = of(Publish, duties(closed))
        assert told.served_life == ""  # type: ignore[attr-defined]


def test_the_endpoint_is_not_pointed_before_the_one_before_is_dead() -> None:
    early = seen(now_seconds=100.5, endpoint=EndpointSeen(epoch=4, target="b"))
    assert not of(PointEndpoint, duties(early))


def test_a_meta_service_that_answers_is_up_for_the_others() -> None:
    answering = EndpointSeen(epoch=5, target="a", life="9", mode="recover")
    assert duties(seen(endpoint=answering))[-1] == Publish(5, "meta_up", "")
    assert duties(seen(endpoint=answering, tier_state="pool_ready"))[-1] == Publish(5, "pool_ready", "")
    assert duties(seen(endpoint=dataclasses.replace(answering, target="")))[-1] == Publish(5, "down", "")


def test_the_target_of_a_switchover_may_run_a_meta_service_that_nobody_uses() -> None:
    permitted = seen(FOLLOWER, permit_until_seconds=110.0)
    assert duties(permitted) == (ArmGuard(110.0), WantMeta())
    up = dataclasses.replace(permitted, meta=UP, armed_until_seconds=110.0)
    assert duties(up) == (WantMeta(),)
    over = duties(dataclasses.replace(up, now_seconds=110.0))
    assert of(KillMeta, over)
    assert of(RestMeta, over)
    gained = duties(dataclasses.replace(up, standing=MASTER))
    assert gained[:2] == (ArmGuard(MASTER.until_seconds), WantMeta())
    assert not of(ArmGuard, duties(dataclasses.replace(permitted, standing=Standing("unknown"))))


def test_while_mastership_is_handed_over_nothing_starts_here() -> None:
    found = duties(seen(handing_over=True, endpoint=EndpointSeen(epoch=4)))
    assert not of(WantMeta, found)
    assert not of(PointEndpoint, found)


lives = ["", "1", "2"]
roles = st.sampled_from(["master", "follower", "unknown"])
views = st.none() | st.builds(
    ClusterView, epoch=st.integers(0, 9), master=st.sampled_from("abc"), served_life=st.sampled_from(lives)
)
endpoints = st.none() | st.builds(
    EndpointSeen,
    epoch=st.integers(0, 9),
    target=st.sampled_from(["", "a", "b", "c"]),
    mode=st.sampled_from(["serve", "quiesce", "recover"]),
    admission=st.sampled_from(["all", "survivors"]),
    life=st.sampled_from(lives),
)
anything = st.builds(
    Seen,
    now_seconds=st.floats(0, 20),
    node=st.just("a"),
    standing=st.builds(
        Standing,
        role=roles,
        epoch=st.integers(0, 9),
        master=st.sampled_from("abc"),
        until_seconds=st.floats(0, 20) | st.just(FOREVER),
        serve_after_seconds=st.floats(0, 20),
    ),
    view=views,
    meta=st.builds(MetaSeen, running=st.booleans(), ready=st.booleans()),
    endpoint=endpoints,
    tier_serving=st.booleans(),
    armed_until_seconds=st.floats(0, 20),
    handing_over=st.booleans(),
    permit_until_seconds=st.floats(0, 20),
)


@given(anything)
def test_whatever_is_seen(what: Seen) -> None:
    found = duties(what)
    wanted, killed = of(WantMeta, found), of(KillMeta, found)
    standing = what.standing
    is_master = standing.role == "master" and what.now_seconds < standing.until_seconds
    permitted = not is_master and standing.role != "unknown" and what.now_seconds < what.permit_until_seconds
    if wanted:
        assert is_master or permitted
        assert permitted or what.meta.running or what.now_seconds >= standing.serve_after_seconds
        assert not killed
    for armed in of(ArmGuard, found):
        assert armed == ArmGuard(standing.until_seconds if is_master else what.permit_until_seconds)
        assert is_master or permitted
    if of(Publish, found):
        assert is_master
    if killed:
        assert what.meta.running
        assert standing.role != "unknown"
    for pointed in of(PointEndpoint, found):
        assert what.endpoint is not None
        assert pointed.epoch >= what.endpoint.epoch  # type: ignore[attr-defined]
    if of(OpenEndpoint, found):
        assert what.view is not None
        assert what.endpoint is not None
        assert what.endpoint.life == what.view.served_life != ""
        assert what.endpoint.epoch == what.view.epoch


def test_clients_without_an_endpoint_are_led_forward_only() -> None:
    view = ClusterView(5, "b", tier_state="down")
    follower = seen(FOLLOWER, view=view, clients=ClientsSeen(4, "c"))
    assert of(PointClients, duties(follower)) == [PointClients(5, "b")], "at once: they leave no link for it"
    for there in (ClientsSeen(5, "b"), ClientsSeen(6, "c")):
        assert not of(PointClients, duties(dataclasses.replace(follower, clients=there)))
    # The files of a new plan point elsewhere: again, under the same epoch.
    anew = dataclasses.replace(follower, clients=ClientsSeen(5, ""))
    assert of(PointClients, duties(anew)) == [PointClients(5, "b")]
    assert not of(PointClients, duties(dataclasses.replace(follower, clients=None)))
    assert of(PointClients, duties(seen(clients=ClientsSeen(4, "b")))) == [PointClients(5, "a")]
    assert not of(PointClients, duties(seen(clients=ClientsSeen(4, "b"), handing_over=True)))


def test_without_endpoints_the_master_says_by_itself_that_it_is_up_and_open() -> None:
    def told(**changes: object) -> Publish:
        (publish,) = of(Publish, duties(seen(clients=ClientsSeen(5, "a"), **changes)))
        assert isinstance(publish, Publish)
        return publish

    assert told().tier_state == "down"
    assert told(meta=UP).tier_state == "meta_up"
    assert told(meta=UP).served_life == ""
    assert told(meta=UP, tier_state="joinable", tier_serving=True).served_life == "epoch 5"
