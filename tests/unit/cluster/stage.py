"""A cluster on a stage: electors, a pool of messages under way, and a clock that only the script moves.

Transcripts are made of blocks: commands, a line ``----``, what came of them, an empty line. See ``COMMANDS`` below; a
line that begins with ``#`` is for the reader.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochAnswer,
    EpochRaised,
    EpochState,
    Grant,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Probe,
    Refusal,
    Release,
    Request,
    Send,
)
from kvtierd.cluster.elector import Elector
from kvtierd.errors import KvtierError

DRAWS = {"a": 0.1, "b": 0.5, "c": 0.9, "d": 0.3, "e": 0.7}
CHANGEABLE = {"sender", "epoch", "lease_seconds", "number", "incarnation", "cluster", "digest"}


class Stage:
    def __init__(self) -> None:
        self.now = 0.0
        self.electors: dict[str, Elector] = {}
        self.disks: dict[str, EpochState | None] = {}
        self.configs: dict[str, ElectorConfig] = {}
        self.pool: list[tuple[str, AnyMessage]] = []
        self.cut: set[tuple[str, str]] = set()
        self.last: dict[tuple[str, str, str], AnyMessage] = {}
        self.lines: list[str] = []

    def play(self, command: str) -> None:
        verb, *words = command.split()
        try:
            getattr(self, f"do_{verb}")(*words)
        except KvtierError as error:
            self.lines += [f"error {error.stable_code}: {line}" for line in str(error).splitlines()]

    # -- setting up

    def do_cluster(self, *words: str) -> None:
        """``cluster a b c [file=none|new|EPOCH] [lease=6]``: voters that were started long ago."""
        names = tuple(w for w in words if "=" not in w)
        options = dict(w.split("=") for w in words if "=" in w)
        self.now = 100.0
        for name in names:
            config = ElectorConfig("demo", name, names, lease_seconds=float(options.get("lease", 6)))
            self.configs[name] = config
            epoch = options.get("file", "1")
            self.disks[name] = None if epoch == "none" else EpochState(int(epoch), "", 0, 0.0, ord(name))
            self.start(name, booted_at=0.0)
            if self.electors[name].voter.state is not None:
                self.electors[name].candidate.campaign_at_seconds = self.now
        config = self.configs[names[0]]
        self.say(
            f"lease {config.lease_seconds:g} s, promise {config.promise_seconds:.2f} s, "
            f"quorum {config.quorum}, time {self.now:g}"
        )

    def start(self, name: str, *, booted_at: float | None = None, held: HeldLease | None = None) -> None:
        lives = itertools.count(len(self.last))
        draw = DRAWS[name]
        self.electors[name] = Elector(
            self.configs[name],
            self.disks[name],
            booted_at_seconds=self.now if booted_at is None else booted_at,
            # the first draw is where the request numbers start; it differs from life to life
            draws=itertools.chain([next(lives) / 2**20], itertools.repeat(draw)),
            held=held,
        )

    def do_restart(self, name: str, *words: str) -> None:
        """``restart a [lost] [held=EPOCH,UNTIL] [lease=S]``: the process ends and starts again."""
        options = dict(w.split("=") for w in words if "=" in w)
        if "lost" in words:
            self.disks[name] = None
        if "lease" in options:
            self.configs[name] = dataclasses.replace(
                self.configs[name], lease_seconds=float(options["lease"])
            )
        held = None
        if "held" in options:
            epoch, until = options["held"].split(",")
            held = HeldLease(int(epoch), float(until))
        self.start(name, held=held)

    def do_file(self, name: str, epoch: str) -> None:
        """``file c 5``: the node has started long ago with a file that says so."""
        self.disks[name] = EpochState(int(epoch), "", 0, 0.0, ord(name))
        self.start(name, booted_at=0.0)

    # -- time and messages

    def do_sleep(self, seconds: str) -> None:
        """``sleep 2``: time passes for nobody in particular; nothing is woken."""
        self.now += float(seconds)

    def do_at(self, when: str) -> None:
        self.now = float(when)

    def do_tick(self, *names: str) -> None:
        for name in names:
            self.carry_out(name, self.electors[name].tick(self.now))

    def do_deliver(self, *words: str) -> None:
        """``deliver [a->b] [request]``: what is under way arrives, and what comes of that is under way in turn."""
        waiting, self.pool = self.pool, []
        for to, message in waiting:
            if self.matches(to, message, words):
                self.arrive(to, message)
            else:
                self.pool.append((to, message))

    def do_drop(self, *words: str) -> None:
        """``drop [a->b] [request]``"""
        self.pool = [(to, m) for to, m in self.pool if not self.matches(to, m, words)]

    def do_settle(self) -> None:
        """Delivers until nothing is under way."""
        while self.pool:
            to, message = self.pool.pop(0)
            self.arrive(to, message)

    def do_run(self, seconds: str) -> None:
        """``run 5``: time passes, everybody is woken when it wants to be, messages take no time."""
        end = self.now + float(seconds)
        while True:
            name = min(self.electors, key=lambda n: self.electors[n].next_wake_seconds())
            due = self.electors[name].next_wake_seconds()
            if due > end:
                break
            self.now = max(self.now, due)
            self.do_tick(name)
            self.do_settle()
        self.now = end

    def do_cut(self, *links: str) -> None:
        """``cut a->b``: nothing that a sends to b arrives; ``cut a`` both ways with everybody."""
        for link in links:
            for x, y in itertools.permutations(self.electors, 2):
                if link == f"{x}->{y}" or link in {x, y}:
                    self.cut.add((x, y))

    def do_heal(self) -> None:
        self.cut.clear()

    def do_again(self, link: str, kind: str, *changes: str) -> None:
        """``again a->b request [epoch=3]``: the last such message arrives once more, or with something changed."""
        sender, to = link.split("->")
        message: Any = self.last[sender, to, kind]
        for change in changes:
            name, value = change.split("=")
            assert name in CHANGEABLE
            old = getattr(message, name)
            message = dataclasses.replace(message, **{name: type(old)(value)})
        self.arrive(to, message)

    def matches(self, to: str, message: AnyMessage, words: tuple[str, ...]) -> bool:
        return all(w in {f"{message.sender}->{to}", kind_of(message), f"->{to}"} for w in words)

    def arrive(self, to: str, message: AnyMessage) -> None:
        if (message.sender, to) in self.cut or to not in self.electors:
            return
        self.carry_out(to, self.electors[to].step(message, self.now))

    def carry_out(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            self.say(in_line(name, effect))
            if isinstance(effect, Send):
                self.pool.append((effect.to, effect.message))
                self.last[name, effect.to, kind_of(effect.message)] = effect.message
            elif isinstance(effect, Persist):
                self.disks[name] = effect.state

    # -- verbs of the elector, and looking

    def do_resign(self, name: str, to: str = "") -> None:
        self.carry_out(name, self.electors[name].resign(self.now, to or None))

    def do_unfit(self, name: str, *why: str) -> None:
        self.electors[name].set_fit(False, " ".join(why))

    def do_fit(self, name: str) -> None:
        self.electors[name].set_fit(True)

    def do_view(self, *names: str) -> None:
        for name in names:
            view = self.electors[name].view(self.now)
            master = f"{view.master} for {view.remaining_seconds:.2f} s" if view.master else "nobody"
            self.say(
                f"{name}: {view.role}, epoch {view.epoch}, master {master}"
                + (f"; {view.why}" if view.why else "")
            )
            for voter, why in view.refusals.items():
                self.say(f"  {voter}: {why}")

    def do_wake(self, *names: str) -> None:
        for name in names:
            due = self.electors[name].next_wake_seconds()
            self.say(f"{name} wakes " + ("never" if due == math.inf else f"at {due:.2f}"))

    def do_quiet(self) -> None:
        """Forgets the output of the commands before it in the block."""
        self.lines.clear()

    def say(self, line: str) -> None:
        self.lines.append(line)


def kind_of(message: AnyMessage) -> str:
    return type(message).__name__.lower()


def in_line(name: str, effect: Effect) -> str:
    if isinstance(effect, Persist):
        state = effect.state
        return f"{name}: persist epoch {state.epoch}" + (
            f", granted to {state.granted_to}" if state.granted_to else ""
        )
    if isinstance(effect, LeaseGained):
        return (
            f"{name}: LEASE GAINED, epoch {effect.epoch}, until {effect.until_seconds:.2f}, "
            f"serve after {effect.serve_after_seconds:.2f}"
        )
    if isinstance(effect, LeaseRenewed):
        return f"{name}: lease renewed, epoch {effect.epoch}, until {effect.until_seconds:.2f}"
    if isinstance(effect, EpochRaised):
        return f"{name}: EPOCH RAISED to {effect.epoch}, until {effect.until_seconds:.2f}"
    if isinstance(effect, LeaseLost):
        return f"{name}: LEASE LOST, epoch {effect.epoch}: {effect.why}"
    message = effect.message
    text = f"{name} -> {effect.to}: {kind_of(message)}"
    if isinstance(message, Request | Probe | Grant | Release):
        text += f" epoch {message.epoch}"
    if isinstance(message, Grant):
        text += f", idle {message.idle_seconds:.2f} s"
    if isinstance(message, Release) and message.successor:
        text += f", to {message.successor}"
    if isinstance(message, EpochAnswer):
        text += f" {message.epoch}" if message.remembers else " unknown"
    if isinstance(message, Refusal):
        text += f", {message.reason}"
        if message.holder:
            text += f" {message.holder}"
        if message.remaining_seconds:
            text += f" {message.remaining_seconds:.2f} s"
    return text


def replay(text: str) -> str:
    """The transcript with what really comes of its commands."""
    stage = Stage()
    written: list[str] = []
    for block in text.strip("\n").split("\n\n"):
        commands = block.split("\n----")[0].splitlines()
        stage.lines = []
        for command in commands:
            if command.strip() and not command.startswith("#"):
                stage.play(command)
        is_script = any(not c.startswith("#") for c in commands)
        written.append(
            "\n".join([*commands, *(["----", *(stage.lines or ["(nothing)"])] if is_script else [])])
        )
    return "\n\n".join(written) + "\n"
