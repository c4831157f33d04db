from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtierd.endpoint.clients import ClientTable, Identity, Numbers


def test_gaps_are_found_once_and_only_when_old() -> None:
    numbers = Numbers()
    for number, at in ((100, 1.0), (103, 1.0), (102, 1.1)):
        numbers.note(number, at)
    assert numbers.gaps
    assert numbers.take_missing(0.9) == []
    assert numbers.take_missing(1.0) == [101]
    assert numbers.take_missing(9.0) == []
    assert numbers.next_ones() == range(104, 112)


def test_a_new_count_is_not_a_gap() -> None:
    numbers = Numbers()
    numbers.note(1, 1.0)
    numbers.note(5_000_000, 1.0)
    assert not numbers.gaps


@given(st.lists(st.integers(0, 2**32), max_size=300))
def test_hostile_numbers_stay_bounded(sequence: list[int]) -> None:
    numbers = Numbers()
    for number in sequence:
        numbers.note(number, 1.0)
    assert len(numbers.take_missing(1.0)) <= 1024


def test_a_full_table_drops_the_longest_gone_and_keeps_its_counts() -> None:
    table = ClientTable(limit=3)
    for pid in (1, 2, 3):
        client = table.obtain(Identity(pid, 1), "c", 0.0)
        client.counters.lookups = 10
        client.disconnected_at = float(pid)
    table.obtain(Identity(1, 1), "c", 0.0).links = 1
    table.obtain(Identity(4, 1), "c", 0.0)
    assert [c.identity.pid for c in table] == [1, 3, 4]
    assert table.totals().lookups == 30


def test_connected_clients_are_never_dropped() -> None:
    table = ClientTable(limit=2)
    for pid in range(5):
        table.obtain(Identity(pid + 1, 1), "c", 0.0).links = 1
    assert len(table) == 5


def test_survivors_that_ended_are_not_waited_for() -> None:
    table = ClientTable()
    for pid in (1, 2):
        table.obtain(Identity(pid, 1), "c", 0.0).joined = True
    assert table.forget_ended(lambda identity: identity.pid == 1) == 1
    assert [c.identity.pid for c in table.survivors()] == [1]


def test_the_kind_is_guessed_from_rank_and_requests() -> None:
    client = ClientTable().obtain(Identity(1, 1), "c", 0.0)
    assert client.kind == "?"
    client.has_rank = False
    assert client.kind == "S"
    client.has_rank = True
    assert client.kind == "P"
    client.seen_data_request = True
    assert client.kind == "F"
