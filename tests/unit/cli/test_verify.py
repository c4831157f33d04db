"""kvtierctl verify: its usage errors, and how a proof is shown."""

import pytest

from kvtierd.cli import main
from kvtierd.cli.verify import _show
from kvtierd.plan.engine import TierTokens
from kvtierd.workload.verify.proof import Proof
from kvtierd.workload.verify.verdict import Fault, Step


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["e", "--url", "http://h:1", "--engine", "vllm"],
        ["--url", "http://h:1"],
        ["e", "--engine", "vllm"],
        ["--url", "https://h:1", "--engine", "vllm"],
        ["--url", "http://h:port", "--engine", "vllm"],
        ["--url", "http://h:1", "--engine", "tgi"],
        ["--url", "http://h:1", "--engine", "vllm", "--env", "NAME"],
        ["e", "--length", "10"],
    ],
)
def test_usage_errors(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", *wrong])
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_a_failed_proof_says_which_tier_served_what_and_what_to_do(capsys):
    steps = (
        Step("cold", TierTokens(prompt=3000, l1=0, l3=0, computed=3000), "t", 1.25),
        Step("restored", TierTokens(prompt=3000, l1=0, l3=1234, computed=1766), "t", 0.5),
    )
    _show(Proof("e", 7, steps, Fault("partly-restored", "L3 gave back 1234", "do this"), ("a remark",)))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["first:", "computed", "3,000", "0", "-", "0", "3,000", "1.250"]
    assert lines[2] == ["emptied:", "from", "L3", "3,000", "0", "-", "1,234", "1,766", "0.500"]
    assert "note: a remark" in out
    assert "e: NOT PROVED (partly-restored): L3 gave back 1234 (seed 7)" in out
    assert "do: do this" in out
