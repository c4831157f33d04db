"""kvtierctl verify against the reference engine over the real MetaService and pool."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvtierd.workload.demo import REFERENCE_ENGINE, DemoNode

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]


def quiet(_text: str) -> None:
    pass


@pytest.fixture(scope="module")
def node():
    with DemoNode(
        quiet, pool="64MiB", orderly=False, engine=REFERENCE_ENGINE + "l3_switch = true\n"
    ) as running:
        yield running


def verify(node: DemoNode, *argv: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "kvtierd.cli", "verify", *argv, "--length", "700", "--json"]
    command += ["--settings", str(node.settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, json.loads(done.stdout)


def tiers(document: dict) -> dict[str, tuple]:
    return {step["name"]: (step["l1"], step["l3"]) for step in document["steps"]}


def test_each_tier_gives_back_what_was_put_into_it(node):
    code, document = verify(node, "ref", "--seed", "1")
    assert (code, document["ok"], document["reason"]) == (0, True, None)
    kept = document["steps"][1]["l1"]
    assert kept > 600
    assert tiers(document) == {"cold": (0, 0), "warm": (kept, 0), "restored": (0, kept), "again": (kept, 0)}
    assert len({step["text"] for step in document["steps"]}) == 1


def test_an_engine_in_use_is_left_alone(node):
    code, document = verify(node, "ref")
    assert code == 1
    assert document["error"]["code"] == "verify.in-use"


def test_by_url_and_with_a_restart(node):
    url = ["--url", f"http://127.0.0.1:{node.engine_port}", "--engine", "refengine", "--yes"]
    assert verify(node, *url)[1]["ok"]
    code, document = verify(node, "ref", "--restart", "--yes")
    assert (code, document["ok"]) == (0, True)


def test_a_detached_l3_is_found_out(node):
    subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "l3", "detach", "ref", "--settings", str(node.settings)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    code, document = verify(node, "ref", "--yes")
    assert code == 1
    assert document["error"]["code"] == "verify.no-l3"
    assert "l3 attach ref" in document["error"]["why"]
