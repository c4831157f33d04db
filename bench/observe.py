"""What observing costs: one picture, one scrape, and following a log.

``python -m bench.observe``. CPU time of one core, medians; the sources' answers are recorded ones, so that neither
network nor engines are in it; the whole cycle of observing and deciding asks over HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

from bench.report import Row, print_table
from kvtierd.decide.decider import Decider
from kvtierd.decide.policy import default_policy
from kvtierd.memcache.answers import Capacity, ClusterStatus, MediumUsage, Segment
from kvtierd.memcache.health import PoolState
from kvtierd.observe.derive import Derivation, EngineLook, Look, PoolLook
from kvtierd.observe.encode import encode
from kvtierd.observe.families import metric_families
from kvtierd.observe.log_follow import LogFollower
from kvtierd.observe.meta_log import MetaLogCounts
from kvtierd.observe.meta_metrics import read_meta_metrics
from kvtierd.observe.observer import Observer, PoolSource, Sources
from kvtierd.observe.picture import HostPicture
from kvtierd.observe.status import History, status_json
from kvtierd.plan.engine import EngineObservation

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))

from observe.full import crowded  # noqa: E402 - the unit tests' full picture

FIXTURES = ROOT / "tests" / "fixtures" / "memcache"
ENGINES, SEGMENTS = 8, 256
ROUNDS = 400
FILLING = 370  # steps of 10 s: an hour of history
LOG_MB = 200


def _metrics_text() -> str:
    """A real scrape with 256 segments in the place of its one."""
    lines = []
    for line in (FIXTURES / "metrics-evicting.txt").read_text().splitlines():
        if 'segment="rank-0-dram"' in line:
            lines += [line.replace("rank-0", f"rank-{n}") for n in range(SEGMENTS)]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _pool_state() -> PoolState:
    usage = MediumUsage(total_bytes=2**40, used_bytes=2**39, free_bytes=2**39)
    segments = tuple(
        Segment(segment_name=f"rank-{n}-dram", medium="dram", total_bytes=2**32, used_bytes=2**31, remaining_bytes=2**31)
        for n in range(SEGMENTS)
    )  # fmt: skip
    none = MediumUsage(total_bytes=0, used_bytes=0, free_bytes=0)
    return PoolState(Capacity(cpu=usage, npu=none), segments, ClusterStatus())


def _engine(number: int, second: int) -> EngineLook:
    tokens = 1000 * second
    observation = EngineObservation(
        l1_query_tokens=tokens, l1_hit_tokens=tokens // 4, l2_query_tokens=tokens, l2_hit_tokens=tokens // 5,
        l3_query_tokens=tokens, l3_hit_tokens=tokens // 2, failed_loads=0, waiting=1, running=1,
        ttft_buckets={bound / 10: second * bound for bound in range(1, 24)},
    )  # fmt: skip
    return EngineLook(
        f"kvtier-engine-e{number}",
        instance="1",
        ready=True,
        observation=observation,
        at_seconds=float(second),
    )


def picture() -> list[Row]:
    """From answers that are there to a picture, with an hour of history behind it."""
    text, state, derivation = _metrics_text(), _pool_state(), Derivation()
    log = MetaLogCounts()
    taken: list[float] = []
    for second in range(3700):
        engines = tuple(_engine(n, second) for n in range(ENGINES))
        measured = second >= 3700 - ROUNDS
        if second % 10 and not measured:
            continue
        started = time.process_time()
        metrics = read_meta_metrics(text)
        at = float(second)
        pool = PoolLook("1", state, at, metrics, at, log=log)
        derivation.take(Look(at, "host-a", "host-a", is_master=True, engines=engines, pool=pool))
        if measured:
            taken.append(time.process_time() - started)
    median = 1000 * statistics.median(taken)
    worst = 1000 * sorted(taken)[int(0.99 * len(taken))]
    what = f"one picture, {ENGINES} engines, {SEGMENTS} segments (p99 {worst:.1f} ms)"
    return [Row(what, f"{median:.1f} ms CPU", "<= 30 ms", median <= 30)]


SERVER = """
import http.server, sys
class Same(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
body = sys.stdin.buffer.read()
server = http.server.HTTPServer(("127.0.0.1", 0), Same)
print(server.server_port, flush=True)
server.serve_forever()
"""


def cycle() -> list[Row]:
    """Observing and deciding as the daemon does it: everything is looked at in every step, and every rule asked.

    The MetaService's metrics come over HTTP from another process, its log grows, the host is this one. What is not in
    it: what is asked elsewhere in the daemon and only handed over here (engines' metrics, segments over REST).
    """
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(_metrics_text().encode())
        server.stdin.close()
        taken = asyncio.run(_cycles(f"http://127.0.0.1:{int(server.stdout.readline())}"))
    finally:
        server.kill()
        server.wait()
    median = 1000 * statistics.median(taken)
    worst = 1000 * sorted(taken)[int(0.99 * len(taken))]
    what = f"observe and decide, {ENGINES} engines, {SEGMENTS} segments (p99 {worst:.1f} ms)"
    return [Row(what, f"{median:.1f} ms CPU", "<= 30 ms", median <= 30)]


async def _cycles(url: str) -> list[float]:
    second = 0
    state = _pool_state()
    taken: list[float] = []
    sample = b"".join((FIXTURES / "mmc-meta.log").read_bytes().splitlines(keepends=True)[:200])
    owners = {n: (f"n{n // 8}", f"kvtier-pool-{n % 8}") for n in range(SEGMENTS)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "mmc-meta.log"
        log.touch()

        def pool() -> PoolSource:
            fresh = dataclasses.replace(state)  # another answer, with the same in it
            return PoolSource("1", fresh, url, None, log, 90, 80, owners)

        def peers() -> list[HostPicture]:
            seen = float(second)
            return [HostPicture(f"n{n}", seen, 2**36, 2**40, 2**34, room_bytes=2**35) for n in range(1, 32)]

        sources = Sources(
            node=lambda: "n0",
            cluster=lambda: ("n0", True),
            engines=lambda: tuple(_engine(n, second) for n in range(ENGINES)),
            pool=pool,
            room_bytes=lambda _: 2**34,
            peers=peers,
        )
        observer = Observer(
            sources,
            state_dir=Path(folder),
            clock=lambda: float(second),
            meta_seconds=0.0,
            host_seconds=0.0,
        )
        decider = Decider(default_policy())
        for step in range(FILLING + ROUNDS // 2):
            measured = step >= FILLING
            second += 1 if measured else 10
            with log.open("ab") as file:
                file.write(sample)
            started = time.process_time()
            seen = await observer.step()
            decider.step(seen)
            if measured:
                taken.append(time.process_time() - started)
        assert seen.pool is not None
        assert len(seen.pool.segments) == SEGMENTS
        assert 3600 in seen.pool.windows
        assert not seen.pool.problem
        assert not observer.problems
        await observer.close()
    return taken


def scrape() -> list[Row]:
    """All families of a crowded node as text, and the status page's JSON, made anew each time."""
    state, history = crowded(ENGINES, SEGMENTS), History()
    rows = []
    for what, make in (
        ("scrape", lambda: encode(metric_families(state), openmetrics=True)),
        ("status.json", lambda: status_json(state, history)),
    ):
        taken = []
        body = b""
        for _ in range(100):
            started = time.process_time()
            body = make()
            taken.append(time.process_time() - started)
        median = 1000 * statistics.median(taken)
        series = sum(not line.startswith(b"#") for line in body.splitlines()) if what == "scrape" else 0
        told = f"{what}, {len(body) // 1024} KiB" + (f", {series} series" if series else "")
        rows.append(Row(told, f"{median:.1f} ms CPU", "<= 20 ms", median <= 20))
    return rows


def follow_log() -> list[Row]:
    """A real mmc-meta.log many times over, from the page cache: read, cut into lines, counted."""
    sample = (FIXTURES / "mmc-meta.log").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mmc-meta.log"
        with path.open("wb") as file:
            for _ in range(LOG_MB * 1_000_000 // len(sample)):
                file.write(sample)
        speeds = []
        for _ in range(3):
            follower, counts, total = LogFollower(path, from_start=True), MetaLogCounts(), 0
            started = time.process_time()
            while lines := follower.read():
                counts.add(lines)
                total += len(lines)
            speeds.append(total / 1e6 / (time.process_time() - started))
            follower.close()
        follower, counts = LogFollower(path, from_start=True), MetaLogCounts()
        tracemalloc.start()
        while lines := follower.read():
            counts.add(lines)
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        follower.close()
    speed = statistics.median(speeds)
    return [
        Row(f"following mmc-meta.log, {LOG_MB} MB", f"{speed:.0f} MB/s", ">= 50 MB/s", speed >= 50),
        Row("  memory that it takes", f"{peak:.1f} MB", "<= 2 MB", peak <= 2),
    ]


def rows() -> list[Row]:
    return [*picture(), *cycle(), *scrape(), *follow_log()]


if __name__ == "__main__":
    print_table(rows())
