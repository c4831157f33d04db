"""kvtierctl plugin new, and what it writes; kvtierctl plugins."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.cli import main
from kvtierd.errors import StateError
from kvtierd.files import write_atomic
from kvtierd.plugins import load_plugins
from kvtierd.testing import new_plugin

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out, err

    return call


def test_the_skeletons_tests_pass_as_generated_without_an_install(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    code, out, _ = run("plugin", "new", "my-engine", "--dest", directory, "--json")
    made = json.loads(out)
    assert (code, made["name"], made["directory"]) == (0, "my-engine", str(directory))
    assert all((directory / file).is_file() for file in made["files"])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", directory],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
    assert "skipped" not in done.stdout
    passed = int(done.stdout.rsplit(" passed", 1)[0].rsplit(maxsplit=1)[-1])
    assert passed >= 40  # its own and the conformance suite


@pytest.mark.slow
def test_the_skeleton_is_clean_code_without_left_over_marks(run: Run, tmp_path: Path) -> None:
    run("plugin", "new", "x9-long-name", "--dest", tmp_path / "p")
    files = [p for p in (tmp_path / "p").rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".py", ".toml", ".md", ".txt"}
    assert [p for p in files if "$" in p.read_text().replace("hit$", "")] == []
    project = tomllib.loads((tmp_path / "p" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["kvtierd.plugins"] == {
        "x9-long-name": "kvtierd_x9_long_name.plugin"
    }
    for tool in (
        ["ruff", "check", "--isolated", "--select=E,F,W,B,UP,I", "--line-length=120"],
        ["mypy", "--strict"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *tool, tmp_path / "p" / "src"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout


def test_what_to_do_next_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("plugin", "new", "echo")
    assert code == 0
    assert "pytest kvtierd-echo\n" in out
    assert (tmp_path / "kvtierd-echo" / "pyproject.toml").is_file()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("name", ["My", "a_b", "a--b", "-a", "a-", "9a", "", "a b", "../a", "a" * 41, "ä"])
def test_bad_names(run: Run, tmp_path: Path, name: str) -> None:
    code, _, err = run("plugin", "new", "--dest", tmp_path / "p", "--", name)
    assert code == 2
    assert "cannot be a driver's name" in err
    assert "like my-engine" in err
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_taken(run: Run, tmp_path: Path) -> None:
    code, _, err = run("plugin", "new", "refengine", "--dest", tmp_path / "p")
    assert (code, "already installed" in err) == (2, True)


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_nothing_that_exists_is_touched(run: Run, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "p"
    if kind == "directory":
        target.mkdir()
    elif kind == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    code, _, err = run("plugin", "new", "echo", "--dest", target)
    assert (code, "is there already" in err) == (2, True)
    assert sorted(tmp_path.iterdir()) == before


def test_a_parent_that_is_missing(run: Run, tmp_path: Path) -> None:
    code, _, err = run("plugin", "new", "echo", "--dest", tmp_path / "no" / "p")
    assert (code, "is no directory" in err) == (2, True)


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def full(path: Path, data: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise StateError("no space", code="state.full")
        write_atomic(path, data)

    monkeypatch.setattr(new_plugin, "write_atomic", full)
    with pytest.raises(StateError):
        new_plugin.write_skeleton("echo", tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_plugins_lists_drivers_with_their_engines(run: Run) -> None:
    _, out, _ = run("plugins", "--json")
    (ref,) = [p for p in json.loads(out) if p["name"] == "refengine"]
    assert (ref["distribution"], ref["drivers"], ref["problem"]) == ("kvtierd-refengine", ["refengine"], "")
    (driver,) = ref["details"]
    assert (driver["package"], driver["versions"], driver["default_port"]) == ("kvtierd-refengine", "", 8100)
    _, out, _ = run("plugins")
    (line,) = [line for line in out.splitlines() if line.startswith("refengine ")]
    assert line.split() == [
        "refengine",
        "kvtierd-refengine",
        "any",
        "8100",
        "kvtierd-refengine",
        ref["version"],
        "ok",
    ]


BROKEN = """
from kvtierd_refengine.plugin import RefengineDriver
from kvtierd.hookspecs import hookimpl
class Driver(RefengineDriver):
    name = "odd"
    versions = "newest"
    default_port = 80
@hookimpl
def kvtierd_engine_drivers():
    return [Driver()]
"""


def test_plugins_names_what_is_wrong(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_plugin_module.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [
        importlib.metadata.EntryPoint("odd", "odd_plugin_module", "kvtierd.plugins"),
        importlib.metadata.EntryPoint("gone", "no_such_module", "kvtierd.plugins"),
    ]
    monkeypatch.setattr("kvtierd.plugins.load_plugins", lambda: load_plugins(entries))
    code, out, _ = run("plugins")
    assert code == 1
    odd, gone = (
        next(line for line in out.splitlines() if word in line) for word in ("odd", "no_such_module")
    )
    assert "default_port is 80" in odd
    assert "PEP 440" in odd
    assert "ModuleNotFoundError" in gone
    code, out, _ = run("plugins", "--json")
    assert [bool(p["problem"]) for p in json.loads(out)] == [True, True]
