#!/usr/bin/env python3
"""Removes every key from the pool, as a client that brings no memory and takes no rank.

It prints ``kvtierd-purge done seconds=S`` and exits 0 when the MetaService has confirmed it. Exit status: 1 when it
was refused, 75 when it did not end by the deadline, 78 when the interpreter has no usable memcache_hybrid or no
configuration is named. Every key that was there is gone then; keys written meanwhile by others may stay, and
memory of writes that their client never finished comes back after some seconds.

Run it when every provider is back: after a restart of the MetaService they bring their keys with them, so an
earlier purge removes nothing.

It is run by path in the inference engine's interpreter: standard library and memcache_hybrid only, nothing of
kvtierd. MMC_LOCAL_CONFIG_PATH in the environment names the configuration of any client of the pool.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

EXIT_REFUSED = 1
EXIT_TRY_LATER = 75  # sysexits EX_TEMPFAIL
EXIT_CONFIG = 78  # sysexits EX_CONFIG: retrying cannot mend it

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_SECONDS = 0.05


def say(text: str) -> None:
    """One line for the operator, on stderr."""
    print(f"kvtierd-purge: {text}", file=sys.stderr, flush=True)


def purge(store: Any, device: int) -> int:
    """Joins, removes all, leaves. The exit status."""
    result: int = store.init(device, init_bm=False)
    if result != 0:
        say(f"init was refused ({result}): the reason is in the lines above")
        return EXIT_REFUSED
    result = store.remove_all()
    if result != 0:
        say(f"the MetaService did not remove the keys ({result})")
    store.close()
    return 0 if result == 0 else EXIT_REFUSED


def main() -> int:
    """Purges within the deadline; the exit status."""
    parser = argparse.ArgumentParser(description="Remove every key from the MemCache pool.")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=20.0, metavar="SECONDS")
    arguments = parser.parse_args()
    path = os.environ.get("MMC_LOCAL_CONFIG_PATH", "")
    if not Path(path).is_file():
        say(f"MMC_LOCAL_CONFIG_PATH={path!r} is not a file")
        return EXIT_CONFIG
    # The library takes these signals over and hangs in its handler: fetch them here instead.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    # Run by path, the script's directory leads sys.path: its modules must not shadow the interpreter's own.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    try:
        from memcache_hybrid import DistributedObjectStore
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        say(f"{sys.executable} has no usable memcache_hybrid: {error}")
        return EXIT_CONFIG
    started = time.monotonic()
    outcome: list[int] = []
    store = DistributedObjectStore()

    def work() -> None:
        try:
            outcome.append(purge(store, arguments.device))
        except Exception as error:  # noqa: BLE001 - whatever the extension module raises
            say(str(error))
            outcome.append(EXIT_REFUSED)

    threading.Thread(target=work, daemon=True).start()
    while not outcome:
        if signal.sigtimedwait(STOP_SIGNALS, POLL_SECONDS) is not None:
            say("told to stop before it was done")
            return EXIT_TRY_LATER
        if time.monotonic() - started > arguments.deadline:
            say(f"not done within {arguments.deadline:g} s: is the MetaService up?")
            return EXIT_TRY_LATER
    if outcome[0] == 0:
        print(f"kvtierd-purge done seconds={time.monotonic() - started:.2f}", flush=True)
    return outcome[0]


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may still be inside the library, and its static destructors crash then.
    os._exit(status)
