"""MemCache's sizes: its grammar to bytes and back, and how it rounds them.

The grammar was read from runs of 1.1.0 and 1.3.0: a decimal number, blanks, then one of b, k, kb, m, mb, g, gb,
t, tb in any case; no unit means bytes. All units are powers of 1024: ``1GB`` is 1,073,741,824 bytes. ``GiB`` is
refused. Two points make ``1.2.3GB`` into 1.2 GB without a word, so this module refuses it.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from kvtierd.quantities import GIB, KIB, MIB, TIB

MAX_SIZE_BYTES = TIB
"""The documented limit of dram.size and hbm.size (1.0.4, 1.1.0 and 1.2.0 enforce it, 1.1.6, 1.2.1 and 1.3.0 do not)."""

_UNITS = {"": 1, "b": 1, "k": KIB, "kb": KIB, "m": MIB, "mb": MIB, "g": GIB, "gb": GIB, "t": TIB, "tb": TIB}
# At most 32 digits a side: no size needs more, and a number of a million digits would take time to convert.
_SIZE = re.compile(r"(\d{1,32}(?:\.\d{0,32})?|\.\d{1,32})[ \t]*([A-Za-z]*)", re.ASCII)
_EXAMPLE = 'write for example "128GB", "512MB" or a number of bytes'


def parse_mmc_size(text: str) -> int:
    """Bytes from a size as MemCache writes it (a fraction of a byte is dropped).

    Raises:
        ValueError: what is wrong and what would be right; the text is fit for an operator.
    """
    match = _SIZE.fullmatch(text)
    if not match:
        if re.fullmatch(r"[\d.]+[ \t]*[A-Za-z]*", text, re.ASCII) and text.count(".") > 1:
            raise ValueError(f"{text!r} has two decimal points; {_EXAMPLE}")
        if text.startswith(("-", "+")):
            raise ValueError(f"{text!r}: a size has no sign; {_EXAMPLE}")
        raise ValueError(f"{text!r} is not a size; {_EXAMPLE}")
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        if re.fullmatch(r"[kmgt]ib", unit.lower()):
            right = f"{number}{unit[0].upper()}B"
            raise ValueError(
                f'MemCache does not know the unit {unit!r}; its GB already means 2^30 bytes: write "{right}"'
            )
        raise ValueError(f"{text!r}: MemCache does not know the unit {unit!r}; it knows B, KB, MB, GB and TB")
    return math.floor(Fraction(number) * factor)


def format_mmc_size(size_bytes: int) -> str:
    """The shortest exact text without a decimal point: "128GB", "1536MB", "1TB", "0".

    ``parse_mmc_size(format_mmc_size(n)) == n`` for every n >= 0.

    Raises:
        ValueError: the size is negative.
    """
    if size_bytes < 0:
        raise ValueError(f"a size cannot be negative: {size_bytes}")
    if size_bytes:
        for unit, factor in (("TB", TIB), ("GB", GIB), ("MB", MIB), ("KB", KIB)):
            if size_bytes % factor == 0:
                return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def alignment_bytes(protocol: str, *, a3: bool = False) -> int:
    """What a size must be a multiple of: 1 GB for ``device_*`` and for every protocol on A3, 2 MB for ``host_*``.

    MemCache rounds up to it without a word, so an unaligned size takes more memory than it says.
    """
    return GIB if a3 or protocol.lower().startswith("device_") else 2 * MIB


def align_up(size_bytes: int, step_bytes: int) -> int:
    """The smallest multiple of ``step_bytes`` that is not below ``size_bytes``: what MemCache makes of a size."""
    return -(-size_bytes // step_bytes) * step_bytes
