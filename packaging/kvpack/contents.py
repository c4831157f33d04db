"""The files of each package beside the interpreter: units, manuals, completion, documentation, the settings file."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

from kvpack import completion, conffile, man
from kvpack.stage import write_gzip, write_text

SYSTEM = {
    "kvtierd.service": "usr/lib/systemd/system/kvtierd.service",
    "kvtierd-hugepages.service": "usr/lib/systemd/system/kvtierd-hugepages.service",
    "kvtierd.slice": "usr/lib/systemd/system/kvtierd.slice",
    "kvtierd.preset": "usr/lib/systemd/system-preset/80-kvtierd.preset",
    "kvtierd.sysusers": "usr/lib/sysusers.d/kvtierd.conf",
    "kvtierd.tmpfiles": "usr/lib/tmpfiles.d/kvtierd.conf",
}
IN_CONTAINER = "usr/lib/kvtierd/in-container"
EXAMPLE_DROP_INS = ("emulation.conf",)
DEBIAN_ONLY, RPM_ONLY = "deb", "rpm"


def stage_system(root: Path, source: Path, *, version: str, epoch: int) -> None:
    """What belongs to both formats of the package kvtierd."""
    for name, target in SYSTEM.items():
        write_text(root / target, (source / "systemd" / name).read_text(encoding="utf-8"))
    text = (source / "packaging/in-container.sh").read_text(encoding="utf-8")
    write_text(root / IN_CONTAINER, text, 0o755)
    write_text(root / "etc/kvtierd/kvtierd.toml", conffile.render())
    (root / "etc/kvtierd/conf.d").mkdir(parents=True)
    date = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%d")
    for name, text in man.pages(version, date).items():
        write_gzip(root / f"usr/share/man/man{name[-1]}" / f"{name}.gz", text)
    write_text(root / "usr/share/bash-completion/completions/kvtierctl", completion.bash())
    documents = root / "usr/share/doc/kvtierd"
    for path in sorted((source / "examples").glob("*.toml")):
        write_text(documents / "examples" / path.name, path.read_text(encoding="utf-8"))
    for name in EXAMPLE_DROP_INS:
        text = (source / "systemd" / name).read_text(encoding="utf-8")
        write_text(documents / "examples/kvtierd.service.d" / name, text)
    for path in sorted((source / "docs").glob("*.md")):
        if path.name != "benchmarks.md":
            write_text(documents / path.name, path.read_text(encoding="utf-8"))
    for path in sorted((source / "docs/dashboards").iterdir()):
        write_text(documents / "dashboards" / path.name, path.read_text(encoding="utf-8"))


def stage_format(
    root: Path, source: Path, *, package: str, form: str, full_version: str, maintainer: str, epoch: int
) -> None:
    """What only one format of a package has: where it wants licence, changes and zsh's completion."""
    if package == "kvtierd":
        zsh = "vendor-completions" if form == DEBIAN_ONLY else "site-functions"
        write_text(root / f"usr/share/zsh/{zsh}/_kvtierctl", completion.zsh())
    documents = root / "usr/share/doc" / package
    changes = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    if form == RPM_ONLY:
        write_text(
            root / "usr/share/licenses" / package / "LICENSE",
            (source / "LICENSE").read_text(encoding="utf-8"),
        )
        write_text(documents / "CHANGELOG.md", changes)
        return
    write_gzip(documents / "changelog.gz", changes)
    when = datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S +0000")
    write_gzip(
        documents / "changelog.Debian.gz",
        f"{package} ({full_version}) unstable; urgency=medium\n\n  * What changed is in changelog.gz.\n\n"
        f" -- {maintainer}  {when}\n",
    )
    write_text(documents / "copyright", copyright_file(package, bundled=BUNDLED.get(package, "")))
    overrides = source / "packaging/lintian" / f"{package}.overrides"
    if overrides.exists():
        write_text(root / "usr/share/lintian/overrides" / package, overrides.read_text(encoding="utf-8"))


BUNDLED = {
    "kvtierd": "Libraries from the Python package index: each with its own licence, in *.dist-info beside it."
    " MemCache and MemFabric (memcache_hybrid, memfabric_hybrid) are under the Mulan Permissive Software License v2.",
    "kvtierd-plugin-refengine": "Libraries from the Python package index, such as NumPy and aiohttp:"
    " each with its own licence, in *.dist-info beside it.",
}


def copyright_file(package: str, *, bundled: str) -> str:
    """Debian's machine-readable statement."""
    text = (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        f"Upstream-Name: {package}\n\n"
        "Files: *\nCopyright: 2026 the authors of kvtierd\nLicense: Apache-2.0\n"
    )
    if bundled:
        text = text.replace("\n\nFiles", f"\nComment: {bundled}\n\nFiles", 1)
    return text + (
        "\nLicense: Apache-2.0\n On Debian systems the full text of the Apache License, Version 2.0, is in\n"
        " /usr/share/common-licenses/Apache-2.0.\n"
    )


def project_version(source: Path) -> str:
    """The version kvtierd gives itself."""
    text = (source / "kvtierd/__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "([^"]+)"', text)
    assert match is not None, "kvtierd/__init__.py has no __version__"
    return match[1]
