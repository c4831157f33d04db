"""kvtierctl without a daemon: exact forms, exit codes, and what a stranger reads."""

import io
import json
import time
from pathlib import Path

import pytest

from kvtierd.cli import main
from kvtierd.cli.status import _console, render
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.errors import UnitError

A2 = ["--settings", "examples/single-host-a2.toml", "--inventory", "tests/fixtures/inventory/a2-2cards.json"]


@pytest.fixture
def run(capsys, monkeypatch):
    for name in ("KVTIERD_SETTINGS", "KVTIERD_SOCKET"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


def test_plan_as_json(run):
    code, out, _ = run("plan", *A2, "--json")
    made = json.loads(out)
    assert code == 0
    assert made["hugepages"] == {"page_size_bytes": 2097152, "pages": 133120, "per_numa_node": {}}


def test_plan_for_people(run):
    code, out, _ = run("plan", *A2)
    assert code == 0
    assert "133120 x 2 MiB = 260 GiB" in out
    assert "256 GiB in 2 x 128 GiB" in out


def test_a_refused_plan_exits_1_and_says_what_to_do(run):
    code, out, _ = run("plan", *A2[:2], "--inventory", "tests/fixtures/inventory/no-hugepages.json")
    assert code == 1
    assert "REFUSED" in out
    assert "do: " in out


@pytest.mark.parametrize("node", ["host-a", "host-b"])
def test_plan_for_a_named_node(run, node):
    code, out, _ = run(
        "plan", "--settings", "examples/two-hosts-a2.toml", "--inventory", "tests/fixtures/inventory/a2-8cards.json",
        "--node", node, "--json",
    )  # fmt: skip
    assert (code, json.loads(out)["node"]) == (0, node)


@pytest.mark.parametrize("content", ["", "{}", "[1, 2", '{"hostname": 5}', "\x00\x01"])
def test_what_is_no_inventory(run, tmp_path, content):
    path = tmp_path / "i.json"
    path.write_text(content)
    code, _, err = run("plan", *A2[:2], "--inventory", path)
    assert code == 1
    assert "is not an inventory" in err
    assert "Traceback" not in err


def test_inventory_reads_back(run, tmp_path):
    code, out, _ = run("inventory", "--json")
    assert code == 0
    path = tmp_path / "i.json"
    path.write_text(out)
    code, out, _ = run("plan", "--settings", "examples/emulation.toml", "--inventory", path, "--json")
    assert json.loads(out)["emulated"] is True


def test_plan_touches_nothing(run, tmp_path):
    settings = tmp_path / "s.toml"
    paths = "".join(f'{n} = "{tmp_path}/{n}"\n' for n in ("state", "runtime", "logs"))
    settings.write_text(
        f'[node]\nseries = "emulated"\n[paths]\n{paths}[pool]\ndram = "64MiB"\nhost_reserve = "1MiB"\n'
    )
    code, _, _ = run("plan", "--settings", settings)
    assert code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]


# -- conf check


def test_conf_check_of_good_settings(run):
    code, out, _ = run("conf", "check", "examples/emulation.toml", "--json")
    assert (code, json.loads(out)) == (0, {"ok": True, "problems": []})


