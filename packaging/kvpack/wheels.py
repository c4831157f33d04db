"""The wheels a package is made of: downloaded by the lock's hashes for the target, or built from the checkout."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# The oldest C library that MemCache's wheels take is 2.28.
PLATFORMS = {
    arch: (f"manylinux_2_28_{arch}", f"manylinux2014_{arch}", f"manylinux_2_17_{arch}")
    for arch in ("x86_64", "aarch64")
}
SOURCE_ONLY = frozenset({"sdnotify"})  # pure Python; PyPI has no wheel of it


def target_options(arch: str) -> list[str]:
    """pip's options for a target of this architecture with this very version of Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = [
        "--implementation",
        "cp",
        "--python-version",
        version,
        "--abi",
        f"cp{version.replace('.', '')}",
    ]
    options += ["--abi", "abi3", "--abi", "none"]
    return options + [word for name in PLATFORMS[arch] for word in ("--platform", name)]


def download(entries: Mapping[str, str], arch: str, cache: Path) -> list[Path]:
    """Wheels of these entries of the lock. What was downloaded once for the same entries is used again.

    Raises:
        subprocess.CalledProcessError: pip says why, for example a hash that differs.
    """
    key = hashlib.sha256("".join(entries.values()).encode()).hexdigest()[:16]
    directory = cache / f"wheels-{arch}-{sys.version_info.major}.{sys.version_info.minor}-{key}"
    done = directory / ".complete"
    if not done.exists():
        directory.mkdir(parents=True, exist_ok=True)
        ready = {name: text for name, text in entries.items() if name not in SOURCE_ONLY}
        _pip("download", *_required(ready, directory), "--dest", str(directory), "--only-binary", ":all:",
             *target_options(arch))  # fmt: skip
        source = {name: text for name, text in entries.items() if name in SOURCE_ONLY}
        if source:
            _pip(
                "wheel", *_required(source, directory), "--wheel-dir", str(directory), "--no-build-isolation"
            )
        done.touch()
    return sorted(directory.glob("*.whl"))


def build(projects: Sequence[Path], directory: Path, epoch: int) -> list[Path]:
    """Wheels of our own projects. ``epoch``: the time written into them, unix seconds."""
    directory.mkdir(parents=True, exist_ok=True)
    for project in projects:
        _pip(
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(directory),
            str(project),
            epoch=epoch,
        )
    return sorted(directory.glob("*.whl"))


def install(wheels: Sequence[Path], site: Path, arch: str) -> None:
    """Unpacks wheels into a site directory."""
    if wheels:
        _pip("install", "--no-deps", "--no-index", "--no-compile", "--target", str(site), "--only-binary", ":all:",
             *target_options(arch), *map(str, wheels))  # fmt: skip


def _required(entries: Mapping[str, str], directory: Path) -> list[str]:
    file = directory / ("source.txt" if entries.keys() <= SOURCE_ONLY else "binary.txt")
    file.write_text("".join(entries.values()), encoding="utf-8")
    return ["--no-deps", "--require-hashes", "--requirement", str(file)]


def _pip(*arguments: str, epoch: int | None = None) -> None:
    environment = dict(os.environ)
    if epoch is not None:
        environment["SOURCE_DATE_EPOCH"] = str(epoch)
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        check=True,
        env=environment,
    )
