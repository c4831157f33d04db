"""The endpoint between the real MetaService and real clients. P: pool holder, F: full client, S: lookups only.

Each test measures the longest time a call took. Without the endpoint a call in flight when the MetaService goes
away blocks for 60 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import Lookups, RawClient, RealTier, Unit, wait_until

from kvtierd.endpoint.control import EndpointControl
from kvtierd.errors import EndpointError, MemcacheError
from kvtierd.memcache.rest import MetaClient
from kvtierd.workload.demo import free_ports

pytestmark = pytest.mark.real

LONGEST_CALL_SECONDS = 1.0
SIZE = 1024


class Endpoint:
    """The endpoint as a process in front of a tier, and its commands from synchronous code."""

    def __init__(self, tier: RealTier, folder: Path, ports: tuple[int, int], **more: Any) -> None:
        self.folder = folder
        tier.client_meta_port, tier.client_store_port = ports
        config = {
            "listen": {"meta": f"127.0.0.1:{ports[0]}", "config_store": f"127.0.0.1:{ports[1]}"},
            "target": {
                "meta": f"127.0.0.1:{tier.meta_port}",
                "config_store": f"127.0.0.1:{tier.store_port}",
            },
            "control_socket": str(folder / "e.sock"),
            "state_file": str(folder / "e.state"),
            **more,
        }
        (folder / "e.json").write_text(json.dumps(config))
        self.process = self.launch()

    def launch(self) -> subprocess.Popen[bytes]:
        with (self.folder / "endpoint.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtierd.endpoint", "--config", str(self.folder / "e.json")],
                stderr=log,
            )
        return self.process

    def do(self, command: str, *arguments: Any, **named: Any) -> Any:
        async def call() -> Any:
            control = EndpointControl(self.folder / "e.sock")
            try:
                return await getattr(control, command)(*arguments, **named)
            finally:
                await control.close()

        return asyncio.run(call())

    def status(self) -> dict[str, Any]:
        with contextlib.suppress(EndpointError):
            return dict(self.do("status"))
        return {
            "backend": {"reachable": False},
            "survivors": {"expected": -1, "back": 0},
            "waiting": 0,
            "clients": [],
        }

    def await_back(self, survivors: int, timeout_seconds: float = 10.0) -> None:
        def back() -> bool:
            status = self.status()
            return bool(status["backend"]["reachable"]) and status["survivors"]["back"] >= survivors

        wait_until(back, timeout_seconds, f"{survivors} survivors are back: {self.status()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def endpoint(real_tier: RealTier, tmp_path: Path) -> Iterator[Callable[..., Endpoint]]:
    made: list[Endpoint] = []

    def make(**more: Any) -> Endpoint:
        ports = free_ports(2)
        made.append(Endpoint(real_tier, tmp_path, (ports[0], ports[1]), **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def await_roles(tier: RealTier, front: Endpoint, roles: dict[int, str]) -> None:
    """A role report can get lost when a client comes back (1 in 13, more under load); cutting once brings it again."""

    def are_as_before() -> bool:
        return tier.ask(MetaClient.cluster_status).roles() == roles

    try:
        wait_until(are_as_before, 5.0, f"roles are {roles}")
    except AssertionError:
        front.do("cut")  # as kvtierd does after two seconds
        wait_until(are_as_before, 10.0, f"roles are {roles}, after a cut")


def start_all(tier: RealTier, *, threads: int = 4) -> tuple[Unit, RawClient, RawClient, Lookups]:
    """MetaService, pool holder, a full client under load, a lookup client under load."""
    meta = tier.start_meta()
    tier.start_pool()
    full = tier.client()
    lookup = tier.client(init_bm=False)
    keys = [f"seed-{n}" for n in range(20)]
    assert full.put_many(keys, size=SIZE) == [0] * len(keys)
    full.start_load("load", size=SIZE, threads=threads, pause_seconds=0.002)
    return meta, full, lookup, Lookups(lookup, keys)


def check_load(
    full: RawClient, lookups: Lookups, longest_seconds: float = LONGEST_CALL_SECONDS
) -> dict[str, Any]:
    lookups.stop()
    load = full.stop_load(timeout_seconds=70.0)
    print(
        f"\nlongest F call {load['longest_seconds']:.3f} s, S call {lookups.longest_seconds:.3f} s, {lookups.calls} calls"
    )
    assert load["stuck"] == 0
    assert load.get("gets_wrong", 0) == 0
    assert load["longest_seconds"] <= longest_seconds
    assert lookups.longest_seconds <= longest_seconds
    return dict(load)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(2))
def test_kill_and_restart_blocks_nobody(
    real_tier: RealTier, endpoint: Callable[..., Endpoint], attempt: int
) -> None:
    front = endpoint(purge_on_unclean=False)
    meta, full, _, lookups = start_all(real_tier)
    time.sleep(1.0)
    roles = real_tier.ask(MetaClient.cluster_status).roles()
    assert sorted(roles.values()) == ["provider", "proxy"]
    meta.kill()
    real_tier.start_meta()
    healthy = time.monotonic()
    front.await_back(3)
    wait_until(lambda: lookups.hits_at > healthy, 4.0, "the tier hits again")
    await_roles(real_tier, front, roles)
    print(f"\nall back, in their roles, {time.monotonic() - healthy:.3f} s after /health")
    time.sleep(1.0)
    check_load(full, lookups)
    status = front.status()
    assert (status["backend"]["deaths"], status["admission"]) == (1, "survivors")
    assert full.put("after", size=SIZE) == 0
    assert full.get_into("after", size=SIZE) == "ok"


@pytest.mark.slow
def test_a_frozen_metaservice_blocks_nobody(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint()
    meta, full, _, lookups = start_all(real_tier, threads=2)
    time.sleep(0.5)
    meta.signal(signal.SIGSTOP)
    time.sleep(3.0)
    meta.signal(signal.SIGCONT)
    front.await_back(3)
    time.sleep(1.5)
    check_load(full, lookups)
    assert front.status()["backend"]["deaths"] == 0


@pytest.mark.slow
def test_recover_withholds_lookups_until_serve(
    real_tier: RealTier, endpoint: Callable[..., Endpoint]
) -> None:
    front = endpoint()
    meta = real_tier.start_meta()
    real_tier.start_pool()
    full, lookup = real_tier.client(), real_tier.client(init_bm=False)
    assert full.put("key", size=SIZE) == 0
    assert lookup.exist_many(["key"]) == [1]
    time.sleep(0.5)  # the pool has been told of the key
    meta.kill()
    real_tier.start_meta()
    front.await_back(3)
    time.sleep(0.5)
    assert front.status()["mode"] == "recover"
    assert lookup.exist_many(["key"]) == [0]
    assert full.exist("key") == 0
    assert full.get_into("key", size=SIZE) == "miss"
    assert full.put("other", size=SIZE) != 0
    assert "key" in real_tier.ask(MetaClient.keys)
    front.do("serve")
    assert lookup.exist_many(["key"]) == [1]  # it was withheld, not lost: the purge is the daemon's
    assert full.get_into("key", size=SIZE) == "ok"


@pytest.mark.slow
def test_a_planned_stop_is_quiet(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint()
    meta, full, _, lookups = start_all(real_tier, threads=2)
    time.sleep(0.5)
    took = front.do("quiesce", 5.0)
    meta.kill()  # everything was answered and replicated: no need to wait 5 s for its own shutdown
    real_tier.start_meta()
    front.await_back(3)
    assert front.status()["mode"] == "quiesce"
    front.do("serve")
    print(f"\nquiet after {took:.3f} s")
    time.sleep(1.0)
    load = check_load(full, lookups)
    assert load.get("gets_ok", 0) > 0
    assert front.status()["quiesced"] is False
    written = load["written"][:200]
    assert full.get_many(written, size=SIZE).count("wrong") == 0
    assert full.get_many(written, size=SIZE).count("ok") >= len(written) * 0.9


@pytest.mark.slow
def test_an_early_joiner_waits_and_joins(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint(purge_on_unclean=False)
    meta = real_tier.start_meta()
    real_tier.start_pool()
    full = real_tier.client()
    assert full.put("key", size=SIZE) == 0
    ranks = {full.rank()}
    time.sleep(0.5)
    roles = real_tier.ask(MetaClient.cluster_status).roles()
    assert sorted(roles.values()) == ["provider", "proxy"]
    meta.kill()
    joiner = real_tier.client(init=False, device=0)
    joining = joiner.submit("init", device=0, init_bm=True)  # while nobody is there
    wait_until(lambda: front.status()["waiting"] >= 1, 10.0, "the joiner waits")
    real_tier.start_meta()
    front.await_back(2)
    await_roles(real_tier, front, roles)
    assert not joining.done()
    front.do("admit", "all")
    assert joining.result(5)["result"] == 0
    assert joiner.rank() not in ranks
    assert joiner.get_into("key", size=SIZE) == "ok"
    assert joiner.put("joined", size=SIZE) == 0
    assert joiner.leave() == 0
    time.sleep(2.5)  # a zombie's exit would take the pool away
    assert full.get_into("key", size=SIZE) == "ok"
    assert full.put("still here", size=SIZE) == 0


@pytest.mark.slow
def test_a_cut_keeps_keys_and_roles(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint()
    _, full, _, lookups = start_all(real_tier, threads=2)
    time.sleep(0.5)
    assert front.do("cut") == 5
    front.await_back(3)
    time.sleep(1.5)
    check_load(full, lookups)
    assert full.get_into("seed-1", size=SIZE) == "ok"


@pytest.mark.slow
def test_the_endpoint_itself_may_be_killed(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint()
    real_tier.start_meta()
    real_tier.start_pool()
    full = real_tier.client()
    assert full.put("key", size=SIZE) == 0
    time.sleep(1.0)
    front.close()
    front.launch()
    front.await_back(2)
    wait_until(lambda: full.get_into("key", size=SIZE) == "ok", 5.0, "the key is there")
    assert front.status()["admission"] == "survivors"


@pytest.mark.slow
def test_a_pool_holder_that_hangs_and_is_killed(
    real_tier: RealTier, endpoint: Callable[..., Endpoint]
) -> None:
    """The MetaService asks pool holders, and waits 60 s for an answer: also for that of one that is gone."""
    front = endpoint()
    real_tier.start_meta()
    pool = real_tier.start_pool()
    real_tier.start_pool(device=1)
    full = real_tier.client()
    full.start_load("load", size=SIZE, threads=2, pause_seconds=0.002)
    time.sleep(1.0)
    pool.signal(signal.SIGSTOP)
    time.sleep(2.0)
    pool.kill()
    killed = time.monotonic()

    def gone() -> bool:
        with contextlib.suppress(MemcacheError):
            return len(real_tier.ask(MetaClient.cluster_status).roles()) == 2
        return False

    wait_until(gone, 8.0, "the MetaService has let go of it")
    print(f"\nlet go of after {time.monotonic() - killed:.2f} s")
    time.sleep(1.0)
    load = full.stop_load(timeout_seconds=70.0)
    assert (load["stuck"], load.get("gets_wrong", 0)) == (0, 0)
    assert load["longest_seconds"] <= LONGEST_CALL_SECONDS
    assert full.put("after", size=SIZE) == 0
    assert full.get_into("after", size=SIZE) == "ok"
    assert front.status()["backend"]["deaths"] == 0


def test_counters_are_right(real_tier: RealTier, endpoint: Callable[..., Endpoint]) -> None:
    front = endpoint()
    real_tier.start_meta()
    pool = real_tier.start_pool()
    full, lookup = real_tier.client(), real_tier.client(init_bm=False)
    assert full.put_many(["a", "b", "c"], size=SIZE) == [0, 0, 0]
    assert full.put("a", size=SIZE) == 0  # there already: not a write
    assert full.get_into("a", size=SIZE) == "ok"
    assert full.get_into("none", size=SIZE) == "miss"
    assert lookup.exist_many(["a", "b", "x", "y", "z"]) == [1, 1, 0, 0, 0]
    assert lookup.exist("c") == 1
    status = front.status()
    rows = {row["kind"]: row for row in status["clients"]}
    assert {kind: row["pid"] for kind, row in rows.items()} == {
        "P": pool.pid,
        "F": full.unit.pid,
        "S": lookup.unit.pid,
    }
    assert full.exist("none") == 0
    rows = {row["kind"]: row for row in front.status()["clients"]}
    assert (rows["F"]["writes"], rows["F"]["reads"], rows["F"]["read_hits"]) == (3, 2, 1)
    assert (rows["F"]["lookups"], rows["F"]["lookup_hits"]) == (1, 0)
    assert (rows["S"]["writes"], rows["S"]["lookups"], rows["S"]["lookup_hits"]) == (0, 6, 3)
    assert (rows["P"]["writes"], rows["P"]["lookups"]) == (0, 0)
    totals = front.status()["totals"]
    assert (totals["lookups"], totals["synthetic_answers"]) == (7, 0)
    assert all(row["bytes_from_client"] > 0 for row in rows.values())
