import threading

import pytest

from kvtierd.drivers import BoundedDriver
from kvtierd.errors import PluginError
from kvtierd.foreign import ForeignCalls
from kvtierd.plan.engine import EngineObservation
from kvtierd.plugins import DRIVER_MEMBERS, load_plugins
from kvtierd.testing import engine_context


@pytest.fixture
def refengine():
    return load_plugins().drivers["refengine"]


def test_it_has_every_member_and_answers_as_the_driver_does(refengine):
    bounded = BoundedDriver(refengine, ForeignCalls())
    context = engine_context(series="emulated", devices=(), model="refengine")
    assert [name for name in DRIVER_MEMBERS if not hasattr(bounded, name)] == []
    for name in ("name", "api_version", "default_port", "package", "versions"):
        assert getattr(bounded, name) == getattr(refengine, name)
    assert bounded.launch(context) == refengine.launch(context)
    assert bounded.metrics_url(context) == refengine.metrics_url(context)
    assert bounded.generation(context) == refengine.generation(context)
    assert bounded.flush(context, frozenset({"L1"})) == refengine.flush(context, frozenset({"L1"}))
    switched = context.model_copy(update={"l3_switch": True})
    for on in (True, False):
        assert bounded.l3_switch(switched, on=on) == refengine.l3_switch(switched, on=on)
    assert bounded.read_line("hello") == refengine.read_line("hello")
    for method, body in (("observe", "no metrics"), ("generated", b"{}"), ("tokens", b"x")):
        outcomes = []
        for driver in (bounded, refengine):
            try:
                outcomes.append(getattr(driver, method)(body))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_one_that_hangs_raises_in_time(refengine):
    release = threading.Event()

    class Hangs(type(refengine)):
        def launch(self, context):
            release.wait(20)

        def read_line(self, line):
            return EngineObservation(running=1)

    bounded = BoundedDriver(Hangs(), ForeignCalls(), seconds=0.05)
    context = engine_context()
    with pytest.raises(PluginError, match=r"refengine's launch\(\) has not come back"):
        bounded.launch(context)
    with pytest.raises(PluginError, match="still hangs"):
        bounded.launch(context)
    assert bounded.read_line("x").running == 1
    release.set()
