from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochState
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.errors import ClusterError, StateError

CONFIG = ElectorConfig("prod", "a", ("a", "b", "c"))
STATE = EpochState(7, "b", 123, 7.25, 456)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster" / "epoch.json"


def code_of(call) -> str:
    with pytest.raises((ClusterError, StateError)) as caught:
        call()
    assert caught.value.hint or caught.value.why
    return caught.value.stable_code


def test_what_was_saved_is_loaded(path):
    EpochStore(path, CONFIG).save(STATE)
    assert EpochStore(path, CONFIG).load() == STATE
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_missing_file_is_no_epoch_zero(path):
    assert EpochStore(path, CONFIG).load() is None
    EpochStore(path, CONFIG).save(EpochState(0, incarnation=9))
    assert EpochStore(path, CONFIG).load() == EpochState(0, incarnation=9)


def test_every_truncation_is_refused(path):
    EpochStore(path, CONFIG).save(STATE)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert code_of(EpochStore(path, CONFIG).load) == "cluster.epoch-damaged"
        assert path.read_bytes() == whole[:length], "a damaged file is left as it is"


def test_every_changed_byte_is_refused(path):
    EpochStore(path, CONFIG).save(STATE)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for flip in (0x01, 0x10, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            assert code_of(EpochStore(path, CONFIG).load) == "cluster.epoch-damaged"


@pytest.mark.parametrize("extra", [b"\n", b"x", b"\0" * 100_000])
def test_more_than_was_written_is_refused(path, extra):
    EpochStore(path, CONFIG).save(STATE)
    path.write_bytes(path.read_bytes() + extra)
    assert code_of(EpochStore(path, CONFIG).load) == "cluster.epoch-damaged"


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b"[]\n", b"null\n", b"{}\n", b"[" * 100_000])
def test_something_else_altogether_is_refused(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    error = code_of(EpochStore(path, CONFIG).load)
    assert error == "cluster.epoch-damaged"


def test_the_error_says_what_to_do(path):
    path.parent.mkdir()
    path.write_bytes(b"\0" * 512)
    with pytest.raises(ClusterError) as caught:
        EpochStore(path, CONFIG).load()
    assert str(path) in caught.value.message
    assert "move it away" in caught.value.hint


def test_a_file_that_cannot_be_read_is_not_a_missing_one(path):
    path.mkdir(parents=True)
    assert code_of(EpochStore(path, CONFIG).load) == "state.not-readable"


@pytest.mark.parametrize("change", [{"node": "b"}, {"cluster": "other"}])
def test_another_nodes_file_is_refused(path, change):
    EpochStore(path, dataclasses.replace(CONFIG, **change)).save(STATE)
    assert code_of(EpochStore(path, CONFIG).load) == "cluster.epoch-foreign"


def test_other_voters_must_be_accepted_by_an_operator(path):
    EpochStore(path, CONFIG).save(STATE)
    more = dataclasses.replace(CONFIG, voters=("a", "b", "c", "d", "e"))
    store = EpochStore(path, more)
    assert code_of(store.load) == "cluster.voters-changed"
    store.accept_voters()
    assert EpochStore(path, more).load() == STATE
    assert code_of(EpochStore(path, CONFIG).load) == "cluster.voters-changed"


def test_accepting_does_not_make_good_what_is_damaged_or_missing(path):
    store = EpochStore(path, CONFIG)
    assert code_of(store.accept_voters) == "cluster.epoch-missing"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{")
    assert code_of(store.accept_voters) == "cluster.epoch-damaged"


def test_the_epoch_never_falls(path):
    store = EpochStore(path, CONFIG)
    store.save(STATE)
    assert code_of(lambda: store.save(EpochState(6))) == "cluster.epoch-backwards"
    again = EpochStore(path, CONFIG)
    again.load()
    with pytest.raises(ClusterError, match="must not be written over"):
        again.save(EpochState(6))
    again.save(dataclasses.replace(STATE, promise_seconds=9.0))
    assert EpochStore(path, CONFIG).load() == dataclasses.replace(STATE, promise_seconds=9.0)


def test_an_operator_can_set_an_epoch_but_not_over_a_file(path):
    made = EpochStore(path, CONFIG).create(40)
    loaded = EpochStore(path, CONFIG).load()
    assert loaded == made
    assert (loaded.epoch, loaded.granted_to) == (40, "")
    assert loaded.incarnation != 0
    assert code_of(lambda: EpochStore(path, CONFIG).create(50)) == "cluster.epoch-exists"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written(path):
    path.parent.mkdir(mode=0o500)
    assert code_of(lambda: EpochStore(path, CONFIG).save(STATE)) == "state.not-writable"


def test_a_write_that_fails_leaves_the_old_state(path, monkeypatch):
    store = EpochStore(path, CONFIG)
    store.save(STATE)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert code_of(lambda: store.save(dataclasses.replace(STATE, epoch=8))) == "state.full"
    monkeypatch.undo()
    assert EpochStore(path, CONFIG).load() == STATE
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_it_is_synced_before_it_is_renamed_and_the_directory_after(path, monkeypatch):
    seen = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor):
        seen.append("sync directory" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        fsync(descriptor)

    def note_rename(self, target):
        seen.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    EpochStore(path, CONFIG).save(STATE)
    assert seen == ["sync file", "rename", "sync directory"]


WRITER = """
import sys
from pathlib import Path
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import EpochState
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore

path, start = Path(sys.argv[1]), int(sys.argv[2])
store = EpochStore(path, ElectorConfig("prod", "a", ("a", "b", "c")))
seen = SeenEpochStore(path.with_name("seen.json"), "prod")
store.load(), seen.load()
for epoch in range(start, start + 100_000):
    store.save(EpochState(epoch, "b" * (1 + epoch % 60), epoch, 7.25, 456))
    assert seen.admit(epoch, "b")
    print(epoch, flush=True)
"""


def test_kill_9_in_the_middle_of_writes_forgets_nothing_that_was_answered(path):
    epoch = 1
    for turn in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(epoch)], stdout=subprocess.PIPE, text=True
        ) as writer:
            answered = int(writer.stdout.readline())
            time.sleep(0.003 * turn)
            writer.kill()
            rest = writer.stdout.read().split()
        answered = int(rest[-1]) if rest else answered
        state = EpochStore(path, CONFIG).load()
        # What was answered is there; at most one more had been written when the end came.
        assert answered <= state.epoch <= answered + 1
        assert state == EpochState(state.epoch, "b" * (1 + state.epoch % 60), state.epoch, 7.25, 456)
        seen = SeenEpochStore(path.with_name("seen.json"), "prod").load()
        assert answered <= seen <= answered + 1
        epoch = state.epoch + 1
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, "seen.json"], "leftovers are cleared"


