"""A modelled pool on two hosts, and the real decider beside it. Time goes in ticks; everything follows from a seed.

The pool does what MemCache does: values go into segments that holders bring; above ``evict_high`` the least recently used
go until ``evict_low`` is reached; a value that finds no room fails, and that alone evicts nothing; a holder that leaves
takes its values along. What an action costs in time is modelled, and what it costs in keys.
"""

from __future__ import annotations

import collections
import dataclasses
import random

from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Circumstances
from kvtierd.decide.policy import default_policy
from kvtierd.decide.proposals import (
    AddHolder,
    AttachL3,
    DetachL3,
    Purge,
    Rebalance,
    RemoveHolder,
    RestartUnit,
    SetThresholds,
)
from kvtierd.observe.picture import (
    EnginePicture,
    HostPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    SegmentPicture,
)
from kvtierd.plan.units import META_ID

GIB = 1024**3
MIB = 1024**2
TICK_SECONDS = 20.0
WINDOWS = (60, 300, 3600)
KEYS = ("evicted_keys", "evicted_bytes", "failed", "allocations", "queries", "hits")


@dataclasses.dataclass(slots=True, eq=False)
class Segment:
    node: str
    unit: str
    total_bytes: int
    used_bytes: int = 0
    rank: int = 0


class Pool:
    """Keys in one LRU order over all segments."""

    def __init__(self, high, low, *, local_first=False, rng):
        self.high, self.low = high, low
        self.segments = []
        self.keys = collections.OrderedDict()  # key -> (segment, bytes)
        self.counts = dict.fromkeys(KEYS, 0)
        self.local_first = local_first
        self.rng = rng
        self.ranks = 0

    @property
    def capacity_bytes(self):
        return sum(s.total_bytes for s in self.segments)

    @property
    def used_bytes(self):
        return sum(s.used_bytes for s in self.segments)

    def join(self, node, unit, size):
        self.segments.append(Segment(node, unit, size, rank=self.ranks))
        self.ranks += 1

    def leave(self, node, unit):
        gone = [s for s in self.segments if (s.node, s.unit) == (node, unit)]
        self.segments = [s for s in self.segments if s not in gone]
        for key in [k for k, (s, _) in self.keys.items() if s in gone]:
            del self.keys[key]

    def purge(self):
        self.keys.clear()
        for segment in self.segments:
            segment.used_bytes = 0

    def look_up(self, key):
        self.counts["queries"] += 1
        if key not in self.keys:
            return False
        self.keys.move_to_end(key)
        self.counts["hits"] += 1
        return True

    def put(self, key, size, node):
        self.counts["allocations"] += 1
        free = [s for s in self.segments if s.total_bytes - s.used_bytes >= size]
        if self.local_first:
            free = [s for s in free if s.node == node]
        if not free:
            self.counts["failed"] += 1
        else:
            segment = max(free, key=lambda s: s.total_bytes - s.used_bytes)
            segment.used_bytes += size
            self.keys[key] = (segment, size)
        self.evict(node)

    def evict(self, node):
        """Over all of the pool; with local values first, over the writer's part."""
        segments = [s for s in self.segments if s.node == node] if self.local_first else self.segments
        total, used = sum(s.total_bytes for s in segments), sum(s.used_bytes for s in segments)
        if used * 100 <= self.high * total:
            return
        gone = []
        for key, (segment, size) in self.keys.items():
            if used * 100 <= self.low * total:
                break
            if not self.local_first or segment.node == node:
                gone.append(key)
                segment.used_bytes -= size
                used -= size
                self.counts["evicted_keys"] += 1
                self.counts["evicted_bytes"] += size
        for key in gone:
            del self.keys[key]


@dataclasses.dataclass
class Host:
    node: str
    total_bytes: int
    headroom_bytes: int
    other_bytes: int = 0  # what else takes memory there


@dataclasses.dataclass
class Engine:
    unit: str
    registered: bool = True
    ready: bool = True
    detached: bool = False


@dataclasses.dataclass
class Act:
    at_seconds: float
    proposal: object
    done_seconds: float
    urgent: bool


