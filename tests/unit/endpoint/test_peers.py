from __future__ import annotations

from kvtierd.endpoint.clients import Counters
from kvtierd.endpoint.peers import MAX_REMEMBERED_REFUSALS, PeerRow, Refusals, row_dict


def test_a_refusal_is_said_once_and_counted_always() -> None:
    refusals = Refusals()
    assert refusals.count("expired", "node-b", 0.0)
    assert not refusals.count("expired", "node-b", 10.0)
    assert refusals.count("wrong-ca", "node-b", 10.0)
    assert refusals.count("expired", "node-c", 10.0)
    assert refusals.count("expired", "node-b", 3700.0)
    assert refusals.as_dict() == {"expired": 4, "wrong-ca": 1}


def test_what_is_remembered_of_senders_is_bounded() -> None:
    refusals = Refusals()
    for number in range(10 * MAX_REMEMBERED_REFUSALS):
        refusals.count("not-tls", f"10.0.{number // 256}.{number % 256}", 0.0)
    assert len(refusals._logged) == MAX_REMEMBERED_REFUSALS
    assert refusals.as_dict() == {"not-tls": 10 * MAX_REMEMBERED_REFUSALS}


def test_bytes_of_links_that_ended_stay_counted() -> None:
    row = PeerRow("node-b", "10.0.0.2:5443", links=2, links_total=2)
    row.ended(Counters(bytes_from_client=5, bytes_to_client=7))
    shown = row_dict(row, [Counters(bytes_from_client=1, bytes_to_client=2)])
    assert (shown["links"], shown["bytes_from"], shown["bytes_to"]) == (1, 6, 9)
