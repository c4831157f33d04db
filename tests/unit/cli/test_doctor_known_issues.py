import json
import socket
import time

import pytest
from typer.testing import CliRunner

from kvtierd.cli.app import app
from kvtierd.cli.doctor import DAEMON_SECONDS, _ask_daemon


def run(*words):
    return CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "80", "NO_COLOR": "1"})


def test_the_table_fits_a_terminal_and_names_every_issue():
    shown, listed = run("--known-issues"), json.loads(run("--known-issues", "--json").stdout)["issues"]
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert f"{len(listed)} known issues" in shown.stdout
    words = "".join(shown.stdout.split())
    assert all("".join(issue["id"].split()) in words for issue in listed)


def test_the_json_has_the_documented_fields():
    listed = json.loads(run("--known-issues", "--json").stdout)["issues"]
    fields = {"id", "component", "versions", "when", "severity", "handled", "title", "advice", "source"}
    assert all(set(issue) == fields for issue in listed)


@pytest.mark.parametrize("kind", ["absent", "file", "deaf"])
def test_no_daemon_is_an_ordinary_state_and_takes_no_time(tmp_path, monkeypatch, kind):
    path = tmp_path / "kvtierd.sock"
    monkeypatch.setenv("KVTIERD_SOCKET", str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "file":
            path.write_text("")
        elif kind == "deaf":
            listener.bind(str(path))
            listener.listen()
        began = time.monotonic()
        assert _ask_daemon(None) is None
        assert time.monotonic() - began < DAEMON_SECONDS + 5
