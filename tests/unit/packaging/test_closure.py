"""What of the lock goes into the packages."""

import pytest
from kvpack.closure import OURS, closure, locked

LOCK = """\
alpha==1.0 \\
    --hash=sha256:aa \\
    --hash=sha256:bb
beta==2.0 ; sys_platform == 'win32' \\
    --hash=sha256:cc
gamma==3.0 ; python_full_version < '3' \\
    --hash=sha256:dd
gamma==3.1 ; python_full_version >= '3' \\
    --hash=sha256:ee
"""


@pytest.fixture
def lock(tmp_path):
    file = tmp_path / "requirements.lock"
    file.write_text(LOCK)
    return file


def test_entries_keep_their_hashes_and_fit_this_interpreter(lock):
    entries = locked(lock, {"Alpha", "gamma", "kvtierd"})
    assert list(entries) == ["alpha", "gamma"]
    assert entries["alpha"].count("--hash") == 2
    assert entries["gamma"].startswith("gamma==3.1")


def test_what_is_not_locked_is_not_built(lock):
    with pytest.raises(ValueError, match="delta"):
        locked(lock, {"alpha", "delta"})
    with pytest.raises(ValueError, match="beta"):  # only for another system
        locked(lock, {"beta"})


def test_the_bundle_has_what_runs_and_nothing_for_developers():
    base = closure(["kvtierd"], extras=frozenset({"memcache"}))
    assert {"kvtierd", "grpcio", "typer", "pydantic-core", "memcache-hybrid", "memfabric-hybrid"} <= base
    assert not {"pytest", "mypy", "ruff", "numpy", "pip", "setuptools"} & base
    assert "memcache-hybrid" not in closure(["kvtierd"])


def test_plugins_bring_only_what_kvtierd_lacks():
    base = closure(["kvtierd"], extras=frozenset({"memcache"}))
    assert closure(["kvtierd-vllm"]) - base == {"kvtierd-vllm"}
    assert closure(["kvtierd-sglang"]) - base == {"kvtierd-sglang"}
    assert "numpy" in closure(["kvtierd-refengine"]) - base - OURS
