"""The files that MemCache's TLS reads: real files with the modes that it wants, from originals that have others."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvtierd.errors import HostError
from kvtierd.host.memcache_tls import find_openssl, prepare_tls
from kvtierd.plan.model import MemcacheTls


@pytest.fixture
def tls(tmp_path: Path) -> MemcacheTls:
    originals = tmp_path / "etc"
    originals.mkdir()
    for name in ("ca.pem", "node.pem", "node.key"):
        (originals / f"real-{name}").write_text(f"content of {name}")
        (originals / name).symlink_to(f"real-{name}")  # as certbot does
    libraries = tmp_path / "lib"
    libraries.mkdir()
    for name in ("libssl.so", "libcrypto.so"):
        (libraries / f"{name}.3.0.1").write_text(name)
        (libraries / f"{name}.3").symlink_to(f"{name}.3.0.1")
    return MemcacheTls(
        directory=str(tmp_path / "run" / "memcache-tls"), ca=str(originals / "ca.pem"),
        cert=str(originals / "node.pem"), key=str(originals / "node.key"), openssl=str(libraries),
    )  # fmt: skip


def mode(path: Path) -> int:
    status = path.lstat()
    assert not stat.S_ISLNK(status.st_mode)
    return stat.S_IMODE(status.st_mode)


def test_copies_are_real_files_with_the_modes_that_memcache_wants(tls: MemcacheTls) -> None:
    assert len(prepare_tls(tls, None)) == 5
    made = Path(tls.directory)
    assert {p.name: mode(p) for p in made.iterdir() if p.is_file()} == {
        "ca.pem": 0o400, "node.pem": 0o400, "node.key": 0o400,
    }  # fmt: skip
    assert {p.name: mode(p) for p in (made / "openssl").iterdir()} == {
        "libssl.so": 0o500, "libcrypto.so": 0o500,
    }  # fmt: skip
    assert mode(made) & 0o077 == 0
    assert (made / "node.key").read_text() == "content of node.key"
    assert mode(Path(tls.key).resolve()) != 0o400, "the original keeps its mode"


def test_only_what_changed_is_copied_again(tls: MemcacheTls) -> None:
    prepare_tls(tls, None)
    assert prepare_tls(tls, None) == []
    Path(tls.cert).resolve().write_text("renewed")
    assert [Path(p).name for p in prepare_tls(tls, None)] == ["node.pem"]
    (Path(tls.directory) / "node.key").chmod(0o444)
    assert [Path(p).name for p in prepare_tls(tls, None)] == ["node.key"]


def test_a_missing_certificate_says_who_makes_them(tls: MemcacheTls) -> None:
    Path(tls.key).unlink()
    with pytest.raises(HostError) as caught:
        prepare_tls(tls, None)
    assert caught.value.stable_code == "tls.unreadable"
    assert "kvtierctl certs" in caught.value.hint
    assert "content of" not in str(caught.value)


def test_both_libraries_come_from_one_directory(tmp_path: Path) -> None:
    for directory, names in {"a": ["libssl.so.3"], "b": ["libssl.so.1.1", "libcrypto.so.1.1"]}.items():
        (tmp_path / directory).mkdir()
        for name in names:
            (tmp_path / directory / name).touch()
    found = find_openssl([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [f.parent.name for f in found] == ["b", "b"]
    with pytest.raises(HostError) as caught:
        find_openssl([str(tmp_path / "a")])
    assert caught.value.stable_code == "tls.no-openssl"
