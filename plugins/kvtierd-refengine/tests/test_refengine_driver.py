"""The plugin as kvtierd sees it: found by entry point, launches, refuses, reads metrics."""

from __future__ import annotations

import math
import subprocess
import sys
from importlib import metadata
from typing import Any

import pluggy
import pytest
from kvtierd_refengine.options import (
    OPTIONS,
    EngineOptions,
    arguments_from,
    options,
    parse_command_line,
)
from kvtierd_refengine.plugin import RefengineDriver
from kvtierd_refengine.stats import _TTFT_BUCKETS, EngineStats, Load, PromptTokens
from prometheus_client import generate_latest

from kvtierd import hookspecs
from kvtierd.plan.engine import EngineContext, EngineObservation
from kvtierd.plan.engines import ask_driver
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import HttpProbe
from kvtierd.plan.remarks import Remarks
from kvtierd.settings import EngineSettings
from kvtierd.testing import engine_context

DRIVER = RefengineDriver()


def context(**changes: Any) -> EngineContext:
    values: dict[str, Any] = {
        "name": "e1",
        "node": "n1",
        "series": "emulated",
        "model": "some-model",
        "port": 22490,
        "python": "/venv/bin/python",
        "memcache_env": {"LD_LIBRARY_PATH": "/wheel/lib", "ASCEND_HOME_PATH": "/emulated"},
        "local_conf_path": "/etc/kvtierd/mmc-local.conf",
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "pool_placement": "standalone",
        "work_dir": "/var/lib/kvtierd/e1",
        "inventory": Inventory(hostname="n1", memory_total_bytes=1, memory_available_bytes=1),
    }
    return EngineContext(**(values | changes))


def parsed(launch_argv: tuple[str, ...]) -> EngineOptions:
    return parse_command_line(launch_argv[3:])


def test_found_through_its_entry_point() -> None:
    (entry,) = metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP, name="refengine")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.load())
    manager.check_pending()
    ((driver,),) = manager.hook.kvtierd_engine_drivers()
    assert (driver.name, driver.api_version) == ("refengine", 1)


def test_the_launch_is_complete_and_the_server_accepts_it() -> None:
    launch = DRIVER.launch(
        context(args={"preset": "tiny", "max_model_len": 512, "l1": "1MiB", "drain": "2s"})
    )
    assert launch.refusals == ()
    assert launch.argv[:3] == ("/venv/bin/python", "-m", "kvtierd_refengine.server")
    got = parsed(launch.argv)
    assert (got.host, got.port, got.served_model_name) == ("127.0.0.1", 22490, "some-model")
    assert (got.preset, got.max_model_len, got.l1, got.drain) == ("tiny", 512, 1024**2, 2.0)
    assert got.l3  # a pool is there, so it is used
    assert launch.env["MMC_LOCAL_CONFIG_PATH"] == "/etc/kvtierd/mmc-local.conf"
    assert launch.env["ASCEND_HOME_PATH"] == "/emulated"
    assert launch.clients == 1
    (probe,) = launch.readiness.probes
    assert isinstance(probe, HttpProbe)
    assert probe.url == "http://127.0.0.1:22490/health"
    assert launch.stop.timeout_seconds >= 15
    assert any(note.code == "engine.reference" for note in launch.notes)


@pytest.mark.parametrize("off", ["off", False])
def test_l3_can_be_left_off(off: object) -> None:
    launch = DRIVER.launch(context(args={"l3": off}))
    assert not parsed(launch.argv).l3
    assert "MMC_LOCAL_CONFIG_PATH" not in launch.env
    assert launch.clients == 0


def test_the_operators_environment_wins_but_cannot_hide_memcaches_libraries() -> None:
    launch = DRIVER.launch(context(env={"LD_LIBRARY_PATH": "/mine", "PATH": "/opt/bin"}))
    assert launch.env["LD_LIBRARY_PATH"] == "/wheel/lib:/mine"
    assert launch.env["PATH"] == "/opt/bin"


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ({"max-modl-len": 1}, "engine.arg-unknown", "did you mean 'max-model-len'?"),
        ({"zzz": 1}, "engine.arg-unknown", "known: preset, seed"),
        ({"port": 1}, "engine.arg-ours", "set host, port, model or l3_switch"),
        ({"preset": "huge"}, "engine.arg-value", "default: base"),
        ({"l1": "many"}, "engine.arg-value", "default: 64MiB"),
        ({"drain": 3}, "engine.arg-value", "default: 10s"),
        ({"threads": True}, "engine.arg-value", "default: 1"),
        ({"l3-namespace": "a@b"}, "engine.arg-value", "default: refengine"),
        ({"block-size": 64, "block_size": 32}, "engine.arg-twice", "keep one"),
    ],
)
def test_wrong_args_are_refused_with_what_would_be_right(args: dict[str, Any], code: str, text: str) -> None:
    remarks = Remarks()
    ask_driver(DRIVER, EngineSettings(name="e1", plugin="refengine"), context(args=args), remarks)
    (refusal,) = remarks.refusals
    assert refusal.code == code
    assert text in refusal.hint
    assert refusal.message.startswith("engine e1: ")
    assert refusal.message.count("e1") == 1, "named once, by the planner"


