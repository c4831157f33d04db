"""A simulated cluster: real electors, true time, clocks that are off, a network that loses, and guards that kill.

Event-driven over a heap; everything random comes from one seed. The oracle sees true time and all nodes: two
MetaServices that accept at once, or an epoch that is not later than all before it, is a violation.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochRaised,
    EpochState,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Send,
)
from kvtierd.cluster.elector import Elector

GAINS = (LeaseGained, EpochRaised)


class World:
    """True time, the network, and the oracle."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(seed)
        self.draw = self.random.random
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], Any, Any]] = []
        self.sequence = 0
        self.nodes: dict[str, Node] = {}
        self.blocked: Counter[tuple[str, str]] = Counter()
        self.loss = 0.0
        self.duplicates = 0.0
        self.longest_delay_seconds = 0.0
        self.slow_share = 0.0  # of the messages that take up to longest_delay_seconds
        self.mishaps = 0.0  # how often a crash or freeze falls between two effects of one list
        self.guarded = True
        self.serve_at_once = False
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.elections = 0
        self.highest_epoch = 0
        self.serving: dict[str, int] = {}
        self.master = ""
        self.on_served: Callable[[Node], None] = lambda _: None

    def at(self, when: float, call: Callable[..., None], first: Any = None, second: Any = None) -> None:
        self.sequence += 1
        heapq.heappush(self.heap, (when, self.sequence, call, first, second))

    def run(self, elections: int, latest: float = math.inf) -> None:
        """Plays events until so many leases were gained, something is wrong or the time is over."""
        heap, pop = self.heap, heapq.heappop
        while self.elections < elections and not self.violations:
            when, _, call, first, second = pop(heap)
            if when > latest:
                self.now = latest
                return
            self.now = when
            call(first, second)

    def send(self, sender: str, to: str, message: AnyMessage) -> None:
        draw = self.draw
        if (self.blocked and self.blocked[sender, to] > 0) or (self.loss and draw() < self.loss):
            return
        node = self.nodes.get(to)
        if node is None:
            return
        copies = 2 if self.duplicates and draw() < self.duplicates else 1
        for _ in range(copies):
            delay = 0.0002 + 0.002 * draw()
            if self.slow_share and draw() < self.slow_share:
                delay = self.longest_delay_seconds * draw() ** 2
            self.sequence += 1
            heapq.heappush(self.heap, (self.now + delay, self.sequence, node.deliver, message, None))

    # -- the oracle

    def violate(self, what: str) -> None:
        self.violations.append(f"at {self.now:.3f} s: {what}")

    def gained(self, node: Node, effect: LeaseGained | EpochRaised) -> None:
        if effect.epoch <= self.highest_epoch:
            self.counts["epoch_faults"] += 1
            self.violate(f"{node.name} got epoch {effect.epoch}; {self.highest_epoch} has been used before")
        self.highest_epoch = max(self.highest_epoch, effect.epoch)
        if type(effect) is LeaseGained:
            self.elections += 1
        else:
            self.counts["raised"] += 1

    def serves(self, node: Node, epoch: int) -> None:
        others = [name for name in self.serving if name != node.name]
        if others:
            self.counts["double_masters"] += 1
            self.violate(f"{node.name} serves under epoch {epoch} while {others} still does ({self.serving})")
        self.serving[node.name] = epoch
        self.master = node.name
        self.on_served(node)


