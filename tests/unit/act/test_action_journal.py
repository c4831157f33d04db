"""The journal of actions: written before and after, bounded, and alive through kill -9, damage and a full disk."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtierd.act.journal import FILE_NAME, ActionJournal
from kvtierd.decide.proposals import AddHolder, Advise, Proposal, proposal_from_json

ROOT = Path(__file__).parents[3]


def proposal(n=1, target="pool"):
    return Proposal(
        "pool-small", target, AddHolder("b", n * 1024**3), f"the pool turns over {n} times", numbers={"n": n}
    )


@pytest.fixture
def said():
    return []


@pytest.fixture
def make(tmp_path, said):
    opened = []

    def open_journal(**changes):
        opened.append(
            ActionJournal(tmp_path / "state", "a", told=said.append, **{"now": lambda: 1000.0, **changes})
        )
        return opened[-1]

    yield open_journal
    for journal in opened:
        journal.close()


def test_an_action_from_beginning_to_end(make, said):
    clock = iter([100.0, 130.0])
    journal = make(now=lambda: next(clock))
    number = journal.begin(proposal(), precondition="40 GiB of room on b", undo="remove the holder")
    journal.step(number, "hugepages are reserved", undo="remove the holder, give the hugepages back")
    (entry,) = journal.open_entries()
    assert (entry.state, entry.step, entry.ended_unix_seconds) == (
        "under way",
        "hugepages are reserved",
        None,
    )
    journal.end(number, "done", "capacity grew by 1 GiB")
    assert journal.open_entries() == []
    entry = journal.get(number)
    assert (entry.at_unix_seconds, entry.ended_unix_seconds, entry.state) == (100.0, 130.0, "done")
    assert (entry.node, entry.rule, entry.target) == ("a", "pool-small", "pool")
    assert entry.what == "add a pool holder of 1 GiB on b"
    assert entry.why == "the pool turns over 1 times"
    assert entry.undo == "remove the holder, give the hugepages back"
    assert entry.outcome == "capacity grew by 1 GiB"
    assert proposal_from_json(entry.proposal) == proposal()
    assert said == []


def test_entries_come_back_in_order_and_by_target(make):
    journal = make()
    for i in range(5):
        journal.note(proposal(i, target="pool" if i % 2 else "engine"), "dry run", "would have")
    assert [e.why[-7:-6] for e in journal.last(3)] == ["2", "3", "4"]
    assert [e.target for e in journal.last(target="engine")] == ["engine"] * 3
    assert journal.last()[0].ended_unix_seconds == 1000.0
    assert journal.get(99) is None


def test_what_is_there_is_there_after_a_restart(make):
    make().note(proposal(), "said")
    assert [e.state for e in make().last()] == ["said"]


def test_an_action_whose_process_ended_is_half_done_at_the_next_start(make):
    journal = make()
    ended, cut = journal.begin(proposal(1)), journal.begin(proposal(2))
    journal.end(ended, "failed", "no room")
    journal.step(cut, "the holder is starting")
    again = make()
    (entry,) = again.open_entries()
    assert (entry.id, entry.state, entry.step) == (cut, "half done", "the holder is starting")
    assert "ended while" in entry.outcome
    again.end(cut, "undone", "the holder was removed")
    assert make().open_entries() == []


def test_it_is_bounded_and_what_is_under_way_stays(make):
    journal = make(kept_rows=100)
    first = journal.begin(proposal())
    for i in range(2000):
        journal.note(proposal(i), "said")
    kept = journal.last(10_000)
    assert len(kept) <= 100 + 500 + 1
    assert kept[0].id == first
    assert kept[-1].id == 2001
    size = journal.path.stat().st_size
    for i in range(2000):
        journal.note(proposal(i), "said")
    assert journal.path.stat().st_size <= 1.2 * size
    assert make(kept_rows=100).last(10_000)[-1].id == 4001
    assert journal.get(4000) is not None


def test_half_done_ones_go_too_in_the_end(make):
    journal = make(kept_rows=10)
    journal.begin(proposal())
    again = make(kept_rows=10)
    for i in range(1100):
        again.note(proposal(i), "said")
    assert again.open_entries() == []


def test_a_long_text_is_cut(make):
    journal = make()
    journal.note(Proposal("x", "pool", Advise("a" * 100_000), "b" * 100_000), "said", "c" * 100_000)
    (entry,) = journal.last()
    assert {len(entry.what), len(entry.why), len(entry.outcome)} == {4003}


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.write_bytes(b"this is not a database at all, is it?" * 100),
        lambda p: p.write_bytes(p.read_bytes()[:100] + b"\xff" * 8000),
        lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
        lambda p: sqlite3.connect(p).execute("PRAGMA user_version = 99").connection.close(),
        lambda p: sqlite3.connect(p).execute("ALTER TABLE actions DROP COLUMN undo").connection.close(),
    ],
    ids=["text", "garbage", "half", "version", "columns"],
)
def test_a_damaged_file_is_set_aside_and_said_and_not_deleted(make, said, damage):
    journal = make()
    for i in range(50):
        journal.note(proposal(i), "said")
    journal.close()
    damage(journal.path)
    content = journal.path.read_bytes()
    again = make()
    assert again.set_aside.name == f"{FILE_NAME}.set-aside-19700101T001640Z"
    assert again.set_aside.read_bytes() == content
    assert len(said) == 1
    assert str(again.set_aside) in said[0]
    assert again.last() == []
    assert again.note(proposal(), "said") == 1
    assert again.problem == ""


def test_a_second_damaged_file_takes_nobodys_place(make):
    for _ in range(2):
        journal = make()
        journal.close()
        journal.path.write_bytes(b"x" * 5000)
    journal = make()
    names = sorted(p.name for p in journal.path.parent.glob("*set-aside*"))
    assert len(names) == 2
    assert names[1].endswith("-2")


def test_a_file_that_gets_damaged_while_it_is_open(make, said):
    journal = make()
    for i in range(200):
        journal.note(proposal(i), "said")
    journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with journal.path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (journal.path.stat().st_size - 4096))
    journal._db.execute("PRAGMA shrink_memory")
    for i in range(5):
        journal.note(proposal(i), "said")
        journal.last(1000)
    assert journal.note(proposal(), "said") > 0
    assert any("set aside" in text for text in said)


def test_a_full_disk_is_said_once_and_stops_nobody(make, said):
    journal = make()
    number = journal.begin(proposal())
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    lost = [journal.note(Proposal("x", "pool", Advise("a" * 3000), "b" * 3000), "said") for _ in range(50)]
    assert 0 in lost
    assert "full" in journal.problem
    assert len([t for t in said if "full" in t]) == 1
    assert journal.unwritten > 0
    journal.step(0, "an action that could not be written down")
    journal.end(0, "done", "it was done all the same")
    journal._db.execute("PRAGMA max_page_count = 1000000")
    journal.end(number, "done", "fine")
    assert journal.problem == ""
    assert "can be written again" in said[-1]
    assert journal.get(number).state == "done"


def test_a_directory_that_cannot_be_made_is_said(tmp_path, said):
    (tmp_path / "file").write_text("")
    journal = ActionJournal(tmp_path / "file" / "state", "a", told=said.append)
    assert journal.begin(proposal()) == 0
    assert journal.last() == []
    assert journal.problem
    assert journal.unwritten == 1
    assert len(said) == 1


def test_it_can_be_used_from_several_threads(make):
    journal = make()

    def work(name):
        for i in range(100):
            journal.end(journal.begin(proposal(i, target=name)), "done", "")

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(journal.last(1000)) == 400
    assert journal.open_entries() == []
    assert journal.problem == ""


WRITER = """
import sys
from pathlib import Path
from kvtierd.act.journal import ActionJournal
from kvtierd.decide.proposals import Advise, Proposal
journal = ActionJournal(Path(sys.argv[1]), "a")
for i in range(10**9):
    number = journal.begin(Proposal("rule", "pool", Advise(f"advice {i}"), "why " * 100))
    print("begun", number, flush=True)
    journal.end(number, "done", "fine")
    print("ended", number, flush=True)
"""


def test_kill_9_in_the_middle_loses_nothing_that_was_written_down(make):
    directory = make().path.parent
    for after in (40, 200, 333):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        lines = [process.stdout.readline() for _ in range(after)]
        os.kill(process.pid, signal.SIGKILL)
        lines += process.stdout.readlines()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        told = [re.fullmatch(r"(begun|ended) (\d+)\n", line) for line in lines]
        begun = {int(m[2]) for m in told if m and m[1] == "begun"}
        ended = {int(m[2]) for m in told if m and m[1] == "ended"}
        journal = make()
        states = {e.id: e.state for e in journal.last(100_000)}
        assert journal.problem == ""
        assert journal.set_aside is None
        assert all(states[i] == "done" for i in ended)
        assert all(states[i] in {"done", "half done"} for i in begun)
        assert len([e for e in journal.open_entries() if e.id in begun]) <= 1
        for entry in journal.open_entries():
            journal.end(entry.id, "undone", "test")
