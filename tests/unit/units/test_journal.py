from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.units import journal


def line(number: int, text: object = "text", instance: str = "run", series: str = "s1") -> bytes:
    cursor = f"s={series};i={number:x};b=b;m=m;t=t;x=x"
    return (
        json.dumps({"__CURSOR": cursor, "_SYSTEMD_INVOCATION_ID": instance, "MESSAGE": text}).encode() + b"\n"
    )


def entry(number: int, text: str = "text", series: str = "s1") -> journal.JournalEntry:
    return journal.JournalEntry(f"s={series};i={number:x};b=b", "run", text)


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a journalctl that says what it is told; its arguments are written down, one call a line."""
    calls = tmp_path / "calls"

    def make(script: str) -> Path:
        program = tmp_path / "bin" / "journalctl"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return calls

    return make


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ("plain", "plain"),
        ([255, 254, 99, 97], "\ufffd\ufffdca"),  # bytes that are no text
        (["first", "second"], "first"),  # a field twice
        ([[104, 105], "x"], "hi"),
        ("", ""),
        ([], ""),
        ("y" * 100_000, "y" * 65536),
    ],
)
def test_messages_in_every_form(message, text):
    found = journal.parse_entry(line(1, message))
    assert found is not None
    assert (found.text, found.instance) == (text, "run")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"{}",
        b'{"MESSAGE": null}',
        b'{"MESSAGE": [999]}',
        b'{"MESSAGE":"a","__CURSOR":1}',
    ],
)
def test_what_is_no_entry_is_left_out(data):
    assert journal.parse_entry(data) is None


def test_order_is_by_journald_s_numbers_within_one_series():
    assert entry(16).is_after(entry(9))
    assert not entry(9).is_after(entry(16))
    assert not entry(9).is_after(entry(9))
    assert entry(1, series="s2").is_after(entry(9))


def test_lines_are_neither_doubled_nor_out_of_order():
    lines = journal._Lines()
    for number in (5, 6, 7):
        lines.add(entry(number))
    lines.put_before([entry(n) for n in (3, 4, 5, 6)])
    for number in (4, 7, 8):  # what the follower delivers late
        lines.add(entry(number))
    assert [journal._place(e.cursor)[1] for e in lines.entries] == [3, 4, 5, 6, 7, 8]


def test_memory_is_bounded():
    lines = journal._Lines()
    for number in range(1, 1000):
        lines.add(entry(number, "z" * 60_000))
    assert sum(len(e.text) for e in lines.entries) <= journal.KEPT_CHARS
    assert lines.cut
    for number in range(1000, 3000):
        lines.add(entry(number))
    assert len(lines.entries) == journal.KEPT_LINES
    assert lines.chars == 4 * journal.KEPT_LINES


async def test_a_journalctl_that_hangs_is_ended_in_time(journalctl):
    journalctl("exec sleep 300")
    begun = time.monotonic()
    with pytest.raises(UnitError) as caught:
        await journal.read(["--lines=1"], 0.3)
    assert caught.value.stable_code == "unit.journal"
    assert time.monotonic() - begun < 3


async def test_no_journalctl_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnitError) as caught:
        await journal.read([])
    assert caught.value.stable_code == "unit.journal"


async def test_an_entry_that_is_too_long_is_left_out(
    journalctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal, "LONGEST_ENTRY_BYTES", 1000)
    (tmp_path / "out").write_bytes(line(1, "first") + line(2, "x" * 9000) + line(3, "last"))
    journalctl(f"cat {tmp_path}/out")
    assert [e.text for e in await journal.read([])] == ["first", "last"]


async def test_following_ends_with_its_child(journalctl, tmp_path: Path):
    (tmp_path / "old").write_bytes(line(1, "a") + line(2, "b"))
    (tmp_path / "new").write_bytes(line(2, "b") + line(3, "c"))
    calls = journalctl(
        f"echo $$ >{tmp_path}/pid\n"
        f'case "$*" in *--follow*) cat {tmp_path}/new; exec sleep 300;; *) cat {tmp_path}/old;; esac'
    )
    follower = journal.follow(journal.of_service("kvtier-engine-a.service"), 7)
    assert [await anext(follower) for _ in range(3)] == ["a", "b", "c"]
    pid = int((tmp_path / "pid").read_text())
    await follower.aclose()  # type: ignore[attr-defined]
    assert not Path(f"/proc/{pid}").exists()
    first, second = calls.read_text().splitlines()
    assert "--lines=7 _SYSTEMD_UNIT=kvtier-engine-a.service _TRANSPORT=stdout" in first
    assert "--follow --no-tail --after-cursor=s=s1;i=2;b=b;m=m;t=t;x=x" in second


async def test_a_journalctl_that_ends_is_an_error_for_a_follower(journalctl):
    journalctl("exit 1")
    with pytest.raises(UnitError):
        async for _ in journal.follow(journal.of_service("x.service"), 1):
            pass


async def test_a_search_reads_no_line_twice(journalctl, tmp_path: Path):
    (tmp_path / "out").write_bytes(line(1, "one") + line(2, "two"))
    calls = journalctl(f"cat {tmp_path}/out")
    search = journal.TextSearch()
    assert not await search.has("run", "three")
    (tmp_path / "out").write_bytes(line(3, "now three here"))
    assert await search.has("run", "three")
    assert await search.has("run", "three")
    first, second = calls.read_text().splitlines()
    assert "--after-cursor" not in first
    assert "--after-cursor=s=s1;i=2;b=b;m=m;t=t;x=x" in second
    assert "_SYSTEMD_INVOCATION_ID=run" in second


async def test_last_lines_come_from_memory_once_they_are_known(journalctl, tmp_path: Path):
    (tmp_path / "old").write_bytes(line(1, "one") + line(2, "two"))
    (tmp_path / "new").write_bytes(line(2, "two") + line(3, "three") + line(4, "other", "another run"))
    calls = journalctl(
        f'case "$*" in *--follow*) sleep 0.5; cat {tmp_path}/new; exec sleep 300;; *) cat {tmp_path}/old;; esac'
    )
    lines = journal.LastLines("kvtierd.slice")
    try:
        assert await lines.tail("run", 20) == ["one", "two"]
        async with asyncio.timeout(5):
            while await lines.tail("run", 1) != ["three"]:
                await asyncio.sleep(0.02)
        assert await lines.tail("run", 20) == ["one", "two", "three"]
        assert await lines.tail("run", 0) == []
        assert len(calls.read_text().splitlines()) == 2
    finally:
        await lines.close()