class Node:
    """A host: a clock, a disk, a daemon with its elector, a guard, and at times a MetaService."""

    def __init__(self, world: World, config: ElectorConfig, *, rate: float, disk: EpochState | None) -> None:
        self.world = world
        self.config = config
        self.name = config.node
        self.disk = disk
        self.elector: Elector | None = None
        self.powered = True
        self.frozen = False
        self.fit = True
        self.mail: list[AnyMessage] = []
        self.unfinished: list[Effect] = []
        self.scheduled = math.inf
        self.woken_at = -1.0
        self.spins = 0
        self.rate = rate
        self._base_true = world.now
        self._base_local = world.draw() * 1000.0
        # What the guard knows; it outlives the daemon, not the host.
        self.epoch = 0
        self.guard_until = -math.inf
        self.serve_after = 0.0
        self.wanted = False
        self.meta_run = 0
        world.nodes[self.name] = self

    # -- the clock

    def local(self) -> float:
        return self._base_local + self.rate * (self.world.now - self._base_true)

    def true(self, local: float) -> float:
        return self._base_true + (local - self._base_local) / self.rate

    def set_clock(self, rate: float, local: float | None = None) -> None:
        self._base_local = self.local() if local is None else local
        self._base_true = self.world.now
        self.rate = rate
        self.scheduled = math.inf
        self.schedule()
        if self.name in self.world.serving:
            self.watch()

    # -- the daemon

    def start(self, *, with_held: bool = True) -> None:
        if self.elector is not None or not self.powered:
            return
        local = self.local()
        held = None
        if with_held and self.wanted and local < self.guard_until:
            held = HeldLease(self.epoch, self.guard_until)
        self.frozen = False
        self.elector = Elector(
            self.config,
            self.disk,
            booted_at_seconds=local,
            draws=iter(self.world.draw, 2.0),
            held=held,
        )
        self.elector.set_fit(self.fit, "")
        if held is None:
            self.wanted = False  # what may still run is the guard's
        else:
            self.world.at(max(self.world.now, self.true(self.serve_after)), self.start_meta, self.epoch)
        self.schedule()

    def end_daemon(self) -> None:
        """kill -9: the guard and the MetaService stay."""
        self.elector = None
        self.frozen = False
        self.mail.clear()
        self.unfinished.clear()
        self.scheduled = math.inf

    def end_host(self) -> None:
        self.end_daemon()
        self.end_meta()
        self.powered = False
        self.wanted = False
        self.guard_until = -math.inf

    def reboot(self) -> None:
        if self.powered:
            return
        self.powered = True
        self.set_clock(self.rate, local=self.world.draw())
        self.start()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        unfinished, self.unfinished = self.unfinished, []
        self.carry_out(unfinished, judged=True)
        mail, self.mail = self.mail, []
        for message in mail:
            if self.elector is None or self.frozen:
                return
            self.carry_out(self.elector.step(message, self.local()))
        if self.wanted and self.name not in self.world.serving and self.local() >= self.serve_after:
            self.start_meta(self.epoch)
        self.scheduled = math.inf
        self.schedule()

    def deliver(self, message: AnyMessage, _: object = None) -> None:
        elector = self.elector
        if elector is None:
            return
        if self.frozen:
            self.mail.append(message)
            return
        effects = elector.step(message, self._base_local + self.rate * (self.world.now - self._base_true))
        if effects:
            self.carry_out(effects)
        self.schedule()

    def wake(self, when: float, _: object = None) -> None:
        if self.scheduled != when:
            return  # another one has taken its place
        self.scheduled = math.inf
        elector = self.elector
        if elector is None or self.frozen:
            return
        local, due = self.local(), elector.next_wake_seconds()
        self.spins = self.spins + 1 if when == self.woken_at else 0
        self.woken_at = when
        if self.spins > 100:
            self.world.violate(f"{self.name} wants to be woken again and again")
        if due <= local + 1e-6:
            self.carry_out(elector.tick(max(local, due)))
        self.schedule()

    def schedule(self) -> None:
        elector = self.elector
        if elector is None or self.frozen:
            return
        when = self._base_true + (elector.next_wake_seconds() - self._base_local) / self.rate
        if when < self.scheduled:
            self.scheduled = when = max(when, self.world.now)
            self.world.at(when, self.wake, when)

    def resign(self, to: str | None) -> bool:
        """The MetaService is stopped first, as the contract of ``Elector.resign`` wants it."""
        elector = self.elector
        if elector is None or self.frozen or elector.view(self.local()).role != "master":
            return False
        self.end_meta()
        self.carry_out(elector.resign(self.local(), to))
        self.schedule()
        return True

    def set_fit(self, fit: bool) -> None:
        self.fit = fit
        if self.elector is not None:
            self.elector.set_fit(fit, "")
            self.schedule()

    # -- effects

    def carry_out(self, effects: list[Effect], *, judged: bool = False) -> None:
        if not effects:
            return
        world = self.world
        if not judged and type(effects[-1]) in GAINS:
            world.gained(self, effects[-1])  # type: ignore[arg-type]
        mishap = -1
        if world.mishaps and type(effects[0]) is not Send and world.draw() < world.mishaps:
            mishap = world.random.randrange(len(effects))
        for place, effect in enumerate(effects):
            if place == mishap:
                self._mishap(effects[place:])
                return
            kind = type(effect)
            if kind is Send:
                world.send(self.name, effect.to, effect.message)  # type: ignore[union-attr]
            elif kind is LeaseRenewed:
                if self.wanted:
                    self.guard_until = max(self.guard_until, effect.until_seconds)  # type: ignore[union-attr]
            else:
                self._rare(effect)

    def _rare(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self.disk = effect.state
        elif isinstance(effect, LeaseGained):
            self.epoch, self.wanted = effect.epoch, True
            self.guard_until = effect.until_seconds
            self.serve_after = self.local() if self.world.serve_at_once else effect.serve_after_seconds
            self.world.at(max(self.world.now, self.true(self.serve_after)), self.start_meta, effect.epoch)
        elif isinstance(effect, EpochRaised):
            if self.wanted:
                if self.world.serving.get(self.name) == self.epoch:
                    self.world.serving[self.name] = effect.epoch
                else:
                    when = max(self.world.now, self.true(self.serve_after))
                    self.world.at(when, self.start_meta, effect.epoch)
                self.epoch = effect.epoch
                self.guard_until = max(self.guard_until, effect.until_seconds)
        elif isinstance(effect, LeaseLost):
            # A kill takes its time; the guard stays armed until it is done.
            self.wanted = False
            if self.name in self.world.serving:
                killed_at = self.world.now + 0.5 * self.world.draw()
                self.world.at(killed_at, self.kill, self.meta_run)

    def _mishap(self, rest: list[Effect]) -> None:
        world = self.world
        world.counts["mishaps"] += 1
        if world.draw() < 0.5:
            self.unfinished = rest
            self.freeze()
            world.at(world.now + 12.0 * world.draw(), lambda *_: self.thaw())
        else:
            self.end_daemon()
            world.at(world.now + 0.05 + 3.0 * world.draw(), lambda *_: self.start())

    # -- the MetaService and its guard

    def start_meta(self, epoch: int, _: object = None) -> None:
        """The driver starts it; a guard that is past its deadline does not let it."""
        if self.elector is None or self.frozen or not self.wanted or epoch != self.epoch:
            return
        if self.world.guarded and self.local() >= self.guard_until:
            return
        if self.world.serving.get(self.name) == epoch:
            return
        self.end_meta()  # of an earlier term of this same node
        self.meta_run += 1
        self.world.serves(self, epoch)
        self.watch()

    def end_meta(self) -> None:
        self.world.serving.pop(self.name, None)

    def watch(self, *_: object) -> None:
        """The guard looks: after the end of the lease it kills, at the latest when the margin is over."""
        if not self.world.guarded or self.name not in self.world.serving:
            return
        if self.local() < self.guard_until - 1e-9:
            self.world.at(max(self.world.now, self.true(self.guard_until)), self.watch)
            return
        late = 1.0 if self.world.draw() < 0.5 else self.world.draw()
        after = late * self.config.kill_margin_seconds / self.rate
        self.world.at(self.world.now + after * 0.999999, self.kill, self.meta_run)

    def kill(self, meta_run: int, _: object = None) -> None:
        """Kills that very process, under whatever epoch it serves by now."""
        if self.meta_run == meta_run:
            self.end_meta()


def make_config(node: str, voters: Iterable[str], **values: Any) -> ElectorConfig:
    return ElectorConfig("sim", node, tuple(voters), **values)
