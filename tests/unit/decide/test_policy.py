"""[policy] and the decider's policy are the same, key by key, and every key is read by something."""

import dataclasses
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvtierd.decide import policy as module
from kvtierd.decide.policy import RULES, Policy, default_policy, policy_from
from kvtierd.settings import PolicySettings

SOURCES = Path(module.__file__).parent


def bare(name):
    return re.sub(r"_(seconds|bytes)$", "", name)


def test_every_key_is_one_field_and_every_field_one_key():
    fields = [f.name for f in dataclasses.fields(Policy)]
    assert [bare(n) for n in fields] == list(PolicySettings.model_fields)


def test_values_arrive():
    made = policy_from(
        PolicySettings(window="1m", grow_step="2GiB", off=("pool-small",), actions_per_hour=9, futile="1h")
    )
    assert (made.window, made.grow_step_bytes, made.off) == (60, 2 * 1024**3, ("pool-small",))
    assert (made.actions_per_hour, made.futile_seconds) == (9, 3600.0)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Policy)])
def test_every_value_is_read_by_a_rule_or_a_limit(field):
    text = "".join(p.read_text() for p in SOURCES.glob("*.py"))
    assert re.search(rf"policy\.{field}\b|self\.{field}\b|policy\.{bare(field)}\b", text), field


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_says_how_long_it_must_hold(rule):
    assert default_policy().hold_seconds(rule) >= 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": "2m"},
        {"off": ["pool-smal"]},
        {"evict_high_least": 95},
        {"evict_high_most": 100},
        {"reversal": "1m"},
        {"actions_per_hour": -1},
        {"grow_hit_rate": 70},
        {"unregistered": "reboot"},
        {"pool_small": True},
        {"cooldown": 15},
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValidationError):
        PolicySettings(**wrong)
