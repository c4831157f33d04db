"""FakeMetaService agrees with the recorded answers of the real one, as kvtierd.memcache.rest reads them."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import pytest

from kvtierd.errors import MemcacheError
from kvtierd.memcache.answers import parse_capacity, parse_cluster_status, parse_health, parse_segments
from kvtierd.memcache.rest import MetaClient
from kvtierd.testing import FakeMetaService, FakeRank

FIXTURES = Path(__file__).parents[2] / "fixtures" / "memcache"
USED_BYTES = 245760
POOLS: dict[str, tuple[FakeRank, ...]] = {
    "empty": (),
    "p": (FakeRank(0, heartbeat_ms=161),),
    "pfs": (FakeRank(0, heartbeat_ms=909), FakeRank(1, role="proxy", total_bytes=0, heartbeat_ms=517)),
    "lost-role": (
        FakeRank(0, role="unknown", used_bytes=USED_BYTES, heartbeat_ms=None),
        FakeRank(1, role="proxy", total_bytes=0, heartbeat_ms=562),
    ),
}
PATHS = {
    "capacity": "/api/v1/capacity/usage",
    "segments": "/api/v1/capacity/segment_remaining",
    "cluster-status": "/api/v1/mf/cluster_status",
}


def recorded(name: str) -> bytes:
    return (FIXTURES / f"{name}.json").read_bytes()


@pytest.mark.parametrize("state", POOLS)
async def test_what_kvtierd_reads_is_what_the_real_one_said(state: str) -> None:
    with FakeMetaService(POOLS[state]) as service:
        client = MetaClient(service.url)
        assert await client.health() == parse_health(recorded("health"))
        assert await client.capacity() == parse_capacity(recorded(f"capacity-{state}"))
        assert await client.segments() == parse_segments(recorded(f"segments-{state}"))
        assert await client.cluster_status() == parse_cluster_status(recorded(f"cluster-status-{state}"))


@pytest.mark.parametrize("state", POOLS)
@pytest.mark.parametrize("what", PATHS)
async def test_every_field_of_the_real_answer_is_there_and_alike(what: str, state: str) -> None:
    with FakeMetaService(POOLS[state]) as service:
        made = json.loads(await MetaClient(service.url).get(PATHS[what]))
    real = json.loads(recorded(f"{what}-{state}"))
    for answer in (made, real):
        answer.pop("timestamp", None)
    assert made == real


async def test_a_lost_role_and_one_that_comes_back() -> None:
    with FakeMetaService([FakeRank(0), FakeRank.proxy(1)]) as service:
        client = MetaClient(service.url)
        service.lose_role(0)
        assert (await client.cluster_status()).roles() == {0: "unknown", 1: "proxy"}
        service.ranks = (FakeRank(0), FakeRank.proxy(1))
        assert (await client.cluster_status()).roles() == {0: "provider", 1: "proxy"}


async def test_a_refusal_is_200_and_kvtierd_sees_that() -> None:
    with FakeMetaService() as service:
        body = await MetaClient(service.url).get("/api/v1/segments/status?segment=none")
    real = json.loads(recorded("refused"))
    assert {**json.loads(body), "timestamp": 0} == {**real, "timestamp": 0}
    with pytest.raises(MemcacheError) as caught:
        parse_capacity(body)
    assert caught.value.stable_code == "memcache.refused"


def ask(service: FakeMetaService, method: str, **options: Any) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=5)
    try:
        connection.request(method, "/health", **options)
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        except http.client.IncompleteRead as error:
            return answer.status, error.partial
    finally:
        connection.close()


def test_its_quirks() -> None:
    with FakeMetaService() as service:
        assert ask(service, "GET")[1]
        assert ask(service, "GET", headers={"Connection": "close"}) == (200, b"")
        assert ask(service, "HEAD")[0] == 405
        assert ask(service, "PUT", body=b"x")[0] == 405
        assert [r.method for r in service.requests] == ["GET", "GET", "HEAD", "PUT"]


async def test_one_that_hangs_and_one_that_is_gone() -> None:
    with FakeMetaService(keys=["a", "b"]) as service:
        client = MetaClient(service.url, timeout_seconds=0.2)
        service.freeze()
        with pytest.raises(MemcacheError) as caught:
            await client.health()
        assert caught.value.stable_code == "memcache.timeout"
        service.thaw()
        assert await client.keys() == ("a", "b")
        service.service_ready = False
        assert not (await client.health()).ok
    with pytest.raises(MemcacheError) as caught:
        await client.health()
    assert caught.value.stable_code == "memcache.unreachable"
    service.close()  # a second time does no harm
