"""docs/plugins.md has a line for every hook, driver member, model field and rule, and for nothing that is gone."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import kvtierd.testing
from kvtierd import hookspecs
from kvtierd.checks import Check
from kvtierd.plan.engine import (
    API_VERSION,
    EngineContext,
    EngineDriver,
    EngineLaunch,
    EngineObservation,
    HttpCall,
    TierTokens,
)
from kvtierd.plugins import DRIVER_MEMBERS
from kvtierd.testing import pytest_plugin
from kvtierd.testing.checks import CHECKS

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
MODELS = [EngineContext, EngineLaunch, EngineObservation, HttpCall, TierTokens]


def section(title: str) -> str:
    """From the heading that ends with this title to the next of any level."""
    found = re.search(rf"^#+ [^\n]*{re.escape(title)}`?\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/plugins.md has no section {title}"
    return found[1]


def rows(text: str) -> dict[str, str]:
    """First cell (the name alone) -> second cell."""
    return dict(re.findall(r"^\| `(\w+)(?:\([^`]*\))?` \| (.+) \|$", text, re.MULTILINE))


def protocol_members() -> set[str]:
    methods = {
        name for name, _ in inspect.getmembers(EngineDriver, inspect.isfunction) if not name.startswith("_")
    }
    return methods | set(EngineDriver.__annotations__)


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_every_field_is_documented_and_no_other(model: type) -> None:
    documented = rows(section(model.__name__))
    assert set(documented) == set(model.model_fields)  # type: ignore[attr-defined]
    assert all(len(meaning) > 6 for meaning in documented.values())


def test_every_member_of_a_driver_is_documented_and_no_other() -> None:
    assert set(rows(section("EngineDriver"))) == protocol_members()


def test_every_field_of_a_check_is_documented_and_no_other() -> None:
    assert set(rows(section("Check"))) == {field.name for field in dataclasses.fields(Check)}


def test_kvtierd_asks_for_what_the_protocol_says() -> None:
    assert set(DRIVER_MEMBERS) == protocol_members()


def test_the_signatures_shown_are_the_real_ones() -> None:
    for name, shown in re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", section("EngineDriver"), re.MULTILINE):
        real = list(inspect.signature(getattr(EngineDriver, name)).parameters)[1:]
        assert shown.split(", ") == real, name


def test_every_hook_is_documented_and_no_other() -> None:
    hooks = {
        name for name, f in inspect.getmembers(hookspecs, inspect.isfunction) if hasattr(f, "kvtierd_spec")
    }
    assert hooks
    assert {name for name in rows(section("The hook")) if name.startswith("kvtierd_")} == hooks
    assert hookspecs.ENTRY_POINT_GROUP in PAGE


def test_the_api_version_is_the_current_one() -> None:
    assert f"`api_version` | the version of this API that the driver was written for: `{API_VERSION}`" in PAGE


def test_the_kit_and_its_rules_are_documented() -> None:
    kit = section("kvtierd.testing")
    assert set(rows(kit)) == set(kvtierd.testing.__all__)
    suite = section("The conformance suite")
    assert set(
        re.findall(
            r"`([a-z0-9-]+)`(?=[,| ])", "\n".join(li for li in suite.splitlines() if li.startswith("| `"))
        )
    ) == {check.name for check in CHECKS}
    options = set(re.findall(r'"(--kvtierd[\w-]*)"', inspect.getsource(pytest_plugin)))
    assert options == set(re.findall(r"--kvtierd[\w-]*", PAGE))


def test_every_public_name_of_the_kit_can_be_had() -> None:
    for name in kvtierd.testing.__all__:
        assert getattr(kvtierd.testing, name).__doc__
    assert dir(kvtierd.testing) == sorted(kvtierd.testing.__all__)
    with pytest.raises(AttributeError):
        _ = kvtierd.testing.no_such_name
