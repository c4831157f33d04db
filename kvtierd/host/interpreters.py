"""Which MemCache a host offers: the wheel in an interpreter, or the run package in a directory.

The wheel is asked about in a child of that interpreter, by its metadata only: importing the native modules
needs the driver and can hang. The run package is read as files; its ``set_env.sh`` is never executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvtierd.host.view import HostView
from kvtierd.plan.inventory import MemcacheInstall

DEFAULT_BINARY_HOME = "/usr/local/memcache_hybrid/latest"
_MARK = "KVTIERD-PROBE "

# Runs in the other interpreter, which may be old: plain Python 3.6 syntax, standard library only.
_PROBE = """
import json, os, sys
answer = {"python": "%d.%d.%d" % sys.version_info[:3], "versions": {}, "dirs": [], "packages": {}}
try:
    from importlib import metadata
except ImportError:
    metadata = None
for name in ("memcache_hybrid", "memfabric_hybrid"):
    found = None
    for spelling in (name, name.replace("_", "-")):
        try:
            found = metadata.distribution(spelling)
            break
        except Exception:
            pass
    if found is None:
        continue
    answer["versions"][name] = found.version
    site = os.path.realpath(str(found.locate_file("")))
    for part in (os.path.join(name, "lib"), name + ".libs"):
        directory = os.path.join(site, part)
        if os.path.isdir(directory):
            answer["dirs"].append(directory)
for name in sys.argv[1:]:
    try:
        answer["packages"][name] = metadata.version(name)
    except Exception:
        pass
