"""Signed packages, with a key made for the test."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from debian import ROOT
from kvpack.nfpm import Package, Release, make

PACKAGE = Package("kvtierd-signed", "noarch", "A package to sign", "Only for a test.")


def run(*command: str, cwd: Path | None = None, home: Path | None = None) -> str:
    environment = {**os.environ, **({"GNUPGHOME": str(home)} if home else {})}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def home(tmp_path: Path):
    """A key ring of its own with one key; its agent ends with the test."""
    if not shutil.which("gpg"):
        pytest.skip("gpg is missing: apt-get install gnupg")
    directory = tmp_path / "gnupg"
    directory.mkdir(mode=0o700)
    run("gpg", "--batch", "--passphrase", "", "--quick-gen-key", "Test <test@example.org>", "rsa3072", "sign", "never",
        home=directory)  # fmt: skip
    (tmp_path / "key.asc").write_text(run("gpg", "--export-secret-keys", "--armor", home=directory))
    (tmp_path / "public.asc").write_text(run("gpg", "--export", "--armor", home=directory))
    yield directory
    run("gpgconf", "--kill", "all", home=directory)


def build(tmp_path: Path, form: str, *, key: Path | None) -> Path:
    root = tmp_path / "root"
    (root / "usr/share/kvtierd-signed").mkdir(parents=True, exist_ok=True)
    (root / "usr/share/kvtierd-signed/file").write_text("content\n")
    release = Release("1.0", "1", 1_700_000_000, "Test <test@example.org>", key)
    return make(
        PACKAGE, release, form, [root], ROOT / "packaging/scripts", tmp_path / "work", tmp_path / "out"
    )


def test_a_signed_deb_says_who_made_it(tmp_path: Path, home: Path) -> None:
    package = build(tmp_path, "deb", key=tmp_path / "key.asc")
    if not shutil.which("ar"):
        pytest.skip("ar is missing: apt-get install binutils")
    run("ar", "x", str(package), cwd=tmp_path)
    # What debsig-verify checks: the signature over the archive's members, one after the other.
    signed = tmp_path / "signed"
    signed.write_bytes(
        b"".join((tmp_path / n).read_bytes() for n in ("debian-binary", "control.tar.gz", "data.tar.gz"))
    )
    assert "Good signature" in run("gpg", "--verify", str(tmp_path / "_gpgorigin"), str(signed), home=home)
    signed.write_bytes(signed.read_bytes() + b"x")
    with pytest.raises(AssertionError, match="BAD signature"):
        run("gpg", "--verify", str(tmp_path / "_gpgorigin"), str(signed), home=home)


def test_debsig_verify_is_content_with_the_documented_policy(tmp_path: Path, home: Path) -> None:
    if not shutil.which("debsig-verify"):
        pytest.skip("debsig-verify is missing: apt-get install debsig-verify")
    listed = run("gpg", "--list-keys", "--with-colons", home=home)
    key_id = next(line.split(":")[4] for line in listed.splitlines() if line.startswith("pub"))
    policy = re.search(r"```xml\n(.*?)```", (ROOT / "docs/install.md").read_text(), re.DOTALL)
    assert policy is not None
    for path, content in (
        (f"etc/debsig/policies/{key_id}/kvtierd.pol", policy[1].replace("KEYID", key_id).encode()),
        (f"usr/share/debsig/keyrings/{key_id}/kvtierd.gpg", subprocess.check_output(
            ["gpg", "--export", key_id], env={**os.environ, "GNUPGHOME": str(home)})),
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(content)
    check = ("debsig-verify", "--verbose", "--root", str(tmp_path))
    assert "Verified package" in run(*check, str(build(tmp_path, "deb", key=tmp_path / "key.asc")))
    with pytest.raises(AssertionError, match=r"no origin signature|Origin Signature check failed"):
        run(*check, str(build(tmp_path, "deb", key=None)))


def test_a_passphrase_is_taken_from_the_environment(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("gpg", "--batch", "--passphrase", "open sesame", "--pinentry-mode", "loopback", "--quick-gen-key",
        "Locked <locked@example.org>", "rsa3072", "sign", "never", home=home)  # fmt: skip
    exported = run("gpg", "--batch", "--passphrase", "open sesame", "--pinentry-mode", "loopback",
                   "--export-secret-keys", "--armor", "locked@example.org", home=home)  # fmt: skip
    (tmp_path / "locked.asc").write_text(exported)
    monkeypatch.setenv("NFPM_PASSPHRASE", "open sesame")
    assert b"_gpgorigin" in build(tmp_path, "deb", key=tmp_path / "locked.asc").read_bytes()
    monkeypatch.setenv("NFPM_PASSPHRASE", "wrong")
    with pytest.raises(subprocess.CalledProcessError):
        build(tmp_path, "deb", key=tmp_path / "locked.asc")


def test_the_documented_command_reaches_the_build() -> None:
    text = (ROOT / "docs/install.md").read_text()
    (command,) = re.findall(r"(?m)^\$ (make packages PACKAGES_ARGS=.*)$", text)
    done = subprocess.run(
        [*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1].endswith("packaging/build.py --sign-with key.asc")


def test_a_signed_rpm_says_who_made_it(tmp_path: Path, home: Path) -> None:
    if not shutil.which("rpmkeys"):
        pytest.skip("rpmkeys is missing: apt-get install rpm")
    package = build(tmp_path, "rpm", key=tmp_path / "key.asc")
    keys = ("rpmkeys", "--dbpath", str(tmp_path / "rpmdb"))
    with pytest.raises(AssertionError, match="NOT OK"):
        run(*keys, "--checksig", str(package))  # the key is not known yet
    run(*keys, "--import", str(tmp_path / "public.asc"))
    assert "digests signatures OK" in run(*keys, "--checksig", str(package))


def test_an_unsigned_deb_has_no_signature(tmp_path: Path) -> None:
    package = build(tmp_path, "deb", key=None)
    assert b"_gpgorigin" not in package.read_bytes()[:100_000]
