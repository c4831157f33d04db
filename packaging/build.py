"""Builds the packages: python packaging/build.py [--arch x86_64] [--out dist]

For the Python X.Y that runs this: a package fits the distributions whose python3 is that one. Needs the development
environment (make setup) and what packaging/requirements.txt lists; `make packages` sees to both.

SOURCE_DATE_EPOCH is the time written into the packages; without it, the time of the last commit. Two builds of the
same commit with the same Python are the same, byte for byte.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvpack import closure, contents, nfpm, stage, wheels
from kvpack.nfpm import Package, Release

SOURCE = Path(__file__).resolve().parent.parent
DESCRIPTION = """\
kvtierd makes tiered KV caches real on Ascend hosts without Kubernetes: HBM
in the inference engine and a shared DRAM pool over MemCache, for vLLM,
SGLang and other engines. It plans, reserves hugepages, writes MemCache's
settings, runs MetaService, pool and engines, and shows what they do."""
VLLM = "The engine drivers vllm-ascend and vllm-cpu. vLLM itself is not in here."
SGLANG = """\
The engine drivers sglang and sglang-cpu, with MemCache as the L3 of the
hierarchical cache. SGLang itself is not in here."""
REFENGINE = """\
A small engine that needs no NPU: for kvtierctl demo, for tests and as an
example. Not for serving."""
PLUGINS = {
    "vllm": ("Runs vLLM and vLLM Ascend under kvtierd", VLLM),
    "sglang": ("Runs SGLang under kvtierd", SGLANG),
    "refengine": ("Reference engine for kvtierd", REFENGINE),
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Builds kvtierd's .deb and .rpm.")
    parser.add_argument("--arch", action="append", choices=sorted(wheels.PLATFORMS), help="default: all")
    parser.add_argument("--form", action="append", choices=["deb", "rpm"], help="default: both")
    parser.add_argument("--out", type=Path, default=SOURCE / "dist")
    parser.add_argument("--cache", type=Path, default=SOURCE / ".cache/packages", help="downloaded wheels")
    parser.add_argument("--package-version", help="default: the version of kvtierd")
    parser.add_argument("--release", default="1", help="counts packages of one version")
    parser.add_argument(
        "--maintainer", default=os.environ.get("KVTIERD_MAINTAINER", "kvtierd <kvtierd@example.org>")
    )
    parser.add_argument("--sign-with", type=Path, metavar="KEY", help="file with an OpenPGP secret key")
    arguments = parser.parse_args()
    os.umask(0o022)
    release = Release(
        version=arguments.package_version or contents.project_version(SOURCE),
        release=arguments.release,
        epoch=build_time(),
        maintainer=arguments.maintainer,
        signing_key=arguments.sign_with.resolve() if arguments.sign_with else None,
    )
    with tempfile.TemporaryDirectory(prefix="kvtierd-packages-") as work:
        forms = arguments.form or ["deb", "rpm"]
        for index, arch in enumerate(arguments.arch or sorted(wheels.PLATFORMS, reverse=True)):
            build(
                arch, forms, release, Path(work), arguments.out.resolve(), arguments.cache, noarch=index == 0
            )


def build_time() -> int:
    """The time written into everything, unix seconds."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    git = subprocess.run(
        ["git", "-C", str(SOURCE), "log", "-1", "--format=%ct"], check=False, capture_output=True, text=True
    )
    if git.returncode == 0:
        return int(git.stdout)
    return int((SOURCE / "CHANGELOG.md").stat().st_mtime)


def build(
    arch: str, forms: list[str], release: Release, work: Path, out: Path, cache: Path, *, noarch: bool
) -> None:
    """All packages of one architecture, with ``noarch`` also those without machine code."""
    lock = SOURCE / "requirements.lock"
    base = closure.closure(["kvtierd"], extras=frozenset({"memcache", "workload"}))
    root = work / arch / "kvtierd"
    stage.stage_interpreter(root)
    own = wheels.build([SOURCE], work / "own", release.epoch)
    libraries = wheels.download(closure.locked(lock, base), arch, cache)
    stage.stage_distributions(root, [*libraries, *own], arch)
    contents.stage_system(root, SOURCE, version=release.version, epoch=release.epoch)
    package = Package(
        "kvtierd", arch, "Node daemon for a tiered KV cache on Ascend hosts", DESCRIPTION, with_scripts=True
    )
    write(package, forms, release, root, work, out)
    for name, (summary, description) in PLUGINS.items():
        extra = closure.closure([f"kvtierd-{name}"]) - base
        entries = closure.locked(lock, extra)
        plugin = Package(
            f"kvtierd-plugin-{name}",
            arch if entries else "noarch",
            summary,
            description,
            depends_on_base=True,
        )
        if not entries and not noarch:
            continue
        own = wheels.build([SOURCE / f"plugins/kvtierd-{name}"], work / f"own-{name}", release.epoch)
        libraries = wheels.download(entries, arch, cache) if entries else []
        root = work / arch / plugin.name
        stage.stage_distributions(root, [*libraries, *own], arch)
        write(plugin, forms, release, root, work, out)


def write(package: Package, forms: list[str], release: Release, root: Path, work: Path, out: Path) -> None:
    """One package in each format."""
    for form in forms:
        extra = work / package.arch / f"{package.name}-{form}"
        shutil.rmtree(extra, ignore_errors=True)
        contents.stage_format(
            extra, SOURCE, package=package.name, form=form, full_version=release.full_version,
            maintainer=release.maintainer, epoch=release.epoch,
        )  # fmt: skip
        path = nfpm.make(
            package, release, form, [root, extra], SOURCE / "packaging/scripts", work / "nfpm", out
        )
        print(f"{path.stat().st_size / 1_000_000:8.1f} MB  {path}")


if __name__ == "__main__":
    sys.exit(main())
