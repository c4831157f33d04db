from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from kvtierd.errors import HugepageError, StateError
from kvtierd.host.ledger import Entry, Intent, Ledger, settle

MIB2 = 2 * 1024 * 1024


def entry(**values: object) -> Entry:
    base = {
        "page_size_bytes": MIB2, "before_pages": 10, "asked_pages": 50, "raised_pages": 0, "others_pages": 0,
    }  # fmt: skip
    return Entry.model_validate({**base, **values})


@pytest.mark.parametrize(
    ("kernel_pages", "raised"),
    [(10, 0), (35, 25), (60, 50), (90, 50), (4, 0)],  # crash: before, during, after the write; others meddled
)
def test_an_open_intent_to_raise_is_settled_by_the_kernel(kernel_pages: int, raised: int) -> None:
    begun = entry(intent=Intent(from_pages=10, to_pages=60))
    settled = settle(begun, kernel_pages)
    assert settled.raised_pages == raised
    assert settled.intent is None


@pytest.mark.parametrize(("kernel_pages", "raised"), [(60, 50), (30, 20), (10, 0), (70, 50)])
def test_an_open_intent_to_lower_is_settled_by_the_kernel(kernel_pages: int, raised: int) -> None:
    begun = entry(raised_pages=50, intent=Intent(from_pages=60, to_pages=10))
    assert settle(begun, kernel_pages).raised_pages == raised


def test_what_others_took_away_is_no_longer_ours() -> None:
    settled = settle(entry(raised_pages=50), 25)
    assert (settled.before_pages, settled.raised_pages) == (10, 15)
    settled = settle(entry(raised_pages=50), 5)
    assert (settled.before_pages, settled.raised_pages) == (5, 0)


def test_entries_survive_and_leave_no_other_files(tmp_path: Path) -> None:
    path = tmp_path / "hugepages.json"
    ledger = Ledger(path, "b")
    with ledger.locked():
        ledger.put(entry(node=1))
        ledger.put(entry())
    again = Ledger(path, "b")
    with again.locked():
        assert again.entries() == (entry(), entry(node=1))
        again.remove(entry())
        assert again.get(MIB2, None) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hugepages.json", "hugepages.lock"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 9, "boot_id": "b", "entries": []}', "\x00\xff"])
def test_a_damaged_ledger_is_an_error_that_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hugepages.json"
    path.write_text(text)
    ledger = Ledger(path, "b")
    with pytest.raises(StateError) as caught, ledger.locked():
        pass
    assert caught.value.stable_code == "state.ledger-damaged"
    assert "move the file away" in caught.value.hint


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "hugepages.json", "b")
    with ledger.locked():
        ledger.put(entry())

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="no space to write") as caught:
            ledger.put(entry(raised_pages=9))
        assert caught.value.why == "No space left on device"
        assert ledger.entries() == (entry(),)
    monkeypatch.undo()
    with ledger.locked():
        assert ledger.entries() == (entry(),)
    assert len(list(tmp_path.iterdir())) == 2


def test_two_at_once_wait_and_then_give_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "hugepages.json", "b")
    with (tmp_path / "hugepages.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(HugepageError) as caught, ledger.locked(timeout_seconds=0.05):
            pass
    assert caught.value.stable_code == "hugepages.busy"
    with ledger.locked(timeout_seconds=0.05):
        pass
