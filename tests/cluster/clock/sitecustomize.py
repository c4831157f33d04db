"""A wall clock that can be set, for one process: Python loads this at its start from PYTHONPATH.

Setting the machine's own clock would reach everything on it. ``time.time`` is what all of kvtierd reads the wall clock with.
gRPC keeps the real one: it adds a time-out to it and has its C core compare the sum with the machine's clock.
"""

import os
import sys
import time

_real = time.time
_file = os.environ.get("LAB_CLOCK", "")


def _set() -> float:
    if str(sys._getframe(1).f_globals.get("__name__")).startswith("grpc."):
        return _real()
    try:
        with open(_file, encoding="ascii") as offset:
            return _real() + float(offset.read() or 0)
    except (OSError, ValueError):
        return _real()


if _file:
    time.time = _set
