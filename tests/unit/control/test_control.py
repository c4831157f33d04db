"""The control service over a real unix socket, with a fake node behind it."""

import asyncio
import json
import os
import stat
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtierd.control.client import ControlClient
from kvtierd.control.server import ControlServer
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.errors import (
    ActionError,
    ClusterError,
    DaemonUnreachableError,
    KvtierError,
    PlanError,
    StateError,
    UnitError,
)
from kvtierd.events import Event


class FakeNode:
    def __init__(self):
        self.calls = []

    def status(self):
        tier = pb.Tier(name="L3", where="pool", state="ready", capacity_bytes=0)
        return pb.StatusReply(
            node="n1", tiers=[tier], units=[pb.Unit(id="kvtier-meta-main", state="ready", pid=7)]
        )

    def plan_json(self):
        raise PlanError("no plan is in force", why="because", hint="look", code="plan.none")

    async def reload(self, *, restart_changed):
        self.calls.append(("reload", restart_changed))
        return pb.ReloadReply(changed_files=["/a"])

    def events(self, last):
        return [Event(i, 1.0 * i, "info", "k", "u", f"m{i}") for i in range(1, 4)][-last or None :]

    async def follow_events(self, last):
        for event in self.events(last):
            yield event
        await asyncio.sleep(3600)

    async def cluster_events(self, last):
        return [("n1", self.events(last)[-1]), ("n2", Event(9, 2.0, "error", "k", "", "elsewhere"))]

    async def follow_cluster_events(self, last):
        for event in await self.cluster_events(last):
            yield event
        raise ClusterError("there is no cluster", code="cluster.none")

    async def tail(self, unit, lines):
        if unit != "meta":
            raise UnitError(f"there is no unit {unit!r}", code="unit.unknown")
        return [f"line {i}" for i in range(lines)]

    async def follow_log(self, unit, lines):
        for line in await self.tail(unit, lines):
            yield line

    async def control_unit(self, unit, action, wait_seconds):
        self.calls.append((unit, action, wait_seconds))
        return pb.Unit(id=unit, state="ready")

    async def drain(self, unit, deadline_seconds):
        self.calls.append((unit, "drain", deadline_seconds))
        return pb.ControlUnitReply(unit=pb.Unit(id=unit, state="stopped"), note="drained")

    async def stop_all(self, wait_seconds):
        return [pb.Unit(id="a", state="stopped")]

    async def purge(self):
        raise RuntimeError("a fault of ours")

    async def switch_l3(self, unit, *, on, wait_seconds):
        self.calls.append((unit, "l3", on, wait_seconds))
        return pb.SwitchL3Reply(unit=unit, on=on, note="done")

    def plugins(self):
        return [pb.Plugin(name="p")]

    async def why(self, unit, last):
        self.calls.append(("why", unit, last))
        if unit == "x":
            raise UnitError("there is no unit 'x'", code="unit.unknown")
        return pb.WhyReply(unit=unit, rules=[pb.Explanation(rule="pool-small", next_in_seconds=0.0)])

    async def policy_in_force(self):
        return pb.PolicyReply(policy_json="{}", problems=["a problem"])

    async def reset_policy(self):
        raise ActionError("an action is being carried out", hint="try again", code="act.busy")

    def pictures(self):
        if self.calls:
            raise ActionError("this kvtierd has not begun to look yet", code="act.not-yet")
        return iter(["{}", "x" * 200_000])


@pytest.fixture
async def served(tmp_path):
    node, path = FakeNode(), tmp_path / "s.sock"
    server = ControlServer(node, path)
    await server.start()
    yield node, path
    await server.close(0)


async def call(path, method, *args, **kwargs):
    """The blocking client in a thread, as kvtierctl uses it in a process of its own."""

    def run():
        with ControlClient(path) as client:
            result = getattr(client, method)(*args, **kwargs)
            return list(result) if hasattr(result, "__next__") else result

    return await asyncio.to_thread(run)


async def test_status_keeps_zero_and_unknown_apart(served):
    reply = await call(served[1], "status")
    tier = reply.tiers[0]
    assert tier.HasField("capacity_bytes")
    assert tier.capacity_bytes == 0
    assert not tier.HasField("used_bytes")


async def test_an_error_of_ours_crosses_with_code_reason_and_hint(served):
    with pytest.raises(KvtierError) as raised:
        await call(served[1], "plan_json")
    error = raised.value
    assert (error.stable_code, error.message, error.why, error.hint) == (
        "plan.none", "no plan is in force", "because", "look",
    )  # fmt: skip


async def test_a_fault_of_ours_is_told_and_does_not_end_the_service(served):
    with pytest.raises(KvtierError, match="internal error: RuntimeError"):
        await call(served[1], "purge")
    assert (await call(served[1], "status")).node == "n1"


