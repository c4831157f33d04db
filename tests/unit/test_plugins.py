import importlib.metadata
import sys
import threading
import types

import pytest

from kvtierd.checks import Check, ok
from kvtierd.doctor.registry import all_checks, built_in
from kvtierd.errors import PluginError
from kvtierd.hookspecs import ENTRY_POINT_GROUP, hookimpl
from kvtierd.plugins import DRIVER_MEMBERS, load_plugins


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


class Newer(Driver):
    api_version = 99


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
        (lambda: [Newer()], "written for plugin API 99"),
        (lambda: sys.exit(3), "SystemExit: 3"),
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


def test_a_plugin_that_hangs_is_named_and_costs_one_thread(plugin, monkeypatch):
    monkeypatch.setattr("kvtierd.plugins.LOAD_SECONDS", 0.05)
    release = threading.Event()
    entries = [plugin("hangs", lambda: release.wait(20)), plugin("good", lambda: [Driver()])]
    first, second = load_plugins(entries), load_plugins(entries)
    release.set()
    assert list(first.drivers) == list(second.drivers) == ["fake"]
    assert "has not come back within 0.05 s" in {p.name: p for p in first.plugins}["hangs"].problem
    assert "still hangs on an earlier call" in {p.name: p for p in second.plugins}["hangs"].problem


def test_a_driver_of_an_older_api_works_with_a_warning(plugin, monkeypatch):
    monkeypatch.setattr("kvtierd.plugins.API_VERSION", 2)
    monkeypatch.setattr("kvtierd.plugins.MEMBERS_SINCE", {"novelty": 2})
    monkeypatch.setattr("kvtierd.plugins.DRIVER_MEMBERS", (*DRIVER_MEMBERS, "novelty"))

    class Current(Driver):
        api_version = 2
        novelty = True

    class Lacking(Driver):
        api_version = 2

    found = load_plugins(
        [
            plugin("current", lambda: [Current("current")]),
            plugin("lacking", lambda: [Lacking("lacking")]),
            plugin("old", lambda: [Driver("old")]),
        ]
    )
    by_name = {p.name: p for p in found.plugins}
    assert list(found.drivers) == ["current", "old"]
    assert by_name["current"].warnings == ()
    assert by_name["lacking"].problem == "the driver 'lacking' lacks novelty"
    assert by_name["old"].problem == ""
    (told,) = by_name["old"].warnings
    assert told.startswith(
        "the driver 'old' is written for plugin API 1, and does without novelty; kvtierd has 2"
    )


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


def with_checks(plugin, name, ids, drivers=()):
    entry = plugin(name, (lambda: list(drivers)) if drivers else None)

    def kvtierd_doctor_checks():
        return [Check(id_, "t", "w", "f", lambda _: ok("fine")) for id_ in ids]

    sys.modules[f"plugin_{name}"].kvtierd_doctor_checks = hookimpl(kvtierd_doctor_checks)
    return entry


def test_a_plugin_may_bring_checks_alone_or_beside_drivers(plugin):
    found = load_plugins(
        [with_checks(plugin, "a", ["acme.one"]), with_checks(plugin, "b", ["b.x", "b.y"], [Driver("d")])]
    )
    assert [info.problem for info in found.plugins] == ["", ""]
    assert [check.id for check in found.checks] == ["acme.one", "b.x", "b.y"]
    assert list(found.drivers) == ["d"]
    assert [c.id for c in all_checks(found)][-3:] == ["acme.one", "b.x", "b.y"]


def test_a_check_that_takes_the_id_of_ours_is_left_out(plugin):
    ours = built_in()[0]
    found = load_plugins([with_checks(plugin, "a", [ours.id])])
    assert [c for c in all_checks(found) if c.id == ours.id] == [ours]


@pytest.mark.parametrize("id_", ["acme", "Acme.One", "", 5])
def test_a_check_without_a_proper_id_is_a_fault_of_its_plugin(plugin, id_):
    found = load_plugins([with_checks(plugin, "a", [id_])])
    assert "has no id" in found.plugins[0].problem
    assert found.checks == ()
