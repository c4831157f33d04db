"""The files that the build makes: which, what is in them, and that they are the same each time."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from debian import ROOT, build_packages
from kvpack.stage import X_Y

SITE = f"/usr/lib/kvtierd/lib/python{X_Y}/site-packages"
PLUGINS = ("kvtierd-plugin-vllm", "kvtierd-plugin-sglang")


def needs(tool: str, package: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is missing: apt-get install {package}")


def deb(dist: Path, name: str = "kvtierd", arch: str = "amd64") -> Path:
    (found,) = dist.glob(f"{name}_*_{arch}.deb")
    return found


def rpm(dist: Path, name: str = "kvtierd", arch: str = "x86_64") -> Path:
    (found,) = dist.glob(f"{name}-[0-9]*.{arch}.rpm")
    return found


def deb_files(package: Path) -> dict[str, str]:
    """Path -> mode as ls writes it."""
    lines = subprocess.run(
        ["dpkg-deb", "--contents", str(package)], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(maxsplit=5) for line in lines.splitlines()]
    assert all(row[1] == "root/root" for row in rows)
    return {row[5].split(" -> ")[0].lstrip(".").rstrip("/"): row[0] for row in rows}


def test_all_packages_are_there(dist: Path) -> None:
    names = {
        p.name.split("_")[0] if p.suffix == ".deb" else p.name.split("-0")[0].split("-1")[0]
        for p in dist.iterdir()
    }
    assert names == {"kvtierd", *PLUGINS, "kvtierd-plugin-refengine"}
    assert len(list(dist.glob("kvtierd_*.deb"))) == len(list(dist.glob("kvtierd-[0-9]*.rpm"))) == 2
    for name in PLUGINS:
        assert len(list(dist.glob(f"{name}?*"))) == 2  # no machine code: one of each for every machine


def test_two_builds_are_the_same_byte_for_byte(dist: Path, tmp_path: Path) -> None:
    again = build_packages(tmp_path / "again", "--arch", "x86_64")
    assert len(again) == 8
    for path in again:
        first = hashlib.sha256((dist / path.name).read_bytes()).hexdigest()
        assert hashlib.sha256(path.read_bytes()).hexdigest() == first, path.name


def test_contents_of_the_deb(dist: Path) -> None:
    files = deb_files(deb(dist))
    for path in (
        "/usr/bin/kvtierctl", "/usr/sbin/kvtierd", "/usr/lib/systemd/system/kvtierd.service",
        "/usr/lib/systemd/system/kvtierd-hugepages.service", "/usr/lib/systemd/system/kvtierd.slice",
        "/usr/lib/systemd/system-preset/80-kvtierd.preset", "/usr/lib/sysusers.d/kvtierd.conf",
        "/usr/lib/tmpfiles.d/kvtierd.conf", "/etc/kvtierd/kvtierd.toml", "/usr/share/man/man8/kvtierd.8.gz",
        "/usr/share/man/man1/kvtierctl.1.gz", "/usr/share/man/man5/kvtierd.toml.5.gz",
        "/usr/share/bash-completion/completions/kvtierctl", "/usr/share/zsh/vendor-completions/_kvtierctl",
        "/usr/share/doc/kvtierd/operator.md", "/usr/share/doc/kvtierd/copyright", f"{SITE}/kvtierd/daemon.py",
    ):  # fmt: skip
        assert path in files, path
    unwanted = {"pip", "setuptools", "activate", "RECORD", "direct_url.json", "tests"}
    assert not [f for f in files if unwanted & set(f.split("/")) and "/skeleton/" not in f]
    assert not [f for f, mode in files.items() if mode[5] == "w" or mode[8] == "w"], "writable for others"
    modules = [f for f in files if f.startswith(f"{SITE}/kvtierd/") and f.endswith(".py")]
    for module in modules:
        directory, name = module.rsplit("/", 1)
        assert f"{directory}/__pycache__/{name[:-3]}.cpython-{X_Y.replace('.', '')}.pyc" in files


def test_nothing_of_the_building_machine_is_inside(dist: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", str(deb(dist)), str(tmp_path)], check=True)
    site = tmp_path / SITE.lstrip("/")
    for path in site.rglob("kvtierd*/**/*.pyc"):
        data = path.read_bytes()
        assert data[4:8] == b"\x01\0\0\0", f"{path} is not unchecked-hash"
        assert str(ROOT).encode() not in data
        assert b"kvtierd-packages-" not in data
    assert (tmp_path / "usr/lib/kvtierd/bin/python").readlink() == Path(f"../../../bin/python{X_Y}")


def test_the_architectures_have_machine_code_of_their_own(dist: Path, tmp_path: Path) -> None:
    for arch, machine in (("amd64", 62), ("arm64", 183)):
        target = tmp_path / arch
        subprocess.run(["dpkg-deb", "--extract", str(deb(dist, arch=arch)), str(target)], check=True)
        machines = set()
        for path in target.rglob("*.so*"):
            start = path.read_bytes()[:20]
            if start[:4] == b"\x7fELF":
                machines.add(int.from_bytes(start[18:20], "little"))
        assert machines == {machine}
    modules = [
        {f for f in deb_files(deb(dist, arch=arch)) if f.endswith(".py") and "/kvtierd" in f}
        for arch in ("amd64", "arm64")
    ]
    assert modules[0] == modules[1]


def test_both_formats_install_the_same(dist: Path) -> None:
    needs("rpm", "rpm")
    listed = subprocess.run(
        ["rpm", "-qlp", str(rpm(dist))], capture_output=True, text=True, check=True
    ).stdout
    in_rpm = {f for f in listed.splitlines() if f.startswith(("/usr/lib/", "/etc/", "/usr/bin", "/usr/sbin"))}
    shared = (
        "",
        "/usr",
        "/etc",
        "/usr/lib",
        "/usr/lib/systemd",
        "/usr/lib/sysusers.d",
        "/usr/lib/tmpfiles.d",
    )
    in_deb = {
        f for f in deb_files(deb(dist)) if f.startswith(("/usr/lib/", "/etc/", "/usr/bin", "/usr/sbin"))
    }
    assert in_deb - in_rpm <= {
        *shared,
        "/usr/bin",
        "/usr/sbin",
        "/usr/lib/systemd/system",
        "/usr/lib/systemd/system-preset",
    }
    assert in_rpm <= in_deb


def test_the_settings_file_is_one_that_upgrades_keep(dist: Path) -> None:
    done = subprocess.run(
        ["dpkg-deb", "--info", str(deb(dist)), "conffiles"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["/etc/kvtierd/kvtierd.toml"]
    needs("rpm", "rpm")
    done = subprocess.run(["rpm", "-qcp", str(rpm(dist))], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["/etc/kvtierd/kvtierd.toml"]


def test_dependencies(dist: Path) -> None:
    def fields(package: Path) -> str:
        return subprocess.run(
            ["dpkg-deb", "--field", str(package)], capture_output=True, text=True, check=True
        ).stdout

    assert f"Depends: python{X_Y}, libc6 (>= 2.28)\n" in fields(deb(dist))
    for name in PLUGINS:
        assert f", python{X_Y}\n" in fields(deb(dist, name, "all"))
        assert "Depends: kvtierd (>= " in fields(deb(dist, name, "all"))
    needs("rpm", "rpm")
    required = subprocess.run(
        ["rpm", "-qp", "--requires", str(rpm(dist))], capture_output=True, text=True, check=True
    )
    assert f"python(abi) = {X_Y}" in required.stdout.splitlines()


def test_lintian_finds_nothing(dist: Path, tmp_path: Path) -> None:
    needs("lintian", "lintian")
    packages = [str(p) for p in sorted(dist.glob("*.deb"))]
    done = subprocess.run(
        ["lintian", "--allow-root", *packages],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # it leaves files behind there
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_rpmlint_finds_nothing(dist: Path) -> None:
    needs("rpmlint", "rpmlint")
    packages = [str(p) for p in sorted(dist.glob("*.rpm"))]
    done = subprocess.run(
        ["rpmlint", "--config", str(ROOT / "packaging/rpmlint.toml"), *packages],
        capture_output=True,
        text=True,
    )
    assert "; 0 errors, 0 warnings" in done.stdout.replace("specfiles checked; ", "; "), done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("form", ["deb", "rpm"])
def test_scripts_are_sound_shell(dist: Path, form: str, tmp_path: Path) -> None:
    if form == "deb":
        subprocess.run(["dpkg-deb", "--control", str(deb(dist)), str(tmp_path)], check=True)
        scripts = {n: (tmp_path / n).read_text() for n in ("postinst", "prerm", "postrm")}
    else:
        needs("rpm", "rpm")
        tags = ("POSTIN", "PREUN", "POSTUN", "POSTTRANS")
        scripts = {
            tag: subprocess.run(
                ["rpm", "-qp", "--queryformat", f"%{{{tag}}}", str(rpm(dist))],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for tag in tags
        }
    for name, text in scripts.items():
        assert len(text) > 20, name
        subprocess.run(["sh", "-n"], input=text, text=True, check=True)
        # An upgrade restarts the daemon and nothing else.
        assert "restart kvtierd.service" not in text.replace("try-restart kvtierd.service", "")
