"""Gathers what a node's sources say and keeps the newest picture of it.

Each source is looked at by itself, with a deadline: the MetaService's metrics over HTTP, its log, the host's files,
npu-smi. One that is late is not waited for the next time, and never looked at twice at once. What engines and the tier
say comes from those who look at them already, through callables that must not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.errors import KvtierError
from kvtierd.host.view import HostView
from kvtierd.http_get import TlsFiles
from kvtierd.memcache.health import PoolState
from kvtierd.memcache.rest import MetaClient
from kvtierd.observe.derive import Derivation, EngineLook, Look, PoolLook
from kvtierd.observe.host import NpuWatch, read_host
from kvtierd.observe.log_follow import LogFollower, PositionStore
from kvtierd.observe.meta_log import MetaLogCounts
from kvtierd.observe.meta_metrics import MetaMetrics, read_meta_metrics
from kvtierd.observe.picture import EngineIdentity, HostPicture, Picture
from kvtierd.observe.tiers import Sample
from kvtierd.plan.engine import EngineObservation
from kvtierd.units.views import UnitView

log = structlog.get_logger(__name__)

META_SECONDS: Final = 2.0
META_TIMEOUT_SECONDS: Final = 2.0
HOST_SECONDS: Final = 5.0
WAIT_SECONDS: Final = 0.25
"""How long a picture waits for looks that have just begun; one that was late before is not waited for."""
LOG_BLOCKS_A_LOOK: Final = 64
POSITIONS_FILE: Final = "log-positions.json"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSource:
    """Where this node's MetaService is looked at, and what is known of it already.

    Attributes:
        instance: Its run; ``None``: it does not run here, then nothing is asked.
        state: What it said last over REST (``TierKeeper.pool``); ``None`` when it did not answer.
        metrics_base_url: ``http://HOST:PORT``; ``None``: its metrics are not read.
        tls: For ``https://``.
        log_file: Its mmc-meta.log; ``None``: not followed.
        evict_high_percent, evict_low_percent: The thresholds in force, by the files.
        owners: Rank -> its node and unit, where that is known.
    """

    instance: str | None
    state: PoolState | None = None
    metrics_base_url: str | None = None
    tls: TlsFiles | None = None
    log_file: Path | None = None
    evict_high_percent: int | None = None
    evict_low_percent: int | None = None
    owners: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Who is asked at every step. The callables return at once; a fault of one leaves its part unknown.

    Attributes:
        node: This node's name.
        cluster: Who is the master ("" for nobody known), and whether this node is.
        engines: The engines, with the newest observation of each (``engine_look`` makes one).
        pool: The MetaService; ``None`` where another node runs it.
        headroom_bytes: Memory that the settings keep free.
        holders: Pool holders that were added beside the plan, by unit id.
        room_bytes: What one more pool holder could take here; ``None``: unknown.
        peers: What other nodes said of their memory.
        engines_elsewhere: What other nodes' engines make their keys from.
    """

    node: Callable[[], str]
    cluster: Callable[[], tuple[str, bool]]
    engines: Callable[[], Sequence[EngineLook]] = tuple
    pool: Callable[[], PoolSource | None] = lambda: None
    headroom_bytes: Callable[[], int] = lambda: 0
    holders: Callable[[], tuple[str, ...]] = tuple
    room_bytes: Callable[[HostPicture], int | None] = lambda _: None
    peers: Callable[[], Sequence[HostPicture]] = tuple
    engines_elsewhere: Callable[[], Sequence[EngineIdentity]] = tuple


def engine_look(
    view: UnitView, sample: Sample | None, reading: EngineObservation | None = None, *, problem: str = ""
) -> EngineLook:
    """An engine as its unit, its newest metrics and its output tell of it; ``dataclasses.replace`` adds what plans know.

    Args:
        view: Its unit.
        sample: From ``EngineObserver.samples``.
        reading: From ``LineObserver.readings``: fills what the metrics do not say.
        problem: From ``EngineObserver.problems``.
    """
    observation = sample.observation if sample is not None else None
    if observation is not None and reading is not None:
        observation = reading.model_copy(update=observation.model_dump(exclude_none=True))
    return EngineLook(
        view.id,
        instance=view.instance if view.pid is not None else None,
        ready=view.ready,
        observation=observation,
        at_seconds=sample.at_seconds if sample is not None else None,
        problem=problem,
    )


