"""The shell around the tier's machine: what a purge that fails says."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.errors import MemcacheError
from kvtierd.events import EventLog
from kvtierd.memcache.health import ExpectedPool
from kvtierd.plan.model import MetaAddress, NodePlan
from kvtierd.tier.keeper import TierKeeper
from kvtierd.tier.machine import TierMachine

ADDRESS = MetaAddress(
    client_meta_url="tcp://127.0.0.1:1", client_config_store_url="tcp://127.0.0.1:2",
    server_meta_url="tcp://127.0.0.1:1", server_config_store_url="tcp://127.0.0.1:2",
    metrics_url="http://127.0.0.1:3",
)  # fmt: skip


def keeper(tmp_path, *argv):
    return TierKeeper(
        NodePlan(node="n", series="A3", meta=ADDRESS),
        TierMachine(ExpectedPool(0, 0, 1), purge_on_unclean=True),
        state_file=tmp_path / "tier.json",
        endpoint=None,
        purge_argv=argv,
        purge_env={"PATH": "/usr/bin:/bin"},
        restart_providers=lambda _reason: None,
        events=EventLog(tmp_path),
    )


def test_a_purge_without_a_wheel_says_which_interpreter_lacks_it_and_what_to_write(tmp_path):
    lacks = "echo many lines; echo 'kvtierd-purge: /usr/bin/python3 has no usable memcache_hybrid: no' >&2; exit 78"
    with pytest.raises(MemcacheError, match="/usr/bin/python3 has no usable memcache_hybrid") as raised:
        asyncio.run(keeper(tmp_path, "sh", "-c", lacks).purge())
    assert "[meta] python" in raised.value.hint


def test_a_purge_that_the_meta_service_refuses_blames_no_interpreter(tmp_path):
    with pytest.raises(MemcacheError, match="exit 1: refused") as raised:
        asyncio.run(keeper(tmp_path, "sh", "-c", "echo refused >&2; exit 1").purge())
    assert not raised.value.hint
