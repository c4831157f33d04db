"""``python -m tests.sim.mutants``: every rule of the election taken out or bent, one at a time.

A simulation that does not notice that a rule is missing proves nothing about the rule. Each mutant must lead to two
masters, a used epoch or a cluster that is stuck within ``MOST_ELECTIONS``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from kvtierd.cluster.candidate import Candidate
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochState, LeaseLost, Persist, Send
from kvtierd.cluster.elector import Elector
from kvtierd.cluster.recollection import Recollection
from kvtierd.cluster.voter import Voter

from .scenario import Scenario
from .world import Node, make_config

MOST_ELECTIONS = 50_000
ELECTIONS_A_RUN = 100

Patch = Callable[[contextlib.ExitStack, dict[str, Any]], None]
MUTANTS: dict[str, Patch] = {}


def mutant(function: Patch) -> Patch:
    MUTANTS[function.__name__.replace("_", "-")] = function
    return function


def replace(stack: contextlib.ExitStack, owner: type, name: str, make: Callable[[Any], Any]) -> None:
    stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))


# -- the rules that make it safe


@mutant
def no_boot_silence(stack, _):
    """A voter that has just started votes at once."""

    def make(real):
        def init(self, config, state, booted):
            real(self, config, state, booted)
            if state is not None:
                self.promise_until_seconds = booted

        return init

    replace(stack, Voter, "__init__", make)


@mutant
def no_drift_margin(_, options):
    """A promise lasts as long as a lease, as if all clocks ran alike."""

    def config(node, voters, **values):
        made = make_config(node, voters, **values)
        object.__setattr__(made, "stretch", 1.0)
        object.__setattr__(made, "promise_seconds", made.lease_seconds)
        return made

    options["config"] = config


@mutant
def deadline_from_the_reply(stack, _):
    """The master counts its lease from when the answers came."""

    def make(real):
        def on_grant(self, grant, now, effects):
            asked = self._rounds.get(grant.number)
            if asked is not None:
                asked.sent_at_seconds = now
            real(self, grant, now, effects)

        return on_grant

    replace(stack, Candidate, "on_grant", make)


@mutant
def no_guard(_, options):
    """Nobody but the daemon kills the MetaService."""
    options["prepare"] = lambda world: setattr(world, "guarded", False)


@mutant
def no_kill_margin(_, options):
    """A new master serves as soon as it has the lease."""
    options["prepare"] = lambda world: setattr(world, "serve_at_once", True)


@mutant
def half_is_a_majority(_, options):
    """Four voters, two of which are enough."""

    class HalfConfig(ElectorConfig):
        def check(self):
            pass

        def majority(self):
            return len(self.voters) // 2

    options["config"] = lambda node, voters, **values: HalfConfig("sim", node, tuple(voters), **values)
    options["voters"] = 4


@mutant
def epoch_not_persisted(stack, _):
    """The epoch lives in memory only."""
    replace(
        stack, Node, "_rare", lambda real: lambda self, e: None if isinstance(e, Persist) else real(self, e)
    )


@mutant
def persisted_after_the_answer(stack, _):
    """The epoch is written, but only when the answer has left."""

    def make(real):
        def carry_out(self, effects, **options):
            late = [e for e in effects if isinstance(e, Persist)]
            real(self, [e for e in effects if not isinstance(e, Persist)], **options)
            if late:
                # The disk takes its time.
                life = self.elector
                self.world.at(
                    self.world.now + 0.02, lambda *_: self.elector is life and real(self, late, judged=True)
                )

        return carry_out

    replace(stack, Node, "carry_out", make)


@mutant
def digest_not_checked(stack, _):
    """Votes count whatever list of voters they were given under."""

    def make(real):
        return lambda self, message, now: real(
            self, dataclasses.replace(message, digest=self.config.digest), now
        )

    replace(stack, Elector, "step", make)


@mutant
def promises_not_kept(stack, _):
    """A voter grants to whoever comes with a later epoch."""

    def make(real):
        def refusal(self, message, now):
            refused = real(self, message, now)
            return None if refused is not None and refused.reason == "promised" else refused

        return refusal

    replace(stack, Voter, "refusal", make)


@mutant
def renewals_do_not_extend_promises(stack, _):
    """A promise lasts from the first grant of a term only."""

    def make(real):
        def grant(self, request, now):
            before, same = self.promise_until_seconds, request.epoch == self.state.epoch
            answer = real(self, request, now)
            if same:
                self.promise_until_seconds = before
            return answer

        return grant

    replace(stack, Voter, "grant", make)


@mutant
def epochs_not_compared(stack, _):
    """A voter grants an epoch that is not later than its last one."""

    def make(real):
        def refusal(self, message, now):
            refused = real(self, message, now)
            return None if refused is not None and refused.reason == "stale-epoch" else refused

        return refusal

    replace(stack, Voter, "refusal", make)


@mutant
def own_promise_does_not_bind(stack, _):
    """A candidate votes for itself although it has promised its vote to somebody."""
    replace(stack, Voter, "free_at_seconds", lambda _: lambda self: 0.0)


@mutant
def a_new_term_keeps_its_epoch(stack, _):
    """A master that lost its lease asks for the old epoch again."""

    def make(real):
        def on_willing(self, answer, now, effects):
            state = self.voter.state
            real(self, answer, now, effects)
            if self.role == "requesting" and effects and isinstance(effects[-1], Send):
                if state.granted_to == self.config.node and not self.voter.released:
                    self.epoch = self._asking_epoch = state.epoch
                    self.voter.state = state
                    self._rounds.clear()
                    effects.clear()
                    self._ask_for_lease(now, effects)

        return on_willing

    replace(stack, Candidate, "on_willing", make)


# -- answers and releases that come late


@mutant
def answers_of_any_request_count(stack, _):
    """A late answer is taken for one to the latest request."""

    def make(real):
        def on_grant(self, grant, now, effects):
            if grant.number not in self._rounds and self._rounds:
                grant = dataclasses.replace(grant, number=max(self._rounds))
            real(self, grant, now, effects)

        return on_grant

    replace(stack, Candidate, "on_grant", make)


@mutant
def a_lapsed_lease_lives_on(stack, _):
    """A master goes on renewing after its lease has ended."""

    def make(real):
        def expire(self, now, effects):
            if self.role == "master" and now >= self.until_seconds:
                self.until_seconds = now + 1.0
            real(self, now, effects)

        return expire

    replace(stack, Candidate, "expire", make)


@mutant
def a_lapsed_term_is_given_back(stack, _):
    """The node tells the voters that nothing runs any more when its lease has only run out."""

    def make(real):
        def expire(self, now, effects):
            epoch = self.epoch
            real(self, now, effects)
            if effects and isinstance(effects[-1], LeaseLost):
                self._release(epoch, "", now, effects)

        return expire

    replace(stack, Candidate, "expire", make)


@mutant
def handed_over_while_serving(stack, _):
    """The lease is given back first and the MetaService stopped then."""

    def make(real):
        def rare(self, effect):
            if isinstance(effect, LeaseLost) and effect.why.startswith(("handed", "given")):
                self.wanted = False
                self.world.at(self.world.now + 1.5, self.kill, self.meta_run)
            else:
                real(self, effect)

        return rare

    replace(stack, Node, "_rare", make)

    def resign(real):
        def late(self, to):
            with mock.patch.object(Node, "end_meta"):
                return real(self, to)

        return late

    replace(stack, Node, "resign", resign)


@mutant
def a_restarted_node_campaigns_at_once(stack, _):
    """A node that holds its own old promise does not wait for what it may still be used for."""

    def make(real):
        def free_at(self):
            state = self.state
            own = (state.granted_to, state.granted_incarnation) == (self.config.node, state.incarnation)
            return 0.0 if own else real(self)

        return free_at

    replace(stack, Voter, "free_at_seconds", make)


@mutant
def a_release_clears_the_record(stack, _):
    """After a release the next master does not wait for the guard of the one before the releasing one either."""

    def make(real):
        def release(self, message, now):
            honoured = real(self, message, now)
            if honoured:
                self.idle_since_seconds = -1000.0
            return honoured

        return release

    replace(stack, Voter, "release", make)


@mutant
def releases_of_any_epoch_count(stack, _):
    """A release that is about an earlier term ends the promise of the present one."""

    def make(real):
        def release(self, message, now):
            if self.state is not None and message.sender == self.state.granted_to:
                message = dataclasses.replace(message, epoch=self.state.epoch)
            return real(self, message, now)

        return release

    replace(stack, Voter, "release", make)


# -- lost files


@mutant
def a_lost_file_counts_as_new(stack, _):
    """A voter without a file starts from epoch 0 and votes."""

    def make(real):
        def init(self, config, persisted, **options):
            real(self, config, persisted or EpochState(incarnation=1), **options)
            self._recollection.everybody_has_a_file = lambda: True

        return init

    replace(stack, Elector, "__init__", make)


@mutant
def one_answer_is_enough(stack, _):
    """A voter without a file believes the first that has one."""

    def make(_):
        def epoch(self):
            known = [e for e in self._epochs.values() if e is not None]
            return max(known) if known else None

        return epoch

    replace(stack, Recollection, "epoch", make)


@mutant
def asks_before_the_silence_is_over(stack, _):
    """A voter without a file asks as soon as it starts, while what it promised may still become a lease."""

    def make(real):
        def init(self, config, persisted, **options):
            real(self, config, persisted, **options)
            self._query_at_seconds = options["booted_at_seconds"]
            self._booted_at_seconds = -math.inf

        return init

    replace(stack, Elector, "__init__", make)


@mutant
def the_length_of_promises_is_forgotten(stack, options):
    """A restarted voter is silent for what its settings say now."""
    options["leases_change"] = True

    def make(real):
        def init(self, config, state, booted):
            real(self, config, state, booted)
            self.promise_until_seconds = booted + config.promise_seconds

        return init

    replace(stack, Voter, "__init__", make)


@mutant
def the_length_of_lost_promises_is_not_asked(stack, options):
    """A voter without a file is silent for what its settings say now."""
    options["leases_change"] = True
    replace(
        stack,
        Recollection,
        "note",
        lambda real: lambda self, answer: real(self, dataclasses.replace(answer, promise_seconds=0.0)),
    )


# -- the driver's side


@mutant
def the_guard_is_late(stack, _):
    """The guard needs twice its margin."""

    def make(real):
        def watch(self, *_):
            fast = self.config
            self.config = dataclasses.replace(fast, kill_margin_seconds=2 * fast.kill_margin_seconds)
            try:
                real(self)
            finally:
                self.config = fast

        return watch

    replace(stack, Node, "watch", make)


@contextlib.contextmanager
def mutated(name: str) -> Iterator[dict[str, Any]]:
    """The mutant in place; what to give to ``Scenario``."""
    options: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        MUTANTS[name](stack, options)
        yield options


def hunt(name: str, seed: int, most_elections: int = MOST_ELECTIONS) -> tuple[int, str]:
    """Elections until the mutant was caught, and how; ("", when it was not)."""
    elections = 0
    with mutated(name) as options:
        for index in range(most_elections // ELECTIONS_A_RUN):
            result = Scenario(seed, index, **options).run(ELECTIONS_A_RUN)
            elections += result.counts["elections"]
            if result.violations:
                return elections, result.violations[0]
    return elections, ""


def _hunt(job: tuple[str, int]) -> tuple[str, int, str]:
    return job[0], *hunt(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--how", action="store_true", help="also say after how many elections, and by what")
    arguments = parser.parse_args()
    missed = 0
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for name, elections, how in pool.imap(
            _hunt, [(name, arguments.seed) for name in arguments.names or MUTANTS]
        ):
            if arguments.how:
                print(f"# {name}: {elections} elections: {how}")
            print(f"{name} {'caught' if how else 'NOT caught'}", flush=True)
            missed += not how
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
