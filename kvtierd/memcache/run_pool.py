#!/usr/bin/env python3
"""Holds DRAM for the pool: one MemCache LocalService in a process of its own that stores and looks up nothing.

It prints one line ``kvtierd-pool ready rank=N device=N seconds=S`` when it has joined, and leaves in good order
on SIGTERM or SIGINT. Exit status: 0 after a stop, 1 when init was refused, 70 when the stop did not complete in
time (the process still ends), 75 when init did not end by the deadline, 78 when the interpreter has no usable
memcache_hybrid or no configuration is named.

It is run by path in the inference engine's interpreter: standard library and memcache_hybrid only, nothing of
kvtierd. MMC_LOCAL_CONFIG_PATH in the environment names the configuration.

Why so careful: init hangs for minutes while the MetaService is away, and the library replaces the handlers of
SIGHUP, SIGINT and SIGTERM by one that then hangs too. So these signals stay blocked in every thread, the main
thread fetches them, and init and close run beside it with a limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_REFUSED = 1
EXIT_UNCLEAN = 70  # sysexits EX_SOFTWARE
EXIT_TRY_LATER = 75  # sysexits EX_TEMPFAIL
EXIT_CONFIG = 78  # sysexits EX_CONFIG: retrying cannot mend it

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
CAUGHT_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
POLL_SECONDS = 0.05
INIT_GRACE_SECONDS = 0.5  # a stop during init waits this long for it, to be able to close properly


class Call(threading.Thread):
    """One library call in a thread of its own; ``result`` is None until it has returned."""

    def __init__(self, function: Callable[..., int], *arguments: int) -> None:
        super().__init__(daemon=True)
        self._function, self._arguments = function, arguments
        self.result: int | None = None

    def run(self) -> None:
        """Makes the call. An exception counts as a refusal."""
        try:
            self.result = self._function(*self._arguments)
        except Exception as error:  # noqa: BLE001 - whatever the extension module raises
            say(str(error))
            self.result = -1


def say(text: str) -> None:
    """One line for the operator, on stderr."""
    print(f"kvtierd-pool: {text}", file=sys.stderr, flush=True)


def stop_requested(seconds: float) -> bool:
    """Waits up to ``seconds`` for a stop signal. SIGHUP is swallowed: there is nothing to reload."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        received = signal.sigtimedwait(CAUGHT_SIGNALS, max(left, 0.0))
        if received is not None and received.si_signo in STOP_SIGNALS:
            return True
        if left <= 0:
            return False


def join_pool(store: Any, device: int, deadline_seconds: float) -> int | None:
    """Joins the pool. None when it worked, else the exit status."""
    started = time.monotonic()
    call = Call(store.init, device)
    call.start()
    while call.is_alive():
        if stop_requested(POLL_SECONDS):
            call.join(INIT_GRACE_SECONDS)
            if not call.is_alive():
                break
            say("told to stop before it had joined the pool")
            return 0
        if time.monotonic() - started > deadline_seconds:
            say(f"init did not end within {deadline_seconds:g} s: is the MetaService up and every rank back?")
            return EXIT_TRY_LATER
    if call.result != 0:
        say(f"init was refused ({call.result}): the reason is in the lines above")
        return EXIT_REFUSED
    seconds = time.monotonic() - started
    rank = store.get_local_service_id()
    print(f"kvtierd-pool ready rank={rank} device={device} seconds={seconds:.2f}", flush=True)
    return None


def leave_pool(store: Any, deadline_seconds: float) -> int:
    """Closes the LocalService: its segment leaves the pool. The exit status."""
    call = Call(store.close)
    call.start()
    call.join(deadline_seconds)
    if call.is_alive():
        say(f"close did not end within {deadline_seconds:g} s")
        return EXIT_UNCLEAN
    return 0


def main() -> int:
    """Runs until told to stop; the exit status."""
    parser = argparse.ArgumentParser(description="Hold DRAM for the MemCache pool.")
    parser.add_argument("--device", type=int, required=True, help="the die this pool holder belongs to")
    parser.add_argument("--init-deadline", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--close-deadline", type=float, default=8.0, metavar="SECONDS")
    arguments = parser.parse_args()
    path = os.environ.get("MMC_LOCAL_CONFIG_PATH", "")
    if not Path(path).is_file():
        say(f"MMC_LOCAL_CONFIG_PATH={path!r} is not a file")
        return EXIT_CONFIG
    signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT_SIGNALS)  # before the library starts its threads
    # Run by path, the script's directory leads sys.path: its modules must not shadow the interpreter's own.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    try:
        from memcache_hybrid import DistributedObjectStore
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        say(f"{sys.executable} has no usable memcache_hybrid: {error}")
        return EXIT_CONFIG
    store = DistributedObjectStore()
    failed = join_pool(store, arguments.device, arguments.init_deadline)
    if failed is not None:
        return failed
    while not stop_requested(3600.0):
        pass
    return leave_pool(store, arguments.close_deadline)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a thread may still be inside the library, and its static destructors crash then.
    os._exit(status)
