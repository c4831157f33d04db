"""Where the Ascend driver and CANN are, and which versions. Reads files only.

MemCache looks for the driver the same way (``/etc/ascend_install.info``, then ``driver/version.info``) and
refuses to start when it finds none. CANN up to 8.3 lives in ``ascend-toolkit/latest``, from 8.5 in ``cann``.
"""

from __future__ import annotations

import re

from kvtierd.host.view import HostView
from kvtierd.plan.inventory import AscendInstall, Record

INSTALL_INFO = "/etc/ascend_install.info"
DEFAULT_HOME = "/usr/local/Ascend"
_TOOLKIT_INFO = "ascend_toolkit_install.info"


class AscendFindings(Record):
    """The install as found, with what is missing or odd as sentences."""

    install: AscendInstall
    problems: tuple[str, ...] = ()


def find_ascend(view: HostView) -> AscendFindings:
    """Driver and CANN of this host. Never raises: what cannot be found is ``None`` and a problem."""
    problems: list[str] = []
    driver_home, driver = _driver(view, problems)
    cann_home, cann_version = _cann(view, driver_home, problems)
    install = AscendInstall(
        driver_home=driver_home,
        driver_version=driver.get("Version") or driver.get("package_version") or None,
        driver_inner_version=driver.get("Innerversion") or None,
        cann_home=cann_home,
        cann_version=cann_version,
    )
    return AscendFindings(install=install, problems=tuple(problems))


def parse_info(text: str) -> dict[str, str]:
    """``key=value`` lines of Ascend's info files. The first of a repeated key counts; other lines are ignored."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and key.strip():
            values.setdefault(key.strip(), value.strip())
    return values


def _driver(view: HostView, problems: list[str]) -> tuple[str | None, dict[str, str]]:
    try:
        info = parse_info(view.read(INSTALL_INFO))
    except OSError as exc:
        if not view.exists(f"{DEFAULT_HOME}/driver/version.info"):
            problems.append(f"no Ascend driver: {INSTALL_INFO} cannot be read ({exc.strerror or exc})")
            return None, {}
        # Containers often mount the driver and forget this file; MemCache needs it.
        problems.append(
            f"{INSTALL_INFO} is missing although {DEFAULT_HOME}/driver is there; MemCache needs the file: "
            "mount it into the container, or install the driver again"
        )
        info = {}
    home = info.get("Driver_Install_Path_Param", "")
    if not home.startswith("/"):
        if info:
            problems.append(f"{INSTALL_INFO} has no Driver_Install_Path_Param; {DEFAULT_HOME} is assumed")
        home = DEFAULT_HOME
    home = home.rstrip("/") or "/"
    version_file = f"{home}/driver/version.info"
    try:
        values = parse_info(view.read(version_file))
    except OSError as exc:
        problems.append(
            f"the driver's version is unknown: {version_file} cannot be read ({exc.strerror or exc})"
        )
        return home, {}
    if not values.get("Innerversion"):
        problems.append(f"{version_file} has no Innerversion; MemCache reads it and will refuse this driver")
    return home, values


def _cann(view: HostView, driver_home: str | None, problems: list[str]) -> tuple[str | None, str | None]:
    machine = view.machine
    found: list[tuple[tuple[int, ...], int, str, str | None]] = []
    foreign: list[str] = []
    for rank, home in enumerate(_cann_candidates(view, driver_home)):
        text = view.text(f"{home}/{machine}-linux/{_TOOLKIT_INFO}")
        if text is None:
            foreign += [
                f"{home}/{name}"
                for name in view.names(home)
                if name.endswith("-linux") and view.exists(f"{home}/{name}/{_TOOLKIT_INFO}")
            ]
            continue
        info = parse_info(text)
        version = info.get("version") or _version_in(info.get("path", "")) or _version_in(home)
        found.append((_version_key(version), -rank, home, version))
    if not found:
        if foreign:
            problems.append(f"CANN is for another machine type: {foreign[0]}, but this host is {machine}")
        elif driver_home is not None:
            problems.append(
                f"no CANN toolkit for {machine} below {driver_home}: neither cann, cann-* nor "
                "ascend-toolkit/latest has one"
            )
        return None, None
    _, _, home, version = max(found)
    if version is None:
        problems.append(f"the version of CANN in {home} is unknown: its {_TOOLKIT_INFO} has an empty version")
    return home, version


def _cann_candidates(view: HostView, driver_home: str | None) -> list[str]:
    """Homes to look at, the steady names (links to the current version) before the versioned ones."""
    homes = []
    for base in dict.fromkeys([driver_home or DEFAULT_HOME, DEFAULT_HOME]):
        versioned = [f"{base}/{name}" for name in view.names(base) if re.fullmatch(r"cann-\d.*", name)]
        toolkits = [
            f"{base}/ascend-toolkit/{name}"
            for name in view.names(f"{base}/ascend-toolkit")
            if re.match(r"\d", name)
        ]
        homes += [f"{base}/cann", f"{base}/ascend-toolkit/latest", *versioned, *toolkits]
    return homes


def _version_in(path: str) -> str | None:
    """The version in ``/usr/local/Ascend/ascend-toolkit/8.3.RC2/aarch64-linux`` or ``.../cann-8.5.0``."""
    match = re.search(r"(?:^|[/-])(\d+\.\d+[\w.]*)(?:/|$)", path)
    return match[1] if match else None


def _version_key(version: str | None) -> tuple[int, ...]:
    """For comparing: 8.2.RC1 < 8.2 < 8.3.RC2 < 8.5.0; an unknown version comes first."""
    if version is None:
        return ()
    release, _, candidate = version.upper().partition("RC")
    numbers = [int(number) for number in re.findall(r"\d+", release)][:3]
    padded = [*numbers, 0, 0, 0][:3]
    number = re.match(r"\d+", candidate)
    return (*padded, int(number[0]) if number else 1_000_000)