def test_conf_check_of_bad_settings(run, tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[pool]\ndramm = "1GiB"\ndram = "1GiB"\n')
    code, out, _ = run("conf", "check", path, "--json")
    answer = json.loads(out)
    assert (code, answer["ok"]) == (1, False)
    problem = answer["problems"][0]
    assert {"line", "key", "code", "message", "hint"} <= set(problem)
    assert (problem["line"], problem["key"], problem["code"]) == (2, "pool.dramm", "unknown-key")
    code, out, _ = run("conf", "check", path)
    assert f"{path}:2: pool.dramm: unknown key 'dramm'" in out
    assert "did you mean 'dram'?" in out
    assert "NOT OK" in out


def test_conf_check_ignores_this_shell_s_environment(run, monkeypatch):
    monkeypatch.setenv("KVTIERD_POOL__DRAM", "nonsense")
    assert run("conf", "check", "examples/emulation.toml")[0] == 0


@pytest.mark.parametrize(
    ("name", "kind", "content", "line", "code"),
    [
        ("mmc-meta.conf", None, "ock.mmc.evict_threshold_low = 60  # comment\n", 1, "inline-comment"),
        ("x.conf", "meta", "ock.mcc.meta_service_url = tcp://127.0.0.1:5011\n", 1, None),
        ("mmc-local.conf", None, "ock.mmc.local_service.dram.size = 1GiB\n", 1, None),
        ("m.json", None, '{"meta_service_url": "tcp://127.0.0.1:5000", // no\n}', 1, None),
        ("m.json", "sglang-meta", '{"ha_enable": "false"}', 1, None),
    ],
)
def test_conf_check_of_hand_written_files(run, tmp_path, name, kind, content, line, code):
    path = tmp_path / name
    path.write_text(content)
    extra = ["--kind", kind] if kind else []
    exit_code, out, _ = run("conf", "check", path, "--json", *extra)
    problems = [p for p in json.loads(out)["problems"] if p["severity"] == "error" and p["line"] == line]
    assert exit_code == 1
    assert problems
    assert code in {None, *(p["code"] for p in problems)}


def test_conf_check_of_a_link(run, tmp_path):
    real = tmp_path / "real.conf"
    real.write_text("ock.mmc.log_level = info\n")
    link = tmp_path / "mmc-meta.conf"
    link.symlink_to(real)
    code, out, _ = run("conf", "check", link)
    assert code == 1
    assert "symbolic link" in out
    assert str(real) in out


def test_conf_check_knows_versions(run, tmp_path):
    path = tmp_path / "mmc-meta.conf"
    path.write_text("ock.mmc.meta_service.lru_shard_count = 16\n")
    assert run("conf", "check", path, "--memcache-version", "1.3.0")[0] == 0
    assert run("conf", "check", path, "--memcache-version", "1.0.0")[0] == 1
    code, _, err = run("conf", "check", path, "--memcache-version", "9.9")
    assert code == 1
    assert "9.9" in err


def test_an_undecidable_name_asks_for_the_kind(run, tmp_path):
    path = tmp_path / "x.conf"
    path.write_text("")
    code, _, err = run("conf", "check", path)
    assert code == 2
    assert "--kind" in err


# -- usage and reach


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["plan", "--nonsense"], ["stop"], ["stop", "x", "--all"], ["purge"], ["logs"]]
)
def test_wrong_usage_exits_2_without_a_traceback(run, arguments):
    code, out, err = run(*arguments)
    assert code == 2
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    "verb", [["status"], ["events"], ["logs", "meta"], ["apply"], ["stop", "--all"], ["purge", "--yes"]]
)
def test_no_daemon_exits_3_with_what_to_do(run, tmp_path, verb):
    code, _, err = run("--socket", tmp_path / "s.sock", *verb)
    assert code == 3
    assert "no kvtierd runs here" in err
    code, out, _ = run("--socket", tmp_path / "s.sock", *verb, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (3, "daemon-unreachable")


def test_help_of_every_verb_documents_its_json(run):
    code, out, _ = run("--help")
    names = "status plan apply reload events logs start stop restart drain inventory hugepages purge plugins demo version"
    verbs = [name for name in names.split() if name in out]
    assert len(verbs) == 16
    for verb in verbs:
        code, out, _ = run(verb, "--help")
        assert code == 0
        assert "JSON" in out


def test_plugins_are_listed(run):
    code, out, _ = run("plugins", "--json")
    assert code == 0
    assert [p["drivers"] for p in json.loads(out) if p["name"] == "refengine"] == [["refengine"]]


def test_hugepages_shows_pools_and_touches_nothing(run, tmp_path):
    settings = tmp_path / "s.toml"
    settings.write_text(f'[paths]\nstate = "{tmp_path}/state"\n[pool]\ndram = "1GiB"\n')
    code, out, _ = run("hugepages", "--settings", settings, "--json")
    assert code == 0
    assert set(json.loads(out)) == {"pools", "raised"}
    assert [p.name for p in tmp_path.iterdir()] == ["s.toml"]
    code, out, _ = run("hugepages", "release", "--settings", settings)
    assert (code, out) == (0, "kvtierd has reserved nothing here\n")


# -- what status shows


def shown(reply, width=100, capsys=None):
    console = _console()
    console.width = width
    with console.capture() as capture:
        console.print(render(reply))
    return capture.get()


def test_status_shows_unknown_as_a_dash_and_zero_as_zero():
    now = time.time()
    tiers = [
        pb.Tier(name="L1", where="engine", state="ready", query_tokens=10, hit_tokens=0, hit_rate=0.0),
        pb.Tier(name="L3", where="pool", state="degraded", capacity_bytes=0),
    ]
    text = shown(pb.StatusReply(node="n", tiers=tiers, at=now, started=now - 5))
    l1, l3 = (next(line for line in text.splitlines() if line.startswith(name)) for name in ("L1", "L3"))
    assert "0.0%" in l1
    assert "0 / 10" in l1
    assert "0 B" in l3
    assert "%" not in l3


def test_status_is_readable_at_80_columns_and_says_emulated_and_problems():
    unit = pb.Unit(
        id="kvtier-engine-ref", state="failed", reason="exit 1; trying again cannot help: " + "x" * 60
    )
    reply = pb.StatusReply(node="n", emulated=True, units=[unit], problems=["kvtier-engine-ref has failed"])
    text = shown(reply, width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "EMULATED" in text
    assert "! kvtier-engine-ref has failed" in text


def test_every_example_plans_on_some_recorded_host(run):
    hosts = {
        "single-host-a2": "a2-2cards", "two-hosts-a2": "a2-8cards", "a3-standalone": "a3-16dies",
        "sglang-a3": "a3-16dies", "emulation": "emulated-small",
    }  # fmt: skip
    assert set(hosts) == {p.stem for p in Path("examples").glob("*.toml")}
    for example, host in hosts.items():
        node = ["--node", "host-a"] if example == "two-hosts-a2" else []
        code, out, err = run(
            "plan",
            "--settings",
            f"examples/{example}.toml",
            "--inventory",
            f"tests/fixtures/inventory/{host}.json",
            *node,
        )
        assert code == 0, out + err


def test_status_shows_what_an_operator_did_to_an_engine_as_a_remark():
    now = time.time()
    units = [pb.Unit(id="kvtier-engine-ref", state="ready", remark="without L3: detached by an operator")]
    text = shown(pb.StatusReply(node="n", units=units, at=now, started=now - 5), width=140)
    assert "without L3: detached by an operator" in text
    assert "!" not in text


class FakeClient:
    """The control service, as far as l3 asks it."""

    asked = ()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def switch_l3(self, unit, *, on, wait_seconds):
        FakeClient.asked = (unit, on, wait_seconds)
        if unit == "busy":
            raise UnitError("busy was not without requests for 5 s", hint="wait longer", code="engine.busy")
        return pb.SwitchL3Reply(unit=f"kvtier-engine-{unit}", on=on, seconds=1.5, note="L3 is as asked")


def test_l3_detach_and_attach(run, monkeypatch):
    monkeypatch.setattr("kvtierd.cli.l3.connect", lambda settings, socket: FakeClient())
    code, out, _ = run("l3", "detach", "ref", "--deadline", "5")
    assert (code, out) == (0, "kvtier-engine-ref: L3 is as asked\n")
    assert FakeClient.asked == ("ref", False, 5.0)
    code, out, _ = run("l3", "attach", "ref", "--json")
    assert (code, json.loads(out)["on"]) == (0, True)
    assert FakeClient.asked == ("ref", True, 60.0)
    code, _, err = run("l3", "detach", "busy")
    assert code == 1
    assert "wait longer" in err
    assert run("l3", "detach")[0] == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"role": "master", "master": "a", "epoch": 4}, "this node is the master, epoch 4"),
        (
            {"role": "follower", "master": "b", "epoch": 4, "view_age_seconds": 2.0},
            "b is the master, epoch 4",
        ),
        (
            {"role": "follower", "master": "b", "epoch": 4, "view_age_seconds": 90.0},
            "last heard of 1m30s ago",
        ),
        (
            {"role": "unknown", "master_why": "etcd does not answer"},
            "no master is known: etcd does not answer",
        ),
        ({}, ""),
    ],
)
def test_status_tells_the_node_s_part_in_its_cluster(fields, told):
    from rich.console import Console

    from kvtierd.cli.status import render
    from kvtierd.control.v1 import control_pb2 as pb

    console = Console(width=140, record=True, file=io.StringIO())
    console.print(render(pb.StatusReply(node="a", version="0.1.0", backend="shim", **fields)))
    text = console.export_text()
    assert told in text
    assert ("master" in text) == bool(fields)