async def test_actions_arrive_as_asked(served):
    await call(served[1], "control_unit", "ref", "restart", 3.0)
    await call(served[1], "reload", restart_changed=True)
    assert (await call(served[1], "drain", "ref", 7.0)).note == "drained"
    assert served[0].calls == [("ref", "restart", 3.0), ("reload", True), ("ref", "drain", 7.0)]


@pytest.mark.parametrize("on", [True, False])
async def test_l3_on_and_off_arrive_as_asked(served, on):
    reply = await call(served[1], "switch_l3", "ref", on=on, wait_seconds=4.0)
    assert (reply.on, reply.note) == (on, "done")
    assert served[0].calls == [("ref", "l3", on, 4.0)]


async def test_why_and_the_policy(served):
    reply = await call(served[1], "why", "ref", last=3)
    assert served[0].calls == [("why", "ref", 3)]
    assert (reply.unit, reply.rules[0].HasField("next_in_seconds")) == ("ref", True)
    await call(served[1], "why")
    assert served[0].calls[-1] == ("why", "", 10)
    with pytest.raises(KvtierError, match="no unit 'x'") as raised:
        await call(served[1], "why", "x")
    assert raised.value.stable_code == "unit.unknown"
    assert list((await call(served[1], "policy")).problems) == ["a problem"]
    with pytest.raises(KvtierError, match="being carried out") as raised:
        await call(served[1], "reset_policy")
    assert (raised.value.stable_code, raised.value.hint) == ("act.busy", "try again")


async def test_pictures_are_streamed_and_a_refusal_crosses(served):
    assert [len(line) for line in await call(served[1], "pictures")] == [2, 200_000]
    served[0].calls.append("begun")
    with pytest.raises(KvtierError, match="has not begun to look") as raised:
        await call(served[1], "pictures")
    assert raised.value.stable_code == "act.not-yet"


async def test_streams(served):
    assert [e.message for e in await call(served[1], "events", last=2)] == ["m2", "m3"]
    of_all = await call(served[1], "events", last=1, cluster=True)
    assert [(e.node, e.message) for e in of_all] == [("n1", "m3"), ("n2", "elsewhere")]
    with pytest.raises(KvtierError, match="there is no cluster"):
        await call(served[1], "events", cluster=True, follow=True)
    assert await call(served[1], "logs", "meta", lines=3) == ["line 0", "line 1", "line 2"]
    with pytest.raises(KvtierError, match="no unit 'x'"):
        await call(served[1], "logs", "x")


async def test_a_follower_that_goes_away_leaves_nothing_behind(served):
    def first():
        with ControlClient(served[1]) as client:
            return next(client.events(last=1, follow=True)).message

    assert await asyncio.to_thread(first) == "m3"


async def test_only_owner_and_group_may_use_the_socket(served):
    mode = stat.S_IMODE(os.stat(served[1]).st_mode)
    assert mode == 0o660


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user must try the socket")
async def test_another_user_is_refused(tmp_path_factory, served):
    script = f"import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect({str(served[1])!r})"
    for parent in served[1].parents:
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    result = await asyncio.to_thread(
        subprocess.run,
        ["/usr/bin/python3", "-c", script],
        user="nobody",
        group="nogroup",
        extra_groups=[],
        capture_output=True,
        timeout=20,
    )
    assert b"PermissionError" in result.stderr


async def test_the_standard_health_service_answers(served):
    async with grpc.aio.insecure_channel(f"unix:{served[1]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="kvtierd.v1.Control"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_nobody_listens(tmp_path):
    with pytest.raises(DaemonUnreachableError, match="no kvtierd runs here") as raised:
        await call(tmp_path / "none.sock", "status")
    assert raised.value.exit_code == 3


async def test_a_socket_left_by_a_killed_daemon_is_replaced_but_not_a_living_one(served, tmp_path):
    with pytest.raises(StateError) as raised:
        await ControlServer(FakeNode(), served[1]).start()
    assert raised.value.stable_code == "state.socket-in-use"
    stale = tmp_path / "stale.sock"
    code = f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({str(stale)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    server = ControlServer(FakeNode(), stale)
    await server.start()
    assert (await call(stale, "status")).node == "n1"
    await server.close(0)


async def test_a_path_too_long_for_a_socket_is_said(tmp_path):
    with pytest.raises(StateError, match="longer than 107 bytes"):
        await ControlServer(FakeNode(), tmp_path / ("x" * 120)).start()


def test_generated_code_is_fresh():
    result = subprocess.run(
        [sys.executable, "proto/generate.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr


def test_message_dict_gives_null_for_unknown_and_numbers_for_numbers():
    from kvtierd.control.messages import message_dict

    fields = message_dict(pb.StatusReply(node="n", epoch=3, tiers=[pb.Tier(name="L1", hit_tokens=5)]))
    assert json.loads(json.dumps(fields)) == fields
    assert fields["epoch"] == 3
    assert fields["tiers"][0]["hit_tokens"] == 5
    assert fields["tiers"][0]["capacity_bytes"] is None
    assert fields["hugepages"]["asked_pages"] == 0
