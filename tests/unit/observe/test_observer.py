import asyncio
import contextlib
import dataclasses
import os
import time
from pathlib import Path

import pytest

from kvtierd.host.view import HostView, RecordedRunner
from kvtierd.observe import observer as module
from kvtierd.observe.derive import EngineLook
from kvtierd.observe.observer import Observer, PoolSource, Sources, engine_look
from kvtierd.observe.tiers import Sample
from kvtierd.plan.engine import EngineObservation
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitView

from .test_derive import pool_state

METRICS = (Path(__file__).parents[2] / "fixtures" / "memcache" / "metrics-evicting.txt").read_bytes()


def http(body, length=None):
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (length or len(body)) + body


class Meta:
    """A MetaService's HTTP port that answers with what it is given, perhaps slowly."""

    def __init__(self):
        self.answer = http(METRICS)
        self.drip_seconds = 0.0
        self.asked = 0

    @contextlib.asynccontextmanager
    async def serve(self):
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _answer(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            self.asked += 1
            if self.drip_seconds:
                for byte in self.answer:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(self.drip_seconds)
            writer.write(self.answer)
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.close()


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def host(tmp_path):
    root = tmp_path / "host"
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    return HostView(root, RecordedRunner())


def sources(**more):
    return Sources(node=lambda: "host-a", cluster=lambda: ("host-b", False), **more)


def at(url, instance="meta-1", **more):
    return lambda: PoolSource(instance, metrics_base_url=url, **more)


async def test_one_step_brings_it_all_together(host, clock, tmp_path):
    meta = Meta()
    log = tmp_path / "mmc-meta.log"
    log.write_text("")
    look = EngineLook(
        "kvtier-engine-e", instance="1", observation=EngineObservation(waiting=2), at_seconds=1000.0
    )
    async with meta.serve() as url:
        observer = Observer(
            sources(
                engines=lambda: [look],
                pool=at(url, state=pool_state(), log_file=log, evict_high_percent=90),
                headroom_bytes=lambda: 7,
                room_bytes=lambda host: host.available_bytes - host.headroom_bytes,
                holders=lambda: ("kvtier-pool-extra",),
            ),
            view=host,
            clock=clock,
            state_dir=tmp_path,
        )
        picture = await observer.step()
    assert (picture.node, picture.master, picture.is_master) == ("host-a", "host-b", False)
    assert picture.engines[0].waiting == 2
    assert picture.pool.stored_keys == 178
    assert picture.pool.evict_high_percent == 90
    assert picture.pool.log_evictions == 0
    assert picture.host.available_bytes == 600 * 1024
    assert picture.host.room_bytes == 600 * 1024 - 7
    assert picture.host.holders == ("kvtier-pool-extra",)
    assert observer.picture is picture
    assert observer.problems == {}
    await observer.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http(b"<html><body>Bad Gateway</body></html>"), "a web page"),
        (http(b"x" * 10_000_000), "the limit is"),
        (http(b"memcache_stored_keys 1\n" * 200_000), "the limit is"),
        (http(b""), "empty"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "500"),
        (b"\x00\x01\x02\r\n\r\n", "HTTP"),
        (http(METRICS, length=len(METRICS) + 50), "did not answer"),
    ],
    ids=["html", "10-MB", "many-lines", "empty", "500", "no-http", "cut-off"],
)
async def test_a_metaservice_that_says_nonsense_is_named(host, clock, monkeypatch, answer, why):
    monkeypatch.setattr(module, "META_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(module, "WAIT_SECONDS", 2.0)
    meta = Meta()
    meta.answer = answer
    async with meta.serve() as url:
        observer = Observer(sources(pool=at(url, state=pool_state())), view=host, clock=clock)
        picture = await observer.step()
        assert why in picture.pool.problem
        assert picture.pool.metrics_at_seconds is None
        assert picture.pool.capacity_bytes == 1000, "what REST says still counts"
        meta.answer = http(METRICS)
        clock.now += 10
        picture = await observer.step()
        assert picture.pool.problem == ""
        assert picture.pool.stored_keys == 178
        await observer.close()


async def test_a_slow_loris_delays_nothing_and_is_asked_once_at_a_time(host, clock):
    meta = Meta()
    meta.drip_seconds = 0.5
    async with meta.serve() as url:
        observer = Observer(sources(pool=at(url)), view=host, clock=clock)
        await observer.step()
        started = time.monotonic()
        for _ in range(10):
            clock.now += 10
            picture = await observer.step()
        assert time.monotonic() - started < 1.0
        assert meta.asked == 1
        assert picture.host.available_bytes is not None
        await observer.close()


async def test_metrics_of_an_earlier_run_are_forgotten(host, clock):
    meta = Meta()
    async with meta.serve() as url:
        current = ["meta-1"]
        observer = Observer(
            sources(pool=lambda: PoolSource(current[0], metrics_base_url=url)), view=host, clock=clock
        )
        assert (await observer.step()).pool.stored_keys == 178
        current[0] = "meta-2"
        clock.now += 0.5  # not time to ask again
        assert (await observer.step()).pool.stored_keys is None
        await observer.close()


async def test_an_answer_that_comes_after_the_next_run_began_is_not_that_runs(host, clock, monkeypatch):
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    meta = Meta()
    meta.drip_seconds, meta.answer = 0.01, http(b"memcache_stored_keys 7\n")
    async with meta.serve() as url:
        current = ["meta-1"]
        observer = Observer(
            sources(pool=lambda: PoolSource(current[0], metrics_base_url=url)), view=host, clock=clock
        )
        await observer.step()
        current[0] = "meta-2"
        await observer.step()
        await asyncio.sleep(1.2)
        assert meta.asked == 1
        assert (await observer.step()).pool.stored_keys is None
        await observer.close()


async def test_it_is_not_asked_while_it_does_not_run(host, clock):
    meta = Meta()
    async with meta.serve() as url:
        observer = Observer(sources(pool=at(url, instance=None)), view=host, clock=clock)
        assert (await observer.step()).pool is None
        assert meta.asked == 0
        await observer.close()


async def test_a_source_that_raises_costs_its_own_part(host, clock):
    def broken():
        raise RuntimeError("boom")

    observer = Observer(
        dataclasses.replace(sources(), engines=broken, pool=broken, peers=broken), view=host, clock=clock
    )
    picture = await observer.step()
    assert picture.engines == ()
    assert picture.host is not None
    assert observer.problems["engines"] == "RuntimeError: boom"
    await observer.close()


async def test_files_of_a_host_that_never_answer_delay_nothing(host, clock, monkeypatch):
    def hangs(*_, **__):
        time.sleep(1.5)

    monkeypatch.setattr(module, "read_host", hangs)
    observer = Observer(sources(), view=host, clock=clock)
    started = time.monotonic()
    for _ in range(5):
        clock.now += 10
        picture = await observer.step()
    assert time.monotonic() - started < 1.0
    assert picture.host is None


async def test_the_state_of_the_pool_has_the_age_of_its_answer(host, clock):
    state = pool_state()
    observer = Observer(sources(pool=lambda: PoolSource("m", state=state)), view=host, clock=clock)
    await observer.step()
    clock.now += 5
    picture = await observer.step()
    assert picture.pool.at_seconds == 1000.0
    state = pool_state()
    assert (await observer.step()).pool.at_seconds == 1005.0
    state = None
    clock.now += 5
    picture = await observer.step()
    assert picture.pool.hung_seconds == 5
    await observer.close()


async def test_the_log_is_followed_over_a_restart_of_kvtierd(host, clock, tmp_path):
    log = tmp_path / "logs" / "mmc-meta.log"
    log.parent.mkdir()
    line = (
        "2026-11-30 08:45:29.619888 2 info [MMC x.cpp:304 F] Evicted 5 keys from DRAM. Candidate count: 9.\n"
    )
    log.write_text(line)

    def make():
        return Observer(
            sources(pool=lambda: PoolSource("m", log_file=log)), view=host, clock=clock, state_dir=tmp_path
        )

    first = make()
    assert (await first.step()).pool.log_evictions == 0, "what was there before is not ours"
    with log.open("a") as file:
        file.write(line * 2)
    assert (await first.step()).pool.log_evictions == 2
    await first.close()
    with log.open("a") as file:
        file.write(line)
    os.rename(log, log.with_name("mmc-meta.1.log"))
    log.write_text(line)
    second = make()
    assert (await second.step()).pool.log_evictions == 2, "one in the rotated file, one in the new"
    await second.close()


async def test_a_log_that_cannot_be_read_is_said(host, clock, tmp_path):
    observer = Observer(sources(pool=lambda: PoolSource("m", log_file=tmp_path)), view=host, clock=clock)
    await observer.step()
    assert "regular file" in observer.problems["log"]
    await observer.close()


def test_an_engine_from_its_unit_its_metrics_and_its_output():
    view = UnitView(
        "kvtier-engine-e", "engine", "e", UnitState.READY, "", 5, 0.0, 0, None, (), False, "run-1", None
    )
    sample = Sample(1.0, EngineObservation(waiting=1), 77.0)
    look = engine_look(view, sample, EngineObservation(waiting=9, failed_loads=3), problem="late")
    assert (look.unit, look.instance, look.ready, look.at_seconds) == ("kvtier-engine-e", "run-1", True, 77.0)
    assert (look.observation.waiting, look.observation.failed_loads) == (1, 3)
    assert look.problem == "late"
    ended = dataclasses.replace(view, pid=None, state=UnitState.STOPPED)
    assert engine_look(ended, None).instance is None