class Observer:
    """Looks at everything, ``step`` by step; ``picture`` is the newest.

    Args:
        sources: Who is asked.
        view: The host, for its files and npu-smi.
        state_dir: Where the positions in logs are kept over restarts of kvtierd; ``None``: nowhere.
        clock: Seconds of CLOCK_BOOTTIME.
        meta_seconds: Between two looks at the MetaService's metrics.
        host_seconds: Between two looks at the host's files.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        view: HostView | None = None,
        state_dir: Path | None = None,
        clock: Callable[[], float] = boottime_seconds,
        meta_seconds: float = META_SECONDS,
        host_seconds: float = HOST_SECONDS,
    ) -> None:
        self.picture: Picture | None = None
        self.problems: dict[str, str] = {}
        self._sources = sources
        self._view = view if view is not None else HostView()
        self._clock = clock
        self._derivation = Derivation()
        self._meta = _MetaScrape()
        self._log = _LogReading(state_dir / POSITIONS_FILE if state_dir is not None else None)
        self._npus = NpuWatch(self._view)
        self._host: HostPicture | None = None
        self._state: tuple[PoolState | None, float | None] = (None, None)
        self._looks = {
            "meta": _Repeated(meta_seconds),
            "log": _Repeated(0.0),
            "host": _Repeated(host_seconds),
        }

    async def step(self) -> Picture:
        """Looks at what is due, waits a moment for it, and makes a new picture. Never raises for a source's fault."""
        now = self._clock()
        node = self._ask("node", self._sources.node, "")
        pool = self._ask("pool", self._sources.pool, None)
        begun: list[asyncio.Task[None]] = []
        self._meta.point_to(pool)
        if pool is not None and pool.instance is not None and pool.metrics_base_url is not None:
            begun += self._looks["meta"].begin(now, lambda: self._meta.look(self._clock))
        begun += self._looks["log"].begin(
            now, lambda: self._log.look(pool.log_file if pool is not None else None, now)
        )
        begun += self._looks["host"].begin(now, lambda: self._look_at_host(node))
        self._npus.step(now)
        if begun:
            await asyncio.wait(begun, timeout=WAIT_SECONDS)
        self._note_faults()
        now = self._clock()
        master, is_master = self._ask("cluster", self._sources.cluster, ("", False))
        self.picture = self._derivation.take(
            Look(
                now_seconds=now,
                node=node,
                master=master,
                is_master=is_master,
                engines=tuple(self._ask("engines", self._sources.engines, ())),
                pool=self._pool_look(pool, now),
                host=self._host_now(),
                peers=tuple(self._ask("peers", self._sources.peers, ())),
                engines_elsewhere=tuple(self._ask("engines elsewhere", self._sources.engines_elsewhere, ())),
            )
        )
        return self.picture

    async def close(self) -> None:
        """Ends what is under way and keeps the positions in logs."""
        for look in self._looks.values():
            await look.close()
        await self._npus.close()
        self._log.close()

    def _ask(self, what: str, source: Callable[[], _T], default: _T) -> _T:
        try:
            answer = source()
        except Exception as error:  # noqa: BLE001 - one source's fault leaves its part unknown, and nothing else
            self.problems[what] = f"{type(error).__name__}: {error}"
            return default
        self.problems.pop(what, None)
        return answer

    def _note_faults(self) -> None:
        for name, look in self._looks.items():
            if look.fault:
                self.problems[name] = look.fault
            else:
                self.problems.pop(name, None)
        if self._log.problem:
            self.problems["log"] = self._log.problem

    def _pool_look(self, pool: PoolSource | None, now: float) -> PoolLook | None:
        if pool is None:
            self._state = (None, None)
            return None
        if pool.state is not self._state[0]:
            self._state = (pool.state, now if pool.state is not None else None)
        return PoolLook(
            instance=pool.instance,
            state=pool.state,
            state_at_seconds=self._state[1],
            metrics=self._meta.metrics,
            metrics_at_seconds=self._meta.at_seconds,
            metrics_problem=self._meta.problem,
            log=self._log.counts,
            evict_high_percent=pool.evict_high_percent,
            evict_low_percent=pool.evict_low_percent,
            owners=pool.owners,
        )

    async def _look_at_host(self, node: str) -> None:
        at_seconds = self._clock()
        self._host = await asyncio.to_thread(
            read_host,
            self._view,
            node,
            at_seconds,
            headroom_bytes=self._ask("headroom", self._sources.headroom_bytes, 0),
        )

    def _host_now(self) -> HostPicture | None:
        host = self._host
        if host is None:
            return None
        seen = dataclasses.replace(
            host,
            holders=self._ask("holders", self._sources.holders, ()),
            npus=self._npus.npus,
            npus_at_seconds=self._npus.at_seconds,
            npu_problem=self._npus.problem,
        )
        room = self._ask("room", lambda: self._sources.room_bytes(seen), None)
        return dataclasses.replace(seen, room_bytes=room)


