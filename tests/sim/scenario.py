"""One run: a cluster drawn from a seed, faults for as long as it takes to see so many elections, and the counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Literal

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochState

from .world import Node, World, make_config

Profile = Literal["calm", "rough"]
NAMES = ("a", "b", "c", "d", "e")
STUCK_SECONDS = (
    3600.0  # faults heal within 30 s; without an election for so long something is wrong with the elector
)
REAL_DRIFT = 1e-4


@dataclasses.dataclass(slots=True)
class Result:
    """What one run, or many, have seen."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    takeovers: list[float] = dataclasses.field(default_factory=list)
    handovers: list[float] = dataclasses.field(default_factory=list)
    violations: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Result) -> None:
        self.counts.update(other.counts)
        self.takeovers += other.takeovers
        self.handovers += other.handovers
        self.violations += other.violations


ConfigMaker = Callable[..., ElectorConfig]


class Scenario:
    """Builds the world and breaks it."""

    def __init__(
        self,
        seed: int,
        index: int,
        *,
        voters: int = 0,
        profile: Profile | None = None,
        leases_change: bool = False,
        config: ConfigMaker = make_config,
        prepare: Callable[[World], None] = lambda _: None,
    ) -> None:
        self.label = f"seed={seed} run={index}"
        self.world = world = World(f"{seed}/{index}")
        self.draw = draw = world.draw
        self.random = world.random
        self.profile: Profile = profile or ("calm" if draw() < 0.1 else "rough")
        self.result = Result()
        self._lost_at: float | None = None
        self._planned = False
        self._healthy_at = 0.0
        self._healing = 0
        count = voters or (3 if draw() < 0.7 else 5)
        names = NAMES[:count]
        # One voter with an older, shorter list: the mistake that the digest is for.
        strange = count == 5 and draw() < 0.25 and self.profile == "rough"
        drift = make_config("a", ("a", "b", "c")).drift
        extreme = draw() < 0.5
        fresh = draw() < 0.3 and not strange
        for name in names:
            rate = 1.0 + REAL_DRIFT * (2 * draw() - 1)
            if self.profile == "rough":
                rate = 1.0 + (drift * (1 if draw() < 0.5 else -1) if extreme else drift * (2 * draw() - 1))
            listed = NAMES[:3] if strange and name == "a" else names
            disk = None if fresh else EpochState(1, "", 0, 0.0, self.random.getrandbits(50))
            Node(world, config(name, listed), rate=rate, disk=disk)
        world.highest_epoch = 0 if fresh else 1
        self.founded = not fresh
        self.nodes = list(world.nodes.values())
        self.lossable = count - (count // 2 + 1)  # so many may be without a file at once
        self.make = config
        self.leases_change = self.profile == "rough" and (draw() < 0.15 or leases_change)
        if self.profile == "rough":
            self._roughen()
        prepare(world)
        for node in self.nodes:
            world.at(draw() * (3.0 if self.profile == "rough" else 0.1), lambda *_, n=node: n.start())
        if self.profile == "calm":
            world.on_served = self._calm_served
        else:
            self.gap = self.random.choice((1.5, 3.0, 6.0, 12.0))
            world.at(self._pause(), self._strike)

    def _roughen(self) -> None:
        world, draw = self.world, self.draw
        world.duplicates = draw() * 0.1 if draw() < 0.5 else 0.0
        world.mishaps = 0.04 if draw() < 0.5 else 0.0
        if draw() < 0.4:
            world.loss = 0.25 * draw() ** 2
        if draw() < 0.6:
            world.slow_share = 0.3 * draw()
            world.longest_delay_seconds = self.random.choice((0.3, 2.0, 8.0, 20.0))

    def run(self, elections: int) -> Result:
        """Plays until so many leases were gained, or something went wrong."""
        world = self.world
        while world.elections < elections and not world.violations:
            seen, before = world.elections, world.now
            world.run(seen + 1, latest=before + STUCK_SECONDS)
            if world.elections == seen and not world.violations:
                world.counts["stuck"] += 1
                world.violate(f"no master for {STUCK_SECONDS:g} s: {self._why_stuck()}")
        self.result.counts = Counter(world.counts, elections=world.elections, runs=1)
        self.result.violations = [f"{self.label} {what}" for what in world.violations]
        return self.result

    def _why_stuck(self) -> str:
        parts = []
        for node in self.nodes:
            view = node.elector.view(node.local()) if node.elector else None
            parts.append(f"{node.name}: {'frozen ' if node.frozen else ''}{view}")
        return "; ".join(parts)

    # -- calm: one fault at a time, and how long the tier is without a master

    def _calm_served(self, node: Node) -> None:
        world = self.world
        if self._lost_at is not None:
            taken = self.result.handovers if self._planned else self.result.takeovers
            taken.append(world.now - self._lost_at)
            self._lost_at = None
        world.at(world.now + 3.0 + 4.0 * self.draw(), self._calm_strike, node)

    def _calm_strike(self, node: Node, _: object = None) -> None:
        world = self.world
        if node.name not in world.serving or node.name != world.master:
            return
        if world.now < self._healthy_at:  # no fault on top of another
            world.at(self._healthy_at, self._calm_strike, node)
            return
        self._lost_at = world.now
        heal_after = 12.0 + 10.0 * self.draw()
        kind = self.random.randrange(4)
        self._planned = kind == 3
        if not self._planned:
            self._healthy_at = world.now + heal_after + 9.0
        if self._planned:
            self._switchover(node)
        elif kind == 0:
            self._count("crashes")
            node.end_host()
            world.at(world.now + heal_after, lambda *_: node.reboot())
        elif kind == 1:
            self._count("freezes")
            node.freeze()
            world.at(world.now + heal_after, lambda *_: node.thaw())
        else:
            self._count("partitions")
            self._cut([node], heal_after)

    # -- rough: anything, several at a time

    def _pause(self) -> float:
        return self.world.now + self.random.expovariate(1.0 / self.gap)

    def _count(self, what: str) -> None:
        self.world.counts[what] += 1
        self.world.counts["faults"] += 1

    def _strike(self, *_: object) -> None:
        world, choose = self.world, self.random.random
        world.at(self._pause(), self._strike)
        node = self.random.choice(self.nodes)
        if choose() < 0.6:
            node = world.nodes.get(world.master, node)
        kind = choose()
        if kind < 0.14:
            self._count("partitions")
            group = [n for n in self.nodes if choose() < 0.5] if choose() < 0.5 else [node]
            self._cut(group, 1.0 + 20.0 * choose())
        elif kind < 0.26:
            self._count("one_way")
            self._one_way(node, 1.0 + 20.0 * choose())
        elif kind < 0.42:
            self._count("freezes")
            node.freeze()
            world.at(world.now + 0.1 + 15.0 * choose() ** 2, lambda *_: node.thaw())
        elif kind < 0.56:
            self._count("crashes")
            self._crash_daemon(node)
        elif kind < 0.70:
            self._count("crashes")
            self._crash_host(node)
        elif kind < 0.74:
            self._lose_file(node)
        elif kind < 0.90:
            self._switchover(node)
        elif kind < 0.95:
            self._count("unfit")
            node.set_fit(False)
            world.at(world.now + 10.0 * choose(), lambda *_: node.set_fit(True))
        else:
            self._count("clocks")
            drift = node.config.drift
            node.set_clock(1.0 + drift * self.random.choice((-1.0, 1.0, 2 * choose() - 1)))

    def _cut(self, group: list[Node], seconds: float) -> None:
        inside = {n.name for n in group}
        links = [
            (x.name, y.name)
            for x in self.nodes
            for y in self.nodes
            if (x.name in inside) != (y.name in inside)
        ]
        self._block(links, seconds)

    def _one_way(self, node: Node, seconds: float) -> None:
        others = [n.name for n in self.nodes if n is not node and self.draw() < 0.7]
        links = [(node.name, o) for o in others] if self.draw() < 0.5 else [(o, node.name) for o in others]
        self._block(links, seconds)

    def _block(self, links: list[tuple[str, str]], seconds: float) -> None:
        blocked = self.world.blocked
        for link in links:
            blocked[link] += 1

        def heal(*_: object) -> None:
            for link in links:
                blocked[link] -= 1
            if not any(blocked.values()):
                blocked.clear()

        self.world.at(self.world.now + seconds, heal)

    def _downtime(self) -> float:
        return self.world.now + (0.05 if self.draw() < 0.5 else 12.0 * self.draw())

    def _crash_daemon(self, node: Node) -> None:
        node.end_daemon()
        self._change_lease(node)
        with_held = self.draw() < 0.7
        self.world.at(self._downtime(), lambda *_: node.start(with_held=with_held))

    def _crash_host(self, node: Node) -> None:
        node.end_host()
        self.world.at(self._downtime(), lambda *_: node.reboot())

    def _change_lease(self, node: Node) -> None:
        if self.leases_change and self.draw() < 0.5:
            lease_seconds = self.random.choice((2.0, 6.0, 9.0))
            node.config = self.make(node.name, node.config.voters, lease_seconds=lease_seconds)

    def _lose_file(self, node: Node) -> None:
        """With it the memory of all epochs. Of fewer than a majority at once: then the others know enough."""
        self.founded = self.founded or all(n.disk is not None for n in self.nodes)
        without = sum(n.disk is None for n in self.nodes)
        if (
            not self.founded
            or without >= self.lossable
            or any(len(n.config.voters) < len(self.nodes) for n in self.nodes)
        ):
            return
        self._count("lost_files")
        host = self.draw() < 0.5
        self._change_lease(node)
        node.end_host() if host else node.end_daemon()
        node.disk = None
        if host:
            self.world.at(self._downtime(), lambda *_: node.reboot())
        else:
            self.world.at(self._downtime(), lambda *_: node.start(with_held=False))

    def _switchover(self, node: Node) -> None:
        to = None if self.draw() < 0.3 else self.random.choice([n.name for n in self.nodes if n is not node])
        if to is not None and to not in node.config.others:
            to = None
        if node.resign(to):
            self._count("switchovers")
