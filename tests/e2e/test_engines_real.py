"""The life of engines on the real tier: proved by a token, drained, restarted one by one, gone without a trace."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time

import psutil
import pytest

from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode, free_ports
from kvtierd.workload.stream import complete

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


@pytest.fixture
def pair():
    """Two engines of one group."""
    port = free_ports(1)[0]
    extra = f'group = "g"\n[[engine]]\nname = "two"\nplugin = "refengine"\ngroup = "g"\nport = {port}\n'
    with DemoNode(lambda _: None, pool="64MiB", extra=extra, orderly=False) as node:
        yield node, (node.engine_port, port)


def states(node):
    return {u.name: u.state for u in node.status().units if u.kind == "engine"}


def pids(node):
    return {u.name: u.pid for u in node.status().units if u.kind == "engine"}


def test_a_rolling_restart_keeps_one_of_the_group_ready_and_fails_no_request(pair):
    node, ports = pair
    before = pids(node)
    failures, both_down, stop = [], [], threading.Event()

    def load():
        """A client as behind a balancer: one engine, and the other when that refuses."""
        while not stop.is_set():
            for port in ports:
                try:
                    complete("127.0.0.1", port, model="refengine", prompt="roll on " * 20, max_tokens=4)
                    break
                except KvtierError as error:
                    last = error
            else:
                failures.append(last)

    def watch():
        while not stop.is_set():
            now = states(node)
            if "ready" not in now.values():
                both_down.append(now)
            time.sleep(0.05)

    threads = [threading.Thread(target=load), threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    text = node.settings.read_text()
    node.settings.write_text(
        text.replace('plugin = "refengine"\n', 'plugin = "refengine"\nargs = { max-queue = 7 }\n')
    )
    reply = node.client.reload(restart_changed=True)
    assert sorted(reply.stale_units) == ["kvtier-engine-ref", "kvtier-engine-two"]
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        now = pids(node)
        if all(now[n] not in {0, before[n]} for n in before) and set(states(node).values()) == {"ready"}:
            break
        time.sleep(0.2)
    else:
        raise AssertionError(f"not both restarted: {before} {pids(node)} {states(node)}")
    stop.set()
    for thread in threads:
        thread.join()
    assert both_down == []
    assert failures == []


def test_a_drain_waits_for_the_running_request_and_says_so(pair):
    node, ports = pair
    answers = []

    def ask():
        answers.append(
            complete("127.0.0.1", ports[0], model="refengine", prompt="drain " * 300, max_tokens=60)
        )

    client = threading.Thread(target=ask)
    client.start()
    time.sleep(0.5)
    reply = node.client.drain("ref", 60.0)
    client.join()
    assert len(answers) == 1, "the request was not cut off"
    assert "drained in" in reply.note
    assert reply.unit.state == "stopped"
    time.sleep(1.5)
    assert states(node)["ref"] == "stopped", "drained means stopped until started"


def test_only_engines_can_be_drained(pair):
    with pytest.raises(KvtierError, match="not an engine"):
        pair[0].client.drain("meta", 1.0)


def test_an_engine_that_hangs_but_keeps_its_port_open_is_degraded_and_a_stop_leaves_nothing(pair):
    node, _ = pair
    pid = pids(node)["two"]
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while states(node)["two"] == "ready":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert any("two" in p for p in node.status().problems)
    node.client.control_unit("two", "stop", 60.0)
    assert not psutil.pid_exists(pid)
    assert states(node)["ref"] == "ready"


L3_ENGINE = 'plugin = "refengine"\nl3_switch = true\nargs = { l1 = "8MiB" }\n'


@pytest.fixture
def switchable():
    """One engine whose L3 can be taken off and on."""
    with DemoNode(lambda _: None, pool="64MiB", engine=L3_ENGINE, orderly=False) as node:
        yield node


def ask_cold(node, prompt):
    """One request after L1 is emptied: (tokens from L3, the answer's digest)."""
    connection = http.client.HTTPConnection("127.0.0.1", node.engine_port, timeout=30)
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().read() is not None
    body = {"model": "refengine", "prompt": prompt, "max_tokens": 3, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    own = json.loads(text)["usage"]["kvtier"]
    return own["l3_tokens"], own["logits_digest"]


def remark(node):
    (engine,) = (u for u in node.status().units if u.kind == "engine")
    return engine.remark


def until_l3_hits(node, prompt):
    """Saves come behind the request, and a tier that was just attached is asked again at once."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        tokens, digest = ask_cold(node, prompt)
        if tokens:
            return digest
        time.sleep(0.2)
    raise AssertionError("the pool never had it")


def test_l3_is_taken_off_and_on_while_requests_are_served(switchable):
    node = switchable
    prompt = "off and on again " * 30
    digest = until_l3_hits(node, prompt)
    assert remark(node) == ""
    failures, served, stop = [], [], threading.Event()

    def load():
        number = 0
        while not stop.is_set():
            number += 1
            try:
                complete(
                    "127.0.0.1",
                    node.engine_port,
                    model="refengine",
                    prompt=f"load {number % 7} " * 40,
                    max_tokens=2,
                )
                served.append(number)
            except KvtierError as error:
                failures.append(error)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    pid = pids(node)["ref"]
    for _ in range(2):
        before = len(served)
        reply = node.client.switch_l3("ref", on=False, wait_seconds=20)
        assert (reply.unit, reply.on) == ("kvtier-engine-ref", False)
        assert "detached by an operator" in remark(node)
        assert [ask_cold(node, prompt) for _ in range(3)] == [(0, digest)] * 3, (
            "computed, and the same to the bit"
        )
        assert len(served) > before, "served meanwhile"
        assert node.client.switch_l3("ref", on=True, wait_seconds=20).on
        assert remark(node) == ""
        assert until_l3_hits(node, prompt) == digest
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pids(node)["ref"] == pid
    assert not node.status().problems
    kinds = [e.kind for e in node.client.events()]
    assert (kinds.count("engine.l3-detached"), kinds.count("engine.l3-attached")) == (2, 2)


def test_a_new_daemon_knows_what_was_taken_off_and_a_new_run_of_the_engine_has_it(switchable):
    node = switchable
    node.client.switch_l3("ref", on=False, wait_seconds=20)
    node.stop_daemon(signal.SIGKILL)
    node.start_daemon()
    node.wait_ready()
    assert "detached by an operator" in remark(node)
    assert not node.status().problems, "a remark, no failure"
    node.restart_engine()
    assert remark(node) == ""
    until_l3_hits(node, "a new run " * 40)


def test_an_engine_that_does_not_have_it_says_why(pair):
    with pytest.raises(KvtierError, match="cannot be taken off and on") as refused:
        pair[0].client.switch_l3("ref", on=False, wait_seconds=5)
    assert refused.value.stable_code == "engine.l3-fixed"
    assert "l3_switch = true" in refused.value.why
    with pytest.raises(KvtierError, match="not an engine"):
        pair[0].client.switch_l3("meta", on=False, wait_seconds=5)