class _Repeated:
    """A look that is begun every so often, never twice at once. ``fault``: what it ended with the last time."""

    def __init__(self, every_seconds: float) -> None:
        self.fault = ""
        self._every_seconds = every_seconds
        self._next_seconds = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def begin(self, now_seconds: float, look: Callable[[], Awaitable[None]]) -> list[asyncio.Task[None]]:
        """The task to wait for, if one was begun."""
        if now_seconds < self._next_seconds or (self._task is not None and not self._task.done()):
            return []
        self._next_seconds = now_seconds + self._every_seconds
        self._task = asyncio.create_task(self._run(look))
        return [self._task]

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
        except Exception as error:  # noqa: BLE001 - looking goes on
            self.fault = f"{type(error).__name__}: {error}"
            log.warning("observe.look-failed", error=self.fault)
        else:
            self.fault = ""


class _MetaScrape:
    """The MetaService's metrics, of its present run."""

    def __init__(self) -> None:
        self.metrics: MetaMetrics | None = None
        self.at_seconds: float | None = None
        self.problem = ""
        self._instance: str | None = None
        self._client: MetaClient | None = None

    def point_to(self, pool: PoolSource | None) -> None:
        """Forgets what another run said."""
        instance = pool.instance if pool is not None else None
        if instance != self._instance:
            self._instance, self.metrics, self.at_seconds, self.problem = instance, None, None, ""
        url = pool.metrics_base_url if pool is not None else None
        self._client = (
            MetaClient(url, timeout_seconds=META_TIMEOUT_SECONDS, tls=pool.tls if pool is not None else None)
            if url is not None
            else None
        )

    async def look(self, clock: Callable[[], float]) -> None:
        client, instance = self._client, self._instance
        if client is None:
            return
        try:
            text = await client.metrics_text()
            at_seconds = clock()
            # In a thread: a body of nonsense may take long to read.
            read = await asyncio.to_thread(read_meta_metrics, text)
        except KvtierError as error:
            if instance == self._instance:
                self.problem = ": ".join(filter(None, (error.message, error.why)))
            return
        if instance == self._instance:  # else it says nothing of the run that is looked at now
            self.metrics, self.at_seconds, self.problem = read, at_seconds, ""


class _LogReading:
    """What mmc-meta.log told since this began; the place in it is kept over restarts."""

    def __init__(self, positions_file: Path | None) -> None:
        self.counts: MetaLogCounts | None = None
        self.problem = ""
        self._store = PositionStore(positions_file) if positions_file is not None else None
        self._path: Path | None = None
        self._follower: LogFollower | None = None

    async def look(self, path: Path | None, now_seconds: float) -> None:
        await asyncio.to_thread(self._read, path, now_seconds)

    def close(self) -> None:
        if self._follower is not None:
            self._save(0.0, at_once=True)
            self._follower.close()
            self._follower = None

    def _read(self, path: Path | None, now_seconds: float) -> None:
        if path != self._path:
            self.close()
            self._path = path
            if path is not None:
                self._follower = LogFollower(path, self._store.get(path) if self._store else None)
        if self._follower is None:
            return
        if self.counts is None:
            self.counts = MetaLogCounts()
        for _ in range(LOG_BLOCKS_A_LOOK):
            lines = self._follower.read()
            if not lines:
                break
            self.counts.add(lines)
        self._save(now_seconds)
        self.problem = self._follower.problem or (self._store.problem if self._store else "")

    def _save(self, now_seconds: float, *, at_once: bool = False) -> None:
        if self._store is not None and self._follower is not None and self._path is not None:
            self._store.save({self._path: self._follower}, now_seconds, at_once=at_once)
