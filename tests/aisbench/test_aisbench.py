"""The same load by kvtierctl bench and by the real AISBench on one server with known delays: do they agree?

``make test-aisbench`` installs AISBench into a cache outside the checkout; ``AISBENCH`` names another one.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..unit.workload.load.fake_openai import FakeOpenAi, serving

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd" / "engines"
AISBENCH = Path(os.environ.get("AISBENCH") or CACHE / "aisbench" / "bin" / "ais_bench")
pytestmark = [
    pytest.mark.skipif(
        not AISBENCH.exists(), reason=f"AISBench is not installed at {AISBENCH} (make test-aisbench)"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(400),
]
TTFT, GAP, TOKENS, CONCURRENCY = 0.15, 0.02, 12, 4
SALT = "same"


@pytest.fixture
def tokenizer(tmp_path):
    """A directory that transformers takes for a model's: a word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path / "model"
    directory.mkdir()
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def kvtierctl(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "bench", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def aisbench(command, work):
    """The median of each of its figures, in seconds and tokens, by its name."""
    done = subprocess.run([AISBENCH, *command[1:]], cwd=work, capture_output=True, text=True, timeout=300)
    found = list(work.glob("results/*/performances/kvtierd/*.csv"))
    assert len(found) == 1, done.stdout[-3000:] + done.stderr[-3000:]
    figures = {}
    with found[0].open() as stream:
        for row in csv.DictReader(stream):
            number, unit = re.fullmatch(r"([\d.]+)\s*(.*)", row["Median"]).groups()
            figures[row["Performance Parameters"]] = float(number) / (1000 if unit == "ms" else 1)
            figures["N"] = int(row["N"])
    return figures


QA = [{"question": f"question {i} " + "alpha beta " * 20, "answer": ""} for i in range(40)]
CHATS = [
    {
        "id": str(i),
        "conversations": [
            {"from": "human" if n % 2 == 0 else "gpt", "value": f"turn {n} of {i}" if n % 2 == 0 else ""}
            for n in range(6)
        ],
    }
    for i in range(12)
]


@pytest.mark.parametrize(("records", "requests"), [(QA, 40), (CHATS, 36)], ids=["qa", "chats"])
def test_both_tools_measure_the_same(tmp_path, tokenizer, records, requests):
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_text("".join(json.dumps(r) + "\n" for r in records))
    # The role comes with the first token, as from vLLM: AISBench takes it for a token.
    server = FakeOpenAi(ttft=TTFT, gap=GAP, early=False)
    with serving(server) as url:
        common = [
            "--url", url, "--model", "fake", "--dataset", dataset, "--concurrency", CONCURRENCY, "--max-tokens", TOKENS,
            "--salt", SALT,
        ]  # fmt: skip
        ours = kvtierctl("run", *common, "--output", tmp_path / "ours")["summary"]
        mine = [b["messages"] for b in server.bodies[-requests:]]
        config = kvtierctl("aisbench-config", *common, "--output", tmp_path / "ais", "--tokenizer", tokenizer)
        theirs = aisbench(config["command"], tmp_path / "ais")
        other = [b["messages"] for b in server.bodies[-requests:]]
    assert ours["succeeded"] == theirs["N"] == requests

    def in_order(sent):
        return sorted(json.dumps([[m["role"], m["content"]] for m in messages]) for messages in sent)

    assert in_order(mine) == in_order(other)  # the very same prompts, history included
    assert server.bodies[-1]["max_tokens"] == TOKENS
    # Medians: one run of each, on a machine that does other things too.
    assert ours["ttft_seconds"]["p50"] == pytest.approx(theirs["TTFT"], rel=0.15)
    assert ours["tpot_seconds"]["p50"] == pytest.approx(theirs["TPOT"], rel=0.2)
    assert ours["e2e_seconds"]["p50"] == pytest.approx(theirs["E2EL"], rel=0.15)
    assert ours["output_tokens_each"]["mean"] == theirs["OutputTokens"] == TOKENS
