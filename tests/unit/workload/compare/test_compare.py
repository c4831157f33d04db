"""Three modes of one engine: what is laid over its settings, and that it is gone again whatever happens."""

import json
import tomllib
from types import SimpleNamespace

import pytest

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.settings import load_settings
from kvtierd.workload.compare.modes import DROP_IN, drop_in, modes_for
from kvtierd.workload.compare.sequence import Comparison, compare
from kvtierd.workload.load.runner import LoadSettings
from kvtierd.workload.load.start import RunRequest

from ..load.fake_openai import FakeOpenAi, serving

SETTINGS = """\
[pool]
dram = "1GiB"
[[engine]]
name = "ref"
plugin = "refengine"
args = { prefix_cache = "on", l1 = "9MiB" }
"""


@pytest.mark.parametrize("plugin", ["refengine", "sglang", "sglang-cpu", "vllm-ascend", "vllm-cpu"])
def test_the_last_mode_is_the_engine_as_it_is(plugin):
    nothing, own, both = modes_for(plugin)
    assert both.args == {}
    assert nothing.args["l3"] == own.args["l3"] == "off"
    assert nothing.args != own.args
    assert own.args.get("enable-prefix-caching", True)


def test_an_engine_that_is_not_known_is_not_guessed():
    with pytest.raises(WorkloadError) as caught:
        modes_for("triton")
    assert caught.value.stable_code == "compare.driver"


def test_the_drop_in_is_toml_and_keeps_the_settings_spelling():
    text = drop_in("ref", {"prefix-cache": "off", "l3": "off", "flag": True}, {"prefix_cache": "on"})
    (engine,) = tomllib.loads(text)["engine"]
    assert engine == {"name": "ref", "args": {"prefix_cache": "off", "l3": "off", "flag": True}}


class FakeDaemon:
    """Reads the settings for real when it is told to; its engine is a fake server."""

    def __init__(self, settings, url):
        self.settings, self.url = settings, url
        self.calls, self.args, self.state = [], {}, "ready"
        self.fail_at = None
        self.reload(restart_changed=False)
        self.calls.clear()

    def _call(self, name):
        self.calls.append(name)
        if len(self.calls) == self.fail_at:
            raise KvtierError("kvtierd went away")

    def reload(self, *, restart_changed):
        assert not restart_changed
        self._call("reload")
        self.planned = dict(load_settings(self.settings, {}).engine[0].args)
        return SimpleNamespace(stale_units=[])

    def control_unit(self, unit, action, wait_seconds):
        self._call(f"{action}")
        self.args = self.planned
        return SimpleNamespace(state=self.state)

    def status(self):
        unit = SimpleNamespace(
            id="kvtier-engine-ref", state=self.state, stale=False, reason="why", last_lines=["last words"]
        )
        return SimpleNamespace(units=[unit])

    def purge(self):
        self._call("purge")

    def plan_json(self):
        unit = {
            "id": "kvtier-engine-ref", "kind": "engine", "plugin": "refengine", "talk": {"base_url": self.url},
            "metrics_url": f"{self.url}/metrics", "uses_pool": self.planned.get("l3") != "off",
        }  # fmt: skip
        return json.dumps({"units": [unit]})


@pytest.fixture
def lab(tmp_path):
    settings = tmp_path / "kvtierd.toml"
    settings.write_text(SETTINGS)
    dataset = tmp_path / "qa.jsonl"
    dataset.write_text("".join(json.dumps({"question": f"question {i}"}) + "\n" for i in range(4)))
    server = FakeOpenAi()
    with serving(server) as url:
        daemon = FakeDaemon(settings, url)
        request = RunRequest(dataset, tmp_path / "out", LoadSettings("fake", max_tokens=2, warm_up=0))
        yield SimpleNamespace(
            daemon=daemon, server=server, settings=settings, out=tmp_path / "out",
            comparison=Comparison("ref", settings, request), drop_in=tmp_path / "conf.d" / DROP_IN,
        )  # fmt: skip


def is_as_before(lab):
    assert not lab.drop_in.exists()
    assert not lab.drop_in.parent.exists()
    assert lab.settings.read_text() == SETTINGS
    assert lab.daemon.args in ({}, {"prefix_cache": "on", "l1": "9MiB"})


def test_all_three_modes(lab):
    done = compare(lab.comparison, lab.daemon)
    assert lab.daemon.calls == ["reload", "restart"] * 3 + ["purge"]
    assert list(done.runs) == ["no cache", "prefix cache", "prefix cache + pool"]
    results = {d.name: json.loads((d / "result.json").read_text()) for d in done.all_passes}
    assert list(results) == [
        f"{m}-{p}" for m in ("no-cache", "prefix-cache", "prefix-cache-and-pool") for p in ("cold", "warm")
    ]
    for mode in ("no-cache", "prefix-cache"):
        cold, warm = results[f"{mode}-cold"], results[f"{mode}-warm"]
        assert cold["salt"] == warm["salt"]
        assert (cold["tiers"]["hit_rate"], warm["tiers"]["hit_rate"]) == (0, 1)
    assert len({r["salt"] for r in results.values()}) == 3  # no mode profits from the one before
    is_as_before(lab)


@pytest.mark.parametrize("at", range(1, 8))
def test_whatever_fails_the_settings_are_as_before(lab, at):
    lab.daemon.fail_at = at
    with pytest.raises(KvtierError, match="went away"):
        compare(lab.comparison, lab.daemon)
    is_as_before(lab)


def test_a_server_that_fails_leaves_nothing_behind(lab):
    lab.server.models = ("another",)
    with pytest.raises(WorkloadError) as caught:
        compare(lab.comparison, lab.daemon)
    assert caught.value.stable_code == "load.model"
    is_as_before(lab)


def test_an_engine_that_does_not_come_back_is_told_with_its_last_words(lab):
    lab.daemon.state = "failed"
    with pytest.raises(WorkloadError) as caught:
        compare(lab.comparison, lab.daemon)
    assert not lab.drop_in.exists()
    assert caught.value.stable_code == "compare.not-restored"


def test_settings_that_the_daemon_does_not_read(lab, tmp_path):
    other = tmp_path / "other" / "kvtierd.toml"
    other.parent.mkdir()
    other.write_text(SETTINGS)
    with pytest.raises(WorkloadError) as caught:
        compare(Comparison("ref", other, lab.comparison.request), lab.daemon)
    assert caught.value.stable_code == "compare.settings"
    assert not (other.parent / "conf.d").exists()


def test_a_drop_in_that_was_left_over(lab):
    lab.drop_in.parent.mkdir()
    lab.drop_in.write_text("")
    with pytest.raises(WorkloadError) as caught:
        compare(lab.comparison, lab.daemon)
    assert caught.value.stable_code == "compare.left-over"
    assert lab.daemon.calls == []


def test_results_of_an_earlier_comparison_are_not_overwritten(lab):
    compare(lab.comparison, lab.daemon)
    lab.daemon.calls.clear()
    with pytest.raises(WorkloadError) as caught:
        compare(lab.comparison, lab.daemon)
    assert caught.value.stable_code == "load.output-taken"
    assert lab.daemon.calls == []
