"""The one line in a hosts file: nothing else changes, others' lines are left alone, mounted files are written in place."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import HostError
from kvtierd.host import hosts_file
from kvtierd.host.hosts_file import MARK, address_of, check_writable, point_alias, with_alias

NAME = "kvtierd-meta.prod-1"
TYPICAL = b"127.0.0.1\tlocalhost\n# 10.0.0.9 kvtierd-meta.prod-1\n\xff\xfe odd \x00\r\n::1 ip6-localhost\r\n"


def line(address: str) -> bytes:
    return f"{address}\t{NAME}\t".encode() + MARK + b"\n"


def test_the_line_is_added_changed_in_its_place_and_taken_out() -> None:
    added = with_alias(TYPICAL, NAME, "10.0.0.1")
    assert added == TYPICAL + line("10.0.0.1")
    longer = added + b"10.0.0.5 other\n"
    changed = with_alias(longer, NAME, "fd00::2")
    assert changed == TYPICAL + line("fd00::2") + b"10.0.0.5 other\n"
    assert address_of(changed, NAME) == "fd00::2"
    assert with_alias(changed, NAME, None) == TYPICAL + b"10.0.0.5 other\n"
    assert with_alias(changed, NAME, "fd00::2") == changed


def test_a_file_without_a_line_end_gets_one_only_when_a_line_follows() -> None:
    assert with_alias(b"127.0.0.1 localhost", NAME, "10.0.0.1") == b"127.0.0.1 localhost\n" + line("10.0.0.1")
    assert with_alias(b"127.0.0.1 localhost", NAME, None) == b"127.0.0.1 localhost"
    assert with_alias(b"", NAME, "10.0.0.1") == line("10.0.0.1")


def test_of_several_lines_of_ours_the_first_stays() -> None:
    data = line("10.0.0.1") + b"1.2.3.4 x\n" + line("10.0.0.2")
    assert with_alias(data, NAME, "10.0.0.3") == line("10.0.0.3") + b"1.2.3.4 x\n"


@pytest.mark.parametrize(
    "foreign", [b"10.0.0.9 KVTIERD-META.prod-1\n", b"10.0.0.9 host kvtierd-meta.prod-1 # mine"]
)
def test_somebody_else_s_line_of_the_name_is_an_error(foreign: bytes) -> None:
    with pytest.raises(HostError) as caught:
        with_alias(line("10.0.0.1") + foreign, NAME, "10.0.0.2")
    assert caught.value.stable_code == "hosts.foreign-line"
    assert "10.0.0.9" in caught.value.why


def test_another_cluster_s_line_and_names_that_only_look_alike_stay() -> None:
    data = (
        b"10.0.0.9\tkvtierd-meta.prod-2\t"
        + MARK
        + b"\n10.0.0.9 xkvtierd-meta.prod-1 kvtierd-meta.prod-1.lan\n"
    )
    assert with_alias(data, NAME, "10.0.0.1") == data + line("10.0.0.1")


@pytest.mark.parametrize(
    ("name", "address"), [("a b", "10.0.0.1"), (NAME, "10.0.0.1 evil"), (NAME, "host"), ("a\n", "::1")]
)
def test_nothing_but_a_name_and_a_number_is_written(name: str, address: str) -> None:
    with pytest.raises(HostError) as caught:
        with_alias(b"", name, address)
    assert caught.value.stable_code == "hosts.name"


@given(st.lists(st.binary(max_size=30), max_size=8).map(b"\n".join), st.integers(0, 255))
def test_every_other_byte_stays(data: bytes, last: int) -> None:
    added = with_alias(data, NAME, f"10.0.0.{last}")
    ended = data if not data or data.endswith(b"\n") else data + b"\n"
    assert added == ended + line(f"10.0.0.{last}")
    assert with_alias(added, NAME, None) == ended


def test_the_file_is_replaced_and_keeps_mode_and_links(tmp_path: Path) -> None:
    file, link = tmp_path / "hosts", tmp_path / "link"
    file.write_bytes(TYPICAL)
    file.chmod(0o604)
    link.symlink_to(file)
    inode = file.stat().st_ino
    assert point_alias(NAME, "10.0.0.1", path=link)
    assert file.read_bytes() == TYPICAL + line("10.0.0.1")
    assert stat.S_IMODE(file.stat().st_mode) == 0o604
    assert file.stat().st_ino != inode, "a reader sees the old file or the new one"
    assert link.is_symlink()
    assert not point_alias(NAME, "10.0.0.1", path=link), "nothing to do"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hosts", "link"]


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EROFS, errno.EACCES])
def test_a_mounted_file_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(TYPICAL + line("10.20.30.40") + b"10.0.0.5 other\n")
    inode = file.stat().st_ino

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", refuse)
    assert point_alias(NAME, "10.0.0.1", path=file)
    assert file.read_bytes() == TYPICAL + line("10.0.0.1") + b"10.0.0.5 other\n"
    assert file.stat().st_ino == inode
    assert list(tmp_path.iterdir()) == [file]


def test_a_container_s_file_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(TYPICAL)
    inode = file.stat().st_ino
    assert point_alias(NAME, "10.0.0.1", path=file, in_place=True)
    assert (file.read_bytes(), file.stat().st_ino) == (TYPICAL + line("10.0.0.1"), inode)


def test_a_write_that_fails_half_way_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(TYPICAL)
    real, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:5], position)

    monkeypatch.setattr(hosts_file.os, "pwrite", full)
    with pytest.raises(HostError) as caught:
        point_alias(NAME, "10.0.0.1", path=file, in_place=True)
    assert caught.value.stable_code == "hosts.read-only"
    assert file.read_bytes() == TYPICAL


def test_what_cannot_be_written_says_how_the_service_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(TYPICAL)
    check_writable(file)
    real = os.open

    def read_only(path: object, flags: int, *rest: int, **more: int) -> int:
        if Path(str(path)) == file and flags & os.O_RDWR:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(hosts_file.os, "open", read_only)
    with pytest.raises(HostError) as caught:
        check_writable(file)
    assert caught.value.stable_code == "hosts.read-only"
    assert f"ReadWritePaths={file}" in caught.value.hint
    with pytest.raises(HostError) as missing:
        check_writable(tmp_path / "none")
    assert missing.value.stable_code == "hosts.unreadable"
    with pytest.raises(HostError):
        point_alias(NAME, "10.0.0.1", path=tmp_path)
