"""Sizes and durations as people write them, and back.

Sizes: ``"256GiB"``, ``"256GB"``, ``"1.5TiB"``, ``"4096"`` or a bare number of bytes. ``KiB MiB GiB TiB`` are
powers of 1024, ``kB MB GB TB`` powers of 1000. MemCache's own files mean 1024 when they say ``GB``;
that spelling is translated at the border (``kvtierd.mmc_conf``), nowhere else.

Durations: ``"6s"``, ``"250ms"``, ``"2m"``, ``"1m30s"``; a bare number is refused: its unit would be a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SIZE_UNITS = {
    "": 1, "b": 1, "bytes": 1,
    "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_CPU_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_LAST_CPU = 8191
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")


def parse_size(value: object) -> int:
    """Bytes from a written size.

    Raises:
        ValueError: what is wrong and what would be right; the text is fit for an operator.
    """
    if isinstance(value, bool):
        raise ValueError('expected a size such as "256GiB", got a boolean')
    if isinstance(value, int):
        if value < 0:
            raise ValueError("a size cannot be negative")
        return value
    if not isinstance(value, str):
        raise ValueError(f'expected a size such as "256GiB" or a number of bytes, got {value!r}')
    match = _SIZE.fullmatch(value)
    if not match:
        raise ValueError(f'{value!r} is not a size; write for example "256GiB", "256GB" or a number of bytes')
    number, unit = match.groups()
    factor = _SIZE_UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"{value!r}: unknown unit {unit!r}; known units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return round(float(number) * factor) if "." in number else int(number) * factor


def parse_duration(value: object) -> float:
    """Seconds from a written duration.

    Raises:
        ValueError: what is wrong and what would be right.
    """
    if not isinstance(value, str):
        raise ValueError(f'expected a duration with its unit such as "6s" or "250ms", got {value!r}')
    total, position, text = 0.0, 0, value.strip()
    while position < len(text):
        match = _DURATION.match(text, position)
        if not match:
            break
        total += float(match[1]) * _DURATION_UNITS[match[2]]
        position = match.end()
    if not text or position != len(text):
        raise ValueError(f'{value!r} is not a duration; write for example "6s", "250ms", "2m" or "1m30s"')
    return total


def format_size(size_bytes: int) -> str:
    """A size for people: exact in the largest binary unit that divides it, else two decimals."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            whole, rest = divmod(size_bytes, factor)
            return f"{whole} {unit}" if rest == 0 else f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} B"


def format_duration(seconds: float) -> str:
    """A duration for people: ``0.4s``, ``12s``, ``3m05s``, ``2h07m``, ``4d03h``."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def align_down(value: int, step: int) -> int:
    """The largest multiple of ``step`` that is not above ``value``."""
    return value - value % step


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The kernel's CPU list format, ``"0-3,8"``, as sorted numbers.

    Raises:
        ValueError: it is none, is empty, or names a CPU beyond 8191 (the most that Linux can have).
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f'{text!r} is not a list of CPUs; write for example "0-23,96-119"')
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > _LAST_CPU:
            raise ValueError(f"{part.strip()!r} is not a range of CPUs")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The numbers in the kernel's CPU list format."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts)