def test_devices_are_left_alone_and_that_is_said() -> None:
    notes = DRIVER.launch(context(devices=(0, 1), series="800I-A2")).notes
    assert "engine.devices-unused" in [note.code for note in notes]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:22490/metrics"),
        ("::1", "http://[::1]:22490/metrics"),
        ("n1", "http://n1:22490/metrics"),
    ],
)
def test_metrics_url(host: str, url: str) -> None:
    assert DRIVER.metrics_url(context(host=host)) == url


def test_every_default_is_valid_and_every_field_has_an_option() -> None:
    assert {option.field for option in OPTIONS} == set(EngineOptions.__dataclass_fields__)
    assert parse_command_line([]) == options()
    argv, problems = arguments_from({o.name: o.default for o in OPTIONS if not o.ours})
    assert problems == []
    assert parse_command_line(argv) == options()


def test_reads_its_own_engine() -> None:
    stats = EngineStats("m", load=lambda: Load(running=2, waiting=1, used_ratio=0.25))
    stats.describe_cache(block_size=64, blocks=10)
    stats.prompt_started(PromptTokens(total=100, l1=64, l3=20, external_queried=36))
    stats.saved(3)
    assert DRIVER.observe(generate_latest(stats.registry).decode()) == EngineObservation(
        l1_query_tokens=100,
        l1_hit_tokens=64,
        l3_query_tokens=36,
        l3_hit_tokens=20,
        l3_written_tokens=192,
        l1_capacity_tokens=640,
        l1_used_ratio=0.25,
        running=2,
        waiting=1,
        failed_loads=0,
        ttft_buckets=dict.fromkeys((*_TTFT_BUCKETS, math.inf), 0),
    )


def test_time_to_the_first_token_and_failed_loads_are_read() -> None:
    stats = EngineStats("m", load=Load)
    stats.watch_l3(attached=lambda: True, skipping=lambda: False)
    stats.first_token(1000, 0.09)
    stats.first_token(1000, 2.0)
    stats.failed_load("gone", 3)
    found = DRIVER.observe(generate_latest(stats.registry).decode())
    assert found.failed_loads == 3
    assert found.ttft_buckets is not None
    assert found.ttft_buckets[0.1] == 1
    assert found.ttft_buckets[0.08] == 0
    assert found.ttft_buckets[math.inf] == 2


def test_reads_vllm_summed_over_engines_and_leaves_unknown_unknown() -> None:
    text = (
        "# TYPE vllm:prefix_cache_queries_total counter\n"
        'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 25000.0\n'
        'vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 5.0\n'
        'vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.7959693302299192e+09\n'
        'vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="1048576"} 1.0\n'
        'vllm:cache_config_info{block_size="128",engine="1",kv_cache_size_tokens="None"} 1.0\n'
    )
    assert DRIVER.observe(text) == EngineObservation(l1_query_tokens=25005, l1_capacity_tokens=1048576)


@pytest.mark.parametrize(
    "text",
    [
        "<html>502 Bad Gateway</html>",
        'vllm:prefix_cache_hits_total{engine="0" 1',
        "vllm:prefix_cache_hits_total abc",
        "vllm:prefix_cache_hits_total NaN",
        "",
        "other_metric 1\n",
        "\x00\x01\x02",
    ],
)
def test_garbage_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"Prometheus|vllm"):
        DRIVER.observe(text)


def test_the_plugin_costs_the_daemon_neither_numpy_nor_aiohttp() -> None:
    code = "import sys, kvtierd_refengine.plugin; sys.exit(bool({'numpy', 'aiohttp', 'memcache_hybrid'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False).returncode == 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prt", "1"], "unrecognized arguments: --prt"),
        (["--block-size", "7"], "expected 8 to 512, got 7"),
        (["--l3", "maybe"], 'expected "on" or "off"'),
        (["--stats-interval", "10"], "--stats-interval"),
    ],
)
def test_a_wrong_command_line_says_what_is_right(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(["--help"])
    assert "not for serving" in " ".join(capsys.readouterr().out.split())


def test_l3_can_be_switched_where_the_settings_say_so() -> None:
    asked = engine_context(l3_switch=True)
    argv = DRIVER.launch(asked).argv
    assert argv[argv.index("--l3-switch") + 1] == "on"
    calls = [DRIVER.l3_switch(asked, on=on) for on in (True, False)]
    assert [(c.method, c.path) for (c,) in calls] == [("PUT", "/l3"), ("DELETE", "/l3")]
    assert "--l3-switch" not in DRIVER.launch(engine_context()).argv
    with pytest.raises(ValueError, match="l3_switch = true"):
        DRIVER.l3_switch(engine_context(), on=True)
    with pytest.raises(ValueError, match="no L3"):
        DRIVER.l3_switch(engine_context(l3_switch=True, args={"l3": "off"}), on=True)
    refusal = DRIVER.launch(engine_context(args={"l3-switch": "on"})).refusals[0]
    assert (refusal.code, "l3_switch" in refusal.hint) == ("engine.arg-ours", True)