class World:
    """One run: ``traffic(world, now)`` yields (key, bytes, node) lookups, ``events(world, now)`` changes things."""

    def __init__(self, scenario, seed, *, decider=True, policy=None):
        self.scenario = scenario
        self.rng = random.Random(f"{scenario.name}/{seed}")
        self.luck = random.Random(
            f"luck/{seed}"
        )  # apart, so that traffic is the same with and without actions
        self.pool = Pool(*scenario.thresholds, local_first=scenario.local_first, rng=self.rng)
        for node, size in scenario.pool:
            self.pool.join(node, "kvtier-pool-0", size)
        self.hosts = [Host(node, total, 8 * GIB, other) for node, total, other in scenario.hosts]
        self.engines = [Engine(f"kvtier-engine-{i}") for i in range(scenario.engines)]
        self.policy = policy or default_policy()
        self.decider = Decider(self.policy) if decider else None
        self.now = 0.0
        self.history = collections.deque(maxlen=WINDOWS[-1] // int(TICK_SECONDS) + 1)
        self.acts = []
        self.flying = []
        self.advice = []
        self.pool_frozen_at = None
        self.frozen = None
        self.paused = False
        self.starved_ticks = 0
        self.added = {}  # (node, unit) -> bytes
        self.counted = [0, 0]  # lookups and hits after the warm-up

    # -- what is seen

    def available(self, host):
        added = sum(size for (node, _), size in self.added.items() if node == host.node)
        base = sum(size for node, size in self.scenario.pool if node == host.node)
        return max(0, host.total_bytes - host.other_bytes - added - base)

    def picture(self):
        hosts = tuple(
            HostPicture(
                node=host.node, at_seconds=self.now, available_bytes=self.available(host),
                total_bytes=host.total_bytes, headroom_bytes=host.headroom_bytes,
                holders=tuple(unit for node, unit in self.added if node == host.node),
                room_bytes=max(0, self.available(host) - 2 * host.headroom_bytes),
            )
            for host in self.hosts
        )  # fmt: skip
        return Picture(
            now_seconds=self.now, node=self.hosts[0].node, master=self.hosts[0].node, is_master=True,
            pool=self.pool_picture(), host=hosts[0], peers=hosts[1:],
            engines=tuple(
                EnginePicture(e.unit, group="chat", instance="1", ready=e.ready, at_seconds=self.now,
                              registered=e.registered, can_switch_l3=True, l3_detached=e.detached)
                for e in self.engines
            ),
        )  # fmt: skip

    def pool_picture(self):
        if self.pool_frozen_at is not None:
            self.frozen = self.frozen or self._pool_picture()
            return self.frozen
        return self._pool_picture()

    def _pool_picture(self):
        pool, windows = self.pool, {}
        capacity = pool.capacity_bytes
        for seconds in WINDOWS:
            ticks = seconds // int(TICK_SECONDS)
            if len(self.history) <= ticks:
                continue
            before = self.history[-1 - ticks]
            delta = {k: pool.counts[k] - before[k] for k in KEYS}
            windows[seconds] = PoolWindow(
                evicted_keys_per_second=delta["evicted_keys"] / seconds,
                evicted_bytes_per_second=delta["evicted_bytes"] / seconds,
                turnovers_per_hour=delta["evicted_bytes"] / capacity * 3600 / seconds if capacity else None,
                failed_allocations=delta["failed"], allocations=delta["allocations"],
                query_keys=delta["queries"], hit_keys=delta["hits"],
            )  # fmt: skip
        return PoolPicture(
            at_seconds=self.now, instance="1", capacity_bytes=capacity, used_bytes=pool.used_bytes,
            segments=tuple(
                SegmentPicture(f"rank-{s.rank}-dram", "cpu", s.rank, s.total_bytes, s.used_bytes, s.node, s.unit)
                for s in pool.segments
            ),
            stored_keys=len(pool.keys), mean_value_bytes=pool.used_bytes / len(pool.keys) if pool.keys else None,
            evict_high_percent=pool.high, evict_low_percent=pool.low, windows=windows,
        )  # fmt: skip

    # -- what happens

    def run(self):
        ticks = int(self.scenario.hours * 3600 / TICK_SECONDS)
        warm = min(ticks // 3, int(3600 / TICK_SECONDS))
        for tick in range(ticks):
            self.now = tick * TICK_SECONDS
            if self.scenario.events:
                self.scenario.events(self, self.now)
            for key, size, node in self.scenario.traffic(self, self.now):
                hit = self.pool.look_up(key)
                if not hit:
                    self.pool.put(key, size, node)
                if tick >= warm:
                    self.counted[0] += 1
                    self.counted[1] += hit
            self.history.append(dict(self.pool.counts))
            self.starved_ticks += any(self.available(h) < h.headroom_bytes / 2 for h in self.hosts)
            self.carry_out()
        return self

    @property
    def hit_rate(self):
        return self.counted[1] / self.counted[0] if self.counted[0] else 0.0

    def carry_out(self):
        if self.decider is None:
            return
        for act in [a for a in self.flying if a.done_seconds <= self.now]:
            self.flying.remove(act)
            ok = self.luck.random() >= self.scenario.failing and self.apply(act.proposal.action)
            self.decider.outcome(act.proposal.id, ok=ok, text="", now_seconds=self.now)
        for proposal in self.decider.step(self.picture(), Circumstances(paused=self.paused)):
            if proposal.is_advice:
                self.advice.append((self.now, proposal))
                continue
            act = Act(self.now, proposal, self.now + self.scenario.action_seconds, proposal.urgent)
            self.acts.append(act)
            self.flying.append(act)
            if isinstance(proposal.action, RestartUnit):
                self.set_ready(proposal.action.unit, ready=False)

    def set_ready(self, unit, *, ready):
        for engine in self.engines:
            if engine.unit == unit:
                engine.ready = ready
                engine.registered = engine.registered or ready

    def apply(self, action):
        if isinstance(action, AddHolder):
            host = next(h for h in self.hosts if h.node == action.node)
            if self.available(host) < action.bytes:
                return False
            unit = f"kvtier-pool-{len(self.acts)}"
            self.added[action.node, unit] = action.bytes
            self.pool.join(action.node, unit, action.bytes)
        elif isinstance(action, RemoveHolder):
            if self.added.pop((action.node, action.unit), None) is None:
                return False
            self.pool.leave(action.node, action.unit)
        elif isinstance(action, Rebalance):
            return self.apply(action.add) and self.apply(action.remove)
        elif isinstance(action, SetThresholds):
            self.pool.high, self.pool.low = action.high_percent, action.low_percent
        elif isinstance(action, Purge) or (isinstance(action, RestartUnit) and action.unit == META_ID):
            self.pool.purge()
        elif isinstance(action, RestartUnit):
            self.set_ready(action.unit, ready=True)
        elif isinstance(action, DetachL3 | AttachL3):
            for engine in self.engines:
                if engine.unit == action.engine:
                    engine.detached = isinstance(action, DetachL3)
        return True
