from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.errors import MemcacheError
from kvtierd.memcache.answers import (
    ACTIVE,
    Rank,
    Segment,
    parse_capacity,
    parse_cluster_status,
    parse_health,
    parse_keys,
    parse_segments,
)

FIXTURES = Path(__file__).parents[2] / "fixtures" / "memcache"
MIB = 1024**2


def recorded(name: str) -> bytes:
    return (FIXTURES / name).read_bytes()


def test_health() -> None:
    health = parse_health(recorded("health.json"))
    assert health.ok
    assert (health.status, health.role, health.view_version) == ("ok", "unknown", 0)
    assert not health.model_copy(update={"service_ready": False}).ok
    assert not health.model_copy(update={"status": "starting"}).ok


def test_capacity() -> None:
    assert parse_capacity(recorded("capacity-empty.json")).dram.total_bytes == 0
    capacity = parse_capacity(recorded("capacity-pfs.json"))
    assert (capacity.dram.total_bytes, capacity.dram.used_bytes) == (64 * MIB, 0)
    assert capacity.hbm.total_bytes == 0


def test_segments() -> None:
    assert parse_segments(recorded("segments-empty.json")) == ()
    (segment,) = parse_segments(recorded("segments-p.json"))
    assert (segment.name, segment.medium, segment.rank) == ("rank-0-dram", "DRAM", 0)
    assert segment.total_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("name", "rank"), [("rank-0-dram", 0), ("rank-17-hbm", 17), ("host-a", None), ("rank-x-dram", None)]
)
def test_rank_of_a_segment(name: str, rank: int | None) -> None:
    segment = Segment(name=name, medium="DRAM", total_bytes=1, used_bytes=0, remaining_bytes=1)
    assert segment.rank == rank


def test_cluster_status_before_anyone_has_joined() -> None:
    cluster = parse_cluster_status(recorded("cluster-status-empty.json"))
    assert cluster.ranks == ()
    assert cluster.world_size is None
    assert cluster.state == "SS_INITED"


def test_cluster_status_with_a_pool_holder_and_clients() -> None:
    cluster = parse_cluster_status(recorded("cluster-status-pfs.json"))
    assert cluster.ranks == (
        Rank(rank=0, role="provider", state=ACTIVE),
        Rank(rank=1, role="proxy", state=ACTIVE),
    )
    assert cluster.roles() == {0: "provider", 1: "proxy"}
    assert cluster.alive == {0, 1}
    assert cluster.world_size == 16
    assert 0 <= cluster.heartbeat_age_seconds[0] < 5


def test_cluster_status_with_a_lost_role() -> None:
    assert parse_cluster_status(recorded("cluster-status-lost-role.json")).roles() == {
        0: "unknown",
        1: "proxy",
    }


def test_keys() -> None:
    assert parse_keys(b"k1\nk2\n\n") == ("k1", "k2")
    assert parse_keys(b"\n") == ()


def test_newer_versions_may_say_more() -> None:
    assert parse_health(b'{"status": "ok", "service_ready": true, "news": [1]}').ok


def test_a_refusal_gives_its_reason() -> None:
    with pytest.raises(MemcacheError, match="Segment not found") as caught:
        parse_segments(recorded("refused.json"))
    assert caught.value.stable_code == "memcache.refused"


@pytest.mark.parametrize("parse", [parse_health, parse_capacity, parse_segments, parse_cluster_status])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b'{"status": 3, "segments": {"a": 1}}',
        b"[" * 100_000,
    ],
)
def test_garbage_is_an_error_that_shows_it(parse: object, body: bytes) -> None:
    assert callable(parse)
    with pytest.raises(MemcacheError) as caught:
        parse(body)
    assert caught.value.stable_code == "memcache.answer"
    assert len(str(caught.value)) < 1000


def test_negative_sizes_are_garbage() -> None:
    body = recorded("capacity-p.json").replace(b'"used_bytes":0', b'"used_bytes":-1')
    with pytest.raises(MemcacheError, match="used_bytes"):
        parse_capacity(body)
