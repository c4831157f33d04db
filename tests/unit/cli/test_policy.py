"""kvtierctl why, policy show, simulate, record, reset: the texts, line by line, and what status says of decisions."""

import io
import json
import os
import re
import time

import pytest

from kvtierd.cli import main
from kvtierd.cli import policy as cli
from kvtierd.cli import status as cli_status
from kvtierd.cli.policy import policy_lines, replay_lines, why_lines
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.decide.recorded import picture_line
from kvtierd.decide.simulate import replay
from kvtierd.errors import ActionError, DaemonUnreachableError
from kvtierd.settings.policy import PolicySettings

from ..decide.scenes import NOW, at, engine, picture, policy

AT = time.mktime((2026, 3, 4, 5, 6, 7, 0, 0, -1))
ONE = "kvtier-engine-one"
WHY = pb.WhyReply(
    unit=ONE, state="degraded", reason="a KV load failed",
    rules=[
        pb.Explanation(
            rule="pool-small", about="pool", state="holds", sees="3.0 turnovers an hour", next_in_seconds=290.0,
            verdict="holds for 10s of 5m00s", would="add a pool holder of 16 GiB on b",
        ),
        pb.Explanation(rule="host-short", about="host-short", state="between", sees="little is left", verdict="not yet"),
        pb.Explanation(rule="meta-hung", about="pool", state="clear", sees="it answers", verdict="no reason to act"),
    ],
    actions=[
        pb.ActionEntry(
            at=AT, what=f"detach L3 from {ONE}", state="done", rule="failed-loads", why="50 failed", outcome="as was wanted"
        ),
        pb.ActionEntry(at=AT, what="purge the pool", state="dry run", rule="failed-loads-everywhere", why="all fail"),
    ],
    events=[pb.Event(at=AT, message="L3 detached")],
)  # fmt: skip


class FakeClient:
    """The control service, as far as these verbs ask it."""

    def __init__(self, reply=None, error=None, lines=()):
        self.reply, self.error, self.lines, self.asked = reply, error, lines, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def _answer(self, *asked):
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return self.reply

    def why(self, unit, *, last):
        return self._answer("why", unit, last)

    def policy(self):
        return self._answer("policy")

    def reset_policy(self):
        return self._answer("reset")

    def pictures(self):
        self._answer("pictures")
        yield from self.lines

    def status(self):
        return self._answer("status")


@pytest.fixture
def run(capsys, monkeypatch):
    monkeypatch.delenv("KVTIERD_SETTINGS", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(client, *arguments):
        for module in (cli, cli_status):
            monkeypatch.setattr(module, "connect", lambda settings, socket: client)
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


# -- why


def test_why_line_by_line(run):
    client = FakeClient(WHY)
    code, out, _ = run(client, "why", "one", "-n", "5")
    assert (code, client.asked) == (0, [("why", "one", 5)])
    assert out.splitlines() == [
        f"{ONE} is degraded: a KV load failed",
        "  03-04 05:06:07  L3 detached",
        "",
        "what the rules see now:",
        "  pool-small (pool): 3.0 turnovers an hour",
        "    would add a pool holder of 16 GiB on b; holds for 10s of 5m00s, in 4m50s",
        "  host-short: little is left",
        "    not yet",
        "",
        "what was done:",
        f"  03-04 05:06:07  detach L3 from {ONE}: done",
        "    because failed-loads: 50 failed",
        "    as was wanted",
        "  03-04 05:06:07  purge the pool: dry run",
        "    because failed-loads-everywhere: all fail",
    ]
    assert "  meta-hung (pool): it answers" in run(client, "why", "--all")[1]


def test_why_when_there_is_nothing_to_say():
    assert why_lines(pb.WhyReply(), all_rules=False) == [
        "what the rules see now:",
        "  nothing",
        "",
        "what was done:",
        "  nothing",
    ]
    quiet = pb.WhyReply(unit=ONE, state="ready", rules=[pb.Explanation(rule="x", state="clear")])
    assert why_lines(quiet, all_rules=False)[:5] == [
        f"{ONE} is ready",
        "  nothing happened to it lately",
        "",
        "what the rules see now:",
        "  nothing to act on (1 looked at; --all shows them)",
    ]


def test_why_as_json(run):
    told = json.loads(run(FakeClient(WHY), "why", "--json")[1])
    assert told["rules"][0]["next_in_seconds"] == 290.0
    assert told["rules"][1]["next_in_seconds"] is None
    assert (told["actions"][0]["ended"], told["actions"][0]["outcome"]) == (None, "as was wanted")


def test_texts_are_as_wide_as_the_terminal_and_whole_elsewhere(run, monkeypatch):
    long = pb.WhyReply(
        rules=[pb.Explanation(rule="pool-small", state="holds", sees="so many words " * 12, verdict="v")]
    )
    _, out, _ = run(FakeClient(long), "why")
    assert max(map(len, out.splitlines())) > 150
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli.fitted(why_lines(long, all_rules=False))
    assert max(map(len, lines)) <= 80
    assert [line[:7] for line in lines[1:3]] == ["  pool-", "      w"], "what follows is further in"
    assert " ".join(" ".join(lines).split()) == " ".join(out.split())
    assert "" in lines, "empty lines stay"


# -- policy


def policy_reply(**adjusted):
    kept = {"evict_high": None, "evict_low": None, "holders": [], **adjusted}
    return pb.PolicyReply(
        policy_json=json.dumps(PolicySettings(dry_run=True).model_dump(mode="json")),
        adjustments_json=json.dumps(kept),
    )


def test_policy_show_marks_what_is_not_the_default(run):
    code, out, _ = run(FakeClient(policy_reply()), "policy", "show")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "[policy] in force (* not the default):")
    keys = lines[1 : lines.index("")]
    assert len(keys) == len(PolicySettings.model_fields)
    assert [line.split() for line in keys if line.startswith("*")] == [["*", "dry_run", "true"]]
    assert all(re.fullmatch(r"[* ] [a-z_0-9]+ +\S.*", line) for line in keys)
    assert len({len(re.match(r"[* ] \w+ +", line)[0]) for line in keys}) == 1, "one column"
    assert max(map(len, keys)) <= 80
    assert lines[lines.index("") :] == ["", "changed beside the settings:", "  nothing"]


