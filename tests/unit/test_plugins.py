import importlib.metadata
import sys
import types

import pytest

from kvtierd.errors import PluginError
from kvtierd.hookspecs import ENTRY_POINT_GROUP, hookimpl
from kvtierd.plugins import load_plugins


class Driver:
    api_version = 1
    default_port = 1
    package = None
    versions = ""

    def __init__(self, name="fake"):
        self.name = name

    def launch(self, context): ...

    def metrics_url(self, context): ...

    def observe(self, metrics_text): ...

    def read_line(self, line): ...

    def generation(self, context): ...

    def generated(self, body): ...

    def tokens(self, body): ...

    def flush(self, context, tiers): ...

    def l3_switch(self, context, *, on): ...


@pytest.fixture
def plugin(monkeypatch):
    """Makes an importable module with this hook implementation, and its entry point."""

    def make(name, implementation):
        module = types.ModuleType(f"plugin_{name}")
        if implementation is not None:
            implementation.__name__ = "kvtierd_engine_drivers"
            module.kvtierd_engine_drivers = hookimpl(implementation)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return importlib.metadata.EntryPoint(name, module.__name__, ENTRY_POINT_GROUP)

    return make


def test_a_driver_is_found_by_its_name(plugin):
    found = load_plugins([plugin("a", lambda: [Driver("one"), Driver("two")])])
    assert sorted(found.drivers) == ["one", "two"]
    assert found.plugins[0].problem == ""


def raises():
    raise ZeroDivisionError("oh")


class Old(Driver):
    api_version = 0


class Half:
    name = "half"


@pytest.mark.parametrize(
    ("implementation", "problem"),
    [
        (raises, "ZeroDivisionError: oh"),
        (list, "brings no engine driver"),
        (None, "brings no engine driver"),
        (lambda: 5, "TypeError"),
        (lambda: [Old()], "written for plugin API 0"),
        (lambda: [Half()], "lacks api_version, default_port, package"),
    ],
)
def test_a_broken_plugin_is_named_and_the_others_work(plugin, implementation, problem):
    made = (lambda: implementation()) if implementation is not None else None
    found = load_plugins([plugin("bad", made), plugin("good", lambda: [Driver()])])
    assert list(found.drivers) == ["fake"]
    by_name = {p.name: p for p in found.plugins}
    assert problem in by_name["bad"].problem
    assert by_name["good"].problem == ""


def test_a_plugin_that_cannot_be_imported_is_named():
    entry = importlib.metadata.EntryPoint("gone", "no_such_module_at_all", ENTRY_POINT_GROUP)
    assert "ModuleNotFoundError" in load_plugins([entry]).plugins[0].problem


def test_two_plugins_with_one_driver_name(plugin):
    found = load_plugins([plugin("a", lambda: [Driver()]), plugin("b", lambda: [Driver()])])
    assert [p.name for p in found.plugins if p.problem] == ["b"]


def test_a_missing_driver_names_what_there_is_and_the_nearest(plugin):
    found = load_plugins([plugin("a", lambda: [Driver("refengine")])])
    with pytest.raises(PluginError, match="installed drivers: refengine") as raised:
        found.driver("refengin")
    assert "did you mean 'refengine'" in raised.value.hint
    assert found.driver("refengine").name == "refengine"


def test_the_reference_engine_is_a_plugin_like_any_other():
    found = load_plugins()
    info = next(p for p in found.plugins if p.name == "refengine")
    assert (info.distribution, info.drivers, info.problem) == ("kvtierd-refengine", ("refengine",), "")