# -- the fence


@pytest.fixture
def seen_path(tmp_path: Path) -> Path:
    return tmp_path / "seen.json"


def test_the_fence_lets_nobody_back(seen_path):
    fence = SeenEpochStore(seen_path, "prod")
    assert fence.load() == 0
    assert fence.admit(3, "a")
    assert fence.admit(3, "a")
    assert not fence.admit(3, "b"), "an epoch belongs to one node"
    assert not fence.admit(2, "b")
    assert fence.admit(5, "b")
    again = SeenEpochStore(seen_path, "prod")
    assert again.load() == 5
    assert again.master == "b"
    assert not again.admit(3, "a")


def test_the_fence_is_on_disk_before_a_master_is_followed(seen_path, monkeypatch):
    fence = SeenEpochStore(seen_path, "prod")
    fence.admit(3, "a")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert code_of(lambda: fence.admit(4, "b")) == "state.full"
    monkeypatch.undo()
    assert fence.epoch == 3
    assert SeenEpochStore(seen_path, "prod").load() == 3


def test_a_damaged_or_foreign_fence_is_refused(seen_path):
    SeenEpochStore(seen_path, "prod").admit(3, "a")
    assert code_of(SeenEpochStore(seen_path, "other").load) == "cluster.epoch-foreign"
    whole = seen_path.read_bytes()
    for length in range(len(whole)):
        seen_path.write_bytes(whole[:length])
        assert code_of(SeenEpochStore(seen_path, "prod").load) == "cluster.epoch-damaged"


def test_the_two_files_are_not_taken_for_each_other(path):
    SeenEpochStore(path, "prod").admit(3, "a")
    assert code_of(EpochStore(path, CONFIG).load) == "cluster.epoch-damaged"
    assert "kind" in json.loads(path.read_bytes().split(b"\n")[0])