sys.stdout.write("\\nKVTIERD-PROBE " + json.dumps(answer) + "\\n")
"""


async def probe_interpreter(
    view: HostView, python: str, *, packages: Sequence[str] = (), timeout_seconds: float = 5.0
) -> MemcacheInstall:
    """The MemCache wheel of one interpreter. Never raises: ``problem`` says what is missing and the remedy.

    The interpreter runs isolated (``-I``): the user's own site-packages and PYTHONPATH do not count, as they
    do not for a unit, whose environment is complete. ``packages`` are distributions whose version is wanted too.
    """
    # LD_LIBRARY_PATH is left out on purpose: the probe must not depend on the operator's shell.
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    result = await view.runner.run(
        [python, "-I", "-c", _PROBE, *packages], timeout_seconds=timeout_seconds, env=env
    )
    if not result.ok:
        why = result.describe().removeprefix(f"{python} -I -c: ")
        return MemcacheInstall(runtime="wheel", python=python, problem=f"the interpreter {python} {why}")
    answer = _answer(result.stdout)
    if answer is None:
        return MemcacheInstall(
            runtime="wheel", python=python, problem=f"{python} does not behave like a Python interpreter"
        )
    versions, dirs, python_version, engines = answer
    return MemcacheInstall(
        runtime="wheel",
        python=python,
        memcache_version=versions.get("memcache_hybrid"),
        memfabric_version=versions.get("memfabric_hybrid"),
        library_dirs=dirs,
        packages=engines,
        problem=_wheel_problem(python, python_version, versions, dirs),
    )


def probe_run_package(view: HostView, home: str = DEFAULT_BINARY_HOME) -> MemcacheInstall | None:
    """The run package in ``home`` (``.../memcache_hybrid/latest`` or the directory above it).

    Returns:
        ``None`` when there is nothing at this path; otherwise an install, with a ``problem`` when it is unusable.
    """
    home = home.rstrip("/") or "/"
    if not view.exists(home):
        return None
    if not view.exists(f"{home}/version.info") and view.exists(f"{home}/latest"):
        home = f"{home}/latest"
    machine = view.machine
    info = _colon_values(view.text(f"{home}/version.info") or "")
    executable = f"{home}/{machine}-linux/bin/mmc_meta_service"
    fabric_home = _fabric_home(home)
    fabric = _colon_values(view.text(f"{fabric_home}/version.info") or "")
    dirs: list[str] = []
    for base in (home, fabric_home):
        environment = parse_set_env(view.text(f"{base.rsplit('/', 1)[0]}/set_env.sh") or "")
        dirs.append(f"{base}/{machine}-linux/lib64")
        dirs += [part for part in environment.get("LD_LIBRARY_PATH", "").split(":") if part.startswith("/")]
    problem = None
    platform = info.get("Platform")
    if platform and platform != machine:
        problem = f"the run package in {home} is for {platform}, but this host is {machine}"
    elif not view.exists(executable):
        problem = f"{executable} is missing or may not be seen; install the run package for {machine}, or use the wheel"
    elif not view.exists(fabric_home):
        problem = (
            f"MemFabric is missing: {fabric_home} does not exist; install its run package beside MemCache's"
        )
    return MemcacheInstall(
        runtime="binary",
        home=home,
        executable=executable if view.exists(executable) else None,
        memcache_version=info.get("Version"),
        memfabric_version=fabric.get("Version"),
        library_dirs=tuple(directory for directory in dict.fromkeys(dirs) if view.exists(directory)),
        problem=problem,
    )


def parse_set_env(text: str) -> dict[str, str]:
    """The variables a simple ``set_env.sh`` sets, without running it.

    Understands ``[export] NAME=VALUE`` with ``$NAME`` and ``${NAME}`` of variables set above. Parts that need a
    shell (command substitutions, unknown variables) become empty; list entries built from them are dropped.
    """
    values: dict[str, str] = {}
    for line in text.splitlines()[:1000]:
        match = re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*", line)
        if not match:
            continue
        name, raw = match[1], match[2].strip("\"'")
        if "$(" in raw or "`" in raw:
            continue
        parts = (_expand(part, values) for part in raw.split(":"))
        values[name] = ":".join(part for part in parts if part)
    return values


def _expand(text: str, values: Mapping[str, str]) -> str:
    """``text`` with its variables put in; empty when one is unknown, since half a path is a wrong path."""
    unknown = False

    def value(match: re.Match[str]) -> str:
        nonlocal unknown
        name = match[1] or match[2]
        unknown = unknown or name not in values
        return values.get(name, "")

    expanded = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)
    return "" if unknown else expanded


def _answer(stdout: str) -> tuple[dict[str, str], tuple[str, ...], str, dict[str, str]] | None:
    """The probe's own line; site customisation may print others around it."""
    line = next((line for line in reversed(stdout.splitlines()) if line.startswith(_MARK)), None)
    if line is None:
        return None
    try:
        answer: Any = json.loads(line.removeprefix(_MARK))
        versions = {str(name): str(version) for name, version in answer["versions"].items()}
        engines = {str(name): str(version) for name, version in answer.get("packages", {}).items()}
        return versions, tuple(str(directory) for directory in answer["dirs"]), str(answer["python"]), engines
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _wheel_problem(
    python: str, python_version: str, versions: Mapping[str, str], dirs: tuple[str, ...]
) -> str | None:
    missing = [name for name in ("memcache_hybrid", "memfabric_hybrid") if name not in versions]
    if missing:
        pip_names = " ".join(name.replace("_", "-") for name in missing)
        text = (
            f"{' and '.join(missing)} not installed in {python} (Python {python_version}); "
            f"run: {python} -m pip install {pip_names}"
        )
        if not re.match(r"3\.1[0-3]\.", python_version):
            text += " (there are wheels for CPython 3.10 to 3.13 only)"
        return text
    if not any(directory.endswith("memcache_hybrid/lib") for directory in dirs):
        return (
            f"memcache_hybrid {versions['memcache_hybrid']} in {python} has no library directory; "
            f"run: {python} -m pip install --force-reinstall memcache-hybrid"
        )
    return None


def _fabric_home(home: str) -> str:
    """MemFabric's run package lies beside MemCache's under its own name."""
    return re.sub(r"/memcache_hybrid(/[^/]+)?$", r"/memfabric_hybrid/latest", home)


def _colon_values(text: str) -> dict[str, str]:
    """``version.info`` of the run packages: ``Version:1.0.0``, ``Platform:aarch64``, ``Kernel:linux``."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon and value.strip()}
