"""``python -m tests.sim.pool.mutants``: what keeps the decider calm, taken out one thing at a time.

Each must break what is promised in the scenario that is named: what can be taken out unnoticed is tested by nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from unittest import mock

from kvtierd.decide import finding, limits
from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Circumstances, Limits
from kvtierd.decide.policy import default_policy

from .run import play
from .scenarios import SCENARIOS

MUTANTS = {}


def mutant(scenario):
    def register(function):
        MUTANTS[function.__name__.replace("_", "-")] = (scenario, function)
        return function

    return register


def changed(**values):
    return dataclasses.replace(default_policy(), **values)


@mutant("bursts")
def no_hold(_stack):
    return changed(grow_hold_seconds=0.0)


@mutant("spikes of memory")
def no_hold_for_a_short_host(_stack):
    return changed(short_hold_seconds=0.0)


@mutant("spikes of memory")
def what_is_over_still_counts(stack):
    """A condition that has cleared keeps its time."""
    real = Decider._weigh

    def weigh(self, found, picture, around):
        before = dict(self._since)
        told = real(self, found, picture, around)
        if found.state == "clear" and found.name in before:
            self._since[found.name] = before[found.name]
        return told

    stack.enter_context(mock.patch.object(Decider, "_weigh", weigh))


@mutant("lukewarm")
def one_level_for_begin_and_end(_stack):
    return changed(grow_turnovers=default_policy().grow_turnovers / 2)


@mutant("actions fail")
def no_cool_down(_stack):
    return changed(cooldown_seconds=0.0, settle_seconds=0.0)


@mutant("actions fail")
def no_longer_wait_after_a_failure(stack):
    stack.enter_context(mock.patch.object(limits, "MOST_DOUBLINGS", 0))


@mutant("engines get lost")
def no_budget(_stack):
    return changed(actions_per_hour=1000, disruptive_per_hour=1000, engine_actions_per_hour=1000)


@mutant("engines get lost")
def all_at_once(stack):
    stack.enter_context(mock.patch.object(Limits, "_beside", return_value=None))


@mutant("scan")
def growth_is_not_judged(stack):
    stack.enter_context(
        mock.patch.object(Decider, "_judge_growth", lambda self, _: setattr(self, "_trial", None))
    )


@mutant("tide")
def short_hosts_are_forgotten(_stack):
    return changed(futile_seconds=1.0)


@mutant("figures stand still")
def old_figures_count(stack):
    stack.enter_context(mock.patch.object(finding, "age_problem", return_value=""))


@mutant("paused")
def a_pause_is_overlooked(stack):
    real = Limits.why_not
    stack.enter_context(
        mock.patch.object(
            Limits, "why_not", lambda self, p, now, _, master: real(self, p, now, Circumstances(), master)
        )
    )


def hunt(name, seed=1):
    """What is noticed; the hit rate is not compared."""
    scenario_name, function = MUTANTS[name]
    scenario = next(s for s in SCENARIOS if s.name == scenario_name)
    with contextlib.ExitStack() as stack:
        return play(scenario, seed, policy=function(stack), without=0.0).problems


def main() -> int:
    unnoticed = 0
    for name, (scenario, _) in MUTANTS.items():
        found = hunt(name)
        unnoticed += not found
        print(f"{name:<32} {scenario:<20} {'; '.join(found) or 'NOT NOTICED'}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
