"""The conformance suite as pytest sees it. ``pytest --kvtierd-plugin NAME`` collects it; see docs/plugins.md."""

from __future__ import annotations

import traceback

import pytest

from kvtierd.testing.checks import CHECKS, Check, NonconformityError, Subject
from kvtierd.testing.loading import Chosen, chosen_plugin, load_chosen


@pytest.fixture(scope="module")
def kvtierd_chosen(pytestconfig: pytest.Config) -> Chosen:
    """What the command line names."""
    chosen = chosen_plugin(pytestconfig)
    if chosen is None:
        pytest.fail("name the driver to check: --kvtierd-plugin NAME", pytrace=False)
    return chosen


@pytest.fixture(scope="module")
def kvtierd_subject(kvtierd_chosen: Chosen) -> Subject:
    """The driver with its recorded texts."""
    subject, problem = load_chosen(kvtierd_chosen)
    if subject is None:
        pytest.skip(f"there is no driver to check: {problem}")
    return subject


def test_plugin_loads(kvtierd_chosen: Chosen) -> None:
    """kvtierd finds the plugin and takes its driver."""
    _, problem = load_chosen(kvtierd_chosen)
    if problem:
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_driver(check: Check, kvtierd_subject: Subject) -> None:
    """One rule of the plugin API."""
    try:
        check.run(kvtierd_subject)
    except NonconformityError as error:
        cause = "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""
        pytest.fail(f"{check.name}: {error}\nthe rule: {check.run.__doc__}\n{cause}", pytrace=False)
