"""Lays out what a package installs, below a directory that stands for /.

The bundled interpreter directory is a virtual environment at its final path, /usr/lib/kvtierd, without pip and
activate: ``bin/python`` leads to the distribution's own Python X.Y, so its security updates are the distribution's.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpack import wheels

HOME = "usr/lib/kvtierd"
X_Y = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"{HOME}/lib/python{X_Y}/site-packages"
# Where other packages and the administrator put plugins; both may be missing.
PLUGIN_DIRECTORIES = ("/usr/lib/kvtierd/plugins", "/usr/local/lib/kvtierd/plugins")
PROGRAMS = {"kvtierctl": "kvtierd.cli", "kvtierd": "kvtierd.daemon"}
LAUNCHER = """\
#!/usr/lib/kvtierd/bin/python -I
import sys
from {module} import main

sys.exit(main())
"""
# Parts of libraries that only their own developers use.
NOT_INSTALLED = ("tests", "_pyinstaller", "conftest.py", "include", "pkgconfig", ".agents")
# Kept whole: MemFabric brings sources that it compiles on the host.
KEPT_WHOLE = ("kvtierd", "memcache_hybrid", "memfabric_hybrid")
SOURCES = frozenset({".c", ".h", ".hpp", ".pyx", ".pxd", ".pxi", ".in", ".cc", ".a", ".pc"})
# Only for pip, or with the path of the machine that built it.
NOT_KEPT_OF_METADATA = ("RECORD", "direct_url.json", "REQUESTED", "INSTALLER")


def stage_interpreter(root: Path) -> None:
    """The interpreter directory without anything installed in it, and the programs on PATH."""
    home = root / HOME
    (home / "bin").mkdir(parents=True)
    (root / SITE).mkdir(parents=True)
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {X_Y}\n", encoding="ascii"
    )
    (home / "bin" / "python").symlink_to(f"../../../bin/python{X_Y}")
    (home / "bin" / "python3").symlink_to("python")
    for name, module in PROGRAMS.items():
        program = home / "bin" / name
        program.write_text(LAUNCHER.format(module=module), encoding="ascii")
        program.chmod(0o755)
    _link(root / "usr/bin/kvtierctl", "../lib/kvtierd/bin/kvtierctl")
    _link(root / "usr/sbin/kvtierd", "../lib/kvtierd/bin/kvtierd")
    (root / SITE / "kvtierd-plugins.pth").write_text("\n".join(PLUGIN_DIRECTORIES) + "\n", encoding="ascii")


def stage_distributions(root: Path, files: Sequence[Path], arch: str) -> None:
    """Wheels, unpacked, cleaned and compiled."""
    site = root / SITE
    wheels.install(files, site, arch)
    shutil.rmtree(site / "bin", ignore_errors=True)  # programs of libraries: none of them is kvtierd's
    _clean(site)
    _set_modes(site)
    _compile(root)


def _clean(site: Path) -> None:
    for path in sorted(site.rglob("*"), key=lambda p: len(p.parts), reverse=True):
        relative = path.relative_to(site)
        whole = relative.parts[0].startswith(KEPT_WHOLE)
        in_metadata = relative.parts[0].endswith(".dist-info")
        unwanted = not whole and not in_metadata and (path.name in NOT_INSTALLED or path.suffix in SOURCES)
        if unwanted or (in_metadata and path.name in NOT_KEPT_OF_METADATA) or path.name == "__pycache__":
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _set_modes(site: Path) -> None:
    for path in sorted(site.rglob("*")):
        if path.is_symlink():
            continue
        if path.is_dir():
            path.chmod(0o755)
            continue
        with path.open("rb") as stream:
            start = stream.read(4)
        # Programs that a library brings stay programs; libraries and modules are data to the file system.
        program = start == b"\x7fELF" and ".so" not in path.name and path.stat().st_mode & 0o100
        path.chmod(0o755 if program else 0o644)


def _compile(root: Path) -> None:
    """Byte code beside each module: it is never checked against the source, whose time packages change."""
    subprocess.run(
        [sys.executable, "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash",
         "-s", str(root), "-p", "/", str(root / HOME / "lib")],
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip


def write_gzip(path: Path, text: str) -> None:
    """A compressed text without name and time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """A text file and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
