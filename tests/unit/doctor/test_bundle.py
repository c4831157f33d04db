"""A bundle of a host full of planted secrets has none of them, and says what is missing."""

import asyncio
import json
import os
import sqlite3
import stat
import tarfile

import pytest

from kvtierd.checks import Check, ok
from kvtierd.control.client import ControlClient
from kvtierd.doctor.admission import admit
from kvtierd.doctor.bundle import TAIL_BYTES, journal_lines, tail, write_bundle
from kvtierd.errors import KvtierError
from kvtierd.plugins import PluginSet

PLANTED = "pl4nted-s3cret"
CHECK = Check("x.y", "t", "w", "f", lambda _: ok(f"token={PLANTED}"))


def content(path):
    with tarfile.open(path) as archive:
        return {
            m.name.partition("/")[2]: archive.extractfile(m).read().decode()
            for m in archive.getmembers()
            if m.isfile()
        }


@pytest.fixture
def host(tmp_path):
    for name in ("state/conf", "state/engines/e", "logs/units", "root/.commands", "conf.d", "run"):
        (tmp_path / name).mkdir(parents=True)
    settings = tmp_path / "kvtierd.toml"
    settings.write_text(
        f'[node]\nseries = "emulated"\n[paths]\nstate = "{tmp_path}/state"\nlogs = "{tmp_path}/logs"\n'
        f'runtime = "{tmp_path}/run"\n[pool]\ndram = "1GiB"\n[[engine]]\nname = "e"\nplugin = "refengine"\n'
        f'env = {{ HF_TOKEN = "{PLANTED}", PATH_X = "/a" }}\nargs = {{ api-key = "{PLANTED}" }}\n'
    )
    (tmp_path / "conf.d" / "10.toml").write_text(f'# password: {PLANTED}\n[node]\nname = "n"\n')
    (tmp_path / "state" / "conf" / "mmc-meta.conf").write_text("ock.mmc.log_level = info\n")
    secret_file = tmp_path / "state" / "engines" / "e" / "admin.key"
    secret_file.write_text("admin-api-key: kn0wn-to-be-a-secret-word\n")
    secret_file.chmod(0o600)
    (tmp_path / "logs" / "units" / "e.log").write_text(
        f"INFO --api-key {PLANTED}\nusing kn0wn-to-be-a-secret-word\nAuthorization: Bearer {PLANTED}\n277,760 tokens\n"
    )
    (tmp_path / "logs" / "units" / "link.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "logs" / "units" / "pipe.log")
    with sqlite3.connect(tmp_path / "state" / "actions.sqlite") as db:
        db.execute("CREATE TABLE actions (id INTEGER PRIMARY KEY, what TEXT)")
        db.execute("INSERT INTO actions (what) VALUES (?)", (f"set password={PLANTED}",))
    (tmp_path / "root" / ".commands" / "ps -eo pid,ppid,user,rss,etimes,stat,args --sort=-rss").write_text(
        f"1 0 root vllm serve --api-key={PLANTED}\n"
    )
    return tmp_path


def bundle_of(host, **more):
    patient = admit(PluginSet({}, ()), root=host / "root", settings_file=host / "kvtierd.toml")
    output = host / "b.tar.gz"
    client = ControlClient(host / "run" / "kvtierd.sock")
    return asyncio.run(write_bundle(output, patient, (CHECK,), client, **more))


def test_no_planted_secret_is_in_it_and_what_helps_is(host):
    bundle = bundle_of(host)
    files = content(bundle.path)
    for name, text in files.items():
        assert PLANTED not in text, name
        assert "kn0wn-to-be" not in text, name
    assert 'HF_TOKEN = "***"' in files["settings.toml"]
    assert 'name = "n"' in files["settings.toml"]
    assert "277,760 tokens" in files["logs/units/e.log"]
    assert files["state/conf/mmc-meta.conf"] == "ock.mmc.log_level = info\n"
    assert json.loads(files["journal.jsonl"]) == {"id": 1, "what": "set password=***"}
    assert json.loads(files["doctor.json"])[0]["found"] == "token=***"
    assert "vllm serve --api-key=***" in next(text for name, text in files.items() if "ps -eo" in name)
    assert not any("link.log" in name or "pipe.log" in name or "admin.key" in name for name in files)


def test_it_is_private_and_its_manifest_says_what_is_not_there(host):
    bundle = bundle_of(host)
    assert stat.S_IMODE(bundle.path.stat().st_mode) == 0o600
    manifest = content(bundle.path)["MANIFEST.txt"]
    assert "status.json  NOT THERE: " in manifest
    assert {part.name for part in bundle.parts if part.problem} >= {
        "status.json",
        "peers.json",
        "events.jsonl",
    }
    assert {part.name for part in bundle.parts if not part.problem} == content(bundle.path).keys() - {
        "MANIFEST.txt"
    }


def test_its_size_is_bounded_and_what_matters_most_comes_first(host):
    (host / "logs" / "units" / "e.log").write_text("x" * 300_000)
    bundle = bundle_of(host, most_bytes=100_000)
    assert sum(part.size_bytes for part in bundle.parts) <= 100_000
    assert next(part for part in bundle.parts if part.name == "logs/units/e.log").problem.startswith(
        "left out"
    )
    assert "doctor.json" in content(bundle.path)


def test_an_output_that_is_there_is_not_overwritten(host):
    (host / "b.tar.gz").write_text("mine")
    with pytest.raises(KvtierError) as caught:
        bundle_of(host)
    assert caught.value.stable_code == "bundle.write"
    assert (host / "b.tar.gz").read_text() == "mine"


def test_of_a_long_file_the_end_from_a_whole_line_on(tmp_path):
    path = tmp_path / "long"
    path.write_bytes(b"".join(b"line %d \xff\n" % n for n in range(200_000)))
    text = tail(path)
    assert len(text) <= TAIL_BYTES + 100
    assert text.startswith("[the last")
    assert text.splitlines()[1].startswith("line ")
    assert text.endswith("line 199999 \ufffd\n")


def test_a_directory_or_a_pipe_where_a_file_should_be(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        tail(tmp_path / "pipe")
    with pytest.raises(OSError, match="directory"):
        tail(tmp_path)


def test_a_journal_that_is_damaged_is_an_error_that_can_be_told(tmp_path):
    (tmp_path / "j").write_text("no database")
    with pytest.raises(sqlite3.Error):
        journal_lines(tmp_path / "j")
