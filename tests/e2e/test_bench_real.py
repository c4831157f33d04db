"""kvtierctl bench on the reference engine over the real pool: hit rates by counters, and what a hit saves."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from kvtierd.workload.demo import DemoNode
from kvtierd.workload.load.results import read_requests

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(240)]
# An L1 of a few prompts, so that repeats come from the pool; prompts of some seconds' worth of words.
ENGINE = 'plugin = "refengine"\nargs = { l1 = "20MiB" }\n'
SMALL = ENGINE.replace("20MiB", "9MiB")
PROMPTS, LENGTH = 6, 1500
WORDS = "river stone winter garden letter silver window market simple bridge".split()


def question(number: int) -> str:
    chance = random.Random(number)
    return " ".join(chance.choice(WORDS) for _ in range(LENGTH))[:LENGTH]


def bench(node, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "--settings", str(node.settings), "bench", *map(str, arguments)],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip


def test_every_prompt_twice(tmp_path):
    questions = [question(n) for n in range(PROMPTS)]
    dataset = tmp_path / "twice.jsonl"
    dataset.write_text(
        "".join(json.dumps({"question": q, "answer": ""}) + "\n" for q in questions + questions[::-1])
    )
    with DemoNode(lambda _: None, engine=ENGINE, orderly=False) as node:
        run = ["run", "--dataset", dataset, "--concurrency", 1, "--max-tokens", 4, "--warm-up", 1]
        done = bench(node, *run, "--engine", "ref", "--output", tmp_path / "first", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(done.stdout)
        again = bench(
            node, *run, "--engine", "ref", "--output", tmp_path / "second", "--salt", result["salt"]
        )
        assert again.returncode == 0, again.stdout + again.stderr
        report = bench(
            node, "report", tmp_path / "first", tmp_path / "second", "--output", tmp_path / "report", "--json"
        )
    tiers, summary = result["tiers"], result["summary"]
    # A little less than half: the last block of a prompt is not whole.
    assert 0.42 <= tiers["hit_rate"] <= 0.5
    assert tiers["l3"]["hit_tokens"] > 0
    assert tiers["l1"]["hit_tokens"] > 0
    assert tiers["hit_tokens"] == summary["cached_tokens"]  # the counters and the answers tell the same
    assert tiers["looked_up_tokens"] == summary["prompt_tokens"]
    records = read_requests(tmp_path / "first")
    cold = sorted(r.ttft_seconds for r in records[:PROMPTS])[PROMPTS // 2]
    warm = sorted(r.ttft_seconds for r in records[PROMPTS:])[PROMPTS // 2]
    assert warm < cold / 2
    assert report.returncode == 0, report.stderr
    rows = json.loads(report.stdout)["runs"]
    assert rows[1]["hit_rate"] > 0.9
    assert rows[1]["speed_up"] > 1.2


def test_the_three_modes_of_one_engine(tmp_path):
    dataset = tmp_path / "once.jsonl"
    dataset.write_text(
        "".join(json.dumps({"question": question(n)[:700], "answer": ""}) + "\n" for n in range(3))
    )
    with DemoNode(lambda _: None, engine=SMALL, orderly=False) as node:
        before = node.client.plan_json()
        asked = [
            "compare",
            "ref",
            "--dataset",
            dataset,
            "--output",
            tmp_path / "out",
            "--max-tokens",
            4,
            "--json",
        ]
        refused = bench(node, *asked)
        assert refused.returncode == 2
        assert node.client.plan_json() == before
        done = bench(node, *asked, "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert node.client.plan_json() == before
        assert not (node.directory / "conf.d").exists()
        assert all(u.state == "ready" and not u.stale for u in node.status().units)
    made = json.loads(done.stdout)
    nothing, own, pool = made["runs"]
    assert [r["label"] for r in made["runs"]] == ["no cache", "prefix cache", "prefix cache + pool"]
    assert nothing["hit_rate"] == 0
    # The engine's own cache has no room for all three prompts, so each drives out the next; the pool has them all.
    assert own["hit_rate"] == 0
    assert own["speed_up"] is None
    assert "no hits" in own["no_speed_up_because"]
    assert pool["l3_share"] > 0.8
    assert pool["speed_up"] > 2
    assert all(
        (tmp_path / "out" / f).exists()
        for f in ("report.html", "comparison.png", "no-cache-cold/result.json")
    )
