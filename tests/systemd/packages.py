"""Packages for the guest: this checkout's, and one whose settings file differs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvpack.nfpm import Package, Release, make
from lab import ROOT

NEXT_VERSION, OTHER_VERSION = "99.0.0", "99.1.0"
OTHER_SETTINGS = "# What this version says about its settings.\n"


def build(out: Path, *arguments: str) -> Path:
    """Packages of this machine's architecture."""
    command = [
        sys.executable,
        str(ROOT / "packaging/build.py"),
        "--out",
        str(out),
        "--arch",
        os.uname().machine,
    ]
    subprocess.run([*command, *arguments], check=True, timeout=900, capture_output=True)
    return out


def with_other_settings(deb: Path, directory: Path, form: str) -> Path:
    """The package kvtierd once more as a yet higher version, whose settings file differs by one line."""
    root = directory / "root"
    root.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(root)], check=True)
    with (root / "etc/kvtierd/kvtierd.toml").open("a") as settings:
        settings.write(OTHER_SETTINGS)
    if form == "deb":
        control = root / "DEBIAN/control"
        control.write_text(re.sub(r"(?m)^Version: .*", f"Version: {OTHER_VERSION}-1", control.read_text()))
        path = directory / f"kvtierd_{OTHER_VERSION}.deb"
        build_it = ["dpkg-deb", "-Znone", "--root-owner-group", "--build", str(root), str(path)]
        subprocess.run(build_it, check=True, capture_output=True)
        return path
    shutil.rmtree(root / "DEBIAN")
    package = Package("kvtierd", os.uname().machine, "For a test", "For a test.", with_scripts=True)
    release = Release(OTHER_VERSION, "1", 1_700_000_000, "Test <test@example.org>")
    return make(package, release, form, [root], ROOT / "packaging/scripts", directory / "work", directory)