def test_policy_show_tells_what_was_changed_and_what_is_wrong():
    adjusted = {"evict_high": 71, "evict_low": 51, "holders": [{"index": 2, "dram_bytes": 4 << 30}]}
    assert policy_lines({"dry_run": False}, adjusted, ["the journal cannot be written"]) == [
        "[policy] in force (* not the default):",
        "  dry_run  false",
        "",
        "changed beside the settings:",
        "  thresholds 71/51 %",
        "  pool holder added-2 of 4 GiB",
        "  kvtierctl policy reset takes it back",
        "! the journal cannot be written",
    ]


def test_policy_show_as_json(run):
    told = json.loads(
        run(FakeClient(policy_reply(evict_high=71, evict_low=51)), "policy", "show", "--json")[1]
    )
    assert set(told) == {"policy", "adjustments", "problems"}
    assert (told["policy"]["dry_run"], told["adjustments"]["evict_high"]) == (True, 71)


def test_policy_reset(run):
    undone = pb.PolicyReply(undone=["kvtier-pool-added-0 (1 GiB) was removed", "thresholds are back"])
    assert run(FakeClient(undone), "policy", "reset")[:2] == (
        0,
        "kvtier-pool-added-0 (1 GiB) was removed\nthresholds are back\n",
    )
    assert run(FakeClient(pb.PolicyReply()), "policy", "reset")[:2] == (0, "nothing was changed\n")
    assert json.loads(run(FakeClient(undone), "policy", "reset", "--json")[1])["problems"] == []
    busy = ActionError("an action is being carried out", hint="try again", code="act.busy")
    code, _, err = run(FakeClient(error=busy), "policy", "reset")
    assert code == 1
    assert "an action is being carried out" in err
    assert "try again" in err


# -- record and simulate


FAILING = picture(engines=(engine("one", failed=50), engine("two")))
SETTINGS = ("--settings", "examples/emulation.toml")


def test_what_was_recorded_can_be_simulated(run, tmp_path):
    file = tmp_path / "r.jsonl"
    lines = [picture_line(at(NOW + 15 * i, FAILING)) for i in range(5)]
    code, out, _ = run(FakeClient(lines=lines), "policy", "record", file)
    assert (code, out) == (0, f"5 pictures in {file}\n")
    assert file.read_text().splitlines() == lines
    code, out, _ = run(FakeClient(), "policy", "simulate", file, *SETTINGS)
    told = out.splitlines()
    assert (code, told[0]) == (0, "5 pictures over 1m00s")
    assert f"after 0.0s: detach L3 from {ONE}" in told
    assert told[told.index(f"after 0.0s: detach L3 from {ONE}") + 1].startswith(
        "    because failed-loads: 50 KV loads of"
    )
    told = json.loads(run(FakeClient(), "policy", "simulate", file, *SETTINGS, "--json")[1])
    assert (told["pictures"], told["last_seconds"] - told["first_seconds"]) == (5, 60.0)
    assert "DetachL3" in {d["action"]["kind"] for d in told["decided"]}