def test_peers_are_a_table_that_tells_the_truth(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    from kvtierd.cli.cluster import _show
    from kvtierd.control.v1 import control_pb2 as pb

    peers = [
        pb.Peer(name="a", address="10.0.0.1", voter=True, this_node=True, role="master", epoch=4, version="0.1.0"),
        pb.Peer(name="b", address="10.0.0.2", role="follower", last_contact_seconds=2.0, clock_offset_seconds=-0.5),
        pb.Peer(name="w", address="10.0.0.3", voter=True, witness=True, problem="no route"),
    ]  # fmt: skip
    reply = pb.PeersReply(
        cluster="prod", mode="lease", role="master", epoch=4, master="a", lease_left_seconds=4.25, paused=True, peers=peers,
        problems=["w: no route"],
    )  # fmt: skip
    _show(reply, as_json=False)
    told = capsys.readouterr().out
    for text in ("cluster prod (mode lease)", "master a", "epoch 4", "lease ends in 4.2s", "PAUSED", "(observer)",
                 "(witness)", "2.0s ago", "never", "-0.50s", "! w: no route"):  # fmt: skip
        assert text in told, told
    _show(reply, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["peers"][2]["last_contact_seconds"] is None
    assert found["lease_left_seconds"] == 4.25


def test_promote_without_force_says_what_it_would_mean(capsys):
    from kvtierd.cli.cluster import promote
    from kvtierd.errors import UsageError

    with pytest.raises(UsageError, match="without asking the old one"):
        promote()
