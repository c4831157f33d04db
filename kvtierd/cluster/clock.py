"""The clocks of the cluster: leases go by one that no time service moves and that counts while the host sleeps."""

from __future__ import annotations

import time


def boottime_seconds() -> float:
    """Seconds of ``CLOCK_BOOTTIME``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
