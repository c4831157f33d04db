"""Transcripts of the connection state machine: events in, actions out, a clock that only the test moves."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.endpoint.clients import ClientProcess, Identity
from kvtierd.endpoint.link import (
    Action,
    CloseClient,
    DropServer,
    FinishClient,
    Link,
    LinkState,
    LinkTimes,
    Mode,
    RetireServer,
    SendClient,
    SendServer,
)
from kvtierd.memcache import framing
from kvtierd.memcache.framing import FrameDecoder, Opcode

TIMES = LinkTimes(silence=1.0)


def request(opcode: int, sequence: int, keys: tuple[str, ...] = ("k",)) -> bytes:
    names = b"".join(struct.pack("<I", len(k)) + k.encode() for k in keys)
    prefix = struct.pack("<hhI", 0, opcode, 0)
    if opcode in (Opcode.BATCH_IS_EXIST, Opcode.BATCH_ALLOC):
        return framing.encode_frame(opcode, sequence, prefix + struct.pack("<Q", len(keys)) + names)
    return framing.encode_frame(opcode, sequence, prefix + names)


def exist_answer(sequence: int, result: int = 0) -> bytes:
    return framing.encode_frame(Opcode.IS_EXIST, sequence, struct.pack("<hhIi", 0, 4, 0, result))


def process(pid: int = 42) -> ClientProcess:
    return ClientProcess(Identity(pid, 7) if pid else Identity(address="10.0.0.9"))


def make(mode: Mode = Mode.SERVE, client: ClientProcess | None = None, now: float = 0.0) -> Link:
    link = Link(client or process(), mode, now, TIMES)
    link.tick(now + 0.01)  # settled
    return link


def answers(actions: list[Action]) -> list[tuple[int, int]]:
    """(sequence, opcode) of every frame sent to the client."""
    data = b"".join(a.data for a in actions if isinstance(a, SendClient))
    return [(f.sequence, f.opcode) for f in FrameDecoder().feed(data)]


def kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def test_a_call_passes_and_is_counted() -> None:
    link = make()
    ask, reply = request(Opcode.IS_EXIST, 1), exist_answer(1)
    assert link.client_data(ask, 1.0) == [SendServer(ask)]
    assert link.pending
    assert link.server_data(reply, 1.1) == [SendClient(reply)]
    assert not link.in_flight
    counters = link.client.counters
    assert (counters.lookups, counters.lookup_hits, counters.requests) == (1, 1, 1)
    assert (counters.bytes_from_client, counters.bytes_to_client) == (len(ask), len(reply))
    assert counters.synthetic_answers == 0


def test_half_a_frame_is_not_passed_on() -> None:
    link, ask = make(), request(Opcode.IS_EXIST, 1)
    assert link.client_data(ask[:20], 1.0) == []
    assert link.client_data(ask[20:], 1.0) == [SendServer(ask)]


def test_a_dead_server_gets_every_request_answered_and_the_client_stays() -> None:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 1) + request(Opcode.BATCH_ALLOC, 2, ("a", "b")), 1.0)
    actions = link.server_lost(1.2)
    assert kinds(actions) == [DropServer, SendClient]
    assert answers(actions) == [(1, Opcode.IS_EXIST), (2, Opcode.BATCH_ALLOC)]
    assert link.state is LinkState.ORPHAN
    assert answers(link.client_data(request(Opcode.BATCH_IS_EXIST, 3), 1.3)) == [(3, Opcode.BATCH_IS_EXIST)]
    assert link.client.counters.synthetic_answers == 3
    assert link.server_data(exist_answer(1), 1.4) == []  # a late answer must not confuse


def silent_link() -> Link:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 1) + request(Opcode.REGISTER, 2), 10.0)
    assert link.tick(10.99) == []
    actions = link.tick(11.01)
    assert kinds(actions) == [SendClient]  # the connection stays
    assert answers(actions) == [(1, Opcode.IS_EXIST)]
    assert link.silent
    assert set(link.in_flight) == {(2, Opcode.REGISTER)}
    return link


def test_a_silent_server_makes_nobody_wait() -> None:
    link = silent_link()
    assert answers(link.client_data(request(Opcode.BATCH_IS_EXIST, 3), 12.0)) == [(3, Opcode.BATCH_IS_EXIST)]
    update = request(Opcode.BATCH_UPDATE, 4)  # the server must not be left with half a write
    actions = link.client_data(update, 12.0)
    assert actions[0] == SendServer(update)
    assert answers(actions) == [(4, Opcode.BATCH_UPDATE)]
    assert link.client.counters.synthetic_answers == 3


def test_a_server_that_speaks_again_is_used_again() -> None:
    link = silent_link()
    assert not link.passes_from_server(exist_answer(1))
    assert link.server_data(exist_answer(1), 13.0) == []  # this one was answered by us
    assert not link.silent
    ask = request(Opcode.IS_EXIST, 3)
    assert link.client_data(ask, 13.1) == [SendServer(ask)]
    assert answers(link.server_data(exist_answer(3), 13.2)) == [(3, Opcode.IS_EXIST)]
    assert link.tick(13.9) == []
    assert link.client.counters.synthetic_answers == 1


def test_a_silent_server_that_closes_is_a_dead_one() -> None:
    link = silent_link()
    actions = link.server_lost(14.0)
    assert answers(actions) == [(2, Opcode.REGISTER)]
    assert (link.state, link.silent) == (LinkState.ORPHAN, False)


def test_a_silence_without_end_is_a_death() -> None:
    link = silent_link()
    assert link.pending
    assert kinds(link.tick(20.5)) == [DropServer, SendClient]
    assert link.state is LinkState.ORPHAN


def test_a_server_is_not_left_waiting_for_a_client_that_is_gone() -> None:
    link = make()
    link.server_data(request(Opcode.REPLICATE, 7) + request(Opcode.REPLICATE, 8), 1.0)
    link.client_data(request(Opcode.REPLICATE, 7), 1.1)
    actions = link.client_lost()
    assert kinds(actions) == [RetireServer, CloseClient]
    assert isinstance(actions[0], RetireServer)
    assert actions[0].unanswered == {(8, int(Opcode.REPLICATE))}
    assert kinds(make().client_lost()) == [RetireServer, CloseClient]


def test_memory_is_noticed_in_the_registration() -> None:
    link = make()
    rank = struct.pack("<hhIQ", 0, 5, 0, 3)
    link.client_data(framing.encode_frame(Opcode.REGISTER, 1, rank + struct.pack("<Q", 0) + bytes(24)), 1.0)
    assert not link.client.provider
    link.client_data(framing.encode_frame(Opcode.REGISTER, 2, rank + struct.pack("<Q", 1) + bytes(42)), 1.0)
    assert link.client.provider


def test_an_idle_server_is_not_silent() -> None:
    link = make()
    assert link.tick(500.0) == []
    link.client_data(request(Opcode.IS_EXIST, 1), 500.0)
    assert link.tick(500.5) == []  # counted from the request, not from the last word


def test_slow_registration_is_not_silence() -> None:
    link = make()
    link.client_data(request(Opcode.UNREGISTER, 1), 1.0)
    assert link.tick(5.0) == []
    assert link.tick(11.5) != []


def test_server_requests_and_their_answers_pass() -> None:
    link = make()
    replicate = request(Opcode.REPLICATE, 1)
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)  # the same number, another opcode
    assert link.server_data(replicate, 1.0) == [SendClient(replicate)]
    assert link.client_data(replicate, 1.0) == [SendServer(replicate)]
    assert set(link.in_flight) == {(1, Opcode.IS_EXIST)}
    assert link.client.counters.requests == 1


def test_quiet_orphan_leaves_between_calls() -> None:
    link = make()
    link.server_lost(1.0)
    link.client_data(request(Opcode.IS_EXIST, 1), 2.0)
    assert link.cut(2.0) == []
    assert link.tick(2.005) == []
    assert answers(link.client_data(request(Opcode.IS_EXIST, 2), 2.006)) == [(2, Opcode.IS_EXIST)]
    assert link.tick(2.012) == []
    assert kinds(link.tick(2.017)) == [FinishClient]
    assert link.state is LinkState.LEFT


def test_busy_orphan_is_sent_away_while_all_its_threads_wait() -> None:
    """Never woken at the moment of the FIN: the answers come on the next link."""
    client = process()
    link = make(client=client)
    link.server_lost(1.0)
    link.cut(1.0)
    sequence, now = 0, 1.0
    while link.state is LinkState.LEAVING:
        sequence += 1
        now += 0.001
        link.client_data(request(Opcode.IS_EXIST, sequence), now)
        link.tick(now)
    assert 1.3 <= now < 1.31
    assert link.client_data(request(Opcode.IS_EXIST, 901), now) == []
    assert link.client_data(request(Opcode.BATCH_UPDATE, 902), now) == []
    actions = link.tick(now + 0.016)
    assert kinds(actions) == [FinishClient]
    successor = Link(client, Mode.SERVE, now + 0.02, TIMES)
    assert successor.deliver(client.take_carried()) == []  # the client is not ready in the same instant
    assert answers(successor.tick(now + 0.026)) == [(901, Opcode.IS_EXIST), (902, Opcode.BATCH_UPDATE)]


def test_farewell_answers_with_the_fin() -> None:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)
    link.cut(1.0, farewell=True)
    assert link.tick(1.1) == []  # the server may still answer
    link.tick(1.31)
    actions = link.tick(1.33)
    assert kinds(actions) == [SendClient, FinishClient, DropServer]
    assert answers(actions) == [(1, Opcode.IS_EXIST)]


def test_cut_waits_for_the_real_answer() -> None:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)
    link.cut(1.0)
    assert link.tick(1.1) == []
    assert answers(link.server_data(exist_answer(1), 1.15)) == [(1, Opcode.IS_EXIST)]
    assert kinds(link.tick(1.2)) == [FinishClient, DropServer]
    assert link.client.counters.synthetic_answers == 0


def test_a_request_behind_the_fin_is_answered_on_the_next_link() -> None:
    client = process()
    link = make(client=client)
    link.cut(1.0)
    link.tick(1.02)
    assert link.state is LinkState.LEFT
    assert link.client_data(request(Opcode.IS_EXIST, 9), 1.021) == []
    assert client.carried_since == 1.021
    assert [(f.sequence, f.opcode) for f in FrameDecoder().feed(client.take_carried())] == [
        (9, Opcode.IS_EXIST)
    ]
    delivered: list[bytes] = []
    client.attach(object(), delivered.append)  # the next link is there already
    link.client_data(request(Opcode.IS_EXIST, 10), 1.03)
    assert [(f.sequence, f.opcode) for f in FrameDecoder().feed(b"".join(delivered))] == [
        (10, Opcode.IS_EXIST)
    ]
    assert not client.carried
    assert link.tick(1.6) == [CloseClient(abort=True)]


def test_numbers_that_never_arrive_are_woken() -> None:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 10) + request(Opcode.IS_EXIST, 13), 1.0)
    link.client_data(request(Opcode.IS_EXIST, 12), 1.05)  # out of order, not lost
    link.server_data(exist_answer(10) + exist_answer(12) + exist_answer(13), 1.06)
    assert link.pending
    assert answers(link.tick(1.1)) == []
    assert [sequence for sequence, _ in answers(link.tick(1.16))] == [11]
    assert answers(link.tick(2.0)) == []


def test_a_quiet_client_on_a_new_link_may_have_lost_its_last_numbers() -> None:
    client = process()
    make(client=client).client_data(request(Opcode.IS_EXIST, 20), 1.0)
    successor = make(client=client, now=2.0)
    assert answers(successor.tick(2.1)) == []
    assert [sequence for sequence, _ in answers(successor.tick(2.16))] == list(range(21, 29))
    assert answers(successor.tick(3.0)) == []


def test_the_numbers_of_several_processes_behind_one_address_are_not_guessed() -> None:
    link = make(client=process(pid=0))
    link.client_data(request(Opcode.IS_EXIST, 10) + request(Opcode.IS_EXIST, 13), 1.0)
    link.server_data(exist_answer(10) + exist_answer(13), 1.0)
    assert answers(link.tick(2.0)) == []


def test_recover_answers_data_and_passes_registration() -> None:
    link = make(Mode.RECOVER)
    for opcode in (Opcode.REGISTER, Opcode.BATCH_UPDATE, Opcode.CONFIG_QUERY, Opcode.REMOVE_ALL):
        frame = request(opcode, opcode)
        assert link.client_data(frame, 1.0) == [SendServer(frame)]
    for opcode in (Opcode.IS_EXIST, Opcode.QUERY, Opcode.GET, Opcode.ALLOC, Opcode.REMOVE, Opcode.BATCH_GET):
        actions = link.client_data(request(opcode, 100 + opcode), 1.0)
        assert answers(actions) == [(100 + opcode, opcode)]
        assert kinds(actions) == [SendClient]
    assert link.set_mode(Mode.SERVE, 2.0) == []
    frame = request(Opcode.IS_EXIST, 500)
    assert link.client_data(frame, 2.0) == [SendServer(frame)]


def test_quiesce_holds_and_serve_releases_in_order() -> None:
    link = make()
    link.set_mode(Mode.QUIESCE, 1.0)
    first, second = request(Opcode.IS_EXIST, 1), request(Opcode.ALLOC, 2)
    finishing = request(Opcode.BATCH_UPDATE, 3)
    assert link.client_data(first + finishing + second, 1.0) == [SendServer(finishing)]
    assert link.set_mode(Mode.SERVE, 1.2) == [SendServer(first), SendServer(second)]


def test_quiesce_does_not_hold_for_long() -> None:
    link = make()
    link.set_mode(Mode.QUIESCE, 1.0)
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)
    assert link.tick(1.7) == []
    assert answers(link.tick(1.81)) == [(1, Opcode.IS_EXIST)]


def test_held_requests_are_answered_when_the_server_goes() -> None:
    link = make()
    link.set_mode(Mode.QUIESCE, 1.0)
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)
    assert answers(link.server_lost(1.1)) == [(1, Opcode.IS_EXIST)]
    assert answers(link.client_data(request(Opcode.IS_EXIST, 2), 1.2)) == [(2, Opcode.IS_EXIST)]


@pytest.mark.parametrize("side", ["client", "server"])
def test_unknown_framing_becomes_a_plain_relay_without_losing_a_byte(side: str) -> None:
    link = make()
    good, strange = request(Opcode.IS_EXIST, 1), b"\x16\x03\x01" + bytes(40)
    if side == "client":
        assert link.client_data(good + strange, 1.0) == [SendServer(good), SendServer(strange)]
        assert link.client_data(b"more", 1.0) == [SendServer(b"more")]
    else:
        link.client_data(good, 1.0)
        link.client_data(good[:5], 1.0)
        assert link.server_data(strange, 1.0) == [SendServer(good[:5]), SendClient(strange)]
        assert link.server_data(b"more", 1.0) == [SendClient(b"more")]
    assert link.state is LinkState.PLAIN
    assert "not a MetaService frame" in link.plain_reason
    assert link.tick(100.0) == []
    assert kinds(link.server_lost(101.0)) == [DropServer, CloseClient]


def test_what_is_not_understood_does_not_pass_in_recover() -> None:
    link = make(Mode.RECOVER)
    assert kinds(link.client_data(b"\x16\x03\x01" + bytes(40), 1.0)) == [RetireServer, CloseClient]
    plain = Link.plain(process(), 0.0, TIMES, "tls")
    assert plain.client_data(b"x", 1.0) == [SendServer(b"x")]
    assert kinds(plain.set_mode(Mode.RECOVER, 2.0)) == [DropServer, CloseClient]


def test_a_client_that_goes_takes_its_server_link_along() -> None:
    link = make()
    link.client_data(request(Opcode.IS_EXIST, 1), 1.0)
    assert kinds(link.client_lost()) == [RetireServer, CloseClient]
    assert link.client_lost() == []
    assert link.client_data(b"x", 1.0) == []


def test_a_flood_without_answers_is_noticed() -> None:
    link = make()
    link.client_data(b"".join(request(Opcode.IS_EXIST, n) for n in range(1, 16386)), 1.0)
    assert link.congested


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([Opcode.IS_EXIST, Opcode.ALLOC, Opcode.BATCH_UPDATE])),
        st.tuples(st.just("answer"), st.integers(0, 5)),
        st.tuples(st.sampled_from(["lost", "cut", "tick", "serve", "quiesce", "recover"]), st.none()),
    ),
    max_size=60,
)


@given(EVENTS)
def test_every_request_is_answered_exactly_once_within_a_second(events: list[tuple[str, int | None]]) -> None:
    """Whatever happens: each request that arrives gets one answer, here or carried to the next link."""
    client = process()
    link = make(client=client)
    now, sequence = 1.0, 0
    asked: dict[int, float] = {}
    got: list[int] = []
    upstream: list[framing.Frame] = []
    alive = True

    def run(actions: list[Action]) -> None:
        nonlocal alive
        got.extend(s for s, _ in answers(actions) if s in asked)
        for action in actions:
            if isinstance(action, SendServer):
                assert alive
                upstream.extend(FrameDecoder().feed(action.data))
            alive = alive and not isinstance(action, DropServer)

    for event, value in events:
        now += 0.004
        if event == "ask" and link.state is not LinkState.CLOSED:
            sequence += 1
            asked[sequence] = now
            run(link.client_data(request(value or 0, sequence), now))
        elif event == "answer" and upstream and alive:
            frame = upstream.pop((value or 0) % len(upstream))
            run(link.server_data(framing.error_answer(frame.opcode, frame.sequence, 1), now))
        elif event == "lost":
            run(link.server_lost(now))
            alive = False
        elif event == "cut":
            run(link.cut(now))
        elif event in ("serve", "quiesce", "recover"):
            run(link.set_mode(Mode(event), now))
        run(link.tick(now))
    for _ in range(150):
        now += 0.01
        run(link.tick(now))
    run(link.server_lost(now))
    got += [f.sequence for f in FrameDecoder().feed(client.take_carried())]
    assert sorted(got) == sorted(asked)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([Opcode.IS_EXIST, Opcode.REGISTER]), st.integers(1, 4)),
        st.tuples(st.just("reply"), st.just(Opcode.IS_EXIST), st.integers(1, 4)),
        st.tuples(st.just("server-asks"), st.just(Opcode.REPLICATE), st.integers(1, 4)),
        st.tuples(st.just("half"), st.just(Opcode.IS_EXIST), st.integers(1, 4)),
        st.tuples(st.just("mode"), st.sampled_from(list(Mode)), st.just(0)),
        st.tuples(st.sampled_from(["lost", "cut", "tick", "garbage"]), st.none(), st.just(0)),
    ),
    max_size=30,
)  # fmt: skip


@given(STEPS)
def test_what_passes_is_sent_exactly_as_it_came(steps) -> None:
    """The shell sends first and tells the link afterwards wherever the link says that this changes nothing."""
    link, now, passed = make(), 1.0, 0
    for what, which, number in steps:
        now += 0.01
        if what in {"ask", "half", "garbage"}:
            data = b"\x05" * 20 if what == "garbage" else request(which, number)
            data = data[:-3] if what == "half" else data
            passes = link.passes_from_client(data)
            actions = link.client_data(data, now)
            assert not passes or actions == [SendServer(data)]
            passed += passes
        elif what in {"reply", "server-asks"}:
            data = exist_answer(number) if what == "reply" else framing.encode_frame(which, number, bytes(8))
            passes = link.passes_from_server(data)
            actions = link.server_data(data, now)
            assert not passes or actions == [SendClient(data)]
            passed += passes
        elif what == "mode":
            link.set_mode(which, now)
        elif what == "lost":
            link.server_lost(now)
        elif what == "cut":
            link.cut(now)
        else:
            link.tick(now)
    if all(what in {"ask", "reply", "tick"} for what, *_ in steps):
        assert passed == sum(what != "tick" for what, *_ in steps), "the ordinary way is the fast one"