def test_what_was_kept_back_is_told_with_why():
    off = replay(
        [at(NOW + 5 * i, FAILING) for i in range(3)],
        policy(engine_actions_per_hour=0, failed_loads="restart"),
    )
    lines = replay_lines(off)
    assert lines[0] == "3 pictures over 10s"
    assert any(re.match(r"kept back: failed-loads: .*\(3 pictures\)", line) for line in lines), lines
    assert replay_lines(replay([], policy())) == ["0 pictures over 0.0s", "nothing would have been done"]


def test_a_recording_is_not_lost_to_a_daemon_that_is_not_there(run, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text("kept\n")
    gone = FakeClient(error=DaemonUnreachableError("no kvtierd runs here"))
    assert run(gone, "policy", "record", file)[0] == 3
    assert file.read_text() == "kept\n"
    assert run(FakeClient(), "policy", "record", file)[1] == f"0 pictures in {file}\n"
    assert file.read_text() == ""
    code, _, err = run(FakeClient(lines=["x"]), "policy", "record", tmp_path / "no" / "r")
    assert code == 1
    assert "cannot be written: No such file" in err


@pytest.mark.parametrize(
    ("content", "told"), [("nonsense\n", "line 1 is not"), ('\n{"now_seconds": "x"}\n', "line 2 is not")]
)
def test_what_is_no_recording(run, tmp_path, content, told):
    file = tmp_path / "r.jsonl"
    file.write_text(content)
    code, _, err = run(FakeClient(), "policy", "simulate", file, *SETTINGS)
    assert code == 1
    assert told in err
    assert "Traceback" not in err
    assert run(FakeClient(), "policy", "simulate", tmp_path, *SETTINGS)[0] == 2


# -- status


def status_reply(**more):
    return pb.StatusReply(
        node="a", at=AT, started=AT - 60,
        last_decision=pb.Decision(
            rule="pool-small", what="add a pool holder of 16 GiB on b", age_seconds=125.0, outcome="undone: it did not grow"
        ),
        next_decision=pb.Decision(rule="pool-idle", what="remove pool holder x", why="little is used", in_seconds=3700.0),
        **more,
    )  # fmt: skip


def text_of(reply, width):
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(cli_status.render(reply))
    return console.export_text()


def test_status_tells_the_last_decision_and_the_next():
    lines = text_of(status_reply(dry_run=True), 200).splitlines()
    assert "policy: dry run, nothing is done" in lines
    assert (
        "last decision 2m05s ago: add a pool holder of 16 GiB on b (pool-small): undone: it did not grow"
        in lines
    )
    assert (
        "next possible: remove pool holder x (pool-idle), in 1h01m at the earliest, if it stays so: little is used"
        in lines
    )
    assert all(len(line) <= 80 for line in text_of(status_reply(), 80).splitlines())
    assert "dry run" not in text_of(status_reply(), 200)
    quiet = text_of(pb.StatusReply(node="a", at=AT, started=AT), 200)
    assert "decision" not in quiet
    assert "next possible" not in quiet


def test_status_next_possible_now():
    reply = pb.StatusReply(next_decision=pb.Decision(rule="r", what="w", why="because", in_seconds=0.0))
    assert "next possible: w (r), now: because" in text_of(reply, 200)


def test_watch_into_a_pipe_is_one_whole_status_after_the_other(run, monkeypatch):
    class Ends(FakeClient):
        def status(self):
            if len(self.asked) == 3:
                raise DaemonUnreachableError("kvtierd is gone")
            return super().status()

    slept = []
    monkeypatch.setattr(cli_status.time, "sleep", slept.append)
    monkeypatch.setattr(os, "isatty", lambda _: False)
    code, out, err = run(Ends(status_reply()), "status", "--watch")
    assert code == 3
    assert "kvtierd is gone" in err
    assert out.count("last decision 2m05s ago") == 3
    assert "\x1b" not in out
    assert slept == [1.0] * 3
