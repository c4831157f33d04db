"""What an operator's request counts as answered by."""

import dataclasses

import pytest

from kvtierd.node.verbs import _is_news
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitView

BEFORE = UnitView(
    id="u", kind="engine", name="e", state=UnitState.FAILED, reason="", pid=None, since_unix_seconds=1.0, restarts=0,
    next_try_in_seconds=None, last_lines=(), stale=False, instance="one", last_exit=None,
)  # fmt: skip


def now(**changes):
    return dataclasses.replace(BEFORE, **changes)


@pytest.mark.parametrize(
    ("action", "seen", "news"),
    [
        ("start", now(), False),  # still the old failure
        ("start", now(since_unix_seconds=2.0), True),  # failed again
        ("start", now(state=UnitState.READY, instance="two"), True),
        ("restart", now(since_unix_seconds=2.0), True),  # could not even be started: no new instance
        ("restart", now(state=UnitState.READY), False),  # still the old run
        ("restart", now(state=UnitState.READY, instance="two"), True),
        ("stop", now(state=UnitState.STOPPED), True),
    ],
)
def test_a_state_from_before_the_request_is_not_its_outcome(action, seen, news):
    assert _is_news(action, BEFORE, seen) is news
